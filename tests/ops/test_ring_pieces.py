"""A ring whose blocks travel in pieces: exact, with the same bytes, and with less work after the last arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from hyper_cp.schedule import arrivals
from hyper_cp.schedule.build import build
from hyper_cp.schedule.lookup import resolve
from hyper_cp.schedule.ranges import merge_ranges
from hyper_cp.schedule.tiles import CAUSAL
from tests.harness.oracle import plain_attention, relative_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks

LENGTH = 120

CASES: list[dict[str, Any]] = [
    {"is_causal": True, "layout": "head_tail"},
    {},
    {"is_causal": True, "load_balance": True},
    {"is_causal": True, "layout": "head_tail", "documents": [0, 7, 20, 41, LENGTH]},
    {"is_causal": True, "window": (30, 0)},
]


def ring_in_pieces(demand: arrivals.KeyDemand) -> arrivals.Arrivals:
    """A ring whose shares travel in pieces even if they are short."""
    return arrivals.ring(demand, least_piece=1)


@on_ranks
def errors_and_messages(world: int) -> tuple[list[float], list[list[int]]]:
    """The largest error of each case, and the bytes of each of its messages between neighbours."""
    mesh, found, sent = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), [], []
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(2, h, LENGTH, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4)]
    arrivals.register_exchange("ring_in_pieces", ring_in_pieces)
    for case in CASES:
        mine = torch.tensor(token_positions(case.get("layout", "contiguous"), mesh.get_rank(), world, LENGTH))
        q, k, v, dout = (x[:, :, mine].clone() for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with comm.record_traffic() as traffic:
            out = attention(*leaves, mesh=mesh, kv_exchange="ring_in_pieces", enable_gqa=True, **case)
            got = [out, *torch.autograd.grad(out, leaves, dout)]
        sent.append([n for operation, n in traffic.entries if operation == "send_recv"])
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        documents = [case["documents"]] if "documents" in case else None
        seen = visible_pairs(LENGTH, case.get("is_causal", False), case.get("window"), documents)
        expected = plain_attention(*leaves, visible=seen)
        want = [expected, *torch.autograd.grad(expected, leaves, whole[3])]
        found.append(max(relative_error(x, y[:, :, mine]) for x, y in zip(got, want, strict=True)))
    return found, sent


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pieces_are_exact_and_send_the_bytes_of_whole_shares(ranks: Any, world: int) -> None:
    hops, share = world - 1, LENGTH // world * 2 * 2 * 2 * 8 * 8  # keys and values: B2 H2 D8, fp64
    for errors, sent in ranks(world, errors_and_messages, world):
        assert max(errors) <= 1e-10, errors
        for messages in sent[:2]:
            assert sum(messages) == hops * share * 3  # forward, again in backward, and the sums
            # Forward: each hop, in two pieces. Backward: the first hop, then each block with the sum that is complete,
            # and the way home.
            assert len(messages) == 2 * hops + (4 if hops == 1 else 2 * hops + 3)


def test_pieces_hold_each_row_once_and_share_the_work_equally() -> None:
    for ranks, share in ((2, 1025), (3, 1100), (4, 1024)):
        held = tuple(((r * share, (r + 1) * share),) for r in range(ranks))
        plan = build(held, held, ranks - 1, "ring", False, (None, None))
        hops = plan.transfers.hops
        assert hops == ranks - 1 and len(plan.forward) == 2 + 2 * hops
        rows = sorted(rows for move in plan.transfers.moves[:2] for rows in move.rows.ranges)
        assert [start for start, _ in rows] + [share] == [0] + [stop for _, stop in rows]
        for hop in range(hops):
            keys = [k for step in plan.forward[1 + 2 * hop : 3 + 2 * hop] for k in step.keys]
            assert merge_ranges(keys) == held[ranks - 2 - hop]
            assert sum(step.area for step in plan.forward[1 + 2 * hop : 3 + 2 * hop]) == share**2
    held = resolve("head_tail", 4, 8192).held
    for rank in range(4):
        plan = build(held, held, rank, "ring", False, CAUSAL)
        assert [step.area for step in plan.forward[1:-1]] == [1024**2] * 6
        assert all(len(step.tiles) == 1 and len(step.take) == 1 for step in plan.forward[1:-1])


def test_long_rings_and_short_shares_travel_whole() -> None:
    for ranks, share in ((8, 4096), (2, 1023)):
        held = tuple(((r * share, (r + 1) * share),) for r in range(ranks))
        plan = build(held, held, 0, "ring", False, CAUSAL)
        assert plan.transfers.moves[0].rows.ranges == ((0, share),) and len(plan.forward) == ranks + 1
