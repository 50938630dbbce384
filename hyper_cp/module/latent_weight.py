"""The weight of a layer that expands latents, for an op that applies it to what arrives from other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils.parametrize import is_parametrized

from .._torch.modules import modules_of_hooks
from ..ops.checks import DTYPES
from ..schedule.choices import log_once
from .thread_stack import ThreadStack

KNOWN_HOOKS = ("torch.distributed.", "hyper_cp.")
"""The modules of hooks that leave a layer as linear as it is: those of FSDP2, of tensor parallelism, and our own."""
NO_WEIGHT = (
    "has no weight that could expand them elsewhere (it draws dropout, is quantised or parametrized, has hooks, or is "
    "not linear)"
)
_read: ThreadStack[nn.Module] = ThreadStack()
"""Layers that are called with the identity matrix."""


def latents_and_weight(layer: nn.Module, latent: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The arguments of :func:`hyper_cp.ops.latent_attention` in place of ``layer(latent)``: the latents ``[.., R]``,
    the weight ``[out, R]`` and the bias ``[out]`` (or None) of the layer.

    It returns None if no weight describes the layer, because the layer is not linear, has hooks that you registered,
    uses dropout, or keeps its weight in another form (quantised). Then call the layer, and attend with keys and values.

    A plain ``nn.Linear`` gives its parameters. A weight that is there in the forward of the layer only (one that FSDP2
    shards apart from the rest of the model, a shard of ``ColwiseParallel``) and adapters (LoRA, without a bias) are
    found by calling the layer with the identity matrix: autograd then reaches sharded parameters and adapters as in any
    call. That costs as much as R tokens. The gradient of latents is summed over the tensor-parallel ranks, as the layer
    itself would.

    Example::

        >>> layer = nn.Linear(32, 128, bias=False)
        >>> latent, weight, bias = latents_and_weight(layer, torch.randn(1, 8, 32))
    """
    if isinstance(latent, DTensor) or not _linear(layer):
        return None
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    # In a recompute the weight of a unit of FSDP2 may be whole, and must take the way of the forward.
    called = isinstance(weight, DTensor) or isinstance(layer, FSDPModule) or hasattr(layer, "base_layer")
    if isinstance(weight, Tensor) and not called:
        return latent, weight, bias
    parameters = dict(layer.named_parameters())
    if not parameters or any(name.endswith("bias") for name in parameters):
        return None
    if isinstance(weight, DTensor) and not isinstance(layer, FSDPModule):
        if weight.device_mesh.ndim > 1 or weight.placements != (Shard(0),):
            return None
        placed = DTensor.from_local(latent, weight.device_mesh, [Replicate()], run_check=False)
        latent = placed.to_local(grad_placements=[Partial()])
    first = next(iter(parameters.values()))
    with _reading(layer):
        found = layer(torch.eye(getattr(layer, "in_features"), dtype=first.dtype, device=first.device))  # noqa: B009
    return (latent, found.mT, None) if isinstance(found, Tensor) and not isinstance(found, DTensor) else None


@torch.compiler.assume_constant_result  # a graph need not trace what is logged
def say_heads_travel(owner: str, layer: str, why: str) -> None:
    """Log, once, that heads travel although a module has latents."""
    log_once("%s: heads travel, not latents: %s %s", owner, layer, why)


def _linear(layer: nn.Module) -> bool:
    """True for an ``nn.Linear``, or one with adapters as PEFT makes them, in which nothing else happens."""
    plain = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    adapted = hasattr(layer, "base_layer") and hasattr(layer, "lora_A")
    hooks = [name for inner in layer.modules() for name in modules_of_hooks(inner)]
    drawn = any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in layer.modules())
    drawn |= any(is_parametrized(x) for x in layer.modules())  # its weight is computed in each read, by anything
    kinds = all(x.dtype in DTYPES and type(x) in (nn.Parameter, Tensor, DTensor) for x in layer.parameters())
    variants = (getattr(layer, "lora_variant", None) or {}).values()  # all but DoRA may depend on the tokens
    adapted = adapted and all(type(x).__name__.startswith("Dora") for x in variants)
    return (plain or adapted) and not drawn and kinds and all(name.startswith(KNOWN_HOOKS) for name in hooks)


@contextmanager
def _reading(layer: nn.Module) -> Iterator[None]:
    _read.push(layer)
    try:
        yield
    finally:
        _read.remove(layer)


def is_read(layer: nn.Module) -> bool:
    """True while the layer is called for its weight."""
    return any(x is layer for x in _read.entries)
