"""Simulates where it pays to send only what is needed: modes x layouts on packed documents, windows and plain causal.

    python -m benchmarks.simulated.needed --ranks 8 16
    python -m benchmarks.simulated.needed --ranks 8 16 --slow-link

No process, no tensor, no clock: every rank's schedule comes from the library, and a virtual clock of each rank follows
the order in which the library posts transfers, waits and runs tiles (forward and backward, which costs 2.5 times as
much). A tile takes as long as its visible pairs; a transfer begins when all ranks that take part in it have posted it,
and takes as long as the bytes that the rank sends or receives, whichever are more, on the rank's own link. Late ranks
are waited for. The link is such that Ulysses' exchange of heads, the cheapest of the known modes, takes as long as the
mean rank computes: it needs 2.0.

The result is the time over that of the mean rank's computation. "ideal" is max(1, bytes / link) for the bytes that
"needed" must move in the layout "balanced", spread evenly. They cannot always be: the rank that holds the last query of
the longest document must receive the rest of that document, wherever it lies. "bound" is the time of that rank, or that
of computation, whichever is longer, in forward and in backward.

With --slow-link the link is so slow that the transfers of the busiest rank take as long as the mean rank computes, with
"needed" in "balanced". The table then has the best of all other modes beside it, and of all hybrids of "needed".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hyper_cp.schedule import lookup
from hyper_cp.schedule.build import Schedule, build
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.moves import Move

HEADS, KV_HEADS, DIM = 64, 8, 128
ELEMENT, SUM = 2, 4  # bytes of bf16, and of gradients that are added up in fp32
BACKWARD = 2.5


def packed(lengths: Iterator[float], total: int) -> PackedDocuments:
    """Return documents of the given lengths, the last one cut."""
    ends = [0]
    while ends[-1] < total:
        ends.append(min(total, ends[-1] + max(1, int(next(lengths)))))
    return PackedDocuments([ends])


def drawn(draw: Callable[[], float]) -> Iterator[float]:
    while True:
        yield draw()


def masks(total: int, tokens: int = 8192) -> dict[str, tuple[PackedDocuments, int | None]]:
    """Return the documents and the window of each case, for a sequence of ``total`` positions. The names give the
    lengths for 8K tokens a rank; with other ``tokens`` they are in proportion."""
    rng = np.random.default_rng(0)
    one = PackedDocuments([[0, total]])
    short, long = tokens // 2, 2 * tokens
    return {
        "log-normal, mean 4K": (packed(drawn(lambda: rng.lognormal(np.log(short) - 1.5**2 / 2, 1.5)), total), None),
        "exponential, mean 16K": (packed(drawn(lambda: rng.exponential(long)), total), None),
        "half one, rest 2K": (PackedDocuments([[0, *range(total // 2, total + 1, tokens // 4)]]), None),
        "window 1K": (one, tokens // 8),
        "window 4K": (one, tokens // 2),
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
        """Return the time at which a transfer is done on each rank, posted now. ``peers[r, s]``: r and s exchange
        something. ``rows``: those that each rank sends or receives; ``factor``: their bytes over those of a row."""
        begin = np.maximum(self.free, np.where(peers, self.clock, 0.0).max(1))
        self.free = np.maximum(begin, self.clock) + rows * self.row * factor
        return self.free

    def wait(self, done: np.ndarray) -> None:
        self.clock = np.maximum(self.clock, done)


def areas(plans: Sequence[Schedule], direction: str) -> np.ndarray:
    """Return the visible pairs of each step of each rank: ``[steps, ranks]``."""
    return np.array([[step.area for step in getattr(plan, direction)] for plan in plans], dtype=float).T


def traffic(moves: Sequence[Move]) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that exchange something, ``[r, s]``, and the rows that each sends or receives, whichever are more."""
    sent, received = (np.array([getattr(move, x) for move in moves]) for x in ("sent", "received"))
    peers = (sent > 0) | (received > 0) | np.eye(len(moves), dtype=bool)
    return peers, np.maximum(sent.sum(1), received.sum(1))


def run(ranks: Ranks, direction: str, factor: float) -> None:
    """Forward or backward: the events of the library's own schedules. ``factor``: the time of a pair."""
    transfers, steps = [plan.transfers for plan in ranks.plans], iter(areas(ranks.plans, direction))
    keys, sums = {}, {}
    for kind, block, gradient in getattr(transfers[0], direction):
        if kind == "use":
            ranks.compute(next(steps), factor)
        elif kind == "arrive":
            ranks.wait(keys.pop(block))
        elif kind == "add":
            ranks.wait(sums.pop(gradient))
        else:
            parts = [] if block is None else [(*traffic([each.moves[block] for each in transfers]), 1.0)]
            if gradient is not None:
                parts.append(
                    (*traffic([each.gradient_moves[gradient].transposed for each in transfers]), SUM / ELEMENT)
                )
            pair = transfers[0].moves[0].pattern == "pair"  # which leave in one batch
            if pair and len(parts) == 2:
                (peers, rows, _), (others, more, of_sums) = parts
                done = [ranks.post(peers | others, rows + more * of_sums)] * 2
            else:
                done = [ranks.post(*part) for part in parts]
            if block is not None:
                keys[block] = done[0]
            if gradient is not None:
                sums[gradient] = done[-1]


# --------------------------------------------------------------------------- the cases


def kv_row(ulysses: int) -> int:
    """Return the bytes of one token's keys and values on a rank that has 1/ulysses of the heads."""
    return 2 * max(KV_HEADS, ulysses) // ulysses * DIM * ELEMENT


