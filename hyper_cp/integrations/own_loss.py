"""Trainers of users: a loss, or a part of one, that they make of this rank's tokens only is warned of."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .._torch.leaves import nodes_of
from ..data.collectives import is_of_all_ranks
from ..module.mixers.calls import names_in
from ..ops.writes import writes

_OVER_RANKS = {"mean_loss", "combine", "pool", "log_probs"}
"""Methods of a handler whose results are those of the whole sequence."""

_GRAPHS = 8
"""The number of graphs that are read of one method."""


class WatchedLoss:
    """The ``compute_loss`` of a user's trainer. ``whole``: its model takes whole batches, and returns whole logits.

    The graph of what it returns is compared with what was made over all ranks while it ran: the losses of the trainer
    behind it, and the results of a handler. A part that reads the model's output elsewhere is that of a share.
    """

    def __init__(self, method: Callable[..., Any], whole: bool) -> None:
        self.method, self.whole = method, whole
        self.made: list[tuple[Tensor, Any, int]] = []
        """The losses of the trainer behind it, in the call that runs, with the node and the number of writes of each:
        ``loss += term`` keeps the tensor."""
        self.reads = _GRAPHS
        """The number of graphs that are still read, as long as none is wrong. (They have thousands of nodes.)"""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made = []
        found = self.method(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        if (
            self.reads
            and isinstance(loss, Tensor)
            and not any(loss is x and loss.grad_fn is node and writes(x) == count for x, node, count in self.made)
        ):
            self.reads -= loss.grad_fn is not None
            self._read(loss)
        self.made = []
        return found

    def add(self, loss: Tensor) -> None:
        """Record a loss of the trainer behind it."""
        self.made.append((loss, loss.grad_fn, writes(loss)))

    def _read(self, loss: Tensor) -> None:
        adds, name = bool(self.made), getattr(inspect.unwrap(self.method), "__qualname__", "compute_loss")
        if self.whole:
            wrong = not adds
        elif loss.grad_fn is None:  # an evaluation, which is right if a graph was
            wrong = self.reads == _GRAPHS and not adds and not _OVER_RANKS & _names(self.method)
        else:
            wrong = _reads_share(loss, {node for _, node, _ in self.made})
        if not wrong:
            return
        self.reads = 0
        if self.whole:
            gets = (
                "whole batches and logits, and what it computes from those is right. But the loss of the model is the "
                "part of this rank: multiply it by self.handler.cp.size, or return that of super().compute_loss"
            )
        else:
            gets = (
                "this rank's share of a batch: labels[:, 1:] lacks the label of its last token, a mean is that of this "
                "rank's tokens, and the loss of the model is the part of this rank. Return "
                "self.handler.mean_loss(logits, inputs['shift_labels']), or that of losses of tokens and a mask: the "
                "shift_labels of a causal model are shifted over the whole sequence (of a masked or token-classifying "
                "one, take the labels). Set loss_is_scaled_for_ga = False in the class if gradients are accumulated"
            )
        computes = "adds a term to the loss of super()" if adds else "computes a loss by itself"
        warnings.warn(f"{name} {computes}. It gets {gets}", stacklevel=4)


def _reads_share(loss: Tensor, made: set[Any]) -> bool:
    """True if a loss has a part that was not made over all ranks, and depends on what such a part depends on. (A term
    of the weights depends on leaves only.)"""
    above, over_ranks = _reached([loss.grad_fn], made)
    below, _ = _reached([node for end in over_ranks for node, _ in end.next_functions])
    return not over_ranks or any(node.next_functions for node in above & below)


def _reached(start: list[Any], made: Iterable[Any] = ()) -> tuple[set[Any], set[Any]]:
    """The nodes of a graph above those that were made over all ranks, and these."""
    ends = set[Any]()

    def is_end(node: Any) -> bool:
        found = node in made or is_of_all_ranks(node)
        ends.update([node] if found else ())
        return found

    return {*nodes_of(start, is_end)}, ends


def replaces(kind: type, name: str) -> bool:
    """True for a class with a method of this name that does not call the one behind it."""
    return name in vars(kind) and name not in _names(vars(kind)[name])


def _names(method: Any) -> set[str]:
    """The names that the code of a method uses."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return set() if code is None else names_in(code)
