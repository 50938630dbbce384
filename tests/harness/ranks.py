"""A pool of gloo ranks that lives for the whole test run and runs functions that are marked with ``@on_ranks``.

Importing torch and starting processes for every test is what makes distributed suites slow. Here
ranks are forked from a server that has imported torch once (preload.py), and every job gets a fresh default
process group of exactly the ranks it asks for, so that nothing leaks from one test to the next.

    >>> @on_ranks
    ... def total(offset: int) -> int: ...
    >>> def test_total(ranks: Ranks) -> None:
    ...     assert ranks(2, total, 1) == [3, 3]  # one result per rank, in rank order
    ...     ranks.raises(2, ValueError, "offset", total, -1)  # on every rank
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Compiled graphs are looked up by the graph, in which the source of our ops' autograd does not show. (What inductor
# builds of C++ is looked up by its source, and is shared.)
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# Ranks share few cores: each compiles by itself, without a pool of processes of its own.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

GRACE = 5.0  # seconds the other ranks get after one has failed
MOST_THREADS = 160
"""A rank with more threads is replaced. PyTorch's caches of DTensors keep process groups alive beyond their job, and
each has threads of its own."""

Function = TypeVar("Function", bound=Callable[..., Any])


def on_ranks(fn: Function) -> Function:
    """Mark a function that runs on ranks: as a job of the pool, in processes that have a process group.

    It has to be at the top of its module, since ranks find it by its name; so do its arguments' classes. What it
    returns, and what it raises, comes back to the test, which does the asserting about more than one rank.
    """
    if fn.__qualname__ != fn.__name__:
        raise TypeError(f"{fn.__qualname__} is inside another object: ranks find functions at the top of a module only")
    fn.__on_ranks__ = True  # type: ignore[attr-defined]
    return fn


class RankError(AssertionError):
    """A job failed on at least one rank. ``types`` and ``messages`` hold, per failed rank, the
    exception's class name and text."""

    def __init__(self, text: str, types: dict[int, str], messages: dict[int, str]):
        super().__init__(text)
        self.types, self.messages = types, messages


# --------------------------------------------------------------------------- in a rank


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of the error of a call; empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def named_error(text: str) -> tuple[str, str]:
    """``("TypeError", "words")`` of ``"TypeError: words"``; words without a name are those of a ValueError."""
    name, found, words = text.partition("Error: ")
    return (f"{name}Error", words) if found and name.isidentifier() else ("ValueError", text)


def errors_of(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The errors of calls, by what :func:`named_error` takes of the error that each should raise."""
    return {expected: error_of(call) for expected, call in calls.items()}


def check_errors(of_ranks: list[dict[str, str]]) -> None:
    """Assert that the calls of :func:`errors_of` raised the errors that they should, on every rank."""
    for found in of_ranks:
        for expected, got in found.items():
            name, words = named_error(expected)
            assert got.startswith(f"{name}: ") and re.search(words, got, re.S), f"{got or 'no error'}\nfor {expected}"


def sum_over_ranks(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The sums of tensors of one dtype over all ranks of the job, in one transfer."""
    total = torch.cat([x.detach().flatten() for x in tensors])
    dist.all_reduce(total)
    parts = total.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _serve(
    conn: Connection, rank: int, port: int, stacks: str, backend: str, prepare: Callable[[], None] | None
) -> None:
    """Run jobs in a rank process until the pool closes its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack_file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it open for good)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _share_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    while True:
        try:
            job, world, payload = conn.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = ("ok", _run(store, backend, job, rank, world, payload))
            conn.send_bytes(pickle.dumps(outcome))
        except BaseException as error:
            text = traceback.format_exc()
            conn.send_bytes(pickle.dumps(("error", (type(error).__name__, str(error), text))))
            if isinstance(error, RankEnds):
                return


class RankEnds(RuntimeError):
    """An error with which a rank's process ends, as it does in training: a new one takes its place in the next job."""


class _NoGroup(RankEnds):
    """The ranks of a job did not find each other: what torch counts process groups by is out of step now."""


ENDS = (RankEnds.__name__, _NoGroup.__name__)


def _run(store: dist.Store, backend: str, job: int, rank: int, world: int, payload: bytes) -> Any:
    fn, args, kwargs, strict = pickle.loads(payload)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.manual_seed(0)
    store.set_timeout(timedelta(seconds=60))  # a job may have changed it
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"job{job}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=100),
        )
        # A job that is over at once must not close its connections while another rank is still making them.
        dist.barrier()
    except Exception as error:
        raise _NoGroup(f"no process group of {world} ranks") from error
    try:
        with warnings.catch_warnings():
            if strict:
                warnings.simplefilter("error")
            return fn(*args, **kwargs)
    finally:
        _signal_end(dist.PrefixStore(f"job{job}", store), world, failed=sys.exc_info()[0] is not None)
        _leave_groups()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        if "torch.distributed.tensor" in sys.modules:
            # It caches what an operator returned, mesh included, and a mesh of the next job may be equal to that one.
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()


def _signal_end(store: dist.Store, world: int, failed: bool) -> None:
    """Tell the others that this rank's job is over. After an error wait for them, for half a second at most: they may
    still be making the connections of a group that the job has made, which must not be closed meanwhile."""
    with suppress(RuntimeError):  # a job may have broken the store
        over, started = store.add("over", 1), time.monotonic()
        while failed and over < world and time.monotonic() - started < 0.5:
            time.sleep(0.005)
            over = store.add("over", 0)