def heads_bytes(ulysses: int, share: int) -> float:
    """Return the bytes that one rank sends to exchange heads: q, k, v before attention and its output behind it."""
    return (ulysses - 1) / ulysses * share * (2 * HEADS + 2 * max(KV_HEADS, ulysses)) * DIM * ELEMENT


class Case:
    """One mask on a number of ranks, and the time of each mode over the mean rank's computation."""

    def __init__(
        self, size: int, per_rank: int, documents: PackedDocuments, window: int | None, slow: bool = False
    ) -> None:
        self.size, self.share, self.length = size, per_rank, size * per_rank
        self.documents, self.window, self.slow = documents, window, slow
        self.band = (None if window is None else -window, 0)
        reach = self.length if window is None else window + 1
        ends = np.diff(documents.rows[0])
        near = np.minimum(ends, reach)
        self.pairs = float((near * (near + 1) // 2 + (ends - near) * near).sum())

    def plans(self, layout: str, exchange: str, ulysses: int) -> list[Schedule]:
        if layout == "balanced" and self.window is not None:
            layout = f"balanced_{self.window}"
        held = lookup.resolve(layout, self.size, self.length, self.documents).by_ring(ulysses).held
        ring = range(self.size // ulysses)
        return [build(held, held, r, exchange, False, self.band, self.documents.rows) for r in ring]

    def link(self) -> float:
        """Return the bytes that a link moves in the time of the mean rank's computation."""
        if self.slow:
            return self.busiest() * kv_row(1) * (2 + SUM / ELEMENT)
        return 2 * heads_bytes(self.size, self.share)

    def time(self, layout: str, exchange: str, ulysses: int = 1) -> float:
        """Return the time of forward and backward."""
        plans = self.plans(layout, exchange, ulysses)
        mean = self.pairs / self.size * (1 + BACKWARD)
        ranks = Ranks(plans, kv_row(ulysses) / self.link(), 1 / ulysses / mean)
        heads = heads_bytes(ulysses, self.share) / self.link()
        run(ranks, "forward", 1.0)
        ranks.clock[:] = ranks.free[:] = ranks.clock.max()  # the exchange of heads, and other modules, join the ranks
        run(ranks, "backward", BACKWARD)
        return float(ranks.clock.max() + 2 * heads)

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows that each rank sends and receives with "needed" in "balanced": ``[2, ranks]``."""
        moves = [plan.transfers.moves for plan in self.plans("balanced", "needed", 1)]
        return np.array([[sum(sum(getattr(m, x)) for m in each) for each in moves] for x in ("sent", "received")])

    def busiest(self) -> float:
        return float(self.rows.max())

    def _time_of(self, rows: float) -> float:
        """Return the time that rows take, received and their gradients sent back."""
        return rows * kv_row(1) * (2 + SUM / ELEMENT) / self.link()

    def ideal(self) -> float:
        return max(1.0, self._time_of(float(self.rows[1].mean())))

    def bound(self) -> float:
        """No deal of the sequence is faster while queries stay where they are."""
        rows = 0 if self.window is not None else max(np.diff(self.documents.rows[0])) - self.share
        of_keys, computing = self._time_of(rows), 1 + BACKWARD
        return max(1 / computing, of_keys / 4) + max(BACKWARD / computing, of_keys * 3 / 4)


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
    parser.add_argument("--slow-link", action="store_true", help="see above; documents only")
    args = parser.parse_args()
    for size in args.ranks:
        chosen = {name: mask for name, mask in masks(size * args.tokens).items() if args.only in name}
        cases = {name: Case(size, args.tokens, *mask, args.slow_link) for name, mask in chosen.items()}
        if args.slow_link:
            slow_table({name: case for name, case in cases.items() if len(case.documents.rows[0]) > 2})
        else:
            table(size, cases)


def table(size: int, cases: dict[str, Case]) -> None:
    """Print the time of every mode in every layout."""
    names = columns(size)
    print(f"\n| {size} ranks | layout | {' | '.join(names)} | Ulysses | ideal | bound |")
    print("|---" * (len(names) + 5) + "|", flush=True)
    for mask, case in cases.items():
        layouts = ["head_tail", "per_document", "balanced"]
        if len(case.documents.rows[0]) == 2:  # one document: all three are the same, but for windows
            layouts = ["head_tail"] if case.window is None else ["head_tail", "balanced"]
        for layout in layouts:
            times = [f"{case.time(layout, *mode):.2f}" for mode in names.values()]
            last = f"2.00 | {case.ideal():.2f} | {case.bound():.2f}" if layout == layouts[-1] else "| |"
            print(f"| {mask} | {layout} | {' | '.join(times)} | {last} |", flush=True)


def slow_table(cases: dict[str, Case]) -> None:
    """Print "needed" in "balanced", and the best of the other modes, of any layout and any Ulysses degree."""
    print("\n| ranks, documents | needed, balanced | bound | best of the others | which | times as long |")
    print("|---|---:|---:|---:|---|---:|", flush=True)
    for mask, case in cases.items():
        modes = [("ring", 1), ("all_gather", 1), *(("ring", u) for u in (2, 4, 8) if u < case.size)]
        others = {
            f"{'' if u == 1 else f'{u} x '}{exchange}, {layout}": case.time(layout, exchange, u)
            for layout in ("head_tail", "per_document")
            for exchange, u in modes
        }
        others["Ulysses"] = 1 + 2 * heads_bytes(case.size, case.share) / case.link()
        best, needed = min(others, key=lambda name: others[name]), case.time("balanced", "needed")
        times = f"{needed:.2f} | {case.bound():.2f} | {others[best]:.2f} | {best} | {others[best] / needed:.1f}"
        print(f"| {case.size}, {mask} | {times} |", flush=True)


if __name__ == "__main__":
    main()
