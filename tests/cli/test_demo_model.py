"""A whole model, embedding to loss: the same loss and gradients as on one device, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.demo import MODES
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness.ranks import on_ranks

LENGTH = 32
CONFIG = LlamaConfig(dim=32, layers=2, heads=8, kv_heads=4, hidden=48)


def loss_of(model: Llama, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * LENGTH)


def data(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (2, LENGTH + 1), generator=g)
    return text[:, :-1], text[:, 1:]


def train_once(mode: dict[str, Any], mesh_shape: tuple[int, ...], compiled: bool, block: bool) -> list[float]:
    """Relative errors of the loss and of every parameter's gradient, summed over the ranks."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, reference = Llama(CONFIG).double(), Llama(CONFIG).double()
    reference.load_state_dict(model.state_dict())
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
        want = loss_of(reference, tokens, labels, torch.arange(LENGTH))
        reference.zero_grad()
        want.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        errors.append(abs(total / want.detach() - 1).item())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            dist.all_reduce(p.grad)
            errors.append(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item())
    return errors


@on_ranks
def train_all(cases: list[tuple[dict[str, Any], tuple[int, ...], bool, bool]]) -> list[float]:
    return [max(train_once(*case)) for case in cases]


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
    names = ("ulysses", "colossal balanced", "ring head-tail", "hybrid ring head-tail")
    cases = [(MODES[name], (4,), True, False) for name in names] + [(MODES[names[-1]], (4,), True, True)]
    for errors in ranks(4, train_all, cases, timeout=400):
        assert max(errors) <= 1e-10, dict(zip(map(str, cases), errors, strict=True))
