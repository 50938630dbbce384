"""Whole keys and values on every ring rank, differentiably, and the global positions of local queries.

For attention that is not made of tiles (see ``flex``): a kernel that takes functions of positions
needs all keys at once. The engine itself never gathers what it does not need.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...mesh import cp_mesh, nans
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, operation
from ...schedule.layout import ResolvedLayout
from ...schedule.lookup import ascending, resolve
from ...schedule.ranges import Rows
from ..kernels.partials import accumulation_dtype
from .wire import from_wire, to_wire


def _on_ring(cp: CPMesh, layout: str, length: int) -> ResolvedLayout:
    """The positions of every ring rank."""
    return resolve(layout, cp.size, length).by_ring(cp.ulysses.size)


def _order(cp: CPMesh, layout: str, length: int) -> tuple[Rows, Rows]:
    """Rows that put the keys of all ring ranks, as they are gathered, into ascending order; and their inverse."""
    return ascending(_on_ring(cp, layout, length), range(cp.ring.size))


@torch.library.custom_op("hyper_cp::gather_keys", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_keys(xs: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    """Each ``[B, H, S/ring, D] -> [B, H, S, D]``, ascending, the same on every ring rank."""
    cp = cp_mesh.by_key(mesh)
    with operation(cp, "gathering of keys", "forward"):
        nans.check(cp, "key, value", *xs)
        pending = [cp.ring.all_gather(to_wire(x)) for x in xs]  # all in flight before the first is waited for
        found = []
        for x, p in zip(xs, pending, strict=True):
            to_ascending, _ = _order(cp, layout, _whole(x, cp))
            found.append(from_wire(to_ascending.take(p.wait(), 0)))
        return found


def _whole(x: Tensor, cp: CPMesh) -> int:
    return x.shape[2] * cp.ring.size


@gather_keys.register_fake
def _(xs: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    cp = cp_mesh.by_key(mesh)
    return [from_wire(x.new_empty(_whole(x, cp), x.shape[0], x.shape[1], x.shape[3])) for x in xs]


@torch.library.custom_op("hyper_cp::scatter_keys", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def scatter_keys(grads: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    """The transpose of :func:`gather_keys`: each ``[B, H, S, D] -> [B, H, S/ring, D]``, summed over the ring ranks
    in the accumulation dtype."""
    cp = cp_mesh.by_key(mesh)
    pending, own = [], []
    with operation(cp, "sum of the keys' gradients", "backward"):
        nans.check(cp, "the gradients of key, value", *grads)
        for grad in grads:
            length = grad.shape[2]
            share = length // cp.ring.size
            _, to_ranks = _order(cp, layout, length)
            wide = grad.movedim(2, 0).to(accumulation_dtype(grad.dtype))
            by_rank = to_ranks.take(wide, 0).clone(memory_format=torch.contiguous_format)
            mine = by_rank[cp.ring.rank * share : (cp.ring.rank + 1) * share]
            own.append(mine.clone())
            mine.zero_()
            pending.append(cp.ring.reduce_scatter(by_rank))
        sums = [mine.add_(p.wait()) for mine, p in zip(own, pending, strict=True)]
    return [from_wire(total.to(grad.dtype)) for total, grad in zip(sums, grads, strict=True)]


@scatter_keys.register_fake
def _(grads: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    n = cp_mesh.by_key(mesh).ring.size
    return [from_wire(x.new_empty(x.shape[2] // n, x.shape[0], x.shape[1], x.shape[3])) for x in grads]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.mesh, ctx.layout = inputs
    ctx.caller = caller()


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        return scatter_keys(grads, ctx.mesh, ctx.layout), None, None


gather_keys.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("hyper_cp::query_positions", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def query_positions(q: Tensor, mesh: str, layout: str) -> Tensor:
    """Global position of every query of ``[B, H, S/ring, D]``: ``[S/ring]`` int32 on its device. An op, so that
    lengths may be symbolic."""
    cp = cp_mesh.by_key(mesh)
    # A clone: a compiled graph may write into what an op has returned.
    return _positions(_on_ring(cp, layout, _whole(q, cp)), cp.ring.rank, q.device).clone()


@lru_cache(maxsize=64)
def _positions(layout: ResolvedLayout, rank: int, device: torch.device) -> Tensor:
    return layout.positions(rank).to(device, torch.int32)


@query_positions.register_fake
def _(q: Tensor, mesh: str, layout: str) -> Tensor:
    return q.new_empty(q.shape[2], dtype=torch.int32)
