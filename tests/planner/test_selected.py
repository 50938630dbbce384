"""Models whose queries select keys: work, bytes and memory by hand, by counted traffic and by counted storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hyper_cp import plan
from hyper_cp.memory import MemoryCounter
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import SAVE_LIST, latent_attention, select_keys
from hyper_cp.ops.kernels import indexer, selected
from hyper_cp.planner import memory as planned
from hyper_cp.planner.cluster import PROFILES
from hyper_cp.planner.memory import layer_saved, layer_work, saved_between, selection_work, selections_saved
from hyper_cp.planner.model import ModelShape, model_shape
from hyper_cp.planner.strategies import Cost, Estimator, Strategy, Workload
from hyper_cp.planner.timeline import Kernels
from hyper_cp.planner.traffic import Ranks
from hyper_cp.planner.work import StepWork
from hyper_cp.schedule.documents import PackedDocuments
from tests.harness.host_seconds import host_seconds
from tests.harness.ranks import on_ranks

V32 = {
    **{"num_hidden_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168},
    **{"intermediate_size": 18432, "vocab_size": 129280, "head_dim": 64, "q_lora_rank": 1536},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
}
"""A layer of DeepSeek V3.2 with a dense MLP."""
S, SHARE = 16384, 2048
"""A sequence on eight ranks."""


def cost(shape: ModelShape, mode: Strategy, element: int = 2, length: int = S, causal: bool = True) -> Cost:
    documents = PackedDocuments([[0, length]])
    workload = Workload(shape, PROFILES["h100"], 8, documents, causal, 1, element, 16.0, 8, 1e12)
    return Estimator(workload).cost(mode)


# --------------------------------------------------------------------------- sizes

FAMILIES = {  # topk, heads and width of the indexer, layers that run one, of how many; R + Dr, weights of attention
    "deepseek_v32": (2048, 64, 128, 61, 61, 576, 187_105_280),
    "glm_moe_dsa": (2048, 32, 128, 78, 78, 576, 165_019_648),
    "hy_v4": (2048, 16, 128, 10, 34, 576, 48_939_008),
    "axk2": (2048, 16, 128, 48, 48, 160, 7_012_352),
    "dots3_note": (2048, 64, 128, 13, 46, 576, 134_021_120),
    "mistral_large4": (2048, 32, 128, 72, 72, 576, 110_493_696),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_sizes_of_configurations(kind: str) -> None:
    found = model_shape(pytest.importorskip("transformers").AutoConfig.for_model(kind))
    sizes = found.topk, found.indexer_heads, found.indexer_dim, found.indexers, found.layers, found.latent
    assert (*sizes, found.attention_weights) == FAMILIES[kind]


def test_layers_that_share_a_selection_run_no_indexer() -> None:
    def indexers(**more: Any) -> int:
        return model_shape(V32 | {"num_hidden_layers": 6} | more).indexers

    assert indexers() == 6
    assert indexers(indexer_types=["full", "shared", "full", "shared", "shared", "full"]) == 3
    assert indexers(index_topk_pattern="FSSFSS") == 2
    assert indexers(index_topk_freq=4) == 3  # layers 0, 1 and 5
    assert indexers(layer_types=["indexed_attention"] * 2 + ["sliding_attention"] * 4) == 2


@pytest.mark.parametrize("more", [{"index_kpool": 16}, {"layer_types": ["linear_attention", "indexed_attention"]}])
def test_other_kinds_of_selections_are_sparse_layers(more: dict[str, Any]) -> None:
    found = model_shape(V32 | {"num_hidden_layers": 2} | more)
    assert (found.topk, found.indexers, found.absorbed) == (0, 0, False)
    assert found.sparse == (((0, 1), (V32["index_topk"], 1)) if "layer_types" in more else ())


def test_models_of_recurrent_layers_have_a_plan() -> None:
    types = ["linear_attention"] * 2
    model = {"layers": 2, "heads": 4, "width": 64, "vocabulary": 100, "layer_types": types}
    best = plan(model, 1024, gpus=2, memory_gb=80).best
    assert best is not None and best.balance == 1.0


M3 = {"index_topk_blocks": 4, "index_block_size": 32, "index_n_heads": 2, "index_head_dim": 16}
V4 = {"index_topk": 24, "index_n_heads": 2, "index_head_dim": 16, "sliding_window": 32}
GLM = {"index_topk": 112, "index_kpool": 17, "index_n_heads": 2, "index_head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "sizes", "seen", "scores"),
    [
        ("minimax_m3_sparse", M3, [(128, 1)], 1.0),
        ("compressed_sparse_attention", V4, [(32, 1), (24 * 4, 1 / 4)], 1 / 4),
        ("heavily_compressed_attention", V4, [(32, 1), (1024, 1 / 128)], 0.0),
        ("indexed_attention", GLM, [(128, 1)], 1 / 17),
        ("sliding_attention", {"sliding_window": 128}, [(128, 1)], 0.0),
    ],
)
def test_sparse_layers_by_hand(kind: str, sizes: dict[str, int], seen: list[tuple[int, float]], scores: float) -> None:
    """One full layer, two whose queries see few keys, and a recurrent one, on one rank and on two. ``seen``: the most
    keys that a query sees, and how much of a pair each is: an entry is one of 4 or 128 keys."""
    length, types = 1024, ["full_attention", kind, "linear_attention", kind]
    model = {"layers": 4, "heads": 4, "width": 64, "ffn": 96, "vocabulary": 100}
    for gpus in (1, 2):
        made = [
            plan(config, length, gpus=gpus, cp_size=gpus, layout="head_tail", checkpointing="none", memory_gb=80).best
            for config in (model, model | sizes | {"layer_types": types})
        ]
        dense, sparse = (x.flops for x in made if x is not None)
        pairs, few = length * (length + 1) / 2, sum((n * length - n * (n - 1) / 2) * part for n, part in seen)
        saved = 4 * 64 * 3.5 * (3 * pairs - 2 * few) - 2 * scores * 2 * 2 * 16 * pairs
        assert dense - sparse == pytest.approx(saved / gpus, rel=1e-9 if gpus == 1 else 0.02)


@pytest.mark.parametrize("kind", ["minimax_m3_sparse", "compressed_sparse_attention"])
def test_sparse_layers_need_their_sizes(kind: str) -> None:
    with pytest.raises(TypeError, match=f"layers of type {kind}, and no index_topk"):
        model_shape({"layers": 2, "heads": 4, "width": 64, "vocabulary": 100, "layer_types": ["full_attention", kind]})


BAD: dict[str, dict[str, Any]] = {
    "topk=0 must be a positive int": {"indexer_heads": 4, "indexer_dim": 8},
    "indexer_dim=0 must be a positive int": {"topk": 4, "indexer_heads": 4},
    "topk=-1 must be a positive int": {"topk": -1},
    "indexers=3 is more than layers=2": {"topk": 4, "indexer_heads": 4, "indexer_dim": 8, "indexers": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_sizes_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(2, 4, 32, 100, **BAD[message])


# --------------------------------------------------------------------------- work

PAIR = 128 * (2 * 576 + 2 * 512)
"""FLOPs of a query and a latent that it has selected: 128 products of 576 numbers, and 128 sums of 512."""
SCORE = 2 * 64 * 128


def test_the_work_of_a_step_by_hand() -> None:
    """Eight ranks in head_tail: two chunks of 1,024. All see as many keys as each other, and all but two select 2,048
    for every query."""
    found = plan(
        V32, S, gpus=8, cp_size=8, ulysses_degree=1, kv_exchange="ring", layout="head_tail", chunked_loss=False
    )
    pairs = {"indexer": S * (S + 1) // 2 // 8, "fullest": SHARE * 2048, "all": 2048 * 2049 // 2 + (S - 2048) * 2048}
    for e in found.strategies:
        passes = {"none": (3, 3.5), "attention": (4, 3.5), "layers": (4, 4.5)}[e.strategy.checkpointing]
        linear = 2 * SHARE * (passes[0] * (187_105_280 + 3 * 7168 * 18432) + 3 * 7168 * 129280)
        attention = PAIR * passes[1] * pairs["fullest"] + SCORE * pairs["indexer"]
        assert e.flops == pytest.approx(linear + attention, rel=1e-9)
        mean = PAIR * passes[1] * pairs["all"] / 8 + SCORE * pairs["indexer"]
        assert e.balance == pytest.approx(attention / mean, rel=1e-9)


@pytest.mark.parametrize("degree,exchange", [(1, "all_gather"), (8, None)])
def test_contiguous_indexers_are_unbalanced_in_every_mode(degree: int, exchange: str | None) -> None:
    found = cost(model_shape(V32), Strategy(8, degree, exchange, "contiguous", "none", False))
    assert found.selection is not None
    owed = [sum(range(r * SHARE + 1, (r + 1) * SHARE + 1)) for r in range(8)]
    assert found.selection.flops.tolist() == [SCORE * pairs for pairs in owed]
    first, others = (2048 * 2049 // 2, 2048 * 2048) if degree == 1 else [(2048 * 2049 // 2 + 7 * 2048**2) / 8] * 2
    assert found.flops.tolist() == pytest.approx([PAIR * first] + [PAIR * others] * 7)


def test_layouts_are_compared_for_ulysses_too() -> None:
    found = plan(V32, S, gpus=8, cp_size=8, ulysses_degree=8)
    best = {e.strategy.layout: e for e in reversed(found.strategies)}
    assert set(best) == {"contiguous", "head_tail"} and best["head_tail"].balance == pytest.approx(1)
    assert best["head_tail"].step_seconds < best["contiguous"].step_seconds
    dense = plan({k: v for k, v in V32.items() if "index" not in k}, S, gpus=8, cp_size=8, ulysses_degree=8)
    assert {e.strategy.layout for e in dense.strategies} == {"contiguous"}


def test_all_keys_are_selected_where_few_are_seen() -> None:
    """Full attention within documents of 3,000 and 5,000 keys, 4,000 of which are selected."""
    shape, documents = replace(model_shape(V32), topk=4000), PackedDocuments([[0, 3000, 8000]])
    workload = Workload(shape, PROFILES["h100"], 2, documents, False, 1, 2, 16.0, 2, 1e12)
    found = Estimator(workload).cost(Strategy(2, 1, "ring", "contiguous", "none", False))
    assert found.flops.tolist() == [PAIR * (3000 * 3000 + 1000 * 4000), PAIR * 4000 * 4000]


def test_indexers_on_many_devices_take_seconds() -> None:
    plan(V32, 2**14, gpus=2)  # imports and caches
    model = V32 | {"num_hidden_layers": 61}
    made = []
    assert host_seconds(lambda: made.append(plan(model, 10 * 2**20, gpus=4096))) < 3.0
    found = made[0]
    assert {e.strategy.layout for e in found.strategies if e.strategy.ulysses_degree == 1} == {
        "contiguous",
        "head_tail",
    }
    assert all(e.exposed_seconds >= 0 for e in found.strategies)


@pytest.mark.parametrize("ranks", [4, 64])
def test_steps_share_the_work_of_their_rank(ranks: int) -> None:
    shape = model_shape(V32)
    found = cost(shape, Strategy(ranks, 1, "ring", "head_tail", "none", False), length=2**20)
    mine = found.ring.ranks[found.ring.rank]
    for steps in (mine.forward, mine.backward):
        unlisted = mine.arriving - len(steps) + 2
        owed = sum(step.pairs for step in steps) + unlisted * steps[-2].pairs
        assert owed == pytest.approx(2**20 // ranks * 2048)
    assert found.attention.kernels_forward * PROFILES["h100"].flops("forward_share") > PAIR * 2**20 // ranks * 2048


def test_tiles_are_whole() -> None:
    """Four ranks with four documents each: one dense tile with parts, or one tile for each document."""
    documents = PackedDocuments([[*range(0, S + 1, 1024)]])
    dense = replace(model_shape(V32), topk=0, indexers=0, indexer_heads=0, indexer_dim=0)
    tiles = []
    for shape in (dense, model_shape(V32)):
        workload = Workload(shape, PROFILES["h100"], 4, documents, True, 1, 2, 16.0, 4, 1e12)
        found = Estimator(workload).cost(Strategy(4, 1, "ring", "contiguous", "none", False))
        tiles.append(found.ring.ranks[2].forward[0].tiles)
    assert tiles == [1, 4]


def test_seconds_of_a_step_by_hand() -> None:
    """Latents are not expanded. Outputs that are merged have 512 numbers of a head, and gradients of queries 576."""
    shape, h100, step = model_shape(V32), PROFILES["h100"], StepWork(1e9, 2048, 1, 4096)
    kernels, alone = Kernels(shape, h100, 64, 64, 1, 2048), Kernels.of_indexer(shape, h100, 1, 2048)
    forward = 1e9 * PAIR / 2 / (0.65 * 989e12) + 8e-6 + 18 * 2048 * 64 * 512 / (0.8 * 3.35e12)
    assert kernels.forward(step) == pytest.approx(forward)
    backward = 2.5e9 * PAIR / 2 / (0.59 * 989e12) + 16e-6 + 10 * (2048 * 64 * 576 + 4096 * 576) / (0.8 * 3.35e12)
    assert kernels.backward(step) == pytest.approx(backward)
    assert alone.forward(step) == pytest.approx(1e9 * SCORE / (0.65 * 989e12) + 8e-6)


def test_heads_that_select_have_their_own_widths() -> None:
    shape = ModelShape(1, 32, 4096, 1000, kv_heads=8, topk=512, indexer_heads=4, indexer_dim=64)
    found = cost(shape, Strategy(8, 1, "all_gather", "head_tail", "none", False))
    assert found.flops.max() == 4 * 32 * 128 * SHARE * 512
    assert found.move.sent.inside == 7 * SHARE * 2 * 8 * 128 * (2 + 2 + 4)


# --------------------------------------------------------------------------- bytes


def test_bytes_by_hand() -> None:
    """bf16: latents forward, backward, and their gradients in fp32; narrow keys of an indexer forward, in every second
    layer; with Ulysses selections of 8 KB."""
    latents, keys = SHARE * 576, 7 * SHARE * 128 * 2
    want = {
        "ring": 2 * 7 * latents * (2 + 2 + 4) + keys,
        "all_gather": 2 * 7 * latents * (2 + 2 + 4) + keys,
        None: 2 * (2 * 7 * (SHARE * 128 * 320 + 8 * latents) * 2 // 8 + 7 * SHARE * 8192) + keys,
    }
    shape = replace(model_shape(V32 | {"num_hidden_layers": 2}), indexers=1)
    found = plan(shape, S, gpus=8, cp_size=8, checkpointing="none", chunked_loss=False, layout="head_tail")
    seen = set()
    for e in found.strategies:
        if e.strategy.kv_exchange in want and e.strategy.ulysses_degree in (1, 8):
            assert e.bytes_inside == pytest.approx(want[e.strategy.kv_exchange]), e.strategy
            seen.add(e.strategy.kv_exchange)
    assert seen == set(want)


HEADS, RANK, ROTARY, PLAIN, VALUE, TOPK = 8, 64, 16, 16, 32, 32
SIZES: dict[str, Any] = {
    **{"layers": 1, "heads": HEADS, "width": 1, "vocabulary": 1, "ffn": 1, "head_dim": (PLAIN + ROTARY + VALUE) // 2},
    **{"latent": RANK + ROTARY, "rotary": ROTARY, "topk": TOPK, "indexer_heads": 2, "indexer_dim": 24},
}
TINY = ModelShape(**SIZES)
"""A layer that is nothing but attention."""
TOKENS = 512
MODES = [(1, "ring"), (1, "all_gather"), (2, None)]


class Layer:
    """An indexer and attention over what it has selected, from hidden states of one number."""

    def __init__(self, mesh: DeviceMesh, degree: int, exchange: str | None, dtype: torch.dtype) -> None:
        self.options: dict[str, Any] = {"mesh": mesh, "kv_exchange": exchange or "all_gather", "layout": "head_tail"}
        self.degree = degree
        outputs = 2 * 24, 24, HEADS * (PLAIN + ROTARY), RANK, ROTARY
        self.weights = [torch.ones(n, 1, dtype=dtype, requires_grad=True) for n in outputs]
        self.up = torch.ones(HEADS * (PLAIN + VALUE), RANK, dtype=dtype, requires_grad=True)
        for x in (*self.weights, self.up):
            x.grad = torch.zeros_like(x)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = [F.linear(x, weight).unflatten(2, (-1, 24)).transpose(1, 2) for weight in self.weights[:2]]
        chosen = select_keys(*made, topk=TOPK, is_causal=True, **self.options)
        q, latent, rope = (F.linear(x, weight) for weight in self.weights[2:])
        heads = q.unflatten(2, (HEADS, -1)).transpose(1, 2)
        options = self.options | {"ulysses_degree": self.degree, "selected": chosen, "is_causal": True}
        out = latent_attention(heads, latent, rope.unsqueeze(1), self.up, **options)
        return torch.sin(out)  # type: ignore[arg-type]  # keeps it, as a projection would


@on_ranks
def traffic() -> list[int]:
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    for degree, exchange in MODES:
        layer = Layer(mesh, degree, exchange, torch.float32)
        with record_traffic() as log:
            layer(torch.randn(1, TOKENS, 1)).sum().backward()
        found.append(sum(n for name, n in log.entries if name != "agreement"))
    return found


def test_bytes_are_those_that_ranks_send(ranks: Any) -> None:
    want = []
    for degree, exchange in MODES:
        found = cost(TINY, Strategy(2, degree, exchange, "head_tail", "none", False), 4, 2 * TOKENS)
        assert found.selection is not None
        want.append(found.move.sent.inside + found.selection.move.sent.inside)
    for sent in ranks(2, traffic):
        assert sent == want


# --------------------------------------------------------------------------- memory

SELECTIVE = partial(create_selective_checkpoint_contexts, SAVE_LIST)
KINDS: dict[str, Callable[..., Tensor]] = {
    "none": lambda layer, x: layer(x),
    "attention": partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "layers": partial(checkpoint, use_reentrant=False),
}


@on_ranks
def of_a_layer() -> list[tuple[str, float, float]]:
    """Predicted and counted bytes of one layer on two ranks: saved, and the peak of backward."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    small = [(selected, "GATHERED_AT_ONCE"), (planned, "GATHERED_AT_ONCE")]
    small += [(indexer, "SCORES_AT_ONCE"), (planned, "SCORES_AT_ONCE")]
    chosen = [(1, "ring", kind) for kind in KINDS] + [(1, "all_gather", "none")]
    chosen += [(2, None, "attention"), (2, None, "layers")]
    for i, (degree, exchange, kind) in enumerate(chosen):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        layer, element = Layer(mesh, degree, exchange, dtype), dtype.itemsize
        ranks = Ranks(2 // degree, degree, 8)
        with MemoryCounter() as counter, patch.object(*small[0], 1 << 18), patch.object(*small[2], 1 << 16):
            x = torch.randn(1, TOKENS, 1, dtype=dtype).requires_grad_()
            out = KINDS[kind](layer, x)
            loss, selecting = out.sum(), counter.peak["cpu"]
            del out
            saved = counter.alive["cpu"]
            loss.backward()
        mode = Strategy(2, degree, exchange, "head_tail", kind, False)
        work = cost(TINY, mode, element, 2 * TOKENS).ring
        kept = saved_between(TINY, ranks, TOKENS, element, kind) + selections_saved(TINY, ranks, TOKENS, kind)
        whole = layer_saved(TINY, ranks, TOKENS, element) + selections_saved(TINY, ranks, TOKENS, "none")
        with patch.object(*small[1], 1 << 18), patch.object(*small[3], 1 << 16):
            given = ranks, exchange or "all_gather", 1, 2 * TOKENS, work.ranks[work.rank], element
            peak = max(whole + layer_work(TINY, *given), kept + selection_work(TINY, TOKENS))
        name = f"{degree}, {exchange}, {dtype}, {kind}"
        found.append((f"{name}: saved", kept, saved))
        found.append((f"{name}: peak", peak, max(counter.peak["cpu"], selecting)))
    return found


@pytest.mark.slow
def test_a_layer_on_two_ranks(ranks: Any) -> None:
    found = ranks(2, of_a_layer)[0]
    wrong = {name: (predicted, counted) for name, predicted, counted in found if abs(predicted / counted - 1) > 0.1}
    assert not wrong, wrong


def test_selections_by_hand() -> None:
    """8 KB of a token in each layer with an indexer; with Ulysses in every layer, for each rank."""
    shape, tokens = replace(model_shape(V32 | {"num_hidden_layers": 12}), indexers=3), 1000
    alone, four = Ranks(8, 1, 8), Ranks(2, 4, 8)
    for kind in KINDS:
        assert selections_saved(shape, alone, tokens, kind) == 3 * 8192 * tokens
    found = [selections_saved(shape, four, tokens, kind) for kind in KINDS]
    assert found == [12 * 4 * 8192 * tokens, (12 * 4 + 3) * 8192 * tokens, 3 * 8192 * tokens]
    assert np.isclose(selection_work(shape, 16384), 12 * 16384 * 2048 + 24 * 4 * 2**20)
