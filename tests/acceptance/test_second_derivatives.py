"""Gradients of gradients (``create_graph=True``): what has none raises an error, and is not taken for a constant."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_cp import ContextParallel, ContextParallelHandler, tiled
from hyper_cp.data.head import Logits, log_probs
from hyper_cp.ops import Entries, attention, gather_windows, latent_attention
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import error_of, on_ranks

MODES: list[dict[str, Any]] = [
    {"kv_exchange": "ring"},
    {"ulysses_degree": None},
    {"ulysses_degree": None, "head_groups": 2},
    {"softcap": 3.0},
]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def calls() -> list[tuple[str, Tensor, list[Tensor]]]:
    """A name, the output of a call and its leaves, the sinks last."""
    mesh, sinks, qkv = cp_mesh(), leaf(4), [leaf(1, 4, 8, 4) for _ in range(3)]
    found = [(str(m), attention(*qkv, mesh=mesh, is_causal=True, sinks=sinks, **m), [*qkv, sinks]) for m in MODES]
    pooled = leaf(1, 4, 4, 4)
    options: dict[str, Any] = {"mesh": mesh, "is_causal": True, "sinks": sinks}
    found.append(("entries", attention(*qkv, entries=Entries(pooled, pooled, 4), **options), [*qkv, pooled, sinks]))
    latents = leaf(1, 4, 8, 6), leaf(1, 8, 5), leaf(1, 1, 8, 2), leaf(4 * 8, 5)
    found.append(("latents", latent_attention(*latents, latents=True, **options), [*latents, sinks]))
    return found


@on_ranks
def errors_of_penalties() -> list[tuple[str, str]]:
    """The error of a penalty on the gradient of each leaf, if there is one."""
    found = []
    for name, out, leaves in calls():
        for i, grad in enumerate(torch.autograd.grad(out.square().sum(), leaves, create_graph=True)):
            again = partial(torch.autograd.grad, grad.sum(), leaves, retain_graph=True)
            found.append((f"{name}, leaf {i}", error_of(again)))
    return found


def test_no_gradient_of_attention_is_differentiated_again(ranks: Any) -> None:
    """Also that of sinks, which is written in plain PyTorch."""
    for of_rank in ranks(2, errors_of_penalties):
        assert len(of_rank) == 26
        for what, error in of_rank:
            assert "no autograd formula was registered" in error, what


@pytest.mark.parametrize("kind", ["head", "tiled"])
def test_a_penalty_on_gradients_is_not_left_out(kind: str) -> None:
    """The loss is added up, so that backward begins with a constant."""
    torch.manual_seed(0)
    x, head = leaf(2, 6, 4), nn.Linear(4, 5).double()
    labels = torch.randint(5, (2, 6))
    out = log_probs(x, labels, head, Logits()) if kind == "head" else tiled(head, 2)(x)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@on_ranks
def errors_of_values_of_all_ranks() -> list[str]:
    handler, x, weights = ContextParallelHandler(cp_mesh(), ContextParallel()), leaf(2, 6), leaf(2, 6)
    outs = [
        handler.pool(x[..., None].square(), "mean", gradients="sum").square(),
        handler.mean_loss(x, gradients="sum", elsewhere=True).exp(),
        handler.mean_loss(x, mask=weights.exp(), gradients="sum", elsewhere=True),
        gather_windows(x[..., None], every=1, length=12, mesh=handler.mesh).square(),
    ]
    return [error_of(partial(torch.autograd.grad, out.sum(), x, create_graph=True)) for out in outs]


def test_a_penalty_on_gradients_of_values_of_all_ranks_is_refused(ranks: Any) -> None:
    """It would lack what comes through other ranks."""
    for found in ranks(2, errors_of_values_of_all_ranks):
        assert len(found) == 4
        for error in found:
            assert error.startswith("NotImplementedError: ") and "create_graph=True is not supported" in error, error
