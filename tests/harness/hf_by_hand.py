"""Configurations of types that no rule makes small, and entries of images that no rule makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.harness.hf_causal import CHANGES as HYBRID
from tests.harness.hf_causal import SIZES, _each

TEXT: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{name: SIZES[name] for name in ("num_key_value_heads", "intermediate_size", "max_position_embeddings")},
    **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
}
"""The sizes of a decoder whose configuration is that of the whole."""
CODES = {"<image>": 58, **{f"IMGIMG{'ABCDEFGHIJ'[i]}Z": 40 + i for i in range(8)}}
"""A vocabulary with eight tokens of images."""
VQ: dict[str, Any] = {
    **_each("embed_dim latent_channels", 4),
    **{"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []},
}
QFORMER: dict[str, Any] = {
    **_each("hidden_size encoder_hidden_size", 16),
    **_each("num_hidden_layers num_attention_heads", 2),
    **_each("hidden_dropout_prob attention_probs_dropout_prob", 0.0),
    **{"vocab_size": SIZES["vocab_size"], "intermediate_size": 24},
}
SIGLIP: dict[str, Any] = {
    **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False},
}
VOICE = {**_each("hidden_size num_filters", 8), "kernel_size": 3, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
MUSE = {"out_hidden_size": 64, "projector_hidden_size": 16}
MUSE_VISION = {**_each("pos_emb_height pos_emb_width", 8), "max_position_embeddings": 64, "patch_temporal": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "chameleon": {**TEXT, "vocabulary_map": CODES, "vq_config": {**VQ, "num_embeddings": 8, "resolution": 16}},
    "emu3": {
        "vocabulary_map": {
            "<image>": 58,
            "<|extra_200|>": 57,
            **{f"<|visual token {i:06d}|>": 40 + i for i in range(8)},
        },
        "text_config": {"attention_dropout": 0.0},
        "vq_config": {**VQ, "codebook_size": 8, "hidden_size": 32, "num_attention_heads": 1},
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
        "vision_config": {
            "sam_config": {
                **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 24},
                **{"output_channels": 8, "image_size": 64, "patch_size": 4, "window_size": 4},
                **{"global_attn_indexes": [1], "downsample_channels": [12, 16]},
            },
            "encoder_config": {**TEXT, "hidden_size": 16, "num_key_value_heads": 2, "num_attention_heads": 2},
        },
    },
    "blip": {"text_config": {"encoder_hidden_size": 16, "hidden_act": "gelu"}},
    "idefics": {
        **{**TEXT, "freeze_text_layers": False, "freeze_vision_layers": False, "use_resampler": True},
        "perceiver_config": {
            **{"resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8},
        },
    },
    "janus": {
        "vision_config": {"projection_dim": 32, "mlp_ratio": 2.0, "num_image_tokens": 16},
        "vq_config": {
            **{**VQ, "num_embeddings": 8, "projection_dim": 32, "image_token_embed_dim": 32},
            "channel_multiplier": [1, 1],
        },
    },
    **{kind: {"insert_layer_id": 0} for kind in ("minicpmv4_6", "minicpmv4_7")},
    "instructblipvideo": {
        "qformer_config": {"model_type": "instructblipvideo_qformer", **QFORMER},
        **{"num_query_tokens": 2, "video_token_index": 58},
    },
    "kosmos-2": {"latent_query_num": 5},
    "kosmos-2.5": {
        "latent_query_num": 5,
        "text_config": {"dropout": 0.0},
        "vision_config": {"patch_embed_hidden_size": 48, "max_num_patches": 16},
    },
    "molmo2": {
        "image_patch_id": 58,
        "text_config": {"additional_vocab_size": 8},
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
        "adapter_config": {
            **{"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
            **{"intermediate_size": 24, "text_hidden_size": 32, "vision_feature_layer": [1, 0]},
        },
    },
    "muse_glimmer": {**MUSE, "vision_config": MUSE_VISION},
    "muse_spark": {
        **MUSE,
        "text_config": {"moe_hidden_size": 16},
        "vision_config": MUSE_VISION,
        "audio_config": {
            **{"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2},
            **{"conv_kernel_size": 3, "out_hidden_size": 32},
        },
    },
    "fuyu": {"patch_size": 4, "image_size": 16},
    "gemma4_unified": {
        "text_config": {"use_bidirectional_attention": "vision"},
        "vision_config": {
            **{"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 8},
            "output_proj_dims": 16,
        },
        "audio_config": {"audio_embed_dim": 16},
    },
    "granite_docling": {
        "text_config": {"num_hidden_layers": 3},
        "vision_config": {"scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
    },
    "ovis2": {
        **{"hidden_size": 32, "vocab_size": SIZES["vocab_size"], "visual_indicator_token_ids": [51, 52, 53, 54, 55]},
        "vision_config": {"vocab_size": 40, "num_visual_indicator_tokens": 5},
    },
    "gemma3n": {
        "vision_soft_tokens_per_image": 16,
        "text_config": {**HYBRID["gemma3n_text"], "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
        "audio_config": {
            **{
                "vocab_offset": 66,
                "vocab_size": 4,
                "hidden_size": 16,
                "conf_num_hidden_layers": 1,
                "input_feat_size": 16,
            },
            **{"conf_num_attention_heads": 2, "sscp_conv_channel_size": (4, 4)},
        },
    },
    "fast_vlm": {"vision_config": SIGLIP},
    "perception_lm": {
        "vision_config": {**SIGLIP, "model_args": {"embed_dim": 16}},
        "vision_use_cls_token": False,
    },
    "dots3_note": {
        "text_config": HYBRID["dots3_note_text"],
        "vision_config": {
            **{"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "moe_intermediate_size": 16},
            **{"adapter_in_dim": 16, "adapter_out_dim": 32},
        },
        "audio_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "feature_size": 16, "downsample_hidden_size": 8},
            **{"adapter_input_size": 16, "adapter_out_dim": 32},
        },
    },
    "nemotron_h_omni": {
        **{"projector_hidden_size": 24, "vision_hidden_size": 16},
        "text_config": HYBRID["nemotron_h"],
        "audio_config": {
            **{"model_type": "parakeet_encoder", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 24, "num_mel_bins": 16, "subsampling_conv_channels": 8, "attention_bias": False},
            **{"scale_input": False, "projection_hidden_size": 24, "projection_bias": False},
            **_each("dropout dropout_positions layerdrop activation_dropout attention_dropout", 0.0),
        },
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64, "torch_dtype": "float64"},
    },
    "phi4_multimodal": {
        **TEXT,
        "vision_config": {**HYBRID["phi4_multimodal"]["vision_config"], "image_token_id": 58},
        "audio_config": {**HYBRID["phi4_multimodal"]["audio_config"], "audio_token_id": 57},
    },
    "inkling_mm_model": {"text_config": HYBRID["inkling_text"], "vision_config": {"patch_size": 4}},
    "inkling2": {"text_config": HYBRID["inkling2_text"]},
    "inkling2_loop": {"text_config": HYBRID["inkling2_loop_text"]},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": VOICE,
        "semantic_tokenizer_encoder_config": VOICE,
        "acoustic_tokenizer_chunk_size": 16,
    },
    "apertus1p5": {
        "text_config": {"vocab_size": 80, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "vision_config": {**VQ, "codebook_size": 8, "resolution": 16},
        "audio_config": {
            **{"num_filters": 4, "upsampling_ratios": [2, 2], "hidden_size": 16, "codebook_dim": 16},
            **{"codebook_size": 8, "decoder_hidden_size": 32, "decoder_intermediate_size": 24, "num_lstm_layers": 1},
        },
        **{"image_token_offset": 62, "audio_token_offset": 70},
    },
    "nemo_speechlm": {
        "text_config": HYBRID["nemotron_h"],
        "audio_config": {
            "asr_config": {
                **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"num_key_value_heads": 2, "num_mel_bins": 16},
            },
            "diarization_config": {
                "audio_config": {
                    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
                    **{"num_mel_bins": 16},
                },
                "head_config": {"audio_hidden_size": 16, "hidden_size": 16, "num_hidden_layers": 2},
            },
        },
        "word_timestamp_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"vocab_size": 12, "blank_token_id": 11},
        },
    },
    "kyutai_speech_to_text": {
        **TEXT,
        "codec_config": {
            **_each("hidden_size codebook_dim vector_quantization_hidden_dimension intermediate_size", 16),
            **{"num_filters": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "codebook_size": 8},
            "upsample_groups": 16,
        },
        **{"ffn_dim": 24, "codebook_vocab_size": 9, "num_codebooks": 2, "head_dim": 8, "sliding_window": 5},
        **{"audio_bos_token_id": 70, "audio_pad_token_id": 79},
    },
}
"""Changes that a type needs, as :data:`tests.harness.hf_images.CHANGES` has them."""

TOWERS = {"gemma3n": {**SIGLIP, "vocab_offset": 62, "vocab_size": 4, "rms_norm_eps": 1e-6}}
"""Towers that stand in for those of types whose configuration makes no other one."""


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _square(*shape: int) -> Callable[[Any, torch.Generator], dict[str, Any]]:
    """Two images of the same shape."""
    return lambda config, generator: {"pixel_values": _normal(generator, 2, *shape)}


def _with_sizes(config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _normal(generator, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16], [8, 16]])}


def _two_resolutions(config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _normal(generator, 2, 3, 16, 16), "high_res_pixel_values": _normal(generator, 2, 3, 64, 64)}


def _with_instruction(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Each image has a text of its own for the Q-Former."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    ids = torch.randint(3, 50, (2, 5), generator=generator)
    return {"pixel_values": _normal(generator, 2, 3, 16, 16), "qformer_input_ids": ids, "qformer_attention_mask": mask}


def _videos_with_instruction(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Two videos of three frames."""
    return {**_with_instruction(config, generator), "pixel_values": _normal(generator, 2, 3, 3, 16, 16)}


