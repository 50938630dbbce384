"""Measurements of the library. ``python -m benchmarks`` compares it with its peers; README.md lists the rest."""
