"""A sequence layout added from outside the package: registered once, then used by attention and by the batch side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.ops import attention
from hyper_cp.schedule import layout as layouts
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks


def every_other_chunk(rank: int, world: int) -> tuple[int, int]:
    """Chunks are dealt like cards: with 2 ranks, rank 0 holds chunks 0 and 2, rank 1 holds chunks 1 and 3."""
    return rank, world + rank


@on_ranks
def attend_in_the_new_layout(degree: int, kv_exchange: str) -> list[float]:
    layouts.register("cards", every_other_chunk, chunks_per_rank=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    handler = ContextParallelHandler(mesh, "cards")
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 4, 16, 8, generator=g, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    expected = plain_attention(*whole, is_causal=True)
    wanted = [expected, *torch.autograd.grad(expected.square().sum(), whole)]

    local = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
    assert torch.equal(local[0][:, :, :4], whole[0][:, :, 4 * dist.get_rank() : 4 * dist.get_rank() + 4])
    mode = {"mesh": mesh, "layout": "cards", "ulysses_degree": degree, "kv_exchange": kv_exchange}
    out = attention(*local, is_causal=True, **mode)
    found = [out, *torch.autograd.grad(out.square().sum(), local)]
    return [relative_error(handler.combine(a, 2), b) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("degree, kv_exchange", [(1, "ring"), (1, "all_gather"), (2, "all_gather")])
def test_a_layout_from_outside(ranks: Any, degree: int, kv_exchange: str) -> None:
    errors = ranks(2, attend_in_the_new_layout, degree, kv_exchange)
    assert max(max(e) for e in errors) <= 1e-10


def test_layouts_that_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="layout='contiguous' is registered already"):
        layouts.register("contiguous", every_other_chunk, chunks_per_rank=2)
    with pytest.raises(ValueError, match=r"layout='twice' deals the chunks .* to 2 ranks"):
        layouts.register("twice", lambda rank, world: (0,))
    assert "twice" not in layouts.LAYOUTS


def test_chunks_for_many_ranks_are_checked_when_they_are_used() -> None:
    layouts.register("up_to_eight", lambda rank, world: (min(rank, 8),))
    assert layouts.ResolvedLayout.of("up_to_eight", 9, 18).held[8] == ((16, 18),)
    with pytest.raises(ValueError, match=r"layout='up_to_eight' deals the chunks .* to 12 ranks"):
        layouts.ResolvedLayout.of("up_to_eight", 12, 24)


@pytest.mark.parametrize("name", ["two words", "a|b", ""])
def test_names_that_no_op_could_receive_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be registered"):
        layouts.register(name, every_other_chunk, chunks_per_rank=2)
