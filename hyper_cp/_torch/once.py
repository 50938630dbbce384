"""Marks the backward of an autograd function that has no derivative of its own: ``create_graph=True`` raises there.

Torch's ``once_differentiable`` reads only the gradients that backward gets. A loss that is added up gives constants,
of which it makes results without a graph, so that a penalty on gradients would be left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .compiling import is_compiling


def once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the ``backward`` of what an error calls ``what``."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        plain = once_differentiable(backward)

        @wraps(backward)
        def refusing(ctx: Any, *grads: Any) -> Any:
            refuse_a_second_time(what)
            return plain(ctx, *grads)

        return refusing

    return decorate


def refuse_a_second_time(what: str) -> None:
    """Raise ``NotImplementedError`` in a backward that is differentiated itself."""
    if torch.is_grad_enabled() and not is_compiling():
        raise NotImplementedError(
            f"{what}: backward with create_graph=True is not supported. A loss of its gradients would have none, or "
            "this rank's part alone. Leave it out of what is differentiated twice, or leave out create_graph"
        )
