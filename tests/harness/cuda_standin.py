"""Stand-ins for what CUDA's attention operators promise, in plain math on the CPU, and for what a card runs.

They refuse what the operators refuse or leave undefined, in any dtype, and do not follow their mistakes: nothing here
says anything of a GPU's numbers, speed or memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from hyper_cp.ops.kernels import cuda


def refuse(unless: bool, why: str) -> None:
    if not unless:
        raise RuntimeError(why)


def refuse_misaligned(*tensors: Tensor) -> None:
    """Operators load 16 bytes at a time."""
    for x in tensors:
        step = 16 // x.element_size()
        starts = [x.storage_offset(), *(stride for stride, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)]
        refuse(all(start % step == 0 for start in starts), f"query is not correctly aligned: {x.stride()}")


def _visible(rows: int, cols: int, left: int, right: int) -> Tensor:
    """``[rows, cols]``: the window around the diagonal that ends at the bottom right; -1 is no bound."""
    distance = torch.arange(cols)[None] - torch.arange(rows)[:, None] - (cols - rows)
    seen = torch.ones(rows, cols, dtype=torch.bool)
    seen = seen if left == -1 else seen & (distance >= -left)
    return seen if right == -1 else seen & (distance <= right)


def _logits(q: Tensor, k: Tensor, scale: float, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., H, rows, cols]`` in fp64 of ``[..., H, S, D]``."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q.double() @ k.double().mT * scale
    return (logits if bias is None else logits + bias.double()).masked_fill(~seen, -torch.inf)


def _attend(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = v.double().repeat_interleave(logits.shape[-3] // v.shape[-3], -3)
    return logits.softmax(-1) @ wide, logits.logsumexp(-1)


def _gradients(
    logits: Tensor, lse: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[-3] // k.shape[-3]
    weights = (logits - lse.double().unsqueeze(-1)).exp()
    dout, wide_k, wide_v = dout.double(), *(x.double().repeat_interleave(groups, -3) for x in (k, v))
    dlogits = weights * (dout @ wide_v.mT - (dout * out.double()).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(-3, (-1, groups)).sum(-3).to(k.dtype) for x in (dlogits.mT @ q.double(), weights.mT @ dout))
    return (dlogits @ wide_k).to(q.dtype), dk, dv


def _order(x: Tensor) -> list[int]:
    strides = x.stride()
    return sorted((d for d in range(x.ndim) if x.shape[d] > 1), key=lambda d: -strides[d])


def _trains(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


@dataclass
class Operators:
    """In place of ``torch.ops.aten``: the operators that the CUDA kernels call."""

    calls: list[str] = field(default_factory=list)
    plans: dict[Any, Any] = field(default_factory=dict)
    """cuDNN's plans: shapes and strides of q, k and v, and the memory order of out and dout."""
    card: Card | None = None
    """The card that runs them; None: one that takes all head dims."""
    ragged: bool = False
    """``TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1``: cuDNN packs batch rows that lie in memory as [B, S, H, D]."""

    @contextmanager
    def installed(self) -> Iterator[Operators]:
        switch = {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": str(int(self.ragged))}
        with mock.patch.object(cuda, "_aten", self), mock.patch.dict(os.environ, switch):
            yield self

    # ------------------------------------------------------------------------------------------- FlashAttention

    def _sequences(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Any, longest: tuple[int, int], causal: bool, options: Any
    ) -> Iterator[tuple[Any, Any, Tensor]]:
        """(index of rows, index of columns, visible) of every sequence."""
        dim = q.shape[-1]
        refuse(dim % 8 == 0 and dim <= 256 and k.shape[-1] == v.shape[-1] == dim, f"head dims of {q.shape}, {v.shape}")
        left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
        refuse(min(left, right) >= -1, f"window ({left}, {right}): negative sizes would be no bound")
        refuse(not (causal and options), "is_causal replaces the right bound of a window")
        right = 0 if causal else right
        refuse_misaligned(q, k, v)
        # As FlashAttention-2 reads them: bounds of `longest` and beyond are none, and one of two must not be none.
        left, right = (-1 if bound >= longest[1] else bound for bound in (left, right))
        left = longest[1] if left < 0 <= right else left
        right = longest[1] if right < 0 <= left else right
        if ends[0] is None:
            refuse(ends == (None, None) and (q.shape[1], k.shape[1]) == longest, "lengths of dense tensors")
            seen = _visible(*longest, left, right)
            for row in range(len(q)):
                yield row, row, seen
            return
        refuse(q.is_contiguous() and all(x.dtype == torch.int32 for x in ends), "cumulative lengths are int32")
        spans = [list(itertools.pairwise(x.tolist())) for x in ends]
        refuse(all(max(b - a for a, b in x) == n for x, n in zip(spans, longest, strict=True)), "longest sequences")
        refuse((spans[0][-1][1], spans[1][-1][1]) == (len(q), len(k)), "cumulative lengths do not cover the tokens")
        for (a, b), (c, d) in zip(*spans, strict=True):
            refuse(a < b and c < d, "operators disagree on sequences without rows or columns")
            yield slice(a, b), slice(c, d), _visible(b - a, d - c, left, right)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, qe: Any, ke: Any, mq: int, mk: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, **options: int,
    ) -> Any:  # fmt: skip
        self.calls.append("packed" if qe is not None else "window" if options else "flash")
        out = torch.zeros_like(q)
        lse = torch.zeros(q.shape[1], len(q)) if qe is not None else torch.zeros(len(q), q.shape[2], q.shape[1])
        for i, j, seen in self._sequences(q, k, v, (qe, ke), (mq, mk), causal, options):
            logits = _logits(q[i].transpose(0, 1), k[j].transpose(0, 1), scale, seen)
            found, sums = _attend(logits, v[j].transpose(0, 1))
            dead = sums == -torch.inf  # FlashAttention-2 returns +inf
            out[i] = found.masked_fill(dead.unsqueeze(-1), 0).transpose(0, 1).to(q.dtype)
            (lse[:, i] if qe is not None else lse[i]).copy_(sums.masked_fill(dead, torch.inf))
        return out, lse, None, None, None

    def _flash_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, qe: Any, ke: Any, mq: int,
        mk: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *, scale: float, **options: int,
    ) -> Any:  # fmt: skip
        self.calls.append("packed" if qe is not None else "window" if options else "flash")
        shape = (q.shape[1], len(q)) if qe is not None else (len(q), q.shape[2], q.shape[1])
        refuse(lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == shape, f"log-sum-exp {lse.shape}")
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for i, j, seen in self._sequences(q, k, v, (qe, ke), (mq, mk), causal, options):
            rows, cols = [x[i].transpose(0, 1) for x in (q, dout, out)], [x[j].transpose(0, 1) for x in (k, v)]
            logits = _logits(rows[0], cols[0], scale, seen)
            sums = lse[:, i] if qe is not None else lse[i]
            found = _gradients(logits, sums, rows[1], rows[0], *cols, rows[2], scale)
            for grad, at, x in zip(grads, (i, j, j), found, strict=True):
                grad[at] = x.transpose(0, 1)
        return tuple(grads)

    # ------------------------------------------------------------------------------------------- cuDNN

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, compute: bool, dropout: float, causal: bool, debug: bool,
        *, scale: float,
    ) -> Any:  # fmt: skip
        self._plan("forward", q, k, v, bias, causal)
        logits = _logits(q, k, scale, _visible(q.shape[2], k.shape[2], -1, 0 if causal else -1))
        out, lse = _attend(logits, v)
        order = sorted(range(4), key=lambda d: (q.stride()[d] != 0, -q.stride()[d]))
        out = out.to(q.dtype).permute(order).contiguous().permute([order.index(d) for d in range(4)])
        return out, lse.float().unsqueeze(-1)

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Any, qe: Any, ke: Any, mq: int, mk: int, dropout: float, causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        plan = self._plan("backward", q, k, v, bias, causal)
        layouts = _order(out), _order(dout)
        refuse(plan.setdefault("layouts", layouts) == layouts, "a plan was found that has other strides of out or dout")
        refuse(out.dtype == dout.dtype == q.dtype and (mq, mk) == (q.shape[2], k.shape[2]), "out, dout, lengths")
        refuse(out.stride(-1) == dout.stride(-1) == 1, f"head dims of out {out.stride()}, dout {dout.stride()}")
        refuse(lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32, f"log-sum-exp {lse.shape}")
        if self.ragged and all(x.transpose(1, 2).is_contiguous() for x in (q, k, v, out)):
            apart = q.shape[2] * lse.stride(2)  # batch rows are found by this, whatever their stride is
            refuse(len(q) == 1 or lse.stride(0) == apart, f"statistics of row 1 at {lse.stride(0)}, and not {apart}")
        else:
            refuse(lse.is_contiguous(), "cuDNN takes statistics [B, H, S]")
        logits = _logits(q, k, scale, _visible(q.shape[2], k.shape[2], -1, 0 if causal else -1))
        return _gradients(logits, lse.squeeze(-1), dout, q, k, v, out, scale)

    def _plan(self, way: str, q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool) -> dict[str, Any]:
        self.calls.append("cudnn")
        refuse_misaligned(*(x for x in (q, k, v) if x.shape[3] % 8 == 0))  # other head dims do not come here
        dims = q.shape[3], v.shape[3]
        refuse(self.card is None or self.card.cudnn_runs(dims, way == "backward"), f"cuDNN has no engine for {dims}")
        refuse(bias is None and min(q.shape[2], k.shape[2]) > 1, f"{q.shape[2]} queries and {k.shape[2]} keys")
        refuse(not causal or q.shape[2] == k.shape[2], "causal rectangles")
        key = way, causal, *((tuple(x.shape), x.stride()) for x in (q, k, v))
        found: dict[str, Any] = self.plans.setdefault(key, {})
        return found

    # ------------------------------------------------------------------------------------------- memory-efficient

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute: bool, dropout: float, causal: bool,
        *, scale: float,
    ) -> Any:  # fmt: skip
        out, lse = _attend(self._efficient(q, k, v, bias, causal, scale), v)  # a row that sees nothing is not a number
        padded = torch.full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), torch.inf)
        padded[..., : q.shape[2]] = lse
        return out.to(q.dtype), padded, None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
        seed: Tensor, offset: Tensor, dropout: float, wanted: Sequence[bool], causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        rows = q.shape[2]
        refuse(lse.shape[2] == -(-rows // 32) * 32 and lse.is_contiguous(), "log-sum-exp padded to 32 rows")
        # Its kernel knows no stride of out from one position to the next: it takes the heads for dense.
        dense = rows == 1 or out.stride(2) == out.shape[1] * out.shape[3]
        refuse(dense and out.stride(3) == 1, f"out is read as [B, S, H, D], not {out.stride()}")
        logits = self._efficient(q, k, v, bias, causal, scale)
        return *_gradients(logits, lse[..., :rows], dout, q, k, v, out, scale), None

    def _efficient(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        self.calls.append("efficient" if bias is None else "bias")
        refuse_misaligned(q, k, v)
        refuse(q.shape[1] == k.shape[1] == v.shape[1] and q.shape[3] % 8 == v.shape[3] % 8 == 0, "heads, head dims")
        refuse(not causal or (bias is None and q.shape[2] == k.shape[2]), "causal rectangles")
        if bias is not None:
            whole = *q.shape[:3], k.shape[2]
            refuse(tuple(bias.shape) == whole and bias.dtype == q.dtype, f"bias {tuple(bias.shape)} is not {whole}")
            refuse(
                all(stride % 16 == 0 for stride in bias.stride()[:3]) and bias.stride(3) == 1, "bias rows not aligned"
            )
        return _logits(q, k, scale, _visible(q.shape[2], k.shape[2], -1, 0 if causal else -1), bias)


@dataclass(frozen=True)
class Card:
    """A card, its cuDNN, and what PyTorch says of both. The user's settings are PyTorch's own, which ``sdpa_kernel``
    sets. ``lenient`` is a PyTorch that admits head dims up to 256 on Hopper, as it did from cuDNN 9.10 on."""

    major: int
    minor: int = 0
    cudnn_version: int = 92000
    lenient: bool = False

    @property
    def cudnn_first(self) -> bool:
        return self.cudnn_version > 91500 and self.major in (9, 10)

    def cudnn_runs(self, dims: tuple[int, int], backward: bool) -> bool:
        """True if cuDNN has an engine for these head dims."""
        if max(dims) <= 128:
            return True
        if not (self.major == 10 or (self.major, self.minor) == (9, 0)):
            return False
        if dims == (192, 128):
            return self.cudnn_version >= 91100
        return max(dims) <= 256 and self.cudnn_version > 92200 and (not backward or dims == (256, 256))

    def flash(self, p: Any, debug: bool = False) -> bool:
        q, k, v = p.query, p.key, p.value
        half = q.dtype in (torch.float16, torch.bfloat16)
        small = self.major == 12 or (self.major == 8 and self.minor >= 6)
        no_backward = small and _trains(q) and 192 < q.shape[3] <= 224
        return half and q.shape[3] == k.shape[3] == v.shape[3] <= 256 and self.major >= 8 and not no_backward

    def efficient(self, p: Any, debug: bool = False) -> bool:
        return bool(p.query.dtype != torch.float64)

    def cudnn(self, p: Any, debug: bool = False) -> bool:
        dims, half = (p.query.shape[3], p.value.shape[3]), p.query.dtype in (torch.float16, torch.bfloat16)
        takes = self.cudnn_runs(dims, _trains(p.query)) or (self.lenient and self.major == 9 and max(dims) <= 256)
        return half and self.major >= 8 and takes and p.key.shape[2] > 1

    def choice(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> int:
        """The backend that plain SDPA would choose."""
        backends = torch.backends.cuda
        params = mock.Mock(query=q, key=k, value=v)
        takes: list[tuple[SDPBackend, bool, Callable[[Any], bool]]] = [
            (SDPBackend.FLASH_ATTENTION, backends.flash_sdp_enabled(), self.flash),
            (SDPBackend.EFFICIENT_ATTENTION, backends.mem_efficient_sdp_enabled(), self.efficient),
            (SDPBackend.MATH, backends.math_sdp_enabled(), lambda _: True),
        ]
        cudnn = SDPBackend.CUDNN_ATTENTION, backends.cudnn_sdp_enabled(), self.cudnn
        takes = [cudnn, *takes] if self.cudnn_first else [*takes, cudnn]
        found = (backend for backend, enabled, can in takes if enabled and can(params))
        return int(next(found, SDPBackend.ERROR).value)

    @contextmanager
    def installed(self, activated: str | None = None) -> Iterator[None]:
        """Tensors of any device are this card's. ``activated``: another implementation of FlashAttention."""
        with ExitStack() as stack:
            for where, name, what in (
                (torch, "_fused_sdp_choice", self.choice),
                (torch.backends.cuda, "SDPAParams", lambda q, k, v, *_: mock.Mock(query=q, key=k, value=v)),
                (torch.backends.cuda, "can_use_flash_attention", self.flash),
                (torch.backends.cuda, "can_use_efficient_attention", self.efficient),
                (torch.backends.cuda, "can_use_cudnn_attention", self.cudnn),
                (torch.cuda, "get_device_capability", lambda device: (self.major, self.minor)),
                (torch.backends.cudnn, "version", lambda: self.cudnn_version),
                (cuda, "current_flash_attention_impl", lambda: activated),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            yield
