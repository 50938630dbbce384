"""Attention of one tile on one device: a small protocol and the choice of the kernel.

Kernels know nothing of processes, layouts or modes. Inside the library a tile's partial is
(output ``[B, H, Sq, Dv]``, log-sum-exp ``[B, H, Sq]`` in fp32, or fp64 for fp64 inputs, natural
logarithm of scaled logits); whatever a device's operator returns is converted at its door.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..schedule import Band


class Kernel(Protocol):
    """Forward and backward of a tile. ``q`` is [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v``
    [B, Hkv, Sk, Dv] with H a multiple of Hkv, any strides. ``band``: see ``schedule.Band``.
    ``mask``: explicit, broadcastable to [B, H, Sq, Sk]; bool (True is visible) or added to logits.
    A row that sees nothing has out = 0 and lse = -inf, and zero gradients.

    Outputs and gradients may be in the dtype of the inputs or wider. Tensors returned are new: the
    caller may write to them.
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, mask: Tensor | None = None
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of ``(dq, dk, dv)``, given the *merged* ``out`` and ``lse`` of its rows."""
        ...


def select(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel for these tensors' device, dtype and head dims."""
    from . import cpu, reference

    if cpu.KERNEL.refusal(q, k, v) is None:
        return cpu.KERNEL
    return reference.KERNEL
