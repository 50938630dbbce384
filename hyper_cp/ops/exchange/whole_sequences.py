"""Whole sequences on every rank of a mesh, or of its rings, differentiably; and the positions of local queries.

The engine itself never gathers what it does not need: this is for the batch side, and for attention that is not made of
tiles (see ``flex``), whose kernel takes functions of positions and needs all keys at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh import cp_mesh, nans
from ...mesh.comm import Axis, gather_ranks, sum_to_ranks
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, operation
from ...schedule.documents import read
from ...schedule.layout import ResolvedLayout
from ...schedule.lookup import ascending, resolve
from ..differentiable import differentiable
from ..kernels.partials import accumulation_dtype


def _ranks(cp: CPMesh, ring: bool) -> tuple[Sequence[Axis], int, int]:
    """The axes of the mesh or of a ring, this rank's place in it, and its size."""
    return ([cp.ring], cp.ring.rank, cp.ring.size) if ring else (cp.flat, cp.rank, cp.size)


def _positions(cp: CPMesh, layout: str, length: int, documents: Tensor | None, ring: bool) -> ResolvedLayout:
    """The positions of every rank of the mesh or of a ring."""
    resolved = resolve(layout, cp.size, length, read(documents))
    return resolved.by_ring(cp.ulysses.size) if ring else resolved


@torch.library.custom_op("hyper_cp::gather_sequence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_sequence_op(
    x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, add_up: bool = False, ring: bool = False
) -> Tensor:
    """Gather ``[.. S/n ..] -> [.. S ..]`` in global order, the same on every rank of the mesh, or of a ring of it.

    Its gradient is a share of the whole's. With ``add_up`` that is the sum over the ranks, each of which uses another
    part of the whole; without, every rank uses it in the same way, and none adds to the share of another.
    """
    cp = cp_mesh.by_key(mesh)
    axes, _, size = _ranks(cp, ring)
    positions = _positions(cp, layout, x.shape[seq_dim] * size, documents, ring)  # raises before anything is sent
    with operation(cp, f"gathering of {'keys' if ring else 'a sequence'}", "forward"):
        if ring:
            nans.check(cp, "key, value", x)
        by_rank = gather_ranks(axes, x.movedim(seq_dim, 0))
    if size == 1:
        return x.clone(memory_format=torch.contiguous_format)  # an op must not return its input
    to_ascending, _ = ascending(positions, range(size))
    return to_ascending.take(by_rank.flatten(0, 1), 0).movedim(0, seq_dim).contiguous()


@gather_sequence_op.register_fake
def _(x, documents, mesh, layout, seq_dim, add_up=False, ring=False):  # type: ignore[no-untyped-def]
    shape = list(x.shape)
    shape[seq_dim] *= _ranks(cp_mesh.by_key(mesh), ring)[2]
    return x.new_empty(shape)


@torch.library.custom_op("hyper_cp::share_sequence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def share_sequence(
    x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, add_up: bool = False, ring: bool = False
) -> Tensor:
    """Take this rank's share of a whole sequence, or with ``add_up`` of the sum over the ranks of the mesh or of a ring
    in the accumulation dtype, ``[.. S ..] -> [.. S/n ..]``. It is an op, so that lengths may be symbolic."""
    cp = cp_mesh.by_key(mesh)
    axes, rank, size = _ranks(cp, ring)
    if size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    positions = _positions(cp, layout, x.shape[seq_dim], documents, ring)
    if not add_up:
        ranges = positions.ranges(rank)
        return torch.cat([x.narrow(seq_dim, start, stop - start) for start, stop in ranges], seq_dim).contiguous()
    with operation(cp, f"sum of the gradients of {'keys' if ring else 'a sequence'}", "backward"):
        if ring:
            nans.check(cp, "the gradients of key, value", x)
        _, to_ranks = ascending(positions, range(size))
        rows = to_ranks.take(x.movedim(seq_dim, 0).to(accumulation_dtype(x.dtype)), 0)
        rows = rows.clone(memory_format=torch.contiguous_format)  # sums overwrite it
        mine = sum_to_ranks(axes, rows.unflatten(0, (size, -1)))
    return mine.to(x.dtype).movedim(0, seq_dim).contiguous()


@share_sequence.register_fake
def _(x, documents, mesh, layout, seq_dim, add_up=False, ring=False):  # type: ignore[no-untyped-def]
    shape = list(x.shape)
    shape[seq_dim] //= _ranks(cp_mesh.by_key(mesh), ring)[2]
    return x.new_empty(shape)


def save_where(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the documents of an op on a sequence, and its other arguments."""
    _, documents, *ctx.where = inputs
    ctx.save_for_backward(documents)
    ctx.caller = caller()


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        return share_sequence(grad, *ctx.saved_tensors, *ctx.where), *(None,) * 6


gather_sequence = differentiable("gather_sequence", gather_sequence_op, _differentiate, save_where)


def gather_keys(k: Tensor, v: Tensor, mesh: str, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, S/ring, D] -> [B, H, S, D]``, ascending, the same on every ring rank. They travel
    together."""
    both = gather_sequence(torch.cat([x.movedim(2, 0) for x in (k, v)], 3), None, mesh, layout, 0, True, True)
    keys, values = both.movedim(0, 2).split([k.shape[3], v.shape[3]], 3)
    return keys, values


@torch.library.custom_op("hyper_cp::query_positions", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def query_positions(q: Tensor, mesh: str, layout: str) -> Tensor:
    """Global position of every query of ``[B, H, S/ring, D]``: ``[S/ring]`` int32 on its device. An op, so that
    lengths may be symbolic."""
    cp = cp_mesh.by_key(mesh)
    on_ring, rank, device = _positions(cp, layout, q.shape[2] * cp.ring.size, None, True), cp.ring.rank, q.device
    key = "positions", rank, device
    # A clone: a compiled graph may write into what an op has returned.
    return on_ring.derived(key, lambda: on_ring.positions(rank).to(device, torch.int32)).clone()


@query_positions.register_fake
def _(q: Tensor, mesh: str, layout: str) -> Tensor:
    return q.new_empty(q.shape[2], dtype=torch.int32)
