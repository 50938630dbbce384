"""Faults on real processes: ranks that are killed, stop, raise or leave a step out; restarts; NaN."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.ops.kernels import cpu
from tests.harness import ranks as pool
from tests.harness.ranks import RankEnds, RankError, Ranks, on_ranks

HEADS, WIDTH, LENGTH, VICTIM = 4, 16, 32, 1
TIMEOUT, SPARE = 3.0, 5.0
"""Seconds of the process groups; seconds beyond in which every other rank must have raised."""

OPERATIONS = "attention|exchange of heads|attention in groups of heads"

MODES: dict[str, dict[str, Any]] = {
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    "all-gather": {"ulysses_degree": 1, "layout": "head_tail"},
    "load balance": {"ulysses_degree": 1, "load_balance": True},
    "needed": {"ulysses_degree": 1, "kv_exchange": "needed"},
    "Ulysses": {"ulysses_degree": None},
    "Ulysses at the boundary": {"ulysses_degree": None, "qkv_indices": (0, 1, 2)},
    "head groups": {"ulysses_degree": 2, "head_groups": 2},
    "hybrid": {"ulysses_degree": 2, "kv_exchange": "ring"},
}


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(WIDTH, 3 * WIDTH), Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.inner(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A small model under context parallelism on all ranks of the job, or alone."""

    def __init__(self, mode: dict[str, Any], timeout: float = TIMEOUT) -> None:
        self.model = Model()
        # The store of the job has the timeout of init_process_group, as it has under torchrun.
        dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=timeout))
        self.group = dist.new_group(timeout=timedelta(seconds=timeout))
        mesh = DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=("cp",))
        style = ContextParallel(seq_dim=2, head_dim=1, **{"qkv_indices": None, **mode})
        parallelize_module(self.model, mesh, {"layers.*.inner": style})
        styled_modules(self.model, at_least=3)
        self.handler = ContextParallelHandler(mesh, style)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def forward(self, step: int, **entries: Any) -> Tensor:
        batch = self.handler.get_batch_on_this_cp_rank({"tokens": tokens(step), **entries}, {"tokens": 1})
        with self.handler.documents(batch):
            found: Tensor = self.handler.mean_loss(self.model(batch["tokens"]).square().mean(-1), gradients="sum")
        return found

    def step(self, step: int, before_backward: Callable[[], None] = lambda: None, **entries: Any) -> float:
        """The loss of one step of training."""
        self.optimizer.zero_grad()
        loss = self.forward(step, **entries)
        before_backward()
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad, group=self.group)
        self.optimizer.step()
        return loss.item()


def tokens(step: int) -> Tensor:
    return torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def one_device(steps: int) -> list[float]:
    """The losses of plain training."""
    model, losses = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(found: list[float], want: list[float]) -> bool:
    return all(abs(a - b) <= 1e-10 * abs(b) for a, b in zip(found, want, strict=True))


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Ranks]:
    """A pool of this module's own: its ranks get killed."""
    ranks = Ranks()
    yield ranks
    ranks.close()


# --------------------------------------------------------------------------- ranks that are killed, or stop


class Fault:
    """Does something to this rank in the kernel of a module, in forward or in backward."""

    def __init__(self, model: Model, step: str, action: Callable[[], None], layer: int = 1) -> None:
        self.armed, self.layer = False, model.layers[layer]
        original = getattr(type(cpu.KERNEL), step)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.armed = False
                action()
            return original(cpu.KERNEL, *args, **kwargs)

        setattr(cpu.KERNEL, step, kernel)
        self.remove = lambda: delattr(cpu.KERNEL, step)
        self.step = step

    def arm(self) -> None:
        """Do it in the next forward of the layer, or in the backward after it."""

        def now(*_: Any) -> None:
            self.armed = True

        if self.step == "forward":
            self.handles = [self.layer.register_forward_pre_hook(now)]
        else:
            self.handles = [self.layer.register_full_backward_pre_hook(now)]


@on_ranks
def lose_a_rank(mode: dict[str, Any], step: str, number: int) -> None:
    """The first step is right; in the second a signal hits one rank in the kernel of the second layer."""
    training = Training(mode)
    training.step(0)
    if dist.get_rank() == VICTIM:
        Fault(training.model, step, lambda: os.kill(os.getpid(), number)).arm()
    dist.barrier()
    started = time.monotonic()
    try:
        training.step(1)
    except Exception as error:
        raise RankEnds(f"{type(error).__name__}: {error} [{time.monotonic() - started:.1f} s]") from error


def survivors(own_pool: Ranks, mode: str, step: str, number: int) -> None:
    with pytest.raises(RankError) as caught:
        own_pool(4, lose_a_rank, MODES[mode], step, number)
    assert set(caught.value.types) == {0, 1, 2, 3}, caught.value
    for rank in {0, 2, 3}:
        text = caught.value.messages[rank]
        want = (
            rf"TransferError: module 'layers\.[012]\.inner' \(Inner\): ({OPERATIONS}) in {step} on the cp mesh of 4 "
            rf"ranks \(ring \d x ulysses \d\), in batch 2 of this rank: \w+ between this rank \({rank}\) and global ranks? "
            r"[\d, ]+ failed: .*Look at the first rank's error.*\[([\d.]+) s\]"
        )
        found = re.fullmatch(want, text, re.S)
        assert found, f"{mode}, {step}, rank {rank}: {text}"
        assert float(found[2]) <= TIMEOUT + SPARE
    peers = [re.findall(r"global rank(?:s?) ([\d, ]+) failed", caught.value.messages[rank])[0] for rank in (0, 2, 3)]
    assert any(str(VICTIM) in x for x in peers), peers


@pytest.mark.slow
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_killed_rank_in_every_mode(own_pool: Ranks, step: str) -> None:
    for mode in MODES:
        survivors(own_pool, mode, step, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step"), [("ring", "forward"), ("head groups", "backward")])
def test_a_rank_that_stops(own_pool: Ranks, mode: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 1.0)
    survivors(own_pool, mode, step, signal.SIGSTOP)
