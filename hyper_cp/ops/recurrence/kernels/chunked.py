"""The arithmetic of the family, in plain torch on any device: the affine map that each piece of a sequence is.

A piece takes the state before it, H, to ``M . H + P``, and its outputs are ``O + Q H``. The whole family is one
function: without ``beta`` the state is ``H <- exp(g) H + k v^T``, with it ``H <- (1 - beta k k^T) exp(g) H + beta k
v^T`` (the delta rule); g is a number for each head, or one for each channel of k. Decays of pairs of positions are
never above one, so that nothing overflows, however strong they are.

Source: Mamba 2 (arXiv 2405.21060), GLA (2312.06635), DeltaNet's chunked form (2406.06484), gated delta net
(2412.06464), Kimi delta attention (2510.26692).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """The inputs of all pieces: ``[pieces, B, H, size, ...]``. Tokens that fill a piece up are zero in all of them."""

    q: Tensor
    """``[..., dk]``; q and k may have fewer heads than v."""
    k: Tensor
    v: Tensor
    """``[..., dv]``."""
    g: Tensor
    """Logarithms of decays ``[..., 1]``, or ``[..., dk]``."""
    beta: Tensor | None
    """``[..., 1]``, for the delta rule; else None."""


class Affine(NamedTuple):
    """The affine map of every piece, ``[pieces, B, H, ...]``."""

    M: Tensor
    """``[1, 1]`` or ``[dk, 1]`` if it is diagonal, else ``[dk, dk]``."""
    P: Tensor
    """``[dk, dv]``."""
    Q: Tensor
    """``[size, dk]``."""
    O: Tensor  # noqa: E741
    """``[size, dv]``."""


def piece_size(inputs_g: Tensor) -> int:
    """The most tokens of a piece. Decays of channels need memory for every pair of positions and every channel."""
    return 64 if inputs_g.shape[-1] == 1 else 16


def _sums_between(g: Tensor) -> Tensor:
    """``[..., i, j, :]``: the sum of g at all positions after j, up to i. Differences of one running sum would lose the
    decays that come after a very strong one."""
    size = g.shape[-2]
    after = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(after[..., None], g[..., :, None, :], 0).cumsum(-3)


def affine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Affine:
    """The maps of all pieces at once, differentiable. The arguments are those of :class:`Inputs`."""
    groups = v.shape[2] // k.shape[2]
    if groups > 1:
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    total = g.cumsum(3)
    between = _sums_between(g)
    later = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).triu(1)
    pairs = between.masked_fill(later[..., None], -torch.inf).exp()

    def scores(x: Tensor) -> Tensor:
        """``sum_d x_i k_j exp(total_i - total_j)`` for all j up to i."""
        if g.shape[-1] == 1:
            return (x @ k.mT) * pairs.squeeze(-1)
        return torch.einsum("...id,...jd,...ijd->...ij", x, k, pairs)

    seen, read, kept = scores(q), q * total.exp(), (k * between[..., -1, :, :].exp()).mT
    decay = total[..., -1:, :].exp().mT
    if beta is None:
        return Affine(decay, kept @ v, read, seen @ v)
    system = (scores(k) * beta).tril(-1)
    written = torch.cat((v * beta, k * total.exp() * beta), -1)
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    values, removed = solved.split((v.shape[-1], k.shape[-1]), -1)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return Affine(decay * identity - kept @ removed, kept @ values, read - seen @ removed, seen @ values)
