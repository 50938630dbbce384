"""CPU: PyTorch's own flash attention, which returns the log-sum-exp and takes it back in backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..merge import accumulation_dtype
from ..schedule import CAUSAL, FULL, Band
from .reference import additive_mask

# What F.scaled_dot_product_attention itself runs on CPU. There is no public spelling that returns
# the log-sum-exp; the operator is the same in torch 2.11 and 2.13.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Rows of a banded tile that are computed at once: with fewer the kernel is slower, with more it
# computes more that no row sees.
_BAND_ROWS = 256


class CPUKernel:
    name = "cpu flash"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why this kernel cannot take these tensors, or None."""
        if q.device.type != "cpu":
            return f"device is {q.device.type}, not cpu"
        if q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"dtype {q.dtype} is not a floating type it supports"
        if not q.shape[3] == k.shape[3] == v.shape[3]:
            return f"head dims of q, k, v differ: {q.shape[3]}, {k.shape[3]}, {v.shape[3]}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if _native(q, k, band, mask):
            out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
            return out, lse
        outs, lses = [], []
        for rows, cols, bias in _pieces(q, k, band, mask):
            out, lse = _forward(q[:, :, rows], k[:, :, cols], v[:, :, cols], 0.0, False, attn_mask=bias, scale=scale)
            # Of a row that sees nothing the operator says lse = 0.
            dead = (bias == -torch.inf).all(-1)
            outs.append(out)
            lses.append(lse.masked_fill(dead, -torch.inf))
        return torch.cat(outs, 2), torch.cat(lses, 2)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _native(q, k, band, mask):
            return _backward(dout, q, k, v, out, lse, 0.0, band == CAUSAL, scale=scale)
        wide = accumulation_dtype(k.dtype)
        dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(x - lse) = 0 where nothing is seen
        for rows, cols, bias in _pieces(q, k, band, mask):
            dq, dk_piece, dv_piece = _backward(
                dout[:, :, rows],
                q[:, :, rows],
                k[:, :, cols],
                v[:, :, cols],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                False,
                attn_mask=bias,
                scale=scale,
            )
            dqs.append(dq)
            dk[:, :, cols] += dk_piece
            dv[:, :, cols] += dv_piece
        return torch.cat(dqs, 2), dk, dv


def _native(q: Tensor, k: Tensor, band: Band, mask: Tensor | None) -> bool:
    # Its is_causal is top-left aligned: the meaning of a causal tile only when that is square.
    return mask is None and (band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2]))


def _pieces(q: Tensor, k: Tensor, band: Band, mask: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of a tile, the columns that any of them sees, and the additive mask between them."""
    (lower, upper), (rows, cols) = band, (q.shape[2], k.shape[2])
    size = rows if band == FULL else _BAND_ROWS
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        first = 0 if lower is None else min(max(0, start + lower), cols - 1)
        last = cols if upper is None else max(first + 1, min(cols, stop + upper))
        part = (
            None if lower is None else lower + start - first,
            None if upper is None else upper + start - first,
        )
        piece = mask
        if piece is not None and piece.shape[2] > 1:
            piece = piece[:, :, start:stop]
        if piece is not None and piece.shape[3] > 1:
            piece = piece[..., first:last]
        bias = additive_mask(stop - start, last - first, part, piece, q)
        yield slice(start, stop), slice(first, last), bias


KERNEL = CPUKernel()
