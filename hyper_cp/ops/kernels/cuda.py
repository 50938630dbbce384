"""CUDA: the operators behind F.scaled_dot_product_attention, chosen as it chooses, tile by tile.

Tests have no GPU: they check shapes on fake tensors, and numbers with mocks of the operators. What runs on hardware is
``benchmarks/device/check.py``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl

from ...schedule.ranges import Rows
from .inputs import Rectangle, TileInputs, backward_each, forward_each
from .operators import OperatorKernel, Packing, gather, packing, scatter, window
from .reference import KERNEL as REFERENCE

_aten = torch.ops.aten


class _Flash:
    """FlashAttention-2, or what ``activate_flash_attention_impl`` has put in its place.

    These are the operators below ``F.scaled_dot_product_attention`` and ``torch.nn.attention.varlen.varlen_attn``, the
    same in torch 2.11 to 2.15. They take a window, return the log-sum-exp, and take the merged one back. Dense tensors
    are [B, S, H, D], the log-sum-exp [B, H, S]; sequences of packed tiles are [tokens, H, D] and [H, tokens]. The head
    dims of q and v must be equal, so the shorter ones get zeros, which change nothing.
    """

    name, grouped, least = "flash", True, 1

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if not _has_window(tile):
            return forward_each(self.forward, tile, _halves(tile))
        rows, cols, lengths = _sequences(tile)
        q, k, v = (_entering(x, at, tile) for x, at in ((tile.q, rows), (tile.k, cols), (tile.v, cols)))
        causal, bounds = _window(tile)
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=tile.scale, **bounds)
        lse = lse[:, :, : tile.q.shape[2]] if rows is None else scatter(lse.mT, rows, tile.q, -torch.inf)
        return _leaving(out, rows, tile.q, tile.v.shape[3]), lse

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not _has_window(tile):
            return backward_each(self.backward, tile, _halves(tile), dout, out, lse)
        rows, cols, lengths = _sequences(tile)
        dout, q, out = (_entering(x, rows, tile) for x in (dout, tile.q, out.to(tile.q.dtype)))
        k, v = (_entering(x, cols, tile) for x in (tile.k, tile.v))
        lse = (lse if rows is None else gather(lse, rows).mT).contiguous()
        causal, bounds = _window(tile)
        grads = _aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, *_no_seed(q, (2,), torch.uint64), scale=tile.scale, **bounds
        )
        targets = (rows, tile.q), (cols, tile.k), (cols, tile.v)
        dq, dk, dv = (_leaving(x, at, like, like.shape[3]) for x, (at, like) in zip(grads, targets, strict=True))
        return dq, dk, dv


class _Efficient:
    """The memory-efficient operator: also fp32, other head dims for v, and an additive mask.

    In half precision its backward reads ``out`` as ``[B, S, H, D]`` without gaps between heads, whatever the strides of
    the tensor are (``o_strideM`` of its kernel).
    """

    name, grouped, least = "memory-efficient", False, 1

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (_pad_heads(x) for x in (tile.q, tile.k, tile.v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned_mask(tile), True, 0.0, tile.causal, scale=tile.scale
        )
        return out[..., : tile.v.shape[3]], lse[:, :, : q.shape[2]]  # its rows are padded to a multiple of 32

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, v_dim = tile.q.shape[3], tile.v.shape[3]
        dout, q, k, v, out = (_pad_heads(x) for x in (dout, tile.q, tile.k, tile.v, out))
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
        gradients = [True, True, True, False]  # of q, k and v, and none of the mask
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _aligned_mask(tile), out, lse, *_no_seed(q), 0.0, gradients, tile.causal, scale=tile.scale
        )
        return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


class _CuDNN:
    """cuDNN's attention. It takes fewer key/value heads as they are.

    PyTorch keeps an execution plan per shape and stride of q, k and v for good, and building one takes tens of
    milliseconds, so only tiles of recurring shapes come here. A plan of backward that is found again must also find
    ``out`` and ``dout`` in the memory layout it was built with, which it does not compare: they get that of q.
    """

    name, grouped = "cudnn", True
    least = 2  # plain SDPA refuses one key; called directly the operator does not check

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if min(tile.q.shape[2], tile.k.shape[2]) < self.least:  # no other backend is allowed
            return REFERENCE.forward(tile)
        q, k, v = (_aligned(x) for x in (tile.q, tile.k, tile.v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, tile.causal, False, scale=tile.scale
        )
        return out, lse.reshape(tile.q.shape[:3])  # [B, H, Sq, 1]

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if min(tile.q.shape[2], tile.k.shape[2]) < self.least:
            return REFERENCE.backward(tile, dout, out, lse)
        q, k, v = (_aligned(x) for x in (tile.q, tile.k, tile.v))
        out, dout = (_in_memory_as(x.to(q.dtype), q) for x in (out, dout))
        lse = _statistics(lse, q, k, v, out)
        lengths = (None, None, q.shape[2], k.shape[2])  # not packed: no cumulative lengths
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *_no_seed(q), None, *lengths, 0.0, tile.causal, scale=tile.scale
        )
        return dq, dk, dv


# --------------------------------------------------------------------------- the operators' arguments


def _sequences(tile: TileInputs) -> tuple[Rows | None, Rows | None, tuple[Any, ...]]:
    """FlashAttention's cumulative lengths and longest sequences, and the rows and columns of the sequences; None for a
    tile without parts, which has no cumulative lengths."""
    if tile.parts is None:
        return None, None, (None, None, tile.q.shape[2], tile.k.shape[2])
    how = packing(tile)
    return how.rows, how.cols, (*_ends(how, tile.q.device), *how.longest)


def _entering(x: Tensor, at: Rows | None, tile: TileInputs) -> Tensor:
    """``[B, H, S, D]`` as FlashAttention takes it."""
    return _pad_heads(x.transpose(1, 2) if at is None else gather(x, at), tile)


def _leaving(x: Tensor, at: Rows | None, like: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_entering`."""
    x = x[..., :dim]
    return x.transpose(1, 2) if at is None else scatter(x, at, like)


