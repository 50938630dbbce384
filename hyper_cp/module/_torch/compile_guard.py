"""The order in which a style and torch.compile are applied: a late style would be silently ignored.

A compiled graph is not guarded on hooks, so the hooks of a style applied after it never run in it.
"""

from __future__ import annotations

import gc
import inspect
import sys
from weakref import ref

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns, or was ``module.compile()``d."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def refuse_compiled(module: nn.Module, name: str) -> None:
    """Raise ``RuntimeError`` if ``module`` is compiled, or part of a module that is, whoever holds that.

    (A compiled *function* that calls the module cannot be seen from here. Before anything has run compiled, compiled
    modules outside of the plan are no harm: they are traced when they run, hooks included.)
    """
    for owner in _compiled_modules(module):
        if any(child is module for child in owner.modules()):
            what = "which" if owner is module else f"but the {type(owner).__name__} that contains it"
            raise RuntimeError(
                f"ContextParallel is applied to {name}, {what} is compiled already: the compiled graph would not "
                "notice, and attend the local share of the sequence only. Apply the plan first, then torch.compile"
            )


_found: tuple[object, list[ref[nn.Module]]] = (None, [])


def _compiled_modules(module: nn.Module) -> list[nn.Module]:
    """Compiled modules that ``module`` may be part of: those in its plan, and all there are if any has run."""
    global _found
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None:
        return []
    # Private: how often what was compiled. Where it is not to be had, all objects are looked at.
    frames = sum(getattr(dynamo, "FRAME_COMPILE_COUNTER", {None: 1}).values())
    call, root = _plan_being_applied()
    # Both look at many objects, so it is done once per plan and not per layer. Addresses are used again; compiled
    # code that ran in between makes the difference.
    plan = call and (*call, frames)
    if plan is None or plan != _found[0]:
        modules = list((module if root is None else root).modules())
        if frames:  # a module does not know what it is part of
            modules += [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__]
        _found = (plan, [ref(x) for x in modules if is_compiled(x)])
    return [x for x in (weak() for weak in _found[1]) if x is not None]


def _plan_being_applied() -> tuple[tuple[int, int] | None, nn.Module | None]:
    """What tells one call of ``parallelize_module`` from another, and its module (None: there is none on the stack)."""
    frame, call, root = inspect.currentframe(), None, None
    while frame is not None:
        if frame.f_code is parallelize_module.__code__:
            root = frame.f_locals["module"]  # the outermost in the end
            call = (id(frame), id(root))
        frame = frame.f_back
    return call, root
