"""CUDA: tiles whose logits a function changes, by FlexAttention, compiled once.

The functions are shifted to the tile, the blocks of its mask are those that the tile touches, and the log-sum-exp is
asked for. Backward computes the tile again: its gradient by FlexAttention is that of the tile's own output and
log-sum-exp, which follow from those of the merged ones. Not executed on hardware: the tests run it on the CPU, where
FlexAttention is plain math.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ....schedule.tiles import FULL
from ..derivative import autograd_in_op
from ..inputs import TileInputs, backward_each, forward_each
from . import MaskMod, ScoreMod
from .mods import Mods, ordered_blocks

_BLOCK = 128


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(_plain(), dynamic=True)


def _plain() -> Callable[..., Any]:
    """Torch's own function, also where attention calls are routed, for which its body is replaced."""
    found: Callable[..., Any] = getattr(flex_attention, "__wrapped__", flex_attention)
    return found


class FlexKernel:
    """FlexAttention as a kernel for tiles with a score. ``compiled=False`` runs its math uncompiled."""

    name = "flex attention"

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.parts is not None:
            return forward_each(self.forward, tile, tile.rectangles())
        with torch.no_grad():
            return self._attend(tile, tile.q, tile.k, tile.v)

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if tile.parts is not None:
            return backward_each(self.backward, tile, tile.rectangles(), dout, out, lse)
        score = tile.score
        captured, totals = (score.score.captured, score.gradients) if score is not None else ((), ())
        with autograd_in_op():
            q, k, v = (x.detach().requires_grad_() for x in (tile.q, tile.k, tile.v))
            own, own_lse = self._attend(tile, q, k, v)
            with torch.no_grad():
                # out = sum of weight * own over tiles; weights are the exponentials of log-sum-exps, normalised.
                weight = (own_lse - lse).exp().nan_to_num(0.0)
                along = [(dout.to(lse.dtype) * x.to(lse.dtype)).sum(-1) for x in (own, out)]
                dlse = weight * (along[0] - along[1] + (0 if tile.dlse is None else tile.dlse))
                down = (dout * weight.unsqueeze(-1)).to(own.dtype)
            with _added_to(captured, totals):
                outputs, downward = (own, own_lse), (down, dlse.to(own_lse.dtype))
                grads = torch.autograd.grad(outputs, (q, k, v, *captured), downward, materialize_grads=True)
        dq, dk, dv = grads[:3]
        return dq, dk, dv

    def _attend(self, tile: TileInputs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        score_mod, mask_mod = functions(tile)
        mask = None if mask_mod is None else tile_blocks(tile, mask_mod)
        run = _compiled() if self.compiled else _plain()
        options = {"scale": tile.scale, "enable_gqa": q.shape[1] != k.shape[1], "return_aux": AuxRequest(lse=True)}
        out, aux = run(q, k, v, score_mod=score_mod, block_mask=mask, **options)
        return out, aux.lse


# --------------------------------------------------------------------------- a tile as functions and blocks


def functions(tile: TileInputs) -> tuple[ScoreMod | None, MaskMod | None]:
    """The score, the band and the explicit mask of a tile as functions of numbers in the tile."""
    score_mod, mask_mod = (None, None) if tile.score is None else tile.score.score.mods(tile.score.where)
    if tile.band != FULL:
        mask_mod = _both(mask_mod, _band(*tile.band))
    if tile.mask is None:
        return score_mod, mask_mod
    mask = tile.mask.expand(*tile.q.shape[:3], tile.k.shape[2])
    if mask.dtype == torch.bool:
        return score_mod, _both(mask_mod, lambda b, h, i, j: mask[b, h, i, j])
    return _added(score_mod, mask), mask_mod


def _added(score_mod: ScoreMod | None, bias: Tensor) -> ScoreMod:
    if score_mod is None:
        return lambda score, b, h, i, j: score + bias[b, h, i, j]
    return lambda score, b, h, i, j: score_mod(score, b, h, i, j) + bias[b, h, i, j]


def _both(first: MaskMod | None, second: MaskMod) -> MaskMod:
    return second if first is None else lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)


_FAR = 2**30  # no key is so far from a query, and indices may be 32-bit integers


def _band(lower: int | None, upper: int | None) -> MaskMod:
    low, high = -_FAR if lower is None else lower, _FAR if upper is None else upper
    return lambda b, h, i, j: (j - i <= high) & (j - i >= low)


def tile_blocks(tile: TileInputs, mask_mod: MaskMod) -> BlockMask:
    """The mask of a tile: blocks of the tile that touch a listed block of the global mask, and that the band leaves
    visible. The function is evaluated in all of them."""
    (rows, cols), device = (tile.q.shape[2], tile.k.shape[2]), tile.q.device
    starts = [torch.arange(0, n, _BLOCK, device=device) for n in (rows, cols)]
    distance = starts[1] - starts[0].unsqueeze(1)  # of the first key of a block from its first query
    listed = torch.ones_like(distance, dtype=torch.bool)
    lower, upper = tile.band
    if upper is not None:
        listed &= distance - (_BLOCK - 1) <= upper
    if lower is not None:
        listed &= distance + (_BLOCK - 1) >= lower
    score = None if tile.score is None else tile.score.score
    if isinstance(score, Mods) and score.dense is not None and score.block_mask is not None and tile.score is not None:
        where = tile.score.where
        if where is not None:
            listed = listed & _touched(score.dense, score.block_mask.BLOCK_SIZE, where.rows, where.cols)
    listed = listed.expand(1, 1, *distance.shape) if listed.ndim == 2 else listed
    number, order = ordered_blocks(listed)
    return BlockMask.from_kv_blocks(number, order, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(rows, cols))


def _touched(dense: Tensor, size: tuple[int, int], rows: Tensor, cols: Tensor) -> Tensor:
    """``[1, 1, R, C]``: blocks of the tile at global positions ``rows`` and ``cols`` in which some pair lies in a block
    that ``dense`` lists for some head and batch row."""
    some = dense.flatten(0, 1).any(0).float()
    touching = []
    for positions, grain, number in ((rows, size[0], some.shape[0]), (cols, size[1], some.shape[1])):
        local = torch.arange(len(positions), device=positions.device) // _BLOCK
        found = some.new_zeros(-(-len(positions) // _BLOCK), number)
        found[local, positions // grain] = 1.0
        touching.append(found)
    return (touching[0] @ some @ touching[1].mT > 0)[None, None]


# --------------------------------------------------------------------------- gradients of captured tensors


@contextmanager
def _added_to(captured: Sequence[Tensor], totals: Sequence[Tensor]) -> Iterator[None]:
    """Add gradients of captured tensors to ``totals``, and nothing to tensors that these were computed from, which may
    be captured too."""

    def hook(total: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: torch.zeros_like(total.add_(gradient), dtype=gradient.dtype)

    handles = [x.register_hook(hook(total)) for x, total in zip(captured, totals, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


KERNEL = FlexKernel()


def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True within the limits of FlexAttention's kernel."""
    return q.dtype != torch.float64 and min(q.shape[3], v.shape[3]) >= 16
