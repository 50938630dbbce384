"""Tiny random transformers of diffusers by the names of their classes, and inputs that two ranks do not divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[dict[str, Any], dict[str, Any]]
"""The configuration of a model, and its inputs."""
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
TEXT = 6
_MASK = torch.tensor([[1] * TEXT, [1] * 4 + [0] * 2])


class Draw:
    """Random tensors in double precision, the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


def transformer_types() -> list[str]:
    """The classes of transformers that diffusers has."""
    import diffusers

    return [
        name for name in dir(diffusers) if "Transformer" in name and isinstance(getattr(diffusers, name, None), type)
    ]


def _times() -> dict[str, Tensor]:
    return {"timestep": torch.tensor([0.3, 0.8], dtype=torch.float64)}


def _flux(draw: Draw, width: int = 3, batched: bool = False, **sizes: Any) -> Made:
    """Flux and its relatives: 35 tokens of an image and 7 of a prompt."""
    config = {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 12, **_HEADS, **sizes}
    axes = [torch.zeros(1), torch.arange(5.0), torch.arange(7.0), *[torch.zeros(1)] * (width - 3)]
    image, text = torch.cartesian_prod(*axes).double(), torch.zeros(TEXT, width, dtype=torch.float64)
    if batched:
        text[:, -1] = torch.arange(TEXT)
        image, text = (x.expand(2, -1, -1) for x in (image, text))
    ids = {"img_ids": image, "txt_ids": text, **_times()}
    return config, {"hidden_states": draw(2, 35, 4), "encoder_hidden_states": draw(2, TEXT, 12), **ids}


def _wan(draw: Draw, **sizes: Any) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12}
    config |= {"text_dim": 10, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 32, **sizes}
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, 5, 10)}
    return config, {**inputs, "timestep": torch.tensor([3.0, 8.0]).double()}


def _with(made: Made, **inputs: Any) -> Made:
    return made[0], {**made[1], **inputs}


def _qwen(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "patch_size": 1, "num_layers": 2, "joint_attention_dim": 12}
    inputs = {"hidden_states": draw(2, 35, 4), "encoder_hidden_states": draw(2, TEXT, 12), **_times()}
    inputs |= {"encoder_hidden_states_mask": _MASK, "img_shapes": [(1, 5, 7)] * 2}
    return {**config, **_HEADS, "axes_dims_rope": (2, 2, 4)}, inputs


def _ltx(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 10}
    inputs = {"hidden_states": draw(2, 45, 4), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"encoder_attention_mask": _MASK, "num_frames": 3, "height": 3, "width": 5}
    return {**config, **_HEADS}, inputs


def _cosmos(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
    config |= {"text_embed_dim": 10, "adaln_lora_dim": 4, "max_size": (4, 8, 12), "rope_scale": (2.0, 1.0, 1.0)}
    config["concat_padding_mask"] = False
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    return config, {**inputs, "attention_mask": _MASK.bool()}


def _pixart(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 32, "sample_size": 8}
    config |= {"caption_channels": 10, "use_additional_conditions": False, **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return config, {**inputs, "encoder_attention_mask": _MASK.double()}


def _sd3(draw: Draw) -> Made:
    config = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 12}
    config |= {"caption_projection_dim": 32, "pooled_projection_dim": 6, "pos_embed_max_size": 16, **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 12), **_times()}
    return config, {**inputs, "pooled_projections": draw(2, 6)}


def _cogvideox(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 10, "num_layers": 2}
    config |= {"sample_width": 14, "sample_height": 10, "sample_frames": 9, "max_text_seq_length": TEXT, **_HEADS}
    inputs = {"hidden_states": draw(2, 3, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    return {**config, "use_rotary_positional_embeddings": True}, {
        **inputs,
        "image_rotary_emb": (draw(105, 8), draw(105, 8)),
    }


def _cogview4(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 10, "time_embed_dim": 8}
    config |= {"condition_dim": 4, "pos_embed_max_size": 16, "sample_size": 16, "rope_axes_dim": (8, 8), **_HEADS}
    sizes = {
        name: torch.tensor([[20.0, 28.0]] * 2).double() for name in ("original_size", "target_size", "crop_coords")
    }
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    return config, {**inputs, **sizes}


def _auraflow(draw: Draw) -> Made:
    config = {"sample_size": 16, "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 2, **_HEADS}
    config |= {"joint_attention_dim": 12, "caption_projection_dim": 32, "pos_embed_max_size": 256}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 12), **_times()}
    return config, inputs


def _hunyuan(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1}
    config |= {"text_embed_dim": 10, "pooled_projection_dim": 6, "rope_axes_dim": (2, 2, 4), **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"encoder_attention_mask": _MASK, "pooled_projections": draw(2, 6)}
    return config, {**inputs, "guidance": draw(2).abs()}


def _allegro(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 48, "sample_frames": 3}
    config |= {"sample_height": 6, "sample_width": 10, "caption_channels": 10}
    config |= {"num_attention_heads": 4, "attention_head_dim": 12}
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(5)).T[:, None]
    angles = tuple((draw(8, 4), draw(8, 4)) for _ in range(3))
    inputs |= {"attention_mask": torch.ones(2, 3, 6, 10), "encoder_attention_mask": _MASK}
    return config, {**inputs, "image_rotary_emb": (angles, tuple(grid))}


