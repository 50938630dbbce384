"""Explicit masks: one that equals a band is replaced by it; any other mask is sliced per tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..schedule.build import Schedule, Step
from ..schedule.ranges import Rows, length_of
from ..schedule.tiles import Band, Tile
from .kernels.inputs import mask_slice
from .writes import writes

_bands: Any = WeakTensorKeyDictionary()
"""``mask -> {view: (number of writes, band)}``"""


def recognised(mask: Tensor, length: int, in_graph: bool = False) -> Band | None:
    """The band a mask ``[..., S, S]`` amounts to (causal, a window, or everything visible), else None.

    Every element is compared, once; the result is kept as long as the tensor lives unchanged. The host waits for the
    device once per mask. In a compiled graph, which may put the mask of the next layer into the same tensor without
    counting a write, it is compared in every call, as in inference mode.
    """
    if mask.shape[-1] != length or mask.shape[-2] != length:
        return None
    if in_graph or mask.is_inference():  # no version shows a change
        return _recognise(mask)
    owner = mask if mask._base is None else mask._base  # views are made anew for every call
    bands = _bands.setdefault(owner, {})
    view = (tuple(mask.shape), mask.stride(), mask.storage_offset())
    if view not in bands or bands[view][0] != writes(mask):
        bands[view] = writes(mask), _recognise(mask)
    band: Band | None = bands[view][1]
    return band


# The most elements of a mask that are compared at once: what is made on the way is as large.
_AT_ONCE = 1 << 26


def _recognise(mask: Tensor) -> Band | None:
    """Compare with the only band that the mask can be. Its first and its last query determine that band: the first
    query sees the keys up to the upper bound, and the last query those from the lower bound on. The host waits once,
    for one number."""
    length = mask.shape[-1]
    mask = mask.reshape(-1, length, length)
    after, before = (length - _hidden(mask[0, row]).sum() for row in (0, -1))  # keys that are seen, with a query's own
    rows = max(1, _AT_ONCE // (len(mask) * length))
    keys = torch.arange(length, device=mask.device)
    wrong = torch.stack(
        [_wrong(mask, keys, start, rows, before, after) for start in range(0, length, rows)] + [before * after == 0]
    ).any()
    number = int(torch.where(wrong, -1, before * (length + 1) + after))
    if number < 0:
        return None
    below, above = divmod(number, length + 1)
    return None if below == length else 1 - below, None if above == length else above - 1


def _wrong(mask: Tensor, keys: Tensor, start: int, rows: int, before: Tensor, after: Tensor) -> Tensor:
    """True unless ``rows`` rows of a mask ``[n, S, S]`` show exactly ``before`` keys up to each query, itself included,
    and ``after`` keys from it on."""
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
        own = mask.shape[2] in (1, length_of(plan.queries))
        if plan.swap and own and mask.shape[2] > 1:
            raise ValueError(
                f"attn_mask of shape {tuple(mask.shape)} has the local queries in its third dimension. With "
                "load_balance=True this rank attends other queries too. Pass the mask of all global queries"
            )
        self.mask = mask if own else Rows(plan.queries).take(mask, 2)
        self.step: Step | None = None

    def of(self, step: Step, tile: Tile) -> Tensor:
        """The slice of a tile, broadcastable to ``[b, H, rows, cols]``."""
        if step is not self.step:
            self.step = step
            self.block = self.mask if self.mask.shape[3] == 1 else Rows(step.keys).take(self.mask, 3)
        block = self.block
        if tile.batch is not None and block.shape[0] > 1:
            block = block[tile.batch[0] : tile.batch[1]]
        return mask_slice(block, tile.q, tile.k)
