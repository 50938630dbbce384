"""The scores of a lightning indexer, and a running selection of the best keys (DeepSeek V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...schedule.tiles import shift
from .inputs import TileInputs, repeat_heads
from .partials import accumulation_dtype, part
from .reference import band_mask

SCORES_AT_ONCE = 1 << 24
"""The most products of queries and keys that are computed at once."""


def relu_sum(q: Tensor, k: Tensor, weights: Tensor | None, scale: float) -> Tensor:
    """Scores ``[b, rows, cols]`` in the accumulation dtype: ``sum over h of weights[h] * relu(scale * q[h] . k)``.

    Args:
        q, k: ``[b, H, rows, D]`` and ``[b, 1 or Hkv, cols, D]``.
        weights: ``[b, H, rows]``; None: all 1.
    """
    dtype = accumulation_dtype(q.dtype)
    products = (q.to(dtype) @ repeat_heads(k.to(dtype), q.shape[1]).mT).mul_(scale).relu_()
    if weights is None:
        return products.sum(1)
    return (weights.to(dtype).transpose(1, 2).unsqueeze(2) @ products.transpose(1, 2)).squeeze(2)


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor | None, float], Tensor]] = {"relu_sum": relu_sum}
"""The functions that score a pair, by their names."""

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
        (b, heads, rows, _), cols, topk = tile.q.shape, tile.k.shape[2], best.shape[3]
        lower, upper = tile.band
        wide = min(cols, max(2 * topk, 512))  # merging costs as much as the keys that are kept
        high = max(1, SCORES_AT_ONCE // (b * heads * wide))
        for first in range(0, rows, high):
            some = first, min(first + high, rows)
            for start in range(0, cols, wide):
                seen = start, min(start + wide, cols)
                if upper is not None and seen[0] - (some[1] - 1) > upper:  # no query sees these keys
                    break
                if lower is not None and seen[1] - 1 - some[0] < lower:
                    continue
                piece, into = tile.rectangle(some, seen, shift(tile.band, first - start)), part(best, some)
                of_rows = None if weights is None else part(weights, some)
                found = self._numbers(piece, of_rows, positions[slice(*seen)], score)
                into.copy_(torch.cat([into, found.unsqueeze(1)], 3).topk(topk, 3, sorted=False).values)

    @staticmethod
    def _numbers(tile: TileInputs, weights: Tensor | None, positions: Tensor, score: str) -> Tensor:
        scores = SCORES[score](tile.q, tile.k, weights, tile.scale).to(torch.float32) + 0.0  # -0.0 becomes 0.0
        bits = scores.view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & _POSITIONS)).to(torch.int64)
        numbers = (ordered << 32) + (_POSITIONS - positions)
        visible = band_mask(numbers.shape[1], numbers.shape[2], tile.band, numbers.device)
        numbers = numbers if visible is None else numbers.masked_fill_(~visible, _NOTHING)
        if tile.mask is not None:
            numbers.masked_fill_(~tile.mask[:, 0], _NOTHING)
        return numbers

    def result(self, rows: tuple[int, int]) -> tuple[Tensor]:
        """The positions ``[B, 1, rows, topk]`` of a range of queries, int32, best first; -1 where there is none."""
        best = part(self.best, rows).sort(-1, descending=True).values
        return ((_POSITIONS - (best & _POSITIONS)).masked_fill_(best == _NOTHING, -1).to(torch.int32),)
