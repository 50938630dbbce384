"""The schedule: which tiles a rank owes, in which order, needing which keys. Pure Python, no tensors.

Modes differ here only in the order in which key blocks are visited (:func:`_visits`); layouts and
load balance only in which global positions are held; masks only in how a rectangle is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .layout import Range, merge_ranges

Band = tuple[int | None, int | None]
"""``(lower, upper)``: key j is visible to query i iff ``lower <= j - i <= upper``; None: no bound."""

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)

KV_EXCHANGES = ("all_gather", "ring")

Documents = tuple[int, ...]
"""Borders of the documents packed into one sequence: ascending, from 0 to its length. Only
positions of the same document see each other."""


@dataclass(frozen=True)
class Tile:
    """One product: rows ``q`` of the rank's queries with rows ``k`` of a step's keys, under ``band``
    (in the coordinates of the tile), of the batch rows ``batch`` (None: all of them)."""

    q: Range
    k: Range
    band: Band = FULL
    batch: Range | None = None

    @property
    def kind(self) -> str:
        square = self.q[1] - self.q[0] == self.k[1] - self.k[0]
        return "full" if self.band == FULL else "causal" if self.band == CAUSAL and square else "windowed"

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
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


@dataclass(frozen=True)
class Step:
    """Tiles over the key block that arrives at this step. ``take``: the ranges of that block they
    use, concatenated; tiles count keys from the start of that concatenation. ``keys``: the global
    positions of these keys."""

    take: tuple[Range, ...]
    keys: tuple[Range, ...]
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        return sum(tile.area for tile in self.tiles)


@dataclass(frozen=True)
class Schedule:
    """What one ring rank does, a step per block: the local one first, those that arrive, and the
    local one again. This last step hides transfers that bring results home: of key gradients in
    ``backward``, of the tails if ``swap`` (the tail half of queries changes places; none of it is
    in the last step). Where there are none it is empty. ``hops``: how many blocks arrive, equal on
    all ranks. ``queries``: the global positions this rank attends."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    hops: int
    swap: bool
    queries: tuple[Range, ...]

    @property
    def area(self) -> int:
        return sum(step.area for step in self.forward)


# --------------------------------------------------------------------------- geometry


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
    """The band of what both leave visible."""
    lower = [x for x in (a[0], b[0]) if x is not None]
    upper = [x for x in (a[1], b[1]) if x is not None]
    return max(lower, default=None), min(upper, default=None)


def _shift(band: Band, by: int) -> Band:
    lower, upper = band
    return (None if lower is None else lower + by, None if upper is None else upper + by)


def _same_document(q: Range, k: Range, documents: Documents | None) -> Iterator[tuple[Range, Range]]:
    """The rectangles of ``q x k`` whose rows and columns belong to one document."""
    if documents is None:
        yield q, k
        return
    low, high = max(q[0], k[0]), min(q[1], k[1])
    # Documents that end behind both starts and begin before both ends meet both ranges.
    for i in range(bisect_right(documents, low) - 1, len(documents) - 1):
        start, stop = documents[i], documents[i + 1]
        if start >= high:
            return
        if start < stop:
            yield (max(q[0], start), min(q[1], stop)), (max(k[0], start), min(k[1], stop))


def _visible(q: tuple[Range, ...], k: tuple[Range, ...], band: Band, documents: Documents | None) -> bool:
    """Whether any position of ``q`` sees any of ``k``."""
    return any(
        next(cut(c, d, _shift(band, c[0] - d[0])), None) is not None
        for a in q
        for b in k
        for c, d in _same_document(a, b, documents)
    )


