"""The measurement of overlap runs on real ranks: every mode that fits, with four times each, and its arithmetic."""

from __future__ import annotations

import argparse
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.device import overlap as device_overlap
from benchmarks.device.ranks import SilentAxis
from benchmarks.no_kernel import NoKernel
from benchmarks.simulated import ring_buffers
from hyper_cp.cli.diagnosis import timing
from hyper_cp.cli.diagnosis.ranks import Ranks
from hyper_cp.mesh import comm, cp_mesh
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import REFERENCE
from tests.harness.ranks import on_ranks


class WrongGradients:
    """The reference kernel with gradients of queries that are too large."""

    name = "wrong gradients"

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        return REFERENCE.forward(tile)

    def backward(self, tile: kernels.TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = REFERENCE.backward(tile, *of_rows)
        return dq * 1.001, dk, dv


GIVEN = "--device cpu --length 32 --heads 16 --kv-heads 16 --dim 8 --dtype float32 --rounds 2"


def prepared(options: str) -> tuple[Ranks, DeviceMesh, argparse.Namespace]:
    ranks = Ranks("cpu")
    return ranks, ranks.mesh(), device_overlap.arguments(options.split())


@on_ranks
def measured() -> tuple[list[tuple[str, float, float, float]], list[str], list[str]]:
    """The times; the checks, and those with a kernel whose gradients are wrong."""
    given = prepared(GIVEN)
    checked = [finding.status for finding in device_overlap.compare(*given)]
    with kernels.register(WrongGradients(), "cpu"):
        wrong = [finding.status for finding in device_overlap.compare(*given)]
    return list(device_overlap.measure(*given)), checked, wrong


@pytest.mark.slow
def test_every_mode_is_checked_and_measured_on_gloo(ranks: Any) -> None:
    found = ranks(4, measured)
    times = found[0][0]
    assert all(rows == times for rows, *_ in found) and all(min(row[1:3]) > 0 for row in times)
    assert len(times) == 8 and times[-1][0] == "hybrid of 2, ring, 2 head groups"
    for _, checked, wrong in found:
        assert checked == ["ok"] * 8 and wrong == ["WRONG"] * 8


class Takes:
    """A kernel that takes a second of a fake clock for each tile, forward and backward, and computes nothing."""

    name = "takes a second"

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        self.clock[0] += 1.0
        return NoKernel().forward(tile)

    def backward(self, tile: kernels.TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.clock[0] += 1.0
        return NoKernel().backward(tile)


@on_ranks
def without_overlap(hidden: float) -> dict[str, float]:
    """The share of communication that is hidden, by a fake clock: tiles take a second each, every transfer a quarter
    of one, of which a part is hidden where tiles are computed, and merging five seconds a step."""
    clock = [0.0]
    arrive, attention = comm.Pending.arrive, device_overlap.attention

    def arriving(self: Any) -> None:
        computes = kernels.available("cpu").keys().isdisjoint({NoKernel.name})
        clock[0] += 0.25 * (1.0 - hidden * computes) * bool(self._works)
        arrive(self)

    def merging(*args: Any, **options: Any) -> Any:
        clock[0] += 5.0
        return attention(*args, **options)

    with (
        kernels.register(Takes(clock), "cpu"),
        mock.patch.object(comm.Pending, "arrive", arriving),
        mock.patch.object(device_overlap, "attention", merging),
        mock.patch.object(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0])),
    ):
        rows = list(device_overlap.measure(*prepared(GIVEN)))
    return {row[0]: float(device_overlap.line(*row).split()[-1].rstrip("%")) for row in rows}


@pytest.mark.parametrize("hidden", [0.0, 0.6])
def test_merging_is_not_counted_as_hidden_communication(ranks: Any, hidden: float) -> None:
    for found in ranks(2, without_overlap, hidden):
        assert found == dict.fromkeys(found, 100 * hidden) and len(found) == 6


