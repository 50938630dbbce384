"""Carries out the moves of a call: keys and values on their way between the ranks of an axis, and their gradients back.

Every way of obtaining keys and values runs through this code. What differs is in :mod:`hyper_cp.schedule.arrivals`.

Who owns what: rows in flight belong to their :class:`~hyper_cp.mesh.comm.Pending`. A block belongs to the
:class:`Travel`; the caller may read it until it asks for the next one. Buffers of pairs are used again as soon as what
was sent out of them has left, so that a ring holds two blocks: one that is being sent, one that is being received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...mesh.comm import Axis, Message, Pending
from ...schedule.moves import HOME, Move, Transfers
from ..kernels.partials import like_queries
from .codec import Codec


class _Buffer:
    """Rows, and the tensors and the messages that they are, made once."""

    __slots__ = ("codec", "messages", "rows", "shown")

    def __init__(self, rows: Tensor, codec: Codec) -> None:
        self.rows, self.codec = rows, codec
        self.shown: Sequence[Tensor] = ()
        self.messages: dict[int, Message] = {}

    @property
    def tensors(self) -> Sequence[Tensor]:
        self.shown = self.shown or self.codec.unpack(self.rows)
        return self.shown

    def message(self, peer: int) -> Message:
        """The message that takes these rows to a rank, or brings them from it."""
        found = self.messages.get(peer)
        if found is None:
            found = self.messages[peer] = Message(self.rows, peer)
        return found


class _Parcel:
    """Rows under way: what this rank sends, and what it receives into. A collective makes its own result.
    ``taken``: what arrived has become the sum that it was to be added to."""

    __slots__ = ("into", "move", "pending", "sent", "taken")

    def __init__(self, move: Move, sent: _Buffer, into: _Buffer | None = None, pending: Pending | None = None) -> None:
        self.move, self.sent, self.into, self.pending, self.taken = move, sent, into, pending, False

    def wait(self) -> _Buffer:
        """Wait for the rows that arrive, and return them."""
        if self.pending is None:
            raise RuntimeError(f"{self.move} is waited for before it was posted")
        if self.into is None:
            return _Buffer(self.pending.wait(), self.sent.codec)
        self.pending.arrive()
        return self.into


Gradients = Callable[[bool], Sequence[Tensor]]
"""The sums of a block's gradients, of k and of v, see :class:`Travel`."""


