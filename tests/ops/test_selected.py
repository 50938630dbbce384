"""Attention over selected keys on real gloo ranks against one device, and the selection itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel
from hyper_cp.mesh import comm, cp_mesh, nans
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import SAVE_LIST, attention, latent_attention, select_keys
from hyper_cp.ops.kernels import indexer, selected
from tests.harness import attention_case
from tests.harness.attention_case import FP64, AttentionCase, Errors, Problem, check, modes, pairwise, run_case
from tests.harness.latent_case import PLAIN, RANK, LatentCase, called, errors_of, leaves_of
from tests.harness.oracle import relative_error, visible_pairs
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
    "blocks": {"is_causal": True, "selected": (3, 2), "block": 7},
    "blocks and documents": {"is_causal": True, "selected": (3, 1), "block": 7, "documents": OF_ROWS},
    "blocks and padding": {"mask": "padding", "selected": (2, 1), "block": 16},
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


def cases_of(mode: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """The calls of a mode and of an option: of keys, of latents, and of latents with rotary parts of each head."""
    given = {"selected": (9, 1), "length": 48, "heads": 4, **mode, **options}
    keys = AttentionCase(kv_heads=2, **given)
    if "lse_grad" in options or given["selected"][1] > 1 or keys.block > 1:
        return [keys]
    return [keys, LatentCase(latents=True, bias="scale" in options, **given), LatentCase(kv_heads=4, **given)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_selected_keys_fp64(ranks: Any, world: int) -> None:
    """On two ranks every option in every exchange, layout and degree; on four each mode has one of the options."""
    cases: list[Any] = []
    given = itertools.product(modes(2), OPTIONS.values())
    wider = [mode for mode in modes(4) if mode["ulysses_degree"] < 4]
    for i, (mode, options) in enumerate(given if world == 2 else zip(wider, itertools.cycle(OPTIONS.values()))):
        if mode["kv_exchange"] != "ring" or "exchange_stages" not in options:
            calls = cases_of(mode, options)
            cases += calls if world == 2 else [calls[i % len(calls)]]
    for layout, exchange in itertools.product(("per_document", "balanced"), ("ring", "needed", "all_gather")):
        how = {"is_causal": True, "documents": OF_ROWS[:1], "selected": (9, 1), "layout": layout}
        cases.append(LatentCase(48, kv_exchange=exchange, latents=False, **how))
    check(ranks(world, run_selected, pairwise(cases)), FP64)


# --------------------------------------------------------------------------- the selection


def best_keys(q: Tensor, k: Tensor, weights: Tensor | None, pairs: Tensor, topk: int) -> Tensor:
    """The selection ``[B, 1, S, topk]``, row by row as it is defined; of equal scores the lower position."""
    scores = torch.relu(torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) * q.shape[3] ** -0.5)
    scores = scores.sum(1) if weights is None else torch.einsum("bhts,bht->bts", scores, weights)
    found, numbers = torch.full((*scores.shape[:2], topk), -1), scores.float().tolist()
    for b, t in itertools.product(*map(range, scores.shape[:2])):
        seen = pairs.expand(len(q), 1, *pairs.shape[2:])[b, 0, t].nonzero()[:, 0].tolist()
        row = sorted(seen, key=lambda s: (-numbers[b][t][s], s))[:topk]
        found[b, t, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return found.unsqueeze(1)


def best_blocks(q: Tensor, k: Tensor, weights: Tensor | None, pairs: Tensor, topk: int, block: int) -> Tensor:
    """The blocks ``[B, H, S, topk]`` that each head selects, the last one of a query first."""
    scores = torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) * q.shape[3] ** -0.5
    scores = (scores if weights is None else scores * weights.unsqueeze(3)).float()
    found, numbers = torch.full((*scores.shape[:3], topk), -1), scores.tolist()
    for b, h, t in itertools.product(*map(range, scores.shape[:3])):
        best = {t // block: float("inf")}
        for s in pairs.expand(len(q), 1, *pairs.shape[2:])[b, 0, t].nonzero()[:, 0].tolist():
            best[s // block] = max(best.get(s // block, float("-inf")), numbers[b][h][t][s])
        row = sorted(best, key=lambda i: (-best[i], i))[:topk]
        found[b, h, t, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return found


def indexer_inputs(length: int, weighted: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    made = [torch.randn(2, *shape, generator=g, dtype=dtype) for shape in ((3, length, 6), (1, length, 6), (3, length))]
    return made if weighted else made[:2]


@lru_cache
def best_of(problem: Problem) -> Tensor:
    """The selection by its definition, computed once for all modes."""
    q, k, *weights = indexer_inputs(problem.length, not problem.sinks)
    visible = visible_pairs(problem.length, problem.is_causal, problem.window, problem.documents)
    if problem.mask:
        visible = visible & attention_case.explicit_mask(problem)[0]  # type: ignore[operator]
    given = q, k, weights[0] if weights else None, visible, (problem.selected or (7, 1))[0]
    return best_blocks(*given, problem.block) if problem.block > 1 else best_keys(*given)


@on_ranks
def run_selection(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    mesh, found = attention_case.cp_mesh(), []
    for case in cases:
        inputs, at = indexer_inputs(case.length, not case.sinks), case.positions(case.length)
        mask = attention_case.explicit_mask(case)[0] if case.mask else None
        topk, _ = case.selected or (7, 1)
        blocks, want = case.block > 1, best_of(case.problem)
        names = ("is_causal", "window", "layout", "load_balance", "kv_exchange")
        options: dict[str, Any] = {name: getattr(case, name) for name in names}
        cp = cp_mesh.view(mesh, case.ulysses_degree)  # attention's, of which all ranks select together
        options |= {"topk": topk, "attn_mask": mask, "documents": case.rows}
        options |= {"block": case.block, "local_blocks": 1, "score": "per_head"} if blocks else {}
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
    "blocks of heads": {"is_causal": True, "selected": (2, 3), "block": 5},
    "blocks, documents": {"is_causal": True, "selected": (3, 3), "block": 4, "documents": OF_ROWS, "sinks": True},
    "wide blocks, not causal": {"selected": (2, 3), "block": 20, "sinks": True},
}


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_best_keys_are_selected(ranks: Any, world: int) -> None:
    """In every mode those of one device, ties too: half of all scores are exactly 0 without weights."""
    cases = [AttentionCase(48, **mode, **options) for mode in modes(world) for options in SELECTIONS.values()]
    check(ranks(world, run_selection, pairwise(cases)), 0.0)


def test_all_scores_equal() -> None:
    """Then the first keys are selected."""
    q, k = -torch.ones(1, 2, 9, 4), torch.ones(1, 1, 9, 4)
    found = select_keys(q, k, topk=3, mesh=cp_mesh.alone())
    assert found[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 7]


@pytest.mark.parametrize("score", ["relu_sum", "per_head"])
def test_local_keys_are_listed_once(score: str) -> None:
    """Blocks of one key, too: attention would count a key twice."""
    q, k, _ = indexer_inputs(20, True)
    found = select_keys(q, k, topk=4, local_blocks=2, score=score, mesh=cp_mesh.alone())
    for t, rows in enumerate(found.movedim(2, 0).flatten(1, 2).tolist()):
        for row in rows:
            assert len({*row} - {-1}) == min(4, t + 1)
            assert {t, max(0, t - 1)} <= {*row}


# --------------------------------------------------------------------------- in modules


class Inner(nn.Module):
    """Attention of a model that is given the keys its queries have selected."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, enable_gqa=True, selected=chosen)  # type: ignore[return-value]


