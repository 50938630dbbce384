"""The oracle of recurrent layers: token by token, each document alone. Shares no code with the library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, documents: Sequence[Sequence[int]] | None
) -> Tensor:
    """Outputs ``[B, S, H, dv]``; ``decay`` is ``[H]``, ``[B, S, H]`` or ``[B, S, H, dk]``."""
    batch, length, heads, _ = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    decay = decay.expand(batch, length, heads) if decay.ndim == 1 else decay
    decay = decay[..., None] if decay.ndim == 3 else decay
    out = []
    for row in range(batch):
        for a, b in pairwise(boundaries(documents, row, length)):
            state = v.new_zeros(heads, k.shape[3], v.shape[3])
            for t in range(a, b):
                state = decay[row, t, :, :, None].exp() * state
                value = v[row, t]
                if beta is not None:
                    value = beta[row, t, :, None] * (value - torch.einsum("hkv,hk->hv", state, k[row, t]))
                state = state + torch.einsum("hk,hv->hkv", k[row, t], value)
                out.append(torch.einsum("hkv,hk->hv", state, q[row, t]))
    return torch.stack(out).view_as(v)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Sequence[Sequence[int]] | None) -> Tensor:
    """Causal depthwise convolution of ``[B, C, S]``."""
    rows = []
    for row in range(len(x)):
        parts = [
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(x[row : row + 1, :, a:b], (weight.shape[1] - 1, 0)),
                weight[:, None],
                bias,
                groups=len(weight),
            )
            for a, b in pairwise(boundaries(documents, row, x.shape[2]))
        ]
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


def boundaries(documents: Sequence[Sequence[int]] | None, row: int, length: int) -> Sequence[int]:
    if documents is None:
        return [0, length]
    return documents[row if len(documents) > 1 else 0]
