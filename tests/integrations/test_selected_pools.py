"""GLM 5 next of transformers, whose layers attend to selected pools of keys: results are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks
from tests.integrations import test_selected_blocks
from tests.integrations.test_selected_models import check

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


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact(ranks: Any, world: int) -> None:
    """Checkpointed on two ranks; pools lie on two ranks, and on three where shares are short."""
    modes = ["ring", "all-gather"] if world % 2 else ["contiguous", "ring"]
    modes += ["ulysses", "heads"] if world == 2 else ["hybrid"] if world == 4 else []
    check(ranks(world, errors, modes, ["padded"] if world > 2 else ["plain", "padded", "right"], world == 2, {}))
