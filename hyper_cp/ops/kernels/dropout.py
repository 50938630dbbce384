"""Attention dropout that does not depend on how the work is cut: each (query, key) pair has its own number.

The number is a hash of a seed, the batch row, the head and both global positions (a counter-based generator, as
Philox in PyTorch and FlashAttention). So forward, backward and recompute drop the same pairs whatever their tiles,
and ranks that share a seed are not correlated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...schedule.build import Step
from ...schedule.ranges import Range
from ...schedule.tiles import Tile
from .partials import accumulation_dtype
from .scores import Positions

_MASK = 0xFFFFFFFF


def draw_seed() -> Tensor:
    """``[1]`` int64 on the CPU from the default generator, which checkpointing restores for a recompute."""
    return torch.randint(0, 2**31, (1,), dtype=torch.int64, device="cpu")


class Dropout:
    """Factors of attention weights: ``1 / (1 - p)`` if a weight is kept, 0 if it is dropped."""

    def __init__(self, p: float, seed: Tensor, like: Tensor, heads_before: int, queries: Sequence[Range]):
        self.p, self.seed, self.dtype = p, int(seed.item()), accumulation_dtype(like.dtype)
        self.positions = Positions(like, heads_before, queries)

    def of(self, step: Step, tile: Tile) -> Tensor:
        """The factors ``[b, H, rows, cols]`` of a tile, in the accumulation dtype."""
        at = self.positions.of(step, tile)
        number = _mix(self.seed ^ at.batch.view(-1, 1, 1, 1))
        for others in (at.heads.view(-1, 1, 1), at.rows.view(-1, 1), _mix(at.cols + 1)):
            number = _mix(number ^ others)
        kept = number >= round(self.p * 2**32)
        return kept.to(self.dtype) / (1.0 - self.p)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3: 32 bits that look random, in int64."""
    x = (x + 0x9E3779B9) & _MASK
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)
