"""``python -m hyper_cp`` is the ``hyper-cp`` command."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
