"""Whole keys and values on every ring rank, differentiably, and the global positions of local queries.

For attention that is not made of tiles (see ``flex``): a kernel that takes functions of positions
needs all keys at once. The engine itself never gathers what it does not need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...mesh import cp_mesh, nans
from ...mesh.comm import sum_to_ranks
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, operation
from ...schedule.layout import ResolvedLayout
from ...schedule.lookup import ascending, resolve
from ...schedule.ranges import Rows
from ..kernels.partials import accumulation_dtype


def _on_ring(cp: CPMesh, layout: str, length: int) -> ResolvedLayout:
    """The positions of every ring rank."""
    return resolve(layout, cp.size, length).by_ring(cp.ulysses.size)


def _order(cp: CPMesh, layout: str, length: int) -> tuple[Rows, Rows]:
    """Rows that put the keys of all ring ranks, as they are gathered, into ascending order; and their inverse."""
    return ascending(_on_ring(cp, layout, length), range(cp.ring.size))


def gather_keys(k: Tensor, v: Tensor, mesh: str, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, S/ring, D] -> [B, H, S, D]``, ascending, the same on every ring rank. They travel
    together."""
    both = gather_rows(torch.cat([x.movedim(2, 0) for x in (k, v)], 3), mesh, layout)
    keys, values = both.movedim(0, 2).split([k.shape[3], v.shape[3]], 3)
    return keys, values


@torch.library.custom_op("hyper_cp::gather_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_rows(x: Tensor, mesh: str, layout: str) -> Tensor:
    """``[S/ring, ...] -> [S, ...]``, ascending, the same on every ring rank."""
    cp = cp_mesh.by_key(mesh)
    with operation(cp, "gathering of keys", "forward"):
        nans.check(cp, "key, value", x)
        to_ascending, _ = _order(cp, layout, len(x) * cp.ring.size)
        return to_ascending.take(cp.ring.all_gather(x.contiguous()).wait(), 0)


@gather_rows.register_fake
def _(x: Tensor, mesh: str, layout: str) -> Tensor:
    return x.new_empty(len(x) * cp_mesh.by_key(mesh).ring.size, *x.shape[1:])


@torch.library.custom_op("hyper_cp::scatter_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def scatter_rows(grad: Tensor, mesh: str, layout: str) -> Tensor:
    """The transpose of :func:`gather_rows`: ``[S, ...] -> [S/ring, ...]``, summed over the ring ranks in the
    accumulation dtype."""
    cp = cp_mesh.by_key(mesh)
    with operation(cp, "sum of the keys' gradients", "backward"):
        nans.check(cp, "the gradients of key, value", grad)
        _, to_ranks = _order(cp, layout, len(grad))
        by_rank = to_ranks.take(grad.to(accumulation_dtype(grad.dtype)), 0).clone(memory_format=torch.contiguous_format)
        return sum_to_ranks([cp.ring], by_rank.unflatten(0, (cp.ring.size, -1))).to(grad.dtype)


@scatter_rows.register_fake
def _(grad: Tensor, mesh: str, layout: str) -> Tensor:
    return grad.new_empty(len(grad) // cp_mesh.by_key(mesh).ring.size, *grad.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.mesh, ctx.layout = inputs
    ctx.caller = caller()


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        return scatter_rows(grad, ctx.mesh, ctx.layout), None, None


gather_rows.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("hyper_cp::query_positions", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def query_positions(q: Tensor, mesh: str, layout: str) -> Tensor:
    """Global position of every query of ``[B, H, S/ring, D]``: ``[S/ring]`` int32 on its device. An op, so that
    lengths may be symbolic."""
    cp = cp_mesh.by_key(mesh)
    on_ring, rank, device = _on_ring(cp, layout, q.shape[2] * cp.ring.size), cp.ring.rank, q.device
    key = "positions", rank, device
    # A clone: a compiled graph may write into what an op has returned.
    return on_ring.derived(key, lambda: on_ring.positions(rank).to(device, torch.int32)).clone()


@query_positions.register_fake
def _(q: Tensor, mesh: str, layout: str) -> Tensor:
    return q.new_empty(q.shape[2], dtype=torch.int32)
