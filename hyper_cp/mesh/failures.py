"""Errors of transfers, in terms of the operation, the module and the ranks, and the end of what else is in flight.

A rank that ends, hangs or raises an error leaves the others in a transfer, and their backend raises an error about a
socket. Every transfer is posted and waited for inside a :class:`Transfer`, which raises :class:`TransferError` from
that error. It finds the operation, the module and the mesh in its thread: ops enter an :class:`operation`, and calls
of modules enter :func:`calling`. Both only push and pop; the text is made when something has failed.

With NCCL's defaults waiting raises nothing: its watchdog ends the process after the timeout (docs/measured/devices.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .._torch.compiling import is_compiling
from .batch_state import BatchState


class TransferError(dist.DistError):
    """A transfer failed, because of another rank or the network. The backend's own error is its ``__cause__``."""


class Caller(NamedTuple):
    """A call of a module, or of a function in place of one."""

    name: str
    backward: bool = False


class Mesh(Protocol):
    """The part of :class:`~hyper_cp.mesh.cp_mesh.CPMesh` that an error needs; ``str`` describes it."""

    @property
    def batch(self) -> BatchState: ...

    @property
    def agreement(self) -> Any: ...


class _Thread(threading.local):
    """The state of this thread: calls and operations, innermost last, and the transfers that nobody has waited for."""

    def __init__(self) -> None:
        self.callers: list[Caller | None] = []
        self.operations: list[operation] = []
        self.pending: dict[Any, None] = {}


here = _Thread()


def caller() -> Caller | None:
    """The call that runs in this thread; None in a compiled graph, which does not say whose ops it runs."""
    return here.callers[-1] if here.callers else None


def calling(name: str) -> AbstractContextManager[None]:
    """The context of a module's call, by the name that errors use. (Ops of a compiled graph run outside of it.)"""
    return nullcontext() if is_compiling() else _Calling(Caller(name))


def backward_of(forward: Caller | None) -> AbstractContextManager[None]:
    """The context of the backward of an op, given the :func:`caller` in its forward."""
    return _Calling(None if forward is None else Caller(forward.name, True))


class _Calling(AbstractContextManager[None]):
    __slots__ = ("caller",)

    def __init__(self, caller: Caller | None) -> None:
        self.caller = caller

    def __enter__(self) -> None:
        here.callers.append(self.caller)

    def __exit__(self, *_: object) -> None:
        here.callers.pop()


class operation:
    """Context of one op on a mesh. If it raises, what it has posted is waited for: buffers must outlive transfers, and
    a process group with transfers that nobody waits for cannot be used again. The ranks then compare their next call,
    since others may not have raised."""

    __slots__ = ("before", "mesh", "name", "step")

    def __init__(self, mesh: Mesh, name: str, step: str = "") -> None:
        """``step``: forward or backward, if the op is only used in one of them."""
        self.mesh, self.name, self.step = mesh, name, step

    def __enter__(self) -> operation:
        self.mesh.batch.mark_ran()
        self.before = tuple(here.pending)
        here.operations.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        here.operations.pop()
        if error is None:
            return
        if self.mesh.agreement is not None:
            self.mesh.agreement.compare_next_call()
        for pending in [p for p in here.pending if p not in self.before]:
            # After a failed transfer others may fail too, each after the timeout. The group is lost: do not wait.
            if isinstance(error, TransferError):
                del here.pending[pending]
                continue
            try:
                pending.arrive()
            except TransferError as failed:  # what the op raised comes first: it may be the cause
                error = error if isinstance(error, TransferError) else failed


class Transfer:
    """One transfer on a process group. A context around the call that posts it, and around the waits for it."""

    __slots__ = ("at", "group", "name", "peers", "works")

    def __init__(self, group: Any, name: str, peers: Sequence[int] | None = None) -> None:
        """``peers``: the ranks in the group that it goes to and comes from, None for all others; if there are as many
        as works, each is that of one work."""
        self.group, self.name, self.peers = group, name, peers
        self.works = self.at = 0
        """The number of works that are waited for, and which one it is."""

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (TransferError, *_OWN)):
            raise TransferError(self._text(error)) from error

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for all works."""
        with self:
            self.works = len(works)
            for self.at, work in enumerate(works):
                work.wait()

    def _text(self, error: RuntimeError) -> str:
        found = caller()
        where = f"{running(here.operations[-1].mesh)}: " if here.operations else f"{found.name}: " if found else ""
        return f"{where}{self.name} {self._ranks()} failed: {_first_line(error)}. {_ADVICE}"

    def _ranks(self) -> str:
        try:
            ranks = dist.get_process_group_ranks(self.group)
        except (KeyError, RuntimeError, ValueError):
            return "in a process group that is gone"
        own = dist.get_rank()
        peers = [ranks[i] for i in range(len(ranks)) if ranks[i] != own] if self.peers is None else self._peers(ranks)
        return f"between this rank ({own}) and global rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"

    def _peers(self, ranks: Sequence[int]) -> list[int]:
        assert self.peers is not None  # for mypy
        if self.works == len(self.peers) > 0:
            return [ranks[self.peers[self.at]]]
        return sorted({ranks[i] for i in self.peers})


_OWN = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError), NotImplementedError)
"""Errors of this rank's own device, which a transfer may be the first to report, and of what a backend cannot do."""

_ADVICE = (
    "A peer has ended, hangs or has raised an error, and this rank only waited for it. Read the first rank's error: "
    "the earliest one in the logs of all ranks that is not about a transfer. If there is none, a rank was killed, or "
    "it makes other calls; if a rank is merely slow, raise the timeout of init_process_group"
)


def running(mesh: Mesh) -> str:
    """The call and the operation that this thread is in, on which mesh and in which batch."""
    inner, found = here.operations[-1] if here.operations else None, caller()
    step = (inner.step if inner else "") if found is None else "backward" if found.backward else "forward"
    name = "" if found is None or (inner and inner.name == found.name) else f"{found.name}: "
    batches = mesh.batch.batches
    count = f", in batch {batches} of this rank" if batches else ""
    return f"{name}{inner.name if inner else 'a call'}{step and f' in {step}'} on the {mesh}{count}"


def _first_line(error: BaseException) -> str:
    """The error of a backend without gloo's advice."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.partition(" This is typically caused by")[0].rstrip(".")
