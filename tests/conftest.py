"""Fixtures of the whole test run: the pool of ranks, and how hypothesis behaves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness import npu_device, npu_standin
from tests.harness.ranks import Ranks

gc.disable()  # until all tests are collected: modules and tests stay
torch.set_num_threads(1)  # as each rank does: threads of several processes would wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # and scripts that tests start
with suppress(AttributeError, OSError):  # Linux has it, and some containers forbid it
    # What wakes up does not interrupt what runs, here and in all processes that tests start. More ranks than cores run,
    # and a rank that is interrupted while gloo holds the lock of a connection has gloo's own thread poll until it goes
    # on: that took an eighth of the processors' time.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

settings.register_profile(
    "hyper_cp",
    deadline=None,  # ranks share two cores: a slow example is not a wrong one
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("hyper_cp")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``pytest -n``: tests that share a pool of a module's own stay in one process; the slow ones come first."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        for pool in {"npus", "own_pool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(pool))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Take what lives as long as this process, modules and tests, out of the collector's sight, as ranks do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain at exit of what they think is leaked


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Ranks]:
    """A pool of a module's own: its ranks get killed."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def npus() -> Iterator[Ranks]:
    """Ranks with a device named "npu". They are a module's own, since the device is registered for good."""
    if npu_device.SETUP is None:
        pytest.skip(npu_device.WHY_NOT)
    npu_standin.install()
    if not npu_standin.installed():
        pytest.skip("the real torch_npu is installed")
    pool = Ranks(npu_device.BACKEND, npu_device.install)
    yield pool
    pool.close()


@pytest.fixture
def standin() -> Any:
    """The stand-in for the NPU's operators, installed, its record of calls empty."""
    npu_standin.install()
    if not npu_standin.installed():
        pytest.skip("the real torch_npu is installed")
    npu_standin.calls.clear()
    return npu_standin
