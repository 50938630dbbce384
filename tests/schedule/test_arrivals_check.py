"""Exchanges from outside that are wrong are refused when a plan is made, and the library's own pass the same check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.ops import attention
from hyper_cp.schedule.arrivals import Arrivals, KeyDemand, arrivals, register_exchange
from hyper_cp.schedule.arrivals_check import check_arrivals
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.moves import HOME, Transfers, pair
from hyper_cp.schedule.ranges import placed
from hyper_cp.schedule.tiles import CAUSAL, FULL, Band
from tests.harness.ranks import on_ranks


def demand_of(layout: str, ranks: int, band: Band, documents: tuple[int, ...] | None, stages: int = 2) -> KeyDemand:
    held = ResolvedLayout.of(layout, ranks, 48).held
    return KeyDemand(1, held, held, band, None if documents is None else (documents,), None, stages)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ring", "all_gather", "needed", "double_ring_2"]),
    st.sampled_from(["contiguous", "head_tail"]),
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from([CAUSAL, FULL, (-5, 0), (-3, 4)]),
    st.sampled_from([None, (0, 7, 30, 48), (0, 48)]),
    st.integers(1, 3),
)
def test_the_exchanges_of_the_library_pass(
    name: str, layout: str, ranks: int, band: Band, documents: tuple[int, ...] | None, stages: int
) -> None:
    check_arrivals(name, demand_of(layout, ranks, band, documents, stages))


def ring_of(demand: KeyDemand, hops: int, back: int = 0) -> Arrivals:
    """A ring whose gradients go straight home; ``back`` ranks too far."""
    size, rank, share = demand.size, demand.rank, ((0, 16),)
    moves = tuple(pair(size, (rank + 1) % size, (rank - 1) % size, share, source=hop - 1) for hop in range(hops))
    returns = tuple(
        pair(size, (rank + hop + back) % size, (rank - hop - back) % size, share) for hop in range(1, hops + 1)
    )
    blocks = tuple(placed(demand.keys[(rank - hop) % size]) for hop in range(hops + 1))
    return Arrivals(blocks, Transfers(moves, 1, returns))


def one_short(demand: KeyDemand) -> Arrivals:
    return ring_of(demand, 1)


def once_too_far(demand: KeyDemand) -> Arrivals:
    return ring_of(demand, 3)


def other_names(demand: KeyDemand) -> Arrivals:
    """The keys of the ring in the other direction."""
    made = ring_of(demand, 2)
    return replace(made, blocks=(made.blocks[0], *made.blocks[:0:-1]))


def lost_gradients(demand: KeyDemand) -> Arrivals:
    return ring_of(demand, 2, back=1)


def added_late(demand: KeyDemand) -> Arrivals:
    made = ring_of(demand, 2)
    first, second = made.transfers.gradient_moves
    moves = replace(made.transfers, gradient_moves=(first, replace(second, source=0)))
    return replace(made, transfers=moves)


def not_its_own(demand: KeyDemand) -> Arrivals:
    made = ring_of(demand, 2)
    return replace(made, blocks=(made.blocks[1], *made.blocks[1:]))


def fewer_on_one(demand: KeyDemand) -> Arrivals:
    return ring_of(demand, 1 if demand.rank == 2 else 2)


WRONG: dict[Callable[[KeyDemand], Arrivals], str] = {
    one_short: r"brings key 16 to rank 0 0 times",
    once_too_far: r"brings key 0 to rank 0 2 times",
    other_names: r"says that block 0 of rank 0 has the keys \[\(16, 32\)\], and its move says \[\(32, 48\)\]",
    lost_gradients: r"says that block 0 of rank 0 has .*, and its gradient move says \[\(16, 32\)\]",
    added_late: r"adds the gradient of block 1 of rank 0 to that of block 0. That one has left already",
    not_its_own: r"gives rank 0 the keys \[\(32, 48\)\] as its own. It has \[\(0, 16\)\]",
    fewer_on_one: r"gives ranks \[3, 3, 2\] blocks and \[2, 2, 1\] moves",
}


@pytest.mark.parametrize("exchange", WRONG, ids=lambda x: x.__name__)
def test_wrong_exchanges_are_refused(exchange: Callable[[KeyDemand], Arrivals]) -> None:
    register_exchange(exchange.__name__, exchange)
    demand = demand_of("contiguous", 3, FULL, None)
    assert arrivals(exchange.__name__, demand).transfers.moves[0].source == HOME
    with pytest.raises(ValueError, match=f"kv_exchange='{exchange.__name__}' {WRONG[exchange]}"):
        check_arrivals(exchange.__name__, demand)


def test_keys_that_nobody_sees_need_not_arrive() -> None:
    register_exchange("one_short", one_short)
    check_arrivals("one_short", demand_of("contiguous", 3, (-10, 0), None))


@on_ranks
def attend(exchange: str) -> None:
    register_exchange(exchange, globals()[exchange])
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    q = torch.ones(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)
    attention(q, q, q, mesh=mesh, kv_exchange=exchange).sum().backward()


@pytest.mark.parametrize("exchange", ["one_short", "other_names", "lost_gradients"])
def test_attention_refuses_them_on_every_rank(ranks: Any, exchange: str) -> None:
    ranks.raises(3, ValueError, f"kv_exchange='{exchange}'", attend, exchange)