def _packed(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Patches of both images beside each other in the last dimension."""
    patch = config.vision_config.patch_size
    pixels = _normal(generator, 1, 3, patch, (16 + 32) * patch)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[4, 4], [4, 8]], dtype=torch.int32)}


def _grid_of_two(config: Any, generator: torch.Generator) -> dict[str, Any]:
    patch = config.vision_config.patch_size
    return {"pixel_values": _normal(generator, 48, 3 * patch**2), "image_grid_hw": torch.tensor([[4, 4], [4, 8]])}


def _tiles(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """An image of two tiles for each row of the batch, the second one of which has one tile without padding."""
    pixels, mask = _normal(generator, 2, 2, 3, 16, 16), torch.tensor([[1, 1], [1, 0]]).bool()
    pixels[1, 1] = 0.0
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _merged_patches(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Patches of each token side by side."""
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    pixels = _normal(generator, 12, side, side, 3)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]])}


_WINDOWS = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
"""Windows of two by two of the sixteen patches of a crop."""


def _pooled(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """An image of three crops and one of one. Tokens pool windows of the first crop, and windows of the others, the
    last of which lack patches."""
    high = torch.cat([_WINDOWS + 16, _WINDOWS + 32])
    high[-1, 2:] = -1
    return {
        "pixel_values": _normal(generator, 4, 16, 48),
        "image_token_pooling": torch.cat([_WINDOWS, high, _WINDOWS + 48]),
        "image_grids": torch.tensor([[2, 2, 2, 4], [2, 2, 0, 0]]),
        "image_num_crops": torch.tensor([3, 1]),
    }


def _pooled_videos(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """A video of three frames and one of one."""
    return {
        "pixel_values_videos": _normal(generator, 4, 16, 48),
        "video_token_pooling": torch.cat([_WINDOWS + 16 * i for i in range(4)]),
        "video_grids": torch.tensor([[3, 2, 2], [1, 2, 2]]),
    }


def _patches_at(config: Any, generator: torch.Generator) -> dict[str, Any]:
    at = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="xy"), -1).flatten(0, 1)
    at = at.expand(2, -1, -1).clone()
    at[1, 6:] = -1
    width = config.vision_config.model_patch_size**2 * 3
    return {"pixel_values": _normal(generator, 2, 9, width), "image_position_ids": at}


