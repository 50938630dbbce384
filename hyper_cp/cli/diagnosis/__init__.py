"""The self-check: the machine, its kernels, every exchange, and the speed of links and devices.

``hyper-cp doctor`` runs it in seconds; ``benchmarks/device`` runs it on many more tiles, layouts and lengths.
"""
