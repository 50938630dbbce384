"""The pairs of a tile as an indexer scores them and as attention weighs them, a few queries at a time.

The loss of an indexer compares both, over all keys that a query sees or over those that it has selected. Products are
``[b, rows, heads, c]`` in the accumulation dtype, where c counts keys: columns of the tile, or selected ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...schedule.ranges import Range
from .indexer import blocks, products_by_row, visible_pairs
from .inputs import TileInputs
from .partials import accumulation_dtype, part
from .selected import Gathered, pieces


class Pairs(Protocol):
    """Some queries of a tile, and keys that they may see.

    Attributes:
        rows: the queries.
        visible: the pairs that are not hidden, ``[b or 1, rows, c]``; None: all.
        products: the scaled products of the indexer's heads.
        logits: the scaled products of the heads of attention.
    """

    rows: Range
    visible: Tensor | None
    products: Tensor
    logits: Tensor

    def of_queries(self, dproducts: Tensor) -> Tensor:
        """The gradient ``[b, Hi, rows, D]`` of the indexer's queries, given that of unscaled products."""
        ...

    def add_to_keys(self, total: Tensor, dproducts: Tensor) -> None:
        """Add the gradient of the indexer's keys to ``[b, 1, cols, D]``, contiguous, of all columns of the tile."""
        ...


def pairs(tile: TileInputs, q: Tensor, scale: float) -> Iterator[Pairs]:
    """All pairs of a tile that are not hidden.

    Args:
        tile: queries of the indexer, its one key head, and as ``v`` the keys of attention.
        q, scale: the queries ``[b, H, rows, D]`` of attention, and its scale.
    """
    if tile.selected is not None:
        keys = tile.v.transpose(1, 2).flatten(2).unsqueeze(1)  # the heads of a key side by side: one gather takes all
        for rows, _, piece in pieces(replace(tile, v=keys)):
            if (selected := _SelectedPairs(piece, rows, part(q, rows), tile.v.shape[1], scale)).products.shape[3]:
                yield selected
        return
    whole = [((0, tile.q.shape[2]), (0, tile.k.shape[2]), tile)] if tile.parts is None else tile.rectangles()
    for of_rows, of_cols, rectangle in whole:
        for some, seen, piece in blocks(rectangle, max(q.shape[1], tile.q.shape[1]), 512):
            rows, cols = ((first + of[0], last + of[0]) for of, (first, last) in ((of_rows, some), (of_cols, seen)))
            yield _AllPairs(piece, rows, cols, part(q, rows), scale)


class _AllPairs:
    """Some rows and columns of a tile."""

    def __init__(self, piece: TileInputs, rows: Range, cols: Range, q: Tensor, scale: float) -> None:
        self.piece, self.rows, self.cols, self.visible = piece, rows, cols, visible_pairs(piece)
        self.products = products_by_row(piece.q, piece.k).mul_(piece.scale)
        self.logits = products_by_row(q, piece.v).mul_(scale)

    def of_queries(self, dproducts: Tensor) -> Tensor:
        """See :class:`Pairs`."""
        keys = self.piece.k[:, 0].to(dproducts.dtype)
        return (dproducts.flatten(1, 2) @ keys).unflatten(1, dproducts.shape[1:3]).transpose(1, 2)

    def add_to_keys(self, total: Tensor, dproducts: Tensor) -> None:
        """See :class:`Pairs`."""
        queries = self.piece.q.transpose(1, 2).flatten(1, 2).to(dproducts.dtype)
        part(total, self.cols)[:, 0].add_(dproducts.flatten(1, 2).mT @ queries)


class _SelectedPairs:
    """Some rows of a tile, and the keys that each of them has selected there."""

    def __init__(self, piece: TileInputs, rows: Range, q: Tensor, groups: int, scale: float) -> None:
        self.rows, self.some = rows, Gathered(piece)
        self.products = self.some.scores[:, 0]
        hidden = self.some.masked(torch.zeros_like(self.some.scores[..., :1, :]))[:, 0, :, 0]
        self.visible: Tensor | None = hidden == 0
        keys = self.some.values[:, 0].unflatten(3, (groups, -1)).permute(0, 3, 1, 2, 4)
        by_group = q.to(accumulation_dtype(q.dtype)).unflatten(1, (groups, -1)).transpose(2, 3)
        self.logits = (by_group @ keys.mT).mul_(scale).transpose(1, 2).flatten(2, 3)

    def of_queries(self, dproducts: Tensor) -> Tensor:
        """See :class:`Pairs`."""
        return (dproducts @ self.some.keys[:, 0]).transpose(1, 2)

    def add_to_keys(self, total: Tensor, dproducts: Tensor) -> None:
        """See :class:`Pairs`."""
        gradients = dproducts.mT @ self.some.queries[:, 0]
        total.view(-1, total.shape[3]).index_add_(0, self.some.index, gradients.flatten(0, 2))
