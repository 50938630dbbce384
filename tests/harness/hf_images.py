"""A tiny random model of types of ``AutoModelForImageTextToText``, made by rule, and a batch of images for it."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.harness import hf_audio, hf_by_hand, hf_causal
from tests.harness.hf_audio import AUDIO, owner
from tests.harness.hf_causal import CHANGES as HYBRID
from tests.harness.hf_causal import COMPASS, SIZES, NotTiny, _each, _has, _is_fixed, random_model

VOCABULARY, IMAGE, VIDEO = 61, 58, 59
TOKENS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
LARGEST = 8_000_000
VISION: dict[str, Any] = {
    **_each("hidden_size embed_dim d_model vision_embed_dim", 16),
    **_each("intermediate_size mlp_dim", 24),
    **_each("num_hidden_layers depth num_layers encoder_layers", 2),
    **_each("num_attention_heads num_heads num_key_value_heads attention_heads encoder_attention_heads", 2),
    **_each("head_dim", 8),
    **_each("image_size", 16),
    **_each("patch_size", 4),
    **_each("out_hidden_size projection_dim output_dim text_hidden_size projector_hidden_size", 32),
    **_each("num_position_embeddings position_embedding_size", 64),
    **_each("window_size", 8),
    **_each("attention_dropout hidden_dropout dropout drop_path_rate projection_dropout", 0.0),
}
"""Sizes of vision towers, for those of these attributes that a configuration has."""
GRIDS = [(1, 4, 4), (1, 4, 8)]
"""Patches of the two images of towers that take any size."""


def _sizes(config: Any, table: dict[str, Any]) -> dict[str, Any]:
    fixed = {name for name in table if _is_fixed(config, name, SIZES.get(name))}
    return {name: x for name, x in table.items() if name not in fixed and _has(config, name)}


DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
MARKS = {"vision_start_token_id": 55, "audio_start_token_id": 56, "position_id_per_seconds": 1}
TILES = {"image_grid_pinpoints": [[16, 32]], "vision_config": {"image_size": 16}}
GEMMA4 = {
    "vision_config": {
        "model_type": "gemma4_vision",
        **{name: x for name, x in VISION.items() if name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        **_each("num_attention_heads num_key_value_heads", 2),
        **_each("head_dim", 8),
        **_each("patch_size", 4),
        **_each("pooling_kernel_size", 2),
        **_each("position_embedding_size", 64),
    },
    "text_config": {
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": 0,
    },
}
HIGH: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 24, "output_channels": 8},
    **{"image_size": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1]},
}
PARTS = ("text_config", "vision_config", "audio_config", "encoder_config", "adaptor_config")
CHANGES: dict[str, dict[str, Any]] = {
    **{
        kind: {"qformer_config": {"model_type": f"{name}_qformer", **hf_by_hand.QFORMER}, "num_query_tokens": 4}
        for kind, name in [("blip-2", "blip_2"), ("instructblip", "instructblip")]
    },
    "cohere_compass": {"text_config": {"rope_parameters": COMPASS}},
    "deepseek_vl_hybrid": {"high_res_vision_config": HIGH},
    "florence2": {
        "vision_config": {
            **{"patch_size": [7, 3, 3, 3], "embed_dim": [8, 8, 8, 16], "num_heads": [1, 1, 1, 2]},
            **{"num_groups": [1, 1, 1, 2], "depths": [1, 1, 1, 1], "projection_dim": 32},
        },
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "gemma4": GEMMA4,
    "llama4": {
        "text_config": {
            **_each("intermediate_size_mlp", 24),
            **{"attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 3},
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "vision_config": {
            **_each("vision_output_dim projector_input_dim projector_output_dim", 16),
            **_each("hidden_size", 16),
            **_each("intermediate_size", 64),
        },
    },
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            **{"num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 48},
            **{"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "max_num_tiles": 2},
        },
    },
    "qwen2_vl": {"vision_config": {"hidden_size": 32}},
    "qwen3_vl": DEEPSTACK,
    "qwen3_vl_moe": DEEPSTACK,
    "cosmos3_omni": DEEPSTACK,
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": {**TILES, "vision_aspect_ratio": "anyres_max_9"},
    "granite4_vision": {
        **{"image_grid_pinpoints": [[16, 32]], "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]},
        **{"spatial_target_layers": [1, 2, 3, 4], "projector_dropout": 0.0},
        "vision_config": {"image_size": 16, "hidden_size": 64},
        "text_config": {"num_hidden_layers": 5},
        "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 24, "num_hidden_layers": 1},
    },
    "kimi_k25": {"projection_hidden_size": 16},
    "qwen2_5_omni_thinker": MARKS,
    "qwen3_omni_moe_thinker": {**MARKS, **DEEPSTACK},
    "glm4v_moe": {"text_config": {"head_dim": 16}},
    "paligemma": {"projection_dim": 32},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [16, 16], "head_dim": 8}},
    "glm5_next": {
        "text_config": {
            **{"index_kpool": 3, "qk_rope_head_dim": 0, "hc_mult": 2, "mlp_layer_types": ["dense", "sparse"]},
            "layer_types": ["linear_attention", "indexed_attention"],
        },
    },
    "qwen4_exp": {"text_config": HYBRID["qwen4_exp_text"]},
}
"""Changes that a type needs in addition."""


def takes_images(kind: str) -> bool:
    """True for the model types that ``AutoModelForImageTextToText`` knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@cache
