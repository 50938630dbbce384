"""A stand-in for the public contract of the Ascend NPU's attention operators, in plain math on the CPU.

Never shipped, never used where the real torch_npu is installed (registering a schema twice ends the
process). It shows nothing of the hardware: no speed, no memory, no streams, no HCCL. A use that the contract
leaves undefined is refused, or gives NaN; a use that the stand-in does not cover raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hyper_cp.ops.writes import Written, unchanged, written
from tests.harness.npu_schemas import SCHEMAS

LANES, COMPRESSED, MOST_TOKENS = 8, 2048, 1 << 20
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_library: Any = None
calls: list[dict[str, Any]] = []
"""Calls of the forward operators since the list was cleared: layout, sparse mode, True if there was a mask."""


def install() -> None:
    """Register the operators in this process, once."""
    global _library
    if _library is None and find_spec("torch_npu") is None:
        _library = torch.library.Library("npu", "DEF")
        for name, schema in SCHEMAS.items():
            _library.define(schema)
            _library.impl(name, partial(_grad if "grad" in name else _forward, name), "CPU")
            if "grad" not in name:
                _library.impl(name, partial(_Differentiable.call, name), "Autograd")


def installed() -> bool:
    """True if the operators are the stand-in's, not those of a real torch_npu."""
    return _library is not None


def refuse(unless: bool, why: str) -> None:
    if not unless:
        raise RuntimeError(why)


