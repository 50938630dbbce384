"""Hybrid models of transformers on two and four ranks, packed documents included, against each document alone."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import InDouble, gradients, prepare_batch, prepare_model, tokens
from tests.harness.ranks import Ranks, error_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")

KINDS = (
    *("qwen3_next", "kimi_linear", "olmo_hybrid", "mamba", "mamba2", "falcon_h1", "nemotron_h"),
    *("granitemoehybrid", "jamba", "zamba2", "lfm2", "minimax", "recurrent_gemma"),
)
"""Types whose mixers or decoders differ; the others have the code of one of these."""
OTHERS = ("qwen3_5_text", "qwen3_5_moe_text", "falcon_mamba", "bamba", "zamba", "lfm2_moe", "lfm3", "bailing_hybrid")
REFUSED = ("rwkv", "xlstm")
"""Types whose recurrences are code of their own."""
DOCUMENTS = {  # lengths that the numbers of ranks do not divide, so that the batch is padded, and all others
    "contiguous": [0, 5, 6, 22],
    "head_tail": [0, 7, 8, 24],
    "balanced": [0, 3, 4, 22],
}


def alone(model: Any, ids: Tensor, documents: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and gradients, each document by itself; its first token is predicted by none."""
    logits, total = [], ids.numel() - len(ids) * (len(documents) - 1)
    for a, b in pairwise(documents):
        logits.append(model(input_ids=ids[:, a:b], use_cache=False).logits)
        predicted = logits[-1][:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(predicted, ids[:, a + 1 : b].flatten(), reduction="sum") / total
        if b - a > 1:
            loss.backward()
    return torch.cat(logits, 1).detach(), flat_gradients(model)


def flat_gradients(model: Any) -> Tensor:
    return torch.cat([x.flatten() for x in gradients(model)])


def packed(model: Any, handler: ContextParallelHandler, ids: Tensor, documents: list[int]) -> tuple[Tensor, Tensor]:
    """The same of a prepared model, with the documents in one batch."""
    labels = ids.clone()
    labels[:, documents[:-1]] = -100
    local = prepare_batch(handler, {"input_ids": ids, "labels": labels, "cu_seqlens": documents})
    output = model(**local)
    output.loss.backward()
    with handler.documents(local["context_parallel"].documents):
        logits = handler.combine(output.logits.detach(), 1, length=ids.shape[1])
    return logits, sum_over_ranks(flat_gradients(model))[0]


@on_ranks
def errors(kinds: list[str], layouts: list[str] | None = None) -> dict[str, float]:
    """The largest relative error of logits and gradients; in these layouts, or each type in another one."""
    import transformers

    transformers.logging.set_verbosity(50)
    mesh, found = cp_mesh(), {}
    for i, kind in enumerate(kinds):
        for layout in layouts or [list(DOCUMENTS)[i % len(DOCUMENTS)]]:
            documents, model = DOCUMENTS[layout], tiny_causal(kind)
            ids = tokens(documents[-1])
            style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout)
            copied = prepare_model(copy.deepcopy(model), mesh, style=style)
            with InDouble():
                want = alone(model, ids, documents)
                got = packed(copied, ContextParallelHandler(mesh, style), ids, documents)
            worst = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)]
            found[f"{kind} {layout}"] = max(worst)
    return found


@on_ranks
def refused(kinds: list[str]) -> dict[str, str]:
    mesh = cp_mesh()
    return {k: error_of(lambda k=k: prepare_model(tiny_causal(k), mesh, style=ContextParallel())) for k in kinds}


def test_recurrences_by_code_of_their_own_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, refused, list(REFUSED)):
        for kind, error in found.items():
            assert error.startswith("NotImplementedError") and "mix positions in a way" in error, (kind, error)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kinds"), [(2, KINDS[1:-1]), (4, (KINDS[0], KINDS[-1]))])
def test_packed_documents_are_those_of_each_document_alone(ranks: Ranks, world: int, kinds: tuple[str, ...]) -> None:
    """Over two ranks ``test_every_causal_model`` runs all types, plain and padded. Each of ``KINDS`` and ``OTHERS`` was
    run with packed documents in both layouts on two and four ranks when docs/guide/recurrent_layers.md was written."""
    bad = {name: e for found in ranks(world, errors, list(kinds)) for name, e in found.items() if not e <= 1e-9}
    assert not bad, bad


def test_some_types_are_exact(ranks: Ranks) -> None:
    """In the fast suite, too."""
    for found in ranks(2, errors, ["qwen3_next", "minimax"]):
        assert all(error <= 1e-9 for error in found.values()), found


