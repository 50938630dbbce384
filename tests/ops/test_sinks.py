"""Attention sinks: a learned logit per head that takes weight and gives no value, in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import attention
from tests.harness.attention_case import FP64, cp_mesh, drawn, modes
from tests.harness.oracle import relative_error, rms_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks, sum_over_ranks

B, H, KV, D, DV = 2, 8, 4, 8, 4
SEEN: list[dict[str, Any]] = [
    {"is_causal": True},
    {},
    {"is_causal": True, "window": (5, 0)},
    {"is_causal": True, "documents": [0, 3, 3, 17, 24]},
    {"is_causal": True, "documents": [[0, 9, 24], [0, 20, 24]], "return_lse": True},
]


def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax with one more column, which has no value; and its log-sum-exp."""
    k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
    logits = (q @ k.mT * D**-0.5).masked_fill(~visible, -torch.inf)
    column = sinks.view(1, H, 1, 1).expand(*logits.shape[:3], 1)
    logits = torch.cat([logits, column], -1)
    return logits.softmax(-1)[..., :-1] @ v, logits.logsumexp(-1)


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    shapes = [(B, H, length, D), (B, KV, length, D), (B, KV, length, DV), (H,), (B, H, length, DV)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


@on_ranks
def errors(world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]], dtype: torch.dtype) -> list[list[float]]:
    """Relative errors of output, log-sum-exp and the gradients of q, k, v and the sinks."""
    mesh, length, found = cp_mesh(), 24, []
    error = relative_error if dtype == torch.float64 else rms_error
    for mode, seen in cases:
        *qkvs, dout = tensors(length, dtype)
        leaves = [x.double().requires_grad_() for x in qkvs]
        rows = seen.get("documents")
        listed = None if rows is None else rows if isinstance(rows[0], list) else [rows]
        visible = visible_pairs(length, seen.get("is_causal", False), seen.get("window"), listed)
        want, want_lse = whole(*leaves, visible)
        expected = torch.autograd.grad(want, leaves, dout.double())
        at = torch.tensor(token_positions(mode["layout"], mesh.get_rank(), world, length))
        local = [x[:, :, at].clone().requires_grad_() for x in qkvs[:3]]
        sinks = qkvs[3].clone().requires_grad_()
        result = attention(*local, mesh=mesh, enable_gqa=True, sinks=sinks, **mode, **seen)
        out, lse = result if seen.get("return_lse") else (result, want_lse[:, :, at])
        got = torch.autograd.grad(out, [*local, sinks], dout[:, :, at])
        mine = [x[:, :, at] for x in expected[:3]]
        pairs = [(out, want[:, :, at]), (lse, want_lse[:, :, at]), *zip(got[:3], mine, strict=True)]
        pairs.append((sum_over_ranks(got[3].double())[0], expected[3]))
        found.append([float(error(a, b)) for a, b in pairs])
    return found


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    groups = [{"ulysses_degree": world, "kv_exchange": "all_gather", "layout": "head_tail", "head_groups": 2}]
    cases = [
        (mode, seen)
        for mode, seen in itertools.product([*modes(world), *(groups if world in (2, 4) else [])], SEEN)
        if 24 % (2 * world) == 0 and 8 % mode["ulysses_degree"] == 0
    ]
    cases = drawn(cases, world)
    for of_rank in ranks(world, errors, world, cases, torch.float64):
        for case, found in zip(cases, of_rank, strict=True):
            assert max(found) <= FP64, case


def test_half_precision_is_as_good_as_on_one_device(ranks: Any) -> None:
    cases = [(mode, SEEN[0]) for mode in modes(2)]
    one = ranks(1, errors, 1, [(modes(1)[0], SEEN[0])], torch.bfloat16)[0][0]
    for of_rank in ranks(2, errors, 2, cases, torch.bfloat16):
        for found in of_rank:
            assert all(a <= 2 * b for a, b in zip(found, one, strict=True)), (found, one)


@on_ranks
def rows_without_keys(minus_infinity: bool) -> tuple[float, float]:
    """A mask that hides all keys of some rows leaves them the sink: output zero, log-sum-exp the sink."""
    q, k, v, sinks, _ = (x.requires_grad_() for x in tensors(16, torch.float64))
    sinks = torch.full((H,), -torch.inf, dtype=torch.float64, requires_grad=True) if minus_infinity else sinks
    mesh, at = cp_mesh(), slice(8 * cp_mesh().get_rank(), 8 * cp_mesh().get_rank() + 8)
    mask = torch.zeros(16, 16, dtype=torch.bool)
    local = [x[:, :, at] for x in (q, k, v)]
    out, lse = attention(*local, mesh=mesh, enable_gqa=True, sinks=sinks, attn_mask=mask, return_lse=True)
    out.sum().backward()
    gradients = sum(float(x.grad.abs().max()) for x in (q, k, v, sinks) if x.grad is not None)
    expected = sinks.view(1, H, 1).expand_as(lse)
    return float(out.detach().abs().max()) + gradients, 0.0 if lse.equal(expected) else relative_error(lse, expected)


def test_a_row_that_sees_nothing_but_the_sink(ranks: Any) -> None:
    for minus_infinity in (False, True):
        assert all(zero == 0 and error < 1e-12 for zero, error in ranks(2, rows_without_keys, minus_infinity))


@on_ranks
def wrong(sinks: Any) -> None:
    q, k, v, *_ = tensors(16, torch.float64)
    attention(q, k, v, mesh=cp_mesh(), enable_gqa=True, sinks=sinks)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(8, dtype=torch.int64), torch.zeros(1, 8), 0.5], ids=str)
def test_sinks_of_another_form_are_refused(ranks: Any, sinks: Any) -> None:
    ranks.raises(2, ValueError, r"sinks=.*one floating-point logit per query head, \[8\]", wrong, sinks)