class Travel:
    """Keys and values of one call, and in backward their gradients.

    Iterating yields ``(keys, gradients)`` for each step of the schedule: this rank's own k and v ``[B, H, S, D]``,
    those of each block that arrives, then its own again. With ``sums``, the dtype of sums, ``gradients(late)`` are
    where the caller adds those of the yielded keys before it asks for the next. If it asks ``late``, with nothing left
    to compute that a transfer could hide behind, it may get the sum of other ranks that has arrived for these keys.
    ``home`` are the sums of this rank's own keys.

    ``wire``: rows of wider dtypes travel in this one. Sums stay as wide as they are on every rank.

    With ``keys_only`` values have no gradients: theirs are ``[B, H, S, 0]``, and nothing of them travels.
    """

    def __init__(
        self,
        axis: Axis,
        transfers: Transfers,
        k: Tensor,
        v: Tensor,
        sums: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        keys_only: bool = False,
    ) -> None:
        self.axis, self.transfers, self.own, self.sums, self.wire = axis, transfers, (k, v), sums, wire
        self.codec, self.keys_only = Codec(k, v), keys_only
        self.differentiated = (k, v[..., :0]) if keys_only else self.own
        self._of_sums = Codec(*self.differentiated) if keys_only else self.codec
        self._dtype = k.dtype if sums is None else sums
        self._blocks: dict[int, _Buffer] = {}
        self._gradients: dict[int, _Buffer] = {}
        self._arriving: dict[int, _Parcel] = {}
        self._returning: dict[int, _Parcel] = {}
        self._lengths: dict[int, int] = {}  # rows of blocks
        self._free: dict[tuple[torch.Size, torch.dtype], list[_Buffer]] = {}
        self.home: Sequence[Tensor] = ()
        if sums is not None and transfers.moves:
            self._gradients[HOME] = self._zeros(k.shape[2])
            self.home = self._gradients[HOME].tensors
        elif sums is not None:
            self.home = [like_queries(x, x.shape[3], sums).zero_() for x in self.differentiated]
        self._events = iter(transfers.forward if sums is None else transfers.backward)
        self._next = self._run()  # the first moves leave before the caller computes anything

    def __iter__(self) -> Iterator[tuple[Sequence[Tensor], Gradients | None]]:
        while self._next is not None:
            yield self._keys_and_gradients(self._next)
            self._next = self._run()

    def gradients_at_home(self) -> Sequence[Tensor]:
        """The gradients of this rank's own k and v, in their dtype and in memory order [B, S, H, D]. Waits for the last
        of them."""
        if self._run() is not None:
            raise RuntimeError("the gradients of keys are asked for before all blocks have been used")
        if not self.transfers.moves:
            return [total.to(x.dtype) for total, x in zip(self.home, self.differentiated, strict=True)]
        pairs = zip(self.home, self.differentiated, strict=True)
        return [like_queries(x, x.shape[3], x.dtype).copy_(total) for total, x in pairs]

    def _run(self) -> int | None:
        """Carry out events up to the next use of a block. None: there is no other."""
        for kind, block, gradient in self._events:
            if kind == "use":
                return block
            if kind == "post":
                self._post(block, gradient)
            elif block is not None:
                self._arrive(block)
            elif gradient is not None:
                self._add(gradient)
        return None

    def _keys_and_gradients(self, block: int) -> tuple[Sequence[Tensor], Gradients | None]:
        if block == HOME:
            return self.own, None if self.sums is None else lambda late: self.home
        keys = self._blocks[block] if block in self.transfers.sent_on else self._blocks.pop(block)
        shown, dtype = keys.tensors, self.own[0].dtype
        if keys.rows.dtype != dtype:
            shown = [x.to(dtype) for x in shown]
        if self.sums is None:
            return shown, None
        self._lengths[block] = keys.rows.shape[0]
        return shown, lambda late: self._total(block, late).tensors

    def _total(self, block: int, late: bool) -> _Buffer:
        """The sum of the gradients of a block's keys: what has arrived for them, or zeros."""
        total = self._gradients.get(block)
        if total is None:
            total = self._arrived_sum(block) if late else None
            total = self._gradients[block] = total or self._zeros(self._lengths[block])
        return total

    def _arrived_sum(self, block: int) -> _Buffer | None:
        """The sum of other ranks, of which this rank's is to be a part, if it is there for every row of a block."""
        gradient = self.transfers.becomes.get(block)
        parcel = None if gradient is None else self._returning.get(gradient)
        if parcel is None:
            return None
        arrived, parcel.taken = parcel.wait(), True
        self._release(parcel.sent)
        return self._in_dtype(arrived, self._dtype)

    def _in_dtype(self, buffer: _Buffer, dtype: torch.dtype) -> _Buffer:
        """A buffer of this rank's own, in a dtype."""
        if buffer.rows.dtype == dtype:
            return buffer
        made = self._room(buffer.rows.shape[0], dtype, buffer.codec)
        made.rows.copy_(buffer.rows)
        self._release(buffer)
        return made

    # ----------------------------------------------------------------------- transfers

    def _post(self, block: int | None, gradient: int | None) -> None:
        pairs: list[tuple[_Parcel, Message, Message]] = []
        if block is not None:
            move = self.transfers.moves[block]
            self._arriving[block] = self._parcel(move, self._leaving(move), pairs)
        if gradient is not None:
            total = self._total(gradient, late=True)  # no tile used it, if there is none yet
            del self._gradients[gradient]
            sent = self._in_dtype(total, self._on_wire(self._dtype))
            self._returning[gradient] = self._parcel(self.transfers.gradient_moves[gradient].transposed, sent, pairs)
        if pairs:  # they leave in one batch
            parcels, sends, receives = zip(*pairs, strict=True)
            pending = self.axis.send_recv(sends, receives)
            for parcel in parcels:
                parcel.pending = pending

    def _leaving(self, move: Move) -> _Buffer:
        """The rows that leave with a move of keys."""
        if move.source == HOME:
            return _Buffer(self.codec.pack(move.rows, self._on_wire(self.own[0].dtype)), self.codec)
        block = self._blocks[move.source]
        rows = move.rows.take(block.rows, 0)
        return block if rows is block.rows else _Buffer(rows, self.codec)

    def _parcel(self, move: Move, sent: _Buffer, pairs: list[tuple[_Parcel, Message, Message]]) -> _Parcel:
        """Rows that leave: at once, but those of a pair, which are added to ``pairs`` with their messages."""
        if move.pattern == "pair":
            into, (to, origin) = self._room(move.rows.length, sent.rows.dtype, sent.codec), move.peers
            parcel = _Parcel(move, sent, into)
            pairs.append((parcel, sent.message(to), into.message(origin)))
            return parcel
        if move.pattern == "all":
            return _Parcel(move, sent, pending=self.axis.all_gather(sent.rows, own=False))
        if move.pattern == "sum" and sent.rows.dtype != self.sums:  # a reduce-scatter would add in the narrow dtype
            by_rank = self.axis.all_to_all(sent.rows.unflatten(0, (self.axis.size, -1)))
            return _Parcel(move, sent, pending=by_rank.then(lambda x: x.sum(0, dtype=self.sums)))
        if move.pattern == "sum":
            return _Parcel(move, sent, pending=self.axis.reduce_scatter(sent.rows))
        return _Parcel(move, sent, pending=self.axis.all_to_all_rows(sent.rows, move.sent, move.received))

    def _arrive(self, block: int) -> None:
        parcel = self._arriving.pop(block)
        self._blocks[block], source = parcel.wait(), parcel.move.source
        if source == HOME:
            if parcel.into is not None:
                self._release(parcel.sent)
        elif self.transfers.sent_on[source] == block:
            self._release(self._blocks.pop(source))

    def _add(self, gradient: int) -> None:
        """Add the gradients that have come back to those of the keys that they are gradients of."""
        move = self.transfers.gradient_moves[gradient]
        if move.source != HOME:
            self._total(move.source, late=True)  # it becomes the sum itself, if no tile has used these keys
        parcel = self._returning.pop(gradient)
        if parcel.taken:
            return
        arrived, total = parcel.wait(), self._gradients[move.source].rows
        if move.pattern != "rows":
            move.rows.add(total, arrived.rows if arrived.rows.dtype == total.dtype else arrived.rows.to(total.dtype), 0)
        else:  # one rank at a time, since several may return a gradient of the same row
            sizes = [rows for rows in move.sent if rows]
            index = move.rows.index(total.device)
            for where, rows in zip(index.split(sizes), arrived.rows.split(sizes), strict=True):
                total.index_add_(0, where, rows.to(total.dtype))
        if parcel.into is not None:
            self._release(parcel.sent)
            self._release(arrived)

    # ----------------------------------------------------------------------- buffers of pairs

    def _on_wire(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.wire is None or dtype.itemsize <= self.wire.itemsize else self.wire

    def _room(self, length: int, dtype: torch.dtype, codec: Codec) -> _Buffer:
        """Uninitialised rows."""
        size = torch.Size((length, codec.width))
        free = self._free.get((size, dtype))
        return free.pop() if free else _Buffer(self.own[0].new_empty(size, dtype=dtype), codec)

    def _zeros(self, length: int) -> _Buffer:
        """Room for the sums of gradients."""
        found = self._room(length, self._dtype, self._of_sums)
        found.rows.zero_()
        return found

    def _release(self, buffer: _Buffer) -> None:
        self._free.setdefault((buffer.rows.shape, buffer.rows.dtype), []).append(buffer)
