"""Whole tensors, shards and styles for tests of ``ContextParallel`` on user modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel
from hyper_cp.cli.modes import named_mode
from hyper_cp.mesh import comm
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, token_positions

SEQ, HEADS, KV, DIM = 16, 4, 4, 8


def whole(kv_heads: int = KV) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(1, h, SEQ, DIM, generator=g, dtype=torch.float64) for h in (HEADS, kv_heads, kv_heads)]


def local(layout: str = "contiguous", kv_heads: int = KV) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k, v ``[B, H, S, D]`` and its expected output."""
    mine = torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), SEQ))
    q, k, v = whole(kv_heads)
    return [x[:, :, mine] for x in (q, k, v)], plain_attention(q, k, v, is_causal=True)[:, :, mine]


def apply(module: nn.Module, mesh_shape: tuple[int, ...] | None = None, **kwargs: Any) -> nn.Module:
    """Style a module on a 1-D mesh of all ranks, or on a ring x ulysses mesh."""
    mesh = cp_mesh()
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ring", "ulysses"))
    return parallelize_module(module, mesh, ContextParallel(**kwargs))


MODES = [named_mode(name) for name in ("Ulysses", "all-gather", "hybrid of 2, ring, head_tail", "auto")]


BNSD = {"seq_dim": 2, "head_dim": 1}


class Flash(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.kwargs)


RING1 = {**BNSD, "ulysses_degree": 1}


def clean() -> bool:
    """No mode is left on the stack, and a plain call of another module is plain."""
    (q, k, v), _ = local()
    with comm.record_traffic() as log:
        F.scaled_dot_product_attention(q, k, v)
    return not torch.overrides._get_current_function_mode_stack() and not log.entries


def fails(module: nn.Module, *args: Any) -> str:
    try:
        module(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"
