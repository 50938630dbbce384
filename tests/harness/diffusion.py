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


def _acestep(draw: Draw) -> Made:
    config = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 8, "in_channels": 12, "audio_acoustic_hidden_dim": 4}
    inputs = {"hidden_states": draw(2, 75, 4), "context_latents": draw(2, 75, 8), **_times()}
    inputs |= {"timestep_r": torch.tensor([0.2, 0.5]).double(), "encoder_hidden_states": draw(2, TEXT, 10)}
    return {**config, "sliding_window": 5, "encoder_hidden_size": 10}, inputs


def _anyflow(draw: Draw) -> Made:
    config, inputs = _wan(draw)
    inputs = {**inputs, "hidden_states": draw(2, 3, 4, 6, 10), "timestep": draw(2, 3).abs()}
    return config, {**inputs, "r_timestep": draw(2, 3).abs()}


def _consisid(draw: Draw) -> Made:
    config, inputs = _cogvideox(draw)
    config |= {"is_train_face": True, "cross_attn_interval": 1, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2}
    config |= {"LFE_id_dim": 10, "LFE_vit_dim": 12, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2}
    config |= {"LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 21, "LFE_num_scale": 5}
    return config, {**inputs, "id_cond": draw(2, 10), "id_vit_hidden": [draw(2, 7, 12) for _ in range(5)]}


def _dit(draw: Draw) -> Made:
    config = {"in_channels": 4, "num_layers": 2, "sample_size": 14, "num_embeds_ada_norm": 10, **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 14, 14), "timestep": torch.tensor([3, 8])}
    return config, {**inputs, "class_labels": torch.tensor([1, 4])}


def _transformer_2d(draw: Draw) -> Made:
    config = {"in_channels": 8, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 10, **_HEADS}
    inputs = {"hidden_states": draw(2, 8, 5, 7), "encoder_hidden_states": draw(2, TEXT, 10)}
    return config, {**inputs, "encoder_attention_mask": _MASK}


def _easyanimate(draw: Draw) -> Made:
    config = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
    config |= {"patch_size": 2, "num_layers": 2, "mmdit_layers": 1, "time_embed_dim": 8, "text_embed_dim": 10}
    config |= {"add_norm_text_encoder": True, "after_norm": True}
    return config, {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}


def _framepack(draw: Draw) -> Made:
    config, inputs = _hunyuan(draw)
    config |= {"has_image_proj": True, "image_proj_dim": 6, "has_clean_x_embedder": True}
    inputs |= {"image_embeds": draw(2, 5, 6), "indices_latents": torch.arange(3) + 7}
    for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 4)):
        inputs[f"latents_{name}"] = draw(2, 4, frames, 6, 10)
        inputs[f"indices_latents_{name}"] = torch.arange(frames)
    return config, inputs


def _hunyuan15(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 10}
    config |= {"text_embed_2_dim": 12, "image_embed_dim": 6, "rope_axes_dim": (2, 2, 4), **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 3, 3, 5), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"encoder_attention_mask": _MASK, "encoder_hidden_states_2": draw(2, 4, 12)}
    inputs |= {"encoder_attention_mask_2": torch.tensor([[1] * 4, [1] * 2 + [0] * 2])}
    return config, {**inputs, "image_embeds": draw(2, 5, 6)}


def _ideogram(draw: Draw) -> Made:
    config = {"in_channels": 4, "num_layers": 2, "intermediate_size": 24, "adaln_dim": 6, "llm_features_dim": 10}
    inputs = {"hidden_states": draw(2, 41, 4), "encoder_hidden_states": draw(2, 41, 10), **_times()}
    kinds = torch.tensor([3] * TEXT + [2] * 35).expand(2, 41)
    inputs |= {"indicator": kinds, "position_ids": torch.arange(41)[None, :, None].expand(2, 41, 3)}
    parts = torch.tensor([[1] * 41, [1] * 20 + [2] * 21])
    return {**config, **_HEADS, "mrope_section": (2, 1, 1)}, {**inputs, "segment_ids": parts}