def _share_device() -> None:
    """Let all gloo groups of this process use one device.

    Each group would make its own, whose thread wakes a hundred times a second: with all groups of all ranks of a test
    run that took a sixth of the processors' time.
    """
    device, gloo = dist.ProcessGroupGloo.create_default_device(), dist.ProcessGroupGloo

    class OnThatDevice(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            if any(more.values()):  # torch 2.15 has a further argument, which is not among the options
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnThatDevice  # type: ignore[misc]


_closing: list[threading.Thread] = []


def _leave_groups() -> None:
    """Destroy all process groups of a job, their connections in another thread.

    gloo takes ten milliseconds for each connection that it closes, in which it does nothing but wait: forty in a job of
    four ranks, as long as many a test. They are closed while the next job runs.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    if len(_closing) == 4:
        _closing.pop(0).join()  # so that threads do not pile up
    _closing.append(threading.Thread(target=groups.clear, daemon=True))
    _closing[-1].start()


# --------------------------------------------------------------------------- in the test process


class _Rank:
    """One rank process and the pipe to it."""

    def __init__(self, context: Any, rank: int, port: int, *job: Any):
        handle, self.stacks = tempfile.mkstemp(prefix="rank-stacks-")
        os.close(handle)
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, rank, port, self.stacks, *job), daemon=True)
        self.process.start()
        theirs.close()

    def dump(self) -> str:
        """The Python stacks of this rank, now."""
        with suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with open(self.stacks) as file:
            return file.read() or "(no stacks: the process is gone)"

    def usable(self) -> bool:
        """True if the process is there and has not gathered threads."""
        try:
            return self.process.is_alive() and len(os.listdir(f"/proc/{self.process.pid}/task")) <= MOST_THREADS
        except FileNotFoundError:  # it has just died, or this system has no /proc
            return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.conn.close()
        with suppress(FileNotFoundError):
            os.unlink(self.stacks)


class Ranks:
    """``ranks(world, fn, *args)`` runs ``fn``, marked with :func:`on_ranks`, on ``world`` ranks and returns their
    results in rank order. ``prepare``, at the top of a module, runs once in each rank's process."""

    def __init__(self, backend: str = "gloo", prepare: Callable[[], None] | None = None) -> None:
        self._job_of_all = backend, prepare
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.harness.preload"])
        self._store: dist.TCPStore | None = None
        self._ranks: list[_Rank] = []
        self._job = 0

    def __call__(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        warnings_as_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        if not hasattr(fn, "__on_ranks__"):
            raise TypeError(f"{fn.__module__}.{fn.__qualname__} is not marked: put @on_ranks above it")
        payload = pickle.dumps((fn, args, kwargs, warnings_as_errors))
        self._ensure(world)
        self._job += 1
        team = self._ranks[:world]
        for rank in team:
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.conn.send((self._job, world, payload))
        outcomes = self._collect(team, timeout)
        failed = {r: o[1] for r, o in outcomes.items() if o[0] != "ok"}
        if failed:
            raise self._error(fn, world, team, outcomes)
        return [outcomes[r][1] for r in range(world)]

    def raises(
        self,
        world: int,
        exception: type[BaseException] | str,
        match: str,
        fn: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[str]:
        """Assert that *every* rank raises ``exception`` with a message that ``match`` finds."""
        name = exception if isinstance(exception, str) else exception.__name__
        try:
            self(world, fn, *args, **kwargs)
        except RankError as error:
            bad = [
                r for r in range(world) if error.types.get(r) != name or not re.search(match, error.messages[r], re.S)
            ]
            if bad:
                raise AssertionError(f"ranks {bad} did not raise {name} matching {match!r}:\n{error}") from error
            return [error.messages[r] for r in range(world)]
        raise AssertionError(f"no rank raised; expected {name} matching {match!r} on all {world}")

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()

    def _ensure(self, world: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for index, rank in enumerate(self._ranks):
            if not rank.usable():
                rank.kill()
                self._ranks[index] = _Rank(self._context, index, self._store.port, *self._job_of_all)
        while len(self._ranks) < world:
            self._ranks.append(_Rank(self._context, len(self._ranks), self._store.port, *self._job_of_all))

    def _collect(self, team: list[_Rank], timeout: float) -> dict[int, tuple[str, Any]]:
        """Outcome per rank: ("ok", value), ("error", (type, message, traceback)), ("dead"|"hung", text)."""
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(team):
            missing = {rank.conn: index for index, rank in enumerate(team) if index not in outcomes}
            for conn in wait(list(missing), max(0.0, deadline - time.monotonic())):
                index = missing[conn]  # type: ignore[index]
                try:
                    outcomes[index] = pickle.loads(conn.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    team[index].process.join(5)
                    outcomes[index] = ("dead", f"exit code {team[index].process.exitcode}")
                if outcomes[index][0] == "error" and outcomes[index][1][0] in ENDS:
                    team[index].process.join(5)
                if outcomes[index][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline and len(outcomes) < len(team):
                for index, rank in enumerate(team):
                    if index not in outcomes and not rank.conn.poll():  # it may answer while another's stacks are read
                        outcomes[index] = ("hung", rank.dump())
                for index, rank in enumerate(team):
                    if outcomes.get(index, ("",))[0] == "hung":
                        rank.kill()
        return outcomes

    def _error(
        self, fn: Callable[..., Any], world: int, team: list[_Rank], outcomes: dict[int, tuple[str, Any]]
    ) -> RankError:
        lines, types, messages = [f"{fn.__module__}.{fn.__qualname__} on {world} ranks"], {}, {}
        for r in range(world):
            kind, detail = outcomes[r]
            if kind == "ok":
                lines.append(f"--- rank {r}: ok")
                continue
            if kind == "error":
                types[r], messages[r], detail = detail
            else:
                types[r], messages[r] = kind, str(detail)
            lines.append(f"--- rank {r}: {kind}\n{detail}")
        return RankError("\n".join(lines), types, messages)
