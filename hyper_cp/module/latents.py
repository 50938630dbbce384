"""Modules that make keys and values of latents themselves: their latents travel in place of what they made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.modes import unseen
from ..mesh.comm import gather_ranks
from ..mesh.cp_mesh import CPMesh
from ..ops.config import Call, Mode
from ..ops.latents import expand
from .latent_weight import NO_WEIGHT, is_read, latents_and_weight, say_heads_travel


class LatentLayer:
    """The layer of a styled module that expands latents ``[B, S, R]`` to keys and values ``[B, S, H * (Dn + Dv)]``.

    Its input is kept until the module calls attention, with keys that end in a rotary part. The first such call
    compares keys and values with those that its weight makes of the latents, on all ranks.
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
        found.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the latents of a call of the layer."""
        if not is_read(layer):
            given = [*args, *kwargs.values()]
            self.kept = (layer, given[0]) if given else None

    def in_place_of(
        self, cp: CPMesh, qkv: tuple[Tensor, Tensor, Tensor], call: Call, mode: Mode
    ) -> tuple[Tensor, Tensor, Call]:
        """Latents and their rotary part in place of k and v, and the call with the weight; or k and v, if heads must
        travel."""
        kept, self.kept = self.kept, None
        q, k, v = qkv
        if kept is None or call.weight is not None or mode.latents is False:
            return k, v, call
        layer, latent = kept
        found = latents_and_weight(layer, latent)
        if found is None:
            say_heads_travel(self.owner, self.name, NO_WEIGHT)
            return k, v, call
        if torch.compiler.is_compiling() and self.shared is None:
            say_heads_travel(self.owner, self.name, "ran in a compiled graph first")
            return k, v, call
        latent, weight, bias = found
        plain = len(weight) // q.shape[1] - v.shape[3]
        if self.shared is None and not self._compare(cp, latent, q, k, v, weight, bias, plain):
            return k, v, call
        rope = k[:, :1, :, plain:] if self.shared else k[..., plain:]
        return latent.unsqueeze(1), rope, replace(call, weight=weight, bias=bias)

    def _compare(
        self,
        cp: CPMesh,
        latent: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plain: int,
    ) -> bool:
        """Raise ``ValueError`` on every rank unless keys and values are what the weight makes of the latents. False:
        a rank cannot tell yet, since its numbers are zero."""
        heads, bar = q.shape[1], 1e-9 if q.dtype == torch.float64 else 1e-4 if q.dtype == torch.float32 else 3e-2

        def verdicts() -> list[bool]:
            fits = latent.ndim == 3 and latent.shape[1] == k.shape[2] and k.shape[1] == v.shape[1] == heads
            fits = fits and len(weight) % heads == 0 and 0 < plain < k.shape[3] and weight.shape[1] == latent.shape[2]
            known = one = True
            if fits:
                rope = k[..., plain:]
                made = expand(latent.to(weight.dtype).unsqueeze(1), rope, heads, k.shape[3], weight, bias)
                fits = all(bool((a - b).abs().max() <= bar * b.abs().max()) for a, b in zip(made, (k, v), strict=True))
                known = all(bool(x.any()) for x in (k[..., :plain], v, rope))
                one = bool((rope == rope[:, :1]).all())
            mine = torch.tensor([fits, known, one], dtype=torch.uint8, device=q.device)
            found: list[bool] = gather_ranks(cp.flat, mine).amin(0).bool().tolist()
            return found

        fits, known, one = unseen(verdicts, q.device)
        if not fits:
            raise ValueError(
                f"latents_from={self.name!r}: {self.owner} calls attention with key {tuple(k.shape)} and value "
                f"{tuple(v.shape)}, which are not what that layer makes of its input {tuple(latent.shape)} with a "
                "rotary part behind each key, here or on another rank. Latents could not travel in their place. Name "
                "the layer whose output is [.., heads * (Dn + Dv)], or leave latents_from out"
            )
        self.shared = one if known else None
        return known
