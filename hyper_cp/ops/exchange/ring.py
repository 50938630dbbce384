"""Ring: keys and values travel point to point around the ring dimension (arXiv 2310.01889).

Who owns what: a buffer in flight belongs to its :class:`~hyper_cp.mesh.comm.Pending` until ``wait()``. The caller may
read a yielded block until it asks for the next one. Every rank posts the same sequence of transfers, whatever tiles it
has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...mesh.comm import Axis, Pending
from ...schedule.build import Schedule
from .wire import Buffer, Pair, gradient_zeros


class RingForward:
    """Keys and values travel point to point: iterating yields this rank's block, then those of
    ranks -1, -2, ... (mod size), then this rank's again. The transfer of the next block is posted
    before the current one is yielded. Beyond the inputs two blocks are alive: one being sent, one
    being received.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule):
        self.axis, self.k, self.v, self.hops = axis, k, v, plan.hops
        if self.hops:
            self.block = Buffer.of(k, v)
            self.spare = self.block.empty()
            self.pending = self._shift()

    def _shift(self) -> Pending:
        axis = self.axis
        to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        return axis.send_recv([self.block.flat], to, [self.spare.flat], source)

    def __iter__(self) -> Iterator[Pair]:
        yield self.k, self.v
        for hop in range(1, self.hops + 1):
            self.pending.wait()  # both directions: the old block has left and may be overwritten
            self.block, self.spare = self.spare, self.block
            if hop < self.hops:
                self.pending = self._shift()
            yield self.block.pair
        yield self.k, self.v


class RingBackward:
    """Keys and values go round again; the gradients of a block travel with it, one hop behind.

    Iterating yields ``(k, v, dk, dv)``; the caller adds to dk and dv (in the accumulation dtype)
    before it asks for the next. The local block comes first and once more last, so that the final
    hop, which brings this rank's gradients home, is hidden behind local work.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype):
        self.axis, self.k, self.v, self.hops, self.dtype = axis, k, v, plan.hops, dtype
        self.home = gradient_zeros(k, dtype), gradient_zeros(v, dtype)
        if self.hops:
            self.block = Buffer.of(k, v)
            self.spare = self.block.empty()
            self.pending = self._post([self.block], [self.spare], 1)

    def _post(self, sends: list[Buffer], recvs: list[Buffer], distance: int) -> Pending:
        to, source = ((self.axis.rank + step) % self.axis.size for step in (distance, -distance))
        return self.axis.send_recv([x.flat for x in sends], to, [x.flat for x in recvs], source)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        yield self.k, self.v, *self.home
        if not self.hops:
            yield self.k, self.v, *self.home
            return
        # Three gradient buffers: the sum that leaves, the sum that arrives, what this rank adds to it.
        # At hop 1 no sum has come along with the block: this rank begins it.
        leaving = self.block.zeros(self.dtype)
        arriving = leaving.empty()
        adding = self.block.zeros(self.dtype) if self.hops > 1 else leaving
        self.pending.wait()
        for hop in range(1, self.hops + 1):
            self.block, self.spare = self.spare, self.block
            sends, recvs = ([self.block], [self.spare]) if hop < self.hops else ([], [])
            if hop > 1:
                sends, recvs = [*sends, leaving], [*recvs, arriving]
            pending = self._post(sends, recvs, 1) if sends else None
            yield *self.block.pair, *(adding if hop > 1 else leaving).pair
            if pending is not None:
                pending.wait()
            if hop > 1:
                arriving.flat.add_(adding.flat)
                adding.flat.zero_()
                leaving, arriving = arriving, leaving
        # Each block's sum is complete here, `hops` ranks after its owner: send it back in one transfer.
        pending = self._post([leaving], [arriving], -self.hops)
        yield self.k, self.v, *self.home
        pending.wait()
        for home, total in zip(self.home, arriving.pair, strict=True):
            home += total
