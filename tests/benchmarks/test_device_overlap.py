"""The measurement of overlap runs on real ranks: every mode that fits, with three times each."""

from __future__ import annotations

import random
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.device import overlap as device_overlap
from benchmarks.simulated import ring_buffers
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import REFERENCE
from tests.harness.ranks import on_ranks


class WrongGradients:
    """The reference kernel with gradients of queries that are too large."""

    name = "wrong gradients"

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        return REFERENCE.forward(tile)

    def backward(self, tile: kernels.TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = REFERENCE.backward(tile, *of_rows)
        return dq * 1.001, dk, dv


GIVEN = "--device cpu --length 32 --heads 16 --kv-heads 16 --dim 8 --dtype float32 --rounds 1"


@on_ranks
def measured() -> tuple[list[tuple[str, float, float, float]], list[str], list[str]]:
    """The times; the checks, and those with a kernel whose gradients are wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    args = device_overlap.arguments(GIVEN.split())
    checked = [result.status for result in device_overlap.compare(mesh, args)]
    with kernels.register(WrongGradients(), "cpu"):
        wrong = [result.status for result in device_overlap.compare(mesh, args)]
    return list(device_overlap.measure(mesh, args)), checked, wrong


def test_every_mode_is_checked_and_measured_on_gloo(ranks: Any) -> None:
    found = ranks(4, measured)
    times = found[0][0]
    assert all(rows == times for rows, *_ in found) and all(min(row[1:]) > 0 for row in times)
    assert len(times) == 8 and times[-1][0] == "hybrid of 2, ring, 2 groups"
    for _, checked, wrong in found:
        assert checked == ["ok"] * 8 and wrong == ["WRONG"] * 8


def test_hybrids_need_two_dimensions_and_heads_that_split() -> None:
    args = device_overlap.arguments([])  # 8 key/value heads
    for ranks, without in ((2, {"hybrid of 2, ring", "hybrid of 2, ring, 2 groups"}), (8, {"Ulysses, 4 head groups"})):
        names = {name for name, mode in device_overlap.MODES.items() if device_overlap.possible(mode, ranks, args)}
        assert names == set(device_overlap.MODES) - without


def test_a_line_says_how_much_is_hidden() -> None:
    assert device_overlap.line("ring", 0.012, 0.010, 0.008).endswith("hidden   75%")
    assert device_overlap.line("ring", 0.018, 0.010, 0.008).endswith("hidden    0%")


def test_three_buffers_help_only_where_kernels_vary() -> None:
    """The figures of docs/measured/communication.md come from this model."""

    def found(link: float, jitter: float, buffers: int) -> float:
        return ring_buffers.step(8, link, jitter, buffers, random.Random(0))

    assert found(1.0, 0.0, 2) == found(1.0, 0.0, 3) == 8 / 8
    assert found(1.0, 0.2, 3) < found(1.0, 0.2, 2)
