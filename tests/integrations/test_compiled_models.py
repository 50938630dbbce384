"""Prepared transformers models in torch.compile, whole or by layer, with other padding and documents in every batch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_cp.cli.modes import named_mode
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import gradients, interrupt, prepared, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")

LENGTH = 24
RING = named_mode("ring, head_tail")


def padded(first: int) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """A batch whose first row ends in padding, and the parts of the rows that see each other."""
    ids = tokens(LENGTH)
    mask = torch.ones_like(ids)
    mask[0, -first:] = 0
    return {"input_ids": ids, "attention_mask": mask}, [(0, LENGTH)]


def packed(first: int) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """A batch of two documents, and their ends."""
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
    return {"input_ids": tokens(LENGTH), "position_ids": positions.expand(2, -1)}, [(0, first), (first, LENGTH)]


def alone(model: Any, batch: dict[str, Tensor], parts: list[tuple[int, int]]) -> Tensor:
    """Logits of the model on one device, where documents are sequences of their own."""
    rows = {name: x for name, x in batch.items() if name != "position_ids"}
    return torch.cat([model(**{k: x[:, a:b] for k, x in rows.items()}, use_cache=False).logits for a, b in parts], 1)


def loss_of(logits: Tensor, mask: Tensor) -> Tensor:
    return (logits.double().square() * mask[..., None]).sum()


def layers_of(model: Any) -> nn.ModuleList:
    return next(x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) <= 2)


@on_ranks
def errors(
    kind: str, whole: bool, packs: bool = True, layers: int = 1, backend: str = "eager", **options: Any
) -> list[float]:
    """The largest errors of visible logits and of gradients, for batches one after the other in one compiled model."""
    from hyper_cp.integrations.transformers import prepare_batch

    model, found = tiny_causal(kind), []
    del layers_of(model)[layers:]
    model.config.num_hidden_layers = layers
    made, handler = prepared(model, **RING)
    for module in [made] if whole else layers_of(made):
        module.compile(backend=backend, **options)
    for batch, parts in (padded(5), packed(9), packed(14)) if packs else (padded(5), padded(3)):
        one, mask = copy.deepcopy(model), batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        want = alone(one, batch, parts)
        loss_of(want, mask).backward()
        made.zero_grad()
        local = prepare_batch(handler, batch)
        documents = local["context_parallel"].documents
        logits = made(**local).logits
        loss_of(logits, handler.dispatch(mask, 1)).backward()
        got, seen = handler.combine(logits.detach(), 1, documents=documents), mask.bool()
        pairs = zip(sum_over_ranks(*gradients(made)), gradients(one), strict=True)
        largest = max(x.abs().max().item() for x in gradients(one))
        found.append(max((a - b).abs().max().item() for a, b in pairs) / largest)
        found.append(relative_error(got[seen], want.detach()[seen]))
    return found


def test_layers_that_write_attention_out(ranks: Any) -> None:
    for found in ranks(2, errors, "bloom", False, backend="aot_eager", timeout=300):
        assert max(found) <= 1e-5, found


def test_a_whole_model_of_any_length(ranks: Any) -> None:
    """Llama, by Dynamo alone: with sizes that may change, AOTAutograd takes 15 s for two layers, prepared or not."""
    for found in ranks(2, errors, "llama", True, dynamic=True, timeout=300):
        assert max(found) <= 1e-5, found


@pytest.mark.slow
def test_a_whole_model_whose_layers_attend_in_chunks(ranks: Any) -> None:
    """Without packed documents, through which it counts positions, for a scale."""
    for found in ranks(2, errors, "llama4_text", True, False, 2, timeout=300):
        assert max(found) <= 1e-5, found


@on_ranks
def one_graph(kind: str, whole: bool) -> str:
    return error_of(lambda: errors(kind, whole, fullgraph=True))


@pytest.mark.parametrize(
    "kind, whole, words", [("llama", True, "reads its batch on the host"), ("bloom", False, "writes its attention out")]
)
def test_what_cannot_be_one_graph_says_so(ranks: Any, kind: str, whole: bool, words: str) -> None:
    for found in ranks(2, one_graph, kind, whole, timeout=300):
        assert words in found and "Compile" in found, found


@on_ranks
def checkpointed(kind: str, reentrant: bool, parts: str) -> list[str | float]:
    """Errors of gradients, or their text, of a model whose modules are compiled inside of checkpoints."""
    from hyper_cp.integrations.transformers import prepare_batch

    model, (batch, _) = tiny_causal(kind).train(), padded(5)
    made, handler = prepared(model, **RING)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, module in made.named_modules():
        if name.rpartition(".")[2] in parts.split():
            module.compile(backend="eager")
    mask = batch["attention_mask"]
    loss_of(model(**batch, use_cache=False).logits, mask).backward()
    loss = loss_of(made(**prepare_batch(handler, batch)).logits, handler.dispatch(mask, 1))
    if words := error_of(loss.backward):
        return [words]
    pairs = zip(sum_over_ranks(*gradients(made)), gradients(model), strict=True)
    return [max(relative_error(a, b) for a, b in pairs if b.abs().max() > 1e-6)]


@pytest.mark.parametrize(("kind", "reentrant"), [("lfm2", False), ("llama4_text", True)])
def test_modules_compiled_inside_of_checkpoints_are_refused(ranks: Any, kind: str, reentrant: bool) -> None:
    for (found,) in ranks(1, checkpointed, kind, reentrant, "self_attn conv", timeout=300):
        assert "recomputes it after the forward of its model" in str(found), found


@on_ranks
def behind_an_interrupted_forward() -> list[str | float]:
    """The same behind the forward of another model that Ctrl-C has ended, for which torch runs no hooks."""
    from hyper_cp.integrations.transformers import prepare_batch

    made, handler = prepared(tiny_causal("llama"), **RING)

    made.model.layers[0].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        made(**prepare_batch(handler, padded(5)[0]))
    return checkpointed("lfm2", False, "self_attn conv")


def test_recomputes_do_not_take_the_state_of_an_interrupted_forward(ranks: Any) -> None:
    for (found,) in ranks(1, behind_an_interrupted_forward, timeout=300):
        assert "recomputes it after the forward of its model" in str(found), found


def test_layers_with_checkpoints_inside_are_exact(ranks: Any) -> None:
    for (found,) in ranks(2, checkpointed, "llama4_text", True, "0", timeout=300):
        assert found <= 1e-5, found
