"""Measures how much communication the schedule hides: real ranks and messages, simulated link and kernels.

    python -m benchmarks.simulated.overlap --ranks 8

Every transfer takes as long as its bytes need on a link of fixed bandwidth, and every kernel as long as its tile's area
needs (backward 2.5 times forward). Both wait by the clock while the real messages are exchanged, so the order of
posting and waiting is the library's own, and n ranks do not need n devices. The link is as slow as the computation is
long. If all communication were hidden, the ratio to the longer of the two would be 1.00. The bar for the balanced ring
is 1.15.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh import comm
from hyper_cp.ops import attention, kernels

MODES: dict[str, dict[str, Any]] = {
    "ring, head_tail": {"kv_exchange": "ring", "layout": "head_tail"},
    "ring, load_balance": {"kv_exchange": "ring", "load_balance": True},
    "needed, head_tail": {"kv_exchange": "needed", "layout": "head_tail"},
    "all_gather, head_tail": {"layout": "head_tail", "exchange_stages": 1},
    "all_gather, head_tail, 2 stages": {"layout": "head_tail", "exchange_stages": 2},
    "all_gather, head_tail, 4 stages": {"layout": "head_tail", "exchange_stages": 4},
    "all_gather, load_balance": {"load_balance": True},
    "Ulysses": {"ulysses_degree": None},
    "Ulysses, 2 head groups": {"ulysses_degree": None, "head_groups": 2},
    "Ulysses, 4 head groups": {"ulysses_degree": None, "head_groups": 4},
    "Ulysses, 8 head groups": {"ulysses_degree": None, "head_groups": 8},
}


class Clock:
    """A clock of simulated durations, or of real time.

    A ``virtual`` clock advances by simulated durations only. It is free of the machine's noise, but it does not count
    waiting for late ranks either, so use it for modes in which all ranks do the same.
    """

    def __init__(self, virtual: bool) -> None:
        self.virtual, self.at = virtual, 0.0

    def now(self) -> float:
        return self.at if self.virtual else time.perf_counter()

    def pass_by(self, seconds: float) -> None:
        if self.virtual:
            self.at += max(0.0, seconds)
        else:
            time.sleep(max(0.0, seconds))


class Link:
    """This rank's link. Transfers use it one after another, in the order in which they are posted.

    Args:
        headers: bytes of packet headers for each byte of a message.
        latency: seconds that a message travels after its last byte has left.
        half_duplex: what is received uses the link as well. (It is as much as what is sent.)
    """

    def __init__(self, clock: Clock, headers: float = 0.0, latency: float = 0.0, half_duplex: bool = False) -> None:
        self.clock, self.latency = clock, latency
        self.share = 1 / (1 + headers) / (2 if half_duplex else 1)
        self.bandwidth, self.free_at, self.busy = float("inf"), 0.0, 0.0

    def post(self, nbytes: int) -> float:
        duration = nbytes / self.bandwidth
        self.busy += duration
        self.free_at = max(self.free_at, self.clock.now()) + duration / self.share
        return self.free_at + self.latency


class Kernel:
    """A kernel that takes the time of a tile and returns zeros of the right shapes."""

    name = "simulated"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pairs_per_second, self.busy = float("inf"), 0.0

    def _run(self, tile: kernels.TileInputs, factor: float) -> None:
        (batch, heads, rows, _), cols = tile.q.shape, tile.k.shape[2]
        pairs = batch * heads * rows * cols * (0.5 if tile.causal else 1.0)
        self.busy += factor * pairs / self.pairs_per_second
        self.clock.pass_by(factor * pairs / self.pairs_per_second)

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        self._run(tile, 1.0)
        return torch.zeros_like(tile.q), tile.q.new_zeros(tile.q.shape[:3])

    def backward(self, tile: kernels.TileInputs, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._run(tile, 2.5)
        return torch.zeros_like(tile.q), torch.zeros_like(tile.k), torch.zeros_like(tile.v)


def simulate(link: Link, kernel: Kernel) -> None:
    """Replace the library's transfers and kernels in this process by the simulated link and kernel."""
    record, init, wait = comm.record, comm.Pending.__init__, comm.Pending.wait
    posted = [0.0]

    def recording(operation: str, nbytes: int) -> None:
        record(operation, nbytes)
        posted[0] = link.post(nbytes)

    def starting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.arrives_at = posted[0]

    def waiting(self: Any) -> Any:
        link.clock.pass_by(self.arrives_at - link.clock.now())
        return wait(self)

    comm.record, comm.Pending.__init__, comm.Pending.wait = recording, starting, waiting
    kernels.register(kernel, "cpu")


