"""Functions that read the documents of a block, recomputed by activation checkpointing: those of their forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.ops import (
    attention,
    causal_conv1d,
    gather_windows,
    indexer_loss,
    latent_attention,
    linear_recurrence,
    select_keys,
    windows,
)
from tests.harness.attention_case import FP64, cp_mesh
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks

SHARE, DOCUMENTS, OTHERS = 8, [0, 5, 16], [0, 9, 11, 16]


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of ``x [1, S/n, 8]``, none of which is given documents."""
    mesh = cp_mesh()
    causal: dict[str, Any] = {"mesh": mesh, "is_causal": True}
    g = torch.Generator().manual_seed(0)
    weight, up = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((8, 3), (12, 4)))

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (2, 4)).transpose(1, 2)

    def selected(x: Tensor) -> Tensor:
        q = heads(x)
        return attention(q, q, q, selected=select_keys(q, q[:, :1], topk=3, mesh=mesh), **causal)

    def of_indexer(x: Tensor) -> Tensor:
        q = heads(x)
        lse = attention(q, q, q, return_lse=True, **causal)[1]
        return indexer_loss(q, q[:, :1], None, q, q, lse, mesh=mesh)

    def pooled(x: Tensor) -> Tensor:
        pools = windows(x, range(4), every=4, mesh=mesh).mean(2)
        return gather_windows(pools, every=4, length=SHARE * dist.get_world_size(), mesh=mesh) * (1 + dist.get_rank())

    return {
        "attention": lambda x: attention(heads(x), heads(x), heads(x), **causal),
        "Ulysses": lambda x: attention(heads(x), heads(x), heads(x), ulysses_degree=None, **causal),
        "latents": lambda x: latent_attention(heads(x), x[..., :4], x[:, None, :, :2], up, latents=True, **causal),
        "convolution": lambda x: causal_conv1d(x.transpose(1, 2), weight, mesh=mesh),
        "windows": lambda x: windows(x, [2, 1], mesh=mesh) * x.unsqueeze(2) ** 2,
        "recurrence": lambda x: linear_recurrence(
            *[x.unflatten(2, (2, 4))] * 3, -x.unflatten(2, (2, 4))[..., 0].abs(), mesh=mesh
        ),
        "selected keys": selected,
        "loss of an indexer": of_indexer,
        "pooled keys": pooled,
    }


class Foreign(torch.autograd.Function):
    """Activation checkpointing that is not torch's, as in Megatron and DeepSpeed."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad  # type: ignore[return-value]


def gradient(run: Callable[[Tensor], Tensor], kind: str, where: str) -> Tensor:
    """The gradient of a function's input, through a checkpoint of this kind, with a backward in another block."""
    handler = ContextParallelHandler(cp_mesh(), ContextParallel(2, 1))
    g = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, SHARE, 8, generator=g, dtype=torch.float64).requires_grad_()
    runs: dict[str, Callable[[], Tensor]] = {
        "none": lambda: run(x * 1),
        "reentrant": lambda: checkpoint(run, x * 1, use_reentrant=True),
        "non-reentrant": lambda: checkpoint(run, x * 1, use_reentrant=False),
        "foreign": lambda: Foreign.apply(run, x * 1),
    }
    inside: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "after": nullcontext,
        "another": lambda: handler.documents(OTHERS),
        "no documents": lambda: handler.documents(None),
    }
    with handler.documents(DOCUMENTS):
        out = runs[kind]()
        loss = (out.tanh() * torch.arange(out.numel()).view(out.shape).sin()).sum()
        if where == "inside":
            loss.backward()
    if where != "inside":
        with inside[where]():
            loss.backward()
    assert x.grad is not None
    return x.grad


@on_ranks
def recomputed(kind: str) -> list[tuple[str, str, float]]:
    found = []
    for name, run in functions().items():
        want = gradient(run, "none", "inside")
        for where in ("inside", "after", "another", "no documents"):
            found.append((name, where, relative_error(gradient(run, kind, where), want)))
    return found


@pytest.mark.filterwarnings("ignore:a handler.documents block has ended")
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_a_recompute_has_the_documents_of_its_forward(ranks: Any, kind: str) -> None:
    """Wherever backward runs: in the block, after it, in that of another batch or of one without documents."""
    for of_rank in ranks(2, recomputed, kind):
        assert len(of_rank) == 36
        for name, where, error in of_rank:
            assert error < FP64, (name, where)


KINDS_INSIDE = [(True, False), (False, True), (True, True), (False, False), (None, True)]
"""Reentrant, not reentrant and no checkpoint, of the first part and of the second."""


@on_ranks
def nested(outer: bool) -> list[tuple[Any, Any, float]]:
    """Errors of two checkpoints in one, by their kinds. Layers select other numbers of keys, and change the selection
    in place."""
    mesh, g = cp_mesh(), torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(1, SHARE, 8, generator=g, dtype=torch.float64)

    def layer(x: Tensor, topk: int) -> Tensor:
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        selected = select_keys(q, q[:, :1], topk=topk, mesh=mesh)
        selected.sub_(1).clamp_(min=-1)
        out = attention(q, q, q, mesh=mesh, is_causal=True, selected=selected)
        return x + out.transpose(1, 2).flatten(2)

    def two(x: Tensor) -> Tensor:
        return layer(layer(x, 3), 5)

    def one(x: Tensor) -> Tensor:
        return layer(x, 3)

    def grads(run: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of the gradients of two backward passes."""
        x = values.clone().requires_grad_()
        out = run(x * 1).sin().sum()
        out.backward(retain_graph=True)
        out.backward()
        assert x.grad is not None
        return x.grad

    def within(first: bool | None, second: bool | None, x: Tensor) -> Tensor:
        x = two(x) if first is None else checkpoint(two, x, use_reentrant=first)
        return one(x) if second is None else checkpoint(one, x, use_reentrant=second)

    want, found = grads(lambda x: one(two(x))), []
    for first, second in KINDS_INSIDE:
        got = grads(partial(checkpoint, partial(within, first, second), use_reentrant=outer))
        found.append((first, second, relative_error(got, want)))
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("outer", [True, False])
def test_nested_checkpoints_have_the_selections_of_their_forward(ranks: Any, outer: bool) -> None:
    """A reentrant one has recomputed, and is in backward, when those inside of it recompute."""
    for of_rank in ranks(2, nested, outer):
        assert len(of_rank) == len(KINDS_INSIDE)
        for first, second, error in of_rank:
            assert error < FP64, (first, second)


@on_ranks
def foreign() -> list[tuple[str, str]]:
    return [(name, error_of(lambda run=run: gradient(run, "foreign", "after"))) for name, run in functions().items()]  # type: ignore[misc]


def test_code_of_others_does_not_recompute_without_documents(ranks: Any) -> None:
    for of_rank in ranks(2, foreign):
        for name, error in of_rank:
            assert "recomputed in backward without documents" in error, name
