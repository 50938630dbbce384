"""Attention of queries over keys that are selected for each of them: the selection at a tile, and plain math.

A selection lists global positions, ``[B, 1 or Hkv, S, k]``, so it holds on any number of ranks. At a tile, a query sees
the keys that it has selected there, and of these what the band and the mask of the tile show. Keys are gathered for a
few queries at a time, and the query heads that share a key head are the rows of one product, so that nothing is as
large as queries times keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...schedule.build import Step
from ...schedule.ranges import Range, placed
from ...schedule.tiles import FULL, Band, Tile, shift
from .inputs import Rectangle, TileInputs, at_once, forward_each
from .partials import accumulation_dtype, empty_partial, like_queries, part, weights_of

GATHERED_AT_ONCE = 1 << 25
"""The most numbers of keys that are gathered at once."""


@dataclass(slots=True, eq=False)
class TileSelection:
    """The selected keys of a tile's queries.

    Attributes:
        listed: what the queries list, ``[b, 1 or Hkv, rows, k]``: global positions, or blocks of ``block`` keys.
        ranges: the keys of the step, ascending: where they begin and end globally, and their columns, ``[3, n]``.
        columns_of_tile: those of the tile among the columns of the step.
        block: the number of adjacent keys in a block; 1: positions are listed.
    """

    listed: Tensor
    ranges: Tensor
    columns_of_tile: Range
    block: int = 1

    @property
    def most(self) -> int:
        """The most keys that a query has selected."""
        return self.listed.shape[3] * self.block

    def positions(self) -> Tensor:
        """``[b, 1 or Hkv, rows, most]``, global; anywhere else than in the tile's keys: no key of this tile."""
        if self.block == 1:
            return self.listed
        within = torch.arange(self.block, dtype=self.listed.dtype, device=self.listed.device)
        return (self.listed.unsqueeze(4) * self.block + within).flatten(3)  # no block (-1): below 0

    def rectangle(self, rows: Range, cols: Range) -> TileSelection:
        """The selection of some rows, of which it keeps some columns."""
        first = self.columns_of_tile[0]
        return replace(self, listed=part(self.listed, rows), columns_of_tile=(first + cols[0], first + cols[1]))

    def columns(self) -> tuple[Tensor, Tensor]:
        """The selected columns of the tile, ``[b, 1 or Hkv, rows, c]``, and True where there is one: c is the most that
        a query has here. (The host waits for the device to know it.)"""
        (starts, stops, columns), positions = self.ranges, self.positions()
        at = torch.searchsorted(starts, positions.contiguous(), right=True, out_int32=True) - 1
        known = (at >= 0) & (positions < stops[at.clamp_(min=0)])
        found = positions - starts[at] + columns[at] - self.columns_of_tile[0]
        known &= (found >= 0) & (found < self.columns_of_tile[1] - self.columns_of_tile[0])
        most = int(known.sum(-1).max()) if known.numel() else 0
        if most < known.shape[3]:  # those of this tile first
            first = torch.sort(known.to(torch.uint8), stable=True, descending=True).indices[..., :most]
            found, known = found.gather(-1, first), known.gather(-1, first)
        return found.masked_fill(~known, 0).long(), known


class Selections:
    """The selection of a call at each of its tiles. ``selected``: of the rows that this rank attends."""

    def __init__(self, selected: Tensor, block: int = 1) -> None:
        self.selected, self.block = selected, block
        self.step: Step | None = None

    def of(self, step: Step, tile: Tile) -> TileSelection:
        """The selection of a tile of a step."""
        if step is not self.step:
            columns, starts, stops = torch.from_numpy(placed(step.keys)).T
            self.ranges = torch.stack([starts, stops, columns]).to(self.selected.device, self.selected.dtype)
            self.step = step
        return TileSelection(part(self.selected, tile.q, tile.batch), self.ranges, tile.k, self.block)


def in_band(columns: Tensor, band: Band) -> Tensor | bool:
    """True where a band shows the columns ``[b, heads, rows, c]`` of a tile to its rows."""
    if band == FULL:
        return True
    distance, (lower, upper) = columns - torch.arange(columns.shape[2], device=columns.device).unsqueeze(1), band
    visible = True if lower is None else distance >= lower
    return visible if upper is None else visible & (distance <= upper)


# --------------------------------------------------------------------------- plain math


def forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Attention over the selected keys of a tile, as :meth:`Kernel.forward`."""
    return forward_each(_attend, tile, pieces(tile))


def backward(tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients, as :meth:`Kernel.backward`."""
    dtype = accumulation_dtype(tile.q.dtype)
    dq = like_queries(tile.q, tile.q.shape[3], dtype).zero_()
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (tile.k, tile.v))
    for rows, _, piece in pieces(tile):
        of_rows = (part(x, rows) for x in (dout, out, lse))
        _differentiate(piece, part(dq, rows), dk, dv, *of_rows)
    return dq, dk, dv


