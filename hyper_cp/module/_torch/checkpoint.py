"""What a call of a styled module was told, remembered for its recompute by activation checkpointing.

A recompute runs in backward: maybe after the block that said which documents or which mesh are in force, maybe in
another one. So the facts of a call are kept with each checkpoint that it runs in, and a recompute finds them there.

torch has no public way to ask which checkpoint is running. Its Python frames are looked at instead (the same in torch
2.11 and 2.13). Where that finds nothing (checkpoints of other libraries, the composable one, compiled modules), a
non-reentrant recompute with other facts than its forward had is an error of the engine, and a reentrant one is not
noticed: there the engine sees the recompute only.
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


def settle(owner: object, facts: tuple[Any, ...]) -> Any:
    """The facts that a call of ``owner`` goes by: those it had in forward, if this is a recompute, else the ones
    given, which are remembered then."""
    if torch.compiler.is_compiling():
        return facts
    new: list[_Memory] = []
    for memory, recomputes in _checkpoints():
        if not recomputes:
            new.append(memory)
        elif owner in memory:
            # Ambiguous: the blocks that say so are inside the checkpoint, and have been entered again.
            known = zip(facts, memory[owner], strict=True)
            facts = tuple(now if then is _AMBIGUOUS else then for now, then in known)
            break
    for memory in new:
        before = memory.setdefault(owner, facts)
        # Called again in one checkpoint, with other facts.
        memory[owner] = tuple(a if _same(a, b) else _AMBIGUOUS for a, b in zip(before, facts, strict=True))
    return facts


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a is b or (both and torch.equal(a, b))


_Memory = WeakKeyDictionary[object, Any]


def _checkpoints() -> Iterator[tuple[_Memory, bool]]:
    """The memories of the checkpoints that are on the stack, innermost first, and whether each is recomputing."""
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
    """What lives as long as a checkpoint's graph, and is the same object in forward and recompute."""
    if function == "checkpoint" and "gen" in names:
        generator = names["gen"].gi_frame
        return (None if generator is None else generator.f_locals.get("new_frame")), False
    if function == "unpack_hook":
        return names.get("frame"), True
    if function in ("forward", "backward") and "ctx" in names:  # reentrant
        return names["ctx"], function == "backward"
    return None, False
