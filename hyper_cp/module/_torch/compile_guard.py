"""Refuses a style that is applied after torch.compile: it would be silently ignored.

A compiled graph is not guarded on hooks, so the hooks of a style applied after it never run in it. Needs the counter
``torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER`` (without it every object is searched) and the frame of
``parallelize_module``.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from weakref import ref

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from .modules import is_compiled


def refuse_compiled(module: nn.Module, name: str) -> None:
    """Raise ``RuntimeError`` if ``module`` is compiled, or part of a compiled module anywhere in the process.

    (A compiled *function* that calls the module cannot be found from here. Before anything has run compiled, compiled
    modules outside of the plan do no harm: they are traced when they run, hooks included.)
    """
    for owner in _compiled_modules(module):
        if any(child is module for child in owner.modules()):
            what = "which" if owner is module else f"but the {type(owner).__name__} that contains it"
            raise RuntimeError(
                f"ContextParallel is applied to {name}, {what} is compiled already. The compiled graph has no "
                "hooks, so attention would silently cover only this rank's shard. Apply the plan first, then "
                "torch.compile"
            )


_found: tuple[object, Callable[[], nn.Module | None], list[ref[nn.Module]]] = (None, lambda: None, [])
"""The last search: its key, the module whose plan was applied, and the compiled modules of the process."""


def _compiled_modules(module: nn.Module) -> list[nn.Module]:
    """Compiled modules that ``module`` may be part of: those in its plan, and all there are if any has run."""
    global _found
    if "torch._dynamo" not in sys.modules:
        return []
    # How often each frame was compiled. Where the counter is missing, all objects are searched.
    counter = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {None: 1})
    frames = sum(counter.values())
    frame, root, _ = plan_being_applied()
    root = module if root is None else root
    found = [x for x in root.modules() if is_compiled(x)]
    if not frames:
        return found
    # A module does not know what it is part of. The search visits all objects, so it runs once per plan and not per
    # layer. The address of a frame may be used again for another plan: then the module or the counter differs.
    if frame is None or (frame, frames) != _found[0] or _found[1]() is not root:
        modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__]
        _found = (frame, frames), ref(root), [ref(x) for x in modules if is_compiled(x)]
    return found + [x for x in (weak() for weak in _found[2]) if x is not None]


def plan_being_applied() -> tuple[int | None, nn.Module | None, list[str]]:
    """The address of the frame of ``parallelize_module``, its module (None if it is not on the stack), and the names
    that the styles of its plan allow to mix positions."""
    frame, call, root, plan = inspect.currentframe(), None, None, None
    while frame is not None:
        if frame.f_code is parallelize_module.__code__:  # the outermost in the end
            root, plan = frame.f_locals["module"], frame.f_locals["parallelize_plan"]
            call = id(frame)
        frame = frame.f_back
    keys, styles = ([*plan], [*plan.values()]) if isinstance(plan, dict) else ([""], [plan])
    allowed = [name for style in styles for name in getattr(style, "allow", ())]
    # Mixers may mix positions: their style makes them do so over all ranks.
    mixers = [key for key, style in zip(keys, styles, strict=True) if getattr(style, "mixers", False)]
    return call, root, allowed + mixers
