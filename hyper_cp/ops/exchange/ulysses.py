"""Ulysses: the differentiable all-to-all that trades a sequence shard for a head shard, and back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...mesh import comm, cp_mesh
from ...schedule.documents import read
from ...schedule.lookup import resolve
from . import keys_values as exchange


@torch.library.custom_op("hyper_cp::all_to_all", mutates_args=())
def all_to_all_op(
    xs: list[Tensor], documents: Tensor | None, mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool
) -> list[Tensor]:
    """``documents``: table of boundaries, if the layout depends on them."""
    cp = cp_mesh.by_key(mesh)
    move = exchange.sequence_to_heads if to_heads else exchange.heads_to_sequence
    pending = []
    with comm.landing():
        for x in xs:  # all are in flight before the first is waited for
            length = x.shape[seq_dim] * cp.ring.size * (cp.ulysses.size if to_heads else 1)
            pieces = resolve(layout, cp.size, length, read(documents)).pieces(cp.ulysses_peers())
            pending.append(move(cp.ulysses, x, seq_dim, head_dim, pieces))
        return [p.wait() for p in pending]


@all_to_all_op.register_fake
def _(
    xs: list[Tensor], documents: Tensor | None, mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool
) -> list[Tensor]:
    degree = cp_mesh.by_key(mesh).ulysses.size
    out = []
    for x in xs:
        shape = list(x.shape)
        grows, shrinks = (seq_dim, head_dim) if to_heads else (head_dim, seq_dim)
        shape[grows] *= degree
        shape[shrinks] //= degree
        out.append(x.new_empty(shape))
    return out


def _save_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.documents, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, ctx.to_heads = inputs


def _differentiate_all_to_all(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    back = all_to_all_op(grads, ctx.documents, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, not ctx.to_heads)
    return (back, None, None, None, None, None, None)


all_to_all_op.register_autograd(_differentiate_all_to_all, setup_context=_save_all_to_all)


def shared_heads(x: Tensor, degree: int, head_dim: int) -> Tensor:
    """Keys or values with each head as often as needed so that their number splits over ``degree`` ranks, beside
    the query heads that use them: the least common multiple of both. (Query heads are a multiple of either, so
    groups stay whole.) Gradients of the copies sum back."""
    heads = x.shape[head_dim]
    return x if heads % degree == 0 else x.repeat_interleave(math.lcm(heads, degree) // heads, dim=head_dim)
