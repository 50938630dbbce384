"""prepare_batch: every way to name documents and padding, in layouts that place tokens by them, against one device."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.hf_models import InDouble, make, prepare_batch, prepare_model, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")

LENGTHS = torch.tensor([5, 9, 7])
BOUNDARIES = [0, 5, 14, 21]


def ways() -> dict[str, dict[str, Any]]:
    """Entries that name the same documents of 21 positions."""
    ids = torch.repeat_interleave(torch.tensor([4, 1, 7]), LENGTHS)[None]
    offsets = torch.tensor(BOUNDARIES, dtype=torch.int32)
    return {
        "documents": {"documents": BOUNDARIES},
        "cu_seqlens": {"cu_seqlens": offsets},
        "flash": {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9},
        "per row": {"cu_seqlens_q": [BOUNDARIES] * 2},
        "document_ids": {"document_ids": ids},
        "seq_idx": {"seq_idx": ids.int(), "cu_seqlens_k": offsets},
        "positions": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS.tolist()])[None].expand(2, -1)},
    }


def answer(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    """The loss and the gradients of some parameters."""
    with InDouble():
        loss = model(**batch).loss
    loss.backward()
    layer = model.model.layers[0]
    found = [p.grad for p in (model.model.embed_tokens.weight, layer.self_attn.q_proj.weight)]
    return [loss.detach(), *found]  # type: ignore[list-item]


@on_ranks
def every_way(layout: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout)
    handler, original, ids = ContextParallelHandler(mesh, style), make("llama", num_hidden_layers=1), tokens(21)
    model = prepare_model(copy.deepcopy(original), mesh, style=style)
    plain = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}

    def error(batch: dict[str, Any], want: list[Tensor], block: Any = None) -> float:
        model.zero_grad()
        with nullcontext() if block is None else handler.documents(block):
            found = answer(model, prepare_batch(handler, {**plain, **batch}))
        pairs = zip(sum_over_ranks(*found), want, strict=True)
        return max(absolute_error(a, b) / max(b.abs().max().item(), 1e-3) for a, b in pairs)

    cases = ways()
    want = answer(copy.deepcopy(original), {**plain, **cases["positions"]})
    found = {way: error(entries, want) for way, entries in cases.items()}  # rotary positions are relative
    found["with positions"] = error({**cases["positions"], "cu_seqlens": BOUNDARIES}, want)
    found["block"] = error({}, want, BOUNDARIES)
    found["block and positions"] = error(cases["positions"], want, BOUNDARIES)
    words = error_of(lambda: error(cases["positions"], want, [0, 9, 21]))
    found["positions in another block"] = float(not words.startswith("ValueError: position_ids restart in documents"))
    found["nothing"] = error({}, answer(copy.deepcopy(original), plain))
    for side, (start, stop) in {"right": (17, 21), "left": (0, 6), "between": (4, 9)}.items():
        padding = {"attention_mask": torch.ones(2, 21, dtype=torch.int64), "labels": ids.clone()}
        rows = slice(0, 2 if side == "left" else 1)  # layouts by document need the same documents in every row
        padding["attention_mask"][rows, start:stop], padding["labels"][rows, start:stop] = 0, -100
        found[side] = error(padding, answer(copy.deepcopy(original), {**plain, **padding}))
    seen = torch.ones(21, 21, dtype=torch.bool).tril() & (torch.arange(21) % 3 != 1) | torch.eye(21, dtype=torch.bool)
    explicit = {"attention_mask": seen[None, None].expand(2, 1, -1, -1)}
    found["4-D"] = error(explicit, answer(copy.deepcopy(original), {**plain, **explicit}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["head_tail", "per_document", "balanced"])
def test_every_way_to_name_documents(ranks: Any, layout: str) -> None:
    for found in ranks(2, every_way, layout):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def mistaken(what: str) -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "head_tail")
    batch = {"input_ids": tokens(8), "labels": tokens(8)}
    if what == "labels":
        handler.cp.batch.batches = 0  # as on a new mesh
        with pytest.warns(UserWarning, match="those of the next tokens already"):
            prepare_batch(handler, {**batch, "labels": batch["labels"].roll(-1, 1)})
    if what == "some ranks":
        prepare_batch(handler, prepare_batch(handler, batch) if dist.get_rank() else batch, debug=True)
    if what == "other ranks":
        prepare_batch(handler, batch, debug=True)
        prepare_batch(handler, {**batch, "labels": batch["labels"] + dist.get_rank()}, debug=True)
    if what == "twice":
        prepare_batch(handler, prepare_batch(handler, batch), debug=True)
    if what == "other function":
        handler.get_batch_on_this_cp_rank(dict(prepare_batch(handler, batch)))
    if what == "other function first":
        prepare_batch(handler, handler.get_batch_on_this_cp_rank(batch, shift_labels=True))


def test_what_is_split_or_shifted_already_is_found(ranks: Any) -> None:
    ranks(2, mistaken, "labels")
    ranks.raises(2, "ValueError", "batches that differ in entry 'labels'", mistaken, "other ranks")
    ranks.raises(2, "ValueError", "batches that differ in its state", mistaken, "some ranks")
    for what in ("twice", "other function", "other function first"):
        ranks.raises(2, "ValueError", "batch is this rank's share of a batch.*split it once", mistaken, what)


@on_ranks
def unknown() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    prepare_batch(ContextParallelHandler(mesh, "auto"), {"input_ids": tokens(8), "cu_seqlens_padded": [0, 3, 8]})


def test_unknown_names_of_documents_are_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "'cu_seqlens_padded' seems to name packed documents", unknown)


@on_ranks
def last_labels(way: str, crossing: bool | None) -> Tensor:
    """The shifted labels of the whole sequence."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "head_tail")
    batch = {"input_ids": tokens(21), "labels": tokens(21), **ways()[way]}
    option = {} if crossing is None else {"labels_cross_documents": crossing}
    local = prepare_batch(handler, batch, **option)
    found = handler.combine(local["shift_labels"], 1, length=21)
    assert local["num_items_in_batch"] == (found != -100).sum()
    return found


