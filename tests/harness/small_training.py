"""A small training under context parallelism, and a fault in a kernel of it, for tests of faults."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.cli.modes import named_mode
from hyper_cp.ops.kernels import cpu

HEADS, WIDTH, LENGTH = 4, 16, 32

MODES = {
    "ring": named_mode("ring, head_tail"),
    "all-gather": named_mode("all-gather, head_tail"),
    "load balance": named_mode("all-gather, load_balance"),
    "needed": named_mode("needed"),
    "Ulysses": named_mode("Ulysses"),
    "Ulysses at the boundary": {**named_mode("Ulysses"), "qkv_indices": (0, 1, 2)},
    "head groups": named_mode("hybrid of 2, 2 head groups"),
    "hybrid": named_mode("hybrid of 2, ring"),
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
    """A small model under context parallelism on all ranks of the job, or on some of them."""

    def __init__(
        self,
        mode: dict[str, Any],
        timeout: float = 60.0,
        members: list[int] | None = None,
        comparisons: float | None = None,
    ) -> None:
        """``timeout``: seconds that transfers may take; ``comparisons``: that ranks wait to compare new calls."""
        self.model = Model()
        # The store of the job has the timeout of init_process_group, as it has under torchrun.
        dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=comparisons or timeout))
        seconds = timedelta(seconds=timeout)
        self.group = dist.new_group(members, timeout=seconds, use_local_synchronization=members is not None)
        mesh = DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=("cp",))
        style = ContextParallel(seq_dim=2, head_dim=1, **{"qkv_indices": None, **mode})
        parallelize_module(self.model, mesh, {"layers.*.inner": style})
        styled_modules(self.model, at_least=3)
        self.handler = ContextParallelHandler(mesh, style)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def forward(self, step: int, **entries: Any) -> Tensor:
        batch = self.handler.get_batch_on_this_cp_rank({"tokens": tokens(step), **entries}, {"tokens": 1})
        with self.handler.documents(batch):
            counts = self.handler.dispatch(torch.ones(1, LENGTH, dtype=torch.bool), 1, pad_value=0)
            losses = self.model(batch["tokens"]).square().mean(-1)
            found: Tensor = self.handler.mean_loss(losses, mask=counts, gradients="sum")
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
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(found: list[float], want: list[float]) -> bool:
    return all(abs(a - b) <= 1e-10 * abs(b) for a, b in zip(found, want, strict=True))


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