MODULES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": None},
    "heads at the call": {"ulysses_degree": None, "qkv_indices": None},
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
}


@on_ranks
def in_module(style: dict[str, Any]) -> list[tuple[Any, Errors]]:
    case, mesh, found = AttentionCase(48, True, kv_heads=2, selected=(9, 2)), attention_case.cp_mesh(), []
    shard = case.shard()
    made = ContextParallel(seq_dim=2, head_dim=1, **style)
    module = parallelize_module(Inner(), mesh, made)
    chosen = attention_case.selection(case)[:, :, shard.at]
    for run in (module, lambda *x: checkpoint(module, *x, use_reentrant=False)):
        out = run(*shard.qkv, chosen)
        found.append((style, shard.errors(out, torch.autograd.grad(out, shard.qkv, shard.dout))))
    return found


@pytest.mark.parametrize("way", MODULES)
def test_a_styled_module_hands_its_selection_on(ranks: Any, way: str) -> None:
    check(ranks(2, in_module, MODULES[way]), FP64)


class Selects(nn.Module):
    """An attention block with an indexer, whose weights are in its inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> tuple[Any, Tensor]:
        chosen = select_keys(*index, topk=9)
        return attention(q, k, v, is_causal=True, selected=chosen), chosen


@on_ranks
def in_block(style: dict[str, Any]) -> tuple[float, bool, bool]:
    """The error of a block's output against the block on one device, and whether its selection is the same there."""
    case, mesh = AttentionCase(48), attention_case.cp_mesh()
    inputs = [*case.tensors()[:3], *indexer_inputs(48, True)]
    want, chosen = Selects()(*inputs)
    made, at = ContextParallel(seq_dim=2, head_dim=1, **style), case.positions(48)
    out, found = parallelize_module(Selects(), mesh, made)(*(x[:, :, at] for x in inputs))
    pairs = torch.ones(48, 48, dtype=torch.bool).tril().expand(1, 1, 48, 48)
    by_definition = best_keys(*inputs[3:], pairs, 9)  # type: ignore[arg-type]
    return relative_error(out, want[:, :, at]), torch.equal(chosen, by_definition), torch.equal(found, chosen[:, :, at])


