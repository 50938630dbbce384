"""Private parts of ``nn.Module``: hooks of a module, calls that are on the stack, wrappers around it.

Needs ``_forward_pre_hooks``, ``_buffers``, ``_call_impl``, ``_compiled_call_impl``, and the child
names of ``torch.compile`` (``_orig_mod``) and of ``checkpoint_wrapper`` (``_checkpoint_wrapped_module``). The same in
torch 2.11 to 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

# The frame of a module's call, which tells a call that is over from one that is running.
_CALL = nn.Module._call_impl.__code__


def hook_owners(module: nn.Module) -> list[Any]:
    """The objects whose methods are forward-pre-hooks of a module."""
    return [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module itself by name, None included, to restore them; the dict is the module's own."""
    return module._buffers


def running_modules() -> Iterator[nn.Module]:
    """The modules whose calls are on the stack of this thread, innermost first; one for each call."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_running(module: nn.Module) -> bool:
    """True if a call of the module is on the stack of this thread."""
    return any(running is module for running in running_modules())


def calls_running(module: nn.Module) -> int:
    """The number of calls of the module on the stack of this thread."""
    return sum(running is module for running in running_modules())


def is_compiled(module: nn.Module) -> bool:
    """True for the result of ``torch.compile(module)``, and for a module that was ``module.compile()``d."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def checkpointed(module: nn.Module) -> nn.Module | None:
    """The module inside torch's ``checkpoint_wrapper``, else None."""
    return module._modules.get("_checkpoint_wrapped_module")
