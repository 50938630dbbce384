"""The state of a prepared model's forward, and the forwards that are running in a thread.

Layers receive the state as the keyword ``context_parallel``. Masks, rotary embeddings and layers that pass no keywords
on are called without it: they find the forward that is running.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import checkpoint
from ..._torch.compiling import is_compiling
from ..._torch.modules import is_running
from ...data.packing import PreparedBatch
from ...module.dispatch_mode import alone
from ...module.mesh_binding import Style, StyledMesh
from ...module.mixers.hooks import Where
from ...module.thread_stack import ThreadStack
from ...schedule.layout import by_documents
from .indexer_losses import IndexerLosses


@dataclass(frozen=True)
class ForwardState:
    """The batch state of one forward, and the style and mesh that it runs with."""

    batch: PreparedBatch
    style: Style
    mesh: StyledMesh
    passed: frozenset[str] = frozenset()
    """Names of the keywords that the decoder was given, some of which it hands on to attention."""
    losses: IndexerLosses | None = None
    """Collects the losses of indexers; None: indexers are not trained."""
    cache: Any = None
    """The cache that the ranks share, a :class:`~.decoding.SplitModelCache`; None: nothing is generated."""
    positions: Tensor | None = None
    """``[S/n]``, the positions of this rank's tokens in the sequence; None: new tokens of a cache."""
    counted: Tensor | None = None
    """``[B, S/n]``: False on this rank's padding."""
    whole: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    """Gathers ``[B, S/n]`` of all ranks to ``[B, S]``; ``share`` is its inverse."""
    share: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    cross: Set[nn.Module] = frozenset()
    """The modules that attend to the states of an encoder."""
    source: Tensor | None = None
    """``[B, 1, 1, S]``: False on padding of the encoder's sequence; None: there is none."""
    implementation: str = ""
    """The attention implementation of the model on one device."""
    callers: list[nn.Module] = field(default_factory=list)
    """The modules that have called attention."""
    biases: list[Tensor] = field(default_factory=list)
    """The biases of scores that the decoder has made for the positions of all ranks."""
    samples: bool = False
    """True for a planned micro-batch, whose documents are samples that know nothing of each other: positions begin anew
    in each."""


@dataclass(frozen=True)
class OneDevice:
    """The state of a forward on a mesh of one rank: the model computes attention as it did before it was prepared."""

    implementation: str


State = ForwardState | OneDevice


_forwards: ThreadStack[tuple[nn.Module, State]] = ThreadStack()
"""The decoders that run, and the state of each."""
_offered: ThreadStack[tuple[nn.Module, PreparedBatch, list[Tensor]]] = ThreadStack()
"""The model around a decoder, the state that it was given, if any, and the tokens of the call that has taken it."""


def offer(model: nn.Module, batch: PreparedBatch | None) -> None:
    """Keep the state that a model was given for its decoder: not every model passes unknown keywords on."""
    _offered.entries[:] = [] if batch is None else [(model, batch, [])]


def offered() -> PreparedBatch | None:
    """The state that the model around this decoder was given."""
    if (top := _offered.top) is not None and not is_compiling() and not is_running(top[0]):
        _offered.remove(top)  # a KeyboardInterrupt ended that forward without its hooks
    return None if (top := _offered.top) is None else top[1]


def refuse_second(name: str, batch: PreparedBatch | None, tokens: Any, handed: bool) -> None:
    """Raise ``NotImplementedError`` if a decoder is called with the offered state for other tokens than before: a
    forward that calls it twice may have documents or padding for one of the calls only. ``handed``: the call was given
    the state itself, among the keywords of the batch."""
    top = _offered.top
    if top is None or batch is not top[1] or batch.plain or not isinstance(tokens, Tensor):
        return
    first = top[2][0] if top[2] else tokens
    top[2][:] = [first]
    if not handed and tokens is not first and not (tokens.shape == first.shape and torch.equal(tokens, first)):
        raise NotImplementedError(
            f"the forward of {type(top[0]).__name__} calls {name} with other tokens a second time. The batch that it "
            "was given has padding or documents, which are those of the first call. Pass both in one call, one below "
            "the other, or call the prepared model once for each batch of prepare_batch"
        )


def refuse_other_mesh(name: str, batch: PreparedBatch | None, mesh: StyledMesh) -> None:
    """Raise ``ValueError`` if a batch was split over another number of ranks than the decoder runs on."""
    ranks = mesh.views[0].size
    if batch is not None and batch.ranks not in (None, ranks):
        raise ValueError(
            f"{name} runs over {ranks} ranks, and prepare_batch has split this batch over {batch.ranks}. Its tokens "
            "would be taken for others. Split batches with the handler of the mesh that the model runs on: in a "
            "context_parallel_mesh block the one that it yields, or ContextParallelHandler.of(model) there"
        )


def begin(decoder: nn.Module, state: State) -> None:
    """Record that a forward of ``decoder`` runs with this state."""
    running()  # takes out those that Ctrl-C has ended: a graph that is compiled in this one cannot tell them
    _forwards.push((decoder, state))
    if isinstance(state, OneDevice):
        alone.push(decoder)


def end(decoder: nn.Module) -> None:
    """Undo :func:`begin`, if it was called."""
    if (top := _forwards.top) is not None and top[0] is decoder:
        _forwards.remove(top)
        alone.remove(decoder)


def _innermost() -> tuple[nn.Module | None, State | None]:
    """The decoder whose forward is the innermost one that runs in this thread, and its state."""
    return _forwards.innermost(lambda entry: is_compiling() or is_running(entry[0])) or (None, None)


def running() -> State | None:
    """The state of the innermost forward that runs in this thread."""
    return _innermost()[1]


def running_decoder() -> nn.Module | None:
    """The decoder of the innermost forward that runs in this thread."""
    return _innermost()[0]


def state_for(owner: nn.Module) -> State | None:
    """The state of the running forward; in a recompute, that of the forward in which ``owner`` was called first."""
    state: State | None
    (state,) = checkpoint.batch_state(owner, lambda: (running(),))
    if state is None and is_compiling():
        checkpoint.refuse_unknown_batch(type(owner).__name__)
    return state


def mixer_state(module: nn.Module) -> Where | None:
    """The mesh, layout and documents for a mixer of a prepared model. States pass between all ranks of the mesh,
    whatever the Ulysses degree of attention, so that any number of heads will do."""
    state = state_for(module)
    if not isinstance(state, ForwardState) or (state.cache is not None and state.cache.turn.prompt is None):
        return None  # all ranks have the same new tokens, and the state before them
    batch, layout = state.batch, state.style.mode.layout
    # Padding is a document for attention; mixers set it to zero themselves, and go on after it.
    padded = batch.tokens is not None and not by_documents(layout)
    return state.mesh.views[0], layout, None if padded else batch.documents, 1
