"""A recompute by activation checkpointing takes over from its forward: the batch state of a call, and selections.

A recompute runs in backward: perhaps after the block that set the documents or the mesh has ended, perhaps inside
another one. So the state of a call is recorded with each checkpoint that the call runs in, and a recompute finds it
there. torch has no public way to ask which checkpoint is running. Two private ones serve:

- A non-reentrant checkpoint is on the stack of saved-tensor hooks: in its forward the pack hook closes over a
  ``_CheckpointFrame``, in its recompute over a weak reference to the same one. That covers nested checkpoints, hooks
  of others above them, and the composable checkpoint.
- A reentrant checkpoint has no hooks, and in its forward no autograd node yet, so its Python frame is all there is:
  that of ``CheckpointFunction.forward`` or ``backward``, whose ``ctx`` is the same object.

Run on torch 2.11.0, 2.13.0 and 2.15.0. Where nothing is found (checkpoints of other libraries, compiled
modules), the engine raises in a non-reentrant recompute whose state differs from that of its forward, and in a
reentrant one of torch (:func:`replays`). In those of others it sees the recompute only. Where the names are missing,
the import raises.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch._C import _autograd
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from .compiling import is_compiling
from .version import moved

_FORWARD, _BACKWARD = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
if "ctx" not in _FORWARD.co_varnames or not {"ctx", "detached_inputs", "outputs"} <= {*_BACKWARD.co_varnames}:
    raise moved("variables ctx, detached_inputs and outputs in CheckpointFunction")
_AMBIGUOUS = object()
T = TypeVar("T")
_Record = WeakKeyDictionary[object, tuple[Any, ...]]


def batch_state(owner: object, read: Callable[[], tuple[Any, ...]]) -> Any:
    """The batch state for a call of ``owner``: that of its forward if this is a recompute, else what ``read`` returns,
    which is recorded."""
    if is_compiling():
        return read()
    running = [(_record(checkpoint), recomputes) for checkpoint, recomputes in _checkpoints()]
    then = [record[owner] for record, recomputes in running if recomputes and owner in record]
    state = _known(then)
    # Ambiguous: the blocks that set the state are inside the checkpoint, and have been entered again. Otherwise the
    # state of now is not even read: the thread of this backward may be in no block, or in that of another batch.
    if not state or any(a is _AMBIGUOUS for a in state):
        state = _known([*then, read()])
    for record, recomputes in running:
        if not recomputes:
            before = record.setdefault(owner, state)
            # Called again in one checkpoint, with another state.
            record[owner] = tuple(a if _same(a, b) else _AMBIGUOUS for a, b in zip(before, state, strict=True))
    return state


def replayed(make: Callable[[], Tensor]) -> Tensor:
    """Return ``make()``; in a recompute what it returned in the forward, kept with each checkpoint that it ran in.

    For results that other bits of the inputs would change altogether. The calls of a recompute come in the order of
    those of its forward. Copies are kept and returned: callers may change what they get in place.
    """
    if is_compiling():
        return make()
    running = [(_kept(checkpoint), recomputation) for checkpoint, recomputation in _recomputations(ended=False)]
    known = [kept.next(recomputation) for kept, recomputation in running if recomputation is not None]
    found = next((x for x in known if x is not None), None)
    made = make() if found is None else found.clone()
    keeping = [kept for kept, recomputation in running if recomputation is None]
    if keeping:
        copy = made.clone()
        for kept in keeping:
            kept.made.append(copy)
    return made


class _Kept(Generic[T]):
    """Results of the calls in a checkpoint during its forward, in order, and how many of them a recompute has met."""

    def __init__(self) -> None:
        self.made: list[T] = []
        self.met: dict[object, int] = {}

    def next(self, recomputation: object) -> T | None:
        """Return what the next call of a recompute made in the forward."""
        at = self.met[recomputation] = self.met.get(recomputation, -1) + 1
        return self.made[at % len(self.made)] if self.made else None


def replays(read: Callable[[], int]) -> bool:
    """False for a call in the recompute of a reentrant checkpoint that has another value than that call of its forward.
    Outside of such checkpoints no value is read.

    Ops ask, so that a compiled graph that was made for other documents is found out, too. (Of non-reentrant checkpoints
    the tensors that an op saves tell.)
    """
    found = True
    for frame in _reentrant_frames():
        kept = _kept(frame.f_locals["ctx"], "hyper_cp_values")
        if frame.f_code is _FORWARD:
            kept.made.append(read())
        elif "detached_inputs" in frame.f_locals and "outputs" not in frame.f_locals:
            found &= kept.next(_number_of_backward()) in (None, read())
    return found


def _kept(checkpoint: Any, name: str = "hyper_cp_kept") -> _Kept[Any]:
    if not hasattr(checkpoint, name):
        setattr(checkpoint, name, _Kept())
    kept: _Kept[Any] = getattr(checkpoint, name)
    return kept


_packed: set[str] = set()
"""Names of modules that were compiled with packed documents."""


def refuse_without_gradients(name: str, what: str, outside: bool) -> None:
    """Raise ``RuntimeError`` if gradients are switched off where a module computes something over the sequence, and not
    ``outside`` of it, by a reentrant checkpoint. (Compiled code does not tell that from ``torch.no_grad()``.)"""
    if outside and not torch.is_grad_enabled() and (is_compiling() or in_function_forward()):
        raise RuntimeError(
            f"{name} calls {what} with gradients switched off inside the module. A reentrant "
            "activation checkpoint there would recompute it over this rank's share. Pass use_reentrant=False "
            "to it; for inference put torch.no_grad() around the module"
        )


@torch.compiler.assume_constant_result  # runs while a graph is made
def refuse_recompiled(name: str, packed: bool) -> None:
    """Raise ``RuntimeError`` if a compiled module that had documents is compiled again, without any, for a recompute
    by a non-reentrant checkpoint around it: the block with the documents has ended, and PyTorch would complain about
    shapes. (Reentrant ones always compile again.)"""
    if packed:
        _packed.add(name)
    elif name in _packed and repeats_gradients():
        raise RuntimeError(
            f"{name} is compiled, and activation checkpointing recomputes it without the packed documents that its "
            "forward had. A compiled graph cannot look for those of its forward, and their block has ended. Run "
            "backward inside the documents block, pass documents= to the module through the checkpointed function, or "
            "put the checkpoint inside the compiled function"
        )


@torch.compiler.assume_constant_result
def refuse_unknown_batch(name: str) -> None:
    """Raise ``RuntimeError`` if a compiled module is compiled again for a recompute by a checkpoint around it, where no
    forward runs that could say which batch it is."""
    if in_recompute():
        raise RuntimeError(
            f"{name} is compiled, and activation checkpointing recomputes it after the forward of its model. A "
            "compiled graph cannot look for the batch of that forward, and would compute this rank's share only. "
            "Compile the layers that are checkpointed (model.gradient_checkpointing_enable() puts checkpoints inside "
            "of them), or do not compile this module"
        )


def _known(states: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Every element from the first of ``states`` in which it is not ambiguous."""
    return tuple(next((x for x in column if x is not _AMBIGUOUS), _AMBIGUOUS) for column in zip(*states, strict=True))


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a is b or (both and torch.equal(a, b))


