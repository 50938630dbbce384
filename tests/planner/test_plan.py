"""plan(): the report, the choice, what does not fit, and errors for impossible input. Nothing runs on ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_cp import PlanReport, plan
from hyper_cp.ops.config import Mode
from hyper_cp.planner.cluster import PROFILES, Cluster, cluster_of, with_measurements
from hyper_cp.planner.model import ModelShape, model_shape
from hyper_cp.planner.strategies import Estimator, Strategy, Workload
from hyper_cp.planner.timeline import Kernels
from hyper_cp.schedule.documents import PackedDocuments
from tests.harness.host_seconds import host_seconds

LLAMA = {"layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "ffn": 14336, "vocabulary": 128256}


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan(LLAMA, [4096] * 20 + [49152], gpus=8)


def test_every_strategy_is_there_and_the_first_is_the_best(report: PlanReport) -> None:
    best = report.best
    assert best is report.strategies[0] and best is not None and best.fits and report.documents == 21
    fastest = max(e.tokens_per_second for e in report.strategies if e.fits)
    assert best.tokens_per_second >= 0.99 * fastest
    modes = {(e.strategy.ulysses_degree, e.strategy.kv_exchange, e.strategy.layout) for e in report.strategies}
    assert {(1, "ring", "head_tail"), (2, "needed", "per_document"), (4, "all_gather", "contiguous")} <= modes
    assert {e.strategy.cp_size for e in report.strategies} == {1, 2, 4, 8}
    kinds = {(e.strategy.checkpointing, e.strategy.chunked_loss) for e in report.strategies}
    assert len(kinds) == 6
    fits = [e.fits for e in report.strategies]
    assert fits == sorted(fits, reverse=True) and all(e.why for e in report.strategies)


def test_the_style_of_a_strategy_is_one_that_the_library_takes(report: PlanReport) -> None:
    for e in report.strategies:
        style = e.strategy.style()
        Mode(**{name: value for name, value in style.items() if name != "ulysses_degree"})  # type: ignore[arg-type]
        assert style["ulysses_degree"] is None or e.strategy.cp_size % style["ulysses_degree"] == 0  # type: ignore


def test_the_report_makes_the_style(report: PlanReport) -> None:
    assert report.best is not None
    style = report.style(seq_dim=2, head_dim=1)
    found = report.best.strategy.style()
    assert (style.ulysses_degree, style.mode.layout) == (found["ulysses_degree"], found["layout"])
    assert style.mode.kv_exchange == found.get("kv_exchange", "all_gather") and style.seq_dim == 2
    with pytest.raises(ValueError, match=r"no strategy fits, so there is no style\. The smallest peak is"):
        plan(LLAMA, 2**23, gpus=2, cluster="a100").style()


def test_the_report_says_why_the_others_lose(report: PlanReport) -> None:
    text = str(report)
    assert "Use first: cp mesh of" in text and "ContextParallel(" in text
    whys = " ".join(e.why for e in report.strategies)
    assert "does not fit" in whys and "transfers that nothing hides" in whys and "the mean work" in whys
    assert "activations again" in whys


def test_the_simplest_of_the_fastest_is_first_with_lines_to_paste() -> None:
    found = plan(LLAMA, 2**17, gpus=16)
    fastest = max(e.tokens_per_second for e in found.strategies if e.fits)
    near = [e for e in found.strategies if e.fits and fastest / e.tokens_per_second < 1.05]
    hybrids = [1 < e.strategy.ulysses_degree < e.strategy.cp_size for e in near]
    assert found.best is near[0] and not hybrids[0] and any(hybrids) and hybrids == sorted(hybrids)
    assert all("within the model's error" in e.why for e in near[1:])
    text = str(found)
    assert f'init_device_mesh("cuda", ({16 // near[0].strategy.cp_size}, {near[0].strategy.cp_size})' in text
    assert "Assumed: 65% of 989 TFLOP/s" in text and "Left out: the exchange of weights and gradients" in text


def test_contiguous_causal_work_is_as_unbalanced_as_its_schedule() -> None:
    found = plan(LLAMA, 2**17, gpus=8, cp_size=8, ulysses_degree=1, layout="contiguous", kv_exchange="ring")
    assert {round(e.balance, 3) for e in found.strategies} == {1.875}  # 2 - 1/n


def test_bytes_are_those_of_the_communication_page() -> None:
    """One layer, bf16, forward and backward, 8 ranks on one host: docs/measured/communication.md."""
    one = dict(LLAMA, layers=1)
    share = 2**17 // 8 * 8 * 128  # elements of k, and of v
    want = {
        "ring": 7 * 2 * share * (2 + 2 + 4),
        "all_gather": 7 * 2 * share * (2 + 2 + 4),
        None: 2 * 7 * (2**17 // 8 * 128 * (32 + 8 + 8 + 32)) * 2 // 8,
    }
    found = plan(one, 2**17, gpus=8, cp_size=8, checkpointing="none", chunked_loss=False)
    for e in found.strategies:
        s = e.strategy
        if s.layout == ("contiguous" if s.kv_exchange is None else "head_tail") and s.ulysses_degree in (1, 8):
            wanted = want.get(s.kv_exchange)
            assert wanted is None or e.bytes_inside == pytest.approx(wanted), s
            assert e.bytes_between == 0


def test_layers_that_run_again_send_again_what_forward_has_sent() -> None:
    """q, k, v and the output of Ulysses twice ahead and once behind; keys, values in bf16, their gradients in fp32."""
    one = dict(LLAMA, layers=1)
    found = plan(one, 2**17, gpus=8, cp_size=8, chunked_loss=False)
    whole = [(e.strategy, e) for e in found.strategies if e.strategy.ulysses_degree in (1, 8)]
    sent = {(s.kv_exchange, s.layout, s.checkpointing): e for s, e in whole}
    for exchange, layout, factor in ((None, "contiguous", 3 / 2), ("ring", "head_tail", (2 + 2 + 2 + 4) / 8)):
        once, again = (sent[exchange, layout, kind] for kind in ("none", "layers"))
        assert again.bytes_inside == pytest.approx(factor * once.bytes_inside)
        assert again.messages == pytest.approx((3 / 2 if exchange is None else 4 / 3) * once.messages)


def test_what_does_not_fit_is_said_so() -> None:
    found = plan(LLAMA, 2**23, gpus=2, cluster="a100")
    assert found.best is None and str(found).splitlines()[2].startswith("Nothing fits: the smallest peak is")
    assert all(e.why.startswith("does not fit") for e in found.strategies)


def test_long_sequences_on_many_devices_take_under_a_second() -> None:
    plan(LLAMA, 2**14, gpus=2)  # imports and caches
    assert host_seconds(lambda: plan(LLAMA, 10 * 2**20, gpus=4096)) < 1.0
    found = plan(LLAMA, 10 * 2**20, gpus=4096)
    assert found.best is not None and found.best.strategy.cp_size >= 64
    assert {e.strategy.cp_size for e in found.strategies} >= {64, 512, 4096}


def test_thousands_of_documents_on_many_devices() -> None:
    found = plan(LLAMA, [2560] * 4096, gpus=1024, cp_size=1024)
    assert found.best is not None and found.best.balance < 1.01


# --------------------------------------------------------------------------- models


def test_a_model_is_read_from_whatever_describes_it(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    config = sizes | {"intermediate_size": 96, "vocab_size": 100, "model_type": "llama"}
    want = ModelShape(4, 8, 64, 100, kv_heads=2, ffn=96, norm="transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(config) == model_shape(SimpleNamespace(**config)) == want
    assert model_shape(SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(**config)))) == want
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert plan(path, 1024, gpus=2).model == want
    gpt = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50}
    assert model_shape(gpt) == ModelShape(2, 4, 32, 50, kv_heads=4, ffn=128)
    experts = config | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = model_shape(experts)
    assert (shape.ffn, shape.stored_ffn) == (48, 384)


def test_the_parameters_of_known_models() -> None:
    assert model_shape(LLAMA).parameters == pytest.approx(8.03e9, rel=0.005)


# --------------------------------------------------------------------------- clusters and measurements


EXPERTS = {"layers": 8, "heads": 4, "width": 64, "vocabulary": 100, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "given,sparse,plain",
    [
        ({"moe_intermediate_size": 32}, 8, 128),
        ({"moe_intermediate_size": 32, "first_k_dense_replace": 3}, 5, 128),
        ({"moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 3, 128),
        ({"moe_intermediate_size": 32, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}, 6, 128),
        ({"interleave_moe_layer_step": 2, "intermediate_size_mlp": 256, "intermediate_size": 32}, 4, 256),
        ({"expert_layer_period": 4, "expert_layer_offset": 1, "intermediate_size": 32}, 2, 32),
    ],
)
def test_layers_without_experts_have_an_mlp(given: dict[str, Any], sparse: int, plain: int) -> None:
    """The means of all layers, with 2 of 8 experts of 32 in some of them."""
    shape = model_shape({"intermediate_size": 128} | EXPERTS | given)
    assert (shape.ffn, shape.stored_ffn) == tuple((sparse * n * 32 + (8 - sparse) * plain) // 8 for n in (2, 8))


def test_profiles_name_their_sources() -> None:
    assert set(PROFILES) == {"h100", "h200", "a100", "b200", "910b", "910c"}
    assert all(len(c.source) > 40 for c in PROFILES.values())


def test_measurements_replace_the_profile(tmp_path: Path) -> None:
    content = {"format": "hyper-cp measurements", "version": 1, "device": "GPU of mine", "inside_gb_s": 100.0}
    content |= {"attention_forward_tflops": 1200.0, "gpus_per_host": 4, "unknown": [1]}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    h100 = PROFILES["h100"]
    found = with_measurements(h100, file)
    assert found == with_measurements(h100, str(file)) and found.gpus_per_host == 4
    assert found.inside == 100e9 and found.between == pytest.approx(h100.between)
    assert found.flops("forward_share") == pytest.approx(1200e12)
    assert found.flops("matmul_share") == pytest.approx(h100.flops("matmul_share"))
    assert "GPU of mine" in str(plan(LLAMA, 2**16, gpus=4, measured=content))


# --------------------------------------------------------------------------- impossible input

BAD: list[tuple[str, dict[str, Any]]] = [
    ("ulysses_degree=5 does not divide the 32 query heads", {"ulysses_degree": 5}),
    ("ulysses_degree=16 divides no cp size", {"ulysses_degree": 16}),
    ("sequence=100003 tokens do not split over cp_size=8", {"sequence": 100003, "cp_size": 8}),
    ("cp_size=3 does not divide gpus=8", {"cp_size": 3}),
    ("cp_size=16 does not divide gpus=8", {"cp_size": 16}),
    ("gpus=0 must be a positive int", {"gpus": 0}),
    ("gpus=2.5 must be a positive int", {"gpus": 2.5}),
    ("memory_gb=-80.0 is not a positive finite number", {"memory_gb": -80.0}),
    ("cluster='h1000' is an unknown profile", {"cluster": "h1000"}),
    ("kv_exchange='replicated' is unknown", {"kv_exchange": "replicated"}),
    ("layout='zigzag' is unknown", {"layout": "zigzag"}),
    ("checkpointing='some' is unknown", {"checkpointing": "some"}),
    ("dtype='int4' is unknown", {"dtype": "int4"}),
    ("chunked_loss='no' must be True or False", {"chunked_loss": "no"}),
    ("batch=-1 must be a positive int", {"batch": -1}),
    ("sequence=-8 must be a positive int", {"sequence": -8}),
    (r"sequence\[1\]=0 must be a positive int", {"sequence": [8, 0]}),
    (r"sequence=\[\] has no documents", {"sequence": []}),
    ("measured='/nowhere.json' cannot be read", {"measured": "/nowhere.json"}),
    ("measured has format=None", {"measured": {}}),
    (
        "inside_gb_s=-1 is not a positive finite number",
        {"measured": {"format": "hyper-cp measurements", "version": 1, "inside_gb_s": -1}},
    ),
    ("no vocab_size", {"model": {"layers": 2, "heads": 4, "width": 8}}),
    ("heads=6 is no multiple of kv_heads=4", {"model": dict(LLAMA, heads=6, kv_heads=4, head_dim=64)}),
    ("width=100 does not split over heads=32", {"model": dict(LLAMA, width=100)}),
    ("layers=0 must be a positive int", {"model": dict(LLAMA, layers=0)}),
    ("no strategy has cp sizes", {"cp_size": 8, "ulysses_degree": 2, "layout": "per_document"}),
]


@pytest.mark.parametrize("message,given", BAD, ids=[message for message, _ in BAD])
def test_impossible_input_is_refused_in_three_sentences(message: str, given: dict[str, Any]) -> None:
    arguments = {"model": LLAMA, "sequence": 2**16, "gpus": 8} | given
    with pytest.raises((ValueError, TypeError), match=message) as error:
        plan(arguments.pop("model"), arguments.pop("sequence"), **arguments)
    assert len(re.split(r"\. (?=[A-Z])", str(error.value))) == 3, str(error.value)


def test_products_of_fp32_are_half_as_fast_unless_they_were_measured() -> None:
    wide, narrow = (plan(LLAMA, 2**16, gpus=8, dtype=x, memory_gb=1e9).best for x in ("float32", "bfloat16"))
    assert wide is not None and narrow is not None
    assert wide.tokens_per_second < 0.6 * narrow.tokens_per_second
    measured = {"format": "hyper-cp measurements", "version": 1, "matmul_tflops": 300.0}
    report = plan(LLAMA, 2**16, gpus=8, dtype="float32", measured=measured)
    assert report.cluster.flops("matmul_share") == pytest.approx(300e12)
    assert report.cluster.flops("forward_share") == pytest.approx(0.65 * 989e12 / 2)


def test_a_cluster_has_positive_numbers() -> None:
    with pytest.raises(ValueError, match=r"memory_gb=-1 is not a positive finite number"):
        Cluster("mine", 8, -1, 3000.0, 900.0, 400.0, 50.0)
    with pytest.raises(ValueError, match=r"link_share=1.5 is more than 1"):
        Cluster("mine", 8, 80.0, 3000.0, 900.0, 400.0, 50.0, link_share=1.5)


V3 = {
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168},
    **{"intermediate_size": 18432, "vocab_size": 129280, "head_dim": 64},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}


def test_latents_travel_where_they_are_fewer_numbers() -> None:
    """576 numbers of a token in place of 128 x 320; with a Ulysses degree of 128, one head's 320."""
    latents = model_shape(V3)
    heads = replace(latents, latent=0)
    assert (latents.latent, latents.head_dim, latents.numbers_that_travel()) == (576, 160, 576)
    assert heads.numbers_that_travel() == 40960
    assert latents.latents_travel(64) and not latents.latents_travel(128)
    cluster, documents = cluster_of("h100"), PackedDocuments([[0, 131072]])
    found = []
    for model in (heads, latents):
        estimator = Estimator(Workload(model, cluster, 8, documents, True, 1, 2, 16.0, 8, 80e9))
        found.append(estimator.cost(Strategy(8, 1, "ring", "head_tail", "none", False)))
    sent = [cost.move.sent.inside + cost.move.sent.between for cost in found]
    assert sent[0] / sent[1] == pytest.approx(40960 / 576)
    # A share of 16,384 tokens is expanded once in forward, and three times as much is done in backward.
    expanded = 16384 * 2 * 576 * 128 * 2 * 160 / cluster.flops("matmul_share")
    step = found[0].ring.ranks[0].forward[1]
    assert step.keys == 16384
    kernels = [Kernels(model, cluster, 128, 128, 1, 16384) for model in (heads, latents)]
    assert kernels[1].forward(step) - kernels[0].forward(step) == pytest.approx(expanded)
    assert kernels[1].backward(step) - kernels[0].backward(step) == pytest.approx(3 * expanded)


