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

from ..._torch.compiling import is_compiling
from ..._torch.once import once
from ...mesh import cp_mesh, nans
from ...mesh.arguments import check_int, check_sequence
from ...mesh.comm import gather_ranks, sum_to_ranks
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import backward_of, caller, calling, operation
from ...schedule.documents import read
from ...schedule.lookup import resolve
from ...schedule.windows import Gathering, counted, gathering, window_ends
from ..checks import check_dtype, check_local, documents_of
from ..differentiable import differentiable
from ..kernels.partials import accumulation_dtype
from ..recompute import check_recompute, check_replay, fingerprint
from .checks import agree, check_layout_of
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
    """Fetch the rows of a split sequence that lie before the positions of this rank, with their gradients.

    The window of position p has the rows ``x[p - shift]`` for each shift, over *global* positions. ``shifts=[1]`` is a
    token shift (RWKV), ``[2, 1, 0]`` on token ids makes trigrams, and ``range(7, -1, -1)`` with ``every=4`` makes
    windows of 8 tokens with a stride of 4, from which pooled keys are made. Only rows that another rank holds travel,
    at most the largest shift before each range that a rank holds; gradients return the same way.

    Args:
        x: this rank's share ``[B, S/n, ...]``, of any dtype; floating-point ones have gradients.
        shifts: the distances to earlier rows, from 0 on.
        mesh: the cp mesh of n ranks.
        every: return only windows that end a block of this many positions: those of p where ``(p + 1) % every`` is 0,
            with p counted from the first token of its document. Their number may differ between ranks, and be 0. Rows
            of the batch that have fewer than others on this rank are filled up with windows of ``fill``.
        fill: the value in place of rows before the sequence, and of rows in another document than p. The dtype of x
            must hold it exactly.
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
    check_int("every", every, "Windows end at this distance from each other")
    _check_fill(x, fill)
    if every > 1 and is_compiling():
        raise NotImplementedError(
            f"{name}: every={every} in compiled code. How many windows a rank has depends on its positions. Call it "
            "outside of the compiled function"
        )
    cp = cp_mesh.whole_view(mesh)
    table = documents_of(mesh, cp, documents, name)
    agree(f"{name} {[*shifts]} every {every}", cp, layout, table, x)
    check_layout_of(name, cp, layout, table, x.shape[0], x.shape[1])
    with calling(name):
        out: Tensor = differentiable_windows(x, shifts, every, fill, table, cp.key, layout)
    return out


def gather_windows(
    x: Tensor,
    *,
    every: int,
    length: int,
    mesh: DeviceMesh | CPMesh,
    layout: str = "contiguous",
    documents: Any = None,
) -> Tensor:
    """Gather what all ranks have made of their windows, in the order of the sequence, on every rank.

    Args:
        x: ``[B, m, ...]``, floating-point, one row for each window that ``windows(..., every=every)`` gave to this
            rank.
        every, mesh, layout, documents: as in :func:`windows`.
        length: S, the number of tokens of the whole sequence.

    Returns:
        ``[B, S // every, ...]``; with documents, the windows of one document after those of the other, and zeros after
        those of rows that have fewer than others. Each rank's gradient of it is a share of a sum, which backward adds
        up on the rank that made x.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.

    Example::

        >>> pools = windows(torch.randn(2, 8, 6), range(4), every=4, mesh=mesh).mean(2)
        >>> gather_windows(pools, every=4, length=16, mesh=mesh).shape
        torch.Size([2, 4, 6])

    Source: the compressed keys of DeepSeek V4.
    """
    name = "gather_windows"
    check_local(f"{name}: x", x, max(2, getattr(x, "ndim", 2)), "[batch, windows, ...]")
    check_dtype(f"{name}: x", x)
    check_int("every", every, "Windows end at this distance from each other")
    check_int("length", length, "It is the number of tokens of the whole sequence")
    cp = cp_mesh.whole_view(mesh)
    table = documents_of(mesh, cp, documents, name)
    shape = x.shape[0], *x.shape[2:]  # ranks may have different numbers of windows
    agree(f"{name} {shape} every {every} of {length}", cp, layout, table, x[:, :0])
    check_layout_of(name, cp, layout, table, x.shape[0], length // cp.size)
    counts = _gathering(every, length, table, cp.key, layout).counts
    if x.shape[1] != counts[cp.rank]:
        raise ValueError(
            f"{name}: x has {x.shape[1]} windows, and {counts[cp.rank]} end in the positions of rank {cp.rank} "
            f"(every={every}, length={length}, layout={layout!r}). Each rank passes the windows that end in its own "
            f"positions. Pass what was made of windows(..., every={every})"
        )
    with calling(name):
        out: Tensor = _Gathered.apply(x, every, length, table, cp.key, layout)
    return out


def _check_fill(x: Tensor, fill: float) -> None:
    """Raise ``ValueError`` if integers would hold another value than ``fill``, which travels to the op as a float."""
    if x.is_floating_point() or x.is_complex():
        return
    low, high = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    if not low <= fill <= high or float(fill) != int(fill):
        raise ValueError(
            f"windows: fill={fill} for x of {x.dtype}. This dtype must hold it exactly, and numbers above 2**53 are "
            f"not exact. Pass a whole number from {low} to {high}, or convert x to a floating-point dtype"
        )


def _gathering(every: int, length: int, documents: Tensor | None, mesh: str, layout: str) -> Gathering:
    cp, packed = cp_mesh.by_key(mesh), read(documents)
    return gathering(resolve(layout, cp.size, length, packed), packed, every)


def _taken(rows: Tensor, index: Tensor, hidden: Tensor, fill: float) -> Tensor:
    """The rows ``index`` ``[B or 1, m, ...]`` of ``[n, B, ...]``, with the batch first; ``fill`` where hidden."""
    batch = torch.arange(rows.shape[1], device=rows.device).view(-1, *(1,) * (index.ndim - 1))
    hidden = hidden.view(*hidden.shape, *(1,) * (rows.ndim - 2))
    return rows[index.to(rows.device), batch].masked_fill_(hidden.to(rows.device), fill)


def _put(dout: Tensor, index: Tensor, hidden: Tensor, number: int) -> Tensor:
    """The transpose of :func:`_taken`: sums ``[number, B, ...]`` in the accumulation dtype."""
    index, hidden = index.to(dout.device), hidden.to(dout.device)
    batch, rest = len(dout), dout.shape[index.ndim :]
    own = dout.masked_fill(hidden.view(*hidden.shape, *(1,) * len(rest)), 0).to(accumulation_dtype(dout.dtype))
    index = index * batch + torch.arange(batch, device=index.device).view(-1, *(1,) * (index.ndim - 1))
    total = own.new_zeros(number * batch, *rest)
    return total.index_add_(0, index.flatten(), own.flatten(0, index.ndim - 1)).view(number, batch, *rest)


class _Gathered(torch.autograd.Function):
    """See :func:`gather_windows`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, every: int, length: int, documents: Tensor | None, mesh: str, layout: str
    ) -> Tensor:
        cp = cp_mesh.by_key(mesh)
        (counts, places), ctx.caller = _gathering(every, length, documents, mesh, layout), caller()
        ctx.mesh, ctx.counts, ctx.places = mesh, counts, places
        send = x.new_zeros(max(counts), x.shape[0], *x.shape[2:])
        send[: x.shape[1]] = x.movedim(1, 0)
        if not max(counts):
            return x.new_zeros(x.shape[0], 0, *x.shape[2:])
        with operation(cp, "windows", "forward"):
            every_rank = gather_ranks(cp.flat, send)
        return _taken(every_rank.flatten(0, 1), places.clamp(min=0), places < 0, 0)

    @staticmethod
    @once("gather_windows")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cp, most = cp_mesh.by_key(ctx.mesh), max(ctx.counts)
        total = _put(dout, ctx.places.clamp(min=0), ctx.places < 0, cp.size * most)
        with backward_of(ctx.caller), operation(cp, "windows", "backward"):
            home = sum_to_ranks(cp.flat, total.unflatten(0, (cp.size, most))) if most else total
        return home[: ctx.counts[cp.rank]].movedim(0, 1).to(dout.dtype), *(None,) * 5


