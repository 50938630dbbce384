"""The sizes of a transformer on which the cost of a step depends, read from whatever describes the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..mesh.arguments import check_choice, check_int, is_int
from ..schedule.choices import heads_after_sharing
from .cluster import read_object

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("heads", "num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads"),
    "width": ("width", "hidden_size", "n_embd", "d_model"),
    "ffn": ("ffn", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocabulary", "vocab_size"),
    "head_dim": ("head_dim",),
    "experts": ("experts", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("active_experts", "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"),
    "expert_ffn": ("expert_ffn", "moe_intermediate_size"),
    "latent": ("latent",),
    "rotary": ("rotary",),
    "attention_weights": ("attention_weights",),
    "topk": ("topk",),
    "indexer_heads": ("indexer_heads",),
    "indexer_dim": ("indexer_dim",),
    "indexers": ("indexers",),
}
"""For each size, the names under which configurations have it; the first that is there counts."""

PARTS = ("attn_config", "ffn_config")
"""Parts of configurations with sizes of their own (DBRX)."""
DENSE, SPARSE_BLOCKS = "full_attention", "minimax_m3_sparse"
ENTRIES, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
"""Types of layers of configurations, beside those of other names."""
NUMBERS_SHARED = ("n_shared_experts", "moe_num_shared_experts")
"""The names under which configurations have the number of experts that all tokens run through."""
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""The names under which configurations have the inner size of an expert that all tokens run through."""
EXPERTS_EVERY = ("interleave_moe_layer_step", "expert_layer_period", "decoder_sparse_step")
"""The names under which configurations say that every so many layers one has experts."""
NORMS = ("fused", "plain", "transformers")
LISTS = ("ffn", "experts", "active_experts", "expert_ffn")
"""Sizes of which configurations may have a list, with one for each layer; the mean counts."""
NECESSARY = ("layers", "heads", "width", "vocabulary")
LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""The names under which configurations have the sizes of latent attention."""
INDEXER = {"topk": "index_topk", "indexer_heads": "index_n_heads", "indexer_dim": "index_head_dim"}
"""Those of a lightning indexer."""
POOLED = (
    ("indexer_budget", "indexer_compress_ratio", "indexer_n_heads", "indexer_head_dim"),
    ("index_topk", "index_kpool", "index_n_heads", "index_head_dim"),
)
"""Those of an indexer over pooled keys: tokens that a query selects, tokens of a pool, query heads and their width."""
BLOCKS = ("index_topk_blocks", "index_block_size", "index_n_heads", "index_head_dim")
"""Those of an indexer over blocks of keys: blocks that a query selects, keys of a block, heads and their width."""
GROUPED = ("q_lora_rank", "o_groups", "o_lora_rank")
"""The names under which configurations have the sizes of narrow projections of queries and, in groups, of outputs."""
INDEXED, WINDOWED, CHUNKED = "indexed_attention", "sliding_attention", "chunked_attention"
"""Types of layers: attention to selected keys, to a window, and in chunks."""
CHUNK = "attention_chunk_size"
ALIKE = {
    **dict.fromkeys(("attention", "hybrid", "noncausal_full_attention", "global"), DENSE),
    **dict.fromkeys(("hybrid_sliding", "reference_sliding_attention", "local"), WINDOWED),
}
"""Types of layers whose attention is that of another type. In a hybrid layer attention runs beside a recurrence."""
PATTERNS, EVERY = ("sliding_window_pattern", "_sliding_window_pattern"), {"gemma2": 2, "gpt_oss": 2, "olmo3": 4}
"""The names under which configurations without types of layers say that every so many layers one has no window, and
models whose configurations do not say it."""
RECURRENT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
"""Types of layers without attention."""


class Pooling(NamedTuple):
    """Layers of one kind in which windows of tokens are pooled into entries (see ``hyper_cp.ops.Entries``)."""

    layers: int
    every: int
    """Tokens from one entry to the next."""
    tokens: int
    """Tokens that are pooled into one entry."""
    row: int
    """Numbers of a token that are pooled: its keys and gates."""
    width: int
    """Numbers of an entry."""
    window: int = 0
    """Tokens that a query sees beside entries; 0: the entries are keys of an indexer, and have no gradients."""
    topk: int = 0
    """Entries that a query selects; 0: it sees all that are complete."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Llama's kind: RMSNorm, attention with a head dim of its own, a gated MLP, a vocabulary's head.

    Args:
        layers: the number of decoder layers.
        heads, kv_heads: the numbers of query heads and of key/value heads (0: as many as query heads).
        width: the size of the residual stream (``hidden_size``).
        ffn: the inner size of the MLP that one token runs through, of all its active experts together (0: four times
            the width).
        vocabulary: the number of tokens of the head.
        head_dim: the numbers of a query, key or value of one head (0: width / heads); in latent attention the mean of
            those of a key and of a value.
        latent: in latent attention, the numbers of a token's latent and of its rotary part (0: there is none).
        rotary: the numbers of the rotary part, which ``latent`` includes.
        attention_weights: the weights of one layer's projections (0: each is one matrix from or to the width).
        stored_ffn: the inner size of all experts together; idle ones take memory and no time (0: the same as ``ffn``).
            Where some layers have no experts, both are means of all layers.
        tied: True if the head and the embedding are one parameter.
        norm: the RMSNorm, which decides how much it saves for backward: ``"fused"`` (one kernel: ``nn.RMSNorm`` on
            accelerators), ``"plain"`` (``nn.RMSNorm`` on the CPU), or ``"transformers"`` (Hugging Face's, in fp32).
        topk: the number of keys that each query selects, in all layers (0: attention is dense).
        indexer_heads, indexer_dim: the query heads of the lightning indexer that selects them, and their width (0: a
            selection comes with the batch).
        indexers: the number of layers that run one (0: all); the others share their selections.
        sparse: pairs ``(keys, layers)`` for layers whose queries see at most ``keys`` keys, selected from all; 0 keys
            mean recurrent layers. Layers that are not in ``sparse``, ``windows`` or ``poolings`` are dense.
        windows: pairs ``(keys, layers)`` for layers whose queries see a window of that many keys.
        poolings: the layers whose queries see entries beside a window, and indexers over entries (:class:`Pooling`).
        scores: the FLOPs of a query and a visible key in the indexers of sparse layers, of all layers together.
        weights: the weights of one layer that a token is multiplied with (0: those of ``attention_weights`` and of a
            gated MLP of ``ffn``).
        stored_weights: the parameters of one layer (0: the weights, those of idle experts, and two norms).

    Raises:
        ValueError: for a size that is not a positive int, heads that are not a multiple of the key/value heads, or an
            indexer without topk.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    stored_ffn: int = 0
    tied: bool = False
    norm: str = "fused"
    latent: int = 0
    rotary: int = 0
    attention_weights: int = 0
    topk: int = 0
    indexer_heads: int = 0
    indexer_dim: int = 0
    indexers: int = 0
    sparse: tuple[tuple[int, int], ...] = ()
    windows: tuple[tuple[int, int], ...] = ()
    poolings: tuple[Pooling, ...] = ()
    scores: float = 0.0
    weights: int = 0
    stored_weights: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocabulary"):
            check_int(name, getattr(self, name), "It is a size of the model")
        check_choice("norm", self.norm, NORMS, "It decides how much is saved for backward")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not split over heads={self.heads}. Without head_dim, a head has width / "
                "heads channels. Pass head_dim"
            )
        derived = {
            "kv_heads": self.heads,
            "ffn": 4 * self.width,
            "head_dim": self.width // self.heads,
            "stored_ffn": self.ffn or 4 * self.width,
        }
        selecting = dict.fromkeys(("topk", "indexer_heads", "indexer_dim"), 0) | {"indexers": self.layers}
        if any(getattr(self, name) for name in selecting):
            derived |= selecting if self.indexer_heads or self.indexer_dim or self.indexers else {"topk": 0}
        for name, value in derived.items():
            object.__setattr__(self, name, getattr(self, name) or value)
            check_int(name, getattr(self, name), "It is a size of the model")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}. Each key/value head serves equally "
                "many query heads. Correct one of the two"
            )
        if self.indexers > self.layers:
            raise ValueError(
                f"indexers={self.indexers} is more than layers={self.layers}. It is the number of layers that select "
                "keys. Pass at most as many as there are layers"
            )
        for name in ("sparse", "windows"):
            object.__setattr__(self, name, tuple(tuple(pair) for pair in getattr(self, name)))
        object.__setattr__(self, "poolings", tuple(Pooling(*sizes) for sizes in self.poolings))
        if self.dense < 0:
            raise ValueError(
                f"sparse={self.sparse}, windows={self.windows} and poolings={self.poolings} name "
                f"{self.layers - self.dense} layers, and layers={self.layers}. Each pair is (keys that a query sees, "
                "layers). Pass at most as many layers as there are"
            )
        projections = 2 * self.width * (self.query_width + self.key_width)
        object.__setattr__(self, "attention_weights", self.attention_weights or projections)

    @property
    def dense(self) -> int:
        """Layers whose queries see all keys, or ``topk`` of them."""
        others = sum(layers for _, layers in (*self.sparse, *self.windows))
        return self.layers - others - sum(pooling.layers for pooling in self.poolings if pooling.window)

    @property
    def query_width(self) -> int:
        """Channels of all query heads of a token, and of the output of attention."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of all key heads of a token; values have as many."""
        return self.kv_heads * self.head_dim

    def numbers_of_heads(self, ulysses: int = 1) -> int:
        """Numbers of a token's keys and values that one of ``ulysses`` ranks attends."""
        return 2 * heads_after_sharing(self.kv_heads, ulysses) // ulysses * self.head_dim

    def latents_travel(self, ulysses: int = 1) -> bool:
        """True if a token's latent is fewer numbers than the heads that one of ``ulysses`` ranks attends, or if it is
        not expanded."""
        return self.absorbed or 0 < self.latent < self.numbers_of_heads(ulysses)

    @property
    def absorbed(self) -> bool:
        """True if queries attend to latents that are not expanded: those that they have selected."""
        return bool(self.topk and self.latent)

    @property
    def head_widths(self) -> tuple[int, int]:
        """Numbers of a query and of an output of one head, as kernels attend them."""
        return (self.latent, self.latent - self.rotary) if self.absorbed else (self.head_dim, self.head_dim)

    @property
    def pair_flops(self) -> int:
        """FLOPs of a query and a key in all heads, forward: a product for the score, and one with the value."""
        return 2 * self.heads * sum(self.head_widths)

    @property
    def score_flops(self) -> int:
        """FLOPs of a query and a key in all heads of an indexer."""
        return 2 * self.indexer_heads * self.indexer_dim

    def numbers_that_travel(self, ulysses: int = 1) -> int:
        """Numbers of a token's keys and values that are sent to one of ``ulysses`` ranks, or of the latent."""
        return self.latent if self.latents_travel(ulysses) else self.numbers_of_heads(ulysses)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        return self.weights or self.attention_weights + 3 * self.width * self.ffn

    @property
    def stored_layer_weights(self) -> int:
        """Weights of one layer that take memory: those of idle experts included."""
        stored = self.layer_weights + 3 * self.width * (self.stored_ffn - self.ffn) + 2 * self.width
        return self.stored_weights or stored

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        heads = self.head_weights * (1 if self.tied else 2)
        return self.layers * self.stored_layer_weights + heads + self.width


