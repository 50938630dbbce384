"""Families of transformers whose layers select blocks, pools or entries of keys: results are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyper_cp.integrations.huggingface import compressed, qwen4, selected_blocks, selected_pools, sparse
from hyper_cp.mesh import comm
from hyper_cp.verify import verify
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import random_model
from tests.harness.hf_models import InDouble, LowestFirst, generate, gradients, prepare_batch, prepared, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks
from tests.integrations.test_selected_models import MODES, SIZES, check, differentiate, loss_of

hf = pytest.importorskip("transformers")

LENGTH = 45
"""No multiple of a block, a pool or a window, nor of twice the number of ranks."""
EOS = 2
M3: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "dense_intermediate_size": 16},
    **{"shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk_blocks": 3},
    **{"index_block_size": 4, "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]},
}
GLM5: dict[str, Any] = {
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
COMPRESSED = [f"{kind}_attention" for kind in ("heavily_compressed", "compressed_sparse", "sliding")]
V4: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "num_experts_per_tok": 2, "n_routed_experts": 4},
    **{"layer_types": COMPRESSED, "hc_mult": 2, "sliding_window": 6, "o_groups": 2},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 3, "partial_rotary_factor": 0.5, "o_lora_rank": 8},
    **{"mlp_layer_types": ["hash_moe", "moe", "moe"], "max_position_embeddings": 64, "pad_token_id": 0},
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 11},
}
QWEN4: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "max_position_embeddings": 64},
    **{"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "ple_layer_ids": [1, 3]},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 6},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1},
    **{"make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 12, "indexer_compress_ratio": 4, "pad_token_id": 0, "eos_token_id": EOS},
}


class Family(NamedTuple):
    """A family, and what is particular to it."""

    model: str
    config: Callable[[dict[str, Any]], Any]
    known: dict[str, tuple[str, ...]]
    """The methods that prepared models rely on."""
    layers: list[str]
    """The types of layers that are refused if one of these methods is another one."""
    gradients: int
    """The least number of parameters with gradients above ``least``."""
    least: float = 1e-12
    implementations: tuple[str, ...] = ("sdpa", "eager")
    """Attention implementations on one device; results are compared with the first one."""


def of_type(kind: str, sizes: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A function that makes the config of a type with these sizes and some others."""
    return lambda changes: hf.AutoConfig.for_model(kind, **copy.deepcopy(sizes | changes))


def glm(changes: dict[str, Any]) -> Any:
    """The config of GLM 5 next, which is always one of text and images."""
    return hf.Glm5NextConfig(text_config=copy.deepcopy(GLM5 | changes), vision_config=copy.deepcopy(VISION))


FAMILIES = {
    "minimax_m3": Family(
        "MiniMaxM3VLForCausalLM",
        of_type("minimax_m3_vl_text", SIZES | M3),
        selected_blocks.KNOWN,
        ["minimax_m3_sparse"],
        30,
        0.0,
    ),
    "glm5": Family("Glm5NextForConditionalGeneration", glm, selected_pools.KNOWN, ["indexed_attention"], 70, 0.0),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        of_type("deepseek_v4", V4),
        compressed.KNOWN,
        sorted(COMPRESSED[:2]),
        70,
        implementations=("eager",),
    ),
    "qwen4": Family("Qwen4ExpForCausalLM", of_type("qwen4_exp_text", QWEN4), qwen4.KNOWN, ["indexed_attention"], 80),
}


