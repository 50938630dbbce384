"""A tiny random model of types of transformers that hear, and a batch with two clips of different lengths for it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.harness.hf_causal import _each

AUDIO = 57
"""The placeholder token of audio."""
MEL, FRAMES = 16, 40
LONG = 200
"""Frames of clips for encoders that cut them into pieces of 100."""
WAVE = 2000
"""Samples of clips for encoders whose first rows see 400 of them."""
SIZES: dict[str, Any] = {
    **_each("d_model hidden_size", 16),
    **_each("encoder_layers num_hidden_layers num_layers", 2),
    **_each("encoder_attention_heads num_attention_heads num_heads num_key_value_heads", 2),
    **_each("encoder_ffn_dim", 24),
    **_each("dropout attention_dropout hidden_dropout", 0.0),
    **_each("num_mel_bins input_dim", MEL),
    **_each("max_source_positions max_position_embeddings", FRAMES // 2),
    **_each("output_dim", 32),
}
"""Sizes of audio towers, for those of these attributes that a configuration has."""
WHISPER = {"intermediate_size": 24}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_5_omni_thinker": {"audio_config": {"n_window": 6}},
    "qwen3_omni_moe_thinker": {
        "audio_config": {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 8, "conv_chunksize": 100}
    },
    "qwen3_asr": {
        "audio_config": {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 8, "output_dim": 32}
    },
    "voxtral": {"audio_config": {"intermediate_size": 64, "encoder_ffn_dim": 64}},
    "glmasr": {"audio_config": {"intermediate_size": 64}},
    "audioflamingo3": {"audio_config": WHISPER},
    "moss_transcribe_diarize": {"audio_config": WHISPER},
    "fun_asr_nano": {
        "audio_config": {
            **WHISPER,
            "num_stacked_frames": 1,
            "max_position_embeddings": 64,
            "num_timestamp_prediction_layers": 1,
            "fsmn_kernel_size": 3,
        },
        "adaptor_config": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1},
    },
}
GEMMA4: dict[str, Any] = {
    "audio_config": {
        **{"model_type": "gemma4_audio", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"subsampling_conv_channels": (MEL, 4), "attention_chunk_size": 4, "attention_context_left": 5},
        "output_proj_dims": 24,
    }
}
GRANITE: dict[str, Any] = {
    "has_lora_adapter": False,
    **{"window_size": 10, "downsample_rate": 5},
    "encoder_config": {"hidden_dim": 16, "dim_head": 8, "context_size": 20, "max_pos_emb": 32, "dropout": 0.0},
    "projector_config": {
        **{"model_type": "blip_2_qformer", "encoder_hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"hidden_size": 16, "num_attention_heads": 2},
        **_each("hidden_dropout_prob attention_probs_dropout_prob", 0.0),
    },
}
CHANGES |= {"gemma4": GEMMA4, "granite_speech": GRANITE, "granite_speech_plus": GRANITE}


def owner(model: Any) -> Any:
    """The innermost module that encodes images, videos or audio."""
    names = "get_image_features", "get_video_features", "get_audio_features"
    found = [m for m in model.modules() if any(hasattr(m, name) for name in names)]
    return found[-1] if found else getattr(model, "model", model)  # its layers attend to images


def clips(model: Any, seed: int = 11) -> dict[str, Any]:
    """The entries of two clips, the second of which is shorter."""
    inner = owner(model)
    config = inner.config
    names = inspect.signature(getattr(type(inner), "get_audio_features", inner.forward)).parameters
    generator = torch.Generator().manual_seed(seed)
    kind = config.model_type
    if kind == "phi4_multimodal":
        features, mask = torch.randn(2, FRAMES, MEL, generator=generator, dtype=torch.float64), torch.ones(2, FRAMES)
        mask[1, 24:] = 0
        made = {"audio_input_features": features, "audio_embed_sizes": torch.tensor([5, 3])}
        return {**made, "audio_attention_mask": mask.bool()}
    if "input_values" in names:  # a waveform
        length = WAVE if kind == "omniasr" else FRAMES
        values, mask = torch.randn(2, length, generator=generator, dtype=torch.float64), torch.ones(2, length)
        mask[1, length * 3 // 5 :] = 0
        name = next(x for x in ("padding_mask", "input_values_mask") if x in names)
        values = values[:, None] if kind in ("vibevoice_asr", "omniasr") else values
        return {"input_values": values, name: mask.bool()}
    frames = LONG if kind.startswith("qwen3") else FRAMES
    frames_first = kind.startswith(("granite_speech", "gemma", "fun_asr", "nemo"))
    shape = (2, frames, MEL) if frames_first else (2, MEL, frames)
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, frames, dtype=torch.bool)
    mask[1, frames * 5 // 8 :] = False
    found = {"input_features": features}
    if kind.startswith("granite_speech"):
        rows = torch.ones(2, frames // config.window_size * (config.window_size // config.downsample_rate))
        rows[1, -2:] = 0
        return found | {"input_features_mask": rows.bool()}
    name = next((x for x in ("feature_attention_mask", "input_features_mask") if x in names), None)
    found |= {} if name is None else {name: mask}
    return found | ({"padding_mask": mask} if "padding_mask" in names else {})


def one_clip(entries: dict[str, Any], i: int) -> dict[str, Any]:
    """The entries of one of the clips."""
    return {name: x[i : i + 1] for name, x in entries.items()}


def rows_of_clips(model: Any, entries: dict[str, Any]) -> list[int]:
    """The numbers of rows that the model makes of each clip."""
    inner, found = owner(model), []
    if "audio_embed_sizes" in entries:
        return list(entries["audio_embed_sizes"].tolist())
    if model.config.model_type == "qwen2_audio":
        lengths = inner.audio_tower._get_feat_extract_output_lengths(entries["feature_attention_mask"].sum(1))
        return list(lengths[1].tolist())
    taken = inspect.signature(type(inner).get_audio_features).parameters
    for i in range(2):
        one = one_clip(entries, i)
        with torch.no_grad():
            output = inner.get_audio_features(**{name: x for name, x in one.items() if name in taken}, return_dict=True)
        rows = output.pooler_output if getattr(output, "pooler_output", None) is not None else output.last_hidden_state
        rows = rows[0] if isinstance(rows, tuple) else rows
        valid = one.get("input_features_mask") if "input_features_mask" not in taken else None
        if valid is None and rows.ndim == 3:
            valid = getattr(output, "attention_mask", None)
        found.append(rows.shape[:-1].numel() if valid is None else int(valid.sum()))
    return found


def audio_batch(model: Any) -> dict[str, Any]:
    """Two rows of tokens: one with two clips, and one without, which ends in padding."""
    ids = torch.randint(3, 50, (2, 17), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    return with_audio(model, {"input_ids": ids, "attention_mask": mask})


def with_audio(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with more tokens before its own, which hold two clips in the first row."""
    entries = clips(model)
    counts = rows_of_clips(model, entries)
    ids, at = batch["input_ids"], 3
    more = torch.randint(3, 50, (2, sum(counts) + 12), generator=torch.Generator().manual_seed(5))
    for count in counts:
        more[0, at - 1] = 56
        more[0, at : at + count] = AUDIO
        at += count + 3
    ids = torch.cat([more, ids], 1)
    mask = torch.cat([torch.ones_like(more), batch["attention_mask"]], 1)
    types = {x: torch.cat([torch.zeros_like(more), batch[x]], 1) for x in batch if x.endswith("token_type_ids")}
    noise = {"sample": False} if "sample" in inspect.signature(type(owner(model)).forward).parameters else {}
    return {**batch, "input_ids": ids, "attention_mask": mask, **types, **entries, **noise}
