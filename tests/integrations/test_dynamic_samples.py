"""Models of Hugging Face on the micro-batches of ``dynamic_steps``: each sample has positions from 0 on, as alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, DynamicContextParallel, context_parallel_mesh, dynamic_steps, split_cp_mesh
from hyper_cp.data.dynamic import CostModel
from hyper_cp.hf import prepare_batch, prepare_model
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import RankError, Ranks, on_ranks, sum_over_ranks

LENGTHS = [9, 21, 2, 13]


def loss_sum(logits: Any, ids: Any) -> Any:
    """The sum of losses of tokens that predict themselves: every position has one."""
    return F.cross_entropy(logits[0], ids[0], reduction="sum", ignore_index=-100)


def gradients(model: Any) -> Any:
    """Those of all parameters, one after the other: some alone are zero but for rounding (biases of keys)."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


@on_ranks
def error_of_steps(kind: str, degree: int, given: str) -> float:
    """The error of the gradients of micro-batches of several samples."""
    g = torch.Generator().manual_seed(3)
    samples = [torch.randint(3, 60, (n,), generator=g) for n in LENGTHS]
    alone, model = tiny_causal(kind), tiny_causal(kind)
    for x in samples:
        with InDouble():
            loss_sum(alone(input_ids=x[None], use_cache=False).logits, x[None]).backward()
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    family = split_cp_mesh(world["dp", "cp"])
    prepare_model(model, world["cp"], style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"))
    scheduler = DynamicContextParallel(family, 48, CostModel(1.0, 0.02, 2.0), degrees=[degree])
    for step in dynamic_steps(scheduler.plan(LENGTHS), family):
        with step.mesh(model) as handler, InDouble():
            whole = step.pack(samples), step.positions(), step.pack(samples, pad_value=-100)
            ids, positions, labels = (handler.dispatch(x, 1) for x in whole)
            local: Any = {"input_ids": ids}
            if given == "positions":
                local["position_ids"] = positions
            elif given == "batch":
                local = prepare_batch(handler, {"input_ids": whole[0]})
            step.loss(loss_sum(model(**local).logits, labels), 1, gradients="sum").backward()
    return relative_error(sum_over_ranks(gradients(model))[0], gradients(alone))


KINDS = ["bart", "musicgen", "inkling_text", "opt", "gpt2", "llama4_text", "qwen4_exp_text"]
CASES = [*product(KINDS, [2], ["positions", "none"]), *product(["gpt2", "opt", "bart"], [1, 2], ["batch"])]


@pytest.mark.parametrize(
    "kind, degree, given", [*CASES, ("llama4_text", 1, "positions"), ("qwen4_exp_text", 1, "none")]
)
def test_gradients_are_those_of_each_sample_alone(ranks: Ranks, kind: str, degree: int, given: str) -> None:
    assert max(ranks(2, error_of_steps, kind, degree, given)) < 1e-9


@on_ranks
def first_forwards() -> float:
    """The error of first forwards on several meshes: of two ranks, while the others run alone, and of all four, where
    one rank has padding alone."""
    model, alone = tiny_causal("llama"), tiny_causal("llama")
    world = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))
    family = split_cp_mesh(world["dp", "cp"])
    prepare_model(model, world["cp"], style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    ids = torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(3))
    ids[:, 12:] = 0
    errors = []
    for degree in (2 if dist.get_rank() < 2 else 1, 4):
        with context_parallel_mesh(model, family.cp(degree)) as handler, InDouble():
            got = model(input_ids=handler.dispatch(ids, 1)).logits
            want = handler.dispatch(alone(input_ids=ids, use_cache=False).logits, 1)
            errors.append(relative_error(got.detach(), want.detach()))
    return max(errors)


def test_every_mesh_compares_its_tokens_in_its_first_forward(ranks: Ranks) -> None:
    assert max(ranks(4, first_forwards)) < 1e-9


@pytest.mark.parametrize("given", ["none", "batch"])
def test_counts_of_ids_are_not_those_of_samples(ranks: Ranks, given: str) -> None:
    with pytest.raises(RankError, match="go on counting from one sample of the micro-batch to the next") as found:
        ranks(2, error_of_steps, "roberta", 2, given)
    assert str(found.value).count("go on counting") == 2
