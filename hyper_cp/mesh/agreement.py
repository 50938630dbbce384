"""The ranks of a mesh compare the arguments of their calls: only new ones, and each once.

Ranks that call with different shapes or documents would hang in a transfer, or mix up positions. So each rank compares
its *signature*, pairs of a field's name and value, with the others before anything travels, and records it once all
agree. From then on a call with that signature looks it up in a dictionary, without communication.

The ranks compare in the store behind the default process group, which needs no device and no backend for the CPU
(``init_process_group("nccl")`` has none). A small collective on the group of the data would be shorter, and wrong: a
rank whose signature is old goes straight on to its transfer, and a comparison that meets a transfer on one group
hangs without an end, or exchanges garbage. Waiting on a store ends after a time limit, and says who is missing.

Two things are compared, but not recorded. Values that may change with every call (a
scale) are compared with the first signature that they come with. And each rank counts the signatures it has looked up
since the last comparison, and digests their order: if ranks have made other calls meanwhile, each of which they had
agreed on before, the next comparison raises.

A comparison is one round of four requests of each rank: write its entry, check for all entries until they are there,
read them, delete its entry of the round before (all ranks have read that one, since they have come to this one).
A rank that gives up withdraws its entry and stays in the round: a later call of all ranks finds them all in one round.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import record
from .failures import TransferError
from .groups import NO_STORE

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, Hashable], ...]

Details = Callable[[], dict[str, str]]
_HISTORY, _TOKENS = "calls before", "tokens"
_FACTOR, _BITS = 1_000_003, 2**61 - 1

TIMEOUT = 600.0
"""Seconds that a rank waits for the others, or less if the timeout of ``init_process_group`` (which is that of its
store) is less; the environment variable ``HYPER_CP_AGREE_TIMEOUT`` overrides both. As long as a slow data loader or a
compilation on another rank may take; after ``PATIENCE`` a warning says who is missing."""
PATIENCE = 30.0
MOST_DIGESTS = 16
"""Batches of a style that are read for a comparison that does not come."""
RECORDED = 4096
"""Signatures of one kind that are recorded; the oldest is dropped, which is the same one on every rank."""

_WITHDRAWN = ""
"""The entry of a rank that has given up."""

_NAMES = {
    "call": "attention call",
    "documents": "packed documents",
    "blocks": "block masks",
    "plan": "styled modules",
    "groups": "process groups",
    "gradients": "requires_grad of their tensors",
    "angles": "angles of a position, which are made",
}
"""The names of kinds and fields in errors."""
REMEDY = {
    "shapes": "Every rank holds an equal share of one sequence: shard the batch with ContextParallelHandler.dispatch, "
    "which pads (pad_value=) lengths that do not split evenly",
    "documents": "Enter the same documents block on every rank, with global cumulative lengths",
    "gradients": "A rank without them takes no part in the transfers of the backward. Use a trainable module (a "
    "projector of images, an expert) in a frozen model on every rank, where its tokens are on other ranks too: add 0 * "
    "p.sum() of its parameters p to its output or to the hidden states",
    "block mask": "Build the block_mask of flex_attention for the global sequence, from the same functions, on every "
    "rank",
    "weights": "The ranks of a cp mesh hold the same weights: seed them alike, load the same checkpoint, or broadcast "
    "the parameters (DDP does). For parameters that differ on purpose, pass the names of their modules as "
    "ContextParallel(allow=...)",
    "batch": "The ranks of a cp mesh share one batch: give their data loaders the same seed and the same rank of data "
    "parallelism, draw noise with one seed, and pass whole batches, which are split here",
    "number of process groups": "PyTorch names a new group after the number of groups that its rank is in, and "
    "ranks with other names never meet. Make the same number of groups with each rank of the cp mesh, or apply the "
    "styles before you make the others",
    "steps": "Plan the lengths of the whole global batch on every rank, and run every step on every rank: "
    "one without a micro-batch too, whose loss is 0",
    "angles": "If they depend on the longest position, give the module the attribute rope_type = 'dynamic': it then "
    "gets the last position of the sequence behind its position_ids. Otherwise make them of each position by itself, "
    "or of the length of the whole sequence",
    "degrees": "Call split_cp_mesh with the same degrees on every rank",
    "styled modules": "Apply one plan, with equal styles, to the same model on every rank",
}
_DIGESTS = ("documents", "block mask", "weights", "batch")
"""Fields whose values are hashes: errors name the ranks instead."""
_SAME_CALLS = "Apply the same styles on every rank, and make the same attention calls in the same order"


class Agreement:
    """The signatures that the ranks of one mesh have agreed on. All views of the mesh share it."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, shape: Sequence[int] = ()) -> None:
        """``ranks``: global ranks of the mesh; ``rank``: this one's place among them; ``shape``: of the mesh."""
        self.ranks, self.rank = list(ranks), rank
        self._agreed: dict[str, dict[Signature, int]] = {}
        """Signatures by kind, each with a number, which is the same on every rank."""
        self._number = self._calls = self._order = 0
        """The number of the last signature; how many were looked up since the last comparison, and their order."""
        self._plans: tuple[int, Callable[[], object]] = 0, lambda: None
        """The number of plans that this rank has applied on the mesh, and the model of the last one."""
        self._tokens: dict[str, tuple[str, ...]] = {}
        """Digests of the batches that not all ranks have compared yet, by the style of their handler, and training."""
        self._compared: set[str] = set()
        """The names in ``_tokens`` of which the ranks have compared a batch."""
        self._styles: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The styles of handlers, numbered."""
        self._next_style = itertools.count()
        self._grad_modes: set[bool] = set()
        """True if the ranks have compared a call with gradients, False if one without."""
        self._round, self._lock, self._compare_next = 0, threading.Lock(), False
        self._limit = store.timeout.total_seconds()
        # Entries of an earlier mesh of the same ranks may be left in the store, so every rank counts its own meshes.
        # It counts those of each shape apart: ranks may come to meshes of different shapes in different orders.
        identity = repr((self.ranks, tuple(shape)))
        mesh = f"hyper_cp/{digest(identity.encode())}"
        number = store.add(f"{mesh}/meshes/{rank}", 1)
        self._store = dist.PrefixStore(f"{mesh}/{number}", store)  # type: ignore[attr-defined]

    @staticmethod
    def between(ranks: Sequence[int], groups: Sequence[Any]) -> Agreement | None:
        """The agreement of a new mesh of these global ranks, over these groups; None if nothing can be compared."""
        world = dist.group.WORLD
        if len(ranks) == 1 or world is None or any(dist.get_backend(g) in NO_STORE for g in (world, *groups)):
            return None
        shape = [dist.get_world_size(g) for g in groups]
        return Agreement(world.get_group_store(), ranks, list(ranks).index(dist.get_rank()), shape)

    def compare_tokens_later(self, tokens: Tensor, style: object | None = None) -> None:
        """Compare a batch's integers with the next call that is compared, if no batch was on this mesh, or none of the
        handlers of a style in training or in evaluation, whose samplers are others.

        Not at once: a data loader's thread may split batches at other times on other ranks. And not those of the
        second style in such a thread: the order of several threads differs between ranks.
        """
        in_turn = threading.current_thread() is threading.main_thread()
        name = "first"
        if in_turn and style is not None:
            if style not in self._styles:
                self._styles[style] = next(self._next_style)
            name = f"{self._styles[style]}, {'training' if torch.is_grad_enabled() else 'evaluation'}"
        others = self._compared or (self._tokens.keys() - {name} if in_turn else self._tokens)
        if name in self._compared or (name == "first" and others):
            return
        if type(tokens) is not Tensor or tokens.is_meta:  # fakes have no values
            return
        if tokens.numel() and not (tokens.is_floating_point() or tokens.dtype == torch.bool):
            known = self._tokens.get(name, ())
            if len(known) == MOST_DIGESTS:  # no call comes to compare them, and each digest waits for the device
                del self._tokens[name]
                self._compared.add(name)
            else:
                self._tokens[name] = (*known, digest_of_tensor(tokens))

    def number_of_plan(self, model: object) -> int:
        """The number, among the plans of this mesh, of the one that is being applied to ``model``."""
        number, last = self._plans
        if last() is not model:
            self._plans = number + 1, ref(model)
        return self._plans[0]

    def compare_next_call(self) -> None:
        """Compare the next call even if it is known: an op of this rank has raised, and other ranks may still be in it.

        A transfer of the next call would meet those of that op. If all ranks have raised, they agree, and go on.
        """
        self._compare_next = True
        self._calls = self._order = 0

    def known(self, kind: str, signature: Signature) -> bool:
        """True if the ranks have agreed on ``signature``."""
        return signature in self._agreed.get(kind, ())

    def compare_if_new(
        self,
        kind: str,
        signature: Signature,
        mesh: object,
        caller: str,
        once: Signature = (),
        details: Details = dict,
        always: bool = False,
    ) -> None:
        """See :meth:`CPMesh.agree`; errors print ``mesh``."""
        agreed = self._agreed.setdefault(kind, {})
        number = agreed.get(signature)
        if number is not None and not self._due(kind, always):
            self._calls += 1
            self._order = (self._order * _FACTOR + number) & _BITS
            return
        with self._lock:
            if signature in agreed and not self._due(kind, always):  # another thread has been faster
                return
            mine = {"kind": kind} | {name: _text(value) for name, value in (*signature, *once)}
            history = f"{self._calls}/{self._order:x}"
            # With a call, or (they may all be known) with another model than the first one.
            sent = kind == "call" or (kind == "weights" and bool(self._agreed.get("call")))
            tokens = json.dumps(self._tokens.copy() if sent else {})
            entries = self._exchange(mine | {_HISTORY: history, _TOKENS: tokens}, mesh, caller)
            self._calls = self._order = 0  # also after a disagreement: all ranks begin anew
            try:
                compared = self._check_alike(mine, entries, history, details, mesh, caller)
            except ValueError:  # on all ranks: what runs again after it compares its batches again
                self._tokens, self._grad_modes = {}, set()
                self._compared = {"first"}  # threads of loaders may be at other batches by now
                raise
            self._compared |= compared
            self._tokens = {name: x for name, x in self._tokens.copy().items() if name not in compared}
            if kind == "call":
                self._grad_modes.add(torch.is_grad_enabled())
            self._compare_next = False
            if signature in agreed:
                return
            self._number += 1
            agreed[signature] = self._number
            if len(agreed) > RECORDED:
                del agreed[next(iter(agreed))]

    def _due(self, kind: str, always: bool) -> bool:
        """True if a call is compared although it is known. All ranks decide alike: the first call of an evaluation is,
        whose batch no other call may come to compare."""
        return always or self._compare_next or (kind == "call" and torch.is_grad_enabled() not in self._grad_modes)

    def _check_alike(
        self,
        mine: dict[str, str],
        entries: list[dict[str, str]],
        history: str,
        details: Details,
        mesh: object,
        caller: str,
    ) -> set[str]:
        """Raise ``ValueError`` unless all ranks have sent one entry, one batch of each name, and one history. Returns
        the names of the batches that all ranks have sent."""
        histories = [entry.pop(_HISTORY) for entry in entries]
        batches = [json.loads(entry.pop(_TOKENS)) for entry in entries]
        if any(entry != mine for entry in entries):
            first = self._first_difference(entries, details, mesh, caller)
            raise ValueError(_disagreement(entries, mesh, caller, first))
        compared = set.intersection(*(set(batch) for batch in batches))  # a rank may have split none by itself
        for name in sorted(compared):
            # The last batch of a rank that all have split: another rank may have split one by itself, to print it.
            shared = set.intersection(*(set(batch[name]) for batch in batches))
            if shared.isdisjoint(batch[name][-1] for batch in batches):
                found = [{"kind": mine["kind"], "batch": batch[name][-1]} for batch in batches]
                raise ValueError(_disagreement(found, mesh, caller))
        if any(other != history for other in histories):
            raise ValueError(_other_histories(histories, mesh, caller))
        return compared

    def _first_difference(
        self, entries: list[dict[str, str]], details: Details, mesh: object, caller: str
    ) -> tuple[str, list[str]] | None:
        """The first of the details that differs, and its value on each rank. They are exchanged only where ranks are
        known to disagree, so they may be long."""
        kinds = {entry["kind"] for entry in entries}
        if details is dict or len(kinds) > 1:  # every rank decides alike: a kind has details, or has none
            return None
        more = self._exchange({"kind": kinds.pop()} | details(), mesh, caller)
        for name in dict.fromkeys(name for entry in more for name in entry):
            values = [entry.get(name, "none") for entry in more]
            if len(set(values)) > 1:
                return name, values
        return None

    def _exchange(self, mine: dict[str, str], mesh: object, caller: str) -> list[dict[str, str]]:
        """The entries of all ranks."""
        keys = [f"{self._round}/{rank}" for rank in range(len(self.ranks))]
        entry = json.dumps(mine)
        record("agreement", len(entry))
        purpose = f"{caller}: rank {self.rank} of the {mesh} compares its {_name(mine['kind'])}"
        try:
            self._store.set(keys[self.rank], entry)
            entries = self._wait(keys, purpose)
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be what has failed
                self._store.set(keys[self.rank], _WITHDRAWN)
            if isinstance(error, dist.DistError):
                raise TransferError(
                    f"{purpose} in the store of the default process group, which fails: {error}. The process that "
                    "keeps the store (rank 0, or torchrun's agent) has ended. Read the first rank's error"
                ) from error
            raise
        if self._round:
            self._store.delete_key(f"{self._round - 1}/{self.rank}")
        self._round += 1
        return [json.loads(entry) for entry in entries]

    def _wait(self, keys: list[str], purpose: str) -> list[bytes]:
        """The values of all keys as soon as all are there."""
        limit = float(os.environ.get("HYPER_CP_AGREE_TIMEOUT", min(TIMEOUT, self._limit)))
        started, warned = time.monotonic(), False
        # In short requests: Store.wait would keep other threads from the store, and torch warns when it times out.
        while not (self._store.check(keys) and all(entries := self._store.multi_get(keys))):
            waited = time.monotonic() - started
            # None is missing where the last of them has come since the check.
            if waited >= limit and (missing := self._missing(keys)):
                raise RuntimeError(
                    f"{self._absence(missing, purpose, waited)}. HYPER_CP_AGREE_TIMEOUT sets the seconds"
                )
            if waited >= PATIENCE and not warned and (missing := self._missing(keys)):
                logger.warning("%s. Waiting for up to %.0f seconds", self._absence(missing, purpose, waited), limit)
                warned = True
            time.sleep(min(0.05, max(0.0002, waited / 8)))
        return entries

    def _missing(self, keys: list[str]) -> list[int]:
        """The ranks that have not written their entry, or have withdrawn it."""
        return [r for r, key in enumerate(keys) if not (self._store.check([key]) and self._store.get(key))]

    def _absence(self, missing: list[int], purpose: str, waited: float) -> str:
        return (
            f"{purpose}, but ranks {missing} (global ranks {[self.ranks[r] for r in missing]}) have not come to "
            f"compare theirs in {waited:.0f} seconds. Their call hangs, has raised an error, is compiled (where this "
            "rank has met torch._dynamo.config.recompile_limit, and runs it in eager mode), or they make other calls "
            f"than this rank. Look for their first error. {_SAME_CALLS}"
        )


def digest_of_tensor(x: Tensor) -> str:
    """A digest of the shape, the dtype and up to 512 values of a tensor, the same in every process."""
    flat = x.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 256) | 1].cpu().contiguous().view(torch.uint8)
    return digest(f"{tuple(x.shape)} {x.dtype}".encode() + bytes(sample.tolist()))


def digest(data: bytes) -> str:
    """A hash of bytes as 16 characters, the same in every process."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _name(word: str) -> str:
    return _NAMES.get(word, word)


