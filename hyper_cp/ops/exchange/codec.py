"""The format in which attention tensors travel: between the tensors of a call and the rows on the wire.

Attention tensors are ``[B, H, S, ...]`` (any strides). On the wire a token is one row ``[S, W]``: what it has in all
tensors of a message, side by side. So a range of tokens is one piece of memory, one gather packs a message, and a
message needs no unpacking: the tensors are views of it.
"""

from __future__ import annotations

import math

from torch import Tensor

from ...schedule.ranges import Rows


class Codec:
    """Packs tensors of one dtype into rows, and shows rows as such tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._shapes = [(x.shape[0], x.shape[1], *x.shape[3:]) for x in tensors]
        self._widths = [math.prod(shape) for shape in self._shapes]
        self.width = sum(self._widths)
        self._all: Tensor | None = None

    def pack(self, rows: Rows) -> Tensor:
        """Copies of some tokens' rows."""
        if rows.many:
            if self._all is None:
                self._all = self.pack(Rows(((0, self.tensors[0].shape[2]),)))
            return rows.take(self._all, 0)
        first = self.tensors[0]
        packed = first.new_empty(rows.length, self.width)
        for view, x in zip(self.unpack(packed), self.tensors, strict=True):
            at = 0
            for start, stop in rows.ranges:
                view.narrow(2, at, stop - start).copy_(x.narrow(2, start, stop - start))
                at += stop - start
        return packed

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """The tensors ``[B, H, S, ...]`` of rows, as views."""
        found, at = [], 0
        for width, (b, h, *rest) in zip(self._widths, self._shapes, strict=True):
            x = rows.narrow(1, at, width).view(len(rows), b, h, *rest)
            found.append(x.permute(1, 2, 0, *range(3, x.ndim)))
            at += width
        return found
