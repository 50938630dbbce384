"""A stand-in for the public contract of the Ascend NPU's attention operators, in plain math on the CPU.

Never shipped, never used where the real torch_npu is installed (registering a schema twice ends the
process). It says nothing of the hardware: no speed, no memory, no streams, no HCCL.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

FORWARD = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
    "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
BACKWARD = (
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, "
    "*, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
    "int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
)
LANES, COMPRESSED = 8, 2048
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_library: Any = None
calls: list[dict[str, Any]] = []
"""What was asked of the operators since the list was cleared: layout, sparse mode, tokens."""


def install() -> None:
    """Register the operators in this process, once."""
    global _library
    if _library is None and find_spec("torch_npu") is None:
        _library = torch.library.Library("npu", "DEF")
        _library.define(FORWARD)
        _library.define(BACKWARD)
        _library.impl("npu_fusion_attention", forward, "CPU")
        _library.impl("npu_fusion_attention_grad", backward, "CPU")


def _to_bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    raise RuntimeError(f"layout {layout} is not supported by the stand-in")


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    return {
        "BNSD": lambda: x,
        "BSND": lambda: x.transpose(1, 2),
        "BSH": lambda: x.transpose(1, 2).flatten(2),
        "SBH": lambda: x.permute(2, 0, 1, 3).flatten(2),
    }[layout]().contiguous()


def _hidden(rows: int, cols: int, mask: Tensor | None, mode: int, pre: int, following: int) -> Tensor:
    """True where masked out, broadcastable to [B, N, rows, cols]: the documented table of sparse modes."""
    if mask is None:  # sparse mode and tokens are ignored
        return torch.zeros(rows, cols, dtype=torch.bool)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError("atten_mask must be bool or uint8")
    mask = mask.bool()
    i, j, d = torch.arange(rows)[:, None], torch.arange(cols)[None], cols - rows
    if mode in (0, 1):
        if tuple(mask.shape[-2:]) != (rows, cols):
            raise RuntimeError(f"atten_mask {tuple(mask.shape)} is not the full mask of {rows} x {cols}")
        if mode == 0:
            return mask | (j > i + following) | (j < i - pre)
        return mask
    if tuple(mask.shape) != (COMPRESSED, COMPRESSED) or not bool((mask == torch.ones_like(mask).triu(1)).all()):
        raise RuntimeError(f"sparse_mode {mode} takes the compressed 2048 x 2048 triangle")
    if mode == 2:
        return j > i
    if mode == 3:
        return j > i + d
    if mode == 4:
        return (j > i + d + following) | (j < i + d - pre)
    raise RuntimeError(f"sparse_mode {mode} is not supported by the stand-in")


def _check(q: Tensor, k: Tensor, v: Tensor, heads: int, padding_mask: Any) -> None:
    for x in (q, k, v):
        if not x.is_contiguous():
            raise RuntimeError("the operator takes contiguous tensors")
        if x.dtype != q.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise RuntimeError(f"dtype {x.dtype} is not supported, or not that of query")
    if padding_mask is not None:
        raise RuntimeError("padding_mask is not supported")
    if heads > 256:
        raise RuntimeError("more than 256 heads")


def _logits(q: Tensor, k: Tensor, pse: Tensor | None, scale: float, hidden: Tensor) -> Tensor:
    if q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise RuntimeError("heads of query must be a multiple of those of key, and head dims equal")
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.float() @ k.float().mT
    return (scale * (logits if pse is None else logits + pse.float())).masked_fill(hidden, -torch.inf)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *_: Any,
    **__: Any,
) -> Any:
    _check(query, key, value, head_num, padding_mask)
    calls.append({"layout": input_layout, "mode": sparse_mode, "mask": atten_mask is not None})
    kv_heads = key.shape[{"BNSD": 1, "BSND": 2}.get(input_layout, -1)]
    if input_layout in ("BSH", "SBH"):
        kv_heads = key.shape[2] // (query.shape[2] // head_num)
    q = _to_bnsd(query, input_layout, head_num)
    k, v = (_to_bnsd(x, input_layout, kv_heads) for x in (key, value))
    if q.shape[1] != head_num or v.shape[3] > k.shape[3]:
        raise RuntimeError("head_num is not that of query, or the head dim of value exceeds that of key")
    hidden = _hidden(q.shape[2], k.shape[2], atten_mask, sparse_mode, pre_tockens, next_tockens)
    logits = _logits(q, k, pse, scale, hidden)
    largest = logits.amax(-1, keepdim=True)
    dead = largest == -torch.inf
    weights = (logits - largest.masked_fill(dead, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.masked_fill(dead, 1)) @ v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    largest, total = largest.masked_fill(dead, LOWEST), total.masked_fill(dead, HIGHEST)
    lanes = [x.expand(*x.shape[:3], LANES).contiguous() for x in (largest, total)]
    return _from_bnsd(out.to(query.dtype), input_layout), *lanes, query.new_empty(0), 0, 0, 0


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    sparse_mode: int = 0,
    **_: Any,
) -> Any:
    _check(query, key, value, head_num, padding_mask)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise RuntimeError("softmax_max, softmax_sum and attention_in are needed")
    kv_heads = key.shape[{"BNSD": 1, "BSND": 2}[input_layout]]
    q, do, o = (_to_bnsd(x, input_layout, head_num).float() for x in (query, dy, attention_in))
    k, v = (_to_bnsd(x, input_layout, kv_heads).float() for x in (key, value))
    if tuple(softmax_max.shape) != (*q.shape[:3], LANES) or softmax_max.dtype != torch.float32:
        raise RuntimeError(f"softmax_max {tuple(softmax_max.shape)} must be fp32 [B, N, S, 8]")
    hidden = _hidden(q.shape[2], k.shape[2], atten_mask, sparse_mode, pre_tockens, next_tockens)
    logits = _logits(q, k, pse, scale_value, hidden)
    weights = (logits - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    groups = q.shape[1] // kv_heads
    wide_k, wide_v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    dlogits = weights * (do @ wide_v.mT - (do * o).sum(-1, keepdim=True)) * scale_value
    dq, dk, dv = dlogits @ wide_k, dlogits.mT @ q, weights.mT @ do
    dk, dv = (x.unflatten(1, (kv_heads, groups)).sum(2) for x in (dk, dv))
    grads = [_from_bnsd(x.to(query.dtype), input_layout) for x in (dq, dk, dv)]
    return *grads, query.new_empty(0), query.new_empty(0)
