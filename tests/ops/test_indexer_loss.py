"""The loss of a lightning indexer on real gloo ranks against autograd through plain math on one device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm, cp_mesh
from hyper_cp.ops import attention, indexer_loss, latent_attention, select_keys
from hyper_cp.ops.kernels import indexer, selected
from tests.harness import attention_case
from tests.harness.attention_case import FP64, AttentionCase, Errors, check, modes, pairwise
from tests.harness.oracle import relative_error, visible_pairs
from tests.harness.ranks import on_ranks, sum_over_ranks

HEADS = 3
"""Heads of the indexer."""


@dataclass(frozen=True)
class LossCase(AttentionCase):
    """A case of the loss, whose attention has keys or latents."""

    heads: int = 4
    kv_heads: int = 2
    latent: bool = False


def index_tensors(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(length + 1)
    shapes = (HEADS, length, 6), (1, length, 6), (HEADS, length)
    return [torch.randn(2, *shape, generator=g, dtype=dtype) for shape in shapes]


def attention_tensors(case: AttentionCase, latent: bool) -> list[Tensor]:
    """Queries and keys of attention, and of these what latents stand for: latent, rope, weight, bias."""
    g = torch.Generator().manual_seed(case.length)
    shapes = [(2, 4, case.length, 8), (2, case.kv_heads, case.length, 8)]
    if latent:
        shapes[1:] = [(2, case.length, 5), (2, 1, case.length, 3), (4 * (5 + 6), 5), (4 * (5 + 6),)]
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def expanded(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads."""
    both = (latent @ weight.mT + bias).unflatten(2, (4, 11)).transpose(1, 2)
    return torch.cat([both[..., :5], rope.expand(-1, 4, -1, -1)], 3), both[..., 5:]


