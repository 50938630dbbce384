"""ContextParallelHandler: dispatch and combine are exact inverses, with the documented gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from tests import modules
from tests.oracle import plain_attention, relative_error, token_positions

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


# --------------------------------------------------------------------------- any length


def any_length(layout: str) -> dict[str, float]:
    """Non-causal and causal attention, and a loss, over lengths that do not split evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="ring", layout=layout)
    handler, found = ContextParallelHandler(mesh, style), {}
    for length in (1, 7, 13, 24):
        g = torch.Generator().manual_seed(length)
        whole = [torch.randn(2, 2, length, 4, dtype=torch.float64, generator=g) for _ in range(3)]
        labels = torch.randint(4, (2, 2, length), generator=g)
        for causal in (True, False):
            module = modules.BNSD(causal)
            parallelize_module(module, mesh, {"": style})
            local = [handler.dispatch(x, 2, pad_value=9.0).requires_grad_() for x in whole]
            mine = handler.dispatch(labels, 2, pad_value=-100)
            with handler.documents([0, length]):
                out = module(*local)
            loss = F.cross_entropy(out.flatten(0, 2), mine.flatten(), reduction="sum", ignore_index=-100)
            grads = torch.autograd.grad(loss / labels.numel(), local)
            wide = [x.clone().requires_grad_() for x in whole]
            want = plain_attention(*wide, is_causal=causal)
            want_loss = F.cross_entropy(want.flatten(0, 2), labels.flatten())
            want_grads = torch.autograd.grad(want_loss, wide)
            total = loss.detach() / labels.numel()
            dist.all_reduce(total)
            key = f"{length} {'causal' if causal else 'full'}"
            found[f"{key} loss"] = abs(total.item() - want_loss.item())
            found[f"{key} out"] = relative_error(handler.combine(out.detach(), 2, length=length), want.detach())
            for a, b in zip(grads, want_grads, strict=True):
                difference = (handler.combine(a, 2, length=length) - b).abs().max().item()
                found[f"{key} gradients"] = max(found.get(f"{key} gradients", 0.0), difference)
    return found


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("world", [2, 3])
def test_any_sequence_length(ranks: Any, world: int, layout: str) -> None:
    for found in ranks(world, any_length, layout):
        assert max(found.values()) <= 1e-10, found


def wrong_length() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    handler = ContextParallelHandler(mesh, "head_tail")
    handler.combine(handler.dispatch(torch.zeros(1, 13), pad_value=0), length=3)


def test_combining_to_another_length_is_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "length=3 does not pad to the 16 positions", wrong_length)
