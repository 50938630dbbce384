"""The random steps of run.py, each with what one device computes in plain math."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
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
from hyper_cp.ops import attention, causal_conv1d, latent_attention, layout_of_mask, linear_recurrence
from tests.harness.oracle import attention_and_lse, plain_attention, positions, softcap, visible_pairs
from tests.harness.recurrence_oracle import convolve, recur

HEADS, DIM, VOCAB, LONGEST = 8, 8, 16, 72
BY_DOCUMENTS = ("per_document", "auto", "balanced")

Results = Iterator[tuple[str, Tensor, Tensor]]
"""``(name, value, expected value)``"""

# --------------------------------------------------------------------------- one device


def numbers(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the number of the document of every position, ``[rows, S]``."""
    found = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, bounds in enumerate(rows):
        for start in bounds[1:-1]:
            found[row, start:] += 1
    return found


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


class Leaves(list[Tensor]):
    """Tensors that want a gradient, and the names of their gradients."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = [*named]
        super().__init__(x for _, x in pairs)
        self.names = [name for name, _ in pairs]

    def plus(self, name: str, x: Tensor) -> Leaves:
        return Leaves(zip([*self.names, name], [*self, x], strict=True))


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

    def layout(self) -> str:
        return self.rng.choice(("contiguous", "head_tail", *BY_DOCUMENTS))

    def mask(self, batch: int, length: int, dtype: torch.dtype) -> Tensor:
        """Draw a mask, bool or added to the logits, which broadcasts in any dimension; some queries see nothing."""
        shape = [self.rng.choice((1, n)) for n in (batch, HEADS, length)]
        shape = [*shape[self.rng.choice((0, 0, 2)) :], length]
        seen = torch.rand(shape, generator=self.generator) < self.rng.choice((0.1, 0.6))
        return seen if self.maybe() else self.normal(*shape, dtype=dtype).masked_fill(~seen, -torch.inf)

    def slices(self, length: int) -> tuple[Tensor, list[Any]]:
        """Draw a mask of slices, as the pairs ``[S, S]`` that are visible and as slices."""
        i, j = torch.arange(length)[:, None], torch.arange(length)
        seen, found = torch.zeros(length, length, dtype=torch.bool), []
        for _ in range(self.rng.randint(1, 5)):
            (a, b), (c, d) = (sorted(self.rng.sample(range(length + 1), 2)) for _ in "qk")
            kind = self.rng.choice(("full", "causal", "inverse_causal", "bicausal"))
            part = (i >= a) & (i < b) & (j >= c) & (j < d)
            part &= (b - i <= d - j) if "causal" in kind and kind != "inverse_causal" else True  # from the last pair on
            part &= (i - a <= j - c) if kind in ("inverse_causal", "bicausal") else True
            seen, found = seen | part, [*found, ((a, b), (c, d), kind)]
        return seen, found

    def leaves(
        self, batch: int, kv_heads: int, length: int, dtype: torch.dtype, sinks: bool = True
    ) -> tuple[list[Tensor], Leaves]:
        """Draw q, k, v and perhaps sinks, and those of them that want a gradient."""
        dim, v_dim = self.rng.choice((DIM, DIM, 5)), self.rng.choice((DIM, DIM, 6))
        shapes = [(HEADS, length, dim), (kv_heads, length, dim), (kv_heads, length, v_dim)]
        whole = [self.normal(batch, *shape, dtype=dtype) for shape in shapes]
        whole += [self.normal(HEADS, dtype=dtype)] if sinks and self.maybe(0.3) else []
        wanted = self.rng.sample(range(len(whole)), self.rng.choice((len(whole),) * 3 + (1, 2)))
        named = [("dq", "dk", "dv", "gradient of sinks")[i] for i in sorted(wanted)]
        return whole, Leaves((name, whole[i].requires_grad_()) for name, i in zip(named, sorted(wanted), strict=True))

    def mode(self, ranks: int, kv_heads: int) -> dict[str, Any]:
        """Draw settings that ``ContextParallel`` and ``attention`` share."""
        rng, degree = self.rng, self.rng.choice([d for d in (1, 2, 4, 8) if ranks % d == 0])
        layout, exchange = self.layout(), rng.choice(("all_gather", "ring", "needed"))
        window = (
            (rng.choice((None, rng.randrange(24))), rng.choice((None, rng.randrange(24)))) if self.maybe() else None
        )
        groups = 2 if kv_heads % (2 * degree) == 0 and self.maybe() else 1
        return {
            "ulysses_degree": degree,
            "kv_exchange": exchange,
            "layout": layout,
            "load_balance": layout == "contiguous" and self.maybe(),
            "window": window,
            "head_groups": groups,
            "exchange_stages": "auto" if exchange == "ring" else rng.choice(("auto", 1, 2, 3)),
        }

    def documents(self, length: int, batch: int) -> list[list[int]] | None:
        """Draw boundaries of packed documents: none, one row for all, or one for each batch row."""
        if self.maybe(0.3):
            return None
        rows = 1 if self.maybe() else batch
        cuts = (self.rng.sample(range(1, length), self.rng.randrange(min(length, 9))) for _ in range(rows))
        return [[0, *sorted(row), length] for row in cuts]


def summed(tensors: Sequence[Tensor | None], like: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sums of gradients over the ranks, in one transfer."""
    given = [torch.zeros_like(y) if x is None else x for x, y in zip(tensors, like, strict=True)]
    flat = torch.cat([x.flatten() for x in given])
    dist.all_reduce(flat, group=group)
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in given]), given, strict=True)]


