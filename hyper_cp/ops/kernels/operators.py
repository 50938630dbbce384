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

from ...schedule.ranges import Numbers, Ranges, Rows
from ...schedule.tiles import CAUSAL, FULL, Band, shift
from .inputs import Kernel, Parts, Rectangle, TileInputs, backward_each, forward_each, repeat_heads, sum_heads
from .reference import additive_mask

# Rows of a banded tile that are computed at once with a mask: with fewer an operator is slower, with more it
# computes more that no row sees.
_BAND_ROWS = 256

MASK_AT_ONCE = 1 << 25
"""The most elements of a mask that is made for an operator (64 MiB in bf16), unless its rows are few."""
_LEAST_ROWS = 64


class Operator(Kernel, Protocol):
    """A kernel for rectangles only: full, or causal and square, or full with an additive ``mask`` of the dtype of q.
    (That of CPUs takes one of float32, too.)"""

    grouped: bool
    """True if it takes fewer key/value heads than query heads."""
    least: int
    """The fewest rows, and the fewest columns, that it takes."""


class OperatorKernel:
    """A kernel for any tile, made of operators. Backward takes merged statistics, so any operator may do any tile.

    Args:
        name: the name of the kernel.
        dense: for rectangles.
        biased: for tiles that no other operator can express, with an additive mask. Without it they are refused.
        flash: takes a band, and all ``parts`` of a tile in one call, as :func:`window` describes them. Without it
            parts are attended one after another, and bands with an additive mask.
        others: for rectangles whose shapes do not recur, or that ``dense`` does not take; default: ``dense``.
        mask_at_once: the most elements of a mask that is made for ``biased``; rows beyond are computed afterwards.
    """

    def __init__(
        self,
        name: str,
        dense: Operator,
        biased: Operator | None = None,
        flash: Operator | None = None,
        others: Operator | None = None,
        mask_at_once: int = MASK_AT_ONCE,
    ) -> None:
        self.name, self.dense, self.biased, self.flash, self.others = name, dense, biased, flash, others or dense
        self.mask_at_once = mask_at_once

    def check(self, masked: bool, band: Band) -> None:
        """Raise ``NotImplementedError`` if a call with an explicit mask, or under this band, has no operator."""
        if self.biased is None and (masked or (self.flash is None and band not in (FULL, CAUSAL))):
            what = "attn_mask" if masked else f"a window (positions {band[0]} to {band[1]} from each query)"
            raise NotImplementedError(
                f"{what} is not possible on the kernel {self.name!r}, which the backends allowed now leave. It "
                "takes no additive mask. Allow SDPBackend.EFFICIENT_ATTENTION too in torch.nn.attention.sdpa_kernel"
            )

    def operator(self, tile: TileInputs) -> Operator | None:
        """The operator that takes the whole tile in one call, if one does."""
        if tile.mask is None and tile.parts is None and is_rectangle(tile):
            recurs = tile.recurring and min(tile.q.shape[2], tile.k.shape[2]) >= self.dense.least
            return self.dense if recurs else self.others
        return self.flash if self.flash is not None and window(tile) is not None else None

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        operator = self.operator(tile)
        if operator is not None:
            return operator.forward(_with_heads(operator, tile))
        if tile.parts is not None:
            return forward_each(self.forward, tile, tile.rectangles())
        biased = self._biased(tile)

        def attend(piece: TileInputs) -> tuple[Tensor, Tensor]:
            out, lse = biased.forward(piece)
            # Operators disagree on what they return for a row that sees nothing.
            blind = (piece.mask == -torch.inf).all(-1)  # type: ignore[union-attr]
            return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)

        tile = _with_heads(biased, tile)
        return forward_each(attend, tile, _with_additive_masks(tile, self.mask_at_once))

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        operator, kv_heads = self.operator(tile), tile.k.shape[1]
        if operator is None and tile.parts is not None:
            return backward_each(self.backward, tile, tile.rectangles(), dout, out, lse)
        if operator is not None:
            dq, dk, dv = operator.backward(_with_heads(operator, tile), dout, out, lse)
        else:
            biased = self._biased(tile)
            tile = _with_heads(biased, tile)
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(x - lse) = 0 where nothing is seen
            dq, dk, dv = backward_each(
                biased.backward, tile, _with_additive_masks(tile, self.mask_at_once), dout, out, lse
            )
        return dq, sum_heads(dk, kv_heads), sum_heads(dv, kv_heads)

    def _biased(self, tile: TileInputs) -> Operator:
        if self.biased is None:
            self.check(tile.mask is not None, tile.band)
            raise NotImplementedError(
                f"the kernel {self.name!r} has no operator for a tile under the band {tile.band}. It takes no additive "
                "mask. Allow SDPBackend.EFFICIENT_ATTENTION too in torch.nn.attention.sdpa_kernel"
            )
        return self.biased


