"""layout_of_mask: equal work on all ranks under a mask, in attention and on the batch side; no documents needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.ops import attention, layout_of_mask
from hyper_cp.schedule.lookup import resolve
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks

S = 256


def lopsided(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A prefix that all see, a window, and a last eighth that sees everything: no layout by position balances it."""
    return (j < 16) | ((j <= i) & (i - j < 24)) | (i >= 7 * S // 8)


def visible() -> Tensor:
    at = torch.arange(S)
    return lopsided(0, 0, at[:, None], at[None])


def work(layout: str, world: int, seen: Tensor) -> float:
    """The fullest rank's visible pairs over the mean."""
    pairs = [seen[resolve(layout, world, S).positions(rank)].sum().item() for rank in range(world)]
    return max(pairs) * world / sum(pairs)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_have_equal_work_and_equal_shares(world: int) -> None:
    seen = visible()
    blocks = create_block_mask(lopsided, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    assert work("head_tail", world, seen) > 1.3
    for mask in (seen, seen.expand(2, 3, -1, -1), blocks):
        layout = layout_of_mask(mask, chunks_per_rank=16)
        held = [resolve(layout, world, S).positions(rank) for rank in range(world)]
        assert torch.equal(torch.cat(held).sort().values, torch.arange(S)) and {len(x) for x in held} == {S // world}
        assert work(layout, world, seen) < 1.1
        assert layout == layout_of_mask(mask, chunks_per_rank=16) != layout_of_mask(mask)


def test_another_length_is_dealt_by_the_same_shares_of_the_mask() -> None:
    layout = layout_of_mask(visible(), chunks_per_rank=4)
    at = [resolve(layout, 2, 2 * S).positions(rank)[::2] // 2 for rank in range(2)]
    assert [x.tolist() for x in at] == [resolve(layout, 2, S).positions(rank).tolist() for rank in range(2)]


class Flex(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Any:
        return flex_attention(q, k, v, block_mask=blocks)


@on_ranks
def attended(modes: list[dict[str, Any]]) -> list[float]:
    """Errors of outputs and gradients, by FlexAttention and with a mask tensor."""
    found, mesh = [], cp_mesh()
    blocks = create_block_mask(lopsided, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    g = torch.Generator().manual_seed(4)
    whole = [torch.randn(1, 4, S, 8, dtype=torch.float64, generator=g, requires_grad=True) for _ in "qkv"]
    want = plain_attention(*whole, visible=visible()[None, None])
    wanted = [want, *torch.autograd.grad(want.square().sum(), whole)]
    for mode in modes:
        style = ContextParallel(2, 1, layout=layout_of_mask(blocks), **mode)
        handler = ContextParallelHandler(mesh, style)
        flex = parallelize_module(Flex(), mesh, style)
        for run in (
            lambda *x, flex=flex: flex(*x, blocks),
            lambda *x, style=style, mode=mode: attention(
                *x, mesh=mesh, attn_mask=visible(), layout=style.mode.layout, **mode
            ),
        ):
            local = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
            out = run(*local)
            parts = [out, *torch.autograd.grad(out.square().sum(), local)]
            found += [relative_error(handler.combine(a.detach(), 2), b) for a, b in zip(parts, wanted, strict=True)]
    assert dist.get_world_size() == 2
    return found


def test_attention_in_the_layout_of_its_mask(ranks: Any) -> None:
    modes = [{"ulysses_degree": 1, "kv_exchange": x} for x in ("ring", "needed", "all_gather")]
    for errors in ranks(2, attended, [*modes, {"ulysses_degree": 2}]):
        assert max(errors) <= 1e-10


@pytest.mark.parametrize(
    "mask, kind, words",
    [
        (torch.ones(8, 8), TypeError, r"mask is a torch.float32 tensor \(8, 8\).*BlockMask, or booleans"),
        (torch.ones(8, 4, dtype=torch.bool), TypeError, r"mask is a torch.bool tensor \(8, 4\)"),
        (None, TypeError, "mask is a NoneType"),
        (torch.zeros(8, 8, dtype=torch.bool), ValueError, "mask hides every pair"),
    ],
)
def test_wrong_masks_are_refused(mask: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        layout_of_mask(mask)


def test_wrong_numbers_of_chunks_are_refused() -> None:
    for wrong in (0, True, 1.5, "8", 2000):
        with pytest.raises(ValueError, match=r"chunks_per_rank=.* must be an int from 1 to 1024"):
            layout_of_mask(visible(), chunks_per_rank=wrong)  # type: ignore[arg-type]
