"""Masks of slices: every pair against the definition, blocks against create_block_mask, attention in every exchange."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.ops import attention, layout_of_mask, mask_of_slices
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

KINDS = ("full", "causal", "inverse_causal", "bicausal")
Slices = list[tuple[tuple[int, int], tuple[int, int], Any]]


def shown(slices: Slices, queries: int, keys: int) -> Tensor:
    """The definition, pair by pair."""
    found = torch.zeros(queries, keys, dtype=torch.bool)
    for (q0, q1), (k0, k1), kind in slices:
        more = (k1 - k0) - (q1 - q0)
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                last = j <= i + more or kind in ("full", "inverse_causal")
                first = j >= i or kind in ("full", "causal")
                found[q0 + i, k0 + j] |= last and first
    return found


def of_pairs(mask: Any, queries: int, keys: int) -> Tensor:
    """The mask's function at every pair."""
    i, j = torch.arange(queries)[:, None].expand(queries, keys), torch.arange(keys)[None].expand(queries, keys)
    return mask.mask_mod(None, None, i, j)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Slices, int, int, int]:
    queries, keys = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    ends = (st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda x: (min(x), max(x))) for n in (queries, keys))
    slices = draw(st.lists(st.tuples(*ends, st.sampled_from(KINDS)), max_size=6))
    return slices, queries, keys, draw(st.sampled_from([1, 3, 4, 8]))


@given(problems())
def test_every_pair_and_every_block(problem: tuple[Slices, int, int, int]) -> None:
    slices, queries, keys, size = problem
    mask, want = mask_of_slices(slices, queries, keys=keys, block_size=size), shown(slices, queries, keys)
    assert torch.equal(of_pairs(mask, queries, keys), want)
    other = create_block_mask(lambda b, h, i, j: want[i, j], None, None, queries, keys, device="cpu", BLOCK_SIZE=size)
    for name in ("kv", "full_kv"):
        number, wanted = (getattr(x, f"{name}_num_blocks") for x in (mask, other))
        assert torch.equal(number, wanted), name
        for row, count in enumerate(number.flatten().tolist()):
            found, listed = (getattr(x, f"{name}_indices")[0, 0, row, :count] for x in (mask, other))
            assert sorted(found.tolist()) == sorted(listed.tolist()), name
    assert mask_of_slices(tuple(slices), queries, keys=keys, block_size=size) is mask
    numbers = [(q, k, KINDS.index(kind)) for q, k, kind in slices]
    assert mask_of_slices(numbers, queries, keys=keys, block_size=size) is mask


@pytest.mark.parametrize("part", ["function", "blocks"])
def test_a_mask_that_a_caller_changes_is_his_own(part: str) -> None:
    """Functions of pairs are combined by setting ``mask_mod``."""
    first = mask_of_slices(SLICES, S, block_size=8)
    want = of_pairs(first, S, S), first.to_dense().clone()
    if part == "function":
        function = first.mask_mod
        first.mask_mod = lambda b, h, i, j: function(b, h, i, j) & (i - j < 4)
    else:
        first.kv_num_blocks.zero_()
    second = mask_of_slices(SLICES, S, block_size=8)
    assert second is not first and mask_of_slices(SLICES, S, block_size=8) is second
    assert torch.equal(of_pairs(second, S, S), want[0]) and torch.equal(second.to_dense(), want[1])


