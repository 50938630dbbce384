"""Qwen 4 of transformers, which selects pooled keys and looks back for n-grams: results are those of one device."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.huggingface import qwen4
from hyper_cp.mesh import comm
from hyper_cp.verify import verify
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble, LowestFirst
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks
from tests.integrations import test_selected_blocks
from tests.integrations.test_selected_models import MODES, check

hf = pytest.importorskip("transformers")

LENGTH = 45
"""No multiple of a window, nor of twice the number of ranks."""
EOS = 2
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 4, "max_position_embeddings": 64},
    **{"layer_types": ["linear_attention", "indexed_attention"] * 2, "ple_layer_ids": [1, 3]},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 6},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1},
    **{"make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 12, "indexer_compress_ratio": 4, "pad_token_id": 0, "eos_token_id": EOS},
}


def made(**changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    config = hf.AutoConfig.for_model("qwen4_exp_text", **{**copy.deepcopy(SIZES), **changes})
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(7)
    model = hf.Qwen4ExpForCausalLM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two rows: plain, padded on the right and on the left, or with packed documents. Some tokens end a text."""
    batch = test_selected_blocks.batch_of("padded" if kind == "padded" else "plain")
    for x in batch["input_ids"], batch["labels"]:
        x[0, [3, 21, 22, 30]] = x[1, [14, 33]] = EOS
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 24, 9)]).expand(2, -1)
    if kind == "inputs_embeds":
        ids = batch.pop("input_ids")
        batch |= {"inputs_embeds": made().model.embed_tokens(ids).detach(), "ple_input_ids": ids}
    return batch


def documents_apart(model: Any, batch: dict[str, Tensor]) -> None:
    """Let the gated delta nets of one device run over each document alone, as their kernels do with cumulative
    lengths; its attention reads documents from positions, and n-grams and their convolution run through."""
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), LENGTH]
    for layer in model.model.layers:
        if layer.layer_type == "linear_attention":
            layer.linear_attn.forward = partial(of_each, layer.linear_attn, starts)


def of_each(module: Any, starts: list[int], hidden: Tensor, **kwargs: Any) -> Tensor:
    return torch.cat([type(module).forward(module, hidden[:, a:b], **kwargs) for a, b in pairwise(starts)], 1)