def _record(checkpoint: Any) -> _Record:
    """The states of the calls in a checkpoint, which live as long as its graph."""
    if not hasattr(checkpoint, "hyper_cp_calls"):
        checkpoint.hyper_cp_calls = WeakKeyDictionary()
    record: _Record = checkpoint.hyper_cp_calls
    return record


def _checkpoints() -> Iterator[tuple[Any, bool]]:
    """The checkpoints that run in this thread, innermost first, and True for those that recompute. (A reentrant one
    comes before one with hooks: where both recompute, each knows the calls that it shares with the other.)"""
    for checkpoint, recomputation in _recomputations():
        yield checkpoint, recomputation is not None


def _recomputations(ended: bool = True) -> Iterator[tuple[Any, object]]:
    """The checkpoints that run in this thread, and an object for the recomputation that runs, None in a forward. (All
    those of one reentrant checkpoint in one backward have the same.) ``ended``: also reentrant ones that have
    recomputed, and are in the backward of what they made, where checkpoints inside of them recompute."""
    for frame in _reentrant_frames():
        # Before its inputs are there, what recomputes is the checkpoint that holds them.
        recomputes = "detached_inputs" in frame.f_locals and (ended or "outputs" not in frame.f_locals)
        if frame.f_code is _FORWARD or recomputes:
            yield frame.f_locals["ctx"], _number_of_backward() if frame.f_code is _BACKWARD else None
    yield from _frames()


def _frames() -> Iterator[tuple[Any, object]]:
    """:func:`_recomputations` of non-reentrant checkpoints."""
    for pack in _pack_hooks():
        for held in _closure(inspect.unwrap(pack)):
            target = held() if isinstance(held, ref) else held
            if isinstance(target, _CheckpointFrame):
                yield target, None if target is held else pack


def _pack_hooks() -> list[Callable[..., Any]]:
    """The saved-tensor hooks of this thread, from the top. Only the top can be read, so all are taken and put back."""
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    found: list[tuple[Any, Any]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append((top[0], top[1]))
        if disabled:  # none can be put back
            return [top[0]]
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(found):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in found]


def _closure(function: Any) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def _reentrant_frames() -> Iterator[FrameType]:
    """The frames of reentrant checkpoints, forward and backward, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _FORWARD or frame.f_code is _BACKWARD:
            yield frame
        frame = frame.f_back


def in_checkpoint() -> bool:
    """True inside an activation checkpoint of torch, in its forward or in a recompute."""
    return any(True for _ in _checkpoints())


def in_recompute() -> bool:
    """True inside a recompute of any kind of activation checkpointing."""
    return any(recomputation is not None for _, recomputation in _recomputations())


def repeats_gradients() -> bool:
    """True inside a recompute whose forward had gradients, too: that of a non-reentrant checkpoint."""
    return any(recomputation is not None for _, recomputation in _frames())


def _number_of_backward() -> int:
    """The number of the backward that this thread runs, another one each time; -1: it runs none."""
    return torch._C._current_graph_task_id()  # which torch.utils.checkpoint asks for, too


def in_backward() -> bool:
    """True in a thread that runs backward."""
    return _number_of_backward() != -1


def in_foreign_recompute() -> bool:
    """True in a backward of this thread, in which no activation checkpointing of torch recomputes: a forward that runs
    now is a recompute by other code."""
    return in_backward() and not in_recompute()


def in_function_forward() -> bool:
    """True inside the forward of an autograd function, as that of a reentrant checkpoint, torch's or other code's: what
    runs there has no graph, and backward is what the function makes it."""
    if torch.is_grad_enabled():
        return False
    forwards = {getattr(function.forward, "__code__", None) for function in _subclasses(torch.autograd.Function)}
    return any(frame.f_code in forwards for frame, _ in traceback.walk_stack(inspect.currentframe()))


def _subclasses(of: Any) -> Iterator[Any]:
    for found in of.__subclasses__():
        yield found
        yield from _subclasses(found)