def model_shape(model: Any) -> ModelShape:
    """Return the shape of a model from a :class:`ModelShape`, a dict, or any object with the attributes of a Hugging
    Face configuration (``num_hidden_layers``, ``num_attention_heads``, ``hidden_size``, ``vocab_size`` ...; those of
    its ``text_config``, if there is one). transformers is not needed.

    Raises:
        TypeError: if a size is missing that cannot be derived, for ``layer_types`` of other names than those of
            transformers, and for an encoder-decoder.
    """
    if isinstance(model, ModelShape):
        return model
    config = getattr(model, "config", model)
    if _get(config, "is_encoder_decoder"):
        raise TypeError(
            f"the model, a {type(model).__name__}, is an encoder-decoder (is_encoder_decoder=True). The costs here are "
            "those of a decoder over one sequence. Pass a dict with the sizes of each by itself"
        )
    outer, config = config, _layer_of(_get(config, "text_config") or config)
    found: dict[str, Any] = {}
    for size, names in NAMES.items():
        value = _size(config, size)
        if value is None and size in NECESSARY:
            raise TypeError(
                f"the model, a {type(model).__name__}, has no {names[1] if len(names) > 1 else size}. The cost of a "
                f"step depends on it. Pass a ModelShape, or a dict or configuration with one of {', '.join(names)}"
            )
        if value is not None:
            found[size] = value
    if _get(config, "multi_query") and not _get(config, "new_decoder_architecture"):  # Falcon, GPT BigCode
        found["kv_heads"] = 1
    experts, active = found.pop("experts", None), found.pop("active_experts", None)
    inner = found.pop("expert_ffn", None) or found.get("ffn")
    if experts and active and inner:
        shared = next((x for name in NUMBERS_SHARED if (x := _get(config, name))), 0) * inner
        shared += next((x for name in SHARED if (x := _get(config, name))), 0)
        plain = _get(config, "intermediate_size_mlp") or found.get("ffn") or inner  # that of layers without experts
        layers, sparse = found["layers"], _layers_with_experts(config, found["layers"])
        for name, sum_of_all in (("ffn", active * inner + shared), ("stored_ffn", experts * inner + shared)):
            found[name] = round((sparse * sum_of_all + (layers - sparse) * plain) / layers)
    found |= _latent_attention(config, found["layers"], found["heads"], found["width"])
    ties = (_get(x, "tie_word_embeddings") for x in (outer, config))  # that of the model with the head comes first
    found["tied"] = bool(next((x for x in ties if x is not None), False) or _get(config, "tied"))
    found["norm"] = _get(config, "norm") or ("transformers" if _get(config, "model_type") else "fused")
    if not found.get("topk"):
        found |= _kinds_of_layers(config, found)
    return ModelShape(**found)


