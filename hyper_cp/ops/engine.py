"""The engine: one custom op that obtains keys and values, runs a kernel per tile, merges partials.

Every mode is this file: forward and backward walk the rank's schedule. The op saves only local
q, k, v, its output and the log-sum-exp; keys and values are fetched again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mesh import comm, cp_mesh
from ..mesh.cp_mesh import CPMesh
from ..schedule import lookup, masks
from ..schedule.build import Step
from ..schedule.documents import read
from ..schedule.layout import Range
from ..schedule.tiles import Band, Tile, intersect
from . import kernels
from .exchange import keys_values as exchange
from .kernels.dropout import Dropout
from .kernels.partials import Partials, RowSum, accumulation_dtype, like_queries, part


class _Plan:
    """The schedule of one call, and its explicit mask if that is not a band."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        documents: Tensor | None,
        mask: Tensor | None,
        mesh: CPMesh,
        layout: str,
        kv_exchange: str,
        load_balance: bool,
        lower: int | None,
        upper: int | None,
        seed: Tensor | None,
        dropout_p: float,
    ):
        length = q.shape[2] * mesh.ring.size
        kv_length = k.shape[2] * (1 if kv_exchange == "replicated" else mesh.ring.size)
        band: Band = (lower, upper)
        known = None if mask is None or length != kv_length else masks.recognised(mask, length)
        if known is not None:
            band, mask = intersect(band, known), None
        self.schedule = lookup.schedule(
            layout,
            mesh.ring.rank,
            mesh.ring.size,
            mesh.ulysses.size,
            kv_exchange,
            load_balance,
            band,
            length,
            kv_length,
            parts=mask is None and seed is None,
            documents=read(documents),
            batch=q.shape[0],
        )
        self.mask = None if mask is None else masks.MaskSlices(mask, self.schedule)
        heads_before = mesh.ulysses.rank * q.shape[1]
        queries = self.schedule.queries
        self.dropout = None if seed is None else Dropout(dropout_p, seed, q, heads_before, queries)

    def of(self, step: Step, tile: Tile) -> dict[str, Any]:
        """What the kernel is told of a tile beside its band and scale."""
        told: dict[str, Any] = {"mask": None if self.mask is None else self.mask.of(step, tile), "parts": tile.parts}
        return told if self.dropout is None else {**told, "keep": self.dropout.of(step, tile)}


