"""Kernels out of vendors' operators: any tile by an operator for rectangles, parts as sequences of one call.

An operator with variable lengths gets only the covered rows and columns, copied side by side if there are gaps between
them. Sequences without keys in place of the gaps would need no copy, but operators disagree on what they return for
such sequences (FlashAttention-2 a log-sum-exp of +inf, the NPU's operator its lowest number). Without gaps, as in the
diagonal tile of packed documents, there is no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...schedule.ranges import Numbers, Range, Ranges, Rows
from ...schedule.tiles import FULL
from .inputs import Kernel, Parts, TileInputs, backward_each, forward_each, repeat_heads, sum_heads
from .partials import accumulation_dtype, part
from .reference import additive_mask

# Rows of a banded tile that are computed at once: with fewer an operator is slower, with more it
# computes more that no row sees.
_BAND_ROWS = 256


class Operator(Kernel, Protocol):
    """A kernel for rectangles only: full, or causal and square, or full with an additive ``mask`` of the dtype of q."""

    grouped: bool
    """True if it takes fewer key/value heads than query heads."""


class OperatorKernel:
    """A kernel for any tile, made of operators: one for rectangles, one that takes an additive mask for the tiles
    that the first cannot express (the same one, if it can), and perhaps one that takes all ``parts`` of a tile in
    one call, with fewer key/value heads than query heads. Without the last, parts are attended one after another."""

    def __init__(self, operator: Operator, biased: Operator, packed: Kernel | None = None):
        self.name, self.operator, self.biased, self.packed = operator.name, operator, biased, packed

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.parts is not None:
            packed = self._for_parts(tile)
            return forward_each(self, tile) if packed is None else packed.forward(tile)
        if is_rectangle(tile):
            return self.operator.forward(_with_heads(self.operator, tile))
        tile = _with_heads(self.biased, tile)
        outs, lses = [], []
        for rows, cols, bias in pieces(tile):
            out, lse = self.biased.forward(tile.rectangle(rows, cols, FULL, bias))
            # Operators disagree on what they return for a row that sees nothing.
            dead = (bias == -torch.inf).all(-1)
            outs.append(out.masked_fill(dead.unsqueeze(-1), 0.0))
            lses.append(lse.masked_fill(dead, -torch.inf))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if tile.parts is not None:
            packed, by_row = self._for_parts(tile), (dout, out, lse)
            return backward_each(self, tile, *by_row) if packed is None else packed.backward(tile, *by_row)
        kv_heads = tile.k.shape[1]
        if is_rectangle(tile):
            dq, dk, dv = self.operator.backward(_with_heads(self.operator, tile), dout, out, lse)
            return dq, sum_heads(dk, kv_heads), sum_heads(dv, kv_heads)
        tile = _with_heads(self.biased, tile)
        wide = accumulation_dtype(tile.k.dtype)
        dqs, dk, dv = [], torch.zeros_like(tile.k, dtype=wide), torch.zeros_like(tile.v, dtype=wide)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(x - lse) = 0 where nothing is seen
        for rows, cols, bias in pieces(tile):
            piece = tile.rectangle(rows, cols, FULL, bias)
            dq, dk_piece, dv_piece = self.biased.backward(piece, *(part(x, rows) for x in (dout, out, lse)))
            dqs.append(dq)
            part(dk, cols).add_(dk_piece)
            part(dv, cols).add_(dv_piece)
        return torch.cat(dqs, 2), sum_heads(dk, kv_heads), sum_heads(dv, kv_heads)

    def _for_parts(self, tile: TileInputs) -> Kernel | None:
        """The operator that takes all parts of the tile in one call, if there are several."""
        return self.packed if tile.parts is not None and len(tile.parts) > 1 else None


def is_rectangle(tile: TileInputs) -> bool:
    """True if a tile is a full rectangle or a causal square. (Causal operators align the diagonal at the top left
    or at the bottom right; in a square both are the same.)"""
    if tile.mask is not None:
        return False
    return tile.band == FULL or (tile.causal and tile.q.shape[2] == tile.k.shape[2])


def pieces(tile: TileInputs) -> Iterator[tuple[Range, Range, Tensor]]:
    """Cut a tile into bands of rows: yield the rows, the columns that any of them sees, and the additive mask between
    them."""
    (lower, upper), mask, rows, cols = tile.band, tile.mask, tile.q.shape[2], tile.k.shape[2]
    size = rows if tile.band == FULL else _BAND_ROWS
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        first = 0 if lower is None else min(max(0, start + lower), cols - 1)
        last = cols if upper is None else max(first + 1, min(cols, stop + upper))
        band = (
            None if lower is None else lower + start - first,
            None if upper is None else upper + start - first,
        )
        piece = mask
        if piece is not None and piece.shape[2] > 1:
            piece = piece[:, :, start:stop]
        if piece is not None and piece.shape[3] > 1:
            piece = piece[..., first:last]
        yield (start, stop), (first, last), additive_mask(stop - start, last - first, band, piece, tile.q)


def _with_heads(operator: Operator, tile: TileInputs) -> TileInputs:
    """The tile with as many key/value heads as the operator needs."""
    heads = tile.q.shape[1]
    if operator.grouped or tile.k.shape[1] == heads:
        return tile
    return replace(tile, k=repeat_heads(tile.k, heads), v=repeat_heads(tile.v, heads))


# --------------------------------------------------------------------------- parts as sequences of one call


@dataclass(frozen=True, eq=False)
class Packing:
    """The parts of a tile as sequences: batch row 0's rectangles, then batch row 1's, and so on."""

    rows: Rows
    """The covered rows; ``cols`` likewise."""
    cols: Rows
    row_ends: tuple[int, ...]
    """The end of each sequence in the packed rows; ``col_ends`` likewise."""
    col_ends: tuple[int, ...]
    longest: tuple[int, int]
    """The most rows and the most columns of a rectangle."""


# By identity, since a hash of many parts takes longer than a launch: all layers of a training step share one schedule,
# so their tiles have the same object as parts. An entry keeps its parts alive, and with them their id.
_packings: OrderedDict[tuple[int, int], tuple[Parts, Packing]] = OrderedDict()
_MOST_PACKINGS = 128


def packing(tile: TileInputs) -> Packing:
    """Lay out the parts of a tile as sequences."""
    parts, batch = tile.parts or (), tile.q.shape[0]
    found = _packings.get((id(parts), batch))
    if found is None:
        found = _packings[id(parts), batch] = parts, _packed(parts, batch)
        if len(_packings) > _MOST_PACKINGS:
            _packings.popitem(last=False)
    return found[1]


def _packed(parts: Parts, batch: int) -> Packing:
    rectangles = np.array(parts, dtype=np.int64)  # [n, rows or columns, start or stop]
    lengths = rectangles[..., 1] - rectangles[..., 0]

    def ends(lengths: Numbers) -> tuple[int, ...]:
        return tuple(np.cumsum(np.tile(lengths, batch)).tolist())

    rows, cols = (Rows(Ranges(rectangles[:, i])) for i in range(2))
    most_rows, most_cols = lengths.max(0).tolist()
    return Packing(rows, cols, ends(lengths[:, 0]), ends(lengths[:, 1]), (most_rows, most_cols))


def gather(x: Tensor, rows: Rows) -> Tensor:
    """``[B, H, S, ...] -> [B * covered, H, ...]``, contiguous; no copy of one range of one batch row (or of all
    of S) whose memory order is [B, S, H, ...] already."""
    return rows.take(x, 2).transpose(1, 2).flatten(0, 1).contiguous()


def scatter(x: Tensor, rows: Rows, like: Tensor, fill: float = 0.0) -> Tensor:
    """The inverse: ``[B * covered, H, ...]`` to its rows of ``[B, H, S, ...]``, S as in ``like``; ``fill`` in the
    gaps."""
    batch, length = like.shape[0], like.shape[2]
    covered = x.unflatten(0, (batch, -1)).transpose(1, 2)
    if covered.shape[2] == length:
        return covered
    whole = x.new_full((batch, length, *x.shape[1:]), fill).transpose(1, 2)
    rows.put(whole, covered, 2)
    return whole
