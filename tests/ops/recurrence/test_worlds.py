"""Recurrences and convolutions over 1 to 8 ranks, which are threads of one process: odd and wide worlds are cheap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device.ranks import Board, ThreadAxis, mesh_of
from hyper_cp.mesh.cp_mesh import CPMesh
from hyper_cp.ops import causal_conv1d, linear_recurrence
from hyper_cp.schedule.documents import documents_table, read
from hyper_cp.schedule.lookup import resolve
from tests.harness.recurrence_oracle import convolve, recur


def over_threads(world: int, run: Any) -> list[Any]:
    """The results of ``run(mesh, rank)`` on all ranks."""
    board = Board()
    meshes = [mesh_of(ThreadAxis(rank, world, board), by_heads=False) for rank in range(world)]

    def work(rank: int) -> Any:
        try:
            return run(meshes[rank], rank)
        except BaseException:
            board.broken.set()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


def error(world: int, kind: str, layout: str, length: int, documents: list[list[int]] | None) -> float:
    """The largest error of outputs and gradients. A length that does not split is padded, as handlers do: the padding
    is one more document."""
    multiple = 2 * world if layout == "head_tail" else world
    padded = -(-length // multiple) * multiple
    g = torch.Generator().manual_seed(length + world)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    k = torch.nn.functional.normalize(random(2, length, 2, 3), dim=-1)
    decay = -random(2, length, 2, *([3] if "channels" in kind else [])).square()
    given = [random(2, length, 2, 3), k, random(2, length, 2, 4), decay]
    given += [random(2, length, 2).sigmoid()] if "delta" in kind else []
    leaves, dout = [x.clone().requires_grad_() for x in given], random(2, length, 2, 4)
    rows = documents or [[0, length]]
    weight = random(6, 4)

    def both(recurrence: Any, convolution: Any, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
        out = recurrence(*leaves) + convolution(leaves[0].flatten(2).mT).mT.unflatten(2, (2, 3)).sum(-1, keepdim=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def recur_alone(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
        return recur(q, k, v, decay, beta, rows)

    want = both(recur_alone, lambda x: convolve(x, weight, None, rows), leaves, dout)
    table = documents_table([[*row, padded] for row in rows])
    resolved = resolve(layout, world, padded, read(table))
    whole = [torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, padded - length)) for x in (*given, dout)]

    def run(mesh: CPMesh, rank: int) -> tuple[Tensor, list[Tensor]]:
        at, more = resolved.positions(rank), {"mesh": mesh, "layout": layout, "documents": table}
        *local, local_dout = (x[:, at].clone() for x in whole)
        local = [x.requires_grad_() for x in local]

        def convolution(x: Tensor) -> Tensor:
            return causal_conv1d(x, weight, **more)

        return at, both(lambda *xs: linear_recurrence(*xs, **more), convolution, local, local_dout)

    worst = 0.0
    for at, got in over_threads(world, run):
        inside = at < length
        for x, y in zip(got, want, strict=True):
            worst = max([worst, *(x[:, inside] - y[:, at[inside]]).abs().flatten().tolist()])
    return worst


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_every_world(world: int) -> None:
    """Odd worlds, one token a rank, lengths that do not split, documents of any length, rows that differ."""
    some, rows = [[0, 1, 3, 17, 29]], [[0, 13, 29], [0, 2, 3, 4, 29]]
    cases: list[tuple[str, str, int, Any]] = [
        ("scalar", "contiguous", world, None),
        ("delta", "head_tail", 29, None),
        ("channels, delta", "head_tail", 29, rows),
        ("channels", "contiguous", 29, some),
    ]
    for case in cases:
        assert error(world, *case) <= 1e-10, case
