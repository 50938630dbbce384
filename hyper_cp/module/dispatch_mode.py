"""What is active while an attention module runs: routes the module's attention call to the engine."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..mesh.cp_mesh import CPMesh
from ..ops.attention import Call
from . import attention_calls as calls
from .dtensor import Outputs
from .mesh_binding import Binding, Place


@dataclass
class RunningCall:
    """One running call of a styled module: what its attention is routed to, and what its end must undo."""

    binding: Binding
    module: nn.Module
    place: Place = field(init=False)
    """Where this call runs."""
    cp: CPMesh | None = None
    """The mesh, if the Ulysses all-to-all was done at the boundary; None if the attention call does it."""
    length: int = 0
    """Of the sequence inside the module, and the query heads and dimensions there (if ``cp``)."""
    heads: int = 0
    ndim: int = 0
    handed: tuple[Tensor, ...] = ()
    """q, k, v as the module gets them, where their shapes do not tell sequence from heads."""
    documents: Tensor | None = None
    required: bool = False
    """Whether other attention than the routed one would be wrong."""
    outputs: Outputs | None = None
    """How outputs leave the module: as DTensors placed like this (None: local tensors)."""
    region: Region | None = None
    routed: int = 0
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)

    def engine_only(self) -> bool:
        """Whether the call asks for what other attention than ours would ignore."""
        return self.documents is not None or self.binding.style.mode.window is not None

    def alive(self) -> bool:
        """Whether the module's call is still on the stack of this thread."""
        if torch.compiler.is_compiling():
            return True
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is self.module:
                return True
            frame = frame.f_back
        return False

    def leave(self) -> None:
        if self.region is not None:
            self.region.__exit__(None, None, None)


# The frame of a module's call, by which a call that is over is told from one that is running.
_CALL = nn.Module._call_impl.__code__


class Region(TorchFunctionMode):
    """While entered, the calls of the table ``calls.ROUTED``, however they were imported, mean attention over the
    whole sequence of a cp mesh."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__()
        self.call = call

    def __enter__(self) -> Any:
        _thread.regions.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.regions.remove(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = calls.ROUTED.get(calls.key_of(func))
        if read is not None and not self.call.required and func not in calls.WHOLE_TOO:
            read = None  # whole sequences: the user's own kernel is right
        if read is not None and self.call.alive():  # else a KeyboardInterrupt ended the call without its hooks
            self.call.routed += 1
            asked = read(self.call.binding.name, *args, **kwargs)
            return asked.answer(self._attend(asked))
        if self.call.required and func in calls.UNROUTED:
            raise NotImplementedError(
                f"{self.call.binding.name} calls {calls.UNROUTED[func]}, which cannot be routed to context-parallel "
                "attention yet. Call F.scaled_dot_product_attention or flex_attention, or use ulysses_degree=None "
                "with qkv_indices on a module that receives q, k, v, where any kernel works"
            )
        return calls.PLAIN.get(func, func)(*args, **kwargs)

    def _attend(self, asked: calls.Asked) -> Any:
        call, name, q = self.call, self.call.binding.name, asked.query
        if call.grad_enabled and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} calls attention with gradients switched off inside the module: a reentrant "
                "activation checkpoint there would recompute it as local attention. Checkpoint the whole module "
                "(use_reentrant=False); for inference put torch.no_grad() around the module"
            )
        if (
            call.cp is not None
            and q.ndim == 4
            and (tuple(q.shape[1:3]) != (call.heads, call.length) or self._swapped(asked))
        ):
            raise ValueError(
                f"{name} calls attention with a query of shape {tuple(q.shape)}; after the exchange of "
                f"sequence and heads it should be [batch, {call.heads} heads, {call.length} positions, "
                "head size]. Check seq_dim and head_dim of ContextParallel: [B, S, H, D] inputs have 1 and 2, "
                "[B, H, S, D] inputs 2 and 1"
            )
        mode = call.binding.style.mode
        if asked.window is not None:
            if mode.window is not None:
                raise ValueError(
                    f"{name} asks for window={asked.window}, its style for {mode.window}: drop one of them"
                )
            mode = replace(mode, window=asked.window)
        if asked.documents is not None and call.documents is not None:
            raise ValueError(f"{name} passes packed documents, and so does the caller: drop one of them")
        documents = call.documents if asked.documents is None else asked.documents
        question = Call(asked.is_causal, asked.scale, asked.mask, documents, asked.dropout_p)
        if call.cp is not None:
            return asked.inside(q, asked.key, asked.value, call.cp, mode, question)
        (q, k, v), outputs = call.binding.local([q, asked.key, asked.value], 2, 1, call.place)
        heads = (q.shape[1], k.shape[1]) if q.ndim == 4 and k.ndim == 4 else (1, 1)
        out = asked.alone(q, k, v, call.place.view(*call.binding.record_heads(*heads)), mode, question)
        return outputs.wrap(out) if outputs is not None and isinstance(out, Tensor) else out

    def _swapped(self, asked: calls.Asked) -> bool:
        """Whether what the style takes for the sequence is where attention has its heads: seen by the strides of
        tensors that come to it as the module got them, or as views."""
        style = self.call.binding.style
        for x in (asked.query, asked.key, asked.value):
            for y in self.call.handed:
                same = x is y or (x._base is not None and x._base is (y if y._base is None else y._base))
                strides = y.stride(style.seq_dim), y.stride(style.head_dim)
                if same and x.ndim == 4 and (x.stride(1), x.stride(2)) == strides and strides[0] != strides[1]:
                    return True
        return False


class _Thread(threading.local):
    """The regions that are entered in this thread, and the calls of styled modules that are running in it (at most
    one: see nesting)."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.calls: list[RunningCall] = []


_thread = _Thread()


def entered() -> bool:
    """Whether a region is entered in this thread."""
    return bool(_thread.regions)


def running_calls() -> list[RunningCall]:
    """The stack of running calls of this thread."""
    return _thread.calls


def running_call() -> RunningCall | None:
    """The innermost of them."""
    return _thread.calls[-1] if _thread.calls else None
