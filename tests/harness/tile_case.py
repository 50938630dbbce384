"""One tile: random tensors of a kernel's shapes, which pairs are visible, and what plain math makes of them in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.harness.oracle import attention_and_lse

Tile = tuple[int, int, tuple[int | None, int | None], str]
"""``(rows, columns, band, kind of mask)``."""


def problem(tile: Tile, dtype: torch.dtype, v_dim: int, dim: int = 8) -> tuple[list[Tensor], Tensor, Tensor, Any]:
    """Make q, k, v, dout, the visible pairs, the bias and the mask as it is passed."""
    rows, cols, (lower, upper), kind = tile
    g = torch.Generator().manual_seed(rows)
    shapes = [(2, 4, rows, dim), (2, 2, cols, dim), (2, 2, cols, v_dim), (2, 4, rows, v_dim)]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    distance = torch.arange(cols)[None] - torch.arange(rows)[:, None]
    visible = torch.ones(1, 1, rows, cols, dtype=torch.bool)
    if lower is not None:
        visible = visible & (distance >= lower)
    if upper is not None:
        visible = visible & (distance <= upper)
    bias = torch.zeros(1, 1, rows, cols, dtype=torch.float64)
    passed = None
    if kind == "bool":
        passed = torch.rand(2, 1, rows, cols, generator=g) < 0.7
        passed[:, :, rows // 2] = False  # a row that sees nothing
        visible = visible & passed
    if kind == "float":
        bias = torch.randn(1, 4, rows, cols, generator=g, dtype=torch.float64)
        passed = bias.to(dtype)
    return tensors, visible, bias, passed


@dataclass(frozen=True)
class TileAnswer:
    """A tile's tensors, and the output, log-sum-exp and gradients of q, k, v that plain math gives."""

    tensors: list[Tensor]
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


@lru_cache(maxsize=4)
def plain_math(tile: Tile, dtype: torch.dtype, v_dim: int, scale: float) -> TileAnswer:
    """The oracle's answer in fp64, computed once for all kernels."""
    tensors, visible, bias, mask = problem(tile, dtype, v_dim)
    q, k, v = (x.double().detach().requires_grad_() for x in tensors[:3])
    out, lse = attention_and_lse(q, k, v, visible=visible, bias=bias, scale=scale)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].double())
    return TileAnswer(tensors, mask, out.detach(), lse.detach(), grads)
