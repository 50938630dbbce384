"""``cost_model``: seconds of samples beside the planner's step on one rank, and visible pairs counted one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_cp import CostModel, DynamicContextParallel, cost_model, plan
from hyper_cp.planner.cluster import PROFILES
from hyper_cp.planner.model import configuration, counted_shape, model_shape

LLAMA: dict[str, Any] = {"layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "ffn": 14336, "vocabulary": 128256}


@pytest.mark.parametrize("length", [8192, 65536])
def test_a_sample_costs_what_a_step_of_one_rank_costs(length: int) -> None:
    options: dict[str, Any] = {"checkpointing": "none", "chunked_loss": False, "memory_gb": 1e6}
    want = plan(LLAMA, length, gpus=1, **options).best
    assert want is not None
    cost = cost_model(LLAMA, 8192, 8)
    assert cost.shared(length, [length], 1) == pytest.approx(want.compute_seconds, rel=0.02)  # blocks at the diagonal


@pytest.mark.parametrize("length", [1, 5, 16, 17, 60])
def test_windows_are_counted_by_visible_pairs(length: int) -> None:
    cost = CostModel(1.0, 0.0, windows=((16, 2.0),))
    seen = sum(min(q + 1, 16) for q in range(length))
    assert cost.attention(length) == 2.0 * (seen - min(length, 16) / 2)  # pairs of a token with itself count half
    assert CostModel(1.0, 3.0).attention(length) == 1.5 * length**2


def test_layers_of_each_kind_have_their_costs() -> None:
    full = cost_model(LLAMA, 8192, 2)
    types = ["sliding_attention"] * 24 + ["full_attention"] * 4 + ["linear_attention"] * 4
    mixed = cost_model(LLAMA | {"layer_types": types, "sliding_window": 1024}, 8192, 2)
    assert mixed.linear == full.linear
    assert mixed.quadratic == pytest.approx(full.quadratic / 8)
    assert mixed.windows == ((1024, pytest.approx(full.quadratic * 3 / 4)),)
    assert cost_model(LLAMA | {"sliding_window": 512}, 8192, 2).windows[0][0] == 512
    unused = LLAMA | {"sliding_window": 512, "use_sliding_window": False}
    assert cost_model(unused, 8192, 2) == full


def test_no_layer_with_attention_is_free() -> None:
    """Falcon H1 and Zaya have attention beside a recurrence in each layer, Inkling in some of them a window."""
    full, more = cost_model(LLAMA, 8192, 2), {"sliding_window": 512}
    for kind in ("hybrid", "attention", "noncausal_full_attention", "chunked_attention"):
        assert cost_model(LLAMA | {"layer_types": [kind] * 32}, 8192, 2).quadratic == full.quadratic, kind
    for kind in ("hybrid_sliding", "reference_sliding_attention"):
        types = {"layer_types": [kind] * 16 + ["hybrid"] * 16}
        mixed = cost_model(LLAMA | more | types, 8192, 2)
        assert mixed.windows == ((512, pytest.approx(full.quadratic / 2)),), kind
        assert mixed.quadratic == pytest.approx(full.quadratic / 2)
        assert cost_model(LLAMA | types, 8192, 2) == full  # no window
    with pytest.raises(TypeError, match=r"layers of types \['window_attention'\], and nothing says how many keys"):
        cost_model(LLAMA | {"layer_types": ["window_attention"] * 16 + ["mamba"] * 16}, 8192, 2)


HUB = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "vocab_size": 256000, "head_dim": 128}


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("kind", "more", "every"),
    [
        ("gemma3_text", {"sliding_window_pattern": 6}, 6),
        ("gemma2", {}, 2),
        ("cohere2", {"sliding_window_pattern": 4}, 4),
    ],
)
def test_layers_without_a_window_of_a_config_json(
    kind: str, more: dict[str, int], every: int, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the hub name no types of layers, and leave out what is the default of a model."""
    hub = HUB | {"model_type": kind, "num_hidden_layers": 12, "intermediate_size": 14336, "sliding_window": 1024} | more
    if installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    of_images = [{"model_type": "gemma3", "text_config": hub}] if kind == "gemma3_text" else []
    for config in (hub, *of_images):
        shape = model_shape(configuration(config))
        assert (shape.dense, shape.windows) == (12 // every, ((1024, 12 - 12 // every),))
        assert shape.tied == installed  # the default of these models
        assert cost_model(config, 8192, 2).windows[0][0] == 1024


def test_sizes_of_configurations_by_other_names() -> None:
    experts = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    shape = model_shape(LLAMA | experts | {"shared_expert_intermediate_size": 5632})  # Qwen1.5-MoE
    assert (shape.ffn, shape.stored_ffn) == (4 * 1408 + 5632, 60 * 1408 + 5632)
    assert model_shape(LLAMA | {"multi_query": True}).kv_heads == 1  # Falcon 7B, whose num_kv_heads are its heads
    assert model_shape(LLAMA | {"multi_query": True, "new_decoder_architecture": True}).kv_heads == 8
    with pytest.raises(TypeError, match="is an encoder-decoder"):
        model_shape(LLAMA | {"is_encoder_decoder": True})


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 199}
MODELS: dict[str, dict[str, Any]] = {  # sizes as files of the hub name them, and experts of 96: all, active
    "gpt2": {"vocab_size": 199, "n_embd": 64, "n_layer": 4, "n_head": 4},  # an MLP of two matrices
    "gemma": SMALL | {"intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 16},  # tied by default
    "ernie4_5_moe": SMALL | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96, "experts": (3, 8, 2)},
    "hunyuan_v1_moe": SMALL | {"num_experts": 8, "moe_topk": [2] * 4, "intermediate_size": 96, "experts": (4, 8, 2)},
    "aria_text": SMALL | {"moe_num_experts": 8, "moe_topk": 2, "intermediate_size": 96, "experts": (4, 8, 2)},
    "granitemoe": SMALL | {"num_local_experts": 8, "intermediate_size": 96, "experts": (4, 8, 2)},
    "gemma3n_text": SMALL | {"intermediate_size": [96] * 4, "num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_text": SMALL | {"intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0},
}


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_of_the_model(kind: str) -> None:
    """All that the model has, and without tables of embeddings, vectors, and three matrices of each idle expert."""
    hf = pytest.importorskip("transformers")
    few = {"head_dim": 16, "pad_token_id": 0, "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8}
    few |= {"activation_sparsity_pattern": [0.0] * 4, "layer_types": ["full_attention"] * 4}
    sizes = {"model_type": kind, "num_key_value_heads": 2} | few | MODELS[kind]
    layers, experts, active = sizes.pop("experts", (0, 1, 1))
    shape = counted_shape(sizes)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**sizes))
    assert shape.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), abs=4)
    tables = "embed_tokens", "lm_head", ".wte", ".wpe"
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1 and not any(x in n for x in tables)}
    idle = layers * (experts - active) * 3 * 64 * 96
    assert shape.layers * shape.layer_weights == pytest.approx(sum(matrices.values()) - idle, abs=4)
    assert counted_shape(configuration(sizes)) == shape


