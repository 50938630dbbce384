"""The hooks of a decoder that ``prepare_model`` has prepared: the entrance and the end of its forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..._torch.modules import bypassed, count_compilations, is_running
from ...data.packing import NONE_BACK, PreparedBatch, take_documents
from ...data.sharding import local_share
from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding, StyledMesh, describe
from ...module.mixers.hooks import MixerHooks
from ...module.model import KnownModules, begin_call
from ...schedule.documents import read
from ...style import ContextParallel, style_of
from ..adapters import check_adapters
from . import forward, inkling, selected_blocks, selected_pools, sparse
from .batch import prepare_batch
from .checks import (
    check_added,
    check_dispatched,
    check_dropped_layers,
    check_inputs,
    check_own_forwards,
    check_padding,
    has_attention,
    mixers_of,
    own_attention,
    sees_behind,
)
from .decoding import SplitModelCache
from .few_tokens import FewTokens
from .forward import ForwardState, OneDevice, mixer_state
from .forward_batch import BatchReader
from .indexer_losses import collecting
from .latents import NAME, prepare_latents
from .masks import adds_mask, request_masks
from .modules import (
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
from .relative import prepare_biases
from .seams import CACHES, cache_in, holds
from .two_sequences import SourceTargetHook, cross_attention
from .written import bias_all_ranks, record, written_attention

ON_THE_HOST = (
    "A prepared model reads its batch on the host, at the entrance of the decoder, and cannot be one compiled graph. "
    "Compile its layers with fullgraph=True, or the model without it"
)
"""The reason for which hooks run outside of graphs. (Their code would mostly be traced, but documents have no fake.)"""


class Around(ref[nn.Module]):
    """A weak reference to the model around a decoder; in a copy of both, to that of the copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[], nn.Module | None]:
        found = memo.get(id(self()))
        return (lambda: None) if found is None else Around(found)


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
        self.modules: set[nn.Module] = set()
        """The modules that were checked when the model was prepared, until its first forward."""
        self.reads_padding = False
        """The states of padding may be read, too: by a head that pools, or by cross-attention."""
        self.mixers = mixers_of(decoder)
        self.dropping = [stack for stack in decoder.modules() if hasattr(stack, "layerdrop")]
        """Stacks of layers that may skip some in training."""
        self.attends = has_attention(decoder)
        """False for a model of recurrences alone."""
        routed = not decoder._can_set_attn_implementation() and self.attends
        self.direct = direct_attention(decoder) if routed else []
        """Attention modules that call SDPA themselves."""
        self.reader = BatchReader(self.binding, decoder, bool(self.direct))
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
        """True for a decoder with indexers. On one rank the selections of a batch of ``prepare_batch`` are those of one
        rank of many, too: without a cache it does not run as it did before it was prepared."""
        self.hides_padding = holds(decoder, selected_pools.is_indexer)
        """True for a decoder whose queries select among tokens only, also those of padding behind those of a row."""
        self.adds_mask = holds(decoder, inkling.has_profiles) or holds(decoder, adds_mask)
        self.selects_blocks = holds(decoder, selected_blocks.is_indexer)
        """True where padding that sees no token has the mean of all values on one device, as by an added mask."""
        self.cross = cross_attention(decoder)
        self.made_mask = False
        """True while a model runs that makes a mask of ones around this decoder (BLIP-2)."""
        self.given_mask: Tensor | None = None
        """The share of the padding mask that the model around this decoder was given for its outputs (ColPali)."""
        self.around: Callable[[], nn.Module | None] = lambda: None
        """The model around this decoder, which has hooks of its own."""
        self.two: SourceTargetHook | None = None
        """The hooks of the encoder-decoder of which this is the decoder."""
        self.decoder: Callable[[], nn.Module | None] = Around(decoder)

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
        if "position_ids" not in self.reader.keywords:
            prepare_positions(decoder)
        prepare_tables(decoder)
        prepare_counting(decoder)
        prepare_biases(decoder)
        if self.direct:
            route(self.direct)
            bias_all_ranks(decoder)
        elif self.written:
            record(decoder, self.written)
        elif self.attends:
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
    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add ``context_parallel`` to the keywords, and masks and positions that suit it."""
        kwargs = dict(kwargs)
        around, found = self.around(), cache_in(kwargs)
        cache = found if isinstance(found, SplitModelCache) else None
        new_tokens = cache is not None and cache.turn.prompt is None  # which all ranks have
        if not new_tokens:  # each of them would wait
            self.known.update(module if around is None else around, [self.binding])
        mesh, block, offered = begin_call(
            self.binding, module, lambda: (self.binding.active_documents(), forward.offered())
        )
        handed = kwargs.pop("context_parallel", None)
        ready = handed or offered
        ids = args[0] if args else kwargs.get("input_ids")
        forward.refuse_second(self.binding.name, ready, ids, handed is not None)
        forward.refuse_other_mesh(self.binding.name, ready, mesh)
        if ready is not None and ready.media is not None:
            check_inputs(module, ready.media.entries)
        documents = block, take_documents(kwargs)
        if around is not None and not is_running(around):  # a KeyboardInterrupt ended its forward without its hooks
            self.given_positions, self.made_mask, self.given_mask = None, False, None
        of_caller, self.given_positions = self.given_positions, None
        if self.on_one_device(mesh, documents, ready, kwargs):
            state: forward.State = OneDevice(self.implementation)
            kwargs |= as_one_device(ready, tokens_in(args, kwargs), kwargs)
        else:
            self._check_implementation(module)
            if new_tokens:
                state = ForwardState(PreparedBatch(), self.binding.style, mesh, frozenset(kwargs), cache=cache)
                if self.direct:
                    kwargs["attention_mask"] = no_mask(next(module.parameters()).device)
            else:
                self._check_call(module, around, mesh, args, kwargs)
                self._check_counted_positions(of_caller, ready, mesh, kwargs)
                state = replace(self._of_share(module, mesh, documents, ready, args, kwargs), cache=cache)
        if self.reader.passes_on:
            kwargs["context_parallel"] = state
        forward.begin(module, state)
        return args, kwargs

    def _of_share(
        self,
        module: Any,
        mesh: StyledMesh,
        documents: tuple[Tensor | None, Tensor | None],
        ready: PreparedBatch | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ForwardState:
        """The state of a forward over this rank's share, whose arguments are completed."""
        tokens = tokens_in(args, kwargs)
        self.binding.positions = tokens.shape[1]
        handler = ContextParallelHandler(mesh.mesh, style_of(self.binding))
        batch = self.reader.read(handler, *documents, ready, tokens, kwargs).to(tokens.device)
        if batch.padding_counts and not self.hides_padding:
            table = batch.documents if batch.tokens is None else None
            batch = replace(batch, documents=table, tokens=None, keys=batch.visible)
        self.binding.documents = batch.documents
        check_padding(module, self.mixers, handler.layout, batch, tokens)
        self._check_eager(module, batch)
        passed = frozenset(kwargs)
        packed = read(batch.documents) if handler.cp.batch.of_samples else None
        if packed is not None and (batch.numbered or kwargs.get("position_ids") is None):
            batch = self.reader.number_samples(batch, packed, kwargs)
        counted, positions = self.reader.complete(handler, tokens, batch, kwargs, packed is not None)
        if ready is None and mesh.parallel and handler.cp.key not in self.compared:
            check_dispatched(handler, tokens, self.binding.name)
            self.compared.add(handler.cp.key)
        return ForwardState(
            batch,
            self.binding.style,
            mesh,
            passed,
            losses=collecting(),
            positions=positions,
            counted=counted,
            whole=partial(handler.combine, documents=batch.documents),
            share=partial(local_share, handler, seq_dim=1, documents=batch.documents),
            cross=frozenset() if self.two is None else self.cross,
            source=None if self.two is None else self.two.source,
            implementation=self.implementation,
            samples=packed is not None,
        )

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
        self.few.compare(model, tokens_in(args, kwargs), kwargs)

    def _check_eager(self, module: Any, batch: PreparedBatch) -> None:
        """Warn of labels whose positions see no token, for a model with eager attention; refuse a head that reads
        them all."""
        eager = self.implementation == "eager" and self.attends
        adds_mask = eager or getattr(module.config, "alibi", False) or self.adds_mask
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
        cached = any(kwargs.get(name) for name in ("use_cache", *CACHES))
        selects = self.selects and not cached and (ready is not None or collecting() is not None)
        return not mesh.parallel and plain and not (keeps or selects)

    def _check_implementation(self, module: Any) -> None:
        given: str = module.config._attn_implementation
        if given != self.prepared:
            raise RuntimeError(
                f"{self.binding.name} has attn_implementation={given!r}, which was set after prepare_model had "
                f"set {self.prepared!r}. Attention would end at this rank's share of the sequence. Call "
                f"set_attn_implementation({self.prepared!r}); choose another one before prepare_model"
            )

    def _check_call(
        self,
        module: Any,
        around: nn.Module | None,
        mesh: StyledMesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Check the arguments of a forward over shares, and what was put into the model since the last one."""
        made, given = kwargs.get("attention_mask"), self.given_mask
        if isinstance(made, Tensor) and made.ndim == 2:  # no mask or request of a model between
            handed_on = given is not None and (
                made is given or (made.shape == given.shape and torch.equal(made, given))
            )
            if self.made_mask or handed_on:
                del kwargs["attention_mask"]
        self._check_arguments(args, kwargs)
        if mesh.parallel:
            check_dropped_layers(self.dropping)
        if self.known.unchecked:
            check_adapters(module)  # also those that are added to a model that has run
            self.known.unchecked = False
        if not self.additions_checked:
            # What was put into the model since it was prepared.
            check_own_forwards(module, eager=False)
            check_added(module, self.modules)
            self.modules = set()
            self.reader.long_rotary |= prepare_rotary(module) > 0
            self.own = own_attention(module) if module._can_set_attn_implementation() else []
            self.additions_checked = True
        if around is not None and mesh.parallel and bypassed(around):
            raise RuntimeError(
                f"{type(around).__name__}.forward(...) was called, which leaves out the hooks of the model: what "
                "its head reads, and its losses, would be those of this rank's share. Call model(...)"
            )

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def _check_counted_positions(
        self, of_caller: bool | None, ready: PreparedBatch | None, mesh: StyledMesh, kwargs: dict[str, Any]
    ) -> None:
        if of_caller is False and ready is None and mesh.parallel and kwargs.get("position_ids") is not None:
            raise ValueError(
                f"{self.binding.name} got position ids that the model around it has counted, over the tokens of this "
                "rank's share: the call had none. Tokens of all ranks but the first would have wrong positions. Take "
                "the batch through prepare_batch, or pass position_ids that were split as the tokens are "
                "(handler.dispatch, or a buffer of the block)"
            )


def tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tokens that a model was called with, or their embeddings; None if it got neither."""
    return next((x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)


def as_one_device(ready: PreparedBatch | None, tokens: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
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
