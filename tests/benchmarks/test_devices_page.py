"""docs/measured/devices.md, command by command. Those of NPUs run on a device named "npu" over gloo, with a double of
the vendor's operators; those of GPUs are read by the programs that they start."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.device import check as device_check
from benchmarks.device import overlap as device_overlap
from hyper_cp.cli.diagnosis import machine, timing
from tests.harness import npu_device
from tests.harness.ranks import Ranks, on_ranks

PAGE = (Path(__file__).parents[2] / "docs/measured/devices.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
OURS = [words for words in COMMANDS if "-m" in words]
SIZES = ["--dtype", "float32", "--heads", "8", "--kv-heads", "8", "--dim", "8", "--rounds", "1"]


def started(words: list[str]) -> tuple[str, list[str], int]:
    """The module, its arguments and the number of processes."""
    at = words.index("-m")
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    return words[at + 1], words[at + 2 :], ranks


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


# --------------------------------------------------------------------------- on a double of NPUs


class Event:
    """An event of the device, whose time is the host's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = timing.time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@on_ranks
def walked(module: str, given: list[str]) -> tuple[int, str]:
    """Exit code and output of a command of the page, on small tensors."""
    device = npu_device.MODULE
    device.Event, device.get_device_name = Event, lambda: "double"
    device.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch.npu = device  # type: ignore[attr-defined]
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(timing, "CACHE", 1),
    ):
        if module == "benchmarks.device.check":
            code = device_check.main([*given, *SIZES, "--lengths", "64", "--worlds", "2", "--ranks", "2"])
        else:
            args = device_overlap.arguments([*given, *SIZES, "--length", "64"])
            with mock.patch.object(device_overlap, "arguments", lambda: args):
                code = device_overlap.main()
    return code, printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in OURS if "npu" in words], ids=" ".join)
def test_the_commands_for_npus_run_on_a_double(npus: Ranks, words: list[str]) -> None:
    module, given, ranks = started(words)
    for code, text in npus(min(ranks, 2), walked, module, given):
        assert code == 0 and not set(text.split()) & {"WRONG", "FAILED", "CRASHED", "FINITE"}, text
