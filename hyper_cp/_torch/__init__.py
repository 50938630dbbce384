"""Everything that depends on private parts of PyTorch."""