@pytest.mark.parametrize("way", MODULES)
def test_a_styled_block_selects_over_all_ranks(ranks: Any, way: str) -> None:
    """Its heads are exchanged at its entrance, at its call, or not at all."""
    for error, on_one, same in ranks(2, in_block, MODULES[way]):
        assert on_one
        assert same
        assert error < FP64


@on_ranks
def compiled_errors() -> Errors:
    case = LatentCase(48, True, kv_exchange="ring", load_balance=True)
    mesh, (leaves, dout, at) = cp_mesh.view(attention_case.cp_mesh(), 1), leaves_of(case)
    index = [x[:, :, at] for x in indexer_inputs(48, True)]

    def run(*given: Tensor) -> Any:
        chosen = select_keys(*index, topk=9, mesh=mesh, load_balance=True)
        options: dict[str, Any] = {"is_causal": True, "kv_exchange": "ring", "load_balance": True}
        return latent_attention(*given, mesh=mesh, selected=chosen, **options)

    outs = [run(*leaves), torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves)]
    grads = [torch.autograd.grad(out, leaves, dout) for out in outs]
    pairs = zip(*([out.detach(), *found] for out, found in zip(outs, grads, strict=True)), strict=True)
    return {str(i): relative_error(b, a) for i, (a, b) in enumerate(pairs)}


@pytest.mark.slow
def test_compiled_as_one_graph(ranks: Any) -> None:
    check([[("compiled", errors)] for errors in ranks(2, compiled_errors)], FP64)


def test_the_selection_is_on_the_save_list() -> None:
    assert torch.ops.hyper_cp.select_keys.default in SAVE_LIST


# --------------------------------------------------------------------------- what travels, and what is alive

TRAVELS = ("send_recv", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows")


@on_ranks
def traffic(exchange: str, degree: int) -> tuple[int, int, int]:
    """Bytes that a rank sends to select, to attend, and in backward."""
    case = LatentCase(64, True, heads=16, dtype=torch.float32, kv_exchange=exchange, selected=(9, 1), bias=False)
    mesh, (leaves, dout, at) = attention_case.cp_mesh(), leaves_of(case)
    index, found = [x[:, :, at] for x in indexer_inputs(64, True, torch.float32)], []
    with comm.record_traffic() as log:
        for step in range(3):
            if step == 0:
                chosen = select_keys(*index, topk=9, mesh=mesh, kv_exchange=exchange)
            elif step == 1:
                options: dict[str, Any] = {"kv_exchange": exchange, "ulysses_degree": degree, "selected": chosen}
                out = latent_attention(*leaves[:4], mesh=mesh, is_causal=True, **options)
            else:
                torch.autograd.grad(out, leaves[:4], dout)
            found.append(sum(n for name, n in log.entries if name in TRAVELS) - sum(found))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "needed"])
