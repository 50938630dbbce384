"""The random steps of run.py, each with what one device computes in plain math."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    CostModel,
    DynamicContextParallel,
    MeshFamily,
    context_parallel,
    context_parallel_mesh,
)
from hyper_cp.ops import attention

HEADS, DIM, VOCAB, LONGEST = 8, 8, 16, 72
BY_DOCUMENTS = ("per_document", "auto", "balanced")

Results = Iterator[tuple[str, Tensor, Tensor]]
"""``(name, value, expected value)``"""

# --------------------------------------------------------------------------- one device, which shares no code


def one_device(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention ``[B, H, S, D]`` in plain math; ``seen`` broadcasts to ``[B, H, S, S]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more column, which has no value
        logits = torch.cat((logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def numbers(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the number of the document of every position, ``[rows, S]``."""
    found = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, bounds in enumerate(rows):
        for start in bounds[1:-1]:
            found[row, start:] += 1
    return found


def visible(length: int, causal: bool, window: Any, documents: Tensor | None) -> Tensor:
    """Return the pairs that a query sees, ``[B or 1, 1, S, S]``; ``documents`` as from :func:`numbers`."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = distance >= 0 if causal else torch.ones(length, length, dtype=torch.bool)
    left, right = window or (None, None)
    seen = seen & (distance <= (length if left is None else left)) & (-distance <= (length if right is None else right))
    return seen[None, None] if documents is None else (seen & (documents[:, :, None] == documents[:, None]))[:, None]


def restarted(documents: Tensor) -> Tensor:
    """Return positions that count from 0 in each document."""
    found = torch.zeros_like(documents)
    for p in range(1, documents.shape[1]):
        found[:, p] = torch.where(documents[:, p] == documents[:, p - 1], found[:, p - 1] + 1, 0)
    return found


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.qkv, self.out = nn.Linear(DIM, (HEADS + 2 * kv_heads) * DIM), nn.Linear(HEADS * DIM, DIM)
        self.inner = Attention()

    def forward(self, x: Tensor, attend: Callable[..., Tensor] | None = None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.kv_heads, self.kv_heads], 1)
        return x + self.out((attend or self.inner)(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A decoder, which knows nothing of context parallelism. ``attend`` replaces its attention."""

    def __init__(self, kv_heads: int, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * LONGEST, DIM)
        self.layers, self.head = nn.ModuleList(Layer(kv_heads) for _ in range(layers)), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any = None, recompute: bool = False) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, attend, use_reentrant=False) if recompute else layer(x, attend)
        return self.head(x)


# --------------------------------------------------------------------------- kinds of steps


@dataclass
class Draw:
    """A random step: every rank draws the same."""

    family: MeshFamily
    rng: random.Random
    generator: torch.Generator

    def maybe(self, probability: float = 0.5) -> bool:
        return self.rng.random() < probability

    def degree(self) -> int:
        return self.rng.choice(self.family.degrees[1:] * 3 + self.family.degrees)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def integers(self, *shape: int) -> Tensor:
        return torch.randint(VOCAB, shape, generator=self.generator)

    def mode(self, ranks: int, kv_heads: int) -> dict[str, Any]:
        """Draw settings that ``ContextParallel`` and ``attention`` share."""
        rng, degree = self.rng, self.rng.choice([d for d in (1, 2, 4, 8) if ranks % d == 0])
        layout = rng.choice(("contiguous", "head_tail", *BY_DOCUMENTS))
        window = (
            (rng.choice((None, rng.randrange(24))), rng.choice((None, rng.randrange(24)))) if self.maybe() else None
        )
        groups = 2 if kv_heads % (2 * degree) == 0 and self.maybe() else 1
        return {
            "ulysses_degree": degree,
            "kv_exchange": rng.choice(("all_gather", "ring", "needed")),
            "layout": layout,
            "load_balance": layout == "contiguous" and self.maybe(),
            "window": window,
            "head_groups": groups,
        }

    def documents(self, length: int, batch: int, layout: str) -> list[list[int]] | None:
        """Draw boundaries of packed documents: none, one row for all, or one for each batch row."""
        if self.maybe(0.3):
            return None
        rows = 1 if layout == "per_document" or self.maybe() else batch
        cuts = (self.rng.sample(range(1, length), self.rng.randrange(min(length, 9))) for _ in range(rows))
        return [[0, *sorted(row), length] for row in cuts]


