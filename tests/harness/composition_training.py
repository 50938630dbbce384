"""Shared by the tests of composition: training beside one device, and models for tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import checkpoint

from hyper_cp.cli.demo_model import Attention, Block, Llama, LlamaConfig, join_heads, rope, rotate, split_heads
from tests.harness.oracle import absolute_error, plain_attention, relative_error, visible_pairs

ROWS, LENGTH, STEPS = 4, 32, 3
IGNORED = [3, 9, 15, 21]  # labels at the start of every row that do not count: every rank has another number
COUNT = ROWS * LENGTH - sum(IGNORED)
CONFIG = LlamaConfig(vocab=64, dim=32, layers=2, heads=8, kv_heads=4, hidden=48)
DOCS = Path(__file__).parents[2] / "docs" / "guide" / "composition.md"


def llama() -> Llama:
    """The same weights on every rank and in every call."""
    torch.manual_seed(0)
    return Llama(CONFIG)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Global tokens and labels ``[ROWS, LENGTH]``."""
    text = torch.randint(CONFIG.vocab, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    for row, ignored in enumerate(IGNORED):
        labels[row, :ignored] = -100
    return tokens, labels


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over tokens; a mean is this over the global number."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, foreach=False)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module|module)\.", "", name)


@dataclass
class Record:
    """Per step: the loss, and the gradient of every parameter (by name)."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, loss: Tensor, model: nn.Module) -> None:
        self.losses.append(loss.item())
        named = {plain_name(name): p.grad for name, p in model.named_parameters()}
        self.grads.append({name: whole(g).detach().clone() for name, g in named.items() if g is not None})

    def part(self, steps: range) -> Record:
        return Record([self.losses[i] for i in steps], [self.grads[i] for i in steps])

    def error(self, expected: Record, some: bool = False) -> float:
        """The worst relative error of any step's loss or gradient. ``some``: this rank has not all parameters."""
        errors = [absolute_error(torch.tensor(self.losses) / torch.tensor(expected.losses), torch.tensor(1.0))]
        for mine, theirs in zip(self.grads, expected.grads, strict=True):
            assert mine.keys() == theirs.keys() or (some and mine)
            errors += [relative_error(grad, theirs[name]) for name, grad in mine.items()]
        return max(errors)


