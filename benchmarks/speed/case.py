"""The problem that all contenders of a run share: its inputs, the shares of ranks, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BARS = {"float32": 1e-5, "bfloat16": 3e-2}
"""The largest error against fp64, relative to a tensor's largest element, that a contender may have."""


@dataclass(frozen=True)
class Problem:
    """Attention of one shape under one mask, in one dtype, on ``world`` ranks with one thread each.

    Attributes:
        length: of the whole sequence.
        mask: ``"causal"``, ``"full"`` or ``"documents"``: causal within packed documents of ``length / 16`` on average.
    """

    length: int
    mask: str = "causal"
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    world: int = 2

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"S={self.length} {self.mask}, H{heads}{dtype}, {self.world} ranks"

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def documents(self) -> list[int] | None:
        """Cumulative lengths of the packed documents: 16 of lengths 1 to 3, in turn, of equal units."""
        if self.mask != "documents":
            return None
        parts = [1, 2, 3, 2] * 4
        ends = [self.length * end // sum(parts) for end in accumulate(parts)]
        return [0, *ends]

    def resized(self, length: int) -> Problem:
        """The same problem with another length."""
        return Problem(**{**self.__dict__, "length": length})

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """q, k, v and the gradient of the output, the same on every rank: ``[B, H, S, D]`` in the memory order
        ``[B, S, H, D]`` of models."""
        numbers = torch.Generator().manual_seed(self.length)

        def one(heads: int) -> Tensor:
            x = torch.randn(self.batch, self.length, heads, self.dim, generator=numbers)
            return x.to(DTYPES[self.dtype]).transpose(1, 2)

        return [one(self.heads), one(self.kv_heads), one(self.kv_heads)], one(self.heads)


def positions(layout: str, rank: int, world: int, length: int) -> Tensor:
    """The global positions of a rank in the layouts that need no documents."""
    if layout == "head_tail":
        chunks = torch.arange(length).chunk(2 * world)
        return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])
    return torch.arange(length).chunk(world)[rank]


def share(x: Tensor, rows: Tensor) -> Tensor:
    """Positions of ``[B, H, S, D]``, in the same memory order."""
    return x.transpose(1, 2).index_select(1, rows).transpose(1, 2)


def oracle(problem: Problem) -> list[Tensor]:
    """The output and the gradients of q, k, v in plain math in fp64."""
    (q, k, v), dout = problem.tensors()
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    at = torch.arange(problem.length)
    seen = torch.ones(problem.length, problem.length, dtype=torch.bool)
    if problem.causal:
        seen = at[:, None] >= at
    if problem.documents is not None:
        number = torch.bucketize(at, torch.tensor(problem.documents[1:-1]), right=True)
        seen = seen & (number[:, None] == number)
    group = problem.heads // problem.kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = (q @ keys.mT * problem.dim**-0.5).masked_fill(~seen, -torch.inf)
    weights = logits.softmax(-1)
    out = weights @ values
    of_weights = dout @ values.mT
    of_logits = weights * (of_weights - (dout * out).sum(-1, keepdim=True)) * problem.dim**-0.5

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(1, (problem.kv_heads, group)).sum(2)

    return [out, of_logits @ keys, summed(of_logits.mT @ q), summed(weights.mT @ dout)]
