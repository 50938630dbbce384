"""The pool of ranks itself: results, failures with their messages, hangs and deaths that do not spread."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import ranks as pool
from tests.harness.ranks import RankError, Ranks, on_ranks


@on_ranks
def total(offset: int) -> tuple[int, int, int]:
    x = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), int(x.item())


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_results_in_rank_order(ranks: Any, world: int) -> None:
    assert ranks(world, total, 1) == [(r, world, world * (world + 1) // 2) for r in range(world)]


@on_ranks
def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("this rank fails")
    dist.barrier()


def test_one_rank_raises_while_others_wait(own_pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(RankError, match="this rank fails") as caught:
        own_pool(2, fail_on, 1)
    assert caught.value.types[1] == "KeyError"
    assert time.monotonic() - start < 20
    assert own_pool(2, total, 0)[0] == (0, 2, 1)


@on_ranks
def sleep_forever() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


@pytest.mark.slow
def test_a_hang_is_reported_with_stacks(own_pool: Ranks) -> None:
    with pytest.raises(RankError, match="in sleep_forever"):
        own_pool(2, sleep_forever, timeout=2.0)
    assert own_pool(2, total, 0)[1] == (1, 2, 1)


@on_ranks
def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_killed_rank_is_reported(own_pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 1.0)
    with pytest.raises(RankError, match="dead\nexit code 3"):
        own_pool(2, die)
    assert own_pool(2, total, 0)[1] == (1, 2, 1)


@on_ranks
def refuse(ranks_that_do: list[int]) -> None:
    if dist.get_rank() in ranks_that_do:
        raise ValueError("no")


def test_raises_wants_every_rank(ranks: Any) -> None:
    assert ranks.raises(2, ValueError, "no", refuse, [0, 1]) == ["no", "no"]
    with pytest.raises(AssertionError, match=r"ranks \[0\] did not raise"):
        ranks.raises(2, ValueError, "no", refuse, [1])
    with pytest.raises(AssertionError, match="no rank raised"):
        ranks.raises(2, ValueError, "no", refuse, [])


@on_ranks
def leave_something() -> None:
    torch.manual_seed(123)
    torch.distributed.new_group([0])


@on_ranks
def look() -> tuple[float, int]:
    return torch.rand(()).item(), len(dist.distributed_c10d._world.pg_map)


def test_jobs_are_isolated(ranks: Any) -> None:
    first = ranks(2, look)
    ranks(2, leave_something)
    assert ranks(2, look) == first
