"""Hugging Face transformers: an attention implementation named "hyper_cp", and the hook that gives it the batch state.

::

    prepare_model(model, mesh, style=style)  # LlamaForCausalLM, Qwen3, Gemma3, DeepseekV3, ...
    handler = ContextParallelHandler(mesh, style)
    loss = model(**prepare_batch(handler, batch)).loss  # this rank's share of the mean

The hook reads a batch's documents and padding once per forward, at the decoder, and hands them to every attention
call as the keyword ``context_parallel``: activation checkpointing recomputes with what the forward had.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeGuard, cast
from weakref import ref

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.masking_utils import create_masks_for_generate

from .._torch.modules import bypassed, count_compilations, is_running
from ..data.batch import WholeBatch, entries_of
from ..data.collectives import by_rank
from ..data.packing import NONE_BACK, Media, PreparedBatch, attention_state, read_positions, take_documents
from ..data.sharding import Shares, documents_for, local_share
from ..handler import ContextParallelHandler
from ..mesh.arguments import check_type
from ..module.guards import watch
from ..module.mesh_binding import Binding, StyledMesh, binding_of, describe
from ..module.mixers.hooks import MixerHooks
from ..module.model import KnownModules, begin_call
from ..ops.writes import writes
from ..schedule import layout as layouts
from ..schedule.documents import PackedDocuments, read
from ..style import ContextParallel, style_of
from .adapters import check_adapters
from .huggingface import forward, inkling, router_loss, selected_blocks, selected_pools, sparse
from .huggingface.attention import make_masks_before, padding_mask, register, request_masks
from .huggingface.checks import (
    OVER_POSITIONS,
    POOLED,
    always_overlays,
    base_of,
    check_added,
    check_dispatched,
    check_dropped_layers,
    check_entries,
    check_inputs,
    check_model,
    check_own_forwards,
    check_padding,
    counts_mask,
    decoder_of,
    has_attention,
    is_media,
    makes_mask,
    masks_by_types,
    mixers_of,
    own_attention,
    position_maker,
    sees_behind,
)
from .huggingface.chunked_loss import ChunkedLoss
from .huggingface.decoding import SplitModelCache, check_arguments, compare_prompts, one_random_state
from .huggingface.few_tokens import FewTokens
from .huggingface.forward import ForwardState, OneDevice, mixer_state
from .huggingface.image_keys import ImageKeysHook, attend_locally, image_keys_of, layers_of
from .huggingface.indexer_losses import collecting, indexer_losses
from .huggingface.inline_media import InlineMediaHook, inline_media_of
from .huggingface.latents import NAME, prepare_latents
from .huggingface.media import PLACES, MediaHook, owner_of
from .huggingface.model_loss import LossCheck, check_kind_of_loss, check_labels
from .huggingface.modules import (
    LightningHooks,
    direct_attention,
    is_lightning,
    no_mask,
    prepare_counting,
    prepare_positions,
    prepare_rotary,
    prepare_tables,
    reach_copied_layers,
    route,
)
from .huggingface.outputs import TupleOutput, check_ignored
from .huggingface.pooled import PooledHook
from .huggingface.relative import prepare_biases
from .huggingface.seams import CACHE, CACHES, cache_in, has_head, holds
from .huggingface.two_sequences import SourceTargetHook, cross_attention, stacks_of
from .huggingface.written import bias_all_ranks, record, written_attention

__all__ = ["NAME", "generate", "indexer_losses", "prepare_batch", "prepare_model", "register"]

IGNORE = -100
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", PLACES)
"""Names of the types of tokens (text, image ...) in batches."""
PROMPT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", *TOKEN_TYPES)
"""Names of the arguments with rows of positions in the forward of a prompt."""
ON_THE_HOST = (
    "A prepared model reads its batch on the host, at the entrance of the decoder, and cannot be one compiled graph. "
    "Compile its layers with fullgraph=True, or the model without it"
)
"""The reason for which hooks run outside of graphs. (Their code would mostly be traced, but documents have no fake.)"""


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
    # All are made before the first one is attached: they may share a config.
    hooks = [DecoderHook(style, mesh, stack, layers_of(model, stack)) for stack in stacks]
    for hook, stack in zip(hooks, stacks, strict=True):
        hook.attach(stack)
        if model is not stack:
            hook.around = _Around(model)
        watch(stack, known=True, elsewhere=attend_locally(model, stack, hook.implementation))
    hook = hooks[-1]
    if model is not decoder:
        make_masks_before(model, hook.binding, hook.implementation)
    if len(stacks) > 1:
        hooks[0].reads_padding = True  # of a source whose mask the encoder makes itself
        hook.two = SourceTargetHook(hook.binding, prepare_batch)
        hook.two.attach(model, *stacks)
    elif has_head(model, POOLED):
        hook.reads_padding = True
        PooledHook(hook.binding, prepare_batch, has_head(model, OVER_POSITIONS)).attach(model, decoder)
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


def prepare_batch(
    handler: ContextParallelHandler,
    batch: dict[str, Any],
    *,
    debug: bool = False,
    labels_cross_documents: bool = True,
) -> dict[str, Any]:
    """This rank's share of a global batch, for the forward of a model that ``prepare_model`` has prepared.

    Labels are shifted over the whole sequence (``shift_labels``), ``position_ids`` are made, and padding and packed
    documents are read here, so that the forward communicates in attention only. ``num_items_in_batch`` counts the
    labels of the whole batch: the model's loss is this rank's share of the mean, and gradients *summed* over the cp
    ranks are those of one device.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` of any length S, and what the model takes with them. Tensors
            ``[B, S, ...]`` are split; 4-D attention masks (over global positions) and everything else remain whole.
            Packed documents have any name that :meth:`ContextParallelHandler.get_batch_on_this_cp_rank` knows, or
            position ids that restart. They are kept apart in every model (some models forget that in SDPA masks).
            Images and videos (``pixel_values``, ``image_grid_thw`` ..., as processors make them) are not split: they
            stay where they are, and the forward shares them out over the ranks (docs/integrations/images.md).
        debug: compare the batches of the ranks by hash, as ``get_batch_on_this_cp_rank(debug=True)`` does.
        labels_cross_documents: the last token of a document gets the label of the first of the next one. Default True,
            as in transformers' own loss on one device; with False it gets -100.
    """
    todo = 'It must hold the keyword arguments of the model. Pass a dict such as {"input_ids": ..., "labels": ...}'
    check_type("batch", batch, Mapping, todo)
    entries = entries_of(handler, batch, debug)
    whole = _KeywordBatch(handler, entries)
    whole.read_padding()
    if entries.get("labels") is not None:
        if entries.get("shift_labels") is None:
            whole.shift_labels(IGNORE, labels_cross_documents)
        entries.setdefault("num_items_in_batch", (entries["shift_labels"] != IGNORE).sum())
    if entries.get("shift_labels") is not None:
        whole.read_labels(entries["shift_labels"] != IGNORE)
    local = whole.split({name: IGNORE for name in whole.dims if "labels" in name})
    labels, shifted = (
        (x, writes(x)) if isinstance(x := local.get(name), Tensor) else None for name in ("labels", "shift_labels")
    )
    return {**local, "context_parallel": replace(whole.prepared(), labels=labels, shifted=shifted)}


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


def _tokens_before(shown: Tensor) -> Tensor:
    """The distance ``[B, S]`` of each position to the last token up to it; ``NONE_BACK`` where there is none."""
    at = torch.arange(shown.shape[1], device="cpu")
    return (at - torch.where(shown, at, -NONE_BACK).cummax(1).values).clamp(max=NONE_BACK)


class _KeywordBatch(WholeBatch):
    """A batch with the conventions of transformers. Padding behind the tokens of a row needs no boundary, because
    masks are causal. Positions do not restart in documents. The documents of an enclosing block count."""

    def __init__(self, handler: Shares, entries: dict[str, Any]) -> None:
        self.media = {name: entries.pop(name) for name, x in [*entries.items()] if is_media(str(name), x)}
        self.media = {name: x for name, x in self.media.items() if x is not None}
        tokens, documents = check_entries(entries), take_documents(entries)
        self.whole = tokens, entries.get("attention_mask")
        length = tokens.shape[1]
        dims = {name: -1 if name == "position_ids" else 1 for name, x in entries.items() if _rows(x)}
        dims = {name: dim for name, dim in dims.items() if entries[name].shape[dim] == length}
        dims.pop("attention_mask", None)
        super().__init__(handler, entries, dims, documents)
        self.position_ids: Tensor | None = entries.get("position_ids")
        self.mask: Tensor | None = None
        """A padding mask of the padded sequence."""

    def read_padding(self) -> None:
        """Read what attention must know."""
        mask, positions = self.entries.get("attention_mask"), self.position_ids
        if _rows(mask) and mask.ndim == 2:
            self.mask = self._padded(self.entries.pop("attention_mask"))
        elif isinstance(mask, Tensor):
            self.pad_mask(mask)
        # The documents of a block say what positions that restart in them would say.
        block = self.handler.cp.batch.documents
        in_block = block is not None
        if mask is not None or self.documents is not None:
            positions = None
        if block is not None and positions is not None:
            self._refuse_other_documents(positions, block)
            positions = None
        positions = read_positions(positions)
        documents = None if self.documents is None else self.table_of(self.documents.rows)
        self.state = attention_state(self.handler, documents, self.mask, positions)
        # Documents of padding alone are for causal attention: padding of an encoder sees what others see.
        self.packed = documents is not None or in_block or self.state.tokens is None
        if self.documents is None and positions is not None and self.state.documents is not None:
            self.documents = self._without_padding(self.state.documents)
        if self.state.tokens is not None and _rows(self.entries.get(TOKEN_TYPES[0])):
            self._count_padding()  # by its type it may see the tokens behind it (PaliGemma)
        if self.state.documents is None and layouts.by_documents(self.handler.layout) and not in_block:
            self.state = replace(self.state, documents=self.table_of([[0, self.length]]))

    def _refuse_other_documents(self, positions: Tensor, block: Tensor) -> None:
        """Raise ``ValueError`` for positions that restart elsewhere than in the documents of the enclosing block."""
        said = attention_state(self.handler, None, None, read_positions(positions)).documents
        if said is None:
            return
        found, known = ([list(row) for row in self._without_padding(table).rows] for table in (said, block))
        if found != known:
            raise ValueError(
                f"position_ids restart in documents {found}, and the enclosing handler.documents block has {known}. "
                "Only one of them can be right. Leave the block, or enter that of this batch"
            )

    def _without_padding(self, table: Tensor) -> PackedDocuments:
        """The documents of a padded table before the padding."""
        return PackedDocuments([[min(x, self.length) for x in row] for row in read(table).rows])

    def read_labels(self, counted: Tensor) -> None:
        """Record if labels count (``[B, S]``) on padding behind the tokens of a row. Otherwise nothing reads its
        outputs, and causality hides padding without a mask of keys."""
        if self.mask is None:
            return
        shown, counted = self.mask[:, : self.length].bool().cpu(), counted.cpu()
        back, ahead = _tokens_before(shown), _tokens_before(shown.flip(1)).flip(1)
        far = [int((x * (counted & ~shown)).max()) for x in (back, torch.minimum(back, ahead))]
        self.state = replace(self.state, tokens_back=far[0], tokens_near=far[1])
        behind = shown.flip(1).cumsum(1).flip(1) == 0
        if not bool((behind & counted).any()):
            return
        self._count_padding()

    def _count_padding(self) -> None:
        """Let padding see what a mask of keys leaves of the tokens, as on one device."""
        self.state = replace(self.state, padding_counts=True)
        if layouts.by_documents(self.handler.layout):  # documents of padding would place the tokens
            documents = self.state.documents if self.state.tokens is None else self.table_of([[0, self.length]])
            self.state = replace(self.state, documents=documents, tokens=None)

    @cached_property
    def table(self) -> Tensor | None:
        """The documents that place the tokens."""
        return documents_for(self.handler, self.state.documents, self.padded)

    def positions(self, at: Tensor) -> Tensor:
        """Positions ``[1, S/n]``. Padding gets no later one than the tokens, so that tables of positions need not be
        longer than the sequence."""
        return rearrange(at.clamp(max=self.length - 1), "s -> 1 s")

    def prepared(self) -> PreparedBatch:
        """The state of the batch, for the model."""
        counted = self.mask
        if counted is None and self.padded > self.length:
            counted = self._padded(torch.ones(self.first.shape[:2], dtype=torch.bool, device="cpu"))
        types = {name: self._padded(self.entries[name], -1) for name in TOKEN_TYPES if _rows(self.entries.get(name))}
        if self.mask is not None and self.state.keys is None and not self.state.padding_counts:
            types = {name: x.masked_fill(~self.mask.bool(), -1) for name, x in types.items()}
        return replace(
            self.state,
            last_position=self.length - 1 if self.position_ids is None else self.position_ids.max(),
            counted=None if counted is None else local_share(self.handler, counted, 1, self.table),
            visible=_of_keys(counted),
            packed=self.packed,
            token_types=types,
            length=self.padded // self.handler.cp.size,
            ranks=self.handler.cp.size,
            numbered=self.position_ids is None,
            media=self._media(),
        )

    def _media(self) -> Media | None:
        tokens, mask = self.whole
        if not self.media:
            return None
        if tokens.is_floating_point():
            raise NotImplementedError(
                f"batch has {', '.join(self.media)} with inputs_embeds. The places of images are found in input_ids. "
                "Pass input_ids, or insert the images into inputs_embeds and leave them out"
            )
        padding = mask.cpu() if _rows(mask) and mask.ndim == 2 else None
        return Media(self.media, tokens.cpu(), padding)

    def _padded(self, x: Tensor, value: int = 0) -> Tensor:
        """``x [B, S]``, padded with the sequence."""
        return F.pad(x, (0, self.padded - self.length), value=value)


def _of_keys(counted: Tensor | None) -> Tensor | None:
    """A mask of tokens ``[B, S]`` as one of keys."""
    return None if counted is None else rearrange(counted.bool(), "b s -> b 1 1 s")


def _rows(x: Any) -> TypeGuard[Tensor]:
    """True for a tensor that has rows of positions."""
    return isinstance(x, Tensor) and x.ndim > 1


class _Around(ref[nn.Module]):
    """A weak reference to the model around a decoder; in a copy of both, to that of the copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[], nn.Module | None]:
        found = memo.get(id(self()))
        return (lambda: None) if found is None else _Around(found)


class DecoderHook:
    """The hooks of a decoder's forward: they read the batch state, which masks, rotary tables and all layers share."""

    def __init__(
        self, style: ContextParallel, mesh: DeviceMesh, decoder: PreTrainedModel, to_images: set[nn.Module]
    ) -> None:
        self.binding = Binding(style, mesh, describe(decoder))
        before: str = decoder.config._attn_implementation
        self.implementation = "sdpa" if before == NAME else before  # NAME: its configuration is a prepared model's
        """The attention implementation before the model was prepared, for meshes of one rank."""
        self.prepared: str | None = None
        """The attention implementation of the prepared model."""
        parameters = inspect.signature(decoder.forward).parameters
        self.keywords = set(parameters)
        self.passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.modules: set[nn.Module] = set()
        """The modules that were checked when the model was prepared, until its first forward."""
        self.reads_padding = False
        """The states of padding may be read, too: by a head that pools, or by cross-attention."""
        self.long_rotary = prepare_rotary(decoder) > 0
        self.position_maker, self.counts_mask = position_maker(decoder), counts_mask(decoder)
        self.mixers = mixers_of(decoder)
        self.dropping = [stack for stack in decoder.modules() if hasattr(stack, "layerdrop")]
        """Stacks of layers that may skip some in training."""
        routed = not decoder._can_set_attn_implementation() and has_attention(decoder)
        self.direct = direct_attention(decoder) if routed else []
        """Attention modules that call SDPA themselves."""
        written = written_attention(decoder) if routed and not self.direct else []
        self.written = [module for module in written if module not in to_images]
        """Attention modules that write attention out."""
        self.sees_images = bool(to_images)
        """True if modules of the decoder attend to images, which are the states of an encoder."""
        self.compared: set[str] = set()
        """The keys of the meshes whose ranks have compared their tokens."""
        self.given_positions: bool | None = None
        """True if the model around the decoder was given position ids in the call that runs; None: it does not run."""
        self.few = FewTokens(self.binding)
        self.additions_checked = False
        self.known = KnownModules()
        self.own: list[nn.Module] = []
        """Attention modules of users, which have to call attention in the first forward."""
        self.selects = sparse.selects(decoder)
        """True for a decoder with indexers. Its selections are those of one rank of many on one rank, too: without a
        cache it does not run as it did before it was prepared."""
        self.hides_padding = holds(decoder, selected_pools.is_indexer)
        """True for a decoder whose queries select among tokens only, also those of padding behind those of a row."""
        self.adds_mask = holds(decoder, inkling.has_profiles)
        self.selects_blocks = holds(decoder, selected_blocks.is_indexer)
        """True where padding that sees no token has the mean of all values on one device, as by an added mask."""
        self.cross = cross_attention(decoder)
        self.made_mask = False
        """True while a model runs that makes a mask of ones around this decoder (BLIP-2)."""
        self.around: Callable[[], nn.Module | None] = lambda: None
        """The model around this decoder, which has hooks of its own."""
        self.two: SourceTargetHook | None = None
        """The hooks of the encoder-decoder of which this is the decoder."""
        self.decoder: Callable[[], nn.Module | None] = _Around(decoder)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoderHook:
        """The hooks of another model: what is put into it from now on is checked when it runs first."""
        made = memo[id(self)] = type(self).__new__(type(self))
        decoder = self.decoder() if self.additions_checked else None
        known = self.modules if decoder is None else {*decoder.modules()}
        made.modules = copy.deepcopy(known, memo)  # before the others: a reference finds what has been copied
        made.__dict__.update({name: copy.deepcopy(x, memo) for name, x in vars(self).items() if name != "modules"})
        made.additions_checked, made.own = False, []
        return made

    def attach(self, decoder: PreTrainedModel) -> None:
        """Register the hooks, and prepare the modules of the decoder."""
        for mixer in self.mixers:
            hooks = LightningHooks if is_lightning(mixer) else MixerHooks
            hooks(mixer, describe(mixer), mixer_state).attach(mixer)
        if "position_ids" not in self.keywords:
            prepare_positions(decoder)
        prepare_tables(decoder)
        prepare_counting(decoder)
        prepare_biases(decoder)
        if self.direct:
            route(self.direct)
            bias_all_ranks(decoder)
        elif self.written:
            record(decoder, self.written)
        elif has_attention(decoder):
            decoder.set_attn_implementation(NAME)
            reach_copied_layers(decoder, self.implementation)
            request_masks(decoder)
            prepare_latents(decoder)
            sparse.prepare(decoder)
        self.prepared = decoder.config._attn_implementation
        self.modules = {*decoder.modules()}
        decoder.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        decoder.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    @staticmethod
    def share(handler: ContextParallelHandler, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's share of a whole batch, for :func:`hyper_cp.verify`."""
        return prepare_batch(handler, batch)

    @torch.compiler.disable(reason=ON_THE_HOST)
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add ``context_parallel`` to the keywords, and masks and positions that suit it."""
        kwargs = dict(kwargs)
        around, found = self.around(), cache_in(kwargs)
        cache = found if isinstance(found, SplitModelCache) else None
        if cache is None or cache.turn.prompt is not None:  # each new token would wait
            self.known.update(module if around is None else around, [self.binding])
        mesh, documents, offered = begin_call(
            self.binding, module, lambda: (self.binding.active_documents(), forward.offered())
        )
        handed = kwargs.pop("context_parallel", None)
        ready = handed or offered
        ids = args[0] if args else kwargs.get("input_ids")
        forward.refuse_second(self.binding.name, ready, ids, handed is not None)
        forward.refuse_other_mesh(self.binding.name, ready, mesh)
        if ready is not None and ready.media is not None:
            check_inputs(module, ready.media.entries)  # type: ignore[arg-type]
        given, losses = take_documents(kwargs), collecting()
        if around is not None and not is_running(around):  # a KeyboardInterrupt ended its forward without its hooks
            self.given_positions, self.made_mask = None, False
        of_caller, self.given_positions = self.given_positions, None
        on_one_device = self.on_one_device(mesh, (documents, given), ready, kwargs)
        if not on_one_device and (given_since := module.config._attn_implementation) != self.prepared:  # type: ignore[union-attr]
            raise RuntimeError(
                f"{self.binding.name} has attn_implementation={given_since!r}, which was set after prepare_model had "
                f"set {self.prepared!r}. Attention would end at this rank's share of the sequence. Call "
                f"set_attn_implementation({self.prepared!r}); choose another one before prepare_model"
            )
        if on_one_device:
            state: forward.State = OneDevice(self.implementation)
            kwargs |= _whole(ready, _tokens_in(args, kwargs), kwargs)
        elif cache is not None and cache.turn.prompt is None:  # new tokens, which all ranks have
            state = ForwardState(PreparedBatch(), self.binding.style, mesh, frozenset(kwargs), cache=cache)
            if self.direct:
                kwargs["attention_mask"] = no_mask(next(module.parameters()).device)
        else:
            if self.made_mask:
                kwargs.pop("attention_mask", None)
            self._refuse(args, kwargs)
            if mesh.parallel:
                check_dropped_layers(self.dropping)
            if self.known.unchecked:
                check_adapters(module)  # also those that are added to a model that has run
                self.known.unchecked = False
            if not self.additions_checked:
                # What was put into the model since it was prepared.
                check_own_forwards(module, eager=False)  # type: ignore[arg-type]
                check_added(module, self.modules)  # type: ignore[arg-type]
                self.modules = set()
                self.long_rotary |= prepare_rotary(module) > 0
                self.own = own_attention(module) if module._can_set_attn_implementation() else []  # type: ignore[operator]
                self.additions_checked = True
            if around is not None and mesh.parallel and bypassed(around):
                raise RuntimeError(
                    f"{type(around).__name__}.forward(...) was called, which leaves out the hooks of the model: what "
                    "its head reads, and its losses, would be those of this rank's share. Call model(...)"
                )
            tokens = args[0] if args else kwargs.get("input_ids")
            tokens = kwargs["inputs_embeds"] if tokens is None else tokens
            self.binding.positions = tokens.shape[1]
            handler = ContextParallelHandler(mesh.mesh, style_of(self.binding))
            if of_caller is False and ready is None and mesh.parallel and kwargs.get("position_ids") is not None:
                raise ValueError(
                    f"{self.binding.name} got position ids that the model around it has counted, over the "
                    f"{tokens.shape[1]} tokens of this rank's share: the call had none. Tokens of all ranks but the "
                    "first would have wrong positions. Take the batch through prepare_batch, or pass position_ids that "
                    "were split as the tokens are (handler.dispatch, or a buffer of the block)"
                )
            batch = self._batch_state(handler, documents, given, ready, tokens, kwargs).to(tokens.device)
            if batch.padding_counts and not self.hides_padding:
                documents = batch.documents if batch.tokens is None else None
                batch = replace(batch, documents=documents, tokens=None, keys=batch.visible)
            check_padding(module, self.mixers, handler.layout, batch, tokens)
            self._check_eager(module, batch)
            passed = frozenset(kwargs)
            packed = read(batch.documents) if handler.cp.batch.of_samples else None
            if packed is not None and (batch.numbered or kwargs.get("position_ids") is None):
                batch = self._numbered_anew(batch, packed, kwargs)
            samples = packed is not None
            counted, positions = self._complete(handler, tokens, batch, kwargs, samples)
            state = ForwardState(
                batch,
                self.binding.style,
                mesh,
                passed,
                losses,
                cache,
                positions,
                counted,
                whole=partial(handler.combine, documents=batch.documents),
                share=partial(local_share, handler, seq_dim=1, documents=batch.documents),
                implementation=self.implementation,
                samples=samples,
            )
            if self.two is not None:
                state = replace(state, cross=self.cross, source=self.two.source)
            if ready is None and mesh.parallel and handler.cp.key not in self.compared:
                check_dispatched(handler, tokens, self.binding.name)
                self.compared.add(handler.cp.key)
        if self.passes_on:
            kwargs["context_parallel"] = state
        forward.begin(module, state)
        return args, kwargs

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End what ``before`` has begun; also after an exception."""
        state, own = forward.running(), self.own
        forward.end(module)
        if not own or output is None or not isinstance(state, ForwardState) or state.cache is not None:
            return
        callers = {id(x) for x in (*state.callers, module)} if state.callers else set()
        # In graphs calls are not seen. (Modules without a call stay: a forward after the error raises again.)
        self.own = [] if count_compilations() else [x for x in own if id(x) not in callers]
        if without := self.own:
            name = next(name for name, x in module.named_modules() if x is without[0])
            raise RuntimeError(
                f"{f'module {name!r}' if name else 'the decoder'} ({type(without[0]).__name__}) has made no attention "
                "call that context parallelism sees: it computes attention by itself, over this rank's share. Let it "
                "call ALL_ATTENTION_FUNCTIONS.get_interface(...), as the attention of transformers' models does"
            )

    @torch.compiler.disable(reason=ON_THE_HOST)
    def compare(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Compare few tokens with one device, behind the first forward of the model (or of a decoder without one)."""
        self.few.compare(model, _tokens_in(args, kwargs), kwargs)

    def _check_eager(self, module: Any, batch: PreparedBatch) -> None:
        """Warn of labels whose positions see no token, for a model with eager attention; refuse a head that reads
        them all."""
        adds_mask = self.implementation == "eager" or getattr(module.config, "alibi", False) or self.adds_mask
        if not adds_mask and not self.selects_blocks:
            return
        kinds = getattr(module.config, "per_layer_config", None) or [module.config]  # windows of layers may differ
        far = batch.tokens_near if sees_behind(module) else batch.tokens_back
        if far < min(getattr(config, "sliding_window", None) or NONE_BACK for config in kinds):
            return
        name = self.binding.name
        adds = f"{name} adds its mask to scores (attn_implementation='eager', ALiBi or relative biases), and "
        zeros = "On one device the mean of all values is there, under context parallelism zeros, as 'sdpa' has"
        if self.selects_blocks:
            adds, zeros = (
                f"{name} selects blocks of keys, and ",
                f"{zeros}, or in its sparse layers a mean without gradients",
            )
        if self.reads_padding:
            raise NotImplementedError(
                f"{adds}padding that sees no token is read, by a head or by cross-attention. "
                f"{zeros}. Pad rows at their end; give an encoder-decoder an attention_mask of its source"
            )
        warnings.warn(
            f"{adds}labels count at padding that sees no token (the label of the first token behind padding is one: "
            f"padding predicts it). {zeros}: the loss differs a little from that of one device. Set these labels to "
            "-100",
            stacklevel=2,
        )

    def on_one_device(
        self, mesh: StyledMesh, documents: tuple[Tensor | None, ...], ready: PreparedBatch | None, kwargs: Any
    ) -> bool:
        """True if the decoder runs as it did before it was prepared: on a mesh of one rank, if no attention has to
        know of documents or padding, or keeps its largest logits."""
        plain = all(x is None for x in documents) and (ready is None or ready.plain)
        keeps = mesh.mode.max_logits and torch.is_grad_enabled()
        selects = self.selects and not any(kwargs.get(name) for name in ("use_cache", *CACHES))
        return not mesh.parallel and plain and not (keeps or selects)

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1:
            raise TypeError(
                f"{self.binding.name} got {len(args)} positional arguments. The entries of a batch are found by their "
                "names. Pass all but input_ids by keyword"
            )
        if kwargs.get("encoder_hidden_states") is not None and self.two is None and not self.sees_images:
            raise NotImplementedError(
                f"{self.binding.name} got encoder_hidden_states. They are another sequence than the one that "
                "prepare_batch splits. Put ContextParallel styles on its attention modules with parallelize_module"
            )
        cache = [name for name in CACHES if not isinstance(kwargs.get(name), (SplitModelCache, type(None)))]
        if cache:
            raise NotImplementedError(
                f"{self.binding.name} got {cache[0]}, a {type(kwargs[cache[0]]).__name__}. It knows no other ranks. "
                "Pass use_cache=False; to generate call hyper_cp.hf.generate(model, "
                "handler, input_ids), whose cache is split over the ranks"
            )

    def _complete(
        self,
        handler: ContextParallelHandler,
        tokens: Tensor,
        batch: PreparedBatch,
        kwargs: dict[str, Any],
        samples: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add the arguments that the decoder would otherwise make for its local tokens only. Returns the mask
        ``[B, S/n]`` of tokens that are no padding, and their positions ``[S/n]`` in the whole sequence, or with
        ``samples`` in each document."""
        mask, counted = kwargs.get("attention_mask"), batch.counted
        if counted is None:
            counted = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            # Without a mask transformers takes the jumps of local positions for packed sequences.
            # Mixers set padding to zero.
            kwargs["attention_mask"] = no_mask(tokens.device) if self.direct else counted
        padded = batch.tokens is not None or batch.keys is not None
        counts = self.position_maker is not None or (self.counts_mask and padded and not samples)
        if counts and (batch.numbered or kwargs.get("position_ids") is None):
            kwargs["position_ids"] = self._counted(handler, tokens, counted, batch.documents)
        length = tokens.shape[1] * handler.cp.size
        positions = handler.position_ids(length, device=tokens.device, documents=batch.documents, restart=samples)
        if kwargs.get("position_ids") is None and ("position_ids" in self.keywords or self.passes_on):
            kwargs["position_ids"] = positions[None]
        if kwargs.get("use_cache") is None and "use_cache" in self.keywords:
            kwargs["use_cache"] = False
        # Tables of positions need not be longer than the sequence: what is behind it is padding.
        return counted, positions.clamp(max=batch.last_position) if batch.numbered else positions

    def _numbered_anew(self, batch: PreparedBatch, packed: PackedDocuments, kwargs: dict[str, Any]) -> PreparedBatch:
        """A batch of samples without position ids of the caller's: positions will begin anew in each sample."""
        if self.position_maker is not None:
            raise ValueError(
                f"{self.binding.name} makes positions of the ids of its tokens, and would go on counting from one "
                "sample of the micro-batch to the next. Pass position_ids that begin anew in each of them"
            )
        kwargs.pop("position_ids", None)
        longest = max(b - a for row in packed.rows for a, b in pairwise(row))
        return replace(batch, last_position=longest - 1, numbered=False)

    def _counted(
        self, handler: ContextParallelHandler, tokens: Tensor, counted: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Position ids that the decoder makes of the whole batch: RoBERTa counts tokens that are not padding by their
        ids, OPT by the mask. One small gather."""
        maker = self.position_maker
        if maker is None:
            shown = handler.combine(counted.to(torch.int64), 1, documents=documents)
            whole = shown.cumsum(1) * shown - 1
        else:  # of embeddings none is known to be padding
            padding = cast(Any, maker).keywords["padding_idx"]
            ids = tokens if tokens.ndim == 2 else torch.full_like(counted, padding + 1, dtype=torch.int64)
            whole = maker(handler.combine(ids, 1, documents=documents))
        return local_share(handler, whole, 1, documents)

    def _batch_state(
        self,
        handler: ContextParallelHandler,
        block: Tensor | None,
        given: Tensor | None,
        ready: PreparedBatch | None,
        tokens: Tensor,
        kwargs: dict[str, Any],
    ) -> PreparedBatch:
        """The state that ``prepare_batch`` has read, or that is read now, with the documents of the enclosing block."""
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        # What a model around the decoder has read of a batch of prepare_batch is in the batch already.
        padding = padding_mask(mask if ready is None or isinstance(mask, Tensor) else None)
        known = ready is not None and (ready.documents is not None or ready.tokens is not None)
        if (ready is not None and (padding is not None or given is not None)) or (
            block is not None and (known or given is not None)
        ):
            sources = {
                "a batch of prepare_batch, which says what is padding, or that nothing is": ready is not None,
                "an attention_mask": padding is not None,
                "documents as an argument": given is not None,
                "an enclosing handler.documents block": block is not None,
            }
            found = ", ".join(name for name, is_given in sources.items() if is_given)
            raise ValueError(
                f"{self.binding.name} got documents or padding twice ({found}). Only one of them can be right. Put "
                "them into the whole batch for prepare_batch, and pass on what it returns as it is"
            )
        documents = block if given is None else given
        if ready is not None:
            if ready.layout not in (None, handler.layout):
                raise ValueError(
                    f"{self.binding.name} runs with layout={handler.layout!r}. prepare_batch has split the batch as "
                    f"{ready.layout!r}. Make its handler of the style that prepare_model was given"
                )
            if ready.length not in (None, tokens.shape[1]):
                raise ValueError(
                    f"{self.binding.name} got {tokens.shape[1]} tokens, but prepare_batch gave {ready.length} to this "
                    "rank. What is added to the tokens of every rank (virtual tokens of PEFT's prompt tuning, say) is "
                    "not part of the sequence that they share. Add it to the whole batch, before prepare_batch"
                )
            return ready if documents is None else replace(ready, documents=documents)
        last = self._last_position(handler, positions, tokens)
        counted = whole = packed = None
        if padding is not None:
            whole = self._global_mask(handler, padding, tokens.shape[1])
            counted = padding if padding.shape[1] == tokens.shape[1] else local_share(handler, whole, 1, documents)
        elif mask is None and documents is None:
            packed = read_positions(positions, lambda x: handler.combine(x, 1))
        state = attention_state(handler, documents, whole, packed)
        several = documents is not None or state.tokens is None
        return replace(state, last_position=last, counted=counted, visible=_of_keys(whole), packed=several)

    def _last_position(self, handler: ContextParallelHandler, positions: Tensor | None, tokens: Tensor) -> int | Tensor:
        """The largest position of all ranks, if a rotary embedding of this decoder depends on it."""
        if positions is None or not self.long_rotary:
            return tokens.shape[1] * handler.cp.size - 1
        return by_rank(handler.mesh, positions.max()[None]).max()

    def _global_mask(self, handler: ContextParallelHandler, mask: Tensor, local: int) -> Tensor:
        length = local * handler.cp.size
        if mask.shape[1] not in (local, length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}. It has a value for each of the {local} local tokens or "
                f"of all {length} tokens. Pass [B, {local}], dispatched like the tokens, or [B, {length}]"
            )
        return mask if mask.shape[1] == length else handler.combine(mask, 1)


def _tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tokens that a model was called with, or their embeddings; None if it got neither."""
    return next((x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)


def _whole(ready: PreparedBatch | None, tokens: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords that ``prepare_batch`` has left out or added, as a model on one device gets them: the padding mask, and
    no position ids if the batch had none. (None where others have added tokens, whose mask is theirs to make.)"""
    if ready is None or tokens is None or ready.length != tokens.shape[1]:
        return {}
    if any(kwargs.get(name) is not None for name in CACHES):
        return {}
    made: dict[str, Any] = {}
    if ready.counted is not None and kwargs.get("attention_mask") is None:
        made["attention_mask"] = ready.counted.to(tokens.device)
    if ready.numbered and "position_ids" in kwargs:
        made["position_ids"] = None
    return made


class HeadHook:
    """The hooks of a model around its decoder: they check what its head would do, and correct its router loss."""

    def __init__(self, decoder: DecoderHook) -> None:
        self.decoder = decoder
        self.formula_checked = False
        self.loss = LossCheck()

    @torch.compiler.disable(reason=ON_THE_HOST)
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse arguments that the head would apply to this rank's share only. A model that makes masks of the types
        of tokens is given those of the whole sequence."""
        cache, kept = cache_in(kwargs), {}
        if isinstance(cache, SplitModelCache):
            cache.check(model, self.decoder.binding.active.mesh)
            kwargs = {**kwargs, "input_ids": args[0]} if args else dict(kwargs)
            cache.read_mask(kwargs.get("attention_mask"), len(check_entries({**kwargs, "position_ids": None})))
            if router_loss.requested(model, kwargs):
                kwargs["output_router_logits"] = False  # nobody trains on new tokens
            args, kept = args[1:], {name: kwargs.pop(name) for name in ("logits_to_keep",) if name in kwargs}
            if cache.get_seq_length() == 0:
                kwargs = self._begin(model, cache, kwargs, kept)
            if cache.get_seq_length() == 0:
                kwargs, kept = self._prompt(cache, kwargs, kept)
            elif isinstance(mask := kwargs.get("attention_mask"), Tensor):
                cache.turn.new_mask = mask[:, -check_entries({**kwargs, "position_ids": None}).shape[1] :]
            cache.running = True
        ready = kwargs.get("context_parallel")
        self.decoder.given_positions = kwargs.get("position_ids") is not None
        forward.offer(model, ready)
        if ready is not None or self.decoder.binding.active.parallel:
            check_ignored(model, kwargs)
        if self.decoder.binding.active.parallel:
            check_labels(model, kwargs)
            check_inputs(model, kwargs)
            self.loss.begin(model, ready, kwargs, self.decoder.binding.active.views[0])
            if router_loss.requested(model, kwargs):
                router_loss.check(model, kwargs, args[0] if args else kwargs.get("input_ids"))
        elif ready is not None and kwargs.get("shift_labels") is not None:
            check_kind_of_loss(model, kwargs)
        tokens = _tokens_in(args, kwargs)
        made: dict[str, Any] = dict(kept)
        self.decoder.made_mask = ready is not None and kwargs.get("attention_mask") is None and makes_mask(model)
        mesh = self.decoder.binding.active
        documents = mesh.views[0].batch.documents, take_documents(dict(kwargs))
        if alone := self.decoder.on_one_device(mesh, documents, ready, kwargs):
            forward.begin(model, OneDevice(self.decoder.implementation))  # a model around its decoder makes masks, too
        if ready is not None and tokens is not None and masks_by_types(model):
            made |= {name: x.to(tokens.device) for name, x in ready.token_types.items() if name in kwargs}
            makes = len(made) > len(kept) or owner_of(model, decoder_of(model)) is not None  # masks, not its decoder
            if makes and kwargs.get("attention_mask") is None:
                # A mask of ones: without any, transformers takes the jumps of local positions for packed sequences.
                made["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
            if not alone and not ready.token_types and always_overlays(model) and kwargs.get("attention_mask") is None:
                made["attention_mask"] = create_masks_for_generate(model.config, tokens, None, None)
        if alone:
            made = {**_whole(ready, tokens, kwargs), **made}
        return (args, {**kwargs, **made}) if made or isinstance(cache, SplitModelCache) else None

    @staticmethod
    def _begin(model: Any, cache: SplitModelCache, kwargs: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """The arguments for what is still to compute of a prompt. If the ranks share a part of its tokens only, the
        model has run over this part, and all ranks compute the others as new tokens."""
        length = check_entries({**kwargs, "position_ids": None}).shape[1]
        if (shared := cache.shared(length)) == length:
            return kwargs
        rows = {name: x for name in PROMPT if (x := kwargs.get(name)) is not None}
        dims = {name: -1 if name == "position_ids" else 1 for name in rows}
        model(**{**kwargs, **kept, **{name: x.narrow(dims[name], 0, shared) for name, x in rows.items()}})
        whole = rows.pop("attention_mask", None)  # which tells new tokens about those before them, too
        rest = {name: x.narrow(dims[name], shared, length - shared) for name, x in rows.items()}
        return {**kwargs, **rest, **({} if whole is None else {"attention_mask": whole})}

    def _prompt(
        self, cache: SplitModelCache, kwargs: dict[str, Any], kept: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's share of a prompt, and the row of the logits to compute."""
        whole = {name: kwargs[name] for name in PROMPT if kwargs.get(name) is not None}
        others = {name: x for name, x in kwargs.items() if name not in PROMPT}
        tokens = check_entries(whole)
        local = prepare_batch(cache.handler, whole)
        cache.begin_prompt(local["context_parallel"], tokens.shape[1], "attention_mask" in whole)
        rank, row = cache.last
        at = torch.tensor([row if cache.handler.cp.rank == rank else 0], device=tokens.device)
        return {**others, **local}, dict.fromkeys(kept, at)

    @torch.compiler.disable(reason=ON_THE_HOST)
    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Make the router loss that of the whole sequence."""
        forward.offer(model, None)
        self.decoder.made_mask = False
        forward.end(model)
        mesh, cache = self.decoder.binding.active, cache_in(kwargs)
        if isinstance(cache, SplitModelCache):
            prompt, cache.turn.prompt, cache.turn.new_mask = cache.turn.prompt, None, None
            if output is not None:
                cache.running = False
                output.logits = (cache.of_first_rank if prompt is None else cache.hand_round)(output.logits)
        ready, mask = kwargs.get("context_parallel"), kwargs.get("attention_mask")
        if mesh.parallel:
            self.loss.end(model, kwargs, output, mesh.mesh, mesh.views[0])
        padded = ready is not None and ready.counted is not None  # on one rank, too, the model has not seen the mask
        if not (mesh.parallel or padded) or not isinstance(getattr(output, "aux_loss", None), Tensor):
            return
        if not self.formula_checked:
            router_loss.check_formula(model, output, mask)
            self.formula_checked = True
        router_loss.share(model, output, mask if ready is None else ready.counted, mesh.mesh)
