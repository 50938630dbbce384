"""The batch side's communication: gathering and rolling a sharded tensor along its sequence, and small sums.

A ``documents`` argument of these ops is the table of the batch (see :mod:`hyper_cp.schedule.documents`) or None.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..mesh import cp_mesh
from ..mesh.comm import Axis, gather_ranks
from ..schedule.documents import read
from ..schedule.layout import ResolvedLayout
from ..schedule.lookup import ascending, resolve
from ..schedule.ranges import Range, merge_ranges

# --------------------------------------------------------------------------- whole sequences


@torch.library.custom_op("hyper_cp::gather_sequence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_sequence(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """Gather ``[.. S/n ..] -> [.. S ..]`` in global order, the same on every rank of the mesh."""
    cp = cp_mesh.by_key(mesh)
    resolved = resolve(layout, cp.size, x.shape[seq_dim] * cp.size, read(documents))
    by_rank = gather_ranks(cp.flat, x.movedim(seq_dim, 0))
    if cp.size == 1:
        return x.clone(memory_format=torch.contiguous_format)  # an op must not return its input
    to_ascending, _ = ascending(resolved, range(cp.size))
    return to_ascending.take(by_rank.flatten(0, 1), 0).movedim(0, seq_dim).contiguous()


@gather_sequence.register_fake
def _(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    shape = list(x.shape)
    shape[seq_dim] *= cp_mesh.by_key(mesh).size
    return x.new_empty(shape)


@torch.library.custom_op("hyper_cp::own_slice", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def own_slice(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """Take this rank's share, ``[.. S ..] -> [.. S/n ..]``. It is an op, so that lengths may be symbolic."""
    cp = cp_mesh.by_key(mesh)
    ranges = resolve(layout, cp.size, x.shape[seq_dim], read(documents)).ranges(cp.rank)
    return torch.cat([x.narrow(seq_dim, start, stop - start) for start, stop in ranges], seq_dim).contiguous()


@own_slice.register_fake
def _(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    shape = list(x.shape)
    shape[seq_dim] //= cp_mesh.by_key(mesh).size
    return x.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, documents, *ctx.where = inputs
    ctx.save_for_backward(documents)


def _differentiate_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Every rank uses the whole in the same way, so no other rank adds to the gradient of its share.
    return own_slice(grad, *ctx.saved_tensors, *ctx.where), None, None, None, None


gather_sequence.register_autograd(_differentiate_gather, setup_context=_save)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: int) -> Tensor:
    """Return ``x`` with a gradient that is multiplied by ``factor``."""
    scaled: Tensor = _ScaledGradient.apply(x, factor)
    return scaled


# --------------------------------------------------------------------------- rolling


Source = tuple[int | None, int, int]
"""``(rank, start, stop)``: local rows of a rank, or so many zeros if the rank is None."""


@dataclass(frozen=True)
class RollPlan:
    """The rows that move when a sharded sequence is rolled; the same on every rank except ``parts``."""

    sent: tuple[tuple[Range, ...], ...]
    """The local ranges of each rank that other ranks need."""
    width: int
    """The most rows that a rank sends; 0 if nothing has to move."""
    parts: tuple[Source, ...]
    """This rank's result in order: its own local rows, rows among those that another rank has sent, or zeros."""


def roll_plan(layout: ResolvedLayout, rank: int, shifts: int) -> RollPlan:
    """Plan a roll of a sharded sequence by ``shifts``: the row at p - shifts moves to p; rows from outside are zero."""
    needed: list[list[Range]] = [[] for _ in range(layout.world)]
    for receiver in range(layout.world):
        for owner, start, stop in _sources(layout, receiver, shifts):
            if owner is not None and owner != receiver:
                needed[owner].append((start, stop))
    sent = tuple(map(merge_ranges, needed))  # a position goes to one place: nothing overlaps
    width = max(sum(stop - start for start, stop in rows) for rows in sent)
    parts = (
        (owner, start, stop) if owner is None or owner == rank else (owner, *_among(sent[owner], start, stop))
        for owner, start, stop in _sources(layout, rank, shifts)
    )
    return RollPlan(sent, width, tuple(parts))


def _sources(layout: ResolvedLayout, rank: int, shifts: int) -> Iterator[Source]:
    """The rows that make up the share of ``rank`` of the rolled sequence, in order."""
    pieces = layout.pieces(range(layout.world)).tolist()
    starts = [*accumulate((stop - start for _, start, stop in pieces), initial=0)]  # global, and the length
    for start, stop in layout.ranges(rank):
        at, end = start - shifts, stop - shifts
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


@torch.library.custom_op("hyper_cp::roll_sequence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def roll_sequence(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, shifts: int) -> Tensor:
    """This rank's share ``[.. S/n ..]`` of the sequence rolled by ``shifts``; values from another document or from
    outside the sequence are zero. One all-gather of the rows that cross between ranks."""
    cp = cp_mesh.by_key(mesh)
    packed = read(documents)
    resolved = resolve(layout, cp.size, x.shape[seq_dim] * cp.size, packed)
    plan = roll_plan(resolved, cp.rank, shifts)
    rows = x.movedim(seq_dim, 0)
    received = rows.new_empty(cp.size, 0)
    if plan.width:
        send = rows.new_zeros(plan.width, *rows.shape[1:])
        mine = [rows[start:stop] for start, stop in plan.sent[cp.rank]]
        if mine:
            torch.cat(mine, out=send[: sum(len(m) for m in mine)])
        received = gather_ranks(cp.flat, send)
    parts = [
        rows.new_zeros(stop - start, *rows.shape[1:])
        if owner is None
        else (rows if owner == cp.rank else received[owner])[start:stop]
        for owner, start, stop in plan.parts
    ]
    out = torch.cat(parts).movedim(0, seq_dim).contiguous()
    if packed is None:
        return out
    at = resolved.positions(cp.rank)
    crosses = packed.numbers(at) != packed.numbers(at - shifts)
    return out.masked_fill_(over_rows(crosses.to(x.device), x.ndim, seq_dim), 0)


def over_rows(per_token: Tensor, ndim: int, seq_dim: int) -> Tensor:
    """Insert dimensions of size 1 into ``[1 or B, S, *rest]``, so that it broadcasts over a tensor of ``ndim``
    dimensions, whose batch is dimension 0, or 1 if the sequence is dimension 0. The rest remains last."""
    shape = [1] * (ndim - per_token.ndim + 2) + list(per_token.shape[2:])
    shape[seq_dim] = per_token.shape[1]
    if len(per_token) > 1:
        shape[0 if seq_dim else 1] = len(per_token)
        per_token = per_token if seq_dim else per_token.transpose(0, 1)
    return per_token.reshape(shape)


@roll_sequence.register_fake
def _(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, shifts: int) -> Tensor:
    return x.new_empty(x.shape)


def _differentiate_roll(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *where, shifts = ctx.where  # rolling back is the transpose, documents included
    return roll_sequence(grad, *ctx.saved_tensors, *where, -shifts), None, None, None, None, None


roll_sequence.register_autograd(_differentiate_roll, setup_context=_save)

# --------------------------------------------------------------------------- numbers


def by_rank(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Gather a small ``x`` from every rank of a mesh of any number of dimensions: ``[n, *x.shape]`` on all of them."""
    axes = [Axis.of(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim))]
    return gather_ranks(axes, x)
