"""Prepared transformers of diffusers as they are trained: what users do to them afterwards is exact or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hyper_cp import ContextParallel
from tests.harness.attention_case import cp_mesh
from tests.harness.diffusion import tiny_transformer
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("diffusers")

FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
RING: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "ring"}


def prepare(model: nn.Module) -> None:
    from hyper_cp.integrations.diffusers import prepare_transformer

    prepare_transformer(model, cp_mesh(), style=ContextParallel(**RING), gradients="sum")


def pair(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model, one like it that is prepared, and inputs."""
    alone, inputs = tiny_transformer(name)
    model = copy.deepcopy(alone)
    prepare(model)
    return alone, model, inputs


def gradients(model: nn.Module) -> Tensor:
    """The gradients of all parameters that are trained, as one vector."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters() if p.requires_grad]
    )


def compare(alone: Any, model: Any, run: Callable[[Any], list[Tensor]]) -> float:
    """The largest error of the outputs of ``run`` and of the gradients of the sum of their squares' means."""
    with InDouble():
        outputs = [run(made) for made in (alone, model)]
        for of_one in outputs:
            sum(x.square().mean() for x in of_one).backward()  # type: ignore[union-attr]
    pairs = [*zip(*outputs, strict=True), (gradients(alone), sum_over_ranks(gradients(model))[0])]
    return max(relative_error(got.detach(), want.detach()) for want, got in pairs)


def of_width(x: dict[str, Any], width: int) -> dict[str, Any]:
    """The inputs of a Wan with a video of another width."""
    return {**x, "hidden_states": x["hidden_states"][..., :width].contiguous()}


# --------------------------------------------------------------------------- several forwards


