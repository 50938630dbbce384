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
    """Keys and values travel point to point: iterating yields this rank's block, then those of ranks -1, -2, ... (mod
    size), then this rank's again. A block comes in the pieces of the schedule, one after the other; the transfer of a
    piece of the next block is posted before that of the current one is yielded. Beyond the inputs two blocks are alive:
    one being sent, one being received.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule):
        self.axis, self.k, self.v, self.hops = axis, k, v, plan.hops
        self.rows = plan.pieces if plan.hops else ()
        self.pieces = [Buffer.of(k, v, rows) for rows in self.rows]
        self.spares = [piece.empty() for piece in self.pieces]
        self.pending = [self.post([piece], [spare], 1) for piece, spare in zip(self.pieces, self.spares, strict=True)]

    def post(self, sends: list[Buffer], recvs: list[Buffer], distance: int) -> Pending:
        """Send to the rank ``distance`` further on, and receive from the one as far behind."""
        to, source = ((self.axis.rank + step) % self.axis.size for step in (distance, -distance))
        return self.axis.send_recv([x.flat for x in sends], to, [x.flat for x in recvs], source)

    def arrived(self, i: int) -> Buffer:
        """Wait for a piece. Both directions: the piece before has left, and its buffer may be overwritten."""
        self.pending[i].wait()
        self.pieces[i], self.spares[i] = self.spares[i], self.pieces[i]
        return self.pieces[i]

    def __iter__(self) -> Iterator[Pair]:
        yield self.k, self.v
        for hop in range(1, self.hops + 1):
            for i in range(len(self.pieces)):
                piece = self.arrived(i)
                if hop < self.hops:
                    self.pending[i] = self.post([piece], [self.spares[i]], 1)
                yield piece.pair
        yield self.k, self.v


class RingBackward:
    """Keys and values go round again; the gradients of a piece travel with it, one hop behind.

    Iterating yields ``(k, v, dk, dv)``; the caller adds to dk and dv (in the accumulation dtype)
    before it asks for the next. The local block comes first and once more last, so that the final
    hop, which brings this rank's gradients home, is hidden behind local work.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype):
        self.blocks, self.dtype, self.rows = RingForward(axis, k, v, plan), dtype, plan.rows_of_pieces
        self.home = gradient_zeros(k, dtype), gradient_zeros(v, dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        blocks = self.blocks
        pieces, hops, pending = range(len(blocks.pieces)), blocks.hops, blocks.pending
        yield blocks.k, blocks.v, *self.home
        # Three gradient buffers of each piece: the sum that leaves, the sum that arrives, what this rank adds to it.
        # At hop 1 no sum has come along with the block: this rank begins it.
        leaving = [piece.zeros(self.dtype) for piece in blocks.pieces]
        arriving = [sums.empty() for sums in leaving]
        adding = [sums.zeros(self.dtype) for sums in leaving] if hops > 1 else leaving

        def add(i: int) -> None:
            arriving[i].flat.add_(adding[i].flat)
            adding[i].flat.zero_()
            leaving[i], arriving[i] = arriving[i], leaving[i]

        for hop in range(1, hops + 1):
            for i in pieces:
                piece = blocks.arrived(i)
                if hop > 2:  # the sum of the block before has come with it
                    add(i)
                sends, recvs = ([piece], [blocks.spares[i]]) if hop < hops else ([], [])
                if hop > 1:
                    sends, recvs = [*sends, leaving[i]], [*recvs, arriving[i]]
                if sends:
                    pending[i] = blocks.post(sends, recvs, 1)
                yield *piece.pair, *(adding if hop > 1 else leaving)[i].pair
                if hop == hops:
                    # The sum of this piece is complete here, `hops` ranks after its owner: send it back at once.
                    if hop > 1:
                        pending[i].wait()
                        add(i)
                    pending[i] = blocks.post([leaving[i]], [arriving[i]], -hops)
        yield blocks.k, blocks.v, *self.home
        for i in pieces:
            pending[i].wait()
            for home, total in zip(self.home, arriving[i].pair, strict=True):
                self.rows[i].add(home, total, 2)