def made(family: str, **changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    config = FAMILIES[family].config(changes)
    config._attn_implementation, config._experts_implementation = FAMILIES[family].implementations[0], "eager"
    model = random_model(getattr(hf, FAMILIES[family].model), config, 0.2 if family == "minimax_m3" else 0.3)
    with torch.no_grad():
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.copy_(torch.randint(0, 4, x.shape))
    return model.train()


def batch_of(family: str, kind: str) -> dict[str, Tensor]:
    """Two rows: plain, one padded on the right and one on the left, one of these, padded between tokens, too, or with
    packed documents. In GLM 5, whose states of padding are those of one device, padding has labels."""
    ids = tokens(LENGTH)
    mask, batch = torch.ones_like(ids), {"input_ids": ids}
    if family == "qwen4":  # some tokens end a text
        ids[0, [3, 21, 22, 30]] = ids[1, [14, 33]] = EOS
    if kind in ("padded", "right", "between"):
        mask[0, -6:] = 0
        mask[1, :7] = int(kind == "right")
        if kind == "between":
            mask[0, 20:25] = 0
        batch["attention_mask"] = mask
    batch["labels"] = ids.clone()
    if family != "glm5":
        batch["labels"][mask == 0] = -100
        behind = (mask[:, :-1] == 0) & (mask[:, 1:] != 0)  # padding predicts nothing
        batch["labels"][:, 1:][behind] = -100
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 24, 9)]).expand(2, -1)
    if kind == "inputs_embeds":
        ids = batch.pop("input_ids")
        batch |= {"inputs_embeds": made(family).model.embed_tokens(ids).detach(), "ple_input_ids": ids}
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


# --------------------------------------------------------------------------- exactness


def compared(
    model: Any, batch: dict[str, Tensor], modes: list[str], checkpointed: bool, least: float
) -> Iterator[tuple[str, float, list[tuple[Tensor, Tensor]]]]:
    """The error of logits in each mode, and the pairs of gradients that are larger than ``least`` on one device. The
    losses are those of the model with its routers."""
    one = copy.deepcopy(model)
    if "position_ids" in batch:
        documents_apart(one, batch)
    with InDouble(), LowestFirst():
        output = one(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False)
        (loss_of(output, batch) + one.router_aux_loss_coef * output.aux_loss).backward()
    expected = [p.grad for p in one.parameters()]
    seen = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
    for mode in modes:
        copied, handler = prepared(model, **MODES[mode])
        if checkpointed:
            copied.gradient_checkpointing_enable({"use_reentrant": False})
        with InDouble():
            local = prepare_batch(handler, batch)
            got = copied(**local)
            differentiate(got.loss)
        logits = handler.combine(got.logits.detach(), 1, documents=local["context_parallel"].documents)
        summed = sum_over_ranks(*gradients(copied))
        assert [p.grad is None for p in copied.parameters()] == [g is None for g in expected]
        pairs = [(a, b) for a, b in zip(summed, expected, strict=True) if b is not None and b.abs().max() > least]
        yield mode, relative_error(logits[:, :LENGTH][seen], output.logits[seen]), pairs


@on_ranks
def errors(family: str, modes: list[str], which: str, changes: dict[str, Any], checkpointed: bool) -> dict[str, float]:
    found, model = {}, made(family, output_router_logits=True, **changes)
    for mode, error, pairs in compared(model, batch_of(family, which), modes, checkpointed, FAMILIES[family].least):
        assert len(pairs) > FAMILIES[family].gradients, len(pairs)
        found[f"{mode}: logits"] = error
        found[f"{mode}: gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


LONG = {"indexer_compress_ratio": 11, "indexer_budget": 11}
"""Windows that span several ranks, and are shorter than no document but one."""
UNSHARED = {"indexer_types": ["full"] * 4, "linear_lower_bound": None}
"""Each layer has an indexer of its own, and decays have no bound."""
CASES: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("minimax_m3", 1, "contiguous", "padded", {}),
    ("minimax_m3", 2, "all-gather ulysses", "padded", {}),
    ("minimax_m3", 4, "hybrid", "padded", {}),
    ("glm5", 1, "ring", "padded", {}),
    ("glm5", 2, "ulysses", "right", {}),
    ("glm5", 2, "all-gather", "padded", {"index_kpool_always_select_tail": False}),
    ("glm5", 2, "ring", "padded", {"index_kpool": 1, "index_topk": 5, **UNSHARED}),
    ("glm5", 3, "ring", "padded", {"index_kpool": 20, "index_topk": 20}),  # a pool over two or three ranks
    ("glm5", 2, "ring", "padded", {"index_kpool": 64, "index_topk": 64}),  # none is complete
    ("deepseek_v4", 1, "ring", "padded", {}),
    ("deepseek_v4", 2, "ulysses", "padded", {}),
    ("deepseek_v4", 3, "ring", "plain", {}),  # in short shares a window of 11 tokens spans several ranks
    ("deepseek_v4", 4, "load_balance", "between", {}),
    ("qwen4", 1, "ring", "packed", {}),
    ("qwen4", 2, "ulysses", "padded", {}),
    ("qwen4", 2, "ring", "packed", {}),  # documents shorter than a window
    ("qwen4", 2, "all-gather", "inputs_embeds", {}),
    ("qwen4", 3, "contiguous", "packed", LONG),
]
"""Family, ranks, modes, a batch and changes of sizes."""


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow if x[:2] == ("minimax_m3", 4) else ()) for x in CASES], ids=str
)
def test_exact(ranks: Any, case: tuple[str, int, str, str, dict[str, Any]]) -> None:
    """Checkpointed on two ranks."""
    family, world, modes, batch, changes = case
    check(ranks(world, errors, family, modes.split(), batch, changes, world == 2))


