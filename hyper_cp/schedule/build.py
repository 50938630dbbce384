"""The schedule: which tiles a rank owes, in which order, needing which keys. Pure Python, no tensors.

Modes differ here only in the order in which key blocks are visited (:func:`_visits`); layouts and
load balance only in which global positions are held; masks only in how a rectangle is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .layout import Documents, Range, merge_ranges
from .tiles import (
    CAUSAL,
    Band,
    Placed,
    Tile,
    by_rows,
    cut,
    cut_pairs,
    joined,
    packed,
    pairs,
    shift,
    visible,
    with_offsets,
)

KV_EXCHANGES = ("all_gather", "ring", "replicated")
"""How keys and values reach a rank; replicated: every rank holds all of them, nothing travels."""


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


# --------------------------------------------------------------------------- steps


def _step(
    queries: tuple[Range, ...], blocks: list[Placed], band: Band, documents: tuple[Documents, ...] | None
) -> Step:
    """Tiles of the queries at global ``queries`` over the keys in ``blocks``."""
    blocks = sorted(blocks, key=lambda b: b[1])
    tiles = [
        tile
        for batch, borders in _batch_rows(documents)
        for q, k in pairs(with_offsets(queries), blocks, borders)
        for tile in cut_pairs(q, k, band, batch)
    ]
    # Used keys in ascending global order, so that what a query range needs is one prefix of them.
    spans = _spans([t.k for t in tiles], blocks)
    take: list[Range] = []
    keys: list[Range] = []
    place: list[tuple[int, int]] = []  # (block offset, position among the taken), by block offset
    taken = 0
    for (offset, (start, _)), span in zip(blocks, spans, strict=True):
        if span is None:
            continue
        first, last = span
        place.append((first, taken))
        taken += last - first
        keys.append((start + first - offset, start + last - offset))
        if take and take[-1][1] == first:
            take[-1] = (take[-1][0], last)
        else:
            take.append((first, last))
    place.sort()

    def among_taken(t: Tile) -> Tile:
        first, before = place[bisect_right(place, (t.k[0], taken)) - 1]
        return Tile(t.q, (before + t.k[0] - first, before + t.k[1] - first), t.band, t.batch)

    return Step(tuple(take), merge_ranges(keys), joined([among_taken(t) for t in tiles]))


def _spans(used: list[Range], blocks: list[Placed]) -> list[Range | None]:
    """Of each block, from the first to the last position that is in one of the ``used`` local ranges."""
    order = sorted(range(len(blocks)), key=lambda i: blocks[i][0])
    starts = [blocks[i][0] for i in order]
    spans: list[Range | None] = [None] * len(blocks)
    for low, high in set(used):
        at = bisect_right(starts, low) - 1
        while at < len(order) and starts[at] < high:  # a tile may use several blocks that lie side by side
            i = order[at]
            offset, (start, stop) = blocks[i]
            first, last = max(low, offset), min(high, offset + stop - start)
            before = spans[i]
            spans[i] = (first, last) if before is None else (min(first, before[0]), max(last, before[1]))
            at += 1
    return spans


def _batch_rows(documents: tuple[Documents, ...] | None) -> list[tuple[Range | None, Documents | None]]:
    """Which batch rows have which documents; rows that share them, together."""
    if documents is None or len(documents) == 1:
        return [(None, documents[0] if documents else None)]
    return [((row, row + 1), borders) for row, borders in enumerate(documents)]


def _visits(kv_exchange: str, rank: int, size: int) -> list[tuple[int, ...]]:
    """Which ranks' keys arrive at each step: the only place where ways of exchange differ."""
    if kv_exchange == "ring":
        return [((rank - hop) % size,) for hop in range(size)]
    return [(rank,)] if kv_exchange == "replicated" else [(rank,), tuple(range(size))]


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
        by_end = sorted(movable, key=lambda t: t.q[1])
        half, done = sum(t.area for t in movable) / 2, 0
        off = {}  # how far from half of the work the rows above a border are
        for tile in by_end:
            done += tile.area
            off[tile.q[1]] = abs(done - half)
        row = min(borders[:-1], key=lambda b: off[b])
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
                tiles = cut((start, stop), tile.k, shift(tile.band, start - tile.q[0]))
                part.extend(Tile(t.q, t.k, t.band, tile.batch) for t in tiles)
    return (
        Step(step.take, step.keys, tuple(sorted(first, key=by_rows))),
        Step(step.take, step.keys, tuple(second)),
    )


@lru_cache(maxsize=1024)
def build(
    held: tuple[tuple[Range, ...], ...],
    held_keys: tuple[tuple[Range, ...], ...],
    rank: int,
    kv_exchange: str,
    load_balance: bool,
    band: Band,
    documents: tuple[Documents, ...] | None = None,
    parts: bool = True,
) -> Schedule:
    """The schedule of ring rank ``rank``, where ring rank r holds queries of global positions ``held[r]`` and keys
    of ``held_keys[r]`` (the same, but for cross-attention).

    ``band``: the mask in global positions (``CAUSAL``, ``FULL`` or a window). ``documents``: one for
    all batch rows, or one per row. ``load_balance`` exchanges the tail half of queries with rank
    ``size-1-rank`` where :func:`swaps` says that this balances the work. ``parts``: tiles may have parts.
    """
    size = len(held)
    swap = swaps(load_balance, size, band, sum(b - a for ranges in held for a, b in ranges))
    queries = [_swapped(held, r) if swap else held[r] for r in range(size)]
    steps = [list(_arrivals(held_keys, kv_exchange, r)) for r in range(size)]

    def needed(step: int) -> bool:
        return any(
            visible(with_offsets(queries[r]), steps[r][step], band, borders)
            for r in range(size)
            for _, borders in _batch_rows(documents)
        )

    hops = next((step for step in reversed(range(1, len(steps[rank]))) if needed(step)), 0)
    local, *arriving = (_step(queries[rank], blocks, band, documents) for blocks in steps[rank][: hops + 1])
    rows = sum(stop - start for start, stop in queries[rank])
    halved = [*(_halves(local, rows // 2 if swap else rows)), *arriving] if hops else [local, _NOTHING]
    whole = [local, _NOTHING, *arriving]
    if parts:
        border = rows // 2 if swap else 0
        halved, whole = (
            [Step(step.take, step.keys, packed(step.tiles, border)) for step in steps] for steps in (halved, whole)
        )
    forward, backward = ((first, *rest, last) for first, last, *rest in (halved if swap else whole, halved))
    return Schedule(forward, backward, hops, swap, queries[rank])


_NOTHING = Step((), (), ())


def _arrivals(held_keys: tuple[tuple[Range, ...], ...], kv_exchange: str, rank: int) -> Iterator[list[Placed]]:
    """What can be used of the block of each step: keys that have not been there before."""
    seen: set[int] = set()
    for sources in _visits(kv_exchange, rank, len(held_keys)):
        blocks: list[Placed] = []
        offset = 0
        for source in sources:
            ranges = with_offsets(held_keys[source], offset)
            offset += sum(stop - start for start, stop in held_keys[source])
            if source not in seen:
                blocks += ranges
        seen.update(sources)
        yield blocks


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
