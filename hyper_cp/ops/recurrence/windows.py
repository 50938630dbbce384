"""Windows over a split sequence: the rows before each position, for token shifts, n-grams and pools of keys.

Forward fetches the rows before each held range, as a short convolution does; backward sends their gradients back to the
ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...mesh import cp_mesh, nans
from ...mesh.arguments import check_int, check_sequence
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, calling, operation
from ..checks import check_local
from ..kernels.partials import accumulation_dtype
from ..recompute import check_recompute, fingerprint
from .checks import agree, check_layout_of, documents_of
from .halo import Halo


def windows(
    x: Tensor,
    shifts: Sequence[int],
    *,
    mesh: DeviceMesh | CPMesh,
    every: int = 1,
    fill: float = 0.0,
    layout: str = "contiguous",
    documents: Any = None,
) -> Tensor:
    """The rows of a split sequence that lie before the positions of this rank, with their gradients.

    Window i of position p has the rows ``x[p - shift]`` for each shift, over *global* positions. ``shifts=[1]`` is a
    token shift (RWKV), ``[1, 2]`` on token ids makes trigrams, ``range(7, -1, -1)`` with ``every=4`` are windows of 8
    tokens with a stride of 4, of which pooled keys are made. Only rows that another rank holds travel, at most the
    largest shift before each range that a rank holds; gradients return the same way.

    Args:
        x: this rank's share ``[B, S/n, ...]``, of any dtype; floating-point ones have gradients.
        shifts: distances, from 0 on.
        mesh: the cp mesh of n ranks.
        every: only windows that end a block of so many positions: those of p where ``(p + 1) % every`` is 0. Their
            number may differ between ranks, and be 0.
        fill: in place of rows before the sequence, and of rows in another document than p.
        layout: the positions that the ranks hold, as in :func:`hyper_cp.ops.attention`.
        documents: cumulative lengths ``[0, ..., S]`` of packed documents (a list or tensor, or one per batch row).
            None: those of the enclosing ``handler.documents`` block, if there is one.

    Returns:
        ``[B, m, len(shifts), ...]``, with m windows in the order of this rank's positions.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.
        NotImplementedError: with ``every`` > 1 in compiled code, in which m is not known.

    Example::

        >>> windows(torch.randn(2, 8, 6), [1], mesh=mesh).shape
        torch.Size([2, 8, 1, 6])
        >>> windows(torch.randn(2, 8, 6), range(8), every=4, mesh=mesh).shape
        torch.Size([2, 2, 8, 6])

    Source: the halo exchange of stencil codes; pooled keys as in DeepSeek V4.
    """
    name, shifts = "windows", list(shifts) if isinstance(shifts, range) else shifts
    form = "[batch, positions, ...]"
    check_local(f"{name}: x", x, max(2, getattr(x, "ndim", 2)), form)
    check_sequence("shifts", shifts, int)
    if 0 in x.shape or not shifts:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}, and shifts={shifts}. There is nothing to fetch. Pass {form} with "
            "values, and at least one shift"
        )
    for shift in shifts:
        check_int("shifts", shift, "Each is a distance to an earlier row", least=0)
    check_int("every", every, "Windows end at so many positions after each other")
    if every > 1 and torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name}: every={every} in compiled code. How many windows a rank has depends on its positions. Call it "
            "outside of the compiled function"
        )
    cp = cp_mesh.whole_view(mesh)
    table = documents_of(mesh, cp, documents, name)
    agree(f"{name} {[*shifts]} every {every}", cp, layout, table, x)
    check_layout_of(name, cp, layout, table, x.shape[0], x.shape[1])
    with calling(name):
        out: Tensor = windows_op(x, shifts, every, fill, table, cp.key, layout)
    return out


def _rows(halo: Halo, shifts: list[int], every: int) -> tuple[Tensor, Tensor]:
    """The fetched rows ``[m, W]`` of windows, and True where one is outside of the sequence or of the document of the
    window, ``[m, W, B or 1]``; on the CPU."""
    ends, back = (halo.positions + 1) % every == 0, torch.tensor(shifts)
    return halo.index[ends][:, None] - back, halo.hidden(halo.positions[ends], back)


@torch.library.custom_op("hyper_cp::windows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def windows_op(
    x: Tensor, shifts: list[int], every: int, fill: float, documents: Tensor | None, mesh: str, layout: str
) -> Tensor:
    """See :func:`windows`."""
    with operation(cp := cp_mesh.by_key(mesh), "windows", "forward"):
        if x.is_floating_point():
            nans.check(cp, "x", x)
        halo = Halo(len(x[0]), documents, mesh, layout, max(shifts), 0)
        fetched = halo.fetch(x.movedim(1, 0))
    rows, hidden = (found.to(x.device) for found in _rows(halo, shifts, every))
    out = fetched[rows].masked_fill_(hidden.view(*hidden.shape, *(1,) * (x.ndim - 2)), fill)
    return out.movedim(2, 0).contiguous()


@torch.library.custom_op("hyper_cp::windows_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def windows_backward_op(
    dout: Tensor,
    mark: Tensor,
    shifts: list[int],
    every: int,
    length: int,
    documents: Tensor | None,
    mesh: str,
    layout: str,
) -> Tensor:
    """The gradient of x, of which this rank holds ``length`` positions."""
    check_recompute(documents, mesh, mark)
    halo = Halo(length, documents, mesh, layout, max(shifts), 0)
    rows, hidden = (found.to(dout.device) for found in _rows(halo, shifts, every))
    own = dout.movedim(0, 2).masked_fill(hidden.view(*hidden.shape, *(1,) * (dout.ndim - 3)), 0)
    total = own.new_zeros(halo.fetched, *own.shape[2:], dtype=accumulation_dtype(own.dtype))
    total.index_add_(0, rows.flatten(), own.flatten(0, 1).to(total.dtype))
    with operation(cp := cp_mesh.by_key(mesh), "windows", "backward"):
        nans.check(cp, "the gradient of the output", dout)
        home = halo.give_back(total)
    return home.to(dout.dtype).movedim(1, 0).contiguous()


@windows_op.register_fake
def _(x: Tensor, shifts: list[int], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:2], len(shifts), *x.shape[2:])


@windows_backward_op.register_fake
def _(dout: Tensor, mark: Tensor, shifts: list[int], every: int, length: int, *_: Any) -> Tensor:
    return dout.new_empty(dout.shape[0], length, *dout.shape[3:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.shifts, ctx.every, _, ctx.documents, ctx.mesh, ctx.layout = inputs
    ctx.caller, ctx.length = caller(), x.shape[1]
    ctx.save_for_backward(fingerprint(ctx.documents, ctx.mesh))


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (mark,) = ctx.saved_tensors
    with backward_of(ctx.caller):
        of_x = windows_backward_op(dout, mark, ctx.shifts, ctx.every, ctx.length, ctx.documents, ctx.mesh, ctx.layout)
    return of_x, None, None, None, None, None, None


windows_op.register_autograd(_differentiate, setup_context=_save)
