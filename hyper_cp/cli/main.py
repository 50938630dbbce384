"""The `hyper-cp` command. Each subcommand is a module with `add_arguments(parser)` and `run(args)`,
imported only when it is named."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# name -> (module, one line of help); a new command is one line here.
COMMANDS = {
    "demo": ("hyper_cp.cli.demo", "train a small Llama in every mode beside one rank, and compare"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    commands = "\n".join(f"  {name:10} {line}" for name, (_, line) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hyper-cp",
        description="Context parallelism for PyTorch.",
        epilog=f"commands:\n{commands}\n\nhyper-cp COMMAND --help tells a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
    name = parser.parse_args(argv[:1]).command
    module = importlib.import_module(COMMANDS[name][0])
    options = argparse.ArgumentParser(
        prog=f"hyper-cp {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(options)
    return int(module.run(options.parse_args(argv[1:])))


if __name__ == "__main__":
    raise SystemExit(main())
