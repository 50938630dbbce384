"""A tiny random model of every type of the installed transformers, with any head, whose configuration can be made small
by changing the sizes that most configurations share."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY = 61
LARGEST = 4_000_000
"""Parameters of the largest model that counts as tiny."""


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_each("vocab_size text_vocab_size unpadded_vocab_size vocab_size_per_layer_input", VOCABULARY),
    **_each("hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size", 32),
    **_each("intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim encoder_ffn_dim", 24),
    **_each("moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size", 16),
    **_each("num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers", 2),
    **_each("dropout_rate activation_dropout encoder_layerdrop decoder_layerdrop", 0.0),
    **_each("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", 4),
    **_each("num_key_value_heads num_kv_heads attention_num_key_value_heads", 2),
    **_each("head_dim attention_head_dim d_kv rotary_dim global_head_dim", 8),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len max_target_positions", 64),
    **_each("q_lora_rank kv_lora_rank", 12),
    **_each("qk_rope_head_dim qk_nope_head_dim v_head_dim", 8),
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts", 4),
    **_each("num_experts_per_tok num_experts_per_token moe_k moe_topk", 2),
    **_each("linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads", 4),
    **_each("linear_num_key_heads n_groups mamba_n_groups mamba_ngroups n_mamba_heads", 2),
    **_each("linear_key_head_dim linear_value_head_dim linear_head_dim", 8),
    **_each("mamba_d_head mamba_head_dim", 16),
    **_each("mamba_d_ssm attention_hidden_size", 64),
    **_each("state_size mamba_d_state ssm_state_size time_step_rank mamba_dt_rank", 4),
    **_each("chunk_size mamba_chunk_size", 8),
    **_each("n_group topk_group first_k_dense_replace", 1),
    **_each("sliding_window attention_window window_size", 5),
    **_each("index_topk", 9),
    **_each("index_n_heads", 4),
    **_each("index_head_dim", 16),
    **_each("pad_token_id", 0),
    **_each("bos_token_id", 1),
    **_each("eos_token_id", 2),
    **_each("attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout dropout", 0.0),
    **_each("is_decoder", True),
}
"""Values for those of these attributes that a configuration has."""

HYBRIDS = (
    *("granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("kimi_linear", "olmo_hybrid", "bailing_hybrid"),
)
"""Types of which two layers would be two of the same kind."""

COMPASS = {x: {"rope_type": "default", "rope_theta": 1e4} for x in ("full_attention", "sliding_attention")}
GEMMA = {
    **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{name: SIZES[name] for name in ("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")},
    **{"sliding_window": 5, "attn_implementation": "eager", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

BLT = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    **{name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
    **_each("hidden_size_global cross_attn_k", 32),
    "cross_attn_k": 1,
}
INKLING = {
    **{"layer_types": ["hybrid_sliding", "hybrid"], "swa_head_dim": 8, "d_rel": 4, "rel_extent": 7},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "log_scaling_n_floor": 3},
}
SHARED_KEYS: dict[str, Any] = {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "num_kv_shared_layers": 2,  # as E2B has them
}
CHANGES: dict[str, dict[str, Any]] = {
    "inkling_text": {**INKLING, "mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": {**INKLING, "n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": {
        **{**INKLING, "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]},
        **{"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2},
        **{"loop_gate_rank": 8, "n_layers_per_attn_res_block": 2},
    },
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 16, "num_key_value_heads": 4},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **_each("indexer_n_heads indexer_kv_heads", 1),
        **_each("indexer_head_dim indexer_budget indexer_compress_ratio", 8),
        **{"ple_layer_ids": [1], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50},
    },
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7},
        **_each("num_hidden_layers index_topk", 3),
        **_each("o_groups num_key_value_heads hc_mult", 2),
        **{"num_key_value_heads": 1, "head_dim": 16, "o_lora_rank": 8, "partial_rotary_factor": 0.5},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        **_each("num_attention_heads num_key_value_heads", 4),  # which differ between layers
        **_each("swa_num_attention_heads swa_num_key_value_heads", 2),
        **_each("kv_lora_rank swa_q_lora_rank swa_kv_lora_rank", 12),
        **_each("qk_rope_head_dim qk_nope_head_dim v_head_dim swa_qk_nope_head_dim swa_v_head_dim", 8),
        **_each("head_dim swa_head_dim shared_experts_intermediate_size", 16),
    },
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        **_each("num_hidden_layers index_topk_blocks", 3),
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "index_block_size": 4, "index_n_heads": 2},
    },
    "nemotron_h": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 5},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    **{kind: {"layer_types": ["linear_attention", "full_attention"]} for kind in HYBRIDS},
    "llama4_text": {"attention_chunk_size": 5, "no_rope_layers": [1, 0], "floor_scale": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mistral4": {"head_dim": 16},  # of which it rotates one half
    "dots1": {"n_shared_experts": 1},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": SHARED_KEYS,
    "gemma4_unified_text": SHARED_KEYS,
    "zamba": {
        "layers_block_type": None,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "blt": {
        **{"encoder_hash_byte_group_vocab": 20, "encoder_hash_byte_group_size": [3], "cross_attn_k": 1},
        "vocab_size": VOCABULARY,
        **{f"{name}_config": BLT for name in ("patcher", "encoder", "decoder", "global")},
    },
    "phi4_multimodal": {
        "vision_config": {
            **_each("hidden_size crop_size image_size", 16),
            **{"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
        },
        "audio_config": {
            **_each("hidden_size ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels input_size", 16),
            **{"intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2},
        },
    },
    **{
        kind: {"num_codebooks": 1, "pad_token_id": VOCABULARY, "bos_token_id": VOCABULARY}
        for kind in ("musicgen_decoder", "musicgen_melody_decoder")
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": COMPASS},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1]},
    "led": {"attention_window": 6},
    "longformer": {"attention_window": 6},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 8},
    "neomme": {"head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "ngram": 2},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": VOCABULARY},
    "git": {"vision_config": {**_each("hidden_size intermediate_size", 24), **_each("image_size patch_size", 8)}},
    # SDPA, their default, leaves out the softcap on one device.
    "gemma2": {"attn_implementation": "eager", "attn_logit_softcapping": 2.0},
    "vaultgemma": {"attn_implementation": "eager", "attn_logit_softcapping": 2.0},
}
"""Changes that a type needs in addition."""


DRAFTS = "a draft model of speculative decoding, which takes hidden states and keys of another model"
UNTRIED = dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTS)
"""Types that have no forward of tokens."""
CAUSAL, MASKED, SEQ2SEQ, CLASSES = "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION"
QUESTIONS = "QUESTION_ANSWERING"
"""Names of heads, as transformers' tables of automatic classes have them."""


