"""Causal depthwise convolution along a split sequence: the rows before each held range travel, and nothing else.

Forward fetches the ``(w - 1) * dilation`` rows before each held range; backward fetches them again, with the rows of
the output's gradient behind each range, in one message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...mesh import cp_mesh, nans
from ...mesh.arguments import check_choice, check_int
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, calling, operation
from ..checks import documents_of
from ..differentiable import differentiable
from ..kernels.partials import accumulation_dtype
from ..recompute import check_recompute, check_replay, fingerprint
from .checks import agree, check_layout_of, check_tensor
from .halo import Halo

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}
"""The activations that convolutions of this kind are fused with."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mesh: DeviceMesh | CPMesh,
    activation: str | None = None,
    dilation: int = 1,
    layout: str = "contiguous",
    documents: Any = None,
    name: str = "causal_conv1d",
) -> Tensor:
    """Causal depthwise convolution of this rank's share of the sequence, as in ``causal_conv1d`` and Mamba.

    Output t is ``sum_i weight[:, i] * x[:, :, t - (w - 1 - i) * dilation] + bias`` over *global* positions.
    Rows before the sequence, and those of other documents, count as zero.

    Args:
        x: this rank's share, ``[B, C, S/n]``.
        weight: ``[C, w]``, of any width.
        bias: ``[C]``, if there is one.
        mesh: the cp mesh of n ranks.
        activation: ``"silu"`` (or ``"swish"``), applied to the result, or None.
        dilation: positions from one weight to the next.
        layout: the positions that the ranks hold, as in :func:`hyper_cp.ops.attention`.
        documents: cumulative lengths ``[0, ..., S]`` of packed documents (a list or tensor, or one per batch row).
            None: those of the enclosing ``handler.documents`` block, if there is one.
        name: names the caller in errors.

    Returns:
        ``[B, C, S/n]`` in the dtype of ``x``. Each rank's gradients of weight and bias are those through its own
        outputs: reduce them over the cp ranks like those of any replicated parameter.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.

    Example::

        >>> causal_conv1d(torch.randn(1, 6, 8), torch.randn(6, 4), mesh=mesh, activation="silu").shape
        torch.Size([1, 6, 8])

    Source: the interface of the package causal_conv1d, in Mamba (arXiv 2312.00752).
    """
    check_tensor(name, "x", x, 3, "[batch, channels, positions]")
    check_tensor(name, "weight", weight, 2, "[channels, width]")
    if weight.shape[0] != x.shape[1] or (bias is not None and tuple(bias.shape) != (x.shape[1],)):
        given = "" if bias is None else f" and bias {tuple(bias.shape)}"
        raise ValueError(
            f"{name}: weight {tuple(weight.shape)}{given} do not fit x {tuple(x.shape)}, which is [batch, channels, "
            f"positions]. A depthwise convolution has one row of weights, and one bias, for each of the {x.shape[1]} "
            "channels. Pass weight [channels, width], and transpose an x of [batch, positions, channels]"
        )
    why = "It is applied to the result"
    check_choice(f"{name}: activation", activation, ACTIVATIONS, why, ", or apply another one yourself")
    check_int(f"{name}: dilation", dilation, "It is the distance between the rows of two weights")
    cp = cp_mesh.whole_view(mesh)
    table = documents_of(mesh, cp, documents, name)
    agree(name if dilation == 1 else f"{name}, dilation={dilation}", cp, layout, table, x, weight, bias)
    check_layout_of(name, cp, layout, table, x.shape[0], x.shape[2])
    with calling(name):
        out: Tensor = differentiable_conv(x, weight, bias, table, cp.key, layout, dilation)
    return ACTIVATIONS[activation](out)


@torch.library.custom_op("hyper_cp::causal_conv1d", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def conv_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    mesh: str,
    layout: str,
    dilation: int,
) -> Tensor:
    """See :func:`causal_conv1d`, without activation."""
    check_replay(documents, mesh)
    shifts, dtype = shifts_of(weight, dilation), accumulation_dtype(x.dtype)
    with operation(cp := cp_mesh.by_key(mesh), "convolution", "forward"):
        nans.check(cp, "x", x)
        halo = Halo(x.shape[2], documents, mesh, layout, shifts[0], 0)
        rows = halo.fetch(x.movedim(2, 0))
    out = x.new_zeros(x.shape[2], *x.shape[:2], dtype=dtype)
    for shift, taps in zip(shifts, weight.to(dtype).unbind(1), strict=True):
        out.addcmul_(halo.shifted(rows, shift).to(dtype), taps)
    if bias is not None:
        out += bias.to(dtype)
    return out.to(x.dtype).movedim(0, 2).contiguous()


@torch.library.custom_op("hyper_cp::causal_conv1d_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def conv_backward_op(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    mark: Tensor,
    documents: Tensor | None,
    mesh: str,
    layout: str,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight. ``mark``: the fingerprint of the documents that the inputs were made with."""
    check_recompute(documents, mesh, mark)
    shifts, dtype = shifts_of(weight, dilation), accumulation_dtype(x.dtype)
    channels, own = x.shape[1], dout.movedim(2, 0).to(dtype)
    with operation(cp := cp_mesh.by_key(mesh), "convolution", "backward"):
        nans.check(cp, "the gradient of the output, x", dout, x)
        both = torch.cat((x, dout.to(x.dtype)), 1).movedim(2, 0)
        halo = Halo(len(both), documents, mesh, layout, shifts[0], shifts[0])
        rows = halo.fetch(both)
    dx, dweight = torch.zeros_like(own), []
    for shift, taps in zip(shifts, weight.to(dtype).unbind(1), strict=True):
        dweight.append((own * halo.shifted(rows, shift)[..., :channels].to(dtype)).sum((0, 1)))
        dx.addcmul_(halo.shifted(rows, -shift)[..., channels:].to(dtype), taps)
    return dx.to(x.dtype).movedim(0, 2).contiguous(), torch.stack(dweight, 1).to(weight.dtype)


def shifts_of(weight: Tensor, dilation: int) -> list[int]:
    """The distances to the rows of the weights ``[C, w]``."""
    return [*range((weight.shape[1] - 1) * dilation, -1, -dilation)]


@conv_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@conv_backward_op.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.documents, ctx.mesh, ctx.layout, ctx.dilation = inputs
    ctx.caller = caller()
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, fingerprint(ctx.documents, ctx.mesh))


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    with backward_of(ctx.caller):
        grads = conv_backward_op(dout, *ctx.saved_tensors, ctx.documents, ctx.mesh, ctx.layout, ctx.dilation)
    dbias = None if ctx.bias is None else dout.sum((0, 2), dtype=accumulation_dtype(dout.dtype)).to(ctx.bias)
    return *grads, dbias, None, None, None, None


differentiable_conv = differentiable("conv", conv_op, _differentiate, _save)