def _cogview3(draw: Draw) -> Made:
    config, inputs = _cogview4(draw)
    del config["rope_axes_dim"]
    return config, inputs


def _glm(draw: Draw) -> Made:
    config, inputs = _cogview4(draw)
    config = {
        name: config[name] for name in config if name not in ("pos_embed_max_size", "sample_size", "rope_axes_dim")
    }
    inputs = {name: inputs[name] for name in inputs if name != "original_size"}
    inputs |= {"prior_token_id": torch.arange(70).view(2, 35) % 9, "prior_token_drop": torch.zeros(2, 35).bool()}
    return {**config, "prior_vq_quantizer_codebook_size": 9}, inputs


def _hunyuan_image(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1}
    config |= {"text_embed_dim": 10, "text_embed_2_dim": 12, "rope_axes_dim": (4, 4), **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 5, 7), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {
        "encoder_hidden_states_2": draw(2, 4, 12),
        "encoder_attention_mask_2": torch.tensor([[1] * 4, [1] * 2 + [0] * 2]),
    }
    return config, {**inputs, "encoder_attention_mask": _MASK}


_CHROMA = {"approximator_num_channels": 8, "approximator_hidden_dim": 12, "approximator_layers": 1}
MADE = {
    "FluxTransformer2DModel": lambda draw: _with(
        _flux(draw, pooled_projection_dim=6, axes_dims_rope=(2, 2, 4)), pooled_projections=draw(2, 6)
    ),
    "Flux2Transformer2DModel": lambda draw: _with(
        _flux(draw, 4, True, timestep_guidance_channels=6, axes_dims_rope=(2, 2, 2, 2)), guidance=draw(2).abs()
    ),
    "ChromaTransformer2DModel": lambda draw: _flux(draw, axes_dims_rope=(2, 2, 4), **_CHROMA),
    "BriaTransformer2DModel": lambda draw: _flux(draw, axes_dims_rope=[2, 2, 4]),
    "OvisImageTransformer2DModel": lambda draw: _flux(draw, out_channels=4, axes_dims_rope=(2, 2, 4)),
    "LongCatImageTransformer2DModel": lambda draw: _flux(draw, pooled_projection_dim=6, axes_dims_rope=[2, 2, 4]),
    "WanTransformer3DModel": _wan,
    "ChronoEditTransformer3DModel": _wan,
    "SkyReelsV2Transformer3DModel": _wan,
    "QwenImageTransformer2DModel": _qwen,
    "LTXVideoTransformer3DModel": _ltx,
    "CosmosTransformer3DModel": _cosmos,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "CogVideoXTransformer3DModel": _cogvideox,
    "CogView4Transformer2DModel": _cogview4,
    "AuraFlowTransformer2DModel": _auraflow,
    "HunyuanVideoTransformer3DModel": _hunyuan,
    "AllegroTransformer3DModel": _allegro,
    "CogView3PlusTransformer2DModel": _cogview3,
    "GlmImageTransformer2DModel": _glm,
    "HunyuanImageTransformer2DModel": _hunyuan_image,
}


def tiny_transformer(name: str, changes: dict[str, Any] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """A model with the same random weights on every rank, in double precision, and inputs of two batch rows.
    ``changes`` of the configuration."""
    import diffusers

    draw = Draw()
    config, inputs = MADE[name](draw)
    torch.manual_seed(7)
    model = getattr(diffusers, name)(**config | (changes or {})).double()
    with torch.no_grad():
        for p in model.parameters():  # the last projections of some are zeros
            p.copy_(draw(*p.shape) * 0.3)
    return model, inputs


_STREAMS = "two streams of tokens (video and audio, or control), which its blocks join"
_LINEAR = "linear attention: sums over all tokens beside the attention calls"
NOT_SUPPORTED = {
    "HeliosTransformer3DModel": "its blocks cut history from the present by counting tokens of the whole sequence",
    "LTX2VideoTransformer3DModel": _STREAMS,
    "SanaWMLTX2RefinerTransformer3DModel": _STREAMS,
    "MiniMaxH3Transformer3DModel": _STREAMS,
    "WanVACETransformer3DModel": _STREAMS,
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMTransformer3DModel": _LINEAR,
    "MochiTransformer3DModel": "attention picks the tokens of each prompt by its mask, a number for each row",
    "LatteTransformer3DModel": "its blocks attend to frames and to places in turn, not to the whole sequence",
    "TransformerTemporalModel": "attention of each place over frames",
}
"""Reasons why types are not supported."""
_PAIRS = "without `attention_mask`, of which its blocks make pairs"
NOTES = {
    "ChromaTransformer2DModel": _PAIRS,
    "CogView4Transformer2DModel": _PAIRS,
    "GlmImageTransformer2DModel": f"{_PAIRS}; without caches",
    "HunyuanVideoTransformer3DModel": 'without `image_condition_type="token_replace"`',
    "SD3Transformer2DModel": "without `dual_attention_layers` (3.5 Medium)",
}
"""The limits of exact types."""