def test_the_report_names_those_as_fast_that_need_less_memory_or_traffic() -> None:
    report = plan(LLAMA, 131072, gpus=64, cluster="h100")
    best = report.best
    assert best is not None
    fast = [e for e in report.strategies if e.fits and best.tokens_per_second / e.tokens_per_second < 1.05]
    peak = min(e.memory.peak for e in fast) / 1e9
    between = min(e.bytes_between / e.tokens_per_rank for e in fast) / 1e3
    text = "\n".join(report.heading())
    assert f"the least memory ({peak:.1f} GB, not {best.memory.peak / 1e9:.1f})" in text, text
    assert f"the fewest bytes between hosts ({between:.0f} KB a token" in text
    alone = plan(LLAMA, 4096, gpus=1, cluster="h100")
    assert "the fewest bytes" not in "\n".join(alone.heading())


def test_sizes_over_which_the_length_does_not_split_are_named() -> None:
    sizes = {"layers": 4, "heads": 8, "kv_heads": 8, "width": 512, "ffn": 2048, "vocabulary": 32000}
    (line,) = [x for x in plan(sizes, 2**17, gpus=12).heading() if x.startswith("Left out")]
    assert "cp meshes of 3, 6, 12, over which 131,072 tokens do not split" in line and "plan with 131,088 " in line
    assert not any(x.startswith("Left out") for x in plan(sizes, 131088, gpus=12).heading())


def test_configurations_that_name_sizes_and_layers_in_their_own_way() -> None:
    """DBRX has parts, GPT-Neo "local" layers, and Llama's images cross-attention."""
    parts = {
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 16, "moe_top_k": 4},
    }
    dbrx = model_shape({"d_model": 48, "n_heads": 16, "layers": 4, "vocab_size": 100, **parts})
    assert (dbrx.kv_heads, dbrx.ffn, dbrx.stored_ffn) == (8, 4 * 64, 16 * 64)
    sizes = {"layers": 4, "heads": 8, "width": 512, "ffn": 2048, "vocabulary": 32000}
    neo = model_shape({**sizes, "attention_layers": ["global", "local"] * 2, "window_size": 256})
    assert (neo.dense, neo.windows) == (2, ((256, 2),))
    assert model_shape({**sizes, "cross_attention_layers": [1, 3]}).dense == 2
