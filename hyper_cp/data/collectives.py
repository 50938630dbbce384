"""The batch side's communication: rolling a sharded tensor along its sequence, rows of any ranks, and small sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.compiling import is_compiling
from .._torch.leaves import nodes_of
from .._torch.once import refuse_a_second_time
from ..mesh import cp_mesh
from ..mesh.comm import Axis, gather_by_keys, gather_ranks
from ..mesh.failures import operation
from ..ops.differentiable import differentiable
from ..ops.exchange.held_rows import fetch, rows_plan
from ..ops.exchange.whole_sequences import save_where
from ..schedule.documents import read
from ..schedule.lookup import resolve
from ..schedule.readers import ReadRows


class _ValueAndGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiable: Tensor, of_ranks: str) -> Tensor:
        ctx.of_ranks = of_ranks
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        if ctx.of_ranks:
            refuse_a_second_time(ctx.of_ranks)
        return None, grad, None


def with_gradient_of(value: Tensor, differentiable: Tensor, of_ranks: str = "") -> Tensor:
    """Return one tensor's value with another's gradient. ``of_ranks``: what makes the value of those of all ranks; it
    cannot be differentiated twice."""
    found: Tensor = _ValueAndGradient.apply(value.detach(), differentiable, of_ranks)
    return found


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[str], ranks: int) -> Tensor:
        ctx.axes, ctx.ranks = axes, ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_a_second_time("the gradient of what all ranks hold")
        return gather_by_keys(ctx.axes, grad).sum(0) / ctx.ranks, None, None


def with_whole_gradient(x: Tensor, mesh: DeviceMesh, *, mean: bool) -> Tensor:
    """Return a tensor that all ranks hold alike; its gradient is the sum of those of all ranks, or their mean."""
    found: Tensor = _WholeGradient.apply(x, _keys_of_axes(mesh), mesh.size() if mean else 1)
    return found


def has_pooled(x: Tensor) -> bool:
    """True if ``x`` was computed from a result of ``pool`` whose gradient is taken to be that of all ranks."""
    whole = f"{_WholeGradient.__name__}Backward"
    nodes = nodes_of([x.grad_fn], lambda node: node.name() == whole)
    return any(getattr(node, "of_ranks", None) == "pool" for node in nodes)


def is_of_all_ranks(node: Any) -> bool:
    """True for the node in an autograd graph of such a tensor: a mean or a whole sequence of all ranks."""
    return bool(node.name() == f"{_ValueAndGradient.__name__}Backward")


# --------------------------------------------------------------------------- rolling


@torch.library.custom_op("hyper_cp::roll_sequence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def roll_sequence_op(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, shifts: int) -> Tensor:
    """This rank's share ``[.. S/n ..]`` of the sequence rolled by ``shifts``; values from another document or from
    outside the sequence are zero. One all-gather of the rows that cross between ranks."""
    cp = cp_mesh.by_key(mesh)
    packed = read(documents)
    resolved = resolve(layout, cp.size, x.shape[seq_dim] * cp.size, packed)
    plan = rows_plan(resolved, cp.rank, shifts, -shifts)
    with operation(cp, "roll of a sequence"):
        out = fetch(x.movedim(seq_dim, 0), plan, cp.flat, cp.rank).movedim(0, seq_dim).contiguous()
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


@roll_sequence_op.register_fake
def _(x: Tensor, documents: Tensor | None, mesh: str, layout: str, seq_dim: int, shifts: int) -> Tensor:
    return x.new_empty(x.shape)


def _differentiate_roll(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *where, shifts = ctx.where  # rolling back is the transpose, documents included
    return roll_sequence_op(grad, *ctx.saved_tensors, *where, -shifts), None, None, None, None, None


roll_sequence = differentiable("roll_sequence", roll_sequence_op, _differentiate_roll, save_where)

# --------------------------------------------------------------------------- rows of any ranks


@torch.library.custom_op("hyper_cp::move_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def move_rows_op(x: Tensor, sent: list[int], received: list[int], mesh: str) -> Tensor:
    """Send rows ``[*, D]`` to other ranks of a mesh with one ring, ``sent[i]`` to rank i, the first ones to rank 0; the
    result has ``received[i]`` rows from rank i, in the same order. Its gradient travels back the same way."""
    cp = cp_mesh.by_key(mesh)
    if cp.size == 1:
        return x.new_empty(0, x.shape[1])
    with operation(cp, "exchange of rows"):
        found: Tensor = cp.ring.all_to_all_rows(x.contiguous(), sent, received).wait()
    return found


@move_rows_op.register_fake
def _(x: Tensor, sent: list[int], received: list[int], mesh: str) -> Tensor:
    return x.new_empty(sum(received), x.shape[1])


def _save_move(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.where = inputs


def _differentiate_move(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sent, received, mesh = ctx.where
    return move_rows_op(grad, received, sent, mesh), None, None, None


move_rows = differentiable("move_rows", move_rows_op, _differentiate_move, _save_move)


def rows_to_readers(x: Tensor, plan: ReadRows, mesh: str) -> Tensor:
    """The rows that this rank reads, of those that all ranks have made: ``x [rows, D]`` are this rank's."""
    leaving, read = (torch.from_numpy(i).to(x.device) for i in (plan.leaving, plan.read))
    arrived = move_rows(x[leaving], list(plan.sent), list(plan.received), mesh)
    return torch.cat([x, arrived])[read]


# --------------------------------------------------------------------------- numbers


def by_rank(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Gather a small ``x`` from every rank of a mesh of any number of dimensions: ``[n, *x.shape]`` on all of them."""
    if is_compiling():
        return gather_by_keys(_keys_of_axes(mesh), x)
    return gather_ranks(_axes(mesh), x)


def _axes(mesh: DeviceMesh) -> list[Axis]:
    return [Axis.of(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim))]


@torch.compiler.assume_constant_result  # a graph would keep its axes when it has run, and its op asks for them before
def _keys_of_axes(mesh: DeviceMesh) -> list[str]:
    return [axis.key for axis in _axes(mesh) if axis.size > 1]
