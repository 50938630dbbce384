"""CPU: PyTorch's own flash attention, which returns the log-sum-exp and takes it back in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..schedule import CAUSAL, FULL, Band
from .reference import KERNEL as REFERENCE

# What F.scaled_dot_product_attention itself runs on CPU. There is no public spelling that returns
# the log-sum-exp; the operator is the same in torch 2.11 and 2.13.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        if not _native(q, k, band):
            return REFERENCE.forward(q, k, v, band, scale)
        out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _native(q, k, band):
            return REFERENCE.backward(dout, q, k, v, out, lse, band, scale)
        return _backward(dout, q, k, v, out, lse, 0.0, band == CAUSAL, scale=scale)


def _native(q: Tensor, k: Tensor, band: Band) -> bool:
    # Its is_causal is top-left aligned: the meaning of a causal tile only when that is square.
    return band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2])


KERNEL = CPUKernel()