def test_a_head_is_tied_where_the_whole_model_says_so() -> None:
    text = SMALL | {"tie_word_embeddings": True}
    assert model_shape({"text_config": text}).tied
    assert not model_shape({"text_config": text, "tie_word_embeddings": False}).tied
    assert model_shape({"text_config": SMALL | {"tie_word_embeddings": False}, "tie_word_embeddings": True}).tied


def test_sizes_that_differ_between_layers() -> None:
    """Those of a layer that sees all keys, or of the first."""
    hf = pytest.importorskip("transformers")
    assert model_shape(hf.Gemma4Config()).head_dim == 512
    llama = hf.LlamaConfig(**SMALL, per_layer_config={0: {"intermediate_size": 32}, 2: {"intermediate_size": 96}})
    assert model_shape(llama).ffn == 32


@pytest.mark.parametrize("kind", ["bamba", "jamba", "kimi_linear", "longcat_flash", "nemotron_h", "recurrent_gemma"])
def test_a_file_has_the_sizes_of_its_configuration(kind: str, tmp_path: Path) -> None:
    """Kinds of layers that files leave out or name otherwise, and numbers that JSON does not have."""
    config = pytest.importorskip("transformers").AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    assert counted_shape(tmp_path) == counted_shape(config)


def test_what_transformers_cannot_make_is_counted_by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LLAMA | {"model_type": "no_such_model"}
    assert counted_shape(sizes) == model_shape(sizes)
    assert counted_shape({"model_type": "gpt2", "n_layer": 2} | LLAMA).weights == 0  # the names are ours
    hf, sizes = pytest.importorskip("transformers"), {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 199}
    config = hf.GPT2Config(**sizes)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert counted_shape(config) == model_shape(config)
    experts = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96, "model_type": "ernie4_5_moe"}
    shape = counted_shape(SMALL | experts)
    assert (shape.ffn, shape.stored_ffn, shape.weights) == (192, 768, 0)


QSA = {"indexer_budget": 2048, "indexer_compress_ratio": 16, "indexer_n_heads": 4, "indexer_head_dim": 128}
KPOOL = {"index_topk": 2048, "index_kpool": 16, "index_n_heads": 4, "index_head_dim": 128}


@pytest.mark.parametrize("sizes", [QSA, KPOOL])
def test_selections_of_pooled_keys_by_hand(sizes: dict[str, int]) -> None:
    """128 pools and a tail of 15 tokens in 8 of 32 layers."""
    full, types = cost_model(LLAMA, 8192, 2), (["linear_attention"] * 3 + ["indexed_attention"]) * 8
    pooled = cost_model(LLAMA | sizes | {"layer_types": types}, 8192, 2)
    assert pooled.windows == ((2048 + 15, pytest.approx(full.quadratic / 4)),)
    assert pooled.quadratic == pytest.approx(8 * 2 * 4 * 128 / 16 / PROFILES["h100"].flops("forward_share"))


def test_a_link_that_cannot_be_hidden_costs() -> None:
    """Short shares on several hosts are done before their keys arrive."""
    assert cost_model(LLAMA, 512, 32).exchange > cost_model(LLAMA, 8192, 8).exchange


def test_windows_keep_long_samples_narrow_and_the_budget() -> None:
    lengths = [4000, 300, 200, 4000, 100, 3000, 50, 900]
    dense, local = CostModel(1.0, 0.02, 2.0), CostModel(1.0, 0.0, 2.0, windows=((64, 0.02),))
    plans = [DynamicContextParallel(8, 4096, cost).plan(lengths) for cost in (dense, local)]
    widest = [max(m.degree for m in plan.micro_batches) for plan in plans]
    assert widest[1] < widest[0]
    assert all(m.length <= 4096 * m.degree for plan in plans for m in plan.micro_batches)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"windows\[0\]\[0\]=0 must be a positive int"):
        CostModel(1.0, 0.0, windows=((0, 1.0),))
    with pytest.raises(ValueError, match=r"windows\[0\]\[1\]=-1.0 is not a finite number of 0 or more"):
        CostModel(1.0, 0.0, windows=((4, -1.0),))
    with pytest.raises(ValueError, match="degree=0 must be a positive int"):
        cost_model(LLAMA, 8192, 0)