def pieces(tile: TileInputs) -> Iterator[Rectangle]:
    """Rows whose keys are not too many to be gathered at once, with all columns, each as a tile of its own."""
    k = tile.k.contiguous()
    tile = replace(tile, k=k, v=k[..., : tile.v.shape[3]] if tile.joint else tile.v.contiguous())
    (b, heads, cols, dim), rows = k.shape, tile.q.shape[2]
    dim += 0 if tile.joint else tile.v.shape[3]
    listed = min(_selection(tile).most, cols)
    size = max(1, at_once(GATHERED_AT_ONCE, k) // max(1, b * heads * listed * dim))
    for start in range(0, rows, size):
        some = start, min(start + size, rows)
        yield some, (0, cols), tile.rectangle(some, (0, cols), shift(tile.band, start))


def _selection(tile: TileInputs) -> TileSelection:
    if tile.selected is None:
        raise ValueError("a tile without a selection has come to the kernel of selected keys")
    return tile.selected


class Gathered:
    """A few queries and the keys that they have selected, in the accumulation dtype, ``[b, Hkv, rows, heads of a key
    head, ...]``."""

    def __init__(self, tile: TileInputs) -> None:
        self.columns, self.known = _selection(tile).columns()
        self.tile, self.dtype, self.groups = tile, accumulation_dtype(tile.q.dtype), tile.k.shape[1]
        b, groups, cols, _ = tile.k.shape
        heads = torch.arange(b * groups, device=tile.q.device).view(b, groups, 1, 1)
        self.index = (self.columns + heads * cols).flatten()
        """The rows of the keys, seen as ``[b * Hkv * cols, ...]``."""
        self.queries, self.keys = self.by_group(tile.q), self.gather(tile.k)
        self.values = self.keys[..., : tile.v.shape[3]] if tile.joint else self.gather(tile.v)
        self.scores = self.queries @ self.keys.mT * tile.scale

    def by_group(self, x: Tensor) -> Tensor:
        """``[b, H, rows, ...]`` by key heads."""
        return x.to(self.dtype).unflatten(1, (self.groups, -1)).transpose(2, 3)

    @staticmethod
    def by_head(x: Tensor) -> Tensor:
        """The inverse of :meth:`by_group`."""
        return x.transpose(2, 3).flatten(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        b, _, rows, most = self.columns.shape
        found = x.flatten(0, 2).index_select(0, self.index).to(self.dtype)
        return found.view(b, self.groups, rows, most, x.shape[3])

    def masked(self, scores: Tensor) -> Tensor:
        """Scores, -inf where a query does not see the key."""
        tile, visible = self.tile, self.known & in_band(self.columns, self.tile.band)
        scores = scores.masked_fill(~visible.unsqueeze(3), -torch.inf)
        if tile.mask is None:
            return scores
        mask = self._of_mask(tile.mask)
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def _of_mask(self, mask: Tensor) -> Tensor:
        """The mask ``[b, 1 or H, 1 or rows, 1 or cols]`` of the selected pairs."""
        b, groups, rows, _ = self.columns.shape
        heads = max(mask.shape[1], groups)
        columns = self.columns.repeat_interleave(heads // groups, 1)
        found = mask.expand(b, heads, rows, self.tile.k.shape[2]).gather(3, columns)
        if heads <= self.groups:
            return found.unsqueeze(3)
        return found.unflatten(1, (self.groups, -1)).transpose(2, 3)


def _attend(tile: TileInputs) -> tuple[Tensor, Tensor]:
    some = Gathered(tile)
    if not some.columns.shape[3]:
        return empty_partial(tile.q, tile.v.shape[3], some.dtype, some.dtype)
    logits = some.masked(some.scores if tile.score is None else tile.score(some.scores))
    tile.raise_largest(some.by_head(logits))
    lse = torch.logsumexp(logits, -1)
    return some.by_head(weights_of(logits, lse) @ some.values), some.by_head(lse)


def _differentiate(
    tile: TileInputs, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Add the gradients of a piece: dq of its rows, dk and dv ``[b, Hkv, cols, ...]``, contiguous, of all columns."""
    some = Gathered(tile)
    if not some.columns.shape[3]:
        return
    dout, out, lse = (some.by_group(x) for x in (dout, out, lse))
    logits, pull = (some.scores, None) if tile.score is None else tile.score.differentiated(some.scores)
    weights = weights_of(some.masked(logits), lse)
    per_row = (dout * out).sum(-1)
    if tile.dlse is not None:
        per_row = per_row - some.by_group(tile.dlse)
    dlogits = weights * (dout @ some.values.mT - per_row.unsqueeze(-1))
    dlogits = (dlogits if pull is None else pull(dlogits)) * tile.scale
    dq.add_(some.by_head(dlogits @ some.keys))
    for total, x in ((dk, dlogits.mT @ some.queries), (dv, weights.mT @ dout)):
        total.view(-1, total.shape[3]).index_add_(0, some.index, x.flatten(0, 3))
