"""Modes that see every operator, also those that our custom ops call inside.

Modes and trees of tensors lie in modules of torch whose names are private (``torch.utils._python_dispatch``,
``torch.utils._pytree``). A mode is off while it handles an operator, so it does not see what one that is written in
Python calls. ``OpOverload.redispatch`` with the key of a device (``torch._C.DispatchKeySet`` and
``torch._C.DispatchKey``) runs the kernel below the key of modes, so that a mode may be on. The same in torch 2.11 to
2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .version import moved

__all__ = ["TorchDispatchMode", "run_kernel", "tree_leaves"]

if not hasattr(torch._ops.OpOverload, "redispatch"):
    raise moved("OpOverload.redispatch")

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}


def run_kernel(func: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of an operator for a type of devices, while the modes of the caller are on."""
    key = getattr(torch._C.DispatchKey, _KEYS.get(device, "PrivateUse1"))
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
