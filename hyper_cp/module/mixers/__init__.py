"""Mixers under context parallelism: modules that run a recurrence or a convolution along the sequence."""
