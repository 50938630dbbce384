"""The pieces of ``benchmarks/device_check.py``."""
