"""The overlap of tiles and transfers on an accelerator: the library's ops on a double of its streams and hardware
queues."""

from __future__ import annotations

import pytest

from hyper_cp.cli.modes import named_mode
from tests.harness.streams import run_balanced

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
    one, several = (run_balanced(named_mode(mode), ranks, SHARE, backward, queue) for queue in (True, False))
    late = [x.start - y.start for x, y in zip(one.of("tile"), several.of("tile"), strict=True)]
    assert min(late) >= 0 and (max(late) > 0) == waits