@cache
def _compressed(prefix: bool) -> Tensor:
    """The triangle that stands for every causal or banded mask; with a prefix, a rectangle below it."""
    triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
    right = torch.arange(COMPRESSED) >= COMPRESSED // 2
    return torch.cat([triangle, right.expand(COMPRESSED // 2, -1)]) if prefix else triangle


# --------------------------------------------------------------------------- a call


@dataclass
class Call:
    """One call of any version, its options spelled as in v2 (v1 and v3 write "tockens", gradients "scale_value")."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    @staticmethod
    def of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        schema = getattr(torch.ops.npu, name).default._schema
        options = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        options.update(zip((a.name for a in schema.arguments), args, strict=False))
        options.update(kwargs)
        options = {k.replace("tockens", "tokens").replace("scale_value", "scale"): v for k, v in options.items()}
        call = Call(options.pop("query"), options.pop("key"), options.pop("value"), {"pse_type": 1, **options})
        call.check()
        return call

    def __getattr__(self, word: str) -> Any:
        return self.options[word]

    @cached_property
    def layout(self) -> str:
        return str(self.input_layout).upper()

    @cached_property
    def kv_heads(self) -> int:
        if self.layout in ("BSH", "SBH"):
            return self.key.shape[2] // (self.query.shape[2] // self.head_num)
        return self.key.shape[-3 if self.layout == "BNSD" else -2]

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """The ends of the sequences among the tokens of query and of key; trailing zeros take no part."""
        both = [[int(x) for x in self.options[f"actual_seq_{x}len"]] for x in ("q", "kv")]
        while both[0] and both[0][-1] == both[1][-1] == 0:
            both = [ends[:-1] for ends in both]
        return both[0], both[1]

    def split(self, x: Tensor, of_query: bool) -> list[Tensor]:
        """``[N, S, D]`` in fp32 of every batch row, or sequence."""
        heads = self.head_num if of_query else self.kv_heads
        if self.layout == "TND":
            ends = self.ends[0 if of_query else 1]
            return [x[a:b].transpose(0, 1).float() for a, b in zip([0, *ends], ends, strict=False)]
        if self.layout in ("BSH", "SBH"):
            x = x.unflatten(2, (heads, -1))
        order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}[self.layout]
        return list(x.permute(order).float())

    def join(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The inverse of :meth:`split`, in the dtype and with the tokens of ``like``."""
        if self.layout == "TND":
            done = torch.cat([x.transpose(0, 1) for x in parts])
            rest = done.new_full((like.shape[0] - done.shape[0], *done.shape[1:]), torch.nan)  # not computed
            return torch.cat([done, rest]).to(like.dtype).contiguous()
        x = torch.stack(parts)
        order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}[self.layout]
        x = x.permute(order)
        return (x.flatten(2) if self.layout in ("BSH", "SBH") else x).to(like.dtype).contiguous()

    # Statistics: [B, N, S, 8]. TND says [T, N, 8], but memory is blocks [N, s_i, 8] unless softmax_layout is TND.

    def lanes(self, parts: list[Tensor]) -> Tensor:
        parts = [x.unsqueeze(-1).expand(*x.shape, LANES) for x in parts]  # [N, s, 8]
        if self.layout != "TND":
            return torch.stack(parts).contiguous()
        if self.softmax_layout == "TND":
            flat = torch.cat([x.transpose(0, 1).reshape(-1) for x in parts])
        else:
            flat = torch.cat([x.reshape(-1) for x in parts])
        shape = (self.query.shape[0], self.head_num, LANES)
        whole = flat.new_full((self.query.shape[0] * self.head_num * LANES,), torch.nan)
        whole[: flat.numel()] = flat
        return whole.view(shape)

    def unlaned(self, x: Tensor, what: str) -> list[Tensor]:
        """``[N, s, 1]`` of every batch row, or sequence."""
        tnd = self.layout == "TND"
        lengths = [q.shape[1] for q in self.split(self.query, True)]
        shape = (self.query.shape[0], self.head_num, LANES)
        shape = shape if tnd else (len(lengths), self.head_num, lengths[0], LANES)  # type: ignore[assignment]
        refuse(x is not None and tuple(x.shape) == shape and x.dtype == torch.float32, f"{what} must be fp32 {shape}")
        refuse(x.is_contiguous(), f"{what} must be contiguous")
        if not tnd:
            return [row[..., :1] for row in x]
        flat = x.view(-1)[: sum(lengths) * self.head_num * LANES]
        blocks = flat.split([s * self.head_num * LANES for s in lengths])
        if self.softmax_layout == "TND":
            return [b.view(-1, self.head_num, LANES).transpose(0, 1)[..., :1] for b in blocks]
        return [b.view(self.head_num, -1, LANES)[..., :1] for b in blocks]

    # ----------------------------------------------------------------------- hidden pairs

    def hidden(self, index: int, rows: int, cols: int) -> Tensor:
        """True where masked out, ``[N or 1, rows, cols]`` of one batch row or sequence: the documented table."""
        if self.atten_mask is None:  # sparse mode and tokens are ignored
            return torch.zeros(1, rows, cols, dtype=torch.bool)
        mask, mode = self.atten_mask.bool(), self.sparse_mode
        i, j, d = torch.arange(rows)[:, None], torch.arange(cols)[None], cols - rows
        band = (j > i + d + self.next_tokens) | (j < i + d - self.pre_tokens)
        if mode in (0, 1, 5):
            if mask.ndim == 4:
                mask = mask[index if mask.shape[0] > 1 else 0]
            mask = (mask if mask.ndim == 3 else mask[None])[:, :rows, :cols]
            tokens = (j > i + self.next_tokens) | (j < i - self.pre_tokens)
            if mode == 5:
                tokens = (j > i + d) & (j >= self.prefix[index])
                refuse(bool((mask == tokens).all()), "sparse_mode 5: atten_mask is not that of prefix")
            if mode == 0:
                refuse(not bool((tokens & ~mask).any()), "sparse_mode 0: tokens hide what atten_mask does not")
            return mask
        last = len(self.ends[0]) - 1 if self.layout == "TND" else 0
        found = {
            2: lambda: j > i,
            3: lambda: j > i + d,
            4: lambda: band,
            6: lambda: (j > i + d) & (j >= self.prefix[index]),
            7: lambda: band if index == last else j > i + d,
            8: lambda: band if index == 0 else j > i,
        }[mode]()
        return found[None].expand(1, rows, cols)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(q, k, v, logits) of every batch row, or sequence, with as many key heads as query heads; hidden
        logits are -inf."""
        qs, ks, vs = self.split(self.query, True), self.split(self.key, False), self.split(self.value, False)
        for index, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True)):
            k, v = (x.repeat_interleave(self.head_num // self.kv_heads, 0) for x in (k, v))
            product = q @ k.mT
            if self.pse is not None:
                pse = self.pse.float()[index if self.pse.shape[0] > 1 else 0]
                logits = self.scale * (product + pse) if self.pse_type == 1 else self.scale * product + pse
            else:
                logits = self.scale * product
            yield q, k, v, logits.masked_fill(self.hidden(index, q.shape[1], k.shape[1]), -torch.inf)

    # ----------------------------------------------------------------------- refusals

    def check(self) -> None:
        tensors = {"query": self.query, "key": self.key, "value": self.value, "pse": self.pse}
        tensors |= {"dy": self.options.get("dy"), "attention_in": self.options.get("attention_in")}
        for name, x in tensors.items():
            if x is not None:
                refuse(x.is_contiguous(), f"{name} must be contiguous")
                fits = x.dtype == self.query.dtype and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
                refuse(fits, f"{name} is {x.dtype}: fp16, bf16 and fp32 are supported, equal to query's")
        refuse(self.layout in ("BSH", "SBH", "BNSD", "BSND", "TND"), f"input_layout {self.layout} is not known")
        dims = 4 if self.layout in ("BNSD", "BSND") else 3
        refuse(all(x.ndim == dims for x in (self.query, self.key, self.value)), f"{self.layout} has {dims} dimensions")
        refuse(0 < self.head_num <= 256, f"head_num {self.head_num} must be in 1 to 256")
        refuse(0 < self.keep_prob <= 1, f"keep_prob {self.keep_prob} must be in (0, 1]")
        refuse(self.padding_mask is None, "padding_mask is not supported")
        refuse(self.inner_precise in (0, 1, 2), f"inner_precise {self.inner_precise} is not known")
        refuse(self.softmax_layout in ("", "TND"), "only softmax_layout TND is supported")
        refuse(self.softmax_layout == "" or self.layout == "TND", "softmax_layout TND takes input_layout TND")
        for word in ("query_rope", "key_rope", "sink", "dropout_mask"):
            if self.options.get(word) is not None:
                raise NotImplementedError(f"{word} is not in the stand-in")
        if self.keep_prob != 1 or self.pse_type > 1 or (self.pse is not None and self.layout == "TND"):
            raise NotImplementedError("dropout, pse_type 2 and 3 and pse of TND are not in the stand-in")
        self.check_shapes()
        self.check_mask()

    def check_shapes(self) -> None:
        tnd = self.layout == "TND"
        lengths = self.options["actual_seq_qlen"], self.options["actual_seq_kvlen"]
        if tnd:
            refuse(all(x is not None and len(x) for x in lengths), "TND takes actual_seq_qlen and actual_seq_kvlen")
            refuse(len(lengths[0]) == len(lengths[1]) <= 1024, "actual_seq_* must be equally many, at most 1024")
            for name, ends, x in zip(("q", "kv"), self.ends, (self.query, self.key), strict=True):
                ascending = all(a <= b for a, b in zip([0, *ends], ends, strict=False))
                refuse(ascending and (not ends or ends[-1] <= x.shape[0]), f"actual_seq_{name}len {ends} is wrong")
            refuse(max(self.query.shape[0], self.key.shape[0]) <= MOST_TOKENS, "more than 1M tokens")
        else:
            refuse(lengths == (None, None), "actual_seq_* belong to input_layout TND")
        for x in lengths:
            if isinstance(x, Tensor):
                refuse(x.device.type == "cpu" and x.ndim == 1, "actual_seq_* must be 1-D on the CPU")
        qs, ks, vs = self.split(self.query, True), self.split(self.key, False), self.split(self.value, False)
        refuse(len(qs) == len(ks) == len(vs), "batch sizes differ")
        for q, k, v in zip(qs, ks, vs, strict=True):
            refuse(q.shape[0] == self.head_num, f"query has {q.shape[0]} heads, head_num is {self.head_num}")
            refuse(k.shape[:2] == v.shape[:2], "key and value differ in heads or length")
            refuse(q.shape[0] % k.shape[0] == 0, "heads of query must be a multiple of those of key")
            refuse(q.shape[2] == k.shape[2] >= v.shape[2], "head dims must be those of query = key >= value")
            refuse(q.shape[2] <= (512 if tnd and "dy" in self.options else 768), f"head dim {q.shape[2]} is too large")
            refuse(max(q.shape[1], k.shape[1]) <= MOST_TOKENS, "more than 1M positions")

    def check_mask(self) -> None:
        mode, tnd = self.sparse_mode, self.layout == "TND"
        refuse(mode in ((0, 1, 2, 3, 4, 7, 8) if tnd else range(7)), f"sparse_mode {mode} is not for {self.layout}")
        if mode in (7, 8):
            refuse(self.pse is None, "sparse_mode 7 and 8 take no pse")
        if self.atten_mask is None:
            return
        mask, shape = self.atten_mask, tuple(self.atten_mask.shape)
        refuse(mask.dtype in (torch.bool, torch.uint8), "atten_mask must be bool or uint8")
        qs, ks = self.split(self.query, True), self.split(self.key, False)
        rows, cols = max(q.shape[1] for q in qs), max(k.shape[1] for k in ks)
        if mode in (5, 6):
            refuse(self.prefix is not None and len(self.prefix) == len(qs) <= 32, "prefix: one per row, at most 32")
            refuse(all(max(0, cols - rows) <= p <= cols for p in self.prefix), f"prefix {self.prefix} is out of range")
        if mode in (0, 1, 5):
            batch = len(qs)
            shapes = [(rows, cols), (1, 1, rows, cols), (batch, 1, rows, cols), (batch, self.head_num, rows, cols)]
            shapes = shapes[:1] if tnd else shapes[2:] if mode == 5 else shapes
            refuse(shape in shapes, f"atten_mask {shape} must be one of {shapes}")
            refuse(not (tnd and bool(mask.bool().all(-1).any())), "atten_mask of TND hides whole rows")
            return
        if not unchanged(_RIGHT.get(mode == 6, []), [mask]):  # 4 million values are compared once
            want = _compressed(mode == 6)
            refuse(shape == tuple(want.shape) and torch.equal(mask.bool(), want), f"sparse_mode {mode}: not its mask")
            _RIGHT[mode == 6] = written([mask])
        if mode in (4, 7, 8):
            refuse(self.pre_tokens + self.next_tokens >= 0, "pre_tokens and next_tokens leave nothing")


_RIGHT: dict[bool, list[Written]] = {}
"""The compressed masks that were right, while nobody writes to them."""


# --------------------------------------------------------------------------- the operators


def _forward(name: str, *args: Any, **kwargs: Any) -> Any:
    call = Call.of(name, args, kwargs)
    calls.append({"layout": call.layout, "mode": call.sparse_mode, "mask": call.atten_mask is not None})
    outs, largest, totals = [], [], []
    for _, _, v, logits in call.pairs():
        top = logits.amax(-1, keepdim=True) if logits.shape[2] else logits.new_full((*logits.shape[:2], 1), -torch.inf)
        dead = top == -torch.inf
        weights = (logits - top.masked_fill(dead, 0)).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(dead, 1)
        if call.atten_mask is not None and call.sparse_mode in (0, 1, 5) and call.inner_precise != 2:
            # Nobody knows which rows such a mask hides from all keys: equal logits, whatever their size.
            weights = weights.masked_fill(dead, 1 / max(1, v.shape[1]))
        outs.append(weights @ v)
        largest.append(top.masked_fill(dead, LOWEST)[..., 0])
        totals.append(total.masked_fill(dead, HIGHEST)[..., 0])
    found = call.join(outs, call.query), call.lanes(largest), call.lanes(totals), call.query.new_empty(0)
    if name.endswith("v3"):
        return *found, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return *found, 0, 0, 0


def _grad(name: str, *args: Any, **kwargs: Any) -> Any:
    call = Call.of(name, args, kwargs)
    refuse(call.attention_in is not None, "attention_in is needed")
    tops, totals = call.unlaned(call.softmax_max, "softmax_max"), call.unlaned(call.softmax_sum, "softmax_sum")
    dys, outs = call.split(call.dy, True), call.split(call.attention_in, True)
    found: list[list[Tensor]] = [[], [], [], []]
    for (q, k, v, logits), top, total, dy, out in zip(call.pairs(), tops, totals, dys, outs, strict=True):
        weights = (logits - top).exp() / total
        dlogits = weights * (dy @ v.mT - (dy * out).sum(-1, keepdim=True))
        pieces = dlogits @ k * call.scale, dlogits.mT @ q * call.scale, weights.mT @ dy, dlogits
        for grads, x in zip(found, pieces, strict=True):
            grads.append(x)
    dq = call.join(found[0], call.query)
    dk, dv = (
        call.join([x.unflatten(0, (call.kv_heads, -1)).sum(1) for x in grads], like)
        for grads, like in zip(found[1:3], (call.key, call.value), strict=True)
    )
    nothing = call.query.new_empty(0)
    dpse = nothing
    if call.pse is not None:
        dpse = torch.stack(found[3]) * (call.scale if call.pse_type == 1 else 1.0)
        dpse = dpse.sum_to_size(call.pse.shape).to(call.query.dtype)
    if name.endswith("v2"):
        return dq, dk, dv, dpse, nothing.clone(), nothing.clone(), nothing.clone()
    return dq, dk, dv, dpse, nothing.clone()


class _Differentiable(torch.autograd.Function):
    """The autograd of a forward operator: it calls the gradient operator with the same options."""

    @staticmethod
    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        arguments = getattr(torch.ops.npu, name).default._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        tensors = {k: v for k, v in given.items() if isinstance(v, Tensor)}
        options = {k: v for k, v in given.items() if k not in tensors and v is not None}
        return _Differentiable.apply(name, options, list(tensors), *tensors.values())

    @staticmethod
    def forward(ctx: Any, name: str, options: dict[str, Any], names: list[str], *tensors: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = getattr(torch.ops.npu, name)(**options, **dict(zip(names, tensors, strict=True)))
        ctx.name, ctx.options, ctx.names = name, dict(options), names
        ctx.save_for_backward(*tensors, *outputs[:3])
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if isinstance(x, Tensor)))
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        saved = dict(zip([*ctx.names, "attention_in", "softmax_max", "softmax_sum"], ctx.saved_tensors, strict=True))
        options = {**ctx.options, **saved, "dy": dout.contiguous()}
        if "scale" in options:
            options["scale_value"] = options.pop("scale")
        grads = getattr(torch.ops.npu, ctx.name.replace("attention", "attention_grad"))(**options)
        return None, None, None, *grads[:3], *[None] * (len(ctx.names) - 3)
