"""The measurement of overlap runs on real ranks: every mode that fits, with three times each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.ranks import on_ranks

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@on_ranks
def measured(given: list[str]) -> list[tuple[str, float, float, float]]:
    sys.path.insert(0, BENCHMARKS)
    import device_overlap

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return list(device_overlap.measure(mesh, device_overlap.arguments(given)))


def test_every_mode_is_measured_on_gloo(ranks: Any) -> None:
    given = [
        "--device",
        "cpu",
        "--length",
        "32",
        "--heads",
        "8",
        "--kv-heads",
        "8",
        "--dim",
        "8",
        "--dtype",
        "float32",
        "--rounds",
        "1",
    ]
    for world in (2, 4):
        found = ranks(world, measured, given)
        assert all(rows == found[0] for rows in found) and all(min(row[1:]) > 0 for row in found[0])
        names = {row[0] for row in found[0]}
        assert {"ring, head_tail", "needed, head_tail", "Ulysses"} <= names
        assert ("Ulysses, 4 head groups" in names) == (world == 2)
        assert ("hybrid of 2, ring, 2 groups" in names) == (world == 4)


def test_a_line_says_how_much_is_hidden() -> None:
    sys.path.insert(0, BENCHMARKS)
    import device_overlap

    assert device_overlap.line("ring", 0.012, 0.010, 0.008).endswith("hidden   75%")
    assert device_overlap.line("ring", 0.018, 0.010, 0.008).endswith("hidden    0%")


def test_three_buffers_help_only_where_kernels_vary() -> None:
    """The figures of docs/communication.md come from this model."""
    sys.path.insert(0, BENCHMARKS)
    import random

    import ring_buffers

    def found(link: float, jitter: float, buffers: int) -> float:
        return ring_buffers.step(8, link, jitter, buffers, random.Random(0))

    assert found(1.0, 0.0, 2) == found(1.0, 0.0, 3) == 8 / 8
    assert found(1.0, 0.2, 3) < found(1.0, 0.2, 2)
