"""``causal_conv1d`` of a split sequence against each document alone on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import causal_conv1d
from tests.harness.ranks import Ranks, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import convolve

CASES: list[tuple[str, Any, int, int]] = [
    ("contiguous", None, 24, 4),
    ("head_tail", None, 48, 4),
    ("head_tail", [[0, 1, 30, 48], [0, 24, 25, 48]], 48, 3),
    ("per_document", [[0, 1, 30, 37, 48]], 48, 4),
    ("contiguous", [[0, 11, 12, 24]], 24, 5),
    ("contiguous", None, 24, 1),
]
"""Layout, documents, length and width."""


@on_ranks
def errors() -> dict[str, float]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found = {}
    # One token a rank: the rows before it come from several ranks.
    for layout, documents, length, width in [*CASES, ("contiguous", None, world, 4)]:
        handler = ContextParallelHandler(mesh, layout)
        with handler.documents(documents):
            at = handler.position_ids(length)
        g = torch.Generator().manual_seed(length + width)
        shapes = [(2, 3, length), (3, width), (3,), (2, 3, length)]
        x, weight, bias, dout = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = torch.nn.functional.silu(convolve(*leaves, documents))
        want = [out.detach()[:, :, at], *torch.autograd.grad(out, leaves, dout)]
        want[1] = want[1][:, :, at]
        local = [t.clone().requires_grad_() for t in (x[:, :, at], weight, bias)]
        with record_traffic() as traffic:
            got = causal_conv1d(*local, mesh=mesh, activation="silu", layout=layout, documents=documents)
            grads = torch.autograd.grad(got, local, dout[:, :, at])
        assert len([name for name, _ in traffic.entries if name == "all_gather"]) == 2 * (width > 1 and world > 1)
        everything = [got, grads[0], *sum_over_ranks(*grads[1:])]
        worst = max((a - b).abs().max().item() for a, b in zip(everything, want, strict=True))
        found[f"{layout} {documents} {length} {width}"] = worst
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_rows_before_each_range_travel(world: int, ranks: Ranks) -> None:
    bad = {name: e for rank in ranks(world, errors) for name, e in rank.items() if not e <= 1e-12}
    assert not bad, bad
