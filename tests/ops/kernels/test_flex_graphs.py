"""FlexAttention as the kernel of tiles is compiled few times, and never falls back to plain math."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.ops.kernels import TileInputs
from hyper_cp.ops.kernels.scores import Softcap, TileScore
from hyper_cp.ops.kernels.scores.flex_kernel import FlexKernel, tile_blocks
from hyper_cp.ops.kernels.scores.mods import dense_blocks
from hyper_cp.schedule.lookup import Key, schedule
from hyper_cp.schedule.tiles import Band
from tests.harness.flex_masks import backward_on_the_cpu

RANKS, LENGTH, DIM = 8, 4096, 16
GLOBAL, WINDOW = (None, 0), (-511, 0)


class Graphs:
    """A compiler that runs graphs as they stand, and counts them and their runs."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1
        run = torch._dynamo.disable(module.forward)

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted


@contextmanager
def counted() -> Iterator[Graphs]:
    graphs, compile = Graphs(), torch.compile
    torch._dynamo.reset()
    with (
        mock.patch.object(torch, "compile", lambda function, **how: compile(function, **{"backend": graphs, **how})),
        backward_on_the_cpu(),
    ):
        yield graphs


def tiles(band: Band, cap: float) -> Iterator[tuple[TileInputs, bool]]:
    """The tiles of head-tail data on 8 ranks with the exchanges that make the most different ones, and if they are
    those of backward. Each kind once: sizes, band, and where the tile begins."""
    seen = set()
    for kv_exchange in ("ring", "all_gather"):
        for rank in (1, RANKS - 1):
            plan = schedule(Key("head_tail", rank, RANKS, 1, kv_exchange, False, band, LENGTH, LENGTH))
            for backward, steps in enumerate((plan.forward, plan.backward)):
                for step in steps:
                    keys = torch.randn(1, sum(b - a for a, b in step.keys), 1, DIM).transpose(1, 2)
                    queries = torch.randn(1, LENGTH // RANKS, 2, DIM).transpose(1, 2)
                    for tile in step.tiles:
                        q, k = queries[:, :, slice(*tile.q)], keys[:, :, slice(*tile.k)]
                        whole = q.shape == queries.shape, k.shape == keys.shape
                        kind = tile.band, q.shape, k.shape, tile.q[0] > 0, tile.k[0] > 0, whole, backward
                        if kind not in seen:
                            seen.add(kind)
                            score = TileScore(Softcap(cap), None)
                            yield TileInputs(q, k, k, tile.band, 0.25, score=score), bool(backward)


def run(kernel: FlexKernel, tile: TileInputs, backward: bool) -> None:
    if backward:
        kernel.backward(tile, tile.q, tile.q, torch.zeros(tile.q.shape[:3]))
    else:
        kernel.forward(tile)


def test_one_graph_serves_all_tiles_each_way() -> None:
    """Gemma 2's layers: softcap, and a window in every second one."""
    calls, kernel = 0, FlexKernel()
    with counted() as graphs:
        for band in (GLOBAL, WINDOW):
            for tile, backward in tiles(band, 50.0):
                run(kernel, tile, backward)
                calls += 1
                assert graphs.runs == calls, "a tile ran outside of the compiled graphs"
    assert calls > 20 and graphs.compiled == 2, graphs.compiled


def test_past_the_limit_is_an_error_and_not_plain_math() -> None:
    q, kernel = torch.randn(1, 2, 256, DIM), FlexKernel(most_graphs=2)
    with (
        counted() as graphs,
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(RuntimeError, match=r"compiled for 2 different calls.*Use fewer functions"),
    ):
        for cap in (10.0, 20.0, 30.0):
            run(kernel, TileInputs(q, q, q, GLOBAL, 0.25, score=TileScore(Softcap(cap), None)), False)
    assert graphs.compiled == graphs.runs == 2


@given(
    st.sampled_from([(None, None), GLOBAL, (-150, 0), (-40, 90), (0, None), (130, None)]),
    st.tuples(st.integers(1, 400), st.integers(1, 400)),
    st.sampled_from(["", "mask"]),
)
@settings(max_examples=60, deadline=None)
def test_blocks_without_evaluation_are_visible_as_a_whole(band: Band, shape: tuple[int, int], masked: str) -> None:
    """FlexAttention on the CPU evaluates every pair: a block that is wrongly listed as full would show on CUDA only."""
    rows, cols = shape
    q, k = (torch.empty(1, 1, n, 16) for n in shape)
    mask = torch.ones(1, 1, rows, cols, dtype=torch.bool) if masked else None
    blocks = tile_blocks(TileInputs(q, k, k, band, 1.0, mask), lambda b, h, i, j: i >= 0)
    distance = torch.arange(cols) - torch.arange(rows)[:, None]
    seen = (distance >= (-999 if band[0] is None else band[0])) & (distance <= (999 if band[1] is None else band[1]))
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
    tables = (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)
    some, full = (dense_blocks(*table, -(-cols // 128))[0, 0].bool() for table in tables)
    assert not (some & full).any() and not (masked and full.any())
    for block, (i, j) in zip(full.flatten(), itertools.product(*map(range, full.shape)), strict=True):
        pairs = seen[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        whole = pairs.shape == (128, 128) and bool(pairs.all())
        assert bool(block) == (whole and not masked), (i, j)
        assert bool(some[i, j] | block) or not pairs.any(), (i, j)