def call(draw: Draw) -> Results:
    """``ops.attention`` between ``dispatch`` and ``combine``, with all its options drawn jointly."""
    ranks, batch, length = draw.degree(), draw.rng.randint(1, 3), draw.rng.randint(1, LONGEST)
    mesh, kv_heads, causal = draw.family.cp(ranks), draw.rng.choice((1, 2, 4, 8)), draw.maybe(0.7)
    mode, dtype = draw.mode(ranks, kv_heads), draw.rng.choice((torch.float64, torch.float64, torch.float32))
    mask, slices = None, None
    if draw.maybe(0.5):  # a mask speaks of all positions, so there is no padding
        length, causal = length - length % (2 * ranks) + 2 * ranks, False
        mask, slices = (draw.mask(batch, length, dtype), None) if draw.maybe(0.7) else draw.slices(length)
    rows = draw.documents(length, batch)
    whole, leaves = draw.leaves(batch, kv_heads, length, dtype)
    grad = draw.normal(batch, HEADS, length, whole[2].shape[3], dtype=dtype)
    cap, scale = draw.rng.choice((None, None, 0.7)), draw.rng.choice((None, None, 0.3))
    keywords = {name: x for name, x in mode.items() if name not in ("ulysses_degree", "head_groups")}
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, mode["ulysses_degree"], **keywords))
    needed = mode["layout"] in BY_DOCUMENTS or not causal  # else they see padding
    with handler.documents(rows or ([0, length] if needed else None)) as table:
        q, k, v = (handler.dispatch(x, 2, pad_value=0) for x in whole[:3])
        if draw.maybe(0.3):  # they lie as [B, S, H, D] in memory
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        sinks, documents = whole[3] if whole[3:] else None, table if draw.maybe() else None
        options = {"attn_mask": mask} if slices is None else {"slices": slices}
        options |= {"is_causal": causal, "documents": documents, "enable_gqa": True, "scale": scale}
        local, lse = attention(q, k, v, mesh=mesh, softcap=cap, sinks=sinks, return_lse=True, **options, **mode)
        out, lse = (handler.combine(x, 2, length=length, gradients=None) for x in (local, lse.detach()))
        found = summed(torch.autograd.grad(out, leaves, grad), leaves, mesh.get_group())
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in whole]
    bias, seen = None, visible_pairs(length, causal, mode["window"], rows)
    if mask is not None:
        bias, seen = (mask.double(), seen) if mask.is_floating_point() else (None, seen & mask)
    score = {} if cap is None else {"score_mod": softcap(cap)}
    given = {"visible": seen, "bias": bias, "scale": scale, "sinks": exact[3] if sinks is not None else None}
    expected, exact_lse = attention_and_lse(*exact[:3], **given, **score)
    yield "output", out, expected
    some = exact_lse > -torch.inf
    yield "rows that see something", (lse > -torch.inf).double(), some.double()
    yield "log-sum-exp", lse.where(some, 0), exact_lse.where(some, 0)
    wanted = [x for x in exact if x.requires_grad]
    yield from zip(leaves.names, found, torch.autograd.grad(expected, wanted, grad.double()), strict=True)


