"""Attention sinks (a logit per head that takes weight and gives no value) and softcap of logits, in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import attention, kernels
from tests.harness.attention_case import FP64, AttentionCase, Errors, check, cp_mesh, modes, pairwise, run_cases
from tests.harness.oracle import relative_error, rms_error
from tests.harness.ranks import on_ranks

ONE, ROWS = ((0, 3, 3, 17, 24),), ((0, 9, 24), (0, 20, 24))
SINKS: list[dict[str, Any]] = [
    {"is_causal": True},
    {},
    {"is_causal": True, "window": (5, 0)},
    {"is_causal": True, "documents": ONE},
    {"is_causal": True, "documents": ROWS, "return_lse": True},
]
SOFTCAP: list[dict[str, Any]] = [
    {"is_causal": True},
    {"is_causal": True, "window": (5, 0), "return_lse": True, "lse_grad": True},
    {"is_causal": True, "documents": ROWS, "sinks": True, "return_lse": True, "lse_grad": True},
    {"mask": "float"},
]
GROUPS = {"kv_exchange": "all_gather", "layout": "head_tail", "head_groups": 2}


def case(**how: Any) -> AttentionCase:
    return AttentionCase(**{"length": 24, "heads": 8, "v_dim": 4, **how})


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    groups = [{"ulysses_degree": world, **GROUPS}] if world in (2, 4) else []
    wanted = [*(m for m in modes(world) if world < 4 or m["ulysses_degree"] == 2), *groups]
    cases = [case(sinks=True, **mode, **seen) for mode, seen in itertools.product(wanted, SINKS)]
    if groups:
        cases += [case(softcap=1.5, **{**mode, **seen}) for mode, seen in itertools.product(wanted, SOFTCAP)]
    check(ranks(world, run_cases, pairwise(cases)), FP64)


@on_ranks
def rms_errors(cases: list[AttentionCase]) -> list[Errors]:
    return [case.shard().step(cp_mesh(), rms_error) for case in cases]


def test_half_precision_is_as_good_as_on_one_device(ranks: Any) -> None:
    how: dict[str, Any] = {"sinks": True, "dtype": torch.bfloat16, **SINKS[0]}
    one = ranks(1, rms_errors, [case(**how)])[0][0]
    for of_rank in ranks(2, rms_errors, [case(**how, **mode) for mode in modes(2)]):
        for found in of_rank:
            assert all(found[name] <= 2 * error for name, error in one.items()), (found, one)


@on_ranks
def rows_without_keys(minus_infinity: bool) -> tuple[float, float]:
    """A mask that hides all keys of some rows leaves them the sink: output zero, log-sum-exp the sink."""
    shard, mesh = case(length=16, sinks=True).shard(), cp_mesh()
    sinks = torch.full((8,), -torch.inf, dtype=torch.float64) if minus_infinity else shard.sinks[0].detach()
    sinks.requires_grad_()
    mask = torch.zeros(16, 16, dtype=torch.bool)
    out, lse = attention(*shard.qkv, mesh=mesh, enable_gqa=True, sinks=sinks, attn_mask=mask, return_lse=True)
    out.sum().backward()
    gradients = sum(float(x.grad.abs().max()) for x in (*shard.qkv, sinks) if x.grad is not None)
    expected = sinks.view(1, 8, 1).expand_as(lse)
    return float(out.detach().abs().max()) + gradients, 0.0 if lse.equal(expected) else relative_error(lse, expected)


def test_a_row_that_sees_nothing_but_the_sink(ranks: Any) -> None:
    for minus_infinity in (False, True):
        assert all(zero == 0 and error < 1e-12 for zero, error in ranks(2, rows_without_keys, minus_infinity))


@on_ranks
def compiled() -> float:
    mesh, found = view(cp_mesh(), 1), []

    def run(*qkv: torch.Tensor) -> Any:
        return attention(*qkv, mesh=mesh, enable_gqa=True, softcap=1.5, is_causal=True, kv_exchange="ring")

    for way in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        shard = case().shard()
        out = way(*shard.qkv)
        found.append([out, *torch.autograd.grad(out, shard.qkv, shard.dout)])
    return max(relative_error(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_it_compiles_to_one_graph(ranks: Any) -> None:
    assert max(ranks(2, compiled)) <= 1e-12


def test_kernels_that_take_no_scores_are_not_chosen() -> None:
    x = torch.randn(1, 2, 4, 8)
    assert (kernels.choose(x, x, x, True), kernels.choose(x, x, x, True, scores=True)) == ("cpu flash", "reference")


@on_ranks
def call(of_each_rank: list[dict[str, Any]]) -> None:
    mesh = cp_mesh()
    attention(*case(length=16).shard().qkv, mesh=mesh, enable_gqa=True, **of_each_rank[mesh.get_rank()])


A_SINK = r"sinks=.*one floating-point logit per query head, \[8\]"


@pytest.mark.parametrize(
    "one, other, error, words",
    [
        ({"softcap": 0.0}, None, "ValueError", "softcap=0.0.*positive"),
        ({"softcap": -3}, None, "ValueError", "softcap=-3.*positive"),
        ({"softcap": "x"}, None, "TypeError", "softcap='x'.*positive"),
        ({"softcap": 2.0}, {"softcap": 3.0}, "ValueError", "score"),
        *(
            ({"sinks": x}, None, "ValueError", A_SINK)
            for x in (torch.zeros(3), torch.zeros(8, dtype=torch.int64), torch.zeros(1, 8), 0.5)
        ),
    ],
    ids=str,
)
def test_other_values_are_refused(ranks: Any, one: Any, other: Any, error: str, words: str) -> None:
    ranks.raises(2, error, words, call, [one, other or one])
