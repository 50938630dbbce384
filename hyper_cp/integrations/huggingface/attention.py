"""The attention implementation and the mask function that transformers calls under the name "hyper_cp"."""

from __future__ import annotations

import warnings
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, create_masks_for_generate

from ..._torch import checkpoint
from ..._torch.compiling import is_compiling
from ...module.dispatch_mode import alone
from ...module.mesh_binding import Binding
from ...ops.attention import cp_attention
from ...ops.config import Call
from ...ops.kernels import scores
from ...ops.kernels.scores import MaskMod, Score
from ...ops.kernels.scores.mods import Mods
from ...schedule import layout as layouts
from ...schedule.documents import documents_table, read
from .compressed import entries_of
from .forward import ForwardState, OneDevice, State, offered, running, state_for
from .inkling import QueryBias, with_sinks
from .latents import NAME, as_latents, expanded, hands_on_latents
from .qwen4 import Selection
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


# --------------------------------------------------------------------------- masks


class MaskRequest:
    """The mask that a model has requested for some of its layers, in place of a tensor: causal, maybe with a window.

    Models hand it to attention like any mask. A model that reads or changes it raises ``NotImplementedError``.
    """

    def __init__(self, model: str, window: int | None, state: State | None, documents: Tensor | None = None) -> None:
        self.model, self.window, self.state = model, window, state
        self.documents = documents
        """Boundaries of chunks, which do not see each other; None: those of the batch."""
        self.selects: torch.dtype | None = None
        """The mask of layers that select keys: their indexers may take its only head, and ask for this dtype."""
        self.selection: Tensor | None = None
        """The keys that a layer has selected, as ``Call.selected``."""
        self.bidirectional = False
        """True if keys behind a query are visible as those before it are; the window holds on both sides."""
        self.padding: Tensor | None = None
        """The padding mask, if the model around the decoder has requested the mask, before the decoder reads it."""
        self.pairs: tuple[int, ...] = ()
        """The size of a mask of this rank's pairs."""
        self.function: MaskMod | None = None
        """The model's own function of global positions that says which pairs are visible, in place of causality and
        the window."""

    ndim: int
    shape: tuple[int, ...]
    """Those of a mask of pairs, if a model makes it and its decoder asks (PaliGemma)."""

    def size(self) -> torch.Size:
        """That of a mask of this rank's pairs: some models compare it with that of their scores."""
        return torch.Size(self.pairs)

    def to(self, *_: Any, **__: Any) -> MaskRequest:
        """The same: there is nothing to move or cast."""
        return self

    def __getitem__(self, index: Any) -> MaskRequest:
        if not self.selects or index not in _HEAD:
            self.refuse("getitem")
        return self

    @property
    def dtype(self) -> torch.dtype:
        """That of a mask that is added to scores, or of one that says what is visible."""
        return self.selects or self.refuse("dtype")

    def __and__(self, other: Any) -> MaskRequest:
        """The same with the selection of a layer."""
        if not isinstance(other, Selection):
            self.refuse("and")
        made = copy(self)
        made.selection = other.tokens
        return made

    def refuse(self, how: str) -> NoReturn:
        """Raise for a model that uses its mask as a tensor."""
        types = (  # a decoder that is given the mask of the model around it
            "; PaliGemma makes it of token_type_ids: put those of its processor into the batch, or ones (a causal mask)"
        )
        raise NotImplementedError(
            f"{self.model} reads its attention mask itself ({how}). Under context parallelism there is no such tensor: "
            "a mask would have a row for every pair of positions. Use a model that only hands masks on to attention"
            f"{types * (how == 'ndim')}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        (found[0] if found else cls("The model", None, None)).refuse(getattr(func, "__name__", str(func)))


def _refused(name: str) -> Any:
    return lambda self, *args: self.refuse(name)


_HEAD = ((slice(None), 0), (slice(None), 0, slice(None), slice(None)))
"""The indices with which an indexer takes the mask of its only head."""

for _operator in ("add", "radd", "sub", "rsub", "mul", "rmul", "rand", "or", "ror", "invert", "neg"):
    setattr(MaskRequest, f"__{_operator}__", _refused(_operator))


def attention_mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,
) -> Any:
    """The request for a mask: attention computes it tile by tile, over the positions of all ranks.

    Raises:
        NotImplementedError: for a mask that is neither causal, nor bidirectional, nor a window, and for a key/value
            cache.
    """
    state = running()
    if isinstance(state, OneDevice):
        options = {"q_offset": q_offset, "allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size}
        given = {"q_length": q_length, "kv_length": kv_length, "config": config, **options, **others}
        original = AttentionMaskInterface().get(state.implementation)
        return None if original is None else original(**given)
    pairs, given_mask = (others.get("batch_size", 1), 1, q_length, kv_length), others.get("attention_mask")
    # Of the model around the decoder, before the decoder's own hook, which checks it: that of a share, or of all ranks.
    early = given_mask if state is None and isinstance(given_mask, Tensor) else None
    two = isinstance(state, ForwardState) and bool(state.cross)
    if "allow_is_bidirectional_skip" in others and not others.get("use_vmap") and (two or q_length == kv_length):
        return _both_sides(config, local_size, state, pairs, early)
    cached = isinstance(state, ForwardState) and state.cache is not None and state.cache.turn.prompt is None
    if not cached and early is None and (q_length != kv_length or not isinstance(q_offset, int) or q_offset != 0):
        raise NotImplementedError(
            f"{q_length} queries at offset {q_offset} of {kv_length} keys: context parallelism does not run with a "
            "key/value cache of its model. Pass use_cache=False; generate with integrations.transformers.generate"
        )
    if isinstance(given_mask, MaskRequest):  # that of the model around the decoder
        return given_mask
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    chunked = local_size is not None and local_size == chunk != window
    batch = state.batch if isinstance(state, ForwardState) else offered()
    selects = torch.float32 if getattr(config, "index_topk", None) is not None else None
    selects = torch.bool if getattr(config, "indexer_budget", None) is not None else selects
    selects = selects if local_size is None else None
    function = others.get("mask_function")
    function = None if selects is not None and function is causal_mask_function else function
    if not allow_is_causal_skip and batch is not None and batch.token_types and function is not None:
        request = MaskRequest(f"The model of {type(config).__name__}", None, state)
        request.function = function
        request.ndim, request.shape = 4, (1, 1, q_length, kv_length)
        return request
    # Decoders that are encoders (EmbeddingGemma) join the causal mask with one of keys behind.
    if function is not None and not allow_is_causal_skip and getattr(config, "use_bidirectional_attention", 0) is True:
        return _both_sides(config, local_size and local_size - 1, state, pairs, early)
    if (not allow_is_causal_skip and not selects) or (local_size not in (None, window) and not chunked):
        chunks = allow_is_causal_skip
        kind = f"custom (size {local_size})" if chunks else "custom or explicit"
        raise NotImplementedError(
            f"{type(config).__name__} asks for a {kind} attention mask. Context parallelism makes causal and "
            "bidirectional masks only, and those of sliding windows. If the types of tokens make it, put them into the "
            "batch (mm_token_type_ids); or pass a 4-D attention_mask over global positions, if all layers share one"
        )
    model = f"The model of {type(config).__name__}"
    if chunked and isinstance(state, ForwardState):
        return MaskRequest(model, None, state, _chunks(state, q_length, local_size or 0))
    request = MaskRequest(model, local_size, state)
    request.selects, request.pairs, request.padding = selects, pairs, early
    return request


def _both_sides(
    config: Any, window: int | None, state: State | None, pairs: tuple[int, ...], padding: Tensor | None
) -> MaskRequest:
    """The request for a mask of keys before and behind each query, ``window`` positions on either side."""
    request = MaskRequest(f"The model of {type(config).__name__}", window, state)
    request.bidirectional, request.pairs, request.padding = True, pairs, padding
    return request


def padding_mask(given: Any) -> Tensor | None:
    """The padding mask ``[B, S/n or S]`` that a decoder was given: as it is, or in the masks that the model around it
    has requested."""
    for mask in given.values() if isinstance(given, dict) else [given]:
        found = mask.padding if isinstance(mask, MaskRequest) else mask
        if isinstance(found, Tensor) and found.ndim == 2:
            return found
    return None


def request_masks(decoder: nn.Module) -> None:
    """Let a decoder that makes a causal mask by a method of its own (Kosmos 2) request it."""
    for module in decoder.modules():
        if hasattr(module, _METHOD):
            setattr(module, _METHOD, partial(_requested, type(module).__name__, getattr(module, _METHOD)))


_METHOD = "_prepare_decoder_attention_mask"


def _requested(name: str, make: Any, *args: Any, **kwargs: Any) -> Any:
    state = running()
    return make(*args, **kwargs) if isinstance(state, OneDevice) else MaskRequest(name, None, state)


def make_masks_before(model: nn.Module, binding: Binding, implementation: str) -> None:
    """Let the masks that ``generate`` makes before a forward (for caches of fixed length) be those of one device on a
    mesh of one rank. ``implementation``: the attention implementation there."""
    make = getattr(model, _BEFORE, create_masks_for_generate)
    setattr(model, _BEFORE, partial(_made_before, binding, implementation, make))


_BEFORE = "create_masks_for_generate"


def _made_before(binding: Binding, implementation: str, make: Any, *, config: Any, **kwargs: Any) -> Any:
    if not binding.active.parallel:
        config = deepcopy(config.get_text_config())
        config._attn_implementation = implementation
    return make(config=config, **kwargs)


@torch.compiler.disable(
    reason="Chunks are cut out of documents on the host, before the layers run. Compile these with fullgraph=True, or "
    "the model without it"
)
def _chunks(state: ForwardState, length: int, size: int) -> Tensor | None:
    """The documents of the batch, cut into chunks of ``size`` that do not see each other (Llama 4)."""
    length *= state.mesh.views[0].size
    if length <= size:
        return state.batch.documents
    if state.batch.keys is not None or layouts.by_documents(state.style.mode.layout):
        raise NotImplementedError(
            f"the model has layers with chunked attention (size {size}), in which chunks count from the first token of "
            f"a document. That is not supported with layout={state.style.mode.layout!r}, nor with padding between "
            'tokens, or whose labels count. Use layout="contiguous" or "head_tail", and pad each row at one end, with '
            "labels -100"
        )
    rows = ((0, length),) if state.batch.documents is None else read(state.batch.documents).rows
    cut = [[x for a, b in pairwise(row) for x in range(a, b, size)] + [length] for row in rows]
    return documents_table(cut)


# --------------------------------------------------------------------------- attention


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
    name = type(module).__name__
    request = attention_mask if isinstance(attention_mask, MaskRequest) else None
    state = context_parallel
    if state is None:  # layers that pass no keywords on
        state = request.state if request is not None and request.state is not None else state_for(module)
    latent = hands_on_latents(module)
    if isinstance(state, OneDevice):
        key, value = expanded(module, key, value) if latent else (key, value)
        options |= {} if position_bias is None else {"position_bias": position_bias}
        return _one_device(state, module, query, key, value, attention_mask, options)
    if not isinstance(state, ForwardState):
        raise RuntimeError(
            f'{name} runs attn_implementation="hyper_cp", but does not know the cp mesh. Call hyper_cp.integrations.'
            "transformers.prepare_model(model, mesh, style=...), and the model as a whole. If it shares its config "
            "with a model that was prepared, give it one of its own, copy.deepcopy(config)"
        )
    if not is_compiling():
        state.callers.append(module)
    if isinstance(position_bias, QueryBias) and options.get("sinks") is not None:
        position_bias, options = with_sinks(position_bias, state.style.mode.max_logits, options)
    none = isinstance(position_bias, Tensor) and getattr(module, "has_relative_attention_bias", True) is False  # zeros
    known = none or isinstance(position_bias, RelativeBias)
    _refuse_unsupported(name, {**options, "position_bias": None if known else position_bias})
    _refuse_unknown(name, options, state.passed)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if attention_mask is not mask and attention_mask is not request:
        raise TypeError(
            f"{name} got a {type(attention_mask).__name__} as attention mask. A prepared model makes its masks for the "
            "whole sequence itself. Pass packed documents to prepare_batch (cu_seqlens, document_ids, or position_ids "
            "that restart), or a 4-D attention_mask over global positions"
        )
    bare = mask is None and request is None and module not in state.cross
    if bare and not causal:
        raise NotImplementedError(f"{name} is not causal: pass a 4-D attention_mask over global positions")
    if bare and state.implementation == "eager":
        raise NotImplementedError(
            f"{name} is causal, but got no attention mask. On one device eager attention then lets all tokens see each "
            'other, and SDPA is causal. Make the model with attn_implementation="sdpa", or let it make a mask'
        )
    asks = mask is None and request is not None and request.function is None and not request.bidirectional
    if asks and not causal and state.implementation == "sdpa":
        raise NotImplementedError(
            f"{name} has is_causal={causal}, but its model asks for a causal mask. On one device SDPA follows the "
            "former in a batch without padding, and the latter in others. Change the setting of the config that makes "
            "them differ (use_bidirectional_attention)"
        )
    at = state.positions
    if asks and at is not None and query.shape[2] == key.shape[2] < len(at) and len(at) % query.shape[2] == 0:
        raise NotImplementedError(
            f"{name} attends over {query.shape[2]} tokens, and this rank holds {len(at)}: groups of the sequence, as "
            "rows of the batch or of heads. They would be joined with those of other ranks. Attend to all tokens, with "
            "windows or chunks of the config"
        )
    layer = None if state.cache is None else state.cache.layer_of(module, key, value)
    if layer is not None and state.cache.turn.prompt is None:
        refuse_in_decoding(name, mask, request)
        size = _window(name, request, options.get("sliding_window"), state)
        return state.cache.attend(module, layer, query, key, size, options), None
    batch = state.batch
    window: tuple[int | None, int | None] | None = None
    encoder = request is not None and request.bidirectional
    function = None if request is None else request.function
    if function is not None:
        mask = batch.keys
    elif module in state.cross:
        mask, batch = state.source, replace(batch, documents=None)
        if mask is not None and query.shape[2] == 1:  # one row for all targets, and not that of this rank's only one
            mask = mask.expand(-1, -1, state.mesh.mesh.size(), -1)
    elif encoder and request is not None:
        size = request.window
        mask, window = _biased(key_bias, batch.visible), None if size is None else (size, size)
    elif mask is None:  # else it is the caller's own for all layers, and nothing is added to it, as in transformers
        size = _window(name, request, options.get("sliding_window"), state)
        mask, window = _biased(key_bias, batch.keys), (None if size is None else size - 1, 0)
    weight, bias = None, None
    key, entries = entries_of(module, key, query.shape[2])
    value = value if entries is None else key
    if latent and (found := as_latents(module, key) if state.style.mode.latents is not False else None) is not None:
        key, weight, bias = found
    elif latent:
        key, value = expanded(module, key, value)
    kv_heads = query.shape[1] if weight is not None else key.shape[1]  # latents become heads of all queries
    cp, mode = state.mesh.view(query.shape[1], kv_heads), replace(state.style.mode, window=window)
    # is_causal=False: the window ends at the query, so it is causal already; and unlike is_causal it allows a mask.
    documents = batch.documents if request is None or request.documents is None else request.documents
    layout = state.style.mode.layout
    if encoder and not batch.packed and layouts.by_documents(layout) and batch.tokens is not None:
        raise NotImplementedError(
            f"{name} of an encoder got padding before tokens in layout={layout!r}. On one device padding attends to "
            "the tokens, and a head may read its first position. This layout places it apart. Pad at the end of rows, "
            'or use layout="contiguous" or "head_tail"'
        )
    if encoder and not batch.packed and not layouts.by_documents(layout):
        batch = replace(batch, tokens=None)  # padding sees what others see
        documents = None
    score = _score(options.get("softcap"), function, query)
    if isinstance(position_bias, RelativeBias) and position_bias.values is not None:
        if score is not None:
            raise NotImplementedError(
                f"{name} asks for a learned bias of positions and a softcap or a mask of its own. Only one of them is "
                "supported. Use a model without the other"
            )
        score = position_bias.score(query)
    call = Call(False, options.get("scaling"), mask, documents, name=name, sinks=options.get("s_aux"), score=score)
    if getattr(module, "store_full_length_kv", False) and checkpoint.in_function_forward():
        raise NotImplementedError(
            f"{name} hands its latents to later layers inside a reentrant activation checkpoint, through which their "
            "gradients do not pass (on one device neither, without an error). Checkpoint with use_reentrant=False"
        )
    indices = options.get("indices")
    selected = None if indices is None else indices.unsqueeze(1)
    selected = selected if request is None or request.selection is None else request.selection
    call = replace(call, weight=weight, bias=bias, selected=selected)
    if (blocks := options.get("block_indices")) is not None:
        call = replace(call, selected=blocks, block=cast(Any, module).indexer.block_size)
    if entries is not None:
        # Padding sees no tokens, but entries, which are those of slots.
        call = replace(call, mask=mask if batch.tokens is None else batch.tokens, entries=entries)
        out = cp_attention(query, key, value, cp, mode, call, module)
        return out.transpose(1, 2).contiguous(), None
    if state.losses is None or indices is None:
        out = cp_attention(query, key, value, cp, mode, call, module, batch.counted)
    elif mode.max_logits:
        raise NotImplementedError(
            f"{name} has an indexer loss and a style with max_logits=True. The loss computes attention in another way, "
            "which returns no largest logits. Leave out one of them"
        )
    else:
        out = state.losses.attend(module, indices, query, key, value, cp, mode, call)
    if batch.tokens is not None:  # padding sees nothing and gets zeros, as from F.scaled_dot_product_attention
        out = torch.where(batch.tokens, out, 0.0 if blocks is None else of_padding(state, value, out.shape[1]))
    return out.transpose(1, 2).contiguous(), None


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


def _score(cap: float | None, function: MaskMod | None, query: Tensor) -> Score | None:
    """The function of logits of a call: a softcap, and the model's function of visible pairs."""
    capped = None if cap is None else scores.softcap(cap)
    if function is None:
        return capped
    return Mods(None if capped is None else capped.mods(None)[0], function, None, query)


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
