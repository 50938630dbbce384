"""FlexAttention as the kernel of tiles is compiled few times, and never falls back to plain math."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from hyper_cp.ops.kernels import TileInputs
from hyper_cp.ops.kernels.scores import Softcap, TileScore, flex_kernel
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
    flex_kernel._compiled.cache_clear()
    torch._dynamo.reset()
    with (
        mock.patch.object(torch, "compile", lambda function, **how: compile(function, **{"backend": graphs, **how})),
        backward_on_the_cpu(),
    ):
        yield graphs
    flex_kernel._compiled.cache_clear()


def tiles(band: Band, cap: float) -> Iterator[tuple[TileInputs, bool]]:
    """The tiles of head-tail data on 8 ranks with the exchanges that make the most different ones, and if they are
    those of backward. Each kind once: sizes, band, and where the tile begins."""
    seen = set()
    for kv_exchange in ("ring", "all_gather"):
        for rank in (0, 1, 3, RANKS - 1):
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


def run(tile: TileInputs, backward: bool) -> None:
    if backward:
        flex_kernel.KERNEL.backward(tile, tile.q, tile.q, torch.zeros(tile.q.shape[:3]))
    else:
        flex_kernel.KERNEL.forward(tile)


def test_one_graph_serves_all_tiles_each_way() -> None:
    """Gemma 2's layers: softcap, and a window in every second one."""
    calls = 0
    with counted() as graphs:
        for band in (GLOBAL, WINDOW):
            for tile, backward in tiles(band, 50.0):
                run(tile, backward)
                calls += 1
                assert graphs.runs == calls, "a tile ran outside of the compiled graphs"
    assert calls > 40 and graphs.compiled == 2, graphs.compiled


def test_past_the_limit_is_an_error_and_not_plain_math() -> None:
    q = torch.randn(1, 2, 256, DIM)
    with (
        counted() as graphs,
        mock.patch.object(flex_kernel, "_MOST_GRAPHS", 2),
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(RuntimeError, match=r"compiled for 2 different calls.*Use fewer functions"),
    ):
        for cap in (10.0, 20.0, 30.0):
            run(TileInputs(q, q, q, GLOBAL, 0.25, score=TileScore(Softcap(cap), None)), False)
    assert graphs.compiled == graphs.runs == 2
