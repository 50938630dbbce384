"""Softcap of logits in every mode: forward and every gradient, with sinks, masks and the log-sum-exp's own gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import attention, kernels
from tests.harness.attention_case import FP64, cp_mesh, modes
from tests.harness.oracle import relative_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks, sum_over_ranks

B, H, KV, D, DV, S, CAP = 2, 8, 4, 8, 4, 24, 1.5
SEEN: list[dict[str, Any]] = [
    {"is_causal": True},
    {"is_causal": True, "window": (5, 0), "return_lse": True},
    {"is_causal": True, "documents": [[0, 9, 24], [0, 20, 24]], "sinks": True, "return_lse": True},
    {"attn_mask": True},
]


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = [(B, H, S, D), (B, KV, S, D), (B, KV, S, DV), (H,), (B, H, S, DV), (B, H, S), (S, S)]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
    """Scores of whole tensors, capped; then what is added and hidden; a sink is one more column without a value."""
    k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
    logits = CAP * torch.tanh(torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5 / CAP)
    logits = (logits if bias is None else logits + bias).masked_fill(~visible, -torch.inf)
    column = torch.full((B, H, S, 1), -torch.inf, dtype=q.dtype)
    column = column if sinks is None else sinks.view(1, H, 1, 1).expand_as(column)
    logits = torch.cat([logits, column], -1)
    return logits.softmax(-1)[..., :-1] @ v, logits.logsumexp(-1)


@on_ranks
def errors(world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[float]]:
    """Relative errors of the output, the log-sum-exp and the gradients of q, k, v and the sinks."""
    mesh, found = cp_mesh(), []
    for mode, seen in cases:
        *qkvs, dout, dlse, bias = tensors()
        leaves = [x.clone().requires_grad_() for x in (qkvs if seen.get("sinks") else qkvs[:3])]
        rows, added = seen.get("documents"), bias if seen.get("attn_mask") else None
        visible = visible_pairs(S, seen.get("is_causal", False), seen.get("window"), rows)
        want, want_lse = whole(*leaves[:3], leaves[3] if len(leaves) > 3 else None, visible, added)
        outputs = [(want, dout), (want_lse, dlse)][: 2 if seen.get("return_lse") else 1]
        expected = torch.autograd.grad([x for x, _ in outputs], leaves, [x for _, x in outputs])
        at = torch.tensor(token_positions(mode["layout"], mesh.get_rank(), world, S))
        local = [x[:, :, at].clone().requires_grad_() for x in qkvs[:3]]
        options = {**seen, "attn_mask": added}
        if seen.get("sinks"):
            local.append(qkvs[3].clone().requires_grad_())
            options["sinks"] = local[3]
        result = attention(*local[:3], mesh=mesh, enable_gqa=True, softcap=CAP, **mode, **options)
        got = result if seen.get("return_lse") else [result]
        grads = torch.autograd.grad(list(got), local, [x[:, :, at] for _, x in outputs])
        pairs = [(a, b[:, :, at]) for a, (b, _) in zip(got, outputs, strict=True)]
        pairs += [(a, b[:, :, at]) for a, b in zip(grads[:3], expected[:3], strict=True)]
        pairs += [(sum_over_ranks(a)[0], b) for a, b in zip(grads[3:], expected[3:], strict=True)]
        found.append([relative_error(a, b) for a, b in pairs])
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    groups = {"ulysses_degree": world, "kv_exchange": "all_gather", "layout": "head_tail", "head_groups": 2}
    cases = [(mode, SEEN[(i + j) % 4]) for i, mode in enumerate([*modes(world), groups, groups]) for j in (0, 3)]
    for of_rank in ranks(world, errors, world, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert max(found) <= FP64, (case, found)


@on_ranks
def compiled() -> float:
    q, k, v, *_, dout, _, _ = tensors()
    at = slice(12 * cp_mesh().get_rank(), 12 * cp_mesh().get_rank() + 12)
    mesh, found = view(cp_mesh(), 1), []

    def run(*qkv: Tensor) -> Any:
        return attention(*qkv, mesh=mesh, enable_gqa=True, softcap=CAP, is_causal=True, kv_exchange="ring")

    for way in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        local = [x[:, :, at].clone().requires_grad_() for x in (q, k, v)]
        out = way(*local)
        found.append([out, *torch.autograd.grad(out, local, dout[:, :, at])])
    return max(relative_error(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_it_compiles_to_one_graph(ranks: Any) -> None:
    assert max(ranks(2, compiled)) <= 1e-12


def test_kernels_that_take_no_scores_are_not_chosen() -> None:
    x = torch.randn(1, 2, 4, 8)
    assert (kernels.choose(x, x, x, True), kernels.choose(x, x, x, True, scores=True)) == ("cpu flash", "reference")


@on_ranks
def call(arguments: dict[str, Any]) -> None:
    q, k, v, *_ = tensors()
    attention(q, k, v, mesh=cp_mesh(), enable_gqa=True, **arguments)


@pytest.mark.parametrize("softcap, error", [(0.0, "ValueError"), (-3, "ValueError"), ("x", "TypeError")], ids=str)
def test_other_values_are_refused(ranks: Any, softcap: Any, error: str) -> None:
    ranks.raises(2, error, f"softcap={softcap!r}.*positive", call, {"softcap": softcap})


@on_ranks
def ranks_differ() -> None:
    q, k, v, *_ = tensors()
    attention(q, k, v, mesh=cp_mesh(), enable_gqa=True, softcap=[2.0, 3.0][cp_mesh().get_rank()])


def test_ranks_with_another_softcap_are_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "score", ranks_differ)
