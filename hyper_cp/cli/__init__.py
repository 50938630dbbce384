"""The ``hyper-cp`` command."""
