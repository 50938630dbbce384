"""Kernels in Triton for work between the tiles. Triton comes with PyTorch's CUDA wheels; nothing here needs it."""
