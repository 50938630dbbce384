"""Ulysses in head groups: the all-to-all of one group travels while another group is attended.

Attention of different heads is independent, so the exchange need not be over before attention starts. One op
exchanges and attends group by group; forward, per group g::

    post q, k, v of g+1  ->  wait for q, k, v of g  ->  attend g  ->  post the output of g  ->  wait for that of g-1

Backward does the same with dout on the way in and dq, dk, dv on the way out. Attention cannot hide the exchange of the
first group's inputs and of the last group's outputs: 1/groups of the communication. Bytes are those of Ulysses in one
go.

Who owns what: a packed message and the buffer it arrives in belong to their ``Pending`` until ``wait()``; what is
unpacked there is new and belongs to the op, which returns it (backward needs it) or adds it to its result. At most
two groups are in flight inwards and two outwards.

Source: head-wise pipelining as in FPDT (arXiv 2408.16978) and USP (2405.07719), of the all-to-all of DeepSpeed
Ulysses (2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.compiling import is_compiling
from ..mesh import comm, cp_mesh, nans
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import backward_of, operation
from ..mesh.groups import check_launch_order
from ..schedule import choices
from ..schedule import layout as layouts
from ..schedule.choices import heads_after_sharing
from ..schedule.documents import read
from ..schedule.lookup import ascending, resolve
from .config import CheckedCall, Operands, OpSettings
from .differentiable import differentiable
from .engine import Saved, TileEngine, attention_backward_op, attention_op, op_arguments
from .exchange import ulysses
from .exchange.ulysses import Ulysses, shared_heads
from .kernels.partials import accumulation_dtype, like_queries


def _heads_of_a_rank(q_heads: int, kv_heads: int, cp: CPMesh) -> tuple[int, int]:
    """The query heads and key/value heads of each rank after the exchange."""
    degree = cp.ulysses.size
    return q_heads // degree, heads_after_sharing(kv_heads, degree) // degree


def _fits(groups: int, queries: int, keys: int, cp: CPMesh) -> bool:
    return (
        groups <= queries
        and queries % groups == 0
        and (keys % groups == 0 or (groups % keys == 0 and cp.ring.size == 1))
    )


def possible_groups(q_heads: int, kv_heads: int, cp: CPMesh) -> tuple[int, ...]:
    """The numbers of groups into which each rank's heads split."""
    queries, keys = _heads_of_a_rank(q_heads, kv_heads, cp)
    return tuple(n for n in range(1, queries + 1) if _fits(n, queries, keys, cp))


def check_groups(q_heads: int, kv_heads: int, cp: CPMesh, groups: int) -> None:
    """Raise ``ValueError`` unless each rank's heads split into ``groups``. Several groups may use one key/value head,
    which is exchanged once, but not round a ring, where it would travel again."""
    degree, (queries, keys) = cp.ulysses.size, _heads_of_a_rank(q_heads, kv_heads, cp)
    if degree > 1 and not _fits(groups, queries, keys, cp):
        works = ", ".join(map(str, possible_groups(q_heads, kv_heads, cp)))
        why = " that leave no head of keys to two groups" if cp.ring.size > 1 else ""
        raise ValueError(
            f"head_groups={groups} does not split the {queries} query and {keys} key/value heads that each rank has "
            f"after the exchange over ulysses_degree={degree}. Numbers of groups{why}: {works}"
        )


# --------------------------------------------------------------------------- the number of groups


def best_groups(q: Tensor, k: Tensor, v: Tensor, cp: CPMesh) -> int:
    """The number of groups that ``head_groups="auto"`` means for a call. A call that does not fit is left to its
    checks."""
    degree = cp.ulysses.size
    if degree == 1 or any(not isinstance(x, Tensor) or x.ndim != 4 for x in (q, k, v)):
        return 1
    # Numbers of heads may be open in a graph, and the choice is a constant of it.
    heads = int(q.shape[1]), int(k.shape[1])
    if 0 in heads or heads[0] % degree or heads[0] % heads[1]:
        return 1
    # Lengths may be open in a graph, too.
    tokens = choices.TOKENS if is_compiling() else q.shape[0] * q.shape[2]
    return chosen_groups(possible_groups(*heads, cp), heads[0], tokens, q.device.type)