def latents(draw: Draw) -> Results:
    """``ops.latent_attention``, whose keys and values one device makes of all latents."""
    ranks, batch, heads, rank = draw.degree(), draw.rng.randint(1, 2), draw.rng.choice((4, 8)), draw.rng.randint(1, 9)
    mesh, mode, length = draw.family.cp(ranks), draw.mode(ranks, heads), 2 * ranks * draw.rng.randint(1, 9)
    sizes, causal, cap = (
        [draw.rng.choice((3, 4)) for _ in range(3)],
        draw.maybe(0.7),
        draw.rng.choice((None, None, 0.7)),
    )
    part, rotary, value = sizes
    which = draw.rng.choice((None, True, False))
    mode["head_groups"] = mode["head_groups"] if which is False else 1
    rows, shared = draw.documents(length, batch), draw.rng.choice((1, heads))
    shapes = [(batch, heads, length, part + rotary), (batch, length, rank), (batch, shared, length, rotary)]
    shapes += [(heads * (part + value), rank)] + [(heads * (part + value),)] * draw.maybe()
    whole, grad = [draw.normal(*shape) for shape in shapes], draw.normal(batch, heads, length, value)
    names = ("dq", "dlatent", "drope", "dweight", "dbias")
    leaves = Leaves(zip(names, [x.requires_grad_() for x in whole], strict=False))
    keywords = {name: x for name, x in mode.items() if name not in ("ulysses_degree", "head_groups")}
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, mode["ulysses_degree"], **keywords))
    with handler.documents(rows or ([0, length] if mode["layout"] in BY_DOCUMENTS else None)):
        q, latent, rope = (handler.dispatch(x, dim) for x, dim in zip(whole, (2, 1, 2), strict=False))
        options = {"is_causal": causal, "softcap": cap, "latents": which}
        local = latent_attention(q, latent, rope, *whole[3:], mesh=mesh, **options, **mode)
        out = handler.combine(local, 2, gradients=None)
        found = summed(torch.autograd.grad(out, leaves, grad), leaves, mesh.get_group())
    exact = [x.detach().requires_grad_() for x in whole]
    made = F.linear(exact[1], *exact[3:]).unflatten(2, (heads, -1)).transpose(1, 2)
    key = torch.cat([made[..., :part], exact[2].expand(-1, heads, -1, -1)], -1)
    seen = visible_pairs(length, causal, mode["window"], rows)
    score = None if cap is None else softcap(cap)
    expected = plain_attention(exact[0], key, made[..., part:], visible=seen, score_mod=score)
    yield "output", out, expected
    yield from zip(leaves.names, found, torch.autograd.grad(expected, exact, grad), strict=True)


