"""Encoder-decoders: BART, T5, Marian and others, whose source and target are two sequences.

Such a model takes the whole batch. Its encoder splits the source and its decoder the target, each with the layout of
the style. Cross-attention reads the encoder's states of all ranks. Logits are this rank's share of the target.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...data.packing import take_documents
from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...style import style_of
from .batch import prepare_batch
from .media import METHODS
from .outputs import check_ignored
from .seams import CACHES, code_of_user, has_head, in_file, loss_of_user, source_of, words_in

CROSS = re.compile(r"(^|\.)(encoder_attn|EncDecAttention|cross_attn|cross_attention|crossattention)($|\.)")
"""Names of modules whose keys are those of an encoder."""
HEADS = re.compile(r"ForConditionalGeneration$|ForTextToText$|MTModel$")
"""Names of models with a head that predicts the tokens of the target."""
MASK = "attention_mask"
INPUTS = ("input_ids", "inputs_embeds", MASK)


def shifted_by(model: Any) -> Callable[[Tensor], Tensor] | None:
    """The function by which a model makes the input of its decoder of labels: a method, or one of its file."""
    method = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if method is not None:
        return lambda labels: method(labels=labels)
    function = in_file(model, "shift_tokens_right")
    config = getattr(model.config, "text_config", model.config)  # Florence 2
    if function is None or list(inspect.signature(function).parameters)[1:] != _SHIFT:
        return None
    return lambda labels: function(labels, config.pad_token_id, config.decoder_start_token_id)


_SHIFT = ["pad_token_id", "decoder_start_token_id"]


def mask_maker(stack: Any) -> Callable[[Tensor], Tensor] | None:
    """The function by which a stack makes a mask of ids when it gets none (T5Gemma), or None."""
    make = in_file(stack, "make_default_2d_attention_mask")
    return None if make is None else lambda ids: make(ids, ids, stack.config.pad_token_id)


def takes_media(encoder: nn.Module) -> bool:
    """True for an encoder that takes images or audio by itself, beside or in place of tokens."""
    names = {"pixel_values", "flattened_patches", "input_features"}
    return not names.isdisjoint(inspect.signature(encoder.forward).parameters)


def stacks_of(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel] | None:
    """The encoder and the decoder of an encoder-decoder with a head of tokens, whose source is tokens or embeddings;
    None for other models."""
    if not (model.config.is_encoder_decoder and has_head(model, HEADS) and shifted_by(model)):
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    inside = decoder.get_decoder() if isinstance(decoder, PreTrainedModel) else None
    decoder = inside if isinstance(inside, PreTrainedModel) else decoder  # Florence 2: that of the model of text
    if takes_media(encoder) and any(hasattr(model, name) for name in METHODS.values()):
        return None
    both = isinstance(encoder, PreTrainedModel) and isinstance(decoder, PreTrainedModel) and encoder is not decoder
    return (encoder, decoder) if both and encoder is not model else None


def cross_attention(decoder: nn.Module) -> set[nn.Module]:
    """The modules of a decoder that attend to the states of an encoder."""
    return {module for name, module in decoder.named_modules() if CROSS.search(name)}


class SourceTargetHook:
    """The hooks of an encoder-decoder, and of its two stacks."""

    def __init__(self, binding: Binding) -> None:
        self.of_decoder = binding  # no "binding": that would be taken for the encoder's
        self.shift: Callable[[Tensor], Tensor] = lambda labels: labels
        """The function by which the model makes the input of its decoder of labels."""
        self.masks: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        """The functions by which the stacks make masks of ids."""
        self.divides = False
        """The model's loss is a sum over ``num_items_in_batch``, if that is given."""
        self.counts: tuple[Tensor, Any] | None = None
        """The number of labels of this forward, and of the whole batch."""
        self.use_cache: bool | None = None
        """That of the caller; None: as the decoder's configuration says."""
        self.labels: Tensor | None = None
        """Those of the whole target; then those of this rank."""
        self.source: Tensor | None = None
        """``[B, 1, 1, S]``: False on padding of the source; None: there is none."""

    def attach(self, model: nn.Module, encoder: nn.Module, decoder: nn.Module) -> None:
        """Register the hooks; those of the stacks before all others."""
        self.shift = shifted_by(model) or self.shift  # now: FSDP2 changes the classes of models
        self.masks = {stack: make for stack in (encoder, decoder) if (make := mask_maker(stack)) is not None}
        self.divides = "self.loss_function(" in source_of(type(model).forward)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        encoder.register_forward_pre_hook(self.split_source, with_kwargs=True, prepend=True)
        decoder.register_forward_pre_hook(self.split_target, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.after)

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the labels, and make the whole input of the decoder of them."""
        self.labels = self.source = self.counts = None
        name, parallel = type(model).__name__, self.of_decoder.active.parallel
        not_shared = ("encoder_outputs", *CACHES) if parallel else ()
        wrong = [x for x in (*not_shared, "context_parallel") if kwargs.get(x) is not None]
        if wrong or (parallel and len(args) > 1):
            raise NotImplementedError(
                f"{name} got {', '.join(wrong) or 'positional arguments'}. It splits its source and its target by "
                "itself. Pass the whole batch, by keyword: input_ids, attention_mask, labels"
            )
        if not parallel:
            return None
        if take_documents(dict(kwargs)) is not None:
            raise NotImplementedError(
                f"{name} got packed documents. Its source and its target are two sequences with boundaries of their "
                "own, and cross-attention would see all documents. Give each pair a row, and pad the rows"
            )
        if kwargs.get("logits_to_keep"):
            raise NotImplementedError(
                f"{name} got logits_to_keep={kwargs['logits_to_keep']}, of which each rank would take the last tokens "
                "of its share. Leave it out"
            )
        if kwargs.get("output_router_logits"):
            raise NotImplementedError(
                f"{name} got output_router_logits=True, for which no loss over two sequences is known. Leave it out"
            )
        self.use_cache = kwargs.get("use_cache")
        kwargs = {**kwargs, "use_cache": False}
        self.labels, count = kwargs.pop("labels", None), kwargs.get("num_items_in_batch")
        if self.labels is not None:
            _check_loss(model)
        if self.labels is not None and self.divides:
            check_ignored(model, {**kwargs, "labels": self.labels})
            self.counts = None if count is None else ((self.labels != -100).sum(), count)
        if self.labels is not None and not any(kwargs.get(f"decoder_{x}") is not None for x in INPUTS[:2]):
            kwargs["decoder_input_ids"] = self.shift(self.labels)
        return args, kwargs

    def _handler(self) -> ContextParallelHandler:
        return ContextParallelHandler(self.of_decoder.active.mesh, style_of(self.of_decoder))

    def _split(self, kwargs: dict[str, Any], labels: Tensor | None) -> dict[str, Any]:
        """This rank's share of a sequence. Where ``labels`` are not -100, outputs of padding are read, too."""
        whole = {name: kwargs.pop(name) for name in INPUTS if kwargs.get(name) is not None}
        whole |= {} if labels is None else {"shift_labels": labels}
        return {**kwargs, **prepare_batch(self._handler(), whole)}

    def split_source(self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This rank's share of the source."""
        if not self.of_decoder.active.parallel:
            return None
        kwargs = {**dict(zip(INPUTS, args, strict=False)), **kwargs}
        made = self._mask_of_ids(encoder, kwargs)
        # A mask that the encoder makes itself is not that of cross-attention, which reads the states of padding, too.
        local = self._split(kwargs | made, torch.zeros_like(kwargs["input_ids"]) if made else None)
        local.pop("shift_labels", None)
        self.source = local["context_parallel"].visible
        if made:
            length = made[MASK].shape[1]
            self.source = made[MASK].new_ones(1, 1, 1, self._handler().padded_length(length), dtype=torch.bool)
            self.source[..., length:] = False
        return (), local

    def split_target(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This rank's share of the target, with the states of the encoder as they are."""
        if not self.of_decoder.active.parallel:
            return None
        kwargs = {**dict(zip(INPUTS, args, strict=False)), **kwargs}
        asked = getattr(decoder.config, "use_cache", False) if self.use_cache is None else self.use_cache
        caches = asked and not decoder.training  # on one device, where a decoder with a cache makes no mask
        made = {} if caches else self._mask_of_ids(decoder, kwargs)
        local = self._split(kwargs | made, self.labels)
        self.labels = local.pop("shift_labels", None)
        return (), {**local, "encoder_attention_mask": None}

    def _mask_of_ids(self, stack: nn.Module, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The mask that a stack makes of ids itself, by its name; empty if it makes none, or has got one."""
        make, ids = self.masks.get(stack), kwargs.get("input_ids")
        return {} if make is None or ids is None or kwargs.get(MASK) is not None else {MASK: make(ids)}

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Add the mean loss of the target, whose gradients are this rank's share."""
        labels, self.labels = self.labels, None
        if labels is not None and self.of_decoder.active.parallel:
            loss = self._handler().mean_loss(output.logits, labels.to(output.logits.device), gradients="sum")
            if self.counts is not None:
                own, whole = (x.to(loss.device) if isinstance(x, Tensor) else x for x in self.counts)
                loss = loss * own / whole
            return type(output)(loss=loss, **output)  # losses are the first entries of outputs
        return output


def _check_loss(model: PreTrainedModel) -> None:
    """Raise ``NotImplementedError`` for an encoder-decoder with a loss of the user's: its labels never reach it."""
    words = words_in(code_of_user(model))
    if loss_of_user(model) is not None or not words.isdisjoint({"loss", "loss_function", "labels", "criterion"}):
        raise NotImplementedError(
            f"{type(model).__name__} got labels, and has a loss of your own. Labels of an encoder-decoder are split "
            "behind its forward, and the loss would be the plain one of next tokens. Pass decoder_input_ids and no "
            "labels, and give the logits, and handler.dispatch(labels, 1, pad_value=-100), to handler.mean_loss"
        )
