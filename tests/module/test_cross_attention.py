"""Cross-attention in a batch with padding: documents of a block describe the queries, and hide no keys of another
sequence, also where both are equally long."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

TARGET, SOURCE = 14, 11
"""Tokens of both sequences; the others of their positions are padding."""


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Flex(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        visible = mask.flatten()
        blocks = create_block_mask(lambda b, h, i, j: visible[j], None, None, 16, len(visible), "cpu", BLOCK_SIZE=4)
        return flex_attention(q, k, v, block_mask=blocks)


def styled(module: nn.Module, **options: Any) -> tuple[nn.Module, ContextParallelHandler]:
    mesh, style = cp_mesh(), ContextParallel(2, 1, **options)
    return parallelize_module(module, mesh, style), ContextParallelHandler(mesh, style)


def whole(keys: int) -> tuple[list[Tensor], Tensor]:
    """q of 16 positions, k and v of ``keys``, and which keys are no padding."""
    g = torch.Generator().manual_seed(keys)
    lengths = (16, keys, keys)
    qkv = [torch.randn(2, 2, n, 4, dtype=torch.float64, generator=g).requires_grad_() for n in lengths]
    return qkv, (torch.arange(keys) < SOURCE)[None, None, None]


@on_ranks
def errors() -> dict[str, float]:
    found = {}
    modes: list[dict[str, Any]] = [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": 1, "kv_exchange": "all_gather"},
        {"ulysses_degree": 1, "kv_exchange": "replicated"},
        {},
    ]
    whole_memory: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "replicated", "layout": "per_document"}
    cases = [
        *itertools.product([Attention], (16, 12), modes, ((0, 1, 2), None)),
        (Flex, 16, modes[0], None),
        *itertools.product([Attention, Flex], [12], [whole_memory], ((0, 1, 2), None)),
    ]
    for kind, keys, mode, indices in cases:
        module, handler = styled(kind(), cross_attention=True, qkv_indices=indices, **mode)
        qkv, visible = whole(keys)
        with handler.documents([0, TARGET, 16]):
            q = handler.dispatch(qkv[0], 2)
            k, v = (x * 1 if mode.get("kv_exchange") == "replicated" else handler.dispatch(x, 2) for x in qkv[1:])
            out = handler.combine(module(q, k, v, visible), 2)
        want = plain_attention(*qkv, visible=visible)
        grads = [torch.autograd.grad(y.square().sum(), qkv) for y in (out, want)]
        pairs = zip([out, *sum_over_ranks(*grads[0])], [want, *grads[1]], strict=True)
        worst = max(relative_error(a, b) for a, b in pairs)
        found[f"{kind.__name__} {keys} {mode} {indices}"] = worst
    return found


def test_documents_of_queries_hide_no_keys(ranks: Any) -> None:
    for found in ranks(2, errors):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def refusals() -> None:
    cross, handler = styled(Attention(), ulysses_degree=1, cross_attention=True)
    plain, _ = styled(Attention(), ulysses_degree=1)
    shares = {keys: [handler.dispatch(x, 2) for x in whole(keys)[0]] for keys in (16, 12)}
    masks = {keys: whole(keys)[1] for keys in (16, 12)}
    with handler.documents([0, TARGET, 16]):
        with pytest.raises(ValueError, match="is_causal=True or a window, and its style has cross_at"):
            cross(*shares[16], causal=True)
        with pytest.raises(ValueError, match="calls attention without attn_mask"):
            cross(*shares[16])
        # The same program with equal lengths would be wrong without a word.
        with pytest.raises(ValueError, match=r"keys of another length \(6 for 8 queries on this rank\)"):
            plain(*shares[12], masks[12])
        plain(*shares[16], causal=True)
        with pytest.raises(RuntimeError, match="modules of cross-attention a style with cross_attention=True"):
            plain(*shares[16], masks[16])
        cross(*shares[16], masks[16])
    with handler.documents([0, TARGET, 16]):  # a mask of keys alone is a mask of the sequence itself
        plain(*shares[16], masks[16])
    window, _ = styled(Attention(), ulysses_degree=1, window=(5, 0))
    with handler.documents([0, TARGET, 16]):  # with a causal window, it is that of a causal model
        plain(*shares[16], causal=True)
        window(*shares[16], masks[16])
        window(*shares[16], torch.ones_like(masks[16]))
    plain(*shares[12], masks[12])
    style = ContextParallel(
        2, 1, ulysses_degree=1, kv_exchange="replicated", layout="per_document", cross_attention=True
    )
    placed = parallelize_module(Attention(), handler.mesh, style)
    with handler.documents([0, TARGET, 16]), pytest.raises(ValueError, match="as many keys as queries"):
        placed(shares[16][0], *whole(16)[0][1:], masks[16])


@on_ranks
def decoding() -> None:
    """A step with a KV cache would attend to this rank's copy of the new token on every rank."""
    q, k, v = (torch.randn(1, 2, length, 4) for length in (1, 9, 9))
    modes: list[dict[str, Any]] = [{"ulysses_degree": 1}, {"ulysses_degree": 1, "kv_exchange": "ring"}, {}]
    for mode, indices in itertools.product(modes, ((0, 1, 2), None)):
        with pytest.raises(ValueError, match="attends from one query on each rank to 9 keys on each"):
            styled(Attention(), qkv_indices=indices, **mode)[0](q, k, v)
        # Of another sequence these are keys as any others.
        module, handler = styled(Attention(), qkv_indices=indices, cross_attention=True, **mode)
        whole = [handler.combine(x, 2) for x in (q, k, v)]
        assert torch.allclose(handler.combine(module(q, k, v), 2), plain_attention(*whole), atol=1e-5)


def test_decoding_with_a_cache_is_refused(ranks: Any) -> None:
    ranks(2, decoding)


def test_what_is_no_cross_attention_is_refused(ranks: Any) -> None:
    ranks(2, refusals)
