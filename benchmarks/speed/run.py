"""Measures context-parallel attention on n ranks x 1 thread against plain SDPA in one process x n threads.

    python -m benchmarks.speed.run --lengths 4096 8192 --rounds 5

Attention is causal, B1 H8 D64 fp32, forward + backward, on CPU with gloo. Plain SDPA and the modes alternate within
every round, so that a slow phase of the machine affects all of them. The script prints medians, and the ratio of plain
SDPA's time to the mode's: 1.00 is perfect scaling, and more is better than the baseline.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.ops import attention

MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": None},
    "ulysses, head_tail": {"ulysses_degree": None, "layout": "head_tail"},
    "colossal": {"kv_exchange": "all_gather"},
    "colossal, head_tail": {"kv_exchange": "all_gather", "layout": "head_tail"},
    "colossal, load_balance": {"kv_exchange": "all_gather", "load_balance": True},
    "ring": {"kv_exchange": "ring"},
    "ring, head_tail": {"kv_exchange": "ring", "layout": "head_tail"},
    "ring, load_balance": {"kv_exchange": "ring", "load_balance": True},
}


def timed(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> float:
    """Return the seconds that forward and backward take."""
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    run().backward(dout)
    return time.perf_counter() - start


def tensors(length: int, args: argparse.Namespace) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Make q, k, v and the output's gradient, ``[B, H, S, D]`` in the memory order ``[B, S, H, D]`` of models."""

    def one() -> torch.Tensor:
        return torch.randn(1, length, args.heads, args.dim).transpose(1, 2)

    return [one().requires_grad_() for _ in range(3)], one()


def rank_main(rank: int, args: argparse.Namespace, store: str, queue: Any) -> None:
    """Measure on one rank. Rank 0 puts ``(length, seconds of every round by mode)`` into the queue."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    for length in args.lengths:
        whole, whole_dout = tensors(length, args)
        part, part_dout = tensors(length // args.ranks, args)
        times: dict[str, list[float]] = {name: [] for name in ["plain SDPA", *args.modes]}
        for _ in range(args.rounds + 1):  # the first round warms up and is dropped
            dist.barrier()
            if rank == 0:  # the other ranks wait in the next barrier and use no core
                torch.set_num_threads(args.ranks)
                times["plain SDPA"].append(
                    timed(lambda q=whole: F.scaled_dot_product_attention(*q, is_causal=True), whole, whole_dout)
                )
                torch.set_num_threads(1)
            for name in args.modes:
                dist.barrier()
                seconds = timed(
                    lambda p=part, kw=MODES[name]: attention(*p, mesh=mesh, is_causal=True, **kw),
                    part,
                    part_dout,
                )
                slowest = torch.tensor([seconds])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[name].append(slowest.item())
        if rank == 0:
            queue.put((length, {name: ts[1:] for name, ts in times.items()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    args = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(r, args, os.path.join(folder, "store"), queue))
            for r in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
        print(f"{'S':>6} {'mode':24} {'median ms':>10} {'SDPA/mode':>10}  {'(of each round: min - max)'}")
        for _ in args.lengths:
            length, times = queue.get()
            base = times["plain SDPA"]
            for name, ts in times.items():
                ratios = [b / t for b, t in zip(base, ts, strict=True)]
                print(
                    f"{length:>6} {name:24} {statistics.median(ts) * 1e3:>10.0f} "
                    f"{statistics.median(ratios):>10.3f}  ({min(ratios):.3f} - {max(ratios):.3f})",
                    flush=True,
                )
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
