"""The check for devices passes on the CPU, and fails on wrong kernels, NaNs, crashes and refusals of its own."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device import check as device_check
from benchmarks.device import merges, ranks, replays, selected, tiles, times
from hyper_cp.cli.diagnosis import findings
from hyper_cp.cli.diagnosis.tiles import CAUSAL, Tile
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import REFERENCE, TileInputs, fused

SMALL = [Tile(12, 12, CAUSAL, heads=(2, 1), dims=(8, 8)), Tile(7, 1, heads=(2, 1), dims=(8, 8))]
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
    monkeypatch.setattr(selected, "CASES", [selected.Case(SMALL[0], 5)])

    def run(*sections: str) -> tuple[int, str]:
        code = device_check.main([*ARGUMENTS.split(), "--only", *sections])
        return code, capsys.readouterr().out

    return run


@pytest.mark.slow
def test_every_section_passes_on_the_cpu(check: Any) -> None:
    code, text = check(*device_check.SECTIONS)
    assert code == 0 and not set(text.split()) & {"WRONG", "FAILED", "CRASHED", "FINITE"}, text
    for line in (
        "reference torch.float32 B2 H2/1 D8 12x12 (None, 0)",
        "dout SBHD, others BSHD",
        "needed, head_tail, 2",
    ):
        assert line in text, line
    assert "Ulysses, head_tail, 2 ranks, autocast" in text and "compiled by aot_eager" in text
    assert text.count("of plain SDPA  cpu flash") == 6 and text.count("merging") == 1 + len(ranks.MODES)
    assert text.count("absent") == 1 + 4 + 8  # CUDA graphs of two kernels on two tiles, Triton, and their count


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


def test_refusals_are_listed_by_kernel_dtype_and_kind_of_tile(check: Any, monkeypatch: Any) -> None:
    """A listed refusal passes and is shown; another exception than a RuntimeError, or another dtype, is none."""

    def listed(*dtypes: torch.dtype) -> None:
        monkeypatch.setattr(tiles, "REFUSALS", [("planted", dtypes, "any", "only halves")])

    with kernels.register(Planted(crash, False), "cpu", accepts=lambda *_: False):
        listed(torch.float32)
        code, text = check("kernels")
        assert code == 0 and text.count("refused") == len(SMALL) + 1 and "only halves (RuntimeError: an illegal" in text
        listed(torch.float64)
        assert check("kernels")[0] == 1
    with kernels.register(Planted(programming_error, False), "cpu", accepts=lambda *_: False):
        listed(torch.float32)
        assert check("kernels")[0] == 1


def test_refusals_that_are_permitted() -> None:
    half, single = torch.bfloat16, torch.float32
    for name in kernels.available("cuda", selected=False).keys() - {"reference"}:
        for kind in ("dense", "packed", "banded"):
            without_masks = kind == "banded" and "without" in name and "memory-efficient" in name.split("without")[1]
            assert bool(tiles.refusal(name, half, kind)) == without_masks, (name, kind)
        assert bool(tiles.refusal(name, single, "dense")) == (name.split()[1] in ("flash", "cudnn"))
    assert not any(tiles.refusal(name, single, "dense") for name in (*kernels.available("npu"), "cpu flash"))


def test_a_section_that_breaks_fails_and_the_next_one_runs(check: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(replays, "check_graphs", lambda *_: 1 / 0)
    monkeypatch.setattr(times, "time_tiles", lambda *_: iter(["a time"]))
    code, text = check("replays", "tiles")
    assert code == 1 and "FAILED  CRASHED" in text and "section replays: ZeroDivisionError" in text and "a time" in text


class Graph:
    """A CUDA graph of a double: what it captured is computed again into the same tensors."""

    def __init__(self) -> None:
        self.captured: list[Any] = []

    def replay(self) -> None:
        for into, again in self.captured:
            for x, y in zip(into, again(), strict=True):
                x.copy_(y)


class Captured:
    """The reference kernel, as a graph captures it. A ``stale`` one has taken q out of the graph."""

    name = "captured"

    def __init__(self, graphs: list[Graph], stale: bool) -> None:
        self.graphs, self.stale = graphs, stale

    def _run(self, function: Any, tile: TileInputs, *of_rows: Tensor) -> Any:
        if self.stale:
            tile = replace(tile, q=tile.q.clone())
        results = function(tile, *of_rows)
        if self.graphs:
            self.graphs[-1].captured.append((results, lambda: function(tile, *of_rows)))
        return results

    def forward(self, tile: TileInputs) -> Any:
        return self._run(REFERENCE.forward, tile)

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> Any:
        return self._run(REFERENCE.backward, tile, *of_rows)


@pytest.mark.parametrize("stale, status", [(False, "ok"), (True, "WRONG")])
def test_a_replay_with_other_values_is_checked(monkeypatch: Any, stale: bool, status: str) -> None:
    capturing: list[Graph] = []

    @contextmanager
    def graph(made: Graph) -> Any:
        capturing.append(made)
        yield
        capturing.clear()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    module = SimpleNamespace(
        CUDAGraph=Graph, graph=graph, stream=lambda s: nullcontext(), Stream=lambda: stream, synchronize=lambda: None
    )
    module.current_stream = lambda: stream
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(kernels, "available", lambda device_type, selected: {"captured": Captured(capturing, stale)})
    assert [result.status for result in replays.check_graphs("cpu", torch.float32)] == [status] * 2


def test_judgement() -> None:
    exact = torch.tensor([[1.0, -torch.inf]], dtype=torch.float64)

    def status(found: Tensor) -> str:
        return findings.judge("", "x", torch.float32, [("output", found, exact)]).status

    assert status(exact.float()) == findings.OK
    assert status(exact.float()[0]) == findings.WRONG  # another shape
    for found in ([1.0, 0.0], [1.0, torch.nan], [torch.inf, -torch.inf], [torch.nan, -torch.inf]):
        assert status(torch.tensor([found])) == findings.NOT_FINITE
    assert status(torch.tensor([[1.00001, -torch.inf]])) == findings.WRONG


def test_the_tiles_of_the_real_check_are_those_that_devices_meet() -> None:
    assert any(t.cols == 1 for t in tiles.TILES) and any(t.rows == 1 for t in tiles.TILES)
    assert any(t.rows % 2 and t.cols % 2 for t in tiles.TILES) and {1, 2, 3} <= {t.batch for t in tiles.TILES}
    assert any(t.parts for t in tiles.TILES) and any(t.band[0] is not None for t in tiles.TILES)
    assert any(not bool(t.visible().any(-1).all()) for t in tiles.TILES)


class CuDNN:
    """A kernel whose operator is cuDNN's on a card that has none for long heads."""

    name, dense = "cuda cudnn", SimpleNamespace(name="cudnn", grouped=True)

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.q.shape[3] > 128:
            raise RuntimeError("cuDNN Frontend error: no engine")
        return REFERENCE.forward(tile)

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return REFERENCE.backward(tile, *of_rows)


