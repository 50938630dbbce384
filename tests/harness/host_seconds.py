"""Processor time of the host's work in a test, whatever speed the machine has at that moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

ROUNDS = 40_000
QUIET = 0.06  # seconds of those rounds on a quiet AMD EPYC, where 5 million additions in a loop take 0.31 s


def host_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of ``work``, in seconds of a quiet machine.

    A machine that other processes share is slower by two or more, also in processor time: caches and the cores'
    clock are shared. So a loop of known work is timed before and after, and the slower of the two is the measure.
    """
    before = _loop()
    start = time.process_time()
    work()
    taken = time.process_time() - start
    return taken * QUIET / max(before, _loop())


def _loop() -> float:
    """Return the processor time of calls, lists and small arrays, which is what plans consist of."""
    start = time.process_time()
    for i in range(ROUNDS):
        max(sorted([i, 3, 5]), key=abs)
        np.add.reduce(np.array((i, i)))
    return time.process_time() - start
