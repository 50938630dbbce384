"""The oracle of recurrent layers: token by token, each document alone. Shares no code with the library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def recur_from(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, S, H, dv]`` of one document in each row, and the last state ``[B, H, dk, dv]``."""
    out, decay = [], decay[..., None] if decay.ndim == 3 else decay
    for t in range(v.shape[1]):
        state, value = decay[:, t, :, :, None].exp() * state, v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, documents: Sequence[Sequence[int]] | None
) -> Tensor:
    """Outputs ``[B, S, H, dv]``; ``decay`` is ``[H]``, ``[B, S, H]`` or ``[B, S, H, dk]``."""
    batch, length, heads, size = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    decay = decay.expand(batch, length, heads) if decay.ndim == 1 else decay
    rows = []
    for row in range(batch):
        for a, b in pairwise(boundaries(documents, row, length)):
            given = (None if x is None else x[row : row + 1, a:b] for x in (q, k, v, decay, beta))
            if b > a:
                rows.append(recur_from(v.new_zeros(1, heads, k.shape[3], size), *given)[0])  # type: ignore[arg-type]
    return torch.cat(rows, 1).view_as(v)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Sequence[Sequence[int]] | None, dilation: int = 1
) -> Tensor:
    """Causal depthwise convolution of ``[B, C, S]``."""
    rows = []
    for row in range(len(x)):
        parts = [
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(x[row : row + 1, :, a:b], ((weight.shape[1] - 1) * dilation, 0)),
                weight[:, None],
                bias,
                groups=len(weight),
                dilation=dilation,
            )
            for a, b in pairwise(boundaries(documents, row, x.shape[2]))
        ]
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


def boundaries(documents: Sequence[Sequence[int]] | None, row: int, length: int) -> Sequence[int]:
    if documents is None:
        return [0, length]
    return documents[row if len(documents) > 1 else 0]
