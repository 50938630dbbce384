"""Decoding over a split cache on real gloo ranks against attention of the whole sequence on one device."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, split_cp_mesh
from hyper_cp.mesh import comm
from hyper_cp.ops import SplitCache, decode_attention, select_cached, split_cache
from tests.harness.oracle import plain_attention, relative_error, softcap, visible_pairs
from tests.harness.ranks import error_of, named_error, on_ranks

LAYOUTS = ("contiguous", "head_tail", "per_document", "balanced", "auto")
PROMPT, STEPS = 21, (1, 1, 3, 1, 7, 1, 1)
TOTAL = PROMPT + sum(STEPS)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "longer window": {"window": 17},
    "sinks, softcap and scale": {"sinks": True, "softcap": 2.0, "scale": 0.7},
    "padding": {"padding": True},
    "padding and window": {"padding": True, "window": 9, "sinks": True},
    "as many heads": {"kv_heads": 4},
    "other values": {"v_dim": 3},
    "interleaved queries": {"interleaved": True},
    "latents": {"latents": 10},
    "latents, window and padding": {"latents": 10, "window": 6, "padding": True},
    "latents with bias": {"latents": 10, "bias": True, "softcap": 3.0},
}


def drawn(kv_heads: int = 2, v_dim: int = 8, latents: int = 0, **_: Any) -> list[Tensor]:
    """q, and k and v or latents, their rotary part, weight and bias of the whole sequence: the same on every rank."""
    g = torch.Generator().manual_seed(kv_heads + latents)
    shapes = [(2, 4, TOTAL, 8), (2, kv_heads, TOTAL, 8), (2, kv_heads, TOTAL, v_dim)]
    if latents:
        shapes[1:] = [(2, 1, TOTAL, latents), (2, 1, TOTAL, 3), (4 * (5 + v_dim), latents), (4 * (5 + v_dim),)]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def mask_of(case: dict[str, Any]) -> Tensor:
    """The first row begins with padding, and the prompt of the second ends with some."""
    mask = torch.ones(2, TOTAL, dtype=torch.int64)
    if case.get("padding"):
        mask[0, :5], mask[1, PROMPT - 2 : PROMPT] = 0, 0
    return mask


def one_device(case: dict[str, Any], listed: Tensor | bool = True) -> Tensor:
    q, *given = drawn(**case)
    if case.get("latents"):
        latent, rope, weight, bias = given
        made = torch.einsum("bsr,or->bso", latent[:, 0], weight) + (bias if case.get("bias") else 0)
        plain, v = made.unflatten(2, (4, -1)).transpose(1, 2).split([5, case.get("v_dim", 8)], 3)
        given = [torch.cat([plain, rope.expand(-1, 4, -1, -1)], 3), v]
    window = case.get("window")
    seen = visible_pairs(TOTAL, True, None if window is None else (window, 0), None)
    cap = case.get("softcap")
    return plain_attention(
        q,
        *given,
        scale=case.get("scale"),
        visible=seen & mask_of(case).bool()[:, None, None] & listed,
        score_mod=None if cap is None else softcap(cap),
        sinks=sinks_of(case),
    )


def sinks_of(case: dict[str, Any]) -> Tensor | None:
    return torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if case.get("sinks") else None


def filled(case: dict[str, Any], layout: str, kv: list[Tensor]) -> SplitCache:
    """A cache with this rank's share of the prompt, which is padded to a length that splits."""
    mesh, window = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), case.get("window")
    handler = ContextParallelHandler(mesh, layout)
    padded = handler.padded_length(PROMPT)
    documents = [0, PROMPT, padded] if layout in LAYOUTS[2:] and padded > PROMPT else [0, padded]
    with handler.documents(documents):
        share = [handler.dispatch(x[:, :, :PROMPT], 2, pad_value=0) for x in kv]
        mask = handler.dispatch(mask_of(case)[:, :PROMPT], 1, pad_value=0) if case.get("padding") else None
    bounds = None if window is None else (window, 0)
    cache = SplitCache(mesh, layout=layout, window=bounds, latents="latents" in case)
    cache.fill(*share, length=PROMPT, documents=documents, attention_mask=mask)
    return cache