def _classes() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    more = {"audioflamingo3": "AudioFlamingo3", "musicflamingo": "MusicFlamingo"}
    return {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **{x: f"{y}ForConditionalGeneration" for x, y in more.items()}}


def image_types() -> list[str]:
    """The model types that ``AutoModelForMultimodalLM`` knows, and two that it does not."""
    return sorted(_classes())


def class_name(kind: str) -> str:
    """The name of the class of a model type."""
    return _classes()[kind]


def _text(config: Any, kind: str) -> dict[str, Any]:
    import transformers as hf

    sizes = _sizes(config, SIZES)
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
    rope = getattr(config, "rope_parameters", None) or {}
    module = inspect.getmodule(getattr(hf, class_name(kind)))
    nested = {name: x for name, x in rope.items() if isinstance(x, dict)}
    if nested:
        sizes["rope_parameters"] = {name: {**x, "mrope_section": [1, 1, 2]} for name, x in nested.items()}
    elif "mrope_section" in rope or "mrope_section" in inspect.getsource(module) or kind.startswith("glm"):
        rope = rope or {"rope_type": "default", "rope_theta": 1e4}
        sizes["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2]}
    if getattr(config, "layer_types", None):
        names = list(dict.fromkeys(config.layer_types))[:2]
        sizes["layer_types"] = (names * 2)[:2]
    return {**sizes, "experts_implementation": "eager"}


@cache
def tiny_config(kind: str) -> Any:
    """A small configuration of a model type; :class:`NotTiny` if there is none."""
    import transformers as hf

    try:
        default, changes = hf.CONFIG_MAPPING[kind](), {**CHANGES, **hf_by_hand.CONFIGS}.get(kind, {})
        if changes or any(getattr(default, name, None) is not None for name in PARTS):
            config = _config_of_parts(kind, default, changes)
            if tower := hf_by_hand.TOWERS.get(kind):
                vars(config)["vision_config"] = hf.SiglipVisionConfig(**tower)  # past the check of its type
        else:  # that of a decoder alone
            config = hf_causal.text_config(kind, hf_causal.CAUSAL, default)
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(hf, class_name(kind))(config).parameters())
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {str(error)[:200]}") from error
    if size > LARGEST:
        raise NotTiny(f"{size / 1e6:.0f} million parameters")
    return config


def _config_of_parts(kind: str, default: Any, changes: dict[str, Any]) -> Any:
    """A small configuration that consists of those of several models."""
    parts: dict[str, Any] = {}
    more = {**_sizes(default, _each("projection_dim", 32)), **changes}
    for name, x in hf_audio.CHANGES.get(kind, {}).items():
        more[name] = {**more.get(name, {}), **x} if isinstance(x, dict) else x
    for name in PARTS:
        part = getattr(default, name, None)
        if part is None:
            parts |= {name: {}} if name in more else {}
            continue
        table = VISION if name == "vision_config" else hf_audio.SIZES
        made = _text(part, kind) if name == "text_config" else _sizes(part, table)
        parts[name] = {"model_type": part.model_type, **made}
    for name in parts:
        parts[name] |= more.pop(name, {})
    ids = {f"{kind}_token_{end}": x for kind, x in TOKENS.items() for end in ("id", "index")}
    ids = {name: x for name, x in ids.items() if _has(default, name) and name not in type(default).attribute_map}
    return type(default)(**{"experts_implementation": "eager", **parts, **ids, **more})


def tiny(kind: str) -> Any:
    """A model in double precision, in evaluation mode, with the same random weights on every rank."""
    import transformers as hf

    return random_model(getattr(hf, class_name(kind)), copy.deepcopy(tiny_config(kind)))


