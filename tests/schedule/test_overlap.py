"""The overlap of tiles and transfers on an accelerator: the library's ops on a mock of its streams and hardware
queues."""

from __future__ import annotations

import pytest

from hyper_cp.cli.modes import named_mode
from tests.harness.streams import Device, run, run_balanced

RANKS, SHARE = 8, 2048

# A step of 1 hides all transfers, one of 2 none. The transfer of one step is not hidden; of an all-gather nothing but
# the own keys, and in backward gradients leave at the end; Ulysses in one group of heads hides nothing.
EXPOSED = {
    "ring, head_tail": 1 + 2 / (RANKS - 1),
    "all-gather, head_tail, 1 stage": 2.0,
    "all-gather, head_tail, 4 stages": 1.45,
    "needed, head_tail, 4 stages": 1.45,
    "Ulysses": 2.0,
    "Ulysses, 4 head groups": 1.45,
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mode", EXPOSED)
def test_tiles_run_while_keys_and_gradients_travel(mode: str, backward: bool) -> None:
    device = run_balanced(named_mode(mode), RANKS, SHARE, backward, one_queue=False)
    own = device.of("tile")[0]
    assert own.start == 0.0 or "Ulysses" in mode, "this rank's own keys wait for nothing"
    assert device.end <= EXPOSED[mode] + 1e-9


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "mode, ranks, waits",
    [
        ("ring, head_tail", 8, False),
        ("ring, head_tail", 4, True),  # a share travels in two pieces
        ("ring, load_balance", 8, True),  # tails of queries travel beside keys
        ("double ring, head_tail", 12, False),  # a share leaves for another host when nothing keeps it waiting
        ("all-gather, head_tail, 1 stage", 8, False),
        ("all-gather, head_tail, 4 stages", 8, True),
        ("needed, head_tail, 1 stage", 4, False),
        ("needed, head_tail, 4 stages", 4, True),
        ("Ulysses", 8, False),
        ("Ulysses, 4 head groups", 8, True),
    ],
)
def test_with_one_hardware_queue_tiles_wait_behind_a_second_transfer(
    mode: str, ranks: int, waits: bool, backward: bool
) -> None:
    """Keys and values are one transfer, and so are their gradients; a ring's keys and sums leave in one batch. So no
    tile waits, but where an exchange posts several transfers in a row, as docs/measured/devices.md says."""
    per_host = 4 if "double" in mode else 0
    one, several = (run_balanced(named_mode(mode), ranks, SHARE, backward, queue, per_host) for queue in (True, False))
    late = [x.start - y.start for x, y in zip(one.of("tile"), several.of("tile"), strict=True)]
    assert min(late) >= 0 and (max(late) > 0) == waits


@pytest.mark.parametrize("backward, double, flat", [(False, 1.0, 1.8), (True, 1.4, 5.3)])
def test_links_between_hosts_work_for_a_whole_round_of_a_double_ring(
    backward: bool, double: float, flat: float
) -> None:
    """Two hosts of four ranks, with links inside that take no time, and links between on which a share takes as long as
    two of eight tiles. A double ring hides it, and in backward some of the gradient, of four tiles, that goes home. In
    a flat ring every hop waits for the link of the last rank."""

    def took(mode: str, link: float) -> float:
        return run(named_mode(mode), RANKS, SHARE, backward, Device(byte=link), per_host=4).end

    device = run(named_mode("double ring, head_tail"), RANKS, SHARE, backward, Device(), per_host=4)
    tiles, share = took("double ring, head_tail", 0.0), device.of("transfer")[0].seconds
    found = [took(mode, tiles / 4 / share) / tiles for mode in ("double ring, head_tail", "ring, head_tail")]
    assert found[0] <= double + 0.01 and found[1] >= flat - 0.1, found
