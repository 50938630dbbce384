"""The check for devices passes on the CPU, and fails on wrong kernels, NaNs, crashes and refusals of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import REFERENCE, TileInputs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import device_check
from device_checks import ranks, replays, results, tiles, times

SMALL = [tiles.Tile(12, 12, tiles.CAUSAL, heads=(2, 1), dims=(8, 8)), tiles.Tile(7, 1, heads=(2, 1), dims=(8, 8))]
ARGUMENTS = "--device cpu --dtype float32 --lengths 64 --heads 4 --kv-heads 4 --dim 16 --ranks 2 --worlds 2 --rounds 1"


class Planted:
    """The reference kernel with something wrong in one of its results."""

    name = "planted"

    def __init__(self, spoil: Any, backward: bool) -> None:
        self.spoil, self.in_backward = spoil, backward

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        out, lse = REFERENCE.forward(tile)
        return (out if self.in_backward else self.spoil(out)), lse

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = REFERENCE.backward(tile, *of_rows)
        return dq, (self.spoil(dk) if self.in_backward else dk), dv


def wrong(x: Tensor) -> Tensor:
    return x * 1.001


def one_nan(x: Tensor) -> Tensor:
    x[0, 0, 0, 0] = torch.nan
    return x


def crash(x: Tensor) -> Tensor:
    raise RuntimeError("an illegal memory access was encountered")


def programming_error(x: Tensor) -> Tensor:
    raise TypeError("unexpected keyword")


@pytest.fixture
def check(monkeypatch: Any, capsys: Any) -> Any:
    """Runs sections on few and small tiles and returns the exit code and what was printed."""
    monkeypatch.setattr(tiles, "TILES", SMALL)
    monkeypatch.setattr(tiles, "MIXED", SMALL[:1])
    monkeypatch.setattr(tiles, "IN_EVERY_LAYOUT", SMALL[:1])

    def run(*sections: str) -> tuple[int, str]:
        code = device_check.main([*ARGUMENTS.split(), "--only", *sections])
        return code, capsys.readouterr().out

    return run


def test_every_section_passes_on_the_cpu(check: Any) -> None:
    code, text = check(*device_check.SECTIONS)
    assert code == 0 and not set(text.split()) & {"WRONG", "FAILED", "CRASHED", "FINITE"}, text
    for line in (
        "reference torch.float32 B2 H2/1 D8 12x12 (None, 0)",
        "dout SBHD, others BSHD",
        "needed, head_tail, 2",
    ):
        assert line in text, line
    assert "ulysses, 2 ranks, autocast" in text and "compiled by aot_eager" in text
    assert text.count("of plain SDPA  cpu flash") == 6 and text.count("merging") == 1 + len(ranks.MODES)
    assert text.count("absent") == 1 + 4  # CUDA graphs of two kernels on two tiles, and their count


@pytest.mark.parametrize(
    "spoil, backward, status",
    [
        (wrong, False, "WRONG"),
        (wrong, True, "WRONG"),
        (one_nan, False, "NOT FINITE"),
        (one_nan, True, "NOT FINITE"),
        (crash, False, "CRASHED"),
        (programming_error, True, "CRASHED"),
    ],
)
def test_a_planted_kernel_fails(check: Any, spoil: Any, backward: bool, status: str) -> None:
    with kernels.register(Planted(spoil, backward), "cpu"):
        code, text = check("kernels", "engine")
    failed = [line for line in text.splitlines() if line.startswith("FAILED")]
    assert code == 1 and all("planted" in line or " ranks" in line for line in failed)
    assert sum(f"FAILED  {status}" in line for line in failed) >= len(SMALL) + 1 + len(ranks.MODES)
    assert "cpu flash torch.float32" in text  # the others are checked all the same


def test_refusals_are_listed_by_kernel_and_dtype(check: Any, monkeypatch: Any) -> None:
    """A listed refusal passes and is shown; another exception than a RuntimeError, or another dtype, is none."""
    monkeypatch.setitem(results.REFUSALS, ("planted", torch.float32), "only halves")
    with kernels.register(Planted(crash, False), "cpu", accepts=lambda *_: False):
        code, text = check("kernels")
        assert code == 0 and text.count("refused") == len(SMALL) + 1 and "only halves (RuntimeError: an illegal" in text
        monkeypatch.delitem(results.REFUSALS, ("planted", torch.float32))
        assert check("kernels")[0] == 1
    monkeypatch.setitem(results.REFUSALS, ("planted", torch.float32), "only halves")
    with kernels.register(Planted(programming_error, False), "cpu", accepts=lambda *_: False):
        assert check("kernels")[0] == 1


def test_a_section_that_breaks_fails_and_the_next_one_runs(check: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(replays, "check_graphs", lambda *_: 1 / 0)
    monkeypatch.setattr(times, "time_tiles", lambda *_: iter(["a time"]))
    code, text = check("replays", "tiles")
    assert code == 1 and "FAILED  CRASHED" in text and "section replays: ZeroDivisionError" in text and "a time" in text


def test_judgement() -> None:
    exact = torch.tensor([[1.0, -torch.inf]], dtype=torch.float64)
    assert results.judge("x", torch.float32, [(exact.float(), exact)]).status == results.OK
    assert results.judge("x", torch.float32, [(exact.float()[0], exact)]).status == results.WRONG  # another shape
    for found in ([1.0, 0.0], [1.0, torch.nan], [torch.inf, -torch.inf], [torch.nan, -torch.inf]):
        assert results.judge("x", torch.float32, [(torch.tensor([found]), exact)]).status == results.NOT_FINITE
    assert results.judge("x", torch.float32, [(torch.tensor([[1.00001, -torch.inf]]), exact)]).status == results.WRONG


def test_the_tiles_of_the_real_check_are_those_that_devices_meet() -> None:
    assert any(t.cols == 1 for t in tiles.TILES) and any(t.rows == 1 for t in tiles.TILES)
    assert any(t.rows % 2 and t.cols % 2 for t in tiles.TILES) and {1, 2, 3} <= {t.batch for t in tiles.TILES}
    assert any(t.parts for t in tiles.TILES) and any(t.band[0] is not None for t in tiles.TILES)
    assert any(not bool(tiles.visible_of(t, "cpu").any(-1).all()) for t in tiles.TILES)


@pytest.mark.slow
def test_real_tiles_on_the_cpu(capsys: Any) -> None:
    given = "--device cpu --dtype bfloat16 --lengths 256 --worlds 2 4 --only kernels layouts engine"
    code = device_check.main(given.split())
    text = capsys.readouterr().out
    assert code == 0 and "cpu flash torch.bfloat16" in text, text