def _rows(halo: Halo, shifts: list[int], every: int) -> tuple[Tensor, Tensor]:
    """The fetched rows of windows, ``[B or 1, m, W]``, and True where one is outside of the sequence or of the document
    of the window; on the CPU."""
    count, back = counted(halo.positions, halo.packed), torch.tensor(shifts, device="cpu")
    ends, there = window_ends(count, every)
    return halo.index[ends][..., None] - back, ~there[..., None] | (count.gather(1, ends)[..., None] < back)


@torch.library.custom_op("hyper_cp::windows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def windows_op(
    x: Tensor, shifts: list[int], every: int, fill: float, documents: Tensor | None, mesh: str, layout: str
) -> Tensor:
    """See :func:`windows`."""
    check_replay(documents, mesh)
    with operation(cp := cp_mesh.by_key(mesh), "windows", "forward"):
        if x.is_floating_point():
            nans.check(cp, "x", x)
        halo = Halo(len(x[0]), documents, mesh, layout, max(shifts), 0)
        fetched = halo.fetch(x.movedim(1, 0))
    return _taken(fetched, *_rows(halo, shifts, every), fill)


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
    total = _put(dout, *_rows(halo, shifts, every), halo.fetched)
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


differentiable_windows = differentiable("windows", windows_op, _differentiate, _save)