@on_ranks
@patch.object(split_cache, "SPARE", 1)
def decoded(layout: str) -> dict[str, tuple[float, Tensor]]:
    """The error of each case, and what it made, in caches that grow (and drop what lies before a window) often."""
    found = {}
    for name, case in CASES.items():
        q, *kv = drawn(**case)
        q = torch.stack([q, -q], -1)[..., 0] if case.get("interleaved") else q  # its head dim is not contiguous
        kv, of_latents = kv[:2], kv[2 : 4 if case.get("bias") else 3]
        cache, at, outs = filled(case, layout, kv), PROMPT - 1, []
        for count in (1, *STEPS):
            new = slice(at, at + count)
            if at >= PROMPT:  # the first query is the last token of the prompt
                cache.append(*(x[:, :, new] for x in kv))
            options = {x: case.get(x) for x in ("scale", "softcap")} | {"sinks": sinks_of(case), "enable_gqa": True}
            options |= dict(zip(("weight", "bias"), of_latents, strict=False))
            outs.append(decode_attention(q[:, :, new], cache, **options))
            at += count
        made = torch.cat(outs, 2)
        found[name] = relative_error(made, one_device(case)[:, :, PROMPT - 1 :]), made
    return found


@pytest.mark.parametrize(
    "world, layout", [(2, "contiguous"), (2, "per_document"), (2, "auto"), (3, "head_tail"), (3, "balanced")]
)
def test_new_tokens_attend_as_on_one_device_with_the_same_bits_on_all_ranks(
    ranks: Any, world: int, layout: str
) -> None:
    first, *others = ranks(world, decoded, layout)
    assert max(error for error, _ in first.values()) <= 1e-12, {name: error for name, (error, _) in first.items()}
    for other in others:
        assert all(torch.equal(made, other[name][1]) for name, (_, made) in first.items())


# --------------------------------------------------------------------------- selected keys

TOPK, INDEX_HEADS, INDEX_DIM = 7, 3, 6


