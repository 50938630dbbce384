"""Every type of transformers of the installed diffusers: exact, or refused by our own words; the table in ``docs/``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_cp import ContextParallel
from hyper_cp.cli.modes import named_mode
from tests.harness.attention_case import cp_mesh
from tests.harness.diffusion import MADE, NOT_SUPPORTED, NOTES, Draw, tiny_transformer, transformer_types
from tests.harness.hf_models import InDouble
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("diffusers")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "diffusers.md"
TITLE = "## Every type of diffusers "
TOLERANCE = 1e-9
MODES = {"ulysses": named_mode("Ulysses"), "ring": {"ulysses_degree": 1, "kv_exchange": "ring"}}
TABLE = """{exact} of its {count} types of transformers are exact, and all others raise an error. The test
`tests/integrations/test_every_diffusion_model.py` builds a tiny random model of each exact type, with two different
prompts, whose masks hide tokens where the type takes masks of prompts, and numbers of tokens that two ranks do not
divide. It compares the output and the gradients of all parameters with one device, in double precision, in Ulysses and
in a ring. It tries all types in both when this table is written, and a third of them, each in one of the two, in every
run of the tests.

| type | outcome | why |
|---|---|---|
"""


def prepare(model: nn.Module, mode: str, gradients: str = "sum") -> None:
    from hyper_cp.integrations.diffusers import prepare_transformer

    prepare_transformer(model, cp_mesh(), style=ContextParallel(**MODES[mode]), gradients=gradients)


def flat(output: Any) -> Tensor:
    """A tensor of all that a model returns: a tuple of one, images in a list, or lists of several kinds."""
    if isinstance(output, Tensor):
        return output
    parts = [flat(x) for x in output if x is not None]
    return parts[0] if len(parts) == 1 else torch.cat([x.flatten() for x in parts])


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output, and all gradients as one vector."""
    with InDouble():
        output = flat(model(**inputs, return_dict=False))
        output.square().mean().backward()
    return output.detach(), torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def errors(
    name: str, mode: str, gradients: str = "sum", changes: dict[str, Any] | None = None, judge: int = 0, **more: Any
) -> tuple[float, float]:
    """The errors of the output and of the gradients, with ``more`` inputs and ``changes`` of the configuration. One
    rank, the ``judge``, compares with the model alone."""
    model, inputs = tiny_transformer(name, changes)
    prepare(model, mode, gradients)
    output, grads = step(model, inputs | more)
    grads = sum_over_ranks(grads)[0] / (cp_mesh().size() if gradients == "mean" else 1)
    if dist.get_rank() != judge % dist.get_world_size():
        return 0.0, 0.0
    want, expected = step(tiny_transformer(name, changes)[0], inputs | more)
    return relative_error(output, want), relative_error(grads, expected)


@on_ranks
def verdicts(cases: list[tuple[str, str]]) -> dict[str, float]:
    import diffusers

    diffusers.logging.set_verbosity(50)
    return {" ".join(case): max(errors(*case, judge=i)) for i, case in enumerate(cases)}


SAMPLE = [f"{name}Model" for name in ("QwenImageTransformer2D", "HunyuanVideoTransformer3D", "LTXVideoTransformer3D")]
SAMPLE += [f"{name}Model" for name in ("MochiTransformer3D", "PRXTransformer2D", "ErnieImageTransformer2D")]


def test_some_types_on_three_ranks(ranks: Any) -> None:
    """Joint attention with the prompt first and behind, cross-attention, masks of prompts, queries of the image."""
    for found in ranks(3, verdicts, [(name, "ring") for name in SAMPLE]):
        assert max(found.values()) <= TOLERANCE, found


WHOLE = bool(os.environ.get("HYPER_CP_WRITE_README"))
CASES = [(name, mode) for i, name in enumerate(MADE) for j, mode in enumerate(MODES) if WHOLE or i % 6 == 3 * j]
"""All types in both modes when the table is written, and otherwise a third of them, in turns in one or in the other."""


@pytest.mark.parametrize("first", range(0, len(CASES), 10))
def test_every_type_is_exact(ranks: Any, first: int) -> None:
    for found in ranks(2, verdicts, CASES[first : first + 10]):
        assert max(found.values()) <= TOLERANCE, found


