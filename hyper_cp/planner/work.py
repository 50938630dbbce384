"""The work of a ring: what its ranks must compute in each step, from the real schedule, or by formula for many ranks.

A schedule depends on the ring alone. A ring rank of a hybrid holds what its Ulysses ranks hold together; in the
layouts by chunks this is the same as one rank of a smaller ring holds, and in "per_document" it differs by the tokens
that remain after a division only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedule.arrivals import ahead_of
from ..schedule.build import Schedule, Step, build
from ..schedule.choices import Limits, stages_needed
from ..schedule.documents import PackedDocuments
from ..schedule.lookup import resolve
from ..schedule.pairs import cost, document_of, visible_before, visible_between
from ..schedule.ranges import Numbers, Range, before, bounds
from ..schedule.tiles import BLOCK, Band

FORMULAS = ("contiguous", "head_tail", "per_document")
"""Layouts whose work is known by formula for any number of ranks."""

REAL = 8
"""The most ranks of a ring for which the real schedule is built; beyond, formulas count."""

DEALT = 128
"""The most ranks of a ring for which layouts without a formula are placed."""

LISTED = 32
"""The most arriving steps of a long ring that are listed; the last one represents the rest."""


@dataclass(frozen=True)
class StepWork:
    """The tiles of one step.

    Attributes:
        pairs: of a query and a key, in whole blocks.
        rows: query rows of all tiles, each of which merges its partial.
        tiles: kernel calls.
        keys: key rows that are used, whose gradients are added.
    """

    pairs: float = 0.0
    rows: float = 0.0
    tiles: float = 0.0
    keys: float = 0.0


@dataclass(frozen=True)
class RankWork:
    """The work of one ring rank, step by step.

    Attributes:
        forward, backward: the local step, those that arrive, and the last local one.
        hops: how many times keys arrive. If fewer steps are listed, the last of them represents the rest.
        pieces: how many steps arrive in each hop.
        received: for ``"needed"``, the rows that arrive in each stage, by ring rank: arrays ``[ring]``.
        returned: the same for the rows that this rank gives, whose gradients come back.
        ahead: how many of these stages are under way at once.
    """

    forward: tuple[StepWork, ...]
    backward: tuple[StepWork, ...]
    hops: int
    received: tuple[npt.NDArray[Any], ...] = ()
    returned: tuple[npt.NDArray[Any], ...] = ()
    ahead: int = 1
    pieces: int = 1

    @property
    def arriving(self) -> int:
        """The number of steps that arrive."""
        return self.hops * self.pieces

    def of_pairs(self, pairs: float) -> RankWork:
        """The same steps with another number of pairs in all, shared out in proportion."""
        unlisted = max(0, self.arriving - len(self.forward) + 2)
        part = pairs / max(1.0, sum(step.pairs for step in self.forward) + unlisted * self.forward[-2].pairs)
        forward, backward = (
            tuple(replace(step, pairs=step.pairs * part) for step in steps) for steps in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)


@dataclass(frozen=True)
class RingWork:
    """The work of a ring.

    Attributes:
        pairs: visible pairs of each ring rank, exact: ``[ring]``.
        ranks: the work of some ranks, by rank: the fullest, the first, the middle and the last (all, if they are few),
            or by formula that of the fullest.
        rank: the fullest.
    """

    pairs: npt.NDArray[Any]
    ranks: dict[int, RankWork]
    rank: int


def ring_work(
    layout: str,
    ring: int,
    kv_exchange: str,
    documents: PackedDocuments,
    band: Band,
    limits: Limits = (),
    parts: bool = True,
) -> RingWork:
    """The work of a ring of ``ring`` ranks for packed documents that all batch rows share, each causal or full.

    Args:
        limits: those that choose the stages of ``"needed"``. An all-gather is whole.
        parts: False if tiles have no parts, as those of selected keys.
    """
    row = documents.rows[0]
    if ring > REAL:
        return _by_formula(layout, ring, kv_exchange, documents, band, limits)
    held = resolve(layout, ring, row[-1], documents).held
    owed = cost(held, (row,), band).pairs
    rows = documents.rows if len(row) > 2 else None
    stages = limits if kv_exchange == "needed" else ()
    fullest = int(owed.argmax())
    chosen = range(ring) if ring <= 4 else sorted({fullest, 0, ring // 2, ring - 1})
    options: dict[str, Any] = {"parts": parts, "stages": stages}
    ranks = {rank: rank_work(build(held, held, rank, kv_exchange, False, band, rows, **options)) for rank in chosen}
    return RingWork(owed, ranks, fullest)


def under_selection(work: RingWork, layout: str, documents: PackedDocuments, causal: bool, topk: int) -> RingWork:
    """The same ring if each query attends to ``topk`` of the keys that it sees, or to all of them if they are fewer.
    Nobody knows which ones before a run: steps share them in proportion to what their queries see."""
    ring, row = len(work.pairs), documents.rows[0]
    ends, lengths = np.asarray(row), np.diff(row)
    most = np.append(0, np.cumsum(lengths * np.minimum(lengths, topk)))

    def pairs_before(positions: npt.NDArray[Any]) -> Any:
        """The pairs of all queries before each position: under a causal mask as many as in a window."""
        return visible_before(ends, positions, (1 - topk, 0)) if causal else np.interp(positions, ends, most)

    if layout == "per_document" and ring > REAL:  # all compute the mean
        pairs = np.full(ring, float(pairs_before(ends[-1:])[0]) / ring)
    else:
        held = [bounds(ranges) for ranges in resolve(layout, ring, row[-1], documents).held]
        starts, stops = np.concatenate(held).T
        first = before(np.array([len(ranges) for ranges in held]))
        pairs = np.add.reduceat((pairs_before(stops) - pairs_before(starts)).astype(np.float64), first)
    ranks = {rank: mine.of_pairs(pairs[rank] if ring <= REAL else pairs.max()) for rank, mine in work.ranks.items()}
    return RingWork(pairs, ranks, max(ranks, key=lambda rank: float(pairs[rank])))


def rank_work(plan: Schedule) -> RankWork:
    """The work of a schedule."""
    moves, pieces = plan.transfers.moves, plan.transfers.pieces
    needed = [move for move in moves if move.pattern == "rows"]
    return RankWork(
        _of_steps(plan.forward, pieces),
        _of_steps(plan.backward, pieces),
        plan.transfers.hops,
        tuple(np.array(move.received) for move in needed),
        tuple(np.array(move.sent) for move in needed),
        plan.transfers.ahead,
        pieces,
    )


def _of_steps(steps: Sequence[Step], pieces: int) -> tuple[StepWork, ...]:
    """The work of steps. Each piece of a hop counts as an equal part of the hop: a rank that has all of the work in the
    first piece does not hold up one that has half of it in each, because the next pieces are on their way."""
    first, *arriving, last = map(_of_step, steps)
    hops = [arriving[i : i + pieces] for i in range(0, len(arriving), pieces)]
    equal = [_part(hop) for hop in hops for _ in hop]
    return first, *equal, last


def _part(works: Sequence[StepWork]) -> StepWork:
    """The mean of some steps."""
    values = [(work.pairs, work.rows, work.tiles, work.keys) for work in works]
    return StepWork(*(sum(column) / len(works) for column in zip(*values, strict=True)))


def _of_step(step: Step) -> StepWork:
    if not step.tiles:
        return StepWork()
    rectangles = [tile for whole in step.tiles for tile in whole.rectangles]
    rows = sum(tile.q[1] - tile.q[0] for tile in rectangles)
    pairs = sum(tile.blocks for tile in rectangles) * BLOCK**2
    keys = sum(stop - start for start, stop in step.take)
    return StepWork(float(pairs), float(rows), len(step.tiles), keys)


# --------------------------------------------------------------------------- by formula


def _by_formula(
    layout: str, ring: int, kv_exchange: str, documents: PackedDocuments, band: Band, limits: Limits
) -> RingWork:
    row = documents.rows[0]
    ends, length, causal, rank = np.asarray(row), row[-1], band[1] == 0, 0
    share, number, reach = length // ring, hops(layout, ring, ends, band), length if band[0] is None else -band[0]
    if layout == "per_document":  # all compute the mean
        owed = np.full(ring, -(-int(visible_before(ends, ends[-1:], band)[0]) // ring))
        squares = float((np.diff(ends).astype(float) ** 2).sum()) / ring**2
        local, remote = min(float(owed[0]), squares / 2 if causal else squares), length * (1 - 1 / ring)
        # Of an average rank's rows, the head sees half of the other ranks' blocks and the tail all of them.
        merged = share * number * (0.75 if causal else 1.0)
    else:
        held = resolve(layout, ring, length, documents).held
        counted = cost(held, (row,), band)
        owed, rank = counted.pairs, int(counted.pairs.argmax())
        local = float(sum(visible_between(ends, q, k, band) for q, k in product(held[rank], repeat=2)))
        # Ranks of equal work differ in what they receive and merge, and the others wait for the slowest.
        remote = float(counted.rows.max())
        chunk = share if layout == "contiguous" else min(share // 2, *(stop - start for start, stop in held[rank]))
        merged = max(_merged_rows(held[r], chunk, ring, ends, causal, reach) for r in (rank, ring // 2, ring - 1))
    arriving = float(owed[rank]) - local
    if kv_exchange == "ring":
        steps = [StepWork(arriving / max(1, number), merged / max(1, number), 1.0, merged / max(1, number))]
        steps *= min(number, LISTED)
        received: tuple[npt.NDArray[Any], ...] = ()
        ahead = 1
    else:
        # The rows that arrive come in stages; whole shares come at once.
        needed = remote >= 1 and number > 0 and kv_exchange == "needed"
        stages = stages_needed(limits, int(remote), share) if needed else min(number, 1)
        ahead = ahead_of(int(remote), share, stages) if needed else 1
        if stages > min(LISTED, ring - 1):  # fewer and longer ones stand for the stages of a long ring
            ahead = max(1, ahead * min(LISTED, ring - 1) // stages)
            stages = min(LISTED, ring - 1)
        rows = min(share, merged / max(1, stages)) if kv_exchange == "needed" else min(share, merged)
        steps = [StepWork(arriving / max(1, stages), rows, 2.0, remote / max(1, stages))] * stages
        number = stages
        received = _by_distance(rank, ring, remote, stages) if needed else ()
    whole = StepWork(float(local), float(share), 2.0, float(share))
    half = StepWork(local / 2, share / 2, 1.0, float(share))
    forward = (whole, *steps, StepWork())
    backward = (half, *steps, half) if steps else (whole, StepWork())
    return RingWork(owed, {rank: RankWork(forward, backward, number, received, received, ahead)}, rank)


def _by_distance(rank: int, ring: int, rows: float, stages: int) -> tuple[npt.NDArray[Any], ...]:
    """Rows that arrive in each stage, by ring rank: equally many from each other rank, those just behind first."""
    found = []
    for distances in np.array_split(np.arange(1, ring), stages):
        stage = np.zeros(ring)
        stage[(rank - distances) % ring] = rows / (ring - 1)
        found.append(stage)
    return tuple(found)


def hops(layout: str, ring: int, ends: Numbers, band: Band) -> int:
    """The hops of the ring: the distance of the furthest block that any rank needs."""
    size = int(ends[-1]) // (ring if layout == "contiguous" else 2 * ring)
    if ring == 1 or (layout != "per_document" and np.isin(np.arange(size, ends[-1], size), ends).all()):
        return 0  # every chunk begins with a document, so nobody needs another rank's keys
    if layout != "contiguous" or band[1] != 0:
        return ring - 1
    starts = np.arange(ring) * size
    first = ends[document_of(ends, starts)]
    first = first if band[0] is None else np.maximum(first, starts + band[0])
    return int((np.arange(ring) - first // size).max())


def _merged_rows(ranges: Sequence[Range], chunk: int, ring: int, ends: Numbers, causal: bool, reach: int) -> float:
    """Query rows of a rank, each as often as another rank's share has keys for it, if shares come in chunks and queries
    see no more than ``reach`` keys before their own."""
    rows = 0
    for low, high in ranges:
        at = int(document_of(ends, np.array([low]))[0])
        start, stop = int(ends[at]), int(ends[at + 1])
        behind = min(low - start, reach)
        rows += (min(high, stop, low + reach) - low) * min(ring - 1, -(-behind // chunk))
    return float(rows if causal else min(2 * rows, (ring - 1) * sum(b - a for a, b in ranges)))
