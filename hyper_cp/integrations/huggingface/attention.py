"""The attention implementation that transformers calls under the name "hyper_cp"."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..._torch import checkpoint
from ..._torch.compiling import is_compiling
from ...module.dispatch_mode import alone
from ...ops.attention import cp_attention
from ...ops.config import Call
from ...ops.kernels import scores
from ...ops.kernels.scores import MaskMod, Score
from ...ops.kernels.scores.mods import Mods
from ...schedule import layout as layouts
from .compressed import entries_of
from .forward import ForwardState, OneDevice, State, state_for
from .inkling import QueryBias, with_sinks
from .latents import NAME, as_latents, expanded, hands_on_latents
from .masks import MaskRequest, attention_mask
from .relative import RelativeBias
from .seams import in_file
from .selected import under_selection
from .selected_blocks import of_padding

UNSUPPORTED = ("dropout", "position_bias", "cache")  # a position_bias of T5 and MPNet excepted
"""Options of attention calls that the engine does not have."""
KNOWN = {
    *UNSUPPORTED,
    *("scaling", "sliding_window", "is_causal", "s_aux", "softcap"),
    *(
        "indices",
        "block_indices",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "layer_idx",
        "target_dtype",
    ),
}
"""Options that are honoured, and some that say nothing about attention."""


def register() -> None:
    """Make ``attn_implementation="hyper_cp"`` known to transformers (attention and masks)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRequest | None,
    context_parallel: State | None = None,
    key_bias: Tensor | None = None,
    position_bias: Tensor | RelativeBias | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attention as transformers calls it: ``[B, H, S/n, D]`` to ``[B, S/n, H, D]``, over the keys of all ranks.

    ``key_bias [B | 1, H, 1, S]`` is added to the scores of all keys (ALiBi); it gets no gradient.
    """
    request = attention_mask if isinstance(attention_mask, MaskRequest) else None
    state = context_parallel
    if state is None:  # layers that pass no keywords on
        state = request.state if request is not None and request.state is not None else state_for(module)
    if isinstance(state, OneDevice):
        key, value = expanded(module, key, value) if hands_on_latents(module) else (key, value)
        options |= {} if position_bias is None else {"position_bias": position_bias}
        return _one_device(state, module, query, key, value, attention_mask, options)
    if not isinstance(state, ForwardState):
        raise RuntimeError(
            f'{type(module).__name__} runs attn_implementation="hyper_cp", but does not know the cp mesh. Call '
            "hyper_cp.integrations.transformers.prepare_model(model, mesh, style=...), and the model as a whole. "
            "Another model that shares its config with a prepared one needs one of its own, copy.deepcopy(config). A "
            "layer of yours beside the decoder (multi-token prediction, a draft) does not: it would attend to the share"
        )
    if not is_compiling():
        state.callers.append(module)
    if isinstance(position_bias, QueryBias) and options.get("sinks") is not None:
        position_bias, options = with_sinks(position_bias, state.style.mode.max_logits, options)
    _check_options(module, state, position_bias, options)
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if attention_mask is not mask and attention_mask is not request:
        raise TypeError(
            f"{type(module).__name__} got a {type(attention_mask).__name__} as attention mask. A prepared model makes "
            "its masks for the whole sequence itself. Pass packed documents to prepare_batch (cu_seqlens, "
            "document_ids, or position_ids that restart), or a 4-D attention_mask over global positions"
        )
    _check_mask(module, state, mask, request, options.get("is_causal"), (query.shape[2], key.shape[2]))
    return _over_ranks(module, state, query, key, value, mask, request, key_bias, position_bias, options), None


def _over_ranks(
    module: nn.Module,
    state: ForwardState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    request: MaskRequest | None,
    key_bias: Tensor | None,
    position_bias: Tensor | RelativeBias | None,
    options: dict[str, Any],
) -> Tensor:
    """A call whose arguments have been checked."""
    name = type(module).__name__
    layer = None if state.cache is None else state.cache.layer_of(module, key, value)
    if layer is not None and state.cache.turn.prompt is None:
        refuse_in_decoding(name, mask, request)
        size = _window(name, request, options.get("sliding_window"), state)
        return state.cache.attend(module, layer, query, key, size, options)
    visible = _visible(module, state, mask, request, key_bias, options.get("sliding_window"), query.shape[2])
    key, entries = entries_of(module, key, query.shape[2])
    value = value if entries is None else key
    key, value, weight, bias = _projected(module, state, key, value)
    kv_heads = query.shape[1] if weight is not None else key.shape[1]  # latents become heads of all queries
    cp, mode = state.mesh.view(query.shape[1], kv_heads), replace(state.style.mode, window=visible.window)
    score = _score(name, options.get("softcap"), None if request is None else request.function, position_bias, query)
    # is_causal=False: the window ends at the query, so it is causal already; and unlike is_causal it allows a mask.
    call = Call(
        False,
        options.get("scaling"),
        visible.mask,
        visible.documents,
        name=name,
        sinks=options.get("s_aux"),
        score=score,
        weight=weight,
        bias=bias,
        **_selected(module, request, options),
    )
    tokens, indices = visible.tokens, options.get("indices")
    if entries is not None:
        # Padding sees no tokens, but entries, which are those of slots.
        call = replace(call, mask=visible.mask if tokens is None else tokens, entries=entries)
        return cp_attention(query, key, value, cp, mode, call, module).transpose(1, 2).contiguous()
    if state.losses is None or indices is None:
        out = cp_attention(query, key, value, cp, mode, call, module, state.batch.counted)
    else:
        out = state.losses.attend(module, indices, query, key, value, cp, mode, call)
    if tokens is not None:  # padding sees nothing and gets zeros, as from F.scaled_dot_product_attention
        blocks = options.get("block_indices") is not None
        out = torch.where(tokens, out, of_padding(state, value, out.shape[1]) if blocks else 0.0)
    return out.transpose(1, 2).contiguous()


def _check_options(module: nn.Module, state: ForwardState, position_bias: Any, options: dict[str, Any]) -> None:
    """Refuse options that the engine does not have, and those of which it is not known what they do."""
    name = type(module).__name__
    none = isinstance(position_bias, Tensor) and getattr(module, "has_relative_attention_bias", True) is False  # zeros
    known = none or isinstance(position_bias, RelativeBias)
    _refuse_unsupported(name, {**options, "position_bias": None if known else position_bias})
    _refuse_unknown(name, options, state.passed)


def _check_mask(
    module: nn.Module,
    state: ForwardState,
    mask: Tensor | None,
    request: MaskRequest | None,
    is_causal: bool | None,
    lengths: tuple[int, int],
) -> None:
    """Refuse a call whose mask on one device would depend on the implementation of attention, and one over groups of
    the sequence. ``lengths``: the numbers of queries and of keys."""
    name = type(module).__name__
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and request is None and module not in state.cross:
        if not causal:
            raise NotImplementedError(f"{name} is not causal: pass a 4-D attention_mask over global positions")
        if state.implementation == "eager":
            raise NotImplementedError(
                f"{name} is causal, but got no attention mask. On one device eager attention then lets all tokens see "
                'each other, and SDPA is causal. Make the model with attn_implementation="sdpa", or let it make a mask'
            )
    asks = mask is None and request is not None and request.function is None and not request.bidirectional
    if asks and not causal and state.implementation == "sdpa":
        raise NotImplementedError(
            f"{name} has is_causal={causal}, but its model asks for a causal mask. On one device SDPA follows the "
            "former in a batch without padding, and the latter in others. Change the setting of the config that makes "
            "them differ (use_bidirectional_attention)"
        )
    held = 0 if state.positions is None else len(state.positions)
    if asks and lengths[0] == lengths[1] < held and held % lengths[0] == 0:
        raise NotImplementedError(
            f"{name} attends over {lengths[0]} tokens, and this rank holds {held}: groups of the sequence, as rows of "
            "the batch or of heads. They would be joined with those of other ranks. Attend to all tokens, with windows "
            "or chunks of the config"
        )


class _Visible(NamedTuple):
    """The keys that the queries of a call see, and the rows that see some."""

    mask: Tensor | None
    window: tuple[int | None, int | None] | None
    documents: Tensor | None
    tokens: Tensor | None
    """``[B, 1, S/n, 1]``: False on rows of padding that see nothing; None: there are none."""


def _visible(
    module: nn.Module,
    state: ForwardState,
    mask: Tensor | None,
    request: MaskRequest | None,
    key_bias: Tensor | None,
    sliding_window: int | None,
    queries: int,
) -> _Visible:
    """The keys that each query sees. A mask of the caller's own (``mask``) is that of all layers, and nothing is added
    to it, as in transformers."""
    batch, layout = state.batch, state.style.mode.layout
    documents, tokens = batch.documents, batch.tokens
    window: tuple[int | None, int | None] | None = None
    encoder = request is not None and request.bidirectional
    if request is not None and request.function is not None:
        mask = batch.keys
    elif module in state.cross:
        mask, documents = state.source, None
        if mask is not None and queries == 1:  # one row for all targets, and not that of this rank's only one
            mask = mask.expand(-1, -1, state.mesh.mesh.size(), -1)
    elif request is not None and request.bidirectional:
        mask, window = _biased(key_bias, batch.visible), None if request.window is None else (request.window,) * 2
    elif mask is None:
        size = _window(type(module).__name__, request, sliding_window, state)
        mask, window = _biased(key_bias, batch.keys), (None if size is None else size - 1, 0)
    if request is not None and request.documents is not None:
        documents = request.documents
    if encoder and not batch.packed and not layouts.by_documents(layout):
        documents = tokens = None  # padding sees what others see
    elif encoder and not batch.packed and tokens is not None:
        raise NotImplementedError(
            f"{type(module).__name__} of an encoder got padding before tokens in layout={layout!r}. On one device "
            "padding attends to the tokens, and a head may read its first position. This layout places it apart. Pad "
            'at the end of rows, or use layout="contiguous" or "head_tail"'
        )
    return _Visible(mask, window, documents, tokens)


def _projected(
    module: nn.Module, state: ForwardState, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values to send. Of a module that hands latents on, these, with the weight and the bias that make heads
    of them, or the heads if latents do not suit it."""
    if getattr(module, "store_full_length_kv", False) and checkpoint.in_function_forward():
        raise NotImplementedError(
            f"{type(module).__name__} hands its latents to later layers inside a reentrant activation checkpoint, "
            "through which their gradients do not pass (on one device neither, without an error). Checkpoint with "
            "use_reentrant=False"
        )
    if not hands_on_latents(module):
        return key, value, None, None
    found = as_latents(module, key) if state.style.mode.latents is not False else None
    if found is None:
        return *expanded(module, key, value), None, None
    latents, weight, bias = found
    return latents, value, weight, bias


