"""Tiles as geometry: rectangles of queries and keys, cut by bands and documents, joined and packed.

Pure Python, no tensors. Global positions come in, local ones go out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Documents, Range

Band = tuple[int | None, int | None]
"""``(lower, upper)``: key j is visible to query i iff ``lower <= j - i <= upper``; None: no bound."""

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)

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
            columns. ``band`` holds for each of them and is FULL, or CAUSAL if all are squares: a kernel takes them as
            one call with variable lengths.
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
        return tuple(Tile((q + r[0], q + r[1]), (k + c[0], k + c[1]), self.band, self.batch) for r, c in self.parts)

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        if self.parts is not None:
            return sum(tile.area for tile in self.rectangles)
        rows, cols = self.q[1] - self.q[0], self.k[1] - self.k[0]
        lower, upper = self.band
        if self.kind != "windowed":
            return rows * cols if self.kind == "full" else rows * (rows + 1) // 2
        return sum(
            max(
                0,
                min(cols - 1, cols if upper is None else i + upper) - max(0, 0 if lower is None else i + lower) + 1,
            )
            for i in range(rows)
        )


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


Placed = tuple[int, Range]
"""``(local offset, global range)``: positions that lie side by side."""


def pairs(
    queries: list[Placed], keys: list[Placed], documents: Documents | None
) -> Iterator[tuple[list[Placed], list[Placed]]]:
    """Queries and keys that may see each other, one document after the other."""
    if documents is None:
        yield queries, keys
        return
    theirs = _by_document(keys, documents)
    for document, pieces in _by_document(queries, documents).items():
        if document in theirs:
            yield pieces, theirs[document]


def _by_document(placed: list[Placed], documents: Documents) -> dict[int, list[Placed]]:
    found: dict[int, list[Placed]] = {}
    for offset, (start, stop) in placed:
        i = bisect_right(documents, start) - 1
        while start < stop:
            end = min(stop, documents[i + 1])
            found.setdefault(i, []).append((offset, (start, end)))
            offset, start, i = offset + end - start, end, i + 1
            while start < stop and documents[i + 1] <= start:  # empty documents
                i += 1
    return found


def cut_pairs(queries: list[Placed], keys: list[Placed], band: Band, batch: Range | None) -> Iterator[Tile]:
    """Tiles, in local coordinates, of everything in ``queries`` with everything in ``keys``."""
    length = _adjacent(queries) if band == CAUSAL else 0
    if length and [r for _, r in queries] == [r for _, r in keys] and _adjacent(keys):
        # The same ascending positions on both sides: causal by local index, in one tile.
        (q, _), (k, _) = queries[0], keys[0]
        yield Tile((q, q + length), (k, k + length), CAUSAL, batch)
        return
    for q_offset, (q0, q1) in queries:
        for k_offset, (k0, k1) in keys:
            rows, cols = (q_offset, q_offset + q1 - q0), (k_offset, k_offset + k1 - k0)
            for tile in cut(rows, cols, shift(band, q0 - k0)):
                yield Tile(tile.q, tile.k, tile.band, batch)


def _adjacent(placed: list[Placed]) -> int:
    """The length of ranges that lie side by side in ascending order, else 0."""
    end, last = placed[0][0], -1
    for offset, (start, stop) in placed:
        if offset != end or start < last:
            return 0
        end, last = end + stop - start, stop
    return end - placed[0][0]


def visible(queries: list[Placed], keys: list[Placed], band: Band, documents: Documents | None) -> bool:
    """True if any of the queries sees any of the keys."""
    return any(next(cut_pairs(q, k, band, None), None) for q, k in pairs(queries, keys, documents))


def joined(tiles: list[Tile]) -> tuple[Tile, ...]:
    """The tiles with neighbouring full ones joined: fewer, larger kernels and fewer merges."""

    def join(tiles: list[Tile], along: str) -> list[Tile]:
        def key(t: Tile) -> tuple[Range, Range, Range]:
            batch = t.batch or (0, 0)
            return (batch, t.q, t.k) if along == "k" else (batch, t.k, t.q)

        out: list[Tile] = []
        for tile in sorted(tiles, key=key):
            last = out[-1] if out else None
            if last and last.band == tile.band == FULL and key(last)[:2] == key(tile)[:2]:
                (*_, (a, b)), (*_, (c, d)) = key(last), key(tile)
                if b == c:
                    q, k = (tile.q, (a, d)) if along == "k" else ((a, d), tile.k)
                    out[-1] = Tile(q, k, FULL, tile.batch)
                    continue
            out.append(tile)
        return out

    return tuple(sorted(join(join(tiles, "k"), "q"), key=by_rows))


def with_offsets(ranges: tuple[Range, ...], offset: int = 0) -> list[Placed]:
    """Global ranges that lie side by side from the local ``offset`` on."""
    out: list[Placed] = []
    for start, stop in ranges:
        out.append((offset, (start, stop)))
        offset += stop - start
    return out


# The least share of the rows, and of the columns, of a tile with parts that the parts cover. Tails of documents are
# half of a rank's rows, a little less where documents do not split evenly.
_MIN_COVER = 0.4


class _Pack:
    """Tiles of one kind that follow each other in rows and in columns. None of them crosses the row ``half``."""

    def __init__(self, tile: Tile):
        self.tiles = [tile]
        self.rows, self.cols = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]

    def takes(self, tile: Tile, half: int) -> bool:
        first, last = self.tiles[0], self.tiles[-1]
        rows, cols = self.rows + tile.q[1] - tile.q[0], self.cols + tile.k[1] - tile.k[0]
        fits = (
            (tile.batch, tile.kind) == (last.batch, last.kind)
            and tile.q[0] >= last.q[1]
            and tile.k[0] >= last.k[1]
            and not first.q[0] < half < tile.q[1]
            and rows >= _MIN_COVER * (tile.q[1] - first.q[0])
            and cols >= _MIN_COVER * (tile.k[1] - first.k[0])
        )
        if fits:
            self.tiles.append(tile)
            self.rows, self.cols = rows, cols
        return fits

    def tile(self) -> Tile:
        first, last = self.tiles[0], self.tiles[-1]
        if first is last:
            return first
        (q, _), (k, _) = first.q, first.k
        parts = tuple(((t.q[0] - q, t.q[1] - q), (t.k[0] - k, t.k[1] - k)) for t in self.tiles)
        return Tile((q, last.q[1]), (k, last.k[1]), first.band, first.batch, parts)


def packed(tiles: tuple[Tile, ...], half: int = 0) -> tuple[Tile, ...]:
    """The same work in fewer tiles: those of one kind that follow each other become one tile with parts. Windowed tiles
    stay as they are, and no tile crosses the row ``half`` (0: no such row)."""
    packs: list[_Pack] = []
    for tile in sorted(tiles, key=by_rows):
        # Only the last few packs can take a tile: at most four tiles (of two kinds, in two batch rows or halves) lie
        # side by side in the same rows.
        if tile.kind == "windowed" or not any(pack.takes(tile, half) for pack in packs[-4:]):
            packs.append(_Pack(tile))
    return tuple(sorted((pack.tile() for pack in packs), key=by_rows))


def by_rows(tile: Tile) -> tuple[Range, Range, Range]:
    """The order in which tiles run: rows of queries first."""
    return tile.batch or (0, 0), tile.q, tile.k
