"""DeepSeek V4 of transformers, whose layers attend to a window and to pooled keys: results are those of one device."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.verify import verify
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks
from tests.integrations import test_selected_blocks
from tests.integrations.test_selected_models import MODES, check

hf = pytest.importorskip("transformers")

LENGTH = 45
"""No multiple of a window, nor of twice the number of ranks."""
LAYERS = ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]
LAYERS += ["compressed_sparse_attention"]
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "num_experts_per_tok": 2, "n_routed_experts": 4},
    **{"layer_types": LAYERS, "hc_mult": 2, "sliding_window": 6, "o_groups": 2, "o_lora_rank": 8, "pad_token_id": 0},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 3, "partial_rotary_factor": 0.5},
    **{"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "max_position_embeddings": 64},
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 11},
}


def made() -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    config = hf.AutoConfig.for_model("deepseek_v4", **copy.deepcopy(SIZES), output_router_logits=True)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(7)
    model = hf.DeepseekV4ForCausalLM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.copy_(torch.randint(0, 4, x.shape))
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two rows: plain, padded on the right and on the left, or padded between tokens."""
    batch = test_selected_blocks.batch_of("plain" if kind == "plain" else "padded")
    if kind == "between":
        batch["attention_mask"][0, 20:25] = 0
        batch["labels"][0, 20:25] = -100
    if kind != "plain":
        batch["labels"][0, 25] = -100
    return batch


@on_ranks
def errors(modes: list[str], batches: list[str], checkpointed: bool) -> dict[str, float]:
    found = {}
    given = {which: batch_of(which) for which in batches}
    for name, error, pairs in test_selected_blocks.compared(made(), given, modes, checkpointed, least=1e-12):
        assert len(pairs) > 80
        found[name + "logits"] = error
        found[name + "gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact(ranks: Any, world: int) -> None:
    """Checkpointed on two ranks; in short shares a window of 11 tokens spans several ranks."""
    modes = ["ring", "all-gather"] if world % 2 else ["contiguous", "ring"]
    modes += ["ulysses"] if world == 2 else ["load_balance"] if world == 4 else []
    batches = {1: ["plain", "padded", "between"], 2: ["plain", "padded"], 3: ["padded"], 4: ["between"]}[world]
    check(ranks(world, errors, modes, batches, world == 2))


@on_ranks
def sent() -> list[int]:
    """The bytes that a rank sends of windows and entries, in forward."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, style = made().float(), ContextParallel(ulysses_degree=1, kv_exchange="ring")
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))
    with comm.record_traffic() as log:
        model.model(**{k: x for k, x in local.items() if "labels" not in k and "num_items" not in k})
    return [n for name, n in log.entries if name == "all_gather"]


def test_entries_travel_and_not_states(ranks: Any) -> None:
    """46 positions on 2 ranks, 2 rows, 4 bytes. The most entries of a rank: 2 of 11 tokens, 6 of 4 tokens."""
    heavy = [2 * 4 * 10 * 2 * 16, 2 * 4 * 2 * 16]  # keys and gates before the share, and entries
    sparse = [2 * 4 * 7 * 2 * 32, 2 * 4 * 6 * 16]  # the same of two series
    for found in ranks(2, sent):
        assert found == heavy + 2 * (sparse + sparse)  # an indexer has as many


BATCHES: dict[str, dict[str, Any]] = {
    "packed documents": {"position_ids": torch.cat([torch.arange(n) for n in (9, 3, 33)]).expand(2, -1)},
    "position_ids": {"position_ids": torch.arange(1, LENGTH + 1).expand(2, -1)},
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
        assert f"DeepseekV4HCACompressor got {what}" in message


def test_the_compressors_are_the_known_ones() -> None:
    """A canary: with another forward, the layers are refused when the model is prepared."""
    from hyper_cp.integrations.huggingface.checks import unrouted_mixers

    model = made()
    assert not unrouted_mixers(model.model), f"transformers {hf.__version__}"
    scorer = type(model.model.layers[1].self_attn.compressor.indexer.scorer)
    with patch.object(scorer, "forward", lambda self, *args: None):
        found = unrouted_mixers(model.model)
    assert found == [f"layers of type {kind}_attention" for kind in ("compressed_sparse", "heavily_compressed")]


@on_ranks
def generated() -> bool:
    """On a mesh of one rank with a cache, the model runs its own code."""
    from hyper_cp.integrations.transformers import prepare_model

    one, ids = made().eval(), batch_of("plain")["input_ids"]
    prepared = copy.deepcopy(one)
    prepare_model(prepared, cp_mesh(), style=ContextParallel(**MODES["ring"]))
    with InDouble():
        a, b = (x.generate(ids, max_new_tokens=5, do_sample=False) for x in (one, prepared))
    return torch.equal(a, b)


def test_generates_on_one_rank(ranks: Any) -> None:
    assert ranks(1, generated) == [True]


@on_ranks
def verified(kind: str) -> tuple[bool, str]:
    from hyper_cp.integrations.transformers import prepare_model

    model = made().float() if kind == "deepseek_v4" else test_selected_blocks.made().float()
    prepare_model(model, cp_mesh(), style=ContextParallel(**MODES["ring"]))
    report = verify(model, cp_mesh(), batch_of("plain"))
    return report.ok, str(report)


@pytest.mark.parametrize("kind", ["deepseek_v4", "minimax_m3_vl_text"])
def test_verify(ranks: Any, kind: str) -> None:
    for ok, report in ranks(2, verified, kind):
        assert ok, report
