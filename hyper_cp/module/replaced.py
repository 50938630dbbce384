"""Results of modules that something else computes in their place, and the conditions in which both are compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conditions(module: nn.Module) -> tuple[bool, bool, int]:
    """The conditions of a call that decide what a module's result depends on: dropout is drawn in training, and only
    parameters that require a gradient show in a graph of autograd."""
    grad = torch.is_grad_enabled()
    training = any(inner.training for inner in module.modules())
    return grad, training, sum(x.requires_grad for x in module.parameters()) if grad else 0


def name_of(module: nn.Module, leaf: Tensor) -> str:
    """The name of a parameter of a module; the shape of another tensor."""
    found = next((name for name, x in module.named_parameters() if x is leaf), None)
    return found or f"a tensor {tuple(leaf.shape)} from outside of it"
