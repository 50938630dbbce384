"""Attention to tokens and to pooled keys under one softmax, against plain math on the whole sequence."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallelHandler
from hyper_cp.memory import MemoryCounter
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import Entries, attention, gather_windows, windows
from hyper_cp.schedule import windows as schedule_windows
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import attention_and_lse, relative_error
from tests.harness.ranks import Ranks, on_ranks, sum_over_ranks

HEADS, DIM = 4, 8
Problem = tuple[int, int, int, bool, bool]
"""Tokens, tokens to an entry and to a window, True for selected entries and for sinks."""
PROBLEMS: list[Problem] = [(48, 4, 8, True, True), (48, 5, 5, False, True), (24, 11, 11, False, False)]
MODES: list[dict[str, Any]] = [
    {"kv_exchange": exchange, "layout": layout}
    for exchange, layout in itertools.product(("ring", "all_gather", "needed"), ("contiguous", "head_tail"))
]
MODES[2] |= {"ulysses_degree": None}  # one ring all the same
MODES += [
    {"kv_exchange": exchange, "layout": "contiguous", "load_balance": True} for exchange in ("ring", "all_gather")
]


def inputs(problem: Problem) -> list[Tensor]:
    """q, k = v, what is pooled, gates, sinks and the gradient of the output."""
    length, *_ = problem
    g = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, length, DIM), (2, 1, length, DIM), (2, length, DIM), (2, length, DIM), (HEADS,)]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in (*shapes, shapes[0])]


def selection(problem: Problem) -> Tensor:
    """Random entries ``[B, 1, S, 3]``, of the future too, each once; some are -1."""
    length, every, *_ = problem
    g = torch.Generator().manual_seed(every)
    found = torch.rand(2, 1, length, length // every, generator=g).argsort(-1)[..., :3]
    return found.masked_fill(torch.rand(found.shape, generator=g) < 0.2, -1)


def whole(problem: Problem, leaves: list[Tensor]) -> Tensor:
    length, every, width, selects, with_sinks = problem
    q, k, raw, gate, sinks = leaves
    entries = []
    for end in range(every - 1, length, every):
        rows = slice(max(0, end + 1 - width), end + 1)
        entries.append((raw[:, rows] * gate[:, rows].softmax(1)).sum(1))
    keys = torch.cat([k, torch.stack(entries, 1).unsqueeze(1)], 2)
    at = torch.arange(length)
    seen = ((torch.arange(len(entries)) + 1) * every - 1 <= at[:, None]).expand(2, 1, length, len(entries))
    if selects:
        chosen = selection(problem)
        listed = torch.zeros(2, 1, length, len(entries) + 1, dtype=torch.bool)
        seen = seen & listed.scatter_(3, chosen.masked_fill(chosen < 0, len(entries)), True)[..., :-1]
    near = (at <= at[:, None]) & (at > at[:, None] - 6)
    visible = torch.cat([near.expand(2, 1, -1, -1), seen], 3)
    return attention_and_lse(q, keys, keys, visible=visible, sinks=sinks if with_sinks else None)[0]


@cache
def one_device(problem: Problem) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output and the gradients, computed once for all modes."""
    *given, dout = inputs(problem)
    leaves = [x.requires_grad_() for x in given]
    out = whole(problem, leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dout, allow_unused=True)


def split(problem: Problem, leaves: list[Tensor], at: Tensor, mode: dict[str, Any]) -> Tensor:
    length, every, width, selects, with_sinks = problem
    q, k, raw, gate, sinks = leaves
    options = {"mesh": cp_mesh(), "layout": mode["layout"], "every": every}
    shifts = range(width - 1, -1, -1)
    gates = windows(gate, shifts, fill=-torch.inf, **options).softmax(2)
    pooled = (windows(raw, shifts, **options) * gates).sum(2)
    pooled = gather_windows(pooled, length=length, **options).unsqueeze(1)
    chosen = selection(problem)[:, :, at] if selects else None
    entries = Entries(pooled, pooled, every, chosen)
    given: dict[str, Any] = {"sinks": sinks if with_sinks else None, "window": (5, 0), "enable_gqa": True, **mode}
    return attention(q, k, k, mesh=cp_mesh(), entries=entries, **given)  # type: ignore[return-value]


