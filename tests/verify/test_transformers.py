"""verify with models that prepare_model has prepared: against transformers itself on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_cp import ContextParallel, verify
from tests.harness import hf_models
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import prepare_model
from tests.harness.ranks import on_ranks

LENGTH = 13
Case = tuple[str, dict[str, Any], dict[str, Any]]
RING = {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}


def masks(left: bool) -> Tensor:
    """A padding mask whose second row has three tokens less."""
    row = [1] * (LENGTH - 3)
    return torch.tensor([[1] * LENGTH, [0] * 3 + row if left else row + [0] * 3])


def whole_batch(**entries: Any) -> dict[str, Any]:
    """Tokens and unshifted labels; padding has none."""
    ids = hf_models.tokens(LENGTH)
    mask = entries.get("attention_mask")
    return {"input_ids": ids, "labels": ids if mask is None else ids.masked_fill(mask == 0, -100), **entries}


def forgets_the_mask(model: nn.Module, batch: Any, handler: Any) -> Tensor:
    """A step that splits tokens by hand."""
    local = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
    logits = model(input_ids=local["input_ids"], position_ids=local["position_ids"]).logits
    loss: Tensor = handler.mean_loss(logits, local["shift_labels"])
    return loss


@on_ranks
def verified(cases: list[Case], forgets: bool = False) -> list[tuple[bool, str | None, str | None, str]]:
    found = []
    for name, entries, style in cases:
        model = prepare_model(hf_models.make(name), mesh := cp_mesh(), style=ContextParallel(**style))
        with hf_models.InDouble():
            step = forgets_the_mask if forgets else None
            report = verify(model, mesh, whole_batch(**entries), loss_fn=step, rtol=1e-10)
        found.append((report.ok, report.module, report.cause, str(report)))
        compared = sum(row.kind == "output" and row.status == "equal" for row in report.rows)
        assert compared > 20 or forgets, (name, entries, str(report))
    return found


RIGHT: list[Case] = [
    ("llama", {}, RING),
    ("llama", {"labels": None}, RING),
    ("llama", {"attention_mask": masks(left=True)}, RING),
    ("qwen3", {"attention_mask": masks(left=False)}, {"ulysses_degree": 2}),
    ("gemma3", {"documents": [0, 5, LENGTH]}, {"ulysses_degree": 1}),
    ("deepseek_v3", {}, RING),
]


@pytest.mark.slow
def test_prepared_models_are_those_of_transformers(ranks: Any) -> None:
    here, there = ranks(2, verified, RIGHT)
    assert here == there
    for case, (ok, _, _, text) in zip(RIGHT, here, strict=True):
        assert ok, (case, text)


def test_a_first_forward_in_verify_warns_of_nothing(ranks: Any) -> None:
    """Before, verify's own comparisons with 0, 1, 2, ... were taken for positions of the rotary embedding."""
    for ((ok, *_),) in ranks(2, verified, [("llama", {}, RING)], warnings_as_errors=True):
        assert ok


def test_a_forgotten_padding_mask_is_named(ranks: Any) -> None:
    ((ok, module, cause, text),), _ = ranks(2, verified, [("llama", {"attention_mask": masks(left=True)}, RING)], True)
    assert not ok and cause == "mask" and module is not None and "self_attn" in module, text
