"""Measures on real ranks how much communication a step hides: on any accelerator, or on gloo.

    torchrun --nproc-per-node 8 benchmarks/device_overlap.py                       # GPUs or NPUs of one host
    torchrun --nproc-per-node 2 benchmarks/device_overlap.py --device cpu --length 2048 --dtype float32

For each mode it times three steps, forward and backward of one causal attention call: the step itself, the same one
with transfers that bring nothing (computation alone), and the same one with a kernel that computes nothing
(communication alone; partials are still merged). The share of communication that is hidden is

    (computation + communication - step) / communication

100 % means that the step is no longer than computation alone, 0 % that the two follow each other. Every number is the
slowest rank's median.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from device_checks.ranks import SilentAxis
from device_checks.times import NoKernel, seconds
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import attention, kernels

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
    for name, settings in MODES.items():
        if not possible(settings, ranks, args):
            continue
        mode = dict(settings)
        cp = cp_mesh.view(mesh, mode.pop("ulysses_degree", 1))

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
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=65536, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, torch.accelerator.current_device_index())
    dist.init_process_group(device_id=None if device.type == "cpu" else device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks, S={args.length} H{args.heads}/{args.kv_heads} D{args.dim} {args.dtype}, causal")
    for row in measure(mesh, args):
        if dist.get_rank() == 0:
            print(line(*row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
