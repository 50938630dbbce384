"""Lightning attention (MiniMax): a linear recurrence that its module computes itself, block by block.

The forward calls no function for it. But it splits one tensor into q, k and v (``torch.split``), and concatenates the
outputs of its blocks (``torch.cat``): the first shows the inputs of the recurrence, and the second is the place of its
outputs. What lies between them is not computed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...module.mixers.calls import RunningMixer, running_mixer
from ...module.mixers.hooks import MixerHooks

STEPS = ("torch.split(qkv_states", "torch.matmul(", "torch.cat(attn_output, dim=-2)")
"""The code around the recurrence in the forward of such a module."""


def is_lightning(module: nn.Module) -> bool:
    """True for a module that computes lightning attention as MiniMax of transformers does."""
    if not isinstance(getattr(module, "slope_rate", None), Tensor):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return all(step in source for step in STEPS)


class LightningHooks(MixerHooks):
    """The hooks of one module with lightning attention."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.modes: list[_Lightning] = []

    def check_calls(self, module: nn.Module) -> None:
        """The recurrence is found in the forward itself."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin to route."""
        found = super().before(module, args, kwargs)
        mixer = running_mixer()
        if mixer is not None and mixer.module is module:
            self.modes.append(_Lightning(mixer, module))
            self.modes[-1].__enter__()
        return found

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop routing."""
        if self.modes and self.modes[-1].mixer is running_mixer():
            self.modes.pop().__exit__(None, None, None)
        super().after(module, args, output)


class _Lightning(TorchFunctionMode):
    """While entered, the recurrence between the split and the concatenation runs over all ranks."""

    def __init__(self, mixer: RunningMixer, module: nn.Module) -> None:
        super().__init__()
        self.mixer, self.module = mixer, module
        self.qkv: tuple[Tensor, ...] | None = None
        """q, k and v ``[B, S, H, D]`` between the two."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if running_mixer() is not self.mixer:  # a KeyboardInterrupt ended the module's call without its hooks
            return func(*args, **kwargs)
        if func is torch.split:
            self.qkv = func(*args, **kwargs)
            return tuple(x.detach() for x in self.qkv)  # what is computed of them is thrown away
        if func is torch.matmul and self.qkv is not None:
            a, b = args
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            return a.new_zeros(()).expand(*batch, a.shape[-2], b.shape[-1])
        if func is torch.cat and self.qkv is not None:
            return self._recur(*self.qkv)
        return func(*args, **kwargs)

    def _recur(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs of the recurrence, ``[B, H, S, D]``."""
        self.qkv = None
        self.mixer.routed += 1
        return self.mixer.recur(q, k, v, -self.module.get_buffer("slope_rate").flatten()).transpose(1, 2)
