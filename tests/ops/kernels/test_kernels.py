"""Kernels of every device on every kind of tile, against plain math in fp64 and the operators' contracts."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import TileInputs, cpu, cuda, npu, reference
from tests.harness import cuda_standin
from tests.harness.operators import Operators
from tests.harness.oracle import relative_error
from tests.harness.tile_case import Tile, plain_math

BANDS = [(None, None), (None, 0), (-5, 0), (-3, 4), (2, 9), (None, 3), (-700, 0)]
TILES: list[Tile] = [
    (rows, cols, band, mask)
    for (rows, cols), band, mask in itertools.product([(12, 12), (7, 16)], BANDS, ["", "bool", "float"])
]
LARGE: list[Tile] = [(600, 530, (-3, 4), ""), (600, 530, (None, 0), ""), (600, 530, (-700, 0), "bool")]
"""More rows and columns than the kernel of the CPU takes at a time, with a window, and with a bound beyond all keys."""
MARKED = [pytest.param(tile, marks=pytest.mark.slow if tile[3] and tile in LARGE else ()) for tile in TILES + LARGE]


def errors(kernel: Any, tile: Tile, dtype: torch.dtype, v_dim: int = 8) -> dict[str, float]:
    """Errors of output, log-sum-exp and gradients, given the oracle's merged output and log-sum-exp."""
    want = plain_math(tile, dtype, v_dim, 0.3)
    q, k, v, dout = want.tensors
    given = TileInputs(q, k, v, tile[2], 0.3, want.mask)
    out, lse = kernel.forward(given)
    alive = want.lse > -torch.inf
    assert bool(((lse > -torch.inf) == alive).all()), "rows that see nothing"
    grads = kernel.backward(given, dout, want.out.to(dtype), lse)
    found = {"out": relative_error(out, want.out), "lse": relative_error(lse[alive], want.lse[alive])}
    for name, grad, expected in zip(("dq", "dk", "dv"), grads, want.grads, strict=True):
        found[name] = relative_error(grad, expected)
    return found


@pytest.mark.parametrize("tile", MARKED, ids=str)
def test_cpu_and_reference(tile: Tile) -> None:
    for kernel, v_dim in ((cpu.KERNEL, 8), (reference.KERNEL, 8), (reference.KERNEL, 5)):
        assert max(errors(kernel, tile, torch.float64, v_dim).values()) <= 1e-10


def test_choice_is_logged_and_follows_head_dims(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(1, 2, 4, d) for d in (8, 8, 6))
    with caplog.at_level(logging.DEBUG, logger="hyper_cp.ops.kernels"):
        assert kernels.choose(q, k, k, True) == "cpu flash"
        assert kernels.choose(q, k, v, True) == "reference"
        assert kernels.choose(*(x.to("meta") for x in (q, k, v)), True) == "reference"
    assert "cpu flash" in caplog.text and "reference" in caplog.text


# --------------------------------------------------------------------------- CUDA, without a GPU


def refused(name: str, masked: bool, band: Any) -> bool:
    """True if the kernel has no operator: the user allows none that takes a mask, or a window."""
    windowed = band not in ((None, None), (None, 0))
    return "memory-efficient" in name.partition("without")[2] and (masked or (windowed and "without flash" in name))


