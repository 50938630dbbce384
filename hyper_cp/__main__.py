"""Runs the ``hyper-cp`` command as ``python -m hyper_cp``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