def flex(draw: Draw) -> Results:
    """A styled module that calls FlexAttention with functions of global positions."""
    ranks, batch, kv_heads = (
        draw.rng.choice(draw.family.degrees[1:]),
        draw.rng.randint(1, 3),
        draw.rng.choice((2, 4, 8)),
    )
    mesh, mode, length = draw.family.cp(ranks), draw.mode(ranks, kv_heads), 2 * ranks * draw.rng.randint(1, 9)
    mode |= {"window": mode["window"] if draw.maybe(0.3) else None}
    own = mode["head_groups"] > 1 or draw.maybe()
    rows = draw.documents(length, batch) if draw.maybe(0.3) else None
    rows = rows or ([[0, length]] if mode["layout"] in BY_DOCUMENTS else None)
    whole, leaves = draw.leaves(batch, kv_heads, length, torch.float64, sinks=False)
    grad, scale = draw.normal(batch, HEADS, length, whole[2].shape[3]), draw.rng.choice((None, None, 0.3))
    packed = numbers(draw.documents(length, batch) or [[0, length]], length).expand(batch, -1)
    table, prefix = draw.normal(HEADS, 11).requires_grad_(), torch.randint(length, (batch,), generator=draw.generator)
    masks = {
        "": (None, 1, 1),
        "causal": (lambda b, h, i, j: j <= i, 1, 1),
        "band": (lambda b, h, i, j: (i - j).abs() < 7, 1, 1),
        "packed": (lambda b, h, i, j: (packed[b, i] == packed[b, j]) & (j <= i), batch, 1),
        "prefix": (lambda b, h, i, j: (j <= i) | (j < prefix[b]), batch, 1),
        "strided": (lambda b, h, i, j: (j <= i) & ((i - j) % (h + 1) == 0), 1, HEADS),
        "nothing": (lambda b, h, i, j: (j < i - 2) & (b != 1), batch, HEADS),
    }
    scores: dict[str, Any] = {
        "": None,
        "alibi": lambda score, b, h, i, j: score - 2.0 ** -(h + 1.0) * (i - j).abs() * (b + 1),
        "relative": lambda score, b, h, i, j: score + table[h, (i - j).clamp(-5, 5) + 5],
        "softcap": lambda score, b, h, i, j: 2 * torch.tanh(score / 2),
    }
    (mask_mod, b, h), score_mod = masks[draw.rng.choice([*masks])], scores[draw.rng.choice([*scores])]
    size = draw.rng.choice((4, 5, 16, 128, (5, 4)))
    sizes = {"B": b, "H": h, "Q_LEN": length, "KV_LEN": length, "device": "cpu", "BLOCK_SIZE": size}
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, **sizes)
    if block_mask is not None and mode["layout"] == "head_tail" and rows is None and draw.maybe():
        seen = mask_mod(*positions(*whole[:2])).any()
        mode["layout"] = layout_of_mask(block_mask, chunks_per_rank=2) if seen else "head_tail"
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": True}
    style = ContextParallel(2, 1, mode.pop("ulysses_degree"), None if own else (0, 1, 2), **mode)
    handler = ContextParallelHandler(mesh, style)
    module, leaves = parallelize_module(Flex(options), mesh, style), leaves.plus("table", table)
    with handler.documents(rows):
        local = module(*(handler.dispatch(x, 2) for x in whole))
        out = handler.combine(local, 2, gradients=None)
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        found = summed(grads, leaves, mesh.get_group())
    exact = [x.detach().requires_grad_(x.requires_grad) for x in whole]
    seen = visible_pairs(length, False, mode["window"], rows)
    seen = seen if mask_mod is None else seen & mask_mod(*positions(*exact[:2]))
    expected, _ = attention_and_lse(*exact, visible=seen, scale=scale, score_mod=score_mod)
    wanted = [*(x for x in exact if x.requires_grad), table]
    yield "output", out, expected
    right = torch.autograd.grad(expected, wanted, grad, materialize_grads=True)
    yield from zip(leaves.names, found, right, strict=True)


