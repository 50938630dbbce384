"""Ascend NPU: ``torch_npu.npu_fusion_attention`` and its gradient.

Not executed on hardware: the tests drive it against a stand-in for the operators' public contract.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..geometry import CAUSAL, FULL, Band
from .reference import KERNEL as REFERENCE
from .reference import band_mask

_COMPRESSED = 2048  # side of the triangle that stands for every causal or banded mask
_LANES = 8  # identical copies in which the operator keeps its softmax statistics
_LOWEST = torch.finfo(torch.float32).min


class NPUKernel:
    name = "npu fusion attention"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.dtype != torch.bool:
            return REFERENCE.forward(q, k, v, band, scale, mask)  # its pse is added before the scale
        layout, (x, y, z) = _layout(q, k, v)
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            x, y, z, q.shape[1], layout, scale=scale, **_visible(q, k, band, mask)
        )
        out = out if layout == "BNSD" else out.transpose(1, 2)
        # Of a row that sees nothing it says (out, max, sum) = (0, lowest, highest number).
        lse = torch.where(largest[..., 0] == _LOWEST, -torch.inf, largest[..., 0] + total[..., 0].log())
        return out, lse

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
        if mask is not None and mask.dtype != torch.bool:
            return REFERENCE.backward(dout, q, k, v, out, lse, band, scale, mask)
        layout, (x, y, z, dy, o) = _layout(q, k, v, dout, out.to(q.dtype))
        # Any (max, sum) of the merged log-sum-exp does; a row that sees nothing gets weights of zero.
        largest = lse.float().masked_fill(lse == -torch.inf, -_LOWEST)
        largest = largest.unsqueeze(-1).expand(*lse.shape, _LANES).contiguous()
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            x,
            y,
            z,
            dy,
            q.shape[1],
            layout,
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=o,
            scale_value=scale,
            **_visible(q, k, band, mask),
        )
        return (dq, dk, dv) if layout == "BNSD" else (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


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
    triangle = _triangle(q.device)
    if band == CAUSAL and rows == cols:
        return {"atten_mask": triangle, "sparse_mode": 2}
    lower, upper = band
    shift = cols - rows  # tokens count from the diagonal that ends at the bottom right
    return {
        "atten_mask": triangle,
        "sparse_mode": 4,
        "pre_tockens": cols + rows if lower is None else shift - lower,
        "next_tockens": cols + rows if upper is None else upper - shift,
    }


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
