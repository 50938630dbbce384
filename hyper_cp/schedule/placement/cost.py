"""The cost of a placement under a causal mask, from arrays: the pairs that ranks compute, the rows that they receive.

No schedule is built. Numbers are integers in float64, which adds them exactly in any order up to 2**53 (a sequence of
10**8 positions), so all ranks come to the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ranges import Documents, Numbers, Range, bounds

Floats = npt.NDArray[np.float64]

ALL_GATHER = 0.25
"""The time of an all-gather that is assumed, in units of the mean rank's computation: what travels can hide behind
computation, but all ranks wait for the fullest."""


class Pieces(NamedTuple):
    """Ranges of positions as queries. The first key that a causal query sees never lies before that of an earlier one,
    so ``low`` and ``stop`` ascend with the positions.

    Attributes:
        pairs: visible pairs of the queries of each range, in all batch rows together.
        low: the first key that any of these queries sees.
        stop: the end of the range: its last query sees itself.
    """

    pairs: Floats
    low: Floats
    stop: Floats


def boundaries_of(rows: Sequence[Documents]) -> list[Floats]:
    """The boundaries of documents as arrays."""
    return [np.asarray(row, dtype=np.float64) for row in rows]


def pieces(starts: Numbers, stops: Numbers, rows: Sequence[Floats], window: int | None) -> Pieces:
    """The cost of ranges, given by their starts and stops.

    Args:
        rows: see :func:`boundaries_of`.
        window: a query sees at most so many positions before its own; None: all of its document.
    """
    pairs, low = np.zeros(len(starts)), starts.astype(np.float64)
    for ends in rows:
        pairs += _pairs_below(ends, stops, window) - _pairs_below(ends, starts, window)
        first = ends[np.searchsorted(ends, starts, "right") - 1]
        low = np.minimum(low, first if window is None else np.maximum(first, starts - window))
    return Pieces(pairs, low, stops.astype(np.float64))


def _pairs_below(ends: Floats, positions: Numbers, window: int | None) -> Floats:
    """The visible pairs of all queries below each position."""

    def of_first(queries: Floats) -> Floats:  # of so many queries from the start of a document
        near = queries if window is None else np.minimum(queries, window + 1)
        return near * (near + 1) / 2 + (queries - near) * near

    whole = np.concatenate(([0.0], np.cumsum(of_first(np.diff(ends)))))
    document = np.searchsorted(ends, positions, "right") - 1
    found: Floats = whole[document] + of_first(positions - ends[document])
    return found


def seen(low: Floats, stop: Floats) -> Floats:
    """The number of keys that the queries of several pieces see, each key once. Pieces ascend along the last axis."""
    before = np.concatenate((np.zeros_like(stop[..., :1]), stop[..., :-1]), -1)
    found: Floats = (stop - np.maximum(low, before)).sum(-1)
    return found


class Cost(NamedTuple):
    """The cost of a placement.

    Attributes:
        pairs: visible pairs that each rank computes.
        rows: rows of keys and values that each rank receives if only needed ones travel.
        length: positions of the sequence.
    """

    pairs: Floats
    rows: Floats
    length: int

    @property
    def work(self) -> float:
        """The fullest rank's pairs over the mean: 1 is perfect."""
        return float(self.pairs.max() / max(1.0, self.pairs.mean()))

    @property
    def share(self) -> float:
        """The rows that travel as a share of what an all-gather moves."""
        return float(self.rows.sum() / max(1, self.length * (len(self.rows) - 1)))

    @property
    def total(self) -> float:
        """One number to compare placements by."""
        return self.work + ALL_GATHER * self.share


def cost(held: Sequence[Sequence[Range]], rows: Sequence[Documents], window: int | None) -> Cost:
    """The cost of a placement in which each rank holds these ranges, ascending."""
    pairs, received, length, ends = [], [], 0, boundaries_of(rows)
    for ranges in held:
        starts, stops = bounds(ranges).T
        own = pieces(starts, stops, ends, window)
        tokens = int((stops - starts).sum())
        pairs.append(own.pairs.sum())
        received.append(seen(own.low, own.stop) - tokens)
        length += tokens
    return Cost(np.array(pairs), np.array(received), length)