def _flat(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Patches with their rows and columns before their values."""
    at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(4), indexing="ij"), -1).flatten(0, 1) + 1.0
    patches = _normal(generator, 2, 8, config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([at.double().expand(2, -1, -1), patches], -1)}


def _crops(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """An image of one crop, padded to two, and one of two crops, of whose second one half is padding; the first crop of
    both is the whole image."""
    mask = torch.ones(2, 3, 4, 4)
    mask[1, 2, :, 2:] = 0
    pixels = _normal(generator, 2, 3, 3, 16, 16)
    pixels[0, 2] = 0.0
    sizes = torch.tensor([[16, 16], [16, 32]])
    return {"image_pixel_values": pixels, "image_sizes": sizes, "image_attention_mask": mask}


ENTRIES: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "apertus1p5": _with_sizes,
    "chameleon": _square(3, 16, 16),
    "emu3": _with_sizes,
    "deepseek_ocr2": _square(3, 64, 64),
    "deepseek_vl_hybrid": _two_resolutions,
    "fuyu": _square(6, 48),
    "gemma4_unified": _patches_at,
    "granite_docling": _tiles,
    **dict.fromkeys(("inkling2", "inkling2_loop"), _merged_patches),
    "inkling_mm_model": _square(2, 3, 4, 4),
    "instructblip": _with_instruction,
    "instructblipvideo": _videos_with_instruction,
    "kosmos-2.5": _flat,
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _packed),
    "molmo2": _pooled,
    "nemotron_h_omni": _grid_of_two,
    "perception_lm": _square(1, 3, 16, 16),
    "phi4_multimodal": _crops,
}
"""Functions that make the entries of two images for the configuration of a type."""
ROWS = {"phi4_multimodal": [2 * 3 + 1 + 2 * 3, 2 * 4 + 1 + 2 * 3]}
"""The rows of each of two images, for types without a method that encodes them: lines of an image end with a row, and
one stands before the whole image."""
VIDEOS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {"molmo2": _pooled_videos}
"""The same for videos."""
