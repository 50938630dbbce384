"""docs/measured/devices.md, command by command, on mocks of NPUs and of GPUs: a device that is made in Python, over
gloo, with mocks of the vendors' operators, events and graphs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.device import check as device_check
from benchmarks.device import merges, replays, selected, tiles
from benchmarks.device import overlap as device_overlap
from hyper_cp.cli import main as cli
from hyper_cp.cli.diagnosis import machine, speeds, timing
from hyper_cp.cli.diagnosis import tiles as diagnosis
from tests.harness import cuda_device, npu_device
from tests.harness.ranks import Ranks, on_ranks

PAGE = (Path(__file__).parents[2] / "docs/measured/devices.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
OURS = [words for words in COMMANDS if "-m" in words]
SIZES = ["--heads", "8", "--kv-heads", "8", "--dim", "8", "--rounds", "1"]
SIZES_OF_SPEEDS = speeds.Sizes(2**10, 8, diagnosis.Tile(64, 64, batch=1, heads=(4, 4)), 2**10, torch.bfloat16)
SMALL_TILES = [tile for tile in tiles.TILES if tile.rows * tile.cols < 6000]
EVERY_KIND = [*tiles.IN_EVERY_LAYOUT, *SMALL_TILES]
ONE_OF_EACH_KIND = list({tile.kind: tile for tile in EVERY_KIND}.values())


def started(words: list[str]) -> tuple[str, list[str], int]:
    """The module, its arguments and the number of processes."""
    at = words.index("-m")
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    return words[at + 1], words[at + 2 :], ranks


ON_GPUS = [
    words
    for words in OURS
    if "npu" not in words and started(words)[0].startswith("benchmarks.device") and started(words)[2] < 8
]
"""The overlap on eight ranks is that on two: the mock runs both at one short length."""


def test_every_command_is_read_by_its_program() -> None:
    assert len(OURS) >= 9 and {"benchmarks.device.check", "benchmarks.device.overlap"} < {started(x)[0] for x in OURS}
    for words in OURS:
        module, given, ranks = started(words)
        assert find_spec(module) is not None, module
        if module == "benchmarks.device.check":
            assert set(device_check.arguments(given).only) <= set(device_check.SECTIONS)
        elif module == "benchmarks.device.overlap":
            args = device_overlap.arguments(given)
            assert args.length % (2 * ranks) == 0


def test_the_recipe_for_npus_installs_versions_that_fit() -> None:
    """The vendor publishes torch_npu for one version of torch each, and for CANN 9.1."""
    (lines,) = (
        [" ".join(words) for words in map(shlex.split, block.splitlines())] for block in BLOCKS if "npu" in block
    )
    source = next(i for i, line in enumerate(lines) if "set_env.sh" in line)
    torch_at = next(i for i, line in enumerate(lines) if line.startswith("pip install torch=="))
    assert source < torch_at and "whl/cpu" in lines[torch_at]
    versions = {version for line in lines for version in re.findall(r"\btorch(?:_npu)?==([0-9.]+)", line)}
    assert versions == {"2.12.0"} and "torch_npu==" in " ".join(lines)


def test_variables_that_the_page_names_are_known_to_the_doctor() -> None:
    table = PAGE.split("## Environment variables")[1].split("###")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    known = {name for names in machine.VARIABLES.values() for name in names}
    assert {name for name in named if not name.startswith("HYPER_CP_")} <= known
    exported = {word.split("=")[0] for words in COMMANDS if words[:1] == ["export"] for word in words[1:]}
    assert exported and exported <= named and machine.QUEUES not in exported


# --------------------------------------------------------------------------- on doubles


@on_ranks
def walked(of_gpus: bool, module: str, given: list[str]) -> tuple[int, str]:
    """Exit code and output of a command of the page, on small tensors, on a mock of GPUs or NPUs."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        cuda_device.installed(triton="merges" in given) if of_gpus else contextlib.nullcontext(),
        mock.patch.object(torch, "npu", npu_device.MODULE, create=True),
        mock.patch.object(torch, "tensor", npu_device.tensor),
        mock.patch.multiple(timing, CACHE=1, WARM_UPS=1),
        mock.patch.object(timing.seconds_in_turns, "__defaults__", (2, lambda: None)),  # rounds, and what comes before
        mock.patch.object(speeds, "SMALL_ROUNDS", 2),
        mock.patch.object(speeds.Sizes, "of", lambda *_: SIZES_OF_SPEEDS),
        mock.patch.object(tiles, "TILES", ONE_OF_EACH_KIND if of_gpus else EVERY_KIND),
        mock.patch.object(tiles, "LAYOUTS", dict([*tiles.LAYOUTS.items()][::3])),
        mock.patch.object(tiles, "IN_EVERY_LAYOUT", SMALL_TILES[-1:] if of_gpus else tiles.IN_EVERY_LAYOUT[:1]),
        mock.patch.object(merges, "SHAPES", [(2, 3, 20, 80)]),
        mock.patch.object(selected, "CASES", [selected.CASES[3], replace(selected.CASES[4], topk=30)]),
        mock.patch.object(replays, "TILE", replace(replays.TILE, rows=64, cols=64)),
        mock.patch.object(replays, "DOCUMENTS", [(0, 64), (0, 31, 32, 64)]),
    ):
        dtype = [] if of_gpus else ["--dtype", "float32"]
        device = ["--device", "npu"]  # the type of the device that is made in Python
        if module == "benchmarks.device.check":
            # Graphs of the compiler hold no tensors of this device: they have tests of their own, on the CPU.
            sizes = ["--lengths", "64", "--worlds", "2", "--ranks", "2", "--compile"]
            code = device_check.main([*given, *device, *dtype, *SIZES, *sizes])
        elif module == "benchmarks.device.overlap":
            args = device_overlap.arguments([*given, *device, *dtype, *SIZES, "--length", "64"])
            with mock.patch.object(device_overlap, "arguments", lambda: args):
                code = device_overlap.main()
        else:
            code = cli.main(given)
    return code, printed.getvalue()


