"""Thin bridges to other libraries. Each module imports its library; nothing else in hyper_cp does."""
