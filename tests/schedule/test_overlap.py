"""What overlaps on an accelerator, by a double of its streams and hardware queues."""

from __future__ import annotations

import pytest

from hyper_cp.schedule import lookup
from hyper_cp.schedule.build import Schedule
from tests.harness.streams import Device, run

RANKS, SHARE = 8, 2048
EXCHANGES = ["ring", "all_gather", "needed"]
SUM = 2.0
"""Bytes of a gradient that is summed up over those of a key."""


def schedule(kv_exchange: str, ranks: int = RANKS) -> Schedule:
    length = ranks * SHARE
    return lookup.schedule(lookup.Key("head_tail", 1, ranks, 1, kv_exchange, False, (None, 0), length, length))


def on_device(kv_exchange: str, backward: bool, one_queue: bool, ranks: int = RANKS) -> tuple[Device, float, float]:
    """The device after a call in which all transfers together take as long as all tiles, and these two times."""
    plan, factor = schedule(kv_exchange, ranks), 1 + SUM if backward else 1.0
    computing = float(plan.area)
    row = computing / (plan.received * factor)
    return (
        run(plan, backward, one_queue, float, lambda of_gradient: row * (SUM if of_gradient else 1.0)),
        computing,
        plan.received * row * factor,
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kv_exchange", EXCHANGES)
def test_tiles_run_while_keys_and_gradients_travel(kv_exchange: str, backward: bool) -> None:
    device, computing, travelling = on_device(kv_exchange, backward, one_queue=False)
    own = next(x for x in device.launched if x.name == "own keys")
    assert own.start == 0.0, "this rank's own keys wait for nothing"
    # One step is not hidden; of an all-gather nothing but the own keys, and in backward gradients leave at the end.
    exposed = {"ring": 1 + 2 / (RANKS - 1), "needed": 1.45, "all_gather": 2.0}[kv_exchange]
    assert device.end <= exposed * max(computing, travelling)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather"])
def test_with_one_hardware_queue_no_tile_waits_behind_a_second_transfer(kv_exchange: str, backward: bool) -> None:
    """Keys and values are one transfer, and so are their gradients; a ring's keys and sums leave in one batch."""
    one, several = (on_device(kv_exchange, backward, one_queue) for one_queue in (True, False))
    assert [(x.name, x.start) for x in one[0].launched] == [(x.name, x.start) for x in several[0].launched]


def test_a_second_transfer_would_be_seen() -> None:
    """The stages of "needed" are posted one after the other: with one queue, own keys wait behind the second."""
    device, *_ = on_device("needed", False, one_queue=True)
    first = device.launched[0]
    assert next(x for x in device.launched if x.name == "own keys").start >= first.end > 0
