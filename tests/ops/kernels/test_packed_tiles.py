"""Packed tiles: several rectangles in one call of a kernel, against plain math; gaps, batch rows, shared heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_cp.ops.kernels import TileInputs, cpu, cuda, npu, operators, reference
from tests.harness import cuda_standin
from tests.harness.attention_case import inputs
from tests.harness.operators import Operators
from tests.harness.oracle import attention_and_lse, relative_error

Parts = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
SQUARES: dict[str, tuple[int, int, Parts]] = {
    "all": (12, 12, (((0, 5), (0, 5)), ((5, 6), (5, 6)), ((6, 12), (6, 12)))),
    "gaps": (14, 15, (((1, 4), (0, 3)), ((4, 5), (6, 7)), ((8, 13), (8, 13)))),
    "one": (7, 9, (((2, 6), (3, 7)),)),
    "tokens": (6, 6, tuple(((i, i + 1), (i, i + 1)) for i in range(6))),
}
RECTANGLES: dict[str, tuple[int, int, Parts]] = {
    **SQUARES,
    "all, oblong": (10, 13, (((0, 7), (0, 2)), ((7, 8), (2, 8)), ((8, 10), (8, 13)))),
    "gaps, oblong": (10, 16, (((1, 3), (2, 9)), ((3, 4), (10, 11)), ((6, 10), (11, 12)))),
    "rows without gaps": (5, 16, (((0, 3), (2, 9)), ((3, 5), (10, 14)))),
}
BANDED: list[tuple[tuple[int | None, int | None], tuple[int, int, Parts]]] = [
    ((-2, 0), SQUARES["all"]),
    ((-2, 1), SQUARES["gaps"]),
    ((-1, 0), SQUARES["tokens"]),
    ((-3, 0), (9, 16, (((0, 4), (0, 6)), ((4, 7), (7, 10)), ((7, 9), (10, 16))))),
    ((-4, 5), RECTANGLES["all, oblong"]),
    ((None, 0), (9, 16, (((0, 4), (0, 6)), ((4, 7), (7, 10)), ((7, 9), (10, 16))))),
    ((0, None), (9, 16, (((0, 4), (0, 4)), ((4, 7), (7, 12))))),
]
"""Bands count from the bottom right corner of each rectangle, in which every row sees a key."""
PACKED = [((None, None), x) for x in RECTANGLES.values()] + [((None, 0), x) for x in SQUARES.values()] + BANDED
PACKED_IDS = [f"full, {x}" for x in RECTANGLES] + [f"causal, {x}" for x in SQUARES] + [f"band {b[0]}" for b in BANDED]


def packed_errors(kernel: Any, band: Any, tile: Any, dtype: torch.dtype, v_dim: int, dim: int = 8) -> dict[str, float]:
    """Errors of a packed tile whose rows have seen other keys too: the oracle's rectangles and one more partial."""
    rows, cols, parts = tile
    q, k, v, dout = inputs(2, 4, 2, rows, dim, v_dim, dtype, cols)
    visible = torch.zeros(rows, cols, dtype=torch.bool)
    for (top, bottom), (left, right) in parts:
        distance = (torch.arange(left, right) - right)[None] - (torch.arange(top, bottom) - bottom)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool) if band[0] is None else distance >= band[0]
        visible[top:bottom, left:right] = seen if band[1] is None else seen & (distance <= band[1])
    given = TileInputs(q, k, v, band, 0.3, parts=parts)
    out, lse = kernel.forward(given)
    wide = [x.double() for x in (q, k, v)]
    want, want_lse = attention_and_lse(*wide, visible=visible, scale=0.3)
    logits = wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.3
    alive = want_lse > -torch.inf
    assert bool(((lse > -torch.inf) == alive).all()) and bool((out.movedim(3, 0)[:, ~alive] == 0).all())
    assert out.shape == want.shape and lse.dtype in (torch.float32, torch.float64)
    found = {"out": relative_error(out, want), "lse": relative_error(lse[alive], want_lse[alive])}
    # Another tile has all keys once more: the merged statistics cover both tiles, the gradients only this one.
    merged = torch.cat([logits.masked_fill(~visible, -torch.inf), logits], -1)
    weights = merged.softmax(-1)
    merged_out = weights @ torch.cat([wide[2]] * 2, 2).repeat_interleave(2, 1)
    dlogits = weights * (dout.double() @ torch.cat([wide[2]] * 2, 2).repeat_interleave(2, 1).mT
                         - (dout.double() * merged_out).sum(-1, keepdim=True)) * 0.3  # fmt: skip
    dlogits, weights = dlogits[..., :cols], weights[..., :cols]
    expected = dlogits @ wide[1].repeat_interleave(2, 1), dlogits.mT @ wide[0], weights.mT @ dout.double()
    expected = expected[0], *(x.unflatten(1, (2, 2)).sum(2) for x in expected[1:])
    statistics = merged_out.to(dtype), merged.logsumexp(-1).to(lse.dtype)
    grads = kernel.backward(given, dout, *statistics)
    for name, grad, right in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert grad.shape == right.shape
        assert bool((grad[right == 0] == 0).all()), f"{name} outside of the rectangles"
        found[name] = relative_error(grad, right)
    return found


