"""Attention to two sources of keys under one softmax: the tokens of a split sequence, and pooled keys of all of it.

Each source is an attention op of its own, and their partials merge with the sinks, as those of tiles do. In backward
each op gets the merged output and log-sum-exp, so that its gradients are those of one softmax over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mesh import cp_mesh
from ..mesh.arguments import check_int
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling
from ..schedule.lookup import resolve
from ..schedule.windows import seen_entries
from .checks import check, check_local, with_hosts
from .config import Call, CheckedCall, Mode
from .engine import Saved, attention_backward_op, attention_op, gradient_of_sinks, op_arguments
from .kernels.partials import Partials


@dataclass(frozen=True)
class Entries:
    """Pooled keys and values of the whole sequence, the same on every rank, for ``attention(..., entries=)``.

    Entry j is of the tokens up to ``(j + 1) * every - 1``: queries from there on see it.

    Args:
        k, v: ``[B, Hkv, E, D]`` and ``[B, Hkv, E, Dv]``, as :func:`hyper_cp.ops.gather_windows` returns them, with the
            rotary positions that they have.
        every: tokens from one entry to the next.
        selected: the only entries that each of this rank's queries sees, ``[B, 1 or Hkv, S/n, k]``, int32 or int64,
            each once; -1 is none. None: all that end before the query or at it.
    """

    k: Tensor
    v: Tensor
    every: int
    selected: Tensor | None = None


@torch.compiler.disable(
    reason="Attention to entries runs in two calls whose results are merged, which cannot be part of a compiled graph. "
    "Compile without fullgraph=True"
)
def attend_with_entries(
    q: Tensor, k: Tensor, v: Tensor, entries: Entries, cp: CPMesh, mode: Mode, call: Call, with_lse: bool = False
) -> Tensor:
    """Attention of local shards ``[B, H, S/n, D]`` to tokens and to entries, under one softmax. Documents of the call
    keep tokens apart (padding), but not entries, and do not place tokens. All ranks form one ring."""
    _check(q, entries, cp, mode, call, with_lse)
    with calling(call.name):
        mode, cp = with_hosts(mode, cp_mesh.as_ring(cp))
        number = entries.k.shape[2]
        cp.agree("call", (("entries", (number, entries.every, entries.selected is not None)),), call.name)
        q, k, v, tokens = check(q, k, v, call, cp, mode, exchanged=False)
        if not number:
            return cast(Tensor, attention_op(q, k, v, *op_arguments(q, k, v, tokens))[0])
        complete, selected = _complete(cp, mode.layout, q.shape[2], entries.every).to(q.device), entries.selected
        if selected is not None:
            selected = selected.masked_fill(selected >= complete, -1)
        own = Call(False, tokens.scale, name=call.name, enable_gqa=call.enable_gqa, selected=selected)
        q, of_keys, of_values, pooled = check(q, entries.k, entries.v, own, cp_mesh.alone(), Mode(), exchanged=False)
        first = complete if selected is None else None
        found: Tensor = _TwoSources.apply(q, k, v, of_keys, of_values, tokens.sinks, first, tokens, pooled)
        return found


def _complete(cp: CPMesh, layout: str, share: int, every: int) -> Tensor:
    """The number of entries that end before each of this rank's queries, or at it, ``[S/n, 1]``, on the CPU."""
    positions = resolve(layout, cp.size, share * cp.size, None).positions(cp.rank)
    return seen_entries(positions, None, every).complete.T


def _shown(complete: Tensor | None, number: int) -> Tensor | None:
    """The mask ``[1, 1, S/n, E]`` of queries that see the first of E entries, ``complete[S/n, 1]`` of them."""
    return None if complete is None else (torch.arange(number, device=complete.device) < complete)[None, None]


