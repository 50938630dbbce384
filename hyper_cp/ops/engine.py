"""The engine: one custom op that obtains keys and values, runs a kernel per tile, and merges partials.

Every mode runs this code, but for one rank alone and for compiled FlexAttention. Forward and backward are one loop. The
op saves only local q, k, v, its output and the log-sum-exp; keys and values are fetched again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mesh import cp_mesh, nans
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import backward_of, caller, operation
from ..schedule import choices, lookup
from ..schedule.build import Step
from ..schedule.documents import read
from ..schedule.ranges import Range
from ..schedule.tiles import CAUSAL, FULL, Band, Tile, intersect
from . import exchange, kernels, masks
from .config import DIFFERENTIATED, CheckedCall, Operands, OpSettings
from .differentiable import differentiable, no_autocast
from .entries import EntryTiles
from .exchange.tails import SwappedTails
from .exchange.travel import Gradients, Travel
from .kernels.dropout import Dropout, draw_seed
from .kernels.inputs import TileInputs
from .kernels.partials import Partials, RowSum, accumulation_dtype, add, like_queries, part
from .kernels.scores import TileScores, find
from .kernels.selected import Selections
from .latents import Absorbed, Expansion, absorb
from .recompute import check_recompute, check_replay, fingerprint
from .selected_check import check_selected


class TileEngine:
    """The engine, as :func:`hyper_cp.ops.attention.attend` calls it. The result is the output, or a tuple of the
    output, the log-sum-exp (``with_lse``) and the largest logit of each query (if the call asks for it)."""

    def __init__(self, with_lse: bool = False) -> None:
        self.with_lse = with_lse

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Any:
        if call.selected is not None and call.weight is not None and v.shape[1] == call.selected.shape[1] == 1:
            return self._absorbed(q, k, v, call)
        # (A mode that keeps the largest logits keeps none in a checkpoint's first forward, and some in its second one.)
        if call.cp.size == 1 and not (self.with_lse or call.max_logits or call.mode.max_logits):
            hiding = call.documents, call.mode.window, call.sinks, call.score, call.entries, call.selected
            if all(x is None for x in hiding):
                return self._plain_sdpa(q, k, v, call)
        return self.asked(call, *differentiable_attention(q, k, v, *op_arguments(q, k, v, call)))

    def asked(self, call: CheckedCall, out: Tensor, lse: Tensor, _: Tensor, largest: Tensor) -> Any:
        """The results of the op that are asked for."""
        found = out, *[lse][: self.with_lse], *[largest][: call.max_logits]
        return found if len(found) > 1 else out

    def _absorbed(self, q: Tensor, latent: Tensor, rope: Tensor, call: CheckedCall) -> Any:
        """Latent attention to selected keys. Expanding all keys would take longer than attending to few of them."""
        q, latent, output = absorb(q, latent, rope.shape[3], cast(Tensor, call.weight), call.bias)
        call = replace(call, weight=None, bias=None)
        arguments = op_arguments(q, latent, rope, call, absorbed=True)
        out, *others = differentiable_attention(q, latent, rope, *arguments)
        return self.asked(call, output(out), *others)

    def _plain_sdpa(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Tensor:
        """On one rank exactly the user's own call."""
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, call.mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=gqa
        )


def op_arguments(
    q: Tensor, k: Tensor, v: Tensor, call: CheckedCall, absorbed: bool = False
) -> tuple[list[Tensor], float, float, str]:
    """The arguments after q, k, v of the op that computes a call."""
    seed, score = draw_seed() if call.dropout_p else None, call.score
    pooled = (None, None, None) if call.entries is None else (call.entries.k, call.entries.v, call.entries.selected)
    given = Operands(
        call.sinks,
        call.documents,
        call.mask,
        seed,
        weight=call.weight,
        bias=call.bias,
        entry_keys=pooled[0],
        entry_values=pooled[1],
        selected=call.selected,
        entry_selected=pooled[2],
        captured=() if score is None else score.captured,
    )
    seen = _attended(q, k, v, given, absorbed)
    kinds = score is not None, call.selected is not None
    kernel = kernels.choose(q, *seen, call.is_causal, call.dropout_p, *kinds)
    return call.settings(kernel, absorbed).arguments(given, call.scale, call.dropout_p)


