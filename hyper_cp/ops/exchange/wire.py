"""The format in which attention tensors travel.

Attention tensors are ``[B, H, S, D]`` (any strides). On the wire the sequence comes first, ``[S, B, H, D]``, so that a
range of tokens is one contiguous piece of memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def to_wire(x: Tensor) -> Tensor:
    """``[B, H, S, ...] -> [S, B, H, ...]``, contiguous (no copy where memory already is so)."""
    return x.movedim(2, 0).contiguous()


def from_wire(x: Tensor) -> Tensor:
    """``[S, B, H, ...] -> [B, H, S, ...]``, a view."""
    return x.movedim(0, 2)


class Message:
    """Packs K and V, of any head dims, into one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor):
        self.shapes = [(x.shape[2], x.shape[0], x.shape[1], x.shape[3]) for x in (k, v)]

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.movedim(2, 0).reshape(-1) for x in (k, v)])

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_zeros(sum(map(math.prod, self.shapes)), dtype=dtype)

    def unpack(self, flat: Tensor) -> Pair:
        k, v = flat.split([math.prod(shape) for shape in self.shapes])
        return from_wire(k.view(self.shapes[0])), from_wire(v.view(self.shapes[1]))


def gradient_zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A zero accumulator of the shape of ``x`` [B, H, S, D], in memory order [B, S, H, D]."""
    b, h, s, d = x.shape
    return x.new_zeros(b, s, h, d, dtype=dtype).transpose(1, 2)