@pytest.mark.parametrize("name", cuda.KERNELS)
@pytest.mark.parametrize("band", [(None, None), (None, 0), (-7, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_operators_are_called_as_their_schemas_say(name: str, band: Any, masked: bool) -> None:
    """On the meta device: arguments and shapes, not numbers."""
    kernel = cuda.KERNELS[name]
    dim, v_dim = {"flash": (60, 60), "memory-efficient": (64, 40), "cudnn": (64, 64)}[kernel.dense.name]

    def made(heads: int, size: int) -> Tensor:
        return torch.empty(2, 100, heads, size, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    q, k, v = made(8, dim), made(2, dim), made(2, v_dim)
    mask = torch.empty(1, 1, 100, 100, dtype=torch.bool, device="meta") if masked else None
    given = TileInputs(q, k, v, band, 0.1, mask)
    if refused(name, masked, band):
        with pytest.raises(NotImplementedError, match="sdpa_kernel"):
            kernel.forward(given)
        return
    out, lse = kernel.forward(given)
    assert out.shape == (2, 8, 100, v_dim) and lse.shape == (2, 8, 100) and lse.dtype == torch.float32
    grads = kernel.backward(given, torch.empty_like(out), out, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", cuda.KERNELS)
def test_cuda_kernels_against_the_contracts_of_their_operators(name: str) -> None:
    """Every tile, with stand-ins for the operators: windows from the bottom right, log-sum-exps in their forms, rows
    that see nothing, memory layouts."""
    for tile in TILES + LARGE[:1] if name == "cuda memory-efficient without flash" else TILES:
        for v_dim in (8, 5):
            with cuda_standin.Operators().installed() as operators:
                if refused(name, bool(tile[3]), tile[2]):
                    continue
                try:
                    found = errors(cuda.KERNELS[name], tile, torch.float32, v_dim)
                except NotImplementedError:  # a band in which some rows see nothing needs a mask
                    assert "memory-efficient" in name.partition("without")[2] and "bias" not in operators.calls
                    continue
                assert max(found.values()) <= 5e-6, (tile, v_dim, found)
            flash = cuda.KERNELS[name].flash is not None
            square_window = tile[0] == tile[1] and not tile[3] and tile[2] in ((-5, 0), (-3, 4))
            if square_window and flash:
                assert operators.calls == ["window"] * 2, "one call, without a mask"


# --------------------------------------------------------------------------- NPU, against the stand-in


@pytest.mark.parametrize("tile", MARKED, ids=str)
def test_npu(standin: Any, tile: Tile) -> None:
    for v_dim in (8, 5):
        assert max(errors(npu.KERNEL, tile, torch.float32, v_dim).values()) <= 5e-6


def test_npu_masks_are_compressed_and_full_tiles_have_none(standin: Any) -> None:
    for tile, want in (
        ((12, 12, (None, None), ""), {"layout": "BNSD", "mode": 0, "mask": False}),
        ((12, 12, (None, 0), ""), {"layout": "BNSD", "mode": 2, "mask": True}),
        ((12, 12, (-5, 0), ""), {"layout": "BNSD", "mode": 4, "mask": True}),
    ):
        standin.calls.clear()
        errors(npu.KERNEL, tile, torch.float32)
        assert standin.calls == [want]
    q = torch.randn(2, 6, 4, 8).transpose(1, 2)  # [B, S, H, D] in memory: no copy
    standin.calls.clear()
    npu.KERNEL.forward(TileInputs(q, q, q, (None, None), 0.3))
    assert standin.calls[0]["layout"] == "BSND"


def test_the_npu_copies_only_tensors_in_another_layout_than_most(standin: Any) -> None:
    bsnd, bnsd = (lambda n: torch.randn(2, 6, n, 8).transpose(1, 2)), (lambda n: torch.randn(2, n, 6, 8))
    for usual, odd, layout in ((bsnd, bnsd, "BSND"), (bnsd, bsnd, "BNSD")):
        q, k, v, dout, out, lse = usual(4), odd(2), usual(2), usual(4), usual(4), torch.randn(2, 4, 6)
        tile = TileInputs(q, k, v, (None, 0), 0.3)
        standin.calls.clear()
        with Operators() as ran:
            npu.KERNEL.forward(tile)
            assert ran.copied == k.numel() and standin.calls[0]["layout"] == layout
            npu.KERNEL.backward(tile, dout, out, lse)
        assert ran.copied == 2 * k.numel() + 8 * lse.numel(), "k, its gradient, and statistics"


def test_the_npu_makes_large_masks_by_rows(standin: Any) -> None:
    """And adds up the gradients of keys and values."""
    kernel = npu.NPUKernel(mask_at_once=1)
    for tile in ((150, 150, (None, 0), "bool"), (70, 16, (None, None), "bool")):
        standin.calls.clear()
        assert max(errors(kernel, tile, torch.float32).values()) <= 5e-6
        assert len(standin.calls) == -(-tile[0] // 64)


def test_an_unknown_device_gets_plain_math() -> None:
    name = kernels.choose(*(torch.empty(1, 1, 2, 4, device="meta") for _ in range(3)), False)
    assert kernels.get(name, "meta") is reference.KERNEL
