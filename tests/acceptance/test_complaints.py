"""Complaints about other context-parallel libraries, as tests of this one: each test names the complaint it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.modes import named_mode
from tests.harness import modules
from tests.harness.attention_case import (
    FP64,
    AttentionCase,
    Errors,
    check,
    cp_mesh,
    inputs,
    run_module,
)
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.harness.styled import BNSD

MODES = [
    named_mode(name)
    for name in (
        "Ulysses",
        "all-gather, head_tail",
        "all-gather, load_balance",
        "ring, head_tail",
        "hybrid of 2, ring",
    )
]


def styled(mode: dict[str, Any], causal: bool = True) -> tuple[nn.Module, ContextParallelHandler]:
    mesh, style = cp_mesh(), ContextParallel(**BNSD, **mode)
    return parallelize_module(modules.BNSD(causal), mesh, {"": style}), ContextParallelHandler(mesh, style)


@on_ranks
def errors_of_modules(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    return [(case, run_module(modules.BNSD(case.is_causal), case)) for case in cases]


# ---- 1. Lengths that are not a multiple of 2 * cp: a crash, or silently wrong (TransformerEngine #1929 #1930 #3331).


@on_ranks
def any_length(mode: dict[str, Any], lengths: list[tuple[int, bool]]) -> float:
    return max(error_of_length(mode, length, causal) for length, causal in lengths)


def error_of_length(mode: dict[str, Any], length: int, causal: bool) -> float:
    module, handler = styled(mode, causal)
    whole = [x.requires_grad_() for x in inputs(2, 4, 4, length, 8, 8, torch.float64)[:3]]
    with handler.documents([0, length]):
        local = [handler.dispatch(x, 2, pad_value=9.0) for x in whole]  # visible padding would show
        out = handler.combine(module(*local), 2, length=length)
    want = plain_attention(*whole, is_causal=causal)
    got = sum_over_ranks(*torch.autograd.grad(out.sin().sum(), whole))  # each rank has a share of every position's
    pairs = [(out, want), *zip(got, torch.autograd.grad(want.sin().sum(), whole), strict=True)]
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_lengths_that_do_not_split(ranks: Any, mode: dict[str, Any]) -> None:
    assert max(ranks(4, any_length, mode, [(13, True), (3, True), (27, False)])) <= FP64


@on_ranks
def call(mode: dict[str, Any], lengths: list[int], documents: list[Any]) -> None:
    """A call with another length, or other documents, on each rank."""
    module, handler = styled(mode)
    with handler.documents(documents[dist.get_rank()]):
        module(*(torch.randn(1, 4, lengths[dist.get_rank()], 8) for _ in range(3)))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_unequal_local_lengths_are_refused_on_every_rank(ranks: Any, mode: dict[str, Any]) -> None:
    words = r"ranks of the cp mesh of 4 ranks .* different shapes: rank 0: \(1, 4, 8, 8\).*rank 2: \(1, 4, 12, 8\)"
    ranks.raises(4, ValueError, words, call, mode, [8, 8, 12, 8], [None] * 4)


def test_no_check_of_one_rank_comes_before_that_of_shapes(ranks: Any) -> None:
    """The documents fit rank 0 only, and 7 is odd."""
    ranks.raises(2, ValueError, "call attention with different shapes", call, MODES[3], [8, 7], [[0, 5, 16]] * 2)


# ---- 3. Ulysses wants K/V heads divisible by the degree (prime-rl #3042, LlamaFactory #10794, DeepSpeed #6392).
# ---- 6. Head dims of multi-head latent attention (TransformerEngine #1552 #2868).


@pytest.mark.slow
def test_any_number_of_kv_heads_and_latent_head_dims(ranks: Any) -> None:
    """At the boundary the module must repeat heads itself: see the functional form below."""
    forms = [(12, 16), (4, 16), (1, 24), (2, 24), (3, 24), (6, 24)]
    cases = [
        AttentionCase(16, True, heads=12, kv_heads=kv_heads, dim=24, v_dim=v_dim, **mode)
        for mode in MODES
        for kv_heads, v_dim in (forms if mode["ulysses_degree"] == 1 else forms[:2])
    ]
    check(ranks(4, errors_of_modules, cases), FP64)


# ---- 14. Packed documents ignored: a loss 1.83 times too large (axolotl #3608).


def test_packed_documents_do_not_see_each_other(ranks: Any) -> None:
    cases = [AttentionCase(32, True, documents=((0, 3, 11, 32),), **mode) for mode in MODES]
    check(ranks(4, errors_of_modules, cases), FP64)


# ---- 15. Stale K/V in the backward of a ring (diffusers #14265).


@on_ranks
def two_forwards(mode: dict[str, Any]) -> float:
    """Backwards of two calls in the order of the forwards, after the inputs of a third have come and gone."""
    module, handler = styled(mode)
    worst, calls = 0.0, []
    for seed in range(3):
        whole = [x * (seed + 1) for x in inputs(1, 4, 4, 32, 8, 8, torch.float64)]
        local = [handler.dispatch(x, 2).requires_grad_() for x in whole[:3]]
        calls.append((whole, local, module(*local)))
    for whole, local, out in calls[:2]:
        wide = [x.requires_grad_() for x in whole[:3]]
        want = torch.autograd.grad(plain_attention(*wide, is_causal=True), wide, whole[3])
        for got, expected in zip(torch.autograd.grad(out, local, handler.dispatch(whole[3], 2)), want, strict=True):
            worst = max(worst, relative_error(handler.combine(got, 2), expected))
    return worst


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_backward_meets_the_keys_of_its_own_forward(ranks: Any, mode: dict[str, Any]) -> None:
    assert max(ranks(4, two_forwards, mode)) <= FP64
