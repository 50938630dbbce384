"""Latent attention: keys and values of all heads, made from the latents of a token where they are attended.

Multi-head latent attention (DeepSeek V2, arXiv 2405.04434) projects one narrow latent of each token to the keys and
values of all heads. So latents can travel in place of heads, and each rank expands what has arrived::

    latent [B, 1, S, R]      --- weight [H * (Dn + Dv), R] -->   keys without positions [B, H, S, Dn], values [.., Dv]
    rope   [B, 1|H, S, Dr]   --- the same for all heads  ---->   the rotary part of keys [B, H, S, Dr]

In the engine latent and rope stand where keys and values stand otherwise: they travel as these do, and their gradients
come home as theirs do. One block is expanded at a time, and again in backward. Where each query attends to few of the
keys that a rank receives, nothing is expanded: the weight is applied to queries and outputs (:func:`absorb`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.partials import accumulation_dtype, like_queries


def expand(
    latent: Tensor, rope: Tensor, heads: int, width: int, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys ``[B, H, S, Dn + Dr]`` and values ``[B, H, S, Dv]`` of ``heads``; ``width`` is Dn + Dr. Differentiable."""
    # The function, not the method: a graph that is traced inside a styled module takes no methods of this name.
    both = torch.unflatten(F.linear(latent[:, 0], weight, bias), 2, (heads, -1)).transpose(1, 2)
    plain = width - rope.shape[3]
    keys, values = both.split([plain, both.shape[3] - plain], 3)
    return torch.cat([keys, rope.expand(-1, heads, -1, -1)], 3), values


def absorb(
    q: Tensor, latent: Tensor, rotary: int, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Latent attention as attention with one key head: the queries ``[B, H, S, R + Dr]``, the latents that are the
    values, and what makes the output ``[B, H, S, Dv]`` of attention over these. Differentiable.

    A query's product with a key that is made of a latent is its product with the latent, if the query has been
    multiplied by the weight (the absorbed form of DeepSeek V2, arXiv 2405.04434). The key is a latent with its rotary
    part behind it. A bias is one more column of the weight, for one more number of every latent, which is 1.
    """
    if bias is not None:
        weight = torch.cat([weight, bias.unsqueeze(1)], 1)
        latent = torch.cat([latent, latent.new_ones(*latent.shape[:3], 1)], 3)
    plain = q.shape[3] - rotary
    by_head = torch.unflatten(weight, 0, (q.shape[1], -1))
    of_keys, of_values = by_head.split([plain, by_head.shape[1] - plain], 1)
    absorbed = torch.cat([q[..., :plain] @ of_keys, q[..., plain:]], 3)
    return absorbed, latent, lambda out: out @ of_values.mT


class Absorbed:
    """The one key head that latents and their rotary part are. It has no parameters, so no ``gradients``."""

    gradients: Sequence[Tensor] = ()

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block. Values are the beginnings of keys, in the same memory."""
        keys = torch.cat([latent, rope], 3)
        return keys, keys[..., : latent.shape[3]]

    def like(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors with the shapes of keys and values, which have memory for one number."""
        b, _, s, rank = latent.shape
        return latent.new_empty(1).expand(b, 1, s, rank + rope.shape[3]), latent

    def pull_back(self, latent: Tensor, rope: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a block's latent and rotary part, given those of its keys and values."""
        of_latent, of_rope = dk.split([latent.shape[3], rope.shape[3]], 3)
        return of_latent + dv, of_rope


class Expansion:
    """The expansion of one call's blocks, and its gradients.

    Args:
        q: the queries ``[B, H, S, Dn + Dr]``.
        sums: True in backward.

    Attributes:
        gradients: those of weight and bias, summed over blocks in the accumulation dtype.
    """

    def __init__(self, q: Tensor, weight: Tensor, bias: Tensor | None, sums: bool = False) -> None:
        self.weight, self.bias, self.heads, self.width = weight, bias, q.shape[1], q.shape[3]
        given = [weight] if bias is None else [weight, bias]
        wide = accumulation_dtype(q.dtype)
        self.gradients = [torch.zeros_like(x, dtype=wide) for x in given] if sums else []

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        return expand(latent, rope, self.heads, self.width, self.weight, self.bias)

    def like(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors with the shapes of the keys and values, which have memory for one number."""
        b, _, s, _ = latent.shape
        dims = self.width, self.weight.shape[0] // self.heads - self.width + rope.shape[3]
        keys, values = (like_queries(latent.new_empty(1, 1, 1, 1), d, latent.dtype) for d in dims)
        return keys.expand(b, self.heads, s, -1), values.expand(b, self.heads, s, -1)

    def pull_back(self, latent: Tensor, rope: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a block's latent and rotary part, given those of its keys and values. Adds to
        ``gradients``. Products are those of one device: in the dtype of the weight."""
        plain, (b, _, rows, dim) = self.width - rope.shape[3], dv.shape
        both = self.weight.new_empty(b, rows, self.heads, plain + dim)
        both[..., :plain].copy_(dk[..., :plain].transpose(1, 2))
        both[..., plain:].copy_(dv.transpose(1, 2))
        both = both.flatten(2)
        of_weight, *of_bias = self.gradients
        of_weight.add_(torch.einsum("bsd,bsr->dr", both, latent[:, 0]))
        for total in of_bias:
            total.add_(both.sum((0, 1), dtype=total.dtype))
        of_rope = dk[..., plain:]
        if rope.shape[1] == 1:
            of_rope = of_rope.sum(1, keepdim=True)
        return (both @ self.weight).unsqueeze(1), of_rope
