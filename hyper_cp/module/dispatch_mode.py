"""The mode that is active while an attention module runs: it routes the module's attention call to the engine."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from .._torch.compiling import is_compiling
from .._torch.modes import begin_no_graph, take_out
from .._torch.modules import is_running
from ..ops.decoding import decode_attention
from ..ops.split_cache import SplitCache
from . import attention_calls
from .running_call import RunningCall, routed_attention
from .thread_stack import ThreadStack
from .unprepared import refuse_lengths_of_shares


class EnteredMode(TorchFunctionMode):
    """A mode that this thread knows to be entered: ``flex_attention`` can then be seen by it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        begin_no_graph(cls)

    def __enter__(self) -> Any:
        _modes.push(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _modes.remove(self)
        super().__exit__(*error)

    def take_out(self) -> None:
        """Leave the mode although others may have been entered since."""
        _modes.remove(self)
        take_out(self)


class DispatchMode(EnteredMode):
    """While entered, the attention calls of ``attention_calls.ROUTED``, however they were imported, mean attention over
    the whole sequence of a cp mesh."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, call = kwargs or {}, self.call
        routed = attention_calls.ROUTED.get(attention_calls.key_of(func))
        if routed is not None and not (call.must_route or routed.whole_too or kwargs.get("sink") is not None):
            routed = None  # whole sequences: the user's own kernel is right
        if routed is not None and call.alive():  # else a KeyboardInterrupt ended the call without its hooks
            call.routed = True
            request = routed.read(call.binding.name, *args, **kwargs)
            mask, length = request.call.mask, request.query.shape[-2]
            check = call.must_route and not request.blocks and not is_compiling()
            out = routed_attention(call, request)  # it may adapt the request, and with it the caller's form
            if check:
                refuse_lengths_of_shares(call, length, mask)
            return request.to_caller(out)
        if func is decode_attention and call.alive():
            _check_decoding(call, args[1])
            call.routed = True
            return func(*args, **kwargs)
        unrouted = attention_calls.spelled(func) if routed is None and call.must_route else None
        if unrouted is not None and call.alive():
            raise NotImplementedError(
                f"{call.binding.name} calls {unrouted}, which cannot be routed to context-parallel attention yet. It "
                "would attend to this rank's share only. Call F.scaled_dot_product_attention or flex_attention, or use "
                "ulysses_degree=None with qkv_indices on a module that receives q, k, v, where any kernel works"
            )
        if (
            func is Tensor.unflatten
        ):  # torch.compile finds it in no dictionary, and cannot trace it where a mode is active
            func = torch.unflatten
        return attention_calls.PLAIN.get(func, func)(*args, **kwargs)


def _check_decoding(call: RunningCall, cache: SplitCache) -> None:
    """Raise if a styled module may not attend to this cache."""
    name = call.binding.name
    if cache.cp.batch is not call.mesh.views[0].batch:
        raise ValueError(
            f"{name} runs on the {call.mesh.views[0]}, but its cache lies on another one, the {cache.cp}. Other ranks "
            "hold its keys. Make the cache on the mesh of the model"
        )
    if call.exchanged is not None and call.exchanged.cp.ulysses.size > 1:
        raise NotImplementedError(
            f"{name} calls decode_attention after its heads were exchanged. New tokens are the same on every rank. "
            "Put the style on a module that computes q, k, v itself, with qkv_indices=None"
        )


BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""Functions that run backward."""
_RENAMED = {"self": "tensors", "gradient": "grad_tensors"}


def differentiate(mode: TorchFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one of ``BACKWARD`` in a mode that is handling it, with the mode entered again.

    A mode is inactive while it handles a function: attention that an activation checkpoint recomputes in backward would
    be local. The mode does not handle backward from edges of the graph, so tensors are replaced by their edges.
    """
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    given = {_RENAMED.get(name, name) if func is Tensor.backward else name: x for name, x in given.items()}
    ends = [name for name in ("tensors", "outputs", "inputs") if given.get(name) is not None]
    tensors = {name: [given[name]] if isinstance(given[name], Tensor) else list(given[name]) for name in ends}
    plain = all(not isinstance(x, Tensor) or x.requires_grad for xs in tensors.values() for x in xs)
    if not plain or given.get("materialize_grads") or given.get("is_grads_batched"):
        return func(*args, **kwargs)  # an error, or what edges cannot do: a recompute then raises
    for name, xs in tensors.items():
        given[name] = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in xs]
    run = torch.autograd.backward if func is Tensor.backward else func
    TorchFunctionMode.__enter__(mode)
    try:
        return run(**given)
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


def begin(call: RunningCall) -> None:
    """Route the attention calls of a running call, until it leaves."""
    mode = DispatchMode(call)
    mode.__enter__()
    call.stop = lambda: mode.__exit__(None, None, None)


def abandon(call: RunningCall) -> None:
    """Stop routing for a call that was interrupted. Its mode is not on top if others were entered since."""
    for mode in [mode for mode in _modes.entries if isinstance(mode, DispatchMode) and mode.call is call]:
        mode.take_out()


_modes: ThreadStack[EnteredMode] = ThreadStack()
"""The modes that are entered."""
calls: ThreadStack[RunningCall] = ThreadStack()
"""The calls of styled modules that are running; at most one in a thread, because nesting is refused."""


alone: ThreadStack[nn.Module] = ThreadStack()
"""Prepared models, their attention modules, and mixers that run as on one device, also in a ``context_parallel`` block
of other ranks."""


def running_alone() -> nn.Module | None:
    """The innermost such module that runs in this thread."""
    return alone.innermost(lambda module: is_compiling() or is_running(module))


def dispatching() -> bool:
    """True if a mode is entered in this thread that must see ``flex_attention``."""
    return bool(_modes.entries)


def current_call() -> RunningCall | None:
    """The innermost running call of this thread."""
    return calls.top
