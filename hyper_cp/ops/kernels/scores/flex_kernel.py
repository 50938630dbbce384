"""CUDA: tiles whose logits a function changes, by FlexAttention, compiled once.

The functions are shifted to the tile, the blocks of its mask are those that the tile touches, and the log-sum-exp is
asked for. Backward computes the tile again: its gradient by FlexAttention is that of the tile's own output and
log-sum-exp, which follow from those of the merged ones.

All tiles are put into one form, so that one graph serves them: each has a band, whose bounds are tensors, listed and
full blocks, and tensors that begin where their storage begins. The tests run it on the CPU, where FlexAttention is
plain math, and count the graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils import dlpack

from ..derivative import autograd_in_op
from ..inputs import TileInputs, backward_each, forward_each
from . import MaskMod, ScoreMod
from .mods import Mods, ordered_blocks

_BLOCK = 128


@contextmanager
def _room_for_graphs(most: int) -> Iterator[None]:
    """Let torch keep more graphs of one function than its 8. In them lengths that happen to be equal stay different
    numbers, and a score's floats are constants: as inputs of a graph they cannot be differentiated past. Private
    configuration, since no public name sets it for one function."""
    dynamo, shapes = torch._dynamo, importlib.import_module("torch.fx.experimental._config")
    kept = max(most, dynamo.config.recompile_limit)
    with dynamo.config.patch(recompile_limit=kept, specialize_float=True), shapes.patch(use_duck_shape=False):
        try:
            yield
        except dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"FlexAttention has been compiled for {kept} different calls in this process, the most that are kept. "
                "Each code of a score_mod or mask_mod, head dim, dtype and number of heads needs a graph of its own, "
                "and without one the logits of a whole tile would be made. Use fewer functions, and give them what "
                "changes as tensors; TORCH_LOGS=recompiles says what differed. Or raise "
                "torch._dynamo.config.recompile_limit"
            ) from error


def _plain() -> Callable[..., Any]:
    """Torch's own function, also where attention calls are routed, for which its body is replaced."""
    found: Callable[..., Any] = getattr(flex_attention, "__wrapped__", flex_attention)
    return found


class FlexKernel:
    """FlexAttention as a kernel for tiles with a score.

    Args:
        compiled: False runs its math uncompiled.
        most_graphs: the most graphs that are kept: of every score function, head dim, dtype and the like, forward and
            backward. A call that needs a further one is an error.
    """

    name = "flex attention"

    def __init__(self, compiled: bool = True, most_graphs: int = 128) -> None:
        self.compiled, self.most_graphs = compiled, most_graphs

    @cached_property
    def _flex(self) -> Callable[..., Any]:
        """FlexAttention compiled as a whole: past the limit of recompilations torch then raises an error, in place of
        its plain math, which would make all logits of a tile."""
        return torch.compile(_plain(), dynamic=True, fullgraph=True) if self.compiled else _plain()

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.parts is not None:
            return forward_each(self.forward, tile, tile.rectangles())
        with torch.no_grad():
            return self._attend(tile, *(_at_zero(x) for x in (tile.q, tile.k, tile.v)))

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if tile.parts is not None:
            return backward_each(self.backward, tile, tile.rectangles(), dout, out, lse)
        score = tile.score
        captured, totals = (score.score.captured, score.gradients) if score is not None else ((), ())
        with autograd_in_op():
            q, k, v = (_at_zero(x).requires_grad_() for x in (tile.q, tile.k, tile.v))
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
        mask = tile_blocks(tile, mask_mod)
        aux = AuxRequest(lse=True, max_scores=tile.largest is not None)
        options = {"scale": tile.scale, "enable_gqa": q.shape[1] != k.shape[1], "return_aux": aux}
        if self.compiled:  # the other kernel, for few queries, has no block for 33 and more that share a key head
            options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
        with _room_for_graphs(self.most_graphs):
            out, aux = self._flex(q, k, v, score_mod=score_mod, block_mask=mask, **options)
        tile.raise_largest(aux.max_scores.unsqueeze(3)) if tile.largest is not None else None
        return out, aux.lse


def _at_zero(x: Tensor) -> Tensor:
    """The same memory as a tensor whose storage begins with it, without the stride that one batch row has in a longer
    tensor: graphs differ by whether an offset is zero, and whether a stride follows from the sizes. By a capsule, which
    asks neither for the current device nor for its stream."""
    x = x.detach()
    capsule = dlpack.to_dlpack(x if len(x) > 1 else x[0].unsqueeze(0))  # type: ignore[attr-defined]
    return dlpack.from_dlpack(capsule)


# --------------------------------------------------------------------------- a tile as functions and blocks


def functions(tile: TileInputs) -> tuple[ScoreMod | None, MaskMod]:
    """The score, and the band and the explicit mask of a tile, as functions of numbers in the tile."""
    score_mod, hidden = (None, None) if tile.score is None else tile.score.score.mods(tile.score.where)
    mask_mod = _both(hidden, _band(tile))
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


def _band(tile: TileInputs) -> MaskMod:
    """The band of a tile. A bound that is a number would be part of a graph where it is 0 or 1; it is filled in on the
    device, so that the host does not wait."""
    lower, upper = tile.band
    bounds = -_FAR if lower is None else lower, _FAR if upper is None else upper
    low, high = (torch.full((), x, dtype=torch.int32, device=tile.q.device) for x in bounds)
    return lambda b, h, i, j: (j - i <= high) & (j - i >= low)


def tile_blocks(tile: TileInputs, mask_mod: MaskMod) -> BlockMask:
    """The mask of a tile: blocks of the tile that touch a listed block of the global mask, and that the band leaves
    visible. The function is evaluated in all of them, but for blocks that only the band could hide, and does not."""
    (rows, cols), device = (tile.q.shape[2], tile.k.shape[2]), tile.q.device
    starts = [torch.arange(0, n, _BLOCK, device=device) for n in (rows, cols)]
    distance = starts[1] - starts[0].unsqueeze(1)  # of the first key of a block from its first query
    listed = torch.ones_like(distance, dtype=torch.bool)
    full = (starts[0].unsqueeze(1) + _BLOCK <= rows) & (starts[1] + _BLOCK <= cols)
    lower, upper = tile.band
    if upper is not None:
        listed &= distance - (_BLOCK - 1) <= upper
        full &= distance + (_BLOCK - 1) <= upper
    if lower is not None:
        listed &= distance + (_BLOCK - 1) >= lower
        full &= distance - (_BLOCK - 1) >= lower
    score, where = (None, None) if tile.score is None else (tile.score.score, tile.score.where)
    if isinstance(score, Mods):
        full = torch.zeros_like(full)
        if score.dense is not None and score.block_mask is not None and where is not None:
            listed = listed & _touched(score.dense, score.block_mask.BLOCK_SIZE, where.rows, where.cols)
    if tile.mask is not None:
        full = torch.zeros_like(full)
    listed = listed.expand(1, 1, *distance.shape)
    some, whole = ordered_blocks(listed & ~full), ordered_blocks(listed & full)
    return BlockMask.from_kv_blocks(
        some[0], some[1], whole[0], whole[1], BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(rows, cols)
    )


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