def _joy(draw: Draw) -> Made:
    config = {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "text_dim": 10, "num_layers": 2}
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10)}
    return {**config, "rope_dim_list": [2, 2, 4], "rope_type": "mrope"}, {**inputs, "timestep": torch.tensor([3, 8])}


def _joy_plus(draw: Draw) -> Made:
    config, inputs = _joy(draw)
    inputs |= {"hidden_states": draw(2, 45, 4, 1, 2, 2), "encoder_hidden_states_mask": _MASK}
    return {**config, "rope_type": "rope"}, {**inputs, "shape_list": [[(2, 3, 5), (1, 3, 5)], [(2, 3, 5)]]}


def _krea(draw: Draw) -> Made:
    config = {"in_channels": 4, "num_layers": 2, "num_key_value_heads": 2, "intermediate_size": 24, **_HEADS}
    config |= {"timestep_embed_dim": 8, "text_hidden_dim": 10, "num_text_layers": 3, "text_num_attention_heads": 2}
    config |= {"text_num_key_value_heads": 1, "text_intermediate_size": 12, "axes_dims_rope": (4, 2, 2)}
    config |= {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    inputs = {"hidden_states": draw(2, 35, 4), "encoder_hidden_states": draw(2, TEXT, 3, 10), **_times()}
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(5), torch.arange(7))
    inputs["position_ids"] = torch.cat([torch.zeros(TEXT, 3).long(), grid])
    return config, {**inputs, "encoder_attention_mask": _MASK.bool()}


