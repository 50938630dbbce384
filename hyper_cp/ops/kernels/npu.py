"""Ascend NPU: ``torch_npu.npu_fusion_attention`` and its gradient.

Not executed on hardware: the tests drive it against a stand-in for the operators' public contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...schedule.tiles import CAUSAL, FULL, Band
from .packed import Packing, Parts, backward_each, forward_each, gather, packing, scatter
from .reference import KERNEL as REFERENCE
from .reference import band_mask

_COMPRESSED = 2048  # side of the triangle that stands for every causal or banded mask
_LANES = 8  # identical copies in which the operator keeps its softmax statistics
_SEQUENCES, _TOKENS, _PACKED_DIM = 1024, 1 << 20, 512  # what one variable-length call takes at most
_LOWEST = torch.finfo(torch.float32).min


class NPUKernel:
    name = "npu fusion attention"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor]:
        if parts is not None:
            if _fits(q, k, parts):
                return _packed_forward(q, k, v, band, scale, parts)
            return forward_each(partial(self.forward, band=band, scale=scale), q, k, v, parts)
        if mask is not None and mask.dtype != torch.bool:
            return REFERENCE.forward(q, k, v, band, scale, mask)  # its pse is added before the scale
        layout, (x, y, z) = _layout(q, k, v)
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            x, y, z, q.shape[1], layout, scale=scale, **_visible(q, k, band, mask)
        )
        return out if layout == "BNSD" else out.transpose(1, 2), _log_sum_exp(largest, total)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if parts is not None:
            if _fits(q, k, parts):
                return _packed_backward(dout, q, k, v, out, lse, band, scale, parts)
            return backward_each(partial(self.backward, band=band, scale=scale), (dout, q, out, lse), k, v, parts)
        if mask is not None and mask.dtype != torch.bool:
            return REFERENCE.backward(dout, q, k, v, out, lse, band, scale, mask)
        layout, (x, y, z, dy, o) = _layout(q, k, v, dout, out.to(q.dtype))
        largest, total = _statistics(lse)
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            x,
            y,
            z,
            dy,
            q.shape[1],
            layout,
            softmax_max=largest,
            softmax_sum=total,
            attention_in=o,
            scale_value=scale,
            **_visible(q, k, band, mask),
        )
        return (dq, dk, dv) if layout == "BNSD" else (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


def _log_sum_exp(largest: Tensor, total: Tensor) -> Tensor:
    """From the operator's lanes. Of a row that sees nothing it says (out, max, sum) = (0, lowest, highest number)."""
    return torch.where(largest[..., 0] == _LOWEST, -torch.inf, largest[..., 0] + total[..., 0].log())


def _statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The operator's (max, sum) of a log-sum-exp: any pair does; a row that sees nothing gets weights of zero."""
    largest = lse.float().masked_fill(lse == -torch.inf, -_LOWEST)
    largest = largest.unsqueeze(-1).expand(*lse.shape, _LANES).contiguous()
    return largest, torch.ones_like(largest)


# --------------------------------------------------------------------------- packed tiles


def _fits(q: Tensor, k: Tensor, parts: Parts) -> bool:
    """Whether a packed tile is worth, and within the limits of, variable-length calls."""
    return len(parts) > 1 and q.shape[3] <= _PACKED_DIM and q.shape[0] * max(q.shape[2], k.shape[2]) <= _TOKENS


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, parts: Parts) -> tuple[Tensor, Tensor]:
    """Layout TND: tensors are [tokens, N, D], statistics [tokens, N, 8]. So are the statistics in memory only if
    ``softmax_layout`` says so, in forward and backward (CANN 8.3.RC1 or newer; older ones refuse the word)."""
    how = packing(parts, q.shape[0])
    x, y, z = gather(q, how.rows), gather(k, how.cols), gather(v, how.cols)
    outs, lses = [], []
    for rows, cols, words in _sequences(how):
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            x[rows], y[cols], z[cols], q.shape[1], "TND", scale=scale, **words, **_square(band, q.device)
        )
        outs.append(out)
        lses.append(_log_sum_exp(largest, total))
    return scatter(_cat(outs), how.rows, q), scatter(_cat(lses), how.rows, q, -torch.inf)


