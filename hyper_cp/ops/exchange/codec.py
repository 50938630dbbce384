"""The format in which attention tensors travel: between the tensors of a call and the rows on the wire.

Attention tensors are ``[B, H, S, ...]`` (any strides). On the wire a token is one row ``[S, W]``: what it has in all
tensors of a message, side by side. So a range of tokens is one piece of memory, one gather packs a message, and a
message needs no unpacking: the tensors are views of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...schedule.ranges import Rows


class Codec:
    """Packs tensors of one dtype into rows, and shows rows as such tensors. Rows of one codec have one dtype."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.length = tensors, tensors[0].shape[2]
        self._views: list[tuple[int, int, int, int, bool]] = []
        """Batch, heads, elements of a head, place in a row; True if these elements are a dimension."""
        self.width = 0
        for x in tensors:
            b, h, _, *head = x.shape
            size = math.prod(head)
            self._views.append((b, h, size, self.width, bool(head)))
            self.width += b * h * size
        self._all: Tensor | None = None

    def pack(self, rows: Rows, dtype: torch.dtype | None = None) -> Tensor:
        """Copies of some tokens' rows, in another dtype if one is given."""
        if rows.many:
            if self._all is None:
                self._all = self.pack(Rows.of(0, self.length), dtype)
            return rows.take(self._all, 0)
        packed = self.tensors[0].new_empty(rows.length, self.width, dtype=dtype)
        for view, x in zip(self.unpack(packed), self.tensors, strict=True):
            at = 0
            for start, stop in rows.ranges:
                length = stop - start
                into = view if length == rows.length else view.narrow(2, at, length)
                into.copy_(x if length == self.length else x.narrow(2, start, length))
                at += length
        return packed

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """The tensors ``[B, H, S, ...]`` of rows, which are contiguous, as views."""
        length, width, start = rows.shape[0], self.width, rows.storage_offset()
        return [
            rows.as_strided((b, h, length, size), (h * size, size, width, 1), start + at)
            if wide
            else rows.as_strided((b, h, length), (h, 1, width), start + at)
            for b, h, size, at, wide in self._views
        ]
