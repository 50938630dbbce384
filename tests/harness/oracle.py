"""The oracle: attention of whole sequences on one device in plain math. Shares no code with the library."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of ``[B, H, S, D]`` written out, differentiable, in the inputs' dtype.

    ``visible``: bool, broadcastable to ``[B, H, S, S]``. ``bias`` is added to the logits. Rows that see
    nothing give zeros.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if visible is not None:
        seen = seen & visible
    if bias is not None:
        logits, seen = logits + bias.masked_fill(bias == -torch.inf, 0), seen & (bias > -torch.inf)
    logits = logits.masked_fill(~seen, -1e300 if q.dtype == torch.float64 else -1e38)
    weights = logits.softmax(-1) * seen
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def visible_pairs(
    length: int,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    borders: list[list[int]] | None,
) -> Tensor:
    """``[B or 1, 1, S, S]``: which pairs a causal mask, a window and documents leave."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = torch.ones(length, length, dtype=torch.bool)
    if is_causal:
        seen = seen & (j <= i)
    if window is not None:
        left, right = window
        seen = seen & (True if left is None else i - j <= left) & (True if right is None else j - i <= right)
    if borders is None:
        return seen[None, None]
    rows = []
    for row in borders:
        number = torch.zeros(length, dtype=torch.int64)
        for start in row[1:-1]:
            number[start:] += 1
        rows.append(seen & (number[:, None] == number[None]))
    return torch.stack(rows)[:, None]


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