def _packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    how = packing(parts, q.shape[0])
    dy, x, o, sums = (gather(t, how.rows) for t in (dout, q, out.to(q.dtype), lse))
    y, z = gather(k, how.cols), gather(v, how.cols)
    grads = []
    for rows, cols, words in _sequences(how):
        largest, total = _statistics(sums[rows])
        grads.append(
            torch.ops.npu.npu_fusion_attention_grad(
                x[rows],
                y[cols],
                z[cols],
                dy[rows],
                q.shape[1],
                "TND",
                softmax_max=largest,
                softmax_sum=total,
                attention_in=o[rows],
                scale_value=scale,
                **words,
                **_square(band, q.device),
            )[:3]
        )
    dq, dk, dv = (_cat(list(pieces)) for pieces in zip(*grads, strict=True))
    return scatter(dq, how.rows, q), scatter(dk, how.cols, k), scatter(dv, how.cols, v)


def _sequences(how: Packing) -> Iterator[tuple[slice, slice, dict[str, object]]]:
    """Groups of sequences that one call takes: their rows, their columns, and the operator's words for them.
    Cumulative lengths are without the leading 0 and stay on the host."""
    for first in range(0, len(how.row_ends), _SEQUENCES):
        row, col = (how.row_ends[first - 1], how.col_ends[first - 1]) if first else (0, 0)
        rows, cols = how.row_ends[first : first + _SEQUENCES], how.col_ends[first : first + _SEQUENCES]
        words: dict[str, object] = {
            "actual_seq_qlen": [end - row for end in rows],
            "actual_seq_kvlen": [end - col for end in cols],
            "softmax_layout": "TND",
        }
        yield slice(row, rows[-1]), slice(col, cols[-1]), words


def _cat(xs: list[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(xs)


# --------------------------------------------------------------------------- the operator's words


def _layout(*tensors: Tensor) -> tuple[str, list[Tensor]]:
    """The operator takes contiguous tensors: [B, S, N, D] where all of them are, else [B, N, S, D]."""
    if all(x.transpose(1, 2).is_contiguous() for x in tensors):
        return "BSND", [x.transpose(1, 2) for x in tensors]
    return "BNSD", [x.contiguous() for x in tensors]


def _visible(q: Tensor, k: Tensor, band: Band, mask: Tensor | None) -> dict[str, object]:
    """The operator's words for a band and a boolean mask. Its masks are True where *hidden*; without one
    it ignores sparse_mode and tokens."""
    rows, cols = q.shape[2], k.shape[2]
    if mask is not None:
        seen = mask.expand(mask.shape[0] if mask.shape[1] == 1 else q.shape[0], mask.shape[1], rows, cols)
        inside = band_mask(rows, cols, band, q.device)
        return {"atten_mask": ~(seen if inside is None else seen & inside), "sparse_mode": 1}
    if band == FULL:
        return {}
    if band == CAUSAL and rows == cols:
        return _square(band, q.device)
    lower, upper = band
    shift = cols - rows  # tokens count from the diagonal that ends at the bottom right
    return {
        "atten_mask": _triangle(q.device),
        "sparse_mode": 4,
        "pre_tockens": cols + rows if lower is None else shift - lower,
        "next_tockens": cols + rows if upper is None else upper - shift,
    }


def _square(band: Band, device: torch.device) -> dict[str, object]:
    """Of a causal square (where the diagonals from top left and bottom right are one), or of a full rectangle."""
    return {"atten_mask": _triangle(device), "sparse_mode": 2} if band == CAUSAL else {}


@lru_cache(maxsize=16)
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


KERNEL = NPUKernel()
KERNELS = {KERNEL.name: KERNEL}


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """The fused operator where it takes these tensors, else plain math."""
    fits = (
        q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[1] <= 256
        and v.shape[3] <= q.shape[3] <= 768
        and max(q.shape[2], k.shape[2]) <= 1 << 20
    )
    return KERNEL.name if fits else REFERENCE.name
