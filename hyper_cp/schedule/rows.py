"""Rows: an ordered selection of positions of one dimension of a tensor, kept as ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .layout import Range

MAX_SLICES = 8
"""The most ranges that are taken one by one. More are taken through an index, in one operation: their number grows with
ranks and documents, and the host's time must not. (Few long ranges are copied a little faster one by one.)"""


class Rows:
    """Positions of a dimension in a given order: those of the first range, then those of the second, and so on.

    One range is taken as a view; several are copied side by side.
    """

    __slots__ = ("_index", "length", "ranges")

    def __init__(self, ranges: Iterable[Range]) -> None:
        joined: list[Range] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self.ranges = tuple(joined)
        self.length = sum(stop - start for start, stop in joined)
        self._index: dict[Any, Tensor] = {}

    @property
    def is_range(self) -> bool:
        """True if :meth:`take` is a view."""
        return len(self.ranges) == 1

    def index(self, device: torch.device) -> Tensor:
        """The positions, ``[length]`` int64; made once per device, on the device, so that nothing waits for it."""
        if device not in self._index:
            parts = [torch.arange(start, stop, device=device) for start, stop in self.ranges]
            self._index[device] = torch.cat(parts) if parts else torch.arange(0, device=device)
        return self._index[device]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """``x`` restricted to these positions of ``dim``, in their order."""
        if self.is_range:
            ((start, stop),) = self.ranges
            return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)
        if len(self.ranges) <= MAX_SLICES:
            return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)
        return x.index_select(dim, self.index(x.device))

    def add(self, total: Tensor, x: Tensor, dim: int) -> None:
        """Add ``x`` to these positions of ``total``, in place: the transpose of :meth:`take`."""
        total.index_add_(dim, self.index(total.device), x)

    def inverse(self) -> Rows:
        """The selection that undoes this one, which must be a permutation (this is not checked)."""
        placed, before = [], 0
        for start, stop in self.ranges:
            placed.append((start, (before, before + stop - start)))
            before += stop - start
        return Rows(where for _, where in sorted(placed))
