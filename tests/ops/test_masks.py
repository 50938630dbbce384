"""Windows, packed documents and explicit masks on real gloo ranks, against a plain-math oracle in fp64."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.module._torch import checkpoint as checkpoint_seam
from hyper_cp.ops import attention
from hyper_cp.schedule import masks
from hyper_cp.schedule.documents import documents_table, read
from hyper_cp.schedule.lookup import resolve
from tests.harness.oracle import plain_attention, relative_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks
from tests.ops.test_attention import FP64, check, inputs, modes

Case = dict[str, Any]


def explicit_mask(kind: str, batch: int, heads: int, length: int, mine: Tensor) -> tuple[Tensor, Any, Any]:
    """``(as the user passes it, visible, bias)`` of a random mask, the same on every rank."""
    g = torch.Generator().manual_seed(length)
    shape = {
        "bool": (batch, 1, length, length),
        "heads": (1, heads, length, length),
        "padding": (batch, 1, 1, length),
        "2d": (length, length),
        "float": (batch, heads, length, length),
        "local rows": (1, heads, length, length),
        "causal": (1, 1, length, length),
    }[kind]
    visible = torch.rand(shape, generator=g) < 0.6
    if kind == "causal":
        visible = visible | True
        visible = visible.tril()
    if kind not in ("padding", "causal"):
        visible[..., length // 3, :] = False  # a query that sees nothing
    if kind == "float":
        bias = torch.randn(shape, generator=g, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        return bias, None, bias
    return (visible[:, :, mine] if kind == "local rows" else visible), visible, None


def held_positions(layout: str, rank: int, world: int, length: int, rows: Any) -> list[int]:
    if layout not in ("per_document", "auto"):
        return token_positions(layout, rank, world, length)
    packed = read(documents_table(rows))
    return resolve(layout, world, length, packed).positions(rank).tolist()  # test_layout compares with definitions


def run_case(case: Case) -> dict[str, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    length, batch, heads = case["length"], case.get("batch", 2), case.get("heads", 4)
    q, k, v, dout = inputs(batch, heads, case.get("kv_heads", 4), length, 8, 8, case.get("dtype", torch.float64))
    mine = torch.tensor(held_positions(case["layout"], rank, world, length, case.get("documents")))
    rows, window, causal = case.get("documents"), case.get("window"), case["causal"]
    visible, bias, passed = visible_pairs(length, causal, window, rows), None, None
    if case.get("mask"):
        passed, seen, bias = explicit_mask(case["mask"], batch, heads, length, mine)
        visible = visible if seen is None else visible & seen
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*wide, visible=visible, bias=bias)
    expected_grads = torch.autograd.grad(expected, wide, dout.double())
    local = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention(
        *local,
        mesh=mesh,
        is_causal=causal,
        enable_gqa=True,
        ulysses_degree=case["degree"],
        kv_exchange=case["kv"],
        layout=case["layout"],
        load_balance=case["balance"],
        window=window,
        documents=rows,
        attn_mask=passed,
        return_lse=True,
    )
    grads = torch.autograd.grad(out, local, dout[:, :, mine])
    found = {"out": relative_error(out, expected[:, :, mine]), "lse": lse_error(lse, wide, visible, bias, mine)}
    for name, grad, want in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        scale = want.abs().max().clamp(min=1.0)  # documents of one token have no gradient of q and k
        found[name] = float("nan") if grad.isnan().any() else ((grad - want[:, :, mine]).abs().max() / scale).item()
    return found


def lse_error(lse: Tensor, wide: list[Tensor], visible: Tensor, bias: Tensor | None, mine: Tensor) -> float:
    q, k = (x.detach() for x in wide[:2])
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    want = logits.masked_fill(~visible.expand_as(logits), -torch.inf).logsumexp(-1)[:, :, mine]
    seen = want > -torch.inf
    if not torch.equal(lse > -torch.inf, seen):
        return float("nan")
    return (lse - want)[seen].abs().max().item() / 10 if seen.any() else 0.0


@on_ranks
def run_cases(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    return [(case, run_case(case)) for case in cases]


def borders(length: int, kind: str) -> list[list[int]]:
    """Documents of odd lengths, of length one, empty ones, shorter than the number of ranks."""
    if kind == "many":
        return [sorted([0, 1, 2, 2, 5, length // 3 + 1, length // 2, length - 1, length])]
    if kind == "singles":
        return [list(range(length + 1))]
    return [[0, length // 2 + 1, length], [0, 3, 3, length - 2, length]]  # a list per row


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_windows_and_documents(ranks: Any, world: int) -> None:
    length = 12 * world
    facts = [
        {"window": (3, 0)},
        {"window": (length // world + 5, None)},
        {"window": (2, 4)},
        {"documents": borders(length, "many")},
        {"documents": borders(length, "rows")},
        {"documents": borders(length, "rows"), "window": (4, 1)},
    ]
    cases = [
        {**mode, **fact, "causal": causal, "length": length}
        for mode, fact, causal in itertools.product(modes(world), facts, (True, False))
        if 4 % mode["degree"] == 0
    ]
    cases += [
        {**m, "documents": borders(length, "singles"), "causal": True, "length": length} for m in modes(world)[:4]
    ]
    check(ranks(world, run_cases, cases), FP64)


@pytest.mark.parametrize("world", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7)), 8])
def test_documents_in_layouts_by_document(ranks: Any, world: int) -> None:
    """Lengths that divide by the number of ranks only, every exchange, every Ulysses degree of eight heads."""
    degrees = [d for d in range(1, world + 1) if world % d == 0 and 8 % d == 0]
    cases = [
        {"degree": d, "kv": kv, "layout": layout, "balance": False, "documents": borders(length, kind), **rest}
        for d in degrees
        for kv in ("ring", "all_gather")
        for layout, length in (("per_document", 11 * world), ("auto", 12 * world))
        for kind in ("many", "singles" if kv == "ring" else "many")
        for rest in ({"causal": True, "length": length, "heads": 8, "kv_heads": 8},)
    ]
    cases += [{**cases[0], "causal": False}, {**cases[0], "window": (3, 0)}, {**cases[-1], "window": (4, 2)}]
    check(ranks(world, run_cases, cases), FP64)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_explicit_masks(ranks: Any, world: int) -> None:
    cases = [
        {
            **mode,
            "mask": kind,
            "causal": False,
            "length": 8 * world,
            "kv_heads": 4 if mode["degree"] == 4 else 2,
        }
        for mode in modes(world)
        for kind in ("bool", "heads", "padding", "2d", "float", "local rows", "causal")
        if 4 % mode["degree"] == 0
        and not (kind == "local rows" and (mode["degree"] > 1 or mode["balance"]))
        and (mode["degree"] < 4)
    ]
    cases += [
        {**mode, "mask": "bool", "window": (5, 2), "causal": False, "length": 8 * world} for mode in modes(world)[:4]
    ]
    cases += [
        {
            **mode,
            "mask": "float",
            "documents": borders(8 * world, "rows"),
            "causal": False,
            "length": 8 * world,
        }
        for mode in modes(world)[:4]
    ]
    check(ranks(world, run_cases, cases), FP64)


def cross(case: Case) -> dict[str, float]:
    """Queries and keys of different lengths, both sharded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, *_ = inputs(2, 4, 4, case["length"], 8, 8, torch.float64)
    _, k, v, _ = inputs(2, 4, 2, case["keys"], 8, 5, torch.float64)
    dout = torch.randn(2, 4, case["length"], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    visible, passed = None, None
    if case["mask"]:
        visible = torch.rand(2, 1, case["length"], case["keys"], generator=torch.Generator().manual_seed(8)) < 0.6
        passed = visible
    wide = [x.clone().requires_grad_() for x in (q, k, v)]
    want = plain_attention(*wide, visible=visible)
    want_grads = torch.autograd.grad(want, wide, dout)
    mine, theirs = (torch.tensor(token_positions(case["layout"], rank, world, case[n])) for n in ("length", "keys"))
    local = [x[:, :, at].clone().requires_grad_() for x, at in ((q, mine), (k, theirs), (v, theirs))]
    keywords = {"kv_exchange": case["kv"], "layout": case["layout"], "load_balance": case["balance"]}
    out = attention(*local, mesh=mesh, enable_gqa=True, attn_mask=passed, ulysses_degree=case["degree"], **keywords)
    grads = torch.autograd.grad(out, local, dout[:, :, mine])
    pairs = [(out, want[:, :, mine])]
    pairs += [(g, w[:, :, at]) for g, w, at in zip(grads, want_grads, (mine, theirs, theirs), strict=True)]
    return {str(i): relative_error(a, b.detach()) for i, (a, b) in enumerate(pairs)}


def replicated(case: Case) -> dict[str, float]:
    """Queries are sharded, keys and values are whole on every rank; their gradients sum over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    length, keys = case["length"], case["keys"]
    q, *_ = inputs(2, 4, 4, length, 8, 8, torch.float64)
    _, k, v, _ = inputs(2, 4, 2, keys, 8, 5, torch.float64)
    dout = torch.randn(2, 4, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    visible = torch.rand(2, 1, length, keys, generator=torch.Generator().manual_seed(8)) < 0.6
    visible = visible if case["mask"] else visible_pairs(length, True, None, None) if case["causal"] else visible | True
    wide = [x.clone().requires_grad_() for x in (q, k, v)]
    want = plain_attention(*wide, visible=visible)
    want_grads = torch.autograd.grad(want, wide, dout)
    mine = torch.tensor(token_positions(case["layout"], rank, world, length))
    local = [q[:, :, mine].clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()]
    with comm.record_traffic() as traffic:
        out = attention(
            *local,
            mesh=mesh,
            enable_gqa=True,
            kv_exchange="replicated",
            attn_mask=visible if case["mask"] else None,
            is_causal=case["causal"],
            layout=case["layout"],
        )
        dq, *shares = torch.autograd.grad(out, local, dout[:, :, mine])
    for share in shares:
        dist.all_reduce(share)
    pairs = [(out, want[:, :, mine]), (dq, want_grads[0][:, :, mine]), *zip(shares, want_grads[1:], strict=True)]
    sent = sum(n for operation, n in traffic.entries if operation != "agreement")
    return {"bytes": float(sent), **{str(i): relative_error(a, b) for i, (a, b) in enumerate(pairs)}}


@on_ranks
def replicated_cases(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    return [(case, replicated(case)) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_cross_attention_to_replicated_keys_sends_nothing(ranks: Any, world: int) -> None:
    cases = [
        {"layout": layout, "length": 4 * world, "keys": 7, "mask": mask, "causal": False}
        for layout in ("contiguous", "head_tail")
        for mask in (False, True)
    ]
    cases += [{**case, "mask": False, "causal": True, "keys": case["length"]} for case in cases[::2]]
    check(ranks(world, replicated_cases, cases), FP64)


@on_ranks
def cross_in_documents(kv: str, layout: str) -> float:
    """Cross-attention inside a block of documents, which are of the queries: a mask says what these see."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, *_ = inputs(2, 4, 4, 16, 8, 8, torch.float64)
    _, k, v, _ = inputs(2, 4, 4, 12, 8, 8, torch.float64)
    mask = torch.rand(2, 1, 16, 12, generator=torch.Generator().manual_seed(8)) < 0.6
    mine = torch.tensor(held_positions(layout, rank, world, 16, [0, 5, 16]))
    keys = slice(None) if kv == "replicated" else torch.tensor(held_positions(layout, rank, world, 12, None))
    out = attention(
        q[:, :, mine],
        k[:, :, keys],
        v[:, :, keys],
        mesh=mesh,
        kv_exchange=kv,
        layout=layout,
        documents=[0, 5, 16],
        attn_mask=mask,
    )
    return relative_error(out, plain_attention(q, k, v, visible=mask)[:, :, mine])


@pytest.mark.parametrize("kv, layout", [("ring", "head_tail"), ("replicated", "per_document"), ("replicated", "auto")])
def test_cross_attention_inside_documents(ranks: Any, kv: str, layout: str) -> None:
    assert max(ranks(2, cross_in_documents, kv, layout)) <= FP64


@on_ranks
def cross_cases(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    return [(case, cross(case)) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_cross_attention(ranks: Any, world: int) -> None:
    cases = [
        {**mode, "length": 4 * world, "keys": keys * world, "mask": mask}
        for mode in modes(world)
        for keys in (2, 10)
        for mask in (False, True)
        if 4 % mode["degree"] == 0
    ]
    check(ranks(world, cross_cases, cases), FP64)


def test_masks_of_inference_and_views_of_one_mask() -> None:
    with torch.inference_mode():
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(mask, 6) == (None, 0)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    with mock.patch.object(masks, "_recognise", wraps=masks._recognise) as looked:
        for _ in range(3):
            assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) == (None, 0)
        assert looked.call_count == 1, "a view is made anew for every call"
        mask[2, 3] = True
        assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) is None
    both = torch.stack([torch.ones(6, 6).tril(), torch.ones(6, 6)]).bool()
    assert (masks.recognised(both[0], 6), masks.recognised(both[1], 6)) == ((None, 0), (None, None))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[int, Case]:
    world = draw(st.integers(1, 8))
    mode = draw(st.sampled_from([m for m in modes(world) if 8 % m["degree"] == 0]))
    length = 2 * world * draw(st.integers(1, 6))
    bound = st.one_of(st.none(), st.integers(0, length + 1))
    case = {**mode, "causal": draw(st.booleans()), "length": length, "heads": 8, "kv_heads": 8}
    kind = draw(st.sampled_from(["window", "documents", "both", "mask"]))
    if kind in ("window", "both"):
        case["window"] = (draw(bound), draw(bound))
    if kind in ("documents", "both"):
        count = draw(st.sampled_from([1, 2]))
        cuts = st.lists(st.integers(0, length), max_size=8).map(sorted)
        case["documents"] = [[0, *draw(cuts), length] for _ in range(count)]
    if kind == "mask":
        case.update(causal=False, mask=draw(st.sampled_from(["bool", "heads", "padding", "float", "causal"])))
    return world, case


@settings(max_examples=60)
@given(drawn())
def test_drawn_masks(ranks: Any, problem: tuple[int, Case]) -> None:
    world, case = problem
    check(ranks(world, run_cases, [case]), FP64)


# --------------------------------------------------------------------------- forms and words


def test_forms_of_documents() -> None:
    table = masks.documents_table([0, 3, 8])
    assert table is not None and table.tolist() == [[0, 3, 8, 8]]
    ids = torch.tensor([[7, 7, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 5]])
    assert masks.documents_of(masks.documents_table(None, ids), 2, 8) == ((0, 2, 5, 8), (0, 7, 8))
    assert masks.documents_of(masks.documents_table(torch.tensor([0, 8], dtype=torch.int32)), 4, 8) is None
    same = masks.documents_table([[0, 4, 4, 8], torch.tensor([0, 4, 8])])
    assert masks.documents_of(same, 2, 8) == ((0, 4, 8),), "equal rows share their tiles"


@pytest.mark.parametrize(
    "documents, batch, words",
    [
        ([0, 5], 1, "ascend from 0 to the global sequence length 8"),
        ([1, 8], 1, "ascend from 0"),
        ([0, 5, 3, 8], 1, "ascend from 0"),
        ([[0, 8], [0, 8], [0, 8]], 2, "3 rows for a batch of 2"),
    ],
)
def test_documents_that_do_not_fit(documents: Any, batch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        masks.documents_of(masks.documents_table(documents), batch, 8)


def test_a_document_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"document_ids\[0\] names a document in two places"):
        masks.documents_table(None, torch.tensor([[1, 2, 1]]))


@pytest.mark.parametrize("window", [(1,), (-2, 0), (1.5, 0), (True, 0)])
def test_windows_that_make_no_sense(window: Any) -> None:
    with pytest.raises(ValueError, match="window="):
        masks.check_window(window)


def test_a_causal_matrix_is_recognised_exactly_and_not_by_memory_of_another() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(causal, 6) == (None, 0)
    causal[2, 3] = True  # changed in place: looked at again
    assert masks.recognised(causal, 6) is None
    lowest = torch.finfo(torch.bfloat16).min
    added = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16).masked_fill(~torch.ones(6, 6).tril().bool(), lowest)
    assert masks.recognised(added, 6) == (None, 0)
    added[1, 0, 5, 0] = -1.0
    assert masks.recognised(added, 6) is None
    assert masks.recognised(torch.ones(6, 6, dtype=torch.bool), 6) == (None, None)


