"""Tiles as geometry: rectangles of queries and keys, cut by bands and documents, joined and packed.

No tensors. Global positions come in, local ones go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..mesh.arguments import is_int
from .pairs import visible
from .ranges import Documents, Numbers, Range, before

Band = tuple[int | None, int | None]
"""``(lower, upper)``: key j is visible to query i iff ``lower <= j - i <= upper``; None: no bound."""

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)

BLOCK = 128
"""The rows and columns of a block that kernels work in, about: a smaller tile takes as long as a whole block."""

Part = tuple[Range, Range]
"""One rectangle of a tile: its rows and columns."""


@dataclass(frozen=True)
class Tile:
    """One product that a kernel computes: rows ``q`` of the rank's queries with rows ``k`` of a step's keys.

    Attributes:
        q, k: local rows; ``k`` counts from the start of what the step takes of its block.
        band: the visible pairs, relative to the tile's corner ``(q[0], k[0])``.
        batch: batch rows; None: all of them.
        parts: if given, only these rectangles of the tile are computed. They ascend and are disjoint in rows and in
            columns. ``band`` holds for each of them, relative to its bottom right corner (in squares both corners
            lie on one diagonal), as in a call with variable lengths.
    """

    q: Range
    k: Range
    band: Band = FULL
    batch: Range | None = None
    parts: tuple[Part, ...] | None = None

    @property
    def kind(self) -> str:
        square = self.parts is not None or self.q[1] - self.q[0] == self.k[1] - self.k[0]
        return "full" if self.band == FULL else "causal" if self.band == CAUSAL and square else "windowed"

    @property
    def rectangles(self) -> tuple[Tile, ...]:
        """The tile as tiles without parts."""
        if self.parts is None:
            return (self,)
        (q, _), (k, _) = self.q, self.k
        return tuple(
            Tile((q + r[0], q + r[1]), (k + c[0], k + c[1]), from_bottom_right(self.band, r, c), self.batch)
            for r, c in self.parts
        )

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        if self.parts is not None:
            return sum(tile.area for tile in self.rectangles)
        found: int = max(0, visible(self.q[1] - self.q[0], self.k[1] - self.k[0], self.band))
        return found

    @property
    def blocks(self) -> int:
        """Number of blocks of ``BLOCK`` x ``BLOCK`` pairs with visible ones, of a tile without parts."""
        rows, cols = (-(-(stop - start) // BLOCK) for start, stop in (self.q, self.k))
        lower, upper = self.band
        lower = None if lower is None else -(-(lower - BLOCK + 1) // BLOCK)
        found: int = visible(rows, cols, (lower, None if upper is None else (upper + BLOCK - 1) // BLOCK))
        return found


def check_window(window: Sequence[int | None] | None) -> tuple[int | None, int | None] | None:
    """``(left, right)`` with None for unbounded, or None for no window; else ``ValueError``."""
    if window is None:
        return None
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(w is not None and not is_int(w, -1) for w in window)
    ):
        raise ValueError(
            f"window={window!r} must be (left, right). A query sees that many positions before and after its own. Pass "
            "two ints >= 0, or None (or -1) for no bound"
        )
    left, right = (None if w == -1 else w for w in window)
    return None if left is None and right is None else (left, right)


def band_of(is_causal: bool, window: tuple[int | None, int | None] | None) -> Band:
    """The band of global positions that causality and a window leave visible."""
    left, right = window or (None, None)
    return (None if left is None else -left, 0 if is_causal else right)


def cut(q: Range, k: Range, band: Band) -> Iterator[Tile]:
    """Tiles of the rectangle ``q x k``, where ``band`` is relative to its corner ``(q[0], k[0])``.

    Rows and columns that see nothing are dropped. Without a lower bound the rest falls into a full
    tile left of the diagonal, a square causal tile and a full tile below it, at most.
    """
    (q0, q1), (k0, k1), (lower, upper) = q, k, band
    if upper is not None:  # rows above the diagonal's start, columns right of its end
        skip = max(0, -upper)
        q0, upper = q0 + skip, upper + skip
        lower = None if lower is None else lower + skip
        k1 = min(k1, k0 + q1 - q0 + upper)
    if lower is not None:  # columns left of the band, rows below its end
        skip = max(0, lower)
        k0, lower = k0 + skip, lower - skip
        upper = None if upper is None else upper - skip
        q1 = min(q1, q0 + k1 - k0 - lower)
    rows, cols = q1 - q0, k1 - k0
    if rows <= 0 or cols <= 0:
        return
    if upper is not None and upper >= cols - 1:
        upper = None
    if lower is not None and lower <= 1 - rows:
        lower = None
    if lower is not None or upper is None:
        yield Tile((q0, q1), (k0, k1), (lower, upper))
        return
    if upper:
        yield Tile((q0, q1), (k0, k0 + upper))
    start, size = k0 + upper, cols - upper
    yield Tile((q0, q0 + size), (start, k1), CAUSAL)
    if size < rows:
        yield Tile((q0 + size, q1), (start, k1))


def intersect(a: Band, b: Band) -> Band:
    """The band of the pairs that both bands leave visible."""
    lower = [x for x in (a[0], b[0]) if x is not None]
    upper = [x for x in (a[1], b[1]) if x is not None]
    return max(lower, default=None), min(upper, default=None)


def shift(band: Band, by: int) -> Band:
    """The band relative to a corner that lies ``by`` rows lower."""
    lower, upper = band
    return (None if lower is None else lower + by, None if upper is None else upper + by)


def from_bottom_right(band: Band, rows: Range, cols: Range) -> Band:
    """The band relative to the top left corner of a rectangle, given that relative to its bottom right corner, without
    bounds that hide nothing there."""
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    lower, upper = shift(band, width - height)
    return (
        None if lower is None or lower <= 1 - height else lower,
        None if upper is None or upper >= width - 1 else upper,
    )


# --------------------------------------------------------------------------- which queries see which keys, as arrays
#
# A *rectangle* is a row (q start, q stop, k start, k stop) of local positions.


def split(ranges: Numbers, documents: Documents) -> tuple[Numbers, Numbers, Numbers]:
    """Cut placed ranges where documents end: ``(pieces, document of each, index of the range it is a piece of)``."""
    ends = np.asarray(documents, dtype=np.int64)
    first = np.searchsorted(ends, ranges[:, 1], "right") - 1
    count = np.searchsorted(ends, ranges[:, 2], "left") - first
    parent = np.repeat(np.arange(len(ranges)), count)
    document = first[parent] + np.arange(len(parent)) - before(count)[parent]
    offset, start, stop = ranges[parent].T
    cut_start, cut_stop = np.maximum(start, ends[document]), np.minimum(stop, ends[document + 1])
    return np.column_stack((offset + cut_start - start, cut_start, cut_stop)), document, parent


class Seen:
    """Pairs of a placed range of queries and one of keys, in the same document and under the band.

    Args:
        queries, keys: placed ranges. Keys ascend in global order and do not overlap.
        documents: boundaries without empty documents; None: one document.
    """

    def __init__(self, queries: Numbers, keys: Numbers, band: Band, documents: Documents | None) -> None:
        lower, upper = band
        if documents is None:
            self.queries, self.keys, self.block = queries, keys, np.arange(len(keys))
            low, high = np.zeros(len(queries), np.int64), np.full(len(queries), len(keys))
        else:
            self.queries, q_document, _ = split(queries, documents)
            self.keys, k_document, self.block = split(keys, documents)
            low, high = (np.searchsorted(k_document, q_document, side) for side in ("left", "right"))
        if upper is not None:
            high = np.minimum(high, np.searchsorted(self.keys[:, 1], self.queries[:, 2] - 1 + upper, "right"))
        if lower is not None:
            low = np.maximum(low, np.searchsorted(self.keys[:, 2], self.queries[:, 1] + lower, "right"))
        self.band, self.low, self.count = band, low, np.maximum(high - low, 0)

    def rectangles(self) -> tuple[Numbers, Numbers, list[tuple[int, Tile]]]:
        """All visible pairs: full rectangles ``[n, 4]`` and the key block of each, and ``(key block, tile)`` of the
        rectangles that the band cuts."""
        lower, upper = self.band
        q = np.repeat(np.arange(len(self.queries)), self.count)
        k = self.low[q] + np.arange(len(q)) - before(self.count)[q]
        (q_offset, q_start, q_stop), (k_offset, k_start, k_stop) = self.queries[q].T, self.keys[k].T
        full = np.ones(len(q), dtype=bool)
        if upper is not None:
            full &= k_stop - 1 <= q_start + upper
        if lower is not None:
            full &= k_start >= q_stop - 1 + lower
        found = np.column_stack((q_offset, q_offset + q_stop - q_start, k_offset, k_offset + k_stop - k_start))
        block, distance = self.block[k], q_start - k_start
        cuts = [
            (at, tile)
            for (q0, q1, k0, k1), at, by in zip(
                found[~full].tolist(), block[~full].tolist(), distance[~full].tolist(), strict=True
            )
            for tile in cut((q0, q1), (k0, k1), shift(self.band, by))
        ]
        return found[full], block[full], cuts


def seen_keys(queries: Numbers, band: Band, documents: Documents | None) -> Numbers:
    """Global ranges of the keys that placed queries see, one for each of their ranges in each document."""
    found = np.tile(np.array([0, np.iinfo(np.int64).max]), (len(queries), 1))
    if documents is not None:
        queries, document, _ = split(queries, documents)
        ends = np.asarray(documents, dtype=np.int64)
        found = np.stack((ends[document], ends[document + 1]), 1)
    lower, upper = band
    if lower is not None:
        found[:, 0] = np.maximum(found[:, 0], queries[:, 1] + lower)
    if upper is not None:
        found[:, 1] = np.minimum(found[:, 1], queries[:, 2] + upper)
    return found[found[:, 0] < found[:, 1]]


def within(keys: Numbers, ranges: Numbers) -> tuple[Numbers, Numbers]:
    """The parts of placed ranges that lie in ``ranges``, both ascending in global order, and the number of the placed
    range of each."""
    low = np.searchsorted(keys[:, 2], ranges[:, 0], "right")
    count = np.maximum(np.searchsorted(keys[:, 1], ranges[:, 1], "left") - low, 0)
    i = np.repeat(np.arange(len(ranges)), count)
    at = low[i] + np.arange(len(i)) - before(count)[i]
    start, stop = np.maximum(keys[at, 1], ranges[i, 0]), np.minimum(keys[at, 2], ranges[i, 1])
    return np.stack((keys[at, 0] + start - keys[at, 1], start, stop), 1), at


def same_positions(ranges: Numbers, documents: Documents | None) -> list[Tile]:
    """Causal tiles of ascending positions with themselves: each document is causal by local index."""
    if documents is not None:
        pieces, document, _ = split(ranges, documents)
        first = np.concatenate(([True], document[1:] != document[:-1]))
    else:
        pieces, first = ranges, np.arange(len(ranges)) == 0
    starts = pieces[first, 0].tolist()
    end = int(pieces[-1, 0] + pieces[-1, 2] - pieces[-1, 1])
    return [Tile(r, r, CAUSAL) for r in zip(starts, [*starts[1:], end], strict=True)]


def joined(found: Numbers) -> list[Tile]:
    """Full tiles of rectangles, neighbours joined: fewer, larger kernels and fewer merges."""
    for a, b in ((0, 2), (2, 0)):  # along keys where queries are the same, then along queries where keys are the same
        found = found[np.lexsort((found[:, b], found[:, a + 1], found[:, a]))]
        same = (found[1:, a] == found[:-1, a]) & (found[1:, a + 1] == found[:-1, a + 1])
        first = np.concatenate(([True], ~(same & (found[1:, b] == found[:-1, b + 1]))))[: len(found)]
        last = np.concatenate((first[1:], [True]))[: len(found)]
        ends = found[last, b + 1]
        found = found[first]
        found[:, b + 1] = ends
    return [Tile((q0, q1), (k0, k1), FULL) for q0, q1, k0, k1 in found.tolist()]


# --------------------------------------------------------------------------- several tiles in one

# The least share of the rows, and of the columns, of a tile with parts that the parts cover. Tails of documents are
# half of a rank's rows, a little less where documents do not split evenly.
_MIN_COVER = 0.4

_LATEST = 6


class _Bound:
    """One bound of a band that holds in several rectangles, at one distance from their bottom right corners.

    A rectangle with this bound fixes its value. One without takes any value that hides nothing in it.
    """

    __slots__ = ("least", "value")

    def __init__(self) -> None:
        self.value: int | None = None
        self.least = 0

    def fits(self, value: int | None, least: int) -> bool:
        """True if a rectangle with the bound ``value`` fits; None: bounds from ``least`` on hide nothing in it."""
        if value is None:
            return self.value is None or self.value >= least
        return value == self.value or (self.value is None and value >= self.least)

    def add(self, value: int | None, least: int) -> None:
        """Add that rectangle."""
        if value is None:
            self.least = max(self.least, least)
        else:
            self.value = value


class _Pack:
    """Tiles that follow each other in rows and in columns, and that one band cuts. None crosses the row ``half``. Full
    tiles stay among themselves: they are faster without a band."""

    __slots__ = ("cols", "end", "group", "left", "right", "rows", "start", "tiles")

    def __init__(self, tile: Tile) -> None:
        self.tiles: list[Tile] = []
        self.start = self.end = tile.q[0], tile.k[0]
        self.group = tile.band == FULL, tile.batch
        self.left, self.right = _Bound(), _Bound()
        self.rows = self.cols = 0
        self.try_add(tile, 0)

    def try_add(self, tile: Tile, half: int) -> bool:
        """Add the tile if it fits; return True if it does."""
        (q0, q1), (k0, k1), (start, col), (end, end_col) = tile.q, tile.k, self.start, self.end
        rows, cols, (left, right) = q1 - q0, k1 - k0, _left_and_right(tile)
        fits = (
            q0 >= end
            and k0 >= end_col
            and (tile.band == FULL, tile.batch) == self.group
            and not start < half < q1
            and self.rows + rows >= _MIN_COVER * (q1 - start)
            and self.cols + cols >= _MIN_COVER * (k1 - col)
            and self.left.fits(left, cols - 1)
            and self.right.fits(right, rows - 1)
        )
        if fits:
            self.left.add(left, cols - 1)
            self.right.add(right, rows - 1)
            self.tiles.append(tile)
            self.rows, self.cols, self.end = self.rows + rows, self.cols + cols, (q1, k1)
        return fits

    def tile(self) -> Tile:
        first = self.tiles[0]
        if len(self.tiles) == 1:
            return first
        (q, k), (q1, k1) = self.start, self.end
        parts = tuple(((t.q[0] - q, t.q[1] - q), (t.k[0] - k, t.k[1] - k)) for t in self.tiles)
        left, right = self.left.value, self.right.value
        return Tile((q, q1), (k, k1), (None if left is None else -left, right), first.batch, parts)


def _left_and_right(tile: Tile) -> tuple[int | None, int | None]:
    """The numbers of keys that a query sees before and after the diagonal that ends at the bottom right corner."""
    lower, upper = shift(tile.band, tile.q[1] - tile.q[0] - tile.k[1] + tile.k[0])
    return None if lower is None else -lower, upper


def packed(tiles: tuple[Tile, ...], half: int = 0) -> tuple[Tile, ...]:
    """The same work in fewer tiles: those that follow each other, and that one band cuts, become one tile with parts.
    No tile crosses the row ``half`` (0: no such row)."""
    packs: list[_Pack] = []
    for tile in sorted(tiles, key=by_rows):
        # Only the last few packs can have room for a tile: few tiles (of two kinds, in two batch rows or halves, before
        # and on the diagonal of a window) lie side by side in the same rows.
        if not any(pack.try_add(tile, half) for pack in packs[-_LATEST:]):
            packs.append(_Pack(tile))
    return tuple(sorted((pack.tile() for pack in packs), key=by_rows))


def by_rows(tile: Tile) -> tuple[Range, Range, Range]:
    """The order in which tiles run: rows of queries first."""
    return tile.batch or (0, 0), tile.q, tile.k
