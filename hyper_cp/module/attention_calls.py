"""The attention calls that user modules make, each read as one request to the engine.

A new call is a new entry of ``ROUTED``: nothing else in the library knows how users spell attention.
An option that cannot be honoured is refused here with its name, never reinterpreted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .._torch.flex_patch import plain_flex_attention
from ..ops.attention import AttentionBackend, attention, latent_attention
from ..ops.checks import check_latent_forms, check_local
from ..ops.config import Call
from ..ops.flex import Flex
from ..ops.indexer_loss import indexer_loss
from ..ops.selection import select_keys
from ..schedule.documents import documents_table


@dataclass
class AttentionRequest:
    """An attention call on ``[B, H, S, D]``. ``core`` computes it, and ``to_caller`` gives its output the
    caller's form."""

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call
    """Its other arguments. The module's name, and documents of its batch, are added when it runs."""
    window: tuple[int | None, int | None] | None = None
    to_caller: Callable[[Any], Any] = lambda out: out
    core: AttentionBackend | None = None
    """None: the engine."""
    blocks: bool = False
    """True if ``core`` has a mask of its own."""
    selects: dict[str, Any] | None = None
    """The other arguments of :func:`hyper_cp.ops.selection.select`, of a call that selects keys."""

    @property
    def masked(self) -> bool:
        """True if a mask of the caller's says which keys each query sees."""
        return self.call.mask is not None or self.blocks


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
) -> AttentionRequest:
    """``F.scaled_dot_product_attention``."""
    if isinstance(attn_mask, CausalBias) and attn_mask.seq_len_q == attn_mask.seq_len_kv:  # both variants are equal
        is_causal, attn_mask = True, None
    call = Call(is_causal, scale, attn_mask, dropout_p=dropout_p, enable_gqa=enable_gqa)
    return AttentionRequest(query, key, value, call)


def _own(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    enable_gqa: bool = False,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> AttentionRequest:
    """``hyper_cp.ops.attention`` without a mesh."""
    return AttentionRequest(q, k, v, Call(mask=attn_mask, enable_gqa=enable_gqa, **options))


def _select(
    name: str,
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    **selects: Any,
) -> AttentionRequest:
    """``hyper_cp.ops.select_keys`` without a mesh."""
    return AttentionRequest(q, k, k, Call(is_causal, scale, attn_mask), selects={"weights": weights, **selects})


def _loss(name: str, **_: Any) -> AttentionRequest:
    """``hyper_cp.ops.indexer_loss`` without a mesh."""
    raise ValueError(
        f"{name} calls indexer_loss without a mesh. It compares an indexer with the log-sum-exp of attention, which "
        "attention in a styled module does not return. Pass mesh= to it and to the attention that makes the log-sum-exp"
    )


def _latent(
    name: str,
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    selected: Tensor | None = None,
) -> AttentionRequest:
    """``hyper_cp.ops.latent_attention`` without a mesh."""
    check_local(f"{name}: query", q, 4, "[batch, heads, sequence, head_dim]")
    check_latent_forms(latent, rope, f"{name}: ")
    call = Call(is_causal, scale, attn_mask, None, dropout_p, weight=weight, bias=bias, selected=selected)
    return AttentionRequest(q, latent.unsqueeze(1), rope, call)


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
) -> AttentionRequest:
    """``flex_attention``."""
    options = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse, "kernel_options": kernel_options}
    flex = Flex(name, score_mod, block_mask, {**options, **others}, plain_flex_attention)
    call, blocks = Call(enable_gqa=enable_gqa), block_mask is not None
    return AttentionRequest(query, key, value, call, core=flex, to_caller=flex.to_caller, blocks=blocks)


# --------------------------------------------------------------------------- nn.MultiheadAttention


def _multihead(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    **options: Any,
) -> AttentionRequest:
    """``F.multi_head_attention_forward``, which ``nn.MultiheadAttention`` calls: ``[L, N, E]``, or ``[L, E]``. The
    projections are applied to this rank's positions, before attention and after it."""
    extra = {"add_bias_kv": bias_k, "add_zero_attn": add_zero_attn or None, "static_k": options.get("static_k")}
    given = [option for option, x in extra.items() if x is not None]
    if options.get("need_weights", True) or given:
        what = ", ".join(given or ["need_weights=True"])
        raise NotImplementedError(
            f"{name} calls nn.MultiheadAttention with {what}, which is not supported under context parallelism. "
            "Attention weights over the whole sequence are never made, and no rank can add a key to it. Call it with "
            "need_weights=False, and make it without add_bias_kv and add_zero_attn"
        )
    batched = query.ndim == 3
    source = (query, key, value) if batched else tuple(x.unsqueeze(1) for x in (query, key, value))
    weights = [options.get(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
    if not options.get("use_separate_proj_weight") and in_weight is not None:
        weights = list(in_weight.chunk(3))
    biases = [None] * 3 if in_bias is None else in_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3)  # type: ignore[arg-type]
        for x, weight, bias in zip(source, weights, biases, strict=True)
    )

    def to_caller(out: Tensor) -> tuple[Tensor, None]:
        joined = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias)
        return (joined if batched else joined.squeeze(1)), None

    causal, padding = bool(options.get("is_causal")), options.get("key_padding_mask")
    # By its contract the mask that comes with is_causal is the causal one.
    mask = _multihead_mask(None if causal else options.get("attn_mask"), padding, q.shape[0], num_heads)
    dropout_p = dropout_p if options.get("training", True) else 0.0
    call = Call(causal and mask is None, mask=mask, dropout_p=dropout_p)
    window = (None, 0) if causal and mask is not None else None  # causal too, and allows a mask
    return AttentionRequest(q, k, v, call, window, to_caller)


