"""Hugging Face transformers: an attention implementation named "hyper_cp", and the hook that feeds it.

::

    prepare_model(model, mesh, style=style)  # LlamaForCausalLM, Qwen3, Gemma3, DeepseekV3, ...
    handler = ContextParallelHandler(mesh, style)
    loss = model(**prepare_batch(handler, batch)).loss  # this rank's share of the mean

What a batch says about attention arrives at the decoder once per forward, is looked at there, and travels to every
attention call as the keyword ``context_parallel``: activation checkpointing recomputes with what the forward saw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..handler import ContextParallelHandler
from ..module._torch import checkpoint
from ..module.mesh_binding import Binding, Style, binding_of, describe
from ..ops.attention import cp_attention
from ..ops.config import Call
from ..style import ContextParallel, style_of
from .hf_batch import Seen, documents_of, look, prepare_batch

__all__ = ["NAME", "prepare_batch", "prepare_model", "register"]

NAME = "hyper_cp"
KINDS = {"full_attention", "sliding_attention"}


def register() -> None:
    """Make ``attn_implementation="hyper_cp"`` known to transformers (attention and masks)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def prepare_model(model: PreTrainedModel, mesh: DeviceMesh, *, style: ContextParallel) -> PreTrainedModel:
    """Let the attention of a causal model run over the sequence that the ranks of ``mesh`` share; in place.

    Call it before DDP, FSDP or compile. Of ``style`` everything but dimensions and indices counts; sliding windows are
    the model's own. The forward takes this rank's tokens: see :func:`prepare_batch`. Without it a 2-D
    ``attention_mask`` (local, or global) or ``position_ids`` are gathered and looked at in every forward.

    Returns:
        The model. ``ValueError`` if it is prepared already, or if the style does not fit.
    """
    register()
    decoder = model.get_decoder()
    name = type(decoder).__name__
    if binding_of(decoder) is not None:
        raise ValueError(f"{name} is prepared for context parallelism already: prepare it once")
    if style.mode.window is not None:
        raise ValueError(f"style has window={style.mode.window}, but the model decides which layers slide: drop it")
    other = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - KINDS)
    if other or not getattr(decoder, "_supports_attention_backend", False):
        raise NotImplementedError(
            f"{name} has {'layers of type ' + ', '.join(other) if other else 'no attention of AttentionInterface'}: "
            f"what they do along the sequence would stop at the borders of ranks. Supported: {', '.join(sorted(KINDS))}"
        )
    decoder.set_attn_implementation(NAME)
    looker = Looker(style, mesh, decoder)
    decoder.register_forward_pre_hook(looker.before, with_kwargs=True, prepend=True)
    if model is not decoder:
        model.register_forward_pre_hook(_check_labels, with_kwargs=True)
    return model


def _check_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            f"{type(model).__name__} was given labels without shift_labels: shifted after the sequence is split, they "
            "would be wrong at the borders of ranks. Use prepare_batch, or shift them over the whole sequence"
        )


