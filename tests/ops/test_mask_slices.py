"""Windows and masks: the forms that users pass, what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import masks
from hyper_cp.ops.kernels import TileInputs, cpu, cuda, operators, reference
from hyper_cp.schedule.tiles import check_window
from tests.harness.operators import Operators


@pytest.mark.parametrize("window", [(1,), (-2, 0), (1.5, 0), (True, 0)])
def test_windows_that_make_no_sense(window: Any) -> None:
    with pytest.raises(ValueError, match="window="):
        check_window(window)


def test_a_causal_matrix_is_recognised_until_it_is_written_to() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(causal, 6) == (None, 0)
    causal[2, 3] = True  # changed in place: read again
    assert masks.recognised(causal, 6) is None
    lowest = torch.finfo(torch.bfloat16).min
    added = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16).masked_fill(~torch.ones(6, 6).tril().bool(), lowest)
    assert masks.recognised(added, 6) == (None, 0)
    added[1, 0, 5, 0] = -1.0
    assert masks.recognised(added, 6) is None
    assert masks.recognised(torch.ones(6, 6, dtype=torch.bool), 6) == (None, None)


def test_masks_of_inference_and_views_of_one_mask() -> None:
    with torch.inference_mode():
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(mask, 6) == (None, 0)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    with Operators() as ran:
        for _ in range(3):
            assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) == (None, 0)
    assert ran.waits == 1, "a view is made anew for every call"
    mask[2, 3] = True
    assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) is None
    both = torch.stack([torch.ones(6, 6).tril(), torch.ones(6, 6)]).bool()
    assert (masks.recognised(both[0], 6), masks.recognised(both[1], 6)) == ((None, 0), (None, None))


def kinds(length: int) -> dict[str, tuple[Tensor, Any]]:
    """Masks and the bands that they are."""
    tril = torch.ones(length, length, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    found: dict[str, tuple[Tensor, Any]] = {
        "causal": (tril, (None, 0)),
        "full": (torch.ones_like(tril), (None, None)),
        "nothing": (torch.zeros_like(tril), None),
        "added": (torch.zeros(2, 1, length, length).masked_fill(~tril, lowest), (None, 0)),
        "added, full": (torch.zeros(length, length), (None, None)),
        "window": (tril & ~tril.tril(-3), (-2, 0)),
        "window both ways": (tril.triu(-4) | tril.mT.tril(2), (-4, 2)),
        "causal from below": (tril.mT, (0, None)),
        "own key": (torch.eye(length).bool(), (0, 0)),
        "added window": (torch.zeros(1, 1, length, length).masked_fill(~tril | tril.tril(-5), lowest), (-4, 0)),
        "window with a hole": (
            (tril & ~tril.tril(-4)) ^ (torch.arange(length**2) == 4 * length + 3).view_as(tril),
            None,
        ),
        "keys before only": (tril.tril(-1), None),
        "padding": (tril & (torch.arange(length) > 2), None),
        "one row different": (torch.stack([tril, torch.ones_like(tril)]), None),
    }
    for name, (row, col, value) in {"above": (1, 3, 0.0), "below": (3, 1, lowest), "bias": (3, 1, 0.5)}.items():
        mask = found["added"][0].clone()
        mask[1, 0, row, col] = value
        found[name] = mask, None
    return found


def test_a_new_mask_costs_one_wait_for_the_device() -> None:
    for name, (mask, want) in kinds(8).items():
        for waits in (1, 0):
            with Operators() as ran:
                assert masks.recognised(mask, 8) == want, name
            assert ran.waits == waits, f"{name}: {ran.waits} waits"
    assert masks.recognised(torch.ones(1, 1, dtype=torch.bool), 1) == (None, None)
    assert masks.recognised(torch.zeros(1, 1, dtype=torch.bool), 1) is None


def test_a_large_mask_is_compared_in_parts() -> None:
    """81 million pairs, of which the last but one row decides."""
    length = 9000
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for want in ((None, 0), None):
        with Operators() as ran:
            assert masks.recognised(mask, length) == want
        assert ran.waits == 1 and ran.largest <= 1 << 26
        mask[-2, -1] = True


@pytest.mark.parametrize("kind", ["bool", "added", "padding"])
def test_masks_for_operators_are_made_by_rows(kind: str) -> None:
    """S=64K, 8 ranks, all keys gathered: the mask of a whole tile would have 470 million elements."""
    rows, cols = 8 * 1024, 56 * 1024
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="meta") for n in (rows, cols))
    shape, dtype = (1, 1, 1 if kind == "padding" else rows, cols), torch.bfloat16 if kind == "added" else torch.bool
    tile = TileInputs(q, k, k, (None, None), 1.0, torch.empty(shape, dtype=dtype, device="meta"))
    kernel = cuda.KERNELS["cuda flash"]
    with Operators() as ran:
        out, lse = kernel.forward(tile)
        kernel.backward(tile, out, out, lse)
    assert ran.largest <= (k.numel() if kind == "padding" else 1 << 25)


def test_masks_made_by_rows_are_the_same() -> None:
    """A mask that is cut into pieces, forward and backward, against plain math."""
    cut = operators.OperatorKernel("cut", cpu.KERNEL.dense, cpu.KERNEL.biased, mask_at_once=1)
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 4, 150, 8, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 33, 8, generator=g, dtype=torch.float64) for _ in range(2))
    for shape in ((2, 4, 150, 33), (1, 1, 150, 33), (2, 1, 1, 33), (1, 4, 150, 1)):
        for band in ((None, None), (-40, 3)):
            mask = torch.rand(shape, generator=g) < 0.6
            for given in (mask, torch.randn(shape, generator=g, dtype=torch.float64)):
                tile, found = TileInputs(q, k, v, band, 0.3, given), []
                for kernel in (cut, reference.KERNEL):
                    out, lse = kernel.forward(tile)
                    found.append([out, lse, *kernel.backward(tile, dout, out, lse)])
                for x, y in zip(*found, strict=True):
                    assert torch.allclose(x, y, rtol=1e-10, atol=1e-10)
