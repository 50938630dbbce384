"""Packed tiles: several rectangles of one tile, one after another or as sequences of one variable-length call.

Variable-length operators get the covered rows and columns only, side by side. Sequences without keys in
the gaps would spare this copy where there are gaps, but operators disagree on what they return of them
(FlashAttention-2 a log-sum-exp of +inf, the NPU's operator its lowest number), and where there are none, as
in the diagonal tile of packed documents, there is no copy either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...schedule.layout import Range, merge_ranges
from .partials import accumulation_dtype, like_queries, part

Parts = tuple[tuple[Range, Range], ...]
"""Rectangles (rows, columns) of a tile, none empty, ascending and disjoint in rows and in columns."""


# --------------------------------------------------------------------------- one after another


def forward_each(
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, parts: Parts
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a packed tile, by ``attend(q, k, v)`` of each rectangle. Never more memory than these."""
    out = lse = None
    for rows, cols in parts:
        piece, piece_lse = attend(part(q, rows), part(k, cols), part(v, cols))
        if out is None or lse is None:
            out, lse = empty_partial(q, v.shape[3], piece.dtype, piece_lse.dtype)
        part(out, rows).copy_(piece)
        part(lse, rows).copy_(piece_lse)
    if out is None or lse is None:
        return empty_partial(q, v.shape[3], q.dtype, accumulation_dtype(q.dtype))
    return out, lse


def backward_each(
    differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]],
    by_row: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of a packed tile, by ``differentiate(dout, q, k, v, out, lse)`` of each rectangle.
    ``by_row``: dout, q, out, lse."""
    grads: list[Tensor] = []
    for rows, cols in parts:
        dout, q, out, lse = (part(x, rows) for x in by_row)
        pieces = differentiate(dout, q, part(k, cols), part(v, cols), out, lse)
        grads = grads or [zeros_like(x, piece.dtype) for x, piece in zip((by_row[1], k, v), pieces, strict=True)]
        for grad, piece, where in zip(grads, pieces, (rows, cols, cols), strict=True):
            part(grad, where).copy_(piece)
    dq, dk, dv = grads or [zeros_like(x, x.dtype) for x in (by_row[1], k, v)]
    return dq, dk, dv


def empty_partial(q: Tensor, head_dim: int, dtype: torch.dtype, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The partial of rows that see nothing."""
    return like_queries(q, head_dim, dtype).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)


def zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the shape of ``x`` [B, H, S, D], in memory order [B, S, H, D]."""
    return like_queries(x, x.shape[3], dtype).zero_()


# --------------------------------------------------------------------------- as sequences


@dataclass(frozen=True)
class Packing:
    """A packed tile of ``batch`` rows as sequences: batch row 0's rectangles, then batch row 1's, ..."""

    rows: tuple[Range, ...]
    """The covered rows, touching ranges joined; ``cols`` likewise."""
    cols: tuple[Range, ...]
    row_ends: tuple[int, ...]
    """Where each sequence ends in the packed rows; ``col_ends`` likewise."""
    col_ends: tuple[int, ...]
    longest: tuple[int, int]
    """The most rows and the most columns of a rectangle."""


@lru_cache(maxsize=256)
def packing(parts: Parts, batch: int) -> Packing:
    """How the rectangles of a tile are packed (kept: a training step asks for the same ones in every layer)."""
    row_lengths, col_lengths = ([stop - start for start, stop in ranges] for ranges in zip(*parts, strict=True))

    def ends(lengths: list[int]) -> tuple[int, ...]:
        return tuple(sum(lengths) * row + sum(lengths[: i + 1]) for row in range(batch) for i in range(len(lengths)))

    return Packing(
        merge_ranges(rows for rows, _ in parts),
        merge_ranges(cols for _, cols in parts),
        ends(row_lengths),
        ends(col_lengths),
        (max(row_lengths), max(col_lengths)),
    )


def gather(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """``[B, H, S, ...] -> [B * covered, H, ...]``, contiguous; no copy of one range of one batch row (or of all
    of S) whose memory order is [B, S, H, ...] already."""
    pieces = [part(x, r) for r in ranges]
    covered = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    return covered.transpose(1, 2).flatten(0, 1).contiguous()


def scatter(x: Tensor, ranges: tuple[Range, ...], like: Tensor, fill: float = 0.0) -> Tensor:
    """The inverse: ``[B * covered, H, ...]`` to where it belongs in ``[B, H, S, ...]``, S as in ``like``; ``fill``
    in the gaps."""
    batch, length = like.shape[0], like.shape[2]
    covered = x.unflatten(0, (batch, -1)).transpose(1, 2)
    if covered.shape[2] == length:
        return covered
    whole = x.new_full((batch, length, *x.shape[1:]), fill).transpose(1, 2)
    start = 0
    for rows in ranges:
        stop = start + rows[1] - rows[0]
        part(whole, rows).copy_(part(covered, (start, stop)))
        start = stop
    return whole
