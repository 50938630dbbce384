"""From an operator that attends a dense rectangle to a kernel for any tile: bands, masks, grouped heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...schedule.tiles import CAUSAL, FULL, Band
from .packed import Parts, backward_each, forward_each
from .partials import accumulation_dtype
from .reference import additive_mask

# Rows of a banded tile that are computed at once: with fewer an operator is slower, with more it
# computes more that no row sees.
_BAND_ROWS = 256


class Operator(Protocol):
    """Attention of a rectangle, full, causal (then square) or with an additive ``bias`` broadcastable to
    [B, H, Sq, Sk]. ``forward`` gives (out [B, H, Sq, Dv], lse [B, H, Sq]); ``backward`` takes the merged
    ones and gives (dq, dk, dv)."""

    name: str
    grouped: bool  # takes fewer key/value than query heads
    biased: bool  # takes a bias

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class PackedOperator(Protocol):
    """Attention of all rectangles of a packed tile in one call; takes fewer key/value than query heads. Shapes
    as of :class:`Operator`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, parts: Parts
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        parts: Parts,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class TileKernel:
    """A :class:`~hyper_cp.ops.kernels.Kernel` made of an operator, and of one that takes a bias for the
    tiles that the first cannot express (the same one, where it can). Without an operator for packed tiles
    their rectangles are attended one after another."""

    def __init__(self, operator: Operator, biased: Operator, packed: PackedOperator | None = None):
        self.name, self.operator, self.biased, self.packed = operator.name, operator, biased, packed

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor]:
        if parts is not None:
            if self.packed is not None and len(parts) > 1:
                return self.packed.forward(q, k, v, band == CAUSAL, scale, parts)
            return forward_each(partial(self.forward, band=band, scale=scale), q, k, v, parts)
        if native(q, k, band, mask):
            k, v = _heads(self.operator, q, k), _heads(self.operator, q, v)
            return self.operator.forward(q, k, v, band == CAUSAL, None, scale)
        k, v = _heads(self.biased, q, k), _heads(self.biased, q, v)
        outs, lses = [], []
        for rows, cols, bias in pieces(q, k, band, mask):
            out, lse = self.biased.forward(q[:, :, rows], k[:, :, cols], v[:, :, cols], False, bias, scale)
            # Operators disagree on what they return of a row that sees nothing.
            dead = (bias == -torch.inf).all(-1)
            outs.append(out.masked_fill(dead.unsqueeze(-1), 0.0))
            lses.append(lse.masked_fill(dead, -torch.inf))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if parts is not None:
            if self.packed is not None and len(parts) > 1:
                return self.packed.backward(dout, q, k, v, out, lse, band == CAUSAL, scale, parts)
            return backward_each(partial(self.backward, band=band, scale=scale), (dout, q, out, lse), k, v, parts)
        kv_heads = k.shape[1]
        if native(q, k, band, mask):
            k, v = _heads(self.operator, q, k), _heads(self.operator, q, v)
            dq, dk, dv = self.operator.backward(dout, q, k, v, out, lse, band == CAUSAL, None, scale)
            return dq, _grouped(dk, kv_heads), _grouped(dv, kv_heads)
        k, v = _heads(self.biased, q, k), _heads(self.biased, q, v)
        wide = accumulation_dtype(k.dtype)
        dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(x - lse) = 0 where nothing is seen
        for rows, cols, bias in pieces(q, k, band, mask):
            dq, dk_piece, dv_piece = self.biased.backward(
                dout[:, :, rows],
                q[:, :, rows],
                k[:, :, cols],
                v[:, :, cols],
                out[:, :, rows],
                lse[:, :, rows],
                False,
                bias,
                scale,
            )
            dqs.append(dq)
            dk[:, :, cols] += dk_piece
            dv[:, :, cols] += dv_piece
        return torch.cat(dqs, 2), _grouped(dk, kv_heads), _grouped(dv, kv_heads)


def native(q: Tensor, k: Tensor, band: Band, mask: Tensor | None) -> bool:
    """Whether a tile is a plain rectangle or a square causal one. (Causal operators align the diagonal
    at the top left or at the bottom right: a square is where they agree.)"""
    return mask is None and (band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2]))


def pieces(q: Tensor, k: Tensor, band: Band, mask: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of a tile, the columns that any of them sees, and the additive mask between them."""
    (lower, upper), (rows, cols) = band, (q.shape[2], k.shape[2])
    size = rows if band == FULL else _BAND_ROWS
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        first = 0 if lower is None else min(max(0, start + lower), cols - 1)
        last = cols if upper is None else max(first + 1, min(cols, stop + upper))
        part = (
            None if lower is None else lower + start - first,
            None if upper is None else upper + start - first,
        )
        piece = mask
        if piece is not None and piece.shape[2] > 1:
            piece = piece[:, :, start:stop]
        if piece is not None and piece.shape[3] > 1:
            piece = piece[..., first:last]
        yield slice(start, stop), slice(first, last), additive_mask(stop - start, last - first, part, piece, q)


def _heads(operator: Operator, q: Tensor, x: Tensor) -> Tensor:
    """Keys or values with as many heads as the operator needs."""
    groups = q.shape[1] // x.shape[1]
    return x if operator.grouped or groups == 1 else x.repeat_interleave(groups, dim=1)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """The gradient of repeated heads: the sum over those of a group."""
    if x.shape[1] == kv_heads:
        return x
    return x.unflatten(1, (kv_heads, -1)).sum(2, dtype=accumulation_dtype(x.dtype))
