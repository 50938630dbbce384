"""States pass from segment to segment: pieces of a rank compose into ranges, and ranges of all ranks into a sequence.

One all-gather in each direction carries the map of every held range; its size does not depend on the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...mesh.comm import Axis, gather_ranks
from .segments import Segments

Steps = Sequence[tuple[Tensor, Tensor]]
"""Maps ``(M, P)`` in the order in which they are applied."""


def applied(m: Tensor, x: Tensor) -> Tensor:
    """``M . x``; a diagonal M is a column."""
    return m * x if m.shape[-1] == 1 else m @ x


def transposed(m: Tensor) -> Tensor:
    """The map of gradients."""
    return m if m.shape[-1] == 1 else m.mT


def fold(steps: Steps, state: Tensor) -> tuple[list[Tensor], Tensor]:
    """Apply maps to a state, one after the other: the states before each of them, and the last one."""
    before = []
    for m, p in steps:
        before.append(state)
        state = applied(m, state) + p
    return before, state


def composed(maps: Sequence[Tensor]) -> Tensor:
    """The product of maps, of which the first is applied first."""
    product = maps[0]
    for m in maps[1:]:
        product = applied(m, product)
    return product


class Passing:
    """The states that enter the pieces of a rank, and the gradients that enter them from behind.

    Args:
        maps: the matrices of all pieces, ``[pieces, B, H, ...]``.
        axes: those of the ranks that share the sequence, innermost first.
        rank: this one among them.
    """

    def __init__(self, segments: Segments, maps: Tensor, axes: Sequence[Axis], rank: int) -> None:
        self.segments, self.axes, self.rank = segments, axes, rank
        self.maps, self.back = maps.unbind(0), transposed(maps).unbind(0)
        self.ranges = [range(a, b) for a, b in zip(segments.first, segments.first[1:], strict=False)]

    def forward(self, adds: Tensor) -> tuple[Tensor, Tensor]:
        """The state that enters each piece, ``[pieces, B, H, dk, dv]``, and the one behind the last piece of all."""
        totals, ends = self._gathered([self._totals(), self._ends(adds)])
        return self._entering(adds, totals, ends)

    def both(self, adds: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the gradient of the state that leaves each piece.

        Args:
            reads: the gradient of the state that enters each piece, through the outputs of this piece.
        """
        totals, ends, starts = self._gathered([self._totals(), self._ends(adds), self._ends(reads, back=True)])
        return self._entering(adds, totals, ends)[0], self._entering(reads, totals, starts, back=True)[0]

    def _totals(self) -> list[Tensor]:
        """The matrix of each range."""
        return [composed([self.maps[i] for i in pieces]) for pieces in self.ranges]

    def _ends(self, adds: Tensor, back: bool = False) -> list[Tensor]:
        """The state that each range leaves if none enters it. ``back``: gradients, from the last piece to the first."""
        zero = torch.zeros_like(adds[0])
        return [fold(self._steps(pieces, adds, back), zero)[1] for pieces in self.ranges]

    def _steps(self, pieces: range, adds: Tensor, back: bool) -> Steps:
        maps = self.back if back else self.maps
        return [(maps[i], adds[i]) for i in (pieces[::-1] if back else pieces)]

    def _entering(
        self, adds: Tensor, totals: list[Tensor], ends: list[Tensor], back: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The state that enters each piece of this rank, from those before it in global order (or behind it), and the
        one that leaves the sequence."""
        order = self.segments.order
        if back:
            order, totals, ends = order[::-1], [transposed(m) for m in reversed(totals)], ends[::-1]
        before, last = fold(list(zip(totals, ends, strict=True)), torch.zeros_like(ends[0]))
        states = [adds[0]] * len(self.maps)
        for (rank, number), state in zip(order, before, strict=True):
            if rank == self.rank:
                pieces = self.ranges[number]
                steps = self._steps(pieces, adds, back)
                for i, entering in zip(pieces[::-1] if back else pieces, fold(steps, state)[0], strict=True):
                    states[i] = entering
        return torch.stack(states), last

    def _gathered(self, of_ranges: list[list[Tensor]]) -> list[list[Tensor]]:
        """Each of the lists, which have a tensor for every range of this rank, of the ranges of all ranks in global
        order."""
        if len(self.segments.order) == len(self.ranges):
            return of_ranges
        shapes = [tensors[0].shape for tensors in of_ranges]
        sizes = [math.prod(shape) for shape in shapes]
        send = of_ranges[0][0].new_zeros(self.segments.most, sum(sizes))
        for row, tensors in zip(send, zip(*of_ranges, strict=True), strict=False):
            torch.cat([x.reshape(-1) for x in tensors], out=row)
        by_rank = gather_ranks(self.axes, send)
        rows = [by_rank[rank, number].split(sizes) for rank, number in self.segments.order]
        return [[row[i].view(shape) for row in rows] for i, shape in enumerate(shapes)]
