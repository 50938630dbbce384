"""Models of transformers that attend to selected keys: their indexers make what is scored, and all ranks select.

The forward of an indexer makes queries, keys and weights of heads, hands the keys to a cache, scores them, and takes
the best ones. In a prepared model it gets a cache that returns no tensor but :class:`_Scores`: what the forward does
with it is recorded, and must be the scores of a lightning indexer, step by step. The result is the selection over all
ranks.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.config import Call
from ...ops.decoding import select_cached
from ...ops.selection import select
from ...ops.split_cache import SplitCache
from .forward import ForwardState, state_for
from .indexer_losses import Scored
from .seams import CACHE, cache_in

LAYER = "indexed_attention"
"""The type of layers that attend to selected keys."""
_WEIGHTS = (
    "weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads ** (-0.5)"
)
_STATEMENTS = f"""
if cache is not None:
    k = cache.update_indexer(k, self.layer_idx)
scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * self.softmax_scale
scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
scores = F.relu(scores)
{_WEIGHTS}
{_WEIGHTS} * self.softmax_scale
index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
if attention_mask.dtype == torch.bool:
    index_scores = index_scores.masked_fill(~attention_mask, float('-inf'))
else:
    index_scores = index_scores + attention_mask
topk = min(self.index_topk, index_scores.shape[-1])
return index_scores.topk(topk, dim=-1).indices.to(torch.int32)
"""
"""The end of an indexer's forward in transformers 5.23 and 5.24 (which has another name of the cache): each statement
from the cache on is one of these."""


def prepare(indexer: Any) -> None:
    """Let an indexer select over all ranks."""
    indexer.forward = partial(_selected, indexer)


def has_indexer_seam(kind: type[nn.Module]) -> bool:
    """True for a type of module whose forward scores keys and selects as the lightning indexers of transformers do."""
    return kind.__name__.endswith("Indexer") and _ends_as_known(kind.forward)


@cache  # every layer has an indexer, and is asked for it several times
def _ends_as_known(forward: Callable[..., Any]) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(forward)).replace("past_key_values", "cache")
        function: Any = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return False
    known = [ast.unparse(x) for x in ast.parse(_STATEMENTS.replace("return ", "_ = ")).body]
    body = [ast.unparse(x).replace("return ", "_ = ") for x in function.body]
    at = body.index(known[0]) if known[0] in body else len(body)
    return len(body) - at == 8 and all(x in known for x in body[at:])


def selects(layer: nn.Module, decoder: nn.Module) -> bool:
    """True for a layer that selects keys, or takes the selection of a layer of its decoder that does."""
    own = any(has_indexer_seam(type(module)) for module in layer.modules())
    shares = any("prev_topk_indices" in inspect.signature(type(x).forward).parameters for x in layer.modules())
    return own or (shares and any(has_indexer_seam(type(module)) for module in decoder.modules()))


def _selected(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an indexer of a prepared model."""
    state, forward = state_for(indexer), type(indexer).forward
    if isinstance(state, ForwardState) and (cache_in(kwargs) is None or state.cache is not None):
        kwargs[CACHE] = _Cache(type(indexer).__name__, state.cache)
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

    def __init__(self, owner: str, cache: Any = None) -> None:
        self.owner, self.cache = owner, cache

    def update_indexer(self, k: Tensor, layer: int) -> _Scores:
        """Keys ``[B, S, D]``. A cache that is split over the ranks keeps them."""
        made = _Scores(self.owner, k)
        if self.cache is not None:
            made.held = self.cache.layers[layer].update_indexer(k)
        return made


_EXPECTED = ("transpose", "float", "unsqueeze", "matmul", "mul", "relu", "matmul", "squeeze", "mask", "topk")
"""The steps from keys to a selection. (Some models have the factor in their weights.)"""


