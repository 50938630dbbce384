"""Transformers of diffusers on two ranks, as the page of the recipe prints it: output and gradients of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh
from tests.harness.attention_case import cp_mesh
from tests.harness.diffusion import tiny_transformer
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks
from tests.harness.recipes import gradient_error, recipe

FLUX, FLUX2, WAN = "FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"


@on_ranks
def diffusion(code: str) -> dict[str, float]:
    """The errors of the recipe's output and gradients."""
    found = {}
    for name in (FLUX, WAN):
        made, inputs = tiny_transformer(name)
        oracle = copy.deepcopy(made)
        with InDouble():
            want = oracle(**inputs).sample
            target = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
            F.mse_loss(want, target).backward()
            names = {"transformer": made, "mesh": cp_mesh(), "inputs": inputs, "target": target}
            exec(code, names)
        got: Any = names["noise"]
        found[name] = max(relative_error(got.detach(), want.detach()), gradient_error(made, oracle))
    return found


@on_ranks
def diffusion_refused() -> list[tuple[str, str]]:
    from diffusers import FirstBlockCacheConfig

    from hyper_cp.integrations.diffusers import prepare_transformer

    model, inputs = tiny_transformer(FLUX)
    mesh, ring = cp_mesh(), ContextParallel(ulysses_degree=1, kv_exchange="ring")
    prepared = copy.deepcopy(model)
    prepare_transformer(prepared, mesh, style=ring)
    other = copy.deepcopy(prepared)  # a copy (of a moving average, say) has the hooks too, and has not compared inputs
    noise = {**inputs, "hidden_states": inputs["hidden_states"] + dist.get_rank()}
    cached, evaluated, twice = copy.deepcopy(other), copy.deepcopy(other), copy.deepcopy(other)
    with pytest.raises(ValueError, match="differ in hidden_states"):
        twice(**noise)
    with context_parallel_mesh(evaluated, split_cp_mesh(mesh).cp(1)):
        evaluated(**noise)  # each rank has an image of its own, and compares nothing
        of_style = error_of(lambda: ContextParallelHandler(mesh, ring).dispatch(noise["hidden_states"]))
    assert "the model of this handler's style runs on another cp mesh" in of_style
    cached.enable_cache(FirstBlockCacheConfig())
    second, of_second = tiny_transformer(FLUX2)
    prepare_transformer(second, mesh, style=ring)
    few = {**inputs, "hidden_states": inputs["hidden_states"][:, :1], "img_ids": inputs["img_ids"][:1]}
    calls = {
        "ValueError: FluxTransformer2DModel: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) split batches "
        "that differ in hidden_states: ranks [1] have": lambda: other(**noise),
        "ValueError: FluxTransformer2DModel: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) split batches "
        "that differ in hidden_states": lambda: evaluated(**noise),
        "ValueError: FluxTransformer2DModel: the ranks of the cp mesh": lambda: twice(**noise),
        "NotImplementedError: FluxTransformer2DModel runs with enable_parallelism or a c": lambda: cached(**inputs),
        "NotImplementedError: FluxTransformer2DModel got controlnet_block_samples": lambda: prepared(
            **inputs, controlnet_block_samples=[inputs["hidden_states"]]
        ),
        "NotImplementedError: Flux2Transformer2DModel got kv_cache_mode. Their rows are": lambda: second(
            **of_second, kv_cache_mode="extract", num_ref_tokens=5
        ),
        "ValueError: 1 tokens of the image and 6 of the prompt cannot be split over 2 ranks": lambda: prepared(**few),
        "ValueError: FluxTransformer2DModel is parallel already": lambda: prepare_transformer(
            prepared, mesh, style=ring
        ),
        "NotImplementedError: transformer is a Linear": lambda: prepare_transformer(nn.Linear(2, 2), mesh, style=ring),
        "ValueError: style has layout='head_tail'": lambda: prepare_transformer(
            model, mesh, style=ContextParallel(layout="head_tail")
        ),
        "ValueError: gradients='none' is unknown": lambda: prepare_transformer(
            model, mesh, style=ring, gradients="none"
        ),
    }
    return [(words, error_of(call)) for words, call in calls.items()]


@pytest.mark.slow
def test_diffusers(ranks: Any) -> None:
    pytest.importorskip("diffusers")
    for found in ranks(2, diffusion, recipe("diffusers")):
        assert max(found.values()) <= 1e-9, found
    for errors in ranks(2, diffusion_refused):
        assert all(got.startswith(words) for words, got in errors), errors
