"""The pooled keys that each query of a split sequence selects, and the tokens that they stand for.

Entries are few, so all ranks have all of them, and each rank scores those that its own queries see. What a query sees
is a range of entries, which the host knows: no mask of all queries and entries exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.checkpoint import replayed
from ..mesh.arguments import check_int
from ..mesh.cp_mesh import CPMesh
from ..schedule.documents import read
from ..schedule.lookup import resolve
from ..schedule.tiles import FULL
from ..schedule.windows import SeenEntries, seen_entries
from .checks import check_local
from .differentiable import no_autocast
from .kernels.indexer import SCORES_AT_ONCE, BestKeys
from .kernels.inputs import TileInputs, at_once
from .kernels.partials import part
from .recurrence.checks import check_layout_of
from .selection import of_indexer


def select_entries(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    *,
    topk: int,
    every: int,
    mesh: DeviceMesh | CPMesh,
    scale: float | None = None,
    layout: str = "contiguous",
    documents: Any = None,
) -> Tensor:
    """Select, for each query of this rank, the ``topk`` entries with the highest scores among those that it sees.

    Entries are pooled keys of windows with a stride, which begin with each document. A query sees those of its document
    that end before it or at it. Scores are those of :func:`select_keys`. Nothing is communicated.

    Args:
        q: local queries of the indexer ``[B, H, S/n, D]``.
        k: the keys of all entries, ``[B, 1, E, D]``, as :func:`gather_windows` returns them, the same on every rank.
        weights: the local weights of heads ``[B, H, S/n]``; None: all are 1.
        topk: the number of entries that a query selects.
        every: the number of tokens from one entry to the next, as for :func:`windows`.
        mesh: the cp mesh of n ranks.
        scale: the factor of ``q . k``; default ``D ** -0.5``.
        layout, documents: as in :func:`windows`.

    Returns:
        Numbers of entries ``[B, 1, S/n, topk]``, int32, best first (of equal scores, the lower number); -1 where fewer
        are seen. They have no gradient, and a recompute by activation checkpointing gets those of its forward.

    Raises:
        ValueError, TypeError: on arguments that do not fit.

    Example::

        >>> pooled = windows(torch.randn(1, 8, 16), range(3, -1, -1), every=4, mesh=mesh).mean(2)
        >>> pooled = gather_windows(pooled, every=4, length=16, mesh=mesh).unsqueeze(1)
        >>> select_entries(torch.randn(1, 2, 8, 16), pooled, topk=3, every=4, mesh=mesh).shape
        torch.Size([1, 1, 8, 3])

    Source: the indexers of DeepSeek V4, Qwen 4 and GLM 5 in transformers.
    """
    name = "select_entries"
    check_int("topk", topk, "A query selects this many entries")
    check_local(f"{name}: query", q, 4, "[batch, heads, sequence, head_dim]")
    check_local(f"{name}: key", k, 4, "[batch, 1, entries, head_dim]")
    if weights is not None:
        check_local(f"{name}: weights", weights, 3, "[batch, heads, sequence]")
        if weights.shape != q.shape[:3]:
            raise ValueError(
                f"{name}: weights has shape {tuple(weights.shape)}. There is one weight for each head of a query. "
                f"Reshape it to {tuple(q.shape[:3])}"
            )
    b, _, share, dim = q.shape
    if k.shape != (b, 1, k.shape[2], dim):
        raise ValueError(
            f"{name}: key has shape {tuple(k.shape)}. It must be [{b}, 1, entries, {dim}], one head for all heads of "
            "the queries. Reshape it"
        )
    seen = _seen(name, b, share, every, mesh, layout, documents)
    if (last := int((stop := seen.first + seen.complete).max())) > k.shape[2]:
        raise ValueError(
            f"{name}: key has {k.shape[2]} entries, and this rank's queries see {last} (every={every}). Every rank "
            "needs the entries of the whole sequence. Pass them as gather_windows returns them for the same documents"
        )
    scale = dim**-0.5 if scale is None else scale
    with torch.no_grad(), no_autocast(q.device.type):
        return replayed(lambda: select_entries_op(q, k, weights, seen.first, stop, topk, scale))


def tokens_of_entries(
    selected: Tensor,
    *,
    every: int,
    mesh: DeviceMesh | CPMesh,
    tail: bool = True,
    layout: str = "contiguous",
    documents: Any = None,
) -> Tensor:
    """List the tokens of the entries that each query of this rank has selected, for ``attention(selected=)``.

    Args:
        selected: numbers of entries ``[B, 1, S/n, k]``, as :func:`select_entries` returns them.
        tail: list also the tokens of the query's document after its last complete entry, up to the query; these are
            ``every - 1`` at most.
        every, mesh, layout, documents: as in :func:`select_entries`.

    Returns:
        Global positions ``[B, 1, S/n, k * every + (every - 1 if tail else 0)]``, int32; -1 is none.

    Raises:
        ValueError, TypeError: on arguments that do not fit.

    Example::

        >>> selected = torch.zeros(1, 1, 8, 1, dtype=torch.int32)
        >>> tokens_of_entries(selected, every=4, mesh=mesh).shape
        torch.Size([1, 1, 8, 7])

    Source: the indexers of Qwen 4 and GLM 5 in transformers.
    """
    name = "tokens_of_entries"
    check_local(f"{name}: selected", selected, 4, "[batch, 1, sequence, entries]")
    found = _seen(name, selected.shape[0], selected.shape[2], every, mesh, layout, documents)
    # [rows, 1, S/n, 1] each, as numbers on the device
    start, first, complete = (x.to(selected.device, torch.int32).unsqueeze(1).unsqueeze(3) for x in found)
    offsets = torch.arange(every, dtype=torch.int32, device=selected.device)
    begins = (start + (selected - first) * every).unsqueeze(4)
    tokens = torch.where(selected.unsqueeze(4) < 0, -1, begins + offsets).flatten(3).to(torch.int32)
    if not tail or every == 1:
        return tokens
    cp, table = of_indexer(mesh, documents, name)
    queries = resolve(layout, cp.size, selected.shape[2] * cp.size, read(table)).positions(cp.rank)
    behind = start + complete * every + offsets[:-1]
    behind = torch.where(behind > queries.to(behind).unsqueeze(1), -1, behind)
    return torch.cat([tokens, behind.expand(len(tokens), -1, -1, -1)], 3)


def _seen(
    name: str, batch: int, share: int, every: int, mesh: DeviceMesh | CPMesh, layout: str, documents: Any
) -> SeenEntries:
    """The entries that this rank's queries see, on the CPU."""
    check_int("every", every, "Windows end at this distance from each other")
    cp, table = of_indexer(mesh, documents, name)
    check_layout_of(name, cp, layout, table, batch, share)
    packed = read(table)
    return seen_entries(resolve(layout, cp.size, share * cp.size, packed).positions(cp.rank), packed, every)


