"""The deal of ``layout="balanced"``: chunks go to ranks so that all have equal work and little has to travel.

It starts from known deals and improves them by exchanges of two chunks. In each round the ranks pair off, and every
pair makes the exchange that gains most; after as many rounds as there are other ranks, each rank has met each. What all
exchanges of all pairs gain is found at once, on arrays. The budget is a number of exchanges, not a time, so every rank
finds the same deal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from ..ranges import Documents, Numbers, Range, compact, touching
from .cost import ALL_GATHER, Cost, Floats, boundaries_of, pieces, seen

_CHUNKS = (8, 6, 4, 2)  # per rank: the first that divides its positions. More would balance a little better, move more
_FINER = 16  # where one chunk of a long document has _NEARLY the work of a rank
_NEARLY = 0.9
_SMALLEST = 128  # positions of a finer chunk: kernels work in blocks of about so many
_TOLERANCE = 1.03  # the fullest rank's work over the mean that is aimed at: the last per cent would cost many rows
_BUDGET = 600_000  # exchanges that are considered: about 0.1 s
_SENT = 1.3  # the rows that the busiest rank sends over the mean that is aimed at
_SWEEPS = 20  # with few ranks nothing changes any more after fewer

Deal = Numbers
"""The numbers of the chunks that each rank holds, ascending: ``[world, chunks per rank]``."""


def dealt(length: int, world: int, rows: Sequence[Documents], window: int | None) -> tuple[Sequence[Range], ...]:
    """The ranges of positions that each rank holds, ascending.

    Args:
        rows: boundaries of the documents that all batch rows have, or of each row.
        window: a query sees at most so many positions before its own; None: all of its document.
    """
    if window is None and all(len(boundaries) == 2 for boundaries in rows):
        return _ranges(_head_tail(world, 2), length)  # one document: no deal of equal work moves less
    chunks = _chunks(length, world, rows, window)
    number = len(chunks.pairs) // world
    return _ranges(min(_candidates(chunks, world, number), key=chunks.total), length)


def _chunks(length: int, world: int, rows: Sequence[Documents], window: int | None) -> _Chunks:
    """The sequence in the usual number of chunks, or in smaller ones if one alone is nearly a rank's work."""
    share = length // world
    chunks = _Chunks(length, world * next(n for n in _CHUNKS if share % n == 0), rows, window)
    if share % _FINER or share // _FINER < _SMALLEST or chunks.pairs.max() * world < _NEARLY * chunks.pairs.sum():
        return chunks
    return _Chunks(length, world * _FINER, rows, window)


def _candidates(chunks: _Chunks, world: int, number: int) -> list[Deal]:
    """Known deals, and what exchanges make of them, as far as the budget goes."""
    found = [np.arange(world * number).reshape(world, number), _head_tail(world, number)]
    budget = _BUDGET * number // _CHUNKS[0]  # of more chunks, more are considered at once, and faster
    for weight, start in product(_weights(world), tuple(found)):
        if budget > 0:
            deal, considered = _improved(chunks, start, weight, budget)
            budget -= considered
            found.append(deal)
    return found


