"""Latent attention of transformers: modules hand on latents, and their attention call sends these, or expands them.

Modules with multi-head latent attention have a method ``expand_kv``, which makes keys and values of latents right
before they call attention. A prepared module's returns the latents as they are.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...module.latent_weight import NO_WEIGHT, latents_and_weight, say_heads_travel
from .seams import digest_of, source_of

NAME = "hyper_cp"
"""The attention implementation of prepared models."""
_EXPANSION = "32f8167d58c5aa7c"
"""The digest of ``expand_kv`` in transformers 5.23 and 5.24, whose result an op can make elsewhere."""
_SEAM = ("self.expand_kv(", "ALL_ATTENTION_FUNCTIONS.get_interface(", "attention_interface(")
"""The steps of the forward of such a module, in this order; nothing between them reads keys or values."""


def prepare_latents(decoder: nn.Module) -> int:
    """Let the modules of a decoder that have latent attention hand on latents. Returns their number."""
    found = [module for module in decoder.modules() if has_seam(type(module)) and hasattr(module, "kv_b_proj")]
    for module in found:
        module.expand_kv = partial(_handed_on, module)  # type: ignore[assignment]
    return len(found)


def has_seam(kind: type[nn.Module]) -> bool:
    """True for a type of module whose forward hands what ``expand_kv(kv_nope, k_rot)`` returns to attention, and does
    nothing else with it, if that method is the one of transformers' types."""
    if digest_of(getattr(kind, "expand_kv", None)) != _EXPANSION:
        return False
    source = _SHAPE.sub("", source_of(kind.forward))
    places = [source.find(text) for text in _SEAM]
    after = source[places[0] :]
    # Each name occurs once more, as an argument of attention.
    return -1 not in places and places == sorted(places) and all(after.count(x) == 1 for x in _RESULTS)


_SHAPE = re.compile(r"key_states\.shape\[(2|-2)\]")
"""The number of keys, which that of latents is too."""
_RESULTS = ("key_states", "value_states")


def _handed_on(module: nn.Module, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """``expand_kv`` of a prepared module."""
    return (kv_nope, k_rot) if _prepared(module) else expanded(module, kv_nope, k_rot)


def _prepared(module: Any) -> bool:
    return bool(module.config._attn_implementation == NAME)


def hands_on_latents(module: nn.Module) -> bool:
    """True if key and value of this module's attention call are latents and their rotary part."""
    return "expand_kv" in vars(module) and _prepared(module)


def expanded(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, as the module itself makes them."""
    keys, values = type(module).expand_kv(module, kv_nope, k_rot)
    return keys, values


def as_latents(module: Any, kv_nope: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Latents, and weight and bias with which they may travel. None: heads must."""
    found = latents_and_weight(module.kv_b_proj, kv_nope)
    if found is None:
        say_heads_travel(type(module).__name__, f"its kv_b_proj ({type(module.kv_b_proj).__name__})", NO_WEIGHT)
    return found