@on_ranks
def by_document() -> float:
    """The error of logits of one document in a layout that places by documents."""
    model, batch = made("qwen4"), {"input_ids": batch_of("qwen4", "plain")["input_ids"]}
    copied, handler = prepared(model, **MODES["ring"] | {"layout": "per_document"})
    with InDouble(), LowestFirst():
        local = prepare_batch(handler, batch)
        logits = copied(**local).logits.detach()
        logits = handler.combine(logits, 1, documents=local["context_parallel"].documents)
        return relative_error(logits[:, :LENGTH], model(**batch, use_cache=False).logits)


def test_one_document_in_a_layout_of_documents(ranks: Any) -> None:
    assert max(ranks(2, by_document)) < 1e-10


# --------------------------------------------------------------------------- bytes


@on_ranks
def sent(family: str, mode: str) -> tuple[list[tuple[str, int]], list[int]]:
    """The transfers of a rank in a forward, and the bytes within the modules of n-grams and the indexer of Qwen 4."""
    (model, handler), inside = prepared(made(family).float(), **MODES[mode]), []
    local = prepare_batch(handler, batch_of(family, "plain"))

    def logged(run: Any, *args: Any, **kwargs: Any) -> Any:
        with comm.record_traffic() as log:
            output = run(*args, **kwargs)
        inside.extend(n for name, n in log.entries if name != "agreement")
        return output

    model(**local)  # the first loss is compared between ranks
    for module in (model.model.layers[0].ple, model.model.layers[1].self_attn.indexer) if family == "qwen4" else ():
        module.forward = partial(logged, module.forward)
    with comm.record_traffic() as log:
        model(**local)
    return [entry for entry in log.entries if entry[0] in ("all_gather", "send_recv")], inside


def test_narrow_keys_of_blocks_travel(ranks: Any) -> None:
    """One head of 8 numbers of the indexer, beside 2 heads of keys and values; 48 positions, 2 rows."""
    for found, _ in ranks(2, sent, "minimax_m3", "ring"):
        assert sum(n for _, n in found) == 2 * 24 * 4 * (2 * 8 + 3 * 2 * 2 * 8)


def test_pools_and_latents_travel(ranks: Any) -> None:
    """48 positions on 2 ranks, 2 rows, 4 bytes; between two linear layers with two messages each."""
    halo, pools, latents = 3 * 2 * 16, 6 * 16, 24 * 12  # halo: keys and gates of 3 tokens before a range
    for found, _ in ranks(2, sent, "glm5", "ring"):
        shared = [2 * 4 * n for n in (halo, pools, latents, latents)]  # the last one: of the shared layer
        assert [n for _, n in found[2:6]] == shared
        assert len(found) == 8


def test_entries_travel_and_not_states(ranks: Any) -> None:
    """46 positions on 2 ranks, 2 rows, 4 bytes. The most entries of a rank: 2 of 11 tokens, 6 of 4 tokens."""
    heavy = [2 * 4 * 10 * 2 * 16, 2 * 4 * 2 * 16]  # keys and gates before the share, and entries
    sparse = [2 * 4 * 7 * 2 * 32, 2 * 4 * 6 * 16]  # the same of two series
    for found, _ in ranks(2, sent, "deepseek_v4", "contiguous"):
        assert [n for name, n in found if name == "all_gather"] == heavy + 2 * sparse  # an indexer has as many


