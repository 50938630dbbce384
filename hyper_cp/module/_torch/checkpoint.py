"""The batch state of a call, recorded for its recompute by activation checkpointing.

A recompute runs in backward: perhaps after the block that set the documents or the mesh has ended, perhaps inside
another one. So the state of a call is recorded with each checkpoint that the call runs in, and a recompute finds it
there.

Needs the Python frames of ``torch.utils.checkpoint``: torch has no public way to ask which checkpoint is running. The
same in torch 2.11 and 2.13. Where nothing is found (checkpoints of other libraries, the composable one, compiled
modules), the engine raises in a non-reentrant recompute whose state differs from that of its forward, and cannot detect
it in a reentrant one: there it sees the recompute only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import checkpoint as _checkpoint

_FILE = _checkpoint.__file__
_AMBIGUOUS = object()


def batch_state(owner: object, state: tuple[Any, ...]) -> Any:
    """The batch state for a call of ``owner``: that of its forward if this is a recompute, else ``state``, which is
    recorded."""
    if torch.compiler.is_compiling():
        return state
    new: list[_Record] = []
    for record, recomputes in _checkpoints():
        if not recomputes:
            new.append(record)
        elif owner in record:
            # Ambiguous: the blocks that set the state are inside the checkpoint, and have been entered again.
            pairs = zip(state, record[owner], strict=True)
            state = tuple(now if then is _AMBIGUOUS else then for now, then in pairs)
            break
    for record in new:
        before = record.setdefault(owner, state)
        # Called again in one checkpoint, with another state.
        record[owner] = tuple(a if _same(a, b) else _AMBIGUOUS for a, b in zip(before, state, strict=True))
    return state


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a is b or (both and torch.equal(a, b))


_Record = WeakKeyDictionary[object, Any]


def _checkpoints() -> Iterator[tuple[_Record, bool]]:
    """The records of the checkpoints that are on the stack, innermost first, and True for those that recompute."""
    at = inspect.currentframe()
    while at is not None:
        if at.f_code.co_filename == _FILE:
            key, recomputes = _key(at.f_code.co_name, at.f_locals)
            if key is not None:
                if not hasattr(key, "hyper_cp_calls"):
                    key.hyper_cp_calls = WeakKeyDictionary()
                yield key.hyper_cp_calls, recomputes
        at = at.f_back


def _key(function: str, names: dict[str, Any]) -> tuple[Any, bool]:
    """An object that lives as long as a checkpoint's graph, and is the same in forward and recompute."""
    if function == "checkpoint" and "gen" in names:
        generator = names["gen"].gi_frame
        return (None if generator is None else generator.f_locals.get("new_frame")), False
    if function == "unpack_hook":
        return names.get("frame"), True
    if function in ("forward", "backward") and "ctx" in names:  # reentrant
        return names["ctx"], function == "backward"
    return None, False


def in_reentrant_forward() -> bool:
    """True inside the forward of a reentrant checkpoint of this thread."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _checkpoint.CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
