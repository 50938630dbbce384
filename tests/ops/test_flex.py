"""FlexAttention under context parallelism: the user's functions of global positions, against whole tensors.

A call runs in tiles of the engine, in every mode; compiled it runs torch's own kernel on all keys at once.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.mesh import cp_mesh as meshes
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import SAVE_LIST, flex, kernels
from hyper_cp.ops.exchange.whole_sequences import gather_sequence, query_positions, share_sequence
from hyper_cp.ops.kernels import TileInputs, reference
from hyper_cp.ops.kernels.scores import Score, TileScore, Where, flex_kernel
from hyper_cp.ops.kernels.scores.mods import Mods
from hyper_cp.schedule.tiles import FULL
from tests.harness.attention_case import FP64, cp_mesh
from tests.harness.flex_masks import (
    CASES,
    DOCUMENT,
    DOCUMENTS,
    KV,
    B,
    D,
    Flex,
    H,
    S,
    backward_on_the_cpu,
    causal,
    oracle,
    relative,
    tensors,
    untraced,
    window,
)
from tests.harness.oracle import relative_error, token_positions
from tests.harness.ranks import error_of, named_error, on_ranks, sum_over_ranks

compiled_flex = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
OWN_QKV = {"qkv_indices": None}


def styled(module: nn.Module, **style: Any) -> nn.Module:
    return parallelize_module(module, cp_mesh(), ContextParallel(seq_dim=2, head_dim=1, **style))


def own(style: dict[str, Any]) -> Tensor:
    """Positions of this rank."""
    layout = style.get("layout", "contiguous")
    return torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), S))


def styles(world: int) -> list[dict[str, Any]]:
    """On two ranks every exchange and layout; on four those that have a ring beside Ulysses, and longer rings."""
    if world == 4:
        return [
            {"ulysses_degree": 2, "kv_exchange": "ring", "qkv_indices": None},
            {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
            {"ulysses_degree": 2, "kv_exchange": "needed", "layout": "contiguous"},
            {"ulysses_degree": 2, "kv_exchange": "all_gather", "layout": "per_document"},
            {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
            {"ulysses_degree": 1, "kv_exchange": "needed", "load_balance": True},
        ]
    return [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "contiguous"},
        {"ulysses_degree": 1, "kv_exchange": "all_gather", "load_balance": True},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "per_document"},
        {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
        {"ulysses_degree": 1, "kv_exchange": "all_gather", "layout": "head_tail", "qkv_indices": None},
        {"ulysses_degree": 1, "kv_exchange": "needed", "window": (4, 2)},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "balanced"},
        {"ulysses_degree": None},
        {"ulysses_degree": None, "layout": "head_tail"},
        {"ulysses_degree": None, "qkv_indices": None, "head_groups": 2},
    ]


def hidden_by(style: dict[str, Any], rows: Any) -> Tensor | None:
    """The pairs that documents of the batch or a window of the style hide beside the functions."""
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    if style.get("window") is not None:
        return (i - j > style["window"][0]) | (j - i > style["window"][1])
    return None if rows is None else DOCUMENT[:, None] != DOCUMENT[None]


def one(name: str, style: dict[str, Any], recompute: str = "", **options: Any) -> dict[str, float]:
    """Relative errors of the output and of every gradient on this rank."""
    *qkv, dout = tensors(name)[:4]
    rows = DOCUMENTS if style.get("layout") in ("per_document", "balanced") else None
    whole, leaves = ([x.clone().requires_grad_() for x in xs] for xs in (qkv, tensors(name)[4:]))
    want, _ = oracle(name, whole, leaves, hidden_by(style, rows))
    expected = torch.autograd.grad(want, whole + leaves, dout, materialize_grads=True)
    made = ContextParallel(seq_dim=2, head_dim=1, **style)
    handler = ContextParallelHandler(cp_mesh(), made)
    copies = [x.detach().clone().requires_grad_() for x in leaves]
    with handler.documents(rows):
        at = handler.position_ids(S)
        local = [x[:, :, at].clone().requires_grad_() for x in qkv]
        module = parallelize_module(Flex(name, copies, **options), handler.mesh, made)
        kept = (
            {"context_fn": partial(create_selective_checkpoint_contexts, SAVE_LIST)} if recompute == "selective" else {}
        )
        out = checkpoint(module, *local, use_reentrant=False, **kept) if recompute else module(*local)
        found = torch.autograd.grad(out, local + copies, dout[:, :, at], materialize_grads=True)
    errors = {"out": relative_error(out, want[:, :, at])}
    for i, (a, b) in enumerate(zip(found[:3], expected[:3], strict=True)):
        errors["qkv"[i]] = relative_error(a, b[:, :, at])
    for i, (a, b) in enumerate(zip(found[3:], expected[3:], strict=True)):
        errors[f"leaf {i}"] = relative_error(sum_over_ranks(a)[0], b)
    return errors


def check(results: list[Any]) -> None:
    bad = [(name, errors) for found in results for name, errors in found.items() if not max(errors.values()) <= FP64]
    assert not bad, bad


@on_ranks
def errors_of(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {f"{name} {style}": one(name, style) for name, style in cases}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_function_in_every_mode(ranks: Any, world: int) -> None:
    """Each mode runs a quarter of the functions, and each function a quarter of the modes."""
    cases = [(name, style) for i, name in enumerate(CASES) for k, style in enumerate(styles(world)) if (i + k) % 4 == 0]
    check(ranks(world, errors_of, cases, timeout=200))


@on_ranks
def errors_of_recomputes(recompute: str) -> dict[str, dict[str, float]]:
    cases = [(name, styles(2)[i]) for name in ("relative", "window, sink") for i in (0, 8)]
    return {f"{name} {style}": one(name, style, recompute) for name, style in cases}


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputes_are_exact(ranks: Any, recompute: str) -> None:
    """In a selective one a mode is active, in which ``torch.vmap`` failed inside of our ops."""
    check(ranks(2, errors_of_recomputes, recompute))


# --------------------------------------------------------------------------- all keys at once


@on_ranks
def compiled_gradients() -> dict[str, dict[str, float]]:
    style = {"ulysses_degree": 1, "layout": "head_tail"}
    with backward_on_the_cpu():
        return {"compiled": one("window, alibi", style, attention=compiled_flex)}


@pytest.mark.slow
def test_gradients_of_a_compiled_call(ranks: Any) -> None:
    check(ranks(2, compiled_gradients, timeout=200))


@on_ranks
def compiled_errors(name: str) -> dict[str, float]:
    """torch.compile of the function alone (one compiled function for modules with and without a style), and of a whole
    module."""
    errors = {}
    traced_flex = torch.compile(flex_attention, fullgraph=True, backend="eager")
    outside = Flex("causal", attention=traced_flex)
    qkv = tensors(name)[:3]
    plain, (want, _) = outside(*qkv), oracle(name, qkv, [])
    errors["outside"] = relative_error(plain, oracle("causal", qkv, [])[0])
    module = torch.compile(styled(Flex(name), ulysses_degree=1, **OWN_QKV), fullgraph=True, backend="eager")
    mine = own({})
    function = styled(Flex(name, attention=traced_flex), ulysses_degree=None)
    for way, run in (("function", function), ("module", module)):
        errors[way] = relative_error(run(*(x[:, :, mine] for x in qkv)), want[:, :, mine])
    errors["outside again"] = relative_error(outside(*qkv), plain)
    return errors


@pytest.mark.slow
def test_compiled(ranks: Any) -> None:
    """The gradients above have the third way, a function whose keys are gathered."""
    for errors in ranks(2, compiled_errors, "window, alibi", timeout=300):
        assert max(errors.values()) <= FP64, errors


@on_ranks
def compiled_in_a_ring() -> float:
    """A compiled flex_attention that may break the graph runs as the function itself does."""
    style = {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}
    qkv, mine = tensors("window, alibi")[:3], own(style)
    module = styled(Flex("window, alibi", attention=torch.compile(flex_attention, backend="eager")), **style)
    return relative_error(module(*(x[:, :, mine] for x in qkv)), oracle("window, alibi", qkv, [])[0][:, :, mine])


@pytest.mark.slow
def test_a_compiled_call_in_a_ring_breaks_the_graph(ranks: Any) -> None:
    assert max(ranks(2, compiled_in_a_ring)) <= FP64


@on_ranks
def asked_beside(style: dict[str, Any]) -> list[float]:
    """Errors of outputs and log-sum-exps, where a call asks for more than the output."""
    qkv, mine = tensors("causal", v_dim=2 * D)[:3], own(style)
    local = [x[:, :, mine] for x in qkv]
    want, lse = (x[:, :, mine] for x in oracle("causal", qkv, [], scale=0.3))
    out, aux = styled(Flex("causal", scale=0.3, return_aux=AuxRequest(lse=True)), **style)(*local)
    options = {"BLOCKS_ARE_CONTIGUOUS": True}
    pair = styled(Flex("causal", scale=0.3, return_lse=True, kernel_options=options), **style)(*local)
    assert options == {"BLOCKS_ARE_CONTIGUOUS": True}
    lses = [pair[1], aux.lse] if style.get("qkv_indices", ()) is None else [pair[1]]
    return [relative_error(x, want) for x in (out, pair[0])] + [relative_error(x, lse) for x in lses]


@pytest.mark.slow
def test_scale_log_sum_exp_and_kernel_options(ranks: Any) -> None:
    for style in (OWN_QKV, {"layout": "head_tail", **OWN_QKV}, {"layout": "head_tail"}):
        assert max(max(e) for e in ranks(4, asked_beside, {"ulysses_degree": 2, **style})) <= FP64, style


@on_ranks
def check_ops(degree: int) -> None:
    cp = meshes.view(cp_mesh(), degree)
    k = torch.randn(2, 3, 8, 4)
    for layout in ("contiguous", "head_tail"):
        torch.library.opcheck(query_positions, (k, cp.key, layout))
        mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
        blocks = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
        for some in (blocks, blocks[:2]):
            torch.library.opcheck(flex.local_blocks, (some, cp.key, layout, 8, 4, 4))


@pytest.mark.slow
def test_opcheck(ranks: Any) -> None:
    ranks(2, check_ops, 1)


@on_ranks
def other_backends_collectives(layout: str) -> bool:
    """Gloo's transfers are made of point-to-point ones; the collectives of other backends give the same."""
    cp = meshes.view(cp_mesh(), 1)
    plain = Axis(cp.ring.rank, cp.ring.size, cp.ring.group)
    other = meshes.register(meshes.CPMesh("plain " + cp.key, plain, cp.ulysses, cp.flat, cp.batch))
    x = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    how = layout, 0, True, True
    a, b = (gather_sequence(x, None, m.key, *how) for m in (cp, other))
    c, d = (share_sequence(a * (1 + dist.get_rank()), None, m.key, *how) for m in (cp, other))
    return torch.equal(a, b) and torch.allclose(c, x * 3) and torch.allclose(d, x * 3)


