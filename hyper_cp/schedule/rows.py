"""Rows: an ordered selection of positions of one dimension of a tensor, kept as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Range

MAX_SLICES = 2
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
    def many(self) -> bool:
        """True if there are too many ranges to treat one by one."""
        return len(self.ranges) > MAX_SLICES

    def within(self, selected: Range) -> Iterator[tuple[int, Range]]:
        """The ranges of positions that a range of this selection stands for, each with its place in that range."""
        before = 0
        for start, stop in self.ranges:
            low, high = max(selected[0], before), min(selected[1], before + stop - start)
            if low < high:
                yield low - selected[0], (start + low - before, start + high - before)
            before += stop - start

    def index(self, device: torch.device) -> Tensor:
        """The positions, ``[length]`` int64 on the device. No call waits for the device.

        On CUDA each call copies them from pinned memory on its own stream, since another stream, or a captured graph,
        must not read a tensor that it did not wait for. Elsewhere they are made once.
        """
        found = self._index.get(device)
        if found is None:
            home = torch.device("cpu") if device.type == "cuda" else device
            parts = [torch.arange(start, stop, device=home) for start, stop in self.ranges]
            found = torch.cat(parts) if parts else torch.arange(0, device=home)
            found = self._index[device] = found.pin_memory() if device.type == "cuda" else found
        return found.to(device, non_blocking=True) if device.type == "cuda" else found

    def take(self, x: Tensor, dim: int) -> Tensor:
        """``x`` restricted to these positions of ``dim``, in their order. What an index takes has ``dim`` outermost in
        memory, as tensors on the wire have it: whole rows are then copied, at half of the time."""
        if len(self.ranges) == 1:
            ((start, stop),) = self.ranges
            return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)
        if not self.many:
            return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)
        return x.movedim(dim, 0).index_select(0, self.index(x.device)).movedim(0, dim)

    def add(self, total: Tensor, x: Tensor, dim: int) -> None:
        """Add ``x`` to these positions of ``total``, in place: the transpose of :meth:`take`."""
        total.movedim(dim, 0).index_add_(0, self.index(total.device), x.movedim(dim, 0))

    def inverse(self) -> Rows:
        """The selection that undoes this one, which must be a permutation (this is not checked)."""
        placed, before = [], 0
        for start, stop in self.ranges:
            placed.append((start, (before, before + stop - start)))
            before += stop - start
        return Rows(where for _, where in sorted(placed))