@pytest.mark.parametrize("band, tile", PACKED, ids=PACKED_IDS)
def test_packed_tiles_of_cpu_and_reference(band: Any, tile: Any) -> None:
    for kernel, v_dim in ((cpu.KERNEL, 8), (reference.KERNEL, 8), (reference.KERNEL, 5)):
        assert max(packed_errors(kernel, band, tile, torch.float64, v_dim).values()) <= 1e-10
    assert max(packed_errors(reference.KERNEL, band, tile, torch.bfloat16, 8).values()) <= 3e-2


def test_packed_tiles_make_no_mask_of_the_whole_tile() -> None:
    """4096 rows of one token each: a mask of them all would have 16M elements."""
    q, parts = torch.randn(1, 1, 4096, 8), tuple(((i, i + 1), (i, i + 1)) for i in range(0, 4096, 64))
    with Operators() as ran:
        for kernel in (cpu.KERNEL, reference.KERNEL):
            given = TileInputs(q, q, q, (None, 0), 0.3, parts=parts)
            out, lse = kernel.forward(given)
            kernel.backward(given, q, out, lse)
    assert ran.largest == q.numel()


def test_a_tile_of_no_rectangles_sees_nothing() -> None:
    q = torch.randn(1, 2, 3, 8)
    for kernel in (cpu.KERNEL, reference.KERNEL, npu.KERNEL, *cuda.KERNELS.values()):
        given = TileInputs(q, q, q, (None, None), 0.3, parts=())
        out, lse = kernel.forward(given)
        assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
        grads = kernel.backward(given, q, out, lse)
        assert all(bool((x == 0).all()) for x in grads)


def test_the_packing_of_the_same_parts_is_found_by_identity() -> None:
    """All layers of a step share one schedule: the host neither lays out nor hashes its parts again."""
    parts = SQUARES["gaps"][2]
    tiles = [TileInputs(*[torch.empty(2, 1, 14, 8)] * 3, (None, 0), 0.3, parts=x) for x in (parts, parts, (*parts,))]
    first, again, equal = (operators.packing(tile) for tile in tiles)
    assert first is again and first is not equal
    assert (first.row_ends, first.col_ends, first.longest) == (equal.row_ends, equal.col_ends, equal.longest)
    assert first.row_ends == (3, 4, 9, 12, 13, 18)


@pytest.mark.parametrize("name", cuda.KERNELS)
@pytest.mark.parametrize("band, tile", PACKED, ids=PACKED_IDS)
def test_cuda_packed_tiles_on_the_meta_device(name: str, band: Any, tile: Any) -> None:
    rows, cols, parts = tile
    q, k, v = (torch.empty(2, h, n, 60, dtype=torch.bfloat16, device="meta") for h, n in ((4, rows), *[(2, cols)] * 2))
    given = TileInputs(q, k, v, band, 0.1, parts=parts)
    if "without flash and memory-efficient" in name and (band, tile) in BANDED:
        return  # a window: no operator is left
    out, lse = cuda.KERNELS[name].forward(given)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = cuda.KERNELS[name].backward(given, torch.empty_like(out), out, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", cuda.KERNELS)
@pytest.mark.parametrize("band, tile", PACKED, ids=PACKED_IDS)
def test_cuda_packs_tiles_for_the_variable_length_operator(name: str, band: Any, tile: Any) -> None:
    """Packing and unpacking, and parts one after another where FlashAttention is not allowed."""
    kernel = cuda.KERNELS[name]
    if "without flash and memory-efficient" in name and (band, tile) in BANDED:
        return  # a window: no operator is left
    for dim, v_dim in ((5, 5), (8, 6)):
        with cuda_standin.Operators().installed() as called:
            assert max(packed_errors(kernel, band, tile, torch.float32, v_dim, dim).values()) <= 5e-6
        if kernel.flash is not None and len(tile[2]) > 1:
            assert called.calls == ["packed"] * 2


# --------------------------------------------------------------------------- NPU, against the stand-in


@pytest.mark.parametrize("band, tile", PACKED, ids=PACKED_IDS)
def test_packed_tiles_of_the_npu(standin: Any, band: Any, tile: Any) -> None:
    for v_dim in (8, 5):
        standin.calls.clear()
        assert max(packed_errors(npu.KERNEL, band, tile, torch.float32, v_dim).values()) <= 5e-6
        layout, square = "TND" if len(tile[2]) > 1 else "BNSD", all(b - a == d - c for (a, b), (c, d) in tile[2])
        mode = 0 if band == (None, None) else 2 if band == (None, 0) and square else 4
        assert standin.calls == [{"layout": layout, "mode": mode, "mask": mode > 0}]


@pytest.mark.slow
def test_the_npu_gets_no_more_than_one_call_takes(standin: Any) -> None:
    """More than 1024 sequences are several calls; head dims that TND has no gradient for, one per rectangle."""
    many = tuple(((i, i + 1), (i, i + 1)) for i in range(0, 1040, 2))
    assert max(packed_errors(npu.KERNEL, (None, 0), (1040, 1040, many), torch.float32, 8).values()) <= 5e-6
    assert [call["layout"] for call in standin.calls] == ["TND"] * 2, "2 batch rows of 520 sequences"
    standin.calls.clear()
    found = packed_errors(npu.KERNEL, (None, 0), SQUARES["gaps"], torch.float32, 520, 520)
    assert max(found.values()) <= 5e-6 and [call["layout"] for call in standin.calls] == ["BNSD"] * 3