@pytest.mark.parametrize("way", ["cu_seqlens", "positions"])
def test_labels_cross_documents_unless_they_must_not(ranks: Any, way: str) -> None:
    ids = tokens(21)
    crossing = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
    ending = crossing.clone()
    ending[:, [b - 1 for b in BOUNDARIES[1:]]] = -100
    for option, want in ((None, crossing), (True, crossing), (False, ending)):
        assert all(torch.equal(found, want) for found in ranks(2, last_labels, way, option))


@on_ranks
def gathered(layout: str) -> dict[str, float]:
    """Errors of values that are gathered, and added up, by the documents that a user has of a batch of 21 positions,
    which is padded in layouts by documents."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout)
    values, found = torch.randn(2, 21, dtype=torch.float64), {}
    dist.broadcast(values, 0)
    left, right = torch.ones(2, 2, 21, dtype=torch.int64)
    left[:, :4] = right[0, 17:] = 0
    cases: dict[str, tuple[dict[str, Any], Any]] = {way: (entries, BOUNDARIES) for way, entries in ways().items()}
    cases |= {"nothing": ({}, [0, 21]), "right": ({"attention_mask": right}, [0, 21])}
    cases |= {"left": ({"attention_mask": left}, None)}
    cases |= {"padding counts": ({"attention_mask": right, "labels": tokens(21)}, [0, 21])}
    for way, (entries, documents) in cases.items():
        local = prepare_batch(handler, {"input_ids": tokens(21), "values": values, **entries})
        for name, given in {"own": documents, "prepared": local["context_parallel"].documents}.items():
            if given is None:
                continue
            whole = handler.combine(local["values"], 1, documents=given, length=21)
            sums = handler.pool(local["values"], "sum", documents=given)
            tokens_only = values * left if way == "left" else values
            bounds = BOUNDARIES if way in ways() else [0, 21]
            want = torch.stack([x.sum(1) for x in tokens_only.split([b - a for a, b in pairwise(bounds)], 1)], 1)
            found[f"{way} {name}"] = max(absolute_error(whole, values), absolute_error(sums, want))
    return found


@pytest.mark.parametrize("layout", ["per_document", "balanced", "auto"])
def test_tokens_are_placed_by_the_documents_of_the_user(ranks: Any, layout: str) -> None:
    """Padding joined the last document of a batch whose position ids restart, or of one document without a mask."""
    for found in ranks(2, gathered, layout):
        assert len(found) == 21 and max(found.values()) <= 1e-12, found
