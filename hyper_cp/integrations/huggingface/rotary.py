"""Rotary tables that depend on the longest position: dynamic NTK, LongRoPE and others that a model defines itself.

They take the maximum of the position ids that they are given, and a rank has only its own share of them. So the last
position of the whole sequence is appended to the ids before such a module, and its row removed from the table after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .forward import ForwardState, state_for

STATIC = {"default", "linear", "yarn", "llama3", "proportional", "ntk_alpha", "axial"}
"""Kinds of rotary embedding whose angles depend on a token's own position only."""


def prepare_rotary(decoder: nn.Module) -> int:
    """Hook the rotary embeddings of a decoder that depend on the longest position, and return their number."""
    found = [module for module in decoder.modules() if _kinds(module) - STATIC]
    for module in found:
        hook = _LastPosition(module)
        module.register_forward_pre_hook(hook.before, with_kwargs=True)
        module.register_forward_hook(hook.after)
    return len(found)


def _kinds(module: nn.Module) -> set[str]:
    """The kinds of rotary embedding that a module computes: one, or one for each type of layer."""
    kinds = getattr(module, "rope_type", None)
    return {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)) if kind is not None}


class _LastPosition:
    """The hooks of one rotary embedding."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def last(self) -> int | Tensor | None:
        """The last position of the whole batch; None if the ids of this call have it."""
        state = state_for(self.module)
        return state.batch.last_position if isinstance(state, ForwardState) else None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append the last position to the position ids."""
        last = self.last()
        if last is None:
            return None
        positional, keywords = list(args), dict(kwargs)
        given: Any = keywords if "position_ids" in keywords else positional
        at: Any = "position_ids" if "position_ids" in keywords else 1
        positions = given[at]
        more = torch.as_tensor(last, dtype=positions.dtype, device=positions.device)
        given[at] = torch.cat([positions, more.expand(*positions.shape[:-1], 1)], -1)
        return tuple(positional), keywords

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Remove the row of the last position."""
        if self.last() is None:
            return None
        if isinstance(output, Tensor):
            return output.narrow(-2, 0, output.shape[-2] - 1)
        return type(output)(x.narrow(-2, 0, x.shape[-2] - 1) for x in output)