def summed(tensors: Sequence[Tensor | None], like: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sums of gradients over the ranks, in one transfer."""
    given = [torch.zeros_like(y) if x is None else x for x, y in zip(tensors, like, strict=True)]
    flat = torch.cat([x.flatten() for x in given])
    dist.all_reduce(flat, group=group)
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in given]), given, strict=True)]


def call(draw: Draw) -> Results:
    """``ops.attention`` between ``dispatch`` and ``combine``."""
    ranks, batch, length = draw.degree(), draw.rng.randint(1, 3), draw.rng.randint(1, LONGEST)
    mesh, kv_heads, causal = draw.family.cp(ranks), draw.rng.choice((1, 2, 4, 8)), draw.maybe(0.7)
    mode, dtype = draw.mode(ranks, kv_heads), draw.rng.choice((torch.float64, torch.float64, torch.float32))
    masked = not causal and draw.maybe()
    length = length - length % (2 * ranks) + 2 * ranks if masked else length
    rows = draw.documents(length, batch, mode["layout"])
    seen = visible(length, causal, mode["window"], None if rows is None else numbers(rows, length))
    mask = None
    if masked:  # every query sees itself
        shape = (draw.rng.choice((1, batch)), draw.rng.choice((1, HEADS)), length, length)
        mask = (torch.rand(shape, generator=draw.generator) < 0.6) | torch.eye(length, dtype=torch.bool)
        seen = seen & mask
    whole = [draw.normal(batch, h, length, DIM, dtype=dtype).requires_grad_() for h in (HEADS, kv_heads, kv_heads)]
    grad = draw.normal(batch, HEADS, length, DIM, dtype=dtype)
    sinks = draw.normal(HEADS, dtype=dtype).requires_grad_() if draw.maybe(0.3) else None
    softcap = draw.rng.choice((None, None, 0.7))
    keywords = {name: x for name, x in mode.items() if name not in ("ulysses_degree", "head_groups")}
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, mode["ulysses_degree"], **keywords))
    needed = mode["layout"] in BY_DOCUMENTS or not causal
    with handler.documents(rows or ([0, length] if needed else None)) as table:
        q, k, v = (handler.dispatch(x, 2, pad_value=0) for x in whole)
        options = {"is_causal": causal, "attn_mask": mask, "documents": table, "enable_gqa": True}
        local = attention(q, k, v, mesh=mesh, softcap=softcap, sinks=sinks, **options, **mode)
        out = handler.combine(local, 2, length=length)
        out.backward(grad)
    whole += [] if sinks is None else [sinks]
    exact = [x.detach().double().requires_grad_() for x in whole]
    expected = one_device(*exact[:3], seen, softcap, *exact[3:])
    expected.backward(grad.double())
    yield "output", out, expected
    grads = summed([x.grad for x in whole], whole, mesh.get_group())
    yield from zip(("dq", "dk", "dv", "gradient of sinks"), grads, (x.grad for x in exact), strict=False)


def compare_training(model: nn.Module, reference: nn.Module, loss: Tensor, expected: Tensor, group: Any) -> Results:
    """The loss and the gradients of all parameters, which are sums over a group."""
    expected.backward()
    yield "loss", loss, expected
    parameters = [*model.parameters()]
    grads = summed([p.grad for p in parameters], parameters, group)
    for (name, p), grad in zip(reference.named_parameters(), grads, strict=True):
        yield f"gradient of {name}", grad, torch.zeros_like(p) if p.grad is None else p.grad


def models(draw: Draw, kv_heads: int) -> tuple[Model, Model]:
    with torch.random.fork_rng([]):
        torch.manual_seed(draw.rng.randrange(2**31))
        model = Model(kv_heads, draw.rng.choice((1, 1, 2))).double()
    return model, copy.deepcopy(model)


def training(draw: Draw) -> Results:
    """A styled model on a batch with documents or padding, perhaps moved to another degree for this step."""
    ranks, swap, recompute = draw.degree(), draw.maybe(0.3), draw.maybe(0.3)
    kv_heads, batch, length = draw.rng.choice((1, 2, 4, 8)), draw.rng.randint(1, 2), draw.rng.randint(2, LONGEST)
    mode, (model, reference) = draw.mode(ranks, kv_heads), models(draw, kv_heads)
    if swap:
        mode["head_groups"] = 1
    block = mode["head_groups"] > 1 or draw.maybe()
    degree = mode.pop("ulysses_degree")
    style = ContextParallel(2, 1, degree, None if block else (0, 1, 2), **mode)
    parallelize_module(model, draw.family.cp(ranks), {"layers.*" if block else "layers.*.inner": style})
    tokens, labels = draw.integers(batch, length), draw.integers(batch, length)
    labels[torch.rand(batch, length, generator=draw.generator) < 0.2] = -100
    rows = draw.documents(length, batch, mode["layout"])
    entries, packed = {"input_ids": tokens, "labels": labels}, numbers(rows or [[0, length]], length)
    pieces = packed
    if rows is not None:
        ids = packed.expand(batch, -1)
        entries |= {"document_ids": ids} if draw.maybe() else {"cu_seqlens": rows[0] if len(rows) == 1 else rows}
    elif mode["layout"] != "per_document":
        pieces = (torch.arange(length) >= torch.randint(length, (batch, 1), generator=draw.generator)).long()
        entries["attention_mask"] = pieces if draw.maybe() else 1 - pieces  # padding before or after the tokens
    other = draw.family.cp(draw.rng.choice(draw.family.degrees)) if swap else draw.family.cp(ranks)
    moved = context_parallel_mesh(model, other) if swap else nullcontext(ContextParallelHandler(other, style))
    reduction = draw.rng.choice(("mean", "sum"))
    with moved as handler:
        local = handler.get_batch_on_this_cp_rank(entries, shift_labels=True)
        with handler.documents(local):
            logits = model(local["input_ids"], local["position_ids"], None, recompute)
            loss = handler.mean_loss(logits, local["shift_labels"], gradients=reduction)
            (loss / (other.size() if reduction == "mean" else 1)).backward()
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = torch.where(packed[:, 1:] == packed[:, :-1], labels[:, 1:], -100)
    seen = visible(length, True, mode["window"], pieces)
    whole = reference(tokens, restarted(packed), lambda q, k, v: one_device(q, k, v, seen))
    expected = F.cross_entropy(whole.flatten(0, 1), shifted.flatten(), reduction="sum") / max(1, (shifted >= 0).sum())
    loss = loss * (1 if loss.requires_grad else 0)
    yield from compare_training(model, reference, loss, expected, other.get_group())


def unchanged_model(draw: Draw) -> Results:
    """The ``context_parallel`` block around a model without styles."""
    ranks, kv_heads = draw.degree(), draw.rng.choice((1, 2, 4, 8))
    mesh, mode, (model, reference) = draw.family.cp(ranks), draw.mode(ranks, kv_heads), models(draw, kv_heads)
    mode["layout"] = "contiguous" if mode["load_balance"] else draw.rng.choice(("contiguous", "head_tail"))
    length = 2 * ranks * draw.rng.randint(1, LONGEST // (2 * ranks))
    tokens, labels, positions = draw.integers(2, length), draw.integers(2, length), torch.arange(length)
    before = tokens.clone()
    seen = visible(length, True, mode["window"], None)
    whole = reference(before, positions.clone(), lambda q, k, v: one_device(q, k, v, seen))
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten().clone())
    buffers = {"buffers": [tokens, positions, labels], "buffer_seq_dims": [1, 0, 1]}
    with context_parallel(mesh, **buffers, no_restore_buffers={labels}, **mode) as handler:
        loss = handler.mean_loss(model(tokens, positions), labels, gradients="sum")
        loss.backward()
    yield "restored buffer", tokens.double(), before.double()
    yield from compare_training(model, reference, loss, expected, mesh.get_group())


def micro_batches(draw: Draw) -> Results:
    """A degree per micro-batch."""
    kv_heads, layout = draw.rng.choice((2, 8)), draw.rng.choice(("contiguous", "head_tail"))
    budget, cost = LONGEST // draw.rng.choice((2, 4)), CostModel(1.0, draw.rng.choice((0.01, 0.1)), exchange=1.0)
    scheduler = DynamicContextParallel(draw.family, budget, cost, layout=layout)
    lengths = [draw.rng.randint(1, LONGEST // draw.rng.choice((1, 8))) for _ in range(draw.rng.randint(1, 5))]
    samples = [(draw.integers(n), draw.integers(n), torch.arange(n)) for n in lengths]
    exchange, (model, reference) = draw.rng.choice(("all_gather", "ring", "needed")), models(draw, kv_heads)
    total = torch.zeros((), dtype=torch.float64)
    for m in scheduler.plan(lengths).of_rank(draw.family.rank):
        mesh, whole = (
            draw.family.cp(m.degree),
            [torch.cat(x) for x in zip(*(samples[i] for i in m.samples), strict=True)],
        )
        handler = ContextParallelHandler(mesh, layout)
        tokens, labels, at = (
            handler.dispatch(x, 0, pad_value=p)[None] for x, p in zip(whole, (0, -100, 0), strict=True)
        )
        settings = {"mesh": mesh, "documents": m.documents, "layout": layout, "kv_exchange": exchange}
        attend = functools.partial(attention, is_causal=True, enable_gqa=True, **settings)
        logits = model(tokens, at, attend)
        loss = F.cross_entropy(logits[0], labels[0], reduction="sum") / sum(lengths)
        loss.backward()
        total += loss.detach()
    everyone = draw.family.dp(1).get_group()
    dist.all_reduce(total, group=everyone)
    expected = torch.zeros((), dtype=torch.float64)
    for tokens, labels, at in samples:
        seen = visible(len(at), True, None, None)
        logits = reference(tokens[None], at, lambda q, k, v: one_device(q, k, v, seen))  # noqa: B023
        expected = expected + F.cross_entropy(logits[0], labels, reduction="sum") / sum(lengths)
    yield from compare_training(model, reference, total, expected, everyone)


def batch_side(draw: Draw) -> Results:
    """Rolling, rotary embedding, positions and a weighted mean of a sharded tensor."""
    ranks, batch = draw.degree(), draw.rng.randint(1, 3)
    layout, mesh = draw.rng.choice(("contiguous", "head_tail", *BY_DOCUMENTS)), draw.family.cp(ranks)
    length = 2 * ranks * draw.rng.randint(1, LONGEST // (2 * ranks))
    rows = draw.documents(length, batch, layout) or [[0, length]]
    packed, shift = numbers(rows, length), draw.rng.randint(-length - 1, length + 1)
    x, weights = draw.normal(batch, length, 2, DIM), draw.normal(batch, length).abs()
    angles, rolled = draw.normal(length, DIM // 2).repeat(1, 2), torch.zeros_like(x)
    for p in range(max(0, shift), min(length, length + shift)):
        same = packed[:, p] == packed[:, p - shift]
        rolled[:, p] = torch.where(same.view(-1, 1, 1), x[:, p - shift], 0.0)
    turned = angles[restarted(packed)][:, :, None]
    half = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    handler = ContextParallelHandler(mesh, layout)
    with handler.documents(rows):
        local = handler.dispatch(x)
        yield "combined", handler.combine(local), x
        yield "rolled", handler.combine(handler.roll_tensor(local, shift, 1)[0]), rolled
        rotated = handler.combine(handler.apply_rotary_pos_emb(local, angles))
        yield "rotated", rotated, x * turned.cos() + half * turned.sin()
        share = handler.dispatch(weights)
        found = handler.mean_loss(local.sum((2, 3)), mask=share)
        yield "weighted mean", found, (x.sum((2, 3)) * weights).sum() / weights.sum()


KINDS: dict[str, tuple[Callable[[Draw], Results], int]] = {
    "attention": (call, 4),
    "styled model": (training, 4),
    "context_parallel": (unchanged_model, 2),
    "dynamic degrees": (micro_batches, 1),
    "batch side": (batch_side, 1),
}
"""Every kind of step, and its weight among the others."""
