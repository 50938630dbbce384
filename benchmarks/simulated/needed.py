"""Simulates where it pays to send only what is needed: modes x layouts on packed documents, windows and plain causal.

    python -m benchmarks.simulated.needed --ranks 8 16

No process, no tensor, no clock: every rank's schedule comes from the library, and a virtual clock of each rank follows
the order in which the library posts transfers, waits and runs tiles (forward and backward, which costs 2.5 times as
much). A tile takes as long as its visible pairs; a transfer begins when all ranks that take part in it have posted it,
and takes as long as the bytes that the rank sends or receives, whichever are more, on the rank's own link. Late ranks
are waited for. The link is such that Ulysses' exchange of heads, the cheapest of the known modes, takes as long as the
mean rank computes: it needs 2.0.

The result is the time over that of the mean rank's computation. "ideal" is max(1, bytes / link) for the bytes that
"needed" must move in the layout "balanced", spread evenly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_cp.schedule import lookup
from hyper_cp.schedule.build import Schedule, build
from hyper_cp.schedule.documents import PackedDocuments

HEADS, KV_HEADS, DIM = 64, 8, 128
ELEMENT, SUM = 2, 4  # bytes of bf16, and of gradients that are added up in fp32
BACKWARD = 2.5


def packed(lengths: Iterator[float], total: int) -> PackedDocuments:
    """Documents of the given lengths, the last one cut."""
    ends = [0]
    while ends[-1] < total:
        ends.append(min(total, ends[-1] + max(1, int(next(lengths)))))
    return PackedDocuments([ends])


def drawn(draw: Callable[[], float]) -> Iterator[float]:
    while True:
        yield draw()


def masks(total: int) -> dict[str, tuple[PackedDocuments, int | None]]:
    """Documents and window of each case, for a sequence of ``total`` positions."""
    rng = np.random.default_rng(0)
    one = PackedDocuments([[0, total]])
    return {
        "log-normal, mean 4K": (packed(drawn(lambda: rng.lognormal(np.log(4096) - 1.5**2 / 2, 1.5)), total), None),
        "exponential, mean 16K": (packed(drawn(lambda: rng.exponential(16384)), total), None),
        "half one, rest 2K": (PackedDocuments([[0, *range(total // 2, total + 1, 2048)]]), None),
        "window 1K": (one, 1024),
        "window 4K": (one, 4096),
        "plain causal": (one, None),
    }


# --------------------------------------------------------------------------- the clock


@dataclass
class Ranks:
    """A clock and a link for each rank.

    Attributes:
        row: the time that one row of keys and values takes on a link.
        pair: the time that a visible pair takes.
    """

    plans: Sequence[Schedule]
    row: float
    pair: float

    def __post_init__(self) -> None:
        self.clock, self.free = np.zeros(len(self.plans)), np.zeros(len(self.plans))

    def compute(self, areas: np.ndarray, factor: float) -> None:
        self.clock = self.clock + areas * self.pair * factor

    def post(self, peers: np.ndarray, rows: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """The time at which a transfer is done on each rank, posted now. ``peers[r, s]``: r and s exchange something.
        ``rows``: those that each rank sends or receives; ``factor``: their bytes over those of a row."""
        begin = np.maximum(self.free, np.where(peers, self.clock, 0.0).max(1))
        self.free = np.maximum(begin, self.clock) + rows * self.row * factor
        return self.free

    def wait(self, done: np.ndarray) -> None:
        self.clock = np.maximum(self.clock, done)


def areas(plans: Sequence[Schedule], direction: str) -> np.ndarray:
    """Visible pairs of each step of each rank: ``[steps, ranks]``."""
    return np.array([[step.area for step in getattr(plan, direction)] for plan in plans], dtype=float).T


def transfers(exchange: str, plans: Sequence[Schedule], share: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(peers, rows)`` of each transfer of keys and values."""
    size = len(plans)
    itself = np.eye(size, dtype=bool)
    if exchange == "needed":
        found = []
        for stage in range(len(plans[0].routes)):
            routes = [plan.routes[stage] for plan in plans]
            sent, received = (np.array([getattr(r, x) for r in routes]) for x in ("sent", "received"))
            found.append(((sent > 0) | (received > 0) | itself, np.maximum(sent.sum(1), received.sum(1))))
        return found
    hops = plans[0].hops
    if exchange == "ring":
        before = np.roll(itself, -1, 1).T | itself
        return [(before, np.full(size, share))] * hops
    return [(np.ones((size, size), dtype=bool), np.full(size, share * (size - 1)))] * hops


class Fetches:
    """Transfers of keys and values. So many are under way at once as the schedule says (one, of whole shares)."""

    def __init__(self, ranks: Ranks, exchange: str, share: int) -> None:
        self.ranks, self.moves = ranks, transfers(exchange, ranks.plans, share)
        self.ahead, self.done = ranks.plans[0].ahead or 1, []
        for move in self.moves[: self.ahead]:
            self.done.append(ranks.post(*move))

    def arrive(self, i: int) -> None:
        """Wait for transfer ``i`` and post the next one."""
        self.ranks.wait(self.done[i])
        if i + self.ahead < len(self.moves):
            self.done.append(self.ranks.post(*self.moves[i + self.ahead]))


def forward(ranks: Ranks, exchange: str, share: int) -> None:
    steps, fetches = areas(ranks.plans, "forward"), Fetches(ranks, exchange, share)
    ranks.compute(steps[0], 1.0)
    for i in range(len(fetches.moves)):
        fetches.arrive(i)
        ranks.compute(steps[i + 1], 1.0)
    ranks.compute(steps[-1], 1.0)


