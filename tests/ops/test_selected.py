"""Attention over selected keys on real gloo ranks against one device, and the selection itself."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm, cp_mesh
from hyper_cp.ops import SAVE_LIST, attention, latent_attention, select_keys
from hyper_cp.ops.kernels import indexer, selected
from tests.harness import attention_case
from tests.harness.attention_case import FP64, AttentionCase, Errors, Problem, check, drawn, modes, run_case
from tests.harness.latent_case import LatentCase, called, errors_of, leaves_of
from tests.harness.oracle import relative_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks


@on_ranks
def run_selected(cases: list[Any]) -> list[tuple[Any, Errors]]:
    """Forward and backward of each case, with keys gathered for a few queries at a time."""
    mesh = attention_case.cp_mesh()
    with patch.object(selected, "GATHERED_AT_ONCE", 1 << 11):
        return [
            (case, run_latents(case, mesh) if isinstance(case, LatentCase) else run_case(case, mesh)) for case in cases
        ]


def run_latents(case: LatentCase, mesh: DeviceMesh) -> Errors:
    leaves, dout, at = leaves_of(case)
    out = called(case, leaves, at, mesh)
    out = out[0] if case.return_lse else out
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    return errors_of(case, leaves, at, out, grads, relative_error)


OF_ROWS = ((0, 5, 11, 30, 33, 48), (0, 17, 48))
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "not causal": {},
    "of key heads": {"is_causal": True, "selected": (9, 2)},
    "all keys": {"is_causal": True, "selected": (48, 1)},
    "window": {"window": (11, 0)},
    "documents": {"is_causal": True, "documents": OF_ROWS[:1]},
    "documents of rows": {"is_causal": True, "documents": OF_ROWS},
    "bool mask": {"mask": "heads"},
    "padding": {"mask": "padding"},
    "float mask": {"mask": "float"},
    "sinks": {"is_causal": True, "sinks": True},
    "softcap": {"is_causal": True, "softcap": 2.0},
    "log-sum-exp": {"is_causal": True, "return_lse": True, "softcap": 2.0, "lse_grad": True},
    "scale": {"is_causal": True, "scale": 0.3, "exchange_stages": 3},
}


@pytest.mark.parametrize(
    "world", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_selected_keys_fp64(ranks: Any, world: int) -> None:
    cases: list[Any] = []
    for mode, options in itertools.product(modes(world), OPTIONS.values()):
        if mode["kv_exchange"] == "ring" and "exchange_stages" in options:
            continue
        given = {"selected": (9, 1), "length": 48, **mode, **options}
        cases.append(AttentionCase(heads=4, kv_heads=2, **given))
        if "lse_grad" not in options and given["selected"][1] == 1:
            cases.append(LatentCase(heads=4, latents=True, bias="scale" in options, **given))
            cases.append(LatentCase(heads=4, kv_heads=4, latents=True, **given))
    for layout, exchange in itertools.product(("per_document", "balanced"), ("ring", "needed", "all_gather")):
        given = {"is_causal": True, "documents": OF_ROWS[:1], "selected": (9, 1), "layout": layout}
        cases.append(LatentCase(48, kv_exchange=exchange, latents=False, **given))
    check(ranks(world, run_selected, drawn(cases, world)), FP64)


# --------------------------------------------------------------------------- the selection


def best_keys(q: Tensor, k: Tensor, weights: Tensor | None, pairs: Tensor, topk: int) -> Tensor:
    """The selection ``[B, 1, S, topk]``, row by row as it is defined; of equal scores the lower position."""
    scores = torch.relu(torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) * q.shape[3] ** -0.5)
    scores = scores.sum(1) if weights is None else torch.einsum("bhts,bht->bts", scores, weights)
    found = torch.full((*scores.shape[:2], topk), -1)
    for b, t in itertools.product(*map(range, scores.shape[:2])):
        seen = pairs.expand(len(q), 1, *pairs.shape[2:])[b, 0, t].nonzero()[:, 0].tolist()
        row = sorted(seen, key=lambda s: (-scores[b, t, s].float().item(), s))[:topk]
        found[b, t, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return found.unsqueeze(1)


def indexer_inputs(length: int, weighted: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    made = [torch.randn(2, *shape, generator=g, dtype=dtype) for shape in ((3, length, 6), (1, length, 6), (3, length))]
    return made if weighted else made[:2]


@on_ranks
def run_selection(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    mesh, found = attention_case.cp_mesh(), []
    for case in cases:
        inputs, at = indexer_inputs(case.length, not case.sinks), case.positions(case.length)
        visible = visible_pairs(case.length, case.is_causal, case.window, case.documents)
        mask = None
        if case.mask:
            mask, _ = attention_case.explicit_mask(case)
            visible = visible & mask  # type: ignore[operator]
        topk, _ = case.selected or (7, 1)
        want = best_keys(*inputs[:2], inputs[2] if len(inputs) > 2 else None, visible, topk)
        names = ("is_causal", "window", "layout", "load_balance", "kv_exchange")
        options: dict[str, Any] = {name: getattr(case, name) for name in names}
        cp = cp_mesh.view(mesh, case.ulysses_degree)  # attention's, of which all ranks select together
        options |= {"topk": topk, "attn_mask": mask, "documents": case.rows}
        with patch.object(indexer, "SCORES_AT_ONCE", 1 << 10):
            got = select_keys(*(x[:, :, at] for x in inputs), mesh=cp, **options)
        found.append((case, {"wrong": float((got != want[:, :, at]).sum()), "dtype": float(got.dtype != torch.int32)}))
    return found


SELECTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "no weights": {"is_causal": True, "sinks": True},
    "more than are visible": {"is_causal": True, "selected": (60, 1)},
    "window": {"window": (11, 2)},
    "documents of rows": {"is_causal": True, "documents": OF_ROWS},
    "padding": {"mask": "padding"},
}


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_best_keys_are_selected(ranks: Any, world: int) -> None:
    """In every mode those of one device, ties too: half of all scores are exactly 0 without weights."""
    cases = [AttentionCase(48, **mode, **options) for mode in modes(world) for options in SELECTIONS.values()]
    check(ranks(world, run_selection, drawn(cases, world)), 0.0)


def test_all_scores_equal() -> None:
    """Then the first keys are selected."""
    q, k = -torch.ones(1, 2, 9, 4), torch.ones(1, 1, 9, 4)
    found = select_keys(q, k, topk=3, mesh=cp_mesh.alone())
    assert found[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 7]
