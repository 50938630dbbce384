"""Rolling a sharded sequence, and get_batch_on_this_cp_rank: against the same done on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.ops import axis, positions
from hyper_cp.ops.batch import roll_plan
from tests.oracle import token_positions

LAYOUTS = ["contiguous", "head_tail"]


def rolled_whole(x: Tensor, shifts: int, dim: int, borders: list[list[int]] | None) -> Tensor:
    """The oracle: every position looks up its source."""
    x = x.movedim(dim, 0)
    out = torch.zeros_like(x)
    for p in range(len(x)):
        source = p - shifts
        if not 0 <= source < len(x):
            continue
        out[p] = x[source]
        for row, borders_of_row in enumerate(borders or []):
            if any(min(p, source) < b <= max(p, source) for b in borders_of_row):
                (out[p] if len(borders) == 1 else out[p][row]).zero_()  # type: ignore[arg-type]
    return out.movedim(0, dim)


@given(st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 4), st.integers(-30, 30))
def test_a_roll_plan_moves_each_row_to_its_place(layout: str, world: int, unit: int, shifts: int) -> None:
    length = 2 * world * unit
    ranges = positions.held(layout, world, length)
    whole = torch.arange(1, length + 1)
    local = [whole[torch.tensor(token_positions(layout, r, world, length))] for r in range(world)]
    plans = [roll_plan(ranges, r, shifts) for r in range(world)]
    for rank, plan in enumerate(plans):
        sent = [
            torch.cat([x[a:b] for a, b in borders]) if borders else x[:0]
            for x, borders in zip(local, plan.borders, strict=True)
        ]
        assert max(map(len, sent)) == plan.width
        parts = [
            torch.zeros(b - a, dtype=torch.int64)
            if owner is None
            else (local[rank] if owner == rank else sent[owner])[a:b]
            for owner, a, b in plan.parts
        ]
        expected = rolled_whole(whole, shifts, 0, None)[torch.tensor(token_positions(layout, rank, world, length))]
        assert torch.equal(torch.cat(parts), expected)


ROLLS: list[tuple[int, Any]] = [(s, None) for s in (-1, 1, -2, 3, 0, -7, 11, -24, 50)]
ROLLS += [(s, d) for s in (-1, 2, -5) for d in ([0, 5, 6, 17, 24], [[0, 24], [0, 7, 8, 24], [0, 1, 23, 24]])]


def rolls(layout: str, names: tuple[str, ...]) -> dict[str, int]:
    """Whether each roll and its gradient are those of the whole; and the transfers of each."""
    world = dist.get_world_size()
    shape = (world,) if len(names) == 1 else (2, world // 2)
    handler = ContextParallelHandler(init_device_mesh("cpu", shape, mesh_dim_names=names), layout)
    mine, g = torch.tensor(token_positions(layout, dist.get_rank(), world, 24)), torch.Generator().manual_seed(1)
    for shifts, documents in ROLLS:
        borders = documents if documents is None or isinstance(documents[0], list) else [documents]
        for x, dim in (
            (torch.randn(3, 24, dtype=torch.float64, generator=g), -1),
            (torch.randn(24, 3, 2, dtype=torch.float64, generator=g), 0),
            (torch.rand(3, 2, 24, generator=g) > 0.5, 2),
            (torch.randint(99, (3, 24, 2), generator=g), 1),
        ):
            local = x.index_select(dim, mine)
            learns = x.is_floating_point()
            local.requires_grad_(learns)
            with axis.record_traffic() as log:
                got, total = handler.roll_tensor(local, shifts, dim, documents=documents)
            where = f"{shifts} {documents} {tuple(x.shape)}"
            want = rolled_whole(x, shifts, dim, borders).index_select(dim, mine)
            assert torch.equal(got, want), where
            assert got.dtype == x.dtype and torch.equal(total, want.sum()), where
            assert len(log.entries) <= len(names), where
            if learns:
                weight = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
                wide = x.clone().requires_grad_()
                (full,) = torch.autograd.grad(
                    (rolled_whole(wide * 1, shifts, dim, borders) * weight).sum() + 0 * wide.sum(), wide
                )
                (grad,) = torch.autograd.grad((got * weight.index_select(dim, mine)).sum(), local)
                assert torch.equal(grad, full.index_select(dim, mine)), where
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rolls(ranks: Any, world: int, layout: str) -> None:
    ranks(world, rolls, layout, ("cp",))


def test_rolls_on_a_mesh_of_two_dimensions(ranks: Any) -> None:
    ranks(4, rolls, "head_tail", ("ring", "ulysses"))


def roll_traffic(layout: str) -> tuple[int, int]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (4,)), layout)
    with axis.record_traffic() as log, handler.documents([0, 9, 64]):
        handler.roll_tensor(torch.zeros(2, 16, 5), -1, 1)
    return len(log.entries), log.bytes_sent


@pytest.mark.parametrize("layout,rows", [("contiguous", 1), ("head_tail", 2)])
def test_only_border_rows_travel(ranks: Any, layout: str, rows: int) -> None:
    for entries, sent in ranks(4, roll_traffic, layout):
        assert (entries, sent) == (1, 3 * rows * 2 * 5 * 4)


def wrong_roll(what: str) -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    x = torch.zeros(3, 8)
    {
        "dims": lambda: handler.roll_tensor(x, -1, 2),
        "shifts": lambda: handler.roll_tensor(x, (1, 2)),  # type: ignore[arg-type]
        "documents": lambda: handler.roll_tensor(x, documents=[0, 5, 12]),
        "rows": lambda: handler.roll_tensor(x, documents=[[0, 16], [0, 4, 16]]),
    }[what]()


def test_wrong_rolls_are_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "dims=2 is not a dimension", wrong_roll, "dims")
    ranks.raises(2, "TypeError", r"shifts=\(1, 2\) must be an int", wrong_roll, "shifts")
    ranks.raises(2, "ValueError", "global sequence length 16", wrong_roll, "documents")
    ranks.raises(2, "ValueError", "2 rows for a batch of 3", wrong_roll, "rows")
