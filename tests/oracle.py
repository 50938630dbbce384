"""The oracle: attention of whole sequences on one device in plain math. Shares no code with the library."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Softmax attention of ``[B, H, S, D]`` written out, differentiable, in the inputs' dtype."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        logits = logits.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhij,bhjd->bhid", logits.softmax(-1), v)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    difference = (value.double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max()).item()


def rms_error(value: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences."""
    return (value.double() - expected.double()).square().mean().sqrt().item()


def token_positions(layout: str, rank: int, world: int, length: int) -> list[int]:
    """Global positions of a rank's tokens, from the layouts' definitions."""
    if layout == "contiguous":
        part = length // world
        return list(range(rank * part, (rank + 1) * part))
    part = length // (2 * world)
    tail = 2 * world - 1 - rank
    return [*range(rank * part, (rank + 1) * part), *range(tail * part, (tail + 1) * part)]