def test_entries_and_a_few_rows_travel(ranks: Any) -> None:
    """46 positions on 2 ranks, 2 rows: two ids and 9 rows of 2 streams of 24 numbers before a share; then 3 rows of a
    key of 16 numbers with 8 of each rotary table, and 6 entries, the most of a rank."""
    for _, inside in ranks(2, sent, "qwen4", "contiguous"):
        assert inside == [2 * 2 * 8, 2 * 9 * 48 * 4, 2 * 3 * (16 + 2 * 8) * 4, 2 * 6 * 16 * 4]


# --------------------------------------------------------------------------- refusals

PACKED = {"position_ids": torch.cat([torch.arange(n) for n in (9, 3, 33)]).expand(2, -1)}
SHIFTED = {"position_ids": torch.arange(1, LENGTH + 1).expand(2, -1)}
LENGTHS = {"cu_seqlens": [0, 9, 12, LENGTH]}
BETWEEN = {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.arange(5, 9), 0)}
PAIRS = {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH).tril().bool()}
REFUSED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("minimax_m3", "MiniMaxM3VLIndexer", "packed documents", PACKED),
    ("minimax_m3", "MiniMaxM3VLIndexer", "position_ids", SHIFTED),
    ("minimax_m3", "MiniMaxM3VLIndexer", "padding between tokens", BETWEEN),
    ("minimax_m3", "MiniMaxM3VLIndexer", "indexer_losses", {}),
    ("glm5", "Glm5NextTextIndexer", "packed documents. On one device it lets them see each other", PACKED),
    ("glm5", "Glm5NextTextIndexer", "packed documents", LENGTHS),
    ("glm5", "Glm5NextTextIndexer", "padding between tokens", BETWEEN),
    ("glm5", "Glm5NextTextIndexer", "indexer_losses", {}),
    ("deepseek_v4", "DeepseekV4HCACompressor", "packed documents", PACKED),
    ("deepseek_v4", "DeepseekV4HCACompressor", "position_ids", SHIFTED),
    ("deepseek_v4", "DeepseekV4HCACompressor", "indexer_losses", {}),
    ("qwen4", "Qwen4ExpTextQSAIndexer", "padding between tokens", BETWEEN),
    ("qwen4", "Qwen4ExpTextQSAIndexer", "an attention mask of pairs", PAIRS),
    ("qwen4", "Qwen4ExpTextQSAIndexer", "indexer_losses", {}),
    ("qwen4", "Qwen4ExpTextNGramEmbedding", "documents, or padding before tokens", LENGTHS),
]
"""Family, the module that refuses, what it got, and the entries of the batch."""


@on_ranks
def refused(family: str, what: str, entries: dict[str, Any]) -> str:
    from hyper_cp.integrations.transformers import indexer_losses

    model, handler = prepared(made(family), **MODES["ring"] | ({"layout": "per_document"} if "before" in what else {}))
    local = prepare_batch(handler, batch_of(family, "plain") | entries)

    def run() -> None:
        if what == "indexer_losses":
            with indexer_losses():
                model(**local)
        model(**local)

    with InDouble():
        return error_of(run)


@pytest.mark.parametrize(("family", "module", "what", "entries"), REFUSED)
def test_refused_by_name(ranks: Any, family: str, module: str, what: str, entries: dict[str, Any]) -> None:
    for message in ranks(2, refused, family, what, entries):
        assert message.startswith(f"NotImplementedError: {module} got {what}"), message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_is_the_known_one(family: str) -> None:
    """A canary: with another method, the layers are refused when the model is prepared."""
    from hyper_cp.integrations.huggingface.checks import unrouted_mixers

    model = made(family)
    decoder = getattr(model.model, "language_model", model.model)
    assert not unrouted_mixers(decoder), f"transformers {hf.__version__}"
    file = __import__(type(decoder).__module__, fromlist=["_"])
    for name in FAMILIES[family].known:
        kind, method = (*name.split("."), "forward")[:2]
        with patch.object(getattr(file, kind), method, lambda self, *args: None):
            assert unrouted_mixers(decoder) == [f"layers of type {x}" for x in FAMILIES[family].layers], name


# --------------------------------------------------------------------------- one rank, generation, verify


