"""The scores of a lightning indexer, and a running selection of the best keys (DeepSeek V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...schedule.tiles import shift
from .inputs import Rectangle, TileInputs, at_once
from .partials import accumulation_dtype, part
from .reference import band_mask

SCORES_AT_ONCE = 1 << 24
"""The most products of queries and keys that are computed at once."""


SORTED_AT_ONCE = 1 << 22
"""The most selected keys that are sorted at once: sorting takes four times their memory."""


class Score(NamedTuple):
    """A function that scores a pair by the products of a query's heads with a key.

    Attributes:
        of: scores ``[b, rows, cols]``, given scaled products ``[b, rows, H, cols]``, which it may overwrite, and
            weights ``[b, rows, H]`` or None.
        pull_back: the gradients of products and weights, given that of scores, products and weights.
    """

    of: Callable[[Tensor, Tensor | None], Tensor]
    pull_back: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _relu_sum(products: Tensor, weights: Tensor | None) -> Tensor:
    products = products.relu_()
    return (products if weights is None else products.mul_(weights.unsqueeze(3))).sum(2)


def _pull_back_relu_sum(dscores: Tensor, products: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    of_weights = (products.relu() @ dscores.unsqueeze(3)).squeeze(3)
    return (weights.unsqueeze(3) * dscores.unsqueeze(2)).masked_fill_(products <= 0, 0), of_weights


SCORES = {"relu_sum": Score(_relu_sum, _pull_back_relu_sum)}
"""The functions that score a pair, by their names."""


def products_by_row(q: Tensor, k: Tensor) -> Tensor:
    """The products ``[b, rows, H, cols]`` of queries ``[b, H, rows, D]`` and keys ``[b, Hkv, cols, D]``, in the
    accumulation dtype."""
    dtype, (b, heads, rows, _), (_, groups, cols, _) = accumulation_dtype(q.dtype), q.shape, k.shape
    by_group = q.to(dtype).unflatten(1, (groups, -1)).flatten(2, 3)
    return (by_group @ k.to(dtype).mT).view(b, heads, rows, cols).transpose(1, 2)


def blocks(tile: TileInputs, heads: int, wide: int) -> Iterator[Rectangle]:
    """Rows and columns of a tile, ``wide`` columns at a time, of which the products with ``heads`` heads are not too
    many to be computed at once. Those that the band hides are left out."""
    (b, _, rows, _), cols, (lower, upper) = tile.q.shape, tile.k.shape[2], tile.band
    wide = min(cols, wide)
    high = max(1, at_once(SCORES_AT_ONCE, tile.q) // max(1, b * heads * wide))
    for first in range(0, rows, high):
        some = first, min(first + high, rows)
        for start in range(0, cols, wide):
            seen = start, min(start + wide, cols)
            if upper is not None and seen[0] - (some[1] - 1) > upper:  # no query sees these keys
                break
            if lower is None or seen[1] - 1 - some[0] >= lower:
                yield some, seen, tile.rectangle(some, seen, shift(tile.band, first - start))


def visible_pairs(tile: TileInputs) -> Tensor | None:
    """The pairs that band and mask (one for all heads) of a tile show, ``[b or 1, rows, cols]``; None: all."""
    visible = band_mask(tile.q.shape[2], tile.k.shape[2], tile.band, tile.q.device)
    if tile.mask is None:
        return None if visible is None else visible.unsqueeze(0)
    return tile.mask[:, 0] if visible is None else tile.mask[:, 0] & visible


_NOTHING = torch.iinfo(torch.int64).min
_POSITIONS = (1 << 31) - 1


class BestKeys:
    """The best keys of each query so far.

    A key and its score are one number of 64 bits: the bits of the fp32 score, ordered as numbers are, above those of
    the position, which count down. So no two are equal, equal scores go to the lower position, and the result does not
    depend on the order in which keys come.
    """

    def __init__(self, q: Tensor, topk: int) -> None:
        self.best = torch.full((q.shape[0], 1, q.shape[2], topk), _NOTHING, dtype=torch.int64, device=q.device)

    def add(self, tile: TileInputs, weights: Tensor | None, best: Tensor, positions: Tensor, score: str) -> None:
        """Add the keys of a tile, at global ``positions``. ``best`` is the part of the tile's queries."""
        topk = best.shape[3]
        wide = max(2 * topk, 512)  # merging costs as much as the keys that are kept
        for some, seen, piece in blocks(tile, tile.q.shape[1], wide):
            into, of_rows = part(best, some), None if weights is None else part(weights, some)
            found = self._numbers(piece, of_rows, positions[slice(*seen)], score)
            into.copy_(torch.cat([into, found.unsqueeze(1)], 3).topk(topk, 3, sorted=False).values)

    @staticmethod
    def _numbers(tile: TileInputs, weights: Tensor | None, positions: Tensor, score: str) -> Tensor:
        products = products_by_row(tile.q, tile.k).mul_(tile.scale)
        of_heads = None if weights is None else weights.to(products.dtype).transpose(1, 2)
        scores = SCORES[score].of(products, of_heads).to(torch.float32) + 0.0  # -0.0 becomes 0.0
        bits = scores.view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & _POSITIONS)).to(torch.int64)
        numbers = (ordered << 32) + (_POSITIONS - positions)
        visible = visible_pairs(tile)
        return numbers if visible is None else numbers.masked_fill_(~visible, _NOTHING)

    def result(self, rows: tuple[int, int]) -> tuple[Tensor]:
        """The positions ``[B, 1, rows, topk]`` of a range of queries, int32, best first; -1 where there is none."""
        best = part(self.best, rows)
        found = torch.empty(best.shape, dtype=torch.int32, device=best.device)
        some = max(1, SORTED_AT_ONCE // max(1, best.shape[0] * best.shape[3]))
        for piece, into in zip(best.split(some, 2), found.split(some, 2), strict=True):
            ordered = piece.sort(-1, descending=True).values
            into.copy_((_POSITIONS - (ordered & _POSITIONS)).masked_fill_(ordered == _NOTHING, -1))
        return (found,)
