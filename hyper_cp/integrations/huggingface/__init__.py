"""The parts of :mod:`hyper_cp.integrations.transformers`: the state of a forward, masks, heads, rotary tables."""