class _TwoSources(torch.autograd.Function):
    """The output of queries over tokens (on the mesh) and over entries (on this rank), of which they see the first
    ``first[S/n, 1]``; None: those that are selected. The mask of entries is made again for backward: it would be the
    largest tensor of a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        of_keys: Tensor,
        of_values: Tensor,
        sinks: Tensor | None,
        first: Tensor | None,
        tokens: CheckedCall,
        pooled: CheckedCall,
    ) -> Tensor:
        merged, rows, kept = Partials(q, v.shape[3], sinks), (0, q.shape[2]), []
        ctx.saved, ctx.sinks, mask = [], sinks is not None, _shown(first, of_keys.shape[2])
        calls = (k, v, replace(tokens, sinks=None)), (of_keys, of_values, replace(pooled, mask=mask))
        for keys, values, call in calls:
            arguments = op_arguments(q, keys, values, call)
            out, lse, kernel, _ = attention_op(q, keys, values, *arguments)
            merged.add(rows, None, out, lse)
            saved = Saved(*arguments[1:])
            tensors = [first if x is mask else x for x in saved.kept(arguments[0])]
            ctx.saved.append((saved, len(tensors)))
            kept += [keys, values, kernel, *tensors]
        out, lse = merged.result(rows)
        ctx.save_for_backward(q, out, lse, *(() if sinks is None else (sinks,)), *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *kept = ctx.saved_tensors
        sinks = kept.pop(0) if ctx.sinks else None
        dq = torch.zeros_like(q)
        of_sources: list[Tensor] = []
        for of_entries, (saved, number) in enumerate(ctx.saved):
            (keys, values, kernel), tensors, kept = kept[:3], kept[3 : 3 + number], kept[3 + number :]
            given = saved.operands(tensors, None, kernel)
            given.mask = _shown(given.mask, keys.shape[2]) if of_entries else given.mask
            arguments = saved.arguments(given)
            of_queries, *of_keys, _ = attention_backward_op(dout, q, keys, values, out, lse, *arguments)
            dq, of_sources = dq + of_queries, [*of_sources, *of_keys]
        of_sinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return dq, *of_sources, of_sinks, None, None, None


def _check(q: Tensor, entries: Entries, cp: CPMesh, mode: Mode, call: Call, with_lse: bool) -> None:
    """Raise, before any communication, for what attention to two sources does not do."""
    if not isinstance(entries, Entries):
        raise TypeError(
            f"{call.name}: entries is a {type(entries).__name__}. It must be pooled keys of the whole sequence. Pass "
            "hyper_cp.ops.Entries(k, v, every=...)"
        )
    check_int("every", entries.every, "It is the number of tokens from one entry to the next")
    check_local(f"{call.name}: query", q, 4, "[batch, heads, sequence, head_dim]")
    for name, x in (("k", entries.k), ("v", entries.v)):
        check_local(f"{call.name}: entries.{name}", x, 4, "[batch, key heads, entries, head_dim]")
    number = q.shape[2] * cp.size // entries.every
    if not entries.k.shape[2] == entries.v.shape[2] <= number:
        raise ValueError(
            f"{call.name}: entries has {entries.k.shape[2]} keys and {entries.v.shape[2]} values. There are as many of "
            f"both, and at most {number}, one for every {entries.every} of {q.shape[2] * cp.size} tokens. Pass those "
            "of the whole sequence, as gather_windows returns them"
        )
    refused = (
        (call.score is not None, "softcap or slices", "Leave them out"),
        (call.dropout_p > 0, f"dropout_p={call.dropout_p}", "Set dropout to 0.0"),
        (call.selected is not None, "selected", "Put the selected entries into Entries(selected=)"),
        (mode.kv_exchange == "replicated", "kv_exchange='replicated'", 'Use "all_gather" or "ring"'),
        (with_lse, "return_lse=True", "Leave it out"),
        (call.max_logits or mode.max_logits, "max_logits", "Leave it out"),
    )
    for applies, what, todo in refused:
        if applies:
            raise NotImplementedError(
                f"{call.name}: entries with {what} are not supported. Tokens and entries are two calls whose results "
                f"are merged. {todo}"
            )
