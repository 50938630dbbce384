"""One attention case: whole tensors, what one device makes of them, a rank's shard, and the comparison of both.

A test lists cases and hands them to :func:`run_cases` on ranks:

    >>> cases = [AttentionCase(24, is_causal=True, **mode) for mode in modes(world=2)]
    >>> check(ranks(2, run_cases, cases), FP64)

A module of a user goes to :func:`run_module` with a case. Where a test makes the call itself, it takes ``case.shard()``
and returns ``shard.errors(out, grads)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import combinations
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.ops import attention
from tests.harness.oracle import (
    absolute_error,
    attention_and_lse,
    plain_attention,
    relative_error,
    softcap,
    token_positions,
    visible_pairs,
)
from tests.harness.ranks import on_ranks, sum_over_ranks

FP64, FP32 = 1e-10, 5e-6
"""The design's exactness bars, relative."""

Errors = dict[str, float]
Error = Callable[[Tensor, Tensor], float]


def cp_mesh(device: str = "cpu") -> DeviceMesh:
    """The cp mesh of all ranks of this job."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def modes(world: int) -> list[dict[str, Any]]:
    """Every Ulysses degree x exchange x layout or load balance of a world, as keywords of ``attention``."""
    found = []
    for degree in (d for d in (1, 2, 4, 8) if world % d == 0 or d == 1):
        for exchange in ("all_gather", "ring", "needed"):
            if exchange != "all_gather" and degree == world > 1:
                continue  # no ring dimension: the same as all_gather
            for layout, balance in (("contiguous", False), ("head_tail", False), ("contiguous", True)):
                if exchange == "needed" and balance and degree > 1:
                    continue  # the tails that a ring rank sends do not depend on what the other dimension does
                mode = {"ulysses_degree": degree, "kv_exchange": exchange, "layout": layout, "load_balance": balance}
                found.append(mode)
    return found


# --------------------------------------------------------------------------- one device


@dataclass(frozen=True)
class Problem:
    """Attention of whole tensors, by ``attention``'s own names; ``mask`` is a kind of :func:`explicit_mask`.

    ``sinks``: there are some, and their gradient is compared too. ``lse_grad``: the log-sum-exp has a gradient, too.
    """

    length: int
    is_causal: bool = False
    keys: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    v_dim: int = 8
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    mask: str | None = None
    softcap: float | None = None
    sinks: bool = False
    lse_grad: bool = False
    selected: tuple[int, int] | None = None
    """The keys that each query selects, and the heads that select for themselves (1: all alike)."""
    block: int = 1
    """Queries select blocks of this many keys."""

    def tensors(self) -> list[Tensor]:
        """Random q, k, v and gradient of the output, the same on every rank."""
        return inputs(self.batch, self.heads, self.kv_heads, self.length, self.dim, self.v_dim, self.dtype, self.keys)

    def sink_logits(self) -> list[Tensor]:
        """One for each head, if there are sinks."""
        g = torch.Generator().manual_seed(self.heads)
        return [torch.randn(self.heads, generator=g, dtype=torch.float64).to(self.dtype)] if self.sinks else []

    def dlse(self) -> Tensor:
        """Gradient of the log-sum-exp."""
        g, shape = torch.Generator().manual_seed(self.length), (self.batch, self.heads, self.length)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)


@dataclass(frozen=True)
class Answer:
    """The whole tensors of a problem, and what one device computes of them in fp64."""

    tensors: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    v_dim: int,
    dtype: torch.dtype,
    keys: int | None = None,
) -> list[Tensor]:
    """Global q, k, v and the output's gradient, the same on every rank."""
    g = torch.Generator().manual_seed(length + heads)
    keys = length if keys is None else keys
    shapes = [(batch, heads, length, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, v_dim)]
    shapes.append((batch, heads, length, v_dim))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def explicit_mask(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """``(visible, bias)`` of a random mask of a kind, the same on every rank; one of them is None."""
    length, keys = problem.length, problem.length if problem.keys is None else problem.keys
    shape = {
        "bool": (problem.batch, 1, length, keys),
        "heads": (1, problem.heads, length, keys),
        "rows and heads": (problem.batch, problem.heads, length, keys),
        "padding": (problem.batch, 1, 1, keys),
        "2d": (length, keys),
        "float": (problem.batch, problem.heads, length, keys),
        "local rows": (1, problem.heads, length, keys),
        "causal": (1, 1, length, keys),
    }[str(problem.mask)]
    g = torch.Generator().manual_seed(length)
    visible = torch.rand(shape, generator=g) < 0.6
    if problem.mask == "causal":
        visible = (visible | True).tril()
    elif problem.mask != "padding":
        visible[..., length // 3, :] = False  # a query that sees nothing
    if problem.mask == "float":
        return None, torch.randn(shape, generator=g, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    return visible, None


def selection(problem: Problem) -> Tensor:
    """Random global positions (or blocks) ``[B, heads, S, k]``, of the future too, the same on every rank; some are
    -1."""
    topk, heads = problem.selected or (0, 1)
    g, (batch, length) = torch.Generator().manual_seed(problem.length), (problem.batch, problem.length)
    found = torch.rand(batch, heads, length, -(-length // problem.block), generator=g).argsort(-1)[..., :topk]
    found[:, :, length // 3] = -1  # a query that selects nothing
    return found.masked_fill(torch.rand(found.shape, generator=g) < 0.1, -1)


def selected_pairs(problem: Problem) -> Tensor:
    """The pairs ``[B, H, S, S]`` of queries and keys that they select."""
    found = selection(problem)
    number = -(-problem.length // problem.block)
    pairs = torch.zeros(*found.shape[:3], number + 1, dtype=torch.bool)
    pairs.scatter_(3, found.masked_fill(found < 0, number), True)
    pairs = pairs[..., :-1].repeat_interleave(problem.block, 3)[..., : problem.length]
    return pairs.repeat_interleave(problem.heads // found.shape[1], 1)


@lru_cache(maxsize=32)
def one_device(problem: Problem) -> Answer:
    """The oracle's answer, computed once per problem in a process: modes and ranks share it."""
    tensors = tuple(problem.tensors())
    leaves = [x.double().detach().requires_grad_() for x in (*tensors[:3], *problem.sink_logits())]
    visible, bias = explicit_mask(problem) if problem.mask else (None, None)
    if problem.keys is None:
        pairs = visible_pairs(problem.length, problem.is_causal, problem.window, problem.documents)
        visible = pairs if visible is None else pairs & visible
    if problem.selected is not None:
        visible = selected_pairs(problem) if visible is None else visible & selected_pairs(problem)
    out, lse = attention_and_lse(
        *leaves[:3],
        scale=problem.scale,
        visible=visible,
        bias=bias,
        score_mod=softcap(problem.softcap) if problem.softcap else None,
        sinks=leaves[3] if problem.sinks else None,
    )
    outputs = (out, lse)[: 1 + problem.lse_grad]
    grads = torch.autograd.grad(outputs, leaves, [tensors[3].double(), problem.dlse().double()][: len(outputs)])
    return Answer(tensors, out.detach(), lse.detach(), grads)


# --------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class AttentionCase(Problem):
    """A problem and the mode in which ranks solve it, by ``attention``'s own names.

    ``strided``: q, k and v lie as ``[B, S, H, D]`` in memory.
    """

    ulysses_degree: int | None = 1
    kv_exchange: str = "all_gather"
    layout: str = "contiguous"
    load_balance: bool = False
    head_groups: int = 1
    exchange_stages: int | str = "auto"
    return_lse: bool = False
    strided: bool = False

    @property
    def problem(self) -> Problem:
        return Problem(**{f.name: getattr(self, f.name) for f in fields(Problem)})

    def positions(self, length: int) -> Tensor:
        """Global positions of this rank's tokens."""
        if self.layout in ("contiguous", "head_tail"):
            return torch.tensor(token_positions(self.layout, dist.get_rank(), dist.get_world_size(), length))
        handler = ContextParallelHandler(cp_mesh(), self.layout)  # tests/schedule compares it with definitions
        with handler.documents(self.rows):
            return handler.position_ids(length)

    @property
    def rows(self) -> list[list[int]] | None:
        return None if self.documents is None else [list(row) for row in self.documents]

    def shard(self, device: str = "cpu") -> Shard:
        """This rank's q, k, v (leaves), gradient of the output and mask."""
        return self.shard_of(one_device(self.problem).tensors, device)

    def shard_of(self, tensors: Sequence[Tensor], device: str = "cpu") -> Shard:
        q, k, v, dout = tensors
        at = self.positions(self.length)
        keys_at = slice(None) if self.kv_exchange == "replicated" else at
        if self.keys is not None and self.kv_exchange != "replicated":
            keys_at = self.positions(self.keys)
        local = [q[:, :, at], k[:, :, keys_at], v[:, :, keys_at]]
        if self.strided:
            local = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
        mask = None
        if self.mask is not None:
            visible, bias = explicit_mask(self)
            mask = bias.to(self.dtype) if visible is None else visible  # type: ignore[union-attr]
            mask = mask[:, :, at] if self.mask == "local rows" else mask
        leaves = [x.clone().to(device).requires_grad_() for x in (*local, *self.sink_logits())]
        rows = [x[:, :, at].to(device) for x in (dout, self.dlse())]
        return Shard(
            self, at, keys_at, leaves[:3], rows[0], None if mask is None else mask.to(device), leaves[3:], rows[1]
        )

    def attention_keywords(self) -> dict[str, Any]:
        """Keywords of ``attention`` but for the mesh and the mask, which :class:`Shard` holds."""
        names = ("is_causal", "scale", "window", "ulysses_degree", "kv_exchange", "layout", "load_balance")
        names = (*names, "head_groups", "exchange_stages", "return_lse", "softcap")
        return {**{name: getattr(self, name) for name in names}, "documents": self.rows, "enable_gqa": True}


@dataclass
class Shard:
    """The part of a case that this rank holds, and its comparison with one device."""

    case: AttentionCase
    at: Tensor
    keys_at: Tensor | slice
    qkv: list[Tensor]
    dout: Tensor
    mask: Tensor | None
    sinks: list[Tensor]
    dlse: Tensor

    def attend(self, mesh: DeviceMesh, **more: Any) -> Any:
        """Call ``attention`` as the case says, with more keywords if there are any."""
        more |= {"sinks": self.sinks[0]} if self.sinks else {}
        if self.case.selected is not None:
            more["selected"] = selection(self.case)[:, :, self.at].to(self.dout.device)
            more |= {"block": self.case.block} if self.case.block > 1 else {}
        return attention(*self.qkv, mesh=mesh, attn_mask=self.mask, **self.case.attention_keywords(), **more)

    def step(self, mesh: DeviceMesh, error: Error | None = None) -> Errors:
        """Errors of forward and backward of :meth:`attend`."""
        result = self.attend(mesh)
        out, lse = result if self.case.return_lse else (result, None)
        outputs = [out, lse][: 1 + self.case.lse_grad]
        grads = torch.autograd.grad(outputs, [*self.qkv, *self.sinks], [self.dout, self.dlse][: len(outputs)])
        return self.errors(out, grads, lse, error)

    def errors(
        self,
        out: Tensor,
        grads: Sequence[Tensor],
        lse: Tensor | None = None,
        error: Error | None = None,
    ) -> Errors:
        """Errors of the output and of the gradients of q, k, v and sinks, relative to the largest expected value."""
        want, error, of_lse = one_device(self.case.problem), error or self._error, error or self._lse_error
        if self.case.kv_exchange == "replicated":  # each rank has the share that its queries give
            grads = [x.clone() for x in grads]
            for share in grads[1:]:
                dist.all_reduce(share)
        found = {"out": error(out.detach().cpu(), want.out[:, :, self.at])}
        expected = [want.grads[0][:, :, self.at], *(x[:, :, self.keys_at] for x in want.grads[1:3]), *want.grads[3:]]
        grads = [*grads[:3], *(sum_over_ranks(x)[0] for x in grads[3:])]
        for name, grad, right in zip(("dq", "dk", "dv", "dsinks"), grads, expected, strict=False):
            found[name] = error(grad.cpu(), right)
        if lse is not None:
            found["lse"] = of_lse(lse.detach().cpu(), want.lse[:, :, self.at])
        return found

    @staticmethod
    def _error(value: Tensor, expected: Tensor) -> float:
        """The relative error, or the absolute one if all that is expected is rounding (queries that see one key)."""
        return (absolute_error if expected.abs().max() < 1e-6 else relative_error)(value, expected)

    @staticmethod
    def _lse_error(lse: Tensor, expected: Tensor) -> float:
        seen = expected > -torch.inf
        if not torch.equal(lse > -torch.inf, seen):
            return float("inf")
        return absolute_error(lse[seen], expected[seen]) / 10 if seen.any() else 0.0


def run_case(case: AttentionCase, mesh: DeviceMesh, error: Error | None = None) -> Errors:
    """One forward and backward of ``attention`` on this rank, compared with one device."""
    return case.shard(mesh.device_type).step(mesh, error)


def run_module(module: nn.Module, case: AttentionCase, device: str = "cpu", **style: Any) -> Errors:
    """One forward and backward of a module under the case's mode and this style, compared with one device."""
    names = ("ulysses_degree", "kv_exchange", "layout", "load_balance", "head_groups")
    made = ContextParallel(seq_dim=2, head_dim=1, **{**{name: getattr(case, name) for name in names}, **style})
    mesh, shard = cp_mesh(device), case.shard(device)
    with ContextParallelHandler(mesh, made).documents(case.rows):
        out = parallelize_module(module, mesh, made)(*shard.qkv)
    return shard.errors(out, torch.autograd.grad(out, shard.qkv, shard.dout))


def kept_pairs(shard: Shard, attend: Callable[..., Tensor]) -> Tensor:
    """The pairs ``[B, H, S, S]`` whose weights a call with dropout keeps, seen through values that are the identity."""
    case = shard.case
    eye = torch.eye(case.length, dtype=case.dtype).expand(case.batch, case.kv_heads, -1, -1)[:, :, shard.keys_at]
    kept = torch.zeros(case.batch, case.heads, case.length, case.length, dtype=torch.float64)
    torch.manual_seed(5)
    kept[:, :, shard.at] = (attend(*shard.qkv[:2], eye).detach() > 0).double()
    return sum_over_ranks(kept)[0]


def dropout_error(shard: Shard, attend: Callable[..., Tensor], p: float, kept: Tensor) -> float:
    """The largest error of a call with dropout and of its gradients, given the pairs that it keeps."""
    torch.manual_seed(5)
    out = attend(*shard.qkv)
    *whole, dout = (x.double().requires_grad_() for x in shard.case.tensors())
    want = plain_attention(*whole, is_causal=shard.case.is_causal, weigh=kept / (1 - p))
    pairs = zip(
        (out, *torch.autograd.grad(out, shard.qkv, shard.dout)),
        (want, *torch.autograd.grad(want, whole, dout)),
        strict=True,
    )
    return max(relative_error(a, b.detach()[:, :, shard.at]) for a, b in pairs)


@on_ranks
def run_cases(cases: Sequence[AttentionCase], device: str = "cpu") -> list[tuple[AttentionCase, Errors]]:
    mesh = cp_mesh(device)
    return [(case, run_case(case, mesh)) for case in cases]


def pairwise(cases: Sequence[AttentionCase]) -> list[AttentionCase]:
    """Cases that have between them every mode, and every pair of values of two settings, which any of the given has.

    A mistake that needs three settings at once is rare. Each chosen case has most of what is missing yet.
    """
    mode = attrgetter("ulysses_degree", "kv_exchange", "layout", "load_balance")
    has = {case: {mode(case), *combinations(vars(case).items(), 2)} for case in cases}
    missing = set().union(*has.values())
    chosen: list[AttentionCase] = []
    while missing:
        chosen.append(max(has, key=lambda case: len(has[case] & missing)))
        missing -= has[chosen[-1]]
    return chosen


def check(results: Sequence[Sequence[tuple[Any, Errors]]], bar: float) -> None:
    """Every error of every case on every rank is within the bar."""
    bad = [(case, errors) for rank in results for case, errors in rank if not all(e <= bar for e in errors.values())]
    assert not bad, f"{len(bad)} cases over {bar}; first: {bad[0]}"