def test_narrow_keys_and_latents_travel(ranks: Any, exchange: str) -> None:
    """One share of each to the other rank; latents in backward again, and their gradients. (``needed`` sends what the
    other rank's queries may see: its first rank needs nothing.)"""
    share = 2 * 32 * 4
    for rank, (select, forward, backward) in enumerate(ranks(2, traffic, exchange, 1)):
        sends = exchange != "needed" or rank == 0
        returns = exchange != "needed" or rank == 1
        width = RANK + LatentCase(64).dim - PLAIN
        assert select == share * 6 * sends
        assert forward == share * width * sends
        assert backward == share * width * (sends + returns)


def test_ulysses_sends_selections(ranks: Any) -> None:
    """Half of the selections of 4 bytes go to the other rank, beside queries, latents and outputs."""
    case = LatentCase(64, heads=16)
    rows, per_token = 2 * 32, 16 // 2 * (case.dim + case.v_dim) + (RANK + case.dim - PLAIN) + 9
    for _, forward, _ in ranks(2, traffic, "all_gather", 2):
        assert forward == rows * per_token * 4


def test_nothing_is_as_large_as_queries_times_keys() -> None:
    """The largest tensor of a selection, of attention to it and of backward."""
    length, topk = 1024, 16
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 4, generator=g, requires_grad=True) for _ in range(3))
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))
            return found

    with (
        Largest(),
        patch.object(selected, "GATHERED_AT_ONCE", 1 << 15),
        patch.object(indexer, "SCORES_AT_ONCE", 1 << 15),
    ):
        chosen = select_keys(q.detach(), k.detach()[:, :1], topk=topk, mesh=cp_mesh.alone())
        attention(q, k, v, is_causal=True, selected=chosen).sum().backward()  # type: ignore[union-attr]
    assert max(largest) < length * length / 8


# --------------------------------------------------------------------------- refusals

GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"selected": [[0]]}, "is a list"),
    "floats": ({"selected": torch.zeros(2, 1, 24, 3)}, "int32 or int64"),
    "whole sequence": ({"selected": torch.zeros(2, 1, 48, 3, dtype=torch.int32)}, "24 queries of this rank"),
    "three heads": ({"selected": torch.zeros(2, 3, 24, 3, dtype=torch.int32)}, "1 or 4 key heads"),
    "no keys": ({"selected": torch.zeros(2, 1, 24, 0, dtype=torch.int32)}, "selected has shape"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p=0.1"),
    "slices": ({"slices": [((0, 48), (0, 48), "full")]}, "a function of pairs"),
    "groups": ({"head_groups": 2, "ulysses_degree": 2}, "head_groups=2"),
    "replicated": ({"kv_exchange": "replicated", "keys": 48}, "replicated"),
    "blocks of what": ({"selected": None, "block": 4}, "block=4 without selected"),
}
SELECT: dict[str, tuple[dict[str, Any], str]] = {
    "topk": ({"topk": 0}, "topk=0"),
    "score": ({"score": "dot"}, "score='dot'"),
    "weights": ({"weights": torch.zeros(2, 3, 23)}, "weights"),
    "mask": ({"attn_mask": torch.zeros(2, 1, 48, 48)}, "attn_mask is torch.float32"),
    "mask of rows": ({"attn_mask": torch.ones(3, 48, 48).bool(), "is_causal": False}, "heads together"),
    "keys": ({"k": torch.zeros(2, 1, 24, 5)}, "do not fit"),
    "a block of none": ({"block": 0}, "block=0 must be a positive int"),
    "too many local blocks": ({"local_blocks": 4}, "local_blocks=4 is more than topk=3"),
}


@on_ranks
def refusals() -> dict[str, str]:
    mesh, found = attention_case.cp_mesh(), {}
    q = torch.zeros(2, 4, 24, 6)
    index = {"q": q[:, :3], "k": q[:, :1], "weights": torch.zeros(2, 3, 24), "topk": 3}
    with comm.record_traffic() as log:
        for name, (options, _) in GIVEN.items():
            options = {"selected": torch.zeros(2, 1, 24, 3, dtype=torch.int32), **options}
            k = torch.zeros(2, 4, options.pop("keys", 24), 6)
            with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
                attention(q, k, k, mesh=mesh, **options)
            found[name] = str(error.value)
        for name, (options, _) in SELECT.items():
            given = {**index, **options}
            with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
                select_keys(given.pop("q"), given.pop("k"), given.pop("weights"), mesh=mesh, **given)
            found[name] = str(error.value)
    assert not [entry for entry in log.entries if entry[0] in TRAVELS]
    return found


