"""A way of obtaining keys and values that is added from outside the package: a ring in the other direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import attention, exchange
from hyper_cp.schedule.build import Schedule
from tests.harness.oracle import plain_attention, relative_error, token_positions
from tests.harness.ranks import on_ranks


class Forward:
    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule) -> None:
        self.axis, self.block, self.hops = axis, [k, v], plan.hops

    def __iter__(self) -> Iterator[Any]:
        own, size, rank = self.block, self.axis.size, self.axis.rank
        yield tuple(own)
        for _ in range(self.hops):
            sends = [x.contiguous() for x in self.block]
            self.block = [torch.empty_like(x) for x in sends]
            self.axis.send_recv(sends, (rank - 1) % size, self.block, (rank + 1) % size).wait()
            yield tuple(self.block)
        yield tuple(own)


class Backward(Forward):
    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype) -> None:
        super().__init__(axis, k, v, plan)
        self.home = tuple(torch.zeros_like(x, dtype=dtype) for x in (k, v))

    def __iter__(self) -> Iterator[Any]:
        size, rank = self.axis.size, self.axis.rank
        for step, block in enumerate(super().__iter__()):
            if step in (0, self.hops + 1):
                yield *block, *self.home
                continue
            grads = [torch.zeros_like(x, dtype=self.home[0].dtype) for x in block]
            yield *block, *grads
            arriving = [torch.empty_like(x) for x in grads]  # home: `step` ranks back
            self.axis.send_recv(grads, (rank + step) % size, arriving, (rank - step) % size).wait()
            for home, x in zip(self.home, arriving, strict=True):
                home += x


def visits(rank: int, size: int) -> list[tuple[int, ...]]:
    return [((rank + hop) % size,) for hop in range(size)]


@on_ranks
def run(world: int, layout: str) -> float:
    exchange.register("backward_ring", Forward, Backward, visits)
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
