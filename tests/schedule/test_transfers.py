"""The transfers of whole worlds without processes: every departure arrives, in one order on all ranks, with the bytes
of the formula; and the gradients of keys come home."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyper_cp.schedule import build as schedule
from hyper_cp.schedule import lookup
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.moves import Move, Transfers
from tests.harness.transfers import Gradient, carry_out, neighbours_agree

CAUSAL, FULL = (None, 0), (None, None)
EXCHANGES = ("ring", "double_ring", "all_gather", "needed")


def one_for_each_use(own: list[list[int]]) -> Gradient:
    """A gradient that is 1 for each key of another rank."""
    return lambda rank, step, block: 1.0 - np.isin(block, own[rank])


@st.composite
def worlds(draw: st.DrawFn) -> tuple:
    kv = draw(st.sampled_from(EXCHANGES))
    ring = draw(st.integers(2, 9))
    if kv == "double_ring":
        hosts, per_host = draw(st.sampled_from(((2, 2), (2, 3), (3, 2), (4, 2), (2, 5))))
        ring, kv = hosts * per_host, f"double_ring_{per_host}"
    layout = draw(st.sampled_from(["contiguous", "head_tail", "balanced"]))
    length = 2 * ring * draw(st.integers(1, 4))
    cuts = sorted(set(draw(st.lists(st.integers(1, length - 1), max_size=5))))
    band = draw(st.sampled_from([CAUSAL, FULL, (-5, 0), (-length // 3, 2)]))
    stages = draw(st.sampled_from([None, 1, 3]))
    return ring, layout, kv, length, (0, *cuts, length), band, stages


@settings(max_examples=25, deadline=None)
@example((64, "contiguous", "double_ring_8", 128, (0, 128), CAUSAL, None))
@example((64, "head_tail", "all_gather", 128, (0, 50, 128), CAUSAL, None))
@example((33, "contiguous", "ring", 66, (0, 66), FULL, None))
@example((17, "balanced", "needed", 34, (0, 5, 34), CAUSAL, 3))
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
        if "ring" in kv:
            assert sum(sent) == plan.transfers.hops * rows
        if kv == "all_gather":
            assert sum(sent) == plan.transfers.hops * (ring - 1) * rows
    _, sums = carry_out([plan.transfers for plan in plans], own, one_for_each_use(own))
    arrived = [x[~np.isin(x, mine)] for mine, of_rank in zip(own, blocks, strict=True) for x in of_rank[1:]]
    copies = np.bincount(np.concatenate([np.array([], int), *arrived]), minlength=length)
    for mine, total in zip(own, sums, strict=True):
        assert (total == copies[mine]).all(), "a gradient from each rank that has the key"


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, kv, band",
    [(4096, "ring", (-3, 0)), (256, "ring", (-40, 0)), (1024, "needed", (-7, 0)), (256, "all_gather", CAUSAL)],
)
def test_sampled_ranks_of_wide_worlds_agree(size: int, kv: str, band: tuple) -> None:
    held = lookup.resolve("contiguous", size, 4 * size).held
    sampled = {0, 1, size - 1} if size > 256 else {0, 1, 2, size // 2, size // 2 + 1, size - 2, size - 1}
    found = {rank: schedule.build(held, held, rank, kv, False, band).transfers for rank in sampled}
    neighbours_agree(found)
    for rank, each in found.items():
        rows = {"ring": each.hops * 4, "all_gather": 4 * (size - 1), "needed": 7 if rank + 1 < size else 0}[kv]
        assert sum(sum(move.sent) for move in each.moves) == (
            rows if kv != "needed" or rank + 2 < size else min(rows, 4)
        )


# --------------------------------------------------------------------------- a ring of two levels


def between_hosts(moves: Sequence[Move], rank: int, per_host: int) -> int:
    """The rows that a rank sends to other hosts."""
    return sum(rows for move in moves for to, rows in enumerate(move.sent) if to // per_host != rank // per_host)


@pytest.mark.parametrize("hosts, per_host", [(2, 3), (3, 2), (4, 4), (2, 9), (9, 2), (5, 7)])
def test_bytes_of_a_double_ring_are_the_same_on_every_link(hosts: int, per_host: int) -> None:
    """Every rank sends to other hosts as many shares, and as many gradients, as there are other hosts; a flat ring
    sends all shares that go round from the last rank of each host."""
    ring, rows = hosts * per_host, 2
    held = lookup.resolve("contiguous", ring, rows * ring).held
    for rank in range(ring):
        each = schedule.build(held, held, rank, f"double_ring_{per_host}", False, FULL).transfers
        for moves in (each.moves, [move.transposed for move in each.gradient_moves]):
            assert between_hosts(moves, rank, per_host) == (hosts - 1) * rows
            assert sum(sum(move.sent) for move in moves) == (ring - 1) * rows
            assert all(
                (move.meanwhile > 0) == (to // per_host != rank // per_host) == (origin // per_host != rank // per_host)
                for move in moves
                for to, origin in [move.peers]
            )
    flat = schedule.build(held, held, per_host - 1, "ring", False, FULL).transfers
    assert between_hosts(flat.moves, per_host - 1, per_host) == (ring - 1) * rows


def test_shares_travel_to_other_hosts_for_a_whole_round() -> None:
    """They leave before the first block of a round is used, and are waited for after the last one, forward and
    backward; so are gradients that go home. The round of the own host is cut in two: after 2 of its 3 hops comes the
    first share of another host, and 1 hop, and the second part of the own tile, hide the last gradient."""
    hosts, per_host = 4, 4
    ring = hosts * per_host
    held = lookup.resolve("contiguous", ring, 2 * ring).held
    each = schedule.build(held, held, 5, "double_ring_4", False, FULL).transfers
    for backward, events in enumerate((each.forward, each.backward)):
        uses, waits, posted = 0, list[tuple[str, int]](), dict[tuple[str, int], int]()
        for kind, block, gradient in events:
            for way, number, moves in (("keys", block, each.moves), ("sums", gradient, each.gradient_moves)):
                if number is None or not moves[number].meanwhile or kind == "use":
                    continue
                if kind == "post":
                    posted[way, number] = uses
                else:
                    waits.append((way, uses - posted.pop((way, number))))
            uses += kind == "use"
        keys = [("keys", 3), ("keys", 4), ("keys", 4)]
        assert not posted and sorted(waits) == keys + [("sums", 1), ("sums", 4), ("sums", 4)] * backward


def test_a_double_ring_over_one_host_is_a_flat_one() -> None:
    held = lookup.resolve("contiguous", 4, 16).held
    for name in ("double_ring", "double_ring_1", "double_ring_4", "double_ring_8"):
        plans = [schedule.build(held, held, 1, kv, False, CAUSAL).transfers for kv in (name, "ring")]
        assert plans[0].forward == plans[1].forward
        assert [move.sent for move in plans[0].moves] == [move.sent for move in plans[1].moves]


def test_a_wrong_list_of_moves_is_found() -> None:
    held = lookup.resolve("contiguous", 3, 12).held
    plans = [schedule.build(held, held, r, "ring", False, FULL).transfers for r in range(3)]
    own = [[*range(4 * r, 4 * r + 4)] for r in range(3)]
    with pytest.raises(ValueError, match="move 0 sends block 0 on, with 1 moves under way"):
        Transfers(plans[0].moves[::-1], 1, plans[0].gradient_moves)
    with pytest.raises(ValueError, match="2 moves and 0 gradient moves"):
        Transfers(plans[0].moves, 1)
    for wrong in ([plans[1], plans[0], plans[2]], [Transfers(), *plans[1:]]):
        with pytest.raises((AssertionError, KeyError)):
            carry_out(wrong, own, one_for_each_use(own))