def test_other_collectives_than_gloo(ranks: Any) -> None:
    assert all(ranks(2, other_backends_collectives, "head_tail"))


# --------------------------------------------------------------------------- FlexAttention as the kernel of a tile


@on_ranks
def by_flex_attention(cases: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, dict[str, float]], set[str]]:
    """The kernel of CUDA, on the CPU: torch's math there is complete."""
    kernel = flex_kernel.FlexKernel(compiled=False)
    called = set()

    def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
        called.add("accepts")
        return True

    with kernels.register(kernel, "cpu", accepts, scores=True), untraced(), backward_on_the_cpu():
        return {f"{name} {style}": one(name, style) for name, style in cases}, called


@pytest.mark.slow
def test_flex_attention_per_tile(ranks: Any) -> None:
    chosen = [("window, sink", 4), ("prefix", 6)]
    found, called = zip(*ranks(2, by_flex_attention, [(name, styles(2)[i]) for name, i in chosen]), strict=True)
    assert all(called)
    check(list(found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mods", "profiles"])
def test_gradients_of_captured_tensors_by_flex_attention(kind: str) -> None:
    """With torch's tracing, without which it has no gradients of captured tensors."""
    q, k, v, dout, table, gain = tensors("relative")
    leaves = [table.requires_grad_(), gain.requires_grad_()]
    mask = Flex("relative", leaves).block_mask
    score: Score = Mods(relative(*leaves), causal, mask, q)
    if kind == "profiles":
        pytest.importorskip("transformers")
        from hyper_cp.integrations.huggingface.inkling import Profiles

        states, profiles = (torch.randn(*shape).double().requires_grad_() for shape in ((B, S, H, 3), (3, 6)))
        score = Profiles(states, profiles)
    where = Where(*(torch.arange(n) for n in (B, H, S, S)))
    found = []
    for kernel in (kernels.REFERENCE, flex_kernel.FlexKernel(compiled=False)):
        captured = [x.detach() for x in score.captured]
        totals = [torch.zeros_like(x) for x in captured]
        tile = TileInputs(q, k, v, FULL, D**-0.5, score=TileScore(score, where, captured, totals))
        with backward_on_the_cpu():
            out, lse = kernel.forward(tile)
            tile.dlse = torch.ones_like(lse)
            found.append([out, lse, *kernel.backward(tile, dout, out, lse), *totals])
    assert len(found[0]) == {"mods": 8, "profiles": 7}[kind]
    assert max(relative_error(a, b) for a, b in zip(found[1], found[0], strict=True)) <= FP64


@pytest.mark.parametrize("band, kind", [((None, 3), "bool"), ((-9, 0), "padding"), ((None, None), "float")])
def test_plain_math_in_chunks_of_rows_is_the_same(band: Any, kind: str) -> None:
    q, k, v, dout, table, gain = tensors("relative")
    mask = torch.rand(B, 1, S if kind == "bool" else 1, S) < 0.8
    mask = torch.randn(1, H, S, S, dtype=torch.float64) if kind == "float" else mask
    score = Mods(relative(table, gain), causal, None, q)
    where = Where(*(torch.arange(n) for n in (B, H, S, S)))
    found = []
    for at_once in (1 << 20, B * H * S * 5):
        tile = TileInputs(q, k, v, band, 0.3, mask, keep=torch.rand(B, H, S, S, generator=torch.manual_seed(2)))
        tile.score, tile.dlse = TileScore(score, where), torch.ones(B, H, S, dtype=torch.float64)
        with mock.patch.object(reference, "LOGITS_AT_ONCE", at_once):
            out, lse = kernels.REFERENCE.forward(tile)
            found.append([out, lse.exp(), *kernels.REFERENCE.backward(tile, dout, out, lse)])
    assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) <= 1e-13


def test_cuda_runs_scores_by_flex_attention_and_nothing_else_by_it() -> None:
    entry = kernels.available("cuda")["flex attention"]
    assert entry is flex_kernel.KERNEL
    q = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    assert flex_kernel.accepts(q, q, q, True) and not flex_kernel.accepts(q.double(), q, q, True)


@given(
    st.sampled_from([(None, None), (None, 0), (-150, 0), (-40, 90)]),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_blocks_of_a_tile(band: Any, shape: tuple[int, int], size: tuple[int, int], seed: int) -> None:
    """Every visible pair of a tile at any positions lies in a listed block."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = (torch.randperm(400, generator=g)[:n].sort().values for n in shape)
    dense = torch.rand(1, 1, -(-400 // size[0]), -(-400 // size[1]), generator=g) < 0.1
    score = Mods.__new__(Mods)
    score.dense, score.score_mod, score.mask_mod = dense, None, None
    score.block_mask = SimpleNamespace(BLOCK_SIZE=size)  # type: ignore[assignment]
    where = Where(torch.zeros(1).long(), torch.zeros(1).long(), rows, cols)
    x = [torch.empty(1, 1, n, 1) for n in (len(rows), len(cols), len(cols))]
    tile = TileInputs(*x, band, 1.0, score=TileScore(score, where))
    mask = flex_kernel.tile_blocks(tile, lambda b, h, i, j: i >= 0)
    distance = torch.arange(len(cols)) - torch.arange(len(rows))[:, None]
    seen = dense[0, 0][rows // size[0]][:, cols // size[1]]
    seen &= (distance >= (band[0] if band[0] is not None else -999)) & (
        distance <= (band[1] if band[1] is not None else 999)
    )
    listed = mask.to_dense()[0, 0].bool()
    for i, j in seen.nonzero().tolist():
        assert listed[i // 128, j // 128]


# --------------------------------------------------------------------------- what travels


@on_ranks
def sent(name: str, style: dict[str, Any], leaves: list[Tensor], backward: bool) -> list[tuple[str, int]]:
    local = [x[:, :, own(style)].requires_grad_(backward) for x in tensors(name)[:3]]
    with comm.record_traffic() as log:
        out = styled(Flex(name, leaves), ulysses_degree=1, **style)(*local)
        if backward:
            out.sum().backward()
    return [entry for entry in log.entries if entry[0] != "agreement"]


def test_bytes_equal_the_formula(ranks: Any) -> None:
    both = 2 * B * KV * (S // 4) * D * 8  # keys and values of a share
    want = [("all_gather", 3 * both)] * 2 + [("reduce_scatter", 3 * both)]  # fetched again in backward
    assert ranks(4, sent, "causal", {"layout": "head_tail"}, [], True) == [want] * 4


def test_blocks_say_what_travels(ranks: Any) -> None:
    rows, seen = 0, [{j for j in range(S) if 0 <= i - j < 7} for i in range(S)]
    for rank in range(4):
        mine = set(range(6 * rank, 6 * rank + 6))
        touched = {i // 4 for i in mine}
        blocks = {j // 4 for i in range(S) if i // 4 in touched for j in seen[i]}
        rows += len({j for j in range(S) if j // 4 in blocks} - mine)
    leaves = [torch.zeros(H, dtype=torch.float64)]
    found = ranks(4, sent, "window, sink", {"kv_exchange": "needed"}, leaves, False)
    assert sum(size for entries in found for _, size in entries) == rows * 2 * B * KV * D * 8


# --------------------------------------------------------------------------- functions and blocks that change


@on_ranks
def changed() -> dict[str, Any]:
    """FlexAttention whose functions or blocks change, and a function without a derivative where it hides pairs."""
    module, found = Flex("alibi"), {}
    whole, mine = tensors("alibi")[:3], own({})
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in whole)
    styled(module, ulysses_degree=1, kv_exchange="ring")

    def run(mask: Any, score_mod: Any = None) -> Tensor:
        module.block_mask, module.options = mask, {"score_mod": score_mod}
        return module(q, k, v)

    def blocks(visible: Any) -> Any:
        return create_block_mask(visible, None, None, S, S, device="cpu", BLOCK_SIZE=4)

    document = torch.arange(S) // 5
    mask = blocks(lambda b, h, i, j: (document[i] == document[j]) & (j <= i))
    out = run(mask)
    document.copy_(torch.arange(S) // 3)
    found["written"] = error_of(lambda: out.sum().backward())
    out = run(mask)
    document = torch.arange(S) // 2  # another tensor in the same closure
    found["replaced"] = error_of(lambda: out.sum().backward())

    outs, slope = [], 0.0
    for slope in (0.1, 2.0):  # the function sees the variable, not its value
        outs.append(run(None, lambda score, b, h, i, j: score - slope * (i - j).abs()))
    found["numbers"] = error_of(lambda: outs[0].sum().backward())
    outs[1].sum().backward()

    table, slopes, layer = torch.ones(2 * H), np.ones(2, np.float32), 0
    for name, changing in (
        ("part", lambda score, b, h, i, j: score * table[layer * H : (layer + 1) * H][h]),
        ("one of several", lambda score, b, h, i, j: score * table.chunk(2)[layer][h]),
        ("number of NumPy", lambda score, b, h, i, j: score * slopes[layer]),
    ):
        outs = []
        for layer in (0, 1):
            slopes[layer] = layer
            outs.append(run(None, changing))
        found["numbers: " + name] = error_of(lambda outs=outs: outs[0].sum().backward())
        outs[1].sum().backward()

    want = F.scaled_dot_product_attention(*whole, enable_gqa=True)[:, :, mine]
    found["blocks"] = 0.0
    for inference in (False, True):  # whose tensors do not count writes
        with torch.inference_mode(inference):
            mask, wider = blocks(lambda b, h, i, j: j <= i), blocks(lambda b, h, i, j: j <= S)
            run(mask)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                getattr(mask, name).copy_(getattr(wider, name))
            mask.mask_mod = wider.mask_mod
            found["blocks"] = max(found["blocks"], (run(mask) - want).abs().max().item())

    run(blocks(lambda b, h, i, j: j < i), lambda score, b, h, i, j: score / (i - j)).sum().backward()
    found["finite"] = all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    return found


def test_what_has_changed_is_seen(ranks: Any) -> None:
    for found in ranks(2, changed):
        for name in ("written", "replaced"):
            assert "RuntimeError: a tensor that score_mod or mask_mod" in found[name], found
        numbers = [x for name, x in found.items() if name.startswith("numbers")]
        assert len(numbers) == 4
        assert all("RuntimeError: a number that score_mod or mask_mod" in x for x in numbers), found
        assert found["blocks"] <= 1e-10 and found["finite"], found


# --------------------------------------------------------------------------- refusals


@on_ranks
def unequal() -> None:
    length = S // 2 - dist.get_rank()
    styled(Flex("causal"), qkv_indices=None)(*(torch.randn(B, H, length, D) for _ in range(3)))


def test_unequal_lengths_are_refused_on_every_rank(ranks: Any) -> None:
    ranks.raises(2, ValueError, "call attention with different shapes", unequal)


@on_ranks
def other_masks() -> None:
    module = Flex("causal")
    module.block_mask = create_block_mask([causal, window][dist.get_rank()], None, None, S, S, "cpu", BLOCK_SIZE=4)
    styled(module, ulysses_degree=1)(*(x.chunk(2, 2)[dist.get_rank()] for x in tensors("causal")[:3]))


def test_ranks_with_other_block_masks_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, "different block mask.*Build the block_mask", other_masks)


ONE = {"ulysses_degree": 1}
RING = {**ONE, "kv_exchange": "ring"}
A_LOCAL_MASK = "for 6 queries and 6 keys, but the global sequence has 24 and 24.*Build it with"
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "local mask": (A_LOCAL_MASK, "local mask", ONE),
    "local mask, own qkv": (A_LOCAL_MASK, "local mask", {"ulysses_degree": 2, **OWN_QKV}),
    "local mask, Ulysses": (A_LOCAL_MASK, "local mask", {}),
    "heads of a share": (
        r"shape \(1, 2, 24, 24\).*global query heads.*H in \(1, 4\)",
        "two heads",
        {"ulysses_degree": 2, **OWN_QKV},
    ),
    "groups": ("query has 4 heads and key 2.*Pass enable_gqa=True", "groups", ONE),
}


@on_ranks
def refused(kind: str) -> None:
    _, what, style = REFUSED[kind]
    options: dict[str, Any] = {"groups": {"enable_gqa": False}}.get(what, {})
    module = Flex("causal", **options)
    heads, length = {"local mask": (None, S // 4), "two heads": (2, S)}.get(what, (None, S))
    module.block_mask = create_block_mask(causal, None, heads, length, length, "cpu", BLOCK_SIZE=16)
    styled(module, **style)
    with comm.record_traffic() as log:
        try:
            module(*(x[:, :, own({})] for x in tensors("causal")[:3]))
        finally:
            early = [op for op, _ in log.entries if op not in ("all_to_all", "agreement")]
            assert not early, early


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_keys_are_sent(ranks: Any, kind: str) -> None:
    ranks.raises(4, *named_error(REFUSED[kind][0]), refused, kind)


def test_an_order_of_all_blocks_is_refused() -> None:
    """It belongs to torch's own kernel, which runs compiled calls."""
    mask = create_block_mask(causal, None, None, S, S, "cpu", BLOCK_SIZE=16)
    mask.dq_write_order = mask.kv_indices
    q, call = torch.zeros(1, H, S, 8), SimpleNamespace(cp=meshes.alone(), exchanged=False, lengths=(S, S))
    with pytest.raises(NotImplementedError, match="compute_dq_write_order=True"):
        flex.Flex("attention", None, mask, {}, flex_attention).check(q, q, call)  # type: ignore[arg-type]


@on_ranks
def nothing_left_behind() -> bool:
    """After a styled module, failing or not, flex_attention is plain again."""
    q = tensors("causal")[0]
    plain = flex_attention(q, q, q)
    for style in ({"ulysses_degree": 1}, RING):
        with suppress(NotImplementedError):
            styled(Flex("causal"), **style)(*(x[:, :, own({})] for x in (q, q, q)))
    return torch.equal(flex_attention(q, q, q), plain)


@pytest.mark.slow
def test_nothing_is_left_behind(ranks: Any) -> None:
    assert all(ranks(2, nothing_left_behind))
    assert "score_mod" in inspect.signature(flex_attention).parameters
