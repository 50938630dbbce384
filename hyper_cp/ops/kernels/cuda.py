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

from .packed import Parts, gather, packing, scatter
from .reference import KERNEL as REFERENCE
from .tiles import TileKernel

_aten = torch.ops.aten


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is not used: backward operators want tensors."""
    return (q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64))


class _Flash:
    """FlashAttention-2, or what ``activate_flash_attention_impl`` has put in its place."""

    name, grouped, biased = "cuda flash", True, False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        dim = v.shape[3]
        q, k, v = (_pad_heads(x) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out[..., :dim], lse[:, :, : q.shape[2]]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = q.shape[3]
        dout, q, k, v, out = (_pad_heads(x) for x in (dout, q, k, v, out))
        grads = _aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,  # not packed: no cumulative lengths
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            *_no_dropout(q),
            scale=scale,
        )
        dq, dk, dv = (x[..., :dim] for x in grads)
        return dq, dk, dv


def _pad_heads(x: Tensor) -> Tensor:
    """The operators want head dims that are multiples of 8; zeros change nothing."""
    return x if x.shape[-1] % 8 == 0 else F.pad(x, (0, -x.shape[-1] % 8))


class _PackedFlash:
    """The variable-length side of FlashAttention, below ``torch.nn.attention.varlen.varlen_attn``: the
    operators that it calls (FA3 and FA4, activated, take their place) return the log-sum-exp and take the
    merged one back. The same in torch 2.11 and 2.13. Tensors are [tokens, H, D], the log-sum-exp [H, tokens]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, parts: Parts
    ) -> tuple[Tensor, Tensor]:
        how = packing(parts, q.shape[0])
        x, y, z = (_pad_heads(gather(t, r)) for t, r in ((q, how.rows), (k, how.cols), (v, how.cols)))
        bounds = _bounds(how.row_ends, q.device), _bounds(how.col_ends, q.device)
        out, lse, *_ = _aten._flash_attention_forward(x, y, z, *bounds, *how.longest, 0.0, causal, False, scale=scale)
        return scatter(out[..., : v.shape[3]], how.rows, q), scatter(lse.mT, how.rows, q, -torch.inf)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        parts: Parts,
    ) -> tuple[Tensor, Tensor, Tensor]:
        how, dim = packing(parts, q.shape[0]), q.shape[3]
        dy, x, o = (_pad_heads(gather(t, how.rows)) for t in (dout, q, out.to(q.dtype)))
        y, z = (_pad_heads(gather(t, how.cols)) for t in (k, v))
        bounds = _bounds(how.row_ends, q.device), _bounds(how.col_ends, q.device)
        statistics = gather(lse, how.rows).mT.contiguous()
        dq, dk, dv = _aten._flash_attention_backward(
            dy, x, y, z, o, statistics, *bounds, *how.longest, 0.0, causal, *_no_dropout(q), scale=scale
        )
        return (
            scatter(dq[..., :dim], how.rows, q),
            scatter(dk[..., :dim], how.cols, k),
            scatter(dv[..., : v.shape[3]], how.cols, v),
        )


@lru_cache(maxsize=256)
def _host_bounds(ends: tuple[int, ...], pinned: bool) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, pin_memory=pinned)


def _bounds(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths with the leading 0 on the device. From pinned memory, so that the host does not wait;
    copied for each call, on its own stream, so that no other stream can see a copy that is not finished."""
    return _host_bounds(ends, device.type == "cuda").to(device, non_blocking=True)


class _Efficient:
    """The memory-efficient operator: also fp32, other head dims for v, and a bias."""

    name, grouped, biased = "cuda memory-efficient", False, True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        dim, bias = v.shape[3], _aligned(q, k, bias)
        q, k, v = (_pad_heads(x) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        return out[..., :dim], lse[:, :, : q.shape[2]]  # its rows are padded to a multiple of 32

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim, v_dim = q.shape[3], v.shape[3]
        dout, q, k, v, out = (_pad_heads(x) for x in (dout, q, k, v, out))
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
        seed, offset = q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            k,
            v,
            _aligned(q, k, bias),
            out,
            lse,
            seed,
            offset,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


def _aligned(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
    """The operator reads a bias expanded to [B, H, Sq, Sk], its rows 16 elements apart in memory."""
    if bias is None:
        return None
    cols = k.shape[2]
    return F.pad(bias, (0, -cols % 16))[..., :cols].expand(q.shape[0], q.shape[1], q.shape[2], cols)


class _CuDNN:
    name, grouped, biased = "cuda cudnn", False, False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])  # [B, H, Sq, 1]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed, offset = q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous().unsqueeze(-1),
            seed,
            offset,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )
        return dq, dk, dv


KERNELS = {
    _Flash.name: TileKernel(_Flash(), _Efficient(), _PackedFlash()),
    _Efficient.name: TileKernel(_Efficient(), _Efficient()),
    _CuDNN.name: TileKernel(_CuDNN(), _Efficient()),
}

_BY_BACKEND = {
    int(SDPBackend.FLASH_ATTENTION.value): _Flash.name,
    int(SDPBackend.EFFICIENT_ATTENTION.value): _Efficient.name,
    int(SDPBackend.CUDNN_ATTENTION.value): _CuDNN.name,
    int(SDPBackend.MATH.value): REFERENCE.name,
}


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """The kernel of the backend that plain SDPA would run, ``sdpa_kernel(...)`` blocks included."""
    grouped = q.shape[1] != k.shape[1]
    # Private: no public function says what SDPA chooses, priorities included. The same in torch 2.11
    # and 2.13. It looks at shapes and settings only: no device synchronisation.
    choice = torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=grouped)
    if choice in _BY_BACKEND:
        return _BY_BACKEND[choice]
    raise RuntimeError(
        f"no attention backend takes query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)} of "
        f"dtype {q.dtype} on {q.device}: {_refusals(q, k, v, causal, grouped)}. Allow another backend in "
        "torch.nn.attention.sdpa_kernel"
    )


def _refusals(q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> str:
    """Why each backend was refused, in PyTorch's words."""
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    words = []
    for name, enabled, can_use in (
        ("flash", cuda.flash_sdp_enabled(), cuda.can_use_flash_attention),
        ("memory-efficient", cuda.mem_efficient_sdp_enabled(), cuda.can_use_efficient_attention),
        ("cudnn", cuda.cudnn_sdp_enabled(), cuda.can_use_cudnn_attention),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use(params, debug=True)
        reasons = "; ".join(str(w.message).split(" (Triggered")[0] for w in caught)
        words.append(f"{name}: {reasons if enabled else 'switched off'}")
    return ", ".join([*words, f"math: {'unknown' if cuda.math_sdp_enabled() else 'switched off'}"])