def _take(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """The ranges of a block [B, H, S, D] that a step uses, side by side; one range is a view."""
    parts = [part(x, r) for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_taken(total: Tensor, ranges: tuple[Range, ...], tile: Tile, x: Tensor) -> None:
    """Add ``x``, which belongs to the keys of a tile, to where the taken ranges came from."""
    before = 0
    for start, stop in ranges:
        low, high = max(tile.k[0], before), min(tile.k[1], before + stop - start)
        if low < high:
            target = part(total, (start + low - before, start + high - before), tile.batch)
            target.add_(part(x, (low - tile.k[0], high - tile.k[0])))
        before += stop - start


def _dense(*tensors: Tensor) -> list[Tensor]:
    """Operators that take a log-sum-exp read head dims as contiguous without checking."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


@torch.library.custom_op("hyper_cp::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    mesh: str,
    layout: str,
    kv_exchange: str,
    load_balance: bool,
    lower: int | None,
    upper: int | None,
    scale: float,
    dropout_p: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """``(out, log-sum-exp)`` of this rank's queries. ``documents``: table of borders on the CPU.
    ``lower``, ``upper``: the band of global positions that is visible. ``seed``: of dropout, ``[1]`` on the
    CPU. ``kernel``: its name, or ""."""
    cp = cp_mesh.by_key(mesh)
    q, k, v = _dense(q, k, v)
    plan = _Plan(q, k, documents, mask, cp, layout, kv_exchange, load_balance, lower, upper, seed, dropout_p)
    steps, tiles = plan.schedule.forward, kernels.get(kernel, q, k, v)
    with comm.landing():
        blocks = exchange.FORWARD[kv_exchange](cp.ring, k, v, plan.schedule.hops)
        queries = exchange.SwappedTails(cp.ring, plan.schedule.swap, q)
        partials = Partials(q, v.shape[3])
        for step, (k_block, v_block) in zip(steps, blocks, strict=True):
            if step is steps[-1]:
                queries.post_results(partials.result)
            if not step.tiles:
                continue
            k_block, v_block = _take(k_block, step.take), _take(v_block, step.take)
            for tile in step.tiles:
                (q_rows,) = queries.rows(tile.q, tile.batch)
                k_rows, v_rows = part(k_block, tile.k, tile.batch), part(v_block, tile.k, tile.batch)
                # Not given a name here: what the kernel returns would outlive its merge.
                partials.add(
                    tile.q,
                    tile.batch,
                    *tiles.forward(q_rows, k_rows, v_rows, tile.band, scale, **plan.of(step, tile)),
                )
        out, lse = queries.results(partials.result)
    return _in_query_order(out), lse.contiguous()


@torch.library.custom_op("hyper_cp::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    fingerprint: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    mesh: str,
    layout: str,
    kv_exchange: str,
    load_balance: bool,
    lower: int | None,
    upper: int | None,
    scale: float,
    dropout_p: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of this rank's share. ``fingerprint``: of the documents that ``out`` was made with."""
    cp = cp_mesh.by_key(mesh)
    _check_recompute(documents, mesh, fingerprint)
    dout, q, k, v = _dense(dout, q, k, v)
    plan = _Plan(q, k, documents, mask, cp, layout, kv_exchange, load_balance, lower, upper, seed, dropout_p)
    steps, tiles = plan.schedule.backward, kernels.get(kernel, q, k, v)
    with comm.landing():
        blocks = exchange.BACKWARD[kv_exchange](cp.ring, k, v, plan.schedule.hops, accumulation_dtype(q.dtype))
        queries = exchange.SwappedTails(cp.ring, plan.schedule.swap, q, dout, out, lse)
        dq = RowSum(q)
        for step, (k_block, v_block, dk, dv) in zip(steps, blocks, strict=True):
            if step is steps[-1]:
                queries.post_results(dq.result)
            if not step.tiles:
                continue
            k_block, v_block = _take(k_block, step.take), _take(v_block, step.take)
            for tile in step.tiles:
                q_rows, dout_rows, out_rows, lse_rows = queries.rows(tile.q, tile.batch)
                k_rows, v_rows = part(k_block, tile.k, tile.batch), part(v_block, tile.k, tile.batch)
                dq_tile, dk_tile, dv_tile = tiles.backward(
                    dout_rows,
                    q_rows,
                    k_rows,
                    v_rows,
                    out_rows,
                    lse_rows,
                    tile.band,
                    scale,
                    **plan.of(step, tile),
                )
                dq.add(tile.q, tile.batch, dq_tile)
                _add_taken(dk, step.take, tile, dk_tile)
                _add_taken(dv, step.take, tile, dv_tile)
                del dq_tile, dk_tile, dv_tile
        (dq_local,) = queries.results(dq.result)
    dk_home, dv_home = blocks.home
    return (
        _in_query_order(dq_local),
        _in_query_order(dk_home.to(k.dtype)),
        _in_query_order(dv_home.to(v.dtype)),
    )


def _in_query_order(x: Tensor) -> Tensor:
    """[B, H, S, D] in memory order [B, S, H, D]: one fixed layout, which the fakes can promise."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return like_queries(q, v.shape[3], q.dtype), lse


@attention_backward_op.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (like_queries(x, x.shape[3], x.dtype) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.documents, mask, seed, *ctx.settings = inputs
    mark = _fingerprint(ctx.documents, ctx.settings[0])
    ctx.save_for_backward(q, k, v, *output, mark, mask, seed)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Any, ...]:
    *saved, mask, seed = ctx.saved_tensors
    grads = attention_backward_op(dout, *saved, ctx.documents, mask, seed, *ctx.settings)
    return (*grads, *(None for _ in range(3 + len(ctx.settings))))


attention_op.register_autograd(_differentiate, setup_context=_save)


# --------------------------------------------------------------------------- recompute
#
# Saved tensors are those of the recompute, if activation checkpointing made one; attributes of ctx
# are those of the forward. So documents and mesh are kept as attributes and their fingerprint as a saved
# tensor: backward always uses what the forward used, and notices if the recompute saw something else.


@torch.library.custom_op("hyper_cp::fingerprint", mutates_args=())
def _fingerprint(documents: Tensor | None, mesh: str) -> Tensor:
    """``[1]`` int64 on the CPU that stands for these documents and this mesh."""
    return torch.tensor([_hash(documents, mesh)])


@_fingerprint.register_fake
def _(documents: Tensor | None, mesh: str) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


def _hash(documents: Tensor | None, mesh: str) -> int:
    return hash((mesh, None if documents is None else read(documents).digest))


def _check_recompute(documents: Tensor | None, mesh: str, fingerprint: Tensor) -> None:
    if _hash(documents, mesh) != fingerprint.item():
        had = "no packed documents" if documents is None else f"documents={documents.tolist()}"
        raise RuntimeError(
            "activation checkpointing recomputed this attention with other packed documents, or on another cp mesh, "
            f"than its forward had ({had} on {cp_mesh.by_key(mesh)}): the block that said so had ended, or another one "
            "was active. Pass documents= to the styled module as a keyword argument (through the checkpointed "
            "function), or run backward inside the block"
        )
