"""The format in which attention tensors travel.

Attention tensors are ``[B, H, S, D]`` (any strides). On the wire the sequence comes first, ``[S, B, H, D]``, so that a
range of tokens is one contiguous piece of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...schedule.ranges import Range

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def to_wire(x: Tensor) -> Tensor:
    """``[B, H, S, ...] -> [S, B, H, ...]``, contiguous (no copy where memory already is so)."""
    return x.movedim(2, 0).contiguous()


def from_wire(x: Tensor) -> Tensor:
    """``[S, B, H, ...] -> [B, H, S, ...]``, a view."""
    return x.movedim(0, 2)


class Buffer:
    """Room for K and V of any head dims: ``flat`` is what travels, ``pair`` its views ``[B, H, S, D]``, made once."""

    def __init__(self, flat: Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.flat, self.shapes = flat, shapes
        k, v = flat.split_with_sizes([math.prod(shape) for shape in shapes])
        self.pair: Pair = from_wire(k.view(shapes[0])), from_wire(v.view(shapes[1]))

    @staticmethod
    def of(k: Tensor, v: Tensor, rows: Sequence[Range]) -> Buffer:
        """A buffer with copies of some rows of K and V."""
        flat = torch.cat([x.movedim(2, 0)[start:stop].reshape(-1) for x in (k, v) for start, stop in rows])
        length = sum(stop - start for start, stop in rows)
        return Buffer(flat, [(length, x.shape[0], x.shape[1], x.shape[3]) for x in (k, v)])

    def empty(self) -> Buffer:
        """Another one, uninitialised."""
        return Buffer(torch.empty_like(self.flat), self.shapes)

    def zeros(self, dtype: torch.dtype) -> Buffer:
        """Another one of this dtype, zero."""
        return Buffer(torch.zeros_like(self.flat, dtype=dtype), self.shapes)


def gradient_zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A zero accumulator of the shape of ``x`` [B, H, S, D], in memory order [B, S, H, D]."""
    b, h, s, d = x.shape
    return x.new_zeros(b, s, h, d, dtype=dtype).transpose(1, 2)
