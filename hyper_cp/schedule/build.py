"""The schedule: the tiles that a rank must compute, in which order, and the keys that they need. No tensors.

Modes differ here only in which keys arrive when (see :mod:`arrivals`); layouts and load balance only in which global
positions are held; masks only in how a rectangle is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from .arrivals import Arrivals, KeyDemand, arrivals, is_from_outside
from .arrivals_check import check_arrivals
from .blocks import BlockMap
from .choices import Limits
from .moves import NO_TRANSFERS, Transfers
from .ranges import Documents, Numbers, Range, Rows, before, compact, length_of, merge_ranges, placed, touching
from .tiles import CAUSAL, Band, Seen, Tile, by_rows, cut, joined, packed, same_positions, shift

# --------------------------------------------------------------------------- what a schedule is made of


@dataclass(frozen=True)
class Step:
    """Tiles over one block of keys and values: the local one, or one that has arrived.

    A tile rarely needs a whole block. With 8 keys in a block, of which tiles use 0 to 2 and 5 to 8::

        take = ((0, 2), (5, 8))            ranges of the block that some tile of this step uses
        keys = ((64, 66), (101, 104))      the global positions of these keys
        tiles[i].k = (2, 5)                counts from the start of what was taken: keys 101 to 104

    The engine takes these ranges out of the block side by side (one range is a view, several are one copy), and every
    tile is then a contiguous slice. Ranges are taken in ascending global order, in which neighbouring tiles join.
    """

    take: Sequence[Range]
    keys: Sequence[Range]
    tiles: tuple[Tile, ...]
    again: bool = False
    """True if the block is that of the step before, another part of which this one uses."""

    @cached_property
    def used(self) -> Rows:
        """``take`` as rows of the block."""
        return Rows(self.take)

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return sum(tile.area for tile in self.tiles)

    @property
    def nbytes(self) -> int:
        """An estimate of its bytes of memory, the index of used keys and what kernels make of parts included."""
        parts = sum(len(tile.parts or ()) for tile in self.tiles)
        keys = sum(stop - start for start, stop in self.take) if len(self.take) > 1 else 0
        return 32 * len(self.take) + 8 * keys + 600 * len(self.tiles) + 500 * parts


@dataclass(frozen=True)
class Schedule:
    """The work of one ring rank, a step per block: the local one, then those that arrive, then the local one again.
    A block of which a step may not use everything has several.

    The tiles of the local block may be cut in two halves (see :func:`_halves`), of which the second is this last step.
    Its work hides the transfers that bring results home: in ``backward`` those of key gradients, and with ``swap``
    those of the queries' tails. Where nothing has to be brought home, the last step is empty.

    Attributes:
        forward, backward: the steps.
        swap: the tail half of queries changes places with another rank's (load balance). None of it is in the last
            step.
        queries: the global positions that this rank attends, in the order of the tiles' rows.
        transfers: the moves that bring blocks and take their gradients home.
        recurring: False if documents decided it, so that the lengths of its tiles change from batch to batch.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    swap: bool
    queries: Sequence[Range]
    transfers: Transfers = field(default=NO_TRANSFERS, compare=False)
    recurring: bool = field(default=True, compare=False)

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return sum(step.area for step in self.forward)

    @cached_property
    def used(self) -> int:
        """The number of rows of blocks that arrive which tiles use."""
        return sum(length_of(step.take) for step in self.forward[1:-1])

    @cached_property
    def received(self) -> int:
        """The number of rows that arrive."""
        return sum(sum(move.received) for move in self.transfers.moves)

    @property
    def nbytes(self) -> int:
        """An estimate of its bytes of memory."""
        steps = {id(step): step for step in (*self.forward, *self.backward)}
        moved = sum(8 * move.rows.length for move in self.transfers.moves if move.pattern == "rows")
        return sum(step.nbytes for step in steps.values()) + moved


_NOTHING = Step((), (), ())

# --------------------------------------------------------------------------- one step


