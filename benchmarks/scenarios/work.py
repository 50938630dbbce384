"""The scenarios: for each the inputs, which are the same on every rank, and the answer of one device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.cli.diagnosis.findings import written_out

LINK = 400.0
"""The rate of a slow link in Mbit/s."""

VOCABULARY, CHUNKS = 8192, 16
"""Classes of the loss, and the parts into which a rank's tokens are divided by libraries that can do so."""

LATENT = {"rank": 512, "rotary": 64, "plain": 128, "value": 128}
"""The head shapes of DeepSeek V2 Lite."""

PADDED = "odd"


class Inputs(NamedTuple):
    """The tensors that a step reads and has gradients for, and the gradient of its output."""

    names: tuple[str, ...]
    sharded: list[Tensor]
    """``[B, H, S, D]``; a rank has some positions."""
    weights: list[Tensor]
    """The same on every rank; a gradient is a rank's share of a sum."""
    dout: Tensor


@dataclass(frozen=True)
class Scenario:
    """One kind of work on ``world`` ranks with one thread each.

    Attributes:
        kind: ``"attention"``, ``"latents"`` (multi-head latent attention), ``"selected"`` (each query sees ``topk``
            keys that are given) or ``"loss"`` (an MLP, the logits and the loss). Attention is causal.
        window: the number of keys that a query sees, its own among them.
        packed: documents of log-normal lengths are packed into the sequence.
        rows: the tokens of each sequence of the batch, which are padded to ``length``.
        per_host: adjacent ranks of a host; what they send to each other is not limited.
        rates: of links, in Mbit/s; None: without a limit.
        modes: named modes of this library.
    """

    name: str
    title: str
    length: int
    modes: tuple[str, ...]
    kind: str = "attention"
    world: int = 2
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    window: int | None = None
    packed: bool = False
    rows: tuple[int, ...] = ()
    topk: int = 0
    per_host: int = 1
    rates: tuple[float | None, ...] = (None, LINK)
    rounds: int = 5

    def resized(self, length: int) -> Scenario:
        """Return the same scenario with about this length, in proportion."""
        parts = 2 * self.world
        length = max(length // (32 * parts), 1) * 32 * parts
        rows = tuple(row * length // self.length - (row * length // self.length + 1) % 2 for row in self.rows)
        return replace(
            self,
            length=length,
            window=None if self.window is None else max(self.window * length // self.length, 2),
            topk=self.topk * length // self.length,
            rows=rows,
        )

    @property
    def batch(self) -> int:
        return max(len(self.rows), 1)

    @property
    def grouped(self) -> bool:
        return self.heads != self.kv_heads

    @cached_property
    def documents(self) -> list[list[int]] | None:
        """Cumulative lengths of the documents of each row; what is padded is one of them."""
        if self.rows:
            return [[0, row, self.length] for row in self.rows]
        if not self.packed:
            return None
        draw, ends = random.Random(0), [0]
        while ends[-1] < self.length:
            size = max(round(self.length / 8 * draw.lognormvariate(-0.5, 1.0)), 1)
            ends.append(min(ends[-1] + size, self.length))
        return [ends]

    def valid(self) -> Tensor:
        """Return 1 for tokens and 0 for padding, ``[B, 1, S, 1]``."""
        rows = torch.tensor(self.rows or (self.length,)).view(-1, 1, 1, 1)
        return (torch.arange(self.length).view(1, 1, -1, 1) < rows).float()

    def selected(self, at: Tensor) -> Tensor:
        """Return the keys that queries at these positions see, spread over all before them: ``[1, 1, len(at), topk]``,
        -1 where there are fewer."""
        turn = torch.rand(self.length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[at, None]
        ranks = torch.arange(self.topk, dtype=torch.float64)
        few = torch.where(ranks <= at[:, None], ranks, -1.0)
        many = ((ranks + turn) * (at[:, None] + 1) / self.topk).floor()
        return torch.where(at[:, None] < self.topk, few, many).to(torch.int32)[None, None]

    def visible(self, at: Tensor | None = None) -> Tensor:
        """Return the pairs of queries at these positions (all) and all keys that see each other, ``[B|1, 1, n, S]``."""
        keys = torch.arange(self.length)
        at = keys if at is None else at
        if self.kind == "selected":
            chosen = self.selected(at).long()
            seen = torch.zeros(1, 1, len(at), self.length + 1, dtype=torch.bool)
            return seen.scatter_(-1, torch.where(chosen < 0, self.length, chosen), True)[..., :-1].contiguous()
        seen = keys <= at[:, None]
        if self.window is not None:
            seen &= at[:, None] - keys < self.window
        if self.documents is None:
            return seen[None, None]
        number = torch.stack([torch.bucketize(keys, torch.tensor(ends[1:]), right=True) for ends in self.documents])
        return (seen & (number[:, at, None] == number[:, None, :]))[:, None]

    def inputs(self) -> Inputs:
        """Make the inputs in fp32, attention's in the memory order ``[B, S, H, D]`` of models."""
        numbers = torch.Generator().manual_seed(self.length)

        def one(heads: int, dim: int) -> Tensor:
            return torch.randn(self.batch, self.length, heads, dim, generator=numbers).transpose(1, 2)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=numbers) / columns**0.5

        if self.kind == "loss":
            wide, names = 4 * self.dim, ("x", "gate", "up", "down", "head")
            weights = [weight(wide, self.dim), weight(wide, self.dim), weight(self.dim, wide)]
            return Inputs(names, [one(1, self.dim)], [*weights, weight(VOCABULARY, self.dim)], torch.tensor(1.0))
        if self.kind == "latents":
            plain, value = LATENT["plain"], LATENT["value"]
            q, latent = one(self.heads, plain + LATENT["rotary"]), one(1, LATENT["rank"])
            expand = weight(self.heads * (plain + value), LATENT["rank"])
            given = [q, latent, one(1, LATENT["rotary"])]
            return Inputs(("q", "latent", "rope", "weight"), given, [expand], one(self.heads, value))
        given = [one(heads, self.dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        return Inputs(("q", "k", "v"), given, [], one(self.heads, self.dim) * self.valid())

    def labels(self) -> Tensor:
        """Return the classes of all tokens, ``[1, S]``."""
        return torch.randint(VOCABULARY, (1, self.length), generator=torch.Generator().manual_seed(2))


def heads_of_latents(heads: int, latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Make the keys and values of all heads."""
    both = F.linear(latent[:, 0], weight).unflatten(2, (heads, -1)).transpose(1, 2)
    keys, values = both.split([LATENT["plain"], LATENT["value"]], -1)
    return torch.cat([keys, rope.expand(-1, heads, -1, -1)], -1), values


def widened(q: Tensor, v: Tensor) -> Tensor:
    """Return values as wide as queries, as kernels want them."""
    return F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def answer(work: Scenario, exact: bool) -> list[Tensor]:
    """Return the output and all gradients of one device: written out in fp64, or in fp32 with a mask of all pairs."""
    given = work.inputs()
    leaves = [(x.double() if exact else x).requires_grad_() for x in (*given.sharded, *given.weights)]
    if work.kind == "loss":
        x, *weights, head = leaves
        logits = F.linear(mlp(x[:, 0], *weights), head)
        out = F.cross_entropy(logits.flatten(0, 1), work.labels().flatten())
    else:
        q, k, v = leaves if work.kind != "latents" else (leaves[0], *heads_of_latents(work.heads, *leaves[1:]))
        visible = work.visible()
        if exact:
            out, _ = written_out(q, k, v, visible, q.shape[-1] ** -0.5)
        else:
            wide: Any = widened(q, v)
            out = F.scaled_dot_product_attention(q, k, wide, attn_mask=visible, enable_gqa=work.grouped)
            out = out[..., : v.shape[-1]]
    grads = torch.autograd.grad(out, leaves, given.dout.to(out.dtype))
    return [out.detach() * (1 if work.kind == "loss" else work.valid()), *grads]


def blocks(work: Scenario, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend all of the sequence with some of the heads on this rank, as a user would write it for causal work with
    ``scaled_dot_product_attention``: document by document, or a window in blocks of queries."""
    attend, gqa, width = F.scaled_dot_product_attention, q.shape[1] != k.shape[1], v.shape[-1]
    v = widened(q, v)
    if work.window is not None:
        parts, size = [], max(work.window, 128)
        for start in range(0, work.length, size):
            at, first = torch.arange(start, min(start + size, work.length)), max(start - work.window + 1, 0)
            keys = torch.arange(first, int(at[-1]) + 1)
            seen = (keys <= at[:, None]) & (at[:, None] - keys < work.window)
            part = k[:, :, first : len(keys) + first], v[:, :, first : len(keys) + first]
            parts.append(attend(q[:, :, start : start + size], *part, attn_mask=seen, enable_gqa=gqa))
        return torch.cat(parts, 2)
    if work.packed and work.documents is not None:
        sizes = [b - a for a, b in pairwise(work.documents[0])]
        each = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), strict=True)
        return torch.cat([attend(a, b, c, is_causal=True, enable_gqa=gqa) for a, b, c in each], 2)
    return attend(q, k, v, is_causal=True, enable_gqa=gqa)[..., :width]


SELECTED = Scenario(
    "selected",
    "512 selected keys of 16K, four query heads on two key/value heads",
    16384,
    ("all-gather, contiguous",),
    kind="selected",
    heads=4,
    kv_heads=2,
    topk=512,
    dim=32,
    rates=(None,),
    rounds=2,
)

SCENARIOS = [
    Scenario(
        "packed",
        "packed documents of log-normal lengths",
        4096,
        ("needed, balanced", "ring, per_document", "Ulysses"),
        packed=True,
        rounds=3,
    ),
    Scenario(
        "window",
        "a sliding window of 1/32 of the length",
        4096,
        ("needed, contiguous", "Ulysses"),
        window=128,
        rounds=3,
    ),
    Scenario(
        "latents",
        "latent attention (16 heads of DeepSeek V2 Lite)",
        2048,
        ("ring, head_tail", "all-gather, head_tail", "Ulysses"),
        kind="latents",
        heads=16,
        kv_heads=16,
        rates=(LINK,),
        rounds=3,
    ),
    Scenario(
        "hosts",
        "two hosts of two ranks with a slow link each",
        4096,
        ("hybrid of 2, ring, head_tail", "double ring, head_tail", "Ulysses"),
        world=4,
        per_host=2,
        rates=(LINK,),
        rounds=3,
    ),
    Scenario(
        "grouped",
        "two key/value heads on four ranks",
        4096,
        ("all-gather, head_tail", "hybrid of 2, ring, head_tail", "Ulysses"),
        world=4,
        kv_heads=2,
        rounds=3,
    ),
    SELECTED,
    replace(
        SELECTED,
        name="selected_mha",
        title="512 selected keys of 16K, two heads with keys of their own",
        heads=2,
        kv_heads=2,
    ),
    Scenario(
        PADDED,
        "two sequences of odd lengths (4,095 and 2,371) with padding",
        4096,
        ("all-gather, head_tail", "ring, head_tail", "Ulysses"),
        rows=(4095, 2371),
        rates=(None,),
        rounds=3,
    ),
    Scenario(
        "loss",
        "an MLP, logits and the loss of a long sequence",
        16384,
        ("contiguous",),
        kind="loss",
        dim=256,
        rates=(None,),
        rounds=2,
    ),
]
