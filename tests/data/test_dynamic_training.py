"""Training at a degree per micro-batch on four ranks: losses, gradients and weights of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from hyper_cp.data.dynamic import CostModel, DynamicContextParallel, MicroBatch
from hyper_cp.mesh.family import split_cp_mesh
from hyper_cp.ops import attention
from tests.harness.ranks import on_ranks

CONFIG = LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
BUDGET = 48
COST = CostModel(linear=1.0, quadratic=0.02, exchange=2.0)  # a slow link: nothing is sharded that fits
STEPS = [
    [150, 17, 33, 8, 40, 5, 61, 12, 90],  # degrees 4, 2 and 1
    [97, 61, 3, 29, 30],  # no length splits evenly
    [7],  # three ranks have no work
]
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("head_tail", {"kv_exchange": "ring"}),
    "all-gather": ("contiguous", {"kv_exchange": "all_gather"}),
    "ulysses": ("head_tail", {"ulysses_degree": None}),
}


@dataclass
class Running:
    """The state of the running micro-batch that the attention of the whole model needs."""

    mode: dict[str, Any]
    mesh: DeviceMesh | None = None
    documents: tuple[int, ...] | None = None


class InnerAttention(nn.Module):
    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now = self.running
        assert now.mesh is not None
        return attention(q, k, v, mesh=now.mesh, is_causal=True, enable_gqa=True, documents=now.documents, **now.mode)


def samples_of(step: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of every sample; a prompt of some tokens carries no loss."""
    g, found = torch.Generator().manual_seed(step), []
    for length in STEPS[step]:
        text = torch.randint(CONFIG.vocab, (length + 1,), generator=g)
        labels = text[1:].clone()
        labels[: length // 3] = -100
        found.append((text[:-1], labels))
    return found


def loss_sum(model: nn.Module, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[None], positions)[0], labels, reduction="sum", ignore_index=-100)


def packed(batch: MicroBatch, samples: list[tuple[Tensor, Tensor]], handler: ContextParallelHandler) -> list[Tensor]:
    """This rank's tokens, positions (from 0 in every sample) and labels of a micro-batch."""
    chosen = [samples[i] for i in batch.samples]
    tokens = torch.cat([tokens for tokens, _ in chosen])
    labels = torch.cat([labels for _, labels in chosen])
    positions = torch.cat([torch.arange(len(tokens)) for tokens, _ in chosen])
    return [handler.dispatch(x, 0, pad_value=pad) for x, pad in ((tokens, 0), (positions, 0), (labels, -100))]


@on_ranks
def train(layout: str, mode: dict[str, Any]) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """Train a few steps. Returns errors of losses, gradients and weights, and per step this rank's (degree, number of
    samples)."""
    family = split_cp_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))
    everyone = family.dp(1).get_group()
    scheduler = DynamicContextParallel(family, BUDGET, COST, layout=layout)
    torch.manual_seed(0)
    model, reference = Llama(CONFIG).double(), Llama(CONFIG).double()
    reference.load_state_dict(model.state_dict())
    running = Running({"layout": layout, **mode})
    for layer in model.layers:
        layer.attention.inner = InnerAttention(running)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (model, reference)]
    errors: list[float] = []
    done = []

    def compare(got: Tensor, want: Tensor) -> None:
        errors.append(((got - want).abs().max() / want.abs().max()).item())

    for step, lengths in enumerate(STEPS):
        samples = samples_of(step)
        count = sum(int((labels != -100).sum()) for _, labels in samples)
        plan = scheduler.plan(lengths)
        total = torch.zeros((), dtype=torch.float64)
        for batch in plan.of_rank(family.rank):
            handler = ContextParallelHandler(family.cp(batch.degree), layout)
            assert handler.padded_length(sum(batch.lengths)) == batch.length
            running.mesh, running.documents = family.cp(batch.degree), batch.documents
            tokens, positions, labels = packed(batch, samples, handler)
            assert len(tokens) <= BUDGET
            loss = loss_sum(model, tokens, positions, labels) / count
            loss.backward()
            total += loss.detach()
        done.append([(batch.degree, len(batch.samples)) for batch in plan.of_rank(family.rank)])
        dist.all_reduce(total, group=everyone)
        want = torch.zeros((), dtype=torch.float64)
        for tokens, labels in samples:  # every sample alone, on one device, through plain attention
            loss = loss_sum(reference, tokens, torch.arange(len(tokens)), labels) / count
            loss.backward()
            want += loss.detach()
        compare(total, want)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # this rank had no work
            dist.all_reduce(p.grad, group=everyone)
            assert q.grad is not None
            compare(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            compare(p.detach(), q.detach())
    return errors, done


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(MODES)]
)
def test_training_equals_one_device(ranks: Any, name: str) -> None:
    found = ranks(4, train, *MODES[name])
    assert max(error for errors, _ in found for error in errors) <= 1e-10
    steps = [[work for _, done in found for work in done[step]] for step in range(len(STEPS))]
    assert {degree for degree, _ in steps[0]} == {1, 2, 4}
    assert any(degree == 1 and count > 1 for degree, count in steps[0])  # packed documents
    assert {degree for degree, _ in steps[1]} == {1, 2, 4}
    assert [done[2] for _, done in found] == [[(1, 1)], [], [], []]