def _latents(q: Tensor, given: Operands, absorbed: bool, sums: bool = False) -> Expansion | Absorbed | None:
    """Return what makes keys and values of what travels; None: these travel themselves."""
    if absorbed:
        return Absorbed()
    return None if given.weight is None else Expansion(q, given.weight, given.bias, sums)


def _attended(q: Tensor, k: Tensor, v: Tensor, given: Operands, absorbed: bool) -> tuple[Tensor, Tensor]:
    """Keys and values as a kernel gets them, by their shapes."""
    latents = _latents(q, given, absorbed)
    return (k, v) if latents is None else latents.like(k, v)


class Work:
    """The work of one call on this rank: its schedule, its kernel, and what each tile sees."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        given: Operands,
        scale: float,
        dropout_p: float,
        settings: OpSettings,
        backward: bool = False,
    ) -> None:
        self.cp = cp = cp_mesh.by_key(settings.mesh)
        score, name, mask = find(settings.score), settings.kernel, given.mask
        if not name and given.kernel is not None:  # the forward chose when it ran
            name = kernels.name_of(int(given.kernel.item()), q.device.type)
        elif not name:
            seen, kinds = _attended(q, k, v, given, settings.absorbed), (score is not None, given.selected is not None)
            name = kernels.choose(q, *seen, settings.band == CAUSAL, 0.0, *kinds)
        self.scale, self.kernel, self.kernel_name = scale, kernels.get(name, q.device.type), name
        length = q.shape[2] * cp.ring.size
        kv_length = k.shape[2] * (1 if settings.kv_exchange == "replicated" else cp.ring.size)
        self.lengths = length, kv_length
        band: Band = settings.band
        known = None if mask is None or length != kv_length else masks.recognised(mask, length, settings.in_graph)
        if known is not None:
            band, mask = intersect(band, known), None
        key = lookup.Key(
            settings.layout,
            cp.ring.rank,
            cp.ring.size,
            cp.ulysses.size,
            settings.kv_exchange,
            settings.load_balance,
            band,
            length,
            kv_length,
            parts=mask is None and given.seed is None and given.selected is None,
            stages=settings.exchange_stages
            or choices.stage_limits(settings.kv_exchange, q.device.type, k.shape[1], given.documents is not None),
            most_keys=None if given.weight is None else k.shape[2],
        )
        blocks = None if score is None else score.blocks
        self.schedule = lookup.schedule(key, read(given.documents), q.shape[0], blocks)
        kernels.check(self.kernel, mask is not None, band)
        exchange.warn_of_cost(settings.layout, settings.kv_exchange, self.schedule, k.shape[2], mask)
        self.band, self.mask = band, None if mask is None else masks.MaskSlices(mask, self.schedule)
        heads_before = settings.heads_before(cp.ulysses.rank, q.shape[1])
        queries = self.schedule.queries
        self.dropout = None if given.seed is None else Dropout(dropout_p, given.seed, q, heads_before, queries)
        self.scores = None if score is None else TileScores(score, q, heads_before, queries, given.captured)
        self.selections = None if given.selected is None else Selections(given.selected, settings.block)
        self.latents = _latents(q, given, settings.absorbed, backward)
        self.entries: EntryTiles | None = None
        if given.entry_keys is not None and given.entry_values is not None:
            pooled = given.entry_keys, given.entry_values, given.entry_selected
            self.entries = EntryTiles(q, *pooled, queries, settings.every, scale)

    def run(
        self,
        steps: Sequence[Step],
        keys: Travel,
        queries: SwappedTails,
        compute: Compute,
        result: Callable[[Range], Sequence[Tensor]],
    ) -> None:
        """Attend, differentiate or select, tile by tile, as keys and queries arrive: the loop of every mode.

        Args:
            compute: computes one tile and keeps its result, given its inputs, what belongs to its queries beside q, and
                where it adds the gradients of its keys.
            result: what has been computed of a range of queries.
        """
        blocks = iter(keys)
        for tile, make in self.entries.tiles() if self.entries else ():  # while keys of other ranks are on their way
            q_rows, *of_rows = queries.rows(tile.q)
            compute(tile, make(q_rows), of_rows, self.entries)
        for step in steps:
            if not step.again:
                block, gradients = next(blocks)
            if step is steps[-1]:
                queries.post_results(result)
            if not step.tiles:
                continue
            used = step.used
            taken = k, v = used.take(block[0], 2), used.take(block[1], 2)
            if self.latents is not None:
                k, v = self.latents(k, v)
            into = KeyGradients(step, k, v[..., :0] if keys.keys_only else v, gradients, self.latents, taken)
            for tile in step.tiles:
                q_rows, *of_rows = queries.rows(tile.q, tile.batch)
                compute(tile, self.inputs(step, tile, q_rows, k, v), of_rows, into)
            into.finish()
            del k, v, taken, into  # before the next block is taken and expanded
        if next(blocks, None) is not None:  # asking carries out what is left: gradients that come home
            raise RuntimeError("a block has arrived for which the schedule has no step")

    def inputs(self, step: Step, tile: Tile, q_rows: Tensor, k: Tensor, v: Tensor) -> TileInputs:
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
            selected=None if self.selections is None else self.selections.of(step, tile),
            joint=isinstance(self.latents, Absorbed),
            recurring=self.schedule.recurring,
        )


class KeyGradients:
    """Adds the gradients of the used keys of a step to where the keys came from in the block.

    A few ranges are added to one by one. For many, whose number grows with ranks and documents, the sums of a step are
    added in one operation when it ends; so are those of keys that were made from latents, ``taken`` from the block.
    """

    kernel: kernels.Kernel | None = None
    """None: that of the call."""
    _totals: Sequence[Tensor] | None = None

    def __init__(
        self,
        step: Step,
        k: Tensor,
        v: Tensor,
        totals: Gradients | None,
        latents: Expansion | Absorbed | None = None,
        taken: Sequence[Tensor] = (),
    ) -> None:
        self.step, self.latents, self.taken, self._asked = step, latents, taken, totals
        self.sums = [RowSum(k), RowSum(v)] if totals and (step.used.many or latents is not None) else []

    @property
    def totals(self) -> Sequence[Tensor]:
        """The sums of gradients of k and of v."""
        if self._totals is None:
            # The first addition may wait for the sum of other ranks, if no tile is left that would hide that.
            late = len(self.step.tiles) == 1 or bool(self.sums)
            self._totals = () if self._asked is None else self._asked(late)
        return self._totals

    def add(self, tile: Tile, *gradients: Tensor) -> None:
        """Add the gradients of a tile's keys and values."""
        for apart, x in zip(self.sums, gradients, strict=False):
            apart.add(tile.k, tile.batch, x)
        if self.sums:
            return
        ranges = [*self.step.used.within(tile.k)]
        for total, x in zip(self.totals, gradients, strict=False):
            for start, rows in ranges:  # from `start` of the tile on
                add(part(total, rows, tile.batch), x.narrow(2, start, rows[1] - rows[0]))

    def finish(self) -> None:
        """Add what has been summed up apart."""
        if not self.sums:
            return
        gradients = [apart.total() for apart in self.sums]
        if self.latents is not None:
            gradients = [
                x.to(total.dtype)
                for x, total in zip(self.latents.pull_back(*self.taken, *gradients), self.totals, strict=True)
            ]
        for total, x in zip(self.totals, gradients, strict=True):
            self.step.used.add(total, x, 2)


