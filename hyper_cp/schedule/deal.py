"""The deal of ``layout="balanced"``: chunks go to ranks so that all have equal work and little has to travel.

It starts from simple deals and improves them by exchanges of two chunks. In each round the ranks pair off, and every
pair makes the exchange that gains most; after as many rounds as there are other ranks, each rank has met each. What all
exchanges of all pairs gain is found at once, on arrays. The budget is a number of exchanges, not a time, so every rank
finds the same deal.

A step takes as long as its slowest rank. So what an exchange gains is the rows that need not travel, and above all what
it takes off ranks that have more than their part of work, of rows to receive or of rows to send.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from .pairs import Cost, Floats, pieces, seen
from .ranges import Documents, Numbers, Range, compact, touching

_CHUNKS = (8, 6, 4, 2)  # per rank: the first that divides its positions
_FINER = 16  # tried too where the budget allows: they balance rows better, but make more and smaller tiles,
_GAIN = 0.02  # so they must gain so much. Where one chunk has _NEARLY the work of a rank, they are tried first
_NEARLY = 0.9
_SMALLEST = 128  # positions of a finer chunk: kernels work in blocks of about that size
_TOLERANCE = 1.03  # the fullest rank's work over the mean that is aimed at: the last per cent would cost many rows
_BUSIEST = (1.15, 1.5, 3)  # the rows that the busiest rank receives or sends over the mean that is aimed at
_ABOVE = 4  # rows that a row above this counts as
_WEIGHTS = (64, 8, 1)  # of work above what is aimed at, beside rows. The deal that is found depends on both
_SHARE = 0.1  # the time of receiving as many rows as a rank holds, in units of the mean rank's work
_BUDGET = 700_000  # exchanges that are considered, with the cost of a round beside them: about 0.1 s
_ROUND = 1000  # exchanges that a round costs as much as, however few it considers
_SWEEPS = 8  # with few ranks nothing changes any more after fewer
_REPAIRS = 16  # exchanges of the fullest rank alone after each sweep

Deal = Numbers
"""The numbers of the chunks that each rank holds, ascending: ``[world, chunks per rank]``."""


def dealt(length: int, world: int, rows: Sequence[Documents], window: int | None) -> tuple[Sequence[Range], ...]:
    """The ranges of positions that each rank holds, ascending.

    Args:
        rows: boundaries of the documents that all batch rows have, or of each row.
        window: the most positions that a query sees before its own; None: all of its document.
    """
    if world == 1:
        return (((0, length),),)
    if window is None and all(len(boundaries) == 2 for boundaries in rows):
        return _ranges(_head_tail(world, 2), length)  # one document: no deal of equal work moves less
    budget, found = _Budget(_BUDGET), []
    for chunks in _cuts(length, world, rows, window):
        number = len(chunks.pairs) // world
        deal = min(_candidates(chunks, world, number, budget), key=chunks.total)
        found.append((chunks.total(deal) + (_GAIN if number == _FINER else 0), deal))
        if not budget.left:
            break
    return _ranges(min(found, key=lambda x: x[0])[1], length)


def _cuts(length: int, world: int, rows: Sequence[Documents], window: int | None) -> Iterator[_Chunks]:
    """The sequence in the usual number of chunks and in smaller ones, in the order in which to try them."""
    share = length // world
    usual = _Chunks(length, world * next(n for n in _CHUNKS if share % n == 0), rows, window)
    if share % _FINER or share // _FINER < _SMALLEST:
        yield usual
        return
    large = usual.pairs.max() * world >= _NEARLY * usual.pairs.sum()
    if not large:
        yield usual
    yield _Chunks(length, world * _FINER, rows, window)
    if large:
        yield usual


class _Budget:
    """The number of exchanges that may still be considered."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, exchanges: int) -> None:
        """Count a round of exchanges."""
        self.left = max(0, self.left - exchanges - _ROUND)


def _candidates(chunks: _Chunks, world: int, number: int, budget: _Budget) -> list[Deal]:
    """Simple deals, and what exchanges make of them, the best first, as far as the budget goes."""
    contiguous = np.arange(world * number).reshape(world, number)
    found = sorted((contiguous, _head_tail(world, number), fullest_first(chunks.pairs, world)), key=chunks.total)
    for (weight, busiest), start in product(zip(_WEIGHTS, _BUSIEST, strict=True), tuple(found)):
        if budget.left:
            found.append(_improved(chunks, start, weight, busiest, budget))
    return found


