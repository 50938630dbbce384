"""Learned biases of relative positions (T5, MPNet): a score function of global positions, with gradients.

Modules make a bias ``[1, H, S, S]`` of the distance between a key and a query. A prepared one makes a row of all
distances, and attention adds its entries to the scores.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import checkpoint
from ...ops.kernels.scores import Score
from ...ops.kernels.scores.mods import Mods
from .forward import ForwardState, state_for

METHODS = {
    "compute_bias": ["query_length", "key_length", "device", "past_seen_tokens"],
    "compute_position_bias": ["x", "position_ids", "num_buckets"],
}
"""Names of the methods that make biases, and those of their arguments."""


@dataclass(frozen=True)
class RelativeBias:
    """The bias of a layer, in place of a tensor: ``values [2 * S - 1, H]``, one for each distance; None: no bias."""

    values: Tensor | None

    def score(self, query: Tensor) -> Score | None:
        """The function that adds it to the scores of ``query``."""
        values = self.values
        if values is None:
            return None
        last = len(values) // 2
        return Mods(lambda score, b, h, i, j: score + values[j - i + last, h], None, None, query)


def relative_modules(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that make biases of relative positions by a table, in a method that is known."""
    tables = [m for m in decoder.modules() if isinstance(getattr(m, "relative_attention_bias", None), nn.Embedding)]
    return [module for module in tables if _method(module)]


def _method(module: nn.Module) -> str | None:
    for name, arguments in METHODS.items():
        made = getattr(type(module), name, None)
        if made is not None and list(inspect.signature(made).parameters)[1:] == arguments:
            return name
    return None


def prepare_biases(decoder: nn.Module) -> None:
    """Let such modules make biases for the positions of all ranks, and those without a table none."""
    found = relative_modules(decoder)
    for module in found:
        name = _method(module) or ""
        setattr(module, name, partial(_made, module, name, len(found) == 1))
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", True) is False and _takes_bias(module):
            module.register_forward_pre_hook(_none, with_kwargs=True)


def _takes_bias(module: nn.Module) -> bool:
    return "position_bias" in inspect.signature(module.forward).parameters


def _none(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Cross-attention of T5 makes a bias of zeros."""
    if kwargs.get("position_bias") is not None or not isinstance(state_for(module), ForwardState):
        return None
    return args, {**kwargs, "position_bias": RelativeBias(None)}


def _made(module: Any, name: str, shared: bool, given: Any, *args: Any, **kwargs: Any) -> Any:
    """The method of a prepared module; its first argument has the number of this rank's positions. A ``shared`` bias is
    that of later layers, too."""
    state, make = state_for(module), getattr(type(module), name)
    if not isinstance(state, ForwardState):
        return make(module, given, *args, **kwargs)
    if shared and checkpoint.in_function_forward():
        raise NotImplementedError(
            f"{type(module).__name__} makes biases of positions inside a reentrant activation checkpoint, and hands "
            "them to later layers. Their gradients would not come back to its table. Use use_reentrant=False"
        )
    local = given.shape[1] if isinstance(given, Tensor) else given
    last = local * state.mesh.views[0].size - 1
    if name == "compute_bias":  # a query in the middle of its keys
        device = module.relative_attention_bias.weight.device
        values = make(module, 1, 2 * last + 1, device=device, past_seen_tokens=last)[0, :, 0].t()
    else:
        distances = torch.arange(-last, last + 1, device=given.device)
        buckets = kwargs.get("num_buckets", 32)
        values = module.relative_attention_bias(module.relative_position_bucket(distances, num_buckets=buckets))
    return RelativeBias(values.contiguous())
