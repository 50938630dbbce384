"""Load balance of contiguous data: ranks exchange the tail halves of their queries, and the results come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...mesh.comm import Axis, Message, Pending
from ...schedule.ranges import Range, Rows
from ..kernels.partials import Parts
from .codec import Codec


class SwappedTails:
    """Queries (and what belongs to them) whose tail half is attended by rank ``size-1-rank``.

    Tensors are ``[B, H, S, ...]``. The head half is usable at once; asking for rows of the tail
    waits for the partner's. The results of the tail go back with :meth:`post_results`, as
    soon as no tile of it is left, so that the transfer is hidden behind the rest. With
    ``swap=False``, or on the rank that is its own partner, everything is used as it is.
    """

    def __init__(self, axis: Axis, swap: bool, *tensors: Tensor):
        self.axis, self.partner = axis, axis.size - 1 - axis.rank
        self.swapped = swap and self.partner != axis.rank
        self.tensors, self.tails = Parts(*tensors), Parts()
        self.length = tensors[0].shape[2]
        self.half = self.length // 2
        if self.swapped:
            self.pending = self._swap(tensors, (self.half, self.length))

    def _swap(self, tensors: Sequence[Tensor], rows: Range) -> Pending:
        """Post some rows of the tensors, those of one dtype in one message; the result has the partner's."""
        codecs = [Codec(*(x for x in tensors if x.dtype == dtype)) for dtype in dict.fromkeys(x.dtype for x in tensors)]
        sends = [codec.pack(Rows.of(*rows)) for codec in codecs]
        receives = [torch.empty_like(x) for x in sends]

        def unpacked(arrived: Sequence[Tensor]) -> list[Tensor]:
            of_dtype = {x.dtype: iter(codec.unpack(x)) for codec, x in zip(codecs, arrived, strict=True)}
            return [next(of_dtype[x.dtype]) for x in tensors]

        messages = ([Message(x, self.partner) for x in xs] for xs in (sends, receives))
        return self.axis.send_recv(*messages).then(unpacked)

    def rows(self, rows: Range, batch: Range | None = None) -> Sequence[Tensor]:
        """The tensors restricted to a range of queries (and of batch rows)."""
        start, stop = rows
        if not self.swapped or stop <= self.half:
            return self.tensors.of(rows, batch)
        self._wait_for_tails()
        if start >= self.half:
            return self.tails.of((start - self.half, stop - self.half), batch)
        # A tile that crosses from one half to the other needs both side by side.
        head, tail = (start, self.half), (0, stop - self.half)
        both = zip(self.tensors.of(head, batch), self.tails.of(tail, batch), strict=True)
        return [torch.cat(halves, 2) for halves in both]

    def _wait_for_tails(self) -> None:
        if not self.tails.tensors:
            self.tails = Parts(*self.pending.wait())

    def post_results(self, of: Callable[[Range], Sequence[Tensor]]) -> None:
        """Send what was computed of the tail rows, ``of(rows)``, to the rank they came from."""
        if self.swapped:
            self._wait_for_tails()
            self.pending = self._swap(of((self.half, self.length)), (0, self.length - self.half))

    def results(self, of: Callable[[Range], Sequence[Tensor]]) -> Sequence[Tensor]:
        """The results for this rank's own rows, head and tail, in memory order [B, S, H, ...]."""
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
