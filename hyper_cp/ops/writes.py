"""Writes to tensors: PyTorch counts them, so that code that keeps a result of a tensor can detect a change.

The counter has no public name (``Tensor._version``); it is the same in torch 2.11 to 2.15. A view counts together with
the tensor whose memory it shares. Writes past autograd (``x.data``, NumPy, another process) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

Written = tuple[Tensor, int]
"""A tensor, and how often it had been written to."""


def writes(x: Tensor) -> int:
    """The number of writes to a tensor; 0 for tensors of inference mode, which count none."""
    return 0 if x.is_inference() else x._version


def written(tensors: Iterable[Tensor]) -> list[Written]:
    """Tensors with the number of writes to each."""
    return [(x, writes(x)) for x in tensors]


def unchanged(before: Sequence[Written], tensors: Sequence[Tensor]) -> bool:
    """True if these are the same tensors, which nobody has written to since."""
    return len(before) == len(tensors) and all(
        a is b and n == writes(b) for (a, n), b in zip(before, tensors, strict=True)
    )


def while_unchanged(
    results: MutableMapping[Any, tuple[list[Written], T]],
    key: Hashable,
    tensors: Sequence[Tensor],
    make: Callable[[], T],
) -> T:
    """The result under ``key``, which is made anew where there is none, or where its tensors have changed since; each
    time for tensors of inference mode, of which nothing tells."""
    if any(x.is_inference() for x in tensors):
        return make()
    if key not in results or not unchanged(results[key][0], tensors):
        results[key] = written(tensors), make()
    return results[key][1]