def indexed() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights of an indexer."""
    g = torch.Generator().manual_seed(5)
    shapes = (2, INDEX_HEADS, TOTAL, INDEX_DIM), (2, 1, TOTAL, INDEX_DIM), (2, INDEX_HEADS, TOTAL)
    q, k, weights = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return q, k, weights


def best_keys(case: dict[str, Any]) -> Tensor:
    """The best visible keys of each query ``[B, S, topk]`` by the definition, -1 where there are fewer."""
    q, k, weights = indexed()
    scores = torch.einsum("bhij,bhi->bij", torch.relu(torch.einsum("bhid,bgjd->bhij", q, k) * INDEX_DIM**-0.5), weights)
    seen = visible_pairs(TOTAL, True, None, None)[:, 0] & mask_of(case).bool()[:, None]
    found = scores.float().masked_fill(~seen, -torch.inf).sort(descending=True, stable=True, dim=-1)
    return found.indices.masked_fill(found.values == -torch.inf, -1)[..., :TOPK]


@on_ranks
def selected(layout: str) -> dict[str, tuple[int, float]]:
    """The number of wrong selections, of keys or by their bytes, and the error of attention to them."""
    found = {}
    for name, case in {"heads": {}, "padding": {"padding": True}, "latents": {"latents": 10}}.items():
        q, *kv = drawn(**case)
        kv, weight = kv[:2], dict(zip(("weight",), kv[2:3] if case.get("latents") else (), strict=False))
        index_q, index_k, weights = indexed()
        halves = [*index_k.split([2, 4], 3)]
        cache, index = filled(case, layout, kv), filled({**case, "latents": 1}, layout, halves)
        best, wrong, errors, at = best_keys(case), 0, [], PROMPT
        listed = torch.zeros(2, TOTAL, TOTAL + 1, dtype=torch.bool).scatter_(2, best % (TOTAL + 1), True)[..., :TOTAL]
        want = one_device(case, listed[:, None])
        for count in STEPS:
            new = slice(at, at + count)
            cache.append(*(x[:, :, new] for x in kv))
            index.append(*(x[:, :, new] for x in halves))
            with comm.record_traffic() as log:
                keys = select_cached(index_q[:, :, new], index, weights[:, :, new], topk=TOPK)
            sent = [n for kind, n in log.entries if kind != "agreement"]
            wrong += not torch.equal(keys[:, 0].long(), best[:, new])
            wrong += sent != [(dist.get_world_size() - 1) * 2 * count * TOPK * 8]
            out = decode_attention(q[:, :, new], cache, enable_gqa=True, selected=keys, **weight)
            errors.append(relative_error(out, want[:, :, new]))
            at += count
        found[name] = wrong, max(errors)
    return found


@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (3, "head_tail")])
def test_new_tokens_select_keys_and_attend_to_them_as_on_one_device(ranks: Any, world: int, layout: str) -> None:
    for found in ranks(world, selected, layout):
        assert all(not wrong and error <= 1e-12 for wrong, error in found.values()), found


@on_ranks
def counted() -> dict[str, Any]:
    """Bytes of memory and of messages, and a long text after the prompt."""
    found: dict[str, Any] = {}
    for name, case in {"plain": {}, "window": {"window": 6}, "latents": {"latents": 10}}.items():
        q, *kv = drawn(**case)
        cache, new = filled(case, "head_tail", kv[:2]), slice(PROMPT, PROMPT + 1)
        weight = dict(zip(("weight",), kv[2:3], strict=False))
        with comm.record_traffic() as filling:
            cache.append(*(x[:, :, new] for x in kv[:2]))
        with comm.record_traffic() as sending:
            decode_attention(q[:, :, new], cache, enable_gqa=True, **weight)
        sent = [[n for kind, n in log.entries if kind != "agreement"] for log in (filling, sending)]
        found[name] = cache.nbytes, *sent
        for _ in range(4 * split_cache.SPARE):
            cache.append(*(x[:, :, new] for x in kv[:2]))
        found[f"long, {name}"] = cache.length, cache.nbytes, len(cache._starts)
    return found


def test_memory_and_messages_are_those_of_the_formulas(ranks: Any) -> None:
    world = 3
    for found in ranks(world, counted):
        share = 24 // world
        for name, row, heads in (("plain", 2 * 2 * 16, 4), ("latents", 2 * 13, 4)):
            memory, filling, sending = found[name]
            # The last share is shorter: the prompt has 21 positions, and is padded to 24.
            assert (share - 3 + split_cache.SPARE) * row * 8 <= memory <= (share + split_cache.SPARE) * row * 8
            assert filling == [] and sending == [(world - 1) * 2 * heads * (8 + 1) * 8]
            length, memory, _ = found[f"long, {name}"]
            assert (
                length == PROMPT + 1 + 4 * split_cache.SPARE
                and memory <= (length / world + 1 + split_cache.SPARE) * row * 8
            )
        memory, *_ = found["window"]
        assert memory <= (6 + split_cache.SPARE) * 2 * 2 * 16 * 8
        _, memory, ranges = found["long, window"]
        assert memory <= (6 + 1 + split_cache.SPARE) * 2 * 2 * 16 * 8 and ranges <= 6 + 1 + split_cache.SPARE


# --------------------------------------------------------------------------- in styled modules


class Decoder(nn.Module):
    def __init__(self, cache: SplitCache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.append(k, v)
        return decode_attention(q, self.cache)


@on_ranks
def ends_of_rows(layout: str) -> list[list[int]]:
    """The last tokens of prompts: without a mask, with padding before tokens, and with padding on both sides."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), layout)
    found: list[list[int]] = []
    before, both = torch.ones(3, 10), torch.ones(3, 10)
    before[0, :4] = both[0, :2] = both[1, 6:] = both[2, 1:] = 0
    for mask in (None, before, both):
        cache = SplitCache(handler.mesh, layout=layout)
        batch = handler.get_batch_on_this_cp_rank({"at": torch.arange(10).expand(3, -1)})
        shown = None if mask is None else handler.dispatch(mask.long(), pad_value=0)
        with handler.documents(batch):
            keys = torch.zeros(3, 2, batch["at"].shape[1], 4)
            cache.fill(keys, keys, length=10, attention_mask=shown)
        assert cache.last_token(batch["at"][..., None].expand(-1, -1, 2)).shape == (3, 1, 2)
        found.append(cache.last_token(batch["at"]).flatten().tolist())
    return found


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_the_last_token_of_each_row_is_before_its_padding(ranks: Any, layout: str) -> None:
    assert ranks(2, ends_of_rows, layout) == [[[9, 9, 9], [9, 9, 9], [9, 5, 0]]] * 2