@on_ranks
def errors(modes: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for problem, (i, mode) in itertools.product(PROBLEMS, enumerate(modes)):
        *given, dout = inputs(problem)
        want, expected = one_device(problem)
        handler = ContextParallelHandler(cp_mesh(), mode["layout"])
        at, batch = (
            handler.position_ids(problem[0]),
            handler.get_batch_on_this_cp_rank({"ids": torch.ones(2, problem[0])}),
        )
        local = [x[:, :, at] for x in given[:2]] + [x[:, at] for x in given[2:4]] + given[4:]
        local = [x.clone().requires_grad_() for x in local]
        run = split if i % 2 else lambda *x: checkpoint(split, *x, use_reentrant=False)
        with handler.documents(batch) if i % 3 else nullcontext():
            got = run(problem, local, at, mode)
        grads = torch.autograd.grad(got, local, dout[:, :, at], allow_unused=True)
        name = f"{problem} {mode} "
        found[name + "out"] = relative_error(got, want[:, :, at])
        right = [x[:, :, at] for x in expected[:2]] + [x[:, at] for x in expected[2:4]]
        for what, a, b in zip(("q", "k", "raw", "gates"), grads, right, strict=False):
            found[name + what] = relative_error(a, b)
        if problem[4]:
            found[name + "sinks"] = relative_error(sum_over_ranks(grads[4])[0], expected[4])
        else:
            assert grads[4] is None
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_softmax_fp64(world: int, ranks: Ranks) -> None:
    for of_rank in ranks(world, errors, MODES if world == 2 else MODES[world % 2 :: 3][: 1 if world == 1 else None]):
        assert not {name: e for name, e in of_rank.items() if not e < 1e-10}


@on_ranks
def summed_in_place() -> dict[str, float]:
    """Gradients of entries, summed by a collective that adds memory, against those of one device."""
    mesh, g = cp_mesh(), torch.Generator().manual_seed(0)
    q, k, v, keys, values, grad = torch.randn(6, 1, 2, 4, DIM, generator=g, dtype=torch.float64)
    v, values, grad = v[..., :3], values[..., :3], grad[..., :3]  # plain math, whose gradients lie as they like
    pooled = [x[:, :, :2].clone().requires_grad_() for x in (keys, values)]
    visible = torch.cat([torch.ones(4, 4).tril().bool(), torch.arange(2) <= torch.arange(4)[:, None]], 1)
    joined = torch.cat([k, pooled[0]], 2), torch.cat([v, pooled[1]], 2)
    expected = torch.autograd.grad(attention_and_lse(q, *joined, visible=visible)[0], pooled, grad)
    own = [x.chunk(mesh.size(), 2)[mesh.get_local_rank()] for x in (q, k, v, grad)]
    out = attention(*own[:3], mesh=mesh, is_causal=True, entries=Entries(*pooled, every=1))
    found = torch.autograd.grad(out, pooled, own[3])
    for x in found:
        dist.all_reduce(x)
    return {name: relative_error(x, y) for name, x, y in zip("kv", found, expected, strict=True)}


def test_gradients_of_entries_lie_alike_on_all_ranks(ranks: Ranks) -> None:
    """The two queries of rank 0 see other entries, and those of rank 1 the same: their tiles are not alike."""
    for found in ranks(2, summed_in_place):
        assert max(found.values()) < 1e-10, found


@on_ranks
def traffic() -> list[tuple[str, int]]:
    *given, dout = inputs((48, 4, 8, False, True))
    at = ContextParallelHandler(cp_mesh(), "contiguous").position_ids(48)
    local = [x[:, :, at] for x in given[:2]] + [x[:, at] for x in given[2:4]] + given[4:]
    local = [x.clone().requires_grad_() for x in local]
    mode = {"kv_exchange": "needed", "layout": "contiguous"}
    split((48, 4, 8, False, True), local, at, mode)
    with record_traffic() as log:
        out = split((48, 4, 8, False, True), local, at, mode)
        out.backward(dout[:, :, at])
    return [(name, n) for name, n in log.entries if name in ("all_gather", "reduce_scatter")]


def test_entries_travel_and_not_tokens(ranks: Ranks) -> None:
    """Two halos of 7 rows, 6 of the 12 entries; and the same back."""
    halo, entries = 2 * 7 * DIM * 8, 2 * 6 * DIM * 8
    for sent in ranks(2, traffic):
        assert sent[:3] == [("all_gather", halo), ("all_gather", halo), ("all_gather", entries)]
        assert sorted(sent[3:]) == [("reduce_scatter", n) for n in sorted((entries, halo, halo))]


@on_ranks
def sizes(length: int, every: int, selects: bool) -> tuple[int, int]:
    """The bytes that forward and backward make at once, and the elements of the largest tensor that is kept."""
    kept, share = list[int](), length // 2
    q, entries = torch.randn(1, 1, share, 1), torch.randn(1, 1, length // every, 1, requires_grad=True)
    listed = torch.zeros(1, 1, share, 1, dtype=torch.int32) if selects else None

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with MemoryCounter() as memory, saved:
        pooled = Entries(entries, entries, every, listed)
        out = attention(q.requires_grad_(), q, q, mesh=cp_mesh(), entries=pooled, window=(5, 0))
        out.sum().backward()  # type: ignore[union-attr]
    return memory.peak["cpu"], max(kept)


@pytest.mark.parametrize("selects", [False, True])
def test_no_mask_of_queries_and_entries_exists(ranks: Ranks, selects: bool) -> None:
    """A mask of all pairs would have 16,384 x 256 bytes. What is kept is as large as the queries."""
    for peak, kept in ranks(2, sizes, 1 << 15, 128, selects):
        assert peak < (1 << 14) * 256 and kept == 1 << 14


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(0, 20),
    st.integers(1, 16),
)
def test_tiles_cover_what_queries_see_once(spans: list[tuple[int, int]], every: int, number: int, rows: int) -> None:
    at, queries = 0, []
    for gap, length in spans:
        queries.append((at + gap, at + gap + length))
        at += gap + length
    positions = [p for start, stop in queries for p in range(start, stop)]
    found: Counter[tuple[int, int]] = Counter()
    with patch.object(schedule_windows, "ROWS", rows):
        for tile, first in schedule_windows.tiles_of_entries(queries, every, number):
            assert first is None or positions[tile.q[0]] == first
            for row, entry in itertools.product(range(*tile.q), range(*tile.k)):
                found[row, entry] += first is None or (first + row - tile.q[0] + 1) // every > entry
    seen = {(i, j) for i, p in enumerate(positions) for j in range(number) if (j + 1) * every - 1 <= p}
    assert +found == Counter(dict.fromkeys(seen, 1))


@on_ranks
def compiled() -> list[float]:
    problem: Problem = (48, 4, 8, True, True)
    q, k, raw, _, sinks, dout = inputs(problem)
    at = ContextParallelHandler(cp_mesh(), "head_tail").position_ids(48)
    pooled, chosen = raw[:, :12].unsqueeze(1), selection(problem)[:, :, at]
    mesh = view(cp_mesh(), 1)

    def run(q: Tensor, k: Tensor, pooled: Tensor, sinks: Tensor) -> Tensor:
        options: dict[str, Any] = {"window": (5, 0), "layout": "head_tail", "sinks": sinks, "enable_gqa": True}
        entries = Entries(pooled, pooled, 4, chosen)
        return attention(q, k, k, mesh=mesh, entries=entries, **options).sin()  # type: ignore[union-attr]

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (q[:, :, at], k[:, :, at], pooled, sinks)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout[:, :, at])])
    return [relative_error(b, a) for a, b in zip(*results, strict=True)]


