"""FlexAttention's functions of global positions as users write them, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

B, H, KV, S, D = 2, 4, 2, 40, 8  # 40: no multiple of 16; 10 or 20 to a rank
DOCUMENT = torch.tensor([0] * 7 + [1] * 11 + [2] + [3] * 18 + [4] * 3)
LENGTH = torch.tensor([40, 29])
SLOPE = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 9)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Packed documents; in row 1 the padding sees nothing and is not seen."""
    return (DOCUMENT[i] == DOCUMENT[j]) & (j <= i) & (i < LENGTH[b])


def strided_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % (h + 1) == 0)


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - SLOPE[h] * (i - j).abs() * (b + 1)


def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


# name: (mask_mod, (B, H) of its blocks, BLOCK_SIZE, score_mod)
Case = tuple[Any, tuple[int | None, int | None], Any, Any]
CASES: dict[str, Case] = {
    "causal": (causal, (None, None), 16, None),
    "window, alibi": (window, (None, None), 128, alibi),
    "documents": (documents, (B, None), (16, 8), softcap),
    "heads": (strided_heads, (None, H), 16, None),
    "alibi": (None, (None, None), 16, alibi),
}


def blocks_of(case: Case) -> BlockMask | None:
    mask_mod, (b, h), size, _ = case
    return mask_mod and create_block_mask(mask_mod, b, h, S, S, device="cpu", BLOCK_SIZE=size)


@contextmanager
def untraced() -> Iterator[None]:
    """Run FlexAttention's math as it stands, without the half second in which torch traces it."""
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


@contextmanager
def backward_on_the_cpu() -> Iterator[None]:
    """Allow gradients, which torch refuses on CPUs for want of a fused kernel; its math is complete."""
    refuse = torch_flex._validate_device
    torch_flex._validate_device = lambda *_: None
    try:
        yield
    finally:
        torch_flex._validate_device = refuse
