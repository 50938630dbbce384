"""Modes of functions and of operators: one is taken out of the stack, and one sees what our custom ops call inside.

Leaving a ``TorchFunctionMode`` takes off the top of the stack, which is another one if the call that entered this mode
was interrupted (Ctrl-C, after which torch runs no hooks). Needs ``_pop_mode``, ``_push_mode`` and
``_get_current_function_mode_stack`` of ``torch.overrides``, which has no public way to look below the top.

Dispatch modes and trees of tensors lie in modules of torch whose names are private (``torch.utils._python_dispatch``,
``torch.utils._pytree``). A mode is off while it handles an operator, so it does not see what one that is written in
Python calls. ``OpOverload.redispatch`` with the key of a device (``torch._C.DispatchKeySet`` and
``torch._C.DispatchKey``) runs the kernel below the key of modes, so that a mode may be on. Functions of tensors
reach no mode in ``torch._C.DisableTorchFunction``. The same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .version import moved

__all__ = ["TorchDispatchMode", "past_modes", "run_kernel", "take_out", "tree_leaves"]

if not hasattr(torch._ops.OpOverload, "redispatch"):
    raise moved("OpOverload.redispatch")

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}


def run_kernel(func: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of an operator for a type of devices, while the modes of the caller are on."""
    key = getattr(torch._C.DispatchKey, _KEYS.get(device, "PrivateUse1"))
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def take_out(mode: TorchFunctionMode) -> None:
    """Remove a mode from this thread's stack, if it is there; the others stay in their order."""
    stack = overrides._get_current_function_mode_stack()
    if not any(entered is mode for entered in stack):
        return
    above: list[TorchFunctionMode] = []
    while (top := overrides._pop_mode()) is not mode:
        above.append(top)
    for entered in reversed(above):
        overrides._push_mode(entered)


def past_modes() -> AbstractContextManager[None]:
    """A context in which functions of tensors reach no mode that is entered."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return found
