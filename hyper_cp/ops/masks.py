"""Explicit masks: one that equals a band is replaced by it; any other mask is sliced per tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..schedule.build import Schedule, Step
from ..schedule.ranges import Range
from ..schedule.tiles import Band, Tile
from .writes import writes

_known: Any = WeakTensorKeyDictionary()  # mask -> {view: (version, band)}


def recognised(mask: Tensor, length: int) -> Band | None:
    """The band a mask ``[..., S, S]`` amounts to (causal, a window, or everything visible), else None.

    Every element is compared, once; the answer is kept as long as the tensor lives unchanged. The host waits for the
    device once per mask.
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
    """Compare with the only band that the mask can be, which its first and its last query tell: a band shows the first
    query the keys up to its upper bound, and the last query those from its lower bound on. The host waits once, for
    one number."""
    length = mask.shape[-1]
    mask = mask.reshape(-1, length, length)
    after, before = (length - _hidden(mask[0, row]).sum() for row in (0, -1))  # keys that are seen, with a query's own
    rows = max(1, _AT_ONCE // (len(mask) * length))
    keys = torch.arange(length, device=mask.device)
    wrong = torch.stack(
        [_wrong(mask, keys, start, rows, before, after) for start in range(0, length, rows)] + [before * after == 0]
    ).any()
    answer = int(torch.where(wrong, -1, before * (length + 1) + after))
    if answer < 0:
        return None
    below, above = divmod(answer, length + 1)
    return None if below == length else 1 - below, None if above == length else above - 1


def _wrong(mask: Tensor, keys: Tensor, start: int, rows: int, before: Tensor, after: Tensor) -> Tensor:
    """True if some rows of a mask ``[n, S, S]`` do not show exactly so many keys before and after their queries."""
    mask, queries = mask[:, start : start + rows], keys[start : start + rows, None]
    above = (keys >= queries + after).logical_or_(keys <= queries - before)
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
