"""Masks that are lists of slices (a range of queries, a range of keys, and a kind), without a matrix of all pairs.

At each query a slice shows one range of keys. So a list of slices is, for each query, as many ranges as slices overlap
there: a small table, from which FlexAttention's function of pairs and its blocks follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..mesh.agreement import digest
from ..mesh.arguments import is_int
from ..schedule.ranges import Numbers
from .kernels.scores import Score
from .kernels.scores.mods import Mods, block_tensors, ordered_blocks
from .writes import Written, unchanged, written

KINDS = ("full", "causal", "inverse_causal", "bicausal")
"""Kinds of slices, in the order of MagiAttention's numbers."""
_REMEDY = "Pass ((query start, stop), (key start, stop), kind) with kind one of " + ", ".join(map(repr, KINDS))


def mask_of_slices(
    slices: Iterable[Sequence[Any]],
    length: int,
    *,
    keys: int | None = None,
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """The mask of FlexAttention under which the queries of each slice see its keys, over *global* positions.

    It needs memory for a few numbers per query, and one per block of pairs; no matrix of all pairs is made. Blocks that
    nobody sees are neither computed nor, with ``kv_exchange="needed"``, sent. ``layout_of_mask`` balances it::

        mask = mask_of_slices([((0, 64), (0, 64), "causal"), ((64, 96), (0, 96), "causal")], 96)
        flex_attention(q, k, v, block_mask=mask)  # in a styled module, on this rank's q, k, v

    Args:
        slices: ``(q_range, k_range, kind)``, ranges as ``(start, stop)``. In a slice of a queries and b keys, query i
            sees key j (both counted from the start of their range)

            * ``"full"``: always,
            * ``"causal"``: if ``j <= i + b - a``, so that the last query sees the last key,
            * ``"inverse_causal"``: if ``j >= i``, so that the first query sees the first key,
            * ``"bicausal"``: if both hold.

            Numbers 0 to 3 mean these kinds, too. A pair in several slices is visible once.
        length: S, the number of queries of the whole sequence.
        keys: the number of keys, if it is another one (cross-attention).
        block_size: the number of queries, and of keys, of a block.
        device: the device of the queries.

    Returns:
        A ``BlockMask``. Equal arguments give the same object while it lives, and layers share what is made of it; once
        somebody has changed it, they give a new one. Give another ``mask_mod`` to a copy (``copy.copy(mask)``).

    Raises:
        TypeError, ValueError: for slices that do not fit.

    Example::

        >>> mask = mask_of_slices([((0, 4), (0, 4), "causal"), ((4, 8), (2, 8), "causal")], 8, block_size=2)
        >>> mask.to_dense()[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]

    Source: the slices of MagiAttention (arXiv 2505.13211) and its ``attn_type_map``, where they must not overlap.
    """
    keys = length if keys is None else keys
    for name, value in (("length", length), ("keys", keys), ("block_size", block_size)):
        if not is_int(value) or not 0 < value < 2**31:
            raise ValueError(
                f"{name}={value!r} must be an int from 1 to 2**31 - 1. It is a number of positions. Pass one"
            )
    key = _checked(slices, length, keys), length, keys, block_size, torch.device(device)
    found = _made.get(key)
    if found is None or not _is_as_made(found):
        found = _made[key] = _block_mask(*key)
        _parts[found] = found.mask_mod, written(block_tensors(found))
    return found


_made: WeakValueDictionary[Any, BlockMask] = WeakValueDictionary()
"""Masks by their arguments, as long as somebody holds them."""
_parts: WeakKeyDictionary[BlockMask, tuple[Any, list[Written]]] = WeakKeyDictionary()
"""The function and the blocks with which each was made: its holders may change them."""


def _is_as_made(mask: BlockMask) -> bool:
    function, blocks = _parts[mask]
    return mask.mask_mod is function and unchanged(blocks, block_tensors(mask))


def score_of_slices(slices: Any, lengths: tuple[int, int], like: Tensor, score: Score | None) -> Score:
    """The score of an attention call under slices of these numbers of queries and keys, over that of its softcap."""
    mask = mask_of_slices(slices, lengths[0], keys=lengths[1], device=like.device)
    found = Mods(None if score is None else score.mods(None)[0], mask.mask_mod, mask, like)
    found.signature += f", slices={digest(repr(_checked(slices, *lengths)).encode())}"
    return found


Slice = tuple[int, int, int, int, int]
"""Start and stop of the queries, and of the keys, and the number of the kind."""


def _checked(slices: Any, length: int, keys: int) -> tuple[Slice, ...]:
    """The slices as numbers, without those that show nothing; ``TypeError`` or ``ValueError`` if they do not fit."""
    if isinstance(slices, (str, Tensor)) or not isinstance(slices, Iterable):
        raise TypeError(
            f"slices is a {type(slices).__name__}. It lists the rectangles that are visible. {_REMEDY}, ..."
        )
    found = []
    for number, given in enumerate(slices):
        try:
            (q0, q1), (k0, k1), kind = given
            kind = KINDS.index(kind) if isinstance(kind, str) else range(len(KINDS)).index(kind)
            if not all(map(is_int, (q0, q1, k0, k1, kind))):
                raise TypeError("a start or stop is no int")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"slices[{number}]={given!r} is no slice. A slice is a range of queries, one of keys, and a kind. "
                f"{_REMEDY}"
            ) from error
        if not (0 <= q0 <= q1 <= length and 0 <= k0 <= k1 <= keys):
            raise ValueError(
                f"slices[{number}]={given!r} does not lie within {length} queries and {keys} keys. Ranges are (start, "
                "stop) over the whole sequence. Pass ranges that ascend and end there at the latest"
            )
        if q0 < q1 and k0 < k1:
            found.append((q0, q1, k0, k1, kind))
    return tuple(found)


