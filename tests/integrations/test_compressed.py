"""DeepSeek V4 of transformers, whose layers attend to a window and to pooled keys: results are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble, LowestFirst, gradients, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.integrations.test_selected_models import MODES, check, differentiate, loss_of

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
    config = hf.AutoConfig.for_model("deepseek_v4", **copy.deepcopy(SIZES))
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
    ids = tokens(LENGTH)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind != "plain":
        mask = torch.ones_like(ids)
        mask[0, -6:] = mask[1, :7] = 0
        if kind == "between":
            mask[0, 20:25] = 0
        batch["labels"][mask == 0] = batch["labels"][1, 7] = batch["labels"][0, 25] = -100
        batch["attention_mask"] = mask
    return batch


@on_ranks
def errors(modes: list[str], batches: list[str], checkpointed: bool) -> dict[str, float]:
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, found = made(), {}
    for which in batches:
        batch, one = batch_of(which), copy.deepcopy(model)
        with InDouble(), LowestFirst():
            output = one(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False)
            loss_of(output, batch).backward()
        expected = [p.grad for p in one.parameters()]
        seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for mode in modes:
            style, copied = ContextParallel(**MODES[mode]), copy.deepcopy(model)
            prepare_model(copied, cp_mesh(), style=style)
            if checkpointed:
                copied.gradient_checkpointing_enable({"use_reentrant": False})
            handler = ContextParallelHandler(cp_mesh(), style)
            with InDouble():
                got = copied(**prepare_batch(handler, batch))
                differentiate(got.loss)
            logits = handler.combine(got.logits.detach(), 1)
            name, summed = f"{mode}, {which}: ", sum_over_ranks(*gradients(copied))
            assert [p.grad is None for p in copied.parameters()] == [g is None for g in expected]
            found[name + "logits"] = relative_error(logits[:, :LENGTH][seen], output.logits[seen])
            pairs = [(a, b) for a, b in zip(summed, expected, strict=True) if b is not None and b.abs().max() > 1e-12]
            assert len(pairs) > 80
            found[name + "gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact(ranks: Any, world: int) -> None:
    """Checkpointed on two ranks; in short shares a window of 11 tokens spans several ranks."""
    modes = ["ring", "all-gather"] if world % 2 else ["contiguous", "ring"]
    batches = {1: ["plain", "padded", "between"], 2: ["plain", "padded"], 3: ["padded"], 4: ["between"]}[world]
    check(ranks(world, errors, modes, batches, world == 2))
