"""Modules that make keys and values of latents themselves: their latents travel in place of what they made."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..ops.config import Call, Mode
from ..ops.latents import expand
from .effective_weight import effective_weight

logger = logging.getLogger(__name__)


class LatentLayer:
    """The layer of a styled module that expands latents ``[B, S, R]`` to keys and values ``[B, S, H * (Dn + Dv)]``.

    Its input is kept until the module calls attention, with keys that end in a rotary part. The first such call
    compares keys and values with those that its weight makes of the latents.
    """

    def __init__(self, owner: str, name: str, module: nn.Module) -> None:
        found = dict(module.named_modules()).get(name)
        if found is None:
            layers = [at for at, x in module.named_modules() if isinstance(x, nn.Linear)]
            raise ValueError(
                f"latents_from={name!r} is no submodule of {owner}. It names the layer that expands latents to keys "
                f"and values. Pass one of its layers: {', '.join(layers) or 'it has no nn.Linear'}"
            )
        self.owner, self.name = owner, name
        self.kept: tuple[nn.Module, Tensor] | None = None
        """The layer that was called last, and its input."""
        self.shared: bool | None = None
        """True if all heads have one rotary part; None before the first call."""
        self._reading = False
        found.register_forward_pre_hook(self.keep)

    def keep(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the latents of a call of the layer."""
        if not self._reading:
            self.kept = (layer, args[0]) if args else None

    def in_place_of(self, qkv: tuple[Tensor, Tensor, Tensor], call: Call, mode: Mode) -> tuple[Tensor, Tensor, Call]:
        """Latents and their rotary part in place of k and v, and the call with the weight; or k and v, if heads must
        travel."""
        kept, self.kept = self.kept, None
        q, k, v = qkv
        if kept is None or call.weight is not None or mode.latents is False:
            return k, v, call
        layer, latent = kept
        self._reading = True
        try:
            found = effective_weight(layer, but=self)
        finally:
            self._reading = False
        local = not isinstance(latent, DTensor)
        compiling = torch.compiler.is_compiling()
        if found is None or not local or (compiling and self.shared is None):
            why = "has no weight that could expand latents elsewhere" if found is None else "works on DTensors"
            _say(self.owner, self.name, why if found is None or not local else "ran in a compiled graph first")
            return k, v, call
        weight, bias = found
        plain = len(weight) // q.shape[1] - v.shape[3]
        if self.shared is None:
            self._compare(latent, q, k, v, weight, bias, plain)
        rope = k[:, :1, :, plain:] if self.shared else k[..., plain:]
        return latent.unsqueeze(1), rope, replace(call, weight=weight, bias=bias)

    def _compare(
        self, latent: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, plain: int
    ) -> None:
        """Raise ``ValueError`` unless keys and values are what the weight makes of the latents."""
        heads, bar = q.shape[1], 1e-9 if q.dtype == torch.float64 else 1e-4 if q.dtype == torch.float32 else 3e-2
        fits = latent.ndim == 3 and latent.shape[1] == k.shape[2] and k.shape[1] == v.shape[1] == heads
        if fits and len(weight) % heads == 0 and 0 < plain < k.shape[3] and weight.shape[1] == latent.shape[2]:
            with torch.no_grad():
                rope = k[..., plain:]
                made = expand(latent.to(weight.dtype).unsqueeze(1), rope, heads, k.shape[3], weight, bias)
                fits = all(bool((a - b).abs().max() <= bar * b.abs().max()) for a, b in zip(made, (k, v), strict=True))
                self.shared = bool((rope == rope[:, :1]).all())
        else:
            fits = False
        if not fits:
            self.shared = None
            raise ValueError(
                f"latents_from={self.name!r}: {self.owner} calls attention with key {tuple(k.shape)} and value "
                f"{tuple(v.shape)}, which are not what that layer makes of its input {tuple(latent.shape)} with a "
                "rotary part behind each key. Latents could not travel in their place. Name the layer whose output is "
                "[.., heads * (Dn + Dv)], or leave latents_from out"
            )


@lru_cache(maxsize=256)
def _say(owner: str, name: str, why: str) -> None:
    logger.info("%s: heads travel, not latents: %s %s", owner, name, why)
