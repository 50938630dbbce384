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
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_cp.cli.modes import Mode, named_modes
from hyper_cp.mesh import comm
from hyper_cp.ops import attention, kernels

from ..ranks import join, leave, results_of

MODES = named_modes(
    "ring, head_tail",
    "ring, load_balance",
    "needed, head_tail",
    "all-gather, head_tail, 1 stage",
    "all-gather, head_tail, 2 stages",
    "all-gather, head_tail, 4 stages",
    "all-gather, load_balance",
    "Ulysses",
    "Ulysses, 2 head groups",
    "Ulysses, 4 head groups",
    "Ulysses, 8 head groups",
)


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


class SimulatedKernel:
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


def simulate(link: Link, kernel: SimulatedKernel) -> None:
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


def rank_main(rank: int, ranks: int, store: str, put: Callable[[Any], None], args: argparse.Namespace) -> None:
    """Measure the chosen modes on one rank. Rank 0 puts ``(name, seconds, the longer of the two)``."""
    mesh = join(rank, ranks, store)
    clock = Clock(args.virtual)
    link, kernel = Link(clock, args.headers, args.latency, args.half_duplex), SimulatedKernel(clock)
    simulate(link, kernel)

    def step(mode: Mode) -> float:
        # Ulysses needs heads for every rank and group, and few dims, because the copies of n ranks share few cores.
        heads, dims = (2, 16) if mode["ulysses_degree"] == 1 else (8 * args.ranks, 4)
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
                put((name, *found.tolist()))
    leave()


def chosen(args: argparse.Namespace) -> list[tuple[str, Mode]]:
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
    print(f"{args.ranks} ranks; {args.seconds} s of simulated computation and {args.link} times as much communication")
    for name, seconds, longer in results_of(rank_main, args.ranks, args):
        print(f"{name:32} {seconds:6.2f} s   {seconds / longer:.2f} x the longer of the two", flush=True)


if __name__ == "__main__":
    main()