Compute = Callable[[Tile, TileInputs, Sequence[Tensor], Any], None]
"""The last argument is a :class:`KeyGradients`, or for tiles over entries :class:`EntryTiles`."""


def last_dim_contiguous(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors whose head dim is not contiguous: operators that take a log-sum-exp read it so, unchecked."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


@torch.library.custom_op("hyper_cp::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], scale: float, dropout_p: float, settings: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, log-sum-exp, kernel, largest logits)`` of this rank's queries; the last ``[0]`` if they are not asked
    for. ``kernel``: the number of the kernel of backward, ``[1]`` on the CPU: under torch.compile it is chosen here.

    Args:
        tensors: the :class:`~hyper_cp.ops.config.Operands`, whose names are in the settings.
        settings: everything else, see :class:`~hyper_cp.ops.config.OpSettings`.
    """
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    check_replay(given.documents, options.mesh)
    q, k, v = last_dim_contiguous(q, k, v)
    work = Work(q, k, v, given, scale, dropout_p, options)
    plan, ring = work.schedule, work.cp.ring
    share = q.shape[2] // work.cp.ulysses.size
    hides = given.documents is not None or work.mask is not None or work.scores is not None
    work.cp.batch.record_call(share, options.layout if hides or work.band != FULL else None, work.cp.size)
    work.cp.batch.record_attention(
        given.documents,
        band=work.band,
        lengths=work.lengths,
        mask_rows=None if given.mask is None else given.mask.shape[2],
        masked=work.mask is not None,
        positional=work.scores is not None and work.scores.score.positional,
    )
    seen, kernel = _attended(q, k, v, given, options.absorbed), work.kernel
    partials = Partials(q, seen[1].shape[3], given.sinks, options.max_logits)
    if options.max_logits:  # backward needs only what is merged, so it may run on another kernel
        plain = given.seed is not None or given.selected is not None
        kernel = kernels.giving_largest(q, *seen, work.band == CAUSAL, plain)

    def compute(tile: Tile, inputs: TileInputs, of_rows: Sequence[Tensor], into: KeyGradients | EntryTiles) -> None:
        if partials.largest is not None:
            inputs.largest = part(partials.largest, tile.q, tile.batch)
        # Without a local name for the kernel's results: it would keep them alive beyond their merge.
        partials.add(tile.q, tile.batch, *(into.kernel or kernel).forward(inputs))

    with no_autocast(q.device.type), operation(work.cp, "attention", "forward"):
        if given.selected is not None and nans.watch.selected:
            check_selected(work.cp, plan, given.selected, options.block, work.band, work.lengths[1])
        check_nans_if_enabled(work.cp, options, "query, key, value", q, k, v)
        # Its first moves leave before the tails of queries.
        keys = Travel(ring, plan.transfers, k, v, wire=options.wire)
        queries = SwappedTails(ring, plan.swap, q)
        work.run(plan.forward, keys, queries, compute, partials.result)
        out, lse, *largest = queries.results(partials.result)
        check_nans_if_enabled(work.cp, options, "the output", out)
    number = torch.tensor([kernels.number_of(work.kernel_name)], device="cpu")
    return _bshd_in_memory(out), lse.contiguous(), number, largest[0].contiguous() if largest else lse.new_empty(0)


@torch.library.custom_op("hyper_cp::attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
    scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """``(dq, dk, dv)`` of this rank's share, and its gradients of :attr:`Operands.differentiated`. ``tensors``: the
    operands of forward, and those of backward."""
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    check_recompute(given.documents, options.mesh, given.mark)
    dout, q, k, v = last_dim_contiguous(dout, q, k, v)
    work = Work(q, k, v, given, scale, dropout_p, options, backward=True)
    if work.scores is not None:
        work.scores.score.check_unchanged()
    plan, ring, dq = work.schedule, work.cp.ring, RowSum(q)

    def compute(tile: Tile, inputs: TileInputs, of_rows: Sequence[Tensor], into: KeyGradients | EntryTiles) -> None:
        dout, out, lse, *of_lse = of_rows
        inputs.dlse = of_lse[0] if of_lse else None
        dq_tile, *of_keys = (into.kernel or work.kernel).backward(inputs, dout, out, lse)
        dq.add(tile.q, tile.batch, dq_tile)
        into.add(tile, *of_keys)

    with no_autocast(q.device.type), operation(work.cp, "attention", "backward"):
        check_nans_if_enabled(work.cp, options, "the gradient of the output, query, key, value", dout, q, k, v)
        keys = Travel(ring, plan.transfers, k, v, accumulation_dtype(q.dtype), options.wire)
        of_queries = (q, dout, out, lse) if given.dlse is None else (q, dout, out, lse, given.dlse)
        queries = SwappedTails(ring, plan.swap, *of_queries)
        work.run(plan.backward, keys, queries, compute, dq.result)
        (dq_local,) = queries.results(dq.result)
        check_nans_if_enabled(work.cp, options, "the gradients of query, key, value", dq_local, *keys.home)
        # In the op, which has no derivative: outside of it a second one would take the log-sum-exp for a constant.
        of_sinks = [] if given.sinks is None else [gradient_of_sinks(given.sinks, dout, out, lse, given.dlse)]
    others = [*of_sinks, *([] if work.latents is None else work.latents.gradients)]
    others += [] if work.entries is None else work.entries.gradients
    others += [] if work.scores is None else work.scores.gradients
    # Contiguous on every rank: their user sums them over ranks, and collectives add memory whatever its strides are.
    of_others = [total.to(x.dtype).contiguous() for total, x in zip(others, given.differentiated, strict=True)]
    dk, dv = keys.gradients_at_home()
    return _bshd_in_memory(dq_local), dk, dv, of_others


def check_nans_if_enabled(cp: CPMesh, options: OpSettings, names: str, *tensors: Tensor) -> None:
    """Check tensors for NaN, if that is asked for. Calls in which nothing travels need not be made by all ranks."""
    if nans.watch.on and (options.kv_exchange != "replicated" or cp.ulysses.size > 1):
        nans.check(cp, names, *tensors)


def _bshd_in_memory(x: Tensor) -> Tensor:
    """[B, H, S, D] in memory order [B, S, H, D]: one fixed layout, which the fakes can promise."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *others: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    options = OpSettings.read(others[-1])
    _, values = _attended(q, k, v, Operands.of(tensors, options.tensors), options.absorbed)
    largest = torch.empty_like(lse) if options.max_logits else lse.new_empty(0)
    return like_queries(q, values.shape[3], q.dtype), lse, torch.empty(1, dtype=torch.int64, device="cpu"), largest


@attention_backward_op.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tensors: list[Tensor], *others: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (like_queries(x, x.shape[3], x.dtype) for x in (q, k, v))
    given = Operands.of(tensors, OpSettings.read(others[-1]).tensors)
    return dq, dk, dv, [x.new_empty(x.shape) for x in given.differentiated]


class Saved:
    """The attributes that an attention op keeps for backward, and the order of the operands among its saved tensors.

    Documents stay an attribute and their fingerprint is a saved tensor, see :mod:`recompute`.
    """

    def __init__(self, scale: float, dropout_p: float, settings: str) -> None:
        self.scale, self.dropout_p, self.options = scale, dropout_p, OpSettings.read(settings)
        self.score = find(self.options.score)  # backward finds it by its key for as long as somebody holds it
        self.caller = caller()
        self.documents: Tensor | None = None
        self.names: tuple[str, ...] = ()

    def kept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors to save, of those that the op took."""
        named = [*zip(self.options.tensors, tensors, strict=True)]
        self.documents = next((x for name, x in named if name == "documents"), None)
        kept = [("mark", fingerprint(self.documents, self.options.mesh)), *(x for x in named if x[0] != "documents")]
        self.names = tuple(name for name, _ in kept)
        return [x for _, x in kept]

    def arguments(
        self, tensors: Sequence[Tensor], dlse: Tensor | None = None, kernel: Tensor | None = None
    ) -> tuple[list[Tensor], float, float, str]:
        """The last arguments of the backward op: the operands that were saved, and those that only backward has."""
        more = [
            (name, x)
            for name, x in (("documents", self.documents), ("dlse", dlse), ("kernel", kernel))
            if x is not None
        ]
        named = [*more, *zip(self.names, tensors, strict=True)]
        return self.options.listed(named, self.scale, self.dropout_p)

    def gradients(self, of_others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the tensors that the op took, in their order."""
        others = iter(of_others)
        return [next(others) if name in DIFFERENTIATED else None for name in self.options.tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, tensors, *others = inputs
    ctx.saved = Saved(*others)
    ctx.save_for_backward(q, k, v, *output[:3], *ctx.saved.kept(tensors))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 if ctx.saved.score is None else 2 :])


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    q, k, v, out, lse, kernel, *tensors = ctx.saved_tensors
    saved: Saved = ctx.saved
    dout = torch.zeros_like(out) if dout is None else dout  # transfers take place: other ranks may have a gradient
    with backward_of(saved.caller):
        arguments = saved.arguments(tensors, dlse, kernel)
        *grads, of_others = attention_backward_op(dout, q, k, v, out, lse, *arguments)
    return *grads, saved.gradients(of_others), None, None, None


def gradient_of_sinks(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> Tensor:
    """The gradient of the sinks ``[H]`` through this rank's rows. A sink's value is zero, so the gradient of its logit
    is its weight times minus the (dout . out) of the row (plus the gradient of the log-sum-exp, if there is one)."""
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp().nan_to_num(0.0)  # both may be -inf
    per_row = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    per_row = per_row if dlse is None else per_row - dlse
    return (weight * per_row).sum((0, 2)).neg().to(sinks.dtype)


differentiable_attention = differentiable("attention", attention_op, _differentiate, _save)
