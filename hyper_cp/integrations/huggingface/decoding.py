"""Generation with a prepared model: a cache of transformers whose layers are split over the ranks of the mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ...data.collectives import by_rank
from ...data.packing import PreparedBatch
from ...handler import ContextParallelHandler
from ...mesh.agreement import digest_of_tensor
from ...module.mixers.calls import gives_state
from ...ops.decoding import decode_attention
from ...ops.split_cache import SplitCache, rank_and_row
from ...ops.writes import writes
from ...schedule.documents import read
from ...schedule.lookup import resolve
from ...schedule.ranges import placed
from .checks import decoder_of, mixers_of
from .latents import as_latents, hands_on_latents
from .media import owner_of
from .seams import holds
from .selected import has_indexer_seam

REFUSED = {
    "assistant_model": "The cache does not forget tokens that were rejected",
    "prompt_lookup_num_tokens": "The cache does not forget tokens that were rejected",
    "max_time": "Clocks of ranks differ, and one would stop while the others wait for it",
    "cache_implementation": "The cache is the one that is split over the ranks",
    "guidance_scale": "It runs the model on a second prompt, without this cache",
    "output_hidden_states": "Those of the prompt are shares of ranks, with padding",
    "output_attentions": "No rank has the weights of all keys",
}
"""Arguments of ``generate`` that are refused, and the reasons."""

DROPPED = "cache_implementation", "hybrid"
"""A value that generation configs of the Hub have (Gemma 2 and 3), and that transformers takes for none."""


@dataclass
class Turn:
    """The forward that a cache is in, for its layers. (Layers that held the cache itself would keep all keys in memory
    until Python looks for cycles.)"""

    handler: ContextParallelHandler
    latents: bool
    prompt: dict[str, Any] | None = None
    """In the forward of the prompt: the arguments of ``SplitCache.fill``."""
    places: list[list[int]] = field(default_factory=list)
    """The first row, start and stop of each range of the prompt on this rank."""
    new_mask: Tensor | None = None
    """The padding mask ``[B, new tokens]`` of other forwards."""

    def last_rows(self, x: Tensor, width: int, length: int) -> Tensor:
        """The last rows ``[B, C, width]`` of a prompt of this length, zero before its first token, on every rank, of a
        tensor whose share ``[B, C, S/n]`` this rank has. One small gather;
        each row comes from one rank, and others add zeros."""
        first, rows = length - width, x.new_zeros(*x.shape[:2], width)
        for row, start, stop in self.places:
            if (begin := max(start, first)) < stop:
                rows[..., begin - first : stop - first] = x[..., row + begin - start : row + stop - start]
        return by_rank(self.handler.mesh, rows).sum(0)


class SplitLayer(CacheLayerMixin):
    """One layer of the cache. Lengths that models read from it are global."""

    def __init__(self, turn: Turn, window: int | None) -> None:
        super().__init__()
        self.turn, self.window, self.is_sliding = turn, window, window is not None
        self.reset()

    def reset(self) -> None:
        handler = self.turn.handler
        bounds = None if self.window is None else (self.window - 1, 0)
        self.split = SplitCache(handler.cp, layout=handler.layout, window=bounds, latents=self.turn.latents)
        self.index = SplitCache(handler.cp, layout=handler.layout, latents=True)
        """The keys of the layer's indexer, if it has one."""
        self.given: tuple[Callable[[], Any], Callable[[], Any]] = tuple, tuple
        """The keys and values that were added last, as long as somebody holds them."""
        self.writes = 0, 0
        """The numbers of writes to them at that time."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep them, and return them: attention reads the cache itself."""
        if self.turn.prompt is not None:
            self.split.fill(key_states, value_states, **self.turn.prompt)
        else:
            self.split.append(key_states, value_states, attention_mask=self.turn.new_mask)
        self.given, self.writes = (ref(key_states), ref(value_states)), (writes(key_states), writes(value_states))
        return key_states, value_states

    def update_indexer(self, keys: Tensor) -> SplitCache:
        """Keep the keys ``[B, S, D]`` of an indexer, and return all that are kept."""
        parts = keys.unsqueeze(1).chunk(2, 3)
        if self.turn.prompt is not None:
            self.index.fill(*parts, **self.turn.prompt)
        else:
            self.index.append(*parts, attention_mask=self.turn.new_mask)
        return self.index

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.split.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.split.length

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in (self.split, self.index):
            cache.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)


