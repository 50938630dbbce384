"""Scenarios in which libraries differ: each the same work, for every library that can do it."""