def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    for messages in ranks(2, refusals):
        for name, (_, text) in {**GIVEN, **SELECT}.items():
            assert text in messages[name], (name, messages[name])


def test_a_mesh_of_two_dimensions_cannot_select() -> None:
    cp = replace(cp_mesh.alone(), ulysses=Axis(2, 0, None), flat=(Axis.alone(), Axis.alone()))
    with pytest.raises(NotImplementedError, match="1-D mesh"):
        select_keys(torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 4, 4), topk=1, mesh=cp)


def test_minus_zero_is_zero() -> None:
    """As numbers, not as bits: the lower position wins."""
    of_pairs = torch.tensor([0.0, -0.0, 0.0, -0.0]).expand(1, 4, 4)
    score = indexer.PairScore(lambda products, weights: of_pairs, indexer.SCORES["relu_sum"].pull_back)
    with patch.dict(indexer.SCORES, relu_sum=score):
        found = select_keys(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), topk=2, mesh=cp_mesh.alone())
    assert found[0, 0, 3].tolist() == [0, 1]


# --------------------------------------------------------------------------- HYPER_CP_DEBUG=selected


@on_ranks
def listed(fault: str) -> str:
    """The error for a selection that is wrong on the last rank, in a packed batch."""
    case = AttentionCase(48, True, kv_heads=1, heads=2, documents=OF_ROWS, kv_exchange="needed", layout="head_tail")
    mesh, at = attention_case.cp_mesh(), case.positions(48)
    q, k, weights = (x[:, :, at] for x in indexer_inputs(48, True))
    modes: dict[str, Any] = {"kv_exchange": "needed", "layout": "head_tail", "documents": case.rows, "mesh": mesh}
    chosen = select_keys(q, k, weights, topk=9, **modes)
    if mesh.get_local_rank() == mesh.size() - 1 and fault:
        last = int(at[-1])
        chosen[0, 0, -1, 0] = {"future": last + 1, "document": 2, "end": 48, "twice": int(chosen[0, 0, -1, 1])}[fault]
    nans.watch.selected = True
    try:
        attention(q, k, k, is_causal=True, enable_gqa=True, selected=chosen, **modes)
    except ValueError as error:
        return str(error)
    finally:
        nans.watch.selected = False
    return ""


@pytest.mark.parametrize("fault", ["", "future", "document", "end", "twice"])
def test_debug_finds_listed_keys_that_are_not_seen(ranks: Any, fault: str) -> None:
    for message in ranks(2, listed, fault):
        assert message[:51] == ("selected of rank 1 lists keys that 1 of its queries" if fault else "")


@on_ranks
def local_listed(block: int, fault: str) -> str:
    """The error for local blocks, of which documents hide some; with a fault, one on the last rank is another one."""
    case = AttentionCase(48, True, kv_heads=1, heads=2, kv_exchange="needed", layout="head_tail")
    mesh, at = attention_case.cp_mesh(), case.positions(48)
    q, k, weights = (x[:, :, at] for x in indexer_inputs(48, True))
    modes: dict[str, Any] = {"kv_exchange": "needed", "layout": "head_tail", "mesh": mesh}
    modes["documents"] = [[0, 7, 17, 48], [0, 25, 39, 48]]
    chosen = select_keys(q, k, weights, topk=5, block=block, local_blocks=3, **modes)
    if mesh.get_local_rank() == mesh.size() - 1 and fault:
        here = int(at[-1]) // block
        chosen[0, 0, -1, 0] = {"future": here + 1, "end": -(-48 // block), "twice": int(chosen[0, 0, -1, 1])}[fault]
    nans.watch.selected = True
    try:
        attention(q, k, k, is_causal=True, enable_gqa=True, selected=chosen, block=block, **modes)
    except ValueError as error:
        return str(error)
    finally:
        nans.watch.selected = False
    return ""


@pytest.mark.parametrize("block", [1, 3, 5])
def test_debug_takes_local_keys_and_blocks_that_are_hidden(ranks: Any, block: int) -> None:
    """And finds those in the future, past the end, or twice among them."""
    for fault in ("", "future", "end", "twice"):
        for message in ranks(2, local_listed, block, fault):
            assert message[:51] == ("selected of rank 1 lists keys that 1 of its queries" if fault else ""), message
