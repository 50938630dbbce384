"""Attention dropout: the same pairs in every mode and in a recompute, other pairs on other ranks and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel
from hyper_cp.ops import attention
from tests.harness.attention_case import FP64, cp_mesh, inputs, modes
from tests.harness.oracle import relative_error, token_positions
from tests.harness.ranks import on_ranks

P = 0.3
B, H, S = 2, 8, 48


def plain(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Causal attention in which the softmax is over all weights and the output from those kept."""
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(S, S).tril().bool(), -torch.inf)
    return (logits.softmax(-1) * kept / (1 - P)) @ v


@on_ranks
def pattern_and_errors(cases: list[dict[str, Any]]) -> list[tuple[Tensor, float]]:
    """Per case: which weights this rank's queries kept (seen through values that are the identity), and the error
    of the output and gradients of other values under that pattern."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), cp_mesh()
    found = []
    q, k, v, dout = inputs(B, H, H, S, 16, 16, torch.float64)
    eye = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    for case in cases:
        mine = torch.tensor(token_positions(case["layout"], rank, world, S))

        def attend(*qkv: Tensor, case: dict[str, Any] = case) -> Any:
            return attention(*qkv, mesh=mesh, is_causal=True, dropout_p=P, **case)

        local = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(5)
        weights = attend(local[0], local[1], eye[:, :, mine])
        torch.manual_seed(5)
        out = checkpoint(attend, *local, use_reentrant=False) if case["kv_exchange"] == "ring" else attend(*local)
        grads = torch.autograd.grad(out, local, dout[:, :, mine])
        whole = torch.zeros(B, H, S, S, dtype=torch.float64)
        whole[:, :, mine] = (weights.detach() > 0).double()
        dist.all_reduce(whole)
        wide = [x.clone().requires_grad_() for x in (q, k, v)]
        want = plain(*wide, whole)
        pairs = zip((out, *grads), (want, *torch.autograd.grad(want, wide, dout)), strict=True)
        found.append((whole, max(relative_error(a, b.detach()[:, :, mine]) for a, b in pairs)))
    return found


@pytest.mark.slow
def test_the_same_pairs_are_dropped_in_every_mode(ranks: Any) -> None:
    reference = ranks(2, pattern_and_errors, modes(2)[:1])[0][0][0]
    seen = torch.ones(S, S).tril().bool()
    kept = reference[..., seen]
    assert abs(kept.mean().item() - (1 - P)) < 5 * (P * (1 - P) / kept.numel()) ** 0.5
    # No two heads, batch rows or queries share their numbers.
    rows = reference.flatten(0, 1)[..., S // 2 :, : S // 2].flatten(0, 1) - (1 - P)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 6 / (S // 2) ** 0.5 and abs(correlation.mean().item()) < 0.005
    for world in (2, 3, 4):
        cases = [m for m in modes(world) if H % m["ulysses_degree"] == 0]
        for found in ranks(world, pattern_and_errors, cases):
            for (pattern, error), case in zip(found, cases, strict=True):
                assert torch.equal(pattern, reference) and error <= FP64, case


class Dropping(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P if self.training else 0.0)


@on_ranks
def through_the_style(style: dict[str, Any]) -> tuple[Tensor, float]:
    """The pattern as above, of a module's own call, and the error of the module in evaluation."""
    world, mesh = dist.get_world_size(), cp_mesh()
    module = parallelize_module(Dropping(), mesh, ContextParallel(2, 1, **style))
    q, k, v, _ = inputs(B, H, H, S, 16, 16, torch.float64)
    mine = torch.tensor(token_positions("contiguous", dist.get_rank(), world, S))
    eye = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    torch.manual_seed(5)
    weights = module(q[:, :, mine], k[:, :, mine], eye[:, :, mine])
    whole = torch.zeros(B, H, S, S, dtype=torch.float64)
    whole[:, :, mine] = (weights > 0).double()
    dist.all_reduce(whole)
    out = module.eval()(*(x[:, :, mine] for x in (q, k, v)))
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(S, S).tril().bool(), -torch.inf)
    return whole, relative_error(out, (logits.softmax(-1) @ v)[:, :, mine])


def test_dropout_of_a_module(ranks: Any) -> None:
    patterns = []
    for style in ({"ulysses_degree": None}, {"ulysses_degree": 1, "kv_exchange": "ring"}, {"qkv_indices": None}):
        for pattern, error in ranks(2, through_the_style, style):
            patterns.append(pattern)
            assert error <= FP64
    assert all(torch.equal(p, patterns[0]) for p in patterns) and 0 < patterns[0].mean() < 0.5


@on_ranks
def refused(p: float) -> None:
    mesh = cp_mesh()
    x = torch.randn(1, 2, 4, 8)
    attention(x, x, x, mesh=mesh, dropout_p=p)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_no_probability(ranks: Any, p: float) -> None:
    ranks.raises(2, ValueError, f"dropout_p={p} must be a probability", refused, p)
