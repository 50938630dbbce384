"""Hugging Face transformers: an attention implementation named "hyper_cp", and the hook that gives it the batch state.

::

    prepare_model(model, mesh, style=style)  # LlamaForCausalLM, Qwen3, Gemma3, DeepseekV3, ...
    handler = ContextParallelHandler(mesh, style)
    loss = model(**prepare_batch(handler, batch)).loss  # this rank's share of the mean

The hook reads a batch's documents and padding once per forward, at the decoder, and hands them to every attention
call as the keyword ``context_parallel``: activation checkpointing recomputes with what the forward had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from .._torch.modules import guard_hooks
from ..handler import ContextParallelHandler
from ..mesh.arguments import check_type
from ..module.guards import watch
from ..module.mesh_binding import binding_of
from ..style import ContextParallel
from .adapters import check_adapters
from .huggingface.attention import register
from .huggingface.batch import prepare_batch
from .huggingface.checks import OVER_POSITIONS, POOLED, base_of, check_model, decoder_of
from .huggingface.chunked_loss import ChunkedLoss
from .huggingface.decoder import Around, DecoderHook
from .huggingface.decoding import SplitModelCache, check_arguments, compare_prompts, one_random_state
from .huggingface.head import HeadHook
from .huggingface.image_keys import ImageKeysHook, attend_locally, image_keys_of, layers_of
from .huggingface.indexer_losses import indexer_losses
from .huggingface.inline_media import InlineMediaHook, inline_media_of
from .huggingface.latents import NAME
from .huggingface.masks import make_masks_before
from .huggingface.media import MediaHook, owner_of
from .huggingface.outputs import TupleOutput
from .huggingface.pooled import PooledHook
from .huggingface.seams import CACHE, CACHES, cache_in, has_head
from .huggingface.two_sequences import SourceTargetHook, stacks_of

__all__ = ["NAME", "generate", "indexer_losses", "prepare_batch", "prepare_model", "register"]


def prepare_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    style: ContextParallel,
    chunked_loss: bool = False,
    compare: bool = True,
) -> PreTrainedModel:
    """Run the attention of a decoder or an encoder over the sequence that the ranks of ``mesh`` share; in place.

    Call it before DDP, FSDP or compile, and before or after adapters of PEFT are added. Dimensions and indices of
    ``style`` do not count, and sliding windows are the model's own. The forward takes this rank's tokens: see
    :func:`prepare_batch`. A batch that has not been through it may have a 2-D ``attention_mask`` (local or global) or
    ``position_ids``, which are then gathered in every forward. A model whose head reads the whole sequence, such as
    ``LlamaForSequenceClassification`` and ``LlamaForQuestionAnswering``, takes the whole batch, and returns whole
    logits and this rank's share of the loss.

    Args:
        chunked_loss: compute the loss without whole logits, for a chunk of tokens at a time. The output of a forward
            with labels has no logits then. Models may scale, cap and cast logits; any other step raises an error.
        compare: behind the first forward run a few tokens through the model once more, over the ranks and on each rank
            alone, and warn if their logits differ (docs/integrations/huggingface.md). The same on all ranks.

    Returns:
        The model.

    Raises:
        ValueError: if the model is prepared already, or if the style does not fit.
        NotImplementedError: with the reason, if the model would be wrong on a share: layers that mix positions
            otherwise than by attention, positions that it counts itself (docs/integrations/transformers_models.md,
            encoder_models.md and image_models.md list the outcome of every type).
    """
    register()
    given, model = model, base_of(model)
    decoder = decoder_of(model)
    name = type(decoder).__name__
    if binding_of(decoder) is not None:
        raise ValueError(
            f"{name} is prepared for context parallelism already. Its sequence would be exchanged twice. Prepare it "
            "once"
        )
    if style.mode.window is not None:
        raise ValueError(
            f"style has window={style.mode.window}. The model says which of its layers have a sliding window. Leave it "
            "out"
        )
    stacks: tuple[Any, ...] = stacks_of(model) or (decoder,)
    for stack in stacks:
        check_adapters(stack)  # those of later are found in the first forward
        check_model(model, stack)
    chunked = ChunkedLoss(model) if chunked_loss else None
    guard_hooks()
    # All are made before the first one is attached: they may share a config.
    hooks = [DecoderHook(style, mesh, stack, layers_of(model, stack)) for stack in stacks]
    for hook, stack in zip(hooks, stacks, strict=True):
        hook.attach(stack)
        if model is not stack:
            hook.around = Around(model)
        watch(stack, known=True, elsewhere=attend_locally(model, stack, hook.implementation))
    hook = hooks[-1]
    if model is not decoder:
        make_masks_before(model, hook.binding, hook.implementation)
    if len(stacks) > 1:
        hooks[0].reads_padding = True  # of a source whose mask the encoder makes itself
        hook.two = SourceTargetHook(hook.binding)
        hook.two.attach(model, *stacks)
    elif has_head(model, POOLED):
        hook.reads_padding = True
        PooledHook(hook.binding, has_head(model, OVER_POSITIONS)).attach(model, decoder)
    elif model is not decoder:
        head = HeadHook(hook)
        model.register_forward_pre_hook(head.before, with_kwargs=True)
        model.register_forward_hook(head.after, with_kwargs=True, always_call=True)
    if (owner := owner_of(model, decoder)) is not None:  # behind the head's: it may be the same module
        MediaHook(hook.binding, model, owner).attach(owner, decoder)
    if (owner := image_keys_of(model, decoder)) is not None:
        ImageKeysHook(hook.binding, model, owner).attach(owner, decoder)
    if (owner := inline_media_of(model, decoder)) is not None:
        InlineMediaHook(hook.binding, model).attach(owner, decoder)
    if chunked is not None:  # last: the router loss is corrected in an output that still has logits
        chunked.attach(model)
    if model is not decoder:
        TupleOutput().attach(model)
    if compare and len(stacks) == 1 and not has_head(model, POOLED):  # they take whole batches, or two
        model.register_forward_hook(hook.compare, with_kwargs=True)
    return given


def generate(model: Any, handler: ContextParallelHandler, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
    """Generate with a prepared model: ``model.generate`` with a cache that is split over the ranks of the mesh.

    The forward of the prompt is that of training, and each rank keeps the keys and values of its share. Then every rank
    computes each new token, and attends to its part of the cache (:func:`hyper_cp.ops.decode_attention`): a cache has
    1/n of the memory, and all ranks get the same tokens.

    Args:
        model: a model that :func:`prepare_model` has prepared, in evaluation mode.
        handler: that of its style, on the mesh on which it runs.
        input_ids: the whole prompts ``[B, S]``, the same on every rank, of any S from n on; padded rows with
            ``attention_mask``, as for ``model.generate``.
        kwargs: those of ``model.generate``: ``max_new_tokens``, ``do_sample``, ``num_beams``, ``streamer`` ... They are
            the same on every rank, and a stopping criterion decides alike on all. Ranks sample with the random state of
            the first one. ``past_key_values`` is the cache of a turn before, which ``return_dict_in_generate=True``
            returns.

    Returns:
        What ``model.generate`` returns, on every rank.

    Raises:
        ValueError: if the ranks pass different prompts or options, a cache of another mesh, a prompt with fewer
            tokens than ranks (with recurrent layers, than split evenly in the layout) or with padding at its end, or in
            a further turn a mask that shows what was padding before.
        NotImplementedError: for models that keep more between tokens than keys, values and the states of delta rules,
            packed prompts, speculative decoding and ``max_time``.
        RuntimeError: in training mode.

    Example::

        handler = ContextParallelHandler(mesh, style)
        text = generate(prepare_model(model, mesh, style=style).eval(), handler, prompt, max_new_tokens=200)
    """
    return generate_with(model.generate, base_of(model), handler, input_ids, **kwargs)


def generate_with(
    method: Callable[..., Any], model: Any, handler: ContextParallelHandler, input_ids: Tensor | None, **kwargs: Any
) -> Any:
    """:func:`generate` by the method ``generate`` of a model, or of what wraps it."""
    if handler.cp.size == 1:
        named = "input_ids" in inspect.signature(type(model).generate).parameters  # behind images (BLIP)
        return method(input_ids=input_ids, **kwargs) if named else method(input_ids, **kwargs)
    check_arguments(model, input_ids, kwargs)
    if not CACHE:
        raise NotImplementedError(
            f"generate found transformers {transformers_version}, whose models take their cache under none of the "
            f"names {', '.join(CACHES)}. It could not hand over the one that is split over ranks. Install "
            "transformers 5.24.0"
        )
    cache = cache_in(kwargs)
    kwargs = {name: x for name, x in kwargs.items() if name not in CACHES}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.ndim == 2:
        kwargs["attention_mask"] = (mask != 0).long()  # as models on one device take it
    compare_prompts(handler, input_ids, kwargs)
    cache = SplitModelCache(handler, model) if cache is None else cache
    todo = "Pass the one that generate(..., return_dict_in_generate=True) has returned, or leave it out"
    check_type("past_key_values", cache, SplitModelCache, f"Its keys are not split over the ranks. {todo}")
    held, given = cache.get_seq_length(), 0 if input_ids is None else input_ids.shape[1]
    if held >= given > 0:
        raise ValueError(
            f"input_ids has {given} tokens, and the cache {held}. The text of a further turn is the whole one, longer "
            "than what the cache holds. Pass the sequences of the turn before with new tokens behind them, or leave "
            "past_key_values out"
        )
    cache.begins = True
    with torch.no_grad(), one_random_state(handler, model.device):
        return method(input_ids, **{CACHE: cache}, **kwargs)
