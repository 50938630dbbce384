"""Transfers of every kind on gloo: exact for any size, counted, and with receives posted before sends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_cp.mesh import comm
from tests.harness.ranks import on_ranks

SIZES = [(0,), (1,), (7, 3), (5, 0, 2), (1023, 257)]
"""Shapes of what a rank sends to another one: empty, odd, and larger than the buffers of a connection."""


def message(source: int, to: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers that are different for every sender, receiver and place."""
    values = torch.arange(torch.Size(shape).numel()) * 64 + source * 8 + to
    return (values % 251).to(dtype).reshape(shape)


class Batches:
    """Records the kinds of transfers of each batch, and counts the bytes of sends."""

    def __init__(self) -> None:
        self.kinds: list[list[str]] = []
        self.sent = 0

    def __enter__(self) -> Batches:
        self.original = dist.batch_isend_irecv

        def recording(ops: list[dist.P2POp]) -> Any:
            self.kinds.append([op.op.__name__ for op in ops])
            self.sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return self.original(ops)

        dist.batch_isend_irecv = recording
        return self

    def __exit__(self, *_: Any) -> None:
        dist.batch_isend_irecv = self.original


def transfers(axis: comm.Axis, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[str, Any, Any]]:
    """Each kind of transfer with a function that posts it and the result that it must have."""
    n, mine = axis.size, axis.rank
    others = [p for p in range(n) if p != mine]
    outgoing = torch.stack([message(mine, to, shape, dtype) for to in range(n)])
    incoming = torch.stack([message(source, mine, shape, dtype) for source in range(n)])
    without_own = outgoing.clone()
    without_own[mine] = 0
    to, source = (mine + 1) % n, (mine - 1) % n
    received = [torch.empty_like(outgoing[0]) for _ in range(2)]
    sent = [message(mine, to, shape, dtype), message(mine, to, shape, dtype) + 1]
    # Rank p sends p + r rows to rank r: none from 0 to 0, and another number to each.
    rows = [[0 if p == r else p + r for r in range(n)] for p in range(n)]
    whole = [[message(p, r, (rows[p][r], *shape[1:]), dtype) for r in range(n)] for p in range(n)]
    arrived = torch.cat([whole[p][mine] for p in range(n)])
    return [
        ("all_to_all", lambda: axis.all_to_all(outgoing), incoming),
        (
            "all_gather",
            lambda: axis.all_gather(outgoing[0]),
            torch.cat([message(p, 0, shape, dtype) for p in range(n)]),
        ),
        (
            "reduce_scatter",
            lambda: axis.reduce_scatter(without_own.flatten(0, 1)),
            sum(incoming[p] for p in others),
        ),
        (
            "all_to_all_rows",
            lambda: axis.all_to_all_rows(torch.cat(whole[mine]), rows[mine], [row[mine] for row in rows]),
            arrived,
        ),
        (
            "send_recv",
            lambda: axis.send_recv([comm.Message(x, to) for x in sent], [comm.Message(x, source) for x in received]),
            [message(source, mine, shape, dtype), message(source, mine, shape, dtype) + 1],
        ),
    ]


@on_ranks
def run_all(world: int) -> list[str]:
    """Everything that is wrong: results, bytes, order."""
    axis, wrong = comm.Axis.of(dist.group.WORLD), []
    small = itertools.product(SIZES[:-1], (torch.float32, torch.bfloat16, torch.float64))
    for shape, dtype in (*small, (SIZES[-1], torch.float32)):
        posted = []
        for name, post, want in transfers(axis, shape, dtype):
            with Batches() as batches, comm.record_traffic() as traffic:
                posted.append((name, post(), want))
            case = f"{name} {shape} {dtype}"
            if batches.sent != traffic.bytes_sent:
                wrong.append(f"{case}: {batches.sent} bytes sent, {traffic.bytes_sent} recorded")
            if any(kinds != sorted(kinds) for kinds in batches.kinds):  # "irecv" < "isend"
                wrong.append(f"{case}: a send is posted before a receive")
        for name, pending, want in posted:  # all of them were in flight together
            got = pending.wait()
            same = all(map(torch.equal, got, want)) if isinstance(want, list) else torch.equal(got, want)
            wrong += [] if same else [f"{name} {shape} {dtype}: another result"]
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_transfers_are_exact_counted_and_receive_first(ranks: Any, world: int) -> None:
    assert ranks(world, run_all, world) == [[]] * world
