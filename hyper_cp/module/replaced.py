"""Results that something else computes in place of a module or a function, and how both are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.leaves import other_leaf
from .._torch.modules import buffers_of

COMPARED = 64
"""The most tokens on which both are compared."""


def conditions(module: nn.Module) -> tuple[bool, bool, int]:
    """The conditions of a call that decide what a module's result depends on: dropout is drawn in training, and only
    parameters that require a gradient show in a graph of autograd."""
    grad = torch.is_grad_enabled()
    training = any(inner.training for inner in module.modules())
    return grad, training, sum(x.requires_grad for x in module.parameters()) if grad else 0


def name_of(module: nn.Module | None, leaf: Tensor) -> str:
    """The name of a parameter of a module; the shape of another tensor."""
    named = () if module is None else module.named_parameters()
    found = next((name for name, x in named if x is leaf), None)
    return found or f"a tensor {tuple(leaf.shape)} from outside of it"


def along(x: Any) -> bool:
    """True for an argument of a recurrence that has a row for each position."""
    return isinstance(x, Tensor) and x.ndim > 2


def first_tokens(x: Any, dim: int) -> Any:
    """A copy of an argument for the first tokens of this rank only, without its graph."""
    if not isinstance(x, Tensor):
        return x
    few = x.narrow(dim % x.ndim, 0, min(COMPARED, x.shape[dim])) if along(x) else x
    return few.detach().clone()  # what is compared may write to it


def _form(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return "one tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"


Few = dict[Any, Any]
"""The arguments of a call by place or name, for the first tokens of this rank only."""


def difference(
    own: Callable[[Few], Any],
    replacement: Callable[[Few], Any],
    few: Few,
    arguments: Few,
    module: nn.Module | None,
    grad: bool,
) -> str:
    """The difference between the result that is replaced and that of the replacement, a tensor or a tuple that begins
    with it, for few tokens; "" if there is none. The module's buffers and attributes are then as they were.

    Args:
        own: computes what is replaced; with ``grad`` in a graph of autograd.
        arguments: those of the call: other tensors on which the result depends would get no gradient. The gradients of
            those that require one are compared.
    """
    with _restored(module):
        again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in few.items()}  # own may write to few
        ours = replacement(few)
        found = None
        for enabled in {grad: None, False: None}:  # some functions run without gradients only
            with suppress(Exception), torch.set_grad_enabled(enabled):
                found = own(few)  # arguments need no gradient: an output that does depends on something else
                break
        if found is None:
            return ""  # it takes no such length, so there is nothing to compare with
        if _form(found) != _form(ours):
            return f"it returns {_form(found)}, and the function {_form(ours)}"
        found, ours = (x[0] if isinstance(x, tuple) else x for x in (found, ours))
        if found.shape != ours.shape:
            return f"it returns {tuple(found.shape)}, and the function {tuple(ours.shape)}"
        bar = 0.1 if torch.finfo(found.dtype).bits == 16 or torch.is_autocast_enabled(found.device.type) else 1e-3
        leaf = other_leaf(found, [x for x in arguments.values() if isinstance(x, Tensor)])
        found, ours = found.detach().double(), ours.double()
        scale = torch.maximum(found.abs().max(), ours.abs().max()).item()
        distance = (found - ours).abs().max().item()
        if distance > bar * scale:
            return f"their outputs differ by {distance:.2g} of {scale:.2g} on the first tokens of this rank"
        if leaf is not None:  # a gain of 1 or a state of 0 changes no output yet, and would never be trained
            return f"its output also depends on {name_of(module, leaf)}, which is no argument"
        if kept := _kept_state(own, again, found, bar / 10 * scale, enabled):
            return kept
        trained = {name for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
        return _difference_of_gradients(own, replacement, few, trained) if trained else ""


@contextmanager
def _restored(module: nn.Module | None) -> Iterator[None]:
    """Restore what forwards in the block assign to a module and to those inside it, and write to their buffers and
    tensors."""
    inside = [] if module is None else [*module.modules()]
    places = [(place, {**place}) for inner in inside for place in (vars(inner), buffers_of(inner))]
    tensors = [x for _, before in places for x in before.values() if type(x) in (Tensor, nn.Buffer)]
    contents = [(x, x.detach().clone()) for x in tensors if x.layout == torch.strided and not x.is_meta]
    try:
        yield
    finally:
        for place, before in places:
            for name in place.keys() - before.keys():
                del place[name]
            place.update(before)
        for x, content in contents:
            if not torch.equal(x, content):  # a write would count as one, which a graph that has saved x refuses
                with torch.inference_mode(x.is_inference()):
                    x.detach().copy_(content)


def _kept_state(own: Callable[[Few], Any], few: Few, found: Tensor, most: float, grad: bool) -> str:
    """The difference, of more than ``most``, between what is replaced and its second call; "" if there is none."""
    try:
        with torch.set_grad_enabled(grad):
            second = own(few)
        second = (second[0] if isinstance(second, tuple) else second).detach().double()
    except Exception as error:
        return f"it raises {type(error).__name__} ({error}) when it is called again"
    distance = (found - second).abs().max().item()
    if not distance > most:  # atomic additions come in another order, too
        return ""
    return (
        f"its outputs differ by {distance:.2g} of {found.abs().max().item():.2g} when it is called again with the same "
        "tokens, so it keeps a state from call to call, where the function begins every call with zeros (let its "
        "forward do so)"
    )


def _difference_of_gradients(
    own: Callable[[Few], Any], replacement: Callable[[Few], Any], few: Few, trained: set[Any]
) -> str:
    """The difference between the gradients of arguments: a state that is detached stops those of earlier tokens."""

    def gradients(function: Callable[[Few], Any]) -> list[Tensor]:
        given = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in few.items()}
        leaves = [x.requires_grad_() for name, x in given.items() if name in trained]
        with torch.enable_grad():
            found = function(given)
            out = found[0] if isinstance(found, tuple) else found
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
            return [*torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True)]

    try:
        pairs = [*zip(gradients(own), gradients(replacement), strict=True)]
    except Exception:
        return ""  # one of them has none
    bar = 0.2 if any(torch.finfo(x.dtype).bits == 16 for x, _ in pairs) else 1e-2
    for x, y in pairs:
        scale, distance = y.abs().max().item(), (x - y).abs().max().item()
        if distance > bar * scale:
            return f"their gradients differ by {distance:.2g} of {scale:.2g} on the first tokens of this rank"
    return ""