def _multihead_mask(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """One mask ``[N, H, L, S]`` of both, True where visible or added to the logits. Theirs are True where hidden."""
    if mask is not None:
        mask = mask.unflatten(0, (batch, heads)) if mask.ndim == 3 else mask[None, None]
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    masks = [x for x in (mask, padding) if x is not None]
    if all(x.dtype == torch.bool for x in masks):
        visible = [~x for x in masks]
        return visible[0] & visible[-1] if masks else None
    added = [x if x.is_floating_point() else torch.zeros((), device=x.device).masked_fill(x, -torch.inf) for x in masks]
    return added[0] + added[1] if len(added) > 1 else added[0]


# --------------------------------------------------------------------------- Ascend NPU

_UNBOUNDED = 2**31 - 1


def _npu(name: str, *args: Any, **kwargs: Any) -> AttentionRequest:
    """``torch_npu.npu_fusion_attention``, its v2 and its v3. v2 spells ``tokens`` with one c less; None means the
    default of an option."""
    given = {option.replace("tokens", "tockens"): x for option, x in kwargs.items() if x is not None}
    return _npu_request(name, *args, **given)


def _npu_request(
    name: str,
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
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: Any = 0,
    offset: Any = 0,
    pse_type: int = 1,
    **others: Any,
) -> AttentionRequest:
    """Masks of the operator are True where hidden, its scale is 1 unless given, its ``actual_seq_*`` are documents
    without the leading 0, its ``sink`` is one logit per head. Options that do not change the result (precision, seed,
    ...) are ignored."""
    refused = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "dropout_mask": dropout_mask}
    given = [option for option, x in {**refused, **others}.items() if x is not None]
    given += ["keep_prob below 1"] if keep_prob != 1.0 else []
    _check_npu(name, given, input_layout, sparse_mode)
    split, join = _LAYOUTS[input_layout]
    kv_heads = head_num * key.shape[-1] // query.shape[-1] if input_layout in ("BSH", "SBH") else 0
    mask, is_causal, window = None, False, None
    if atten_mask is not None:  # without it the operator ignores sparse_mode and tokens
        mask = atten_mask == 0 if sparse_mode in (0, 1) else None
        is_causal = sparse_mode in (2, 3)  # query and key are equally long: both diagonals are one
        window = _npu_window(name, pre_tockens, next_tockens) if sparse_mode in (0, 4) else None
    documents = _npu_documents(name, input_layout, actual_seq_qlen, actual_seq_kvlen)
    return AttentionRequest(
        split(query, head_num),
        split(key, kv_heads),
        split(value, kv_heads),
        Call(is_causal, scale, mask, documents, sinks=sink),
        window,
        lambda out: _npu_outputs(join(out).contiguous(), out),
    )


def _check_npu(name: str, given: list[str], layout: str, sparse_mode: int) -> None:
    """Raise ``NotImplementedError`` for options, a layout or a mode that cannot be honoured."""
    if given or sparse_mode not in (0, 1, 2, 3, 4) or layout not in _LAYOUTS:
        what = ", ".join(given or [f"sparse_mode={sparse_mode}" if layout in _LAYOUTS else layout])
        raise NotImplementedError(
            f"{name} calls npu_fusion_attention with {what}, which is not supported under context parallelism yet. "
            "Supported: sparse_mode 0 to 4, layouts BNSD, BSND, BSH, SBH and TND, atten_mask, scale, "
            "pre/next tokens, sink and actual_seq_qlen = actual_seq_kvlen"
        )


def _npu_documents(name: str, layout: str, lengths: Any, kv_lengths: Any) -> Tensor | None:
    """``actual_seq_*`` as a table of documents."""
    if (lengths is None) != (layout != "TND") or (
        lengths is not None and [int(x) for x in lengths] != [int(x) for x in kv_lengths or ()]
    ):
        raise ValueError(
            f"{name} calls npu_fusion_attention with input_layout={layout!r}, actual_seq_qlen={lengths} and "
            f"actual_seq_kvlen={kv_lengths}. TND needs both, equal and over global positions, and other layouts need "
            "none. Pass them so"
        )
    return None if lengths is None else documents_table([0, *(int(x) for x in lengths)])