def _pad_heads(x: Tensor, tile: TileInputs | None = None) -> Tensor:
    """Pad head dims to a multiple of 8, as the operators need; with ``tile``, to the larger of q's and v's."""
    dim = x.shape[-1] if tile is None else max(tile.q.shape[3], tile.v.shape[3])
    missing = dim + -dim % 8 - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else _aligned(x)


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy if a row of it does not begin at a multiple of 16 bytes, which operators load at a time. (A
    message may have log-sum-exps between the rows.)"""
    step = max(1, 16 // x.element_size())
    starts = [x.storage_offset(), *(stride for stride, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)]
    return x if all(start % step == 0 for start in starts) else x.clone(memory_format=torch.contiguous_format)


def _window(tile: TileInputs) -> tuple[bool, dict[str, int]]:
    """FlashAttention's options for a band: ``is_causal``, and the bounds of a window, from the bottom right."""
    left, right = window(tile) or (-1, -1)
    if left == -1 and right in (-1, 0):
        return right == 0, {}
    return False, {"window_size_left": left, "window_size_right": right}


def _has_window(tile: TileInputs) -> bool:
    """True if FlashAttention reads the window of a tile as it is meant. It takes a bound of as many keys as the longest
    sequence has, or more, for none; and where the left one is a bound and the right one is none, it puts that number
    in place of the right one, which hides keys from the first rows of a tile that has more rows than that."""
    left, right = window(tile) or (-1, -1)
    rows, cols = (tile.q.shape[2], tile.k.shape[2]) if tile.parts is None else packing(tile).longest
    if 0 <= right < cols or (left == -1 and right == -1):
        return True
    everything = right == -1 or right >= rows - 1
    return everything and (left == -1 or left >= cols or cols >= rows - 1)


