"""The pieces of :func:`hyper_cp.verify`: record two runs of one batch, compare them, and name the cause."""
