"""The kernels of flash-linear-attention (fla) on CUDA, called by their public functions.

A piece's map is had from one call of any kernel that takes an initial state: with values ``[v | 0]`` and the initial
state ``[0 | I]`` the outputs are ``[O | Q]``, and the final state is ``[P | M]``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..threads import in_thread
from .chunked import Affine, Inputs

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
Pullback = Callable[[Affine], tuple[Tensor | None, ...]]


def function(delta: bool, channels: bool) -> Callable[..., Any]:
    """The function of fla for a member of the family.

    Raises:
        ImportError: if fla is not installed.
        NotImplementedError: if the installed function takes no initial state.
    """
    module, name = FUNCTIONS[delta, channels]
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    missing = [x for x in NEEDED if x not in inspect.signature(found).parameters]
    if missing:
        raise NotImplementedError(
            f"{module}.{name} of the installed fla takes no {', '.join(missing)}. Without an initial state a kernel "
            'cannot continue what another rank has begun. Install a newer flash-linear-attention, or use kernel="torch"'
        )
    return found


def accepts(v: Tensor, k: Tensor, delta: bool, channels: bool) -> bool:
    """True for calls that fla computes on this device: half precision (fla refuses fp32), heads up to 256."""
    half = v.dtype in (torch.float16, torch.bfloat16)
    if v.device.type != "cuda" or not half or not 16 <= k.shape[-1] <= LARGEST:
        return False
    try:
        function(delta, channels)
    except (ImportError, NotImplementedError):
        return False
    return True


class FlaKernel:
    """fla's kernels. A piece is a sequence of their batch."""

    name, wide = "fla", False

    def size(self, g: Tensor) -> int:
        return 256

    def forward(self, inputs: Inputs) -> Affine:
        return _affine(inputs, *_called(_arguments(inputs), inputs))

    def differentiable(self, inputs: Inputs) -> tuple[Affine, Pullback]:
        arguments = [x.detach().requires_grad_() for x in _arguments(inputs)]
        # A custom op runs below autograd, which is a state of its thread, and fla's functions need autograd.
        out, state = in_thread(lambda: _called(arguments, inputs), inputs.v)

        def pull(maps: Affine) -> tuple[Tensor | None, ...]:
            gradients = _gradients(maps, inputs, out, state)
            pulled = in_thread(lambda: torch.autograd.grad((out, state), arguments, gradients), inputs.v)
            return _of_inputs(pulled, inputs)

        return _affine(inputs, out.detach(), state.detach()), pull


def _arguments(inputs: Inputs) -> list[Tensor]:
    """q, k, ``[v | 0]``, g and maybe beta as fla takes them: ``[pieces * B, size, H, ...]``."""
    heads = inputs.v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (inputs.q, inputs.k))
    v = torch.cat((inputs.v, torch.zeros_like(k)), -1)
    g = inputs.g.float()  # logarithms of decays are summed up
    gates = [g if g.shape[-1] > 1 else g.squeeze(-1)] + ([] if inputs.beta is None else [inputs.beta.squeeze(-1)])
    return [x.flatten(0, 1).transpose(1, 2).contiguous() for x in (q, k, v, *gates)]


def _called(arguments: list[Tensor], inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v, *gates = arguments
    call = function(inputs.beta is not None, inputs.g.shape[-1] > 1)
    dk = k.shape[-1]
    initial = v.new_zeros(len(v), v.shape[2], dk, v.shape[-1], dtype=torch.float32)
    initial[..., -dk:] = torch.eye(dk, device=v.device)
    found: tuple[Tensor, Tensor] = call(q, k, v, *gates, scale=1.0, initial_state=initial, output_final_state=True)
    return found


def _affine(inputs: Inputs, out: Tensor, state: Tensor) -> Affine:
    """The maps of all pieces from fla's outputs and final states."""
    pieces, batch = inputs.v.shape[:2]
    dv, dk = inputs.v.shape[-1], inputs.k.shape[-1]
    O, Q = out.transpose(1, 2).unflatten(0, (pieces, batch)).float().split((dv, dk), -1)  # noqa: E741
    P, M = state.unflatten(0, (pieces, batch)).float().split((dv, dk), -1)
    if inputs.beta is None:
        M = M.diagonal(dim1=-2, dim2=-1)[..., None]  # a column, as in the other kernel
    return Affine(M, P, Q, O)


def _gradients(maps: Affine, inputs: Inputs, out: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of fla's outputs from those of the maps."""
    dM = maps.M if inputs.beta is not None else torch.diag_embed(maps.M.squeeze(-1))
    dout = torch.cat((maps.O, maps.Q), -1).flatten(0, 1).transpose(1, 2)
    return dout.to(out.dtype).contiguous(), torch.cat((maps.P, dM), -1).flatten(0, 1).to(state.dtype).contiguous()


def _of_inputs(pulled: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Gradients in the form of the inputs."""
    pieces, batch = inputs.v.shape[:2]
    q, k, v, *gates = (x.transpose(1, 2).unflatten(0, (pieces, batch)) for x in pulled)
    groups = inputs.q.shape[2]
    q, k = (x.unflatten(2, (groups, -1)).sum(3) for x in (q, k))
    gates = [x if x.ndim == 5 else x[..., None] for x in gates]
    return q, k, v[..., : inputs.v.shape[-1]], *gates
