"""GLM 5 next of transformers, whose layers attend to selected pools of keys: results are those of one device."""

from __future__ import annotations

import copy
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.huggingface.selected_pools import KNOWN
from hyper_cp.mesh import comm
from hyper_cp.verify import verify
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks
from tests.integrations import test_selected_blocks
from tests.integrations.test_selected_models import MODES, check

hf = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16, "hc_mult": 2},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4},
    **{"layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"]},
    **{"indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", "sparse"] * 2},
    **{"num_experts_per_tok": 2, "q_lora_rank": 12, "kv_lora_rank": 12, "v_head_dim": 10, "qk_nope_head_dim": 8},
    **{"index_topk": 12, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 3, "hc_sinkhorn_iters": 3},
    **{"linear_head_dim": 8, "linear_num_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0},
}
VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 16, "patch_size": 4, "out_hidden_size": 32},
    **{"intermediate_size": 24, "projection_intermediate_size": 24},
}


def made(**changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    text = copy.deepcopy({**TEXT, "output_router_logits": True, **changes})
    config = hf.Glm5NextConfig(text_config=text, vision_config=copy.deepcopy(VISION))
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(7)
    model = hf.Glm5NextForConditionalGeneration(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two rows: plain, one padded on the right and one on the left, or only the first of these padded. Padding has
    labels: its states are those of one device, too."""
    batch = test_selected_blocks.batch_of("plain" if kind == "plain" else "padded")
    if kind == "right":
        batch["attention_mask"][1] = 1
    return {**batch, "labels": batch["input_ids"]}


@on_ranks
def errors(modes: list[str], batches: list[str], checkpointed: bool, changes: dict[str, Any]) -> dict[str, float]:
    model, found, given = made(**changes), {}, {which: batch_of(which) for which in batches}
    for name, error, pairs in test_selected_blocks.compared(model, given, modes, checkpointed):
        assert len(pairs) > 70
        found[name + "logits"] = error
        found[name + "gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


CASES: dict[int, tuple[list[str], list[str]]] = {
    1: (["ring"], ["padded"]),
    2: (["contiguous", "all-gather", "ulysses"], ["plain", "right"]),
    3: (["ring", "all-gather"], ["padded"]),
    4: (["contiguous", "ring", "hybrid"], ["padded"]),
}
"""Modes and batches for numbers of ranks."""


@pytest.mark.parametrize("world", CASES)
def test_exact(ranks: Any, world: int) -> None:
    """Checkpointed on two ranks."""
    check(ranks(world, errors, *CASES[world], world == 2, {}))


@pytest.mark.parametrize(
    "changes",
    [
        {"index_kpool_always_select_tail": False},
        {"index_kpool": 1, "index_topk": 5},
        {"index_kpool": 20, "index_topk": 20},  # a pool over two or three ranks
        {"index_kpool": 64, "index_topk": 64},  # none is complete
        {"indexer_types": ["full"] * 4, "linear_lower_bound": None},
    ],
)
def test_other_sizes(ranks: Any, changes: dict[str, Any]) -> None:
    check(ranks(3, errors, ["ring"], ["padded"], False, changes))


@on_ranks
def sent() -> list[int]:
    """The bytes that a rank sends in forward."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, style = made().float(), ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))
    with comm.record_traffic() as log:
        model(**local)
    return [n for name, n in log.entries if name in ("all_gather", "send_recv")]


def test_pools_and_latents_travel(ranks: Any) -> None:
    """48 positions on 2 ranks, 2 rows, 4 bytes; between two linear layers with two messages each."""
    halo, pools, latents = 3 * 2 * 16, 6 * 16, 24 * 12  # halo: keys and gates of 3 tokens before a range
    for found in ranks(2, sent):
        assert found[2:6] == [2 * 4 * n for n in (halo, pools, latents, latents)]  # the last one: of the shared layer
        assert len(found) == 9


BATCHES: dict[str, dict[str, Any]] = {
    "packed documents": {"position_ids": torch.cat([torch.arange(n) for n in (9, 3, 33)]).expand(2, -1)},
    "packed documents by lengths": {"cu_seqlens": [0, 9, 12, 45]},
    "padding between tokens": {"attention_mask": torch.ones(2, 45).index_fill(1, torch.arange(5, 9), 0)},
    "indexer_losses": {},
}


@on_ranks
def refused(what: str) -> str:
    from hyper_cp.integrations.transformers import indexer_losses, prepare_batch, prepare_model

    model, style = made(), ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain") | BATCHES[what])
    with pytest.raises(NotImplementedError) as error, InDouble():
        if what == "indexer_losses":
            with indexer_losses():
                model(**local)
        model(**local)
    return str(error.value)


@pytest.mark.parametrize("what", BATCHES)
def test_refused_by_name(ranks: Any, what: str) -> None:
    for message in ranks(2, refused, what):
        assert f"Glm5NextTextIndexer got {what.removesuffix(' by lengths')}. On one device it" in message


@pytest.mark.parametrize("name", KNOWN)
def test_methods_are_the_known_ones(name: str) -> None:
    """A canary: with another one, the layers are refused when the model is prepared."""
    from hyper_cp.integrations.huggingface.checks import unrouted_mixers

    decoder = made().model.language_model
    file, (kind, method) = sys.modules[type(decoder).__module__], (*name.split("."), "forward")[:2]
    assert not unrouted_mixers(decoder), f"transformers {hf.__version__}"
    with patch.object(getattr(file, kind), method, lambda self, *args: None):
        assert unrouted_mixers(decoder) == ["layers of type indexed_attention"]


@on_ranks
def generated() -> list[bool]:
    """On a mesh of one rank with a cache, the model runs its own code."""
    from hyper_cp.integrations.transformers import prepare_model

    same, batch = [], batch_of("padded")
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    for implementation in ("eager", "sdpa"):
        one = made(output_router_logits=False).eval()
        one.set_attn_implementation(implementation)
        prepared = copy.deepcopy(one)
        prepare_model(prepared, cp_mesh(), style=ContextParallel(**MODES["ring"]))
        with InDouble():
            a, b = (x(**given, use_cache=True).logits for x in (one, prepared))
            c, d = (x.generate(**given, max_new_tokens=5, do_sample=False) for x in (one, prepared))
        same += [relative_error(a, b) < 1e-12, torch.equal(c, d)]
    return same


def test_generates_on_one_rank(ranks: Any) -> None:
    assert ranks(1, generated) == [[True] * 4]


@on_ranks
def refused_generation() -> str:
    from hyper_cp.integrations.transformers import generate, prepare_model

    style, model = ContextParallel(**MODES["ring"]), made().eval()
    prepare_model(model, cp_mesh(), style=style)
    with pytest.raises(NotImplementedError) as error:
        generate(model, ContextParallelHandler(cp_mesh(), style), batch_of("plain")["input_ids"], max_new_tokens=2)
    return str(error.value)


def test_generation_is_refused_by_name(ranks: Any) -> None:
    for message in ranks(2, refused_generation):
        assert "generate got a Glm5NextForConditionalGeneration, a model of images and text" in message


@on_ranks
def verified() -> tuple[bool, str]:
    from hyper_cp.integrations.transformers import prepare_model

    model = made().float()
    prepare_model(model, cp_mesh(), style=ContextParallel(**MODES["ring"]))
    report = verify(model, cp_mesh(), batch_of("plain"))
    return report.ok, str(report)


def test_verify(ranks: Any) -> None:
    for ok, report in ranks(2, verified):
        assert ok, report
