"""Restore a model after a run: its gradients, buffers and attributes, random numbers, and the state of its styles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...module._torch.modules import buffers_of
from ...module.mesh_binding import bindings

_ABSENT: Any = object()


@contextmanager
def untouched(model: nn.Module, device_type: str) -> Iterator[None]:
    """After the block, or an exception in it, the model is as it was before: gradients (the same objects), buffers,
    the attributes that a forward assigns, the records of its styles. Random number generators too. In the block
    gradients begin as None."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(module, dict(buffers_of(module))) for module in model.modules()]
    contents = [(x, x.detach().clone()) for _, found in buffers for x in found.values() if x is not None]
    attributes = [(module, _attributes(module)) for module in model.modules()]
    heads = [(binding, binding.heads) for binding in bindings(model)]
    python = random.getstate()
    devices = [] if device_type == "cpu" else [torch.accelerator.current_device_index()]
    of_device = {} if device_type == "cpu" else {"device_type": device_type}  # torch 2.11 takes no None
    with torch.random.fork_rng(devices, **of_device):
        for p, _ in grads:
            p.grad = None
        try:
            yield
        finally:
            for module, before in attributes:
                _restore_attributes(module, before)
            for module, found in buffers:
                buffers_of(module).clear()
                buffers_of(module).update(found)
            with torch.no_grad():
                for buffer, content in contents:
                    if not _equal(buffer, content):
                        buffer.copy_(content)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # after an exception, whole parameters may be in place of the sharded ones
            for p, grad in grads:
                p.grad = grad
            for binding, before_heads in heads:
                binding.heads = before_heads
            random.setstate(python)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that user code may assign in a forward. (DDP and torch's own state are their own.)"""
    if isinstance(module, DistributedDataParallel):
        return {}
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    now = _attributes(module)
    for name in now.keys() - before.keys():
        delattr(module, name)
    for name, value in before.items():
        if now.get(name, _ABSENT) is not value:
            vars(module)[name] = value


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