@on_ranks
def sampled(gradients_are: str, steps: int) -> tuple[float, float, list[str]]:
    """The errors of the gradients of parameters and of inputs on this rank, for a loss over several steps of sampling,
    each of which begins with the output of the last; and the warnings."""
    from hyper_cp.integrations.diffusers import prepare_transformer

    alone, inputs = tiny_transformer(FLUX)
    model = copy.deepcopy(alone)
    prepare_transformer(model, cp_mesh(), style=ContextParallel(**RING), gradients=gradients_are)
    starts: list[Any] = []
    with InDouble(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        for made in (alone, model):
            start = inputs["hidden_states"].double().clone().requires_grad_()
            x = start * scale if gradients_are == "mean" else start
            for _ in range(steps):
                x = x - 0.5 * made(**{**inputs, "hidden_states": x}).sample
            x.square().mean().backward()
            starts.append(start.grad)
    total = sum_over_ranks(gradients(model))[0] / (2 if gradients_are == "mean" else 1)
    found = relative_error(total, gradients(alone)), relative_error(starts[1], starts[0])
    return *found, [str(x.message) for x in said if "in front of it" in str(x.message)]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("gradients_are", ["sum", "mean"])
def test_gradients_of_inputs_are_those_of_the_whole_image(ranks: Any, gradients_are: str, steps: int) -> None:
    """They were those of this rank's tokens, and with ``"sum"`` an output that is an input, too, gave its n-th part."""
    for of_parameters, of_inputs, said in ranks(2, sampled, gradients_are, steps):
        assert max(of_parameters, of_inputs) <= 1e-10
        assert not said


@on_ranks
def trained_in_front() -> list[str]:
    """The warnings of a model whose prompts come from a trained layer, with ``gradients="sum"``, and of one whose image
    is what another one has made."""
    _, model, inputs = pair(FLUX)
    _, other, _ = pair(FLUX)
    layer = nn.Linear(*[inputs["encoder_hidden_states"].shape[-1]] * 2, dtype=torch.float64)
    with InDouble(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**{**inputs, "encoder_hidden_states": layer(inputs["encoder_hidden_states"])})
        other(**{**inputs, "hidden_states": model(**inputs).sample})
    return [str(x.message) for x in said if "in front of it" in str(x.message)]


def test_a_sum_of_gradients_in_front_of_the_transformer_is_warned_of(ranks: Any) -> None:
    for said in ranks(2, trained_in_front):
        assert len(said) == 1, said
        assert said[0].startswith("encoder_hidden_states of FluxTransformer2DModel come from parameters"), said


@on_ranks
def several_forwards() -> dict[str, float]:
    """Guidance, whose prompts and batches differ, and two models on one mesh that run in turn."""
    found = {}
    alone, model, inputs = pair(QWEN)
    text, mask = inputs["encoder_hidden_states"], inputs["encoder_hidden_states_mask"]
    one = {name: x[:1] for name, x in inputs.items()}
    shorter = {**inputs, "encoder_hidden_states": text[:, :3], "encoder_hidden_states_mask": mask[:, :3]}
    found["guidance"] = compare(alone, model, lambda made: [made(**x).sample for x in (one, shorter, inputs)])
    alone, model, inputs = pair(WAN)
    low_alone, low, _ = pair(WAN)
    for p in (*low_alone.parameters(), *low.parameters()):
        p.data.mul_(0.9)
    narrow = of_width(inputs, 8)
    both = nn.ModuleList([alone, low_alone]), nn.ModuleList([model, low])
    found["two"] = compare(
        *both, lambda made: [made[0](**inputs).sample, made[1](**inputs).sample, made[0](**narrow).sample]
    )
    return found


def test_guidance_and_two_transformers(ranks: Any) -> None:
    for found in ranks(2, several_forwards):
        assert max(found.values()) <= 1e-9, found


@on_ranks
def sharded_parameters() -> tuple[float, float]:
    """The errors of the output and of the gradients under FSDP2, in which blocks hold a share of their parameters."""
    from hyper_cp.integrations.diffusers import prepare_transformer

    alone, inputs = tiny_transformer("LatteTransformer3DModel")
    model, mesh = copy.deepcopy(alone), cp_mesh()
    prepare_transformer(model, mesh, style=ContextParallel(**RING))
    for blocks in (x for x in model.children() if isinstance(x, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with InDouble():
        outputs = [made(**inputs).sample for made in (alone, model)]
        for output in outputs:
            output.square().mean().backward()
    got = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    grads = torch.cat([x.flatten() for x in got]), torch.cat([p.grad.flatten() for p in alone.parameters()])
    return relative_error(outputs[1].detach(), outputs[0].detach()), relative_error(*grads)


def test_parameters_sharded_by_fsdp(ranks: Any) -> None:
    for found in ranks(2, sharded_parameters):
        assert max(found) <= 1e-9, found


@on_ranks
def recomputed_later(name: str) -> float:
    """Two forwards with gradient checkpointing before one backward. A video 10 wide has 45 tokens and needs a row of
    padding, one 8 wide has 36 and needs none. Recomputes upcast norms to fp32, on both sides."""
    alone, model, inputs = pair(name)
    for made in (alone, model):
        made.enable_gradient_checkpointing()
    for made in (alone, model):
        loss = sum(made(**of_width(inputs, width)).sample.square().mean() for width in (10, 8))
        loss.backward()
    return relative_error(sum_over_ranks(gradients(model))[0], gradients(alone))


def test_a_recompute_after_another_forward(ranks: Any) -> None:
    for found in ranks(2, recomputed_later, WAN):
        assert found <= 5e-6


# --------------------------------------------------------------------------- adapters


def add_adapter(made: Any, seed: int) -> None:
    from peft import LoraConfig

    torch.manual_seed(seed)
    layers = ["to_q", "to_v", "to_out.0", "proj_mlp"]
    made.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    made.double()


@on_ranks
def with_adapters() -> tuple[float, float, str, str]:
    """Adapters that are added before the first forward and after it; and such that each rank has drawn by itself, or
    that average over tokens."""
    from peft import LilyConfig

    found = []
    for ran in (False, True):
        alone, model, inputs = pair(FLUX)
        if ran:
            model(**inputs)
        for made in (alone, model):
            add_adapter(made, 3)
        found.append(compare(alone, model, lambda made: [made(**inputs).sample]))
    _, model, inputs = pair(FLUX)
    model(**inputs)
    add_adapter(model, dist.get_rank())
    differ = error_of(lambda: model(**inputs))
    _, model, inputs = pair(FLUX)
    model(**inputs)
    model.add_adapter(LilyConfig(r=4, target_modules=["to_q"]))
    return found[0], found[1], differ, error_of(lambda: model(**inputs))


def test_adapters_after_preparation(ranks: Any) -> None:
    pytest.importorskip("peft")
    for before, after, differ, averages in ranks(2, with_adapters):
        assert max(before, after) <= 1e-9
        assert differ.startswith("ValueError: ") and "lora_A" in differ and "different weights" in differ, differ
        assert "has a Lily adapter" in averages, averages


# --------------------------------------------------------------------------- other attention


class ByHand:
    """An attention processor of a user's, which computes attention without a call that could be routed."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any) -> Any:
        x = hidden_states if encoder_hidden_states is None else torch.cat([encoder_hidden_states, hidden_states], 1)
        q, k, v = (f(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v))
        out = self.attend(q, k, v).transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        return attn.to_out[0](image), attn.to_add_out(text)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class BySDPA(ByHand):
    """One that calls PyTorch's attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@on_ranks
def other_attention() -> tuple[float, float, str, str]:
    """Processors and fused projections that are set after preparation, and a cache that is applied without the model's
    own method."""
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    alone, model, inputs = pair(FLUX)
    prepared = copy.deepcopy(model)
    for made in (alone, model):
        made.set_attn_processor(BySDPA())
    routed = compare(alone, model, lambda made: [made(**inputs).sample])
    model.set_attn_processor(ByHand())
    by_hand = error_of(lambda: model(**inputs))
    alone, _ = tiny_transformer(FLUX)
    prepared.fuse_qkv_projections()
    with InDouble():
        fused = relative_error(prepared(**inputs).sample.detach(), alone(**inputs).sample.detach())
    _, cached, inputs = pair(WAN)
    apply_first_block_cache(cached, FirstBlockCacheConfig(threshold=0.5))
    with cached.cache_context("prompt"):
        return routed, fused, by_hand, error_of(lambda: cached(**inputs))


def test_other_attention_after_preparation(ranks: Any) -> None:
    for routed, fused, by_hand, cached in ranks(2, other_attention):
        assert max(routed, fused) <= 1e-9
        assert by_hand.startswith("RuntimeError: module 'transformer_blocks.0.attn' (FluxAttention) returned without")
        assert cached.startswith("NotImplementedError: WanTransformer3DModel runs with enable_parallelism or a cache")


# --------------------------------------------------------------------------- autocast


@on_ranks
def under_autocast(names: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Errors of output and gradients against double precision, on one device and on the ranks."""
    found = {}
    for name in names:
        alone, model, inputs = pair(name)
        with InDouble():
            want = alone(**inputs, return_dict=False)[0]
            want.square().mean().backward()
        expected = gradients(alone)
        inputs = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
        found[name] = []
        for made in (alone.float(), model.float()):
            made.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = made(**inputs, return_dict=False)[0]
            output.float().square().mean().backward()
            grads = gradients(made) if made is alone else sum_over_ranks(gradients(made))[0]
            error = relative_error(output.detach().double(), want.detach())
            found[name].append((error, relative_error(grads.double(), expected)))
    return found


def test_autocast(ranks: Any) -> None:
    for found in ranks(2, under_autocast, [FLUX, WAN]):
        for alone, split in found.values():
            assert all(y <= 1.5 * x for x, y in zip(alone, split, strict=True)), found


# --------------------------------------------------------------------------- what is not split as it should be


def outcome(
    name: str, changes: dict[str, Any], inputs: dict[str, Any], then: Callable[[Any], None] = lambda _: None
) -> str:
    """The error of a prepared model, or that its output is or is not that of one device."""
    alone, given = tiny_transformer(name, changes)
    model = copy.deepcopy(alone)
    try:
        prepare(model)
        for made in (alone, model):
            then(made)
        found = compare(alone, model, lambda made: [made(**given | inputs, return_dict=False)[0]])
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "exact" if found <= 1e-9 else f"wrong by {found:.1g}"


def smooth_queries(made: Any) -> None:
    """Smoothed energy guidance, as the guider applies it."""
    from diffusers.hooks.smoothed_energy_guidance_utils import (
        SmoothedEnergyGuidanceConfig,
        _apply_smoothed_energy_guidance_hook,
    )

    _apply_smoothed_energy_guidance_hook(made, SmoothedEnergyGuidanceConfig(indices=[0]), 1.0)


@on_ranks
def not_split() -> dict[str, str]:
    draw = torch.Generator().manual_seed(3)
    prompt = torch.randn(2, 18, 10, generator=draw, dtype=torch.float64)  # as many tokens as a rank has of the image
    two_tokens = torch.randn(2, 4, 4, 2, generator=draw, dtype=torch.float64)
    five = torch.randn(2, 5, 10, generator=draw, dtype=torch.float64)
    holes = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0]]).bool()
    of_prompt = {"encoder_hidden_states": prompt, "encoder_attention_mask": None}
    without = {"encoder_hidden_states": None, "encoder_attention_mask": None}
    return {
        "queries that are smoothed": outcome(WAN, {}, {}, smooth_queries),
        "a prompt in place of the image": outcome("Transformer2DModel", {"only_cross_attention": True}, of_prompt),
        "the image in place of a prompt": outcome("Transformer2DModel", {"double_self_attention": True}, without),
        "a share as long as the image": outcome(
            "CogView4Transformer2DModel", {}, {"hidden_states": two_tokens, "encoder_hidden_states": five}
        ),
        "a mask with holes": outcome("MochiTransformer3DModel", {}, {"encoder_attention_mask": holes}),
        "one without": outcome("MochiTransformer3DModel", {}, {"encoder_attention_mask": holes.sort(-1)[0].flip(-1)}),
    }


def test_what_is_not_split_is_refused(ranks: Any) -> None:
    for found in ranks(2, not_split):
        assert found.pop("one without") == "exact"
        words = [
            "NotImplementedError: WanTransformer3DModel runs with smoothed energy guidance",
            "NotImplementedError: Attention got encoder_hidden_states where blocks",
            "NotImplementedError: Attention got no encoder_hidden_states",
            "ValueError: 2 tokens of the image and 5 of the prompt cannot be split",
            "NotImplementedError: MochiTransformerBlock got an encoder_attention_mask that hides tokens before",
        ]
        assert all(got.startswith(text) for got, text in zip(found.values(), words, strict=True)), found
