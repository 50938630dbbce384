"""Models that call ``F.scaled_dot_product_attention`` themselves (Falcon): the call is routed while a module runs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...module._torch.modules import is_running
from ...module.thread_stack import ThreadStack
from .attention import attention_forward
from .forward import ForwardState, state_for

CALL = "scaled_dot_product_attention("


def direct_attention(decoder: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a decoder that call SDPA themselves and add nothing to scores; none if it runs another
    implementation."""
    if decoder.config._attn_implementation != "sdpa" or getattr(decoder.config, "alibi", False):
        return []
    return [module for module in decoder.modules() if _calls_sdpa(type(module))]


def _calls_sdpa(kind: type[nn.Module]) -> bool:
    names = inspect.signature(kind.forward).parameters
    if kind.__module__.startswith("torch.") or "attention_mask" not in names:
        return False
    try:
        return CALL in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def no_mask(device: torch.device) -> Tensor:
    """A mask in four dimensions, in place of one that models would make. They hand it on as it is."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def route(modules: list[nn.Module]) -> None:
    """Route the attention calls of these modules."""
    for module in modules:
        module.register_forward_pre_hook(_before)
        module.register_forward_hook(_after, always_call=True)


def _before(module: nn.Module, args: Any) -> None:
    state = state_for(module)
    if isinstance(state, ForwardState):
        mode = _Routing(module, state)
        _modes.push(mode)
        mode.__enter__()


def _after(module: nn.Module, args: Any, output: Any) -> None:
    if (mode := _modes.top) is not None and mode.module is module:
        _modes.remove(mode)
        mode.__exit__(None, None, None)


class _Routing(TorchFunctionMode):
    """While entered, SDPA is attention over the sequence of all ranks."""

    def __init__(self, module: nn.Module, state: ForwardState) -> None:
        super().__init__()
        self.module, self.state = module, state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A KeyboardInterrupt ends a module's call without its hooks.
        alive = torch.compiler.is_compiling() or is_running(self.module)
        if func is F.scaled_dot_product_attention and alive:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = None if attn_mask is None or attn_mask.numel() == 1 else attn_mask
        out, _ = attention_forward(
            self.module, query, key, value, mask, context_parallel=self.state, dropout=dropout_p, scaling=scale
        )
        return out.transpose(1, 2)


_modes: ThreadStack[_Routing] = ThreadStack()
"""The modes that are entered."""
