"""Entries of DeepSeek V4 in plans: weights, bytes and memory are those of transformers' model on split sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.memory import MemoryCounter
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.planner.cluster import PROFILES
from hyper_cp.planner.memory import memory
from hyper_cp.planner.model import Pooling, model_shape
from hyper_cp.planner.strategies import Estimator, Strategy, Workload
from hyper_cp.planner.traffic import Ranks, pooling_transfers
from hyper_cp.planner.work import ring_work
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.tiles import CAUSAL
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import prepare_batch, prepare_model
from tests.harness.ranks import on_ranks

hf = pytest.importorskip("transformers")

LAYERS = ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "num_experts_per_tok": 2, "n_routed_experts": 4},
    **{"layer_types": LAYERS, "hc_mult": 2, "sliding_window": 6, "o_groups": 2, "o_lora_rank": 8, "pad_token_id": 0},
    **{"index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "partial_rotary_factor": 0.5},
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
}
LENGTH, ROWS, WORLD = 72, 2, 3
MODES = [("ring", "head_tail"), ("all_gather", "contiguous"), ("needed", "contiguous"), ("needed", "head_tail")]


def config() -> Any:
    return hf.AutoConfig.for_model("deepseek_v4", **SIZES)


def test_the_sizes_of_configurations() -> None:
    found = model_shape(hf.AutoConfig.for_model("deepseek_v4"))
    csa, indexer = Pooling(20, 4, 8, 4 * 512, 512, 128, 512), Pooling(20, 4, 8, 4 * 128, 128)
    assert found.poolings == (csa, indexer, Pooling(23, 128, 128, 2 * 512, 512, 128))
    assert (found.dense, found.windows, found.sparse) == (0, (), ())
    glm = model_shape(hf.AutoConfig.for_model("glm5_next"))
    assert [(x.every, x.row, x.width, x.window) for x in glm.poolings] == [(16, 256, 128, 0)]


def test_weights_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = hf.AutoModel.from_config(config())
    weights = [p.numel() for name, p in model.named_parameters() if "self_attn" in name and p.ndim == 2]
    biases = [p.numel() for name, p in model.named_parameters() if "position_bias" in name]
    assert model_shape(config()).attention_weights == round((sum(weights) - sum(biases)) / len(LAYERS))


@on_ranks
def traffic() -> list[int]:
    found = []
    for exchange, layout in MODES:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config())
        style = ContextParallel(ulysses_degree=1, kv_exchange=exchange, layout=layout)
        prepare_model(model, cp_mesh(), style=style)
        ids = torch.randint(1, 61, (ROWS, LENGTH))
        local = prepare_batch(ContextParallelHandler(cp_mesh(), style), {"input_ids": ids, "labels": ids})
        inputs = {name: x for name, x in local.items() if "labels" not in name and "num_items" not in name}
        with record_traffic() as log:
            model.model(**inputs)[0].sum().backward()
        found.append(sum(n for name, n in log.entries if name != "agreement"))
    return found


def test_bytes_are_those_that_ranks_send(ranks: Any) -> None:
    """fp32, in which gradients travel, too. (With "needed" a plan counts what a middle rank sends and receives.)"""
    shape, documents = model_shape(config()), PackedDocuments([[0, LENGTH]])
    sent = [max(of_mode) for of_mode in zip(*ranks(WORLD, traffic), strict=True)]
    for (exchange, layout), counted in zip(MODES, sent, strict=True):
        workload = Workload(shape, PROFILES["h100"], WORLD, documents, True, ROWS, 4, 16.0, WORLD, 1e12)
        found = Estimator(workload).cost(Strategy(WORLD, 1, exchange, layout, "none", False))
        assert counted == sum(n * c.move.sent.inside for n, _, c in found.calls(shape, 0)), (exchange, layout)


def test_bytes_by_hand() -> None:
    """bf16 on four ranks, of which each holds 4,096 of 16,384 tokens: two ranges in head_tail, one in contiguous."""
    csa, indexer = Pooling(20, 4, 8, 4 * 512, 512, 128, 512), Pooling(20, 4, 8, 4 * 128, 128)
    for pooling, bytes_of in ((csa, 2 + 4), (indexer, 2)):  # gradients are summed in fp32
        for layout, ranges in (("contiguous", 1), ("head_tail", 2)):
            found = pooling_transfers(pooling, PROFILES["h100"], Ranks(4, 1, 8), layout, 1, 16384, 2)
            numbers = ranges * 7 * pooling.row + 1024 * pooling.width
            assert found.sent.inside == pytest.approx(3 * numbers * bytes_of)


# --------------------------------------------------------------------------- memory

WINDOWS, TOKENS = "sliding_attention", 2048
WIDER = SIZES | {"hidden_size": 64, "head_dim": 64, "index_head_dim": 32, "index_topk": 32, "sliding_window": 16}
WIDER |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}}


def of_layers(kinds: list[str]) -> Any:
    return hf.AutoConfig.for_model("deepseek_v4", **WIDER | {"layer_types": kinds, "num_hidden_layers": len(kinds)})


@on_ranks
def kept(dtype: torch.dtype) -> list[int]:
    """Bytes that two layers keep for backward: two of windows, then with one of each kind of entries."""
    found = []
    for second in (WINDOWS, "compressed_sparse_attention", "heavily_compressed_attention"):
        torch.manual_seed(0)
        model = hf.AutoModel.from_config(of_layers([WINDOWS, second])).to(dtype)
        style = ContextParallel(ulysses_degree=1, kv_exchange="all_gather", layout="head_tail")
        prepare_model(model, cp_mesh(), style=style)
        local = prepare_batch(ContextParallelHandler(cp_mesh(), style), {"input_ids": torch.ones(1, TOKENS).long()})
        with MemoryCounter() as counter:
            out = model(**local)[0]
            found.append(counter.alive["cpu"])
        del out
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_entries_keep_for_backward(ranks: Any, dtype: torch.dtype) -> None:
    windows, *others = ranks(2, kept, dtype)[0]
    for kind, counted in zip(LAYERS[1::-1], others, strict=True):
        shape, documents = model_shape(of_layers([WINDOWS, kind])), PackedDocuments([[0, TOKENS]])
        ranks_of, work = Ranks(2, 1, 8), ring_work("head_tail", 2, "all_gather", documents, CAUSAL).ranks[0]
        how: dict[str, Any] = {"checkpointing": "none", "chunked_loss": True, "element": dtype.itemsize, "states": 0.0}
        found, without = (
            memory(x, ranks_of, "all_gather", 1, TOKENS, work, **how) for x in (shape, replace(shape, poolings=()))
        )
        assert found.saved - without.saved == pytest.approx(counted - windows, rel=0.1), kind
