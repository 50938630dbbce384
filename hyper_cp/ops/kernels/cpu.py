"""CPU: PyTorch's own flash attention, which returns the log-sum-exp and takes it back in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import TileInputs
from .operators import OperatorKernel

# The operator that F.scaled_dot_product_attention itself runs on CPU. No public function returns
# the log-sum-exp; the operator is the same in torch 2.11 and 2.13.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Flash:
    name, grouped, least = "cpu flash", True, 1

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        out, lse = _forward(tile.q, tile.k, tile.v, 0.0, tile.causal, attn_mask=tile.mask, scale=tile.scale)
        return out, lse

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = {"attn_mask": tile.mask, "scale": tile.scale}
        dq, dk, dv = _backward(dout, tile.q, tile.k, tile.v, out, lse, 0.0, tile.causal, **options)
        return dq, dk, dv


KERNEL = OperatorKernel("cpu flash", _Flash(), _Flash())


def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True if head dims are equal: the operator takes no others."""
    return q.shape[3] == k.shape[3] == v.shape[3]
