"""The problem that all contenders of a run share: its inputs, the shares of ranks, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hyper_cp.cli.diagnosis.findings import answer
from hyper_cp.cli.diagnosis.tiles import CAUSAL, FULL, Tile

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

    @property
    def tile(self) -> Tile:
        """The visible pairs of the whole sequence, as the self-checks describe them."""
        parts = None if self.documents is None else tuple((part, part) for part in pairwise(self.documents))
        band, heads = CAUSAL if self.causal else FULL, (self.heads, self.kv_heads)
        return Tile(self.length, self.length, band, parts, self.batch, heads, (self.dim, self.dim))

    def resized(self, length: int) -> Problem:
        """Return the same problem with another length."""
        return Problem(**{**self.__dict__, "length": length})

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Return q, k, v and the gradient of the output, the same on every rank: ``[B, H, S, D]`` in the memory order
        ``[B, S, H, D]`` of models."""
        numbers = torch.Generator().manual_seed(self.length)

        def one(heads: int) -> Tensor:
            x = torch.randn(self.batch, self.length, heads, self.dim, generator=numbers)
            return x.to(DTYPES[self.dtype]).transpose(1, 2)

        return [one(self.heads), one(self.kv_heads), one(self.kv_heads)], one(self.heads)


def share(x: Tensor, rows: Tensor) -> Tensor:
    """Return some positions of ``[B, H, S, D]``, in the same memory order."""
    return x.transpose(1, 2).index_select(1, rows).transpose(1, 2)


def oracle(problem: Problem) -> list[Tensor]:
    """Return the output and the gradients of q, k, v in plain math in fp64."""
    qkv, dout = problem.tensors()
    out, _, *grads = answer([*qkv, dout], problem.tile.visible(), problem.tile.scale)
    return [out, *grads]
