"""Compares a training step with context parallelism with the same step on one device, and names what differs.

MODULE:FUNCTION is a function without arguments that returns the arguments of `hyper_cp.verify` as a dict: model, mesh,
batch, and if you like loss_fn, rtol, atol, gradients, layout. It is called on every rank, with the process group made:

    torchrun --nproc-per-node 2 -m hyper_cp verify my_training:verification

The exit code is 1 if something differs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..data.collectives import by_rank
from ..verify import Report, verify
from .diagnosis.ranks import default_device, one_of_several_ranks, process_group
from .options import mistake
from .shown import progress, say, show_table


class _Mistake(ValueError):
    """A mistake in how the command is used, which needs no traceback."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp verify``."""
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="returns the arguments of hyper_cp.verify as a dict"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--rtol", type=float, help="relative tolerance (default: by dtype)")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default 0)")


def run(args: argparse.Namespace) -> int:
    """Verify on this rank. Return the exit code, which is the same on all ranks."""
    try:
        if not one_of_several_ranks():
            return mistake(
                "verify",
                "it compares several ranks, but RANK and WORLD_SIZE are not set. Start it with torchrun "
                f"--nproc-per-node 2 -m hyper_cp verify {args.function}",
            )
    except ValueError as error:
        return mistake("verify", error)
    try:
        function = _load(args.function)
    except _Mistake as error:  # the same on every rank: one of them says so
        return mistake("verify", error) if os.environ["RANK"] == "0" else 2
    with process_group(default_device()):
        try:
            return _verify(function, args)
        except _Mistake as error:
            return mistake("verify", error) if dist.get_rank() == 0 else 2


def _verify(function: Callable[[], Any], args: argparse.Namespace) -> int:
    given = function()
    if not isinstance(given, dict) or not {"model", "mesh", "batch"} <= given.keys():
        got = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise _Mistake(
            f"{args.function} returned {got}. Its result becomes the arguments of hyper_cp.verify. Return a dict with "
            "model, mesh and batch, and loss_fn if your training step is not the default one"
        )
    known = inspect.signature(verify).parameters
    unknown = [name for name in given if name not in known]
    if unknown:
        raise _Mistake(
            f"{args.function} returned {', '.join(map(str, unknown))}, which hyper_cp.verify does not take. Its result "
            f"becomes the arguments of hyper_cp.verify. Choose among {', '.join(known)}"
        )
    given = {**given, **{name: x for name in ("rtol", "atol") if (x := getattr(args, name)) is not None}}
    mesh = given["mesh"]
    with progress("a step on all ranks, then on each alone", shown=dist.get_rank() == 0 and not args.json):
        report = verify(given.pop("model"), given.pop("mesh"), given.pop("batch"), **given)
    first_of_mesh = dist.get_rank() == int(mesh.mesh.flatten()[0])
    if dist.get_rank() == 0 or (first_of_mesh and not report.ok):
        print(report.json(), flush=True) if args.json else show(report)
    # All ranks end together with one code: torchrun kills the others as soon as one fails, maybe before it has printed.
    world = init_device_mesh(mesh.device_type, (dist.get_world_size(),))
    return int(by_rank(world, torch.tensor([int(not report.ok)], device=mesh.device_type)).max())


def show(report: Report) -> None:
    """Print a report: what was compared as a table, and the result with its causes."""
    cells = report.cells()
    styles = [{"!": "bold red", "~": "yellow", "?": "dim"}.get(row[0], "") for row in cells[1:]]
    say(report.heading())
    show_table(cells, styles, left=["", "name", "class", "shape"])
    say("\n".join(report.conclusion()), "green" if report.ok else "bold red")


def _load(name: str) -> Callable[[], Any]:
    """Import the function that ``MODULE:FUNCTION`` names; modules in the working directory are found."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise _Mistake(
            f"{name!r} does not name a function. It is imported and called. Write MODULE:FUNCTION, for example "
            "my_training:build"
        )
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is missing: its traceback says where
        raise _Mistake(
            f"no module {error.name!r} was found. {name!r} is imported as Python does it, also from the working "
            "directory. Write MODULE:FUNCTION of a module that can be imported"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise _Mistake(
            f"module {module} has no function {attribute!r}. It is called for the arguments of verify. Write "
            "MODULE:FUNCTION of one that it has"
        )
    return found
