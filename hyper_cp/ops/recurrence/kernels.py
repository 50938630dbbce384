"""The kernels that map pieces: plain torch on every device, and flash-linear-attention (fla) on CUDA."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...mesh.arguments import check_choice
from ..kernels.derivative import differentiable
from .chunked import Affine, Inputs, affine, piece_size


@dataclass(frozen=True)
class RecurrenceKernel:
    """A way to compute the affine maps of pieces (see :mod:`.chunked`)."""

    affine: Callable[..., Affine]
    """The maps of :class:`Inputs`, which autograd differentiates."""
    size: Callable[[Tensor], int]
    """The most tokens of a piece, for decays ``[..., 1]`` or ``[..., dk]``."""
    wide: bool
    """True if it takes inputs in the dtype of states (fp32, or fp64 for fp64)."""

    def forward(self, inputs: Inputs) -> Affine:
        """The maps of all pieces."""
        return self.affine(*inputs)

    def differentiable(self, inputs: Inputs) -> tuple[Affine, Callable[[Sequence[Tensor]], list[Tensor]]]:
        """The maps, and the function from their gradients to those of the inputs that are given, to be called once."""
        maps, pull = differentiable(self.affine, *(x for x in inputs if x is not None))
        return Affine(*maps), pull


# --------------------------------------------------------------------------- flash-linear-attention

FUNCTIONS = {
    (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    (False, True): ("fla.ops.gla", "chunk_gla"),
}
"""Module and function, by (delta rule, decays of channels)."""
NEEDED = ("initial_state", "output_final_state", "scale")
LARGEST = 256
"""The largest head of q and k that these kernels take."""
SEQUENCES, NUMBERS, CHUNK = 2**16 - 1, 2**31 - 1, 64
"""The most sequences times heads of one call (a dimension of a grid of CUDA), and the most numbers of one of its
tensors: up to fla 0.5.2 kernels count them in int32. A state is stored for each chunk of tokens."""


def fla_function(delta: bool, channels: bool) -> Callable[..., Any]:
    """The function of fla for a member of the family.

    Raises:
        ImportError: if fla is not installed.
        NotImplementedError: if the installed function takes no initial state.
    """
    module, name = FUNCTIONS[delta, channels]
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    # Behind the function that routes calls of mixers, this one among them.
    found = inspect.unwrap(found, stop=lambda function: not hasattr(function, "hyper_cp_routes"))
    missing = [x for x in NEEDED if x not in inspect.signature(found).parameters]
    if missing:
        raise NotImplementedError(
            f"{module}.{name} of the installed fla takes no {', '.join(missing)}. Without an initial state a kernel "
            'cannot continue what another rank has begun. Install a newer flash-linear-attention, or use kernel="torch"'
        )
    return found


def fla_affine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Affine:
    """The maps of all pieces by fla, in which a piece is a sequence of the batch. The arguments are those of
    :class:`Inputs`.

    One call of any kernel that takes an initial state is enough: with values ``[v | 0]`` and the initial state
    ``[0 | I]`` the outputs are ``[O | Q]``, and the final state is ``[P | M]``. (Pieces beyond what a call can take are
    those of another one.)
    """
    _, rows, heads, size, dv = v.shape
    numbers = rows * heads * size * (dv + k.shape[-1]) * max(1.0, k.shape[-1] / CHUNK)
    most = max(1, int(min(SEQUENCES // (rows * heads), NUMBERS / max(numbers, 1))))
    given = [x for x in (q, k, v, g, beta) if x is not None]
    parts = [_fla_maps(*part) for part in zip(*(x.split(most) for x in given), strict=True)]
    return parts[0] if len(parts) == 1 else Affine(*map(torch.cat, zip(*parts, strict=True)))


def _fla_maps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Affine:
    call = fla_function(beta is not None, g.shape[-1] > 1)
    pieces, (heads, dv), dk = v.shape[:2], (v.shape[2], v.shape[-1]), k.shape[-1]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    g = g.float()  # logarithms of decays are summed up
    gates = [g if g.shape[-1] > 1 else g.squeeze(-1)] + ([] if beta is None else [beta.squeeze(-1)])
    given = q, k, torch.cat((v, torch.zeros_like(k)), -1), *gates
    q, k, v, *gates = (x.flatten(0, 1).transpose(1, 2).contiguous() for x in given)  # [sequences, size, H, ...]
    initial = v.new_zeros(len(v), heads, dk, dv + dk, dtype=torch.float32)
    initial[..., dv:] = torch.eye(dk, device=v.device)
    out, state = call(q, k, v, *gates, scale=1.0, initial_state=initial, output_final_state=True)
    for x in (out, state):
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # kernels read gradients as if they were
    O, Q = out.transpose(1, 2).unflatten(0, pieces).float().split((dv, dk), -1)  # noqa: E741
    P, M = state.unflatten(0, pieces).float().split((dv, dk), -1)
    if beta is None:
        M = M.diagonal(dim1=-2, dim2=-1)[..., None]  # a column, as in the other kernel
    return Affine(M, P, Q, O)


def _fla_accepts(v: Tensor, k: Tensor, delta: bool, channels: bool) -> bool:
    """True for calls that fla computes on this device: half precision (fla refuses fp32), heads up to 256."""
    half = v.dtype in (torch.float16, torch.bfloat16)
    if v.device.type != "cuda" or not half or not 16 <= k.shape[-1] <= LARGEST:
        return False
    try:
        fla_function(delta, channels)
    except (ImportError, NotImplementedError):
        return False
    return True


# --------------------------------------------------------------------------- the choice

_KERNELS = {
    "torch": RecurrenceKernel(affine, piece_size, wide=True),
    "fla": RecurrenceKernel(fla_affine, lambda g: 256, wide=False),
}


def choose(kernel: str | None, caller: str, q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str:
    """The name of the kernel for a call: ``kernel`` if it is given, or the best one of the device.

    Raises:
        ValueError, NotImplementedError: for a kernel that is unknown, or cannot compute this call.
    """
    check_choice(f"{caller}: kernel", kernel, (None, *_KERNELS), "It maps the pieces of the sequence; None is the best")
    delta, channels = beta is not None, g.shape[-1] > 1
    if kernel is None:
        return "fla" if _fla_accepts(v, q, delta, channels) else "torch"
    if kernel == "fla":
        try:
            fla_function(delta, channels)
        except ImportError as error:
            raise NotImplementedError(
                f'{caller}: kernel="fla" is not possible here ({error}). It needs the package flash-linear-attention. '
                "Install it with pip install 'hyper-cp[fla]', or leave the argument out"
            ) from error
    return kernel


def get(name: str) -> RecurrenceKernel:
    """The kernel of this name."""
    return _KERNELS[name]
