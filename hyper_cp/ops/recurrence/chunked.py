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
import torch.nn.functional as F
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


SMALLEST = 2
"""Positions of the blocks in which every pair has its own decay of every channel."""


def piece_size(inputs_g: Tensor) -> int:
    """The most tokens of a piece. Products of matrices gain from many, unless heads are small (Mamba 1)."""
    return 64 if inputs_g.shape[-1] == 1 or inputs_g.shape[-1] >= 32 else 16


def _sums_between(g: Tensor) -> Tensor:
    """``[..., i, j, :]``: the sum of g at all positions after j, up to i. Differences of one running sum would lose the
    decays that come after a very strong one."""
    size = g.shape[-2]
    after = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(after[..., None], g[..., :, None, :], 0).cumsum(-3)


def _pairs(between: Tensor) -> Tensor:
    """Decays of pairs, zero for pairs of a position with a later one."""
    size = between.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=between.device).triu(1)
    return between.masked_fill(later[..., None], -torch.inf).exp()


class _Scores(NamedTuple):
    """``sum_d x_i k_j exp(g_j+1 + ... + g_i)`` of pairs ``j <= i``, for each x of a list, and the sums of g."""

    scores: list[Tensor]
    start: Tensor
    """The sum from the first position to each, itself included."""
    end: Tensor
    """The sum of all positions behind each."""


def _scores_of_heads(xs: list[Tensor], k: Tensor, g: Tensor) -> _Scores:
    """With one decay for each head."""
    between = _sums_between(g)
    pairs = _pairs(between).squeeze(-1)
    return _Scores([(x @ k.mT) * pairs for x in xs], g.cumsum(-2), between[..., -1, :, :])


def _scores_of_channels(xs: list[Tensor], k: Tensor, g: Tensor) -> _Scores:
    """With decays of channels: within small blocks by pairs, and then neighbouring blocks merge until one is left.

    Between two neighbours the decay of a pair is that from j to the end of the left block times that from the start of
    the right one to i, so that the scores are one matrix product. Both are sums of decays, and not differences.
    """
    size, n, count = g.shape[-2], min(SMALLEST, g.shape[-2]), len(xs)
    blocks = 1 << max(0, (-(-size // n) - 1).bit_length())
    rows, k, g = (_blocks(x, n, blocks) for x in (torch.stack(xs), k, g))
    between = _sums_between(g)
    found = ((rows[..., :, None, :] * k[..., None, :, :]) * _pairs(between)).sum(-1)
    start, end = g.cumsum(-2), between[..., -1, :, :]
    while found.shape[-3] > 1:
        (left, right), (k_left, _), (_, x_right) = _halves(found), _halves(k), _halves(rows)
        (s_left, s_right), (e_left, e_right) = _halves(start), _halves(end)
        x_right = x_right * s_right.exp()
        cross = (x_right.movedim(0, -3).flatten(-3, -2) @ (k_left * e_left.exp()).mT).unflatten(-2, (count, n))
        cross = cross.movedim(-3, 0)
        found = torch.cat((F.pad(left, (0, n)), torch.cat((cross, right), -1)), -2)
        start = torch.cat((s_left, s_right + s_left[..., -1:, :]), -2)
        end = torch.cat((e_left + s_right[..., -1:, :], e_right), -2)
        n *= 2
        rows, k = (x.flatten(-3, -2).unflatten(-2, (-1, n)) for x in (rows, k))
    found = found.squeeze(-3)[..., :size, :size]
    return _Scores(list(found.unbind(0)), start.squeeze(-3)[..., :size, :], end.squeeze(-3)[..., :size, :])


def _blocks(x: Tensor, n: int, blocks: int) -> Tensor:
    """``[..., size, d] -> [..., blocks, n, d]``, filled up with zeros."""
    return F.pad(x, (0, 0, 0, n * blocks - x.shape[-2])).unflatten(-2, (blocks, n))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right blocks of all pairs of neighbours."""
    left, right = x.unflatten(-3, (-1, 2)).unbind(-3)
    return left, right


def affine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Affine:
    """The maps of all pieces at once, differentiable. The arguments are those of :class:`Inputs`."""
    groups = v.shape[2] // k.shape[2]
    if groups > 1:
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    scores_of = _scores_of_heads if g.shape[-1] == 1 else _scores_of_channels
    (seen, *keys), start, end = scores_of([q] if beta is None else [q, k], k, g)
    since = start.exp()
    read, kept, decay = q * since, (k * end.exp()).mT, since[..., -1:, :].mT
    if beta is None:
        return Affine(decay, kept @ v, read, seen @ v)
    system = (keys[0] * beta).tril(-1)
    written = torch.cat((v * beta, k * since * beta), -1)
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    values, removed = solved.split((v.shape[-1], k.shape[-1]), -1)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return Affine(decay * identity - kept @ removed, kept @ values, read - seen @ removed, seen @ values)
