"""The measurement: all contenders in one process group, each checked first, then timed in turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_cp.cli.diagnosis.exchanges import positions

from ..ranks import join, leave, results_of
from .case import BARS, Problem, oracle, share
from .contenders import chosen
from .contenders.contender import Attention, Contender, Skip

SHORT = 512
"""Length at which results are compared with fp64; at the measured length they are compared with plain SDPA."""

SLOW = 3.0
"""A contender that takes this many times as long as plain SDPA is timed in one round only."""

TENSORS = "out", "dq", "dk", "dv"


@dataclass
class Result:
    """The outcome of one contender on one problem.

    Attributes:
        status: ``"ok"``, ``"skipped"`` (it does not take the problem, or is not installed) or ``"WRONG"``.
        reason: of the last two.
        error: the largest relative error against fp64.
        seconds: of the slowest rank in each round; None in rounds without it.
        limits: of plain SDPA just before and after it, their mean, in each round.
    """

    library: str
    mode: str
    layout: str
    note: str
    balanced: bool
    status: str = "ok"
    reason: str = ""
    error: float = 0.0
    seconds: list[float | None] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)


def machine() -> dict[str, Any]:
    """Return the machine and the versions."""
    names = {"deepspeed": "deepspeed", "ringmaster": "axolotl-ringmaster", "yunchang": "yunchang"}
    found = {}
    for name, package in names.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": cores,
        "load": round(os.getloadavg()[0], 1),
        **found,
    }


def in_words(machine: Mapping[str, Any], threads: str = "") -> str:
    """The machine in a sentence for a page, with a warning if it was not idle. ``threads`` stands before the load."""
    shared = " Other processes used them, too: times are uncertain." if machine["load"] > 0.5 else ""
    return (
        f"torch {machine['torch']}, {machine['processor']}, {machine['cores']} cores, {threads}load {machine['load']} "
        f"before the run, {machine['date']}.{shared}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


# --------------------------------------------------------------------------- in a rank


class Ranks:
    """A rank's view of the others: what is slowest, what is worst, whether all have come this far."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()

    def most(self, value: float) -> float:
        """Return the largest of all ranks' values; infinite if one is not a number."""
        found = torch.tensor([value if value == value else float("inf")], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def error(self, text: str) -> str:
        """Return the error of the first rank that has one."""
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text)
        return next((x for x in texts if x), "")


def limit(problem: Problem) -> Attention:
    """Return plain SDPA of the whole sequence in one process: of every document by itself, if there are several."""
    gqa = problem.heads != problem.kv_heads
    ends = problem.documents
    if ends is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa)

    def each(*qkv: Tensor) -> Tensor:
        parts = zip(*(x.split([b - a for a, b in pairwise(ends)], 2) for x in qkv), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=gqa) for x in parts], 2)

    return each


def timed(attend: Attention, inputs: Sequence[Tensor], dout: Tensor) -> tuple[float, Tensor]:
    """Return the seconds of forward and backward, and the output."""
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    out = attend(*inputs)
    out.backward(dout)
    return time.perf_counter() - start, out.detach()


Shares = dict[str, tuple[Tensor, list[Tensor], Tensor]]
"""By layout: the positions of this rank, its q, k, v, and its gradient of the output."""


class Entry:
    """A contender on this rank: its function, its share of the inputs, its result."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        c = contender
        self.result = Result(c.library, c.mode, c.layout, c.note, c.balanced)

    def rows(self, problem: Problem, ranks: Ranks) -> Tensor:
        """Return the global positions of this rank."""
        return positions(ranks.rank, ranks.size, problem.tile, self.contender.layout)

    def prepare(self, problem: Problem, ranks: Ranks, shares: Shares) -> Callable[[], float]:
        """Make the function and its inputs; returns a step, which returns its seconds."""
        attend = self.contender.prepare(problem, ranks.mesh)
        if self.contender.layout not in shares:
            rows = self.rows(problem, ranks)
            qkv, dout = problem.tensors()
            inputs = [share(x, rows).requires_grad_() for x in qkv]
            shares[self.contender.layout] = rows, inputs, share(dout, rows)
        self.at, self.inputs, self.dout = shares[self.contender.layout]

        def step() -> float:
            seconds, self.out = timed(attend, self.inputs, self.dout)
            return seconds

        return step

    def off(self, expected: Sequence[Tensor], ranks: Ranks) -> dict[str, float]:
        """Return the relative error of each tensor, the largest of all ranks."""
        found = [self.out, *(x.grad for x in self.inputs)]
        errors = {}
        for name, got, want in zip(TENSORS, found, expected, strict=True):
            wrong = float("nan") if got is None else float((got.double() - share(want, self.at)).abs().max())
            errors[name] = ranks.most(wrong / float(want.abs().max()))
        return errors

    def attempt(self, what: Callable[[], Any], ranks: Ranks) -> Any:
        """Do something that may fail on any rank; all ranks then record the first rank's error."""
        text, found = "", None
        try:
            found = what()
        except Skip as reason:
            text = str(reason)
        except Exception as error:  # a contender may fail as it likes: that is its result
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        text = ranks.error(text)
        if text:
            self.result.status, self.result.reason = "skipped", text
        return found

    def check(
        self, problem: Problem, shares: Shares, expected: Sequence[Tensor], bar: float, against: str, ranks: Ranks
    ) -> None:
        """Run one step and compare it."""
        self.step = self.attempt(lambda: self.prepare(problem, ranks, shares), ranks)
        if self.result.status == "ok":
            self.attempt(self.step, ranks)
        if self.result.status != "ok":
            return
        errors = self.off(expected, ranks)
        name, worst = max(errors.items(), key=lambda item: item[1])
        self.result.error = max(self.result.error, worst)
        if worst > bar:
            self.result.status = "WRONG"
            self.result.reason = (
                f"{name} is off by {worst:.0e} of its largest element from {against}, S={problem.length}"
            )


