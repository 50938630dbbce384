"""Measures linear recurrences and a short convolution on n ranks x 1 thread against one process.

    python -m benchmarks.measured.recurrence  # 2 and 4 ranks, 8192 positions; about two minutes

Each layer runs forward + backward on the CPU with gloo: in one process with one thread, with states that pass between
ranks (contiguous and head-tail), and with heads exchanged by Ulysses. All of them alternate within every round, so that
a slow phase of the machine affects all. The script prints medians, the ratio of one process's time to the mode's over
the number of ranks (1.00 is perfect scaling, if every rank has a core), and the bytes that a rank sends. After
``--seconds``, shared out among worlds and layers, it leaves out rounds, but for one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import causal_conv1d, linear_recurrence

from ..ranks import join, leave, results_of

Layer = tuple[Callable[..., Tensor], list[Tensor]]
MODES: dict[str, dict[str, Any]] = {
    "states": {},
    "states, head_tail": {"layout": "head_tail"},
    "Ulysses": {"ulysses_degree": None},
}


def layers(length: int, args: argparse.Namespace) -> dict[str, Layer]:
    """Return the layers and their inputs: B1, H heads with keys and values of D numbers."""
    heads, dim = args.heads, args.dim

    def random(*shape: int) -> Tensor:
        return torch.randn(1, length, *shape)

    def qkv() -> list[Tensor]:
        return [random(heads, dim), F.normalize(random(heads, dim), dim=-1), random(heads, dim)]

    def decays(*shape: int) -> Tensor:
        return F.logsigmoid(random(*shape) + 3)

    weight = torch.randn(3 * heads * dim, 4)
    return {
        "Mamba 2": (linear_recurrence, [*qkv(), decays(heads)]),
        "gated delta net": (linear_recurrence, [*qkv(), decays(heads), random(heads).sigmoid()]),
        "Kimi delta attention": (linear_recurrence, [*qkv(), decays(heads, dim), random(heads).sigmoid()]),
        "convolution": (causal_conv1d, [random(3 * heads * dim).transpose(1, 2).contiguous(), weight]),
    }


def timed(run: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Return the seconds that forward and backward take."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    start = time.perf_counter()
    run(*leaves).sum().backward()
    return time.perf_counter() - start


def rank_main(rank: int, world: int, store: str, put: Callable[[Any], None], args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 puts ``(layer, seconds of every round by mode, bytes by mode)``."""
    mesh = join(rank, world, store)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "cp"))["cp"]
    whole, parts = layers(args.length, args), layers(args.length // world, args)
    for name, (function, inputs) in whole.items():
        modes = {mode: x for mode, x in MODES.items() if function is linear_recurrence or mode != "Ulysses"}
        times: dict[str, list[float]] = {mode: [] for mode in ["one process", *modes]}
        sent = dict.fromkeys(times, 0)
        end = time.perf_counter() + args.seconds / len(args.ranks) / len(whole)
        for number in range(args.rounds + 1):  # the first round warms up and is dropped
            late = torch.tensor([float(time.perf_counter() > end)])
            dist.broadcast(late, 0)
            if number > 1 and late.item():
                break
            dist.barrier()
            if rank == 0:  # the other ranks wait in the next barrier and use no core
                times["one process"].append(timed(partial(function, mesh=alone), inputs))
            for mode, options in modes.items():
                dist.barrier()
                with record_traffic() as traffic:
                    seconds = timed(partial(function, mesh=mesh, **options), parts[name][1])
                slowest = torch.tensor([seconds])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[mode].append(slowest.item())
                sent[mode] = sum(size for operation, size in traffic.entries if operation != "agreement")
        if rank == 0:
            put((name, {mode: ts[1:] for mode, ts in times.items()}, sent))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    args = parser.parse_args()
    for world in args.ranks:
        measure(world, args)


def measure(world: int, args: argparse.Namespace) -> None:
    """Measure on ``world`` ranks, and print the table."""
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {world} ranks, S={args.length}")
    print(f"{'layer':22} {'mode':18} {'median ms':>10} {'ratio':>7} {'MiB sent':>9}")
    for name, times, sent in results_of(rank_main, world, args):
        base = statistics.median(times["one process"])
        for mode, ts in times.items():
            median = statistics.median(ts)
            ratio = base / median / (1 if mode == "one process" else world)
            print(f"{name:22} {mode:18} {median * 1e3:>10.0f} {ratio:>7.2f} {sent[mode] / 2**20:>9.2f}")


if __name__ == "__main__":
    main()