def _lumina(draw: Draw) -> Made:
    config = {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1}
    config |= {"num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (4, 2, 2)}
    config |= {"axes_lens": (30, 20, 20), "cap_feat_dim": 10}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    return config, {**inputs, "encoder_attention_mask": _MASK}


def _music(draw: Draw) -> Made:
    config = {"in_channels": 4, "condition_dim": 10, "num_layers": 2, "ff_inner_dim": 24, "rotary_dim": 4, **_HEADS}
    inputs = {"hidden_states": draw(2, 4, 36), "encoder_hidden_states": draw(2, 36, 10), **_times()}
    return {**config, "fourier_embedding_dim": 8}, inputs


def _omnigen(draw: Draw) -> Made:
    config = {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"intermediate_size": 24, "num_layers": 2, "pad_token_id": 0, "vocab_size": 20, "time_step_dim": 8}
    config |= {"pos_embed_max_size": 16, "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "input_ids": torch.arange(2 * TEXT).view(2, TEXT), **_times()}
    mask = torch.ones(2, 42, 42).double().tril()
    mask[:, TEXT + 1 :] = 1
    mask[1, :, 3:5] = 0
    inputs |= {"position_ids": torch.arange(42).expand(2, 42), "attention_mask": mask}
    return config, {**inputs, "input_img_latents": [], "input_image_sizes": {}}


def _kandinsky(draw: Draw) -> Made:
    config = {"in_text_dim": 10, "in_text_dim2": 6, "time_dim": 8, "model_dim": 32, "ff_dim": 24}
    config |= {"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 2, 2)}
    inputs = {"hidden_states": draw(2, 3, 6, 10, 4), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    grid = [torch.arange(n) for n in (3, 3, 5)]
    inputs |= {"visual_rope_pos": grid, "text_rope_pos": torch.arange(TEXT), "pooled_projections": draw(2, 6)}
    return config, inputs


def _z_image(draw: Draw) -> Made:
    config = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 2}
    config |= {"cap_feat_dim": 10, "axes_dims": [4, 2, 2], "axes_lens": [100, 20, 20]}
    inputs = {"x": [draw(4, 1, 10, 14), draw(4, 1, 8, 10)], "cap_feats": [draw(TEXT, 10), draw(40, 10)]}
    return config, {**inputs, "t": torch.tensor([0.3, 0.8]).double()}


def _longcat_audio(draw: Draw) -> Made:
    config = {"dit_dim": 32, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 10, "latent_dim": 4, "ff_mult": 1.0}
    inputs = {"hidden_states": draw(2, 37, 4), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"attention_mask": torch.tensor([[1] * 37, [1] * 31 + [0] * 6]).bool()}
    return config, {**inputs, "encoder_attention_mask": _MASK}


def _vace(draw: Draw) -> Made:
    config, inputs = _wan(draw, num_layers=3, vace_layers=[0, 1], vace_in_channels=6)
    return config, {**inputs, "control_hidden_states": draw(2, 6, 3, 6, 10)}


def _h3(draw: Draw) -> Made:
    config = {"hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 24, "in_channels": 4}
    config |= {"num_attention_heads": 4, "attention_head_dim": 12}
    config |= {"audio_in_channels": 6, "text_dim": 10, "freq_dim": 8, "time_embed_hidden_dim": 8, "time_embed_dim": 6}
    inputs = {"hidden_states": draw(1, 30, 16), "audio_hidden_states": draw(1, 7, 6), "timestep": draw(2).abs()}
    inputs |= {"encoder_hidden_states": draw(1, TEXT, 10), "token_tags": torch.tensor([0] * TEXT + [1] * 30 + [2] * 7)}
    at = torch.arange(43)
    inputs |= {"timestep_indices": torch.tensor([0] * TEXT + [1] * 37), "position_ids": at[:, None] + torch.arange(3)}
    inputs |= {"text_indices": at[:TEXT], "video_indices": at[TEXT : TEXT + 30], "audio_indices": at[TEXT + 30 :]}
    return {**config, "rope_freq_dim": 2}, inputs


def _ernie(draw: Draw) -> Made:
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 24, "in_channels": 4}
    config |= {"out_channels": 4, "text_in_dim": 10, "rope_axes_dim": (4, 2, 2)}
    inputs = {"hidden_states": draw(2, 4, 5, 7), "text_bth": draw(2, TEXT, 10), **_times()}
    return config, {**inputs, "text_lens": _MASK.sum(1)}


def _flux3(draw: Draw) -> Made:
    made = _flux(draw, 4, axes_dims_rope=(2, 2, 2, 2), timestep_channels=8, cond_in_channels=6)
    grid = torch.cartesian_prod(torch.ones(1), torch.arange(2.0), torch.arange(4.0), torch.zeros(1)).double()
    return _with(made, image_cond_hidden_states=draw(2, 8, 6), image_cond_ids=grid)


def _fibo(draw: Draw) -> Made:
    made = _flux(draw, axes_dims_rope=[2, 2, 4], text_encoder_dim=6)
    return _with(made, text_encoder_layers=[draw(2, TEXT, 6) for _ in range(4)])


def _hidream(draw: Draw) -> Made:
    config = {"patch_size": 2, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "caption_channels": [10, 12]}
    config |= {"text_emb_dim": 6, "axes_dims_rope": (4, 2, 2), "max_resolution": (16, 16), "llama_layers": [0, 1, 0, 1]}
    config["force_inference_output"] = True
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states_t5": draw(2, TEXT, 10)}
    inputs |= {"timesteps": torch.tensor([3, 8]), "pooled_embeds": draw(2, 6)}
    return {**config, **_HEADS}, {**inputs, "encoder_hidden_states_llama3": draw(2, 2, 5, 12)}


def _animate(draw: Draw) -> Made:
    config, inputs = _wan(draw, in_channels=12, latent_channels=4, image_dim=6, motion_encoder_size=16)
    config |= {"motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8}
    config |= {"face_encoder_num_heads": 2, "inject_face_latents_blocks": 2, "out_channels": 4}
    config |= {"motion_encoder_channel_sizes": {"4": 6, "8": 6, "16": 6}}
    inputs |= {"hidden_states": draw(2, 12, 3, 6, 10), "encoder_hidden_states_image": draw(2, 257, 6)}
    return config, {**inputs, "pose_hidden_states": draw(2, 4, 2, 6, 10), "face_pixel_values": draw(2, 3, 5, 16, 16)}


def _motif(draw: Draw) -> Made:
    config, inputs = _hunyuan(draw)
    config = {name: config[name] for name in config if name not in ("num_refiner_layers", "pooled_projection_dim")}
    config |= {"image_embed_dim": 6, "num_decoder_layers": 0}
    inputs = {name: inputs[name] for name in inputs if name not in ("guidance", "pooled_projections")}
    return config, {**inputs, "image_embeds": draw(2, 5, 6)}


def _prx(draw: Draw) -> Made:
    config = {"in_channels": 4, "context_in_dim": 10, "hidden_size": 32, "mlp_ratio": 1.0, "num_heads": 4, "depth": 2}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    return {**config, "axes_dim": [4, 4]}, {**inputs, "attention_mask": _MASK.bool()}


def _mochi(draw: Draw) -> Made:
    config = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 6}
    config |= {"in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8, "max_sequence_length": TEXT}
    inputs = {"hidden_states": draw(2, 4, 3, 6, 10), "encoder_hidden_states": draw(2, TEXT, 16), **_times()}
    return config, {**inputs, "encoder_attention_mask": _MASK.bool()}


def _helios(draw: Draw) -> Made:
    config, inputs = _wan(draw, rope_dim=(4, 4, 4), is_amplify_history=True)
    del config["rope_max_seq_len"]
    for name, frames in (("short", 1), ("mid", 2), ("long", 4)):
        inputs[f"latents_history_{name}"] = draw(2, 4, frames, 6, 10)
        inputs[f"indices_latents_history_{name}"] = torch.arange(frames).expand(2, -1)
    return config, {**inputs, "indices_hidden_states": torch.arange(7, 10).expand(2, -1)}


def _ltx2(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "num_layers": 2, "caption_channels": 10}
    config |= {"audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 2}
    config |= {"audio_attention_head_dim": 12, "audio_cross_attention_dim": 24, "perturbed_attn": True}
    config |= {"num_attention_heads": 4, "attention_head_dim": 12, "gated_attn": True, "cross_attn_mod": True}
    inputs = {"hidden_states": draw(2, 45, 4), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"audio_hidden_states": draw(2, 7, 6), "audio_encoder_hidden_states": draw(2, TEXT, 10)}
    inputs |= {"encoder_attention_mask": _MASK, "audio_encoder_attention_mask": _MASK, "sigma": draw(2).abs()}
    inputs |= {"num_frames": 3, "height": 3, "width": 5, "audio_num_frames": 7}
    return {**config, "audio_gated_attn": True, "audio_cross_attn_mod": True}, inputs


def _fibo2(draw: Draw) -> Made:
    config = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "cap_feat_dim": 10}
    config |= {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "gist_step": 2}
    config |= {"max_num_gist_tokens": 8, "gist_min_text_len": 3, "gist_max_text_len": 7, "axes_dims": (4, 2, 2)}
    inputs = {"hidden_states": draw(2, 4, 10, 14), "encoder_hidden_states": draw(2, 2, TEXT, 10), **_times()}
    inputs |= {"encoder_attention_mask": _MASK.bool(), "context_latents": [draw(2, 4, 6, 8)]}
    return {**config, "axes_lens": (32, 32, 32)}, inputs


def _refiner(draw: Draw) -> Made:
    config, inputs = _ltx2(draw)
    names = "hidden_states", "encoder_hidden_states", "encoder_attention_mask"
    inputs = {name: inputs[name] for name in names} | {"timestep": draw(2, 45).abs()}
    config |= dict.fromkeys(("perturbed_attn", "cross_attn_mod", "audio_cross_attn_mod"), False)
    return config, {**inputs, "video_rotary_emb": (draw(2, 45, 48), draw(2, 45, 48))}


def _qwen21(draw: Draw) -> Made:
    config = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "context_in_dim": 12, "axes_dims_rope": (4, 2, 2)}
    slots = torch.tensor([0, 0, 1, 0, 0, 0] + [1] * 5).bool().expand(2, -1)  # an image in the prompt, a new one
    inputs = {"hidden_states": draw(2, 24, 4), "encoder_hidden_states": draw(2, TEXT, 12), **_times()}
    inputs |= {
        "img_shapes": [[(1, 2, 2), (1, 4, 5)]] * 2,
        "img_mask": slots,
        "encoder_hidden_states_mask": _MASK.bool(),
    }
    return {**config, **_HEADS}, inputs


_CHROMA = {"approximator_num_channels": 8, "approximator_hidden_dim": 12, "approximator_layers": 1}


def _latte(draw: Draw) -> Made:
    """5 frames of 15 places: blocks attend to the places of a frame, and to the frames of a place."""
    config = {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 32}
    config |= {"sample_size": 10, "patch_size": 2, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000}
    config |= {"caption_channels": 10, "video_length": 5, "norm_elementwise_affine": False}
    config["activation_fn"] = "gelu-approximate"
    inputs = {"hidden_states": draw(2, 4, 5, 6, 10), "encoder_hidden_states": draw(2, TEXT, 10)}
    return config, {**inputs, "timestep": torch.tensor([3, 8])}


def _kandinsky6(draw: Draw) -> Made:
    """45 tokens of a video, 7 of audio, and a prompt, which both attend to."""
    config = {"in_visual_dim": 3, "out_visual_dim": 3, "in_text_dim": 10, "in_text_dim2": 6, "time_dim": 12}
    config |= {"model_dim": 32, "ff_dim": 24, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 2, 2)}
    config |= {"in_audio_dim": 5, "out_audio_dim": 5, "model_dim_a": 16, "ff_dim_a": 20, "time_dim_a": 10}
    config |= dict.fromkeys(("ca_rope", "cross_gates", "fix_modulation", "text_token_padding"), True)
    inputs = {"hidden_states": draw(2, 3, 6, 10, 7), "encoder_hidden_states": draw(2, TEXT, 10), **_times()}
    inputs |= {"pooled_projections": draw(2, 6), "audio_hidden_states": draw(2, 7, 5)}
    return config, {**inputs, "encoder_attention_mask": _MASK.bool()}


def _cosmos3(draw: Draw) -> Made:
    """9 tokens of text, 23 of a video, whose first frame is given, and of sound and of an action."""
    config = {"head_dim": 8, "hidden_size": 32, "intermediate_size": 24, "latent_channel": 4, "latent_patch_size": 2}
    config |= {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "patch_latent_dim": 16}
    config |= {"vocab_size": 61, "rope_axes_dim": (2, 1, 1), "sound_gen": True, "sound_dim": 5, "rope_theta": 1e4}
    config |= {"action_gen": True, "action_dim": 6, "num_embodiment_domains": 3}
    text, video, sound, action = 9, 3 * 2 * 2, 7, 4
    ends = [text, text + video, text + video + sound, text + video + sound + action]
    moving = torch.arange(text + 4, ends[1])
    inputs = {
        **{"input_ids": torch.arange(3, 3 + text), "text_indexes": torch.arange(text), "und_len": text},
        **{"sequence_length": ends[3], "vision_tokens": [draw(1, 4, 3, 4, 4)], "vision_token_shapes": [(3, 2, 2)]},
        **{"vision_sequence_indexes": torch.arange(text, ends[1]), "vision_mse_loss_indexes": moving},
        **{"vision_timesteps": draw(8).abs(), "vision_noisy_frame_indexes": [torch.tensor([1, 2])]},
        **{"sound_tokens": [draw(5, 7)], "sound_token_shapes": [(7, 1, 1)], "sound_timesteps": draw(7).abs()},
        **{"sound_noisy_frame_indexes": [torch.arange(7)], "action_tokens": [draw(4, 6)]},
        **{"action_token_shapes": [(4, 1, 1)], "action_timesteps": draw(4).abs()},
        **{"action_noisy_frame_indexes": [torch.arange(4)], "action_domain_ids": [torch.tensor(1)]},
        "position_ids": torch.arange(ends[3]).expand(3, -1) * torch.tensor([[1], [2], [3]]) % 17,
    }
    for name, start, end in (("sound", ends[1], ends[2]), ("action", ends[2], ends[3])):
        at = torch.arange(start, end)
        inputs |= {f"{name}_sequence_indexes": at, f"{name}_mse_loss_indexes": at}
    return config, inputs


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
    "AceStepTransformer1DModel": _acestep,
    "AnyFlowTransformer3DModel": _anyflow,
    "ConsisIDTransformer3DModel": _consisid,
    "DiTTransformer2DModel": _dit,
    "DreamLiteTransformer2DModel": _transformer_2d,
    "EasyAnimateTransformer3DModel": _easyanimate,
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "Ideogram4Transformer2DModel": _ideogram,
    "JoyImageEditTransformer3DModel": _joy,
    "JoyImageEditPlusTransformer3DModel": _joy_plus,
    "HunyuanVideo15Transformer3DModel": _hunyuan15,
    "Krea2Transformer2DModel": _krea,
    "MochiTransformer3DModel": _mochi,
    "MotifVideoTransformer3DModel": _motif,
    "PRXTransformer2DModel": _prx,
    "Lumina2Transformer2DModel": _lumina,
    "MiniMaxMusic3Transformer1DModel": _music,
    "MiniMaxH3Transformer3DModel": _h3,
    "OmniGenTransformer2DModel": _omnigen,
    "Transformer2DModel": _transformer_2d,
    "Kandinsky5Transformer3DModel": _kandinsky,
    "ZImageTransformer2DModel": _z_image,
    "LongCatAudioDiTTransformer": _longcat_audio,
    "WanVACETransformer3DModel": _vace,
    "ErnieImageTransformer2DModel": _ernie,
    "Flux3Transformer2DModel": _flux3,
    "BriaFiboTransformer2DModel": _fibo,
    "HiDreamImageTransformer2DModel": _hidream,
    "WanAnimateTransformer3DModel": _animate,
    "HeliosTransformer3DModel": _helios,
    "LTX2VideoTransformer3DModel": _ltx2,
    "BriaFibo2Transformer2DModel": _fibo2,
    "QwenImage21Transformer2DModel": _qwen21,
    "SanaWMLTX2RefinerTransformer3DModel": _refiner,
    "Cosmos3OmniTransformer": _cosmos3,
    "LatteTransformer3DModel": _latte,
    "Kandinsky6Transformer3DModel": _kandinsky6,
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


_LINEAR = "linear attention: sums over all tokens beside the attention calls"
NOT_SUPPORTED = {
    "AnyFlowFARTransformer3DModel": "attention pads to a multiple of 128, for a mask of blocks of the whole sequence",
    "Kandinsky6SRTransformer3DModel": "attention selects blocks of keys by averages over the whole sequence",
    "NucleusMoEImageTransformer2DModel": "each expert chooses its tokens among those of the whole sequence",
    "PriorTransformer": "a single embedding of an image behind a prompt: too short to split",
    "RFD4ProteinaTransformer": "features of all pairs of tokens beside the attention calls",
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMTransformer3DModel": _LINEAR,
    "TransformerTemporalModel": "a layer of a UNet, whose blocks may count the frames of their share by themselves",
    "WanAnimate2Transformer3DModel": "attention counts whole frames, and packs them with a cache of a reference",
}
"""Reasons why types are not supported."""
NOTES = {
    "LTX2VideoTransformer3DModel": "without `video_self_attention_mask`",
    "QwenImage21Transformer2DModel": "without caches, in the processor that diffusers sets",
    "SanaWMLTX2RefinerTransformer3DModel": "without caches",
    "GlmImageTransformer2DModel": "without caches",
    "Kandinsky5Transformer3DModel": "without `sparse_params`",
    "MotifVideoTransformer3DModel": "without decoder layers and text cross-attention",
    "WanVACETransformer3DModel": "unless the last layer is one of `vace_layers`",
}
"""The limits of exact types."""
