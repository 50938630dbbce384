"""A degree for every micro-batch under FSDP2 and DDP on four ranks: the weights of one device after some steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallel, DynamicContextParallel, dynamic_steps, split_cp_mesh
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from hyper_cp.data.dynamic import CostModel
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks

CONFIG = LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
COST = CostModel(linear=1.0, quadratic=0.02, exchange=2.0)
STEPS = [[5, 900, 33, 410, 61, 12, 150], [97, 61, 3, 29, 30], [7]]
"""Lengths of global batches: all degrees; no length that splits evenly; three ranks without a sample."""


def samples_of(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and labels of every sample; the first third of each has no loss."""
    g = torch.Generator().manual_seed(step)
    texts = [torch.randint(CONFIG.vocab, (length + 1,), generator=g) for length in STEPS[step]]
    labels = [torch.where(torch.arange(len(x) - 1) < len(x) // 3, -100, x[1:]) for x in texts]
    return [x[:-1] for x in texts], labels


def loss_sum(model: nn.Module, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens, positions)[0], labels[0], reduction="sum", ignore_index=-100)


def one_device(model: nn.Module) -> list[float]:
    """Train on every sample by itself; the gradient norms."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), []
    for step in range(len(STEPS)):
        texts, labels = samples_of(step)
        count = sum(int((x != -100).sum()) for x in labels)
        for text, label in zip(texts, labels, strict=True):
            (loss_sum(model, text[None], torch.arange(len(text)), label[None]) / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@on_ranks
def train(wrapper: str) -> tuple[float, float, list[list[int]]]:
    """Errors of weights and of gradient norms, and in each step the degree of this rank's forwards, 0 for none."""
    family = split_cp_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))
    scheduler = DynamicContextParallel(family, 240, COST)
    torch.manual_seed(0)
    model, reference = Llama(CONFIG).double(), Llama(CONFIG).double()
    reference.load_state_dict(model.state_dict())
    want = one_device(reference)
    style = ContextParallel(seq_dim=2, head_dim=1, layout="head_tail", ulysses_degree=1, kv_exchange="ring")
    parallelize_module(model, family.cp(4), {"layers.*.attention.inner": style})
    run: Any = model
    if wrapper == "ddp":
        run = DistributedDataParallel(model, process_group=family.dp(1).get_group())
    else:
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=family.dp(1), reshard_after_forward=wrapper != "kept")
    optimizer, norms, done = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), [], []
    for number in range(len(STEPS)):
        texts, labels = samples_of(number)
        count = sum(int((x != -100).sum()) for x in labels)
        steps = dynamic_steps(scheduler.plan([len(x) for x in texts]), family)
        for step in steps:
            if wrapper == "kept":
                run.set_requires_gradient_sync(step.last)
            accumulated = wrapper == "ddp" and not step.last
            with run.no_sync() if accumulated else nullcontext(), step.mesh(model) as handler:
                whole = step.pack(texts), step.positions(), step.pack(labels, -100)
                tokens, positions, targets = (handler.dispatch(x, 1) for x in whole)
                step.loss(loss_sum(run, tokens, positions[0], targets), count).backward()
        done.append([step.degree if step.micro_batch else 0 for step in steps])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    pairs = zip(weights, reference.parameters(), strict=True)
    errors = [relative_error(a.detach(), b.detach()) for a, b in pairs]
    return max(errors), max(abs(a / b - 1) for a, b in zip(norms, want, strict=True)), done


@pytest.mark.parametrize("wrapper", ["fsdp", "kept", "ddp"])
def test_weights_are_those_of_one_device(ranks: Any, wrapper: str) -> None:
    found = ranks(4, train, wrapper)
    assert max(max(errors) for *errors, _ in found) <= 1e-10
    for step in range(len(STEPS)):
        assert len({len(done[step]) for *_, done in found}) == 1, "ranks have different numbers of steps"
    assert {degree for *_, done in found for degree in done[0]} >= {1, 4}
    assert sorted(done[2] for *_, done in found) == [[0], [0], [0], [1]]


@given(st.lists(st.integers(1, 280), min_size=1, max_size=30), st.sampled_from([6, 8, 12]))
def test_a_round_has_one_micro_batch_of_each_rank(lengths: list[int], size: int) -> None:
    plan = DynamicContextParallel(size, 48, COST, layout="contiguous").plan(lengths)
    places = [(at, rank) for at, m in zip(plan.rounds, plan.micro_batches, strict=True) for rank in m.ranks]
    assert len(set(places)) == len(places)
    for rank in range(size):  # in the order of the plan, so that groups agree
        own = [at for at, m in zip(plan.rounds, plan.micro_batches, strict=True) if rank in m.ranks]
        assert own == sorted(own)
