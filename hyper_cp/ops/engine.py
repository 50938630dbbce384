"""The engine: one custom op that obtains keys and values, runs a kernel per tile, and merges partials.

All modes run this code: forward and backward walk the rank's schedule. The op saves only local
q, k, v, its output and the log-sum-exp; keys and values are fetched again in backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mesh import cp_mesh, nans
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import backward_of, caller, operation
from ..schedule import choices, lookup
from ..schedule.build import Step
from ..schedule.documents import read
from ..schedule.tiles import Band, Tile, intersect
from . import exchange, kernels, masks
from .config import Call, CheckedCall, Mode, OpSettings, op_settings
from .exchange.tails import SwappedTails
from .kernels.dropout import Dropout, draw_seed
from .kernels.inputs import TileInputs
from .kernels.partials import Partials, RowSum, accumulation_dtype, add, like_queries, part
from .kernels.scores import TileScores, find
from .recompute import check_recompute, fingerprint


class TileEngine:
    """The engine as a core of :func:`hyper_cp.ops.attention.attend`. The result is the output, or ``(output,
    log-sum-exp)``."""

    def __init__(self, with_lse: bool = False) -> None:
        self.with_lse = with_lse

    def compiles(self, cp: CPMesh, mode: Mode, call: Call) -> bool:
        """The engine is one op in a graph."""
        return True

    def settle(self, q: Tensor, cp: CPMesh, mode: Mode, call: Call) -> tuple[TileEngine, Call]:
        """The engine takes every call as it is."""
        return self, call

    def check(self, q: Tensor, k: Tensor, call: CheckedCall) -> None:
        """Raise if the score function of the call, if it has one, does not fit it."""
        if call.score is not None:
            heads = q.shape[1] * (call.cp.ulysses.size if call.exchanged else 1)
            call.score.check(call.name, q.shape[0], heads, call.lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Any:
        own = call.documents is None and call.mode.window is None and call.sinks is None and call.score is None
        if call.cp.size == 1 and own and not self.with_lse:
            return self._alone(q, k, v, call)
        found = attention_op(q, k, v, *op_arguments(q, k, v, call))
        return found[:2] if self.with_lse else found[0]

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Tensor:
        """On one rank exactly the user's own call."""
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, call.mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=gqa
        )


