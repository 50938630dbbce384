"""Rotary position embedding (RoPE, arXiv 2104.09864) of tokens whose positions are not consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch.compiling import is_compiling
from ..mesh.arguments import check_type
from .collectives import over_rows


def rows_of(table: Tensor, positions: Tensor, seq_dim: int, name: str) -> Tensor:
    """Rows of a table over positions ``[.. L ..]``, for tokens at ``positions [S/n]`` or ``[1, S/n]`` on the CPU.

    Errors call the table ``name``.
    """
    longest = int(positions.max()) + 1
    if table.shape[seq_dim] < longest:
        raise ValueError(
            f"{name} has {table.shape[seq_dim]} positions in dimension {seq_dim}. Tokens of this rank are at "
            f"positions up to {longest - 1}. Build it with get_rotary_seq_len(...) positions, for the whole sequence "
            "and not for the local share"
        )
    return table.index_select(seq_dim, positions.flatten().to(table.device))


def rotate(tensor: Tensor, angles: Tensor, seq_dim: int, interleaved: bool, mscale: float) -> Tensor:
    """Rotate the first R of the last dimension of ``tensor``; ``angles`` is ``[1 or B, S/n, R]``."""
    size = angles.shape[-1]
    if size % 2 or size > tensor.shape[-1]:
        raise ValueError(
            f"freqs has {size} angles per position. Their number must be even and at most {tensor.shape[-1]}, the last "
            "dimension of tensor. Give each angle twice: torch.cat((freqs, freqs), -1), or next to each other if "
            "interleaved"
        )
    angles = over_rows(angles, tensor.ndim, seq_dim)
    # Cast before multiplying, as in Megatron, for the same bits in half precision.
    cos, sin = ((f(angles) * mscale).to(tensor.dtype) for f in (torch.cos, torch.sin))
    turned, rest = tensor[..., :size], tensor[..., size:]
    turned = turned * cos + _quarter_turn(turned, interleaved) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Map pairs (x1, x2) to (-x2, x1). Pairs are (i, i + half), or neighbours if interleaved."""
    two, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    first, second = x.unflatten(-1, sizes).unbind(two)
    return torch.stack((-second, first), two).flatten(-2)


def checked_table(tensor: Tensor, freqs: Tensor, seq_dim: int, interleaved: bool, mscale: float) -> Tensor:
    """The angles ``[L, R]`` of ``apply_rotary_pos_emb``; ``TypeError`` or ``ValueError`` if arguments do not fit."""
    check_type("freqs", freqs, Tensor, "It holds the angles of positions. Pass a tensor [L, R] or [L, 1, 1, R]")
    if freqs.is_complex():
        raise TypeError(
            f"freqs is {freqs.dtype}, as tables of cosines and sines are. It holds angles, each twice. Pass "
            "freqs.angle().repeat_interleave(2, -1) and interleaved=True, or multiply by the rows of "
            "get_emb_on_this_cp_rank"
        )
    if freqs.ndim < 2 or freqs.numel() != freqs.shape[0] * freqs.shape[-1]:
        raise ValueError(
            f"freqs has shape {tuple(freqs.shape)}. Each position has R angles. Pass a tensor [L, R] or [L, 1, 1, R]"
        )
    if seq_dim == tensor.ndim - 1:
        raise ValueError(
            f"seq_dim={seq_dim} is the last dimension of tensor, whose shape is {tuple(tensor.shape)}, but that is "
            "the one that is rotated. Pass a tensor [.. S/n .., D]"
        )
    check_type("mscale", mscale, (int, float), "Cosine and sine are multiplied by it. Pass a number")
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
    if not is_compiling() and type(table) is Tensor and table.device.type == "cpu":  # elsewhere the host would wait
        _refuse_angles_once(table, tensor.shape[-1], interleaved)
    return table


def _refuse_angles_once(table: Tensor, width: int, interleaved: bool) -> None:
    """Raise ``ValueError`` if a table has fewer angles than channels, and not each of them twice."""
    size = table.shape[1]
    if size % 2 or not 0 < size < width:
        return
    first, second = table.unflatten(1, (-1, 2) if interleaved else (2, -1)).unbind(2 if interleaved else 1)
    if not torch.equal(first, second):
        where = "next to each other (interleaved=True)" if interleaved else "in halves"
        raise ValueError(
            f"freqs has {size} angles per position, which are not each angle twice {where}, for {width} channels. "
            "Angles of pairs that differ would be wrong, and the other channels would stay as they are. Pass "
            "torch.cat((freqs, freqs), -1), or with interleaved=True freqs.repeat_interleave(2, -1)"
        )
