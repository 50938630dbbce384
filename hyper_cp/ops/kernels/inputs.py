"""The kernel protocol: a tile's inputs, forward and backward of it, and its parts one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...schedule.ranges import Range
from ...schedule.tiles import CAUSAL, Band, from_bottom_right
from .partials import accumulation_dtype, like_queries, part
from .scores import TileScore

Parts = tuple[tuple[Range, Range], ...]
"""Rectangles (rows, columns) of a tile, none empty, ascending and disjoint in rows and in columns."""


@dataclass(slots=True, eq=False)
class TileInputs:
    """The tensors of one tile, and which of its queries see which of its keys.

    ``q`` is [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv] with H a multiple of Hkv; their last
    dimension is contiguous. Logits are ``scale * q @ k.mT``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    """Query i sees key j if ``band[0] <= j - i <= band[1]``; None is no bound."""
    scale: float
    mask: Tensor | None = None
    """An explicit mask, broadcastable to [B, H, Sq, Sk]: bool (True is visible) or added to the logits."""
    parts: Parts | None = None
    """The tile is only these rectangles of it. All other pairs are hidden. ``band`` then holds in each rectangle,
    counted from its bottom right corner: its last query sees ``-band[0]`` keys before its last key. ``mask`` and
    ``keep`` are None then. A kernel that has no call for several rectangles uses :func:`forward_each`."""
    keep: Tensor | None = None
    """Factors [B, H, Sq, Sk] of the attention weights: dropout. Only the reference kernel is given any."""
    score: TileScore | None = None
    """A function of the scaled logits [B, H, Sq, Sk] that is applied before ``band`` and ``mask``. Only kernels that
    are registered for scores are given any, and the reference kernel. Their backward also adds to the score's
    ``gradients``."""
    dlse: Tensor | None = None
    """In backward of a tile with a score: the gradient [B, H, Sq] of the merged log-sum-exp. None is zero."""
    recurring: bool = True
    """False if the lengths of such tiles change from batch to batch, as with documents: a kernel that builds a plan per
    shape would build one for each."""

    @property
    def causal(self) -> bool:
        """True if the band is the causal one."""
        return self.band == CAUSAL

    def rectangle(self, rows: Range, cols: Range, band: Band, mask: Tensor | None = None) -> TileInputs:
        """Some rows and columns as a tile of their own, under their own band and mask."""
        score = None if self.score is None else self.score.rectangle(rows, cols)
        dlse = None if self.dlse is None else part(self.dlse, rows)
        tensors = part(self.q, rows), part(self.k, cols), part(self.v, cols)
        return TileInputs(*tensors, band, self.scale, mask, score=score, dlse=dlse, recurring=self.recurring)

    def rectangles(self) -> Iterator[tuple[Range, Range, TileInputs]]:
        """The parts with their rows and columns, each as a tile of its own."""
        for rows, cols in self.parts or ():
            yield rows, cols, self.rectangle(rows, cols, from_bottom_right(self.band, rows, cols))


class Kernel(Protocol):
    """Attention of one tile on one device, forward and backward.

    A row that sees nothing has out = 0, lse = -inf and zero gradients. Outputs and gradients may be in the dtype of
    the inputs or wider. Returned tensors are new: the caller may write to them.
    """

    name: str

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        """The tile's partial: ``out`` [B, H, Sq, Dv] and ``lse`` [B, H, Sq], the natural logarithm of the sum of
        exponentials of the logits, in fp32 (fp64 for fp64 inputs)."""
        ...

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of ``(dq, dk, dv)``, given the *merged* ``out`` and ``lse`` of its rows."""
        ...


# --------------------------------------------------------------------------- the parts of a tile, one after another


def forward_each(kernel: Kernel, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Attend the parts of a tile one after another. Memory is that of the result and of one part."""
    out = lse = None
    for rows, _, rectangle in tile.rectangles():
        piece, piece_lse = kernel.forward(rectangle)
        if out is None or lse is None:
            out, lse = empty_partial(tile.q, tile.v.shape[3], piece.dtype, piece_lse.dtype)
        part(out, rows).copy_(piece)
        part(lse, rows).copy_(piece_lse)
    if out is None or lse is None:
        return empty_partial(tile.q, tile.v.shape[3], tile.q.dtype, accumulation_dtype(tile.q.dtype))
    return out, lse


def backward_each(
    kernel: Kernel, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate the parts of a tile one after another."""
    inputs = tile.q, tile.k, tile.v
    grads: list[Tensor] = []
    for rows, cols, rectangle in tile.rectangles():
        pieces = kernel.backward(rectangle, *(part(x, rows) for x in (dout, out, lse)))
        grads = grads or [_zeros_like(x, piece.dtype) for x, piece in zip(inputs, pieces, strict=True)]
        for grad, piece, covered in zip(grads, pieces, (rows, cols, cols), strict=True):
            part(grad, covered).copy_(piece)
    dq, dk, dv = grads or [_zeros_like(x, x.dtype) for x in inputs]
    return dq, dk, dv


def empty_partial(q: Tensor, head_dim: int, dtype: torch.dtype, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The partial of queries that see nothing."""
    return like_queries(q, head_dim, dtype).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the shape of ``x`` [B, H, S, D], in memory order [B, S, H, D]."""
    return like_queries(x, x.shape[3], dtype).zero_()


# --------------------------------------------------------------------------- fewer key/value heads than query heads


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads to as many as the queries have."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """The gradient of repeated heads: the sum over those that share a key/value head."""
    if grad.shape[1] == kv_heads:
        return grad
    return grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=accumulation_dtype(grad.dtype))
