"""Private parts of ``nn.Module`` and ``DeviceMesh``: hooks, calls on the stack, wrappers, compiled modules.

Needs ``_forward_pre_hooks``, ``_forward_hooks``, ``_backward_pre_hooks``, ``_backward_hooks``, ``_buffers``,
``_parameters``, ``_call_impl``, ``_compiled_call_impl``, ``RemovableHandle.next_id``, the child names of
``torch.compile`` (``_orig_mod``) and of ``checkpoint_wrapper`` (``_checkpoint_wrapped_module``),
``DeviceMesh._get_root_mesh`` (torch has no public way from a slice back to its mesh), the frame of
``parallelize_module``, and of the groups of FSDP2 their meshes and the gradients that wait in them. The same in torch
2.11 to 2.15.
``torch._dynamo.config.skip_nnmodule_hook_guards`` is set to False with the first style, and its default in
``torch._dynamo.config._config`` (:func:`guard_hooks`).
The counter ``torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER`` saves searches; without it every object is searched.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import dropwhile, islice
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# The frame of a module's call, which tells a call that is over from one that is running.
_CALL = nn.Module._call_impl.__code__
_MODE = "__torch_function__"
LIBRARY = __name__.partition(".")[0]


def hook_owners(module: nn.Module) -> list[Any]:
    """The objects whose methods are forward-pre-hooks of a module."""
    return [getattr(_plain(hook), "__self__", None) for hook in module._forward_pre_hooks.values()]


def _plain(hook: Any) -> Any:
    return hook.func if isinstance(hook, partial) else hook


@contextmanager
def numbered_alike(module: nn.Module) -> Iterator[None]:
    """Give the hooks that are registered inside the block, eight at most, the same numbers in modules that are alike.

    PyTorch counts hooks through a process, and a compiled graph holds for their numbers: each block of a model would be
    compiled by itself, until Dynamo gives up at ``recompile_limit``. Only the hooks of one module need different ones.
    """
    before = RemovableHandle.next_id
    RemovableHandle.next_id = min([0, *module._forward_pre_hooks, *module._forward_hooks]) - 8
    try:
        yield
    finally:
        RemovableHandle.next_id = before


def modules_of_hooks(module: nn.Module) -> list[str]:
    """The names of the Python modules that the hooks of a module's forward and of its backward come from."""
    forward = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks = [*forward, *module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    return [_module_of(hook) for hook in hooks]


@contextmanager
def without_hooks(modules: Iterable[nn.Module], of: Callable[[str], bool]) -> Iterator[None]:
    """In this block ``modules`` do not call those hooks of their forwards whose code is from a Python module for whose
    name ``of`` is True."""
    before: list[tuple[dict[int, Any], dict[int, Any], list[int]]] = []
    try:
        for module in modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                left_out = [number for number, hook in hooks.items() if of(_module_of(hook))]
                if left_out:
                    before.append((hooks, dict(hooks), left_out))
                    for number in left_out:
                        del hooks[number]
        yield
    finally:
        for hooks, content, left_out in before:  # not those that the block has removed
            found = {number: hook for number, hook in content.items() if number in left_out or number in hooks} | hooks
            hooks.clear()
            hooks.update(found)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Modules of ``model`` that are in training are in evaluation in this block."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _module_of(hook: Any) -> str:
    """The name of the Python module that a hook comes from."""
    plain = _plain(hook)
    owner = getattr(plain, "__self__", plain)
    return str(getattr(owner, "__module__", type(owner).__module__))


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module itself by name, None included, to restore them; the dict is the module's own."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module itself by name; the dict is the module's own."""
    return module._parameters


def _frames() -> Iterator[FrameType]:
    """The Python frames of this thread, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(code: CodeType, depth: int | None = None) -> Iterator[FrameType]:
    """The Python frames of this thread that run ``code``, innermost first. ``depth``: of the innermost ones only."""
    return (frame for frame in islice(_frames(), depth) if frame.f_code is code)


def calling_file() -> str:
    """The name of the file, which is none of PyTorch's, that makes the call which a mode of functions sees."""
    for frame in dropwhile(lambda frame: frame.f_code.co_name != _MODE, _frames()):
        file = str(frame.f_globals.get("__name__", ""))  # code that was made by exec may have none
        if frame.f_code.co_name != _MODE and file.partition(".")[0] != "torch":
            return file
    return ""


def called_by_library() -> bool:
    """True if the library itself makes the call that a mode of functions sees: it knows what it does. (The demo's model
    is a user's model.)"""
    file = calling_file()
    return file.startswith(f"{LIBRARY}.") and not file.startswith(f"{LIBRARY}.cli.")


def running_modules() -> Iterator[nn.Module]:
    """The modules whose calls are on the stack of this thread, innermost first; one for each call."""
    return (frame.f_locals["self"] for frame in frames_of(_CALL))


def is_running(module: nn.Module) -> bool:
    """True if a call of the module is on the stack of this thread."""
    return any(running is module for running in running_modules())


def calls_running(module: nn.Module) -> int:
    """The number of calls of the module on the stack of this thread."""
    return sum(running is module for running in running_modules())


def bypassed(module: nn.Module) -> bool:
    """True if ``module.forward`` is on the stack of this thread, and no call of the module: its hooks have not run."""
    if is_running(module):  # first: reading the locals of a forward keeps its tensors alive until it ends
        return False
    return any(x.f_code.co_name == "forward" and x.f_locals.get("self") is module for x in _frames())


def is_compiled(module: nn.Module) -> bool:
    """True for the result of ``torch.compile(module)``, and for a module that was ``module.compile()``d."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def checkpointed(module: nn.Module) -> nn.Module | None:
    """The module inside torch's ``checkpoint_wrapper``, else None."""
    return module._modules.get("_checkpoint_wrapped_module")


def averaging_ranks(module: nn.Module) -> list[int]:
    """The ranks over which a module is a wrapper of DDP or FSDP that averages gradients; none for other modules."""
    if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
        return dist.get_process_group_ranks(module.process_group)
    group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
    return [] if group is None else group.mesh_info.mesh.mesh.flatten().tolist()


def accumulates(module: nn.Module) -> bool:
    """True for a unit of DDP or FSDP2 whose next backward reduces no gradients, or also those of backwards before."""
    if isinstance(module, DistributedDataParallel):
        return not module.require_backward_grad_sync
    if not isinstance(module, FSDPModule):
        return False
    state = module._get_fsdp_state()
    for group in vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]:
        if group is not None:
            waiting = [group._partial_reduce_output, *(p.unsharded_accumulated_grad for p in group.fsdp_params)]
            waiting += [p._unsharded_param.grad for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            if not (group.reduce_grads and group.all_reduce_grads) or any(x is not None for x in waiting):
                return True
    return False


def holds(outer: str, name: str) -> bool:
    """True if the module of a model that is named ``outer`` ("": the model) contains another one of this name."""
    return outer != name and (not outer or name.startswith(f"{outer}."))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which ``mesh`` is a slice, or itself."""
    return mesh._get_root_mesh()


# --------------------------------------------------------------------------- a style applied after torch.compile
#
# A compiled graph is not guarded on hooks, so the hooks of a style applied after it never run in it: the style would be
# silently ignored.


def guard_hooks() -> None:
    """Have Dynamo guard the graphs of this process on modules without hooks, which it does not by default.

    A module under a style would run, without its hooks, the graph of another module of its class that has none.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False  # from torch 2.13 on, in this thread
        config._config["skip_nnmodule_hook_guards"].default = False  # and in all others
        if count_compilations():
            torch.compiler.reset()  # graphs that were made before have no such guards


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


def count_compilations() -> int:
    """The number of frames that were compiled in this process; 1 where the counter is missing (all objects are then
    searched for compiled modules)."""
    if "torch._dynamo" not in sys.modules:
        return 0
    counter = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {None: 1})
    return sum(counter.values())


