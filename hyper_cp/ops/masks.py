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
from .writes import writes

_known: Any = WeakTensorKeyDictionary()  # mask -> {view: (version, band)}


def recognised(mask: Tensor, length: int) -> Band | None:
    """The band a mask ``[..., S, S]`` amounts to (causal, or everything visible), else None.

    Every element is compared, once; the answer is kept as long as the tensor lives unchanged. The host reads one number
    per mask, for which it waits for the device.
    """
    if mask.shape[-1] != length or mask.shape[-2] != length:
        return None
    if mask.is_inference():  # has no version by which a change would show
        return _recognise(mask)
    owner = mask if mask._base is None else mask._base  # views are made anew for every call
    known = _known.setdefault(owner, {})
    view = (tuple(mask.shape), mask.stride(), mask.storage_offset())
    if view not in known or known[view][0] != writes(mask):
        known[view] = writes(mask), _recognise(mask)
    found: Band | None = known[view][1]
    return found


# The most elements of a mask that are compared at once: what is made on the way is as large.
_AT_ONCE = 1 << 26


def _recognise(mask: Tensor) -> Band | None:
    """Compare with what the corner says that the mask is: if the first query does not see the last key, it can only be
    causal. So one reduction and one number, which the host waits for, decide."""
    length = mask.shape[-1]
    mask = mask.reshape(-1, length, length)
    causal = _hidden(mask[:1, :1, -1:]).reshape(())
    rows = max(1, _AT_ONCE // (len(mask) * length))
    wrong = torch.stack([_wrong(mask, start, rows, causal) for start in range(0, length, rows)]).any()
    answer = int(causal + 2 * wrong)
    return (FULL, CAUSAL)[answer] if answer < 2 else None


def _wrong(mask: Tensor, start: int, rows: int, causal: Tensor) -> Tensor:
    """True if some rows of a mask ``[n, S, S]`` are not causal, or not all visible."""
    mask = mask[:, start : start + rows]
    above = torch.ones(mask.shape[1:], dtype=torch.bool, device=mask.device).triu_(start + 1).logical_and_(causal)
    if mask.dtype == torch.bool:
        return (mask == above).any()  # visible where hidden is right, or the other way round
    return torch.where(above, _hidden(mask), mask == 0).logical_not_().any()  # visible is exactly 0


def _hidden(mask: Tensor) -> Tensor:
    """True where a mask hides a key. What hides in an additive mask is -inf or the most negative number."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


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
