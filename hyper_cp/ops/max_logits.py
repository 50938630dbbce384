"""The largest attention logit of each head, by which QK-clip scales weights: of a call, and kept by modules for a step.

The engine returns the largest logit of each query. Here the queries that are padding are left out and the maximum is
taken: over those of this rank, then over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._torch.checkpoint import repeats_gradients
from .._torch.modes import unseen
from ..mesh.comm import gather_ranks
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import operation
from ..schedule.documents import read, tokens_of
from ..schedule.lookup import resolve

_KEPT = "hyper_cp_max_logits"
CALLS = 64
"""Calls of which a module keeps its own largest logits; those of more are one."""


def of_heads(rows: Tensor, cp: CPMesh, layout: str, documents: Tensor | None, counted: Tensor | None = None) -> Tensor:
    """The largest logit of each head ``[H]`` of this rank's queries ``[B, H, S/n]``; -inf if none sees a key.

    Args:
        counted: ``[B, S/n]``, False for queries that are padding. They are also those that ``documents`` know.
    """
    tokens = tokens_of(documents)
    if documents is not None and tokens is not None:
        at = resolve(layout, cp.size, tokens.shape[1], read(documents)).positions(cp.rank)
        rows = rows.masked_fill(~tokens[:, at].unsqueeze(1).to(rows.device), -torch.inf)
    if counted is not None:
        rows = rows.masked_fill(~counted.bool().unsqueeze(1), -torch.inf)
    return rows.amax((0, 2)) if rows.numel() else rows.new_full(rows.shape[1:2], -torch.inf)


def of_all_ranks(rows: Tensor, cp: CPMesh, layout: str, documents: Tensor | None) -> Tensor:
    """The largest logit of each head ``[H]`` over the queries of all ranks. One small communication."""
    with operation(cp, "maximum of logits"):
        return gather_ranks(cp.flat, of_heads(rows.detach(), cp, layout, documents)).amax(0)


@torch.compiler.disable(
    reason="A module keeps its largest logits (max_logits=True) outside of a graph. Compile without fullgraph=True"
)
def keep(
    module: nn.Module, rows: Tensor, cp: CPMesh, layout: str, documents: Tensor | None, counted: Tensor | None = None
) -> None:
    """Let a module keep the largest logit of each head, of this call and of those since :func:`take`. (A recompute by
    activation checkpointing repeats what the forward had, which may be taken already. That of a reentrant checkpoint is
    the first run with gradients.) Arguments: see :func:`of_heads`."""
    if repeats_gradients():
        return
    kept = module.__dict__.get(_KEPT, [])
    # Maxima are taken where no selective checkpoint sees them: a recompute, which takes none, may return what it has
    # saved of others.
    if len(kept) == CALLS:
        kept = [unseen(lambda: torch.stack(kept).amax(0), rows.device)]
    # A new list: who restores the attributes of modules (verify) restores what they kept.
    new = unseen(lambda: of_heads(rows.detach(), cp, layout, documents, counted), rows.device)
    module.__dict__[_KEPT] = [*kept, new]


@contextmanager
def ignored(model: nn.Module) -> Iterator[None]:
    """A block whose tokens are none of the training: what modules keep of its calls is -inf."""
    before = [(module, module.__dict__.pop(_KEPT, [])) for module in model.modules()]
    try:
        yield
    finally:
        for module, kept in before:
            kept += [torch.full_like(x, -torch.inf) for x in module.__dict__.pop(_KEPT, [])[:1]]
            if kept:
                module.__dict__[_KEPT] = kept


def take(model: nn.Module) -> dict[str, Tensor]:
    """Take what the modules of a model have kept, by their names: they forget it."""
    modules = [(name, module) for name, module in model.named_modules() if _KEPT in module.__dict__]
    return {name: torch.stack(module.__dict__.pop(_KEPT)).amax(0) for name, module in modules}
