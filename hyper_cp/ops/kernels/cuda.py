"""CUDA: the operators behind F.scaled_dot_product_attention, chosen as it chooses.

Not executed by the tests, which have no GPU: they check shapes on fake tensors; what runs on hardware
is ``benchmarks/device_check.py``.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .inputs import Kernel, TileInputs
from .operators import OperatorKernel, Packing, gather, packing, scatter

_aten = torch.ops.aten


class _Flash:
    """FlashAttention-2, or what ``activate_flash_attention_impl`` has put in its place."""

    name, grouped = "cuda flash", True

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (_pad_heads(x) for x in (tile.q, tile.k, tile.v))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, tile.causal, False, scale=tile.scale)
        return out[..., : tile.v.shape[3]], lse[:, :, : q.shape[2]]

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (_pad_heads(x) for x in (dout, tile.q, tile.k, tile.v, out))
        lengths = (None, None, q.shape[2], k.shape[2])  # not packed: no cumulative lengths
        grads = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, tile.causal, *_no_dropout(q), scale=tile.scale
        )
        dq, dk, dv = (x[..., : tile.q.shape[3]] for x in grads)
        return dq, dk, dv


class _PackedFlash:
    """The variable-length side of FlashAttention, below ``torch.nn.attention.varlen.varlen_attn``: the
    operators that it calls (FA3 and FA4, activated, take their place) return the log-sum-exp and take the
    merged one back. The same in torch 2.11 and 2.13. Tensors are [tokens, H, D], the log-sum-exp [H, tokens]."""

    name = "cuda flash"

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        how = packing(tile)
        pairs = (tile.q, how.rows), (tile.k, how.cols), (tile.v, how.cols)
        q, k, v = (_pad_heads(gather(x, ranges)) for x, ranges in pairs)
        bounds = _bounds(how, q.device)
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *bounds, *how.longest, 0.0, tile.causal, False, scale=tile.scale
        )
        out = scatter(out[..., : tile.v.shape[3]], how.rows, tile.q)
        return out, scatter(lse.mT, how.rows, tile.q, -torch.inf)

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        how = packing(tile)
        dout, q, out = (_pad_heads(gather(x, how.rows)) for x in (dout, tile.q, out.to(tile.q.dtype)))
        k, v = (_pad_heads(gather(x, how.cols)) for x in (tile.k, tile.v))
        bounds = _bounds(how, q.device)
        lse = gather(lse, how.rows).mT.contiguous()
        grads = _aten._flash_attention_backward(
            dout, q, k, v, out, lse, *bounds, *how.longest, 0.0, tile.causal, *_no_dropout(q), scale=tile.scale
        )
        targets = (how.rows, tile.q), (how.cols, tile.k), (how.cols, tile.v)
        dq, dk, dv = (
            scatter(grad[..., : x.shape[3]], ranges, x) for grad, (ranges, x) in zip(grads, targets, strict=True)
        )
        return dq, dk, dv


class _Efficient:
    """The memory-efficient operator: also fp32, other head dims for v, and an additive mask."""

    name, grouped = "cuda memory-efficient", False

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (_pad_heads(x) for x in (tile.q, tile.k, tile.v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned_mask(tile), True, 0.0, tile.causal, scale=tile.scale
        )
        return out[..., : tile.v.shape[3]], lse[:, :, : q.shape[2]]  # its rows are padded to a multiple of 32

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, v_dim = tile.q.shape[3], tile.v.shape[3]
        dout, q, k, v, out = (_pad_heads(x) for x in (dout, tile.q, tile.k, tile.v, out))
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _aligned_mask(tile), out, lse, *_no_seed(q), 0.0, wanted, tile.causal, scale=tile.scale
        )
        return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


class _CuDNN:
    name, grouped = "cuda cudnn", False

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            tile.q, tile.k, tile.v, None, True, 0.0, tile.causal, False, scale=tile.scale
        )
        return out, lse.reshape(tile.q.shape[:3])  # [B, H, Sq, 1]

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, lse = tile.q, tile.k, tile.v, lse.contiguous().unsqueeze(-1)
        lengths = (None, None, q.shape[2], k.shape[2])  # not packed: no cumulative lengths
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *_no_seed(q), None, *lengths, 0.0, tile.causal, scale=tile.scale
        )
        return dq, dk, dv


# --------------------------------------------------------------------------- the operators' arguments


def _pad_heads(x: Tensor) -> Tensor:
    """Pad head dims to a multiple of 8, which the operators want; zeros change nothing."""
    return x if x.shape[-1] % 8 == 0 else F.pad(x, (0, -x.shape[-1] % 8))


def _aligned_mask(tile: TileInputs) -> Tensor | None:
    """The operator reads a mask expanded to [B, H, Sq, Sk], its rows a multiple of 16 elements apart in memory."""
    if tile.mask is None:
        return None
    (batch, heads, rows, _), cols = tile.q.shape, tile.k.shape[2]
    return F.pad(tile.mask, (0, -cols % 16))[..., :cols].expand(batch, heads, rows, cols)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is not used: FlashAttention's backward wants tensors."""
    return q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)


def _no_seed(q: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the other two operators, which want int64."""
    return q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)


@lru_cache(maxsize=1024)
def _host_bounds(how: Packing, pinned: bool) -> list[Tensor]:
    return [torch.tensor([0, *x], dtype=torch.int32, pin_memory=pinned) for x in (how.row_ends, how.col_ends)]


def _bounds(how: Packing, device: torch.device) -> list[Tensor]:
    """Cumulative lengths of queries and of keys with the leading 0, on the device. From pinned memory, so that the
    host does not wait; copied for each call, on its own stream, so that no other stream can see a copy that is not
    finished."""
    return [x.to(device, non_blocking=True) for x in _host_bounds(how, device.type == "cuda")]


# --------------------------------------------------------------------------- the choice


_FLASH = OperatorKernel(_Flash(), _Efficient(), _PackedFlash())
_EFFICIENT = OperatorKernel(_Efficient(), _Efficient())
_CUDNN = OperatorKernel(_CuDNN(), _Efficient())
KERNELS = {kernel.name: kernel for kernel in (_FLASH, _EFFICIENT, _CUDNN)}

_BY_BACKEND = {
    int(SDPBackend.FLASH_ATTENTION.value): _FLASH,
    int(SDPBackend.EFFICIENT_ATTENTION.value): _EFFICIENT,
    int(SDPBackend.CUDNN_ATTENTION.value): _CUDNN,
    int(SDPBackend.MATH.value): None,
}


def accepts(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True if plain SDPA would run the backend of ``kernel``, ``sdpa_kernel(...)`` blocks included."""
    grouped = q.shape[1] != k.shape[1]
    # Private: no public function says what SDPA chooses, priorities included. The same in torch 2.11
    # and 2.13. It reads shapes and settings only: no device synchronisation.
    choice = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    if choice in _BY_BACKEND:
        return _BY_BACKEND[choice] is kernel
    raise RuntimeError(
        f"no attention backend takes query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)} of "
        f"dtype {q.dtype} on {q.device}: {_refusals(q, k, v, is_causal, grouped)}. Allow another backend in "
        "torch.nn.attention.sdpa_kernel"
    )


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
