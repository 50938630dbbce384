"""The parts of :mod:`hyper_cp.integrations.diffusers`: types of models, and the split of their blocks."""
