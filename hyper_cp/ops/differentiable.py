"""Gradients of ops: one pair of functions for compiled graphs and for eager calls, none of forward mode, and no
autocast inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from .._torch.compiling import is_compiling


def differentiable(
    name: str,
    op: Any,
    backward: Callable[..., tuple[Any, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    *,
    returns_list: bool = False,
) -> Callable[..., Any]:
    """Give a custom op its gradient, and return the function to call, which takes all of the arguments by position.

    Compiled graphs contain the op, with the gradient that is registered. Eager calls run the same two functions as an
    autograd function of their own: PyTorch's general one, which takes lists apart and puts them together with pytrees
    and reads the schema in every call, would be a fifth of the host time of an attention call.

    Args:
        name: names the node of the graph, as in anomaly mode.
        backward, setup_context: as ``op.register_autograd`` takes them. ``backward`` returns a list for an argument
            that is a list of tensors, or None.
        returns_list: the op returns a list of tensors, and ``backward`` takes one.
    """
    op.register_autograd(backward, setup_context=setup_context)

    # With a setup_context of its own, PyTorch would read the signature of forward in each call.
    def forward(ctx: Any, lists: Lists, *flat: Any) -> Any:
        arguments = _nested(lists, flat)
        found = op(*arguments)
        found = _owned(found) if isinstance(found, Tensor) else type(found)(map(_owned, found))
        ctx.lists = lists
        setup_context(ctx, tuple(arguments), found)
        return tuple(found) if returns_list else found

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found = backward(ctx, [*grads]) if returns_list else backward(ctx, *grads)
        flat: list[Any] = [None]
        for length, grad in zip(ctx.lists, found, strict=True):
            flat += [grad] if length is None else grad or [None] * length
        return tuple(flat)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), methods)

    def call(*arguments: Any) -> Any:
        if is_compiling():
            return op(*arguments)
        refuse_dtensor("tensor", arguments[0])  # of combine and roll_tensor: others have checked theirs
        if not torch.is_grad_enabled():  # with gradients PyTorch refuses tangents by itself
            for x in arguments:
                refuse_forward_mode(name, *(y for y in (x if isinstance(x, list) else [x]) if isinstance(y, Tensor)))
            return op(*arguments)
        lists = tuple([len(x) if isinstance(x, list) and _of_tensors(x) else None for x in arguments])
        flat: list[Any] = []
        for length, x in zip(lists, arguments, strict=True):
            flat += [x] if length is None else x
        found = function.apply(lists, *flat)
        return [*found] if returns_list else found

    return call


def _owned(x: Tensor) -> Tensor:
    """A result that its user may write to: PyTorch would refuse that of a view which was made in an autograd function.
    Writes are counted as before, so that backward raises for results which it has saved."""
    return x if x._base is None else x.detach()


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Leave autocast inside an op: its tensors were cast at the entrance, and what it adds up is in wider dtypes."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def refuse_forward_mode(caller: str, *tensors: Tensor) -> None:
    """Raise ``NotImplementedError`` if a tensor has a tangent, which the ops of this library would lose in silence."""
    if is_compiling():
        return
    for x in tensors:
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{caller} runs under forward-mode differentiation (torch.func.jvp, jacfwd or forward_ad). The ops of "
                "this library have no forward-mode derivative, so the tangent would be zero. Use backward "
                "(torch.autograd.grad), or one device"
            )


def refuse_dtensor(name: str, x: Any, instead: str = "Pass its to_local() or full_tensor()") -> None:
    """Raise ``TypeError`` for an argument that is a DTensor. ``instead``: what to do, in the last sentence."""
    if isinstance(x, DTensor):
        raise TypeError(f"{name} is a DTensor placed {x.placements}. This function takes local tensors. {instead}")


Lists = Sequence[int | None]
"""The lengths of those arguments that are lists of tensors; None for the others."""


def _of_tensors(x: list[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in x)


def _nested(lists: Lists, flat: Sequence[Any]) -> list[Any]:
    """The arguments, of those that lists were taken apart into."""
    items = iter(flat)
    return [next(items) if length is None else [next(items) for _ in range(length)] for length in lists]
