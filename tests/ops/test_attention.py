"""The engine on real gloo ranks against one-device attention: outputs and gradients, every mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import attention
from hyper_cp.ops.exchange.ulysses import Ulysses, shared_heads
from tests.harness.attention_case import (
    FP32,
    FP64,
    AttentionCase,
    Errors,
    check,
    cp_mesh,
    modes,
    one_device,
    pairwise,
    run_case,
    run_cases,
)
from tests.harness.oracle import relative_error, rms_error
from tests.harness.ranks import on_ranks


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    cases = [
        AttentionCase(24 * world, causal, batch=batch, heads=8, kv_heads=kv_heads, strided=strided, **mode)
        for mode in modes(world)
        for causal, (batch, strided) in itertools.product((True, False), ((1, False), (3, True)))
        for kv_heads in ((8, 4, 2, 1) if world < 3 else (8, 2))
    ]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@pytest.mark.slow
@pytest.mark.parametrize("world", [6, 8])
def test_wide_worlds_fp64(ranks: Any, world: int) -> None:
    cases = [
        AttentionCase(4 * world, i % 2 == 0, batch=1, heads=8, kv_heads=8 if mode["ulysses_degree"] == 8 else 4, **mode)
        for i, mode in enumerate(modes(world))
    ]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@on_ranks
def long_errors(modes: list[dict[str, Any]], world: int) -> list[tuple[AttentionCase, Errors]]:
    """Errors against plain SDPA in fp64: the oracle's logits would be too large."""
    cases = [AttentionCase(2048 * world, True, batch=1, heads=1, kv_heads=1, **mode) for mode in modes]
    *whole, dout = cases[0].tensors()
    leaves, found = [x.clone().requires_grad_() for x in whole], []
    want = F.scaled_dot_product_attention(*leaves, is_causal=True)
    wanted = [want, *torch.autograd.grad(want, leaves, dout)]
    for case in cases:
        shard = case.shard_of([*whole, dout])
        out = shard.attend(cp_mesh())
        got = [out, *torch.autograd.grad(out, shard.qkv, shard.dout)]
        errors = [relative_error(a, b[:, :, shard.at]) for a, b in zip(got, wanted, strict=True)]
        found.append((case, dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))))
    return found


def test_long_shares(ranks: Any) -> None:
    """Shares with enough rows that the local step is cut in two parts, the second of which comes last."""
    chosen = [
        {"kv_exchange": "all_gather"},
        {"kv_exchange": "ring", "layout": "head_tail"},
        {"kv_exchange": "needed", "load_balance": True},
    ]
    check(ranks(2, long_errors, chosen, 2), FP64)


def test_key_heads_are_sent_as_seldom_as_possible() -> None:
    for heads, degree, sent in ((2, 4, 4), (4, 4, 4), (8, 4, 8), (6, 4, 12), (1, 8, 8), (3, 2, 6)):
        x = torch.arange(float(heads)).view(1, heads, 1, 1)
        shared = shared_heads(x, degree, 1)
        assert shared.shape[1] == sent
        assert shared.flatten().tolist() == sorted(shared.flatten().tolist()), "a head's copies are neighbours"
        assert (shared is x) == (heads % degree == 0)


# --------------------------------------------------------------------------- drawn combinations


@st.composite
def drawn_case(draw: st.DrawFn, world: int) -> AttentionCase:
    mode = draw(st.sampled_from(modes(world)))
    degree = mode["ulysses_degree"]
    kv_heads = draw(st.sampled_from([1, 2, 3, degree, 2 * degree]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return AttentionCase(
        length=2 * world * draw(st.integers(1, 9)),
        is_causal=draw(st.booleans()),
        heads=math.lcm(kv_heads, degree) * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        # In bf16 two errors are compared: among 64 numbers their ratio was seen to be 3.6 by luck alone,
        # among 1024 of the same shape it is 1.4.
        batch=16 if dtype == torch.bfloat16 else draw(st.integers(1, 2)),
        # Where head dims differ, SDPA in bf16 computes in fp32 throughout, also what flash kernels (and
        # we) round to bf16 between forward and backward: no measure for them.
        v_dim=8 if dtype == torch.bfloat16 else draw(st.sampled_from([8, 5])),
        dtype=dtype,
        strided=draw(st.booleans()),
        **mode,
    )


@st.composite
def drawn_job(draw: st.DrawFn) -> tuple[int, list[AttentionCase]]:
    """Several cases of one world: what takes time is to bring ranks together."""
    world = draw(st.sampled_from([1, 2, 3, 4, 6]))
    return world, draw(st.lists(drawn_case(world), min_size=1, max_size=10))


BARS = {torch.float64: FP64, torch.float32: FP32}


def one_device_errors(case: AttentionCase) -> Errors:
    """Errors of plain SDPA on one device in the same dtype, against fp64."""
    *qkv, dout = case.tensors()
    narrow = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*narrow, is_causal=case.is_causal, enable_gqa=True)
    want, grads = one_device(case.problem), torch.autograd.grad(out, narrow, dout)
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (want.out, *want.grads), strict=True)
    return {name: rms_error(a, b) for name, a, b in pairs}