def _step(
    queries: Sequence[Range],
    blocks: Numbers,
    band: Band,
    documents: tuple[Documents, ...] | None,
    listed: BlockMap | None,
) -> Step:
    """Tiles of the queries at global ``queries`` over the keys in ``blocks``, placed ranges in any order. Of what
    ``listed`` does not list, nothing is computed."""
    blocks = _ascending(blocks)
    rows = placed(queries)
    if band == CAUSAL and listed is None and np.array_equal(rows, blocks):
        same = [
            replace(t, batch=b) for b, boundaries in _batch_rows(documents) for t in same_positions(rows, boundaries)
        ]
        return Step(*_taken(blocks, rows[:, 0], rows[:, 0] + rows[:, 2] - rows[:, 1])[:2], _sorted(same))
    found = [
        (batch, *Seen(rows, blocks, band, boundaries).rectangles()) for batch, boundaries in _batch_rows(documents)
    ]
    if listed is not None:
        found = [(batch, *_listed(listed, rows, blocks, *seen)) for batch, *seen in found]  # type: ignore[arg-type]
    # Of each block, what is used is from the first to the last position of a tile. Used keys lie in ascending global
    # order: the keys that a causal query sees are then the first ones.
    first, last = np.full(len(blocks), np.iinfo(np.int64).max), np.zeros(len(blocks), np.int64)
    for _, full, block, cuts in found:
        np.minimum.at(first, block, full[:, 2])
        np.maximum.at(last, block, full[:, 3])
        for at, tile in cuts:
            first[at], last[at] = min(first[at], tile.k[0]), max(last[at], tile.k[1])
    take, keys, by = _taken(blocks, first, last)
    tiles: list[Tile] = []
    for batch, full, block, cuts in found:
        full[:, 2:] += by[block, None]
        tiles += [replace(t, batch=batch) for t in joined(full)] if batch else joined(full)
        tiles += [Tile(t.q, (t.k[0] + int(by[at]), t.k[1] + int(by[at])), t.band, batch) for at, t in cuts]
    return Step(take, keys, _sorted(tiles))


def _listed(
    listed: BlockMap, rows: Numbers, keys: Numbers, full: Numbers, block: Numbers, cuts: list[tuple[int, Tile]]
) -> tuple[Numbers, Numbers, list[tuple[int, Tile]]]:
    """Restrict the result of :meth:`Seen.rectangles` to listed blocks: full rectangles become smaller, tiles that the
    band cuts stay whole or go."""

    def shifts(q: int, at: int) -> tuple[int, int]:
        row = rows[np.searchsorted(rows[:, 0], q, "right") - 1]
        return int(row[1] - row[0]), int(keys[at, 1] - keys[at, 0])

    def trimmed(q: Range, k: Range, at: int) -> tuple[Range, Range] | None:
        by, of_keys = shifts(q[0], at)
        found = listed.trimmed((q[0] + by, q[1] + by), (k[0] + of_keys, k[1] + of_keys))
        if found is None:
            return None
        (q0, q1), (k0, k1) = found
        return (q0 - by, q1 - by), (k0 - of_keys, k1 - of_keys)

    pairs = [
        (trimmed((q0, q1), (k0, k1), at), at)
        for (q0, q1, k0, k1), at in zip(full.tolist(), block.tolist(), strict=True)
    ]
    left = [(*q_k[0], *q_k[1], at) for q_k, at in pairs if q_k is not None]
    array = np.array(left, dtype=np.int64).reshape(-1, 5)
    return array[:, :4], array[:, 4], [(at, tile) for at, tile in cuts if trimmed(tile.q, tile.k, at) is not None]


def _taken(blocks: Numbers, first: Numbers, last: Numbers) -> tuple[Sequence[Range], Sequence[Range], Numbers]:
    """``take`` and ``keys`` of a step that uses positions from ``first`` to ``last`` of each block, and what is added
    to a position in a block to have its position among the taken."""
    size = np.maximum(last - first, 0)
    used = size > 0
    first, last, start = first[used], last[used], (blocks[:, 1] - blocks[:, 0])[used]
    by = np.zeros(len(blocks), np.int64)
    by[used] = before(size)[used] - first
    take, keys = np.stack((first, last), 1), np.stack((start + first, start + last), 1)
    return compact(touching(take)), compact(touching(keys)), by