def fake_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(mesh: Any, degree: int) -> Any:
        axes = SilentAxis(0, mesh.size() // degree), SilentAxis(0, degree)
        return cp_mesh.CPMesh("fake", *axes, axes, cp_mesh.BatchState())

    monkeypatch.setattr(cp_mesh, "view", view)


def test_hybrids_need_two_dimensions_and_heads_that_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented commands (32 query and 8 key/value heads on 2 and 8 ranks) measure every mode that the library
    runs: groups of heads may share a key/value head where nothing goes round a ring."""
    fake_meshes(monkeypatch)
    hybrids = {"hybrid of 2, ring, head_tail", "hybrid of 2, ring, 2 head groups"}
    ulysses = {"Ulysses", "Ulysses, 4 head groups"}
    for options, ranks, without in (("", 2, hybrids), ("", 8, set()), ("--heads 12 --kv-heads 4", 8, ulysses)):
        mesh: Any = SimpleNamespace(size=lambda ranks=ranks: ranks)
        args = device_overlap.arguments(options.split())
        names = {name for name, *_ in device_overlap.possible(mesh, args)}
        assert names == set(device_overlap.MODES) - without, options


def test_a_line_says_how_much_is_hidden() -> None:
    assert device_overlap.line("ring", 0.012, 0.010, 0.008).endswith("hidden   75%")
    assert device_overlap.line("ring", 0.018, 0.010, 0.008).endswith("hidden    0%")


def test_silent_transfers_bring_numbers() -> None:
    """Memory as the allocator gives it may hold NaNs. Attention of them takes another time than that of numbers."""
    axis, sent = SilentAxis(0, 2), torch.randn(4, 3)
    torch.use_deterministic_algorithms(True)  # it fills new memory with NaN
    try:
        into = torch.empty(4, 3)
        for pending in (
            axis.all_gather(sent),
            axis.all_to_all(sent.view(2, 2, 3)),
            axis.all_to_all_rows(sent, [2, 2], [3, 1]),
            axis.reduce_scatter(sent),
            axis.send_recv([comm.Message(sent, 1)], [comm.Message(into, 1)]),
        ):
            found = pending.wait()
            assert all(x.isfinite().all() and x.std() > 0 for x in (found if isinstance(found, list) else [found]))
    finally:
        torch.use_deterministic_algorithms(False)


# --------------------------------------------------------------------------- the stopwatch


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_a_drifting_clock_cancels(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Two runs of the same work on a machine that becomes slower by a tenth with every call."""
    clock, calls = [0.0], [0]

    def run() -> None:
        calls[0] += 1
        clock[0] += 1.0 + 0.1 * calls[0]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = timing.seconds_in_turns({"a": run, "b": run}, "cpu", rounds)
    assert found["a"] == pytest.approx(found["b"], abs=0.11 if rounds % 2 else 1e-9)


def test_an_accelerator_is_timed_by_its_events_after_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host queues everything before it waits, and writes over the caches of the device before each run."""
    log: list[str] = []
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    def run() -> None:
        log.append("run")
        clock[0] += 3.0

    module = SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    cache = SimpleNamespace(zero_=lambda: log.append("cache"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: cache)
    assert timing.seconds_in_turns({"a": run}, "cuda", 4) == {"a": pytest.approx(3e-3)}
    queued = log[: log.index("wait")]
    assert queued == ["run"] * 10 + ["cache", "run"] * 4


# --------------------------------------------------------------------------- buffers of a ring


def test_three_buffers_help_only_where_kernels_vary() -> None:
    """The figures of docs/measured/communication.md come from this model."""

    def found(link: float, jitter: float, buffers: int) -> float:
        return ring_buffers.step(8, link, jitter, buffers, random.Random(0))

    assert found(1.0, 0.0, 2) == found(1.0, 0.0, 3) == 8 / 8
    assert found(1.0, 0.2, 3) < found(1.0, 0.2, 2)
