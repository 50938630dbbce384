"""Complaints about other context-parallel libraries, as tests of this one: each test names the complaint it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.modes import named_mode
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from tests.harness.attention_case import FP64, AttentionCase, check, cp_mesh, inputs, run_cases
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import on_ranks

MODES = [
    named_mode(name)
    for name in (
        "Ulysses",
        "all-gather, head_tail",
        "all-gather, load_balance",
        "ring, head_tail",
        "hybrid of 2, ring",
    )
]


class Attention(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


def styled(mode: dict[str, Any], causal: bool = True, **more: Any) -> tuple[nn.Module, ContextParallelHandler]:
    mesh, style = cp_mesh(), ContextParallel(seq_dim=2, head_dim=1, **mode, **more)
    module = parallelize_module(Attention(causal), mesh, {"": style})
    return module, ContextParallelHandler(mesh, style)


# ---- 1. Lengths that are not a multiple of 2 * cp: a crash, or silently wrong (TransformerEngine #1929 #1930 #3331).


@on_ranks
def any_length(mode: dict[str, Any], lengths: list[tuple[int, bool]]) -> float:
    return max(error_of_length(mode, length, causal) for length, causal in lengths)


def error_of_length(mode: dict[str, Any], length: int, causal: bool) -> float:
    module, handler = styled(mode, causal)
    whole = [x.requires_grad_() for x in inputs(2, 4, 4, length, 8, 8, torch.float64)[:3]]
    with handler.documents([0, length]):
        local = [handler.dispatch(x, 2, pad_value=9.0) for x in whole]  # visible padding would show
        out = handler.combine(module(*local), 2, length=length)
    want = plain_attention(*whole, is_causal=causal)
    got = [grad.contiguous() for grad in torch.autograd.grad(out.sin().sum(), whole)]
    for grad in got:  # a share of each position's gradient is on each rank
        dist.all_reduce(grad)
    pairs = [(out, want), *zip(got, torch.autograd.grad(want.sin().sum(), whole), strict=True)]
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_lengths_that_do_not_split(ranks: Any, mode: dict[str, Any]) -> None:
    assert max(ranks(4, any_length, mode, [(13, True), (3, True), (27, False)])) <= FP64


@on_ranks
def unequal(mode: dict[str, Any]) -> None:
    module, _ = styled(mode)
    length = 8 + 4 * (dist.get_rank() == 2)
    module(*(torch.randn(1, 4, length, 8) for _ in range(3)))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_unequal_local_lengths_are_refused_on_every_rank(ranks: Any, mode: dict[str, Any]) -> None:
    words = r"ranks of the cp mesh of 4 ranks .* different shapes: rank 0: \(1, 4, 8, 8\).*rank 2: \(1, 4, 12, 8\)"
    ranks.raises(4, ValueError, words, unequal, mode)


@on_ranks
def other_documents(mode: dict[str, Any]) -> None:
    module, handler = styled(mode)
    with handler.documents([0, 5, 32] if dist.get_rank() else [0, 7, 32]):
        module(*(torch.randn(1, 4, 8, 8) for _ in range(3)))


def test_other_documents_on_other_ranks_are_refused(ranks: Any) -> None:
    words = r"different packed documents: ranks \[1, 2, 3\] have others"
    ranks.raises(4, ValueError, words, other_documents, MODES[3])


@on_ranks
def unequal_and_documents() -> None:
    module, handler = styled(MODES[3])
    length = 8 - dist.get_rank()  # the documents fit rank 0 only, and 7 is odd
    with handler.documents([0, 5, 16]):
        module(*(torch.randn(1, 4, length, 8) for _ in range(3)))


def test_no_check_of_one_rank_comes_before_that_of_shapes(ranks: Any) -> None:
    ranks.raises(2, ValueError, "call attention with different shapes", unequal_and_documents)


# ---- 2. Masks dropped; sliding-window layers trained as full causal (TransformerEngine #2052, accelerate #4177).


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_windows_and_masks_are_never_dropped(ranks: Any, world: int) -> None:
    chosen = [
        {"ulysses_degree": degree, "kv_exchange": exchange, "layout": layout, "load_balance": balance}
        for degree in (1, 2)
        for exchange, layout, balance in (
            ("ring", "head_tail", False),
            ("all_gather", "contiguous", True),
            ("all_gather", "head_tail", False),
        )
        if not (exchange == "ring" and degree == world)
    ]
    cases = [AttentionCase(16 * world, True, window=(5, None), **mode) for mode in chosen]
    cases += [AttentionCase(16 * world, mask=kind, **mode) for mode in chosen for kind in ("padding", "float")]
    check(ranks(world, run_cases, cases), FP64)


# ---- 3. Ulysses wants K/V heads divisible by the degree (prime-rl #3042, LlamaFactory #10794, DeepSpeed #6392).
# ---- 6. Head dims of multi-head latent attention (TransformerEngine #1552 #2868).


@on_ranks
def grouped_or_latent(mode: dict[str, Any], kv_heads: int, v_dim: int) -> float:
    module, handler = styled(mode)
    whole = inputs(2, 12, kv_heads, 16, 24, v_dim, torch.float64)
    q, k, v, dout = (handler.dispatch(x, 2) for x in whole)
    local = [x.requires_grad_() for x in (q, k, v)]
    out = module(*local)
    wide = [x.requires_grad_() for x in whole[:3]]
    want = plain_attention(*wide, is_causal=True)
    grads = zip(torch.autograd.grad(out, local, dout), torch.autograd.grad(want, wide, whole[3].double()), strict=True)
    return max(relative_error(handler.combine(a.detach(), 2), b) for a, b in [(out, want), *grads])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_any_number_of_kv_heads_and_latent_head_dims(ranks: Any, mode: dict[str, Any]) -> None:
    for kv_heads, v_dim in ((1, 24), (2, 24), (3, 24), (6, 24), (12, 16), (4, 16)):
        if kv_heads in (1, 2, 3, 6) and mode["ulysses_degree"] != 1:
            continue  # at the boundary the module must repeat heads itself: see the functional form below
        assert max(ranks(4, grouped_or_latent, mode, kv_heads, v_dim)) <= FP64


def test_ulysses_shares_kv_heads(ranks: Any) -> None:
    cases = [
        AttentionCase(16, True, batch=1, heads=12, kv_heads=kv_heads, ulysses_degree=degree)
        for kv_heads in (1, 2, 3, 6)
        for degree in (2, None)
    ]
    check(ranks(4, run_cases, cases), FP64)


# ---- 12. A ring that moves K/V heads repeated for grouped queries (torchtitan #1283).


@on_ranks
def ring_bytes(kv_heads: int) -> list[int]:
    q, k, v = (torch.randn(1, h, 8, 4, requires_grad=True) for h in (8, kv_heads, kv_heads))
    sent = []
    for kv_exchange in ("ring", "all_gather"):
        with comm.record_traffic() as traffic:
            attention(q, k, v, mesh=cp_mesh(), is_causal=True, enable_gqa=True, kv_exchange=kv_exchange)
        sent.append(sum(n for operation, n in traffic.entries if operation != "agreement"))
    return sent


def test_repeated_heads_do_not_travel(ranks: Any) -> None:
    local_kv = 2 * 8 * 4 * 4  # k and v, positions, head dim, bytes
    for found in ranks(4, ring_bytes, 2):
        assert found == [3 * 2 * local_kv] * 2


# ---- 14. Packed documents ignored: a loss 1.83 times too large (axolotl #3608).


@on_ranks
def documents(mode: dict[str, Any]) -> tuple[float, float]:
    module, handler = styled(mode)
    q, k, v, _ = inputs(1, 4, 4, 32, 8, 8, torch.float64)
    local = [handler.dispatch(x, 2) for x in (q, k, v)]
    with handler.documents([0, 3, 11, 32]):
        out = handler.combine(module(*local), 2)
    want = plain_attention(q, k, v, visible=visible_pairs(32, True, None, [[0, 3, 11, 32]]))
    return relative_error(out, want), relative_error(out, plain_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_packed_documents_do_not_see_each_other(ranks: Any, mode: dict[str, Any]) -> None:
    for error, difference in ranks(4, documents, mode):
        assert error <= FP64 and difference > 0.1


# ---- 15. Stale K/V in the backward of a ring (diffusers #14265).


@on_ranks
def two_forwards(mode: dict[str, Any]) -> float:
    """Backwards of two calls in the order of the forwards, after the inputs of a third have come and gone."""
    module, handler = styled(mode)
    worst, calls = 0.0, []
    for seed in range(3):
        whole = [x * (seed + 1) for x in inputs(1, 4, 4, 32, 8, 8, torch.float64)]
        local = [handler.dispatch(x, 2).requires_grad_() for x in whole[:3]]
        calls.append((whole, local, module(*local)))
    for whole, local, out in calls[:2]:
        wide = [x.requires_grad_() for x in whole[:3]]
        want = torch.autograd.grad(plain_attention(*wide, is_causal=True), wide, whole[3])
        for got, expected in zip(torch.autograd.grad(out, local, handler.dispatch(whole[3], 2)), want, strict=True):
            worst = max(worst, relative_error(handler.combine(got, 2), expected))
    return worst


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_backward_meets_the_keys_of_its_own_forward(ranks: Any, mode: dict[str, Any]) -> None:
    assert max(ranks(4, two_forwards, mode)) <= FP64