def _weights(world: int) -> tuple[int, ...]:
    """Weights of excess work, beside rows, to begin with. The deal that is found depends on it."""
    return max(1, world // 4), 1, 2 * world


def _head_tail(world: int, number: int) -> Deal:
    """Head-tail in ``number`` chunks per rank, an even number: runs of chunks r and 2 * world - 1 - r."""
    runs = np.arange(world * number).reshape(2 * world, number // 2)
    return np.concatenate((runs[:world], runs[::-1][:world]), 1)


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
        self.pairs, low, stop = pieces(ends[:-1], ends[1:], boundaries_of(rows), window)
        self.low, self.stop = np.append(low, length), np.append(stop, length)

    def cost(self, deal: Deal) -> Cost:
        """The cost of a deal."""
        received = seen(self.low[deal], self.stop[deal]) - self.length / len(deal)
        return Cost(self.pairs[deal].sum(1), received, self.length)

    def total(self, deal: Deal) -> float:
        """One number to compare deals by. The rank that receives or sends most counts as much as their mean."""
        cost = self.cost(deal)
        busiest = max(cost.rows.max(), self.sent(deal)[deal].sum(1).max()) / (self.length - self.length / len(deal))
        return cost.work + ALL_GATHER * float(cost.share + busiest) / 2

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


def _improved(chunks: _Chunks, start: Deal, weight: int, budget: int) -> tuple[Deal, int]:
    """A deal after exchanges of chunks, and how many exchanges were considered.

    An exchange gains the rows that need not travel, those that it takes off ranks that send too many, and the work that
    it takes off ranks that have too much. That has a weight, which grows from sweep to sweep until no rank has.
    """
    deal = start.copy()
    world, number = deal.shape
    ranks = _Ranks(chunks, deal)
    sweep, unchanged, considered = _rounds(world), 0, 0
    for turn in range(_SWEEPS * len(sweep)):
        if considered >= budget or unchanged >= len(sweep):
            break
        if turn % len(sweep) == 0:
            ranks.count_sent()
        a, b = sweep[turn % len(sweep)]
        unchanged = 0 if ranks.exchange(a, b, weight) else unchanged + 1
        considered += len(a) * number * number
        if (turn + 1) % len(sweep) == 0 and ranks.above:
            weight, unchanged = 4 * weight, 0
    return deal, considered


class _Ranks:
    """The ranks' chunks and work, which exchanges change in place."""

    def __init__(self, chunks: _Chunks, deal: Deal) -> None:
        self.chunks, self.deal = chunks, deal
        self.work = chunks.pairs[deal].sum(1)
        self.most = np.floor(_TOLERANCE * self.work.mean())
        self.row = max(1.0, np.floor(self.work.sum() / chunks.length))  # pairs that a row costs as much as

    def count_sent(self) -> None:
        """Count the rows that each chunk sends. Exchanges change them little, so it is done once a sweep."""
        self.popular = self.chunks.sent(self.deal)
        self.sent = self.popular[self.deal].sum(1)
        self.most_sent = np.floor(_SENT * self.sent.mean())

    @property
    def above(self) -> bool:
        """True if a rank has more work than is aimed at."""
        return bool(self.work.max() > self.most)

    def exchange(self, a: Numbers, b: Numbers, weight: int) -> bool:
        """Make the best exchange between each rank of ``a`` and its partner in ``b``, if it gains; True if any does."""
        chunks, mine, theirs = self.chunks, self.deal[a], self.deal[b]
        given = chunks.pairs[mine][:, :, None] - chunks.pairs[theirs][:, None, :]
        moved = self.popular[mine][:, :, None] - self.popular[theirs][:, None, :]
        work, work_before = _excess(self.work[a], self.work[b], given, self.most)
        sent, sent_before = _excess(self.sent[a], self.sent[b], moved, self.most_sent)
        rows = chunks.gained(mine, theirs) + chunks.gained(theirs, mine).transpose(0, 2, 1)
        change = (self.row * (rows + sent) + weight * work).reshape(len(a), -1)
        best = change.argmin(1)
        better = np.flatnonzero(change[np.arange(len(a)), best] < self.row * sent_before + weight * work_before)
        i, j = np.divmod(best[better], mine.shape[1])
        a, b = a[better], b[better]
        for total, by in ((self.work, given), (self.sent, moved)):
            total[a] -= by[better, i, j]
            total[b] += by[better, i, j]
        self.deal[a, i], self.deal[b, j] = theirs[better, j], mine[better, i]
        for ranks in (a, b):
            self.deal[ranks] = np.sort(self.deal[ranks], 1)
        return bool(len(better))


def _excess(a: Floats, b: Floats, given: Floats, most: float) -> tuple[Floats, Floats]:
    """The sum of what two ranks have above ``most`` after each exchange, in which a gives b so much, and before it."""
    after = np.maximum(0, a[:, None, None] - given - most) + np.maximum(0, b[:, None, None] + given - most)
    return after, np.maximum(0, a - most) + np.maximum(0, b - most)


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
