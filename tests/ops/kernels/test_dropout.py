"""Attention dropout: the same pairs in every mode and in a recompute, other pairs on other ranks and heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel
from hyper_cp.ops import attention
from tests.harness.attention_case import (
    FP64,
    AttentionCase,
    Errors,
    Shard,
    cp_mesh,
    dropout_error,
    kept_pairs,
    modes,
    run_module,
)
from tests.harness.ranks import on_ranks

P = 0.3
CAUSAL = torch.ones(48, 48).tril().bool()


def case_of(**mode: Any) -> AttentionCase:
    return AttentionCase(48, True, heads=8, kv_heads=8, dim=16, v_dim=16, **mode)


@on_ranks
def pattern_and_errors(modes: list[dict[str, Any]]) -> list[tuple[Tensor, float]]:
    """Per mode: the pairs that are kept, and the error of the output and gradients under that pattern."""
    mesh, found = cp_mesh(), []
    for mode in modes:
        shard = case_of(**mode).shard()

        def attend(*qkv: Tensor, shard: Shard = shard) -> Any:
            return replace(shard, qkv=qkv).attend(mesh, dropout_p=P)

        def recomputed(*qkv: Tensor, attend: Any = attend) -> Any:
            return checkpoint(attend, *qkv, use_reentrant=False)

        kept = kept_pairs(shard, attend)
        found.append((kept, dropout_error(shard, recomputed if mode["kv_exchange"] == "ring" else attend, P, kept)))
    return found


@pytest.mark.slow
def test_the_same_pairs_are_dropped_in_every_mode(ranks: Any) -> None:
    reference = ranks(2, pattern_and_errors, modes(2)[:1])[0][0][0]
    kept = reference[..., CAUSAL]
    assert abs(kept.mean().item() - (1 - P)) < 5 * (P * (1 - P) / kept.numel()) ** 0.5
    # No two heads, batch rows or queries share their numbers.
    rows = reference.flatten(0, 1)[..., 24:, :24].flatten(0, 1) - (1 - P)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 6 / 24**0.5 and abs(correlation.mean().item()) < 0.005
    hybrid = [mode for mode in modes(4) if mode["ulysses_degree"] == 2]
    for world, cases in ((2, modes(2)), (3, modes(3)[::4]), (4, hybrid[::3])):
        for found in ranks(world, pattern_and_errors, cases):
            for (pattern, error), case in zip(found, cases, strict=True):
                assert torch.equal(pattern, reference) and error <= FP64, case


class Dropping(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P if self.training else 0.0)


@on_ranks
def through_the_style(style: dict[str, Any]) -> tuple[Tensor, float, Errors]:
    """The pattern as above, of a module's own call, the error under it, and the errors of the module in evaluation."""
    case = case_of(ulysses_degree=None)
    module, shard = parallelize_module(Dropping(), cp_mesh(), ContextParallel(2, 1, **style)), case.shard()
    kept = kept_pairs(shard, module)
    return kept, dropout_error(shard, module, P, kept), run_module(Dropping().eval(), case, **style)


def test_dropout_of_a_module(ranks: Any) -> None:
    patterns = []
    for style in ({"ulysses_degree": None}, {"ulysses_degree": 1, "kv_exchange": "ring"}, {"qkv_indices": None}):
        for pattern, *errors, evaluated in ranks(2, through_the_style, style):
            patterns.append(pattern)
            assert max(*errors, *evaluated.values()) <= FP64
    assert all(torch.equal(p, patterns[0]) for p in patterns) and 0 < patterns[0].mean() < 0.5


@on_ranks
def refused(p: float) -> None:
    x = torch.randn(1, 2, 4, 8)
    attention(x, x, x, mesh=cp_mesh(), dropout_p=p)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_no_probability(ranks: Any, p: float) -> None:
    ranks.raises(2, ValueError, f"dropout_p={p} must be a probability", refused, p)
