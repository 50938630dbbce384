"""Restore a model after forwards that are not part of its training: gradients, buffers, attributes, random numbers."""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .._torch.modules import buffers_of, parameters_of
from ..module.mesh_binding import bindings

_ABSENT: Any = object()


@contextmanager
def restore_model_state(model: nn.Module, device_type: str, kept: bool = False) -> Iterator[None]:
    """Restore a model after the block, or after an exception in it: gradients (the same objects), buffers, the
    attributes that a forward assigns or changes (lists, dicts, sets, tensors, generators), the records of its styles.
    Restore random number generators, too. In the block gradients begin as None.

    ``kept``: the block has no backward, and stands behind a forward of the model, perhaps inside of the one of FSDP's
    root. What that forward has kept for later, in private attributes and in objects, is restored, too; gradients are
    not touched, weights that are whole remain so, and the block writes to copies of what the forward's graph may have
    saved: buffers, tensors, and small frozen parameters."""
    units = [x for x in model.modules() if isinstance(x, FSDPModule) and not (kept and _is_whole(x))]
    for unit in () if kept else units:  # a root is whole behind a forward without backward, and its gradients apart
        unit.reshard()
    grads = [] if kept else [(p, p.grad) for p in model.parameters()]
    averaged = any(isinstance(x, DistributedDataParallel) for x in model.modules())
    shared = [x for _, x in grads if averaged and x is not None and x.layout is torch.strided]  # views of its buckets
    values = [(x, x.detach().clone()) for x in shared]
    buffers = [(module, dict(buffers_of(module))) for module in model.modules()]
    attributes = [(module, _attributes(module)) for module in model.modules()]
    contents: dict[int, Callable[[], object]] = {}
    frozen = [(module, _small_frozen(module)) for module in model.modules()] if kept else []
    copied = _put_copies_in_place(buffers, attributes, frozen) if kept else set()
    for _, found in buffers:
        plain = [x for x in found.values() if x is not None and x.layout is torch.strided and not x.is_meta]
        contents |= {id(x): partial(_restore_tensor, x, x.detach().clone()) for x in plain if id(x) not in copied}
    for _, found in attributes:
        _keep_content([x for x in found.values() if id(x) not in copied], contents, kept)
    calls = [(binding, binding.heads, binding.positions) for binding in bindings(model)]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device_type == "cpu" else [torch.accelerator.current_device_index()]
    of_device = {} if device_type == "cpu" else {"device_type": device_type}  # torch 2.11 takes no None
    with torch.random.fork_rng(devices, **of_device):
        for p, _ in grads:
            p.grad = None
        try:
            yield
        finally:
            for module, before in attributes:
                _restore_attributes(module, before, kept)
            for module, found in buffers:
                buffers_of(module).clear()
                buffers_of(module).update(found)
            for module, found in frozen:
                parameters_of(module).update(found)
            for restore in contents.values():
                restore()
            for unit in units:
                unit.reshard()  # after an exception, whole parameters may be in place of the sharded ones
            for p, grad in grads:
                p.grad = grad
            for grad, value in values:
                _restore_tensor(grad, value)
            for binding, heads, positions in calls:
                binding.heads, binding.positions = heads, positions
            random.setstate(python)
            np.random.set_state(numpy)


Found = list[tuple[nn.Module, dict[str, Any]]]


def _put_copies_in_place(buffers: Found, attributes: Found, frozen: Found) -> set[int]:
    """Let modules have copies of their tensors, for forwards that may write; return the ids of the originals."""
    copies: dict[int, Tensor] = {}
    for place, tensors in ((buffers_of, buffers), (vars, attributes), (parameters_of, frozen)):
        for module, found in tensors:
            for name, x in found.items():
                if type(x) in (Tensor, nn.Parameter) and _owns_storage(x):
                    if id(x) not in copies:
                        copies[id(x)] = x.detach().clone()
                    made = copies[id(x)]
                    place(module)[name] = made if type(x) is Tensor else nn.Parameter(made, False)
    return {*copies}


def _small_frozen(module: nn.Module) -> dict[str, Any]:
    """The frozen parameters of a module that it may use as buffers: counters, averages."""
    found = parameters_of(module).items()
    return {
        name: p for name, p in found if type(p) is nn.Parameter and not p.requires_grad and p.numel() <= _MOST_ELEMENTS
    }


def _owns_storage(x: Tensor) -> bool:
    """True for a tensor that is all there, and no view."""
    return x.layout is torch.strided and not x.is_meta and x.untyped_storage().nbytes() == x.numel() * x.itemsize


