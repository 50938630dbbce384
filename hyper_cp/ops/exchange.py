"""Everything that communicates: all-to-all, all-gather, ring, pairwise swap. The only such file.

Rules kept here, on which the rest relies:

* every rank of an axis issues the same sequence of calls, whatever its own tiles are;
* a buffer in flight is owned by its :class:`Pending` until ``wait()``; on accelerators ``wait()``
  orders the current stream after the transfer and never blocks the host;
* a transfer starts after the work already queued on the current stream, so a buffer may be
  received into again as soon as the kernels that read it have been *queued*;
* on an axis the first transfer involves all its ranks (some backends create communicators then).

Shapes: attention tensors are ``[B, H, S, D]`` (any strides); on the wire the sequence comes first,
``[S, B, H, D]``, so that a range of tokens is one contiguous piece of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Piece, Range

# The names changed in torch 2.13; the old ones warn there and are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Pair = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------- traffic records


@dataclass
class Traffic:
    """What one rank sent: entries ``(operation, bytes)`` in order."""

    entries: list[tuple[str, int]] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(n for _, n in self.entries)


_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record every transfer this process makes through ``hyper_cp`` inside the block.

    Bytes are those this rank must send: ``(n-1)/n`` of an all-to-all's or reduce-scatter's input,
    ``n-1`` times an all-gather's input, the message of a point-to-point transfer.
    """
    log = Traffic()
    _recording.append(log)
    try:
        yield log
    finally:
        _recording.remove(log)


def _record(operation: str, nbytes: int) -> None:
    for log in _recording:
        log.entries.append((operation, nbytes))


# --------------------------------------------------------------------------- primitives


