"""Hugging Face transformers: an attention implementation named "hyper_cp", and the hook that gives it the batch state.

::

    prepare_model(model, mesh, style=style)  # LlamaForCausalLM, Qwen3, Gemma3, DeepseekV3, ...
    handler = ContextParallelHandler(mesh, style)
    loss = model(**prepare_batch(handler, batch)).loss  # this rank's share of the mean

The hook reads a batch's documents and padding once per forward, at the decoder, and hands them to every attention
call as the keyword ``context_parallel``: activation checkpointing recomputes with what the forward had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..data.batch import WholeBatch, shifted
from ..data.packing import AttentionState, attention_state, padded_mask, take_documents
from ..handler import ContextParallelHandler
from ..module._torch import checkpoint
from ..module.mesh_binding import Binding, Style, StyledMesh, binding_of, describe
from ..ops.attention import cp_attention
from ..ops.config import Call
from ..schedule import layout as layouts
from ..schedule.documents import documents_table
from ..style import ContextParallel, style_of

__all__ = ["NAME", "prepare_batch", "prepare_model", "register"]

NAME = "hyper_cp"
LAYER_TYPES = {"full_attention", "sliding_attention"}
IGNORE = -100


def register() -> None:
    """Make ``attn_implementation="hyper_cp"`` known to transformers (attention and masks)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def prepare_model(model: PreTrainedModel, mesh: DeviceMesh, *, style: ContextParallel) -> PreTrainedModel:
    """Run the attention of a causal model over the sequence that the ranks of ``mesh`` share; in place.

    Call it before DDP, FSDP or compile. Dimensions and indices of ``style`` do not count, and sliding windows are the
    model's own. The forward takes this rank's tokens: see :func:`prepare_batch`. A batch that has not been through it
    may have a 2-D ``attention_mask`` (local or global) or ``position_ids``, which are then gathered in every forward.

    Returns:
        The model.

    Raises:
        ValueError: if the model is prepared already, or if the style does not fit.
        NotImplementedError: if the model has layers that are not attention over the whole sequence.
    """
    register()
    decoder = model.get_decoder()
    name = type(decoder).__name__
    if binding_of(decoder) is not None:
        raise ValueError(f"{name} is prepared for context parallelism already: prepare it once")
    if style.mode.window is not None:
        raise ValueError(
            f"style has window={style.mode.window}, but the model decides which layers have a sliding window: drop it"
        )
    other = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - LAYER_TYPES)
    if other or not getattr(decoder, "_supports_attention_backend", False):
        raise NotImplementedError(
            f"{name} has {'layers of type ' + ', '.join(other) if other else 'no attention of AttentionInterface'}. "
            "What they compute along the sequence would end at this rank's share. Use a model with layers of type "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    decoder.set_attn_implementation(NAME)
    decoder.register_forward_pre_hook(DecoderHook(style, mesh, decoder).before, with_kwargs=True, prepend=True)
    if model is not decoder:
        model.register_forward_pre_hook(_check_labels, with_kwargs=True)
    return model


def _check_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            f"{type(model).__name__} got labels without shift_labels. The model would shift them within this rank's "
            "share, which is wrong at its ends. Use prepare_batch, or shift them over the whole sequence"
        )


