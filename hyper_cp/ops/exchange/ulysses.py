"""Ulysses: the differentiable all-to-all that trades a sequence shard for a head shard, and back.

Source: DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...mesh import cp_mesh, nans
from ...mesh.comm import Axis, Pending
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, operation
from ...schedule import layout as layouts
from ...schedule.choices import heads_after_sharing
from ...schedule.documents import read
from ...schedule.lookup import ascending, resolve
from ...schedule.ranges import Rows
from ..differentiable import differentiable, no_autocast


@dataclass(frozen=True)
class Ulysses:
    """The exchange of heads around one attention call: sequence to heads before it, back after it.

    ``seq_dim`` and ``head_dim`` are those of the tensors; ``documents`` is the table of the call, on which some layouts
    depend.
    """

    cp: CPMesh
    layout: str
    seq_dim: int = 2
    head_dim: int = 1
    documents: Tensor | None = None

    def to_heads(self, q: Tensor, *kv: Tensor) -> list[Tensor]:
        """Each ``[.. S .. H ..]`` becomes ``[.. S*degree .. H/degree ..]``, ascending in S. Keys and values whose heads
        do not split are sent to every rank that uses them."""
        return self._exchange([q, *self._shared(kv)], True)

    def keys_to_heads(self, *kv: Tensor) -> list[Tensor]:
        """:meth:`to_heads` of keys and values, or of what belongs to their heads."""
        return self._exchange(self._shared(kv), True)

    def _shared(self, kv: Sequence[Tensor]) -> list[Tensor]:
        return [shared_heads(x, self.cp.ulysses.size, self.head_dim) for x in kv]

    def to_sequence(self, result: Any) -> Any:
        """The way back, for a tensor or a tuple or list of tensors (other entries pass through)."""
        back = iter(self._exchange(list(_tensors(result)), False))
        return _replaced(result, back)

    def _exchange(self, xs: list[Tensor], to_heads: bool) -> list[Tensor]:
        if self.cp.ulysses.size == 1:
            return xs
        table = self.documents if layouts.by_documents(self.layout) else None
        arguments = table, self.cp.key, self.layout, self.seq_dim, self.head_dim, to_heads
        found: list[Tensor] = differentiable_all_to_all(xs, *arguments)
        return found


def shared_heads(x: Tensor, degree: int, head_dim: int) -> Tensor:
    """Repeat heads of keys or values so that their number splits over ``degree`` ranks, each beside the query heads
    that use it. (Query heads are a multiple of both numbers, so groups stay whole.) Gradients of the copies are
    summed."""
    heads = x.shape[head_dim]
    return x if heads % degree == 0 else x.repeat_interleave(heads_after_sharing(heads, degree) // heads, dim=head_dim)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _replaced(result: Any, tensors: Iterator[Tensor]) -> Any:
    """``result`` with its tensors replaced, in order."""
    if isinstance(result, Tensor):
        return next(tensors)
    if not isinstance(result, (tuple, list)):
        return result
    items = [_replaced(item, tensors) for item in result]
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


# --------------------------------------------------------------------------- the op


@torch.library.custom_op("hyper_cp::all_to_all", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def all_to_all_op(
    xs: list[Tensor], documents: Tensor | None, mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool
) -> list[Tensor]:
    """``documents``: the table, if the layout depends on it. All tensors are in flight before the op waits for one."""
    cp = cp_mesh.by_key(mesh)
    move = sequence_to_heads if to_heads else heads_to_sequence
    pending = []
    with no_autocast(xs[0].device.type), operation(cp, "exchange of heads"):
        nans.check(cp, "an exchanged tensor", *xs)
        for x in xs:
            length = x.shape[seq_dim] * cp.ring.size * (cp.ulysses.size if to_heads else 1)
            order = ascending(resolve(layout, cp.size, length, read(documents)), cp.ulysses_peers())
            pending.append(move(cp.ulysses, x, seq_dim, head_dim, order))
        return [p.wait() for p in pending]


@all_to_all_op.register_fake
def _(
    xs: list[Tensor], documents: Tensor | None, mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool
) -> list[Tensor]:
    degree = cp_mesh.by_key(mesh).ulysses.size
    wider, narrower = (seq_dim, head_dim) if to_heads else (head_dim, seq_dim)
    out = []
    for x in xs:
        shape = list(x.shape)
        shape[wider], shape[narrower] = shape[wider] * degree, shape[narrower] // degree
        if to_heads and not stays_contiguous(x, seq_dim, head_dim):
            out.append(like_received(x, shape, seq_dim))
        elif to_heads or seq_dim < head_dim:
            out.append(x.new_empty(shape))
        else:  # tokens before heads in memory, see heads_to_sequence
            shape.insert(head_dim, shape.pop(seq_dim))
            out.append(x.new_empty(shape).movedim(head_dim, seq_dim))
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.documents, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, ctx.to_heads = inputs
    ctx.caller = caller()


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        back = all_to_all_op(grads, ctx.documents, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, not ctx.to_heads)
    return (back, None, None, None, None, None, None)


differentiable_all_to_all = differentiable("all_to_all", all_to_all_op, _differentiate, _save, returns_list=True)


# --------------------------------------------------------------------------- the transfers

Order = tuple[Rows, Rows]
"""Rows that put the tokens of the Ulysses ranks, as they lie rank by rank, into ascending order; and their inverse.
Reordering is part of the copy that packs or unpacks a message."""


def like_received(x: Tensor, shape: Sequence[int], seq_dim: int) -> Tensor:
    """An empty tensor with the memory order of :func:`send_heads`: tokens outermost."""
    tokens_first = [shape[seq_dim], *shape[:seq_dim], *shape[seq_dim + 1 :]]
    return x.new_empty(tokens_first).movedim(0, seq_dim)


def stays_contiguous(x: Tensor, seq_dim: int, head_dim: int) -> bool:
    """True if :func:`sequence_to_heads` gives a contiguous tensor.

    It does where tokens of a head lie side by side in memory, since the module that receives the result may rely on it.
    Otherwise, as for heads that a model has split off and transposed, the result has tokens outermost, as the message
    has them, and is not copied.
    """
    return seq_dim < head_dim or x.stride(head_dim) >= x.stride(seq_dim)


def sequence_to_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, order: Order) -> Pending:
    """Trade a sequence shard for a head shard: ``[.. S .. H ..] -> [.. S*n .. H/n ..]``."""
    pending = send_heads(axis, x.unflatten(head_dim, (axis.size, -1)), seq_dim, head_dim, order)
    return pending.then(Tensor.contiguous) if stays_contiguous(x, seq_dim, head_dim) else pending


def send_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, order: Order) -> Pending:
    """:func:`sequence_to_heads` for ``[.. S .. n, H ..]``: ``head_dim`` numbers the destination ranks, and the heads
    are the next dimension. They may be a part of each rank's heads, with any strides. The result is a view of the
    message, with tokens outermost."""
    send = x.movedim(head_dim, 0).movedim(seq_dim + 1, 1).contiguous()  # [n, S, ...]
    to_ascending, _ = order
    return axis.all_to_all(send).then(lambda received: to_ascending.take(received.flatten(0, 1), 0).movedim(0, seq_dim))


def heads_to_sequence(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, order: Order) -> Pending:
    """The inverse: ``[.. S*n .. H ..] -> [.. S .. H*n ..]``.

    In memory a token's heads lie side by side, as in the models around attention: they reshape the output without a
    copy, and autograd takes the gradients over without one.
    """

    def unpacked(by_rank: Tensor) -> Tensor:
        if head_dim > seq_dim:
            return by_rank.flatten(head_dim, head_dim + 1).contiguous()
        tokens_first = by_rank.movedim(seq_dim + 1, head_dim)  # [.. S, n, H ..]
        return tokens_first.flatten(head_dim + 1, head_dim + 2).contiguous().movedim(head_dim, seq_dim)

    return collect_heads(axis, x, seq_dim, head_dim, order).then(unpacked)


def collect_heads(axis: Axis, x: Tensor, seq_dim: int, head_dim: int, order: Order) -> Pending:
    """The inverse of :func:`send_heads`, a view of the message: ``[.. S*n .. H ..] -> [.. S .. n, H ..]``."""
    _, to_ranks = order
    send = to_ranks.take(x.movedim(seq_dim, 0), 0).contiguous().unflatten(0, (axis.size, -1))
    return axis.all_to_all(send).then(lambda received: received.movedim(1, seq_dim + 1).movedim(0, head_dim))
