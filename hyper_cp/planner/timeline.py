"""The time of one attention layer: each mode's order of posting, computing and waiting, replayed with durations.

The order is that of ``ops/exchange/``. A rank has one link, which carries its transfers one after another in the order
of posting, and computes beside them. A ring advances as fast as its slowest rank in each hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .cluster import Cluster
from .model import ModelShape
from .traffic import TransferTimes
from .work import RankWork, StepWork

MERGED_BYTES = 18
"""Bytes that merging one output element of a further partial reads and writes (fp32 sums, the partial in bf16)."""

ADDED_BYTES = 10
"""Bytes that adding one element of a gradient to its sum reads and writes."""

BACKWARD = 2.5
"""FLOPs of attention backward over forward: five matrix products instead of two."""


class Clock:
    """A rank's time, and the time at which its link is free."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def compute(self, seconds: float) -> None:
        """Run a kernel."""
        self.now += seconds

    def post(self, *seconds: float) -> float:
        """Post a transfer; returns when it arrives."""
        self.free = max(self.free, self.now) + sum(seconds)
        return self.free

    def wait(self, arrival: float) -> None:
        """Wait for a transfer."""
        self.now = max(self.now, arrival)


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one layer's attention.

    Attributes:
        forward, backward: of the whole call.
        kernels_forward, kernels_backward: the part that its kernels run, on the fullest rank.
    """

    forward: float
    backward: float
    kernels_forward: float
    kernels_backward: float

    @property
    def exposed(self) -> float:
        """Seconds, forward and backward, in which no kernel runs."""
        return max(0.0, self.forward + self.backward - self.kernels_forward - self.kernels_backward)

    def recomputed(self, times: int) -> AttentionTime:
        """With ``times`` more forwards."""
        return replace(self, forward=self.forward * (1 + times), kernels_forward=self.kernels_forward * (1 + times))


def total(calls: Iterable[tuple[float, AttentionTime]]) -> AttentionTime:
    """The time of calls, each of which is made as often as its number says."""
    each = [[number * seconds for seconds in vars(time).values()] for number, time in calls]
    return AttentionTime(*(sum(column) for column in zip(*each, strict=True)))


class Kernels:
    """Durations of a step's kernels on one rank, which attends ``heads`` query heads and ``kv_heads`` key heads."""

    def __init__(self, model: ModelShape, cluster: Cluster, heads: float, kv_heads: float, batch: int, rows: float):
        self.cluster, self.own_rows = cluster, rows
        of_query, of_output = (heads * width * batch for width in model.head_widths)
        self.of_query, self.of_output = of_query, of_output
        """Numbers of a row of queries, and of outputs."""
        self.of_key = (model.latent if model.absorbed else 2 * kv_heads * model.head_dim) * batch
        """Numbers of a key and its value."""
        self.of_pair = 2 * (of_query + of_output)
        """FLOPs of a pair, forward."""
        expands = not model.absorbed and model.latents_travel(round(model.heads / heads))
        # Of each key that has arrived as a latent; those of the own share are made by the layer in any case.
        self.expansion = 2 * model.latent * self.of_key if expands else 0.0

    @classmethod
    def of_indexer(cls, model: ModelShape, cluster: Cluster, batch: int, rows: float) -> Kernels:
        """Those of an indexer, which has a forward only, and no outputs that are merged."""
        found = cls(model, cluster, model.heads, 0, batch, rows)
        found.of_output, found.of_pair, found.expansion = 0, model.score_flops * batch, 0.0
        return found

    def forward(self, step: StepWork, first: bool = False) -> float:
        """Seconds of a step. ``first``: its rows are stored, not merged."""
        merged = max(0.0, step.rows - self.own_rows) if first else step.rows
        return (
            step.pairs * self.of_pair / self.cluster.flops("forward_share")
            + step.tiles * self.cluster.launch_us * 1e-6
            + merged * self.of_output * MERGED_BYTES / self.cluster.memory_bandwidth
            + self._expanded(step, first)
        )

    def _expanded(self, step: StepWork, first: bool) -> float:
        """Seconds in which the latents of a step become heads."""
        return 0.0 if first else step.keys * self.expansion / self.cluster.flops("matmul_share")

    def backward(self, step: StepWork, first: bool = False) -> float:
        """Seconds of a step. ``first``: its gradients are stored, not added."""
        added = 0.0 if first else step.rows * self.of_query + step.keys * self.of_key
        return (
            BACKWARD * step.pairs * self.of_pair / self.cluster.flops("backward_share")
            + 2 * step.tiles * self.cluster.launch_us * 1e-6
            + added * ADDED_BYTES / self.cluster.memory_bandwidth
            + 3 * self._expanded(step, first)  # again, and the gradients of the latents and of the weight
        )


