"""The counter of tensor storages, and the benchmark that counts training steps with it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measured import memory as benchmark
from hyper_cp.memory import MemoryCounter
from hyper_cp.ops import attention
from tests.harness.ranks import on_ranks

MB = 2**20


def test_storages_count_once_while_they_are_alive() -> None:
    old = torch.zeros(MB // 4)
    with MemoryCounter() as memory:
        old.add_(1).view(2, -1).mul_(2)
        assert memory.alive["cpu"] == 0  # it existed before
        new = old + 1
        view = new.view(2, -1)[0]
        assert memory.alive["cpu"] == MB
        del new
        assert memory.alive["cpu"] == MB  # the view has the storage
        more = torch.empty(2 * MB, dtype=torch.uint8)
        del view
        assert (memory.alive["cpu"], memory.peak["cpu"]) == (2 * MB, 3 * MB)
        on_meta = torch.empty(3 * MB, dtype=torch.uint8, device="meta")
        assert memory.alive == {"cpu": 2 * MB, "meta": 3 * MB}
    del more, on_meta, old
    assert memory.alive["cpu"] == 0 and memory.peak["cpu"] == 3 * MB


def test_what_backward_needs_is_alive_after_forward() -> None:
    x = torch.zeros(MB // 4, requires_grad=True)
    with MemoryCounter() as memory:
        y = x.exp().sin().sum()  # both steps save their input, and exp its output, which is sin's input
        assert memory.alive["cpu"] == MB + 4
        y.backward()
        assert memory.alive["cpu"] == MB + 4 and memory.peak["cpu"] >= 2 * MB  # the gradient of x


@on_ranks
def inside() -> dict[str, int]:
    """Peaks of one attention call on two ranks, and the bytes of a DTensor's part."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    q, k, v = (torch.zeros(1, 2, 512, 64) for _ in range(3))
    for kv in ("all_gather", "ring"):
        with MemoryCounter() as memory:
            attention(q, k, v, mesh=mesh, kv_exchange=kv)
        found[kv] = memory.peak["cpu"]
    part = torch.zeros(MB // 4)
    with MemoryCounter() as memory:
        kept = DTensor.from_local(part, mesh, [Shard(0)]) + 1
        found["dtensor"] = memory.alive["cpu"]
    del kept
    return found


def test_the_insides_of_operators_and_the_parts_of_dtensors_count(ranks: Any) -> None:
    out, keys = 512 * 128 * 4, 2 * 512 * 128 * 4
    for found in ranks(2, inside):
        assert found["all_gather"] >= 2 * keys + out  # the keys and values of both ranks
        assert keys + out <= found["ring"]
        assert found["dtensor"] == MB


# --------------------------------------------------------------------------- the benchmark


@pytest.mark.slow
def test_the_benchmark_counts_what_is_known() -> None:
    """Attention saves its output and log-sum-exp beside its inputs; a step of the model has the logits that whole
    logits cost, and every row of the table saves less than the one before."""
    config, length = benchmark.CONFIG, 1024
    with benchmark.rank_of(4) as mesh:
        for mode in ("all-gather", "ring", "needed"):
            step = benchmark.attention_alone(mesh, length, benchmark.MODES[mode])
            known = length // 4 * config.heads * (config.head_dim + 1) * 4
            assert known <= step.saved <= known + 64
        steps = {row: benchmark.whole_model(mesh, length, benchmark.MODES["ring"], row) for row in benchmark.LAYERS}
        block = benchmark.one_block(mesh, length, benchmark.MODES["ring"])
        attended = benchmark.attention_alone(mesh, length, benchmark.MODES["ring"])
    assert attended.saved < block.saved < steps["plain"].saved
    logits = length // 4 * config.vocab * 4
    assert steps["plain"].saved - steps["loss without logits"].saved >= 0.95 * logits
    saved = [step.saved for step in steps.values()]
    assert all(a > b for a, b in pairwise(saved)), saved
    inside = config.layers * length // 4 * config.hidden * 4
    assert steps["loss without logits"].saved - steps["+ tiled MLP"].saved >= 3 * inside


class Slow(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


def test_modules_run_as_usual_inside() -> None:
    x = torch.randn(3, requires_grad=True)
    with MemoryCounter(), MemoryCounter() as inner:
        out = torch.utils.checkpoint.checkpoint(Slow(), x, use_reentrant=False)
        out.sum().backward()
    assert x.grad is not None and inner.peak["cpu"] > 0
