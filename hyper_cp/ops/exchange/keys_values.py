"""What travels, and when: keys and values by ring or all-gather, queries' tails, Ulysses.

Transfers themselves, and the rules of buffers and order that this file relies on, are in ``axis``.

Shapes: attention tensors are ``[B, H, S, D]`` (any strides); on the wire the sequence comes first,
``[S, B, H, D]``, so that a range of tokens is one contiguous piece of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...mesh.comm import Axis, Pending
from ...schedule.layout import Piece, Range
from ..kernels.partials import part

Pair = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------- wire format


def to_wire(x: Tensor) -> Tensor:
    """``[B, H, S, ...] -> [S, B, H, ...]``, contiguous (no copy where memory already is so)."""
    return x.movedim(2, 0).contiguous()


def from_wire(x: Tensor) -> Tensor:
    """``[S, B, H, ...] -> [B, H, S, ...]``, a view."""
    return x.movedim(0, 2)


class _Message:
    """K and V of any head dims as one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor):
        self.shapes = [(x.shape[2], x.shape[0], x.shape[1], x.shape[3]) for x in (k, v)]

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.movedim(2, 0).reshape(-1) for x in (k, v)])

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_zeros(sum(map(math.prod, self.shapes)), dtype=dtype)

    def unpack(self, flat: Tensor) -> Pair:
        k, v = flat.split([math.prod(shape) for shape in self.shapes])
        return from_wire(k.view(self.shapes[0])), from_wire(v.view(self.shapes[1]))


def _gradient_zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A zero accumulator of the shape of ``x`` [B, H, S, D], in memory order [B, S, H, D]."""
    b, h, s, d = x.shape
    return x.new_zeros(b, s, h, d, dtype=dtype).transpose(1, 2)


# --------------------------------------------------------------------------- keys and values


class RingForward:
    """Keys and values travel point to point: iterating yields this rank's block, then those of
    ranks -1, -2, ... (mod size), then this rank's again. The transfer of the next block is posted
    before the current one is yielded. Beyond the inputs two blocks are alive: one being sent, one
    being received.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int):
        self.axis, self.k, self.v, self.hops = axis, k, v, hops
        if hops:
            self.message = _Message(k, v)
            self.block = self.message.pack(k, v)
            self.spare = torch.empty_like(self.block)
            self.pending = self._shift()

    def _shift(self) -> Pending:
        axis = self.axis
        to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        return axis.send_recv([self.block], to, [self.spare], source)

    def __iter__(self) -> Iterator[Pair]:
        yield self.k, self.v
        for hop in range(1, self.hops + 1):
            self.pending.wait()  # both directions: the old block has left and may be overwritten
            self.block, self.spare = self.spare, self.block
            if hop < self.hops:
                self.pending = self._shift()
            yield self.message.unpack(self.block)
        yield self.k, self.v


