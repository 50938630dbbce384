"""The batch side's communication: gathering a sharded tensor along its sequence, differentiably."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layout as layouts
from . import mesh as meshes
from .axis import gather_ranks


@torch.library.custom_op("hyper_cp::gather_sequence", mutates_args=())
def gather_sequence(x: Tensor, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """``[.. S/n ..] -> [.. S ..]``, ascending, the same on every rank of the mesh."""
    cp = meshes.by_key(mesh)
    length = x.shape[seq_dim] * cp.size
    by_rank = gather_ranks(cp.flat, x.movedim(seq_dim, 0))
    pieces = layouts.ascending_pieces(layout, range(cp.size), cp.size, length)
    parts = [by_rank[rank, start:stop].movedim(0, seq_dim) for rank, start, stop in pieces]
    return torch.cat(parts, dim=seq_dim).contiguous()


@gather_sequence.register_fake
def _(x: Tensor, mesh: str, layout: str, seq_dim: int) -> Tensor:
    shape = list(x.shape)
    shape[seq_dim] *= meshes.by_key(mesh).size
    return x.new_empty(shape)


@torch.library.custom_op("hyper_cp::own_slice", mutates_args=())
def own_slice(x: Tensor, mesh: str, layout: str, seq_dim: int) -> Tensor:
    """``[.. S ..] -> [.. S/n ..]``: this rank's share. An op, so that lengths may be symbolic."""
    cp = meshes.by_key(mesh)
    ranges = layouts.rank_ranges(layout, cp.rank, cp.size, x.shape[seq_dim])
    parts = [x.narrow(seq_dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim=seq_dim).contiguous()


@own_slice.register_fake
def _(x: Tensor, mesh: str, layout: str, seq_dim: int) -> Tensor:
    shape = list(x.shape)
    shape[seq_dim] //= meshes.by_key(mesh).size
    return x.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.mesh, ctx.layout, ctx.seq_dim = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Every rank uses the whole in the same way, so its share of the gradient is all there is.
    return own_slice(grad, ctx.mesh, ctx.layout, ctx.seq_dim), None, None, None


gather_sequence.register_autograd(_differentiate, setup_context=_save)
