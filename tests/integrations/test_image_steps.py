"""A training step of five model types with two images of different size in one row and none in the other, under FSDP2:
padded or packed, with or without recomputing layers. Loss, every gradient and the bytes of rows of images."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.mesh.comm import record_traffic
from tests.harness.hf_images import IMAGE, batch_of, images, item_of, labels_of, rows_of, tiny
from tests.harness.hf_models import InDouble, compared, gradients, prepare_batch
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks
from tests.integrations.test_images import RING, prepared, shard

pytest.importorskip("transformers")

CASES = [
    *(("glm4v", True, False), ("lfm2_vl", False, True), ("llava_next", True, True), ("mistral3", False, False)),
    ("qwen3_vl", True, False),
]
"""Types whose encoders take images of different size: as patches with a grid, padded patches, tiles, padded pixels.
Batches are packed or padded, and layers are recomputed or kept."""
WIDTH = 32
"""The numbers of a hidden state of the tiny models."""


def padded_batch(model: Any) -> tuple[dict[str, Any], Tensor, list[tuple[dict[str, Any], Tensor]]]:
    """A batch whose second row ends in padding, and its labels; and the batches that one device runs, with theirs."""
    batch = batch_of(model)
    labels = labels_of(batch)
    return batch, labels, [(batch, labels)]


def packed_batch(model: Any) -> tuple[dict[str, Any], Tensor, list[tuple[dict[str, Any], Tensor]]]:
    """A batch of three documents in one row, two with an image each, and two without images in the other row."""
    both = images(model)
    rows, generator = rows_of(model, both), torch.Generator().manual_seed(1)
    lengths = [rows[0] + 5, 9, rows[1] + 4]
    lengths = [*lengths, 11, sum(lengths) - 11]
    documents = [torch.randint(3, 50, (1, n), generator=generator) for n in lengths]
    documents[0][0, 2 : 2 + rows[0]], documents[2][0, 3 : 3 + rows[1]] = IMAGE, IMAGE
    alone = []
    for i, ids in enumerate(documents):
        own = {"input_ids": ids, **(item_of(both, i // 2) if i in (0, 2) else {}), **types_of(model, ids)}
        alone.append((own, ids.masked_fill(ids == IMAGE, -100)))
    ids = torch.cat([torch.cat(documents[:3], 1), torch.cat(documents[3:], 1)])
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).view_as(ids)
    batch = {"input_ids": ids, "document_ids": numbers, **both, **types_of(model, ids)}
    return batch, ids.masked_fill(ids == IMAGE, -100), alone


def types_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The types of tokens, for models that take them."""
    return {"mm_token_type_ids": (ids == IMAGE).long()} if "mm_token_type_ids" in batch_of(model) else {}


def on_one_device(model: Any, batches: list[tuple[dict[str, Any], Tensor]]) -> tuple[Any, Tensor]:
    """The model with its gradients, and the mean loss of all labels."""
    alone, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    for batch, labels in batches:
        with InDouble():
            logits = alone(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
        total += loss.detach()
    return alone, total


def crossing(model: Any, ids: Tensor) -> list[int]:
    """The rows of each of two images whose tokens lie on the rank that does not encode it. (Two ranks; rank i encodes
    image i, and the layout is head_tail.)"""
    length = -(-ids.shape[1] // 4) * 4
    chunk = torch.arange(ids.shape[1]) // (length // 4)
    ranks = ((chunk == 1) | (chunk == 2)).long().expand_as(ids)[ids == IMAGE]
    return [int((x != i).sum()) for i, x in enumerate(ranks.split(rows_of(model, images(model))))]


@on_ranks
def step(kind: str, packed: bool, recomputed: bool) -> tuple[dict[str, float], list[int], list[int], list[int]]:
    """The errors of the loss and of the gradients of encoder and others; bytes of rows that this rank sent, and those
    that it must send; and the bytes of all gathers."""
    model = tiny(kind)
    batch, labels, parts = packed_batch(model) if packed else padded_batch(model)
    alone, want = on_one_device(model, parts)
    made, handler = prepared(model, **RING)
    if recomputed:
        made.train()
        again = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), InDouble())}
        made.gradient_checkpointing_enable(again)
    shard(made, handler.mesh)
    documents = {name: batch[name] for name in ("document_ids",) if name in batch}
    local = prepare_batch(handler, batch)
    targets = handler.get_batch_on_this_cp_rank({"labels": labels, **documents}, shift_labels=True)["shift_labels"]
    compared(made)
    with record_traffic() as log, InDouble():
        loss = handler.mean_loss(made(**local).logits, targets, gradients="mean")
        loss.backward()
    found = {"loss": relative_error(loss.detach(), want), "encoder": 0.0, "others": 0.0}
    decoder, seen = {id(p) for p in alone.get_decoder().parameters()}, {"encoder": 0, "others": 0}
    scale = max(x.abs().max().item() for x in gradients(alone))
    for p, q in zip(made.parameters(), alone.parameters(), strict=True):
        got: Any = p.grad
        whole = torch.zeros_like(q) if got is None else got.full_tensor()
        part = "others" if id(q) in decoder else "encoder"
        if q.grad is not None and q.grad.abs().max() > 1e-9 * scale:
            found[part], seen[part] = max(found[part], relative_error(whole, q.grad)), seen[part] + 1
        else:
            found[part] = max(found[part], whole.abs().max().item() / scale)
    assert min(seen.values()) > 5, seen
    rank, away = dist.get_rank(), crossing(model, batch["input_ids"])
    row = WIDTH * 8 * (1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())))
    sent = [n for name, n in log.entries if name == "all_to_all_rows"]
    gathers = [n for name, n in log.entries if name == "all_gather"]
    return found, sent, [away[rank] * row, away[1 - rank] * row], gathers


@pytest.mark.parametrize(("kind", "packed", "recomputed"), CASES)
def test_a_step_is_exact_and_ranks_receive_their_own_rows(
    ranks: Any, kind: str, packed: bool, recomputed: bool
) -> None:
    """Rows travel once in forward, and their gradients once in backward; a recompute brings no row again."""
    for errors, sent, expected, gathers in ranks(2, step, kind, packed, recomputed):
        assert max(errors.values()) <= 1e-9, errors
        assert sent == expected and sum(expected) > 0
        assert max(gathers, default=0) <= 64, "ranks gather numbers of rows, not rows"