def _is_whole(unit: FSDPModule) -> bool:
    return not all(isinstance(p, DTensor) for p in cast(nn.Module, unit).parameters())


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that user code may assign in a forward. (DDP, FSDP and torch restore theirs.)"""
    if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
        return {}
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


_OF_TORCH = {*vars(nn.Module())}


def _restore_attributes(module: nn.Module, before: dict[str, Any], private: bool) -> None:
    """Restore attributes; unless ``private``, of private ones numbers only, since libraries keep there what they have
    made in a forward."""
    now = _attributes(module)
    for name in now.keys() - before.keys():
        if private or not name.startswith("_"):
            delattr(module, name)
    for name, value in before.items():
        restored = private or not name.startswith("_") or type(value) in (int, float)
        if restored and now.get(name, _ABSENT) is not value:
            vars(module)[name] = value


def _keep_content(attribute: Any, kept: dict[int, Callable[[], object]], objects: bool) -> None:
    """Add what restores the content of an attribute: of a container also that of its elements, and of ``objects`` that
    of their attributes. (Views, as of FSDP's flat parameters, are left to who has made them, and large containers, as
    of a vocabulary, as they are.)"""
    waiting = [attribute]
    while waiting:
        x = waiting.pop()
        if id(x) in kept:
            continue
        if isinstance(x, torch.Generator):
            kept[id(x)] = partial(x.set_state, x.get_state())
        elif isinstance(x, random.Random):
            kept[id(x)] = partial(x.setstate, x.getstate())
        elif isinstance(x, np.random.Generator):
            kept[id(x)] = partial(setattr, x.bit_generator, "state", x.bit_generator.state)
        elif isinstance(x, np.ndarray) and x.size <= _MOST_ELEMENTS and x.flags.writeable:
            kept[id(x)] = partial(np.copyto, x, x.copy())
        elif type(x) is Tensor:
            if x.is_leaf and _owns_storage(x):
                kept[id(x)] = partial(_restore_tensor, x, x.detach().clone())
        elif type(x) is tuple:
            waiting += x
        elif (type(x) in _CONTAINERS or (isinstance(x, _CONTAINERS) and _is_of_user(x))) and len(x) <= _MOST_ELEMENTS:
            kept[id(x)] = partial(_restore_container, x, copy.copy(x))
            waiting += x.values() if isinstance(x, dict) else x
        elif objects and len(kept) < _MOST_ELEMENTS and _is_of_user(x) and isinstance(own := _vars(x), dict):
            found = {name: y for name, y in own.items() if _holds_tensors(y)}  # others may be those of other threads
            kept[id(x)] = partial(own.update, found)
            waiting += [y for y in own.values() if not isinstance(y, (Tensor, tuple, *_CONTAINERS))]
            waiting += [y for y in found.values() if not isinstance(y, Tensor)]


_LIBRARIES = {*sys.stdlib_module_names, "torch", "hyper_cp", "transformers", "peft", "accelerate", "numpy"}
_LIBRARIES -= {"__main__", "types", "collections", "argparse"}  # of which users make their own objects
"""Packages whose objects keep themselves in order, or nothing of a forward."""
_FEW_ELEMENTS = 1000


def _is_of_user(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] not in _LIBRARIES


def _holds_tensors(x: Any) -> bool:
    """True for a tensor, and for a small container with tensors, or with nothing yet."""
    if not isinstance(x, (tuple, *_CONTAINERS)):
        return isinstance(x, Tensor)
    elements = x.values() if isinstance(x, dict) else x
    return len(x) <= _FEW_ELEMENTS and (not x or any(isinstance(y, Tensor) for y in elements))


def _vars(x: Any) -> Any:
    """The attributes of an object; None for a module, a class, and what has none."""
    return None if isinstance(x, (nn.Module, Tensor, type)) else getattr(x, "__dict__", None)


_CONTAINERS = (list, set, deque, dict, OrderedDict, defaultdict, Counter)
_MOST_ELEMENTS = 10_000


def _restore_tensor(x: Tensor, content: Tensor) -> None:
    with torch.no_grad(), torch.inference_mode(x.is_inference()):
        if x.shape != content.shape:  # by x.data = ...
            x.data = content
        elif not _equal(x, content):
            x.copy_(content)


def _restore_container(x: Any, content: Any) -> None:
    flat = [[y for pair in of.items() for y in pair] if isinstance(of, dict) else list(of) for of in (x, content)]
    if len(x) == len(content) and all(a is b for a, b in zip(*flat, strict=True)):
        return
    x.clear()
    (x.extend if isinstance(x, (list, deque)) else x.update)(content)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
