"""Record a run: the tensors at the boundaries of modules, suspicious calls, and the state that is restored."""
