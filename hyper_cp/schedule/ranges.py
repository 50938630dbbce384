"""Ranges of token positions: pairs of Python numbers where they are few, one array where they are many; and rows of a
tensor that ranges select."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Range = tuple[int, int]
"""A half-open range ``(start, stop)`` of token positions."""

Documents = tuple[int, ...]
"""Boundaries of the documents packed into one sequence: ascending, from 0 to its length. Only positions of the same
document see each other."""

Numbers = npt.NDArray[np.int64]

_FEW = 8
"""The most ranges that are kept as a tuple, which Python reads faster. For more, an array is smaller and faster."""


class Ranges(Sequence[Range]):
    """Many ranges, in a given order. It equals any sequence of the same pairs.

    Attributes:
        bounds: starts and stops, ``[n, 2]``.
    """

    __slots__ = ("bounds",)

    def __init__(self, bounds: Numbers) -> None:
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, index: int) -> Range: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Range]: ...
    def __getitem__(self, index: int | slice) -> Range | Sequence[Range]:
        if isinstance(index, slice):
            return Ranges(self.bounds[index])
        start, stop = self.bounds[index].tolist()
        return start, stop

    def __iter__(self) -> Iterator[Range]:
        return map(tuple, self.bounds.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and bool((bounds(other) == self.bounds).all())

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Ranges({self.bounds.tolist()})"


def bounds(ranges: Sequence[Any]) -> Numbers:
    """Starts and stops as an array ``[n, 2]``."""
    return ranges.bounds if isinstance(ranges, Ranges) else np.array(ranges, dtype=np.int64).reshape(-1, 2)


def length_of(ranges: Sequence[Range]) -> int:
    """The number of positions in all ranges together."""
    array = bounds(ranges)
    return int((array[:, 1] - array[:, 0]).sum())


def compact(array: Numbers) -> Sequence[Range]:
    """The ranges of an array ``[n, 2]``."""
    return Ranges(array) if len(array) > _FEW else tuple((start, stop) for start, stop in array.tolist())


def before(lengths: Numbers) -> Numbers:
    """For each length, the sum of those before it."""
    total: Numbers = np.cumsum(lengths) - lengths
    return total


def touching(array: Numbers) -> Numbers:
    """Join neighbours of ``[n, 2]`` of which one stops where the next starts. The order stays."""
    if len(array) < 2:
        return array
    first = np.concatenate(([True], array[1:, 0] != array[:-1, 1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((array[first, 0], array[last, 1]), 1)


def placed(ranges: Sequence[Range], offset: int = 0) -> Numbers:
    """*Placed ranges*, which lie side by side from a local offset on: an array of rows ``(offset, start, stop)``, the
    local offset and the global range."""
    array = bounds(ranges)
    return np.column_stack((offset + before(array[:, 1] - array[:, 0]), array))


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges and join those that touch or overlap."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


# --------------------------------------------------------------------------- rows of a tensor


def pinned(x: Tensor) -> Tensor:
    """A copy in pinned memory, from which copies to an accelerator do not wait, if its backend has any."""
    try:
        return x.pin_memory()
    except (NotImplementedError, RuntimeError):
        return x


MAX_SLICES = 4
"""The most ranges that are taken one by one. More are taken through an index, in one operation: their number grows with
ranks and documents, and the host's time must not. (Few long ranges are copied a little faster one by one.)"""


class Rows:
    """Positions of a dimension in a given order: those of the first range, then those of the second, and so on.

    One range is taken as a view; several are copied side by side.
    """

    __slots__ = ("_index", "length", "ranges")

    def __init__(self, ranges: Sequence[Range]) -> None:
        array = touching(bounds(ranges))
        self.ranges = compact(array)
        self.length = length_of(self.ranges)
        self._index: dict[Any, Tensor] = {}

    @property
    def many(self) -> bool:
        """True if there are too many ranges to treat one by one."""
        return len(self.ranges) > MAX_SLICES

    def within(self, selected: Range) -> Iterator[tuple[int, Range]]:
        """The ranges of positions that a range of this selection selects, each with its place in that range."""
        at = 0
        for start, stop in self.ranges:
            low, high = max(selected[0], at), min(selected[1], at + stop - start)
            if low < high:
                yield low - selected[0], (start + low - at, start + high - at)
            at += stop - start

    def index(self, device: torch.device) -> Tensor:
        """The positions, ``[length]`` int64 on the device. No call waits for the device.

        On CUDA each call copies them from pinned memory on its own stream, since another stream, or a captured graph,
        must not read a tensor that it did not wait for. Elsewhere they are made once.
        """
        found = self._index.get(device)
        if found is None:
            starts, stops = bounds(self.ranges).T
            first = np.repeat(starts - before(stops - starts), stops - starts)
            found = torch.from_numpy(first + np.arange(self.length))
            found = found if device.type == "cpu" else pinned(found)
            found = self._index[device] = found if device.type == "cuda" else found.to(device, non_blocking=True)
        return found.to(device, non_blocking=True) if device.type == "cuda" else found

    def take(self, x: Tensor, dim: int) -> Tensor:
        """``x`` restricted to these positions of ``dim``, in their order. What an index takes has ``dim`` outermost in
        memory, as tensors on the wire have it: whole rows are then copied, at half of the time."""
        if len(self.ranges) <= 1:
            whole = self.length == x.shape[dim]
            return x if whole else x.narrow(dim, self.ranges[0][0] if self.ranges else 0, self.length)
        if not self.many:
            return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)
        return x.movedim(dim, 0).index_select(0, self.index(x.device)).movedim(0, dim)

    def add(self, total: Tensor, x: Tensor, dim: int) -> None:
        """Add ``x`` to these positions of ``total``, in place: the transpose of :meth:`take`."""
        if len(self.ranges) == 1 and self.length == total.shape[dim]:
            total.add_(x)
            return
        if not self.many:
            for (start, stop), piece in zip(self.ranges, x.split([b - a for a, b in self.ranges], dim), strict=True):
                total.narrow(dim, start, stop - start).add_(piece)
            return
        total.movedim(dim, 0).index_add_(0, self.index(total.device), x.movedim(dim, 0))

    def put(self, whole: Tensor, x: Tensor, dim: int) -> None:
        """Write ``x`` to these positions of ``whole``."""
        if self.many:
            whole.movedim(dim, 0).index_copy_(0, self.index(whole.device), x.movedim(dim, 0))
            return
        for (start, stop), piece in zip(self.ranges, x.split([b - a for a, b in self.ranges], dim), strict=True):
            whole.narrow(dim, start, stop - start).copy_(piece)

    @staticmethod
    @lru_cache(maxsize=256)
    def of(start: int, stop: int) -> Rows:
        """Those of one range, made once."""
        return Rows(((start, stop),))

    def inverse(self) -> Rows:
        """The selection that undoes this one, which must be a permutation (this is not checked)."""
        array = bounds(self.ranges)
        lengths = array[:, 1] - array[:, 0]
        place = before(lengths)
        return Rows(Ranges(np.stack((place, place + lengths), 1)[np.argsort(array[:, 0])]))
