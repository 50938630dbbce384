"""The soak: twenty steps of it are right, and it finds a wrong result, other bits and every kind of leak.

Its steps are also the differential fuzzers of attention (of latents, too), FlexAttention, recurrences and convolutions:
each runs here for a second with a new seed.
"""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.soak import run, steps
from hyper_cp.ops import attention
from hyper_cp.schedule.derived import kept
from tests.harness.ranks import on_ranks

_leaked: list[Any] = []
_done = threading.Event()


def leak(number: int) -> None:
    """One more of everything that the soak counts."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=_done.wait)
    thread.start()
    _leaked.extend([torch.zeros(1), b"x" * 4 * 2**20, reader, writer, thread, dist.new_group([dist.get_rank()])])
    kept.most_bytes = 2**30


def stop_leaking() -> None:
    _done.set()
    for x in _leaked:
        if isinstance(x, int):
            os.close(x)
        elif isinstance(x, threading.Thread):
            x.join()
        elif isinstance(x, dist.ProcessGroup):
            dist.destroy_process_group(x)
    _leaked.clear()


def times(factor: float, *args: Any, **kwargs: Any) -> Any:
    """Attention whose output is multiplied by a number."""
    result = attention(*args, **kwargs)
    return result * factor if isinstance(result, Tensor) else (result[0] * factor, *result[1:])


def wrong_on_rank_2(*args: Any, **kwargs: Any) -> Any:
    return times(1 + 1e-4 * (dist.get_rank() == 2), *args, **kwargs)


class Drifting:
    """Attention whose results are hardly wrong, but never the same bits."""

    calls = 0

    def __call__(self, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return times(1 + 2 * torch.finfo(q.dtype).eps * self.calls, q, *args, **kwargs)


@on_ranks
def soak(number: int, plant: str = "", *more: str) -> tuple[int, str]:
    """The exit code and the output of a soak in this process group, with something planted, and with more options."""
    planted: dict[str, Callable[..., Any]] = {"wrong": wrong_on_rank_2, "bits": Drifting()}
    steps.attention = planted.get(plant, attention)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            options = ["--steps", str(number), "--seed", "2", *more]
            code = run.soak(run.parsed(options), *([leak] if plant == "leak" else []))
    finally:
        steps.attention = attention
        stop_leaking()
    return code, out.getvalue()


@pytest.mark.slow
def test_twenty_steps(ranks: Any) -> None:
    found = ranks(4, soak, 20)
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    for kind in steps.KINDS:
        assert f"{kind}: " in found[0][1]


SECONDS = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "latents", "flex", "recurrence", "convolution"])
def test_drawn_calls_are_those_of_one_device(ranks: Any, kind: str) -> None:
    """Failures show the seed and the number of the step: ``python -m benchmarks.soak.run --seed S --only N --kinds K``
    runs it again."""
    seed = 0 if os.environ.get("CI") else random.randrange(10**6)
    found = ranks(4, soak, 10**6, "", "--seconds", str(SECONDS), "--seed", str(seed), "--kinds", kind)
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    assert f"{kind}: " in found[0][1]


@pytest.mark.slow
def test_a_step_is_run_however_little_time_there_is(ranks: Any) -> None:
    assert "1 steps in " in ranks(4, soak, 10, "", "--seconds", "0")[0][1]


@pytest.mark.slow
def test_a_wrong_result_on_one_rank_fails_on_all(ranks: Any) -> None:
    found = ranks(4, soak, 8, "wrong", "--kinds", "attention")
    assert [code for code, _ in found] == [1] * 4
    assert "(attention): output is off by" in found[0][1]


@pytest.mark.slow
def test_every_leak_is_found(ranks: Any) -> None:
    found = ranks(4, soak, 12, "leak")
    assert [code for code, _ in found] == [1] * 4
    for name in ("mib", "tensors", "groups", "threads", "descriptors", "store_keys"):
        assert f"FAILED on rank 3 with --seed 2: {name} grew from" in found[0][1]


@pytest.mark.slow
def test_other_bits_are_found(ranks: Any) -> None:
    found = ranks(4, soak, 10, "bits", "--kinds", "attention")
    assert [code for code, _ in found] == [1] * 4 and "other bits when it is repeated" in found[0][1]