def _layers_with_experts(config: Any, layers: int) -> int:
    """The number of layers whose MLP has experts: all, unless the configuration names some."""
    if kinds := _get(config, "mlp_layer_types"):
        return layers - [*kinds].count("dense")
    every = next((x for name in EXPERTS_EVERY if (x := _get(config, name))), 1)
    offset, first = _get(config, "expert_layer_offset"), _get(config, "first_k_dense_replace") or 0
    place, without = (every - 1 if offset is None else offset), _get(config, "mlp_only_layers") or ()
    return sum((i - place) % every == 0 for i in range(first, layers) if i not in without)


def _layer_of(config: Any) -> Any:
    """The configuration of a layer that selects keys, else of one that sees all, else of the first, if layers have
    configurations of their own."""
    if isinstance(config, Mapping) or not _get(config, "is_heterogeneous"):
        return config
    types = _get(config, "layer_types") or ()
    return config.per_layer_config[next((types.index(kind) for kind in (INDEXED, DENSE) if kind in types), 0)]


def _latent_attention(config: Any, layers: int, heads: int, width: int) -> dict[str, int]:
    """The sizes of latent attention and of its indexer, of those that a configuration has."""
    rank, rotary, plain, value = (_get(config, name) or 0 for name in LATENTS)
    if not rank or not plain:
        return {}
    of_queries, narrow = heads * (plain + rotary), _get(config, "q_lora_rank") or 0
    weights = narrow * (width + of_queries) if narrow else width * of_queries
    weights += width * (rank + rotary) + heads * (rank * (plain + value) + value * width)
    found = {"latent": rank + rotary, "rotary": rotary, "head_dim": (plain + rotary + value) // 2, "kv_heads": heads}
    found["attention_weights"] = weights
    types = _get(config, "layer_types") or [INDEXED] * layers
    pooled = (_get(config, "index_kpool") or 1) > 1  # selects pools of keys, whose cost is not counted yet
    if _get(config, INDEXER["topk"]) and {INDEXED} <= {*types} <= {INDEXED, WINDOWED} and not pooled:
        found |= {size: _get(config, name) for size, name in INDEXER.items()}
        found["indexers"] = _indexers(config, [i for i, kind in enumerate(types) if kind == INDEXED])
    return found


def _indexers(config: Any, selecting: list[int]) -> int:
    """The number of layers that run an indexer, among those that attend to selected keys."""
    kinds = _get(config, "indexer_types") or _get(config, "index_topk_pattern")  # "full" and "shared", or "F" and "S"
    if kinds:
        return sum(kinds[i][0] in "fF" for i in selecting)
    every, offset = _get(config, "index_topk_freq") or 1, _get(config, "index_skip_topk_offset")
    first = 2 if offset is None else offset
    return sum(max(i - first + 1, 0) % every == 0 for i in selecting)


def _kinds_of_layers(config: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of layers that are not dense, by their types. In chunks queries see half of one on average.
    ``sizes``: the others of the model."""
    if given := [name for name in ("sparse", "windows", "poolings", "scores") if _get(config, name)]:
        return {name: _get(config, name) for name in given}
    named = _get(config, "layer_types") or _get(config, "attention_layers")  # the latter of GPT-Neo, as its window
    window, chunk = _get(config, "sliding_window") or 0, _get(config, CHUNK)
    window = window or (_get(config, "window_size") if named and "local" in named else 0)
    sliding = window and _get(config, "use_sliding_window") is not False
    types = [*(named or [WINDOWED if sliding else DENSE] * sizes["layers"])]
    for i in _get(config, "cross_attention_layers") or ():  # of images: no tokens attend to each other
        types[i] = RECURRENT[0]
    every: Any = next((x for name in PATTERNS if (x := _get(config, name))), EVERY.get(_get(config, "model_type")))
    if sliding and not named and is_int(every):
        types[every - 1 :: every] = [DENSE] * len(types[every - 1 :: every])
    kinds, sparse = Counter(ALIKE.get(kind, kind) for kind in types), Counter[int]()
    if unknown := kinds.keys() - {DENSE, WINDOWED, CHUNKED, INDEXED, ENTRIES, COMPRESSED, SPARSE_BLOCKS, *RECURRENT}:
        raise TypeError(
            f"the model has layers of types {sorted(map(str, unknown))}, and nothing says how many keys their queries "
            "see. The cost of a step depends on it. Pass a ModelShape, or a dict with sizes 'windows' and 'sparse', or "
            f"with layer_types {DENSE!r}, {WINDOWED!r} and {RECURRENT[0]!r}"
        )
    for kind, size in ((WINDOWED, window), (CHUNKED, chunk)):
        if not size:
            kinds[DENSE] += kinds.pop(kind, 0)
    keys = {CHUNKED: chunk and max(1, chunk // 2)}
    topk, *lightning = (_get(config, name) or 0 for name in INDEXER.values())
    scores, (tokens, pool, *indexer) = 0.0, _pooled(config) or (topk, 1, *lightning)
    poolings = _poolings(config, kinds, sizes)
    if not tokens:
        kinds[DENSE] += kinds.pop(INDEXED, 0)  # nothing says how many keys they select
    elif kinds[INDEXED]:
        keys[INDEXED] = tokens + pool - 1  # with the tail behind the last whole pool
        running = _indexers(config, [i for i, kind in enumerate(types) if kind == INDEXED])
        poolings += [Pooling(running, pool, pool, 2 * indexer[1], indexer[1])] if pool > 1 and running else []
        scores = running / pool
    if kinds[ENTRIES]:
        _, *indexer = _sizes(config, ENTRIES, [*INDEXER.values()])
        scores = kinds[ENTRIES] / _rates(config)[ENTRIES]
    if kinds[SPARSE_BLOCKS]:
        blocks, size, *indexer = _sizes(config, SPARSE_BLOCKS, BLOCKS)
        keys[SPARSE_BLOCKS], scores = blocks * size, float(kinds[SPARSE_BLOCKS])
    windows = ((window, kinds.pop(WINDOWED, 0)),) if kinds[WINDOWED] else ()
    for kind in kinds.keys() - {DENSE, ENTRIES, COMPRESSED}:
        sparse[keys.get(kind) or 0] += kinds[kind]
    score = 2 * indexer[0] * indexer[1] if scores else 0
    found = {"sparse": tuple(sorted((+sparse).items())), "windows": windows, "poolings": tuple(poolings)}
    return found | _grouped(config, sizes, poolings) | {"scores": scores * score}


def _poolings(config: Any, kinds: Mapping[str, int], sizes: Mapping[str, int]) -> list[Pooling]:
    """Those of DeepSeek V4's layers. In CSA each token has two series of keys and gates, so an entry has the tokens of
    two windows, and the indexer has entries of its own."""
    found, dim = [], _head_dim(sizes)
    if kinds[ENTRIES]:
        every, names = _rates(config)[ENTRIES], [*INDEXER.values(), "sliding_window"]
        topk, _, narrow, window = _sizes(config, ENTRIES, names)
        found += [Pooling(kinds[ENTRIES], every, 2 * every, 4 * dim, dim, window, topk)]
        found += [Pooling(kinds[ENTRIES], every, 2 * every, 4 * narrow, narrow)]
    if kinds[COMPRESSED]:
        every, (window,) = _rates(config)[COMPRESSED], _sizes(config, COMPRESSED, ["sliding_window"])
        found += [Pooling(kinds[COMPRESSED], every, every, 2 * dim, dim, window)]
    return found


def _head_dim(sizes: Mapping[str, int]) -> int:
    return sizes.get("head_dim") or sizes["width"] // sizes["heads"]


def _grouped(config: Any, sizes: Mapping[str, int], poolings: Sequence[Pooling]) -> dict[str, int]:
    """The weights of attention with narrow projections of queries and of outputs, with those of entries and indexers:
    the mean of all layers."""
    narrow, groups, output = (_get(config, name) or 0 for name in GROUPED)
    if not (narrow and groups and output):
        return {}
    width, queries = sizes["width"], sizes["heads"] * _head_dim(sizes)
    keys = sizes.get("kv_heads", sizes["heads"]) * _head_dim(sizes)
    total = sizes["layers"] * (narrow * (width + queries) + width * keys + output * (queries + groups * width))
    for pooling in poolings:
        heads = 0 if pooling.window else _get(config, "index_n_heads")
        total += pooling.layers * (width * pooling.row + heads * (narrow * pooling.width + width))
    return {"attention_weights": round(total / sizes["layers"])}


def _sizes(config: Any, kind: str, names: Sequence[str]) -> list[int]:
    """Sizes of a configuration that its layers of one type need. Raises ``TypeError`` if one is missing."""
    found = [_get(config, name) for name in names]
    if None in found:
        raise TypeError(
            f"the model has layers of type {kind}, and no {names[found.index(None)]}. Their cost depends on it. Pass a "
            f"configuration with {', '.join(names)}"
        )
    return found


def _rates(config: Any) -> Mapping[str, int]:
    """The tokens of an entry, by the types of layers that attend to entries."""
    return _get(config, "compress_rates") or {ENTRIES: 4, COMPRESSED: 128}


def _pooled(config: Any) -> list[int] | None:
    """The sizes of an indexer over pooled keys, if layers have one."""
    found = ([_get(config, name) or 0 for name in names] for names in POOLED)
    return next((sizes for sizes in found if all(sizes) and sizes[1] > 1), None)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _size(config: Any, size: str) -> Any:
    """The size under any of its names, in the configuration or in its parts; None if there is none."""
    parts = [config, *(part for name in PARTS if (part := _get(config, name)) is not None)]
    value = next((x for part in parts for name in NAMES[size] if (x := _get(part, name)) is not None), None)
    return round(sum(value) / len(value)) if size in LISTS and isinstance(value, Sequence) and value else value


def counted_shape(model: Any) -> ModelShape:
    """The shape of a model from whatever describes it. If that is a configuration of transformers, parameters are those
    of the decoder that transformers makes for it, on no device."""
    config = configuration(model)
    shape = model_shape(config)
    config = getattr(config, "config", config)
    text = _get(config, "text_config") or config
    own = any(_get(text, NAMES[size][0]) is not None for size in (*NECESSARY, "kv_heads", "ffn"))
    if own or isinstance(config, Mapping) or not _get(config, "model_type"):
        return shape
    with suppress(Exception):  # no transformers, or a model that it does not have or cannot make
        return _counted(shape, text)
    return shape


_TOWERS = re.compile(r"(^|\.)(vision|visual|image|audio|speech)\w*\.")
"""Names of encoders of images and sounds in a decoder whose configuration has no part of its own for text."""


def _counted(shape: ModelShape, config: Any) -> ModelShape:
    """The shape with the weights of a model of transformers. Tables of embeddings are multiplied with nothing, and of
    experts a token is multiplied with those that are active."""
    from transformers import AutoModel  # optional

    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some models draw numbers on the CPU all the same
        model = AutoModel.from_config(deepcopy(config), trust_remote_code=False, attn_implementation="eager")
    tables = {id(p) for x in model.modules() if isinstance(x, nn.Embedding) for p in x.parameters(recurse=False)}
    layer = _layer_of(config)
    experts, active = _size(layer, "experts") or 1, _size(layer, "active_experts") or 1
    weights, idle, stored = 0, 0.0, -shape.head_weights - shape.width
    for name, p in model.named_parameters():
        if _TOWERS.search(name):
            continue
        stored += p.numel()
        if p.ndim > 1 and id(p) not in tables:
            weights += p.numel()
            routed = ("experts" in name and "shared" not in name) or (p.ndim == 3 and len(p) == experts)
            idle += p.numel() * (1 - active / experts) if routed else 0
    weights, stored = (round(x / shape.layers) for x in (weights - idle, stored))
    if (weights, stored) == (shape.layer_weights, shape.stored_layer_weights):
        return shape
    return replace(shape, weights=weights, stored_weights=stored)


def configuration(model: Any) -> Any:
    """The configuration under a path or a name; anything else as it is. The contents of a config.json are completed by
    transformers, if that is installed."""
    if isinstance(model, Mapping):
        return _completed(model)
    if not isinstance(model, (str, Path)):
        return model
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _completed(read_object("model", path, "A configuration is", "a config.json"))
    # A name has at most one slash, and no ending of a file: everything else would only be looked up in the network.
    if isinstance(model, Path) or path.suffix == ".json" or model[:1] in ("/", ".", "~") or len(path.parts) > 2:
        raise ValueError(
            f"model={str(model)!r} means the file {str(path)!r}, which does not exist. It holds the sizes of the "
            "model. Pass the path of a config.json or of its folder, or a name that transformers.AutoConfig finds"
        )
    try:
        from transformers import AutoConfig  # optional: a name needs it, a path does not

        return AutoConfig.from_pretrained(str(model))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"model={str(model)!r} is no file, and no configuration of this name was found: {error}. Names are looked "
            "up by transformers. Pass the path of a config.json, or a dict of sizes"
        ) from error


def _completed(config: Mapping[str, Any]) -> Any:
    """The contents of a config.json with what it leaves out as the default of its model (types of layers, experts, or a
    tied embedding), by transformers; the contents alone if there is no such model."""
    if not config.get("model_type"):
        return config
    with suppress(Exception):  # no transformers, or a model or a configuration that this version does not know
        from transformers import AutoConfig  # optional

        return type(AutoConfig.for_model(config["model_type"])).from_dict(_decoded(config))
    return config


def _decoded(x: Any) -> Any:
    """A copy with the infinite numbers that transformers writes into files as ``{"__float__": "Infinity"}``."""
    if isinstance(x, Mapping):
        return float(x["__float__"]) if "__float__" in x else {name: _decoded(value) for name, value in x.items()}
    return [_decoded(value) for value in x] if isinstance(x, list) else deepcopy(x)
