"""Models of transformers that attend to selected keys: their indexers make what is scored, and all ranks select.

The forward of an indexer makes queries, keys and weights of heads, hands the keys to a cache, scores them, and takes
the best ones. In a prepared model it gets a cache that returns no tensor but :class:`_Scores`, to which the end of the
forward hands all that the scores would be made of. The result is the selection over all ranks.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.config import Call
from ...ops.decoding import select_cached
from ...ops.selection import select
from ...ops.split_cache import SplitCache
from .forward import ForwardState
from .indexer_losses import Scored
from .seams import CACHE, digest_of, holds

LAYER = "indexed_attention"
"""The type of layers that attend to selected keys."""
END = "if cache is not None : k = cache . update_indexer"
"""The words at which the end of an indexer's forward begins."""
KNOWN = ("6d7fdb5e95302526", "e5dbae16586b3cb8")
"""Digests of that end in transformers 5.23 and 5.24: the scores of heads have a factor, or their weights have."""


def has_indexer_seam(kind: type[nn.Module]) -> bool:
    """True for a type of module whose forward scores keys and selects as the lightning indexers of transformers do."""
    return kind.__name__.endswith("Indexer") and digest_of(kind.forward, END) in KNOWN


def selects(layer: nn.Module, decoder: nn.Module) -> bool:
    """True for a layer that selects keys, or takes the selection of a layer of its decoder that does."""
    own = holds(layer, has_indexer_seam)
    shares = any("prev_topk_indices" in inspect.signature(type(x).forward).parameters for x in layer.modules())
    return own or (shares and holds(decoder, has_indexer_seam))


def selected(indexer: Any, state: ForwardState, *args: Any, **kwargs: Any) -> Any:
    """The forward of an indexer over all ranks."""
    kwargs[CACHE], forward = _Cache(type(indexer).__name__, state), type(indexer).forward
    if state.losses is not None:  # without the decorator ``no_grad``, on inputs that have no gradient
        state.losses.refuse_where_lost(type(indexer).__name__)
        forward = inspect.unwrap(forward)
        args, kwargs = tuple(_detached(x) for x in args), {name: _detached(x) for name, x in kwargs.items()}
    return forward(indexer, *args, **kwargs)


def _detached(x: Any) -> Any:
    """A tensor, or a tuple of them, without a gradient."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(_detached, x))
    return x.detach() if isinstance(x, Tensor) else x


class _Cache:
    """Takes the place of a cache: the keys that an indexer hands to it come back as scores to be."""

    def __init__(self, owner: str, state: ForwardState) -> None:
        self.owner, self.state = owner, state

    def update_indexer(self, k: Tensor, layer: int) -> _Scores:
        """Keys ``[B, S, D]``. A cache that is split over the ranks keeps them."""
        cache = self.state.cache
        return _Scores(self.owner, self.state, k, None if cache is None else cache.layers[layer].update_indexer(k))


class _Scores:
    """Keys on their way to the scores ``[B, S, keys]`` of a lightning indexer. No number of them is made."""

    def __init__(self, owner: str, state: ForwardState, k: Tensor, held: SplitCache | None) -> None:
        self.owner, self.state, self.k, self.held = owner, state, k, held
        self.factors: list[Tensor] = []
        """Queries, which are multiplied with keys, and weights, which are multiplied with the products."""
        self.scale, self.documents = 1.0, state.batch.documents
        self.indices: Tensor | None = None
        """The selection, after :meth:`topk`."""

    def same(self, *_: Any) -> _Scores:
        """Steps that are the same for the selection: it is in fp32, and keys travel as they are."""
        return self

    transpose = float = unsqueeze = squeeze = same

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Scores:
        """Products with queries and weights, and the rectified linear unit between the two."""
        scores: _Scores = args[-1]
        if func is torch.matmul:
            scores.factors.append(args[0])
        return scores

    def __mul__(self, scale: Any) -> _Scores:
        self.scale = scale
        return self

    def under(self, mask: Any, *_: Any) -> _Scores:
        """Take the request for a mask."""
        if isinstance(mask, Tensor):
            raise NotImplementedError(
                f"{self.owner} selects keys under an attention mask that was given as a tensor. Under context "
                "parallelism causality, documents and padding come with the batch of prepare_batch. Leave the "
                "attention mask out, or pass one of two dimensions"
            )
        self.documents = self.documents if mask.documents is None else mask.documents
        return self

    __add__ = masked_fill = under

    @property
    def shape(self) -> tuple[int, ...]:
        """That of scores, over all ranks."""
        b, length, _ = self.k.shape
        if self._decodes and self.held is not None:
            return b, length, self.held.length
        return b, length, length * self.state.mesh.views[0].size

    @property
    def _decodes(self) -> bool:
        """True for the scores of new tokens, which all ranks have."""
        cache = self.state.cache
        return cache is not None and cache.turn.prompt is None

    def topk(self, topk: int, dim: int) -> _Scores:
        """Select, as ``torch.topk`` does."""
        self.indices = self._selection(topk)
        return self

    def _selection(self, topk: int) -> Tensor:
        """The best keys of all ranks, ``[B, S, topk]``."""
        (q, weights), state = self.factors, self.state
        q, weights = q.to(self.k.dtype).transpose(1, 2), weights.squeeze(2).transpose(1, 2)
        if self._decodes and self.held is not None:
            return select_cached(q, self.held, weights, topk=topk, scale=self.scale)[:, 0]
        mode, k = replace(state.style.mode, window=(None, 0)), self.k.unsqueeze(1)
        call = Call(False, self.scale, state.batch.keys, self.documents, name=self.owner)
        found: Any = select(q, k, weights, state.mesh.views[0], mode, call, topk)[:, 0]
        if state.losses is not None:
            found.scored = Scored((q, k, weights), mode, call)
        return found


def under_selection(mask: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """A mask ``[B, 1, S, keys]`` that also hides keys which are not among ``indices`` ``[B, S, k]``, as the models'
    eager attention has it."""
    hidden = torch.ones_like(mask[:, :1].expand(len(indices), -1, -1, -1), dtype=torch.bool)
    hidden.scatter_(-1, indices.long().unsqueeze(1), False)
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(like.dtype).min)
