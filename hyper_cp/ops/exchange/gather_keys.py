"""Whole keys and values on every ring rank, differentiably, and the global positions of local queries.

For attention that is not made of tiles (see ``flex``): a kernel that takes functions of positions
needs all keys at once. The engine itself never gathers what it does not need.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...mesh import comm, cp_mesh
from ...mesh.cp_mesh import CPMesh
from ...schedule.layout import Piece, ResolvedLayout
from ...schedule.lookup import resolve
from ..kernels.partials import accumulation_dtype
from .wire import from_wire, to_wire


def _on_ring(cp: CPMesh, layout: str, length: int) -> ResolvedLayout:
    """The positions of every ring rank."""
    return resolve(layout, cp.size, length).by_ring(cp.ulysses.size)


def _pieces(cp: CPMesh, layout: str, length: int) -> tuple[Piece, ...]:
    """``(ring rank, local start, local stop)`` of all ring ranks, in ascending global order."""
    return _on_ring(cp, layout, length).pieces(range(cp.ring.size))


@torch.library.custom_op("hyper_cp::gather_keys", mutates_args=())
def gather_keys(xs: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    """Each ``[B, H, S/ring, D] -> [B, H, S, D]``, ascending, the same on every ring rank."""
    cp = cp_mesh.by_key(mesh)
    with comm.landing():
        pending = [cp.ring.all_gather(to_wire(x)) for x in xs]  # all in flight before the first is waited for
        found = []
        for x, p in zip(xs, pending, strict=True):
            found.append(from_wire(_ascending(p.wait(), _pieces(cp, layout, _whole(x, cp)))))
        return found


def _whole(x: Tensor, cp: CPMesh) -> int:
    return x.shape[2] * cp.ring.size


def _ascending(gathered: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Wire format in rank order -> wire format in global order."""
    share = sum(stop - start for rank, start, stop in pieces if rank == 0)
    parts = [gathered[rank * share + start : rank * share + stop] for rank, start, stop in pieces]
    in_order = all(a[:2] <= b[:2] for a, b in pairwise(pieces))
    return gathered if in_order else torch.cat(parts)


@gather_keys.register_fake
def _(xs: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    cp = cp_mesh.by_key(mesh)
    return [from_wire(x.new_empty(_whole(x, cp), x.shape[0], x.shape[1], x.shape[3])) for x in xs]


@torch.library.custom_op("hyper_cp::scatter_keys", mutates_args=())
def scatter_keys(grads: list[Tensor], mesh: str, layout: str) -> list[Tensor]:
    """The transpose of :func:`gather_keys`: each ``[B, H, S, D] -> [B, H, S/ring, D]``, summed over the ring ranks
    in the accumulation dtype."""
    cp = cp_mesh.by_key(mesh)
    pending, own = [], []
    with comm.landing():
        for grad in grads:
            b, h, length, d = grad.shape
            share = length // cp.ring.size
            by_rank = grad.new_empty(length, b, h, d, dtype=accumulation_dtype(grad.dtype))
            wire, offset = grad.movedim(2, 0), 0
            for rank, start, stop in _pieces(cp, layout, length):
                by_rank[rank * share + start : rank * share + stop].copy_(wire[offset : offset + stop - start])
                offset += stop - start
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


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return scatter_keys(grads, ctx.mesh, ctx.layout), None, None


gather_keys.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("hyper_cp::query_positions", mutates_args=())
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
