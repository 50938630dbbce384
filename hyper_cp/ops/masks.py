"""Explicit masks: one that equals a band is replaced by it; any other mask is sliced per tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..schedule.build import Schedule, Step
from ..schedule.ranges import Range
from ..schedule.tiles import CAUSAL, FULL, Band, Tile

_known: Any = WeakTensorKeyDictionary()  # mask -> {view: (version, band)}


def recognised(mask: Tensor, length: int) -> Band | None:
    """The band a mask ``[..., S, S]`` amounts to (causal, or everything visible), else None.

    Every element is compared; the answer is kept as long as the tensor lives unchanged. Reads the
    result once per mask, which on an accelerator waits for the device.
    """
    if mask.shape[-1] != length or mask.shape[-2] != length:
        return None
    if mask.is_inference():  # has no version by which a change would show
        return _recognise(mask)
    owner = mask if mask._base is None else mask._base  # views are made anew for every call
    known = _known.setdefault(owner, {})
    view = (tuple(mask.shape), mask.stride(), mask.storage_offset())
    if view not in known or known[view][0] != mask._version:
        known[view] = mask._version, _recognise(mask)
    found: Band | None = known[view][1]
    return found


def _recognise(mask: Tensor) -> Band | None:
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:  # exactly 0 where visible; what hides is -inf or the most negative number
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((mask.masked_fill(hidden, 0) == 0).all()):
            return None
    if not bool(hidden.any()):
        return FULL
    upper = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return CAUSAL if bool((hidden == upper).all()) else None


class MaskSlices:
    """An explicit mask ``[B|1, H|1, Sq|1, Skv|1]``, cut to what this rank's tiles need.

    The key dimension is global; the query dimension is global, or this rank's own rows.
    """

    def __init__(self, mask: Tensor, plan: Schedule):
        rows = sum(stop - start for start, stop in plan.queries)
        own = mask.shape[2] in (1, rows)
        if plan.swap and own and mask.shape[2] > 1:
            raise ValueError(
                f"attn_mask of shape {tuple(mask.shape)} has the local queries in its third dimension, but "
                "load_balance=True attends other queries: pass the mask of all global queries"
            )
        self.mask = mask if own else _ranges(mask, plan.queries, 2)
        self.step: Step | None = None

    def of(self, step: Step, tile: Tile) -> Tensor:
        """The slice of a tile, broadcastable to ``[b, H, rows, cols]``."""
        if step is not self.step:
            self.step = step
            self.block = self.mask if self.mask.shape[3] == 1 else _ranges(self.mask, step.keys, 3)
        part = self.block
        if tile.batch is not None and part.shape[0] > 1:
            part = part[tile.batch[0] : tile.batch[1]]
        if part.shape[2] > 1:
            part = part[:, :, tile.q[0] : tile.q[1]]
        return part if part.shape[3] == 1 else part[..., tile.k[0] : tile.k[1]]


def _ranges(x: Tensor, ranges: Sequence[Range], dim: int) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