@torch.compiler.assume_constant_result
def chosen_groups(numbers: tuple[int, ...], heads: int, tokens: int, device: str) -> int:
    """The choice, which a compiled graph takes as a number."""
    return choices.head_groups(numbers, heads, tokens, device)


# --------------------------------------------------------------------------- the op


def attend(q: Tensor, k: Tensor, v: Tensor, call: CheckedCall, core: TileEngine) -> Any:
    """Exchange, attend and exchange back the shards ``[B, H, S, D]`` of one cp rank, in groups of heads. The result is
    what ``core`` returns."""
    degree = call.cp.ulysses.size
    k, v = (shared_heads(x, degree, 1) for x in (k, v))
    out, largest, lse, kernel, *_ = differentiable_ulysses_attention(q, k, v, *op_arguments(q, k, v, call))
    found = core.asked(call, out, lse, kernel, largest)
    if not isinstance(found, tuple):
        return found
    # [B, H/degree, S*degree]: of the heads of this rank
    ulysses = Ulysses(call.cp, call.mode.layout, documents=call.documents)
    return out, *(ulysses.to_sequence(x) for x in found[1:])


class Groups:
    """The groups of one call. Tensors are ``[B, H, S, D]``, of a rank (S local, H all) or of a group (S that of a
    ring rank, H of one group)."""

    def __init__(
        self, settings: OpSettings, documents: Tensor | None, kv_heads: int, scale: float, dropout_p: float
    ) -> None:
        self.settings, self.numbers = settings, (scale, dropout_p)
        self.cp, self.layout = cp_mesh.by_key(settings.mesh), settings.layout
        self.documents = documents if layouts.by_documents(settings.layout) else None
        self.number = settings.head_groups
        self.kv_number = min(self.number, kv_heads)
        self.sharing = self.number // self.kv_number
        """Groups that use the same keys and values."""
        if self.cp.ring.size > 1:
            check_launch_order(self.cp.ring, self.cp.ulysses)

    def heads_of(self, x: Tensor, number: int, index: int) -> Tensor:
        """``[B, n, h, S, D]``, a view: the heads of ``x`` that are in one of ``number`` groups, by rank."""
        return x.unflatten(1, (self.cp.ulysses.size, number, -1))[:, :, index]

    def order(self, length: int) -> ulysses.Order:
        """The order of a ring rank's ``length`` tokens in messages and in sequence."""
        cp = self.cp
        return ascending(resolve(self.layout, cp.size, length * cp.ring.size, read(self.documents)), cp.ulysses_peers())

    def to_group(self, x: Tensor, number: int, index: int) -> comm.Pending:
        """Post one group of a rank's ``x``."""
        order = self.order(x.shape[2] * self.cp.ulysses.size)
        return ulysses.send_heads(self.cp.ulysses, self.heads_of(x, number, index), 2, 1, order)

    def to_rank(self, x: Tensor, into: Tensor, number: int, index: int) -> comm.Pending:
        """Post a group's ``x`` back; it is put into a rank's tensor when it is waited for."""
        place = self.heads_of(into, number, index)
        return ulysses.collect_heads(self.cp.ulysses, x, 2, 1, self.order(x.shape[2])).then(place.copy_)

    def arguments(self, index: int, heads: int, given: Operands, **others: Any) -> tuple[Any, ...]:
        """The last arguments of a group's ops. Sinks ``[H]`` and masks ``[B|1, H|1, ...]`` are those of its heads."""
        first = self.cp.ulysses.rank * self.number * heads + index * heads
        sinks = None if given.sinks is None else given.sinks.narrow(0, index * heads, heads)
        mask = given.mask
        mask = mask if mask is None or mask.shape[1] == 1 else mask.narrow(1, index * heads, heads)
        given = given._replace(sinks=sinks, mask=mask, **others)
        return self.settings._replace(first_head=first).arguments(given, *self.numbers)


def _wait(pending: Sequence[comm.Pending]) -> list[Tensor]:
    return [p.wait() for p in pending]


