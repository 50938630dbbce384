"""Windows, packed documents, explicit masks and cross-attention on real gloo ranks, against one device in fp64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from tests.harness.attention_case import FP32, FP64, AttentionCase, Errors, check, cp_mesh, modes, pairwise, run_cases
from tests.harness.oracle import absolute_error
from tests.harness.ranks import on_ranks

Rows = tuple[tuple[int, ...], ...]


def boundaries(length: int, kind: str) -> Rows:
    """Documents of odd lengths, of length one, empty ones, shorter than the number of ranks."""
    if kind == "many":
        return (tuple(sorted([0, 1, 2, 2, 5, length // 3 + 1, length // 2, length - 1, length])),)
    if kind == "singles":
        return (tuple(range(length + 1)),)
    return (0, length // 2 + 1, length), (0, 3, 3, length - 2, length)  # other documents in each batch row


def modes_of(world: int) -> list[dict[str, Any]]:
    """All modes; on four ranks those that have a ring beside Ulysses."""
    return [mode for mode in modes(world) if world < 4 or mode["ulysses_degree"] == 2]


def with_lse(*args: Any, **keywords: Any) -> AttentionCase:
    return AttentionCase(*args, return_lse=True, **keywords)


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_windows_and_documents(ranks: Any, world: int) -> None:
    length = 12 * world
    visible: list[dict[str, Any]] = [
        {"window": (3, 0)},
        {"window": (length // world + 5, None)},
        {"window": (2, 4)},
        {"documents": boundaries(length, "many")},
        {"documents": boundaries(length, "rows")},
        {"documents": boundaries(length, "rows"), "window": (4, 1)},
    ]
    cases = [
        with_lse(length, causal, **mode, **settings)
        for settings, causal, mode in itertools.product(visible, (True, False), modes_of(world))
    ]
    cases += [with_lse(length, True, documents=boundaries(length, "singles"), **mode) for mode in modes_of(world)[:4]]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_documents_in_layouts_by_document(ranks: Any, world: int) -> None:
    """Lengths that divide by the number of ranks only, every exchange, in rings alone and beside Ulysses."""
    cases = [
        with_lse(
            length,
            True,
            heads=8,
            kv_heads=8,
            documents=boundaries(length, kind),
            ulysses_degree=degree,
            kv_exchange=exchange,
            layout=layout,
        )
        for layout, length in (("per_document", 11 * world), ("balanced", 12 * world))
        for exchange, kind in (("ring", "many"), ("ring", "singles"), ("all_gather", "many"), ("needed", "many"))
        for degree in ((2,) if world == 4 else (1,))
    ]
    cases += [replace(cases[0], is_causal=False), replace(cases[0], window=(3, 0)), replace(cases[-1], window=(4, 2))]
    cases += [replace(case, kv_heads=2, v_dim=5, documents=boundaries(12 * world, "rows")) for case in cases[-5:-3]]
    cases += [replace(cases[-1], layout="auto"), replace(cases[-1], layout="balanced_3", window=(3, 0))]
    cases += [replace(case, kv_heads=2, v_dim=5, documents=boundaries(11 * world, "rows")) for case in cases[:3]]
    cases += [replace(cases[-1], is_causal=False)]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_explicit_masks(ranks: Any, world: int) -> None:
    length = 8 * world
    cases = [
        with_lse(length, kv_heads=2, mask=kind, **mode)
        for kind in ("bool", "heads", "padding", "2d", "float", "local rows", "causal")
        for mode in modes_of(world)
        if not (kind == "local rows" and (mode["ulysses_degree"] > 1 or mode["load_balance"]))
    ]
    cases += [with_lse(length, mask="bool", window=(5, 2), **mode) for mode in modes_of(world)[:4]]
    rows = boundaries(length, "rows")
    cases += [with_lse(length, mask="float", documents=rows, **mode) for mode in modes_of(world)[:4]]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


# --------------------------------------------------------------------------- cross-attention


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_cross_attention(ranks: Any, world: int) -> None:
    """Queries and keys of different lengths, both sharded."""
    cases = [
        AttentionCase(4 * world, keys=keys * world, kv_heads=2, v_dim=5, mask=mask, **mode)
        for keys, mask, mode in itertools.product((2, 10), ("bool", None), modes_of(world))
        if 4 % mode["ulysses_degree"] == 0
    ]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@on_ranks
def run_replicated(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    """Queries are sharded, keys and values are whole on every rank: nothing travels."""
    with comm.record_traffic() as traffic:
        shards = [case.shard() for case in cases]
        outs = [shard.attend(cp_mesh()) for shard in shards]
        grads = [torch.autograd.grad(out, shard.qkv, shard.dout) for out, shard in zip(outs, shards, strict=True)]
    assert not [entry for entry in traffic.entries if entry[0] != "agreement"]
    return [(s.case, s.errors(out, some)) for s, out, some in zip(shards, outs, grads, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_cross_attention_to_replicated_keys_sends_nothing(ranks: Any, world: int) -> None:
    cases = []
    for layout in ("contiguous", "head_tail"):
        how: dict[str, Any] = {"kv_heads": 2, "v_dim": 5, "layout": layout, "kv_exchange": "replicated"}
        cases += [AttentionCase(4 * world, keys=7, mask=mask, **how) for mask in ("bool", None)]
        cases.append(AttentionCase(4 * world, True, **how))
    check(ranks(world, run_replicated, cases), FP64)


@pytest.mark.parametrize(
    "kv, layout",
    [("ring", "head_tail"), ("needed", "head_tail"), ("replicated", "per_document"), ("replicated", "auto")],
)
def test_cross_attention_inside_documents(ranks: Any, kv: str, layout: str) -> None:
    """Document boundaries describe queries only: a mask says which keys these see."""
    case = AttentionCase(16, keys=12, documents=((0, 5, 16),), mask="bool", kv_exchange=kv, layout=layout)
    check(ranks(2, run_cases, [case]), FP64)


@pytest.mark.parametrize("kv", ["ring", "all_gather", "needed"])
def test_windows_wider_than_any_number_of_positions(ranks: Any, kv: str) -> None:
    bounds = [(4, 2**63 - 1), (2**63 - 1, 2), (2**62, None)]
    cases = [AttentionCase(16, kv_exchange=kv, layout="head_tail", window=window) for window in bounds]
    check(ranks(2, run_cases, cases), FP64)


def test_one_token_a_rank(ranks: Any) -> None:
    cases = [
        AttentionCase(4, True, kv_exchange=kv, dtype=dtype)
        for kv in ("ring", "all_gather", "needed")
        for dtype in (torch.float64, torch.float32)
    ]
    check(ranks(4, run_cases, cases), FP32)


# --------------------------------------------------------------------------- drawn combinations


@st.composite
def drawn_case(draw: st.DrawFn, world: int) -> AttentionCase:
    mode = draw(st.sampled_from([m for m in modes(world) if 8 % m["ulysses_degree"] == 0]))
    length = 2 * world * draw(st.integers(1, 6))
    bound = st.one_of(st.none(), st.integers(0, length + 1))
    kind = draw(st.sampled_from(["window", "documents", "both", "mask"]))
    how: dict[str, Any] = {**mode, "is_causal": draw(st.booleans()), "heads": 8, "kv_heads": 8}
    if kind in ("window", "both"):
        how["window"] = (draw(bound), draw(bound))
    if kind in ("documents", "both"):
        cuts = st.lists(st.integers(0, length), max_size=8).map(sorted)
        how["documents"] = tuple((0, *draw(cuts), length) for _ in range(draw(st.sampled_from([1, 2]))))
    if kind == "mask":
        how.update(is_causal=False, mask=draw(st.sampled_from(["bool", "heads", "padding", "float", "causal"])))
    return with_lse(length, **how)


@st.composite
def drawn_job(draw: st.DrawFn) -> tuple[int, list[AttentionCase]]:
    """Several cases of one world: what takes time is to bring ranks together."""
    world = draw(st.integers(1, 5))
    return world, draw(st.lists(drawn_case(world), min_size=1, max_size=10))


@pytest.mark.slow
@settings(max_examples=8)
@given(drawn_job())
def test_drawn_masks(ranks: Any, job: tuple[int, list[AttentionCase]]) -> None:
    check(ranks(job[0], run_cases, job[1]), FP64)


@on_ranks
def one_row(shape: tuple[int, ...]) -> None:
    """Masks ``[..., 1, S]`` where every rank holds one query: a row of this rank, or one row for all."""
    n = dist.get_world_size()
    q = torch.randn(1, n, 1, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    attention(q, q, q, mesh=cp_mesh(), ulysses_degree=None, attn_mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_that_may_be_a_row_of_this_rank_is_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "one row, and so has every rank's share of the 2 queries", one_row, (1, 1, 1, 2))
    for shape in ((1, 1, 2, 2), (1, 1, 1, 1)):
        ranks(2, one_row, shape)


@on_ranks
def own_heads(shape: tuple[int, ...], kv_heads: int) -> None:
    """A mask of as many heads as a rank attends under Ulysses, of a batch of two rows with four heads."""
    n = dist.get_world_size()
    q, k = (torch.randn(2, heads, 4, 4, generator=torch.Generator().manual_seed(0)) for heads in (4, kv_heads))
    mask = torch.ones(*shape, 4 * n, 4 * n, dtype=torch.bool)
    attention(q, k, k, mesh=cp_mesh(), ulysses_degree=None, attn_mask=mask, enable_gqa=True)


def test_a_mask_of_fewer_heads_is_refused_under_ulysses(ranks: Any) -> None:
    """``[B, S, S]``, whose heads were forgotten, and one mask for each key head were those of a rank's own heads."""
    for shape, kv_heads in (((2,), 4), ((1, 2), 2)):
        ranks.raises(2, "ValueError", r"must be broadcastable to \[2, 4, 8, 8\]", own_heads, shape, kv_heads)
    ranks(2, own_heads, (1, 4), 2)


@on_ranks
def rounded(dtype: torch.dtype) -> tuple[float, float]:
    """The errors of attention in half precision with an ALiBi bias of float32: over the ranks, and on one device."""
    q, k, v = (torch.randn(1, 2, 512, 16, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    at, slopes = torch.arange(512), torch.tensor([0.5, 0.25])[:, None, None]
    bias = (at * slopes).masked_fill(at > at[:, None], -torch.inf)[None]
    wide = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias.double())
    here = slice(256 * dist.get_rank(), 256 * dist.get_rank() + 256)
    found = attention(*(x[:, :, here] for x in (q, k, v)), mesh=cp_mesh(), attn_mask=bias)
    alone = F.scaled_dot_product_attention(q, k, v, bias)
    return absolute_error(found, wide[:, :, here]), absolute_error(alone[:, :, here], wide[:, :, here])


def test_a_mask_of_float32_is_not_rounded(ranks: Any) -> None:
    """Biases of 128 and more lost their last bits, which are those that tell neighbours apart."""
    for error, of_one in ranks(2, rounded, torch.bfloat16):
        assert error <= 2 * of_one, (error, of_one)