# --------------------------------------------------------------------------- through the style

SEQ = 24
FIRST, SECOND = [0, 5, 6, 24], [0, 11, 20, 24]
STYLES: list[dict[str, Any]] = [
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "layout": "head_tail"},
    {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
    {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
]


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True)


class Block(nn.Module):
    """Computes q, k, v itself; the whole is what gets checkpointed and styled."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 1.5, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def styled(module: nn.Module, style: Case) -> tuple[Any, ContextParallelHandler]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    made = ContextParallel(seq_dim=2, head_dim=1, **style)
    parallelize_module(module, mesh, {"": made})
    return module, ContextParallelHandler(mesh, made)


def wanted(block_input: Tensor, documents: list[int]) -> tuple[Tensor, Tensor]:
    """Output and gradient of its square sum, of the Block on one device."""
    x = block_input.clone().requires_grad_()
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    visible = visible_pairs(SEQ, True, None, [documents])
    out = plain_attention(heads * 1.5, heads, heads, visible=visible).transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


@on_ranks
def through_the_style(style: Case) -> dict[str, float]:
    found = {}
    q, k, v, _ = inputs(2, 4, 4, SEQ, 8, 8, torch.float64)
    module, handler = styled(Attending(), style)
    local = [handler.dispatch(x, 2) for x in (q, k, v)]

    def error(out: Tensor, rows: Any) -> float:
        visible = visible_pairs(SEQ, True, None, rows)
        return relative_error(handler.combine(out, 2), plain_attention(q * 1.5, k, v, visible=visible))

    with handler.documents(FIRST):
        found["block"] = error(module(*local), [FIRST])
        with handler.documents(document_ids=torch.tensor([[0] * 11 + [1] * 9 + [2] * 4] * 2)):
            found["nested, ids"] = error(module(*local), [SECOND])
        found["back"] = error(module(*local), [FIRST])
        found["keyword wins"] = error(module(*local, documents=[FIRST, SECOND]), [FIRST, SECOND])
    found["after the block"] = error(module(*local), None)
    found["a window"] = relative_error(
        handler.combine(styled(Attending(), {**style, "window": (3, None)})[0](*local), 2),
        plain_attention(q * 1.5, k, v, visible=visible_pairs(SEQ, True, (3, None), None)),
    )
    return found


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_documents_and_windows_through_the_style(ranks: Any, style: Case) -> None:
    for found in ranks(4, through_the_style, style):
        assert max(found.values()) <= FP64, found


BY_DOCUMENTS: list[Case] = [
    {"ulysses_degree": None, "layout": "per_document"},
    {"ulysses_degree": 1, "layout": "auto"},
    {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "per_document"},
]


@on_ranks
def by_documents(style: Case) -> dict[str, float]:
    """Data and attention place tokens by the documents in force, eager, recomputed and compiled."""
    found = {}
    block, handler = styled(Block(), {**style, "qkv_indices": None})
    whole = torch.randn(2, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    for turn, documents in enumerate((FIRST, SECOND, [0, 4, 8, 24])):
        want, want_grad = wanted(whole, documents)
        for name, run in (
            ("eager", block),
            ("compiled", fast),
            ("recomputed", lambda x: checkpoint(block, x, use_reentrant=False)),
        ):
            with handler.documents(documents):
                x = handler.dispatch(whole, 1).requires_grad_()
                at = handler.position_ids(SEQ)
                with torch._dynamo.config.patch(error_on_recompile=turn > 0):
                    out = run(x)
                assert torch.equal(whole[:, at], x.detach())
            out.square().sum().backward()
            assert x.grad is not None
            with handler.documents(documents):
                found[f"{name} {turn}"] = relative_error(handler.combine(out.detach(), 1), want)
                found[f"{name} {turn}, gradient"] = relative_error(handler.combine(x.grad, 1), want_grad)
    return found


@pytest.mark.parametrize("style", BY_DOCUMENTS, ids=str)
def test_layouts_by_document_through_the_style(ranks: Any, style: Case) -> None:
    for found in ranks(4, by_documents, style):
        assert max(found.values()) <= FP64, found


@on_ranks
def without_documents(where: str) -> None:
    block, handler = styled(Block(), {"layout": "per_document", "ulysses_degree": 1, "qkv_indices": None})
    if where == "attention":
        block(torch.randn(2, 6, 32))
    handler.dispatch(torch.randn(2, SEQ, 32), 1)


@pytest.mark.parametrize("where", ["attention", "dispatch"])
def test_layouts_by_document_without_documents(ranks: Any, where: str) -> None:
    ranks.raises(2, ValueError, "places tokens by document, but no documents are given", without_documents, where)


@on_ranks
def recompute(style: Case, remembered: bool, reentrant: bool = False) -> dict[str, Any]:
    """Activation checkpointing: a recompute sees the documents of its forward; or raises, where torch's frames do not
    tell which forward it belongs to."""
    block, handler = styled(Block(), {**style, "qkv_indices": None})
    whole = torch.randn(2, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}

    def run(**keywords: Any) -> tuple[Tensor, Tensor]:
        x = handler.dispatch(whole, 1).requires_grad_()
        if reentrant:
            return x, checkpoint(lambda y: block(y, **keywords), x, use_reentrant=True)
        return x, checkpoint(block, x, use_reentrant=False, **keywords)

    def error(x: Tensor, out: Tensor, documents: list[int]) -> Any:
        try:
            out.square().sum().backward()
        except RuntimeError as failure:
            return str(failure)
        want, want_grad = wanted(whole, documents or [0, SEQ])
        assert x.grad is not None
        return max(
            relative_error(handler.combine(out.detach(), 1), want),
            relative_error(handler.combine(x.grad, 1), want_grad),
        )

    with nullcontext() if remembered else mock.patch.object(checkpoint_seam, "batch_state", lambda _, state: state):
        with handler.documents(FIRST):
            found["inside"] = error(*run(), FIRST)
            late = run()
        for name, other in (("ended", None), ("another batch", SECOND), ("other shape", [0, 1, 2, 3, 4, 24])):
            with handler.documents(other) if other else nullcontext():
                found[name] = error(*late, FIRST)
            with handler.documents(FIRST):
                late = run()
        plain = run()
        with handler.documents(FIRST):
            found["documents only later"] = error(*plain, [0, SEQ])
        found["explicit"] = error(*run(documents=SECOND), SECOND)
        x = handler.dispatch(whole, 1).requires_grad_()
        found["blocks inside the checkpoint"] = error(x, checkpoint(twice, block, handler, x, use_reentrant=False), [])
    return found


def twice(block: nn.Module, handler: ContextParallelHandler, x: Tensor) -> Tensor:
    """Two calls with other documents; the second is what counts."""
    with handler.documents(SECOND):
        ignored = block(x.detach() * 2)
    with handler.documents([0, SEQ]):
        return block(x) + 0 * ignored


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_recompute_sees_the_documents_of_its_forward(ranks: Any, style: Case) -> None:
    for reentrant in (False, True):
        for found in ranks(4, recompute, style, True, reentrant):
            for name, value in found.items():
                assert isinstance(value, float) and value <= FP64, (name, value)


@pytest.mark.parametrize("style", STYLES[1:3], ids=str)
def test_a_recompute_that_does_not_know_its_forward_raises(ranks: Any, style: Case) -> None:
    fine = ("inside", "explicit", "blocks inside the checkpoint")
    for found in ranks(4, recompute, style, False):
        for name, value in found.items():
            if name in fine:
                assert value <= FP64, (name, value)
            else:
                assert "recomputed this attention with other packed documents" in value, (name, value)


@on_ranks
def compiled(style: Case) -> float:
    """New documents do not recompile, and are those used."""
    torch._dynamo.reset()
    module, handler = styled(Attending(), style)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v, _ = inputs(2, 4, 4, SEQ, 8, 8, torch.float64)
    worst = 0.0
    for step, documents in enumerate((FIRST, SECOND, [0, 1, 2, SEQ])):
        local = [handler.dispatch(x, 2).requires_grad_() for x in (q, k, v)]
        with torch._dynamo.config.patch(error_on_recompile=step > 0), handler.documents(documents):
            out = fast(*local)
            grads = torch.autograd.grad(out.square().sum(), local)
        wide = [x.clone().requires_grad_() for x in (q, k, v)]
        want = plain_attention(wide[0] * 1.5, *wide[1:], visible=visible_pairs(SEQ, True, None, [documents]))
        want_grads = torch.autograd.grad(want.square().sum(), wide)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            worst = max(worst, relative_error(handler.combine(a.detach(), 2), b))
    return worst


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_new_documents_do_not_recompile(ranks: Any, style: Case) -> None:
    assert max(ranks(4, compiled, style, timeout=300)) <= FP64
