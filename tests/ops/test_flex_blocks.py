"""The blocks of a local FlexAttention mask, on one process, against the function the mask was made from."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import flex
from tests.harness.flex_masks import CASES, H, S, blocks_of, window
from tests.harness.oracle import token_positions

# torch 2.11 always lists full blocks separately.
CAN_LIST_TOGETHER = "separate_full_blocks" in inspect.signature(create_block_mask).parameters


def fake_mesh(ring: int, ulysses: int, rank: int) -> cp_mesh.CPMesh:
    """A rank's view of a mesh, without processes."""
    ring_rank, lane = divmod(rank, ulysses)
    axes = Axis(ring_rank, ring, None), Axis(lane, ulysses, None)
    return cp_mesh.register(cp_mesh.CPMesh(f"fake {ring} {ulysses} {rank}", *axes, (), cp_mesh.BatchState()))


def listed(mask: BlockMask, number: str, indices: str) -> Tensor:
    """``[B, H, rows, columns]``, True where the mask lists a block."""
    n, i = getattr(mask, number), getattr(mask, indices)
    found = torch.zeros(*i.shape[:3], -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1]), dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*(torch.arange(size) for size in n.shape)).tolist():
        found[b, h, row, i[b, h, row, : n[b, h, row]].long()] = True
    return found


def by_block(pairs: Tensor, size: tuple[int, int], fill: bool) -> Tensor:
    """``[B, H, Sq, Skv] -> [B, H, rows, columns, size]``."""
    pad = (0, -pairs.shape[3] % size[1], 0, -pairs.shape[2] % size[0])
    pairs = nn.functional.pad(pairs, pad, value=fill)
    return pairs.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0])).transpose(3, 4).flatten(4)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from([(2, 1), (3, 1), (2, 2), (1, 2)]),
    st.sampled_from(["contiguous", "head_tail"]),
    st.integers(1, 9),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.sampled_from(["causal", "window, alibi", "heads"]),
    st.booleans(),
)
@example((2, 2), "head_tail", 4, (4, 4), "causal", True)
def test_local_blocks(
    shape: tuple[int, int], layout: str, chunk: int, size: tuple[int, int], name: str, separate: bool
) -> None:
    """Every visible pair is in a listed block; a full block is visible wherever there are positions; aligned chunks
    give exactly the blocks that torch finds by evaluating the mask."""
    world = shape[0] * shape[1]
    length = 2 * world * chunk
    mask_mod, heads = CASES[name].mask_mod, CASES[name].blocks[1]
    kwargs: dict[str, Any] = {"device": "cpu", "BLOCK_SIZE": size}
    if CAN_LIST_TOGETHER:
        kwargs["separate_full_blocks"] = separate
    else:
        separate = True
    mask = create_block_mask(mask_mod, None, heads, length, length, **kwargs)
    for rank in range(world):
        cp = fake_mesh(*shape, rank)
        lanes = range(rank - rank % shape[1], rank - rank % shape[1] + shape[1])
        mine = torch.tensor(sorted(p for r in lanes for p in token_positions(layout, r, world, length)))
        q = torch.empty(1, H // shape[1], len(mine), 1)
        local = flex.local_mask(mask, q, length, cp, layout)
        assert (local.BLOCK_SIZE, local.seq_lengths) == (size, (len(mine), length))
        first = rank % shape[1] * q.shape[1]
        own_heads = torch.arange(H)[first : first + q.shape[1]] if heads else torch.zeros(1, dtype=torch.int64)
        index = torch.meshgrid(torch.zeros(1, dtype=torch.int64), own_heads, mine, torch.arange(length), indexing="ij")
        pairs = mask_mod(*index)
        count = torch.arange(q.shape[1] if heads else 1), torch.arange(len(mine)), torch.arange(length)
        again = local.mask_mod(*torch.meshgrid(torch.zeros(1, dtype=torch.int64), *count, indexing="ij"))
        assert heads is None or torch.equal(again, pairs)
        some = listed(local, "kv_num_blocks", "kv_indices")
        full = listed(local, "full_kv_num_blocks", "full_kv_indices") if separate else torch.zeros_like(some)
        assert not (some & full).any()
        assert len(mine) % size[0] == 0 or not full[:, :, -1].any()  # as torch: a row that is not filled is masked
        assert ((some | full) >= by_block(pairs, size, False).any(4)).all()
        assert (full <= by_block(pairs, size, True).all(4)).all()
        if chunk * (1 if layout == "head_tail" else 2) % size[0] == 0:
            exact = create_block_mask(local.mask_mod, None, heads and q.shape[1], len(mine), length, **kwargs)
            for what in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
                assert torch.equal(getattr(local, what), getattr(exact, what)), what
            assert torch.equal(local.to_dense(), exact.to_dense())


def test_layers_share_the_blocks_of_one_mask_and_nothing_outlives_it() -> None:
    cp, q = fake_mesh(2, 1, 1), torch.empty(1, H, S // 2, 1)
    mask = blocks_of(CASES["causal"])
    assert mask is not None
    first, second = (flex.local_mask(mask, q, S, cp, "head_tail") for _ in range(2))
    assert first.kv_indices is second.kv_indices
    assert flex.local_mask(mask, q, S, cp, "contiguous").kv_indices is not first.kv_indices
    mask.mask_mod = window  # the user's own object: another function, other blocks
    assert flex.local_mask(mask, q, S, cp, "head_tail").mask_mod is not first.mask_mod
    other = create_block_mask(window, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    mask.kv_indices = other.kv_indices
    assert flex.local_mask(mask, q, S, cp, "head_tail").kv_indices is not first.kv_indices
    mask.mask_mod = lambda b, h, i, j, held=mask: j <= i  # a function that holds its own mask
    flex.local_mask(mask, q, S, cp, "head_tail")
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None
