"""Attention of queries over keys that are selected for each of them, in Triton, on CUDA, forward and backward.

The math is that of :mod:`selected`. One program attends one query in a block of the heads that share a key head: its
heads are the rows of the products, its keys are gathered by index, some at a time. ``list_kernel`` comes first: it
writes the columns that each query sees in this tile one behind the other, so that no product is made for keys of other
tiles, and the host waits for nothing.

Backward has a kernel by queries, and one by the keys of a query, which sums over all heads before it adds to the
gradients of keys and values. Queries that have selected the same key add to it atomically, in fp32 and in no fixed
order, so these gradients are not the same bit for bit from run to run: under ``torch.use_deterministic_algorithms``
plain math runs instead.

Tests run the kernels in Triton's interpreter, and compile them for GPUs that are not there; an H100 has run them once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.tiles import shift
from .fused import switched_on
from .inputs import TileInputs
from .partials import empty_partial, like_queries, part
from .scores import Softcap

tl: Any = None  # triton.language, from the first use on: the kernels find it among their module's names
INSTALLED = importlib.util.find_spec("triton") is not None
"""True if there is a Triton to compile the kernels. A call does not look for it again."""


# --------------------------------------------------------------------------- functions of the kernels


def place_of(rows, heads, groups, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a program: batch row, row, key head, its block of query heads, and which of these are there."""
    per_group = heads // groups
    blocks = (per_group + BLOCK - 1) // BLOCK
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    h = block * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)  # strides of heads of long sequences times it exceed int32
    return (row // rows).to(tl.int64), (row % rows).to(tl.int64), group, group * per_group + h, h < per_group


def list_of(counts, columns, b, row, group, lists, rows, most):  # type: ignore[no-untyped-def]
    """The number of keys that a query sees for a key head, and the beginning of their list."""
    at = (b * lists + tl.minimum(group, lists - 1)) * rows + row
    return tl.load(counts + at), columns + at * most


def heads_at(at, b, heads, row):  # type: ignore[no-untyped-def]
    """The beginnings of a query in a tensor, head by head."""
    return b * at[0] + heads.to(tl.int64) * at[1] + row * at[2]


def block_of(x, at, inside, first, WIDTH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``WIDTH`` numbers of some rows, from ``first`` on, ``[rows, WIDE]``: 0 where there are none."""
    d = tl.arange(0, WIDE)
    seen = inside[:, None] if WIDTH == WIDE else inside[:, None] & (d < WIDTH)[None, :]
    return tl.load(x + at[:, None] + (first + d)[None, :], mask=seen, other=0.0)


def put_block(x, at, inside, first, values, WIDTH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of ``block_of``."""
    d = tl.arange(0, WIDE)
    seen = inside[:, None] if WIDTH == WIDE else inside[:, None] & (d < WIDTH)[None, :]
    tl.store(x + at[:, None] + (first + d)[None, :], values, mask=seen)


def add_block(x, at, inside, first, values, WIDTH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to some rows, to which other programs may be adding."""
    d = tl.arange(0, WIDE)
    seen = inside[:, None] if WIDTH == WIDE else inside[:, None] & (d < WIDTH)[None, :]
    tl.atomic_add(x + at[:, None] + (first + d)[None, :], values, mask=seen, sem="relaxed")


def logits_of(  # type: ignore[no-untyped-def]
    q, q_rest, k, k_rest, seen, mask, mask_at, scale, cap, REST: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr
):
    """Logits ``[heads, keys]``, -inf where they are hidden, and the slope of the softcap there."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST > 0:
        logits = tl.dot(q_rest, tl.trans(k_rest), logits, input_precision="ieee")
    logits *= scale
    slope = 1.0
    if CAPPED:
        bent = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / cap))  # tanh
        logits, slope = cap * bent, 1.0 - bent * bent
    if MASK == "bool":
        seen &= tl.load(mask + mask_at, mask=seen, other=0) != 0
    elif MASK == "added":
        logits += tl.load(mask + mask_at, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, logits, float("-inf")), slope


# --------------------------------------------------------------------------- the kernels


def list_kernel(  # type: ignore[no-untyped-def]
    columns, counts, positions, positions_at, ranges, number, first, cols, lower, upper, lists, rows, most,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the columns of a tile that a query has selected, and count them. ``ranges``: global starts and stops, and
    columns, of the keys of the step; the starts are searched in ``STEPS`` halvings."""
    row, here = (tl.program_id(0) % rows).to(tl.int64), (tl.program_id(0) // rows).to(tl.int64)
    of_row = positions + (here // lists) * positions_at[0] + (here % lists) * positions_at[1] + row * positions_at[2]
    into, count = columns + tl.program_id(0).to(tl.int64) * most, 0
    for start in range(0, most, BLOCK):
        n = start + tl.arange(0, BLOCK)
        position = tl.load(of_row + n, mask=n < most, other=-1)
        before = tl.zeros([BLOCK], tl.int32)  # ranges that begin at the position or before it
        for halving in tl.static_range(STEPS):
            more = before + (1 << (STEPS - 1 - halving))
            begins = tl.load(ranges + more - 1, mask=more <= number, other=0)
            before = tl.where((more <= number) & (begins <= position), more, before)
        known = (before > 0) & (n < most)
        begins = tl.load(ranges + before - 1, mask=known, other=0)
        known &= position < tl.load(ranges + number + before - 1, mask=known, other=0)
        column = position - begins + tl.load(ranges + 2 * number + before - 1, mask=known, other=0) - first
        known &= (column >= 0) & (column < cols) & (column - row >= lower) & (column - row <= upper)
        tl.store(into + count + tl.cumsum(known.to(tl.int32), 0) - 1, column, mask=known)
        count += tl.sum(known.to(tl.int32), 0)
    tl.store(counts + tl.program_id(0), count)


def attend_kernel(  # type: ignore[no-untyped-def]
    out, lse, q, k, v, mask, columns, counts, out_at, lse_at, q_at, k_at, v_at, mask_at,
    scale, cap, heads, groups, lists, rows, most,
    DIM: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr, WIDE: tl.constexpr, WIDE_REST: tl.constexpr,
    WIDE_V: tl.constexpr, WITHIN: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a query and a block of its heads. Keys have ``DIM + REST`` numbers, and values
    ``DIM_V``: with ``WITHIN``, the first ``DIM`` of the keys."""
    b, row, group, h, there = place_of(rows, heads, groups, HEADS)
    count, listed = list_of(counts, columns, b, row, group, lists, rows, most)
    q_rows = heads_at(q_at, b, h, row)
    query = block_of(q, q_rows, there, 0, DIM, WIDE)
    query_rest = block_of(q, q_rows, there, DIM, REST, WIDE_REST) if REST > 0 else query
    k_head, v_head = b * k_at[0] + group * k_at[1], b * v_at[0] + group * v_at[1]
    mask_rows = heads_at(mask_at, b, h, row)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDE_V], tl.float32)
    for start in range(0, count, KEYS):
        n = start + tl.arange(0, KEYS)
        column = tl.load(listed + n, mask=n < count, other=0).to(tl.int64)
        key = block_of(k, k_head + column * k_at[2], n < count, 0, DIM, WIDE)
        key_rest = block_of(k, k_head + column * k_at[2], n < count, DIM, REST, WIDE_REST) if REST > 0 else key
        seen = there[:, None] & (n < count)[None, :]
        at = mask_rows[:, None] + (column * mask_at[3])[None, :]
        logits, _ = logits_of(query, query_rest, key, key_rest, seen, mask, at, scale, cap, REST, CAPPED, MASK)
        above = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(above == float("-inf"), 0.0, above)  # nothing is visible yet: inf - inf would be NaN
        weights, kept = tl.exp(logits - base[:, None]), tl.exp(top - base)
        total, top = total * kept + tl.sum(weights, 1), above
        value = key if WITHIN else block_of(v, v_head + column * v_at[2], n < count, 0, DIM_V, WIDE_V)
        sums = tl.dot(weights.to(value.dtype), value, sums * kept[:, None], input_precision="ieee")
    total = tl.where(total == 0.0, 1.0, total)  # nothing is visible: `top` is -inf
    put_block(out, heads_at(out_at, b, h, row), there, 0, sums / total[:, None], DIM_V, WIDE_V)
    tl.store(lse + heads_at(lse_at, b, h, row), top + tl.log(total), mask=there)