@on_ranks
def ends_of_selected_rows(layout: str, rows: list[int]) -> list[int]:
    """The last tokens of rows that were selected after the prompt: 9, 5 and 0 before."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), layout)
    mask, index = torch.ones(3, 12, dtype=torch.int64), torch.tensor(rows)
    mask[0, 10:] = mask[1, 6:] = mask[2, 1:] = 0
    cache, keys = SplitCache(handler.mesh, layout=layout), torch.zeros(3, 2, 6, 4)
    cache.fill(keys, keys, attention_mask=handler.dispatch(mask))
    cache.select_rows(index)
    at = handler.dispatch(torch.arange(12).expand(len(rows), -1))
    return cache.last_token(at).flatten().tolist()


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0, 2], [2]])
def test_the_last_tokens_are_those_of_the_rows_that_were_selected(ranks: Any, rows: list[int]) -> None:
    for layout in ("contiguous", "head_tail"):
        assert ranks(2, ends_of_selected_rows, layout, rows) == [[[9, 5, 0][row] for row in rows]] * 2


@on_ranks
def in_a_styled_module() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    alone = split_cp_mesh(mesh).cp(1)
    x, found = torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(0)), []
    for where, degree in ((mesh, 1), (alone, 1), (mesh, 2)):
        module = Decoder(SplitCache(where))
        indices = None if degree == 1 else (0, 1, 2)
        style = ContextParallel(qkv_indices=indices, ulysses_degree=degree, seq_dim=2, head_dim=1)
        parallelize_module(module, mesh, style)
        found.append(error_of(lambda module=module: module(x, x, x)))
    return found


def test_a_styled_module_decodes_on_its_own_mesh_without_exchanged_heads(ranks: Any) -> None:
    for right, other, exchanged in ranks(2, in_a_styled_module):
        assert not right, right
        assert re.match("ValueError: .*but its cache lies on another one", other), other
        assert re.match("NotImplementedError: .*after its heads were exchanged", exchanged), exchanged


# --------------------------------------------------------------------------- wrong use


def _wrong(what: str) -> None:
    q, k, v = (x[:, :, :1] for x in drawn())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    window = {"window": (4, 2), "older queries": (3, 0)}.get(what)
    cache = SplitCache(mesh, layout="nowhere" if what == "layout" else "contiguous", window=window)
    share = [x[:, :, :4] for x in drawn()[1:]]
    if what == "documents":
        cache.fill(*share, documents=[0, 3, 8])
    if what == "block":
        with ContextParallelHandler(mesh, "contiguous").documents([0, 3, 8]):
            cache.fill(*share)
    if what == "odd":
        SplitCache(mesh, layout="balanced").fill(*(x[:, :, :3] for x in share), documents=[0, 6])
    if what == "short":
        cache.fill(*share, length=1)
    if what == "length":
        cache.fill(*share, length=9)
    if what == "mask":
        cache.fill(*share, attention_mask=torch.ones(2, 8))
    if what == "values":
        cache.fill(share[0], share[1][:, :1])
    if what == "rank":
        cache.fill(*(x[:, :, : 3 + dist.get_rank()] for x in share))
    if what == "gradients":
        cache.fill(share[0].requires_grad_(), share[1])
    if what == "empty":
        decode_attention(q, cache)
    cache.fill(*share)
    if what == "twice":
        cache.fill(*share)
    if what == "dtype":
        cache.append(k.float(), v.float())
    cache.append(k, v)
    if what == "older queries":
        decode_attention(torch.cat([q, q], 2), cache, enable_gqa=True)
    if what == "weight":
        decode_attention(q, cache, weight=torch.ones(4, 8, dtype=torch.float64))
    if what == "queries":
        decode_attention(q.float(), cache)
    if what == "gqa":
        decode_attention(q, cache)
    if what == "head dim":
        decode_attention(q[..., :4], cache, enable_gqa=True)
    if what == "sinks":
        decode_attention(q, cache, enable_gqa=True, sinks=torch.ones(2, dtype=torch.float64))
    if what == "gradients of queries":
        decode_attention(q.requires_grad_(), cache, enable_gqa=True)
    if what.startswith("indexer"):
        _wrong_indexer(what, cache, q)
    decode_attention(q if what != "other tokens" or dist.get_rank() else q[:1], cache, enable_gqa=True)


def _wrong_indexer(what: str, attention: SplitCache, q: Tensor) -> None:
    cache = SplitCache(attention.cp, latents=True)
    if what != "indexer of nothing":
        cache.fill(torch.ones(2, 1, 4, 5).double(), torch.ones(2, 1, 4, 3).double())
    weights = torch.ones(2, 1, 4) if what == "indexer weights" else None
    topk, scale = 0 if what == "indexer topk" else 3, 1.0 + dist.get_rank() * (what == "indexer scale")
    rows = {"indexer batch": q[:1], "indexer dim": q[..., :4], "indexer dtype": q.float()}
    of_attention = what == "indexer of attention"
    select_cached(rows.get(what, q), attention if of_attention else cache, weights, topk=topk, scale=scale)


WRONG = {
    "layout": "layout='nowhere'",
    "window": "window=(4, 2) of a cache reaches 2 positions to the right. New tokens are causal",
    "documents": "NotImplementedError: the prompt has documents that end at [[0, 3, 8]], before its 8 tokens do",
    "block": "NotImplementedError: the prompt has documents that end at [[0, 3, 8]], before its 8 tokens do",
    "odd": "length of the prompt on all ranks=6 cannot be split over 2 ranks with layout='balanced'",
    "short": "the prompt has 1 tokens, fewer than the cp mesh of 2 ranks",
    "length": "length=9 is not that of a prompt of which 2 ranks hold 4 positions each",
    "mask": "attention_mask is torch.float32 (2, 8)",
    "values": "SplitCache.fill: key is torch.float64 (2, 2, 4, 8) and value torch.float64 (2, 1, 4, 8)",
    "rank": "SplitCache.fill: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) call attention with different",
    "gradients": "NotImplementedError: SplitCache.fill: a tensor of shape (2, 2, 4, 8) requires a gradient",
    "empty": "decode_attention: query has 1 new tokens, and the cache has 0 positions",
    "twice": "SplitCache.fill: the cache holds 8 positions already",
    "dtype": "SplitCache.append: key torch.float32 (2, 2, 1, 8) and value (2, 2, 1, 8) do not fit the cache",
    "older queries": "decode_attention: query has 2 new tokens, more than were appended last. The cache has window",
    "weight": "decode_attention: the cache does not hold latents, and weight is given",
    "queries": "decode_attention: query is torch.float32 (2, 4, 1, 8)",
    "gqa": "query has 4 heads and key 2",
    "head dim": "decode_attention: query (2, 4, 1, 4) has another head dim than the keys in the cache (8)",
    "sinks": "sinks=torch.float64 (2,) on cpu must hold",
    "gradients of queries": "NotImplementedError: decode_attention: a tensor of shape (2, 4, 1, 8) requires a gradient",
    "indexer of nothing": "select_cached: query has 1 new tokens, and the cache has 0 positions",
    "indexer of attention": "select_cached: query is (2, 4, 1, 8), and the cache holds keys and values of attention",
    "indexer topk": "topk=0 must be a positive int",
    "indexer batch": "select_cached: query is torch.float64 (1, 4, 1, 8), and the cache holds 2 batch rows",
    "indexer dtype": "select_cached: query is torch.float32 (2, 4, 1, 8), and the cache holds 2 batch rows",
    "indexer dim": "select_cached: query is (2, 4, 1, 4), and the cache holds keys of 8 numbers",
    "indexer weights": "select_cached: weights is torch.float32 (2, 1, 4). It must be floating-point (2, 4, 1)",
    "indexer scale": "select_cached: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) call",
    "other tokens": "decode_attention: query is torch.float64 (1, 4, 1, 8), and the cache holds 2 batch rows",
}


@on_ranks
def wrong_uses() -> dict[str, str]:
    alone = ("rank", "other tokens", "indexer scale")
    return {what: error_of(lambda what=what: _wrong(what)) for what in WRONG if what not in alone}


@on_ranks
def wrong_use(what: str) -> str:
    return error_of(lambda: _wrong(what))


def test_wrong_use_raises_on_every_rank_and_says_why(ranks: Any) -> None:
    for found in ranks(2, wrong_uses):
        for what, text in found.items():
            kind, words = named_error(WRONG[what])
            assert re.match(rf"{kind}: .*{re.escape(words)}", text), (what, text)
    for what in ("rank", "indexer scale"):
        kind, words = named_error(WRONG[what])
        assert all(re.match(rf"{kind}: .*{re.escape(words)}", text) for text in ranks(2, wrong_use, what))
