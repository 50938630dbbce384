"""The work of a ring: what its ranks owe step by step, from the real schedule, or by formula for many ranks.

A schedule depends on the ring alone. A ring rank of a hybrid holds what its Ulysses ranks hold together; in the
layouts by chunks this is the same as one rank of a smaller ring holds, and in "per_document" it differs by the tokens
that remain after a division only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrivals import ahead_of
from ..build import Schedule, Step, build
from ..choices import stage_limits, stages_needed
from ..documents import PackedDocuments
from ..lookup import resolve
from ..ranges import Numbers, bounds
from ..tiles import CAUSAL, FULL
from . import pairs as counting
from .pairs import FORMULAS, Pairs

REAL = 8
"""Up to so many ranks of a ring the real schedule is built; beyond, formulas count."""

BLOCK = 128
"""Kernels work in blocks of about so many rows and columns: a smaller tile takes as long as a whole block."""

DEALT = 128
"""Up to so many ranks of a ring, layouts without a formula are placed."""

LISTED = 32
"""So many arriving steps of a long ring are listed at most; the last one stands for the rest."""


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
        hops: how many times keys arrive. If fewer steps are listed, the last of them stands for the rest.
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

    @property
    def listed(self) -> int:
        """The number of arriving steps that are listed."""
        return len(self.forward) - 2


@dataclass(frozen=True)
class RingWork:
    """The work of a ring.

    Attributes:
        pairs: visible pairs of each ring rank, exact: ``[ring]``.
        ranks: the work of some ranks, by rank: the fullest, the first, the middle and the last (all, if they are few),
            or by formula that of the fullest.
        rank: the fullest.
    """

    pairs: Numbers
    ranks: dict[int, RankWork]
    rank: int

    @property
    def balance(self) -> float:
        """The fullest rank's pairs over the mean: 1 is perfect."""
        return float(self.pairs.max() / max(1.0, self.pairs.mean()))


def ring_work(layout: str, ring: int, kv_exchange: str, documents: PackedDocuments, pairs: Pairs) -> RingWork:
    """The work of a ring of ``ring`` ranks for packed documents that all batch rows share."""
    row = documents.rows[0]
    if ring > REAL:
        return _by_formula(layout, ring, kv_exchange, documents, pairs)
    held = resolve(layout, ring, row[-1], documents).held
    owed = np.array([pairs.of(bounds(ranges)).sum() for ranges in held])
    rows = documents.rows if len(row) > 2 else None
    fullest = int(owed.argmax())
    chosen = range(ring) if ring <= 4 else sorted({fullest, 0, ring // 2, ring - 1})
    found = {}
    for rank in chosen:
        plan = build(held, held, rank, kv_exchange, False, CAUSAL if pairs.causal else FULL, rows)
        found[rank] = rank_work(plan)
    return RingWork(owed, found, fullest)


def rank_work(plan: Schedule) -> RankWork:
    """The work of a schedule."""
    pieces = max(1, len(plan.pieces))
    return RankWork(
        _of_steps(plan.forward, pieces),
        _of_steps(plan.backward, pieces),
        plan.hops,
        tuple(np.array(route.received) for route in plan.routes),
        tuple(np.array(route.sent) for route in plan.routes),
        max(1, plan.ahead),
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
    sides = np.array([(t.q[1] - t.q[0], t.k[1] - t.k[0]) for t in rectangles])
    causal = np.array([t.kind == "causal" for t in rectangles])
    rows, cols = (-(-sides // BLOCK)).T
    blocks = np.where(causal, rows * (rows + 1) // 2, rows * cols)
    keys = sum(stop - start for start, stop in step.take)
    return StepWork(float(blocks.sum()) * BLOCK**2, float(sides[:, 0].sum()), len(step.tiles), keys)


# --------------------------------------------------------------------------- by formula

_USUAL = stage_limits("needed")


def _by_formula(layout: str, ring: int, kv_exchange: str, documents: PackedDocuments, pairs: Pairs) -> RingWork:
    length = documents.rows[0][-1]
    share, number = length // ring, counting.hops(layout, ring, length, pairs)
    rank = 0
    if layout == "per_document":
        owed = pairs.by_rank(layout, ring)
        squares = float((pairs.lengths.astype(float) ** 2).sum()) / ring**2
        local, remote = (squares / 2 if pairs.causal else squares), length * (1 - 1 / ring)
        # Of an average rank's rows, the head sees half of the other ranks' blocks and the tail all of them.
        merged = share * number * (0.75 if pairs.causal else 1.0)
    else:
        if layout in FORMULAS:
            owed = pairs.by_rank(layout, ring)
            rank = int(owed.argmax())
            some = [counting.held(layout, r, ring, length) for r in (rank, ring // 2, ring - 1)]
        else:
            held = resolve(layout, ring, length, documents).held
            owed = np.array([pairs.of(bounds(ranges)).sum() for ranges in held])
            rank = int(owed.argmax())
            some = [list(held[r]) for r in (rank, ring // 2, ring - 1)]
        local, remote = pairs.local_and_remote(some[0])
        # Ranks of equal work differ in what they receive and merge, and the others wait for the slowest.
        remote = max(remote, *(pairs.local_and_remote(mine)[1] for mine in some[1:]))
        chunk = share if layout == "contiguous" else min(share // 2, *(stop - start for start, stop in some[0]))
        merged = max(pairs.merged_rows(mine, chunk, ring) for mine in some)
    arriving = float(owed[rank]) - local
    if kv_exchange == "ring":
        steps = [StepWork(arriving / max(1, number), merged / max(1, number), 1.0, merged / max(1, number))]
        steps *= min(number, LISTED)
        received: tuple[npt.NDArray[Any], ...] = ()
        ahead = 1
    else:
        # The rows that arrive come in stages; whole shares come at once.
        needed = remote >= 1 and number > 0 and kv_exchange == "needed"
        stages = stages_needed(_USUAL, int(remote), share) if needed else min(number, 1)
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