@cache
def one_device(
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    clip: float | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> Record:
    """Plain training of whole batches, once in a process for the same arguments.

    ``clip``: the norm to which gradients are cut (it must do something). ``before`` is called before each step.
    """
    model, record = prepare(llama()), Record()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        tokens, labels = batch(step)
        before(model, step)
        with context():
            loss = token_losses(model(tokens, torch.arange(LENGTH)), labels) / COUNT
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        record.add(loss.detach(), model)
        optimizer.step()
    return record


def example(title: str, *edits: tuple[str, str]) -> str:
    """A code block of docs/guide/composition.md, with edits (regular expression, replacement), each of which fits."""
    (code,) = re.findall(rf"```python {re.escape(title)}\n(.*?)```", DOCS.read_text(), re.S)
    for pattern, replacement in edits:
        code, count = re.subn(pattern, lambda _, to=replacement: to, code, flags=re.S)  # type: ignore[misc]
        assert count == 1, (title, pattern)
    return code


def setup(title: str, *edits: tuple[str, str], model: nn.Module | None = None, **names: Any) -> dict[str, Any]:
    """Run an example on a fresh model; the names it leaves."""
    names = {"model": model or llama(), "backend": "aot_eager", "count": COUNT, "length": LENGTH, **names}
    exec(example("start"), names)
    exec(example(title, *edits), names)
    names["optimizer"] = sgd(names["model"].parameters())
    return names


def train(names: dict[str, Any], steps: range = range(STEPS)) -> Record:
    """Train what an example has set up, on this rank's rows of the batches."""
    record, mesh, optimizer, rows = Record(), names["mesh"], names["optimizer"], slice(None)
    if "dp" in mesh.mesh_dim_names:
        share = ROWS // mesh["dp"].size()
        rows = slice(mesh["dp"].get_local_rank() * share, (mesh["dp"].get_local_rank() + 1) * share)
    for step in steps:
        tokens, labels = (x[rows] for x in batch(step))
        optimizer.zero_grad()
        record.add(names["step"](tokens, labels).detach(), names["model"])  # the same loss on every rank
        if "scaler" in names:
            names["scaler"].step(optimizer)
            names["scaler"].update()
        else:
            optimizer.step()
    return record


# --------------------------------------------------------------------------- tensor parallelism


def tp_plan(local: bool = True, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Megatron's tensor parallelism of the demo's Llama. ``local``: wq, wk, wv return local tensors."""
    plan: dict[str, ParallelStyle] = {
        **{f"layers.*.attention.{w}": ColwiseParallel(use_local_output=local) for w in ("wq", "wk", "wv")},
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.ffn.w1": ColwiseParallel(),
        "layers.*.ffn.w3": ColwiseParallel(),
        "layers.*.ffn.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    if not sequence_parallel:
        return plan
    gathered = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
    return {
        **plan,
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gathered),
        "layers.*.ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class DTensorAttention(Attention):
    """The demo's attention for projections that return DTensors: RoPE's tables have to be DTensors then."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        cos, sin = (DTensor.from_local(c, q.device_mesh, [Replicate()], run_check=False) for c in (cos, sin))
        out = self.inner(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(join_heads(out))


class ComposedAttention(Attention):
    """Hands q, k, v over as DTensors of a cp x tp mesh, and expects that of the output."""

    mesh: DeviceMesh

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        placements = [Shard(2), Shard(1)]
        given = (DTensor.from_local(y, self.mesh, placements) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        out = self.inner(*given)
        assert isinstance(out, DTensor) and out.device_mesh == self.mesh and list(out.placements) == placements
        return self.wo(join_heads(out.to_local()))


def with_attention(kind: type[Attention], **attributes: Any) -> Llama:
    model = llama()
    for layer in model.layers:
        layer.attention.__class__ = kind
        for name, value in attributes.items():
            setattr(layer.attention, name, value)
    return model


# --------------------------------------------------------------------------- packed documents, pipelines


def packed_documents(step: int) -> Tensor:
    """Cumulative lengths ``[ROWS, 4]`` of a batch: every row has other documents than its neighbours."""
    cuts = [[0, 3 + 5 * row + step, 17 + 3 * row, LENGTH] for row in range(ROWS)]
    return torch.tensor(cuts)


class MaskedAttention(nn.Module):
    """Attention within documents, written out: the oracle's inner attention. ``visible``: [B, 1, S, S]."""

    visible: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, visible=self.visible)


def masked(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.attention.inner = MaskedAttention()
    return model


def mask_documents(model: nn.Module, step: int) -> None:
    for layer in model.layers:
        layer.attention.inner.visible = visible_pairs(LENGTH, True, None, packed_documents(step).tolist())


def one_device_packed() -> Record:
    """Plain training on batches of packed documents."""
    return one_device(prepare=masked, before=mask_documents)


class Stage(nn.Module):
    """Half of the demo's Llama, whose blocks are checkpointed and told their documents."""

    def __init__(self, model: Llama, index: int, positions: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): model.layers[index]})
        self.cos, self.sin = rope(positions, model.config)
        self.embedding = model.embedding if index == 0 else None
        self.norm, self.output = (model.norm, model.output) if index == 1 else (None, None)

    def block(self, layer: Block, x: Tensor, documents: Tensor) -> Tensor:
        attention = layer.attention
        normed = layer.attention_norm(x)
        q, k, v = (split_heads(w(normed), attention.head_dim) for w in (attention.wq, attention.wk, attention.wv))
        q, k = (rotate(y, self.cos, self.sin) for y in (q, k))
        out = attention.inner(q, k, v, documents=documents)
        x = x + attention.wo(join_heads(out))
        return x + layer.ffn(layer.ffn_norm(x))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = checkpoint(self.block, layer, x, documents, use_reentrant=False)
        return x if self.output is None else self.output(self.norm(x))
