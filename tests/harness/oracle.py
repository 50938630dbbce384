"""The oracle: attention of whole sequences on one device in plain math. Shares no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Tensor]
"""A function of FlexAttention: ``(score, b, h, i, j) -> score``, or ``(b, h, i, j) -> visible``."""


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Batch row, head, query and key of every pair, ``[B, H, S, S]`` each."""
    return torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")


def softcap(cap: float) -> Mod:
    return lambda score, *_: cap * torch.tanh(score / cap)


def attention_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Mod | None = None,
    sinks: Tensor | None = None,
    weigh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``[B, H, S, D]`` written out, differentiable, in the inputs' dtype; and its log-sum-exp.

    ``visible``: bool, broadcastable to ``[B, H, S, S]``. ``bias`` is added to the logits, after ``score_mod``. A sink
    is one more column, which has no value. ``weigh`` multiplies the weights, as dropout does. Rows that see nothing
    give zeros.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    seen = seen if visible is None else seen & visible
    if score_mod is not None:
        logits = score_mod(logits, *positions(q, k))
    if bias is not None:
        logits, seen = logits + bias.masked_fill(bias == -torch.inf, 0), seen & (bias > -torch.inf)
    column = logits.new_full((*logits.shape[:3], 1), -torch.inf)
    column = column if sinks is None else sinks.view(1, -1, 1, 1).expand_as(column)
    lse = torch.cat([logits.masked_fill(~seen, -torch.inf), column], -1).logsumexp(-1)
    lowest = -1e300 if q.dtype == torch.float64 else -1e38
    logits = torch.cat([logits.masked_fill(~seen, lowest), column], -1)
    weights = logits.softmax(-1)[..., :-1] * seen
    return torch.einsum("bhij,bhjd->bhid", weights if weigh is None else weights * weigh, v), lse


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output of :func:`attention_and_lse`."""
    return attention_and_lse(q, k, v, **options)[0]


def visible_pairs(
    length: int,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    documents: Sequence[Sequence[int]] | None,
) -> Tensor:
    """The pairs that a causal mask, a window and documents leave, bool ``[B or 1, 1, S, S]``.

    ``documents``: cumulative lengths, one sequence of them per batch row.
    """
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = torch.ones(length, length, dtype=torch.bool)
    if is_causal:
        seen = seen & (j <= i)
    if window is not None:
        left, right = window
        seen = seen & (True if left is None else i - j <= left) & (True if right is None else j - i <= right)
    if documents is None:
        return seen[None, None]
    rows = []
    for row in documents:
        number = torch.zeros(length, dtype=torch.int64)
        for start in row[1:-1]:
            number[start:] += 1
        rows.append(seen & (number[:, None] == number[None]))
    return torch.stack(rows)[:, None]


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; infinite if there is a NaN."""
    difference = (value.double() - expected.double()).abs().max()
    return _or_infinite((difference / expected.double().abs().max()).item())


def absolute_error(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite if there is a NaN."""
    return _or_infinite((value.double() - expected.double()).abs().max().item())


def rms_error(value: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences; infinite if there is a NaN."""
    return _or_infinite((value.double() - expected.double()).square().mean().sqrt().item())


def _or_infinite(error: float) -> float:
    """Python's ``max`` skips a NaN that is not the first of its arguments, so no error may be one."""
    return math.inf if math.isnan(error) else error


def token_positions(layout: str, rank: int, world: int, length: int) -> list[int]:
    """Global positions of a rank's tokens, from the layouts' definitions."""
    if layout == "contiguous":
        part = length // world
        return list(range(rank * part, (rank + 1) * part))
    part = length // (2 * world)
    tail = 2 * world - 1 - rank
    return [*range(rank * part, (rank + 1) * part), *range(tail * part, (tail + 1) * part)]