@on_ranks
def errors(modes: list[str], batches: list[str], checkpointed: bool, changes: dict[str, Any]) -> dict[str, float]:
    found = {}
    model = made(output_router_logits=True, **changes)
    for which in batches:
        batch = batch_of(which)
        apart = partial(documents_apart, batch=batch) if which == "packed" else None
        options: dict[str, Any] = {"least": 1e-12, "before": apart}
        for name, error, pairs in test_selected_blocks.compared(model, {which: batch}, modes, checkpointed, **options):
            assert len(pairs) > 80, len(pairs)
            found[name + "logits"] = error
            found[name + "gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


LONG = {"indexer_compress_ratio": 11, "indexer_budget": 11}
"""Windows that span several ranks, and are shorter than no document but one."""


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact(ranks: Any, world: int) -> None:
    """Checkpointed on two ranks."""
    modes = {1: ["ring"], 2: ["ring", "ulysses"], 3: ["ring", "all-gather"], 4: ["contiguous", "ring"]}[world]
    batches = {1: ["packed"], 2: ["plain", "padded"], 3: ["padded"], 4: ["packed"]}[world]
    check(ranks(world, errors, modes, batches, world == 2, LONG if world > 2 else {}))


def test_short_documents(ranks: Any) -> None:
    check(ranks(2, errors, ["ring", "contiguous"], ["packed"], False, {}))


def test_embeddings_with_ids(ranks: Any) -> None:
    check(ranks(2, errors, ["contiguous"], ["inputs_embeds"], False, {}))


@on_ranks
def sent() -> list[int]:
    """The bytes of each gather of an indexer, and of a layer of n-grams."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, style, found = made().float(), ContextParallel(**MODES["contiguous"]), []
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))

    def logged(run: Any, *args: Any, **kwargs: Any) -> Any:
        with comm.record_traffic() as log:
            output = run(*args, **kwargs)
        found.extend(n for name, n in log.entries if name != "agreement")
        return output

    first, second = model.model.layers[:2]
    for module in first.ple, second.self_attn.indexer:
        module.forward = partial(logged, module.forward)
    model(**local)
    return found


def test_entries_and_a_few_rows_travel(ranks: Any) -> None:
    """46 positions on 2 ranks, 2 rows: two ids and 9 rows of 2 streams of 24 numbers before a share; then 3 rows of a
    key of 16 numbers with 8 of each rotary table, and 6 entries, the most of a rank."""
    for found in ranks(2, sent):
        assert found == [2 * 2 * 8, 2 * 9 * 48 * 4, 2 * 3 * (16 + 2 * 8) * 4, 2 * 6 * 16 * 4]


BATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "padding between tokens": ("Indexer", {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor(7), 0)}),
    "an attention mask of pairs": ("Indexer", {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH).tril().bool()}),
    "indexer_losses": ("Indexer", {}),
    "documents, or padding before tokens": ("NGramEmbedding", {"cu_seqlens": [0, 9, 12, LENGTH]}),
}


@on_ranks
def refused(what: str) -> str:
    from hyper_cp.integrations.transformers import indexer_losses, prepare_batch, prepare_model

    model, mode = made(), MODES["ring"] | ({"layout": "per_document"} if "before" in what else {})
    style = ContextParallel(**mode)
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain") | BATCHES[what][1])
    with pytest.raises(NotImplementedError) as error, InDouble():
        if what == "indexer_losses":
            with indexer_losses():
                model(**local)
        model(**local)
    return str(error.value)


@pytest.mark.parametrize("what", BATCHES)
def test_refused_by_name(ranks: Any, what: str) -> None:
    for message in ranks(2, refused, what):
        assert f"{BATCHES[what][0]} got {what}" in message


@on_ranks
def by_document() -> float:
    """The error of logits of one document in a layout that places by documents."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, batch = made(), {"input_ids": batch_of("plain")["input_ids"]}
    style, copied = ContextParallel(**MODES["ring"] | {"layout": "per_document"}), copy.deepcopy(model)
    prepare_model(copied, cp_mesh(), style=style)
    handler = ContextParallelHandler(cp_mesh(), style)
    with InDouble(), LowestFirst():
        local = prepare_batch(handler, batch)
        logits = copied(**local).logits.detach()
        logits = handler.combine(logits, 1, documents=local["context_parallel"].documents)
        return relative_error(logits[:, :LENGTH], model(**batch, use_cache=False).logits)


def test_one_document_in_a_layout_of_documents(ranks: Any) -> None:
    assert max(ranks(2, by_document)) < 1e-10


def test_the_modules_are_the_known_ones() -> None:
    """A canary: with another method, the model is refused when it is prepared."""
    from hyper_cp.integrations.huggingface.checks import unrouted_mixers

    model = made()
    assert not unrouted_mixers(model.model), f"transformers {hf.__version__}"
    file = hf.models.qwen4_exp.modeling_qwen4_exp
    for name in qwen4.KNOWN:
        kind, method = [*name.split("."), "forward"][:2]
        with patch.object(getattr(file, kind), method, lambda self, *args: None):
            assert unrouted_mixers(model.model) == ["layers of type indexed_attention"]


@on_ranks
def generated() -> bool | str:
    """On a mesh of one rank with a cache, the model runs its own code; on more it is refused."""
    from hyper_cp.integrations.transformers import generate, prepare_model

    one, ids, style = made().eval(), batch_of("plain")["input_ids"], ContextParallel(**MODES["ring"])
    prepared = prepare_model(copy.deepcopy(one), cp_mesh(), style=style)
    handler = ContextParallelHandler(cp_mesh(), style)
    if handler.cp.size > 1:
        return error_of(lambda: generate(prepared, handler, ids, max_new_tokens=5))
    with InDouble():
        a, b = (x.generate(ids, max_new_tokens=5, do_sample=False) for x in (one, prepared))
    return torch.equal(a, b)


def test_generates_on_one_rank(ranks: Any) -> None:
    assert ranks(1, generated) == [True]
    for message in ranks(2, generated):
        assert message.startswith("NotImplementedError: Qwen4ExpForCausalLM keeps other things than keys and values")


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
