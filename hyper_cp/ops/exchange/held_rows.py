"""Rows of a sharded sequence that lie around what a rank holds: one all-gather of those that cross between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...mesh.comm import Axis, gather_ranks, sum_to_ranks
from ...schedule.layout import ResolvedLayout
from ...schedule.ranges import Range, merge_ranges

Source = tuple[int | None, int, int]
"""``(rank, start, stop)``: local rows of a rank, or that number of zeros if the rank is None."""


@dataclass(frozen=True)
class RowsPlan:
    """The rows that move; the same on every rank except ``parts``."""

    sent: tuple[tuple[Range, ...], ...]
    """The local ranges of each rank that other ranks need."""
    width: int
    """The most rows that a rank sends; 0 if nothing has to move."""
    parts: tuple[Source, ...]
    """This rank's result in order: its own local rows, rows among those that another rank has sent, or zeros."""


def rows_plan(layout: ResolvedLayout, rank: int, before: int, after: int) -> RowsPlan:
    """Plan to fetch, for each held range, also the rows ``before`` and ``after`` it. Negative numbers leave rows out;
    rows outside of the sequence are zero. The layout keeps the plan."""
    return layout.derived(("rows", rank, before, after), lambda: _planned(layout, rank, before, after))


def _planned(layout: ResolvedLayout, rank: int, before: int, after: int) -> RowsPlan:
    needed: list[list[Range]] = [[] for _ in range(layout.world)]
    for receiver in range(layout.world):
        for owner, start, stop in _sources(layout, receiver, before, after):
            if owner is not None and owner != receiver:
                needed[owner].append((start, stop))
    sent = tuple(map(merge_ranges, needed))
    width = max(sum(stop - start for start, stop in rows) for rows in sent)
    parts = (
        (owner, start, stop) if owner is None or owner == rank else (owner, *_among(sent[owner], start, stop))
        for owner, start, stop in _sources(layout, rank, before, after)
    )
    return RowsPlan(sent, width, tuple(parts))


def fetch(rows: Tensor, plan: RowsPlan, axes: Sequence[Axis], rank: int) -> Tensor:
    """The rows of a plan, one after the other, from this rank's share ``[S/n, ...]``.

    Args:
        axes: those that together span the ranks of the layout, innermost first.
    """
    received = rows.new_empty(len(plan.sent), 0)
    if plan.width:
        send = rows.new_zeros(plan.width, *rows.shape[1:])
        mine = [rows[start:stop] for start, stop in plan.sent[rank]]
        if mine:
            torch.cat(mine, out=send[: sum(len(m) for m in mine)])
        received = gather_ranks(axes, send)
    return torch.cat(
        [
            rows.new_zeros(stop - start, *rows.shape[1:])
            if owner is None
            else (rows if owner == rank else received[owner])[start:stop]
            for owner, start, stop in plan.parts
        ]
    )


def give_back(gradients: Tensor, plan: RowsPlan, axes: Sequence[Axis], rank: int, share: int) -> Tensor:
    """The transpose of :func:`fetch`: the sum ``[S/n, ...]`` of all ranks' gradients of this rank's rows.

    Args:
        gradients: those of the rows that this rank has fetched.
        share: S/n.
    """
    home = gradients.new_zeros(share, *gradients.shape[1:])
    away = gradients.new_zeros(len(plan.sent), plan.width, *gradients.shape[1:])
    at = 0
    for owner, start, stop in plan.parts:
        if owner is not None:
            (home if owner == rank else away[owner])[start:stop] += gradients[at : at + stop - start]
        at += stop - start
    if plan.width:
        arrived, at = sum_to_ranks(axes, away), 0
        for start, stop in plan.sent[rank]:
            home[start:stop] += arrived[at : at + stop - start]
            at += stop - start
    return home


def _sources(layout: ResolvedLayout, rank: int, before: int, after: int) -> Iterator[Source]:
    """The rows that a rank fetches, in order."""
    pieces = layout.pieces(range(layout.world)).tolist()
    starts = [*accumulate((stop - start for _, start, stop in pieces), initial=0)]  # global, and the length
    for start, stop in layout.ranges(rank):
        at, end = start - before, stop + after
        if at < 0:
            yield None, 0, min(0, end) - at
            at = min(0, end)
        while at < min(end, layout.length):
            piece = bisect_right(starts, at) - 1
            owner, local, _ = pieces[piece]
            upto = min(end, starts[piece + 1])
            yield owner, local + at - starts[piece], local + upto - starts[piece]
            at = upto
        if at < end:
            yield None, 0, end - at


def _among(sent: Sequence[Range], start: int, stop: int) -> Range:
    """Local rows of a rank by their index among the rows that it has sent."""
    before = 0
    for first, last in sent:
        if first <= start < last:
            return before + start - first, before + stop - first
        before += last - first
    raise RuntimeError(f"rows {start} to {stop} are needed, but not among the rows that are sent: {sent}")
