"""The measurement: every way is checked first, and then they take turns, at every rate of the links."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_cp.memory import MemoryCounter
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.lookup import resolve

from ..measured.links import Link, limit_all, switch, why_not
from ..ranks import join, leave, results_of
from ..speed.case import share
from ..speed.contenders.contender import Skip
from ..speed.run import Ranks, machine, timed
from .peers import ZIGZAG_OF_HOSTS, peers
from .ways import Way, ours, plain
from .work import Inputs, Scenario, answer

BAR = 1e-5
"""The largest error against fp64 on a short sequence, relative to a tensor's largest element; four times that against
fp32 on the measured one."""

SHORT = 512
SLOW = 3.0
"""A way that takes this many times as long as the fastest is timed in one round only."""


@dataclass
class Result:
    """The outcome of one way of a scenario.

    Attributes:
        status: ``"ok"``, ``"cannot"``, ``"not installed"`` or ``"WRONG"``.
        reason: of all but the first.
        error: the largest relative error.
        memory: the most bytes of tensors that a step makes on any rank, beside its inputs.
        seconds: of the slowest rank in each round, by the rate of the links (``"none"``: no limit).
    """

    library: str
    mode: str
    layout: str
    alone: bool
    status: str = "ok"
    reason: str = ""
    error: float = 0.0
    memory: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)


def label(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def rows_of(work: Scenario, way: Way, rank: int) -> Tensor:
    """Return the positions of a rank."""
    if way.alone:
        return torch.arange(work.length)
    if way.layout == ZIGZAG_OF_HOSTS:
        chunks, ring = torch.arange(work.length).chunk(work.world), rank // 2
        return torch.cat([chunks[ring], chunks[work.world - 1 - ring]]).chunk(2)[rank % 2]
    table = PackedDocuments(work.documents or [[0, work.length]])
    return resolve(way.layout, work.world, work.length, table).positions(rank)


class Entry:
    """A way on this rank: its function, its share of the inputs, its result."""

    def __init__(self, way: Way, ranks: Ranks) -> None:
        self.way, self.ranks = way, ranks
        self.result = Result(way.library, way.mode, way.layout, way.alone)
        self.active = not way.alone or ranks.rank == 0
        self.threads = min(ranks.size, os.cpu_count() or 1) if way.alone else 1

    @property
    def ok(self) -> bool:
        return self.result.status == "ok"

    def attempt(self, what: Callable[[], Any]) -> None:
        """Do something that may fail on any rank; all ranks then record the first rank's error."""
        text = ""
        try:
            what()
        except Skip as reason:
            text = f"cannot|{reason}"
        except ModuleNotFoundError as error:
            text = f"not installed|{error}"
        except Exception as error:  # a peer may fail as it likes: that is its result
            first = str(error).splitlines()[0][:200] if str(error) else ""
            text = f"cannot|{type(error).__name__}: {first}"
        text = self.ranks.error(text)
        if text:
            self.result.status, self.result.reason = text.split("|", 1)

    def prepare(self, work: Scenario, given: Inputs) -> None:
        self.rows = rows_of(work, self.way, self.ranks.rank)
        if self.active:
            self.attend = self.way.prepare(work, self.ranks.mesh, self.rows)
        self.inputs = [share(x, self.rows).requires_grad_() for x in given.sharded]
        self.inputs += [x.detach().clone().requires_grad_() for x in given.weights]
        self.dout = share(given.dout, self.rows) if given.dout.dim() else given.dout

    def step(self) -> float:
        """Run forward and backward; returns the seconds of the slowest rank."""
        seconds = 0.0
        if self.active:
            torch.set_num_threads(self.threads)
            seconds, self.out = timed(self.attend, self.inputs, self.dout)
            torch.set_num_threads(1)
        return self.ranks.most(seconds)

    def first_step(self) -> None:
        """Run a step and count the memory it takes."""
        if self.active:
            with MemoryCounter() as memory:
                _, self.out = timed(self.attend, self.inputs, self.dout)
            self.result.memory = memory.peak["cpu"]

    def check(self, work: Scenario, given: Inputs, expected: Sequence[Tensor], bar: float, against: str) -> None:
        """Run one step and compare it."""
        self.attempt(lambda: self.prepare(work, given))
        if self.ok:
            self.attempt(self.first_step)
        if not self.ok:
            return
        self.result.memory = int(self.ranks.most(self.result.memory))
        errors = self.errors(work, given, expected)
        name, worst = max(errors.items(), key=lambda item: item[1])
        self.result.error = max(self.result.error, worst)
        if worst > bar:
            reason = f"{name} is off by {worst:.0e} of its largest element from {against}, S={work.length}"
            self.result.status, self.result.reason = "WRONG", reason

    def errors(self, work: Scenario, given: Inputs, expected: Sequence[Tensor]) -> dict[str, float]:
        """Return the relative error of each tensor, the largest of all ranks. What is no rank's own is added up."""
        names, found = ("out", *given.names), []
        if self.active:
            found = [self.out, *(x.grad for x in self.inputs)]
        errors = {}
        for i, (name, want) in enumerate(zip(names, expected, strict=True)):
            got = found[i] if self.active else torch.zeros_like(want)
            wrong = float("nan")
            if got is not None and want.dim() != 4:
                total = got.detach().double()
                dist.all_reduce(total)
                wrong = float((total - want).abs().max())
            elif got is not None and self.active:
                valid = share(work.valid(), self.rows) if name == "out" and work.kind != "loss" else 1
                wrong = float((got.double() * valid - share(want, self.rows)).abs().max())
            elif not self.active:
                wrong = 0.0
            errors[name] = self.ranks.most(wrong / float(want.abs().max()))
        return errors


