"""Configurations of types of images, audio and text that no rule makes small, and entries of a batch that no rule makes."""

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
SIGLIP: dict[str, Any] = {
    **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False},
}
MUSE = _each("out_hidden_size projector_hidden_size", 16)
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
    "janus": {
        "vision_config": {"projection_dim": 32, "mlp_ratio": 2.0, "num_image_tokens": 16},
        "vq_config": {
            **{**VQ, "num_embeddings": 8, "projection_dim": 32, "image_token_embed_dim": 32},
            "channel_multiplier": [1, 1],
        },
    },
    "molmo2": {
        "text_config": {"additional_vocab_size": 8},
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
        "adapter_config": {
            **{"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
            **{"intermediate_size": 24, "text_hidden_size": 32, "vision_feature_layer": [1, 0]},
        },
    },
    "muse_glimmer": {**MUSE, "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64}},
    "muse_spark": {
        **MUSE,
        "text_config": {"moe_hidden_size": 16},
        "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64},
        "audio_config": {
            **{"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2},
            **{"conv_kernel_size": 3, "out_hidden_size": 32},
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
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64, "torch_dtype": "float64"},
    },
    "qwen3_omni_moe": {},
    "inkling_mm_model": {"vision_config": {"patch_size": 4}},
    "kyutai_speech_to_text": {
        **TEXT,
        **{"ffn_dim": 24, "codebook_vocab_size": 9, "num_codebooks": 2, "head_dim": 8, "sliding_window": 5},
    },
}
"""Changes that a type needs, as :data:`tests.harness.hf_images.CHANGES` has them."""


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


ENTRIES: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {}
"""What makes the entries of two images for the configuration of a type."""