def measure(problem: Problem, rounds: int, only: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """Check all contenders, then time them in turns, plain SDPA between every two: the cores of a virtual machine are
    not as fast in every minute."""
    short, bar = problem.resized(min(problem.length, SHORT)), BARS[problem.dtype]
    entries = [Entry(contender) for contender in chosen(only)]
    exact, shares_short, shares = oracle(short), Shares(), Shares()
    for entry in entries:
        entry.check(short, shares_short, exact, bar, "fp64", ranks)
    attend, (qkv, dout) = limit(problem), problem.tensors()
    whole = [x.requires_grad_() for x in qkv]
    _, out = timed(attend, whole, dout)
    plain = [out.double(), *(x.grad.double() for x in whole if x.grad is not None)]
    for entry in [entry for entry in entries if entry.result.status == "ok"]:
        entry.check(problem, shares, plain, 4 * bar, "plain SDPA", ranks)
    del plain
    runners = [entry for entry in entries if entry.result.status == "ok"]
    for entry in runners:  # this warms up
        dist.barrier()
        entry.step()

    def plainly() -> float:
        dist.barrier()
        seconds = 0.0
        if ranks.rank == 0:  # the other ranks wait and use no core
            torch.set_num_threads(ranks.size)
            seconds, _ = timed(attend, whole, dout)
            torch.set_num_threads(1)
        return ranks.most(seconds)

    plainly()
    limits: list[list[float]] = []
    for number in range(rounds):
        limits.append([plainly()])
        for entry in [*runners[number % len(runners) :], *runners[: number % len(runners)]] if runners else []:
            result, around = entry.result, limits[-1]
            if number and (result.seconds[0] or 0.0) > SLOW * result.limits[0]:
                result.seconds.append(None)
                result.limits.append(around[-1])
                continue
            dist.barrier()
            result.seconds.append(ranks.most(entry.step()))
            around.append(plainly())
            result.limits.append((around[-2] + around[-1]) / 2)
    medians = [statistics.median(around) for around in limits]
    return {"problem": asdict(problem), "limit": medians, "results": [asdict(entry.result) for entry in entries]}


# --------------------------------------------------------------------------- processes


def rank_main(
    rank: int,
    world: int,
    store: str,
    put: Callable[[Any], None],
    problems: Sequence[tuple[Problem, int]],
    only: Sequence[str],
) -> None:
    """Measure on one rank. Rank 0 puts what it finds."""
    ranks = Ranks(join(rank, world, store))
    for problem, rounds in problems:
        found = measure(problem, rounds, only, ranks)
        if rank == 0:
            put(found)
    leave()


def run(
    problems: Sequence[tuple[Problem, int]], only: Sequence[str] = (), say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure every problem in its number of rounds. Problems of as many ranks share one process group."""
    found: list[dict[str, Any]] = []
    about = machine()
    for world in sorted({problem.world for problem, _ in problems}):
        some = [(problem, rounds) for problem, rounds in problems if problem.world == world]
        say(f"{', '.join(str(problem) for problem, _ in some)} ...")
        for run in results_of(rank_main, world, some, list(only)):
            found.append(run)
            say(f"{Problem(**run['problem'])}: done")
    return {"format": "hyper-cp speed", "version": 1, "machine": about, "runs": found}
