"""Exact merging of partial attention results, and sums over tiles, in the accumulation dtype.

A partial is (output, log-sum-exp) of some queries over some keys. Two partials of the same
queries merge as ``out = out_a * (1 - w) + out_b * w`` with ``w = sigmoid(lse_b - lse_a)``
(ring attention, arXiv 2310.01889, in the overflow-free form of the flash-attention community).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...schedule.ranges import Range
from . import fused


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything smaller, and complex numbers of these for complex ones."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def like_queries(x: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised ``[B, H, S, head_dim]`` in memory order [B, S, H, D], as the models around
    attention reshape it without a copy."""
    b, h, s, _ = x.shape
    return x.new_empty(b, s, h, head_dim, dtype=dtype).transpose(1, 2)


def part(x: Tensor, rows: Range, batch: Range | None = None) -> Tensor:
    """Rows ``[B, H, rows, ...]`` of some batch rows (None: all): a view, or ``x`` itself if that is all of it."""
    start, stop = rows
    if batch is not None:
        x = x.narrow(0, batch[0], batch[1] - batch[0])
    return x if stop - start == x.shape[2] else x.narrow(2, start, stop - start)


class Parts:
    """Parts of tensors ``[B, H, S, ...]``. Each is made once: the steps of a call ask for the same few again."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._made: dict[tuple[Range, Range | None], Sequence[Tensor]] = {}

    def of(self, rows: Range, batch: Range | None = None) -> Sequence[Tensor]:
        """:func:`part` of each tensor."""
        found = self._made.get((rows, batch))
        if found is None:
            found = self._made[rows, batch] = [part(x, rows, batch) for x in self.tensors]
        return found


def empty_partial(q: Tensor, head_dim: int, dtype: torch.dtype, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The partial of queries that see nothing."""
    return like_queries(q, head_dim, dtype).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)


def weights_of(logits: Tensor, lse: Tensor) -> Tensor:
    """Weights of logits. A row that sees nothing has lse = -inf: its weights are zero, not NaN."""
    return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # a comparison takes a tenth of the time of a cast to the same dtype


def merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the partial ``(out, lse)`` into ``(total, total_lse)``, which are in the accumulation dtype."""
    if fused.merge(total, total_lse, out, lse):
        return
    out, lse = _cast(out, total.dtype), _cast(lse, total.dtype)
    # If both are -inf, neither has seen anything: their difference is not a number, the weight is 0.
    weight = (lse - total_lse).sigmoid_().nan_to_num_(0.0)
    total.lerp_(out, weight.unsqueeze(-1))
    torch.logaddexp(total_lse, lse, out=total_lse)


def add(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total``, which is in the accumulation dtype."""
    if not fused.add(total, x):
        total.add_(x)


class Partials:
    """The running (output, log-sum-exp) of a rank's queries ``[B, H, S, D]``. ``sinks`` ``[H]`` are merged into
    results, which are taken once for each row.

    Attributes:
        largest: the largest logit of each row, if ``with_largest``; kernels raise it.
    """

    def __init__(self, q: Tensor, head_dim: int, sinks: Tensor | None = None, with_largest: bool = False):
        self._q, self._head_dim, self._sinks = q, head_dim, sinks
        self._dtype = accumulation_dtype(q.dtype)
        self.largest = q.new_full(q.shape[:3], -torch.inf, dtype=self._dtype) if with_largest else None
        self._total: Parts | None = None

    def add(self, rows: Range, batch: Range | None, out: Tensor, lse: Tensor) -> None:
        """Merge the partial of a range of queries. Takes over ``out`` and ``lse``, which the kernel
        made for this call: they may become the accumulators."""
        if self._total is None and batch is None and rows[1] - rows[0] == self._q.shape[2]:
            self._total = Parts(_cast(out, self._dtype), _cast(lse, self._dtype))
            return
        total, total_lse = self._sums(rows, batch)
        merge(total, total_lse, out, lse)

    def _sums(self, rows: Range, batch: Range | None = None) -> Sequence[Tensor]:
        if self._total is None:
            self._total = Parts(*empty_partial(self._q, self._head_dim, self._dtype, self._dtype))
        return self._total.of(rows, batch)

    def result(self, rows: Range) -> tuple[Tensor, ...]:
        """The output of a range of queries in their dtype, and its log-sum-exp (and its largest logits, if they are
        asked for) in the accumulation dtype."""
        out, lse = self._sums(rows)
        if self._sinks is not None:
            # One more partial of every row: its value is zero, its log-sum-exp the sink of the head.
            sinks = self._sinks.to(self._dtype).view(1, -1, 1)
            weight = (lse - sinks).sigmoid().nan_to_num(0.0)  # 0 where neither keys nor the sink have any weight
            out, lse = out * weight.unsqueeze(-1), torch.logaddexp(lse, sinks)
        largest = () if self.largest is None else (part(self.largest, rows),)
        return _cast(out, self._q.dtype), lse, *largest


class RowSum:
    """A sum over tiles that each cover a range of rows of ``[B, H, S, D]``."""

    def __init__(self, like: Tensor):
        self._like, self._dtype = like, accumulation_dtype(like.dtype)
        self._total: Parts | None = None

    def add(self, rows: Range, batch: Range | None, x: Tensor) -> None:
        """Add to a range of rows. Takes over ``x``."""
        if self._total is None and batch is None and rows[1] - rows[0] == self._like.shape[2]:
            self._total = Parts(_cast(x, self._dtype))
        else:
            add(self._sum(rows, batch), x)

    def _sum(self, rows: Range, batch: Range | None = None) -> Tensor:
        if self._total is None:
            self._total = Parts(like_queries(self._like, self._like.shape[3], self._dtype).zero_())
        return self._total.of(rows, batch)[0]

    def total(self) -> Tensor:
        """The sum over all rows, in the accumulation dtype."""
        return self._sum((0, self._like.shape[2]))

    def result(self, rows: Range) -> tuple[Tensor]:
        """The sum over a range of rows, in the dtype of ``like``."""
        return (_cast(self._sum(rows), self._like.dtype),)