def _sorted(tiles: list[Tile]) -> tuple[Tile, ...]:
    return tuple(sorted(tiles, key=by_rows))


def _batch_rows(documents: tuple[Documents, ...] | None) -> list[tuple[Range | None, Documents | None]]:
    """Batch rows and the documents they have; rows that share them, together."""
    if documents is None or len(documents) == 1:
        return [(None, documents[0] if documents else None)]
    return [((row, row + 1), boundaries) for row, boundaries in enumerate(documents)]


LEAST_ROWS = 1024
"""Kernels are slower on fewer rows than this (CPU flash halves its block below 768)."""


def _halves(step: Step, rows: int, least: int) -> tuple[Step, Step]:
    """Cut a step in two: one to run now, and one to run while the last transfer is under way.

    Only queries below ``rows`` may wait (with ``swap`` the others leave with that transfer), so the first part has all
    tiles that reach beyond. The rest is cut at one query row, the lower side to the first part and the upper side to
    the second. A boundary between two tiles is best, because no tile is cut: the one with most nearly half of the
    work below it. A single long tile is cut at half of its rows; under a causal mask at 0.7 of them, since work grows
    with the square of the rows and 0.7 ** 2 is half. If parts would have fewer rows than ``least``, the second is
    empty.
    """
    movable = [t for t in step.tiles if t.q[1] <= rows]
    row, length = _half_of_work(movable, least)
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


