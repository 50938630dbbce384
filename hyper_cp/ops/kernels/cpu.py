"""CPU: PyTorch's own flash attention, which returns the log-sum-exp and takes it back in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .tiles import TileKernel

# What F.scaled_dot_product_attention itself runs on CPU. There is no public spelling that returns
# the log-sum-exp; the operator is the same in torch 2.11 and 2.13.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Flash:
    name, grouped, biased = "cpu flash", True, True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return dq, dk, dv


KERNEL = TileKernel(_Flash(), _Flash())


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """The name of the kernel for these tensors."""
    return KERNEL.name if q.shape[3] == k.shape[3] == v.shape[3] else "reference"


KERNELS = {KERNEL.name: KERNEL}
PLAIN_WITH_DROPOUT = True  # as in F.scaled_dot_product_attention, whose flash attention has no dropout here
