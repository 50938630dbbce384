"""Tiny random models of transformers, and a mode in which they compute in double precision throughout."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp._torch.modules import hook_owners
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import random_model

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
NAMES = ("llama", "qwen3", "gemma3", "deepseek_v3")


def make(name: str, **changes: Any) -> Any:
    """A model in double precision with the same random weights on every rank."""
    import transformers as hf

    if name == "llama":
        model, config = hf.LlamaForCausalLM, hf.LlamaConfig(**{**SMALL, **changes})
    elif name == "qwen3":
        model, config = hf.Qwen3ForCausalLM, hf.Qwen3Config(**{**SMALL, "head_dim": 16, **changes})
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        extra = {"sliding_window": 5, "layer_types": kinds, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
        model = hf.Gemma3ForCausalLM
        config = hf.Gemma3TextConfig(**{**SMALL, "num_key_value_heads": 1, **extra, **changes})
    elif name == "deepseek_v3":
        mla = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
        moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        moe["first_k_dense_replace"] = 1
        heads = {"num_key_value_heads": 4, "head_dim": 4, "moe_intermediate_size": 8, "experts_implementation": "eager"}
        model = hf.DeepseekV3ForCausalLM
        config = hf.DeepseekV3Config(**{**SMALL, **mla, **moe, **heads, **changes})
    else:
        raise ValueError(name)
    config._attn_implementation = "sdpa"
    return random_model(model, config).train()


def model_of(kind: str, **changes: Any) -> Any:
    """A causal model of any type, in evaluation mode: some routers draw random numbers in training."""
    import transformers as hf

    return random_model(hf.AutoModelForCausalLM.from_config, hf.CONFIG_MAPPING[kind](**{**SMALL, **changes}))


class InDouble(TorchFunctionMode):
    """Models cast to float32 or bfloat16 in norms, rotary embeddings, routers and losses; here they cast to float64, so
    that a comparison at 1e-10 says something about attention and not about rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if func is torch.full and "dtype" not in (kwargs or {}) and isinstance([*args, 0, 0][1], float):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        return func(*map(_wide, args), **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 or x is torch.bfloat16 else x


class LowestFirst(TorchFunctionMode):
    """``Tensor.topk`` that takes the lower position of equal scores. (PyTorch promises no order.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.topk:
            found = torch.sort(args[0], stable=True, descending=True, dim=-1)
            return torch.return_types.topk([x[..., : args[1]] for x in found])
        return func(*args, **(kwargs or {}))


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def interrupt(*_: Any) -> None:
    """A hook in which Ctrl-C ends a forward: torch runs no other hooks then."""
    raise KeyboardInterrupt


def gradients(model: Any) -> list[Tensor]:
    """The gradient of every parameter; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


# --------------------------------------------------------------------------- the integration
# These functions are imported when they are called: tests are collected without transformers.


def prepare_model(*args: Any, **options: Any) -> Any:
    from hyper_cp.integrations import transformers

    return transformers.prepare_model(*args, **options)


def compared(model: Any) -> Any:
    """A prepared model whose first forward communicates as the others do: it is not compared with one device on a few
    tokens."""
    for module in model.modules():
        for owner in hook_owners(module):
            if hasattr(owner, "few"):
                owner.few.made = True
    return model


def prepare_batch(*args: Any, **options: Any) -> Any:
    from hyper_cp.integrations import transformers

    return transformers.prepare_batch(*args, **options)


def generate(*args: Any, **options: Any) -> Any:
    from hyper_cp.integrations import transformers

    return transformers.generate(*args, **options)


def prepared(model: Any, **mode: Any) -> tuple[Any, ContextParallelHandler]:
    """A copy of a model that is prepared in a mode on all ranks, and the handler of its batches."""
    mesh, style = cp_mesh(), ContextParallel(**mode)
    return prepare_model(copy.deepcopy(model), mesh, style=style), ContextParallelHandler(mesh, style)