@pytest.mark.parametrize("most, code", [(128, 0), (256, 1)])
def test_heads_that_the_card_does_not_take_are_no_failure(check: Any, monkeypatch: Any, most: int, code: int) -> None:
    """PyTorch says what a card's operators take. Where it says that heads are taken, an error is a failure."""
    long = Tile(16, 16, CAUSAL, heads=(2, 1), dims=(256, 256))
    monkeypatch.setattr(tiles, "TILES", [*SMALL, long])
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: params.query.shape[3] <= most)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92300)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with kernels.register(CuDNN(), "cpu", accepts=lambda *_: False):
        found, text = check("kernels", "--dtype", "bfloat16")
    (line, *_) = (line for line in text.splitlines() if "cuda cudnn torch.bfloat16" in line and "D256" in line)
    assert found == code and line.startswith("CRASHED" if code else "refused"), text


def test_the_clock_of_a_device_is_shown_if_its_driver_tells_it(monkeypatch: Any) -> None:
    def untold() -> int:
        raise ModuleNotFoundError("pynvml is not installed")

    for clock_rate, shown in ((lambda: 1980, "a card, now at 1980 MHz"), (untold, "a card")):
        module = SimpleNamespace(get_device_name=lambda: "a card", clock_rate=clock_rate)
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        assert device_check.device_name("cuda") == shown


def test_merges_are_checked_where_triton_runs(monkeypatch: Any) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(merges, "SHAPES", [(2, 2, 13, 8)])
    fused.compiled.cache_clear()
    monkeypatch.setattr(fused, "merge", lambda *x: fused.launch_merge(*x) is None)
    monkeypatch.setattr(fused, "add", lambda *x: fused.launch_add(*x) is None)
    assert [result.status for result in merges.check_merges("cpu", torch.bfloat16)] == ["ok", "ok"]
    monkeypatch.setattr(fused, "merge", lambda *x: True)  # it does nothing
    assert [result.status for result in merges.check_merges("cpu", torch.bfloat16)] == ["NOT FINITE", "ok"]
    fused.compiled.cache_clear()


def test_selected_keys_are_checked(monkeypatch: Any) -> None:
    """By the kernel that the call gets: plain math here, or what is registered for selections."""
    small = replace(selected.CASES[1].tile, rows=12, cols=12, dims=(8, 8)), replace(SMALL[0], rows=7, dims=(8, 6))
    monkeypatch.setattr(
        selected, "CASES", [selected.Case(small[0], 5, lists=2), selected.Case(small[1], 4, latents=True)]
    )
    single = [torch.float32]
    assert [(x.status, "reference (chosen)" in x.what) for x in selected.check_selected("cpu", single)] == [
        ("ok", True)
    ] * 2
    for spoil, backward, status in ((wrong, True, "WRONG"), (one_nan, False, "NOT FINITE")):
        with kernels.register(Planted(spoil, backward), "cpu", selected=True):
            assert [x.status for x in selected.check_selected("cpu", single)] == [status] * 2


@pytest.mark.slow
def test_real_tiles_on_the_cpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", tiles.TILES[::2])
    code = device_check.main(["--device", "cpu", "--dtype", "float32", "--lengths", "256", "--only", "kernels"])
    text = capsys.readouterr().out
    assert code == 0 and text.count("cpu flash torch.float32") == len(tiles.TILES), text
