"""Ascend NPU: ``torch_npu.npu_fusion_attention`` and its gradient.

Not executed on hardware: the tests run it against a stand-in for the operators' public contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...schedule.tiles import FULL, Band, shift
from .inputs import Rectangle, TileInputs, backward_each, forward_each
from .operators import MASK_AT_ONCE, Packing, gather, packing, rows_at_once, scatter, window
from .reference import KERNEL as REFERENCE
from .reference import band_mask

_COMPRESSED = 2048  # side of the triangle that the operator takes for every causal or banded mask
_LANES = 8  # identical copies in which the operator keeps its softmax statistics
_SEQUENCES, _TOKENS, _PACKED_DIM = 1024, 1 << 20, 512  # the limits of one variable-length call
_LOWEST = torch.finfo(torch.float32).min


class NPUKernel:
    """The operator as a kernel for any tile. Of a mask with more elements than ``mask_at_once`` some rows are computed
    after others."""

    name = "npu fusion attention"

    def __init__(self, mask_at_once: int = MASK_AT_ONCE) -> None:
        self.mask_at_once = mask_at_once

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if (rectangles := _rectangles(tile, self.mask_at_once)) is not None:
            return forward_each(self.forward, tile, rectangles)
        if tile.parts is not None:
            return _packed_forward(tile)
        if _is_additive(tile):
            return REFERENCE.forward(tile)
        layout, (q, k, v) = _layout(tile.q, tile.k, tile.v)
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            q, k, v, tile.q.shape[1], layout, scale=tile.scale, **_visible(tile)
        )
        return out if layout == "BNSD" else out.transpose(1, 2), _log_sum_exp(largest, total)

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if (rectangles := _rectangles(tile, self.mask_at_once)) is not None:
            return backward_each(self.backward, tile, rectangles, dout, out, lse)
        if tile.parts is not None:
            return _packed_backward(tile, dout, out, lse)
        if _is_additive(tile):
            return REFERENCE.backward(tile, dout, out, lse)
        layout, tensors = _layout(tile.q, tile.k, tile.v, dout, out.to(tile.q.dtype))
        grads = _gradients(tile, layout, tensors, lse, _visible(tile))
        dq, dk, dv = (x if layout == "BNSD" else x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _rectangles(tile: TileInputs, mask_at_once: int) -> Iterator[Rectangle] | None:
    """The parts of a tile, or rows whose boolean mask is not too large; None: the tile is computed by other means."""
    if tile.parts is not None:
        return None if _fits_one_call(tile) else tile.rectangles()
    if tile.mask is None or _is_additive(tile):
        return None
    rows = rows_at_once(tile, mask_at_once)
    return tile.row_bands(rows) if rows < tile.q.shape[2] else None


def _is_additive(tile: TileInputs) -> bool:
    """True if the tile's mask is added to the logits: the operator would add it before the scale."""
    return tile.mask is not None and tile.mask.dtype != torch.bool


def _gradients(
    tile: TileInputs, layout: str, tensors: Sequence[Tensor], lse: Tensor, options: dict[str, object]
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the operator's gradient on q, k, v, dout and out, all in the given layout."""
    q, k, v, dout, out = tensors
    largest, total = _statistics(lse)
    statistics = {"softmax_max": largest, "softmax_sum": total, "attention_in": out}
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        q, k, v, dout, tile.q.shape[1], layout, scale_value=tile.scale, **statistics, **options
    )
    return dq, dk, dv


def _log_sum_exp(largest: Tensor, total: Tensor) -> Tensor:
    """The log-sum-exp from the operator's lanes. A row that sees nothing has (out, max, sum) = (0, lowest number,
    highest number)."""
    return torch.where(largest[..., 0] == _LOWEST, -torch.inf, largest[..., 0] + total[..., 0].log())


def _statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The operator's (max, sum) for a log-sum-exp: any pair does; a row that sees nothing gets weights of zero."""
    largest = lse.float().masked_fill(lse == -torch.inf, -_LOWEST)
    largest = largest.unsqueeze(-1).expand(*lse.shape, _LANES).contiguous()
    return largest, torch.ones_like(largest)


# --------------------------------------------------------------------------- packed tiles


def _fits_one_call(tile: TileInputs) -> bool:
    """True if a packed tile is worth, and within the limits of, variable-length calls."""
    q = tile.q
    tokens = q.shape[0] * max(q.shape[2], tile.k.shape[2])
    return window(tile) is not None and q.shape[3] <= _PACKED_DIM and tokens <= _TOKENS


