"""Models with scores or masks of their own: sinks, softcap, image tokens that see each other, positions of three
dimensions. Logits and every gradient are those of one device."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import SMALL, VOCABULARY, InDouble, gradients, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

hf: Any = pytest.importorskip("transformers")


def compare(model: Any, batch: dict[str, Any], styles: list[dict[str, Any]]) -> dict[str, float]:
    """The largest error, in each style, of the logits and of every gradient that is not nothing but rounding."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    found, alone, mask = {}, copy.deepcopy(model), batch["attention_mask"].bool()
    given = {name: x for name, x in batch.items() if name != "labels"}
    with InDouble():
        want = alone(**given, use_cache=False).logits
        flat = want[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        torch.nn.functional.cross_entropy(*flat, ignore_index=-100).backward()
    scale = max(x.abs().max().item() for x in gradients(alone))
    for options in styles:
        style = ContextParallel(**options)
        handler = ContextParallelHandler(cp_mesh(), style)
        made = prepare_model(copy.deepcopy(model), handler.mesh, style=style)
        local = prepare_batch(handler, given)
        labels = handler.get_batch_on_this_cp_rank({"labels": batch["labels"]}, shift_labels=True)["shift_labels"]
        with InDouble():
            logits = made(**local).logits
            handler.mean_loss(logits, labels, gradients="sum").backward()
        whole = handler.combine(logits.detach(), 1, documents=local["context_parallel"].documents)
        pairs = zip(sum_over_ranks(*gradients(made)), gradients(alone), strict=True)
        worst = [relative_error(a, b) for a, b in pairs if b.abs().max() > 1e-9 * scale]
        found[str(options)] = max(relative_error(whole[mask], want.detach()[mask]), *worst)
    return found


# --------------------------------------------------------------------------- sinks and softcap

KINDS = ["gpt_oss", "gemma2", "vaultgemma"]
WAYS: list[dict[str, Any]] = [
    {"ulysses_degree": 1, "kv_exchange": "ring"},
    {"ulysses_degree": 1, "kv_exchange": "all_gather"},
    {"ulysses_degree": None},
    {"ulysses_degree": 2, "kv_exchange": "ring"},
]


@on_ranks
def errors_of_scores(kind: str, ways: list[dict[str, Any]]) -> dict[str, float]:
    ids = tokens(24)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    styles = [{**way, "layout": layout} for way, layout in itertools.product(ways, ("contiguous", "head_tail"))]
    return compare(tiny_causal(kind), batch, styles)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_sinks_and_softcap_of_models_are_exact_in_every_mode(ranks: Any, world: int) -> None:
    for kind in KINDS:
        for found in ranks(world, errors_of_scores, kind, WAYS[: 3 if world == 2 else 4], timeout=300):
            assert max(found.values()) <= 1e-9, (kind, found)


# --------------------------------------------------------------------------- images and text

STYLES: list[dict[str, Any]] = [
    {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "kv_exchange": "needed"},
]
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
IMAGES = [0] * 4 + [1] * 5 + [0] * 3 + [1] * 6 + [0] * 6
"""Types of tokens: two images, which cross the boundaries between ranks."""
PREFIX = [0] * 14 + [1] * 10


def model_of(kind: str) -> tuple[Any, list[int]]:
    """A model in double precision, and types of tokens that it makes masks of."""
    text = {**SMALL, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(7)
    if kind == "gemma3":
        config = hf.Gemma3Config(
            text_config={**text, "query_pre_attn_scalar": 8}, vision_config=VISION, mm_tokens_per_image=4
        )
        model = hf.Gemma3ForConditionalGeneration(config)
    elif kind == "gemma4":
        more = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "global_head_dim": 8}
        small = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
        kinds = {"image_token_id": 58, "video_token_id": 59, "audio_token_id": 60}
        config = hf.Gemma4Config(text_config={**text, **more}, vision_config={**VISION, **small}, **kinds)
        model = hf.Gemma4ForConditionalGeneration(config)
    elif kind == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        config = hf.Qwen2_5_VLConfig(text_config={**SMALL, "rope_parameters": rope}, vision_config=vision)
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    else:
        text = {**text, "model_type": "gemma2", "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
        config = hf.PaliGemmaConfig(text_config=text, vision_config={**VISION, "projection_dim": 32}, projection_dim=32)
        model = hf.PaliGemmaForConditionalGeneration(config)
        model.set_attn_implementation("eager")
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model, PREFIX if kind == "paligemma" else IMAGES


def batch_of(model: Any, types: list[int]) -> dict[str, Any]:
    ids = tokens(len(types)).clamp(max=VOCABULARY - 3)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    embeddings = model.get_input_embeddings()(ids).detach()
    batch = {"inputs_embeds": embeddings, "attention_mask": mask, "labels": labels}
    if "Qwen" in type(model).__name__:  # an image has one position in time, and a grid of others
        at = torch.arange(len(types))
        rows = torch.where(torch.tensor(types) == 1, at // 3, at), torch.where(torch.tensor(types) == 1, at % 3, at)
        return {**batch, "position_ids": torch.stack([at, *rows])[:, None].expand(3, 2, -1)}
    name = "mm_token_type_ids" if "Gemma4" in type(model).__name__ else "token_type_ids"
    return {**batch, name: torch.tensor(types).expand(2, -1)}


@on_ranks
def errors_of_images(kind: str) -> dict[str, float]:
    model, types = model_of(kind)
    return compare(model, batch_of(model, types), STYLES)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "paligemma", "qwen2_5_vl"])
def test_models_of_images_and_text_are_exact(ranks: Any, kind: str) -> None:
    for found in ranks(2, errors_of_images, kind):
        assert max(found.values()) <= 1e-9, found


# --------------------------------------------------------------------------- packed documents with positions of axes

PACKED = [5, 9, 10]


@on_ranks
def packed_axes(prepared: bool) -> float:
    """The error of packed documents of a text model of images, whose positions are ``[4, B, S]``."""
    from hyper_cp.integrations.transformers import prepare_batch, prepare_model

    model = model_of("qwen2_5_vl")[0].model.language_model
    text = torch.cat([torch.arange(n) for n in PACKED])
    grid = torch.stack([text, text // 3, text % 3])
    ids = tokens(len(text)).clamp(max=VOCABULARY - 3)
    embeddings = model.embed_tokens(ids).detach()
    positions = torch.cat([text[None], grid])[:, None].expand(4, 2, -1)
    given = {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}
    with InDouble():
        want = model(**given).last_hidden_state
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    handler = ContextParallelHandler(cp_mesh(), style)
    made = prepare_model(copy.deepcopy(model), handler.mesh, style=style)
    local: dict[str, Any] = {
        name: handler.dispatch(x, -1 if x is positions else 1) for name, x in given.items() if x is not False
    }
    with InDouble():
        out = made(**(prepare_batch(handler, given) if prepared else {**local, "use_cache": False})).last_hidden_state
    with pytest.raises(ValueError, match=r"position_ids of 3 axes go back along the sequence"):
        prepare_batch(handler, {**given, "position_ids": positions[1:]})
    with pytest.raises(ValueError, match=r"position_ids of 3 axes go back along the sequence"):
        made(**{**local, "position_ids": local["position_ids"][1:]})
    return relative_error(handler.combine(out, 1), want)


@pytest.mark.parametrize("prepared", [True, False])
def test_packed_documents_of_models_of_images_stay_apart(ranks: Any, prepared: bool) -> None:
    assert max(ranks(2, packed_axes, prepared)) <= 1e-10
