"""Colossal: keys and values of all ring ranks are gathered at once (arXiv 2105.13120, 2407.21783).

Who owns what: gathered tensors are new and belong to the iteration. All gathers are in flight while the local block is
attended, those of later stages also while an earlier one is; so are reduce-scatters of gradients, and those of the
last stage while the local block is attended again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...mesh.comm import Axis
from ...schedule.build import Schedule
from .wire import Pair, from_wire, gradient_zeros, to_wire


class GatherForward:
    """Gathers keys and values of all ranks.

    It yields the local block; for each stage the rows of all ranks that travel in it, in rank order, of which the local
    ones must not be read; then the local block again.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule):
        self.local, self.stages = (k, v), plan.rows_of_pieces if plan.hops else ()
        wire = [to_wire(x) for x in self.local] if self.stages else []
        self.pending = [[axis.all_gather(rows.take(x, 0), own=False) for x in wire] for rows in self.stages]

    def __iter__(self) -> Iterator[Pair]:
        yield self.local
        for stage in self.pending:
            k, v = (from_wire(pending.wait()) for pending in stage)
            yield k, v
        yield self.local


class GatherBackward:
    """Keys and values are gathered again; gradients of all blocks are summed by reduce-scatter.

    Yields ``(k, v, dk, dv)`` like :class:`RingBackward`: local, all ranks in each stage, local again (while the
    gradients of the last stage travel).
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype):
        self.axis, self.dtype = axis, dtype
        self.home = gradient_zeros(k, dtype), gradient_zeros(v, dtype)
        self.blocks = GatherForward(axis, k, v, plan)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        blocks = iter(self.blocks)
        yield *next(blocks), *self.home
        pending = []
        for _ in self.blocks.stages:
            k, v = next(blocks)
            # Gathered tensors are views of the wire format; their gradients have it too.
            dk, dv = (torch.zeros_like(x.movedim(2, 0), dtype=self.dtype) for x in (k, v))
            yield k, v, from_wire(dk), from_wire(dv)
            pending.append([self.axis.reduce_scatter(total) for total in (dk, dv)])
        yield *next(blocks), *self.home
        for rows, sums in zip(self.blocks.stages, pending, strict=True):
            for home, total in zip(self.home, sums, strict=True):
                rows.add(home, from_wire(total.wait()), 2)
