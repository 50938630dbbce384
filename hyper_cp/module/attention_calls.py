"""Attention calls that user modules make, read as one question, and the answer in the caller's form.

A new call is a new entry of ``ROUTED``: nothing else in the library knows how users spell attention.
What a call asks for and cannot be honoured is refused by name here, never reinterpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..mesh.cp_mesh import CPMesh
from ..ops.attention import Call, Mode, cp_attention, ring_attention
from ..ops.flex import Flex
from ..schedule.masks import documents_table
from ._torch.flex_patch import plain_flex_attention

Attend = Callable[[Tensor, Tensor, Tensor, CPMesh, Mode, Call], Any]


@dataclass
class Asked:
    """Attention of ``[B, H, S, D]``; ``answer`` puts the output into the caller's form.

    ``inside`` computes it where the all-to-all was done at the module's boundary, ``alone`` does that too: the
    engine, unless the call brings its own.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    documents: Tensor | None = None
    dropout_p: float = 0.0
    answer: Callable[[Any], Any] = lambda out: out
    inside: Attend = ring_attention
    alone: Attend = cp_attention


def _sdpa(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Asked:
    _check_groups(name, query, key, enable_gqa)
    return Asked(query, key, value, is_causal, scale, attn_mask, dropout_p=dropout_p)


def _check_groups(name: str, query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{name}: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True for "
            "grouped-query attention"
        )


# --------------------------------------------------------------------------- FlexAttention


def _flex(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **others: Any,
) -> Asked:
    _check_groups(name, query, key, enable_gqa)
    options = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse, "kernel_options": kernel_options}
    flex = Flex(name, score_mod, block_mask, {**options, **others}, plain_flex_attention)
    return Asked(query, key, value, inside=flex.inside, alone=flex.alone)


# --------------------------------------------------------------------------- Ascend NPU

_UNBOUNDED = 2**31 - 1
# Arguments of npu_fusion_attention (v1) after input_layout.
_POSITIONAL = ["pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens"]
_POSITIONAL += ["inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"]
_POSITIONAL += ["gen_mask_parallel", "sync", "softmax_layout", "sink", "dropout_mask", "seed", "offset"]
# Arguments that do not change the result, whatever they are.
_HARMLESS = {"inner_precise", "gen_mask_parallel", "sync", "softmax_layout", "seed", "offset", "pse_type"}


def _npu_fusion_attention(
    name: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *args: Any, **kwargs: Any
) -> Asked:
    """``torch_npu.npu_fusion_attention`` and its v2 and v3. Its masks are True where hidden, its scale is 1
    unless given, its ``actual_seq_*`` are documents without the leading 0."""
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    given = {k.replace("tockens", "tokens"): v for k, v in given.items() if v is not None and k not in _HARMLESS}
    mask, scale, mode = given.pop("atten_mask", None), given.pop("scale", 1.0), given.pop("sparse_mode", 0)
    before, after = given.pop("pre_tokens", _UNBOUNDED), given.pop("next_tokens", _UNBOUNDED)
    lengths, kv_lengths = (given.pop(f"actual_seq_{x}len", None) for x in ("q", "kv"))
    if given.pop("keep_prob", 1.0) != 1.0:
        given["keep_prob"] = "below 1"
    if given or mode not in (0, 1, 2, 3, 4) or input_layout not in _LAYOUTS:
        what = ", ".join([*given] or [f"sparse_mode={mode}" if input_layout in _LAYOUTS else input_layout])
        raise NotImplementedError(
            f"{name} calls npu_fusion_attention with {what}, which is not supported under context parallelism yet. "
            "Supported: sparse_mode 0 to 4, layouts BNSD, BSND, BSH, SBH and TND, atten_mask, scale, "
            "pre/next tokens and actual_seq_qlen = actual_seq_kvlen"
        )
    split, join = _LAYOUTS[input_layout]
    kv_heads = head_num * key.shape[-1] // query.shape[-1] if input_layout in ("BSH", "SBH") else 0
    q, k, v = split(query, head_num), split(key, kv_heads), split(value, kv_heads)
    asked = Asked(q, k, v, scale=scale, answer=lambda out: _npu_outputs(join(out).contiguous(), out))
    if (lengths is None) != (input_layout != "TND") or (
        lengths is not None and [int(x) for x in lengths] != [int(x) for x in kv_lengths or ()]
    ):
        raise ValueError(
            f"{name} calls npu_fusion_attention with input_layout={input_layout!r}, actual_seq_qlen={lengths} and "
            f"actual_seq_kvlen={kv_lengths}: TND needs both, equal and over global positions; other layouts none"
        )
    if lengths is not None:
        asked.documents = documents_table([0, *(int(x) for x in lengths)])
    if mask is None:  # the operator ignores sparse_mode and tokens then
        return asked
    if mode in (0, 1):
        asked.mask = mask == 0
    if mode in (2, 3):  # query and key are equally long: both diagonals are one
        asked.is_causal = True
    if mode in (0, 4):
        if before < 0 or after < 0:
            raise NotImplementedError(
                f"{name} calls npu_fusion_attention with pre_tokens={before}, next_tokens={after}: bounds below 0 "
                "are not supported under context parallelism"
            )
        bounds = tuple(None if x >= _UNBOUNDED else x for x in (before, after))
        asked.window = None if bounds == (None, None) else bounds  # type: ignore[assignment]
    return asked


_LAYOUTS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "BNSD": (lambda x, n: x, lambda x: x),
    "BSND": (lambda x, n: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BSH": (lambda x, n: x.unflatten(2, (n, -1)).transpose(1, 2), lambda x: x.transpose(1, 2).flatten(2)),
    "SBH": (lambda x, n: x.unflatten(2, (n, -1)).permute(1, 2, 0, 3), lambda x: x.permute(2, 0, 1, 3).flatten(2)),
    "TND": (lambda x, n: x.transpose(0, 1).unsqueeze(0), lambda x: x.squeeze(0).transpose(0, 1)),
}


def _npu_outputs(joined: Tensor, out: Tensor) -> tuple[Any, ...]:
    """The operator's seven results; the statistics of the softmax stay inside the engine."""
    nothing = out.new_empty(0)
    return joined, nothing, nothing, nothing, 0, 0, 0


# --------------------------------------------------------------------------- the table

_NPU = ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")
ROUTED: dict[Any, Callable[..., Asked]] = {
    F.scaled_dot_product_attention: _sdpa,
    flex_attention: _flex,
    **{f"npu.{op}{overload}": _npu_fusion_attention for op in _NPU for overload in ("", ".default")},
}
WHOLE_TOO = {F.scaled_dot_product_attention, flex_attention}
"""Routed even where the module sees whole sequences: what they take may name heads, of which it has a share."""
PLAIN: dict[Any, Callable[..., Any]] = {
    flex_attention: plain_flex_attention,
    Tensor.unflatten: torch.unflatten,  # torch.compile cannot trace the method where a mode is active
}
"""What to call instead of a function that is not routed after all, where that is not the function itself."""
# (The operator inside flex_attention is not refused: a compiled graph calls it after flex_attention was routed.)
UNROUTED = {F.multi_head_attention_forward: "nn.MultiheadAttention"}


def key_of(func: Any) -> Any:
    """What ``ROUTED`` knows a function by: itself, or the name of an operator that may not be installed."""
    return str(func) if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) else func