def _npu_window(name: str, before: int, after: int) -> tuple[int | None, int | None] | None:
    if before < 0 or after < 0:
        raise NotImplementedError(
            f"{name} calls npu_fusion_attention with pre_tokens={before}, next_tokens={after}. Bounds below 0 "
            "are not supported under context parallelism. Pass an atten_mask instead"
        )
    left, right = (None if x >= _UNBOUNDED else x for x in (before, after))
    return None if left is None and right is None else (left, right)


_LAYOUTS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "BNSD": (lambda x, n: x, lambda x: x),
    "BSND": (lambda x, n: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BSH": (lambda x, n: x.unflatten(2, (n, -1)).transpose(1, 2), lambda x: x.transpose(1, 2).flatten(2)),
    "SBH": (lambda x, n: x.unflatten(2, (n, -1)).permute(1, 2, 0, 3), lambda x: x.permute(2, 0, 1, 3).flatten(2)),
    "TND": (lambda x, n: x.transpose(0, 1).unsqueeze(0), lambda x: x.squeeze(0).transpose(0, 1)),
}
"""The operator's layouts: to ``[B, H, S, D]`` (given the number of heads), and back."""


def _npu_outputs(joined: Tensor, out: Tensor) -> tuple[Any, ...]:
    """The operator's seven results; the statistics of the softmax stay inside the engine."""
    nothing = out.new_empty(0)
    return joined, nothing, nothing, nothing, 0, 0, 0


# --------------------------------------------------------------------------- the table


class Routed(NamedTuple):
    """A call that is routed: the function that reads it, and how users know it."""

    read: Callable[..., AttentionRequest]
    spelling: str | None = None
    """Its name in errors; None if it is never called on a share without being routed, or is an operator."""
    dim: int | None = None
    """The dimension of queries and keys that is the sequence, in calls as users spell them."""
    whole_too: bool = False
    """True if it is routed even where the module sees whole sequences: it may use head numbers, of which the module has
    a share. (A call with ``sink=`` does.)"""


_NPU = ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")
ROUTED: dict[Any, Routed] = {
    F.scaled_dot_product_attention: Routed(_sdpa, "F.scaled_dot_product_attention", -2, whole_too=True),
    attention: Routed(_own, "hyper_cp.ops.attention", -2, whole_too=True),
    latent_attention: Routed(_latent, "latent_attention", -2, whole_too=True),
    select_keys: Routed(_select, "select_keys", -2, whole_too=True),
    indexer_loss: Routed(_loss, whole_too=True),
    **{f"aten.scaled_dot_product_attention{overload}": Routed(_sdpa) for overload in ("", ".default")},
    flex_attention: Routed(_flex, "flex_attention", -2, whole_too=True),
    F.multi_head_attention_forward: Routed(_multihead, "nn.MultiheadAttention", 0),
    **{f"npu.{op}{overload}": Routed(_npu) for op in _NPU for overload in ("", ".default")},
}
PLAIN: dict[Any, Callable[..., Any]] = {
    flex_attention: plain_flex_attention,
}
"""The replacement for a function that is not routed after all, where that is not the function itself."""
_ATTENTION_OPERATOR = re.compile(
    r"npu\.npu_fusion_attention|torch_attn\.|aten\._?scaled_dot_product|aten\._(flash|efficient)_attention|aiter\.f?mha"
    r"|(?!aten\.|hyper_cp\.)\S*(flash_?attn|flash_attention|fmha|sage_?att|xformers|fused_attn|unified_attention)"
)
"""Names of operators that compute attention: those of kernels from a hub begin with an underscore, and end with a hash.
(The one inside flex_attention is not among them: a compiled graph calls it after flex_attention was routed.)"""


def spelled(func: Any) -> str | None:
    """The name of a function that computes attention, also of one that cannot be routed; None for others."""
    if isinstance(func, _OPERATORS):
        return str(func) if _ATTENTION_OPERATOR.match(str(func)) else None
    return ROUTED[func].spelling if func in ROUTED else _BINDINGS.get(func)


def key_of(func: Any) -> Any:
    """The key of a function in ``ROUTED``: itself, or the name of an operator that may not be installed."""
    return str(func) if isinstance(func, _OPERATORS) else func


_BINDING = re.compile(
    "_(scaled_dot_product|triton_(scaled_dot|multi_head)|native_multi_head|transformer_encoder_layer_fwd)"
)
_BINDINGS: dict[Any, str] = {x: f"torch.{name}" for name, x in vars(torch).items() if _BINDING.match(name)}
"""Functions of PyTorch in front of such operators, with their names."""
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
