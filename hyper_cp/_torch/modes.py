"""Modes of functions and of operators: one is taken out of the stack, one sees what our custom ops call inside, and
calls are made past all of them.

Leaving a ``TorchFunctionMode`` takes off the top of the stack, which is another one if the call that entered this mode
was interrupted (Ctrl-C, after which torch runs no hooks). Needs ``_pop_mode``, ``_push_mode`` and
``_get_current_function_mode_stack`` of ``torch.overrides``, which has no public way to look below the top.

Dispatch modes and trees of tensors lie in modules of torch whose names are private (``torch.utils._python_dispatch``,
``torch.utils._pytree``). A mode is off while it handles an operator, so it does not see what one that is written in
Python calls. ``OpOverload.redispatch`` with the key of a device (``torch._C.DispatchKeySet`` and
``torch._C.DispatchKey``) runs the kernel below the key of modes, so that a mode may be on. Functions of tensors
reach no mode in ``torch._C.DisableTorchFunction``. Dynamo asks ``set_code_exec_strategy`` of
``torch._C._dynamo.eval_frame`` where not to begin a graph. The same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .version import moved

__all__ = ["TorchDispatchMode", "begin_no_graph", "past_modes", "run_kernel", "take_out", "tree_leaves", "unseen"]

if not hasattr(torch._ops.OpOverload, "redispatch"):
    raise moved("OpOverload.redispatch")
if not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):
    raise moved("set_code_exec_strategy")

T = TypeVar("T")
_KEYS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}


def run_kernel(func: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of an operator for a type of devices, while the modes of the caller are on."""
    key = getattr(torch._C.DispatchKey, _KEYS.get(device, "PrivateUse1"))
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def begin_no_graph(mode: type[TorchFunctionMode]) -> None:
    """Let Dynamo begin no graph in a mode's ``__torch_function__``, or in what that calls.

    Where Dynamo gives up a frame, its functions run eagerly, and each call of a mode is a frame that Dynamo compiles by
    itself. It has no guard on the function that the mode handles, so the next one with such inputs would run as the one
    before (torch 2.11 to 2.15). Graphs that begin outside of the mode trace it as before.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(mode.__torch_function__.__code__, skip)


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


def unseen(call: Callable[[], T], device: torch.device) -> T:
    """Return ``call()``, without gradients, in another thread: no mode of this one sees what it calls, and nothing is
    routed. Stream and autocast are those of this thread.

    For comparisons that only a first forward makes, and what is added up beside forwards: a selective checkpoint counts
    the operators that it sees, and would take the results of others in a recompute.
    """
    module, kind = torch.get_device_module(device), device.type
    has_streams = hasattr(module, "current_stream")
    stream = module.stream(module.current_stream(device)) if has_streams else nullcontext()
    casts = torch.is_autocast_enabled(kind)
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind)) if casts else nullcontext()

    def without_gradients() -> T:
        with torch.no_grad(), autocast, stream:
            return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(without_gradients).result()
