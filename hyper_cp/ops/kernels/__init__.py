"""Attention of one tile on one device: a small protocol and the choice of the kernel.

Kernels know nothing of processes, layouts or modes. Inside the library a tile's partial is
(output ``[B, H, Sq, Dv]``, log-sum-exp ``[B, H, Sq]`` in fp32, or fp64 for fp64 inputs, natural
logarithm of scaled logits); whatever a device's operator returns is converted at its door.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from ...schedule.tiles import Band
from .packed import Parts
from .reference import KERNEL as REFERENCE

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """Forward and backward of a tile. ``q`` is [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v``
    [B, Hkv, Sk, Dv] with H a multiple of Hkv; their last dimension is contiguous. ``band``: see
    ``geometry.Band``. ``mask``: explicit, broadcastable to [B, H, Sq, Sk]; bool (True is visible) or
    added to logits. A row that sees nothing has out = 0 and lse = -inf, and zero gradients.

    ``parts``: the tile is several rectangles (rows, columns) in the coordinates of its q and k, ascending and
    disjoint in rows and in columns, each under ``band``, which is FULL or CAUSAL (then every rectangle is
    square). What is in no rectangle sees nothing and is not seen. ``mask`` is None then.

    Plain math alone also takes ``keep`` [b, H, Sq, Sk], factors of the weights: dropout.

    Outputs and gradients may be in the dtype of the inputs or wider. Tensors returned are new: the
    caller may write to them.
    """

    name: str

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tile's partial: ``(out, lse)``."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of ``(dq, dk, dv)``, given the *merged* ``out`` and ``lse`` of its rows."""
        ...


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