def attention_time(
    kv_exchange: str, kernels: Kernels, works: Sequence[RankWork], moves: Sequence[TransferTimes]
) -> AttentionTime:
    """Replay one layer on each of some ranks; the slowest counts.

    Args:
        works, moves: the work and the transfers of each of these ranks.
    """
    forward = [_steps([kernels.forward(s, i == 0) for i, s in enumerate(w.forward)]) for w in works]
    backward = [_steps([kernels.backward(s, i == 0) for i, s in enumerate(w.backward)]) for w in works]
    busy_forward, busy_backward = (max(map(_sum, times, works)) for times in (forward, backward))
    ulysses = [max(m.ulysses[i] for m in moves) for i in (0, 1)]
    if not works[0].hops:
        return AttentionTime(busy_forward + ulysses[0], busy_backward + ulysses[1], busy_forward, busy_backward)
    if kv_exchange == "ring":
        forward, backward = ([_slowest(times)] for times in (forward, backward))
    replay = _ring if kv_exchange == "ring" else _stages
    found = [
        (replay(f, move.arriving, [], 0.0, work), replay(b, move.arriving, move.gradients, move.home, work))
        for f, b, move, work in zip(forward, backward, moves, works, strict=False)
    ]
    times = [max(side) + exchange for side, exchange in zip(zip(*found, strict=True), ulysses, strict=True)]
    return AttentionTime(times[0], times[1], busy_forward, busy_backward)


@dataclass(frozen=True)
class _Steps:
    """Seconds of a rank's steps."""

    local: float
    arriving: list[float]
    last: float


def _steps(seconds: list[float]) -> _Steps:
    return _Steps(seconds[0], seconds[1:-1], seconds[-1])


def _sum(steps: _Steps, work: RankWork) -> float:
    """Seconds of all steps, those that are not listed included."""
    more = (work.arriving - len(steps.arriving)) * steps.arriving[-1] if steps.arriving else 0.0
    return steps.local + sum(steps.arriving) + more + steps.last


def _slowest(ranks: list[_Steps]) -> _Steps:
    """The slowest of some ranks in each step."""
    arriving = [max(hop) for hop in zip(*(steps.arriving for steps in ranks), strict=True)]
    return _Steps(max(s.local for s in ranks), arriving, max(s.last for s in ranks))


def _ring(steps: _Steps, keys: list[float], gradients: list[float], home: float, work: RankWork) -> float:
    """Seconds of a ring, given those of a hop of keys and, in backward, of a hop of sums of gradients and of the last
    one, which brings them home."""
    clock, pieces = Clock(), work.pieces
    hop, sums = keys[0] / pieces, sum(gradients[:1]) / pieces
    arrivals, last = [clock.post(hop) for _ in range(pieces)], 0.0
    clock.compute(steps.local)
    for index, seconds in enumerate(steps.arriving):
        clock.wait(arrivals[index])
        if gradients or index + pieces < work.arriving:
            more = hop if index + pieces < work.arriving else 0.0
            arrivals.append(clock.post(more, sums if index >= pieces else 0.0))
        clock.compute(seconds)
        if gradients and index + pieces >= len(steps.arriving):  # of the last hop
            if index >= pieces:
                clock.wait(arrivals[-1])
            last = clock.post(home / pieces)
    clock.compute(steps.last)
    clock.wait(last)
    return clock.now + (work.arriving - len(steps.arriving)) * max(hop + sums, *steps.arriving[-1:])


def _stages(steps: _Steps, keys: list[float], gradients: list[float], home: float, work: RankWork) -> float:
    """Seconds of stages, given those of the keys of each and, in backward, of their gradients, which go home from each
    stage."""
    clock, left = Clock(), [0.0] * work.ahead
    arrivals = [clock.post(seconds) for seconds in keys[: work.ahead]]
    clock.compute(steps.local)
    for index, seconds in enumerate(steps.arriving):
        clock.wait(arrivals[index])
        arrivals += map(clock.post, keys[index + work.ahead :][:1])
        clock.compute(seconds)
        if gradients:
            clock.wait(left[-work.ahead])
            left.append(clock.post(gradients[index]))
    clock.compute(steps.last)
    clock.wait(left[-1])
    return clock.now