def prepare_batch(handler: ContextParallelHandler, batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of a global batch, for the forward of a model that ``prepare_model`` has prepared.

    Labels are shifted over the whole sequence (``shift_labels``), ``position_ids`` are made, and padding and packed
    documents are read here, so that the forward communicates in attention only. ``num_items_in_batch`` counts the
    labels of the whole batch: the model's loss is this rank's share of the mean, and gradients *summed* over the cp
    ranks are those of one device.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` of any length S, and what the model takes with them. Tensors
            ``[B, S, ...]`` are split; 4-D attention masks (over global positions) and everything else remain whole.
            Packed documents have any name that :meth:`ContextParallelHandler.get_batch_on_this_cp_rank` knows.
    """
    entries = dict(batch)
    tokens = next((entries[x] for x in ("input_ids", "inputs_embeds") if entries.get(x) is not None), None)
    if tokens is None:
        raise ValueError(
            f"batch has the entries {list(batch)}, but neither input_ids nor inputs_embeds: name the tokens so"
        )
    documents = take_documents(entries)
    if entries.get("labels") is not None:
        if entries.get("shift_labels") is None:
            entries["shift_labels"] = shifted(entries["labels"], 1, IGNORE)
        entries.setdefault("num_items_in_batch", (entries["shift_labels"] != IGNORE).sum())
    dims = {name: -1 if name == "position_ids" else 1 for name in entries if name != "attention_mask"}
    dims = {name: dim for name, dim in dims.items() if _length(entries[name], dim) == tokens.shape[1]}
    whole = WholeBatch(handler, entries, dims)
    mask, positions = entries.get("attention_mask"), entries.get("position_ids")
    documents = None if documents is None else handler.padded_table(documents)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        mask = F.pad(entries.pop("attention_mask"), (0, whole.padded - whole.length))
        state = attention_state(handler, documents, mask)
    else:
        if isinstance(mask, Tensor) and whole.padded > whole.length:
            entries["attention_mask"] = padded_mask(mask, whole.length, whole.padded)
        # The documents of a block say what positions that restart in them would say.
        packed = mask is None and positions is not None and positions.ndim == 2 and handler.cp.batch.documents is None
        state = attention_state(handler, documents, None, positions if packed else None)
    if state.documents is None and handler.layout in layouts.BY_DOCUMENTS and handler.cp.batch.documents is None:
        state = replace(state, documents=documents_table([0, whole.padded]))  # the whole sequence is a document too
    placed_by = handler.documents_for(state.documents, whole.padded)
    local = whole.split(placed_by, {name: IGNORE for name in dims if "labels" in name})
    if positions is None:
        local["position_ids"] = handler.position_ids(whole.padded, device=tokens.device, documents=placed_by)[None]
    return {**local, "context_parallel": state}


def _length(x: Any, dim: int) -> int | None:
    return x.shape[dim] if isinstance(x, Tensor) and x.ndim > 1 else None


@dataclass(frozen=True)
class ForwardState:
    """The batch state of one forward, and the style and mesh that it runs with."""

    batch: AttentionState
    style: Style
    mesh: StyledMesh


class DecoderHook:
    """The hook before a decoder's forward: it reads the batch state, which the attention of all layers shares."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh, decoder: nn.Module) -> None:
        self.binding = Binding(style, mesh, describe(decoder))

    @staticmethod
    def share(handler: ContextParallelHandler, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's share of a whole batch, for :func:`hyper_cp.verify`."""
        return prepare_batch(handler, batch)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add ``context_parallel`` to the keywords, and masks and positions that suit it."""
        kwargs = dict(kwargs)
        if len(args) > 1:
            raise TypeError(
                f"{self.binding.name} got {len(args)} positional arguments: pass all but input_ids by keyword"
            )
        if kwargs.get("past_key_values") is not None:
            raise NotImplementedError(
                f"{self.binding.name} got past_key_values. Context parallelism does not run with a key/value cache, "
                "and generated tokens are not shares of a sequence. Pass use_cache=False, and generate with a "
                "model without prepare_model"
            )
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        documents, mesh = checkpoint.batch_state(
            self.binding, lambda: (self.binding.documents_in_force(), self.binding.active)
        )
        handler = ContextParallelHandler(mesh.mesh, style_of(self.binding))
        state = self._batch_state(handler, documents, tokens, kwargs).to(tokens.device)
        kwargs["context_parallel"] = ForwardState(state, self.binding.style, mesh)
        mask = kwargs.get("attention_mask")
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            # Without a mask transformers takes the jumps of local positions for packed sequences.
            kwargs["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if kwargs.get("position_ids") is None:
            length = tokens.shape[1] * handler.cp.size
            kwargs["position_ids"] = handler.position_ids(length, device=tokens.device)[None]
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        return args, kwargs

    def _batch_state(
        self, handler: ContextParallelHandler, block: Tensor | None, tokens: Tensor, kwargs: dict[str, Any]
    ) -> AttentionState:
        """The state that ``prepare_batch`` has read, or that is read now, with the documents of the enclosing block."""
        ready: AttentionState | None = kwargs.get("context_parallel")
        mask, positions, given = kwargs.get("attention_mask"), kwargs.get("position_ids"), take_documents(kwargs)
        padding = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        known = ready is not None and (ready.documents is not None or ready.tokens is not None)
        if (ready is not None and (padding is not None or given is not None)) or (
            block is not None and (known or given is not None)
        ):
            raise ValueError(
                f"{self.binding.name} got documents or padding twice (from prepare_batch, attention_mask, documents or "
                "handler.documents). Only one of them can be right. Give them once, best in the batch for prepare_batch"
            )
        documents = block if given is None else given
        if ready is not None:
            if ready.layout not in (None, handler.layout):
                raise ValueError(
                    f"{self.binding.name} runs with layout={handler.layout!r}, but prepare_batch split the batch as "
                    f"{ready.layout!r}. Make its handler of the style that prepare_model was given"
                )
            return ready if documents is None else replace(ready, documents=documents)
        if padding is not None:
            return attention_state(handler, documents, self._global_mask(handler, padding, tokens.shape[1]))
        if mask is not None or positions is None or positions.ndim != 2 or documents is not None:
            return attention_state(handler, documents)
        return attention_state(handler, None, None, handler.combine(positions, 1))

    def _global_mask(self, handler: ContextParallelHandler, mask: Tensor, local: int) -> Tensor:
        length = local * handler.cp.size
        if mask.shape[1] not in (local, length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; it must be [B, {local}] (dispatched like the {local} "
                f"local tokens) or [B, {length}] (global)"
            )
        return mask if mask.shape[1] == length else handler.combine(mask, 1)


def attention_mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> None:
    """Make no mask: the decoder's hook has read padding and packing, and each layer's attention knows its own window.

    Raises:
        NotImplementedError: for a mask that is neither causal nor sliding-window, and for a key/value cache.
    """
    if q_length != kv_length or not isinstance(q_offset, int) or q_offset != 0:
        raise NotImplementedError(
            f"{q_length} queries at offset {q_offset} of {kv_length} keys: context parallelism does not run with a "
            "key/value cache. Pass use_cache=False, and generate without prepare_model"
        )
    if not allow_is_causal_skip or (local_size is not None and local_size != getattr(config, "sliding_window", None)):
        kind = "custom or bidirectional" if local_size is None else f"chunked or custom (size {local_size})"
        raise NotImplementedError(
            f"{type(config).__name__} asks for a {kind} attention mask. Context parallelism makes causal and "
            "sliding-window masks only. Pass it as a 4-D attention_mask over global positions, if all layers share one"
        )


def _refuse_unsupported(name: str, **kwargs: Any) -> None:
    unsupported = ("dropout", "softcap", "s_aux", "position_bias", "cache")
    wanted = [key for key in unsupported if kwargs.get(key) is not None]
    if wanted:
        raise NotImplementedError(
            f"{name} asks for {', '.join(wanted)} in attention, which context parallelism does not support yet. "
            "Set attention_dropout=0.0, attn_logit_softcapping=None in the config, or use a model without attention "
            "sinks, position biases and paged caches"
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    context_parallel: ForwardState | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: ``[B, H, S/n, D]`` to ``[B, S/n, H, D]``, over the keys of all ranks."""
    name = type(module).__name__
    if not isinstance(context_parallel, ForwardState):
        raise RuntimeError(
            f'{name} runs attn_implementation="hyper_cp", but does not know the cp mesh. Call hyper_cp.integrations.'
            "transformers.prepare_model(model, mesh, style=...), and the model as a whole (its decoder must hand "
            "unknown keywords down to attention)"
        )
    _refuse_unsupported(name, dropout=dropout or None, **kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not causal:
        raise NotImplementedError(f"{name} is not causal: pass a 4-D attention_mask over global positions")
    batch, style, mesh = context_parallel.batch, context_parallel.style, context_parallel.mesh
    mask, window = attention_mask, None
    if mask is None:  # else it is the caller's own for all layers, and nothing is added to it, as in transformers
        mask, window = batch.keys, (None if sliding_window is None else sliding_window - 1, 0)
    cp, mode = mesh.view(query.shape[1], key.shape[1]), replace(style.mode, window=window)
    # is_causal=False: the window ends at the query, so it is causal already; and unlike is_causal it allows a mask.
    out = cp_attention(query, key, value, cp, mode, Call(False, scaling, mask, batch.documents))
    if batch.tokens is not None:  # padding sees nothing and gets zeros, as from F.scaled_dot_product_attention
        out = out.masked_fill(~batch.tokens, 0.0)
    return out.transpose(1, 2).contiguous(), None