def check_walk(pool: Ranks, words: list[str], of_gpus: bool) -> str:
    """Run a command, on two ranks at most, and return what its first rank printed."""
    module, given, ranks = started(words)
    found = pool(min(ranks, 2), walked, of_gpus, module, given)
    for code, text in found:
        assert code == 0 and not set(text.split()) & {"WRONG", "FAILED", "CRASHED", "FINITE"}, text
    return str(found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in OURS if "npu" in words], ids=" ".join)
def test_the_commands_for_npus_run_on_a_double(npus: Ranks, words: list[str]) -> None:
    check_walk(npus, words, False)


@pytest.mark.slow
@pytest.mark.parametrize("words", ON_GPUS, ids=" ".join)
def test_the_commands_for_gpus_run_on_a_double(npus: Ranks, words: list[str]) -> None:
    text = check_walk(npus, words, True)
    assert "absent" not in text and ("a mock of an H100, now at 1980 MHz" in text or "overlap" in " ".join(words))


def test_the_lines_that_show_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    device = SimpleNamespace(get_device_name=lambda: "a card", is_available=lambda: False)
    lines = [words[2] for words in COMMANDS if words[:2] == ["python", "-c"]]
    installed = {"torch_npu": SimpleNamespace(__version__="2.12.0")}
    with mock.patch.multiple(torch, cuda=device, npu=device, create=True), mock.patch.dict(sys.modules, installed):
        for line in lines:
            exec(line, {})
    assert capsys.readouterr().out.count("a card") == len(lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("of_gpus", "ranks"), [(True, 1), (False, 2)])
def test_the_doctor_examines_a_double(npus: Ranks, of_gpus: bool, ranks: int) -> None:
    words = f"torchrun --nproc-per-node {ranks} -m hyper_cp doctor".split()
    text = check_walk(npus, words, of_gpus)
    assert "warnings)" in text and ("cuda cudnn on npu, bfloat16: it runs plain calls" in text) == of_gpus


@pytest.mark.slow
def test_a_step_is_verified_on_a_double(npus: Ranks) -> None:
    (command,) = re.findall(r"`(torchrun .*? -m hyper_cp verify \S+)`", PAGE)
    words = command.replace("my_training:verification", "tests.harness.planted:verification_on_npus").split()
    assert "OK: " in check_walk(npus, words, True)