def _text(value: Hashable) -> str:
    """A value as other ranks read it, the same in every process; tuples inside a tuple without its brackets."""
    if isinstance(value, tuple):  # torch.Size too
        inside = ", ".join(map(_text, value))
        return inside if value and all(isinstance(x, tuple) for x in value) else f"({inside})"
    return str(value)


def _other_histories(histories: list[str], mesh: object, caller: str) -> str:
    """The error's text where ranks agree on this call, but have made other calls before."""
    odd = [rank for rank, history in enumerate(histories) if history != histories[0]]
    counts = [int(history.split("/")[0]) for history in histories]
    if len(set(counts)) > 1:
        found = "; ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        how = f"another number of them (signatures looked up: {found})"
    else:
        how = "others, or in another order"
    return (
        f"{caller}: since the ranks of the {mesh} last compared their attention calls, ranks {odd} have made {how} "
        f"than rank 0. Results since then are wrong, because each call attended with another call's keys. {_SAME_CALLS}"
    )


def _disagreement(
    entries: list[dict[str, str]], mesh: object, caller: str, first: tuple[str, list[str]] | None = None
) -> str:
    """The error's text: the fields that differ, who has what, and what to do."""
    kinds = [entry["kind"] for entry in entries]
    if len(set(kinds)) > 1:
        table = "; ".join(f"rank {rank} compares its {_name(kind)}" for rank, kind in enumerate(kinds))
        return f"{caller}: the ranks of the {mesh} make different calls: {table}. {_SAME_CALLS}"
    fields = dict.fromkeys(name for entry in entries for name in entry)
    differ = [name for name in fields if len({entry.get(name) for entry in entries}) > 1]
    names, batch = " and ".join(map(_name, differ)), kinds[0] == "batch"
    does = {
        "batch": "split batches that differ in",
        "groups": "make process groups with different",
        "steps": "run different",
    }
    found = f"{does.get(kinds[0], 'call attention with different')} {names}"
    start = f"{caller}: the ranks of the {mesh} {found}: "
    remedy = REMEDY["batch" if batch else differ[0]] if batch or differ[0] in REMEDY else _SAME_CALLS
    if first is not None and differ[0] not in _DIGESTS:
        table = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(first[1]))
        return f"{start}{first[0]} ({table}). {remedy}"
    if batch or set(differ) <= set(_DIGESTS):
        odd = [rank for rank, entry in enumerate(entries) if entry != entries[0]]
        which = f", first in {first[0]}" if first is not None else ""
        return f"{start}ranks {odd} have others (or none) than rank 0{which}. {remedy}"

    def of(entry: dict[str, str]) -> str:
        values = {name: entry.get(name, "none") for name in differ}
        return ", ".join(values.values() if len(differ) == 1 else (f"{name}={v}" for name, v in values.items()))

    return start + "; ".join(f"rank {rank}: {of(entry)}" for rank, entry in enumerate(entries)) + f". {remedy}"
