"""Record one run of a batch: inputs and outputs of every module in the order of execution, and suspicious calls.

A suspicious call is one of a function that is often wrong on a share of the sequence. It explains a difference if there
is one. So does a sum over tensor-parallel ranks that was not made.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._torch.modes import past_modes
from .._torch.modules import called_by_library, hook_owners
from ..data.collectives import by_rank
from ..handler import ContextParallelHandler
from ..module import attention_calls
from ..module.dtensor import CPDims
from ..module.hooks import AttentionHooks
from ..module.mixing import row_of_call
from ..ops.writes import writes
from .share import Positions, Selection, closest, looks_local

Key = tuple[str, int, str, str]
"""The name of a module, the number of its call, ``"input"`` or ``"output"``, and the tensor's place among them."""

WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")


@dataclass
class Event:
    """A tensor that went into a module or came out of it."""

    key: Key
    call: int
    tick: int
    value: Tensor
    """The tensor on the CPU; in a run on one device only the rows that this rank holds under context parallelism."""
    shape: tuple[int, ...]
    """The shape of the tensor itself."""
    selection: Selection | None = None
    positions: Positions | None = None
    """In the run with context parallelism: those of this rank then, if they were known."""
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
    """The name of the module that ran; None outside of all modules."""
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
    """True if some module ran with packed documents or padding."""
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """Records the modules of a model, and the functions that they call, while it is entered.

    Args:
        model: its modules get hooks for the length of the block.
        handler: the handler of the run.
        cp_dims: finds the cp dimension in the meshes of DTensors.
        positions: returns the positions of this rank once they are known.
        like: the trace of the run with context parallelism, for a run without it: only the rows that it has are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: ContextParallelHandler,
        cp_dims: CPDims,
        positions: Callable[[], Positions | None],
        like: Trace | None = None,
    ) -> None:
        super().__init__()
        self.model, self.handler, self.cp_dims, self.positions, self.like = model, handler, cp_dims, positions, like
        self.trace = Trace()
        self._stack: list[tuple[nn.Module, int, tuple[Any, ...]]] = []
        """The modules that run, the numbers of their calls in the trace, and the arguments that callers have passed."""
        self._numbers: Counter[str] = Counter()
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._tick = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for name, module in self.model.named_modules():
            begin = partial(self._begin, WRAPPERS.sub("", name).rstrip("."), _parameter_names(module))
            self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._end))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    # ---- one call of a module

    def _begin(
        self, name: str, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
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
        packed = self.handler.cp.batch.documents is not None or (not inside and _carries_documents(named))
        trace.documents = trace.documents or packed
        if not hidden:
            for place, x in tensors(named):
                if x.ndim:
                    self._keep(len(trace.calls) - 1, "input", place, x)

    def _end(self, module: nn.Module, inner_args: tuple[Any, ...], output: Any) -> None:
        while self._stack and self._stack[-1][0] is not module:
            self._stack.pop()  # an exception, which the model has caught, ended that call
        if not self._stack:
            return
        _, index, args = self._stack.pop()
        call = self.trace.calls[index]
        found = unreduced_sum(module, args, output, self.cp_dims) if self.like is None else None
        if found is not None:
            self.trace.observations.append(Observation(self._tick, call.module, "tensor parallel", found))
        if not (call.parent is not None and self.trace.calls[call.parent].opaque):
            for place, x in tensors(output):
                self._keep(index, "output", place, x)

    def _keep(self, index: int, kind: str, place: str, x: Tensor) -> None:
        with past_modes():  # what watches a first forward would take these comparisons for the model's
            self._keep_unseen(index, kind, place, x)

    def _keep_unseen(self, index: int, kind: str, place: str, x: Tensor) -> None:
        self._tick += 1
        call, trace, positions = self.trace.calls[index], self.trace, self.positions()
        key = (call.module, call.number, kind, place)
        value = self._copy(x) if self.like is None else self._local(x.detach()).cpu()
        event = Event(key, index, self._tick, value, tuple(value.shape))
        if self.like is None:
            event.positions = positions
            event.local_positions = positions is not None and looks_local(value, positions)
            trace.events[key] = event
        elif key in self.like.events and (at := self.like.events[key].positions or positions) is not None:
            found = closest(self.like.events[key].value, value, at)
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

    # ---- calls of functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with suppress(RuntimeError):  # values cannot be read in transforms of functions, and need not be
            # Without context parallelism only random numbers matter.
            found = suspicious(func, args, kwargs, out, self.positions() if self.like is None else None)
            if found is not None and not called_by_library():
                self._observe(*found)
        return out

    def _observe(self, kind: str, text: str) -> None:
        calls = [self.trace.calls[index] for _, index, _ in self._stack]
        if calls and calls[-1].opaque and kind != "dropout":
            return  # whole sequences inside a styled module
        if kind == "attention" and any(call.styled for call in calls):
            return
        self.trace.observations.append(Observation(self._tick, calls[-1].module if calls else None, kind, text))


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


# --------------------------------------------------------------------------- suspicious calls

DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
RANDOM = {"bernoulli", "bernoulli_", "rand_like", "randn_like", "rand", "randn"}


def suspicious(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, positions: Positions | None
) -> tuple[str, str] | None:
    """The kind and the description of a call that may be wrong on a share; None for other calls. Without
    ``positions`` only random numbers are suspicious."""
    name = getattr(func, "__name__", "")
    random = _random(func, name, args, kwargs)
    if random is not None or positions is None:
        return random
    x = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    local = positions.local
    if func is torch.arange or name == "arange":
        counts = isinstance(out, Tensor) and out.shape == (local,) and out[0] == 0 and out[-1] == local - 1
        if counts and not positions.first:
            return "positions", f"torch.arange counts 0 to {local - 1}, the local length"
    elif attention_calls.key_of(func) in attention_calls.ROUTED or attention_calls.spelled(func) is not None:
        if isinstance(x, Tensor) and local in x.shape:
            return "attention", f"{name} attends {local} local positions only"
    elif name == "__getitem__":
        return _slice(x, out, positions)
    elif name == "pad":
        return _pad(x, out, args[1] if len(args) > 1 else kwargs.get("pad"), local)
    elif row_of_call(name, args, kwargs, {local}) is not None:
        kind = "attention" if name == "softmax" and isinstance(x, Tensor) and x.ndim > 2 else "mixing"
        return kind, f"{name} over {local} local positions"
    return None


def _random(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    if name in DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return ("dropout", f"{name}(p={p}) is active") if training and p else None
    if func is F.scaled_dot_product_attention:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return ("dropout", f"{name}(dropout_p={p}) is active") if p else None
    return ("dropout", f"{name} draws random numbers") if name in RANDOM else None


def _slice(x: Any, out: Any, positions: Positions) -> tuple[str, str] | None:
    """A slice that begins at position 0 of a table, or that moves the local rows against each other."""
    if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim != out.ndim:
        return None
    local = positions.local
    for before, after in zip(x.shape, out.shape, strict=True):
        if before == local and local - 3 <= after < local:
            return "shift", f"a slice keeps {after} of the {local} local positions"
        if after == local and local < before <= local + 3:
            return "shift", f"a slice takes {local} of {before} positions, the local ones and {before - local} more"
        begins = after == local and before >= min(positions.wholes) and x.data_ptr() == out.data_ptr()
        if begins and not positions.first:
            return "positions", f"a slice takes the first {local} rows of a table of {before}"
    return None


def _pad(x: Any, out: Any, pad: Any, local: int) -> tuple[str, str] | None:
    """Padding that adds at one end of the local rows what it cuts off at the other."""
    if not isinstance(x, Tensor) or not isinstance(out, Tensor) or not isinstance(pad, (tuple, list)):
        return None
    for size, before, after in zip(reversed(x.shape), pad[::2], pad[1::2], strict=False):
        if size == local and before == -after != 0:
            return "shift", f"pad moves the {local} local positions by {before}"
    return None


# --------------------------------------------------------------------------- sums over tensor-parallel ranks

SUMMED_OVER = {nn.Linear: 1, nn.Embedding: 0}
"""The dimension of the weight over which a module sums: sharded there, every rank has a part of the sum."""
SAMPLE = 256
"""Values of an output that ranks compare."""


def unreduced_sum(module: nn.Module, args: tuple[Any, ...], output: Any, cp_dims: CPDims) -> str | None:
    """Describe a module with a row-wise sharded weight whose output is still one part of a sum; None for others. (Both
    runs lack that sum, so that a comparison cannot find it.) All ranks that share the weight make the call."""
    weight = getattr(module, "weight", None)
    dim = next((d for kind, d in SUMMED_OVER.items() if isinstance(module, kind)), None)
    if dim is None or not isinstance(weight, DTensor) or not isinstance(output, Tensor):
        return None
    mesh = _mesh_of_shards(weight, dim, cp_dims)
    if mesh is None or isinstance(output, DTensor):  # a DTensor knows that it is a sum
        return None
    given = args[0] if args and isinstance(args[0], Tensor) else None
    rows = output.shape[: output.ndim - 1]
    if given is None or rows != (given.shape[:-1] if isinstance(module, nn.Linear) else given.shape):
        return None  # the sum was scattered over the ranks
    sample = output.detach().flatten()[:SAMPLE].float()
    parts = by_rank(mesh, sample.contiguous())
    apart, scale = (parts - parts[0]).abs().max().item(), parts.abs().max().item()
    if apart <= 1e-3 * scale:
        return None
    return f"its output differs by {apart / scale:.1e} between the {mesh.size()} ranks that share its weight"


def _mesh_of_shards(weight: DTensor, dim: int, cp_dims: CPDims) -> DeviceMesh | None:
    """The mesh dimension beside cp over which dimension ``dim`` of a weight is sharded."""
    mesh = weight.device_mesh
    cp = set(cp_dims.ranks)
    for i, placement in enumerate(weight.placements):
        if not isinstance(placement, Shard) or placement.dim != dim or mesh.size(i) == 1:
            continue
        found = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[i]] if mesh.mesh_dim_names else None
        if found is not None and len(cp & set(found.mesh.flatten().tolist())) < 2:
            return found
    return None
