"""The engine on real gloo ranks against one-device attention: outputs and gradients, every mode."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.ops import attention
from hyper_cp.ops.exchange.ulysses import shared_heads
from hyper_cp.schedule import build as schedule
from hyper_cp.schedule import lookup
from tests.harness.oracle import plain_attention, relative_error, rms_error, token_positions

FP64, FP32 = 1e-10, 5e-6  # the design's exactness bars


def inputs(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Global q, k, v and the output's gradient, the same on every rank."""
    g = torch.Generator().manual_seed(length + heads)
    shapes = [(batch, heads, length, dim), (batch, kv_heads, length, dim), (batch, kv_heads, length, v_dim)]
    shapes.append((batch, heads, length, v_dim))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


@lru_cache(maxsize=16)
def oracle(causal: bool, *of: Any) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
    """Global inputs, and the output and gradients that attention in fp64 has of them: the same for every mode."""
    q, k, v, dout = inputs(*of)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*wide, is_causal=causal)
    return [q, k, v, dout], expected.detach(), torch.autograd.grad(expected, wide, dout.double())


def run_case(world: int, case: dict[str, Any]) -> dict[str, float]:
    """One forward and backward on this rank; errors of its share against the oracle."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    shape = [case.get("batch", 1), case["heads"], case["kv_heads"], case["length"], 8, case.get("v_dim", 8)]
    (q, k, v, dout), expected, expected_grads = oracle(case["causal"], *shape, case.get("dtype", torch.float64))

    mine = torch.tensor(token_positions(case["layout"], rank, world, case["length"]))
    local = [x[:, :, mine] for x in (q, k, v)]
    if case.get("strided"):
        local = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
    local = [x.requires_grad_() for x in local]
    out = attention(
        *local,
        mesh=mesh,
        is_causal=case["causal"],
        enable_gqa=True,
        ulysses_degree=case["degree"],
        kv_exchange=case["kv"],
        layout=case["layout"],
        load_balance=case["balance"],
    )
    grads = torch.autograd.grad(out, local, dout[:, :, mine])
    error = rms_error if case.get("rms") else relative_error
    result = {"out": error(out, expected[:, :, mine])}
    for name, grad, want in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        result[name] = error(grad, want[:, :, mine])
    return result


def run_cases(world: int, cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    return [(case, run_case(world, case)) for case in cases]


def modes(world: int) -> list[dict[str, Any]]:
    """Every degree x exchange x layout/balance of a world."""
    found = []
    for degree in (d for d in (1, 2, 4, 8) if world % d == 0 or d == 1):
        for kv in ("all_gather", "ring"):
            if kv == "ring" and degree == world > 1:
                continue  # no ring dimension: the same as all_gather
            for layout, balance in (("contiguous", False), ("head_tail", False), ("contiguous", True)):
                found.append({"degree": degree, "kv": kv, "layout": layout, "balance": balance})
    return found


def check(results: list[Any], bar: float) -> None:
    bad = [(c, e) for rank in results for c, e in rank if not max(e.values()) <= bar]
    assert not bad, f"{len(bad)} cases over {bar}; first: {bad[0]}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    cases = [
        {
            **mode,
            "causal": causal,
            "batch": batch,
            "heads": 8,
            "kv_heads": kv,
            "length": 24 * world,
            "strided": s,
        }
        for mode in modes(world)
        for causal, (batch, s) in itertools.product((True, False), ((1, False), (3, True)))
        for kv in (8, 4, 2, 1)
        if 8 % mode["degree"] == 0
    ]
    check(ranks(world, run_cases, world, cases), FP64)


@pytest.mark.parametrize("world", [6, 8])
def test_wide_worlds_fp64(ranks: Any, world: int) -> None:
    cases = [
        {
            **mode,
            "causal": causal,
            "heads": 8,
            "kv_heads": 8 if mode["degree"] == 8 else 4,
            "length": 4 * world,
        }
        for mode in modes(world)
        for causal in (True, False)
    ]
    check(ranks(world, run_cases, world, cases), FP64)


def run_cases_cut_in_two(world: int, cases: list[dict[str, Any]]) -> Any:
    """As if these lengths were long: the local step in two parts, the second one last."""
    with (
        mock.patch.object(schedule, "_MIN_ROWS", 2),
        mock.patch.object(lookup, "_without_documents", lru_cache(lookup._without_documents.__wrapped__)),
    ):
        return run_cases(world, cases)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_local_step_in_two_parts(ranks: Any, world: int) -> None:
    cases = [
        {**mode, "causal": causal, "batch": 2, "heads": 8, "kv_heads": 4, "length": 24 * world}
        for mode in modes(world)
        for causal in (True, False)
    ]
    check(ranks(world, run_cases_cut_in_two, world, cases), FP64)


def test_key_heads_are_sent_as_seldom_as_possible() -> None:
    for heads, degree, sent in ((2, 4, 4), (4, 4, 4), (8, 4, 8), (6, 4, 12), (1, 8, 8), (3, 2, 6)):
        x = torch.arange(float(heads)).view(1, heads, 1, 1)
        shared = shared_heads(x, degree, 1)
        assert shared.shape[1] == sent
        assert shared.flatten().tolist() == sorted(shared.flatten().tolist()), "a head's copies are neighbours"
        assert (shared is x) == (heads % degree == 0)


# --------------------------------------------------------------------------- drawn combinations


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    mode = draw(st.sampled_from(modes(world)))
    kv_heads = draw(st.sampled_from([1, 2, 3, mode["degree"], 2 * mode["degree"]]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return {
        **mode,
        "world": world,
        "causal": draw(st.booleans()),
        "heads": math.lcm(kv_heads, mode["degree"]) * draw(st.sampled_from([1, 2])),
        "kv_heads": kv_heads,
        "length": 2 * world * draw(st.integers(1, 9)),
        # In bf16 two errors are compared: among 64 numbers their ratio was seen to be 3.6 by luck alone,
        # among 1024 of the same shape it is 1.4.
        "batch": 16 if dtype == torch.bfloat16 else draw(st.integers(1, 2)),
        "strided": draw(st.booleans()),
        # Where head dims differ, SDPA in bf16 computes in fp32 throughout, also what flash kernels (and
        # we) round to bf16 between forward and backward: no measure for them.
        "v_dim": 8 if dtype == torch.bfloat16 else draw(st.sampled_from([8, 5])),
        "dtype": dtype,
    }


BARS = {torch.float64: FP64, torch.float32: FP32}


def one_device_errors(case: dict[str, Any]) -> dict[str, float]:
    """Of plain SDPA on one device in the same dtype, against fp64."""
    q, k, v, dout = inputs(
        case["batch"], case["heads"], case["kv_heads"], case["length"], 8, case["v_dim"], case["dtype"]
    )
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = plain_attention(*wide, is_causal=case["causal"])
    want_grads = torch.autograd.grad(want, wide, dout.double())
    narrow = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*narrow, is_causal=case["causal"], enable_gqa=True)
    grads = torch.autograd.grad(out, narrow, dout)
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *want_grads), strict=True)
    return {name: rms_error(a, b) for name, a, b in pairs}


@settings(max_examples=60)
@given(case=drawn())
def test_drawn_combinations_meet_the_bars(ranks: Any, case: dict[str, Any]) -> None:
    """fp64 1e-10 and fp32 5e-6 relative (largest element); bf16 at most twice the error of
    one-device attention (root mean square: the largest of a few roundings is a matter of luck)."""
    world = case["world"]
    if case["dtype"] in BARS:
        check(ranks(world, run_cases, world, [case]), BARS[case["dtype"]])
        return
    found = ranks(world, run_case, world, {**case, "rms": True})
    allowed = one_device_errors(case)
    for name, limit in allowed.items():
        # All ranks hold equally many elements.
        assert (sum(rank[name] ** 2 for rank in found) / world) ** 0.5 <= 2 * limit, (name, found, allowed)