@torch.library.custom_op("hyper_cp::select_entries", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def select_entries_op(
    q: Tensor, k: Tensor, weights: Tensor | None, first: Tensor, stop: Tensor, topk: int, scale: float
) -> Tensor:
    """Some queries at a time, with the entries that any of them sees. Each sees those from ``first`` to before
    ``stop``, ``[B or 1, S/n]`` on the CPU."""
    best, share = BestKeys(q, topk), q.shape[2]
    size = max(1, at_once(SCORES_AT_ONCE, q) // max(1, len(q) * k.shape[2]))
    for begin in range(0, share, size):
        rows = begin, min(begin + size, share)
        low, high = first[:, slice(*rows)].unsqueeze(2), stop[:, slice(*rows)].unsqueeze(2)
        cols = int(low.min()), int(high.max())
        if cols[0] == cols[1]:
            continue
        numbers = torch.arange(*cols, device=q.device)
        mask = (numbers >= low.to(q.device)) & (numbers < high.to(q.device))
        keys = part(k, cols)
        tile = TileInputs(part(q, rows), keys, keys[..., :0], FULL, scale, mask.unsqueeze(1))
        best.add(tile, None if weights is None else part(weights, rows), part(best.best, rows), numbers)
    return best.result((0, share))[0]


@select_entries_op.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor | None, first: Tensor, stop: Tensor, topk: int, scale: float) -> Tensor:
    return q.new_empty(len(q), 1, q.shape[2], topk, dtype=torch.int32)