class Flex(nn.Module):
    """Calls FlexAttention with functions that it keeps, as models do."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, **self.options)


def recurrence(draw: Draw) -> Results:
    """``linear_recurrence`` of every kind, with padding as one more document."""
    ranks, batch, length = draw.degree(), draw.rng.randint(1, 2), draw.rng.randint(1, LONGEST)
    mesh, layout, degrees = draw.family.cp(ranks), draw.layout(), [d for d in (1, 2, 4) if ranks % d == 0]
    heads, kept, size, v_size = HEADS // 2, draw.rng.choice((1, 2, 4)), draw.rng.randint(1, 4), draw.rng.randint(1, 4)
    rows, degree = draw.documents(length, batch), draw.rng.choice((1, 1, *degrees))
    q, k = draw.normal(batch, length, kept, size), F.normalize(draw.normal(batch, length, kept, size), dim=-1)
    shape = draw.rng.choice(((heads,), (batch, length, heads), (batch, length, heads, size)))
    decay = -draw.normal(*shape).square() * draw.rng.choice((0.1, 1.0, 30.0))
    given = [q, k, draw.normal(batch, length, heads, v_size), decay]
    given += [draw.normal(batch, length, heads).sigmoid()] if draw.maybe() else []
    grad, scale = draw.normal(batch, length, heads, v_size), draw.rng.choice((1.0, 0.4))
    leaves = Leaves(zip(("dq", "dk", "dv", "ddecay", "dbeta"), [x.requires_grad_() for x in given], strict=False))
    handler = ContextParallelHandler(mesh, layout)
    with handler.documents(rows or [0, length]) as table:
        local = [x if x.ndim == 1 else handler.dispatch(x, 1, pad_value=0) for x in given]
        options = {"scale": scale, "layout": layout, "ulysses_degree": degree}
        beta = local[4] if local[4:] else None
        out = linear_recurrence(*local[:4], beta, mesh=mesh, documents=table if draw.maybe() else None, **options)
        out = handler.combine(out, 1, length=length, gradients=None)
        found = summed(torch.autograd.grad(out, leaves, grad), leaves, mesh.get_group())
    exact = [x.detach().requires_grad_() for x in given]
    expected = recur(exact[0] * scale, *exact[1:4], exact[4] if exact[4:] else None, rows)
    yield "output", out, expected
    yield from zip(leaves.names, found, torch.autograd.grad(expected, exact, grad), strict=True)


def convolution(draw: Draw) -> Results:
    """``causal_conv1d`` of any width, also of more than a rank's share."""
    ranks, batch, length = draw.degree(), draw.rng.randint(1, 3), draw.rng.randint(1, LONGEST)
    mesh, layout, width, channels = draw.family.cp(ranks), draw.layout(), draw.rng.randint(1, 9), draw.rng.randint(1, 5)
    rows, activation = draw.documents(length, batch), draw.rng.choice((None, "silu"))
    given = [draw.normal(batch, channels, length), draw.normal(channels, width)]
    given += [draw.normal(channels)] if draw.maybe() else []
    leaves = Leaves(zip(("dx", "dweight", "dbias"), [x.requires_grad_() for x in given], strict=False))
    grad, handler = draw.normal(batch, channels, length), ContextParallelHandler(mesh, layout)
    with handler.documents(rows or [0, length]) as table:
        options = {"layout": layout, "activation": activation, "documents": table if draw.maybe() else None}
        out = causal_conv1d(handler.dispatch(given[0], 2, pad_value=0), *given[1:], mesh=mesh, **options)
        out = handler.combine(out, 2, length=length, gradients=None)
        found = summed(torch.autograd.grad(out, leaves, grad), leaves, mesh.get_group())
    exact = [x.detach().requires_grad_() for x in given]
    expected = convolve(*exact[:2], exact[2] if exact[2:] else None, rows)
    expected = expected if activation is None else F.silu(expected)
    yield "output", out, expected
    yield from zip(leaves.names, found, torch.autograd.grad(expected, exact, grad), strict=True)


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
    rows = draw.documents(length, batch)
    entries, packed = {"input_ids": tokens, "labels": labels}, numbers(rows or [[0, length]], length)
    seen = visible_pairs(length, True, mode["window"], rows)
    if rows is not None:
        ids = packed.expand(batch, -1)
        entries |= {"document_ids": ids} if draw.maybe() else {"cu_seqlens": rows[0] if len(rows) == 1 else rows}
    else:
        pieces = (torch.arange(length) >= torch.randint(length, (batch, 1), generator=draw.generator)).long()
        entries["attention_mask"] = pieces if draw.maybe() else 1 - pieces  # padding before or after the tokens
        seen = seen & (pieces[:, :, None] == pieces[:, None])[:, None]
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
    whole = reference(tokens, restarted(packed), lambda q, k, v: plain_attention(q, k, v, visible=seen))
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
    seen = visible_pairs(length, True, mode["window"], None)
    whole = reference(before, positions.clone(), lambda q, k, v: plain_attention(q, k, v, visible=seen))
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
        seen = visible_pairs(len(at), True, None, None)
        logits = reference(tokens[None], at, lambda q, k, v: plain_attention(q, k, v, visible=seen))  # noqa: B023
        expected = expected + F.cross_entropy(logits[0], labels, reduction="sum") / sum(lengths)
    yield from compare_training(model, reference, total, expected, everyone)


def batch_side(draw: Draw) -> Results:
    """Rolling, rotary embedding, positions and a weighted mean of a sharded tensor."""
    ranks, batch = draw.degree(), draw.rng.randint(1, 3)
    layout, mesh = draw.rng.choice(("contiguous", "head_tail", *BY_DOCUMENTS)), draw.family.cp(ranks)
    length = 2 * ranks * draw.rng.randint(1, LONGEST // (2 * ranks))
    rows = draw.documents(length, batch) or [[0, length]]
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
    "latents": (latents, 1),
    "flex": (flex, 2),
    "recurrence": (recurrence, 1),
    "convolution": (convolution, 1),
    "styled model": (training, 4),
    "context_parallel": (unchanged_model, 2),
    "dynamic degrees": (micro_batches, 1),
    "batch side": (batch_side, 1),
}
"""Every kind of step, and its weight among the others."""