def test_compiled_without_a_graph_break(ranks: Ranks) -> None:
    for of_rank in ranks(2, compiled):
        assert max(of_rank) < 1e-12


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a tuple": ({"entries": (1, 2)}, "entries is a tuple"),
    "every": ({"every": 0}, "every=0 must be a positive int"),
    "too many": ({"number": 5}, "at most 4"),
    "documents": ({"documents": [0, 3, 16]}, "entries with documents"),
    "log-sum-exp": ({"return_lse": True}, "entries with return_lse=True"),
    "softcap": ({"softcap": 2.0}, "entries with softcap"),
    "dropout": ({"dropout_p": 0.1}, "entries with dropout_p=0.1"),
}


@on_ranks
def refusals() -> dict[str, str]:
    found = {}
    for name, (options, _) in BAD.items():
        options = {"number": 4, "every": 4, **options}
        q = torch.zeros(1, 2, 8, 4)
        pooled = torch.zeros(1, 2, options.pop("number"), 4)
        given = {"entries": Entries(pooled, pooled, options.pop("every")), "window": (3, 0), **options}
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
            attention(q, q, q, mesh=cp_mesh(), **given)
        found[name] = str(error.value)
    with pytest.raises(ValueError, match=r"x has 3 windows, and 2 end in the positions of rank"):
        gather_windows(torch.zeros(1, 3, 4), every=4, length=16, mesh=cp_mesh())
    assert dist.is_initialized()
    return found


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    for messages in ranks(2, refusals):
        for name, (_, text) in BAD.items():
            assert text in messages[name], messages[name]
