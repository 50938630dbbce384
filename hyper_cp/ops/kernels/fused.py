"""One kernel that merges a partial into its place, and one that adds gradients into theirs, in Triton, on CUDA.

PyTorch's own operators do a merge in five or six launches that read and write the output several times. Tests run these
kernels on the CPU in Triton's interpreter, and compile them for GPUs that are not there. Triton is imported at the
first use on CUDA. If it is missing or cannot compile (it needs a C compiler), PyTorch's operators do the work.

Both kernels change memory in place. Where a block has fewer elements than threads, several warps load the same element,
and one of them stores it: a barrier lets all of them load first.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

tl: Any = None  # triton.language, from the first use on: the kernels find it among their module's names

_ELEMENTS = 2048
"""Elements of a block: 16 for each thread of 4 warps, twice, in few enough registers for several blocks at a time."""


# --------------------------------------------------------------------------- the kernels


def merge_kernel(  # type: ignore[no-untyped-def]
    total,
    total_lse,
    out,
    lse,
    heads,
    rows,
    dim,
    total_b,
    total_h,
    total_s,
    total_d,
    total_lse_b,
    total_lse_h,
    total_lse_s,
    out_b,
    out_h,
    out_s,
    out_d,
    lse_b,
    lse_h,
    lse_s,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge the partial ``(out, lse)`` into ``(total, total_lse)``, which are fp32. Strides are named after the
    dimensions of ``[B, H, S, D]``."""
    blocks = (rows + ROWS - 1) // ROWS
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    s = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = s < rows
    total_lse_at = total_lse + b * total_lse_b + h * total_lse_h + s * total_lse_s
    old_lse = tl.load(total_lse_at, mask=inside, other=float("-inf"))
    new_lse = tl.load(lse + b * lse_b + h * lse_h + s * lse_s, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.maximum(old_lse, new_lse)
    blind = top == float("-inf")  # rows that have seen nothing yet: their weight is 0, and 0 / 0 would be NaN
    top = tl.where(blind, 0.0, top)
    new = tl.exp(new_lse - top)
    both = tl.where(blind, 1.0, tl.exp(old_lse - top) + new)
    weight = (new / both)[:, None]
    d = tl.arange(0, DIM)
    seen = inside[:, None] & (d < dim)[None, :]
    total_at = total + b * total_b + h * total_h + s[:, None] * total_s + d[None, :] * total_d
    x = tl.load(total_at, mask=seen, other=0.0)
    y = tl.load(out + b * out_b + h * out_h + s[:, None] * out_s + d[None, :] * out_d, mask=seen, other=0.0)
    step = y.to(tl.float32) - x
    tl.debug_barrier()  # every warp has loaded what one of them stores now
    tl.store(total_lse_at, tl.where(blind, float("-inf"), top + tl.log(both)), mask=inside)
    # Exact at both ends, as torch.lerp is: x at weight 0, y at weight 1.
    tl.store(total_at, tl.where(weight < 0.5, x + step * weight, x + step - step * (1.0 - weight)), mask=seen)


def add_kernel(  # type: ignore[no-untyped-def]
    total,
    x,
    heads,
    rows,
    dim,
    total_b,
    total_h,
    total_s,
    total_d,
    x_b,
    x_h,
    x_s,
    x_d,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add ``x`` to ``total``, which is fp32."""
    blocks = (rows + ROWS - 1) // ROWS
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    s = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    seen = (s < rows)[:, None] & (d < dim)[None, :]
    total_at = total + b * total_b + h * total_h + s[:, None] * total_s + d[None, :] * total_d
    added = tl.load(x + b * x_b + h * x_h + s[:, None] * x_s + d[None, :] * x_d, mask=seen, other=0.0)
    sums = tl.load(total_at, mask=seen, other=0.0) + added.to(tl.float32)
    tl.debug_barrier()  # every warp has loaded what one of them stores now
    tl.store(total_at, sums, mask=seen)


# --------------------------------------------------------------------------- launches


@cache
def compiled(kernel: Callable[..., None]) -> Any:
    """The kernel as Triton launches it. (``rows`` changes with documents, so lengths share one kernel.)"""
    global tl
    import triton
    import triton.language as tl

    return triton.jit(kernel, do_not_specialize=["rows"])


def blocks(rows: int, dim: int) -> tuple[int, int]:
    """``ROWS`` and ``DIM`` of a launch: powers of two."""
    wide = 1 << max(0, dim - 1).bit_length()
    return min(max(1, _ELEMENTS // wide), 1 << max(0, rows - 1).bit_length()), wide


def _launch(kernel: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
    b, h, s, d = tensors[0].shape
    height, width = blocks(s, d)
    strides = [stride for x in tensors for stride in x.stride()]
    if tensors[0].numel():  # CUDA refuses an empty grid
        compiled(kernel)[(-(-s // height) * b * h,)](*tensors, h, s, d, *strides, ROWS=height, DIM=width)


def launch_merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``(out, lse)`` into ``(total, total_lse)``: ``[B, H, S, D]`` and ``[B, H, S]``, any strides."""
    _launch(merge_kernel, (total, total_lse, out, lse))


def launch_add(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total``, ``[B, H, S, D]``, any strides."""
    _launch(add_kernel, (total, x))


# --------------------------------------------------------------------------- the choice


_failed: list[str] = []
"""The error that Triton raised in this process, if any."""


def merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> bool:
    """:func:`launch_merge` where it is possible; False if nothing was done."""
    return _tried(launch_merge, total, total_lse, out, lse)


def add(total: Tensor, x: Tensor) -> bool:
    """:func:`launch_add` where it is possible; False if nothing was done."""
    return _tried(launch_add, total, x)


def _tried(launch: Callable[..., None], total: Tensor, *rest: Tensor) -> bool:
    if not total.is_cuda or not _possible(total):
        return False
    try:
        launch(total, *rest)
    except Exception as error:  # whatever Triton or its compilers raise, before the kernel runs
        _failed.append(str(error))
        warnings.warn(
            f"Triton cannot compile or launch the merge of partials: {type(error).__name__}: {str(error)[:300]}. "
            "PyTorch's operators merge instead, in more launches. Install a C compiler and the triton of this "
            "PyTorch, or set HYPER_CP_TRITON=0",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True


def switched_on() -> bool:
    """True unless the user has switched kernels in Triton off, or the GPU is AMD's, on which none has been tried."""
    return os.environ.get("HYPER_CP_TRITON", "1") != "0" and torch.version.hip is None


def _possible(total: Tensor) -> bool:
    """True on the current device, in fp32, unless Triton is switched off or has failed. (Triton launches on the current
    device, whatever the tensors' is.)"""
    on = switched_on() and not _failed
    return on and total.dtype == torch.float32 and total.get_device() == torch.cuda.current_device()