def test_the_page_has_every_type() -> None:
    """With HYPER_CP_WRITE_README=1 the table is written instead of compared."""
    import diffusers

    assert set(MADE) | set(NOT_SUPPORTED) == set(transformer_types()) and not set(MADE) & set(NOT_SUPPORTED)
    rows = []
    for name in transformer_types():
        reason = NOTES.get(name, "") if name in MADE else NOT_SUPPORTED[name]
        rows.append(f"| `{name}` | {'exact' if name in MADE else 'refused'} | {reason} |\n")
    table = TABLE.format(exact=len(MADE), count=len(rows)) + "".join(rows)
    text = PAGE.read_text()
    made = text[: text.index(TITLE)] + f"{TITLE}{diffusers.__version__}\n\n{table}"
    if os.environ.get("HYPER_CP_WRITE_README"):
        PAGE.write_text(made)
    elif f"{TITLE}{diffusers.__version__}\n" in text:
        assert text == made, "the table should be written again, with HYPER_CP_WRITE_README=1"


def test_every_type_that_diffusers_splits_is_exact() -> None:
    import diffusers

    planned = {name for name in transformer_types() if getattr(getattr(diffusers, name), "_cp_plan", None)}
    assert len(planned) >= 9 and planned <= set(MADE)


@on_ranks
def other_types() -> list[str]:
    others = [type(name, (nn.Module,), {})() for name in transformer_types() if name not in MADE]
    return [error_of(partial(prepare, made, "ring")) for made in others]


def test_other_types_are_refused(ranks: Any) -> None:
    (found,) = ranks(1, other_types)
    assert len(found) == len(NOT_SUPPORTED) and all(
        x.startswith("NotImplementedError: transformer is a ") for x in found
    )


def hidden(length: int) -> Tensor:
    """A mask that hides two tokens of the second row."""
    mask = torch.ones(2, length, dtype=torch.float64)
    mask[1, 4:6] = 0
    return mask


def variants() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Configurations and inputs that change which tokens see each other, or how tokens are modulated."""
    draw, wan = Draw(), "WanTransformer3DModel"
    image = {"encoder_hidden_states_image": draw(2, 9, 6), "encoder_hidden_states": draw(2, 512, 10)}
    images = {"img_shapes": [[(1, 5, 4), (1, 5, 3)]] * 2}
    helios, ltx = "HeliosTransformer3DModel", "LTX2VideoTransformer3DModel"
    history = {f"latents_history_{name}": None for name in ("short", "mid", "long")}
    times = {"timestep": draw(2, 45).abs(), "audio_timestep": draw(2, 7).abs()}
    perturbed = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([1.0, 0.0]).double()}
    return {
        "an image as a prompt": (wan, {"image_dim": 6, "added_kv_proj_dim": 48}, image),
        "a time for each token": (wan, {}, {"timestep": draw(2, 45).abs()}),
        "a mask of pairs": ("SkyReelsV2Transformer3DModel", {"num_frame_per_block": 3}, {}),
        "a time for each frame": ("CosmosTransformer3DModel", {}, {"timestep": draw(2, 1, 3, 1, 1).abs()}),
        "two images": ("QwenImageTransformer2DModel", {"zero_cond_t": True}, images),
        "attention to the image only": ("SD3Transformer2DModel", {"dual_attention_layers": (0, 1)}, {}),
        "a first frame": ("HunyuanVideoTransformer3DModel", {"image_condition_type": "token_replace"}, {}),
        "a first frame and a prompt": ("HunyuanVideoTransformer3DModel", {"image_condition_type": "latent_concat"}, {}),
        "a product of masks": ("ChromaTransformer2DModel", {}, {"attention_mask": hidden(41)}),
        "a sum with products of masks": ("CogView4Transformer2DModel", {}, {"attention_mask": hidden(6)}),
        "no history": (helios, {"guidance_cross_attn": False, "zero_history_timestep": False}, history),
        "a prompt for the history": (helios, {"guidance_cross_attn": False, "is_amplify_history": False}, {}),
        "a time for each token of both": (ltx, {"rope_type": "split"}, times),
        "no attention in a block": (ltx, {}, {"spatio_temporal_guidance_blocks": [1]}),
        "no attention for a row": (ltx, {"cross_attn_mod": False}, perturbed),
        "audio and video by themselves": (ltx, {}, {"isolate_modalities": True}),
        "video without audio": ("Kandinsky6Transformer3DModel", {}, {"audio_hidden_states": None}),
        "audio and video without gates": (
            "Kandinsky6Transformer3DModel",
            {"ca_rope": False, "cross_gates": False, "fix_modulation": False, "time_dim_a": 12},
            {"encoder_attention_mask": None},
        ),
        "a mask of the prompt": ("GlmImageTransformer2DModel", {}, {"attention_mask": hidden(6)}),
    }


@on_ranks
def of_variants() -> dict[str, float]:
    """The errors of all variants, in turns in one mode and in the other; in both when the table is written."""
    return {
        f"{what} {mode}": max(errors(name, mode, changes=changes, judge=i // 2, **inputs))
        for i, (what, (name, changes, inputs)) in enumerate(variants().items())
        for j, mode in enumerate(MODES)
        if WHOLE or i % 2 == j
    }


def test_variants(ranks: Any) -> None:
    for found in ranks(2, of_variants):
        assert max(found.values()) <= TOLERANCE, found


@on_ranks
def refused_variants() -> list[str]:
    """Motif with attention to the prompt's text beside the joint one, and a control behind the last layer of Wan."""
    second, _ = tiny_transformer("MotifVideoTransformer3DModel", {"enable_text_cross_attention_dual": True})
    control, _ = tiny_transformer("WanVACETransformer3DModel", {"vace_layers": [0, 2]})
    return [error_of(partial(prepare, model, "ring")) for model in (second, control)]


