"""A whole model, embedding to loss: the same loss and gradients as on one device, in every mode."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.demo import MODES
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

LENGTH = 32
CONFIG = LlamaConfig(dim=32, heads=8, kv_heads=4, hidden=48)


def loss_of(model: Llama, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * LENGTH)


def data(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (2, LENGTH + 1), generator=g)
    return text[:, :-1], text[:, 1:]


def plain_model(layers: int = 2) -> Llama:
    torch.manual_seed(0)
    return Llama(replace(CONFIG, layers=layers)).double()


@cache
def one_device(step: int, layers: int) -> tuple[float, list[Tensor]]:
    """The loss and the gradient of every parameter on one device."""
    model = plain_model(layers)
    loss = loss_of(model, *data(step), torch.arange(LENGTH))
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def train_once(mode: dict[str, Any], mesh_shape: tuple[int, ...], compiled: bool, block: bool) -> list[float]:
    """Relative errors of the loss and of every parameter's gradient, summed over the ranks."""
    torch._dynamo.reset()
    model = plain_model(1 if compiled else 2)  # one layer is enough of a graph: each rank compiles it
    names = ("cp",) if len(mesh_shape) == 1 else ("ring", "ulysses")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    if block:  # the whole attention block is styled, as in Hugging Face models
        style = ContextParallel(qkv_indices=None, **mode)
        parallelize_module(model, mesh, {"layers.*.attention": style})
    else:
        style = ContextParallel(seq_dim=2, head_dim=1, **mode)
        parallelize_module(model, mesh, {"layers.*.attention.inner": style})
    handler = ContextParallelHandler(mesh, style)
    run: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    errors = []
    for step in range(2):
        tokens, labels = data(step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss = loss_of(run, *(handler.dispatch(x, 1) for x in (tokens, labels)), handler.position_ids(LENGTH))
            model.zero_grad()
            loss.backward()
        want, grads = one_device(step, len(model.layers))
        total, *found = sum_over_ranks(loss, *(p.grad for p in model.parameters()))
        errors += [abs(total.item() / want - 1), *map(relative_error, found, grads)]
    return errors


@on_ranks
def train_all(cases: list[tuple[dict[str, Any], tuple[int, ...], bool, bool]]) -> list[float]:
    return [max(train_once(*case)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", [False, True])
def test_loss_and_every_gradient(ranks: Any, world: int, block: bool) -> None:
    cases = [(mode, (world,), False, block) for mode in MODES.values()]
    cases.append(({"ulysses_degree": "auto"}, (world,), False, block))
    cases.append(({"kv_exchange": "ring"}, (2, world // 2), False, block))
    for errors in ranks(world, train_all, cases):
        # The forward's RoPE tables are fp32 in the model itself, the same on both sides.
        assert max(errors) <= 1e-10, dict(zip(map(str, cases), errors, strict=True))


@pytest.mark.slow
def test_compiled_whole_model(ranks: Any) -> None:
    """Two ranks for what is the same on any number, four where the ring and Ulysses both have more than one."""
    two = [(MODES["ring, head_tail"], (2,), True, False)]
    four = [(MODES["hybrid of 2, ring, head_tail"], (4,), True, True)]
    for world, cases in ((2, two), (4, four)):
        for errors in ranks(world, train_all, cases, timeout=400):
            assert max(errors) <= 1e-10, dict(zip(map(str, cases), errors, strict=True))
