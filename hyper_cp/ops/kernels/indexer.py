"""The scores of a lightning indexer, and a running selection of the best keys (DeepSeek V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class PairScore(NamedTuple):
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


SCORES = {"relu_sum": PairScore(_relu_sum, _pull_back_relu_sum)}
"""The functions that score a pair, by their names."""
PER_HEAD = "per_head"
"""The name of the score with which every head selects for itself: its product, times its weight."""


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
_INFINITY = 0x7F800000
"""The bits of an infinite score."""


class BestKeys:
    """The best keys of each query so far.

    A key and its score are one number of 64 bits: the bits of the fp32 score, ordered as numbers are, above those of
    the position, which count down. So no two are equal, equal scores go to the lower position, and the result does not
    depend on the order in which keys come.

    Blocks of keys are selected in the same way: a block's number has the largest score of its keys. A part of a block
    that comes later raises it, or brings back a block that was dropped: what dropped it are other blocks, whose scores
    do not fall.

    Args:
        q: queries ``[B, H, S, D]``, of which every head selects with the score ``"per_head"``.
        block: the number of adjacent keys that are selected together. What is listed are numbers of blocks then.
        local: blocks before and of each query, which it selects whatever their scores are.
        positions: the global ones of the queries ``[S]``.
    """

    def __init__(
        self, q: Tensor, topk: int, score: str = "relu_sum", block: int = 1, local: int = 0, positions: Any = None
    ) -> None:
        heads = q.shape[1] if score == PER_HEAD else 1
        self.best = torch.full((q.shape[0], heads, q.shape[2], topk), _NOTHING, dtype=torch.int64, device=q.device)
        self.score, self.block, self.listed = score, block, local > 0
        for i in range(local):
            number = positions // block - i
            first = (_INFINITY << 32) + (_POSITIONS - number)
            self.best[..., i] = first.masked_fill(number < 0, _NOTHING)

    def add(self, tile: TileInputs, weights: Tensor | None, best: Tensor, positions: Tensor) -> None:
        """Add the keys of a tile, at global ``positions``. ``best`` is the part of the tile's queries."""
        topk, positions = best.shape[3], positions // self.block
        wide = max(2 * topk * self.block, 512)  # merging costs as much as the keys that are kept
        for some, seen, piece in blocks(tile, tile.q.shape[1], wide):
            into, of_rows = part(best, some), None if weights is None else part(weights, some)
            found = self._numbers(piece, of_rows, positions[slice(*seen)])
            if self.block > 1 or self.listed:  # a key of a local block is listed before it comes
                found = self._of_blocks(found, positions[slice(*seen)], into)
            into.copy_(torch.cat([into, found], 3).topk(topk, 3, sorted=False).values)

    def _numbers(self, tile: TileInputs, weights: Tensor | None, positions: Tensor) -> Tensor:
        products = products_by_row(tile.q, tile.k).mul_(tile.scale)
        of_heads = None if weights is None else weights.to(products.dtype).transpose(1, 2)
        if self.score == PER_HEAD:
            scores = (products if of_heads is None else products.mul_(of_heads.unsqueeze(3))).transpose(1, 2)
        else:
            scores = SCORES[self.score].of(products, of_heads).unsqueeze(1)
        bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        ordered = (bits ^ ((bits >> 31) & _POSITIONS)).to(torch.int64)
        numbers = (ordered << 32) + (_POSITIONS - positions)
        visible = visible_pairs(tile)
        return numbers if visible is None else numbers.masked_fill_(~visible.unsqueeze(1), _NOTHING)

    @staticmethod
    def _of_blocks(found: Tensor, numbers: Tensor, best: Tensor) -> Tensor:
        """The best key of each block, and nothing for a block that is among the best: it may raise that one."""
        here, index = numbers.unique_consecutive(return_inverse=True)
        of_blocks = found.new_full((*found.shape[:3], len(here) + 1), _NOTHING)  # and a column for none of them
        of_blocks.scatter_reduce_(3, index.expand(found.shape), found, "amax")
        kept = _POSITIONS - (best & _POSITIONS)
        at = torch.searchsorted(here, kept).clamp_(max=len(here) - 1)
        at.masked_fill_(here[at] != kept, len(here))
        best.copy_(torch.maximum(best, of_blocks.gather(3, at)))
        return of_blocks.scatter_(3, at, _NOTHING)

    def result(self, rows: tuple[int, int]) -> tuple[Tensor]:
        """The positions (or blocks) of a range of queries, ``[B, 1 or H, rows, topk]``, int32, best first; -1 where
        there is none."""
        best = part(self.best, rows)
        found = torch.empty(best.shape, dtype=torch.int32, device=best.device)
        some = max(1, SORTED_AT_ONCE // max(1, best[:, :, :1].numel()))
        for piece, into in zip(best.split(some, 2), found.split(some, 2), strict=True):
            ordered = piece.sort(-1, descending=True).values
            into.copy_((_POSITIONS - (ordered & _POSITIONS)).masked_fill_(ordered == _NOTHING, -1))
        return (found,)