class RingBackward:
    """Keys and values go round again; the gradients of a block travel with it, one hop behind.

    Iterating yields ``(k, v, dk, dv)``; the caller adds to dk and dv (in the accumulation dtype)
    before it asks for the next. The local block comes first and once more last, so that the final
    hop, which brings this rank's gradients home, is hidden behind local work.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int, dtype: torch.dtype):
        self.axis, self.k, self.v, self.hops, self.dtype = axis, k, v, hops, dtype
        self.home = _gradient_zeros(k, dtype), _gradient_zeros(v, dtype)
        if hops:
            self.message = _Message(k, v)
            self.block = self.message.pack(k, v)
            self.spare = torch.empty_like(self.block)
            self.pending = self._post([self.block], [self.spare], 1)

    def _post(self, sends: list[Tensor], recvs: list[Tensor], distance: int) -> Pending:
        rank, size = self.axis.rank, self.axis.size
        return self.axis.send_recv(sends, (rank + distance) % size, recvs, (rank - distance) % size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        yield self.k, self.v, *self.home
        if not self.hops:
            yield self.k, self.v, *self.home
            return
        # Three gradient buffers: the sum that leaves, the sum that arrives, what this rank adds to it.
        # At hop 1 no sum has come along with the block: this rank begins it.
        leaving = self.message.zeros(self.k, self.dtype)
        arriving = torch.empty_like(leaving)
        adding = torch.zeros_like(leaving) if self.hops > 1 else leaving
        self.pending.wait()
        for hop in range(1, self.hops + 1):
            self.block, self.spare = self.spare, self.block
            sends, recvs = ([self.block], [self.spare]) if hop < self.hops else ([], [])
            if hop > 1:
                sends, recvs = [*sends, leaving], [*recvs, arriving]
            pending = self._post(sends, recvs, 1) if sends else None
            yield *self.message.unpack(self.block), *self.message.unpack(adding if hop > 1 else leaving)
            if pending is not None:
                pending.wait()
            if hop > 1:
                arriving += adding
                adding.zero_()
                leaving, arriving = arriving, leaving
        # Each block's sum stops here, `hops` ranks after its owner: straight home with it.
        pending = self._post([leaving], [arriving], -self.hops)
        yield self.k, self.v, *self.home
        pending.wait()
        for home, total in zip(self.home, self.message.unpack(arriving), strict=True):
            home += total


class GatherForward:
    """Keys and values of all ranks at once: yields the local block, then (while that was computed
    on, the gather was in flight) the blocks of all ranks in rank order, of which the local one is
    not to be read, then the local block again."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int):
        self.local = k, v
        self.pending = [axis.all_gather(to_wire(x), own=False) for x in (k, v)] if hops else []

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

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int, dtype: torch.dtype):
        self.axis, self.hops, self.dtype = axis, hops, dtype
        self.home = _gradient_zeros(k, dtype), _gradient_zeros(v, dtype)
        self.blocks = GatherForward(axis, k, v, hops)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        blocks = iter(self.blocks)
        yield *next(blocks), *self.home
        pending = []
        if self.hops:
            k, v = next(blocks)
            # Gathered tensors are views of the wire format, which the zeros take over.
            dk, dv = (torch.zeros_like(x.movedim(2, 0), dtype=self.dtype) for x in (k, v))
            yield k, v, from_wire(dk), from_wire(dv)
            pending = [self.axis.reduce_scatter(total) for total in (dk, dv)]
        yield *next(blocks), *self.home
        for home, arrived in zip(self.home, pending, strict=False):
            home += from_wire(arrived.wait())


# Replicated keys and values never hop: what is local is all.
FORWARD: dict[str, type[RingForward] | type[GatherForward]] = {
    "ring": RingForward,
    "all_gather": GatherForward,
    "replicated": GatherForward,
}
BACKWARD: dict[str, type[RingBackward] | type[GatherBackward]] = {
    "ring": RingBackward,
    "all_gather": GatherBackward,
    "replicated": GatherBackward,
}


# --------------------------------------------------------------------------- queries


