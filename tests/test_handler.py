"""ContextParallelHandler: dispatch and combine are exact inverses, with the documented gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.oracle import token_positions

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def samples(length: int) -> list[tuple[Tensor, int]]:
    """Tensors of every dtype with the sequence in every place."""
    g = torch.Generator().manual_seed(0)
    found = []
    for dtype in DTYPES:
        for shape, dim in (((length,), 0), ((2, length), 1), ((2, length, 3), -2), ((2, 3, length), -1)):
            found.append(((torch.rand(shape, generator=g) * 100).to(dtype), dim))
    found.append((torch.rand(3, length, 2).transpose(0, 2), 1))  # not contiguous
    return found


def round_trips(shape: tuple[int, ...], layout: str) -> bool:
    names = ("cp",) if len(shape) == 1 else ("ring", "ulysses")
    handler = ContextParallelHandler(init_device_mesh("cpu", shape, mesh_dim_names=names), layout)
    world, length = dist.get_world_size(), 12 * dist.get_world_size()
    mine = torch.tensor(token_positions(layout, dist.get_rank(), world, length))
    good = torch.equal(handler.position_ids(length), mine)
    for tensor, dim in samples(length):
        part = handler.dispatch(tensor, dim)
        whole = handler.combine(part, dim)
        good &= torch.equal(part, tensor.index_select(dim, mine)) and torch.equal(whole, tensor)
        good &= whole.dtype == tensor.dtype
    return good


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 2)])
def test_dispatch_and_combine_are_inverses(ranks: Any, shape: tuple[int, ...], layout: str) -> None:
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert all(ranks(world, round_trips, shape, layout))


def gradients(layout: str) -> bool:
    handler = ContextParallelHandler(init_device_mesh("cpu", (3,)), layout)
    length = 12
    mine = torch.tensor(token_positions(layout, dist.get_rank(), 3, length))
    weight = torch.arange(1.0, length + 1)
    whole = torch.rand(length, requires_grad=True)
    (got,) = torch.autograd.grad((handler.dispatch(whole, 0) * weight[mine]).sum(), whole)
    want = torch.zeros(length)
    want[mine] = weight[mine]
    part = torch.rand(length // 3, requires_grad=True)
    (local,) = torch.autograd.grad((handler.combine(part, 0) * weight).sum(), part)
    return torch.equal(got, want) and torch.equal(local, weight[mine])


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_gradients(ranks: Any, layout: str) -> None:
    assert all(ranks(3, gradients, layout))


def mistakes() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    style = ContextParallel(layout="head_tail")
    handler = ContextParallelHandler(mesh, style)
    found = [handler.layout]
    for make in (
        lambda: handler.dispatch(torch.zeros(2, 6), 1),
        lambda: handler.combine(torch.zeros(2, 3), 1),
        lambda: handler.dispatch(torch.zeros(2, 6), 2),
        lambda: handler.position_ids(6),
        lambda: handler.dispatch([1, 2]),  # type: ignore[arg-type]
        lambda: ContextParallelHandler(mesh, "zigzag"),
        lambda: ContextParallelHandler(mesh, 3),  # type: ignore[arg-type]
    ):
        try:
            make()
            found.append("nothing")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_mistakes_are_named(ranks: Any) -> None:
    words = ["head_tail", "shape[1]=6", "=6", "seq_dim=2", "length=6", "list", "'zigzag'", "style is a int"]
    for found in ranks(2, mistakes):
        for text, word in zip(found, words, strict=True):
            assert word in text, (text, word)