def types_of(head: str = CAUSAL) -> list[str]:
    """The model types that the automatic class of a head knows."""
    return sorted(_table(head))


def _table(head: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    found: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
    return found


def class_name(kind: str, head: str = CAUSAL) -> str:
    """The name of the class of a model type with a head."""
    # Some text models of others, such as mistral4, have a causal class that the automatic one does not know.
    found = _table(head).get(kind) or _table("PRETRAINING")[kind]
    return found if isinstance(found, str) else found[0]


class NotTiny(Exception):
    """A model type that cannot be built small by these changes."""

    @property
    def why(self) -> str:
        """The reason, for a table."""
        package = re.search(r"No module named '(\w+)'|requires the (\w+) library", str(self))
        return f"its encoder needs the package {package[1] or package[2]}" if package else "no tiny configuration"


@cache
def tiny_config(kind: str, head: str = CAUSAL) -> Any:
    """A small configuration of a model type; :class:`NotTiny` if there is none."""
    import transformers as hf

    try:
        default, made = hf.CONFIG_MAPPING[kind](), getattr(hf, class_name(kind, head))
        parts = (getattr(default, name, None) for name in ("text_config", "decoder"))
        text = next((x for x in parts if made.config_class is type(x)), None)
        if text is not None:  # a text model that the type of a whole one names, too
            config = text_config(text.model_type, head, text)
        elif getattr(default, "text_config", None) is not None and kind not in CHANGES:
            from tests.harness import hf_images

            config = hf_images.tiny_config(kind)
        else:
            config = text_config(kind, head, default)
        with torch.device("meta"):
            size = sum(p.numel() for p in made(config).parameters())
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {error}") from error
    if size > LARGEST:
        raise NotTiny(f"{size / 1e6:.0f} million parameters")
    return config


def text_config(kind: str, head: str, default: Any) -> Any:
    """A small configuration of a model of text."""
    fixed = {name for name, x in SIZES.items() if _is_fixed(default, name, x)}
    sizes = {name: x for name, x in SIZES.items() if name not in fixed and _has(default, name)}
    if "kv_lora_rank" in sizes:  # every head of latent attention has its own keys
        sizes["num_key_value_heads"] = 4
    if head != CAUSAL:
        sizes.pop("is_decoder", None)
    if head == SEQ2SEQ:
        sizes |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    eager = {"experts_implementation": "eager"}  # grouped products take no float64
    return type(default)(**{**sizes, **eager, **CHANGES.get(kind, {})})


def changed_behaviour(kind: str) -> str:
    """The types of layers of a tiny configuration, but for full attention alone, and the options, other than sizes, in
    which it differs from the default: "with `x=y`", or ""."""
    import transformers as hf

    default, config = hf.CONFIG_MAPPING[kind](), tiny_config(kind)
    layers = [f"`{x}`" for x in layer_types(kind) if x in _MIXING]
    names = [name for name in ("is_decoder",) if _has(default, name)]
    found = [f"`{name}={getattr(config, name)}`" for name in names if getattr(config, name) != getattr(default, name)]
    options = [f"with {' and '.join(found)}"] if found else []
    return "; ".join([", ".join(layers) if layers != ["`full_attention`"] else "", *options]).removeprefix("; ")


_MIXING = {"conv", "hybrid", "hybrid_sliding", "indexed_attention", "linear_attention", "minimax_m3_sparse"}
_MIXING |= {f"{kind}_attention" for kind in ("full", "sliding", "chunked", "window", "reference_sliding")}
_MIXING |= {f"{kind}_attention" for kind in ("compressed_sparse", "heavily_compressed")}
"""Types of layers that mix positions."""


def layer_types(kind: str) -> list[str]:
    """The types of layers of a tiny configuration, of attention and of MLPs, each once."""
    config = tiny_config(kind)
    found = [x for name in ("layer_types", "mlp_layer_types") for x in getattr(config, name, None) or ()]
    return list(dict.fromkeys(map(str, found)))


def left_out_by_transformers(kind: str) -> bool:
    """True if transformers' own context parallelism refuses the tiny model (5.23 or later)."""
    import transformers as hf

    made = getattr(hf, class_name(kind))
    own = getattr(hf.PreTrainedModel, "supports_context_parallel", None)
    given = SimpleNamespace(config=tiny_config(kind), _supports_context_parallel=made._supports_context_parallel)
    return own is not None and not own.fget(given)


def _is_fixed(default: Any, name: str, value: Any) -> bool:
    attribute = getattr(type(default), name, None)
    if not isinstance(attribute, property):
        return False
    try:
        setattr(copy.deepcopy(default), name, value)
    except (AttributeError, NotImplementedError):
        return True
    return False


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # some attributes may differ between layers, and say so
        return False


def random_model(made: Callable[[Any], Any], config: Any, scale: float = 0.3) -> Any:
    """A model in double precision, in evaluation mode, with the same random weights on every rank."""
    torch.manual_seed(7)
    model = made(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # norms start at ones or zeros, and small weights hide what attention does
            p.normal_(0, scale)
    return model


def tiny_causal(kind: str, head: str = CAUSAL) -> Any:
    """A model in double precision, in evaluation mode, with the same random weights on every rank."""
    import transformers as hf

    model = random_model(getattr(hf, class_name(kind, head)), copy.deepcopy(tiny_config(kind, head)))
    with torch.no_grad():
        for module in model.modules():  # tables of decays, which are made in single precision (MiniMax)
            if hasattr(module, "decay_factors"):
                made = module.decay_factors(module.slope_rate)
                for name, table in zip(("query_decay", "key_decay", "diagonal_decay"), made, strict=True):
                    getattr(module, name).copy_(table)
    return model