def is_rectangle(tile: TileInputs) -> bool:
    """True if a tile is a full rectangle or a causal square. (Causal operators align the diagonal at the top left
    or at the bottom right; in a square both are the same.)"""
    if tile.mask is not None:
        return False
    return tile.band == FULL or (tile.causal and tile.q.shape[2] == tile.k.shape[2])


def window(tile: TileInputs) -> tuple[int, int] | None:
    """``(left, right)``: the numbers of keys that a query sees before and after its diagonal, which ends at the bottom
    right corner of each rectangle; -1 is no bound, as in operators. None if the tile has a mask or only one part, or if
    a row of it may see nothing: operators disagree on what they return for such rows."""
    if tile.mask is not None:
        return None
    rows, cols, band = tile.q.shape[2], tile.k.shape[2], tile.band
    if tile.parts is None:
        band, overhang = shift(band, rows - cols), rows - cols
    elif len(tile.parts) > 1:
        overhang = packing(tile).overhang
    else:
        return None
    left, right = None if band[0] is None else -band[0], band[1]
    if (left is not None and left < 0) or (right is not None and right < max(0, overhang)):
        return None
    return -1 if left is None else left, -1 if right is None else right


def _with_additive_masks(tile: TileInputs, mask_at_once: int) -> Iterator[Rectangle]:
    """Cut a tile into bands of rows, each of which has an additive mask in place of the band and mask of the tile."""
    same = tile.mask is not None and tile.mask.shape[2] == 1 and tile.band == FULL  # for all rows
    for rows, cols, piece in tile.row_bands(tile.q.shape[2] if same else rows_at_once(tile, mask_at_once)):
        height = 1 if same else piece.q.shape[2]
        exact = piece.q.device.type == "cpu" and piece.mask is not None and piece.mask.dtype == torch.float32
        dtype = torch.float32 if exact else piece.q.dtype
        piece.mask = additive_mask(height, piece.k.shape[2], piece.band, piece.mask, dtype, piece.q.device)
        piece.band = FULL
        yield rows, cols, piece


def rows_at_once(tile: TileInputs, mask_at_once: int) -> int:
    """The number of rows whose mask has no more elements, but of some rows at least."""
    batch, heads = (1, 1) if tile.mask is None else tile.mask.shape[:2]
    most = max(_LEAST_ROWS, mask_at_once // (batch * heads * tile.k.shape[2]))
    return min(most, tile.q.shape[2] if tile.band == FULL else _BAND_ROWS)


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
    """The rows that the parts cover."""
    cols: Rows
    """The columns that they cover."""
    row_ends: tuple[int, ...]
    """The end of each sequence in the packed rows."""
    col_ends: tuple[int, ...]
    """The end of each sequence in the packed columns."""
    longest: tuple[int, int]
    """The most rows and the most columns of a rectangle."""
    overhang: int
    """The largest value of rows - columns over all rectangles."""

    @property
    def square(self) -> bool:
        """True if all rectangles are squares."""
        return self.row_ends == self.col_ends


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
    overhang = int((lengths[:, 0] - lengths[:, 1]).max())
    return Packing(rows, cols, ends(lengths[:, 0]), ends(lengths[:, 1]), (most_rows, most_cols), overhang)


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
