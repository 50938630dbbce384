"""Transformers of diffusers on two ranks, as the page of the recipe prints it: output and gradients of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_cp import ContextParallel
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks
from tests.harness.recipes import gradient_error, recipe


def transformer(kind: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """A tiny transformer in double precision, its inputs and a target."""
    import diffusers

    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    torch.manual_seed(7)
    if kind == "flux":
        sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4}
        sizes |= {"attention_head_dim": 8, "joint_attention_dim": 12, "pooled_projection_dim": 6}
        made = diffusers.FluxTransformer2DModel(**sizes, axes_dims_rope=(2, 2, 4))
        prompt, grid = 7, torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(7.0)).double()
        ids = {"img_ids": grid, "txt_ids": torch.zeros(prompt, 3, dtype=torch.float64)}
        inputs = {"hidden_states": draw(2, 35, 4), "encoder_hidden_states": draw(2, prompt, 12), **ids}
        inputs |= {"pooled_projections": draw(2, 6), "timestep": torch.tensor([0.3, 0.8]).double()}
        target = draw(2, 35, 4)
    elif kind == "flux2":
        sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4}
        sizes |= {"attention_head_dim": 8, "joint_attention_dim": 12, "timestep_guidance_channels": 6}
        made = diffusers.Flux2Transformer2DModel(**sizes, axes_dims_rope=(2, 2, 2, 2))
        grid = torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(7.0), torch.zeros(1))
        ids = {"img_ids": grid.expand(2, -1, -1).double(), "txt_ids": torch.zeros(2, 7, 4, dtype=torch.float64)}
        ids["txt_ids"][:, :, 3] = torch.arange(7)
        inputs = {"hidden_states": draw(2, 35, 4), "encoder_hidden_states": draw(2, 7, 12), **ids}
        inputs |= {"guidance": draw(2).abs(), "timestep": torch.tensor([0.3, 0.8]).double()}
        target = draw(2, 35, 4)
    else:
        sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 4}
        sizes |= {"attention_head_dim": 12, "text_dim": 10, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 32}
        chrono = kind == "chronoedit"
        made = (diffusers.ChronoEditTransformer3DModel if chrono else diffusers.WanTransformer3DModel)(**sizes)
        inputs = {"hidden_states": draw(1, 4, 3, 6, 10), "encoder_hidden_states": draw(1, 5, 10)}
        inputs["timestep"], target = torch.tensor([3.0]).double(), draw(1, 4, 3, 6, 10)
        if kind == "wan, a time for each token":
            inputs["timestep"] = draw(1, 45).abs()
    made = made.double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return made, inputs, target


@on_ranks
def diffusion(code: str) -> dict[str, float]:
    found = {}
    modes = {"flux": {"ulysses_degree": 2}, "wan": {"ulysses_degree": None}, "wan, a time for each token": {}}
    modes |= {"flux2": {"ulysses_degree": None}, "chronoedit": {"ulysses_degree": None}}
    for kind, mode in modes.items():
        model, inputs, target = transformer(kind)
        for options in (None, mode):
            used = code
            if options is not None:
                used = code.replace('ulysses_degree=1, kv_exchange="ring"', repr(options).join(("**", "")))
            oracle, made = copy.deepcopy(model), copy.deepcopy(model)
            with InDouble():
                want = oracle(**inputs).sample
                F.mse_loss(want, target).backward()
                names = {"transformer": made, "mesh": cp_mesh(), "inputs": inputs, "target": target}
                if options and kind == "flux":
                    made.enable_gradient_checkpointing()
                exec(used, names)
            got = names["noise"].detach()
            found[f"{kind} {options}"] = max(relative_error(got, want.detach()), gradient_error(made, oracle))
    return found


@on_ranks
def diffusion_refused() -> list[tuple[str, str]]:
    from diffusers import FirstBlockCacheConfig

    from hyper_cp.integrations.diffusers import prepare_transformer

    model, inputs, _ = transformer("flux")
    mesh, ring = cp_mesh(), ContextParallel(ulysses_degree=1, kv_exchange="ring")
    prepared = copy.deepcopy(model)
    prepare_transformer(prepared, mesh, style=ring)
    other = copy.deepcopy(prepared)  # a copy (of a moving average, say) has the hooks too, and has not compared inputs
    noise = {**inputs, "hidden_states": inputs["hidden_states"] + dist.get_rank()}
    cached = copy.deepcopy(other)
    cached.enable_cache(FirstBlockCacheConfig())
    second, of_second, _ = transformer("flux2")
    prepare_transformer(second, mesh, style=ring)
    few = {**inputs, "hidden_states": inputs["hidden_states"][:, :1], "img_ids": inputs["img_ids"][:1]}
    calls = {
        "ValueError: FluxTransformer2DModel: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) split batches "
        "that differ in hidden_states: ranks [1] have": lambda: other(**noise),
        "NotImplementedError: FluxTransformer2DModel runs with enable_parallelism or a c": lambda: cached(**inputs),
        "NotImplementedError: FluxTransformer2DModel got controlnet_block_samples": lambda: prepared(
            **inputs, controlnet_block_samples=[inputs["hidden_states"]]
        ),
        "NotImplementedError: Flux2Transformer2DModel got kv_cache_mode. Their rows are": lambda: second(
            **of_second, kv_cache_mode="extract", num_ref_tokens=5
        ),
        "ValueError: 1 tokens of the image and 7 of the prompt cannot be split over 2 ranks": lambda: prepared(**few),
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
        recomputed = found.pop("flux {'ulysses_degree': 2}")  # outside of the mode: norms upcast to fp32
        assert max(found.values()) <= 1e-9 and recomputed <= 5e-6, found
    for errors in ranks(2, diffusion_refused):
        assert all(got.startswith(words) for words, got in errors), errors
