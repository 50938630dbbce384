"""Attention of one tile on one device: a small protocol and the choice of the kernel.

Kernels know nothing of processes, layouts or modes. Inside the library a tile's partial is
(output ``[B, H, Sq, Dv]``, log-sum-exp ``[B, H, Sq]`` in fp32, or fp64 for fp64 inputs, natural
logarithm of scaled logits); whatever a device's operator returns is converted at its door.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from .inputs import Kernel, TileInputs
from .reference import KERNEL as REFERENCE

__all__ = ["REFERENCE", "Kernel", "TileInputs", "choose", "get"]

logger = logging.getLogger(__name__)


# A module per device type, with KERNELS by name and choose(q, k, v, causal) -> name. Other devices
# get plain math.
_MODULES = {"cpu": "cpu", "cuda": "cuda", "npu": "npu"}


def _module(device: torch.device) -> Any:
    name = _MODULES.get(device.type)
    return None if name is None else importlib.import_module(f".{name}", __name__)


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float = 0.0) -> str:
    """The name of the kernel that this call's tiles run on, in forward and backward. Raises if the
    user's settings leave none. Under torch.compile the choice is left to the run ("")."""
    if dropout_p:  # only plain math can be told which weights to drop
        return _with_dropout(q, k, v, causal)
    if torch.compiler.is_compiling():
        return ""
    module = _module(q.device)
    name: str = REFERENCE.name if module is None else module.choose(q, k, v, causal)
    logger.debug("attention of %s on %s: %s", tuple(q.shape), q.device, name)
    return name


def _with_dropout(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    module = _module(q.device)
    plain = module is None or getattr(module, "PLAIN_WITH_DROPOUT", False)
    name: str = REFERENCE.name if plain else module.choose(q, k, v, causal)
    if name != REFERENCE.name:
        raise NotImplementedError(
            f"dropout_p > 0 on {q.device.type}, where attention runs on the kernel {name!r}: it draws its own numbers "
            "for each tile and cannot be told which weights to drop. Set dropout to 0.0, or allow plain math only: "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    return name


def get(name: str, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel chosen by name, or ("") chosen now."""
    module = _module(q.device)
    if not name:
        name = REFERENCE.name if module is None else module.choose(q, k, v, False)
    kernel: Kernel = REFERENCE if name == REFERENCE.name else module.KERNELS[name]
    return kernel
