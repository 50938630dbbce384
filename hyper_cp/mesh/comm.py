"""Transfers of tensors along one dimension of a cp mesh. No other file sends tensors.

The rest of the library relies on these rules:

* every rank of an axis issues the same sequence of calls, whatever its own tiles are;
* a buffer in flight belongs to its :class:`Pending` until ``wait()``; on accelerators ``wait()`` orders the current
  stream after the transfer and never blocks the host;
* a transfer starts after the work already queued on the current stream, so a buffer may be received into again as soon
  as the kernels that read it have been *queued*;
* the first transfer on an axis involves all its ranks (some backends create communicators then);
* no graph writes a buffer in flight: in compiled code gathers, which copy this rank's part meanwhile, are an op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.compiling import is_compiling
from .failures import Transfer, here

# The names changed in torch 2.13; the old ones warn there and are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --------------------------------------------------------------------------- traffic records


@dataclass(eq=False)
class Traffic:
    """Record of what one rank sent: entries ``(operation, bytes)`` in order."""

    entries: list[tuple[str, int]] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(n for _, n in self.entries)


_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record every transfer this process makes through ``hyper_cp`` inside the block.

    Bytes are those this rank must send: ``(n-1)/n`` of an all-to-all's or reduce-scatter's input, ``n-1`` times an
    all-gather's input, the rows and messages of other transfers, and the entry that ``"agreement"`` puts in the store.
    """
    log = Traffic()
    _recording.append(log)
    try:
        yield log
    finally:
        _recording.remove(log)


def _nbytes(x: Tensor) -> int:
    """The bytes of a tensor. (Dynamo cannot trace ``Tensor.nbytes`` of a size that is symbolic.)"""
    return x.numel() * x.itemsize


def record(operation: str, nbytes: int) -> None:
    """Add a transfer to the records that are open."""
    for log in _recording:
        log.entries.append((operation, nbytes))


# --------------------------------------------------------------------------- primitives


class Pending:
    """A transfer in flight, which owns its buffers. ``wait()``, called once, returns the result after ``finish`` (an
    unpacking copy, say) has been applied to it."""

    def __init__(
        self,
        works: Sequence[Any],
        result: Any,
        sent: Any,
        finish: Callable[[Any], Any] = lambda r: r,
        transfer: Transfer | None = None,
    ) -> None:
        self._works, self._result, self._sent, self._finish = works, result, sent, finish
        self._transfer = Transfer(None, "a transfer") if transfer is None else transfer
        here.pending[self] = None

    def wait(self) -> Any:
        self.arrive()
        result, self._result, self._sent = self._result, None, None
        return self._finish(result)

    def arrive(self) -> None:
        """Wait, without a result."""
        here.pending.pop(self, None)
        if self._works:  # some backends return one for a whole batch, others one per transfer
            self._transfer.wait(self._works)
            self._works = ()

    def then(self, finish: Callable[[Any], Any]) -> Pending:
        """Add one more step after the transfer has arrived; returns the same object."""
        before = self._finish
        self._finish = lambda r: finish(before(r))
        return self


