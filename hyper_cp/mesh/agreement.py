"""Comparison of what the ranks of a mesh bring to a call: only what is new, and each thing once.

Ranks that bring different shapes or documents would hang in a transfer, or mix up positions. So each rank compares its
*signature*, pairs of a field's name and value, with the others before anything travels, and records it once all agree.
From then on a call with that signature looks it up in a dictionary and asks nobody.

The ranks compare in the store behind the default process group, which needs no device and no backend for the CPU
(``init_process_group("nccl")`` has none). A small collective on the group of the data would be shorter, and wrong: a
rank whose signature is old goes straight on to its transfer, and a comparison that meets a transfer on one group
hangs without an end, or exchanges garbage. Waiting on a store ends after a time limit, and says who is missing.

A comparison is one round of four requests of each rank: set the own entry, check for all entries until they are there,
read them, delete the own entry of the round before (all ranks have read that one, since they have come to this one).
A rank that gives up withdraws its entry and stays in the round: a later call of all ranks finds them all in one round.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from .comm import record

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, Hashable], ...]

TIMEOUT = 600.0
"""Seconds that a rank waits for the others; the environment variable ``HYPER_CP_AGREE_TIMEOUT`` overrides it. As long
as a slow data loader or a compilation on another rank may take; after ``PATIENCE`` a warning says who is missing."""
PATIENCE = 30.0
RECORDED = 4096
"""Signatures of one kind that are recorded; the oldest is dropped, which is the same one on every rank."""

_NO_STORE = ("fake", "mpi")
"""Backends whose groups have no store with the other ranks behind it: nothing is compared there."""

_WITHDRAWN = ""
"""The entry of a rank that has given up."""

_NAMES = {"call": "attention call", "documents": "packed documents"}
"""Names that errors use for kinds and fields."""
_REMEDY = {
    "shapes": "Every rank holds an equal share of one sequence: shard the batch with ContextParallelHandler.dispatch, "
    "which pads (pad_value=) lengths that do not split evenly",
    "documents": "Enter the same documents block on every rank, with global cumulative lengths",
}
_SAME_CALLS = "Apply the same styles on every rank, and make the same attention calls in the same order"


class Agreement:
    """The signatures that the ranks of one mesh have agreed on. All views of the mesh share it."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, shape: Sequence[int] = ()) -> None:
        """``ranks``: global ranks of the mesh; ``rank``: this one's place among them; ``shape``: of the mesh."""
        self.ranks, self.rank = list(ranks), rank
        self._agreed: dict[str, dict[Signature, None]] = {}
        self._round, self._lock = 0, threading.Lock()
        # Entries of an earlier mesh of the same ranks may be left in the store, so every rank counts its own meshes.
        # It counts those of each shape apart: ranks may come to meshes of different shapes in different orders.
        identity = repr((self.ranks, tuple(shape)))
        mesh = f"hyper_cp/{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"
        number = store.add(f"{mesh}/meshes/{rank}", 1)
        self._store = dist.PrefixStore(f"{mesh}/{number}", store)  # type: ignore[attr-defined]

    @staticmethod
    def between(ranks: Sequence[int], groups: Sequence[Any]) -> Agreement | None:
        """The agreement of a new mesh of these global ranks, over these groups; None if there is nobody to ask."""
        world = dist.group.WORLD
        if len(ranks) == 1 or world is None or any(dist.get_backend(g) in _NO_STORE for g in (world, *groups)):
            return None
        shape = [dist.get_world_size(g) for g in groups]
        return Agreement(world.get_group_store(), ranks, list(ranks).index(dist.get_rank()), shape)

    def reach(self, kind: str, signature: Signature, mesh: object, caller: str) -> None:
        """See :meth:`CPMesh.agree`; ``mesh`` describes itself in errors."""
        agreed = self._agreed.setdefault(kind, {})
        if signature in agreed:
            return
        with self._lock:
            if signature in agreed:  # another thread has been faster
                return
            mine = {"kind": kind} | {name: _text(value) for name, value in signature}
            everyone = self._exchange(mine, mesh, caller)
            if any(theirs != mine for theirs in everyone):
                raise ValueError(_disagreement(everyone, mesh, caller))
            agreed[signature] = None
            if len(agreed) > RECORDED:
                del agreed[next(iter(agreed))]

    def _exchange(self, mine: dict[str, str], mesh: object, caller: str) -> list[dict[str, str]]:
        """The entries of all ranks."""
        keys = [f"{self._round}/{rank}" for rank in range(len(self.ranks))]
        entry = json.dumps(mine)
        record("agreement", len(entry))
        self._store.set(keys[self.rank], entry)
        try:
            entries = self._wait(keys, f"{caller}: rank {self.rank} of the {mesh} compares its {_name(mine['kind'])}")
        except BaseException:
            with suppress(RuntimeError):  # the store may be what has failed
                self._store.set(keys[self.rank], _WITHDRAWN)
            raise
        if self._round:
            self._store.delete_key(f"{self._round - 1}/{self.rank}")
        self._round += 1
        return [json.loads(entry) for entry in entries]

    def _wait(self, keys: list[str], purpose: str) -> list[bytes]:
        """The values of all keys as soon as all are there."""
        limit, started, warned = float(os.environ.get("HYPER_CP_AGREE_TIMEOUT", TIMEOUT)), time.monotonic(), False
        # In short requests: Store.wait would keep other threads from the store, and torch warns when it times out.
        while not (self._store.check(keys) and all(entries := self._store.multi_get(keys))):
            waited = time.monotonic() - started
            if waited >= limit:
                raise RuntimeError(f"{self._absence(keys, purpose, waited)}. HYPER_CP_AGREE_TIMEOUT sets the seconds")
            if waited >= PATIENCE and not warned:
                logger.warning("%s. Waiting for up to %.0f seconds", self._absence(keys, purpose, waited), limit)
                warned = True
            time.sleep(min(0.05, max(0.0002, waited / 8)))
        return entries

    def _absence(self, keys: list[str], purpose: str, waited: float) -> str:
        missing = [r for r, key in enumerate(keys) if not (self._store.check([key]) and self._store.get(key))]
        return (
            f"{purpose}, but ranks {missing} (global ranks {[self.ranks[r] for r in missing]}) have not come to "
            f"compare theirs in {waited:.0f} seconds. Their call hangs, has raised an error, or they make other calls "
            f"than this rank. Look for their first error. {_SAME_CALLS}"
        )