@on_ranks
def run_drawn(cases: list[AttentionCase]) -> list[Errors]:
    mesh = cp_mesh()
    return [run_case(case, mesh, None if case.dtype in BARS else rms_error) for case in cases]


@pytest.mark.slow
@settings(max_examples=8)
@given(job=drawn_job())
def test_drawn_combinations_meet_the_bars(ranks: Any, job: tuple[int, list[AttentionCase]]) -> None:
    """fp64 1e-10 and fp32 5e-6 relative (largest element); bf16 at most twice the error of
    one-device attention (root mean square: the largest of a few roundings is a matter of luck)."""
    world, cases = job
    by_rank = ranks(world, run_drawn, cases)
    for case, *found in zip(cases, *by_rank, strict=True):
        if case.dtype in BARS:
            check([[(case, errors)] for errors in found], BARS[case.dtype])
            continue
        allowed = one_device_errors(case)
        for name, limit in allowed.items():
            # All ranks hold equally many elements.
            assert (sum(rank[name] ** 2 for rank in found) / world) ** 0.5 <= 2 * limit, (case, name, found, allowed)


@on_ranks
def autocast_errors(case: AttentionCase) -> list[tuple[float, float]]:
    """Errors of output and gradients: of tensors in bf16, and under autocast to it, forward and backward."""
    found = []
    for inside in (False, True):
        shard = case.shard()
        mask = None if shard.mask is None else shard.mask.to(torch.bfloat16)
        given = [x if inside else x.to(torch.bfloat16) for x in shard.qkv]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = attention(*given, mesh=cp_mesh(), attn_mask=mask, **case.attention_keywords())
            grads = torch.autograd.grad(out, shard.qkv, shard.dout.to(torch.bfloat16))
        found.append(list(shard.errors(out, grads, error=rms_error).values()))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("v_dim, mask", [(8, None), (16, "float")])
def test_autocast_ends_at_the_entrance(ranks: Any, v_dim: int, mask: str | None) -> None:
    """Sums that the engine makes in fp32 are not cast to bf16 again."""
    mode = {"kv_exchange": "ring", "layout": "head_tail"}
    case = AttentionCase(64, mask is None, dim=16, v_dim=v_dim, mask=mask, dtype=torch.float32, **mode)
    for of_rank in ranks(2, autocast_errors, case):
        assert all(inside <= 1.05 * by_hand for by_hand, inside in of_rank), of_rank


# --------------------------------------------------------------------------- the exchange of heads, in memory


@on_ranks
def orders_of_memory() -> list[tuple[bool, float]]:
    """For heads that are contiguous, a part of contiguous heads, and split off and transposed: True if the result is
    contiguous, or has the order of the message; and the error of a round trip."""
    exchange, found = Ulysses(view(cp_mesh()), "head_tail"), []
    transposed = torch.randn(2, 4, 8, 16).transpose(1, 2)
    for q in (torch.randn(2, 8, 4, 16), torch.randn(2, 9, 4, 16)[:, :8], transposed):
        (wide,) = exchange.to_heads(q)
        kept = wide.movedim(2, 0) if q is transposed else wide
        found.append((kept.is_contiguous(), (exchange.to_sequence(wide) - q).abs().max().item()))
    return found


def test_transposed_heads_are_not_copied_after_their_exchange(ranks: Any) -> None:
    """Those whose tokens lie side by side are: the module that receives them may rely on it."""
    for found in ranks(2, orders_of_memory):
        assert found == [(True, 0.0)] * 3