@on_ranks
def generated(family: str) -> list[bool] | str:
    """On a mesh of one rank with a cache, the model runs its own code; on more it is refused."""
    same, batch = [], batch_of(family, "padded")
    for implementation in FAMILIES[family].implementations:
        one = made(family).eval()
        one.set_attn_implementation(implementation)
        model, handler = prepared(one, **MODES["ring"])
        if handler.cp.size > 1:
            return error_of(lambda model=model, handler=handler: generate(model, handler, batch["input_ids"]))
        given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        with InDouble():
            a, b = (x(**given, use_cache=True).logits for x in (one, model))
            c, d = (x.generate(**given, max_new_tokens=3, do_sample=False) for x in (one, model))
        same += [relative_error(a, b) < 1e-12, torch.equal(c, d)]
    return same


NOT_SPLIT = {
    "glm5": "generate got a Glm5NextForConditionalGeneration, a model of images and text",
    "qwen4": "Qwen4ExpForCausalLM keeps other things than keys and values",
}
"""The errors of families that do not generate with a cache that is split."""


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_on_one_rank(ranks: Any, family: str) -> None:
    (same,) = ranks(1, generated, family)
    assert all(same)
    assert len(same) == 2 * len(FAMILIES[family].implementations)


@pytest.mark.parametrize("family", NOT_SPLIT)
def test_generation_on_ranks_is_refused_by_name(ranks: Any, family: str) -> None:
    for message in ranks(2, generated, family):
        assert message.startswith(f"NotImplementedError: {NOT_SPLIT[family]}"), message


@on_ranks
def verified(family: str) -> tuple[bool, str]:
    report = verify(prepared(made(family).float(), **MODES["ring"])[0], cp_mesh(), batch_of(family, "plain"))
    return report.ok, str(report)


@pytest.mark.parametrize("family", ["minimax_m3", "qwen4"])
def test_verify(ranks: Any, family: str) -> None:
    for ok, report in ranks(2, verified, family):
        assert ok, report


@on_ranks
def without_prepare_batch(family: str) -> dict[str, bool]:
    """On a mesh of one rank a batch that has not been through prepare_batch runs as it did: of an odd length, padded,
    without a cache. The layout is one of an even length."""
    one, batch, found = made(family).eval(), batch_of(family, "padded"), {}
    model, _ = prepared(one, **MODES["ring"])
    given = {"input_ids": batch["input_ids"][:, :-1], "attention_mask": batch["attention_mask"][:, :-1]}
    for name, x in {"padded": given, "plain": {"input_ids": given["input_ids"]}}.items():
        with InDouble():
            a, b = (m(**x, use_cache=False).logits for m in (one, model))
            c, d = (m.generate(**x, use_cache=False, max_new_tokens=3, do_sample=False) for m in (one, model))
        found |= {f"{name}: logits": torch.equal(a, b), f"{name}: tokens": torch.equal(c, d)}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_as_they_are_on_one_rank(ranks: Any, family: str) -> None:
    ((found),) = ranks(1, without_prepare_batch, family)
    assert all(found.values()), found
    assert len(found) == 4


@on_ranks
def without_position_ids(family: str, mode: str) -> float:
    """The error of the logits of shares that prepare_batch has not made, and that have no position ids."""
    one, ids = made(family).eval(), batch_of(family, "plain")["input_ids"][:, :44]
    model, handler = prepared(one, **MODES[mode])
    with InDouble(), LowestFirst(), torch.no_grad():
        want = one(ids, use_cache=False).logits
        return relative_error(handler.combine(model(handler.dispatch(ids), use_cache=False).logits), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_without_position_ids(ranks: Any, family: str) -> None:
    assert max(ranks(2, without_position_ids, family, "ring")) < 1e-9


class OwnIndexer(hf.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Indexer):
    """An indexer of a user's, whose forward context parallelism would replace."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("how", ["class", "instance"])
def test_modules_that_a_user_has_changed_are_refused(how: str) -> None:
    """Before, theirs was replaced without a word."""
    model = made("deepseek_v4")
    indexer = next(x for x in model.modules() if type(x).__name__ == "DeepseekV4Indexer")
    if how == "class":
        indexer.__class__ = OwnIndexer
    else:
        indexer.forward = MethodType(OwnIndexer.forward, indexer)
    with pytest.raises(NotImplementedError, match=r"has a forward of your own .OwnIndexer.forward"):
        sparse.prepare(model.model)