def _half_of_work(tiles: list[Tile], least: int) -> tuple[int, int]:
    """``(row, last row)``: about half of the tiles' work is below ``row``, or all of it."""
    boundaries = sorted({t.q[1] for t in tiles})
    length = boundaries[-1] if boundaries else 0
    if len(boundaries) > 1:
        half, done = sum(t.area for t in tiles) / 2, 0
        off = {}  # how far from half of the work a boundary is
        for tile in sorted(tiles, key=lambda t: t.q[1]):
            done += tile.area
            off[tile.q[1]] = abs(done - half)
        return min(boundaries[:-1], key=lambda b: off[b]), length
    share = 0.7 if any(t.band == CAUSAL for t in tiles) else 0.5
    grain = max(1, least // 8)
    row = min(round(length * share / grain) * grain, length - least)
    return (row if row >= least else length), length


# --------------------------------------------------------------------------- all steps


def build(
    held: tuple[Sequence[Range], ...],
    held_keys: tuple[Sequence[Range], ...],
    rank: int,
    kv_exchange: str,
    load_balance: bool,
    band: Band,
    documents: tuple[Documents, ...] | None = None,
    parts: bool = True,
    blocks: BlockMap | None = None,
    stages: int | Limits | None = None,
    most_keys: int | None = None,
    least_rows: int = LEAST_ROWS,
) -> Schedule:
    """The schedule of ring rank ``rank``, where ring rank r holds queries of global positions ``held[r]`` and keys
    of ``held_keys[r]`` (the same, but for cross-attention). Calls find it through :func:`lookup.schedule`.

    ``band``: the mask in global positions (``CAUSAL``, ``FULL`` or a window). ``documents``: one for
    all batch rows, or one per row. ``load_balance`` exchanges the tail half of queries with rank
    ``size-1-rank`` where :func:`swaps` says that this balances the work. ``parts``: tiles may have parts. ``blocks``:
    all other pairs are hidden. ``stages``: see :class:`~arrivals.KeyDemand`. ``most_keys``: see :class:`lookup.Key`.
    ``least_rows``: a tile is not cut in two where a half would have fewer.
    """
    size, length = len(held), sum(map(length_of, held))
    band = _bounded(band, max(length, sum(map(length_of, held_keys))))
    swap = swaps(load_balance, size, band, length, blocks)
    queries = [_swapped(held, r) if swap else held[r] for r in range(size)]
    demand = KeyDemand(rank, queries, held_keys, band, documents, blocks, stages)
    if is_from_outside(kv_exchange):
        check_arrivals(kv_exchange, demand)
    return assembled(demand, arrivals(kv_exchange, demand), parts, swap, most_keys, least_rows)


def assembled(
    demand: KeyDemand,
    arriving: Arrivals,
    parts: bool = True,
    swap: bool = False,
    most_keys: int | None = None,
    least_rows: int = LEAST_ROWS,
) -> Schedule:
    """The schedule of the rank of a demand, given the keys that arrive there. Other arguments: see :func:`build`."""
    queries, mask = demand.queries[demand.rank], (demand.band, demand.documents, demand.blocks)
    own = _step(queries, arriving.blocks[0], *mask)
    others = [
        replace(_step(queries, part, *mask), again=i > 0)
        for block in arriving.blocks[1:]
        for i, part in enumerate([block] if most_keys is None else _cut(block, most_keys))
    ]
    rows = length_of(queries)
    last_row = rows // 2 if swap else rows  # of the queries that are this rank's
    first, last = _halves(own, last_row, least_rows) if others else (own, _NOTHING)

    def final(step: Step) -> Step:
        return replace(step, tiles=packed(step.tiles, last_row if swap else 0)) if parts else step

    others = [final(step) for step in others]
    halved = (final(first), *others, final(last))
    forward = halved if swap or not others else (final(own), *others, _NOTHING)
    return Schedule(forward, halved, swap, queries, arriving.transfers)


def _cut(block: Numbers, most: int) -> list[Numbers]:
    """The placed ranges of a block in parts of at most ``most`` positions, side by side in the block."""
    length = block[:, 2] - block[:, 1]
    ends = before(length) + length
    cuts = [*range(0, max(int(length.sum()), 1), most), int(length.sum())]
    parts = []
    for first, last in pairwise(cuts):
        low, high = np.maximum(ends - length, first), np.minimum(ends, last)
        by = low - (ends - length)
        part = np.column_stack((block[:, 0] + by, block[:, 1] + by, block[:, 1] + by + high - low))
        parts.append(part[high > low])
    return parts


def _bounded(band: Band, length: int) -> Band:
    """The same band over ``length`` positions, without bounds that hide nothing: they may be any Python number."""
    lower, upper = band
    return (
        None if lower is None or lower <= -length else lower,
        None if upper is None or upper >= length else upper,
    )


def _ascending(blocks: Numbers) -> Numbers:
    """Placed ranges in global order."""
    return blocks[np.argsort(blocks[:, 1])]


def swaps(load_balance: bool, size: int, band: Band, length: int, blocks: BlockMap | None = None) -> bool:
    """True if tails of queries are exchanged. That balances work where later queries see more keys than earlier ones:
    under a causal mask, unless a window is shorter than half of the sequence, and under blocks that look so."""
    lower, upper = band
    if load_balance and blocks is not None and size > 1:
        shares = [((length * r // size, length * (r + 1) // size),) for r in range(size)]
        most = [max(map(blocks.work, x)) for x in (shares, [_swapped(tuple(shares), r) for r in range(size)])]
        return most[1] < most[0]
    return load_balance and size > 1 and upper is not None and (lower is None or -lower >= length // 2)


def _swapped(held: tuple[Sequence[Range], ...], rank: int) -> tuple[Range, ...]:
    """Positions of the queries of ``rank`` after the tail exchange: own head, partner's tail."""
    ((start, stop),), ((partner_start, partner_stop),) = held[rank], held[len(held) - 1 - rank]
    head = (start, start + (stop - start) // 2)
    tail = (partner_start + (partner_stop - partner_start) // 2, partner_stop)
    return merge_ranges((head, tail)) if head[1] == tail[0] else (head, tail)