def backward(ranks: Ranks, exchange: str, share: int) -> None:
    steps = areas(ranks.plans, "backward")
    if exchange == "ring":
        _ring_backward(ranks, steps, transfers(exchange, ranks.plans, share))
        return
    fetches, home = Fetches(ranks, exchange, share), []
    ranks.compute(steps[0], BACKWARD)
    for i, move in enumerate(fetches.moves):
        fetches.arrive(i)
        ranks.compute(steps[i + 1], BACKWARD)
        if len(home) == fetches.ahead:
            ranks.wait(home.pop(0))
        home.append(ranks.post(*move, SUM / ELEMENT))
    ranks.compute(steps[-1], BACKWARD)
    for done in home:
        ranks.wait(done)


def _ring_backward(ranks: Ranks, steps: np.ndarray, moves: list[Any]) -> None:
    """Sums of gradients go with the blocks, one hop behind, and home in one transfer at the end."""
    pending = ranks.post(*moves[0]) if moves else None
    ranks.compute(steps[0], BACKWARD)
    if not moves:
        ranks.compute(steps[-1], BACKWARD)
        return
    ranks.wait(pending)
    hops = len(moves)
    for hop in range(1, hops + 1):
        factor = (hop < hops) + (hop > 1) * SUM / ELEMENT
        pending = ranks.post(*moves[0], factor) if factor else None
        ranks.compute(steps[hop], BACKWARD)
        if pending is not None:
            ranks.wait(pending)
    peers = np.roll(np.eye(len(ranks.plans), dtype=bool), hops, 1) | np.eye(len(ranks.plans), dtype=bool)
    pending = ranks.post(peers, moves[0][1], SUM / ELEMENT)
    ranks.compute(steps[-1], BACKWARD)
    ranks.wait(pending)


# --------------------------------------------------------------------------- the cases


def kv_row(ulysses: int) -> int:
    """Bytes of one token's keys and values on a rank that has 1/ulysses of the heads."""
    return 2 * max(KV_HEADS, ulysses) // ulysses * DIM * ELEMENT


def heads_bytes(ulysses: int, share: int) -> float:
    """Bytes that one rank sends to exchange heads: q, k, v before attention and its output behind it."""
    return (ulysses - 1) / ulysses * share * (2 * HEADS + 2 * max(KV_HEADS, ulysses)) * DIM * ELEMENT


class Case:
    """One mask on a number of ranks, and the time of each mode over the mean rank's computation."""

    def __init__(self, size: int, per_rank: int, documents: PackedDocuments, window: int | None) -> None:
        self.size, self.share, self.length = size, per_rank, size * per_rank
        self.documents, self.window = documents, window
        self.band = (None if window is None else -window, 0)
        self.pairs = 0.0

    def plans(self, layout: str, exchange: str, ulysses: int) -> list[Schedule]:
        if layout == "balanced" and self.window is not None:
            layout = f"balanced_{self.window}"
        held = lookup.resolve(layout, self.size, self.length, self.documents).by_ring(ulysses).held
        ring = range(self.size // ulysses)
        return [build(held, held, r, exchange, False, self.band, self.documents.rows) for r in ring]

    def link(self) -> float:
        """Bytes that a link moves in the time of the mean rank's computation."""
        return 2 * heads_bytes(self.size, self.share)

    def time(self, layout: str, exchange: str, ulysses: int = 1) -> float:
        """Forward and backward."""
        plans = self.plans(layout, exchange, ulysses)
        self.pairs = self.pairs or float(sum(plan.area for plan in plans))
        mean = self.pairs / self.size * (1 + BACKWARD)
        ranks = Ranks(plans, kv_row(ulysses) / self.link(), 1 / ulysses / mean)
        heads = heads_bytes(ulysses, self.share) / self.link()
        forward(ranks, exchange, self.share * ulysses)
        ranks.clock[:] = ranks.free[:] = ranks.clock.max()  # the exchange of heads, and other modules, join the ranks
        backward(ranks, exchange, self.share * ulysses)
        return float(ranks.clock.max() + 2 * heads)

    def ideal(self) -> float:
        plans = self.plans("balanced", "needed", 1)
        rows = sum(sum(route.received) for plan in plans for route in plan.routes) / self.size
        return max(1.0, rows * kv_row(1) * (2 + SUM / ELEMENT) / self.link())


def columns(size: int) -> dict[str, tuple[str, int]]:
    hybrid = 2 if size <= 8 else 8
    return {
        "ring": ("ring", 1),
        "all-gather": ("all_gather", 1),
        f"{hybrid} x ring": ("ring", hybrid),
        "needed": ("needed", 1),
        f"{hybrid} x needed": ("needed", hybrid),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--tokens", type=int, default=8192, help="per rank")
    parser.add_argument("--only", default="", help="only masks whose name contains this")
    args = parser.parse_args()
    for size in args.ranks:
        names = columns(size)
        print(f"\n| {size} ranks | layout | {' | '.join(names)} | Ulysses | ideal |")
        print("|---" * (len(names) + 4) + "|", flush=True)
        for mask, (documents, window) in masks(size * args.tokens).items():
            if args.only not in mask:
                continue
            case = Case(size, args.tokens, documents, window)
            layouts = ["head_tail", "per_document", "balanced"]
            if len(documents.rows[0]) == 2:  # one document: all three are the same, but for windows
                layouts = ["head_tail"] if window is None else ["head_tail", "balanced"]
            for layout in layouts:
                times = [f"{case.time(layout, *mode):.2f}" for mode in names.values()]
                last = f"2.00 | {case.ideal():.2f}" if layout == layouts[-1] else "|"
                print(f"| {mask} | {layout} | {' | '.join(times)} | {last} |", flush=True)


if __name__ == "__main__":
    main()