def test_long_sequences_need_no_matrix_of_pairs() -> None:
    length, document = 2**17, 2**13
    starts = range(0, length, document)
    slices: Slices = [((s, s + document), (s, s + document), "causal") for s in starts]
    slices += [((s, s + document), (0, 512), "full") for s in starts]
    began = time.perf_counter()
    mask = mask_of_slices(slices, length)
    assert time.perf_counter() - began < 20
    assert max(x.numel() for x in (mask.kv_indices, mask.full_kv_indices)) == (length // 128) ** 2
    rows = document // 128
    assert int(mask.kv_num_blocks.sum()) == length // 128 - 4  # the diagonal, but for what the prefix shows whole
    whole = [4 if row < 4 else row if row < rows else row % rows + 4 for row in range(length // 128)]
    assert mask.full_kv_num_blocks.flatten().tolist() == whole


# --------------------------------------------------------------------------- attention

S = 96
SLICES: Slices = [
    ((0, 40), (0, 40), "causal"),
    ((40, 64), (8, 32), "bicausal"),
    ((40, 64), (40, 64), "inverse_causal"),
    ((64, 96), (0, 16), "full"),
    ((70, 96), (56, 96), "causal"),
]
"""Some pairs lie in two of them, and every query sees something."""


class Flex(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=mask_of_slices(SLICES, S, block_size=8))


@on_ranks
def attended(modes: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """The largest error of output and gradients, and the bytes that this rank sends in forward."""
    mesh, found, g = cp_mesh(), [], torch.Generator().manual_seed(4)
    whole = [torch.randn(1, 4, S, 8, dtype=torch.float64, generator=g, requires_grad=True) for _ in "qkv"]
    want = plain_attention(*whole, visible=shown(SLICES, S, S)[None, None])
    wanted = [want, *torch.autograd.grad(want.square().sum(), whole)]
    for mode in modes:
        style = ContextParallel(2, 1, **mode)
        handler, module = ContextParallelHandler(mesh, style), parallelize_module(Flex(), mesh, style)
        local = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
        module(*local)  # what is compared once is not counted
        with comm.record_traffic() as log:
            out = module(*local)
        parts = [out, *torch.autograd.grad(out.square().sum(), local)]
        errors = [relative_error(handler.combine(a.detach(), 2), b) for a, b in zip(parts, wanted, strict=True)]
        found.append((max(errors), log.bytes_sent))
    return found


def test_attention_under_slices(ranks: Any) -> None:
    balanced = layout_of_mask(mask_of_slices(SLICES, S, block_size=8), chunks_per_rank=4)
    assert balanced.startswith("mask_")
    modes: list[dict[str, Any]] = [{"ulysses_degree": 1, "kv_exchange": x} for x in ("ring", "all_gather", "needed")]
    modes += [{**modes[0], "layout": "head_tail"}, {"ulysses_degree": 2}]
    first, second = ranks(2, attended, modes)
    assert max(error for error, _ in (*first, *second)) <= 1e-10
    # Rank 0 (queries 0 to 47) sees of the other's keys 48 to 63 in blocks, rank 1 (48 to 95) of rank 0's all but the
    # keys 32 to 39, which lie in blocks of no slice: a row is a key and a value of 4 heads of 8 numbers in fp64.
    row = 2 * 4 * 8 * 8
    seen = shown(SLICES, S, S)
    blocks = seen.view(12, 8, 12, 8).any(3).any(1)
    assert second[2][1] == 8 * row * int(blocks[:6, 6:].any(0).sum()) and first[2][1] == 8 * row * int(
        blocks[6:, :6].any(0).sum()
    )
    assert first[2][1] < first[1][1] and second[2][1] < second[1][1], "blocks that nobody sees are not sent"


@on_ranks
def functions(cases: list[dict[str, Any]]) -> list[float]:
    """The largest error of ``ops.attention(slices=)``, of its gradients and of its log-sum-exp."""
    mesh, found, g = cp_mesh(), [], torch.Generator().manual_seed(4)
    for case in cases:
        mode = dict(case)
        keys, cap, some = mode.pop("keys", S), mode.get("softcap"), SLICES[mode.pop("first", 0) :]
        if keys != S:
            some = [((0, 60), (0, 20), "full"), ((30, S), (4, keys), "inverse_causal"), ((60, S), (0, 9), "causal")]
        handler = ContextParallelHandler(mesh, mode.get("layout", "contiguous"))
        sizes = ((4, S), (2, keys), (2, keys))
        whole = [torch.randn(2, h, n, 8, dtype=torch.float64, generator=g, requires_grad=True) for h, n in sizes]
        visible = shown(some, S, keys)
        if mode.get("window"):
            i, j = torch.arange(S)[:, None], torch.arange(keys)
            visible = visible & (i - j <= 9) & (j - i <= 5)
        q, k, v = whole[0], *(x.repeat_interleave(2, 1) for x in whole[1:])
        logits = q @ k.mT / 8**0.5
        logits = (logits if cap is None else cap * (logits / cap).tanh()).masked_fill(~visible, -torch.inf)
        want_lse, want = logits.logsumexp(-1), logits.softmax(-1).nan_to_num(0.0) @ v
        wanted = torch.autograd.grad(want.square().sum(), whole)
        local = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
        if mode.get("kv_exchange") == "replicated":
            local[1:] = [x.detach().clone().requires_grad_() for x in whole[1:]]
        out, lse = attention(*local, mesh=mesh, slices=some, enable_gqa=True, return_lse=True, **mode)
        grads = list(torch.autograd.grad(out.square().sum(), local))
        if mode.get("kv_exchange") == "replicated":
            grads[1:] = [sum_over_ranks(x)[0] for x in grads[1:]]
        else:
            grads[1:] = [handler.combine(x, 2) for x in grads[1:]]
        grads[0] = handler.combine(grads[0], 2)
        pairs = [(handler.combine(out.detach(), 2), want), *zip(grads, wanted, strict=True)]
        errors = [relative_error(a, b) for a, b in pairs]
        lse = handler.combine(lse.detach(), 2)
        assert torch.equal(lse.isinf(), want_lse.isinf()), (case, lse.isinf().sum(), want_lse.isinf().sum())
        errors.append(relative_error(lse.nan_to_num(neginf=0.0), want_lse.detach().nan_to_num(neginf=0.0)))
        found.append(max(errors))
    return found


def test_the_function_takes_slices(ranks: Any) -> None:
    cases: list[dict[str, Any]] = [{"kv_exchange": x} for x in ("ring", "all_gather", "needed")]
    cases += [{"ulysses_degree": 2}, {"ulysses_degree": 2, "head_groups": 2}, {"softcap": 2.0, "kv_exchange": "ring"}]
    cases += [{"layout": "head_tail", "first": 1}, {"kv_exchange": "needed", "window": (9, 5), "first": 0}]
    cases += [{"keys": 40}, {"keys": 40, "kv_exchange": "replicated"}]
    for errors in ranks(2, functions, cases):
        assert max(errors) <= 1e-10, errors


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "slices, words",
    [
        ([((0, 4), (0, 9), "full")], r"slices\[0\]=.* does not lie within 8 queries and 8 keys"),
        ([((0, 4), (0, 4), "full"), ((5, 4), (0, 4), "full")], r"slices\[1\]=\(\(5, 4\)"),
        ([((-1, 4), (0, 4), "full")], r"slices\[0\]=\(\(-1, 4\)"),
    ],
)
def test_ranges_that_do_not_fit(slices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mask_of_slices(slices, 8)


@pytest.mark.parametrize(
    "wrong", [((0, 4), (0, 4), "band"), ((0, 4), (0, 4), 4), ((0, 4), (0, 4)), ((0.5, 4), (0, 4), 0), (0, 4, 1), None]
)
def test_what_is_no_slice(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"slices\[0\]=.* is no slice\. .*'inverse_causal'"):
        mask_of_slices([wrong], 8)


@pytest.mark.parametrize("wrong", [None, 3, "full", torch.zeros(2, 5)])
def test_what_is_no_list_of_slices(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"slices is a {type(wrong).__name__}. It lists"):
        mask_of_slices(wrong, 8)


@pytest.mark.parametrize("numbers", [{"length": 0}, {"length": "8"}, {"keys": -1}, {"block_size": 1.5}])
def test_wrong_lengths(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(numbers))}=.* must be an int from 1"):
        mask_of_slices([], **{"length": 8, **numbers})