_last_search: tuple[object, Callable[[], nn.Module | None], list[ref[nn.Module]]] = (None, lambda: None, [])
"""The last search: its key, the module whose plan was applied, and the compiled modules of the process."""


def _compiled_modules(module: nn.Module) -> list[nn.Module]:
    """Compiled modules that ``module`` may be part of: those in its plan, and all there are if any has run."""
    global _last_search
    if "torch._dynamo" not in sys.modules:
        return []
    compilations = count_compilations()
    frame, root, _ = plan_being_applied()
    root = module if root is None else root
    found = [x for x in root.modules() if is_compiled(x)]
    if not compilations or (root is module and not _is_child(module)):
        return found
    # A module does not know what it is part of. The search visits all objects, so it runs once per plan and not per
    # layer. The address of a frame may be used again for another plan: then the module or the counter differs.
    if frame is None or (frame, compilations) != _last_search[0] or _last_search[1]() is not root:
        modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__]
        _last_search = (frame, compilations), ref(root), [ref(x) for x in modules if is_compiled(x)]
    return found + [x for x in (weak() for weak in _last_search[2]) if x is not None]


def _is_child(module: nn.Module) -> bool:
    """True if a dict of modules alone holds the module, as the children of a module do: a fifth of a search's time."""
    tables = (x for x in gc.get_referrers(module) if isinstance(x, dict))
    return any(all(x is None or isinstance(x, nn.Module) for x in table.values()) for table in tables)


def plan_being_applied() -> tuple[int | None, nn.Module | None, list[str]]:
    """The address of the frame of ``parallelize_module``, its module (None if it is not on the stack), and the names
    that the styles of its plan allow to mix positions."""
    call, root, plan = None, None, None
    for frame in frames_of(parallelize_module.__code__):  # the outermost in the end
        root, plan, call = frame.f_locals["module"], frame.f_locals["parallelize_plan"], id(frame)
    keys, styles = ([*plan], [*plan.values()]) if isinstance(plan, dict) else ([""], [plan])
    allowed = [name for style in styles for name in getattr(style, "allow", ())]
    # Mixers may mix positions: their style makes them do so over all ranks.
    mixers = [key for key, style in zip(keys, styles, strict=True) if getattr(style, "mixers", False)]
    return call, root, allowed + mixers
