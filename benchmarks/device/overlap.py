"""Checks every mode on real ranks, and measures how much communication it hides: on any accelerator, or on gloo.

    torchrun --nproc-per-node 8 -m benchmarks.device.overlap                       # GPUs or NPUs of one host
    torchrun --nproc-per-node 2 -m benchmarks.device.overlap --device cpu --length 2048 --dtype float32

First each mode is compared with attention written out in fp64, on a short sequence; the exit code is 1 if one differs.
Then four steps of each are timed in turns, forward and backward of one causal attention call: the step itself; the same
one with transfers that take no time (computation and merging); with a kernel that computes nothing (transfers and
merging); and with both (merging alone). Communication is the third less the fourth, and the share of it that is hidden

    (computation and merging + communication - step) / communication

100 % means that the step is no longer than without transfers, 0 % that the two follow each other. Every number is the
slowest rank's median.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_cp.cli.diagnosis.exchanges import attend
from hyper_cp.cli.diagnosis.findings import Finding, check
from hyper_cp.cli.diagnosis.ranks import Ranks, default_device, process_group
from hyper_cp.cli.diagnosis.tiles import CAUSAL, Tile
from hyper_cp.cli.diagnosis.timing import seconds_in_turns
from hyper_cp.cli.modes import Mode, named_modes
from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import attention
from hyper_cp.ops.head_groups import possible_groups

from ..no_kernel import without_kernel
from .ranks import SilentAxis

MODES = named_modes(
    "ring, head_tail",
    "ring, load_balance",
    "all-gather, head_tail",
    "needed, head_tail",
    "Ulysses",
    "Ulysses, 4 head groups",
    "hybrid of 2, ring, head_tail",
    "hybrid of 2, ring, 2 head groups",
)


def possible(mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[tuple[str, cp_mesh.CPMesh, Mode]]:
    """Yield the modes that run on this mesh, each with its view of the mesh and its arguments of ``attention``. A
    hybrid has two dimensions, and heads must split over ranks and groups."""
    for name, mode in MODES.items():
        settings, n = dict(mode), mesh.size()
        degree = settings.pop("ulysses_degree") or n
        if n % degree or args.heads % degree or ("hybrid" in name and n == degree):
            continue
        view = cp_mesh.view(mesh, degree)
        if settings.get("head_groups", 1) in possible_groups(args.heads, args.kv_heads, view):
            yield name, view, settings


def compare(ranks: Ranks, mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[Finding]:
    """Yield output and gradients of every mode on all ranks."""
    dtype, rows = getattr(torch, args.dtype), min(args.length, 128 * mesh.size())
    tile = Tile(rows, rows, CAUSAL, batch=1, heads=(args.heads, args.kv_heads), dims=(args.dim, args.dim))
    for name, cp, mode in possible(mesh, args):
        what = f"{name}, {mesh.size()} ranks, {dtype}"
        yield ranks.worst(check("modes", what, dtype, partial(attend, cp, tile, dtype, mesh.device_type, **mode)))


def silent(cp: cp_mesh.CPMesh) -> cp_mesh.CPMesh:
    """Return the same mesh with transfers that take no time."""
    ring, ulysses = (SilentAxis(axis.rank, axis.size) for axis in (cp.ring, cp.ulysses))
    return cp_mesh.register(
        replace(cp, key=f"silent {cp.key}", ring=ring, ulysses=ulysses, flat=(ulysses, ring), agreement=None)
    )


def measure(ranks: Ranks, mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[tuple[str, float, float, float]]:
    """Yield ``(mode, step, computation and merging, communication alone)`` in seconds, the same on every rank."""
    device, rows = mesh.device_type, args.length // mesh.size()
    tile = Tile(rows, rows, batch=1, heads=(args.heads, args.kv_heads), dims=(args.dim, args.dim))
    *qkv, dout = tile.tensors(device, getattr(torch, args.dtype), seed=None)
    for name, cp, mode in possible(mesh, args):

        def step(cp: cp_mesh.CPMesh, mode: dict[str, Any] = mode) -> tuple[Tensor, ...]:
            inputs = [x.detach().requires_grad_() for x in qkv]
            out = attention(*inputs, mesh=cp, is_causal=True, enable_gqa=True, **mode)
            return torch.autograd.grad(out, inputs, dout)

        real, quiet = partial(step, cp), partial(step, silent(cp))
        runs: list[Callable[[], Any]] = [real, quiet, without_kernel(real, device), without_kernel(quiet, device)]
        numbered = {str(number): run for number, run in enumerate(runs)}
        mine = seconds_in_turns(numbered, device, args.rounds, before=partial(dist.barrier, mesh.get_group()))
        slowest = map(max, zip(*ranks.share(list(mine.values())), strict=True))
        found, computation, with_merging, merging = slowest
        yield name, found, computation, with_merging - merging


def line(name: str, step: float, computation: float, communication: float) -> str:
    """Return one mode as a line of the table."""
    hidden = (computation + communication - step) / communication if communication > 0 else float("nan")
    return (
        f"{name:32} step {step * 1e3:9.2f} ms   computation {computation * 1e3:9.2f} ms   "
        f"communication {communication * 1e3:9.2f} ms   hidden {hidden:5.0%}"
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=65536, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    with process_group(torch.device(args.device).type):
        ranks = Ranks(torch.device(args.device).type)
        mesh, show = ranks.mesh(), print if ranks.rank == 0 else lambda *_, **__: None
        show(f"{mesh.size()} ranks, S={args.length} H{args.heads}/{args.kv_heads} D{args.dim} {args.dtype}, causal")
        failed = [finding for finding in compare(ranks, mesh, args) if finding.failed]
        for finding in failed:
            show(f"FAILED  {finding}", flush=True)
        for row in measure(ranks, mesh, args):
            show(line(*row), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
