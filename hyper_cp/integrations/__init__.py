"""Thin bridges to other libraries. Each library is imported here only, by the modules that serve it."""
