"""Results that something else computes in place of a module or a function, and how both are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.leaves import other_leaf
from .._torch.modules import buffers_of, parameters_of
from ..ops.writes import writes

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
    with it, for few tokens; "" if there is none. The module's buffers, attributes and lists are then as they were.

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
    """Restore what forwards in the block assign to a module and to those inside it, put into their lists, dicts and
    sets, and write to their buffers and tensors."""
    attributes = [] if module is None else [vars(inner) for inner in module.modules()]
    places = [*_containers(attributes)]
    contents = [place.copy() for place in places]
    tensors = {id(x): x for before in contents for x in _entries(before) if type(x) in (Tensor, nn.Buffer)}
    written = [(x, x.detach().clone()) for x in tensors.values() if x.layout == torch.strided and not x.is_meta]
    try:
        yield
    finally:
        for place, before in zip(places, contents, strict=True):
            if isinstance(place, dict):
                for name in place.keys() - before.keys():
                    del place[name]
                place.update(before)
            elif [*map(id, place)] != [*map(id, before)]:
                place.clear()
                (place.update if isinstance(place, set) else place.extend)(before)
        for x, content in written:
            if not torch.equal(x, content):  # a write would count as one, which a graph that has saved x refuses
                with torch.inference_mode(x.is_inference()):
                    x.detach().copy_(content)


def _entries(place: Any) -> Iterable[Any]:
    return place.values() if isinstance(place, dict) else place


def _containers(todo: list[Any]) -> Iterator[Any]:
    """Lists, dicts, sets and queues, and those inside of them."""
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if isinstance(x, (list, dict, set, deque, tuple)) and id(x) not in seen:
            seen.add(id(x))
            if not isinstance(x, tuple):
                yield x
            todo.extend(_entries(x))


@dataclass
class Held:
    """The numbers, texts and tensors that a module and those inside it held when it was compared: its forward may read
    them, and what has replaced it does not."""

    plain: list[Any]
    tensors: list[tuple[Tensor, int, Tensor | None]]
    """Each with the number of writes to it, and a copy, where it has values."""

    @classmethod
    def by(cls, module: nn.Module, trained: bool) -> Held:
        """Return what a module holds; without parameters that require a gradient if it has been ``trained``: the
        comparison refuses those that its result depends on."""
        plain, tensors = _held(module, trained)
        real = (
            type(x) in (Tensor, nn.Parameter, nn.Buffer) and not x.is_meta and x.layout == torch.strided
            for x in tensors
        )
        copies = [x.detach().clone() if has else None for x, has in zip(tensors, real, strict=True)]
        return cls(plain, [(x, writes(x), copy) for x, copy in zip(tensors, copies, strict=True)])

    def changed(self, module: nn.Module, trained: bool) -> bool:
        """True if the module holds anything else by now. (Values are read of tensors that were written to.)"""
        plain, tensors = _held(module, trained)
        if plain != self.plain or len(tensors) != len(self.tensors):
            return True
        for i, (now, (x, before, copy)) in enumerate(zip(tensors, self.tensors, strict=True)):
            if now is x and writes(x) == before:
                continue
            if copy is None or (now.shape, now.dtype, now.device) != (copy.shape, copy.dtype, copy.device):
                return True
            if not torch.equal(now.detach(), copy):
                return True
            self.tensors[i] = now, writes(now), copy
        return False


def _held(module: nn.Module, trained: bool) -> tuple[list[Any], list[Tensor]]:
    found = [
        (name, x)
        for inner in module.modules()
        for place in (vars(inner), buffers_of(inner), parameters_of(inner))
        for name, x in place.items()
    ]
    tensors = [x for _, x in found if isinstance(x, Tensor) and not (trained and x.requires_grad)]
    return [(name, x) for name, x in found if type(x) in _PLAIN], tensors


_PLAIN = (bool, int, float, complex, str, torch.dtype)


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
