"""Plain math: any device, any dtype including fp64, any head dims, any band. Exact and slow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...schedule.tiles import FULL, Band
from . import selected
from .inputs import Rectangle, TileInputs, backward_each, forward_each, repeat_heads, sum_heads
from .partials import accumulation_dtype, weights_of


def band_mask(rows: int, cols: int, band: Band, device: torch.device) -> Tensor | None:
    """Boolean ``[rows, cols]``, True where visible; None if everything is."""
    if band == FULL:
        return None
    lower, upper = band
    distance = torch.arange(cols, device=device) - torch.arange(rows, device=device).unsqueeze(1)
    mask = torch.ones(rows, cols, dtype=torch.bool, device=device)
    if lower is not None:
        mask &= distance >= lower
    if upper is not None:
        mask &= distance <= upper
    return mask


def additive_mask(
    rows: int, cols: int, band: Band, mask: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A band and an explicit mask (bool: True is visible; or added to the logits) as one additive
    mask ``[1|b, 1|H, rows, cols]``."""
    shape = (1, 1, rows, cols) if mask is None else torch.broadcast_shapes((1, 1, rows, cols), mask.shape)
    bias = torch.zeros(shape, dtype=dtype, device=device)  # every further step is in place: it may be large
    if mask is not None:
        bias = bias.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else bias.copy_(mask)
    visible = band_mask(rows, cols, band, device)
    return bias if visible is None else bias.masked_fill_(~visible, -torch.inf)


class ReferenceKernel:
    """Computes and returns everything in the accumulation dtype: nothing is rounded before the merge."""

    name = "reference"

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.selected is not None:
            return selected.forward(tile)
        if (rectangles := _rectangles(tile)) is not None:
            return forward_each(self.forward, tile, rectangles)
        q, k, v = _wide(tile.q.shape[1], tile.q, tile.k, tile.v)
        logits = q @ k.mT * tile.scale
        logits = _masked(logits if tile.score is None else tile.score(logits), tile)
        tile.raise_largest(logits)
        lse = torch.logsumexp(logits, dim=-1)
        weights = weights_of(logits, lse)
        return (weights if tile.keep is None else weights * tile.keep) @ v, lse

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if tile.selected is not None:
            return selected.backward(tile, dout, out, lse)
        if (rectangles := _rectangles(tile)) is not None:
            return backward_each(self.backward, tile, rectangles, dout, out, lse)
        q, k, v, out, dout = _wide(tile.q.shape[1], tile.q, tile.k, tile.v, out, dout)
        logits, gradient = q @ k.mT * tile.scale, None
        if tile.score is not None:
            logits, gradient = tile.score.differentiated(logits)
        kept = weights = weights_of(_masked(logits, tile), lse.to(q.dtype))
        delta = (dout * out).sum(-1, keepdim=True)
        if tile.dlse is not None:
            delta = delta - tile.dlse.unsqueeze(-1)
        dweights = dout @ v.mT
        if tile.keep is not None:  # the softmax is over all weights, the output from those kept
            dweights, kept = dweights * tile.keep, weights * tile.keep
        dlogits = weights * (dweights - delta)
        dlogits = (dlogits if gradient is None else gradient(dlogits)) * tile.scale
        kv_heads = tile.k.shape[1]
        return dlogits @ k, sum_heads(dlogits.mT @ q, kv_heads), sum_heads(kept.mT @ dout, kv_heads)


LOGITS_AT_ONCE = 1 << 26
"""The most logits that are computed at once."""


def _rectangles(tile: TileInputs) -> Iterator[Rectangle] | None:
    """The parts of a tile, or rows whose logits are few enough; None: the tile is computed at once."""
    if tile.parts is not None:
        return tile.rectangles()
    (batch, heads, rows, _), cols = tile.q.shape, tile.k.shape[2]
    size = max(1, LOGITS_AT_ONCE // max(1, batch * heads * cols))
    return None if size >= rows else tile.row_bands(size)


def _wide(heads: int, *tensors: Tensor) -> list[Tensor]:
    """All in the accumulation dtype, with key/value heads repeated to ``heads``."""
    dtype = accumulation_dtype(tensors[0].dtype)
    return [repeat_heads(x.to(dtype), heads) for x in tensors]


def _masked(logits: Tensor, tile: TileInputs) -> Tensor:
    if tile.band == FULL and tile.mask is None:
        return logits
    rows, cols = logits.shape[2:]
    return logits + additive_mask(rows, cols, tile.band, tile.mask, logits.dtype, logits.device)


KERNEL = ReferenceKernel()