class Looker:
    """Looks at what a decoder is called with, and passes it on to its attention."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh, decoder: nn.Module) -> None:
        self.binding = Binding(style, mesh, describe(decoder))

    @property
    def style(self) -> Style:
        return self.binding.style

    @property
    def name(self) -> str:
        return self.binding.name

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        if len(args) > 1:
            raise TypeError(f"{self.name} got {len(args)} positional arguments: pass all but input_ids by keyword")
        if kwargs.get("past_key_values") is not None:
            raise NotImplementedError(
                f"{self.name} was given past_key_values: context parallelism does not run with a key/value cache, and "
                "tokens that are generated are not shares of a sequence. Pass use_cache=False, and generate with a "
                "model without prepare_model"
            )
        documents, place = checkpoint.batch_state(self.binding, (self.binding.active.documents, self.binding.active))
        handler = ContextParallelHandler(place.mesh, style_of(self.binding))
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        two_d = isinstance(mask, Tensor) and mask.ndim == 2
        kwargs["context_parallel"] = self._seen(handler, documents, tokens, kwargs, two_d).on(
            tokens.device, self.style, place
        )
        if mask is None or two_d:
            # Without a mask transformers takes the jumps of local positions for packed sequences.
            kwargs["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if positions is None:
            length = tokens.shape[1] * handler.cp.size
            kwargs["position_ids"] = handler.position_ids(length, device=tokens.device)[None]
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        return args, kwargs

    def _seen(
        self, handler: ContextParallelHandler, block: Tensor | None, tokens: Tensor, kwargs: Any, two_d: bool
    ) -> Seen:
        """What ``prepare_batch`` has seen, or what is seen now; and the documents of the enclosing block."""
        seen, given = kwargs.get("context_parallel"), documents_of(kwargs)
        known = seen is not None and (seen.documents is not None or seen.tokens is not None)
        if (seen is not None and (two_d or given is not None)) or (block is not None and (known or given is not None)):
            raise ValueError(
                f"{self.name} is told about documents or padding twice (by prepare_batch, attention_mask, documents or "
                "handler.documents): say it once, best in the batch given to prepare_batch"
            )
        documents = block if given is None else given
        if seen is not None and seen.layout not in (None, handler.layout):
            raise ValueError(
                f"{self.name} runs with layout={handler.layout!r}, but prepare_batch split the batch as {seen.layout!r}"
                ": make its handler of the style that prepare_model was given"
            )
        if seen is not None:
            return seen if documents is None else replace(seen, documents=documents)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if two_d:
            local, length = tokens.shape[1], tokens.shape[1] * handler.cp.size
            if mask.shape[1] not in (local, length):
                raise ValueError(
                    f"attention_mask has shape {tuple(mask.shape)}; it must be [B, {local}] (dispatched like the "
                    f"{local} local tokens) or [B, {length}] (global)"
                )
            return look(handler, documents, mask if mask.shape[1] == length else handler.combine(mask, 1))
        if mask is not None or positions is None or positions.ndim != 2 or documents is not None:
            return look(handler, documents)
        return look(handler, None, None, handler.combine(positions, 1))


def attention_mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> None:
    """No mask: padding and packing were looked at by the decoder's hook, the band of a layer is known to its
    attention. A mask that is neither causal nor sliding is refused."""
    if q_length != kv_length or not isinstance(q_offset, int) or q_offset != 0:
        raise NotImplementedError(
            f"{q_length} queries at offset {q_offset} of {kv_length} keys: context parallelism does not run with a "
            "key/value cache. Pass use_cache=False, and generate without prepare_model"
        )
    if not allow_is_causal_skip or (local_size is not None and local_size != getattr(config, "sliding_window", None)):
        kind = "custom or bidirectional" if local_size is None else f"chunked or custom (size {local_size})"
        raise NotImplementedError(
            f"{type(config).__name__} asks for a {kind} attention mask, which context parallelism does not know: only "
            "causal and sliding-window masks are. Pass it as a 4-D attention_mask over global positions, if all "
            "layers share one"
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
    context_parallel: Seen | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``[B, H, S/n, D]`` to ``[B, S/n, H, D]``, over the keys of all ranks."""
    name = type(module).__name__
    seen = context_parallel
    if seen is None or seen.style is None or seen.place is None:
        raise RuntimeError(
            f'{name} runs attn_implementation="hyper_cp" but was not told the cp mesh: call hyper_cp.integrations.'
            "transformers.prepare_model(model, mesh, style=...) and the model as a whole (its decoder must hand "
            "unknown keywords down to attention)"
        )
    refused = {"dropout": dropout or None, **{k: kwargs.get(k) for k in ("softcap", "s_aux", "position_bias", "cache")}}
    asked = [k for k, v in refused.items() if v is not None]
    if asked:
        raise NotImplementedError(
            f"{name} asks for {', '.join(asked)} in attention, which context parallelism does not support yet: "
            "set attention_dropout=0.0, attn_logit_softcapping=None in the config, or use a model without attention "
            "sinks, position biases and paged caches"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not causal:
        raise NotImplementedError(f"{name} is not causal: pass a 4-D attention_mask over global positions")
    mask, window = attention_mask, None
    if mask is None:  # else it is the caller's own for all layers, and nothing is added to it, as in transformers
        mask, window = seen.keys, (None if sliding_window is None else sliding_window - 1, 0)
    cp, mode = seen.place.view(query.shape[1], key.shape[1]), replace(seen.style.mode, window=window)
    # The window says that it is causal, and goes with a mask.
    out = cp_attention(query, key, value, cp, mode, Call(False, scaling, mask, seen.documents))
    if seen.tokens is not None:  # what sees nothing gets zeros, as from F.scaled_dot_product_attention
        out = out.masked_fill(~seen.tokens, 0.0)
    return out.transpose(1, 2).contiguous(), None