class Message:
    """A tensor, and the rank that it goes to or comes from. It may be posted several times, with what the tensor then
    holds."""

    __slots__ = ("_made", "nbytes", "peer", "tensor")

    def __init__(self, tensor: Tensor, peer: int) -> None:
        self.tensor, self.peer, self.nbytes = tensor, peer, _nbytes(tensor)
        self._made: dict[tuple[Any, Any], dist.P2POp] = {}

    def on(self, group: Any, operation: Any) -> dist.P2POp:
        """``dist.isend`` or ``dist.irecv`` of it on a group, made once: PyTorch looks up ranks for each."""
        found = self._made.get((group, operation))
        if found is None:
            found = dist.P2POp(operation, self.tensor, group=group, group_peer=self.peer)
            self._made[group, operation] = found
        return found


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of a cp mesh: this rank's place in it, its size and its process group."""

    rank: int
    size: int
    group: Any
    per_host: int = 0
    """The adjacent ranks that share a host, of an axis with links of its own between hosts; else 0."""
    between: Axis | None = None
    """The same ranks with another group, for messages to other hosts: messages of one group follow each other."""
    key: str = ""
    """The name of its group, by which the op of a compiled graph finds it."""

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        kind, kept = BACKENDS.get(backend_of(group), Axis), _BY_KEY.get(group.group_name)
        if kept is not None and kept.group is group and type(kept) is kind:
            return kept
        made = kind(dist.get_rank(group), dist.get_world_size(group), group, key=group.group_name)
        for key in [key for key, axis in _BY_KEY.items() if not axis.alive()]:
            del _BY_KEY[key]
        _BY_KEY[made.key] = made
        return made

    @staticmethod
    def alone() -> Axis:
        """An axis of one rank: it communicates nothing."""
        return Axis(0, 1, None)

    def over_hosts(self, per_host: int, between: Axis | None) -> Axis:
        """The same axis with its hosts."""
        made = copy(self)
        for name, value in (("per_host", per_host), ("between", between)):
            object.__setattr__(made, name, value)
        return made

    def alive(self) -> bool:
        """True while the process group exists."""
        try:
            return self.group is None or bool(dist.get_process_group_ranks(self.group))
        except (KeyError, RuntimeError, ValueError):
            return False

    def all_to_all(self, send: Tensor) -> Pending:
        """``send[i]`` goes to rank i; ``result[i]`` came from rank i."""
        record("all_to_all", _nbytes(send) // self.size * (self.size - 1))
        result = torch.empty_like(send)
        with Transfer(self.group, "all_to_all") as transfer:
            work = dist.all_to_all_single(result, send, group=self.group, async_op=True)
        return Pending([work], result, send, transfer=transfer)

    def all_gather(self, send: Tensor, own: bool = True) -> Pending:
        """Gather the ranks' tensors, concatenated along dimension 0. With ``own=False`` the caller does not read this
        rank's own part, which may then be uninitialised."""
        record("all_gather", _nbytes(send) * (self.size - 1))
        result = send.new_empty(self.size * send.shape[0], *send.shape[1:])
        with Transfer(self.group, "all_gather") as transfer:
            work = _all_gather(result, send, group=self.group, async_op=True)
        return Pending([work], result, send, transfer=transfer)

    def reduce_scatter(self, send: Tensor) -> Pending:
        """Sum this rank's part (along dimension 0) over the *other* ranks. The own part of ``send`` must be zero."""
        record("reduce_scatter", _nbytes(send) // self.size * (self.size - 1))
        result = send.new_empty(send.shape[0] // self.size, *send.shape[1:])
        with Transfer(self.group, "reduce_scatter") as transfer:
            work = _reduce_scatter(result, send, group=self.group, async_op=True)
        return Pending([work], result, send, transfer=transfer)

    def all_to_all_rows(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Send ``sent[i]`` rows ``[*, W]`` to rank i, the first ones to rank 0; the result has ``received[i]`` rows
        from rank i, in the same order. A rank sends itself none."""
        record("all_to_all_rows", _nbytes(send))
        result = send.new_empty(sum(received), *send.shape[1:])
        with Transfer(self.group, "all_to_all_rows") as transfer:
            work = dist.all_to_all_single(result, send, list(received), list(sent), group=self.group, async_op=True)
        return Pending([work], result, send, transfer=transfer)

    def send_recv(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Send tensors and receive into others, in one batch, each with the rank on its other end; the result is the
        tensors that were received."""
        record("send_recv", sum(message.nbytes for message in sends))
        axis = self.between if self.between is not None and self._leaves_host([*sends, *recvs]) else self
        transfer, works = axis._batch("send_recv", sends, recvs)
        return Pending(works, [message.tensor for message in recvs], sends, transfer=transfer)

    def _leaves_host(self, messages: Sequence[Message]) -> bool:
        """True if a message goes to, or comes from, another host than this rank's."""
        return self.per_host > 0 and any(
            message.peer // self.per_host != self.rank // self.per_host for message in messages
        )

    def _batch(self, name: str, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[Transfer, list[Any]]:
        batch = [message.on(self.group, dist.isend) for message in sends]
        batch += [message.on(self.group, dist.irecv) for message in recvs]
        return self._post(name, batch)

    def _post(self, name: str, batch: list[dist.P2POp]) -> tuple[Transfer, list[Any]]:
        with Transfer(self.group, name, [op.group_peer for op in batch]) as transfer:
            return transfer, dist.batch_isend_irecv(batch) if batch else []


class GlooAxis(Axis):
    """An axis on gloo, with collectives made of point-to-point transfers, whose receives are posted before their sends.

    Gloo's own all-gather and reduce-scatter take three to four times as long as its point-to-point transfers of the
    same bytes (16 MiB, 2 ranks: 20 and 25 ms against 6 ms), its all-to-all twice as long. NCCL and HCCL choose a route
    through the machine's topology: :class:`Axis` is right for them.
    """

    def _batch(self, name: str, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[Transfer, list[Any]]:
        # Two ranks share one connection for both directions, and a message leaves when its receiver has said over that
        # connection that it is ready. Posted after a send, a receive says so behind all bytes of the send, and the two
        # directions take turns. 8 MiB each way over 800 Mbit/s, which need 0.084 s: 0.15 s with sends first, 0.09 s
        # with receives first (100 Mbit/s, 0.67 s: 0.80 and 0.70 s). Messages stay whole: in parts of 64 KiB to 4 MiB
        # they take 0.11 to 0.17 s with sends first and 0.09 to 0.10 s with receives first.
        batch = [message.on(self.group, dist.irecv) for message in recvs]
        batch += [message.on(self.group, dist.isend) for message in sends]
        return self._post(name, batch)

    def all_to_all(self, send: Tensor) -> Pending:  # gloo's own posts sends first: 0.18 s at 800 Mbit/s
        record("all_to_all", _nbytes(send) // self.size * (self.size - 1))
        result, peers = torch.empty_like(send), self._peers()
        sends = [Message(send[p], p) for p in peers]
        recvs = [Message(result[p], p) for p in reversed(peers)]
        transfer, works = self._batch("all_to_all", sends, recvs)
        result[self.rank].copy_(send[self.rank])  # while the others travel
        return Pending(works, result, send, transfer=transfer)

    def all_gather(self, send: Tensor, own: bool = True) -> Pending:
        record("all_gather", _nbytes(send) * (self.size - 1))
        result = send.new_empty(self.size, *send.shape)
        peers = self._peers()
        sends = [Message(send, p) for p in peers]
        recvs = [Message(result[p], p) for p in reversed(peers)]
        transfer, works = self._batch("all_gather", sends, recvs)
        if own:
            result[self.rank].copy_(send)
        return Pending(works, result.flatten(0, 1), send, transfer=transfer)

    def reduce_scatter(self, send: Tensor) -> Pending:
        record("reduce_scatter", _nbytes(send) // self.size * (self.size - 1))
        parts = send.unflatten(0, (self.size, -1))
        peers = self._peers()
        received = {p: torch.empty_like(parts[p]) for p in sorted(peers)}
        sends = [Message(parts[p], p) for p in peers]
        recvs = [Message(received[p], p) for p in reversed(peers)]
        transfer, works = self._batch("reduce_scatter", sends, recvs)
        return Pending(works, list(received.values()), send, _sum_in_place, transfer)

    def all_to_all_rows(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        record("all_to_all_rows", _nbytes(send))
        result = send.new_empty(sum(received), *send.shape[1:])
        outgoing, incoming, peers = send.split(list(sent)), result.split(list(received)), self._peers()
        sends = [Message(outgoing[p], p) for p in peers if sent[p]]
        recvs = [Message(incoming[p], p) for p in reversed(peers) if received[p]]
        transfer, works = self._batch("all_to_all_rows", sends, recvs)
        return Pending(works, result, send, transfer=transfer)

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that at each moment every rank has one sender."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class HcclAxis(Axis):
    """An axis on HCCL, whose batches refuse two messages to, or from, the same rank ("Send Tasks are duplicated")."""

    def _batch(self, name: str, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[Transfer, list[Any]]:
        works: list[Any] = []
        peers: list[int] = []  # of each work, in the order of the rounds
        for some, others in zip_longest(_one_each(sends), _one_each(recvs), fillvalue=()):
            works += super()._batch(name, some, others)[1]
            peers += [message.peer for message in (*some, *others)]
        return Transfer(self.group, name, peers), works


def _one_each(messages: Sequence[Message]) -> list[list[Message]]:
    """The first message of each rank, then the second of each, and so on: the same order on both sides."""
    rounds: list[list[Message]] = []
    count: Counter[int] = Counter()
    for message in messages:
        if count[message.peer] == len(rounds):
            rounds.append([])
        rounds[count[message.peer]].append(message)
        count[message.peer] += 1
    return rounds


_BY_KEY: dict[str, Axis] = {}
"""The axes of process groups that exist, for ops, to which only strings travel."""

BACKENDS: dict[str, type[Axis]] = {"gloo": GlooAxis, "hccl": HcclAxis}
"""The kind of axis for each backend; any other has :class:`Axis` itself."""


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend that serves the accelerator, or the CPU if there is no other. ``get_backend`` does not name it for a
    group of several backends, nor for the default of ``init_process_group``."""
    of_device = backends_of(group)
    others = [backend for device, backend in of_device.items() if device != "cpu"]
    return (others or [*of_device.values()])[0]


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each type of device."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _sum_in_place(parts: list[Tensor]) -> Tensor:
    """Sum in the order of the list, whatever arrived first: the same bits every time."""
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


# --------------------------------------------------------------------------- whole mesh


def gather_ranks(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """Gather ``x`` of every rank of a mesh: ``[n, *x.shape]`` in rank order; ``axes`` innermost first."""
    if is_compiling():
        return gather_by_keys([axis.key for axis in axes if axis.size > 1], x)
    # Some backends have no bool: bytes travel as bytes.
    wire = x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x.contiguous()
    for axis in axes:
        if axis.size > 1:
            wire = axis.all_gather(wire).wait()
    whole = wire.view(torch.bool) if x.dtype == torch.bool else wire
    return whole.view(math.prod(axis.size for axis in axes), *x.shape)


def gather_by_keys(axes: Sequence[str], x: Tensor) -> Tensor:
    """:func:`gather_ranks` in a graph, over axes of several ranks by their keys."""
    found = x.unsqueeze(0)
    for axis in axes:
        found = gather_ranks_op(found, axis).flatten(0, 1)
    return found


# An op: a traced transfer would be cut in two where it is posted, and the second graph writes the buffer in flight as a
# whole when it copies this rank's part into it, with what was there before the other parts arrived.
@torch.library.custom_op("hyper_cp::gather_ranks", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_ranks_op(x: Tensor, axis: str) -> Tensor:
    """:func:`gather_ranks` over one axis of several ranks, by its key."""
    return gather_ranks([_BY_KEY[axis]], x)


@gather_ranks_op.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(_BY_KEY[axis].size, *x.shape)


def sum_to_ranks(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """The transpose of :func:`gather_ranks`: the sum over all ranks of ``x[i]``, on rank i. It overwrites ``x``."""
    for axis in reversed(axes):
        if axis.size > 1:
            own = x.view(axis.size, -1, *x.shape[1:])[axis.rank]
            kept = own.clone()
            own.zero_()
            x = axis.reduce_scatter(x).wait() + kept
    return x[0]
