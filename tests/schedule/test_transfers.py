"""The transfers of whole worlds without processes: every departure arrives, in one order on all ranks, with the bytes
of the formula; and the gradients of keys come home."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.schedule import build as schedule
from hyper_cp.schedule import lookup
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.moves import HOME, Move, Transfers
from tests.harness.transfers import Gradient, carry_out, neighbours_agree

CAUSAL, FULL = (None, 0), (None, None)
EXCHANGES = ("ring", "all_gather", "needed")


def one_for_each_use(own: list[list[int]]) -> Gradient:
    """A gradient that is 1 for each key of another rank."""
    return lambda rank, step, block: 1.0 - np.isin(block, own[rank])


@st.composite
def worlds(draw: st.DrawFn) -> tuple:
    ring = draw(st.integers(2, 64))
    layout = draw(st.sampled_from(["contiguous", "head_tail", "balanced"]))
    length = 2 * ring * draw(st.integers(1, 4))
    cuts = sorted(set(draw(st.lists(st.integers(1, length - 1), max_size=5))))
    band = draw(st.sampled_from([CAUSAL, FULL, (-5, 0), (-length // 3, 2)]))
    stages = draw(st.sampled_from([None, 1, 3]))
    return ring, layout, draw(st.sampled_from(EXCHANGES)), length, (0, *cuts, length), band, stages


@settings(max_examples=15, deadline=None)
@given(worlds())
def test_every_departure_arrives_and_every_gradient_comes_home(world: tuple) -> None:
    ring, layout, kv, length, documents, band, stages = world
    packed = PackedDocuments([list(documents)])
    held = lookup.resolve(layout, ring, length, packed).held
    plans = [schedule.build(held, held, r, kv, False, band, packed.rows, stages=stages) for r in range(ring)]
    own = [[p for start, stop in mine for p in range(start, stop)] for mine in held]
    blocks, _ = carry_out([plan.transfers for plan in plans], own)
    for mine, of_rank, plan in zip(own, blocks, plans, strict=True):
        for step, block in zip(plan.forward[:-1], of_rank, strict=True):
            keys = np.concatenate([block[:0], *(block[start:stop] for start, stop in step.take)])
            assert keys.tolist() == [p for start, stop in step.keys for p in range(start, stop)]
        others = np.concatenate(of_rank[1:]) if len(of_rank) > 1 else np.array([], int)
        received = others if kv != "all_gather" else others[~np.isin(others, mine)]
        assert len(received) == plan.received == len(set(received.tolist())), "each row once"
        rows = length // ring
        sent = [sum(move.sent) for move in plan.transfers.moves]
        if kv == "ring":
            assert sum(sent) == plan.transfers.hops * rows
        if kv == "all_gather":
            assert sum(sent) == plan.transfers.hops * (ring - 1) * rows
    _, sums = carry_out([plan.transfers for plan in plans], own, one_for_each_use(own))
    arrived = [x[~np.isin(x, mine)] for mine, of_rank in zip(own, blocks, strict=True) for x in of_rank[1:]]
    copies = np.bincount(np.concatenate([np.array([], int), *arrived]), minlength=length)
    for mine, total in zip(own, sums, strict=True):
        assert (total == copies[mine]).all(), "a gradient from each rank that has the key"


@pytest.mark.parametrize("size", [256, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kv, band", [("ring", (-3, 0)), ("ring", (-40, 0)), ("needed", (-7, 0)), ("all_gather", CAUSAL)]
)
def test_sampled_ranks_of_wide_worlds_agree(size: int, kv: str, band: tuple) -> None:
    held = lookup.resolve("contiguous", size, 4 * size).held
    sampled = {0, 1, size - 1} if size > 1000 else {0, 1, 2, size // 2, size // 2 + 1, size - 2, size - 1}
    found = {rank: schedule.build(held, held, rank, kv, False, band).transfers for rank in sampled}
    neighbours_agree(found)
    for rank, each in found.items():
        rows = {"ring": each.hops * 4, "all_gather": 4 * (size - 1), "needed": 7 if rank + 1 < size else 0}[kv]
        assert sum(sum(move.sent) for move in each.moves) == (
            rows if kv != "needed" or rank + 2 < size else min(rows, 4)
        )


def two_levels(rank: int, hosts: int, per_host: int) -> Transfers:
    """A ring of two levels as a list of moves: shares go round inside the host, then on to the same place on the next
    host. Gradients leave straight for the owner."""
    size, (host, place) = hosts * per_host, divmod(rank, per_host)

    def rank_at(host: int, place: int) -> int:
        return host % hosts * per_host + place % per_host

    def only(peer: int) -> tuple[int, ...]:
        return tuple(2 * (r == peer) for r in range(size))

    rows, moves, returns, first = schedule.Rows(((0, 2),)), [], [], HOME
    for round_ in range(hosts):
        source = first
        if round_:
            moves.append(Move("pair", first, rows, only(rank_at(host + 1, place)), only(rank_at(host - 1, place))))
            source = first = len(moves) - 1
            returns.append((round_, 0))
        for hop in range(1, per_host):
            moves.append(Move("pair", source, rows, only(rank_at(host, place + 1)), only(rank_at(host, place - 1))))
            source = len(moves) - 1
            returns.append((round_, hop))
    back = [
        Move("pair", HOME, rows, only(rank_at(host + h, place + p)), only(rank_at(host - h, place - p)))
        for h, p in returns
    ]
    return Transfers(tuple(moves), 1, tuple(back))


def test_a_ring_of_two_levels_is_another_list_of_moves() -> None:
    """No other loop: the same events carry it out."""
    transfers = [two_levels(rank, 3, 2) for rank in range(6)]
    own = [[2 * rank, 2 * rank + 1] for rank in range(6)]
    blocks, sums = carry_out(transfers, own, one_for_each_use(own))
    assert all(sorted(np.concatenate(of_rank).tolist()) == [*range(12)] for of_rank in blocks)
    assert all((total == 5).all() for total in sums)


def test_a_wrong_list_of_moves_is_found() -> None:
    held = lookup.resolve("contiguous", 3, 12).held
    plans = [schedule.build(held, held, r, "ring", False, FULL).transfers for r in range(3)]
    own = [[*range(4 * r, 4 * r + 4)] for r in range(3)]
    with pytest.raises(ValueError, match="move 0 sends block 0 on, with 1 moves under way"):
        Transfers(plans[0].moves[::-1], 1, plans[0].returns)
    with pytest.raises(ValueError, match="2 moves and 0 returns"):
        Transfers(plans[0].moves, 1)
    for wrong in ([plans[1], plans[0], plans[2]], [Transfers(), *plans[1:]]):
        with pytest.raises((AssertionError, KeyError)):
            carry_out(wrong, own, one_for_each_use(own))