def _packed_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Layout TND: tensors are [tokens, N, D], statistics [tokens, N, 8]. The statistics lie so in memory only if
    ``softmax_layout`` says so, in forward and backward (CANN 8.3.RC1 or newer; older ones refuse the argument)."""
    how = packing(tile)
    q, k, v = gather(tile.q, how.rows), gather(tile.k, how.cols), gather(tile.v, how.cols)
    outs, lses = [], []
    for rows, cols, options in _groups(how):
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            q[rows], k[cols], v[cols], tile.q.shape[1], "TND", scale=tile.scale, **options, **_in_parts(tile, how)
        )
        outs.append(out)
        lses.append(_log_sum_exp(largest, total))
    return scatter(_cat(outs), how.rows, tile.q), scatter(_cat(lses), how.rows, tile.q, -torch.inf)


def _packed_backward(tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    how = packing(tile)
    q, dout, out, lse = (gather(x, how.rows) for x in (tile.q, dout, out.to(tile.q.dtype), lse))
    k, v = gather(tile.k, how.cols), gather(tile.v, how.cols)
    grads = []
    for rows, cols, options in _groups(how):
        tensors = q[rows], k[cols], v[cols], dout[rows], out[rows]
        grads.append(_gradients(tile, "TND", tensors, lse[rows], {**options, **_in_parts(tile, how)}))
    dq, dk, dv = (_cat(pieces) for pieces in zip(*grads, strict=True))
    return scatter(dq, how.rows, tile.q), scatter(dk, how.cols, tile.k), scatter(dv, how.cols, tile.v)


@lru_cache(maxsize=1024)
def _groups(how: Packing) -> list[tuple[slice, slice, dict[str, object]]]:
    """Groups of sequences that one call takes: their rows, their columns, and the operator's options.
    Cumulative lengths are without the leading 0 and on the host."""
    groups = []
    for first in range(0, len(how.row_ends), _SEQUENCES):
        row, col = (how.row_ends[first - 1], how.col_ends[first - 1]) if first else (0, 0)
        rows, cols = how.row_ends[first : first + _SEQUENCES], how.col_ends[first : first + _SEQUENCES]
        options: dict[str, object] = {
            "actual_seq_qlen": [end - row for end in rows],
            "actual_seq_kvlen": [end - col for end in cols],
            "softmax_layout": "TND",
        }
        groups.append((slice(row, rows[-1]), slice(col, cols[-1]), options))
    return groups


def _cat(xs: Sequence[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs))


# --------------------------------------------------------------------------- the operator's options


def _layout(*tensors: Tensor) -> tuple[str, list[Tensor]]:
    """The operator takes contiguous tensors, all [B, S, N, D] or all [B, N, S, D]. The layout is the one that most
    elements are in already, and only the other tensors are copied."""
    by_layout = {"BSND": [x.transpose(1, 2) for x in tensors], "BNSD": list(tensors)}
    copied = {name: sum(x.numel() for x in xs if not x.is_contiguous()) for name, xs in by_layout.items()}
    layout = "BSND" if not copied["BSND"] else min(("BNSD", "BSND"), key=copied.__getitem__)
    return layout, [x.contiguous() for x in by_layout[layout]]


def _visible(tile: TileInputs) -> dict[str, object]:
    """The operator's options for a band and a boolean mask. Its masks are True where *hidden*; without one
    it ignores sparse_mode and tokens."""
    (batch, _, rows, _), cols = tile.q.shape, tile.k.shape[2]
    if tile.mask is not None:
        heads = tile.mask.shape[1]
        seen = tile.mask.expand(tile.mask.shape[0] if heads == 1 else batch, heads, rows, cols)
        inside = band_mask(rows, cols, tile.band, tile.q.device)
        # Without inner_precise=2 a row that this mask hides from all keys comes back as the mean of the values.
        hidden = ~(seen if inside is None else seen & inside)
        return {"atten_mask": hidden, "sparse_mode": 1, "inner_precise": 2}
    if tile.band == FULL or (tile.causal and rows == cols):
        return _square(tile)
    # Tokens count from the diagonal that ends at the bottom right.
    options = _tokens(tile.q.device, shift(tile.band, rows - cols), cols + rows)
    return options if window(tile) is not None else {**options, "inner_precise": 2}  # a row may see nothing


def _in_parts(tile: TileInputs, how: Packing) -> dict[str, object]:
    """The options for the parts of a tile, whose band counts from the bottom right corner of each."""
    if tile.band == FULL or (tile.causal and how.square):
        return _square(tile)
    return _tokens(tile.q.device, tile.band, sum(how.longest))


def _square(tile: TileInputs) -> dict[str, object]:
    """The options for causal squares (the diagonals from top left and bottom right are one) or full rectangles."""
    return {"atten_mask": _triangle(tile.q.device), "sparse_mode": 2} if tile.causal else {}


def _tokens(device: torch.device, band: Band, most: int) -> dict[str, object]:
    """The options for a band that counts from the bottom right corner; ``most`` hides nothing."""
    lower, upper = band
    before, after = most if lower is None else -lower, most if upper is None else upper
    return {"atten_mask": _triangle(device), "sparse_mode": 4, "pre_tockens": before, "next_tockens": after}


@lru_cache(maxsize=16)
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


KERNEL = NPUKernel()


def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True within the limits of the operator on dtype, heads, head dims and lengths."""
    return (
        q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[1] <= 256
        and v.shape[3] <= q.shape[3] <= 768
        and max(q.shape[2], k.shape[2]) <= 1 << 20
    )