@torch.library.custom_op("hyper_cp::ulysses_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def ulysses_attention_op(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], scale: float, dropout_p: float, settings: str
) -> list[Tensor]:
    """``[out]`` of this rank's ``[B, H, S, D]``, the largest logits (if asked for, else ``[0]``) and the log-sum-exp
    of the heads that it attends, then what backward needs: the kernel that ran, and per group all outputs, all q, all
    k, all v. Arguments: see :func:`engine.attention_op`; sinks and mask are those of this rank's heads after the
    exchange."""
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    kv_heads = k.shape[1] // cp_mesh.by_key(options.mesh).ulysses.size
    plan = Groups(options, given.documents, kv_heads, scale, dropout_p)
    groups = plan.number

    def post(group: int) -> list[comm.Pending]:
        pending = [plan.to_group(q, groups, group)]
        if group % plan.sharing == 0:
            pending += [plan.to_group(x, plan.kv_number, group // plan.sharing) for x in (k, v)]
        return pending

    out = like_queries(q, v.shape[3], q.dtype)
    largest, lses, outs, queries, keys, values = [], [], [], [], [], []
    with operation(plan.cp, "attention in groups of heads", "forward"):
        nans.check(plan.cp, "query, key, value", q, k, v)
        arriving = post(0)
        leaving: list[comm.Pending] = []
        for group in range(groups):
            ahead = post(group + 1) if group + 1 < groups else []
            x, *kv = _wait(arriving)
            queries.append(x)
            keys.extend(kv[:1])
            values.extend(kv[1:])
            x, lse, kernel, most = attention_op(x, keys[-1], values[-1], *plan.arguments(group, x.shape[1], given))
            outs.append(x)
            lses.append(lse)
            largest.append(most)
            posted = [plan.to_rank(x, out, groups, group)]
            _wait(leaving)
            arriving, leaving = ahead, posted
        _wait(leaving)
    joined = torch.cat(largest, 1 if options.max_logits else 0)
    return [out, joined, torch.cat(lses, 1), kernel, *outs, *queries, *keys, *values]


@ulysses_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    options = OpSettings.read(others[-1])
    groups, degree = options.head_groups, cp_mesh.by_key(options.mesh).ulysses.size
    kv_groups = min(groups, k.shape[1] // degree)

    def group_of(x: Tensor, number: int) -> Tensor:
        b, h, s, d = x.shape
        return ulysses.like_received(x, (b, h // degree // number, s * degree, d), 2)

    one = group_of(q, groups)
    lse = q.new_empty(*group_of(q, 1).shape[:3], dtype=accumulation_dtype(q.dtype))
    return [
        like_queries(q, v.shape[3], q.dtype),
        torch.empty_like(lse) if options.max_logits else lse.new_empty(0),
        lse,
        torch.empty(1, dtype=torch.int64, device="cpu"),
        *(like_queries(one, v.shape[3], q.dtype) for _ in range(groups)),
        *(group_of(q, groups) for _ in range(groups)),
        *(group_of(x, kv_groups) for x in (k, v) for _ in range(kv_groups)),
    ]


@torch.library.custom_op("hyper_cp::ulysses_attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def ulysses_attention_backward_op(
    dout: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    tensors: list[Tensor],
    scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """``(dq, dk, dv)`` of this rank, and its gradients of sinks (if given) and of captured tensors. ``saved``: all
    outputs, q, k and v of the groups. ``tensors``: the operands of forward, and those of backward."""
    options = OpSettings.read(settings)
    groups, given = options.head_groups, Operands.of(tensors, options.tensors)
    outs, queries, keys, values = _sorted(saved, groups)
    plan = Groups(options, given.documents, keys[0].shape[1] * len(keys), scale, dropout_p)
    cp, captured = plan.cp, given.captured
    dq, dk, dv = (_rank_of(xs, cp.ulysses.size) for xs in (queries, keys, values))
    of_sinks: list[Tensor] = []
    of_captured = [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in captured]
    total: list[Tensor] = []  # dk and dv of keys and values that several groups share
    with operation(cp, "attention in groups of heads", "backward"):
        nans.check(cp, "the gradient of the output", dout)
        arriving = plan.to_group(dout, groups, 0)
        leaving: list[comm.Pending] = []
        for group in range(groups):
            ahead = plan.to_group(dout, groups, group + 1) if group + 1 < groups else None
            q, kv = queries[group], group // plan.sharing
            of_lse = None if given.dlse is None else given.dlse.chunk(groups, 1)[group]
            results = arriving.wait(), outs[group], lse.chunk(groups, 1)[group]
            arguments = plan.arguments(group, q.shape[1], given, dlse=of_lse)
            local = results[0], q, keys[kv], values[kv], *results[1:]
            grad, *kv_grads, others = attention_backward_op(*local, *arguments)
            if given.sinks is not None:
                of_sinks.append(others.pop(0))
            for whole, x in zip(of_captured, others, strict=True):
                whole.add_(x)
            posted = [plan.to_rank(grad, dq, groups, group)]
            total = _added(total, kv_grads) if plan.sharing > 1 else kv_grads
            if (group + 1) % plan.sharing == 0:  # no later group adds to these
                wholes = zip(total, (dk, dv), strict=True)
                posted += [plan.to_rank(x.to(into.dtype), into, plan.kv_number, kv) for x, into in wholes]
                total = []
            _wait(leaving)
            leaving = posted
            if ahead is not None:
                arriving = ahead
        _wait(leaving)
    extra = [torch.cat(of_sinks)] if of_sinks else []
    return dq, dk, dv, extra + [whole.to(x.dtype) for whole, x in zip(of_captured, captured, strict=True)]


@ulysses_attention_backward_op.register_fake
def _(
    dout: Tensor, lse: Tensor, saved: list[Tensor], tensors: list[Tensor], *others: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    options = OpSettings.read(others[-1])
    given, degree = Operands.of(tensors, options.tensors), cp_mesh.by_key(options.mesh).ulysses.size
    dq, dk, dv = (_rank_of(xs, degree) for xs in _sorted(saved, options.head_groups)[1:])
    return dq, dk, dv, [torch.empty_like(x) for x in given.differentiated]


def _sorted(saved: list[Tensor], groups: int) -> list[list[Tensor]]:
    """Outputs, q, k and v, each per group."""
    rest = (len(saved) - 2 * groups) // 2
    lists, start = [], 0
    for number in (groups, groups, rest, rest):
        lists.append(saved[start : start + number])
        start += number
    return lists


def _rank_of(xs: list[Tensor], degree: int) -> Tensor:
    """An uninitialised tensor ``[B, H, S, D]`` of a rank, given all its groups ``[B, H/degree/n, S*degree, D]``."""
    b, h, s, d = xs[0].shape
    return xs[0].new_empty(b, s // degree, h * len(xs) * degree, d).transpose(1, 2)


def _added(total: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The sums so far, in the accumulation dtype."""
    if not total:
        return [x.to(accumulation_dtype(x.dtype)) for x in grads]
    return [t.add_(x) for t, x in zip(total, grads, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, _, tensors, *others = inputs
    ctx.saved = Saved(*others)
    kept = ctx.saved.kept(tensors)
    ctx.kept = len(kept)
    ctx.save_for_backward(*kept, *output[2:])
    ctx.mark_non_differentiable(output[1], *output[2 if ctx.saved.score is None else 3 :])
    ctx.set_materialize_grads(False)  # zeros for what has no gradient would be as large as all of q, k, v


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    dout, _, dlse, *_ = grads
    saved: Saved = ctx.saved
    tensors = ctx.saved_tensors
    kept, (lse, kernel, *groups) = tensors[: ctx.kept], tensors[ctx.kept :]
    if dout is None:  # transfers take place all the same: other ranks may have a gradient
        outs, queries, _, _ = _sorted(groups, saved.options.head_groups)
        shape = _rank_of(queries, cp_mesh.by_key(saved.options.mesh).ulysses.size)
        dout = like_queries(shape, outs[0].shape[3], shape.dtype).zero_()
    with backward_of(saved.caller):
        arguments = saved.arguments(kept, dlse, kernel)
        *of_qkv, others = ulysses_attention_backward_op(dout, lse, [*groups], *arguments)
    return *of_qkv, saved.gradients(others), None, None, None


differentiable_ulysses_attention = differentiable(
    "ulysses_attention", ulysses_attention_op, _differentiate, _save, returns_list=True
)
