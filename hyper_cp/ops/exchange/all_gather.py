"""Colossal: keys and values of all ring ranks are gathered at once (arXiv 2105.13120, 2407.21783).

Who owns what: gathered tensors are new and belong to the iteration. Both gathers are in flight while the local block
is attended, and the reduce-scatter of the gradients while it is attended again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...mesh.comm import Axis
from ...schedule.build import Schedule
from .wire import Pair, from_wire, gradient_zeros, to_wire


class GatherForward:
    """Gathers keys and values of all ranks at once.

    It yields the local block, during whose attention the gather is in flight; then the blocks of all ranks in rank
    order, of which the local one must not be read; then the local block again.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule):
        self.local = k, v
        self.pending = [axis.all_gather(to_wire(x), own=False) for x in (k, v)] if plan.hops else []

    def __iter__(self) -> Iterator[Pair]:
        yield self.local
        if self.pending:
            k, v = (from_wire(pending.wait()) for pending in self.pending)
            yield k, v
        yield self.local


class GatherBackward:
    """Keys and values are gathered again; gradients of all blocks are summed by reduce-scatter.

    Yields ``(k, v, dk, dv)`` like :class:`RingBackward`: local, all ranks, local again (while the
    gradients travel).
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype):
        self.axis, self.hops, self.dtype = axis, plan.hops, dtype
        self.home = gradient_zeros(k, dtype), gradient_zeros(v, dtype)
        self.blocks = GatherForward(axis, k, v, plan)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        blocks = iter(self.blocks)
        yield *next(blocks), *self.home
        pending = []
        if self.hops:
            k, v = next(blocks)
            # Gathered tensors are views of the wire format; their gradients have it too.
            dk, dv = (torch.zeros_like(x.movedim(2, 0), dtype=self.dtype) for x in (k, v))
            yield k, v, from_wire(dk), from_wire(dv)
            pending = [self.axis.reduce_scatter(total) for total in (dk, dv)]
        yield *next(blocks), *self.home
        for home, arrived in zip(self.home, pending, strict=False):
            home += from_wire(arrived.wait())