def _head_tail(world: int, number: int) -> Deal:
    """Head-tail in ``number`` chunks per rank, an even number: runs of chunks r and 2 * world - 1 - r."""
    runs = np.arange(world * number).reshape(2 * world, number // 2)
    return np.concatenate((runs[:world], runs[::-1][:world]), 1)


def fullest_first(pairs: Floats, world: int) -> Deal:
    """Runs of chunks, those with most work first, each to the rank that has least so far. A run is a quarter of a
    rank's chunks, or less where one would have more than half of a rank's work. ``pairs``: the work of each chunk."""
    number = len(pairs) // world
    run = max(1, number // 4)
    while run > 1 and (number % run or 2 * world * pairs.reshape(-1, run).sum(1).max() > pairs.sum()):
        run //= 2
    work = pairs.reshape(-1, run).sum(1)
    ranks: list[tuple[float, int]] = [(0.0, rank) for rank in range(world)]
    dealt: list[list[int]] = [[] for _ in range(world)]
    for at in np.argsort(-work, kind="stable").tolist():
        done, rank = heapq.heappop(ranks)
        dealt[rank].append(at)
        if len(dealt[rank]) < number // run:
            heapq.heappush(ranks, (done + work[at], rank))
    found: Deal = (np.sort(np.array(dealt), 1)[:, :, None] * run + np.arange(run)).reshape(world, number)
    return found


def _ranges(deal: Deal, length: int) -> tuple[Sequence[Range], ...]:
    size = length // deal.size
    return tuple(compact(touching(np.stack((mine * size, (mine + 1) * size), 1))) for mine in deal)


class _Chunks:
    """The sequence in equal chunks, and what each costs. All numbers are integers, in float64.

    Attributes:
        pairs: the visible pairs of the queries of each chunk.
        low, stop: the first key that they see, and the end of each chunk; after the last chunk, an empty one.
    """

    def __init__(self, length: int, count: int, rows: Sequence[Documents], window: int | None) -> None:
        ends = np.arange(count + 1) * (length // count)
        self.length = length
        band = None if window is None else -window, 0
        self.pairs, low, stop = pieces(ends[:-1], ends[1:], rows, band)
        self.low, self.stop = np.append(low, length), np.append(stop, length)

    def cost(self, deal: Deal) -> Cost:
        """The cost of a deal."""
        first = np.arange(0, deal.size, deal.shape[1])
        received = seen(self.low[deal].ravel(), self.stop[deal].ravel(), first) - self.length / len(deal)
        return Cost(self.pairs[deal].sum(1), received, self.length)

    def total(self, deal: Deal) -> float:
        """One number to compare deals by. The rows of the mean rank count more than those of the busiest."""
        cost, share = self.cost(deal), self.length / len(deal)
        busiest = max(cost.rows.max(), self.sent(deal)[deal].sum(1).max())
        return max(_TOLERANCE, cost.work) + _SHARE * float(busiest + 4 * cost.rows.mean()) / share / 5

    def gained(self, a: Deal, b: Deal) -> Floats:
        """The keys more that ``a[p]`` sees with chunk ``b[p, j]`` in place of its own ``a[p, i]``: ``[p, i, j]``.

        A chunk adds the keys from its first, or from the end of the chunk before it, to its end. So this changes only
        for the chunk after the one that leaves and for the chunk after the one that comes.
        """
        pairs, number = a.shape
        ends = np.zeros((pairs, number + 2))  # of the chunks, with an empty one before and after them
        lows = np.full((pairs, number + 2), float(self.length))
        ends[:, 1:-1], ends[:, -1], lows[:, 1:-1] = self.stop[a], self.length, self.low[a]
        before, end, low, after = ends[:, :-2], ends[:, 1:-1], lows[:, 1:-1], lows[:, 2:]
        left = np.maximum(after, end) - np.maximum(after, before) - (end - np.maximum(low, before))
        # The neighbours of the chunk that comes, among those that stay.
        place, own = (a[:, None, :] < b[:, :, None]).sum(-1)[:, None, :], np.arange(number)[:, None]
        row = np.arange(pairs)[:, None, None]
        before, after = ends[row, place - (own == place - 1)], lows[row, place + 1 + (own == place)]
        low, end = self.low[b][:, None, :], self.stop[b][:, None, :]
        came = end - np.maximum(low, before) + np.maximum(after, before) - np.maximum(after, end)
        gained: Floats = left[:, :, None] + came
        return gained

    def sent(self, deal: Deal) -> Floats:
        """The rows of each chunk that its rank sends, to all other ranks together: ``[chunks]``."""
        size = self.length // deal.size
        starts, stop = self.stop[:-1] - size, self.stop[deal]
        low = np.maximum(self.low[deal], np.concatenate((np.zeros((len(deal), 1)), stop[:, :-1]), 1))
        seen = np.minimum(stop[:, :, None], starts + size) - np.maximum(low[:, :, None], starts)
        seen = np.maximum(seen, 0).sum(1)  # [ranks, chunks]
        seen[np.arange(len(deal))[:, None], deal] = 0
        found: Floats = seen.sum(0)
        return found


def _improved(chunks: _Chunks, start: Deal, weight: int, busiest: float, budget: _Budget) -> Deal:
    """A deal after exchanges of chunks. The weight of work grows from sweep to sweep until no rank has too much."""
    ranks, world, unchanged = _Ranks(chunks, start.copy(), busiest), len(start), 0
    for _ in range(_SWEEPS):
        ranks.count_rows()
        for a, b in _rounds(world):
            budget.spend(len(a) * start.shape[1] ** 2)
            unchanged = 0 if ranks.exchange(a, b, weight) else unchanged + 1
            if not budget.left or unchanged >= len(_rounds(world)):
                break
        everyone = np.arange(world)
        for _ in range(_REPAIRS):
            fullest, others = ranks.work.argmax(), np.delete(everyone, ranks.work.argmax())
            if not ranks.above or not ranks.exchange(np.full(world - 1, fullest), others, weight, one=True):
                break
            unchanged = 0
        if not budget.left or (unchanged and not ranks.above):
            break
        weight *= 4 if ranks.above else 1
    return ranks.deal


class _Ranks:
    """The ranks' chunks, work and rows, which exchanges change in place.

    Attributes:
        work: visible pairs of each rank.
        received, sent: rows that each rank receives and sends.
        popular: rows of each chunk that its rank sends.
        row: pairs that a row counts as much as.
    """

    def __init__(self, chunks: _Chunks, deal: Deal, busiest: float) -> None:
        self.chunks, self.deal, self.busiest = chunks, deal, busiest
        self.work = chunks.pairs[deal].sum(1)
        self.most = np.floor(_TOLERANCE * self.work.mean())
        self.row = max(1.0, np.floor(self.work.sum() / chunks.length))
        self.least = (chunks.stop - chunks.low).max() - chunks.length // len(deal)  # some rank must receive that many

    def count_rows(self) -> None:
        """Count the rows that travel. What exchanges change in the popularity of other chunks is counted here only."""
        self.received = self.chunks.cost(self.deal).rows
        self.popular = self.chunks.sent(self.deal)
        self.sent = self.popular[self.deal].sum(1)
        self.most_rows = max(self.least, np.floor(self.busiest * self.sent.mean()))

    @property
    def above(self) -> bool:
        """True if a rank has more work than is aimed at."""
        return bool(self.work.max() > self.most)

    def exchange(self, a: Numbers, b: Numbers, weight: int, one: bool = False) -> bool:
        """Make the best exchange between each rank of ``a`` and its partner in ``b``, or only the best ``one`` of them
        all, if it gains; True if any does."""
        chunks, mine, theirs = self.chunks, self.deal[a], self.deal[b]
        gained = chunks.gained(np.concatenate((mine, theirs)), np.concatenate((theirs, mine)))
        rows = gained[: len(a)], gained[len(a) :].transpose(0, 2, 1)
        work, sent = (x[mine][:, :, None] - x[theirs][:, None, :] for x in (chunks.pairs, self.popular))
        changes = (self.work, (-work, work)), (self.received, rows), (self.sent, (-sent, sent))
        limits = (self.most, weight), (self.most_rows, _ABOVE * self.row), (self.most_rows, _ABOVE * self.row)
        change = self.row * (rows[0] + rows[1])
        before = np.zeros(len(a))
        for (total, by), (most, each) in zip(changes, limits, strict=True):
            for ranks, more in zip((a, b), by, strict=True):
                change += each * np.maximum(0, total[ranks][:, None, None] + more - most)
                before += each * np.maximum(0, total[ranks] - most)
        change = change.reshape(len(a), -1)
        best = change.argmin(1)
        gain = change[np.arange(len(a)), best] - before
        better = np.flatnonzero(gain < 0)
        better = better[gain[better].argmin()][None] if one and len(better) else better
        i, j = np.divmod(best[better], mine.shape[1])
        for total, by in changes:
            for ranks, more in zip((a, b), by, strict=True):
                total[ranks[better]] += more[better, i, j]
        a, b = a[better], b[better]
        self.deal[a, i], self.deal[b, j] = theirs[better, j], mine[better, i]
        for ranks in (a, b):
            self.deal[ranks] = np.sort(self.deal[ranks], 1)
        return bool(len(better))


@lru_cache(maxsize=8)
def _rounds(world: int) -> list[tuple[Numbers, Numbers]]:
    """Pairs of ranks for each round, so that each rank meets each other once: the ranks stand in a circle around the
    first, face each other, and move on by one place."""
    circle, found = np.arange(1, world + world % 2), []
    for turn in range(len(circle)):
        ranks = np.append(0, np.roll(circle, turn))
        a, b = ranks[: len(ranks) // 2], ranks[: len(ranks) // 2 - 1 : -1]
        real = np.maximum(a, b) < world  # with an odd number, one rank rests
        found.append((a[real], b[real]))
    return found