class _Scores:
    """Keys on their way to the scores ``[B, S, keys]`` of a lightning indexer. No number of them is made."""

    def __init__(self, owner: str, k: Tensor) -> None:
        self.owner, self.k, self.steps = owner, k, ["keys"]
        self.q, self.weights, self.scale = k, k, 1.0
        self.request: Any = None
        self.held: SplitCache | None = None

    def _step(self, name: str, **found: Any) -> _Scores:
        """The next step; raises unless the steps so far begin the expected ones."""
        made = _Scores.__new__(_Scores)
        made.__dict__.update(self.__dict__, **found)
        made.steps = [*self.steps, name]
        begun = made.steps[1:]
        if not any(begun == [*steps][: len(begun)] for steps in (_EXPECTED, [x for x in _EXPECTED if x != "mul"])):
            self._refuse(name)
        return made

    def _refuse(self, step: str) -> Any:
        raise NotImplementedError(
            f"{self.owner} scores keys by {', '.join([*self.steps[1:], step])}. A lightning indexer, which context "
            f"parallelism runs over all ranks, does {', '.join(_EXPECTED)}. Use a version of transformers in which "
            "it does, or call hyper_cp.ops.select_keys in a model of your own"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if func is torch.matmul and len(args) == 2 and args[1] is scores and not kwargs:
            first = "relu" not in scores.steps
            return scores._step("matmul", **({"q": args[0]} if first else {"weights": args[0]}))
        if func is F.relu:
            return scores._step("relu")
        return scores._refuse(getattr(func, "__name__", str(func)))

    def transpose(self, *dims: int) -> _Scores:
        """Keys as columns."""
        return self._step("transpose" if dims == (-1, -2) else f"transpose{dims}")

    def float(self) -> _Scores:
        """Keys in fp32."""
        return self._step("float")  # the selection is in fp32, and keys travel as they are

    def unsqueeze(self, dim: int) -> _Scores:
        """Keys of all heads."""
        return self._step("unsqueeze" if dim == 1 else f"unsqueeze({dim})")

    def __mul__(self, scale: Any) -> _Scores:
        return self._step("mul", scale=scale)

    def squeeze(self, dim: int) -> _Scores:
        """Sums over heads."""
        return self._step("squeeze" if dim == -2 else f"squeeze({dim})")

    def __add__(self, mask: Any) -> _Scores:
        if isinstance(mask, Tensor):
            raise NotImplementedError(
                f"{self.owner} selects keys under an attention mask that was given as a tensor. Under context "
                "parallelism causality, documents and padding come with the batch of prepare_batch. Leave the "
                "attention mask out, or pass one of two dimensions"
            )
        return self._step("mask", request=mask)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of scores, over all ranks."""
        state: ForwardState = self.request.state
        b, length, _ = self.k.shape
        if self._decodes and self.held is not None:
            return b, length, self.held.length
        return b, length, length * state.mesh.views[0].size

    @property
    def _decodes(self) -> bool:
        """True for the scores of new tokens, which all ranks have."""
        cache = self.request.state.cache
        return cache is not None and cache.prompt is None

    def topk(self, topk: int, dim: int) -> Any:
        """The selection, as ``torch.topk`` returns it."""
        made, state = self._step("topk" if dim == -1 else f"topk in {dim}"), self.request.state
        return _TopK(partial(made.selection, topk, state))

    def selection(self, topk: int, state: ForwardState) -> Tensor:
        """The best keys of all ranks, ``[B, S, topk]``."""
        batch, weights = state.batch, self.weights.squeeze(2).transpose(1, 2)
        if self._decodes and self.held is not None:
            q = self.q.to(self.k.dtype).transpose(1, 2)
            return select_cached(q, self.held, weights, topk=topk, scale=self.scale)[:, 0]
        documents = batch.documents if self.request.documents is None else self.request.documents
        mode = replace(state.style.mode, window=(None, 0))
        call = Call(False, self.scale, batch.keys, documents, name=self.owner)
        q, k = self.q.to(self.k.dtype).transpose(1, 2), self.k.unsqueeze(1)
        found: Any = select(q, k, weights, state.mesh.views[0], mode, call, topk)[:, 0]
        if state.losses is not None:
            found.scored = Scored((q, k, weights), mode, call)
        return found


class _TopK:
    """The result of a ``topk`` of which the indices are asked for."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    @property
    def indices(self) -> Tensor:
        """Global positions."""
        return self._make()


def under_selection(mask: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """A mask ``[B, 1, S, keys]`` that also hides keys which are not among ``indices`` ``[B, S, k]``, as the models'
    eager attention has it."""
    hidden = torch.ones_like(mask[:, :1].expand(len(indices), -1, -1, -1), dtype=torch.bool)
    hidden.scatter_(-1, indices.long().unsqueeze(1), False)
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(like.dtype).min)