def measured_answer(work: Scenario, ranks: Ranks) -> list[Tensor]:
    """Return the fp32 answer of one device on every rank: rank 0 computes it with all cores."""
    given = work.inputs()
    empty = [given.dout * 0, *(torch.empty_like(x) for x in (*given.sharded, *given.weights))]
    if ranks.rank == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        empty = answer(work, exact=False)
        torch.set_num_threads(1)
    found = [x.contiguous() for x in empty]
    for x in found:
        dist.broadcast(x, 0)
    return found


def ways(work: Scenario, only: Sequence[str]) -> list[Way]:
    """Return all ways whose name contains one of these words; all without words."""
    found = [*ours(work), *peers(work), *plain(work)]
    names = [f"{way.library} {way.mode}".lower() for way in found]
    return [w for w, name in zip(found, names, strict=True) if not only or any(x.lower() in name for x in only)]


def measure(work: Scenario, only: Sequence[str], ranks: Ranks, link: Link | None) -> dict[str, Any]:
    """Check all ways of a scenario, then time them in turns."""
    limit_all(link, None)
    entries = [Entry(way, ranks) for way in ways(work, only)]
    short = work.resized(SHORT)
    given, exact = short.inputs(), answer(short, exact=True)
    for entry in entries:
        entry.check(short, given, exact, BAR, "fp64")
    given, expected = work.inputs(), measured_answer(work, ranks)
    for entry in entries:
        if entry.ok:
            entry.check(work, given, expected, 4 * BAR, "fp32")
    del expected
    runners = [entry for entry in entries if entry.ok]
    rates = [rate for rate in work.rates if rate is None or link is not None]
    for number in range(work.rounds):
        first = number % max(len(runners), 1)
        for rate in rates:
            limit_all(link, rate)
            for entry in [*runners[first:], *runners[:first]]:
                seconds = entry.result.seconds.setdefault(label(rate), [])
                fastest = min(statistics.median(r.result.seconds[label(rate)]) for r in runners) if number else 0.0
                if number and seconds[0] > SLOW * fastest:
                    continue
                dist.barrier()
                seconds.append(entry.step())
    limit_all(link, None)
    return {"scenario": asdict(work), "results": [asdict(entry.result) for entry in entries]}


def rank_main(
    number: int,
    world: int,
    store: str,
    put: Callable[[Any], None],
    works: Sequence[Scenario],
    only: Sequence[str],
    at: int | None,
) -> None:
    """Measure scenarios on one rank. Rank 0 puts what it finds. With ``at``, a switch, ranks have links."""
    link, per_host = None, works[0].per_host
    if at is not None:
        link = Link(at, number, per_host=per_host)
        os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    ranks = Ranks(join(number, world, store))

    for work in works:
        found = measure(work, only, ranks, link)
        if number == 0:
            put(found)
    leave()


def run(works: Sequence[Scenario], only: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure scenarios. Those of as many ranks and hosts share one process group, and links where one is limited."""
    about, reason = machine(), why_not()
    found: dict[str, Any] = {}
    for key in dict.fromkeys((work.world, work.per_host, any(work.rates)) for work in works):
        some = [work for work in works if (work.world, work.per_host, any(work.rates)) == key]
        for one in _results(key[0], some, only, key[2] and not reason):
            found[one["scenario"]["name"]] = one
            say(f"{one['scenario']['title']}: done")
    runs = [found[work.name] for work in works]
    return {"format": "hyper-cp scenarios", "version": 1, "machine": about, "no_links": reason, "runs": runs}


def _results(world: int, works: Sequence[Scenario], only: Sequence[str], linked: bool) -> Iterator[dict[str, Any]]:
    if not linked:
        yield from results_of(rank_main, world, works, list(only), None)
        return
    with switch() as at:
        yield from results_of(rank_main, world, works, list(only), at)
