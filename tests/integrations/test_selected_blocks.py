"""MiniMax M3 of transformers, whose layers attend to selected blocks of keys: results are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.huggingface.selected_blocks import selects_blocks
from hyper_cp.mesh import comm
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble, LowestFirst, gradients, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.integrations.test_selected_models import MODES, SIZES, check, differentiate, loss_of

hf = pytest.importorskip("transformers")

LENGTH = 45
"""No multiple of a block, nor of twice the number of ranks."""
M3: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "dense_intermediate_size": 16},
    **{"shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk_blocks": 3},
    **{"index_block_size": 4, "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]},
}


def made(**changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    config = hf.AutoConfig.for_model("minimax_m3_vl_text", **copy.deepcopy({**SIZES, **M3, **changes}))
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(7)
    model = hf.MiniMaxM3VLForCausalLM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two rows, plain or padded on the left and on the right."""
    ids = tokens(LENGTH)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, -6:] = mask[1, :7] = 0
        batch["labels"][mask == 0] = batch["labels"][1, 7] = -100
        batch["attention_mask"] = mask
    return batch


def compared(
    model: Any,
    batches: dict[str, dict[str, Tensor]],
    modes: list[str],
    checkpointed: bool,
    least: float = 0.0,
    before: Callable[[Any], None] | None = None,
) -> Iterator[tuple[str, float, list[tuple[Tensor, Tensor]]]]:
    """The error of logits of each batch in each mode, and the pairs of gradients that are larger than ``least`` on one
    device, which ``before`` changes. The losses are those of the model with its routers."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    for which, batch in batches.items():
        one = copy.deepcopy(model)
        if before is not None:
            before(one)
        with InDouble(), LowestFirst():
            output = one(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False)
            (loss_of(output, batch) + one.router_aux_loss_coef * output.aux_loss).backward()
        expected = [p.grad for p in one.parameters()]
        seen = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
        for mode in modes:
            style, copied = ContextParallel(**MODES[mode]), copy.deepcopy(model)
            prepare_model(copied, cp_mesh(), style=style)
            if checkpointed:
                copied.gradient_checkpointing_enable({"use_reentrant": False})
            handler = ContextParallelHandler(cp_mesh(), style)
            with InDouble():
                local = prepare_batch(handler, batch)
                got = copied(**local)
                differentiate(got.loss)
            logits = handler.combine(got.logits.detach(), 1, documents=local["context_parallel"].documents)
            summed = sum_over_ranks(*gradients(copied))
            assert [p.grad is None for p in copied.parameters()] == [g is None for g in expected]
            error = relative_error(logits[:, :LENGTH][seen], output.logits[seen])
            pairs = [(a, b) for a, b in zip(summed, expected, strict=True) if b is not None and b.abs().max() > least]
            yield f"{mode}, {which}: ", error, pairs


@on_ranks
def errors(modes: list[str], batches: list[str], checkpointed: bool) -> dict[str, float]:
    model, found = made(output_router_logits=True), {}
    for name, error, pairs in compared(model, {which: batch_of(which) for which in batches}, modes, checkpointed):
        found[name + "logits"] = error
        found[name + "gradients"] = max(relative_error(a, b) for a, b in pairs)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_exact(ranks: Any, world: int) -> None:
    modes = ["ring", "all-gather", "contiguous"] if world == 2 else ["contiguous", "all-gather"]
    modes += ["hybrid"] if world == 4 else ["ulysses"] if world == 2 else []
    check(ranks(world, errors, modes, ["padded"] if world > 2 else ["plain", "padded"], world == 2))


@on_ranks
def bytes_sent() -> list[int]:
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model, style = made().float(), ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))
    with comm.record_traffic() as log:
        model(**local)
    return [n for name, n in log.entries if name == "send_recv"]


def test_narrow_keys_travel(ranks: Any) -> None:
    """One head of 8 numbers of the indexer, beside 2 heads of keys and values; 48 positions, 2 rows."""
    for sent in ranks(2, bytes_sent):
        assert sum(sent) == 2 * 24 * 4 * (2 * 8 + 3 * 2 * 2 * 8)


@on_ranks
def refused(what: str) -> str:
    from hyper_cp.integrations.transformers import indexer_losses, prepare_batch, prepare_model

    model, style = made(), ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    batch = batch_of("plain")
    if what == "packed documents":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 33)]).expand(2, -1)
    if what == "position_ids":
        batch["position_ids"] = torch.arange(1, LENGTH + 1).expand(2, -1)
    if what == "padding between tokens":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 5:9] = 0
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch)
    with pytest.raises(NotImplementedError) as error, InDouble():
        if what == "indexer_losses":
            with indexer_losses():
                model(**local)
        model(**local)
    return str(error.value)


@pytest.mark.parametrize("what", ["packed documents", "position_ids", "padding between tokens", "indexer_losses"])
def test_refused_by_name(ranks: Any, what: str) -> None:
    for message in ranks(2, refused, what):
        assert f"MiniMaxM3VLIndexer got {what}" in message


def test_the_indexer_ends_as_is_known() -> None:
    """A canary: with another end, the layers are refused when the model is prepared."""
    from hyper_cp.integrations.huggingface.checks import unrouted_mixers

    model = made()
    kind = type(model.model.layers[0].self_attn.indexer)
    assert selects_blocks(kind), f"transformers {hf.__version__}"
    assert not unrouted_mixers(model.model)
    with patch.object(kind, "forward", lambda self, *args: None):
        assert unrouted_mixers(model.model) == ["layers of type minimax_m3_sparse"]


@on_ranks
def generated() -> list[bool]:
    """On a mesh of one rank with a cache, the model runs its own code."""
    from hyper_cp.integrations.transformers import prepare_model

    same, ids = [], batch_of("plain")["input_ids"]
    for implementation in ("eager", "sdpa"):
        one = made().eval()
        one.set_attn_implementation(implementation)
        prepared = copy.deepcopy(one)
        prepare_model(prepared, cp_mesh(), style=ContextParallel(**MODES["ring"]))
        with InDouble():
            a, b = (x.generate(ids, max_new_tokens=3, do_sample=False) for x in (one, prepared))
        same.append(torch.equal(a, b))
    return same


def test_generates_on_one_rank(ranks: Any) -> None:
    assert ranks(1, generated) == [[True, True]]
