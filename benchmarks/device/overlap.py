"""Checks every mode on real ranks, and measures how much communication it hides: on any accelerator, or on gloo.

    torchrun --nproc-per-node 8 -m benchmarks.device.overlap                       # GPUs or NPUs of one host
    torchrun --nproc-per-node 2 -m benchmarks.device.overlap --device cpu --length 2048 --dtype float32

First each mode is compared with attention written out in fp64, on a short sequence; the exit code is 1 if one differs.
Then three steps of each are timed, forward and backward of one causal attention call: the step itself, the same one
with transfers that bring nothing (computation alone), and the same one with a kernel that computes nothing
(communication alone; partials are still merged). The share of communication that is hidden is

    (computation + communication - step) / communication

100 % means that the step is no longer than computation alone, 0 % that the two follow each other. Every number is the
slowest rank's median.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import attention, kernels
from hyper_cp.schedule.lookup import resolve

from .ranks import SilentAxis
from .results import Result, check
from .tiles import CAUSAL, SCALE, Tile, answer, tensors_of, visible_of
from .times import NoKernel, seconds

MODES: dict[str, dict[str, Any]] = {
    "ring, head_tail": {"kv_exchange": "ring", "layout": "head_tail"},
    "ring, load_balance": {"kv_exchange": "ring", "load_balance": True},
    "all_gather, head_tail": {"kv_exchange": "all_gather", "layout": "head_tail"},
    "needed, head_tail": {"kv_exchange": "needed", "layout": "head_tail"},
    "Ulysses": {"ulysses_degree": None},
    "Ulysses, 4 head groups": {"ulysses_degree": None, "head_groups": 4},
    "hybrid of 2, ring": {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
    "hybrid of 2, ring, 2 groups": {"ulysses_degree": 2, "kv_exchange": "ring", "head_groups": 2},
}


Modes = Iterator[tuple[str, cp_mesh.CPMesh, dict[str, Any]]]


def modes(mesh: DeviceMesh, args: argparse.Namespace) -> Modes:
    """The modes that run on this mesh, each with its view of the mesh and its arguments of ``attention``."""
    for name, settings in MODES.items():
        if possible(settings, mesh.size(), args):
            rest = {key: value for key, value in settings.items() if key != "ulysses_degree"}
            yield name, cp_mesh.view(mesh, settings.get("ulysses_degree", 1)), rest


def compare(mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[Result]:
    """Output and gradients of every mode on this rank, for a sequence of which every rank knows all."""
    dtype, rows = getattr(torch, args.dtype), min(args.length, 128 * mesh.size())
    tile = Tile(rows, rows, CAUSAL, batch=1, heads=(args.heads, args.kv_heads), dims=(args.dim, args.dim))
    wholes = tensors_of(tile, mesh.device_type, dtype)
    want = answer(*wholes, visible_of(tile, mesh.device_type), SCALE)
    del want[1]  # the log-sum-exp
    for name, cp, mode in modes(mesh, args):
        mine = resolve(mode.get("layout", "contiguous"), mesh.size(), rows).positions(cp.rank)

        def step(mine: Tensor = mine, cp: cp_mesh.CPMesh = cp, mode: dict[str, Any] = mode) -> Any:
            q, k, v, dout = (x[:, :, mine.to(x.device)].detach() for x in wholes)
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = attention(*inputs, mesh=cp, is_causal=True, enable_gqa=True, scale=SCALE, **mode)
            found = out.detach(), *torch.autograd.grad(out, inputs, dout)
            return list(zip(found, (x[:, :, mine] for x in want), strict=True))

        yield check(f"{name}, rank {cp.rank} of {mesh.size()}, {dtype}", dtype, step)


def silent(cp: cp_mesh.CPMesh) -> cp_mesh.CPMesh:
    """The same mesh with transfers that take no time and bring nothing."""
    ring, ulysses = (SilentAxis(axis.rank, axis.size) for axis in (cp.ring, cp.ulysses))
    return cp_mesh.register(
        replace(cp, key=f"silent {cp.key}", ring=ring, ulysses=ulysses, flat=(ulysses, ring), agreement=None)
    )


def possible(mode: dict[str, Any], ranks: int, args: argparse.Namespace) -> bool:
    """True if the mode is itself on so many ranks (a hybrid has two dimensions) and the heads split."""
    degree, groups = mode.get("ulysses_degree", 1), mode.get("head_groups", 1)
    hybrid = degree not in (None, 1)
    degree = degree or ranks
    return not (hybrid and (ranks == degree or ranks % degree)) and args.kv_heads % (degree * groups) == 0


def measure(mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[tuple[str, float, float, float]]:
    """``(mode, step, computation alone, communication alone)`` in seconds, the same on every rank."""
    device, ranks = torch.device(mesh.device_type), mesh.size()
    dtype, rows = getattr(torch, args.dtype), args.length // ranks
    tensors = [
        torch.randn(1, rows, heads, args.dim, device=device, dtype=dtype).transpose(1, 2)
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    ]
    for name, cp, mode in modes(mesh, args):

        def step(cp: cp_mesh.CPMesh = cp, mode: dict[str, Any] = mode) -> tuple[Tensor, ...]:
            inputs = [x.detach().requires_grad_() for x in tensors[:3]]
            out = attention(*inputs, mesh=cp, is_causal=True, enable_gqa=True, **mode)
            return torch.autograd.grad(out, inputs, tensors[3])

        times = [seconds(step, device.type, args.rounds)]
        quiet = silent(cp)
        times.append(seconds(lambda run=step, cp=quiet: run(cp), device.type, args.rounds))
        with kernels.register(NoKernel(), device.type):
            times.append(seconds(step, device.type, args.rounds))
        slowest = torch.tensor(times, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.get_group())
        found, computation, communication = slowest.tolist()
        yield name, found, computation, communication


def line(name: str, step: float, computation: float, communication: float) -> str:
    """One mode as a line of the table."""
    hidden = (computation + communication - step) / communication
    return (
        f"{name:28} step {step * 1e3:9.2f} ms   computation {computation * 1e3:9.2f} ms   "
        f"communication {communication * 1e3:9.2f} ms   hidden {hidden:5.0%}"
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=65536, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    device = torch.device(args.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, torch.accelerator.current_device_index())
    dist.init_process_group(device_id=None if device.type == "cpu" else device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks, S={args.length} H{args.heads}/{args.kv_heads} D{args.dim} {args.dtype}, causal")
    failed = [result for result in compare(mesh, args) if not result.passed]
    for result in failed:
        print(f"FAILED  {result}", flush=True)
    for row in measure(mesh, args):
        if dist.get_rank() == 0:
            print(line(*row), flush=True)
    dist.destroy_process_group()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