def join(rank: int, ranks: int, store: str) -> None:
    """Make this process one of the ranks."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )


@contextmanager
def on_ranks(main: Callable[..., None], args: argparse.Namespace) -> Iterator[Any]:
    """Run ``main(rank, args, store, queue)`` in ``args.ranks`` processes, and yield the queue of their results."""
    context: Any = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        target = (args, os.path.join(folder, "store"), queue)
        ranks = [context.Process(target=main, args=(r, *target)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        yield queue
        for process in ranks:
            process.join()


def rank_main(rank: int, args: argparse.Namespace, store: str, queue: Any) -> None:
    """Measure the chosen modes on one rank. Rank 0 puts ``(name, seconds, the longer of the two)`` into the queue."""
    join(rank, args.ranks, store)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    clock = Clock(args.virtual)
    link, kernel = Link(clock, args.headers, args.latency, args.half_duplex), Kernel(clock)
    simulate(link, kernel)

    def step(mode: dict[str, Any]) -> float:
        # Ulysses needs heads for every rank and group, and few dims, because the copies of n ranks share few cores.
        heads, dims = (2, 16) if "ulysses_degree" not in mode else (8 * args.ranks, 4)
        kv_heads = heads // (args.queries_per_key if heads > 2 else 1)
        tokens = args.tokens if heads == 2 else max(args.tokens // 16, 2)
        q, k, v = (torch.randn(1, h, tokens, dims, requires_grad=True) for h in (heads, kv_heads, kv_heads))
        dist.barrier()
        link.free_at = link.busy = kernel.busy = 0.0
        start = clock.now()
        attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, **mode).sum().backward()
        return clock.now() - start

    for name, mode in chosen(args):
        link.bandwidth, kernel.pairs_per_second = 1e30, 1e30
        step(mode)  # infinitely fast: it counts the bytes and the visible pairs
        link.bandwidth, kernel.pairs_per_second = (
            link.busy * 1e30 / (args.seconds * args.link),
            kernel.busy * 1e30 / args.seconds,
        )
        for _ in range(args.runs):
            found = torch.tensor([step(mode), max(link.busy, kernel.busy)])
            dist.all_reduce(found, dist.ReduceOp.MAX)
            if rank == 0:
                queue.put((name, *found.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def chosen(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the modes that ``--only`` selects."""
    return [(name, mode) for name, mode in MODES.items() if args.only in name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of the computation")
    parser.add_argument("--link", type=float, default=1.0, help="duration of communication / computation")
    parser.add_argument("--headers", type=float, default=0.0, help="packet headers / payload: 0.045 on Ethernet")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of each message on its way")
    parser.add_argument("--half-duplex", action="store_true", help="both directions share the link")
    parser.add_argument("--queries-per-key", type=int, default=1, help="query heads per key/value head (Ulysses)")
    parser.add_argument("--virtual", action="store_true", help="use a clock that only simulated durations advance")
    parser.add_argument("--runs", type=int, default=1, help="runs of each mode")
    parser.add_argument("--only", default="", help="run only the modes whose name contains this")
    args = parser.parse_args()
    with on_ranks(rank_main, args) as queue:
        print(
            f"{args.ranks} ranks; {args.seconds} s of simulated computation and {args.link} times as much communication"
        )
        for _ in range(args.runs * len(chosen(args))):
            name, seconds, longer = queue.get()
            print(f"{name:26} {seconds:6.2f} s   {seconds / longer:.2f} x the longer of the two", flush=True)


if __name__ == "__main__":
    main()
