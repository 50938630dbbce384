"""A way of obtaining keys and values that is added from outside the package: a ring in the other direction, whose
gradients go straight home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.ops import attention
from hyper_cp.schedule.arrivals import Arrivals, KeyDemand, register_exchange
from hyper_cp.schedule.moves import Transfers, pair
from hyper_cp.schedule.ranges import length_of, placed
from tests.harness.oracle import plain_attention, relative_error, token_positions
from tests.harness.ranks import on_ranks


def backward_ring(demand: KeyDemand) -> Arrivals:
    """Every share comes to every rank, from the rank after it. Its gradient leaves as if its owner had sent it."""
    size, rank = demand.size, demand.rank
    share = ((0, length_of(demand.keys[rank])),)
    before, after = (rank - 1) % size, (rank + 1) % size
    moves = tuple(pair(size, before, after, share, source=hop - 1) for hop in range(size - 1))
    returns = tuple(pair(size, (rank - hop) % size, (rank + hop) % size, share) for hop in range(1, size))
    blocks = tuple(placed(demand.keys[(rank + hop) % size]) for hop in range(size))
    return Arrivals(blocks, Transfers(moves, 1, returns))


@on_ranks
def run(world: int, layout: str) -> float:
    register_exchange("backward_ring", backward_ring)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v, dout = torch.randn(4, 2, 4, 48, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = torch.tensor(token_positions(layout, mesh.get_rank(), world, 48))
    local, whole = ([x.clone().requires_grad_() for x in xs] for xs in ([y[:, :, mine] for y in (q, k, v)], (q, k, v)))
    out = attention(*local, mesh=mesh, is_causal=True, kv_exchange="backward_ring", layout=layout)
    expected = plain_attention(*whole, is_causal=True)
    got = [out, *torch.autograd.grad(out, local, dout[:, :, mine])]
    want = [expected, *torch.autograd.grad(expected, whole, dout)]
    return max(relative_error(a, b[:, :, mine]) for a, b in zip(got, want, strict=True))


def test_an_exchange_from_outside_is_exact_in_every_layout(ranks: Any) -> None:
    for world, layout in ((3, "contiguous"), (4, "head_tail")):
        assert max(ranks(world, run, world, layout)) <= 1e-10


def test_a_name_means_one_exchange() -> None:
    with pytest.raises(ValueError, match="kv_exchange='ring' is registered already"):
        register_exchange("ring", backward_ring)
    with pytest.raises(ValueError, match="cannot be registered"):
        register_exchange("two words", backward_ring)