def _halves(tile: TileInputs) -> Iterator[Rectangle]:
    """The parts of a tile one by one, or the two halves of its rows. (A few rows have a window always.)"""
    return tile.row_bands(-(-tile.q.shape[2] // 2)) if tile.parts is None else tile.rectangles()


def _in_memory_as(x: Tensor, like: Tensor) -> Tensor:
    """``x`` dense, with its dimensions in the same order in memory as those of ``like``."""
    strides = like.stride()  # 0 where one row stands for all: such a dimension is the outermost
    order = sorted(range(x.ndim), key=lambda dim: (strides[dim] != 0, -strides[dim]))
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def _statistics(lse: Tensor, *q_k_v_out: Tensor) -> Tensor:
    """The log-sum-exp ``[B, H, S]`` as cuDNN's backward takes it, ``[B, H, S, 1]``. With
    ``TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1`` and all tensors in memory as [B, S, H, D], PyTorch packs the batch rows and
    finds the statistics of each by a stride that is right for [B, S, H] only; otherwise they are [B, H, S]."""
    ragged = os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"
    if ragged and all(x.transpose(1, 2).is_contiguous() for x in q_k_v_out):
        return lse.transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(-1)
    return lse.contiguous().unsqueeze(-1)


def _aligned_mask(tile: TileInputs) -> Tensor | None:
    """The operator reads a mask expanded to [B, H, Sq, Sk], its rows a multiple of 16 elements apart in memory."""
    if tile.mask is None:
        return None
    (batch, heads, rows, _), cols = tile.q.shape, tile.k.shape[2]
    return F.pad(tile.mask, (0, -cols % 16))[..., :cols].expand(batch, heads, rows, cols)


def _no_seed(q: Tensor, size: tuple[int, ...] = (), dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is not used. Operators need these tensors in backward, but do not read them."""
    return q.new_empty(size, dtype=dtype), q.new_empty((), dtype=dtype)


@lru_cache(maxsize=1024)
def _host_ends(how: Packing, pinned: bool) -> Tensor:
    return torch.tensor([[0, *how.row_ends], [0, *how.col_ends]], dtype=torch.int32, pin_memory=pinned, device="cpu")


def _ends(how: Packing, device: torch.device) -> tuple[Tensor, ...]:
    """Cumulative lengths of queries and of keys with the leading 0, on the device. From pinned memory, so that the
    host does not wait; copied for each call, on its own stream, so that no other stream can see a copy that is not
    finished."""
    return _host_ends(how, device.type == "cuda").to(device, non_blocking=True).unbind()


# --------------------------------------------------------------------------- the choice


def _kernels() -> list[OperatorKernel]:
    """A kernel for each choice of plain SDPA, and for each set of the other backends that are allowed.

    ``dense`` is what plain SDPA would choose. Windows and packed tiles run on FlashAttention if it is allowed and takes
    the call, since it needs no mask for them. So do rectangles that cuDNN would build a plan for in every batch.
    """
    flash, efficient, cudnn = _Flash(), _Efficient(), _CuDNN()
    made = [
        OperatorKernel(
            kernel_name(dense.name, with_flash, with_efficient),
            dense,
            efficient if with_efficient else None,
            flash if with_flash else None,
            dense if dense is not cudnn else flash if with_flash else efficient if with_efficient else cudnn,
        )
        for with_efficient in (False, True)
        for with_flash in (False, True)
        for dense in (efficient, flash, cudnn)
        if (with_flash or dense is not flash) and (with_efficient or dense is not efficient)
    ]
    return made  # those with all operators come last, since the last is the first to be asked


def kernel_name(dense: str, flash: bool, efficient: bool) -> str:
    """The name of the kernel for what plain SDPA would choose, and for the other backends."""
    missing = [name for name, there in (("flash", flash), ("memory-efficient", efficient)) if not there]
    return f"cuda {dense}" + (f" without {' and '.join(missing)}" if missing else "")


KERNELS = {kernel.name: kernel for kernel in _kernels()}

_NAMES = {
    int(SDPBackend.FLASH_ATTENTION.value): _Flash.name,
    int(SDPBackend.EFFICIENT_ATTENTION.value): _Efficient.name,
    int(SDPBackend.CUDNN_ATTENTION.value): _CuDNN.name,
    int(SDPBackend.MATH.value): "",
}

ACTIVATED = {"FA3": ((9,), 256), "FA4": ((9, 10), 128)}
"""The limits of the implementations of FlashAttention that a user may activate: the major numbers of cards, and the
longest heads. On other cards they raise an error. PyTorch hands both of them windows, variable lengths and whether
backward is to be deterministic."""


def accepts(kernel: OperatorKernel, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True if ``kernel`` is the one for this call and for what the user allows (``sdpa_kernel``). It reads shapes and
    settings only: no device synchronisation."""
    dense = _dense(q, k, v, is_causal)
    if not dense or kernel.dense.name != dense:
        return False
    efficient = dense == _Efficient.name or torch.backends.cuda.mem_efficient_sdp_enabled()
    return kernel.name == kernel_name(dense, dense == _Flash.name or takes(_Flash.name, q, k, v), efficient)


def _dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """The backend of rectangles: what plain SDPA would choose for training; "" is plain math."""
    grouped = q.shape[1] != k.shape[1]
    with _in_training(q, k, v) as (q, k, v):
        # Private: no public function says what SDPA chooses, priorities included. The same in torch 2.11 to 2.15.
        choice = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    if choice not in _NAMES:
        raise RuntimeError(
            f"no attention backend takes query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)} of "
            f"dtype {q.dtype} on {q.device}. The reasons are {_refusals(q, k, v, is_causal, grouped)}. Allow another "
            "backend in torch.nn.attention.sdpa_kernel"
        )
    name = _NAMES[choice]
    unequal = q.shape[3] != v.shape[3]
    if name == _CuDNN.name and current_flash_attention_impl() is not None and takes(_Flash.name, q, k, v):
        return _Flash.name  # the user has installed a faster one, and has activated it
    if name == _Efficient.name and unequal and _card(q)[0] in (9, 10):
        # Wheels that prefer FlashAttention to cuDNN leave unequal head dims (MLA) to the slowest of the three.
        return _CuDNN.name if takes(_CuDNN.name, q, k, v) else name
    if not name or takes(name, q, k, v):
        return name
    # PyTorch lets more through than the operator takes.
    rest = [_Flash.name] * (name == _CuDNN.name and not unequal) + [_Efficient.name]
    return next((other for other in rest if takes(other, q, k, v)), "")


@contextmanager
def _in_training(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Tensors as they are in training, without which PyTorch also names backends that have no backward for such heads.
    Inside an op and under ``torch.no_grad``, where backward may follow, tensors require no gradient."""
    with torch.enable_grad():
        yield [x if x.is_inference() else x.detach().requires_grad_() for x in tensors]


def takes(operator: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if an operator is allowed, and runs calls with such tensors on this card, forward and backward.
    FlashAttention gets values that are filled up to the head dim of queries."""
    cuda = torch.backends.cuda
    if operator == _Flash.name:
        cards, most = ACTIVATED.get(current_flash_attention_impl() or "", ((), 0))
        if v.shape[3] > q.shape[3] or (cards and (q.shape[3] > most or _card(q)[0] not in cards)):
            return False
        enabled, can_use, v = cuda.flash_sdp_enabled(), cuda.can_use_flash_attention, k
    elif operator == _Efficient.name:
        enabled, can_use = cuda.mem_efficient_sdp_enabled(), cuda.can_use_efficient_attention
    else:
        enabled, can_use = cuda.cudnn_sdp_enabled() and _cudnn_has(q, v), cuda.can_use_cudnn_attention
    with _in_training(q, k, v) as (q, k, v):
        return enabled and bool(can_use(cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])))


def _cudnn_has(q: Tensor, v: Tensor) -> bool:
    """True if cuDNN has forward and backward for such head dims. Older versions of PyTorch let through more on
    Hopper."""
    dims, version = (q.shape[3], v.shape[3]), torch.backends.cudnn.version() or 0
    if max(dims) <= 128:
        return True
    least = {(192, 128): 91100, (256, 256): 92201}.get(dims)
    return least is not None and version >= least and (_card(q) == (9, 0) or _card(q)[0] == 10)


def _card(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)


def _refusals(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, grouped: bool) -> str:
    """PyTorch's reasons for refusing each backend."""
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(q, k, v, None, 0.0, is_causal, grouped)
    reasons = []
    for name, enabled, can_use in (
        ("flash", cuda.flash_sdp_enabled(), cuda.can_use_flash_attention),
        ("memory-efficient", cuda.mem_efficient_sdp_enabled(), cuda.can_use_efficient_attention),
        ("cudnn", cuda.cudnn_sdp_enabled(), cuda.can_use_cudnn_attention),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use(params, debug=True)
        reason = "; ".join(str(w.message).split(" (Triggered")[0] for w in caught)
        reasons.append(f"{name}: {reason if enabled else 'switched off'}")
    return ", ".join([*reasons, f"math: {'unknown' if cuda.math_sdp_enabled() else 'switched off'}"])
