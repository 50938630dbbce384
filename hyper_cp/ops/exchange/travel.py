"""Carries out the moves of a call: keys and values on their way between the ranks of an axis, and their gradients back.

Every way of obtaining keys and values runs through this code. What differs is in :mod:`hyper_cp.schedule.arrivals`.

Who owns what: rows in flight belong to their :class:`~hyper_cp.mesh.comm.Pending`. A block belongs to the
:class:`Travel`; the caller may read it until it asks for the next one. Buffers of pairs are used again as soon as what
was sent out of them has left, so that a ring holds two blocks: one that is being sent, one that is being received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...mesh.comm import Axis, Pending
from ...schedule.moves import HOME, Move, Transfers
from ..kernels.partials import like_queries
from .codec import Codec


@dataclass(slots=True)
class _Parcel:
    """Rows under way: what this rank sends, and the transfer that brings what it receives."""

    move: Move
    sent: Tensor
    room: Tensor | None = None
    """The buffer of a pair that is received into."""
    pending: Pending | None = None

    def wait(self) -> Tensor:
        """What has arrived."""
        if self.pending is None:
            raise RuntimeError(f"{self.move} was not posted before it was waited for")
        if self.room is None:
            rows: Tensor = self.pending.wait()
            return rows
        self.pending.arrive()
        return self.room


class Travel:
    """Keys and values of one call, and in backward their gradients.

    Iterating yields ``(keys, gradients)`` for each step of the schedule: this rank's own k and v ``[B, H, S, D]``,
    those of each block that arrives, then its own again. With ``sums``, the dtype of sums, ``gradients`` are where the
    caller adds those of the yielded keys before it asks for the next. ``home`` are those of this rank's own keys, and
    complete at the end.
    """

    def __init__(self, axis: Axis, transfers: Transfers, k: Tensor, v: Tensor, sums: torch.dtype | None = None) -> None:
        self.axis, self.transfers, self.own, self.sums = axis, transfers, (k, v), sums
        self.codec = Codec(k, v)
        self.home = [] if sums is None else [like_queries(x, x.shape[3], sums).zero_() for x in self.own]
        self._onward = {move.source for move in transfers.moves}
        self._blocks: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._arriving: dict[int, _Parcel] = {}
        self._returning: dict[int, _Parcel] = {}
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._events = iter(transfers.forward if sums is None else transfers.backward)
        self._next = self._run()  # the first moves leave before the caller computes anything

    def __iter__(self) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        while self._next is not None:
            yield self._keys_and_gradients(self._next)
            self._next = self._run()

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

    def _keys_and_gradients(self, block: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if block == HOME:
            return self.own, self.home
        rows = self._blocks[block] if block in self._onward else self._blocks.pop(block)
        if self.sums is None:
            return self.codec.unpack(rows), ()
        total = self._gradients[block] = self._room(len(rows), self.sums).zero_()
        return self.codec.unpack(rows), self.codec.unpack(total)

    # ----------------------------------------------------------------------- transfers

    def _post(self, block: int | None, gradient: int | None) -> None:
        pairs: list[_Parcel] = []
        if block is not None:
            move = self.transfers.moves[block]
            self._arriving[block] = self._parcel(move, self._leaving(move), pairs)
        if gradient is not None:
            move = self.transfers.returns[gradient].transposed
            self._returning[gradient] = self._parcel(move, self._gradients.pop(gradient), pairs)
        if pairs:  # in one batch
            to, origin = zip(*(x.move.peers for x in pairs), strict=True)
            sends, receives = zip(*((x.sent, x.room) for x in pairs), strict=True)
            pending = self.axis.send_recv(sends, to, receives, origin)
            for parcel in pairs:
                parcel.pending = pending

    def _leaving(self, move: Move) -> Tensor:
        """The rows that leave with a move of keys."""
        return self.codec.pack(move.rows) if move.source == HOME else move.rows.take(self._blocks[move.source], 0)

    def _parcel(self, move: Move, rows: Tensor, pairs: list[_Parcel]) -> _Parcel:
        """Rows that leave now; those of a pair are posted with the others of their batch."""
        if move.pattern == "pair":
            pairs.append(_Parcel(move, rows, self._room(sum(move.received), rows.dtype)))
            return pairs[-1]
        if move.pattern == "all":
            return _Parcel(move, rows, pending=self.axis.all_gather(rows, own=False))
        if move.pattern == "sum":
            return _Parcel(move, rows, pending=self.axis.reduce_scatter(rows))
        return _Parcel(move, rows, pending=self.axis.all_to_all_rows(rows, move.sent, move.received))

    def _arrive(self, block: int) -> None:
        parcel = self._arriving.pop(block)
        self._blocks[block] = parcel.wait()
        if parcel.room is not None:
            self._release(parcel.sent)
            self._blocks.pop(parcel.move.source, None)

    def _add(self, gradient: int) -> None:
        parcel, move = self._returning.pop(gradient), self.transfers.returns[gradient]
        rows = parcel.wait()
        if move.source != HOME:
            move.rows.add(self._gradients[move.source], rows, 0)
        elif move.pattern != "rows":
            for total, x in zip(self.home, self.codec.unpack(rows), strict=True):
                move.rows.add(total, x, 2)
        else:  # one rank at a time, since several may return a gradient of the same row
            index = move.rows.index(rows.device)
            for where, some in zip(index.split(move.sent), rows.split(move.sent), strict=True):
                for total, x in zip(self.home, self.codec.unpack(some), strict=True):
                    total.movedim(2, 0).index_add_(0, where, x.movedim(2, 0))
        if parcel.room is not None:
            self._release(parcel.sent)
            self._release(rows)

    # ----------------------------------------------------------------------- buffers of pairs

    def _room(self, length: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised rows."""
        free = self._free.get((length, dtype))
        return free.pop() if free else self.own[0].new_empty(length, self.codec.width, dtype=dtype)

    def _release(self, rows: Tensor) -> None:
        self._free.setdefault((len(rows), rows.dtype), []).append(rows)
