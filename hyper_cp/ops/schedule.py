"""The schedule: which tiles a rank owes, in which order, needing which keys. Pure Python, no tensors.

Modes differ here only in the order in which key blocks are visited (:func:`_visits`); layouts and
load balance only in which global positions are held; masks only in how a rectangle is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .layout import Range, merge_ranges

Band = tuple[int | None, int | None]
"""``(lower, upper)``: key j is visible to query i iff ``lower <= j - i <= upper``; None: no bound."""

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)

KV_EXCHANGES = ("all_gather", "ring")


@dataclass(frozen=True)
class Tile:
    """One product: rows ``q`` of the rank's queries with rows ``k`` of a step's keys, under ``band``
    (in the coordinates of the tile)."""

    q: Range
    k: Range
    band: Band = FULL

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
                min(cols - 1, cols if upper is None else i + upper)
                - max(0, 0 if lower is None else i + lower)
                + 1,
            )
            for i in range(rows)
        )


@dataclass(frozen=True)
class Step:
    """Tiles over the key block that arrives at this step. ``take``: the ranges of that block they
    use, concatenated; tiles count keys from the start of that concatenation."""

    take: tuple[Range, ...]
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
    all ranks."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    hops: int
    swap: bool

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


def _shift(band: Band, by: int) -> Band:
    lower, upper = band
    return (None if lower is None else lower + by, None if upper is None else upper + by)


def _visible(q: tuple[Range, ...], k: tuple[Range, ...], band: Band) -> bool:
    """Whether any position of ``q`` sees any of ``k``."""
    return any(next(cut(a, b, _shift(band, a[0] - b[0])), None) is not None for a in q for b in k)


def _joined(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Join full tiles that are neighbours: fewer, larger kernels and fewer merges."""

    def join(tiles: list[Tile], along: str) -> list[Tile]:
        def key(t: Tile) -> tuple[Range, Range]:
            return (t.q, t.k) if along == "k" else (t.k, t.q)

        out: list[Tile] = []
        for tile in sorted(tiles, key=key):
            last = out[-1] if out else None
            if last and last.band == tile.band == FULL and key(last)[0] == key(tile)[0]:
                (_, (a, b)), (_, (c, d)) = key(last), key(tile)
                if b == c:
                    out[-1] = Tile(tile.q, (a, d)) if along == "k" else Tile((a, d), tile.k)
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


def _step(queries: tuple[Range, ...], blocks: list[tuple[int, Range]], band: Band) -> Step:
    """Tiles of the queries at global ``queries`` over the keys at ``(block offset, global range)``."""
    blocks = sorted(blocks, key=lambda b: b[1])
    same = [r for _, r in blocks] == list(queries) == list(merge_ranges(queries))
    if same and band == CAUSAL:
        # The same ascending positions on both sides: causal by local index, in one tile.
        length = sum(stop - start for start, stop in queries)
        if blocks == _with_offsets(queries, blocks[0][0]):
            offset = blocks[0][0]
            return Step(((offset, offset + length),), (Tile((0, length), (0, length), CAUSAL),))
    tiles = [
        tile
        for q_offset, q in _with_offsets(queries)
        for k_offset, k in blocks
        for tile in cut(
            (q_offset, q_offset + q[1] - q[0]),
            (k_offset, k_offset + k[1] - k[0]),
            _shift(band, q[0] - k[0]),
        )
    ]
    # Used keys in ascending global order, so that what a query range needs is one prefix of them.
    take: list[Range] = []
    for offset, (start, stop) in blocks:
        used = [t.k for t in tiles if offset <= t.k[0] < offset + stop - start]
        if used:
            first, last = min(u[0] for u in used), max(u[1] for u in used)
            if take and take[-1][1] == first:
                take[-1] = (take[-1][0], last)
            else:
                take.append((first, last))

    def packed(k: Range) -> Range:
        before = 0
        for start, stop in take:
            if start <= k[0] < stop:
                return (before + k[0] - start, before + k[1] - start)
            before += stop - start
        raise AssertionError("a tile uses keys that were not taken")  # unreachable by construction

    return Step(tuple(take), _joined([Tile(t.q, packed(t.k), t.band) for t in tiles]))


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
                part.extend(cut((start, stop), tile.k, _shift(tile.band, start - tile.q[0])))
    return Step(step.take, tuple(sorted(first, key=_by_rows))), Step(step.take, tuple(second))


def _by_rows(tile: Tile) -> tuple[Range, Range]:
    return tile.q, tile.k


@lru_cache(maxsize=1024)
def build(
    held: tuple[tuple[Range, ...], ...],
    rank: int,
    kv_exchange: str,
    load_balance: bool,
    band: Band,
) -> Schedule:
    """The schedule of ring rank ``rank``, where ring rank r holds global positions ``held[r]``.

    ``band``: the mask in global positions (``CAUSAL``, ``FULL`` or a window). ``load_balance``
    exchanges the tail half of queries with rank ``size-1-rank`` under a causal mask; without one
    work is balanced already and nothing moves.
    """
    size = len(held)
    swap = load_balance and size > 1 and band[1] is not None
    queries = [_swapped(held, r) if swap else held[r] for r in range(size)]

    def steps_of(r: int) -> Iterator[list[tuple[int, Range]]]:
        seen: set[int] = set()
        for sources in _visits(kv_exchange, r, size):
            blocks, offset = [], 0
            for source in sources:
                ranges = _with_offsets(held[source], offset)
                offset += sum(stop - start for start, stop in held[source])
                if source not in seen:
                    blocks += ranges
            seen.update(sources)
            yield blocks

    def last_needed(r: int) -> int:
        needed = [i for i, b in enumerate(steps_of(r)) if _visible(queries[r], tuple(x for _, x in b), band)]
        return max(needed, default=0)

    hops = max(last_needed(r) for r in range(size)) if size > 1 else 0
    local, *arriving = (_step(queries[rank], b, band) for b in list(steps_of(rank))[: hops + 1])
    whole = (local, *arriving, Step((), ()))
    if not hops:
        return Schedule(whole, whole, 0, swap)
    rows = sum(stop - start for start, stop in queries[rank])
    first, second = _halves(local, rows // 2 if swap else rows)
    halved = (first, *arriving, second)
    return Schedule(halved if swap else whole, halved, hops, swap)


def _swapped(held: tuple[tuple[Range, ...], ...], rank: int) -> tuple[Range, ...]:
    """Positions of the queries of ``rank`` after the tail exchange: own head, partner's tail."""
    ((start, stop),), ((partner_start, partner_stop),) = held[rank], held[len(held) - 1 - rank]
    head = (start, start + (stop - start) // 2)
    tail = (partner_start + (partner_stop - partner_start) // 2, partner_stop)
    return merge_ranges((head, tail)) if head[1] == tail[0] else (head, tail)
