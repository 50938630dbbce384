"""Windows over a split sequence against loops over one whole sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import windows
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import Ranks, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import boundaries

CASES: list[tuple[str, Any, int, list[int], int]] = [
    ("contiguous", None, 24, [1], 1),
    ("head_tail", None, 48, [1, 2], 1),
    ("head_tail", [[0, 1, 30, 48], [0, 24, 25, 48]], 48, [0, 2, 1], 1),
    ("per_document", [[0, 1, 30, 37, 48]], 48, [3, 0], 1),
    ("contiguous", None, 36, [*range(7, -1, -1)], 4),  # windows of 8 with a stride of 4
    ("head_tail", None, 24, [*range(7, -1, -1)], 4),  # over more ranges than one
    ("contiguous", None, 12, [*range(10, -1, -1)], 11),  # over all ranks, and a window of one rank only
    ("head_tail", [[0, 5, 11, 24]], 24, [*range(6, -1, -1)], 3),  # windows restart with each document
    ("contiguous", [[0, 1, 3, 24], [0, 20, 24]], 24, [2, 1, 0], 3),  # rows have other windows
    ("per_document", [[0, 7, 9, 24]], 24, [1, 0], 2),
]
"""Layout, documents, length, shifts and the distance of windows."""


def expected(x: Tensor, shifts: list[int], every: int, fill: float, documents: Any, at: Tensor | None = None) -> Tensor:
    """``[B, windows, shifts, ...]`` of those that end at the positions ``at`` (None: all), counted in each document;
    rows that have fewer are filled up."""
    found, ends_at = [], set(range(x.shape[1]) if at is None else at.tolist())
    for b, row in enumerate(x):
        first = [a for a, stop in pairwise(boundaries(documents, b, x.shape[1])) for _ in range(a, stop)]
        ends = [p for p in range(x.shape[1]) if (p - first[p] + 1) % every == 0 and p in ends_at]
        of_row = [row[p - s] if p - s >= first[p] else torch.full_like(row[p], fill) for p in ends for s in shifts]
        found.append(torch.stack(of_row) if of_row else row[:0])
    return torch.nn.utils.rnn.pad_sequence(found, True, fill).unflatten(1, (-1, len(shifts)))


@on_ranks
def errors() -> dict[str, float]:
    mesh, world, found = cp_mesh(), dist.get_world_size(), {}
    axes = int(world > 1)
    if world == 4:
        mesh, axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")), 2
    for i, (layout, documents, length, shifts, every) in enumerate(CASES):
        handler = ContextParallelHandler(mesh, layout)
        with handler.documents(documents):
            at = handler.position_ids(length)
        g, fill = torch.Generator().manual_seed(i), -1.5 * (i % 2)
        x = torch.randn(2, length, 3, 2, generator=g, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        want = expected(whole, shifts, every, fill, documents, at)
        dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        (of_whole,) = torch.autograd.grad(want, whole, dout)
        of_whole = sum_over_ranks(of_whole)[0]
        local = x[:, at].requires_grad_()
        options: dict[str, Any] = {"mesh": mesh, "every": every, "layout": layout, "documents": documents}
        with record_traffic() as traffic:
            got = windows(local, shifts, fill=fill, **options)
            (grad,) = torch.autograd.grad(got, local, dout)
        sent = [name for name, _ in traffic.entries if name in ("all_gather", "reduce_scatter")]
        assert sent == ["all_gather"] * axes + ["reduce_scatter"] * axes
        ids = (x[..., 0, 0] * 1000).long()
        of_ids = windows(ids[:, at], shifts, fill=int(fill), **options)
        right = expected(ids, shifts, every, int(fill), documents, at)
        name = f"{layout} {documents} {length} {shifts} {every}"
        found[name] = max((got - want).abs().sum().item(), (grad - of_whole[:, at]).abs().max().item())
        found[f"ids, {name}"] = (of_ids - right).abs().sum().item()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_windows_fp64(world: int, ranks: Ranks) -> None:
    for of_rank in ranks(world, errors):
        assert not {name: e for name, e in of_rank.items() if not e < 1e-12}


@on_ranks
def traffic() -> list[int]:
    x = torch.randn(1, 32, 5, requires_grad=True)
    with record_traffic() as log:
        windows(x, range(7, -1, -1), every=4, mesh=cp_mesh()).sum().backward()
    return [n for name, n in log.entries if name in ("all_gather", "reduce_scatter")][-2:]


def test_only_the_rows_before_a_share_travel(ranks: Ranks) -> None:
    """7 rows of 5 numbers to each other rank, and their gradients back."""
    assert ranks(2, traffic) == [[7 * 5 * 4] * 2] * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no shifts": ({"shifts": []}, "There is nothing to fetch"),
    "the future": ({"shifts": [-1]}, "shifts=-1 must be a non-negative int"),
    "one number": ({"shifts": 1}, "must be a tuple or list of int"),
    "every": ({"every": 0}, "every=0 must be a positive int"),
    "dimensions": ({"x": torch.zeros(4)}, r"\[batch, positions, ...\]"),
    "documents": ({"documents": [0, 5]}, "windows: "),
    "half an id": ({"x": torch.zeros(1, 4, dtype=torch.long), "fill": 0.5}, "fill=0.5 for x of torch.int64"),
    "too long for a float": (
        {"x": torch.zeros(1, 4, dtype=torch.long), "fill": 2**53 + 1},
        "This dtype must hold it exactly",
    ),
    "too large": ({"x": torch.zeros(1, 4, dtype=torch.uint8), "fill": -1}, "a whole number from 0 to 255"),
}


@on_ranks
def refusals() -> dict[str, str]:
    found = {}
    for name, (options, _) in BAD.items():
        given: dict[str, Any] = {"x": torch.zeros(1, 4, 2), "shifts": [1], **options}
        with record_traffic() as log, pytest.raises((ValueError, TypeError)) as error:
            windows(given.pop("x"), given.pop("shifts"), mesh=cp_mesh(), **given)
        assert not [entry for entry in log.entries if entry[1] > 4096]
        found[name] = str(error.value)
    return found


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    import re

    for messages in ranks(2, refusals):
        for name, (_, text) in BAD.items():
            assert re.search(text, messages[name]), messages[name]
