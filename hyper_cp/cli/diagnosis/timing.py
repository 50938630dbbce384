"""Times of work on a device: by events of the device, after warm-ups, in turns with what it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

ROUNDS = 6
"""An even number, so that each order of the turns occurs equally often."""

WARM_UPS = 10
"""Calls before the first timed one on an accelerator, while its clocks rise and its caches fill; one on a CPU."""

CACHE = 2**28
"""Bytes that are written between calls on an accelerator: more than its last cache holds."""


def seconds_in_turns(
    runs: Mapping[str, Callable[[], Any]],
    device: str,
    rounds: int = ROUNDS,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Return the median seconds of each run.

    The runs take turns, in the opposite order in every second round (A B B A), so that a machine that becomes faster or
    slower meanwhile changes all of them alike. Every rank of a process group makes the same calls.

    Args:
        before: called before each run and not timed, for example a barrier.
    """
    kind = torch.device(device).type
    start = _host if kind == "cpu" else _Events(kind)
    for run in runs.values():
        for _ in range(1 if kind == "cpu" else WARM_UPS):
            run()
    found: dict[str, list[Callable[[], float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            before()
            found[name].append(start(runs[name]))
    return {name: median(read() for read in reads) for name, reads in found.items()}


def _host(run: Callable[[], Any]) -> Callable[[], float]:
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return lambda: seconds


class _Events:
    """Times a run by events of its device. The host waits only when a time is read, after all runs are queued."""

    def __init__(self, kind: str) -> None:
        self.module: Any = torch.get_device_module(kind)
        self.cache = torch.empty(CACHE, dtype=torch.uint8, device=kind)

    def __call__(self, run: Callable[[], Any]) -> Callable[[], float]:
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.cache.zero_()
        begin.record()
        run()
        end.record()

        def seconds() -> float:
            self.module.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return seconds