def _joined(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Join full tiles that are neighbours: fewer, larger kernels and fewer merges."""

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

    return tuple(sorted(join(join(tiles, "k"), "q"), key=_by_rows))


# --------------------------------------------------------------------------- steps


def _with_offsets(ranges: tuple[Range, ...], offset: int = 0) -> list[tuple[int, Range]]:
    out = []
    for start, stop in ranges:
        out.append((offset, (start, stop)))
        offset += stop - start
    return out


def _step(
    queries: tuple[Range, ...],
    blocks: list[tuple[int, Range]],
    band: Band,
    documents: tuple[Documents, ...] | None,
) -> Step:
    """Tiles of the queries at global ``queries`` over the keys at ``(block offset, global range)``."""
    blocks = sorted(blocks, key=lambda b: b[1])
    if band == CAUSAL and documents is None and [r for _, r in blocks] == list(merge_ranges(queries)):
        # The same ascending positions on both sides: causal by local index, in one tile.
        length = sum(stop - start for start, stop in queries)
        offset = blocks[0][0]
        if merge_ranges(queries) == queries and blocks == _with_offsets(queries, offset):
            tile = Tile((0, length), (0, length), CAUSAL)
            return Step(((offset, offset + length),), queries, (tile,))
    tiles = [
        Tile(tile.q, tile.k, tile.band, batch)
        for batch, borders in _batch_rows(documents)
        for q_offset, q in _with_offsets(queries)
        for k_offset, k in blocks
        for c, d in _same_document(q, k, borders)
        for tile in cut(
            (q_offset + c[0] - q[0], q_offset + c[1] - q[0]),
            (k_offset + d[0] - k[0], k_offset + d[1] - k[0]),
            _shift(band, c[0] - d[0]),
        )
    ]
    # Used keys in ascending global order, so that what a query range needs is one prefix of them.
    take: list[Range] = []
    keys: list[Range] = []
    place: list[tuple[int, int]] = []  # (block offset, position among the taken), by block offset
    taken = 0
    for offset, (start, stop) in blocks:
        used = [t.k for t in tiles if offset <= t.k[0] < offset + stop - start]
        if not used:
            continue
        first, last = min(u[0] for u in used), max(u[1] for u in used)
        place.append((first, taken))
        taken += last - first
        keys.append((start + first - offset, start + last - offset))
        if take and take[-1][1] == first:
            take[-1] = (take[-1][0], last)
        else:
            take.append((first, last))
    place.sort()

    def packed(t: Tile) -> Tile:
        first, before = place[bisect_right(place, (t.k[0], taken)) - 1]
        return Tile(t.q, (before + t.k[0] - first, before + t.k[1] - first), t.band, t.batch)

    return Step(tuple(take), merge_ranges(keys), _joined([packed(t) for t in tiles]))


def _batch_rows(documents: tuple[Documents, ...] | None) -> list[tuple[Range | None, Documents | None]]:
    """Which batch rows have which documents; rows that share them, together."""
    if documents is None or len(documents) == 1:
        return [(None, documents[0] if documents else None)]
    return [((row, row + 1), borders) for row, borders in enumerate(documents)]


def _visits(kv_exchange: str, rank: int, size: int) -> list[tuple[int, ...]]:
    """Which ranks' keys arrive at each step: the only place where ring and all-gather differ."""
    if kv_exchange == "ring":
        return [((rank - hop) % size,) for hop in range(size)]
    return [(rank,), tuple(range(size))]


# Kernels are slower on fewer rows than this (CPU flash halves its block below 768).
_MIN_ROWS = 1024


def _halves(step: Step, rows: int) -> tuple[Step, Step]:
    """Cut a step in two. The second part has only queries below ``rows``: those behind a border
    between two tiles if there is one, else the later ones of a long tile; about half of the work
    of these queries (causal: the rows from 0.7, as 0.7^2 is half), or none of it."""
    movable = [t for t in step.tiles if t.q[1] <= rows]
    borders = sorted({t.q[1] for t in movable})
    length = borders[-1] if borders else 0
    if len(borders) > 1:
        area = sum(t.area for t in movable)
        row = min(borders[:-1], key=lambda b: abs(2 * sum(t.area for t in movable if t.q[1] <= b) - area))
    else:
        share = 0.7 if any(t.band == CAUSAL for t in movable) else 0.5
        grain = max(1, _MIN_ROWS // 8)
        row = min(round(length * share / grain) * grain, length - _MIN_ROWS)
        row = row if row >= _MIN_ROWS else length
    first: list[Tile] = [t for t in step.tiles if t.q[1] > rows]
    second: list[Tile] = []
    for tile in movable:
        for part, (low, high) in ((first, (0, row)), (second, (row, length))):
            start, stop = max(tile.q[0], low), min(tile.q[1], high)
            if start < stop:
                tiles = cut((start, stop), tile.k, _shift(tile.band, start - tile.q[0]))
                part.extend(Tile(t.q, t.k, t.band, tile.batch) for t in tiles)
    return (
        Step(step.take, step.keys, tuple(sorted(first, key=_by_rows))),
        Step(step.take, step.keys, tuple(second)),
    )


def _by_rows(tile: Tile) -> tuple[Range, Range, Range]:
    return tile.batch or (0, 0), tile.q, tile.k


@lru_cache(maxsize=1024)
def build(
    held: tuple[tuple[Range, ...], ...],
    held_keys: tuple[tuple[Range, ...], ...],
    rank: int,
    kv_exchange: str,
    load_balance: bool,
    band: Band,
    documents: tuple[Documents, ...] | None = None,
) -> Schedule:
    """The schedule of ring rank ``rank``, where ring rank r holds queries of global positions ``held[r]`` and keys
    of ``held_keys[r]`` (the same, but for cross-attention).

    ``band``: the mask in global positions (``CAUSAL``, ``FULL`` or a window). ``documents``: one for
    all batch rows, or one per row. ``load_balance`` exchanges the tail half of queries with rank
    ``size-1-rank`` where :func:`swaps` says that this balances the work.
    """
    size = len(held)
    swap = swaps(load_balance, size, band, sum(b - a for ranges in held for a, b in ranges))
    queries = [_swapped(held, r) if swap else held[r] for r in range(size)]

    def steps_of(r: int) -> Iterator[list[tuple[int, Range]]]:
        seen: set[int] = set()
        for sources in _visits(kv_exchange, r, size):
            blocks, offset = [], 0
            for source in sources:
                ranges = _with_offsets(held_keys[source], offset)
                offset += sum(stop - start for start, stop in held_keys[source])
                if source not in seen:
                    blocks += ranges
            seen.update(sources)
            yield blocks

    def needs(r: int, blocks: list[tuple[int, Range]]) -> bool:
        keys = tuple(ranges for _, ranges in blocks)
        return any(_visible(queries[r], keys, band, borders) for _, borders in _batch_rows(documents))

    hops = max(max((i for i, b in enumerate(steps_of(r)) if needs(r, b)), default=0) for r in range(size))
    local, *arriving = (_step(queries[rank], b, band, documents) for b in list(steps_of(rank))[: hops + 1])
    whole = (local, *arriving, Step((), (), ()))
    if not hops:
        return Schedule(whole, whole, 0, swap, queries[rank])
    rows = sum(stop - start for start, stop in queries[rank])
    first, second = _halves(local, rows // 2 if swap else rows)
    halved = (first, *arriving, second)
    return Schedule(halved if swap else whole, halved, hops, swap, queries[rank])


def swaps(load_balance: bool, size: int, band: Band, length: int) -> bool:
    """Whether tails of queries are exchanged: where later queries see more keys than earlier ones, that
    is, unless the mask is not causal or a window shorter than half of the sequence."""
    lower, upper = band
    return load_balance and size > 1 and upper is not None and (lower is None or -lower >= length // 2)


def _swapped(held: tuple[tuple[Range, ...], ...], rank: int) -> tuple[Range, ...]:
    """Positions of the queries of ``rank`` after the tail exchange: own head, partner's tail."""
    ((start, stop),), ((partner_start, partner_stop),) = held[rank], held[len(held) - 1 - rank]
    head = (start, start + (stop - start) // 2)
    tail = (partner_start + (partner_stop - partner_start) // 2, partner_stop)
    return merge_ranges((head, tail)) if head[1] == tail[0] else (head, tail)
