"""Record one run of a batch: the inputs and outputs of every module in the order of execution."""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...module._torch.modules import hook_owners
from ...module.dtensor import CPDims
from ...module.hooks import AttentionHooks
from ...ops.writes import writes
from .observe import Observer
from .share import Positions, Selection, closest, looks_local

Key = tuple[str, int, str, str]
"""Module, number of its call, ``"input"`` or ``"output"``, and the place of the tensor among them."""

WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")


@dataclass
class Event:
    """A tensor that went into a module or came out of it."""

    key: Key
    call: int
    tick: int
    value: Tensor
    """On the CPU: the tensor; in a run without context parallelism the rows of it that this rank holds with it."""
    shape: tuple[int, ...]
    """The shape of the tensor itself."""
    selection: Selection | None = None
    local_positions: bool = False
    """True if it counts local rows where it should have positions."""


@dataclass
class ModuleCall:
    """One call of a module."""

    module: str
    type: str
    number: int
    parent: int | None
    styled: bool
    """True if ContextParallel is applied to the module."""
    opaque: bool
    """True if the tensors inside the module have another form with context parallelism (after Ulysses)."""
    integrated: bool
    """True for a module that an integration has prepared, and inside it."""


@dataclass
class Observation:
    """A call of a function, or a state of the model, that explains a difference if there is one."""

    tick: int
    module: str | None
    """None: outside of all modules."""
    kind: str
    text: str


