"""Models that change the scores of attention (sinks, softcap): logits and every gradient are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import InDouble, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

pytest.importorskip("transformers")

KINDS = ["gpt_oss", "gemma2", "vaultgemma"]
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "all_gather": {"ulysses_degree": 1, "kv_exchange": "all_gather"},
    "Ulysses": {"ulysses_degree": None},
    "hybrid": {"ulysses_degree": 2, "kv_exchange": "ring"},
}


def gradients(model: Any) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def one_device(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    with InDouble():
        output = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        output.loss.backward()
    return output.logits.detach(), gradients(model)


@on_ranks
def errors(world: int, kinds: list[str]) -> dict[str, float]:
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ids = tokens(24)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = {}
    for kind in kinds:
        model = tiny_causal(kind)
        logits, wanted = one_device(copy.deepcopy(model), ids, mask, labels)
        for name, way in WAYS.items():
            for layout in ("contiguous", "head_tail"):
                if name == "hybrid" and world == 2:
                    continue
                style = ContextParallel(**way, layout=layout)
                handler = ContextParallelHandler(mesh, style)
                made = prepare_model(copy.deepcopy(model), mesh, style=style)
                local = prepare_batch(handler, {"input_ids": ids, "attention_mask": mask, "labels": labels})
                with InDouble():
                    output = made(**local)
                    output.loss.backward()
                documents = local["context_parallel"].documents
                whole = handler.combine(output.logits.detach(), 1, documents=documents)
                pairs = list(zip(sum_over_ranks(*gradients(made)), wanted, strict=True))
                scale = max(b.abs().max().item() for _, b in pairs)
                worst = [relative_error(a, b) for a, b in pairs if b.abs().max() > 1e-9 * scale]
                seen = mask.bool()
                found[f"{kind}, {name}, {layout}"] = max(relative_error(whole[seen], logits[seen]), *worst)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sinks_and_softcap_of_models_are_exact_in_every_mode(ranks: Any, world: int) -> None:
    for found in ranks(world, errors, world, KINDS, timeout=300):
        assert len(found) == len(KINDS) * (6 if world == 2 else 8)
        assert max(found.values()) <= 1e-9, found