def op_arguments(q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> tuple[Any, ...]:
    """The arguments after q, k, v of the op that computes a call."""
    seed, score = draw_seed() if call.dropout_p else None, call.score
    kernel = kernels.choose(q, k, v, call.is_causal, call.dropout_p, score is not None)
    captured = [] if score is None else list(score.captured)
    tensors = call.sinks, captured, call.documents, call.mask, seed
    return *tensors, call.scale, call.dropout_p, call.settings(kernel)


class _Work:
    """The work of one call on this rank: its schedule, its kernel, and what each tile sees."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: list[Tensor],
        documents: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout_p: float,
        settings: OpSettings,
        chosen: Tensor | None = None,
    ) -> None:
        self.cp = cp = cp_mesh.by_key(settings.mesh)
        score, name = find(settings.score), settings.kernel
        if not name and chosen is not None:  # the forward chose when it ran
            name = kernels.name_of(int(chosen.item()), q.device.type)
        self.scale, self.kernel = scale, kernels.get(name, q, k, v, score is not None)
        self.kernel_name = name or self.kernel.name
        length = q.shape[2] * cp.ring.size
        kv_length = k.shape[2] * (1 if settings.kv_exchange == "replicated" else cp.ring.size)
        self.lengths = length, kv_length
        band: Band = settings.band
        known = None if mask is None or length != kv_length else masks.recognised(mask, length)
        if known is not None:
            band, mask = intersect(band, known), None
        self.schedule = lookup.schedule(
            settings.layout,
            cp.ring.rank,
            cp.ring.size,
            cp.ulysses.size,
            settings.kv_exchange,
            settings.load_balance,
            band,
            length,
            kv_length,
            parts=mask is None and seed is None,
            documents=read(documents),
            batch=q.shape[0],
            blocks=None if score is None else score.blocks,
            stages=settings.exchange_stages
            or choices.stage_limits(settings.kv_exchange, q.device.type, k.shape[1], documents is not None),
        )
        kernels.check(self.kernel, mask is not None, band)
        exchange.warn_of_cost(settings.layout, settings.kv_exchange, self.schedule, k.shape[2], mask)
        self.band, self.mask = band, None if mask is None else masks.MaskSlices(mask, self.schedule)
        heads_before = settings.heads_before(cp.ulysses.rank, q.shape[1])
        queries = self.schedule.queries
        self.dropout = None if seed is None else Dropout(dropout_p, seed, q, heads_before, queries)
        self.scores = None if score is None else TileScores(score, q, heads_before, queries, captured)

    def inputs(
        self, step: Step, tile: Tile, q_rows: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None
    ) -> TileInputs:
        """A tile of queries ``q_rows`` and of the keys that a step uses."""
        return TileInputs(
            q_rows,
            part(k, tile.k, tile.batch),
            part(v, tile.k, tile.batch),
            tile.band,
            self.scale,
            None if self.mask is None else self.mask.of(step, tile),
            tile.parts,
            None if self.dropout is None else self.dropout.of(step, tile),
            None if self.scores is None else self.scores.of(step, tile),
            dlse,
            self.schedule.recurring,
        )


class _UsedKeys:
    """The keys and values of a block that a step uses, side by side: a view if they are one range of it."""

    def __init__(self, step: Step, *block: Tensor) -> None:
        self.rows = step.used
        self.k, self.v = (self.rows.take(x, 2) for x in block)


class _KeyGradients:
    """Adds the gradients of the used keys to where the keys came from in the block.

    A few ranges are added to one by one. For many, whose number grows with ranks and documents, the sums of a step are
    added in one operation when it ends.
    """

    def __init__(self, keys: _UsedKeys, *totals: Tensor) -> None:
        self.rows, self.totals = keys.rows, totals
        self.sums = [RowSum(keys.k), RowSum(keys.v)] if self.rows.many else []

    def add(self, tile: Tile, *gradients: Tensor) -> None:
        """Add the gradients of a tile's keys and values."""
        for apart, x in zip(self.sums, gradients, strict=False):
            apart.add(tile.k, tile.batch, x)
        for total, x in zip(() if self.sums else self.totals, gradients, strict=False):
            for start, rows in self.rows.within(tile.k):  # from `start` of the tile on
                add(part(total, rows, tile.batch), x.narrow(2, start, rows[1] - rows[0]))

    def finish(self) -> None:
        """Add what has been summed up apart."""
        for total, apart in zip(self.totals, self.sums, strict=False):
            self.rows.add(total, apart.total(), 2)


def _last_dim_contiguous(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors whose head dim is not contiguous: operators that take a log-sum-exp read it so, unchecked."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Leave autocast inside an op: its tensors were cast at the entrance, and what it adds up is in wider dtypes."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


@torch.library.custom_op("hyper_cp::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    captured: list[Tensor],
    documents: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, log-sum-exp, kernel)`` of this rank's queries. ``kernel``: the number of the kernel that ran, ``[1]`` on
    the CPU, for backward: under torch.compile it is chosen here.

    Args:
        sinks: one logit for each head of ``q`` that takes weight and gives no value, ``[H]``.
        captured: tensors that the score function uses and gives gradients to.
        documents: table of cumulative lengths, on the CPU.
        mask: explicit, of the heads of this rank.
        seed: of dropout, ``[1]`` on the CPU.
        settings: everything else, see :class:`~hyper_cp.ops.config.OpSettings`.
    """
    options = op_settings(settings)
    q, k, v = _last_dim_contiguous(q, k, v)
    work = _Work(q, k, v, captured, documents, mask, seed, scale, dropout_p, options)
    plan, ring = work.schedule, work.cp.ring
    # Rows of a mask that are all the same show the same keys to every query: only a window may be causal then.
    alike = mask is None or mask.shape[2] == 1 < work.lengths[0] == work.lengths[1]
    known = (alike or work.mask is None) and (work.scores is None or not work.scores.score.positional)
    causal = work.band[1] == 0 if known else None
    work.cp.batch.record_attention(q.shape[2] // work.cp.ulysses.size, documents, causal)
    with _no_autocast(q.device.type), operation(work.cp, "attention", "forward"):
        watched(work.cp, options, "query, key, value", q, k, v)
        blocks = exchange.FORWARD[options.kv_exchange](ring, k, v, plan)
        queries = SwappedTails(ring, plan.swap, q)
        partials = Partials(q, v.shape[3], sinks)
        for step, block in zip(plan.forward, blocks, strict=True):
            if step is plan.forward[-1]:
                queries.post_results(partials.result)
            if not step.tiles:
                continue
            keys = _UsedKeys(step, *block)
            for tile in step.tiles:
                (q_rows,) = queries.rows(tile.q, tile.batch)
                inputs = work.inputs(step, tile, q_rows, keys.k, keys.v)
                # Without a local name for the kernel's results: it would keep them alive beyond their merge.
                partials.add(tile.q, tile.batch, *work.kernel.forward(inputs))
        out, lse = queries.results(partials.result)
        watched(work.cp, options, "the output", out)
    return _bshd_in_memory(out), lse.contiguous(), torch.tensor([kernels.number_of(work.kernel_name)])


@torch.library.custom_op("hyper_cp::attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    chosen: Tensor,
    mark: Tensor,
    captured: list[Tensor],
    documents: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """``(dq, dk, dv)`` of this rank's share, and its gradients of ``captured``.

    Args:
        dlse: the gradient of the log-sum-exp, of calls with a score function.
        chosen: the kernel that made ``out``, as :func:`attention_op` returns it.
        mark: the fingerprint of the documents that ``out`` was made with.
    """
    options = op_settings(settings)
    check_recompute(documents, options.mesh, mark)
    dout, q, k, v = _last_dim_contiguous(dout, q, k, v)
    work = _Work(q, k, v, captured, documents, mask, seed, scale, dropout_p, options, chosen)
    if work.scores is not None:
        work.scores.score.check_unchanged()
    plan, ring = work.schedule, work.cp.ring
    with _no_autocast(q.device.type), operation(work.cp, "attention", "backward"):
        watched(work.cp, options, "the gradient of the output, query, key, value", dout, q, k, v)
        blocks = exchange.BACKWARD[options.kv_exchange](ring, k, v, plan, accumulation_dtype(q.dtype))
        queries = SwappedTails(ring, plan.swap, q, dout, out, lse, *([] if dlse is None else [dlse]))
        dq = RowSum(q)
        for step, (k_block, v_block, dk, dv) in zip(plan.backward, blocks, strict=True):
            if step is plan.backward[-1]:
                queries.post_results(dq.result)
            if not step.tiles:
                continue
            keys = _UsedKeys(step, k_block, v_block)
            key_gradients = _KeyGradients(keys, dk, dv)
            for tile in step.tiles:
                q_rows, *of_rows = queries.rows(tile.q, tile.batch)
                inputs = work.inputs(step, tile, q_rows, keys.k, keys.v, *of_rows[3:])
                dq_tile, *gradients = work.kernel.backward(inputs, *of_rows[:3])
                dq.add(tile.q, tile.batch, dq_tile)
                key_gradients.add(tile, *gradients)
                del inputs, dq_tile, gradients  # freed before the next tile
            key_gradients.finish()
        (dq_local,) = queries.results(dq.result)
        watched(work.cp, options, "the gradients of query, key, value", dq_local, *blocks.home)
    dk_home, dv_home = (home.to(x.dtype) for home, x in zip(blocks.home, (k, v), strict=True))
    others = [] if work.scores is None else work.scores.gradients
    of_captured = [total.to(x.dtype) for total, x in zip(others, captured, strict=True)]
    return _bshd_in_memory(dq_local), _bshd_in_memory(dk_home), _bshd_in_memory(dv_home), of_captured


def watched(cp: CPMesh, options: OpSettings, names: str, *tensors: Tensor) -> None:
    """Check tensors for NaN, if that is asked for. Calls in which nothing travels need not be made by all ranks."""
    if nans.watch.on and (options.kv_exchange != "replicated" or cp.ulysses.size > 1):
        nans.check(cp, names, *tensors)


def _bshd_in_memory(x: Tensor) -> Tensor:
    """[B, H, S, D] in memory order [B, S, H, D]: one fixed layout, which the fakes can promise."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return like_queries(q, v.shape[3], q.dtype), lse, torch.empty(1, dtype=torch.int64)


@attention_backward_op.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Any,
    chosen: Any,
    mark: Any,
    captured: Any,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (like_queries(x, x.shape[3], x.dtype) for x in (q, k, v))
    return dq, dk, dv, [torch.empty_like(x) for x in captured]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, captured, ctx.documents, mask, seed, *ctx.numbers, ctx.settings = inputs
    options = op_settings(ctx.settings)
    mark = fingerprint(ctx.documents, options.mesh)
    ctx.save_for_backward(q, k, v, *output, mark, mask, seed, sinks, *captured)
    ctx.caller = caller()
    ctx.score = find(options.score)  # backward finds it by its key for as long as somebody holds it
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 if ctx.score is None else 2 :])


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, chosen, mark, mask, seed, sinks, *captured = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    others = dlse, chosen, mark, captured, ctx.documents, mask, seed
    with backward_of(ctx.caller):
        *grads, of_captured = attention_backward_op(dout, q, k, v, out, lse, *others, *ctx.numbers, ctx.settings)
    of_sinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse, dlse)
    return *grads, of_sinks, of_captured, None, None, None, None, None, None


def gradient_of_sinks(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> Tensor:
    """The gradient of the sinks ``[H]`` through this rank's rows. A sink's value is zero, so the gradient of its logit
    is its weight times minus the (dout . out) of the row (plus the gradient of the log-sum-exp, if there is one)."""
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp().nan_to_num(0.0)  # both may be -inf
    per_row = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    per_row = per_row if dlse is None else per_row - dlse
    return (weight * per_row).sum((0, 2)).neg().to(sinks.dtype)


attention_op.register_autograd(_differentiate, setup_context=_save)