@dataclass
class Trace:
    """The record of one run."""

    calls: list[ModuleCall] = field(default_factory=list)
    events: dict[Key, Event] = field(default_factory=dict)
    unmatched: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """Tensors whose rows could not be found, with their shapes."""
    observations: list[Observation] = field(default_factory=list)
    documents: bool = False
    """True if packed documents or padding were in force in some module."""
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Recorder:
    """Records the modules of ``model`` while it is entered.

    Args:
        model: its modules get hooks for the length of the block.
        cp_dims: finds the cp dimension in the meshes of DTensors.
        positions: returns the positions of this rank once they are known.
        like: the trace of the run with context parallelism, for a run without it: only the rows that it has are kept.
        documents: returns True while packed documents are in force.
        after: called with each module, its inputs and its output after its call, and returns an observation or None.
    """

    def __init__(
        self,
        model: nn.Module,
        cp_dims: CPDims,
        positions: Callable[[], Positions | None],
        like: Trace | None = None,
        documents: Callable[[], bool] = lambda: False,
        after: Callable[[nn.Module, tuple[Any, ...], Any], str | None] = lambda module, args, output: None,
    ) -> None:
        self.model, self.cp_dims, self.positions, self.like = model, cp_dims, positions, like
        self.documents, self.after = documents, after
        self.trace = Trace()
        self._stack: list[tuple[nn.Module, int, tuple[Any, ...]]] = []
        self._numbers: Counter[str] = Counter()
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._tick, self._handles, self._busy = 0, [], False  # type: ignore[var-annotated]
        self._observer = Observer(positions if like is None else lambda: None, self._observe)

    def __enter__(self) -> Trace:
        for name, module in self.model.named_modules():
            name = WRAPPERS.sub("", name).rstrip(".")
            names = _parameter_names(module)
            before, behind = self._hooks(name, names)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(behind))
        self._observer.__enter__()
        return self.trace

    def __exit__(self, *error: Any) -> None:
        self._observer.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _hooks(self, name: str, names: list[str]) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._busy = True
            try:
                self._begin(module, name, args, {**dict(zip(names, args, strict=False)), **kwargs})
            finally:
                self._busy = False

        def behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._busy = True
            try:
                self._end(module, output)
            finally:
                self._busy = False

        return before, behind

    # ---- one call of a module

    def _begin(self, module: nn.Module, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        trace, owners = self.trace, hook_owners(module)
        hooks = [h for h in owners if isinstance(h, AttentionHooks)]
        parent = self._stack[-1][1] if self._stack else None
        hidden = parent is not None and trace.calls[parent].opaque
        opaque = hidden or any(h.style.qkv_indices is not None for h in hooks)
        inside = parent is not None and trace.calls[parent].integrated
        integrated = inside or any(hasattr(h, "share") for h in owners)
        number = self._numbers[name]
        call = ModuleCall(name, type(module).__name__, number, parent, bool(hooks), opaque, integrated)
        self._numbers[name] += 1
        trace.calls.append(call)
        self._stack.append((module, len(trace.calls) - 1, args))
        trace.documents = trace.documents or self.documents() or (not inside and _carries_documents(named))
        if not hidden:
            for place, x in tensors(named):
                if x.ndim:
                    self._keep(len(trace.calls) - 1, "input", place, x)

    def _end(self, module: nn.Module, output: Any) -> None:
        while self._stack and self._stack[-1][0] is not module:
            self._stack.pop()  # an exception, which the model has caught, ended that call
        if not self._stack:
            return
        _, index, args = self._stack.pop()
        call = self.trace.calls[index]
        found = self.after(module, args, output)
        if found is not None:
            self._add("tensor parallel", found, call.module)
        if not (call.parent is not None and self.trace.calls[call.parent].opaque):
            for place, x in tensors(output):
                self._keep(index, "output", place, x)

    def _keep(self, index: int, kind: str, place: str, x: Tensor) -> None:
        self._tick += 1
        call, trace, positions = self.trace.calls[index], self.trace, self.positions()
        key = (call.module, call.number, kind, place)
        value = self._copy(x) if self.like is None else self._local(x.detach()).cpu()
        event = Event(key, index, self._tick, value, tuple(value.shape))
        if self.like is None:
            event.local_positions = positions is not None and looks_local(value, positions)
            trace.events[key] = event
        elif positions is not None and key in self.like.events:
            found = closest(self.like.events[key].value, value, positions)
            if found is None:
                trace.unmatched[key] = event.shape
            else:
                event.selection, event.value = found[0], found[1].clone()  # not a view of the model's memory
                trace.events[key] = event

    def _copy(self, x: Tensor) -> Tensor:
        """A copy on the CPU. An output that goes into other modules unchanged is copied once."""
        known = self._copies.get(id(x))
        if known is not None and known[0]() is x and known[1] == writes(x):
            return known[2]
        value = self._local(x.detach()).to("cpu", copy=True)
        if not x.is_inference():  # such tensors count no writes
            self._copies[id(x)] = weakref.ref(x), writes(x), value
        return value

    def _local(self, x: Tensor) -> Tensor:
        """This rank's share of a DTensor, whole in all dimensions but those of the cp mesh."""
        if not isinstance(x, DTensor):
            return x
        cp = self.cp_dims.within(x.device_mesh, "a module's tensor")
        return x.redistribute(placements=[p if i in cp else Replicate() for i, p in enumerate(x.placements)]).to_local()

    # ---- observations

    def _observe(self, kind: str, text: str) -> None:
        inside = bool(self._stack) and self.trace.calls[self._stack[-1][1]].opaque
        if self._busy or (inside and kind != "dropout"):
            return  # our own call, or one on whole sequences inside a styled module
        if kind == "attention" and any(self.trace.calls[index].styled for _, index, _ in self._stack):
            return
        self._add(kind, text, self.trace.calls[self._stack[-1][1]].module if self._stack else None)

    def _add(self, kind: str, text: str, module: str | None) -> None:
        self.trace.observations.append(Observation(self._tick, module, kind, text))


def _parameter_names(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except ValueError:  # it is not written in Python
        return []


def tensors(x: Any, place: str = "", depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, with their places: ``"cos"``, ``"[0]"``, ``"past[1]"``."""
    if isinstance(x, Tensor):
        yield place, x
    elif depth and isinstance(x, Mapping):
        for name, item in x.items():
            yield from tensors(item, f"{place}.{name}" if place else str(name), depth - 1)
    elif depth and isinstance(x, (tuple, list)):
        for i, item in enumerate(x):
            yield from tensors(item, f"{place}[{i}]" if len(x) > 1 or place else place, depth - 1)


def _carries_documents(named: dict[str, Any]) -> bool:
    """True if the caller of a module passes packed documents, or the batch state of an integration."""
    return named.get("documents") is not None or named.get("context_parallel") is not None