@on_ranks
def steps() -> dict[str, Any]:
    """Half precision, activation checkpointing, a cache, and the number of transfers of a mixer."""
    import transformers

    transformers.logging.set_verbosity(50)
    mesh = cp_mesh()
    style, ids = ContextParallel(ulysses_degree=1, layout="head_tail"), tokens(24)
    handler, model = ContextParallelHandler(mesh, style), tiny_causal("mamba2")
    want = model(input_ids=ids, use_cache=False).logits
    half = copy.deepcopy(model).bfloat16()
    one = (half(input_ids=ids, use_cache=False).logits - want).abs().max().item()
    prepare_model(half, mesh, style=style)
    local = prepare_batch(handler, {"input_ids": ids, "labels": ids})
    half(**local)  # the first loss is compared between ranks
    with record_traffic() as traffic:
        output = half(**local)
    cp = (handler.combine(output.logits, 1) - want).abs().max().item()
    forward = [operation for operation, _ in traffic.entries if operation != "agreement"]
    trained = prepare_model(copy.deepcopy(model).train(), mesh, style=style)
    trained(**local).loss.backward()
    plain = flat_gradients(trained)
    trained.zero_grad()
    (getattr(trained, "activation_checkpointing_enable", None) or trained.gradient_checkpointing_enable)()
    trained(**local).loss.backward()
    recomputed = (flat_gradients(trained) - plain).abs().max().item()
    cached = prepare_model(copy.deepcopy(model), mesh, style=style)
    cache = error_of(lambda: cached(input_ids=local["input_ids"], use_cache=True))
    return {"half": (one, cp), "forward": forward, "recomputed": recomputed, "cache": cache}


def test_half_precision_checkpointing_and_a_cache(ranks: Ranks) -> None:
    for found in ranks(2, steps):
        one, cp = found["half"]
        assert cp <= 2 * one, found["half"]
        assert found["forward"] == ["all_gather"] * 4, "a convolution and a recurrence in each of two layers"
        assert found["recomputed"] < 1e-12
        assert found["cache"].startswith("NotImplementedError") and "cache" in found["cache"]


@on_ranks
def padding_refused() -> dict[str, str]:
    """Errors for batches whose padding lies before tokens."""
    mesh, found = cp_mesh(), {}
    biased = copy.deepcopy(tiny_causal("mamba2"))
    for block in biased.backbone.layers:
        block.mixer.in_proj.bias = torch.nn.Parameter(torch.ones(block.mixer.in_proj.out_features).double())
    for case, kind, layout, length in (
        ("bias", biased, "balanced", 12),
        ("contiguous", biased, "contiguous", 12),
        ("no bias", tiny_causal("mamba2"), "balanced", 12),
        ("one token", tiny_causal("qwen3_next"), "contiguous", 2),
        ("one token behind", tiny_causal("qwen3_next"), "contiguous", 2),
    ):
        model, ids = copy.deepcopy(kind), tokens(length)
        mask = torch.ones_like(ids)
        mask[0, slice(-1, None) if case == "one token behind" else slice(length // 2)] = 0
        shown, style = mask.bool(), ContextParallel(ulysses_degree=1, layout=layout)
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        prepare_model(model, mesh, style=style)
        handler = ContextParallelHandler(mesh, style)
        local = prepare_batch(handler, {"input_ids": ids, "attention_mask": mask})
        found[case] = error_of(lambda model=model, local=local: model(**local))
        if not found[case]:
            got = handler.combine(model(**local).logits, 1, documents=local["context_parallel"].documents)
            assert (got - want)[shown].abs().max() < 1e-5 * want.abs().max()
    return found


def test_padding_that_mixers_would_take_otherwise_is_refused(ranks: Ranks) -> None:
    """Each outcome is exact or an error."""
    for found in ranks(2, padding_refused):
        assert re.match("ValueError: layout='balanced' .* Mamba2Mixer of Mamba2Model makes a bias", found["bias"])
        assert re.match("ValueError: Qwen3NextModel got one token on each rank", found["one token"])
        assert not any(found[case] for case in ("contiguous", "no bias", "one token behind")), found


@on_ranks
def later_positions() -> list[float]:
    """Errors of logits of RecurrentGemma, which begins anew at position 0, in a batch whose positions begin at 3."""
    model, ids, found = tiny_causal("recurrent_gemma"), tokens(16), []
    positions = torch.arange(3, 19).expand(2, -1)
    with torch.no_grad(), InDouble():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for layout in ("contiguous", "balanced"):
            style = ContextParallel(ulysses_degree=1, kv_exchange="needed", layout=layout)
            made = prepare_model(copy.deepcopy(model), cp_mesh(), style=style)
            handler = ContextParallelHandler(cp_mesh(), style)
            local = prepare_batch(handler, {"input_ids": ids, "position_ids": positions})
            share = made(**local).logits
            with handler.documents(local["context_parallel"].documents):
                got = handler.combine(share, 1, length=16)
            found.append((got - want).abs().max().item())
    return found


def test_positions_that_do_not_begin_at_0(ranks: Any) -> None:
    for found in ranks(2, later_positions):
        assert max(found) <= 1e-9, found
