"""The mask function that transformers calls under the name "hyper_cp": requests for masks, in place of tensors."""

from __future__ import annotations

from copy import copy, deepcopy
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, create_masks_for_generate

from ...module.mesh_binding import Binding
from ...ops.kernels.scores import MaskMod
from ...schedule import layout as layouts
from ...schedule.documents import documents_table, read
from .forward import ForwardState, OneDevice, State, offered, running
from .qwen4 import Selection


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
        whole = isinstance(index, tuple) and all(x in _ALL for x in index)  # -0 tokens to keep (Gemma 4)
        if not whole and (not self.selects or index not in _HEAD):
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


_ALL = (slice(None), slice(0, None))
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
        make = AttentionMaskInterface().get(state.implementation)
        options = {"allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size, "config": config, **others}
        return None if make is None else make(q_length=q_length, kv_length=kv_length, q_offset=q_offset, **options)
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
    selects = _dtype_of_selection(config) if local_size is None else None
    function = others.get("mask_function")
    function = None if selects is not None and function is causal_mask_function else function
    model = f"The model of {type(config).__name__}"
    if not allow_is_causal_skip and batch is not None and batch.token_types and function is not None:
        request = MaskRequest(model, None, state)
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
    if chunked and isinstance(state, ForwardState):
        return MaskRequest(model, None, state, _chunks(state, q_length, local_size or 0))
    request = MaskRequest(model, local_size, state)
    request.selects, request.pairs, request.padding = selects, pairs, early
    return request


def _dtype_of_selection(config: Any) -> torch.dtype | None:
    """That of the mask which the indexers of a model expect: added to scores, or True where visible. None: it has no
    indexer."""
    if getattr(config, "indexer_budget", None) is not None:
        return torch.bool
    return torch.float32 if getattr(config, "index_topk", None) is not None else None


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


def adds_mask(kind: type) -> bool:
    """True for modules that make a finite mask, which is added to scores by any implementation (Kosmos 2)."""
    return hasattr(kind, _METHOD)


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