class StateLayer(LinearAttentionLayer):
    """The states of one recurrent layer, which every rank has: only the prompt's are made by all ranks together."""

    def __init__(self, turn: Turn, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.turn = turn

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keep the last rows ``[B, C, width]`` of the sequence, of which the prompt's share ``[B, C, S/n]`` may have
        some. (The recurrent state of a prompt is that of all ranks already.)"""
        if self.turn.prompt is None:
            found: Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
            return found
        if conv_kernel_size is None:
            raise NotImplementedError(
                "a recurrent layer does not tell its cache the width of its convolution, so the rows to keep of a "
                "prompt are unknown. Generate in context_parallel_mesh(model, a mesh of one rank)"
            )
        last = self.turn.last_rows(conv_states, conv_kernel_size, self.turn.prompt["length"])
        super().update_conv_state(last, state_idx, conv_kernel_size, **kwargs)
        return conv_states

    @property
    def nbytes(self) -> int:
        """Bytes of memory on this rank."""
        return sum(x.nbytes for x in (*self.conv_states.values(), *self.recurrent_states.values()) if x is not None)


class SplitModelCache(Cache):
    """The cache of a prepared model, see :func:`hyper_cp.integrations.transformers.generate`."""

    def __init__(self, handler: ContextParallelHandler, model: Any) -> None:
        self.handler = handler
        self.turn = Turn(handler, any(hands_on_latents(x) for x in model.modules()))
        layers = [self._layer(layer) for layer in _layers(model)]
        self._split = [x for x in layers if isinstance(x, SplitLayer)]
        self._states = [x for x in layers if isinstance(x, StateLayer)]
        super().__init__(layers=layers)
        self.last: tuple[int, int] = 0, 0
        """The rank that holds the last token of the prompt, and its row there."""
        self.begins, self.mask = True, torch.ones(1, 0, dtype=torch.bool, device="cpu")
        """True up to the first forward of a call of ``generate``; the mask of all tokens in the last forward."""
        self.running = False
        """True from the beginning of a forward to its end: after an exception, layers hold different tokens."""

    def _layer(self, layer: Any) -> Any:
        """Make the layer that keeps on the ranks what a layer of a cache keeps on one device."""
        if isinstance(layer, LinearAttentionLayer):
            return StateLayer(self.turn, layer.number_of_states)
        if isinstance(layer, DummyLayer):  # it attends to the keys of an earlier layer
            return layer
        return SplitLayer(self.turn, getattr(layer, "sliding_window", None))

    @property
    def nbytes(self) -> int:
        """Bytes of memory on this rank."""
        split = sum(layer.split.nbytes + layer.index.nbytes for layer in self._split)
        return split + sum(layer.nbytes for layer in self._states)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, as of transformers' own caches."""
        super().batch_select_indices(indices)
        self.mask = self.mask if len(self.mask) == 1 else self.mask[indices.to(self.mask.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        rows = next((x for layer in self._split for x in layer.split.held()[0]), self.mask)
        self.batch_select_indices(torch.arange(len(rows), device=rows.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise unless nothing is to be removed."""
        if tokens_to_remove:
            raise NotImplementedError(
                f"crop({tokens_to_remove}) of a cache that is split over ranks is not supported. Each rank would have "
                "to drop other rows. Copy the cache (copy.deepcopy) before the tokens that are to go"
            )

    def check(self, model: nn.Module, mesh: Any) -> None:
        """Raise unless a forward of the model on this mesh may use the cache."""
        name = type(model).__name__
        if model.training or torch.is_grad_enabled():
            what = "in training mode" if model.training else "with gradients enabled"
            raise RuntimeError(
                f"{name} runs with a split cache {what}. Tokens are generated without dropout and without a backward. "
                "Call model.eval(), and generate under torch.no_grad()"
            )
        if self.handler.mesh != mesh:
            raise ValueError(
                f"{name} runs on the mesh {mesh}, but the cache lies on {self.handler.mesh}. Other ranks hold its "
                "keys. Make a new cache after another mesh has become active"
            )
        if self.running:
            raise RuntimeError(
                f"{name} got a split cache in whose last forward an exception was raised. Its layers hold different "
                "tokens. Begin with a new cache: leave past_key_values out"
            )

    def read_mask(self, mask: Any, rows: int) -> None:
        """Read the padding mask ``[B, cached and new tokens]`` of a forward; None: nothing is padding. That of a
        further turn may hide tokens in the cache (padding behind the end of a text), as on one device."""
        length, begins, old = self.get_seq_length(), self.begins, self.mask
        mask = mask if isinstance(mask, Tensor) else old.new_ones(rows, length + 1)
        self.begins, self.mask = False, max(mask, old, key=lambda x: x.shape[1])
        if not begins:
            return
        mask, old = mask != 0, old.to(mask.device) != 0
        if (ended := mask.any(1) & ~mask[:, -1]).any():
            raise ValueError(
                f"attention_mask ends with padding in rows {ended.nonzero().flatten().tolist()}. New tokens follow the "
                "last position, whose logits are those of padding. Pad shorter prompts on the left"
            )
        if len(old) not in (1, rows):
            return  # a cache of other rows, which it refuses itself
        old, new = F.pad(old, (0, length - old.shape[1]), value=True).expand(rows, -1), mask[:, :length]
        if (new & ~old).any():
            raise ValueError(
                "attention_mask shows positions that were padding when they came into the cache. What it keeps of them "
                "is not that of tokens. Pass the mask of the turn before, with 1 for each further token"
            )
        if not torch.equal(new, old):
            for cache in (x for layer in self._split for x in (layer.split, layer.index) if x.length):
                cache.show(new)

    def shared(self, length: int) -> int:
        """The tokens of a prompt that the ranks share; all compute the others, as new tokens. States must not run
        through padding at the end, so with recurrent layers they are as many as split evenly."""
        multiple = self.handler.padded_length(1)
        if self._states and length < multiple:
            raise ValueError(
                f"the prompt has {length} tokens. With recurrent layers, layout={self.handler.layout!r} and "
                f"{self.handler.cp.size} ranks it needs {multiple} at least, so that each rank has an equal part. Use "
                "fewer ranks (context_parallel_mesh)"
            )
        return length - length % multiple if self._states else length

    def begin_prompt(self, state: PreparedBatch, length: int, padded: bool) -> None:
        """Begin the forward of a prompt of ``length`` tokens, which the ranks share."""
        if self.handler.cp.batch.documents is not None:
            raise NotImplementedError(
                "a prompt is read inside a handler.documents block. New tokens go on with one text, and would see all "
                "documents. Leave the block, and pass each document as a row of the batch, padded on the left"
            )
        ranks, share = self.handler.cp.size, state.length or 0
        counted = None if state.counted is None or not padded else state.counted
        self.turn.prompt = {"length": length, "documents": state.documents, "attention_mask": counted}
        resolved = resolve(self.handler.layout, ranks, share * ranks, read(state.documents))
        self.last, self.turn.places = (
            rank_and_row(resolved, length - 1),
            placed(resolved.ranges(self.handler.cp.rank)).tolist(),
        )

    def hand_round(self, logits: Tensor) -> Tensor:
        """The logits ``[B, 1, V]`` of the last token of the prompt, which one rank has."""
        rank, row = self.last
        own = logits if logits.shape[1] == 1 else logits[:, row : row + 1]
        return by_rank(self.handler.mesh, own.contiguous())[rank]

    def of_first_rank(self, logits: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of new tokens whose last row is that of the first rank. Every rank has computed them,
        but kernels that each process tunes for itself add up in other orders: a token might then differ."""
        last = by_rank(self.handler.mesh, logits[:, -1:].contiguous())[0]
        return last if logits.shape[1] == 1 else torch.cat((logits[:, :-1], last), 1)

    def layer_of(self, module: nn.Module, key: Tensor, value: Tensor) -> SplitLayer:
        """The layer that was given these keys and values. Raises if there is none: new tokens attend to the cache."""
        layer = next((x for x in self._split if x.given[0]() is key and x.given[1]() is value), None)
        if layer is None or layer.writes != (writes(key), writes(value)):
            raise NotImplementedError(
                f"{type(module).__name__} attends to other keys and values than it puts into its cache: it changes "
                "them in between. A cache that is split over ranks is attended as it is. Generate in "
                "context_parallel_mesh(model, a mesh of one rank)"
            )
        return layer

    def attend(
        self, module: Any, layer: SplitLayer, query: Tensor, key: Tensor, window: int | None, options: dict[str, Any]
    ) -> Tensor:
        """Attention ``[B, T, H, D]`` of new tokens to a layer. ``window``: that of the mask of the module."""
        if layer.window != window:
            raise NotImplementedError(
                f"{type(module).__name__} attends with a window of {window}, but its layer of the cache has "
                f"{layer.window}. Only one of them can be meant. Generate without prepare_model, or in "
                "context_parallel_mesh(model, a mesh of one rank)"
            )
        given: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
        if hands_on_latents(module):
            found = as_latents(module, key)
            if found is None:
                raise NotImplementedError(
                    f"{type(module).__name__} makes keys of latents in a layer whose weight cannot be read (quantized, "
                    "say). The cache holds latents. Generate in context_parallel_mesh(model, a mesh of one rank)"
                )
            given |= {"weight": found[1], "bias": found[2]}
        if (indices := options.get("indices")) is not None:
            given["selected"] = indices.unsqueeze(1)
        out = decode_attention(query, layer.split, enable_gqa=True, sinks=options.get("s_aux"), **given)
        return out.transpose(1, 2).contiguous()


def _layers(model: Any) -> list[Any]:
    """The layers of a model's cache on one device. Raises unless all keep keys and values of attention, or states that
    the routed functions return."""
    decoder = decoder_of(model)
    own = {*inspect.signature(type(model).generate).parameters}
    if owner_of(model, decoder) is not None or own & {"pixel_values", "input_features"}:
        raise NotImplementedError(
            f"generate got a {type(model).__name__}, a model of images and text. model.generate encodes images before "
            "the forward that would share them out, and counts positions after them. Generate in "
            "context_parallel_mesh(model, a mesh of one rank)"
        )
    config = decoder.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    kinds = list(getattr(config, "layer_types", None) or ())
    known: list[type] = [DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer]
    if holds(decoder, has_indexer_seam):
        known.append(DynamicIndexedLayer)
    others = {type(layer).__name__ for layer in layers if type(layer) not in known}
    others |= {f"layers of type {kind}" for kind in kinds if "chunked" in kind}
    others |= {type(mixer).__name__ for mixer in mixers_of(decoder) if not gives_state(type(mixer))}
    if others:
        raise NotImplementedError(
            f"{type(model).__name__} keeps other things than keys and values between tokens: "
            f"{', '.join(sorted(others))}. States of other recurrences than delta rules, keys of other indexers and "
            "chunks are not kept by ranks yet. Generate in context_parallel_mesh(model, a mesh of one rank)"
        )
    return layers


def check_arguments(model: Any, tokens: Any, kwargs: dict[str, Any]) -> None:
    """Raise for arguments of ``generate`` that do not go with a split cache."""
    settings = [
        x for x in (kwargs.get("generation_config"), getattr(model, "generation_config", None)) if x is not None
    ]
    chunk = next((x for of in (kwargs, *map(vars, settings)) if (x := of.get("prefill_chunk_size"))), None)
    if chunk and mixers_of(decoder_of(model)) and _has_padding(model, tokens, kwargs.get("attention_mask")):
        raise NotImplementedError(
            f"generate got prefill_chunk_size={chunk} and a prompt with padding, and {type(model).__name__} has "
            "recurrent layers. A chunk that is padding in some row, or ends in a single token, would let padding into "
            "their states. Leave prefill_chunk_size out: the prompt is split over the ranks already"
        )
    for name, reason in REFUSED.items():
        given = kwargs.get(name), *(getattr(x, name, None) for x in settings)
        if any(x is not None and x is not False and (name, x) != DROPPED for x in given):
            raise NotImplementedError(
                f"generate got {name}, which does not go with a cache that is split over ranks. {reason}. Leave it out"
            )
    if model.training:
        raise RuntimeError(
            f"{type(model).__name__} is in training mode. Dropout would differ between ranks. Call model.eval()"
        )
    cached = (kwargs.get("use_cache"), *(getattr(x, "use_cache", None) for x in settings))
    if next((x for x in cached if x is not None), True) is False:
        raise ValueError(
            "generate got use_cache=False, as an argument or in a generation config. Every token would need a forward "
            "of the whole sequence. Pass use_cache=True"
        )


def _has_padding(model: Any, tokens: Any, mask: Any) -> bool:
    """True if a mask hides something, or (without one) if generate would make one that does, of the id of padding."""
    hidden = mask == 0 if isinstance(mask, Tensor) else tokens == getattr(model.config, "pad_token_id", None)
    return isinstance(hidden, Tensor) and bool(hidden.any())


def compare_prompts(handler: ContextParallelHandler, tokens: Any, kwargs: dict[str, Any]) -> None:
    """Raise on every rank if the ranks do not ask for the same: one entry in the store."""
    tensors = {"input_ids": tokens, **kwargs}
    found = sorted((name, digest_of_tensor(x)) for name, x in tensors.items() if isinstance(x, Tensor))
    plain = sorted((name, str(x)) for name, x in kwargs.items() if _is_plain(x))
    if (config := kwargs.get("generation_config")) is not None:
        plain.append(("generation_config", config.to_json_string()))
    handler.cp.agree("batch", (("batch", str((found, plain))),), "generate", always=True)


def _is_plain(x: Any) -> bool:
    """True for a value that has the same text on every rank, or a list of such."""
    if isinstance(x, (list, tuple)):
        return all(_is_plain(part) for part in x)
    return isinstance(x, (bool, int, float, str, type(None)))


@contextmanager
def one_random_state(handler: ContextParallelHandler, device: torch.device) -> Iterator[None]:
    """Give all ranks the random state of the first, so that they draw the same tokens. Ranks that had another one get
    it back; the others remain like the first, as where all ranks draw the order of samples from one seed."""
    source = torch if device.type == "cpu" else torch.get_device_module(device)
    before = source.get_rng_state()
    first = by_rank(handler.mesh, before.to(device))[0].cpu()
    source.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(before, first):
            source.set_rng_state(before)
