"""A small causal model in which one mistake of context parallelism can be planted."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel
from hyper_cp.cli.demo_model import join_heads, split_heads

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 31, 16, 4, 24, 2


class Inner(nn.Module):
    dropout = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)


class ByHand(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT / q.shape[-1] ** 0.5
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        return logits.masked_fill(~visible, -1e30).softmax(-1) @ v


class Attention(nn.Module):
    local_rope = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=i == 1) for i in range(4))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(w(x), WIDTH // HEADS) for w in (self.wq, self.wk, self.wv))
        if self.local_rope:
            angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.1
            q, k = (y * angles.cos() + y.roll(1, -1) * angles.sin() for y in (q, k))
        return self.wo(join_heads(self.inner(q, k, v)))


class Conv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Function(nn.Module):
    """A module that is a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "cumsum":
            return x.cumsum(1) / x.shape[1]
        if self.name == "token shift":
            return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if self.name == "normalise":
            return x / (x.detach().pow(2).sum((0, 1)).sqrt() + 1)
        raise ValueError(self.name)


def convolved(x: Tensor) -> Tensor:
    """A causal convolution by hand."""
    weight = torch.linspace(-1, 1, 3 * WIDTH, dtype=x.dtype).view(WIDTH, 1, 3)
    return F.conv1d(F.pad(x.mT, (2, 0)), weight, groups=WIDTH).mT


IN_FORWARD: dict[str, Any] = {
    "shift by pad": lambda x: x - F.pad(x, (0, 0, 1, -1)),
    "shift by pad and slice": lambda x: x - F.pad(x, (0, 0, 1, 0))[:, :-1],
    "convolution by function": convolved,
}
"""Faults between the modules of a block."""


class Lstm(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def extra(fault: str) -> nn.Module:
    """The module beside attention that has a fault."""
    made: dict[str, Any] = {
        "conv": lambda: Conv(WIDTH, WIDTH, 3, padding=1),
        "lstm": lambda: Lstm(WIDTH, WIDTH, batch_first=True),
        "dropout": lambda: nn.Dropout(0.2),
        "batch norm": lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (ROWS, -1))),
        "attention by hand": lambda: Attention(ByHand()),
        "unrouted": lambda: Attention(Inner()),
    }
    names = ("cumsum", "token shift", "normalise")
    return Function(fault) if fault in names else made.get(fault, nn.Identity)()


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm, self.attention, self.extra = nn.LayerNorm(WIDTH), Attention(Inner()), extra(fault)
        self.attention.local_rope = fault == "local rope"
        self.attention.inner.dropout = 0.2 if fault == "attention dropout" else 0.0
        self.between = IN_FORWARD.get(fault, lambda x: x)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = self.between(self.extra(x))
        return x + self.mlp(x)


class Planted(nn.Module):
    """``forward(input_ids [B, S], position_ids [B, S]) -> logits``; the second of its blocks has the fault."""

    def __init__(self, fault: str = "", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fault, self.steps = fault, 0
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.register_buffer("table", torch.randn(2 * LENGTH, WIDTH))
        self.register_buffer("calls", torch.zeros(1))
        self.blocks = nn.ModuleList([Block(""), Block(fault)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        if self.fault == "local arange":
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids) + self.places(position_ids)
        x = x + (self.table[: x.shape[1]] if self.fault == "local table" else self.table[position_ids])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def styled(mesh: DeviceMesh, fault: str = "", dtype: torch.dtype = torch.float64, **style: Any) -> Planted:
    """The model under context parallelism, also the second attention of a block but for the fault "unrouted"."""
    model = Planted(fault, dtype)
    if fault == "functional attention":
        for block in model.blocks:
            del block.attention.inner
            block.attention.inner = partial(F.scaled_dot_product_attention, is_causal=True)
    # Exempt from checks, since the guards would raise before there is anything to verify.
    plan = ContextParallel(**{"seq_dim": 2, "head_dim": 1, "allow": ("*",), **style})
    where = "blocks.*.attention" if plan.qkv_indices is None else "blocks.*.attention.inner"
    parallelize_module(model, mesh, {where: plan})
    return model


def whole_batch(length: int = LENGTH, **entries: Any) -> dict[str, Any]:
    """Tokens and unshifted labels; other numbers of labels count on every rank."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (ROWS, length), generator=g)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, **entries}


def forward(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> tuple[Tensor, Tensor]:
    """Logits and shifted labels of this rank's share."""
    batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
    with handler.documents(batch):
        return model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]


def loss_fn(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """A right training step."""
    return handler.mean_loss(*forward(model, batch, handler))


def two_sequences(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """A right training step of two sequences of one length, which a layout by documents places differently."""
    first, second = ({**batch, "documents": boundaries} for boundaries in ([0, 5, LENGTH], [0, 9, 12, LENGTH]))
    return loss_fn(model, first, handler) + loss_fn(model, second, handler)


def shifted_after_sharding(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    batch = handler.get_batch_on_this_cp_rank(batch)
    logits = model(batch["input_ids"], batch["position_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def without_documents(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
    return handler.mean_loss(model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])


def mean_of_share(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    logits, labels = forward(model, batch, handler)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    return handler.mean_loss(*forward(model, batch, handler), gradients="sum")


def divided(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    return loss_fn(model, batch, handler) / handler.cp.size


def in_block(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """The step of a user of ``context_parallel``, with positions in a buffer."""
    ids, labels = batch["input_ids"], F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    places = torch.arange(ids.shape[1])[None].clone()
    with context_parallel(handler.mesh, buffers=[ids, labels, places], buffer_seq_dims=[1, 1, 1]) as inner:
        return inner.mean_loss(model(ids, places), labels)


def in_block_of_the_mesh(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """The same with a mesh of its own."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "head_tail")
    return in_block(model, batch, handler)


def undispatched(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    ids = batch["input_ids"]
    logits = model(ids, torch.arange(ids.shape[1])[None])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def other_layout(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    return loss_fn(model, batch, ContextParallelHandler(handler.mesh, "contiguous"))


def pooled(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """A head on the gathered sequence, whose loss is the same on every rank."""
    batch = handler.get_batch_on_this_cp_rank(batch)
    logits = model(batch["input_ids"], batch["position_ids"])
    return handler.combine(logits, 1).mean(1).pow(2).sum()


def failing(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    """A step that raises after it has left its traces everywhere: at once, or on one device only."""
    loss = loss_fn(model, batch, handler)
    loss.backward()
    model.new = model.calls = torch.ones(3)
    torch.rand(5)
    if model.fault == "fails" or handler.cp.size == 1:
        raise KeyError("the user's own mistake")
    return loss.detach()


def local_positions(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
    logits = model(batch["input_ids"], torch.arange(batch["input_ids"].shape[1])[None])
    return handler.mean_loss(logits, batch["shift_labels"])


def verification(fault: str = "") -> dict[str, Any]:
    """Arguments of verify, as ``hyper-cp verify`` takes them from a function."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {"model": styled(mesh, fault), "mesh": mesh, "batch": whole_batch(), "loss_fn": loss_fn}


def wrong_verification() -> dict[str, Any]:
    """The same for a model with a mistake."""
    return verification("cumsum")


def verification_on_npus() -> dict[str, Any]:
    """The same on a device that is made in Python."""
    mesh = init_device_mesh("npu", (2,), mesh_dim_names=("cp",))
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = styled(mesh, dtype=torch.float32).to("npu")
    batch = {name: x.to("npu") for name, x in whole_batch().items()}
    return {"model": model, "mesh": mesh, "batch": batch, "loss_fn": loss_fn}
