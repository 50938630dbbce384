"""The kernels that map pieces: plain torch on every device, and flash-linear-attention on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ...kernels.derivative import differentiable
from . import fla
from .chunked import Affine, Inputs, affine, piece_size
from .fla import FlaKernel

Pullback = Callable[[Affine], Sequence[Tensor | None]]
"""From gradients of the maps to those of the inputs."""


class Kernel(Protocol):
    """A way to compute the affine maps of pieces (see :mod:`.chunked`)."""

    name: str
    wide: bool
    """True if it takes inputs in the dtype of states (fp32, or fp64 for fp64)."""

    def size(self, g: Tensor) -> int:
        """The most tokens of a piece, for decays ``[..., 1]`` or ``[..., dk]``."""

    def forward(self, inputs: Inputs) -> Affine:
        """The maps of all pieces."""

    def differentiable(self, inputs: Inputs) -> tuple[Affine, Pullback]:
        """The same, and their derivative, which is called once."""


class TorchKernel:
    """Chunked plain torch: every device, every member of the family."""

    name, wide = "torch", True

    def size(self, g: Tensor) -> int:
        return piece_size(g)

    def forward(self, inputs: Inputs) -> Affine:
        return affine(*inputs)

    def differentiable(self, inputs: Inputs) -> tuple[Affine, Pullback]:
        found, pull = differentiable(affine, *(x for x in inputs if x is not None))
        return Affine(*found), pull


_KERNELS: dict[str, Kernel] = {"torch": TorchKernel(), "fla": FlaKernel()}


def choose(asked: str | None, caller: str, q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str:
    """The name of the kernel for a call: the one that is asked for, or the best one of the device.

    Raises:
        ValueError, NotImplementedError: for a kernel that is unknown, or cannot compute this call.
    """
    if asked not in (None, *_KERNELS):
        raise ValueError(
            f"{caller}: kernel={asked!r} is unknown. It is one of None, {', '.join(map(repr, _KERNELS))}. Leave it out "
            "to have one chosen for the device"
        )
    delta, channels = beta is not None, g.shape[-1] > 1
    if asked is None:
        return "fla" if fla.accepts(v, q, delta, channels) else "torch"
    if asked == "fla":
        try:
            fla.function(delta, channels)
        except ImportError as error:
            raise NotImplementedError(
                f'{caller}: kernel="fla" needs the package flash-linear-attention ({error}). Install it with '
                "pip install 'hyper-cp[fla]', or leave the argument out"
            ) from error
    return asked


def get(name: str) -> Kernel:
    """The kernel of this name."""
    return _KERNELS[name]
