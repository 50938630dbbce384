"""Ulysses in head groups: exact, the same bytes, compiled, recomputed, and refused where it cannot be."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel
from hyper_cp.ops import SAVE_LIST, attention, axis
from hyper_cp.ops import mesh as meshes
from tests.modules import BNSD
from tests.oracle import plain_attention, relative_error, token_positions, visible_pairs

HEADS = 8


def inputs(kv_heads: int, length: int, batch: int = 2) -> list[Tensor]:
    """Global q, k, v and the output's gradient, the same on every rank; v has its own head dim."""
    g = torch.Generator().manual_seed(kv_heads)
    shapes = [(HEADS, 8), (kv_heads, 8), (kv_heads, 6), (HEADS, 6)]
    return [torch.randn(batch, h, length, d, generator=g, dtype=torch.float64) for h, d in shapes]


def errors(world: int, case: dict[str, Any]) -> dict[str, float]:
    """Of this rank's output and gradients against the oracle."""
    case = dict(case)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    length, layout = 24 * world, case.get("layout", "contiguous")
    q, k, v, dout = inputs(case.pop("kv_heads"), length)
    causal, window, documents = case.get("is_causal", False), case.get("window"), case.get("documents")
    visible, mask = visible_pairs(length, causal, window, documents), case.pop("mask", None)
    if mask is not None:
        heads = HEADS if mask == "per head" else 1
        keep = torch.rand(2, heads, length, length, generator=torch.Generator().manual_seed(3)) > 0.3
        case["attn_mask"], visible = keep, visible & keep
    wide = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*wide, visible=visible)
    wanted = torch.autograd.grad(expected, wide, dout)
    mine = torch.tensor(token_positions(layout, torch.distributed.get_rank(), world, length))
    local = [x[:, :, mine].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = attention(*local, mesh=mesh, enable_gqa=True, **case)
    grads = torch.autograd.grad(out, local, dout[:, :, mine])
    found = {"out": relative_error(out, expected[:, :, mine])}
    for name, grad, want in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        found[name] = relative_error(grad, want[:, :, mine])
    return found


def run_cases(world: int, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [errors(world, case) for case in cases]


def cases_of(world: int) -> list[dict[str, Any]]:
    length = 24 * world
    packed = [[0, 5, 17, length], [0, length // 2 + 3, length - 1, length]]
    whole = {"ulysses_degree": None}
    keyed = [
        {**whole, "kv_heads": kv, "head_groups": n, "is_causal": True, "layout": layout}
        for kv, n, layout in itertools.product((8, 4, 2, 1), (2, 4), ("contiguous", "head_tail"))
        if HEADS // world % n == 0
    ]
    asked = [
        {"documents": packed, "is_causal": True},
        {"window": (9, 4)},
        {"mask": "per head"},
        {"mask": "one"},
        {"scale": 0.3, "is_causal": True, "window": (7, 0), "documents": packed, "layout": "head_tail"},
    ]
    cases = keyed + [{**whole, "kv_heads": 4, "head_groups": HEADS // world, **a} for a in asked if "scale" not in a]
    cases += [{**whole, "kv_heads": 2, "head_groups": 2, **a} for a in asked if "scale" not in a]
    if world == 4:
        for kv, exchange in itertools.product((8, 4), ("ring", "all_gather")):
            hybrid = {"kv_heads": kv, "ulysses_degree": 2, "head_groups": kv // 2, "kv_exchange": exchange}
            cases += [{**hybrid, "is_causal": True}, {**hybrid, "is_causal": True, "load_balance": True}]
            cases += [{**hybrid, **a} for a in asked[:3]]
    return cases


@pytest.mark.parametrize("world", [2, 4])
def test_exact_in_fp64(ranks: Any, world: int) -> None:
    cases = cases_of(world)
    for found in ranks(world, run_cases, world, cases):
        for case, worst in zip(cases, found, strict=True):
            assert max(worst.values()) <= 1e-10, (case, worst)