def images(model: Any, grids: list[tuple[int, int, int]] = GRIDS, seed: int = 3, video: bool = False) -> dict[str, Any]:
    """Entries of a batch that hold these images (of equal size for towers that take one size only)."""
    inner, generator = owner(model), torch.Generator().manual_seed(seed)
    if made := hf_by_hand.ENTRIES.get(inner.config.model_type):
        return made(inner.config, generator)
    names = inspect.signature(type(inner).get_image_features).parameters
    config = inner.config.vision_config
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    patch, side = (x if isinstance(x, int) else x[0] for x in (config.patch_size, getattr(config, "image_size", 16)))
    found: dict[str, Any]
    if "spatial_shapes" in names:
        sizes, mask = torch.tensor([(4, 4), (4, 8)][: len(grids)]), torch.ones(len(grids), 32, dtype=torch.int64)
        mask[0, 16:] = 0
        patches = torch.randn(len(grids), 32, channels * patch**2, generator=generator, dtype=torch.float64)
        return {"pixel_values": patches, "spatial_shapes": sizes, "pixel_attention_mask": mask}
    if "image_grid_thw" in names:
        count = sum(t * h * w for t, h, w in grids)
        width = channels * getattr(config, "temporal_patch_size", 1) * patch**2
        pixels, end = torch.randn(count, width, generator=generator, dtype=torch.float64), ""
        end = "_videos" if video else ""
        if type(inner).__name__.startswith(("Kimi", "PaddleOCR")):
            pixels = pixels.view(count, channels, patch, patch)
        kind = "video" if video else "image"
        found = {f"pixel_values{end}": pixels, f"{kind}_grid_thw": torch.tensor(grids)}
        return found | ({f"{kind}_merge_sizes": torch.tensor([2] * len(grids))} if "image_merge_sizes" in names else {})
    shape = (len(grids), channels, side, side)
    source = inspect.getsource(inspect.unwrap(type(inner).get_image_features))
    if "image_position_ids" in names:
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).flatten(0, 1)
        pixels = torch.rand(len(grids), 16, channels * patch**2, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "image_position_ids": at.expand(len(grids), -1, -1).clone()}
    if "batch_size, num_images," in source:
        shape = (2, len(grids), *shape[1:])
    pixels = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if "batch_size, num_images," in source:
        pixels[1] = 0.0
    found = {"pixel_values": pixels}
    if "image_sizes" in names and names["image_sizes"].default is inspect.Parameter.empty:
        sizes = [(side, side), (side // 2, side)]
        found["image_sizes"] = torch.tensor([sizes[i % 2] for i in range(len(grids))])
        if hasattr(inner.config, "image_grid_pinpoints"):
            found["pixel_values"] = torch.randn(len(grids), 3, *shape[1:], generator=generator, dtype=torch.float64)
    return found


def item_of(entries: dict[str, Any], i: int) -> dict[str, Any]:
    """The entries of one of the images."""
    own = {name: x[i : i + 1] for name, x in entries.items()}
    if "image_grid_thw" in entries:
        sizes = entries["image_grid_thw"].prod(1).tolist()
        own["pixel_values"] = entries["pixel_values"].split(sizes)[i]
    return own


def rows_of(model: Any, entries: dict[str, Any], name: str = "") -> list[int]:
    """The numbers of rows that the model makes of each image, or by the method of this name."""
    if made := hf_by_hand.ROWS.get(model.config.model_type):
        return made
    name = name or next(x for x in ("get_image_features", "get_video_features") if hasattr(owner(model), x))
    with torch.no_grad():
        output = getattr(owner(model), name)(**entries, return_dict=True)
    tagged = getattr(output, "deepstack_features", None)
    if tagged and isinstance(tagged[0], tuple) and isinstance(tagged[0][0], int):
        found = tagged[0][1]
    elif output.pooler_output is None or "Llama4" in type(model).__name__:
        found = output.last_hidden_state
    else:
        found = output.pooler_output
    return [x.shape[:-1].numel() for x in found]


def tiled_images(config: Any, seen: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Images of one and two tiles, of which tokens see the tiles with content (Mllama)."""
    shape = (2, 2, config.max_num_tiles, 3, config.image_size, config.image_size)
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    pixels[1, 1] = pixels[0, 0, 1] = pixels[1, 0, 1] = 0.0
    tiles = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [1, 0]]])
    ratios = torch.tensor([[1, 2], [1, 0]])
    entries = {"pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": tiles}
    return {"cross_attention_mask": seen[..., None] * tiles[:, None], **entries}


def plain_images(config: Any, seen: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Images of one size (Idefics)."""
    pixels = torch.randn(2, 2, 3, config.image_size, config.image_size, generator=generator, dtype=torch.float64)
    pixels[1, 1] = 0.0
    return {"image_attention_mask": seen, "pixel_values": pixels}


def one_image_a_row(config: Any, seen: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """An image, which all tokens of its row see (BLIP)."""
    shape = (2, 3, config.image_size, config.image_size)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


KEYS = {"blip": one_image_a_row, "idefics": plain_images, "mllama": tiled_images}
"""Functions that make the entries of images for models whose layers attend to them."""


def keys_batch(model: Any, length: int = 40) -> dict[str, Any]:
    """Two rows of tokens for a model whose layers attend to images. The first one has two images, which tokens see from
    their places on; the second one has an image, without content behind it."""
    generator, config = torch.Generator().manual_seed(length), model.config
    ids = torch.randint(3, VOCABULARY - 5, (2, length), generator=generator)
    seen = torch.zeros(2, length, 2, dtype=torch.int64)
    for row, image, start in ((0, 0, 3), (0, 1, 21), (1, 0, 9)):
        ids[row, start] = IMAGE
        seen[row, start:, image] = 1
    mask = torch.ones_like(ids)
    mask[1, -5:] = seen[1, -5:] = 0
    made = KEYS[config.model_type](config.vision_config, seen, generator)
    return {"input_ids": ids, "attention_mask": mask, **made}


def batch_of(model: Any, length: int = 40) -> dict[str, Any]:
    """Two rows of tokens: one with two images, and one without any, with padding at its end."""
    if model.config.model_type in KEYS:
        return keys_batch(model, length)
    entries = images(model)
    generator = torch.Generator().manual_seed(length)
    counts, at = rows_of(model, entries), 3
    length = max(length, sum(counts) + 12)
    ids = torch.randint(3, VOCABULARY - 5, (2, length), generator=generator)
    for count in counts:
        start = getattr(owner(model).config, "vision_start_token_id", VOCABULARY)
        ids[0, at - 1] = start if start < VOCABULARY else 7
        ids[0, at : at + count] = IMAGE
        at += count + 2
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, **entries}
    names = inspect.signature(type(owner(model)).forward).parameters
    types = (ids == IMAGE).long()
    if "mm_token_type_ids" in names:
        batch["mm_token_type_ids"] = types
    for name in ("token_type_ids", "image_embeds_position_mask"):
        if name in names:
            batch[name] = types
    return batch


def pair_batch(model: Any, count: int = 3) -> dict[str, Any]:
    """Images in the sources of an encoder-decoder, both of which end in padding, as do the targets."""
    generator, config = torch.Generator().manual_seed(count), model.config.vision_config
    pixels = torch.randn(count, config.in_channels, 32, 32, generator=generator, dtype=torch.float64)
    rows = rows_of(model, {"pixel_values": pixels})[0]
    ids = torch.randint(3, 50, (2, 2 * rows + 17), generator=generator)
    for i in range(count):
        ids[i % 2, 3 + i // 2 * (rows + 4) :][:rows] = IMAGE
    mask, labels = torch.ones_like(ids), torch.randint(3, 50, (2, 13), generator=generator)
    mask[0, -2:] = mask[1, -5:] = 0
    labels[1, -4:] = -100
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}


def text_batch(model: Any, length: int = 40) -> dict[str, Any]:
    """Two rows of tokens, the second of which ends in padding; with codes of audio beside each token (Kyutai)."""
    codes = getattr(model.config, "num_codebooks", 0)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 50, (2, length, *[1 + codes] * (codes > 0)), generator=generator)
    if codes:
        ids[..., 1:] %= model.config.codebook_vocab_size
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def labels_of(batch: dict[str, Any]) -> Tensor:
    """Labels of the text: placeholder tokens and padding have none."""
    ids = batch["input_ids"]
    ids = ids if ids.ndim == 2 else ids[..., 0]
    return ids.masked_fill((batch["attention_mask"] == 0) | torch.isin(ids, torch.tensor([*TOKENS.values()])), -100)


def video_batch(model: Any, apart: bool) -> dict[str, Any]:
    """A row with a video of three frames, whose tokens stand together or ``apart``, with text between frames; and a row
    without. (LLaVA: two videos of three frames.)"""
    if made := hf_by_hand.VIDEOS.get(owner(model).config.model_type):
        entries = made(owner(model).config, torch.Generator().manual_seed(5))
    elif "video_grid_thw" in inspect.signature(type(owner(model)).get_video_features).parameters:
        entries = images(model, [(3, 4, 4)], seed=5, video=True)
    else:
        generator, side = torch.Generator().manual_seed(5), owner(model).config.vision_config.image_size
        pixels = torch.randn(2, 3, 3, side, side, generator=generator, dtype=torch.float64)
        entries = {"pixel_values_videos": pixels}
    total, frames = sum(rows_of(model, entries, "get_video_features")), 3 if apart else 1
    token = IMAGE if type(model).__name__.lower().startswith(("glm", "molmo")) else VIDEO
    ids = torch.randint(3, 50, (2, total + 20), generator=torch.Generator().manual_seed(0))
    types, at = torch.zeros_like(ids), 2
    for _ in range(frames):
        ids[0, at : at + total // frames], types[0, at : at + total // frames] = token, 2
        at += total // frames + 2
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **entries}
    takes = "mm_token_type_ids" in inspect.signature(type(owner(model)).forward).parameters
    return {**batch, "mm_token_type_ids": types} if takes else batch
