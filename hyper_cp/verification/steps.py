"""The training step of a verification that was given none: split the batch, call the model, compute a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..handler import ContextParallelHandler
from .record.share import Positions
from .record.trace import tensors

Known = Callable[[], Positions | None]
"""Returns the positions of this rank: they are known when the batch has been split."""


def styled_loss(model: nn.Module, batch: Any, handler: ContextParallelHandler, positions: Known) -> Tensor:
    """The loss of a plain model on this rank's share of a whole batch. Its gradients, averaged over the cp ranks, are
    those of one device."""
    shift = isinstance(batch, Mapping) and "labels" in batch and "shift_labels" not in batch
    local = handler.get_batch_on_this_cp_rank(batch, shift_labels=shift)
    with handler.documents(local):
        output = model(*local) if isinstance(local, (list, tuple)) else model(**_accepted(model, local))
    labels = local.get("shift_labels") if isinstance(local, Mapping) else None
    return _loss_of(output, labels, handler, positions)


def integrated_loss(model: nn.Module, local: Any, handler: ContextParallelHandler, positions: Known) -> Tensor:
    """The loss of a model that an integration has prepared, on its form of a batch. The model's own loss is a share of
    the mean, and gradients are averaged here."""
    output = model(**local)
    own = getattr(output, "loss", None)
    return own * handler.cp.size if isinstance(own, Tensor) else _loss_of(output, None, handler, positions)


def _loss_of(output: Any, labels: Tensor | None, handler: ContextParallelHandler, positions: Known) -> Tensor:
    """The loss that a model returned, the cross-entropy of its logits, or a fixed weighted sum of its output."""
    own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if isinstance(own, Tensor):
        return own
    first = logits if isinstance(logits, Tensor) else next((x for _, x in tensors(output)), None)
    if first is None or not first.is_floating_point():
        raise TypeError(
            f"the model returned a {type(output).__name__} without a floating-point tensor. verify compares losses and "
            "gradients. Pass loss_fn(model, batch, handler), which returns the loss of your training step"
        )
    if labels is not None and first.shape[:-1] == labels.shape:
        return handler.mean_loss(first, labels)
    known = positions()
    at = torch.arange(first.shape[1] if first.ndim > 1 else 0)
    if known is not None and handler.cp.size > 1:
        at = known.at
    if first.ndim < 2 or first.shape[1] != len(at):
        raise ValueError(
            f"the model returned {tuple(first.shape)}, which does not have the {len(at)} local positions in dimension "
            "1. verify does not know its loss. Pass loss_fn(model, batch, handler)"
        )
    return handler.mean_loss(_weighted(first, at.to(first.device)), mask=_counted(first, at, known))


def _weighted(x: Tensor, at: Tensor) -> Tensor:
    """A number for each position, in which every channel has another weight, and every position other weights."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    channels = torch.arange(x.shape[2], device=x.device)
    return (x * torch.cos(at[:, None] * 0.7 + channels * 1.3).to(x.dtype)).mean(2)


def _counted(x: Tensor, at: Tensor, positions: Positions | None) -> Tensor | None:
    """True for the positions ``[B, S/n]`` that are tokens."""
    if positions is None:
        return None
    counted = (at < positions.length).expand(x.shape[:2])
    if positions.padding is not None and len(positions.padding) == len(x):
        counted = counted & ~positions.padding[:, at.clamp(max=positions.length - 1)]
    return counted.to(x.device)


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model's forward takes by name."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    parameters = inspect.signature(model.forward).parameters
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in batch
    ]
    if missing:
        raise TypeError(
            f"the forward of {type(model).__name__} needs {', '.join(missing)}, but the batch has {list(batch)}. "
            "verify passes entries by name. Rename the entries, or pass loss_fn(model, batch, handler), which calls "
            "the model as your training step does"
        )
    return {name: batch[name] for name in parameters if name in batch}