def losses(index: list[Tensor], q: Tensor, k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each query ``[B, S]`` by its definition, and attention's log-sum-exp. ``seen``: ``[B, S, S]``."""
    index_q, index_k, weights = index
    scores = torch.relu(torch.einsum("bhtd,bsd->bhts", index_q, index_k[:, 0]) * index_q.shape[3] ** -0.5)
    scores = torch.einsum("bhts,bht->bts", scores, weights).masked_fill(~seen, -torch.inf)
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5
    logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
    p = logits.softmax(3).nan_to_num(0.0).mean(1)
    log_ratio = torch.where(p > 0, p.clamp(min=1e-300).log() - scores.log_softmax(2), 0.0)
    return (p * log_ratio).sum(2), logits.logsumexp(3)


def pairs_of(case: AttentionCase, chosen: Tensor | None, mask: Tensor | None) -> Tensor:
    """The pairs ``[B, S, S]`` that the sums run over."""
    seen = visible_pairs(case.length, case.is_causal, case.window, case.documents)
    seen = seen.expand(2, 1, case.length, case.length)[:, 0]
    seen = seen if mask is None else seen & mask[:, 0]
    if chosen is None:
        return seen
    listed = torch.zeros(2, case.length, case.length + 1, dtype=torch.bool)
    listed.scatter_(2, chosen[:, 0].long().masked_fill(chosen[:, 0] < 0, case.length), True)
    return seen & listed[..., :-1]


@on_ranks
def run_losses(cases: list[LossCase]) -> list[tuple[LossCase, Errors]]:
    mesh, found = attention_case.cp_mesh(), []
    for case in cases:
        index, given, at = index_tensors(case.length), attention_tensors(case, case.latent), case.positions(case.length)
        mask = attention_case.explicit_mask(case)[0] if case.mask else None
        chosen = attention_case.selection(case) if case.selected else None
        q, k = given if not case.latent else (given[0], expanded(*given)[0])
        whole = [x.requires_grad_() for x in index]
        want, lse = losses(whole, q, k, pairs_of(case, chosen, mask))
        upstream = torch.randn(2, case.length, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        wanted = [x[:, :, at] for x in torch.autograd.grad(want, whole, upstream)]
        own = [x[:, :, at].detach().requires_grad_() for x in index]
        local = [x[:, at] if x.ndim == 3 else x[:, :, at] if x.ndim == 4 else x for x in given]
        names = ("is_causal", "window", "layout", "load_balance", "kv_exchange")
        options: dict[str, Any] = {name: getattr(case, name) for name in names}
        options |= {"attn_mask": mask, "documents": case.rows, "scale": 8**-0.5}
        options["selected"] = None if chosen is None else chosen[:, :, at]
        with patch.object(indexer, "SCORES_AT_ONCE", 1 << 10), patch.object(selected, "GATHERED_AT_ONCE", 1 << 11):
            keys = local[1:] if case.latent else local[1]
            got = indexer_loss(
                *own, local[0], keys, lse[:, :, at], mesh=cp_mesh.view(mesh, case.ulysses_degree), **options
            )
            grads = torch.autograd.grad(got, own, upstream[:, at])
        pairs = zip(("loss", "q", "k", "weights"), (got, *grads), (want[:, at], *wanted), strict=True)
        found.append((case, {name: relative_error(a.detach(), b) for name, a, b in pairs}))
    return found


OF_ROWS = ((0, 5, 11, 30, 33, 48), (0, 17, 48))
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "not causal": {},
    "one key head": {"is_causal": True, "kv_heads": 1},
    "latents": {"is_causal": True, "latent": True},
    "window": {"window": (11, 0)},
    "documents of rows": {"is_causal": True, "documents": OF_ROWS},
    "padding": {"mask": "padding"},
}


@pytest.mark.parametrize(
    "world", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_those_of_plain_math(ranks: Any, world: int) -> None:
    """Dense warm-up and sparse training, in every mode."""
    cases = [
        LossCase(48, selected=chosen, **mode, **options)
        for mode, options, chosen in itertools.product(modes(world), OPTIONS.values(), (None, (9, 1)))
        if world < 4 or mode["ulysses_degree"] == 2
    ]
    check(ranks(world, run_losses, pairwise(cases)), FP64)


# --------------------------------------------------------------------------- beside other features


@on_ranks
def trained(use_reentrant: bool | None) -> Errors:
    """Selection, attention to it and the loss as a model has them, and the mean over all ranks, against one device."""
    mesh, length = attention_case.cp_mesh(), 48
    case = AttentionCase(length, True, heads=4, kv_heads=4, layout="head_tail", kv_exchange="ring")
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    at, index, (q, *latents) = case.positions(length), index_tensors(length), attention_tensors(case, latent=True)
    weight = [torch.eye(6, dtype=torch.float64).requires_grad_() for _ in range(2)]  # a layer of the indexer
    k, _ = expanded(q, *latents)
    whole = [index[0] @ weight[0], *index[1:]]
    chosen = select_keys(*(x.detach() for x in whole), topk=9)
    want = losses(whole, q, k, pairs_of(case, chosen, None))[0].mean()
    (wanted,) = torch.autograd.grad(want, weight[0])

    def local(index_q: Tensor) -> Tensor:
        mine = [index_q[:, :, at] @ weight[1], *(x[:, :, at] for x in index[1:])]
        keys = [latents[0][:, at], latents[1][:, :, at], *latents[2:]]
        options: dict[str, Any] = {"mesh": mesh, "kv_exchange": "ring", "layout": "head_tail"}
        options["selected"] = select_keys(*mine, topk=9, **options)
        options["is_causal"] = True
        _, lse = latent_attention(q[:, :, at], *keys, return_lse=True, **options)
        return indexer_loss(*mine, q[:, :, at], keys, lse, **options)

    handler = ContextParallelHandler(mesh, style)
    of_tokens = local(index[0]) if use_reentrant is None else checkpoint(local, index[0], use_reentrant=use_reentrant)
    mean = handler.mean_loss(of_tokens, gradients="sum")
    (grad,) = torch.autograd.grad(mean, weight[1])
    found = {"mean": relative_error(mean.detach(), want.detach())}
    return found | {"gradient": relative_error(sum_over_ranks(grad)[0], wanted)}


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_mean_loss_of_a_layer_that_selects(ranks: Any, use_reentrant: bool | None) -> None:
    check([[(use_reentrant, errors)] for errors in ranks(2, trained, use_reentrant)], FP64)


@on_ranks
def with_shared_heads(chosen: bool, exchange: str) -> Errors:
    """Two ranks of context parallelism, two of tensor parallelism: each of these has half of the heads."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    case = AttentionCase(24, True, heads=4, kv_heads=2, selected=(9, 1) if chosen else None)
    index, (q, k) = [x.requires_grad_() for x in index_tensors(24)], attention_tensors(case, latent=False)
    picked = attention_case.selection(case) if chosen else None
    want, lse = losses(index, q, k, pairs_of(case, picked, None))
    rank, half = world["cp"].get_local_rank(), world["tp"].get_local_rank()
    at = slice(12 * rank, 12 * rank + 12)
    upstream = torch.randn(2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = torch.autograd.grad(want, index, upstream)
    own = [x[:, :, at].detach().requires_grad_() for x in index]
    of_attention = [x.chunk(2, 1)[half][:, :, at].detach() for x in (q, k, lse)]
    options: dict[str, Any] = {"mesh": world["cp"], "heads_mesh": world["tp"], "kv_exchange": exchange}
    got = indexer_loss(*own, *of_attention, selected=None if picked is None else picked[:, :, at], **options)
    grads = torch.autograd.grad(got, own, upstream[:, at])
    pairs = zip(
        ("loss", "q", "k", "weights"), (got, *grads), (want[:, at], *(x[:, :, at] for x in wanted)), strict=True
    )
    return {name: relative_error(a.detach(), b.detach()) for name, a, b in pairs}


@pytest.mark.parametrize("chosen,exchange", [(False, "ring"), (True, "all_gather")])
def test_heads_that_tensor_parallel_ranks_share(ranks: Any, chosen: bool, exchange: str) -> None:
    check([[("shared", errors)] for errors in ranks(4, with_shared_heads, chosen, exchange)], FP64)


# --------------------------------------------------------------------------- what travels, and what is alive

TRAVELS = ("send_recv", "all_gather", "reduce_scatter", "all_to_all_rows")


@on_ranks
def traffic(exchange: str) -> tuple[int, int]:
    case = AttentionCase(64, True, heads=4, kv_heads=2, dtype=torch.float32)
    index, (q, k) = index_tensors(64, torch.float32), (x.float() for x in attention_tensors(case, latent=False))
    at, mesh = case.positions(64), attention_case.cp_mesh()
    own = [x[:, :, at].requires_grad_() for x in index]
    with comm.record_traffic() as log:
        loss = indexer_loss(*own, q[:, :, at], k[:, :, at], q[:, :, at, 0], mesh=mesh, kv_exchange=exchange)
        forward = len(log.entries)
        loss.sum().backward()
    of_pass = log.entries[:forward], log.entries[forward:]
    sent = [sum(n for name, n in entries if name in TRAVELS) for entries in of_pass]
    return sent[0], sent[1]


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_of_the_gradients_only_those_of_the_indexer_travel(ranks: Any, exchange: str) -> None:
    """Keys of attention (2 heads of 8) and of the indexer (6) of two rows of 32 tokens, in fp32; 6 come home."""
    for forward, backward in ranks(2, traffic, exchange):
        assert forward == 2 * 32 * 4 * (2 * 8 + 6)
        assert backward == forward + 2 * 32 * 4 * 6


@pytest.mark.parametrize("topk", [None, 16])
def test_nothing_is_as_large_as_queries_times_keys(topk: int | None) -> None:
    length, largest = 1024, []
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, length, 4, generator=g) for heads in (2, 1, 4, 4)]
    index_q, index_k, q, k = (x.requires_grad_() for x in made)

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))
            return found

    chosen = None if topk is None else select_keys(index_q, index_k, topk=topk)
    _, lse = attention(q, k, k, mesh=cp_mesh.alone(), is_causal=True, return_lse=True, selected=chosen)
    few = patch.object(indexer, "SCORES_AT_ONCE", 1 << 16), patch.object(selected, "GATHERED_AT_ONCE", 1 << 15)
    with few[0], few[1], Largest():
        indexer_loss(index_q, index_k, None, q, k, lse, selected=chosen).sum().backward()
    assert max(largest) <= length**2 // 8
    assert q.grad is None
    assert k.grad is None


def test_autocast_casts_the_arguments_and_nothing_else() -> None:
    """Sums, scores and weights of attention stay in fp32; keys that autocast left in fp32 are cast, as attention's."""
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(1, *shape, generator=g) for shape in ((3, 64, 8), (1, 64, 8), (3, 64), (4, 64, 8), (4, 64, 8))]
    index_q, index_k, weights, q, k = made
    low = [x.bfloat16().requires_grad_() for x in (index_q, index_k)]
    given = q.bfloat16(), k.bfloat16(), (q.bfloat16().float() @ k.bfloat16().float().mT * 8**-0.5).logsumexp(3)
    want = indexer_loss(*low, weights, *given, is_causal=False)
    wanted = torch.autograd.grad(want.sum(), low)
    chosen = select_keys(*low, weights, topk=5)
    with torch.autocast("cpu", torch.bfloat16):
        got = indexer_loss(low[0], low[1].float(), weights, q, given[1].float(), given[2], is_causal=False)
        assert torch.equal(select_keys(low[0], low[1].float(), weights, topk=5), chosen)
        grads = torch.autograd.grad(got.sum(), low)
    assert torch.equal(got, want)
    assert all(map(torch.equal, grads, wanted))


# --------------------------------------------------------------------------- arguments that do not fit


class Inner(nn.Module):
    """A module that has forgotten the mesh."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return indexer_loss(q, k[:, :1], None, q, k, q[..., 0])


@on_ranks
def misused(where: str) -> str:
    mesh = attention_case.cp_mesh()
    q = torch.zeros(1, 2 + 2 * mesh.get_local_rank() * (where == "heads"), 8, 4)
    with pytest.raises(ValueError) as error:
        if where == "heads":
            options = {"mesh": cp_mesh.alone(), "heads_mesh": mesh}
            indexer_loss(torch.zeros(1, 2, 8, 4), torch.zeros(1, 1, 8, 4), None, q, q, q[..., 0], **options)
        else:
            style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=None if where == "ulysses" else 1)
            parallelize_module(Inner(), mesh, style)(q, q, q)
    return str(error.value)


@pytest.mark.parametrize("where", ["ring", "ulysses"])
def test_without_a_mesh_in_a_styled_module(ranks: Any, where: str) -> None:
    for message in ranks(2, misused, where):
        assert "calls indexer_loss without a mesh" in message


def test_ranks_that_share_heads_agree(ranks: Any) -> None:
    for message in ranks(2, misused, "heads"):
        assert "query" in message


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "key heads": ({"index_k": torch.zeros(1, 2, 8, 4)}, ValueError, "index_k .* one key head"),
    "weights": ({"weights": torch.zeros(1, 2, 4)}, ValueError, r"weights .* must be floating-point \(1, 2, 8\)"),
    "lse": ({"lse": torch.zeros(1, 2, 8)}, ValueError, r"lse .* must be floating-point \(1, 4, 8\)"),
    "width": ({"k": torch.zeros(1, 4, 8, 5)}, ValueError, "k .* the width of q"),
    "dtype": ({"k": torch.zeros(1, 4, 8, 6, dtype=torch.float64)}, TypeError, "must have one. Convert them"),
    "latents": ({"k": (torch.zeros(1, 8, 6), torch.zeros(1, 1, 8, 2))}, ValueError, "k has 2 tensors"),
    "score": ({"score": "softmax"}, ValueError, "score='softmax'"),
    "selected": ({"selected": torch.zeros(1, 1, 9, 2, dtype=torch.int32)}, ValueError, "selected has shape"),
    "mask of heads": (
        {"attn_mask": torch.ones(1, 2, 8, 8).bool(), "is_causal": False},
        ValueError,
        "all heads together",
    ),
    "added mask": (
        {"attn_mask": torch.zeros(1, 1, 8, 8), "is_causal": False},
        ValueError,
        "attn_mask is torch.float32",
    ),
    "no lse": ({"lse": None}, TypeError, "lse is a NoneType"),
    "no tensor": ({"q": 1.0}, TypeError, "q is a float"),
    "indexer": ({"index_q": torch.zeros(8, 4)}, ValueError, "index_q has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit(name: str) -> None:
    changed, error, message = BAD[name]
    given: dict[str, Any] = {
        "index_q": torch.zeros(1, 2, 8, 4),
        "index_k": torch.zeros(1, 1, 8, 4),
        "weights": torch.zeros(1, 2, 8),
        "q": torch.zeros(1, 4, 8, 6),
        "k": torch.zeros(1, 4, 8, 6),
        "lse": torch.zeros(1, 4, 8),
    }
    with pytest.raises(error, match=message):
        indexer_loss(**{**given, **changed})