def _selected(module: Any, request: MaskRequest | None, options: dict[str, Any]) -> dict[str, Any]:
    """The keys that a layer has selected, as options of a call: blocks, or tokens."""
    if (blocks := options.get("block_indices")) is not None:
        return {"selected": blocks, "block": module.indexer.block_size}
    if request is not None and request.selection is not None:
        return {"selected": request.selection}
    indices = options.get("indices")
    return {} if indices is None else {"selected": indices.unsqueeze(1)}


def _biased(bias: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The mask of keys ``[B, 1, 1, S]``, with a bias of them."""
    return keys if bias is None else bias if keys is None else bias.masked_fill(~keys, -torch.inf)


def refuse_in_decoding(name: str, mask: Tensor | None, request: MaskRequest | None) -> None:
    """Raise for what hides keys of new tokens otherwise than causality, windows and padding do."""
    found = {
        "an explicit attention mask": mask is not None,
        "a mask function": request is not None and request.function is not None,
        "chunks": request is not None and request.documents is not None,
    }
    if any(found.values()):
        raise NotImplementedError(
            f"{name} attends with {', '.join(x for x, given in found.items() if given)} to a cache that is split over "
            "ranks. It knows causality, windows and padding only. Generate in context_parallel_mesh(model, a mesh of "
            "one rank)"
        )


def _score(name: str, cap: float | None, function: MaskMod | None, position_bias: Any, query: Tensor) -> Score | None:
    """The function of logits of a call: a softcap with the model's function of visible pairs, or a learned bias of
    positions."""
    score: Score | None = None if cap is None else scores.softcap(cap)
    if function is not None:
        score = Mods(None if score is None else score.mods(None)[0], function, None, query)
    if not isinstance(position_bias, RelativeBias) or position_bias.values is None:
        return score
    if score is not None:
        raise NotImplementedError(
            f"{name} asks for a learned bias of positions and a softcap or a mask of its own. Only one of them is "
            "supported. Use a model without the other"
        )
    return position_bias.score(query)


def _window(name: str, request: MaskRequest | None, given: int | None, state: ForwardState) -> int | None:
    """The sliding window of a layer. The mask decides, as in transformers' SDPA; the keyword is for other kernels."""
    if request is None:
        return None if state.implementation == "sdpa" else given
    if given is not None and given != request.window:
        raise NotImplementedError(
            f"{name} asks attention for sliding_window={given}, but its mask has the window {request.window}. Only one "
            "of them can be meant. Use a model whose layers and masks agree"
        )
    return request.window


def _refuse_unsupported(name: str, options: dict[str, Any]) -> None:
    wanted = [key for key in UNSUPPORTED if options.get(key) is not None and (key != "dropout" or options[key])]
    if wanted:
        raise NotImplementedError(
            f"{name} asks for {', '.join(wanted)} in attention, which context parallelism does not support yet. "
            "Set attention_dropout=0.0 in the config, or use a model without position biases and paged caches"
        )
    if options.get("output_attentions") and not is_compiling():
        warnings.warn(
            f"{name} got output_attentions=True, and returns no attention weights: no rank has those of all keys. (On "
            "one device SDPA returns none either.) Leave it out, or run the model with eager attention on one device",
            stacklevel=2,
        )


def _refuse_unknown(name: str, options: dict[str, Any], passed: frozenset[str]) -> None:
    """Raise for an option that the model itself adds, and that may change what attention computes."""
    unknown = [
        key
        for key, value in options.items()
        if key not in KNOWN and key not in passed and not key.startswith(("output_", "return_"))
        if value is not None and value is not False
    ]
    if unknown:
        raise NotImplementedError(
            f"{name} calls attention with {', '.join(unknown)}, which context parallelism does not know. Ignored, it "
            "might be a mask, a bias or a scale that is missing. Use a model whose attention takes "
            f"{', '.join(sorted(KNOWN - set(UNSUPPORTED)))} only"
        )


def _one_device(
    state: OneDevice, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Tensor, Any]:
    """The attention that the model had before it was prepared."""
    known = in_file(module, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    attend = known.get(state.implementation, in_file(module, "eager_attention_forward"))
    if attend is None:
        raise NotImplementedError(
            f"{type(module).__name__} has no attention function for attn_implementation={state.implementation!r}, "
            'which it had before prepare_model. Call set_attn_implementation("sdpa") before prepare_model'
        )
    if (indices := options.get("indices")) is not None and state.implementation in ("eager", "sdpa"):
        mask = under_selection(mask, indices, query)
    if hasattr(module, "build_attention_mask_from_topk") and state.implementation == "sdpa":
        mask = mask == 0  # it was made for another implementation
    if (blocks := options.get("block_indices")) is not None and state.implementation in ("eager", "sdpa"):
        given = key.shape[2], query.dtype, query.device, options["position_ids"].expand(len(query), -1)
        mask = cast(Any, module).indexer.build_block_mask(blocks, mask, *given)
    alone.push(module)  # a recompute by a checkpoint runs the layers only
    try:
        found: tuple[Tensor, Any] = attend(module, query, key, value, mask, **options)
    finally:
        alone.remove(module)
    return found