class Pending:
    """A transfer in flight. Owns its buffers; ``wait()`` returns the result, through ``finish``
    (an unpacking copy, say) if there is one. Called once."""

    def __init__(
        self, works: Sequence[Any], result: Any, sent: Any, finish: Callable[[Any], Any] = lambda r: r
    ) -> None:
        self._works, self._result, self._sent, self._finish = works, result, sent, finish

    def wait(self) -> Any:
        # Some backends return one work for a whole batch, others one per transfer: wait on all.
        for work in self._works:
            work.wait()
        result, self._result, self._sent, self._works = self._result, None, None, ()
        return self._finish(result)

    def then(self, finish: Callable[[Any], Any]) -> Pending:
        """The same transfer, with one more step after it has arrived."""
        before = self._finish
        return Pending(self._works, self._result, self._sent, lambda r: finish(before(r)))


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of a cp mesh: this rank's place in it and its process group."""

    rank: int
    size: int
    group: Any

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        kind = GlooAxis if dist.get_backend(group) == "gloo" else Axis
        return kind(dist.get_rank(group), dist.get_world_size(group), group)

    @staticmethod
    def alone() -> Axis:
        """An axis of one rank: it communicates nothing."""
        return Axis(0, 1, None)

    def alive(self) -> bool:
        """Whether the process group still exists."""
        try:
            return self.group is None or bool(dist.get_process_group_ranks(self.group))
        except (KeyError, RuntimeError, ValueError):
            return False

    def all_to_all(self, send: Tensor) -> Pending:
        """``send[i]`` goes to rank i; ``result[i]`` came from rank i."""
        _record("all_to_all", send.nbytes // self.size * (self.size - 1))
        result = torch.empty_like(send)
        work = dist.all_to_all_single(result, send, group=self.group, async_op=True)
        return Pending([work], result, send)

    def all_gather(self, send: Tensor) -> Pending:
        """Result: the ranks' tensors concatenated along dimension 0."""
        _record("all_gather", send.nbytes * (self.size - 1))
        result = send.new_empty(self.size * send.shape[0], *send.shape[1:])
        work = _all_gather(result, send, group=self.group, async_op=True)
        return Pending([work], result, send)

    def reduce_scatter(self, send: Tensor) -> Pending:
        """Result: this rank's part (along dimension 0) of the sum over ranks."""
        _record("reduce_scatter", send.nbytes // self.size * (self.size - 1))
        result = send.new_empty(send.shape[0] // self.size, *send.shape[1:])
        work = _reduce_scatter(result, send, group=self.group, async_op=True)
        return Pending([work], result, send)

    def send_recv(self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int) -> Pending:
        """Send to one rank and receive from one rank, in one batch; result: ``recvs``."""
        _record("send_recv", sum(t.nbytes for t in sends))
        works = self._batch([(t, to) for t in sends], [(t, source) for t in recvs])
        return Pending(works, list(recvs), list(sends))

    def _batch(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> list[Any]:
        batch = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t, to in sends]
        batch += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t, source in recvs]
        return dist.batch_isend_irecv(batch)


class GlooAxis(Axis):
    """Gloo's all-gather and reduce-scatter take three to four times as long as its point-to-point
    transfers of the same bytes (16 MiB, 2 ranks: 20 and 25 ms against 6 ms), so here they are made
    of those. NCCL and HCCL choose a route through the machine's topology: there Axis is right.
    """

    def all_gather(self, send: Tensor) -> Pending:
        _record("all_gather", send.nbytes * (self.size - 1))
        result = send.new_empty(self.size, *send.shape)
        result[self.rank].copy_(send)
        peers = self._peers()
        works = self._batch([(send, p) for p in peers], [(result[p], p) for p in reversed(peers)])
        return Pending(works, result.flatten(0, 1), send)

    def reduce_scatter(self, send: Tensor) -> Pending:
        _record("reduce_scatter", send.nbytes // self.size * (self.size - 1))
        parts = send.unflatten(0, (self.size, -1))
        received = torch.empty_like(parts)
        peers = self._peers()
        works = self._batch([(parts[p], p) for p in peers], [(received[p], p) for p in reversed(peers)])
        received[self.rank].copy_(parts[self.rank])
        # Summed in rank order whatever arrives first: the same bits every time.
        return Pending(works, received, send, finish=lambda r: r.sum(0))

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that at each moment every rank has one sender."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


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
    ranks -1, -2, ... (mod size). The transfer of the next block is posted before the current one is
    yielded. Beyond the inputs two blocks are alive: one being sent, one being received.
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
            return
        # Three gradient buffers: the sum that leaves, the sum that arrives, what this rank adds to it.
        # At hop 1 no sum has come along with the block: this rank begins it.
        leaving = self.message.zeros(self.k, self.dtype)
        arriving, adding = torch.empty_like(leaving), torch.zeros_like(leaving)
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
    on, the gather was in flight) the blocks of all ranks in rank order."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int):
        self.local = k, v
        self.pending = [axis.all_gather(to_wire(x)) for x in (k, v)] if hops else []

    def __iter__(self) -> Iterator[Pair]:
        yield self.local
        if self.pending:
            k, v = (from_wire(pending.wait()) for pending in self.pending)
            yield k, v


class GatherBackward:
    """Keys and values are gathered again; gradients of all blocks are summed by reduce-scatter.

    Yields ``(k, v, dk, dv)`` like :class:`RingBackward`: local, all ranks, local again (while the
    gradients travel).
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, hops: int, dtype: torch.dtype):
        self.axis, self.dtype = axis, dtype
        self.home = _gradient_zeros(k, dtype), _gradient_zeros(v, dtype)
        self.blocks = GatherForward(axis, k, v, hops)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        blocks = iter(self.blocks)
        yield *next(blocks), *self.home
        for k, v in blocks:
            # Gathered tensors are views of the wire format, which the zeros take over.
            dk, dv = (torch.zeros_like(x.movedim(2, 0), dtype=self.dtype) for x in (k, v))
            yield k, v, from_wire(dk), from_wire(dv)
            pending = [self.axis.reduce_scatter(total) for total in (dk, dv)]
            yield *self.blocks.local, *self.home
            for home, arrived in zip(self.home, pending, strict=True):
                home += from_wire(arrived.wait())


FORWARD: dict[str, type[RingForward] | type[GatherForward]] = {
    "ring": RingForward,
    "all_gather": GatherForward,
}
BACKWARD: dict[str, type[RingBackward] | type[GatherBackward]] = {
    "ring": RingBackward,
    "all_gather": GatherBackward,
}


# --------------------------------------------------------------------------- queries


class SwappedTails:
    """Queries (and what belongs to them) with the tail half exchanged with rank ``size-1-rank``.

    Tensors are ``[B, H, S, ...]``. With ``swap=False`` they are used as they are. The head half is
    usable at once; asking for rows of the tail waits for the transfer. Swapping twice restores.
    """

    def __init__(self, axis: Axis, swap: bool, *tensors: Tensor):
        self.tensors: Sequence[Tensor] = tensors
        self.half = tensors[0].shape[2] // 2
        self.pending: Pending | None = None
        partner = axis.size - 1 - axis.rank
        if swap and partner != axis.rank:
            filled = [self._with_head(x) for x in tensors]
            sends = [to_wire(x[:, :, self.half :]) for x in tensors]
            recvs = [x[self.half :] for x in filled]
            self.pending = axis.send_recv(sends, partner, recvs, partner)
            self.tensors = [from_wire(x) for x in filled]

    def _with_head(self, x: Tensor) -> Tensor:
        wire = x.movedim(2, 0)
        filled = torch.empty(wire.shape, dtype=x.dtype, device=x.device)
        filled[: self.half].copy_(wire[: self.half])
        return filled

    def rows(self, rows: Range) -> list[Tensor]:
        """The tensors restricted to a range of queries."""
        start, stop = rows
        if stop > self.half:
            self.whole()
        return [x[:, :, start:stop] for x in self.tensors]

    def whole(self) -> Sequence[Tensor]:
        """The tensors with both halves in place."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.tensors


# --------------------------------------------------------------------------- Ulysses


def sequence_to_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """Trade a sequence shard for a head shard: ``[.. S .. H ..] -> [.. S*n .. H/n ..]``.

    ``pieces`` (rank, local start, local stop) say in which order the ranks' tokens come; putting
    them in that order is part of the copy that unpacks the message.
    """
    by_rank = x.unflatten(head_dim, (axis.size, -1)).movedim(head_dim, 0)
    send = by_rank.movedim(seq_dim + 1, 1).contiguous()  # [n, S, ...]

    def unpack(received: Tensor) -> Tensor:
        parts = [received[rank, start:stop] for rank, start, stop in pieces]
        return torch.cat([part.movedim(0, seq_dim) for part in parts], dim=seq_dim).contiguous()

    return axis.all_to_all(send).then(unpack)


def heads_to_sequence(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, pieces: Sequence[Piece]) -> Pending:
    """The inverse: ``[.. S*n .. H ..] -> [.. S .. H*n ..]``."""
    ordered = x.movedim(seq_dim, 0)
    send = x.new_empty(axis.size, ordered.shape[0] // axis.size, *ordered.shape[1:])
    offset = 0
    for rank, start, stop in pieces:
        send[rank, start:stop].copy_(ordered[offset : offset + stop - start])
        offset += stop - start

    def unpack(received: Tensor) -> Tensor:
        by_rank = received.movedim(1, seq_dim + 1)  # [n, ... S ... H ...]
        return by_rank.movedim(0, head_dim).flatten(head_dim, head_dim + 1).contiguous()

    return axis.all_to_all(send).then(unpack)


# --------------------------------------------------------------------------- whole mesh


def gather_ranks(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """``x`` of every rank of a mesh, ``[n, *x.shape]`` in rank order; ``axes`` innermost first."""
    # Some backends have no bool: bytes travel as bytes.
    wire = x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x.contiguous()
    for axis in axes:
        if axis.size > 1:
            wire = axis.all_gather(wire).wait()
    return wire.view(x.dtype).view(-1, *x.shape)
