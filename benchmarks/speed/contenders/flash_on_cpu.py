"""FlashAttention's entry points, computed by PyTorch's flash attention for the CPU, for libraries that import them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads_first(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in xs]


def _repeated(kv: Tensor, heads: int) -> Tensor:
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], 1)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, **_: Any
) -> tuple[Tensor, Tensor, None, None]:
    """``_flash_attn_forward`` of FlashAttention 2: tensors ``[B, S, H, D]``."""
    q, k, v = _heads_first(q, k, v)
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *_: Any,
    **others: Any,
) -> None:
    """``_flash_attn_backward``: gradients are written to the tensors ``dq``, ``dk`` and ``dv``."""
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = (_repeated(x, heads) for x in (k, v))
    lse = lse.contiguous()  # the operator reads it so, unchecked
    found = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=softmax_scale)
    for into, grad in zip((dq, dk, dv), found, strict=True):
        grad = grad if grad.shape[1] == into.shape[2] else grad.unflatten(1, (kv_heads, -1)).sum(2)
        into.copy_(grad.transpose(1, 2))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> Tensor:
    """``flash_attn_func``."""
    q, k, v = _heads_first(q, k, v)
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def varlen(*_: Any, **__: Any) -> Any:
    """The entry points for packed documents, of which the CPU has no kernel."""
    raise NotImplementedError("FlashAttention for packed documents has no kernel on the CPU. Use one document")


@contextmanager
def installed() -> Iterator[None]:
    """Let ``import flash_attn`` find these functions inside the block, unless the package is installed."""
    if "flash_attn" in sys.modules:
        yield
        return
    package: Any = ModuleType("flash_attn")
    interface: Any = ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.flash_attn_func, package.flash_attn_interface = "2.8.0", flash_attention, interface
    interface._flash_attn_forward, interface._flash_attn_backward = flash_forward, flash_backward
    interface.flash_attn_func = flash_attention
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = varlen
    names = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