def _name(word: str) -> str:
    return _NAMES.get(word, word)


def _text(value: Hashable) -> str:
    """A value as other ranks read it, the same in every process; tuples inside a tuple without its brackets."""
    if isinstance(value, tuple):  # torch.Size too
        inside = ", ".join(map(_text, value))
        return inside if value and all(isinstance(x, tuple) for x in value) else f"({inside})"
    return str(value)


def _disagreement(everyone: list[dict[str, str]], mesh: object, caller: str) -> str:
    """The error's text: the fields that differ, who has what, and what to do."""
    kinds = [theirs["kind"] for theirs in everyone]
    if len(set(kinds)) > 1:
        table = "; ".join(f"rank {rank} compares its {_name(kind)}" for rank, kind in enumerate(kinds))
        return f"{caller}: the ranks of the {mesh} make different calls: {table}. {_SAME_CALLS}"
    fields = dict.fromkeys(name for theirs in everyone for name in theirs)
    differ = [name for name in fields if len({theirs.get(name) for theirs in everyone}) > 1]
    names = " and ".join(map(_name, differ))
    start = f"{caller}: the ranks of the {mesh} call attention with different {names}: "
    remedy = _REMEDY.get(differ[0], _SAME_CALLS)
    if differ == ["documents"]:  # digests, which tell a reader nothing
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        return f"{start}ranks {odd} have others (or none) than rank 0. {remedy}"

    def of(theirs: dict[str, str]) -> str:
        values = {name: theirs.get(name, "none") for name in differ}
        return ", ".join(values.values() if len(differ) == 1 else (f"{name}={v}" for name, v in values.items()))

    return start + "; ".join(f"rank {rank}: {of(theirs)}" for rank, theirs in enumerate(everyone)) + f". {remedy}"