def test_variants_that_are_refused(ranks: Any) -> None:
    for second, control in ranks(2, refused_variants):
        assert second.startswith("NotImplementedError: MotifVideoTransformer3DModel has attention in transformer_bl")
        assert control.startswith("NotImplementedError: vace_layers=[0, 2] has the last of 3 layers")


@on_ranks
def masks_and_lengths() -> tuple[list[float], str]:
    """Masks of the whole sequence, and lengths that coincide, which are refused."""
    shape = 2, 1, 1, 41  # 35 tokens of the image and 6 of the prompt
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(shape, generator=generator) < 0.7
    added = torch.randn(shape, generator=generator, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    pairs = torch.rand(2, 1, 41, 41, generator=generator) < 0.7
    found = [
        max(errors("FluxTransformer2DModel", "ring", gradients, joint_attention_kwargs={"attention_mask": x}))
        for x, gradients in ((mask, "mean"), (added, "sum"), (pairs, "sum"))
    ]
    model, inputs = tiny_transformer("HunyuanVideoTransformer3DModel")
    prepare(model, "ring")
    many = {"encoder_hidden_states": torch.ones(2, 45, 10).double(), "encoder_attention_mask": torch.ones(2, 45).long()}
    return found, error_of(lambda: model(**inputs | many))


def test_masks_and_lengths_that_coincide(ranks: Any) -> None:
    for found, lengths in ranks(2, masks_and_lengths):
        assert max(found) <= TOLERANCE, found
        assert lengths.startswith("NotImplementedError: HunyuanVideoTransformerBlock got freqs_cis of"), lengths


@on_ranks
def sharded_and_recomputed(names: list[str]) -> dict[str, float]:
    """FSDP2 over the same ranks, and gradient checkpointing. A recompute runs outside of a mode in double precision, so
    that norms upcast to fp32 on both sides."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name in names:
        (alone, inputs), (model, _) = tiny_transformer(name), tiny_transformer(name)
        prepare(model, "ring", "mean")
        model.enable_gradient_checkpointing()
        for block in model.blocks if hasattr(model, "blocks") else model.transformer_blocks:
            fully_shard(block, mesh=cp_mesh())
        fully_shard(model, mesh=cp_mesh())
        outputs = [made(**inputs, return_dict=False)[0] for made in (alone, model)]
        for output in outputs:
            output.square().mean().backward()
        both = zip(alone.parameters(), model.parameters(), strict=True)
        pairs = [(x.grad, y.grad.full_tensor()) for x, y in both if x.grad is not None]
        want, got = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
        found[name] = max(relative_error(outputs[1].detach(), outputs[0].detach()), relative_error(got, want))
    return found


def test_fsdp2_and_gradient_checkpointing(ranks: Any) -> None:
    for found in ranks(2, sharded_and_recomputed, ["FluxTransformer2DModel", "WanTransformer3DModel"]):
        assert max(found.values()) <= 5e-6, found
