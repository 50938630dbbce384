"""The ``hyper-cp`` command.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``, and one line in ``COMMANDS``.
Keep such a module light: import what only some runs need (matplotlib, for example) inside the function that needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import demo, doctor, plan, tiles, verify

COMMANDS = {
    "demo": (demo, "train a small Llama in three modes beside one rank, and compare the losses"),
    "doctor": (doctor, "examine the machine: versions, kernels, every exchange, and the speed of links and devices"),
    "plan": (plan, "estimate a training step in every strategy, and name the one to use first"),
    "tiles": (tiles, "draw who computes what, and what travels, in several sequence layouts"),
    "verify": (verify, "compare a training step with and without context parallelism, and name what differs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. ``argv`` defaults to the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog="hyper-cp",
        description="Context parallelism for PyTorch.",
        epilog="`hyper-cp COMMAND --help` lists the options of a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):  # without a command: say which there are
        parser.print_help(sys.stderr)
        return 2
    return int(args.run(args))
