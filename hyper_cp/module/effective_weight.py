"""The weight of a layer, for an op that applies it to what arrives from other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._torch.modules import hooks_of


def effective_weight(linear: nn.Module, but: Any = None) -> tuple[Tensor, Tensor | None] | None:
    """The weight ``[out, in]`` and the bias ``[out]`` of what a layer computes, for
    :func:`hyper_cp.ops.latent_attention`. None: it has none, because it is not linear, draws dropout, keeps its weight
    in another form (quantised), has hooks of its user (which may change what it computes, or its gradients), or has a
    bias and hooks.

    A plain ``nn.Linear`` gives its parameters. A weight that is there in the forward of the layer only (one that FSDP2
    shards apart from the rest of the model, a tensor-parallel shard) and adapters (LoRA) are found by calling the layer
    with the identity matrix: autograd then reaches sharded parameters and adapters as in any call. That costs as much
    as ``in`` tokens.

    Args:
        but: an object whose hooks on the layer change nothing.
    """
    plain = type(linear).forward is nn.Linear.forward and "forward" not in vars(linear)
    hooks = [x for module in linear.modules() for x in hooks_of(module) if x is not but]
    if not all(str(getattr(x, "__module__", "")).startswith(("torch.", "hyper_cp.")) for x in hooks):
        return None
    unhooked = not hooks
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if plain and unhooked and isinstance(weight, Tensor) and not isinstance(weight, DTensor):
        return (weight, bias) if weight.is_floating_point() else None
    adapted = hasattr(linear, "base_layer") and hasattr(linear, "lora_A")  # as PEFT names them
    variants = (getattr(linear, "lora_variant", None) or {}).values()  # all but DoRA may depend on the tokens
    if not all(type(x).__name__.startswith("Dora") for x in variants):
        return None
    parameters = dict(linear.named_parameters())
    drawn = any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in linear.modules())
    if not (plain or adapted) or drawn or not parameters or any(name.endswith("bias") for name in parameters):
        return None
    first = next(iter(parameters.values()))
    if not all(x.is_floating_point() for x in parameters.values()):
        return None
    found = linear(torch.eye(getattr(linear, "in_features"), dtype=first.dtype, device=first.device))  # noqa: B009
    return (found.mT, None) if isinstance(found, Tensor) and not isinstance(found, DTensor) else None
