"""Numbers of visible pairs of a query and a key, and of the rows that they need, by formula: no tile is cut.

A band is relative to the corner of its rectangle, as in :mod:`tiles`. Numbers are integers; where they are added in
float64, it adds them exactly in any order up to 2**53 (a sequence of 10**8 positions), so all ranks find the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .ranges import Documents, Numbers, Range, before, bounds

Floats = npt.NDArray[np.float64]

ALL_GATHER = 0.25
"""The time of an all-gather that is assumed, in units of the mean rank's computation: what travels can hide behind
computation, but all ranks wait for the fullest."""

# --------------------------------------------------------------------------- visible pairs


def visible(rows: Any, cols: Any, band: tuple[Any, Any]) -> Any:
    """The visible pairs of a rectangle.

    Args:
        rows, cols, band: ints, or arrays of as many rectangles; None in ``band``: no bound.
    """

    def below(bound: Any) -> Any:  # pairs of query i and key j with j - i <= bound
        ends = _triangle(rows + bound) - _triangle(bound)
        return ends - _triangle(rows + bound - cols) + _triangle(bound - cols)  # less what lies right of the rectangle

    lower, upper = band
    found = rows * cols if upper is None else below(upper)
    return found if lower is None else found - below(lower - 1)


def _triangle(n: Any) -> Any:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2 * (n > 0)


def document_of(ends: Numbers, positions: Numbers) -> Numbers:
    """The number of the document of each position; the end of the sequence belongs to the last."""
    found: Numbers = np.searchsorted(ends[1:-1], positions, "right")
    return found


def visible_before(ends: Numbers, positions: Numbers, band: tuple[Any, Any]) -> Numbers:
    """The visible pairs of all queries before each position, in documents with the boundaries ``ends``."""
    lengths, at = np.diff(ends), document_of(ends, positions)
    found: Numbers = before(visible(lengths, lengths, band))[at] + visible(positions - ends[at], lengths[at], band)
    return found


def visible_between(ends: Numbers, queries: Range, keys: Range, band: tuple[Any, Any]) -> int:
    """The visible pairs of the queries of one range and the keys of another."""
    (q0, q1), (k0, k1) = ((np.maximum(r[0], ends[:-1]), np.minimum(r[1], ends[1:])) for r in (queries, keys))
    shifted = tuple(None if bound is None else bound + q0 - k0 for bound in band)
    return int(visible(np.maximum(q1 - q0, 0), np.maximum(k1 - k0, 0), shifted).sum())  # type: ignore[arg-type]


# --------------------------------------------------------------------------- what ranks compute and receive


class Pieces(NamedTuple):
    """Ranges of positions as queries. Keys that a later query sees never begin or end before those of an earlier one,
    so ``low`` and ``stop`` ascend with the positions.

    Attributes:
        pairs: visible pairs of the queries of each range, in all batch rows together.
        low, stop: the first key that any of these queries sees, and the end of the last one.
    """

    pairs: Floats
    low: Floats
    stop: Floats


def pieces(starts: Numbers, stops: Numbers, rows: Sequence[Documents], band: tuple[Any, Any]) -> Pieces:
    """The cost of ranges, given by their starts and stops. In ``band`` every query sees itself."""
    lower, upper = band
    pairs, low, stop = np.zeros(len(starts)), starts, stops
    for boundaries in rows:
        ends = np.asarray(boundaries, dtype=np.int64)
        pairs += visible_before(ends, stops, band) - visible_before(ends, starts, band)
        first, last = ends[document_of(ends, starts)], ends[document_of(ends, stops - 1) + 1]
        low = np.minimum(low, first if lower is None else np.maximum(first, starts + lower))
        stop = np.maximum(stop, last if upper is None else np.minimum(last, stops + upper))
    return Pieces(pairs, low.astype(np.float64), stop.astype(np.float64))


def seen(low: Floats, stop: Floats, first: Numbers) -> Floats:
    """The number of keys that the queries of each rank see, each key once.

    Args:
        low, stop: of ascending pieces, rank by rank.
        first: the first piece of each rank.
    """
    earlier = np.concatenate((np.zeros(1), stop[:-1]))
    earlier[first] = 0
    found: Floats = np.add.reduceat(stop - np.maximum(low, earlier), first)
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


def cost(held: Sequence[Sequence[Range]], rows: Sequence[Documents], band: tuple[Any, Any]) -> Cost:
    """The cost of a placement in which each rank holds these ranges, ascending."""
    each = [bounds(ranges) for ranges in held]
    first = before(np.array([len(ranges) for ranges in each]))
    starts, stops = np.concatenate(each).T
    own = pieces(starts, stops, rows, band)
    received = seen(own.low, own.stop, first) - np.add.reduceat(stops - starts, first)
    return Cost(np.add.reduceat(own.pairs, first), received, int((stops - starts).sum()))
