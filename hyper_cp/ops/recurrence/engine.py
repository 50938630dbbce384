"""The engine of linear recurrences: one custom op that maps every piece, passes states and reads outputs from them.

Forward maps all pieces of this rank at once, exchanges the maps of its ranges with the other ranks, and adds to each
piece's outputs what its entering state gives. Only the inputs are saved. Backward maps the pieces again and sends one
message that holds what both directions need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mesh import cp_mesh, nans
from ...mesh.failures import backward_of, caller, operation
from ...schedule.documents import ends_of_tokens, read
from ..differentiable import differentiable
from ..kernels.partials import accumulation_dtype
from ..recompute import check_recompute, check_replay, fingerprint
from ..settings import read as read_settings
from . import kernels
from .chunked import Affine, Inputs
from .segments import segments
from .states import Passing


class RecurrenceSettings(NamedTuple):
    """Everything that the ops of recurrences need beside tensors."""

    layout: str
    kernel: str
    exchanged: bool
    """True if heads have been exchanged for the sequence of a whole ring rank."""
    mesh: str


class _Work:
    """The segments of a call on this rank, its kernel, and the axes along which states pass."""

    def __init__(self, v: Tensor, g: Tensor, documents: Tensor | None, settings: RecurrenceSettings) -> None:
        cp = cp_mesh.by_key(settings.mesh)
        self.kernel = kernels.get(settings.kernel)
        degree = cp.ulysses.size if settings.exchanged else 1
        self.cp = cp
        self.axes = (cp.ring,) if settings.exchanged else cp.flat
        self.rank, world = (cp.ring.rank, cp.ring.size) if settings.exchanged else (cp.rank, cp.size)
        self.dtype = accumulation_dtype(v.dtype)
        size = self.kernel.size(g)
        length = v.shape[1] * world
        self.segments = segments(settings.layout, self.rank, world, degree, length, size, read(documents))
        cp.batch.record_call(v.shape[1] // degree, settings.layout, cp.size)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Inputs:
        return Inputs(*(None if x is None else self._wide(self.segments.split(x)) for x in (q, k, v, g, beta)))  # type: ignore[arg-type]

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if self.kernel.wide else x

    def entered(self, maps: Affine) -> Affine:
        """The maps with no state where a document begins, in the dtype of states."""
        entering, (M, P, Q, O) = self.segments.entering(maps.P), maps  # noqa: E741
        return maps if entering is None else Affine(M * entering, P, Q * entering, O)

    def until(self, ends: tuple[int, ...], maps: Affine) -> Affine:
        """The maps that leave states as they are behind the end of each row."""
        inside, unchanged = self.segments.before(ends, maps.P) > 0, torch.ones_like(maps.M)
        if maps.M.shape[-1] > 1:
            unchanged = torch.eye(maps.M.shape[-1], dtype=maps.M.dtype, device=maps.M.device)
        return maps._replace(M=torch.where(inside, maps.M, unchanged), P=torch.where(inside, maps.P, 0))

    def passing(self, maps: Affine) -> Passing:
        return Passing(self.segments, maps.M, self.axes, self.rank)


@torch.library.custom_op("hyper_cp::linear_recurrence", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def recurrence_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, documents: Tensor | None, settings: str
) -> Tensor:
    """Outputs ``[B, S, H, dv]`` of this rank's share."""
    return _forward(None, q, k, v, g, beta, documents, settings)[0]


@torch.compiler.disable(
    reason="A final state is kept for decoding, which is not compiled. Compile without fullgraph=True"
)
def with_final_state(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The same, without a backward, and the state ``[B, H, dk, dv]`` after the last token of each row."""
    return _forward(ends_of_tokens(arguments[5]), *arguments)


def _forward(
    ends: tuple[int, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    documents: Tensor | None,
    settings: str,
) -> tuple[Tensor, Tensor]:
    options = read_settings(RecurrenceSettings, settings)
    check_replay(documents, options.mesh)
    work = _Work(v, g, documents, options)
    with torch.autocast(v.device.type, enabled=False), operation(work.cp, "recurrence", "forward"):
        nans.check(work.cp, "q, k, v, g, beta", q, k, v, g, beta)
        maps = work.entered(work.kernel.forward(work.inputs(q, k, v, g, beta)))
        states, last = work.passing(maps).forward(maps.P)
        if ends is not None:
            of_tokens = work.until(ends, maps)
            last = work.passing(of_tokens).forward(of_tokens.P)[1]
        return _own_memory(work.segments.join(maps.O + maps.Q @ states).to(v.dtype)), last


def _own_memory(x: Tensor) -> Tensor:
    """A contiguous tensor that is no view: outputs of ops may be written to in place."""
    return x.contiguous() if x._base is None else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("hyper_cp::linear_recurrence_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def recurrence_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    mark: Tensor,
    documents: Tensor | None,
    settings: str,
) -> list[Tensor]:
    """Gradients of q, k, v, g and, if it is given, beta. ``mark``: the fingerprint of the documents of the inputs."""
    check_recompute(documents, read_settings(RecurrenceSettings, settings).mesh, mark)
    work = _Work(v, g, documents, read_settings(RecurrenceSettings, settings))
    with torch.autocast(v.device.type, enabled=False), operation(work.cp, "recurrence", "backward"):
        nans.check(work.cp, "the gradient of the output, q, k, v, g, beta", dout, q, k, v, g, beta)
        inputs = work.inputs(q, k, v, g, beta)
        found, pull = work.kernel.differentiable(inputs)
        maps = work.entered(found)
        dO = work.segments.split(dout).to(maps.O.dtype)
        states, gradients = work.passing(maps).both(maps.P, maps.Q.mT @ dO)
        dM = (gradients @ states.mT if maps.M.shape[-1] > 1 else gradients * states).sum_to_size(maps.M.shape)
        # What does not enter a piece has no gradient; the factors of `entered` are the same in both directions.
        of_maps = work.entered(Affine(dM, gradients, dO @ states.mT, dO))
        given = [x for x in (q, k, v, g, beta) if x is not None]
        return [work.segments.join(d).to(x.dtype).contiguous() for d, x in zip(pull(of_maps), given, strict=True)]


@recurrence_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


@recurrence_backward_op.register_fake
def _(dout: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.documents, ctx.settings = inputs
    ctx.caller = caller()
    ctx.save_for_backward(*tensors, fingerprint(ctx.documents, read_settings(RecurrenceSettings, ctx.settings).mesh))


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        grads = recurrence_backward_op(dout, *ctx.saved_tensors, ctx.documents, ctx.settings)
    return *grads, *([None] * (7 - len(grads)))


differentiable_recurrence = differentiable("recurrence", recurrence_op, _differentiate, _save)
