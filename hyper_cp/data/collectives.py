"""The batch side's communication: gathering and rolling a sharded tensor along its sequence, and small sums.

A ``documents`` argument of these ops is the table of the batch (see :func:`documents.documents_table`) or None.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..mesh import cp_mesh
from ..mesh.comm import Axis, gather_ranks
from ..schedule.documents import read
from ..schedule.layout import Range, ResolvedLayout, merge_ranges
from ..schedule.lookup import resolve

# --------------------------------------------------------------------------- whole sequences


@torch.library.custom_op("hyper_cp::gather_sequence", mutates_args=())
def gather_sequence(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """``[.. S/n ..] -> [.. S ..]``, ascending, the same on every rank of the mesh."""
    cp = cp_mesh.by_key(mesh)
    resolved = resolve(layout, cp.size, x.shape[seq_dim] * cp.size, read(documents))
    by_rank = gather_ranks(cp.flat, x.movedim(seq_dim, 0))
    parts = [by_rank[rank, start:stop] for rank, start, stop in resolved.pieces(range(cp.size))]
    return torch.cat(parts).movedim(0, seq_dim).contiguous()


@gather_sequence.register_fake
def _(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    shape = list(x.shape)
    shape[seq_dim] *= cp_mesh.by_key(mesh).size
    return x.new_empty(shape)


@torch.library.custom_op("hyper_cp::own_slice", mutates_args=())
def own_slice(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """``[.. S ..] -> [.. S/n ..]``: this rank's share. An op, so that lengths may be symbolic."""
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
    # Every rank uses the whole in the same way, so its share of the gradient is all there is.
    return own_slice(grad, *ctx.saved_tensors, *ctx.where), None, None, None, None


gather_sequence.register_autograd(_differentiate_gather, setup_context=_save)

# --------------------------------------------------------------------------- rolling


@dataclass(frozen=True)
class _Owned:
    """Global positions ``start .. stop``, held by ``rank`` from its position ``local`` on."""

    start: int
    stop: int
    rank: int
    local: int


def _owned(resolved: ResolvedLayout) -> list[_Owned]:
    """The positions of every rank, in ascending global order."""
    found, start = [], 0
    for rank, first, last in resolved.pieces(range(resolved.world)):
        found.append(_Owned(start, start + last - first, rank, first))
        start += last - first
    return found


@dataclass(frozen=True)
class RollPlan:
    """Which rows move where when a sharded sequence is rolled: the same on every rank but for ``parts``."""

    borders: tuple[tuple[Range, ...], ...]
    """Per rank: the local ranges that other ranks need."""
    width: int
    """The most rows that a rank sends; 0 if nothing has to move."""
    parts: tuple[tuple[int | None, int, int], ...]
    """This rank's result in order: local rows of its own, rows of what another rank has sent, or zeros (None)."""


def roll_plan(resolved: ResolvedLayout, rank: int, shifts: int) -> RollPlan:
    """Plan the roll by ``shifts`` (result p is source p - shifts, zero from outside) of what ranks hold."""
    owned = _owned(resolved)
    starts, length = [piece.start for piece in owned], resolved.length

    def sources(of: int) -> Iterator[tuple[int | None, int, int]]:
        for start, stop in resolved.ranges(of):
            at, end = start - shifts, stop - shifts
            if at < 0:
                yield None, 0, min(0, end) - at
                at = min(0, end)
            while at < min(end, length):
                piece = owned[bisect_right(starts, at) - 1]
                upto = min(end, piece.stop)
                yield piece.rank, piece.local + at - piece.start, piece.local + upto - piece.start
                at = upto
            if at < end:
                yield None, 0, end - at

    asked: list[list[Range]] = [[] for _ in resolved.held]
    for of in range(resolved.world):
        for owner, start, stop in sources(of):
            if owner not in (None, of):
                asked[owner].append((start, stop))
    borders = tuple(merge_ranges(a) for a in asked)  # a position goes to one place: nothing overlaps

    def part(owner: int | None, start: int, stop: int) -> tuple[int | None, int, int]:
        if owner in (None, rank):
            return owner, start, stop
        before = 0
        for first, last in borders[owner]:
            if first <= start < last:
                return owner, before + start - first, before + stop - first
            before += last - first
        raise RuntimeError("a row that is needed is not sent")

    width = max(sum(stop - start for start, stop in b) for b in borders)
    return RollPlan(borders, width, tuple(part(*source) for source in sources(rank)))


@torch.library.custom_op("hyper_cp::roll_sequence", mutates_args=())
def roll_sequence(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, shifts: int) -> Tensor:
    """This rank's share ``[.. S/n ..]`` of the sequence rolled by ``shifts``, zero where another document (or the
    outside) would come in. One all-gather of the rows that cross between ranks."""
    cp = cp_mesh.by_key(mesh)
    packed = read(documents)
    resolved = resolve(layout, cp.size, x.shape[seq_dim] * cp.size, packed)
    plan = roll_plan(resolved, cp.rank, shifts)
    rows = x.movedim(seq_dim, 0)
    received = rows.new_empty(cp.size, 0)
    if plan.width:
        send = rows.new_zeros(plan.width, *rows.shape[1:])
        mine = [rows[start:stop] for start, stop in plan.borders[cp.rank]]
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
    numbers = (packed.numbers(p) for p in (at, at - shifts))
    return out.masked_fill_(over_rows(torch.ne(*numbers).to(x.device), x.ndim, seq_dim), 0)


def over_rows(per_token: Tensor, ndim: int, seq_dim: int) -> Tensor:
    """``[1 or B, S, *rest]`` with dimensions of size 1 so that it broadcasts over a tensor of ``ndim`` dimensions:
    the batch is its dimension 0, or 1 if the sequence is dimension 0. The rest stays last."""
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
    *where, shifts = ctx.where  # rolling back is the transpose, borders of documents included
    return roll_sequence(grad, *ctx.saved_tensors, *where, -shifts), None, None, None, None, None


roll_sequence.register_autograd(_differentiate_roll, setup_context=_save)

# --------------------------------------------------------------------------- numbers


def by_rank(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """A small ``x`` of every rank of a mesh of any dimensions, ``[n, *x.shape]``: the same on all of them."""
    axes = [Axis.of(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim))]
    return gather_ranks(axes, x)