def queries_kernel(  # type: ignore[no-untyped-def]
    dq, delta, q, k, v, dout, out, lse, dlse, mask, columns, counts,
    dq_at, delta_at, q_at, k_at, v_at, dout_at, out_at, lse_at, dlse_at, mask_at,
    scale, cap, heads, groups, lists, rows, most,
    DIM: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr, WIDE: tl.constexpr, WIDE_REST: tl.constexpr,
    WIDE_V: tl.constexpr, WITHIN: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, DLSE: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of a query and a block of its heads, and for ``keys_kernel`` what each weight's gradient loses to
    the others of its row, ``delta``."""
    b, row, group, h, there = place_of(rows, heads, groups, HEADS)
    count, listed = list_of(counts, columns, b, row, group, lists, rows, most)
    q_rows = heads_at(q_at, b, h, row)
    query = block_of(q, q_rows, there, 0, DIM, WIDE)
    query_rest = block_of(q, q_rows, there, DIM, REST, WIDE_REST) if REST > 0 else query
    down = block_of(dout, heads_at(dout_at, b, h, row), there, 0, DIM_V, WIDE_V)
    result = block_of(out, heads_at(out_at, b, h, row), there, 0, DIM_V, WIDE_V)
    loss = tl.sum(down.to(tl.float32) * result.to(tl.float32), 1)
    if DLSE:
        loss -= tl.load(dlse + heads_at(dlse_at, b, h, row), mask=there, other=0.0).to(tl.float32)
    tl.store(delta + heads_at(delta_at, b, h, row), loss, mask=there)
    whole = tl.load(lse + heads_at(lse_at, b, h, row), mask=there, other=float("inf")).to(tl.float32)
    whole = tl.where(whole == float("-inf"), float("inf"), whole)  # rows that see nothing: their weights are 0
    k_head, v_head = b * k_at[0] + group * k_at[1], b * v_at[0] + group * v_at[1]
    mask_rows = heads_at(mask_at, b, h, row)
    sums = tl.zeros([HEADS, WIDE], tl.float32)
    sums_rest = tl.zeros([HEADS, WIDE_REST], tl.float32)
    for start in range(0, count, KEYS):
        n = start + tl.arange(0, KEYS)
        column = tl.load(listed + n, mask=n < count, other=0).to(tl.int64)
        key = block_of(k, k_head + column * k_at[2], n < count, 0, DIM, WIDE)
        key_rest = block_of(k, k_head + column * k_at[2], n < count, DIM, REST, WIDE_REST) if REST > 0 else key
        seen = there[:, None] & (n < count)[None, :]
        at = mask_rows[:, None] + (column * mask_at[3])[None, :]
        logits, slope = logits_of(query, query_rest, key, key_rest, seen, mask, at, scale, cap, REST, CAPPED, MASK)
        value = key if WITHIN else block_of(v, v_head + column * v_at[2], n < count, 0, DIM_V, WIDE_V)
        dweights = tl.dot(down, tl.trans(value), input_precision="ieee")
        dlogits = tl.exp(logits - whole[:, None]) * (dweights - loss[:, None]) * slope * scale
        sums = tl.dot(dlogits.to(key.dtype), key, sums, input_precision="ieee")
        if REST > 0:
            sums_rest = tl.dot(dlogits.to(key.dtype), key_rest, sums_rest, input_precision="ieee")
    dq_rows = heads_at(dq_at, b, h, row)
    put_block(dq, dq_rows, there, 0, sums, DIM, WIDE)
    if REST > 0:
        put_block(dq, dq_rows, there, DIM, sums_rest, REST, WIDE_REST)


def keys_kernel(  # type: ignore[no-untyped-def]
    dk, dv, q, k, v, dout, lse, delta, mask, columns, counts,
    dk_at, dv_at, q_at, k_at, v_at, dout_at, lse_at, delta_at, mask_at,
    scale, cap, heads, groups, lists, rows, most,
    DIM: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr, WIDE: tl.constexpr, WIDE_REST: tl.constexpr,
    WIDE_V: tl.constexpr, WITHIN: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add what a query gives to the gradients of some of its keys and values, summed over the heads that share them.
    With ``WITHIN``, both are added to that of the keys."""
    row, group, per_group = tl.program_id(0), tl.program_id(1).to(tl.int64), heads // groups
    b, row = (row // rows).to(tl.int64), (row % rows).to(tl.int64)
    count, listed = list_of(counts, columns, b, row, group, lists, rows, most)
    n = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(2) * KEYS < count:
        column = tl.load(listed + n, mask=n < count, other=0).to(tl.int64)
        k_rows = b * k_at[0] + group * k_at[1] + column * k_at[2]
        key = block_of(k, k_rows, n < count, 0, DIM, WIDE)
        key_rest = block_of(k, k_rows, n < count, DIM, REST, WIDE_REST) if REST > 0 else key
        v_rows = b * v_at[0] + group * v_at[1] + column * v_at[2]
        value = key if WITHIN else block_of(v, v_rows, n < count, 0, DIM_V, WIDE_V)
        sums = tl.zeros([KEYS, WIDE], tl.float32)
        sums_rest = tl.zeros([KEYS, WIDE_REST], tl.float32)
        sums_v = tl.zeros([KEYS, WIDE_V], tl.float32)
        for start in range(0, per_group, HEADS):
            h = start + tl.arange(0, HEADS)
            there, h = h < per_group, group * per_group + h
            q_rows = heads_at(q_at, b, h, row)
            query = block_of(q, q_rows, there, 0, DIM, WIDE)
            query_rest = block_of(q, q_rows, there, DIM, REST, WIDE_REST) if REST > 0 else query
            down = block_of(dout, heads_at(dout_at, b, h, row), there, 0, DIM_V, WIDE_V)
            loss = tl.load(delta + heads_at(delta_at, b, h, row), mask=there, other=0.0)
            whole = tl.load(lse + heads_at(lse_at, b, h, row), mask=there, other=float("inf")).to(tl.float32)
            whole = tl.where(whole == float("-inf"), float("inf"), whole)
            seen = there[:, None] & (n < count)[None, :]
            at = heads_at(mask_at, b, h, row)[:, None] + (column * mask_at[3])[None, :]
            logits, slope = logits_of(query, query_rest, key, key_rest, seen, mask, at, scale, cap, REST, CAPPED, MASK)
            weights = tl.exp(logits - whole[:, None])
            dweights = tl.dot(down, tl.trans(value), input_precision="ieee")
            dlogits = (weights * (dweights - loss[:, None]) * slope * scale).to(key.dtype)
            if WITHIN:
                sums = tl.dot(tl.trans(weights.to(key.dtype)), down, sums, input_precision="ieee")
            else:
                sums_v = tl.dot(tl.trans(weights.to(key.dtype)), down, sums_v, input_precision="ieee")
            sums = tl.dot(tl.trans(dlogits), query, sums, input_precision="ieee")
            if REST > 0:
                sums_rest = tl.dot(tl.trans(dlogits), query_rest, sums_rest, input_precision="ieee")
        dk_rows = b * dk_at[0] + group * dk_at[1] + column * dk_at[2]
        add_block(dk, dk_rows, n < count, 0, sums, DIM, WIDE)
        if REST > 0:
            add_block(dk, dk_rows, n < count, DIM, sums_rest, REST, WIDE_REST)
        if not WITHIN:
            add_block(dv, b * dv_at[0] + group * dv_at[1] + column * dv_at[2], n < count, 0, sums_v, DIM_V, WIDE_V)


# --------------------------------------------------------------------------- launches


FUNCTIONS = place_of, list_of, heads_at, block_of, put_block, add_block, logits_of


@cache
def compiled(kernel: Callable[..., None]) -> Any:
    """The kernel as Triton launches it. (Lengths change with documents and blocks: all of them share one kernel.)"""
    global tl
    import triton
    import triton.language as tl

    for function in FUNCTIONS:  # kernels find them, as they find triton.language
        globals()[function.__name__] = triton.jit(function)
    return triton.jit(kernel, do_not_specialize=["rows", "number", "first", "cols", "lower", "upper"])


LISTED_AT_ONCE = 1 << 25
"""The most columns that are listed at once."""
_FAR = 1 << 30  # no key is so far from a query


def blocks(kernel: Callable[..., None], given: dict[str, Any], heads: int) -> dict[str, int]:
    """The heads and keys of a block, warps and stages: the largest for which the compiler reports no register that is
    spilled to memory, on sm_80, sm_90 and sm_100, for head dims that are powers of two, 192, 320 and 576. (Others, such
    as 561, spill a few.) No time has been measured."""
    width = max(given["WIDE"] + (given["WIDE_REST"] if given["REST"] else 0), given["WIDE_V"])
    warps, wide = (4 if width <= 192 else 8), width > 320
    if kernel is keys_kernel:  # it adds once for all heads, whatever the block
        return {"HEADS": 16, "KEYS": 16 if wide and not given["WITHIN"] else 32, "num_warps": warps, "num_stages": 1}
    narrow = kernel is queries_kernel or not given["WITHIN"]
    height = min(32, max(16, _power_of_two(heads)))
    return {"HEADS": height, "KEYS": 32 if wide and narrow else 64, "num_warps": warps, "num_stages": 2}


def _power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def widths(tile: TileInputs) -> dict[str, Any]:
    """The numbers of keys and values, and the powers of two that hold them. Keys are two parts, so that 576 numbers are
    not filled up to 1,024: values and the rest, if values are in the memory of keys."""
    (*_, dim), (*_, dim_v) = tile.k.shape, tile.v.shape
    first = dim if dim <= 16 else 1 << (dim.bit_length() - 1)
    within = tile.joint and sum(map(_power_of_two, (dim_v, dim - dim_v))) <= sum(MOST)
    first = dim_v if within else first
    parts = {"DIM": first, "REST": dim - first, "DIM_V": dim_v}
    wide = (max(16, _power_of_two(n)) for n in parts.values())
    return parts | dict(zip(("WIDE", "WIDE_REST", "WIDE_V"), wide, strict=True)) | {"WITHIN": within}


class _Piece:
    """Some rows of a tile, and the lists of the columns that each of them sees."""

    def __init__(self, tile: TileInputs) -> None:
        selected = tile.selected
        if selected is None:
            raise ValueError("a tile without a selection has come to the kernel of selected keys")
        positions = _with_last_contiguous(selected.positions())
        self.tile, self.lists = tile, positions.shape
        b, lists, rows, most = positions.shape
        self.columns = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
        self.counts = torch.empty(positions.shape[:3], dtype=torch.int32, device=positions.device)
        (lower, upper), ranges = tile.band, selected.ranges.contiguous()
        bounds = -_FAR if lower is None else lower, _FAR if upper is None else upper
        number, cols = ranges.shape[1], tile.k.shape[2]
        numbers = number, selected.columns_of_tile[0], cols, *bounds, lists, rows, most
        sizes = {"STEPS": number.bit_length(), "BLOCK": min(1024, _power_of_two(most))}
        given = self.counts, positions, positions.stride(), ranges
        _launch(list_kernel, (b * lists * rows,), self.columns, *given, *numbers, **sizes)

    def run(self, kernel: Callable[..., None], *tensors: Tensor, **constants: Any) -> None:
        """Launch a kernel on tensors of these rows and of all keys, with the tile's mask."""
        tile, (_, lists, rows, most) = self.tile, self.lists
        (b, heads, *_), groups = tile.q.shape, tile.k.shape[1]
        constants |= widths(tile) | {"CAPPED": tile.score is not None, "MASK": ""}
        constants |= blocks(kernel, constants, heads // groups)
        mask = tile.q
        if tile.mask is not None:
            mask = tile.mask.expand(b, heads, rows, tile.k.shape[2])
            constants["MASK"] = "bool" if mask.dtype == torch.bool else "added"
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        tensors = *tensors, mask
        numbers = tile.scale, _cap(tile), heads, groups, lists, rows, most
        of_heads, of_keys = -(-heads // groups // constants["HEADS"]), -(-most // constants["KEYS"])
        grid = (b * rows, groups, of_keys) if kernel is keys_kernel else (b * rows * of_heads, groups)
        _launch(
            kernel, grid, *tensors, self.columns, self.counts, *(x.stride() for x in tensors), *numbers, **constants
        )


def _with_last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cap(tile: TileInputs) -> float:
    if tile.score is None:
        return 1.0
    if not isinstance(tile.score.score, Softcap):
        raise NotImplementedError(
            f"the score {tile.score.score.key!r} came to the Triton kernel of selected keys. It has the softcap only. "
            "Set HYPER_CP_TRITON=0, so that plain math runs"
        )
    return tile.score.score.cap


def _launch(kernel: Callable[..., None], grid: tuple[int, ...], first: Tensor, *rest: Any, **constants: Any) -> None:
    """Launch on the device of the tensors: Triton takes the current one."""
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        try:
            compiled(kernel)[grid](first, *rest, **constants)
        except Exception as error:  # whatever Triton or its compilers raise
            raise RuntimeError(
                f"Triton cannot compile or launch attention over selected keys: {type(error).__name__}: "
                f"{str(error)[:300]}. It needs a C compiler and the triton of this PyTorch. Install these, or set "
                "HYPER_CP_TRITON=0, so that plain math runs"
            ) from error


def _pieces(tile: TileInputs) -> Iterator[tuple[tuple[int, int], _Piece]]:
    """Rows whose lists are not too long together."""
    rows, cols = tile.q.shape[2], tile.k.shape[2]
    per_row = 1 if tile.selected is None else tile.selected.listed[:, :, :1].numel() * tile.selected.block
    if not tile.q.numel() or not tile.k.numel():
        return
    size = max(1, LISTED_AT_ONCE // max(1, per_row))
    for start in range(0, rows, size):
        some = start, min(start + size, rows)
        yield some, _Piece(tile.rectangle(some, (0, cols), shift(tile.band, start)))


# --------------------------------------------------------------------------- the kernel of the package


class SelectedKernel:
    """The kernels above, for tiles whose queries have selected their keys. Results are in fp32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_partial(tile.q, tile.v.shape[3], torch.float32, torch.float32)
        for rows, piece in _pieces(tile):
            some = piece.tile
            piece.run(attend_kernel, part(out, rows), part(lse, rows), some.q, some.k, some.v)
        return out, lse

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq = like_queries(tile.q, tile.q.shape[3], torch.float32).zero_()
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (tile.k, tile.v))
        dout, out = (_with_last_contiguous(x) for x in (dout, out))
        for rows, piece in _pieces(tile):
            some, of_rows = piece.tile, [part(x, rows) for x in (dout, out, lse)]
            q, k, v, dlse = some.q, some.k, some.v, some.dlse
            delta = torch.empty_like(of_rows[2], dtype=torch.float32)
            given = *of_rows, of_rows[2] if dlse is None else dlse
            piece.run(queries_kernel, part(dq, rows), delta, q, k, v, *given, DLSE=dlse is not None)
            piece.run(keys_kernel, dk, dv, q, k, v, of_rows[0], of_rows[2], delta)
        return dq, dk, dv


KERNELS = {scores: SelectedKernel("triton selected keys" + ", softcap" * scores) for scores in (False, True)}
"""By whether the logits are changed by a function."""

MOST = 512, 64
"""The most numbers of a value, and of a key beyond them."""
_MEMORY = 160 * 1024
"""The most bytes of shared memory that a program needs; with keys up to 192 and values up to 128, a half of it."""


def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True for bfloat16 and float16 with head dims that fit, on GPUs with the memory for it, where Triton is there and
    not switched off. (fp32 without tensor cores spills registers, and with them it would not be fp32.)"""
    half = q.dtype in (torch.bfloat16, torch.float16)
    fits = k.shape[3] <= sum(MOST) and v.shape[3] <= MOST[0]
    if not q.is_cuda or not half or not fits or torch.are_deterministic_algorithms_enabled():
        return False
    if not switched_on() or not INSTALLED:
        return False
    card = torch.cuda.get_device_properties(q.device)
    needed = _MEMORY if k.shape[3] > 192 or v.shape[3] > 128 else _MEMORY // 2
    return card.major >= 8 and getattr(card, "shared_memory_per_block_optin", 0) >= needed