def _block_mask(slices: tuple[Slice, ...], length: int, keys: int, size: int, device: torch.device) -> BlockMask:
    starts, stops = _merged(*_ranges(slices, length))
    some, whole = _blocks(starts, stops, keys, size)
    listed = [ordered_blocks(torch.from_numpy(x).to(device)[None, None]) for x in (some & ~whole, whole)]
    tables = [torch.from_numpy(x).to(device, torch.int32) for x in (starts, stops)]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        first, last = tables
        found = (j >= first[0, i]) & (j < last[0, i])
        for level in range(1, len(first)):
            found = found | ((j >= first[level, i]) & (j < last[level, i]))
        return found

    return BlockMask.from_kv_blocks(
        *listed[0], *listed[1], BLOCK_SIZE=size, mask_mod=visible, seq_lengths=(length, keys)
    )


def _ranges(slices: tuple[Slice, ...], length: int) -> tuple[Numbers, Numbers]:
    """The range of keys ``[levels, length]`` that each query sees by each of the slices it lies in: starts and stops.
    Slices whose queries do not overlap share a level."""
    free, busy, levels = [0], list[tuple[int, int]](), list[tuple[int, Slice]]()
    for given in sorted(slices):
        while busy and busy[0][0] <= given[0]:
            heappush(free, heappop(busy)[1])
        level = heappop(free) if free else len(busy)
        heappush(busy, (given[1], level))
        levels.append((level, given))
    starts = np.zeros((1 + max((level for level, _ in levels), default=0), length), np.int64)
    stops = starts.copy()
    for level, (q0, q1, k0, k1, kind) in levels:
        at = np.arange(q0, q1)
        causal, inverse = kind in (1, 3), kind in (2, 3)
        starts[level, q0:q1] = np.maximum(k0, k0 + at - q0) if inverse else k0
        stops[level, q0:q1] = np.clip(k1 - q1 + at + 1, k0, k1) if causal else k1
    return starts, np.maximum(starts, stops)


def _merged(starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """The same keys in ranges that neither overlap nor touch."""
    starts = np.where(starts < stops, starts, np.iinfo(np.int64).max)
    order = np.argsort(starts, 0)
    starts, stops = (np.take_along_axis(x, order, 0) for x in (starts, stops))
    reach = np.maximum.accumulate(np.where(starts < stops, stops, 0), 0)
    begins = np.ones(starts.shape, bool)
    begins[1:] = starts[1:] > reach[:-1]
    end = reach[-1].copy()
    for level in range(len(starts) - 1, -1, -1):
        stops[level] = np.where(begins[level], end, 0)
        end = np.where(begins[level], reach[level - 1] if level else 0, end)
    empty = ~begins | (starts >= stops)
    starts[empty] = stops[empty] = 0
    used = max((level + 1 for level in range(len(starts)) if not empty[level].all()), default=1)
    return starts[:used], stops[:used]


def _blocks(starts: Numbers, stops: Numbers, keys: int, size: int) -> tuple[Any, Any]:
    """``[R, C]`` twice: True for blocks with a visible pair, and for those in which all pairs are visible."""
    length = starts.shape[1]
    rows, cols = -(-length // size), -(-keys // size)
    row = np.broadcast_to(np.arange(length) // size, starts.shape)

    def counted(first: Numbers, last: Numbers, where: Any) -> Any:  # queries of a row of blocks that reach a block
        found = np.zeros((rows, cols + 1), np.int32)
        np.add.at(found, (row[where], first[where]), 1)
        np.add.at(found, (row[where], last[where]), -1)
        return np.cumsum(found, 1, dtype=np.int32)[:, :cols]

    some = counted(starts // size, -(-stops // size), starts < stops) > 0
    first, last = -(-starts // size), stops // size
    whole = counted(first, last, first < last) == size  # a block that is not filled is never full
    return some, whole
