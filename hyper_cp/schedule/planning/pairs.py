"""Visible pairs of queries and keys, counted by formula: what thousands of ranks owe without building a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ranges import Documents, Numbers, Range, before

FORMULAS = ("contiguous", "head_tail", "per_document")
"""Layouts whose work is known by formula for any number of ranks."""


class Pairs:
    """The visible pairs of packed documents, each causal or full.

    Args:
        documents: boundaries ``(0, ..., S)`` without empty documents.
        causal: True if a query sees the keys up to its own position, False if it sees all of its document.
    """

    def __init__(self, documents: Documents, causal: bool) -> None:
        self.ends, self.causal = np.asarray(documents, dtype=np.int64), causal
        self.lengths = np.diff(self.ends)
        self._before = before(self.lengths * (self.lengths + 1) // 2 if causal else self.lengths**2)
        self.total = int(self.upto(self.ends[-1:])[0])

    def document(self, positions: Numbers) -> Numbers:
        """The number of the document of each position; the end of the sequence belongs to the last."""
        found: Numbers = np.searchsorted(self.ends[1:-1], positions, "right")
        return found

    def upto(self, positions: Numbers) -> Numbers:
        """The pairs of all queries before each position."""
        at = self.document(positions)
        inside = positions - self.ends[at]
        pairs: Numbers = self._before[at] + (inside * (inside + 1) // 2 if self.causal else inside * self.lengths[at])
        return pairs

    def of(self, ranges: Numbers) -> Numbers:
        """The pairs of the queries of each range ``[n, 2]``."""
        return self.upto(ranges[:, 1]) - self.upto(ranges[:, 0])

    def by_rank(self, layout: str, ranks: int) -> Numbers:
        """The pairs that each rank of the ring owes: ``[ranks]``. For ``"per_document"`` all owe the mean."""
        if layout == "per_document":
            return np.full(ranks, -(-self.total // ranks))
        chunks = 2 if layout == "head_tail" else 1
        size = int(self.ends[-1]) // (chunks * ranks)
        starts = np.arange(chunks * ranks) * size
        pairs = self.of(np.stack((starts, starts + size), 1))
        # The layout gives chunks r and 2n-1-r to rank r.
        return pairs if chunks == 1 else pairs[:ranks] + pairs[ranks:][::-1]

    def between(self, queries: Range, keys: Range) -> int:
        """The pairs of the queries of one range with the keys of another that ends before it begins, or of itself."""
        ends, (low, high) = self.ends, queries
        if queries == keys:
            first = int(self.document(np.array([low]))[0])
            cut = ends[first : first + 1]
            hidden = (low - int(cut[0])) * (min(high, int(ends[first + 1])) - low)
            total = int(self.of(np.array([queries]))[0])
            if not self.causal:  # keys behind the range are hidden as well
                last = int(self.document(np.array([high - 1]))[0])
                hidden += (int(ends[last + 1]) - high) * (high - max(low, int(ends[last])))
            return total - hidden
        at = int(self.document(np.array([low]))[0])
        rows = min(high, int(ends[at + 1])) - low
        return rows * max(0, keys[1] - max(keys[0], int(ends[at])))

    def visible(self, ranges: Sequence[Range]) -> list[Range]:
        """The keys that ascending ranges of queries see, joined."""
        found: list[Range] = []
        for low, high in ranges:
            first, last = self.document(np.array([low, high - 1])).tolist()
            start, stop = int(self.ends[first]), high if self.causal else int(self.ends[last + 1])
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            else:
                found.append((start, stop))
        return found

    def local_and_remote(self, ranges: Sequence[Range]) -> tuple[float, float]:
        """Pairs of a rank's queries with its own keys, and the rows of other ranks that they see, for ascending
        ranges."""
        local = sum(self.between(own, own) for own in ranges)
        crossing = sum(self.between(q, k) for i, q in enumerate(ranges) for k in ranges[:i])
        seen = sum(stop - start for start, stop in self.visible(ranges))
        own = sum(stop - start for start, stop in ranges)
        return float(local + crossing * (1 if self.causal else 2)), float(seen - own)

    def merged_rows(self, ranges: Sequence[Range], chunk: int, ring: int) -> float:
        """Query rows of a rank, each as often as another rank's share has keys for it, if shares come in chunks."""
        rows = 0
        for low, high in ranges:
            at = int(self.document(np.array([low]))[0])
            start, stop = int(self.ends[at]), int(self.ends[at + 1])
            rows += (min(high, stop) - low) * min(ring - 1, -(-(low - start) // chunk))
        return float(rows if self.causal else min(2 * rows, (ring - 1) * sum(b - a for a, b in ranges)))


def held(layout: str, rank: int, ranks: int, length: int) -> list[Range]:
    """The positions of one rank of the ring in ``"contiguous"`` or ``"head_tail"``."""
    if layout == "contiguous":
        size = length // ranks
        return [(rank * size, (rank + 1) * size)]
    size = length // (2 * ranks)
    head, tail = rank, 2 * ranks - 1 - rank
    ranges = [(head * size, (head + 1) * size), (tail * size, (tail + 1) * size)]
    return ranges if head + 1 < tail else [(ranges[0][0], ranges[1][1])]


def hops(layout: str, ranks: int, length: int, pairs: Pairs) -> int:
    """The hops of the ring: the distance of the furthest block that any rank needs."""
    size = length // (ranks if layout == "contiguous" else 2 * ranks)
    if ranks == 1 or (layout != "per_document" and np.isin(np.arange(size, length, size), pairs.ends).all()):
        return 0  # every chunk begins with a document, so nobody needs another rank's keys
    if layout != "contiguous" or not pairs.causal:
        return ranks - 1
    starts = np.arange(ranks) * size
    first = pairs.ends[pairs.document(starts)]
    return int((np.arange(ranks) - first // size).max())