class SwappedTails:
    """Queries (and what belongs to them) whose tail half is attended by rank ``size-1-rank``.

    Tensors are ``[B, H, S, ...]``. The head half is usable at once; asking for rows of the tail
    waits for the partner's. What was computed of the tail goes back with :meth:`post_results`, as
    soon as no tile of it is left, so that the transfer is hidden behind the rest. With
    ``swap=False``, or on the rank that is its own partner, everything is used as it is.
    """

    def __init__(self, axis: Axis, swap: bool, *tensors: Tensor):
        self.axis, self.partner = axis, axis.size - 1 - axis.rank
        self.swapped = swap and self.partner != axis.rank
        self.tensors: Sequence[Tensor] = tensors
        self.tails: Sequence[Tensor] | None = None
        self.length = tensors[0].shape[2]
        self.half = self.length // 2
        if self.swapped:
            self.pending = self._swap([x[:, :, self.half :] for x in tensors])

    def _swap(self, tails: Sequence[Tensor]) -> Pending:
        sends = [to_wire(x) for x in tails]
        recvs = [torch.empty_like(x) for x in sends]
        pending = self.axis.send_recv(sends, self.partner, recvs, self.partner)
        return pending.then(lambda received: [from_wire(x) for x in received])

    def rows(self, rows: Range, batch: Range | None = None) -> Sequence[Tensor]:
        """The tensors restricted to a range of queries (and of batch rows)."""
        start, stop = rows
        if not self.swapped or stop <= self.half:
            return [part(x, rows, batch) for x in self.tensors]
        if self.tails is None:
            self.tails = self.pending.wait()
        if start >= self.half:
            return [part(x, (start - self.half, stop - self.half), batch) for x in self.tails]
        # A tile across the border needs both halves side by side.
        head, tail = (start, self.half), (0, stop - self.half)
        both = zip(self.tensors, self.tails, strict=True)
        return [torch.cat([part(x, head, batch), part(t, tail, batch)], 2) for x, t in both]

    def post_results(self, of: Callable[[Range], Sequence[Tensor]]) -> None:
        """Send what was computed of the tail rows, ``of(rows)``, to the rank they came from."""
        if self.swapped:
            if self.tails is None:
                self.tails = self.pending.wait()
            self.pending = self._swap(of((self.half, self.length)))

    def results(self, of: Callable[[Range], Sequence[Tensor]]) -> Sequence[Tensor]:
        """What was computed of this rank's own rows, head and tail, in memory order [B, S, H, ...]."""
        if not self.swapped:
            return of((0, self.length))
        heads = of((0, self.half))
        return [self._joined(head, tail) for head, tail in zip(heads, self.pending.wait(), strict=True)]

    def _joined(self, head: Tensor, tail: Tensor) -> Tensor:
        b, h, _, *rest = head.shape
        joined = head.new_empty(b, self.length, h, *rest).transpose(1, 2)
        joined[:, :, : self.half].copy_(head)
        joined[:, :, self.half :].copy_(tail)
        return joined


# --------------------------------------------------------------------------- Ulysses


def sequence_to_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """Trade a sequence shard for a head shard: ``[.. S .. H ..] -> [.. S*n .. H/n ..]``.

    ``pieces`` (rank, local start, local stop) say in which order the ranks' tokens come; putting
    them in that order is part of the copy that unpacks the message.
    """
    return send_heads(axis, x.unflatten(head_dim, (axis.size, -1)), seq_dim, head_dim, pieces)


def send_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """:func:`sequence_to_heads` of some heads of each rank's, any strides: ``head_dim`` (and what follows it) is
    preceded by one more dimension, the rank they go to."""
    send = x.movedim(head_dim, 0).movedim(seq_dim + 1, 1).contiguous()  # [n, S, ...]

    def unpack(received: Tensor) -> Tensor:
        parts = [received[rank, start:stop] for rank, start, stop in pieces]
        return torch.cat([part.movedim(0, seq_dim) for part in parts], dim=seq_dim).contiguous()

    return axis.all_to_all(send).then(unpack)


def heads_to_sequence(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """The inverse: ``[.. S*n .. H ..] -> [.. S .. H*n ..]``."""
    return collect_heads(axis, x, seq_dim, head_dim, pieces).then(
        lambda by_rank: by_rank.flatten(head_dim, head_dim + 1).contiguous()
    )


def collect_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """The inverse of :func:`send_heads`, a view of the message: ``[.. S*n .. H ..] -> [.. S .. n, H ..]``."""
    ordered = x.movedim(seq_dim, 0)
    send = x.new_empty(axis.size, ordered.shape[0] // axis.size, *ordered.shape[1:])
    offset = 0
    for rank, start, stop in pieces:
        send[rank, start:stop].copy_(ordered[offset : offset + stop - start])
        offset += stop - start
    return axis.all_to_all(send).then(lambda received: received.movedim(1, seq_dim + 1).movedim(0, head_dim))
