"""The examples run as their first lines say, and print the losses of one rank."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def command(script: str) -> list[str]:
    """The words of the command line in an example's first lines, without its optional part."""
    (line,) = re.findall(r"^    torchrun (.*)$", (EXAMPLES / script).read_text(), re.M)
    return shlex.split(re.sub(r"\[.*\]", "", line))


def options_of(script: str) -> list[str]:
    """All options that the command line in an example's first lines shows, with their values."""
    (line,) = re.findall(r"^    torchrun (.*)$", (EXAMPLES / script).read_text(), re.M)
    return shlex.split(" ".join(x for x in re.findall(r"\[(.*?)\]", line) if "DIRECTORY" not in x))


@on_ranks
def run_main(script: str, options: list[str]) -> tuple[Any, float]:
    start = time.monotonic()
    spec = importlib.util.spec_from_file_location(Path(script).stem, EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(options), time.monotonic() - start


def test_there_are_few_and_each_says_how_it_runs() -> None:
    assert len(NAMES) <= 8
    for name in NAMES:
        assert command(name) == ["--nproc-per-node", "4", f"examples/{name}"]


@pytest.mark.slow
def test_under_torchrun() -> None:
    """One of them; the others start in the same way."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command("nanogpt.py")]
    run[run.index("--nproc-per-node") + 1] = "2"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=env, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"2 ranks:( \d\.\d{4}){5}\n", done.stdout), done.stdout


TRAINED: dict[str, list[list[str]]] = {
    "encoder_decoder.py": [[]],
    "hybrid_recurrent.py": [[]],
    "nanogpt.py": [[]],
    "packed_llama_fsdp.py": [[], ["--tp", "2"]],
    "vit_cls.py": [[]],
}
"""Examples that return the loss of every step, and other options for four ranks."""


@pytest.mark.parametrize("script", TRAINED)
def test_losses_are_those_of_one_rank(ranks: Any, script: str) -> None:
    ((one, _),) = ranks(1, run_main, script, ["--cp", "1"] if "--cp" in options_of(script) else [])
    assert one[-1] < one[0] - 0.1, one
    for options in ([*options_of(script)], *TRAINED[script][1:]):
        for losses, _ in ranks(4, run_main, script, options):
            assert losses == pytest.approx(one, abs=1e-4)


def test_a_long_sequence_takes_less_memory_and_gives_the_same_losses(ranks: Any) -> None:
    options = ["--length", "1000", "--steps", "1"]
    ((one, _),) = ranks(1, run_main, "long_sequence.py", options)
    for found, _ in ranks(4, run_main, "long_sequence.py", options):
        assert list(found) == list(one) and len(found) == 4
        for losses, _ in found.values():
            assert losses == pytest.approx(one["plain"][0], abs=1e-4)
        peaks = [peak for _, peak in found.values()]
        assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.7 * peaks[0], peaks
        assert peaks[0] < 0.4 * one["plain"][1]


@pytest.mark.slow
def test_trainer_on_other_divisions_of_the_ranks(ranks: Any) -> None:
    pytest.importorskip("accelerate")
    ((one, evaluation), _), *_ = ranks(2, run_main, "hf_trainer.py", ["--steps", "3"])
    assert one[-1] < one[0] - 0.1
    for (losses, evaluated), _ in ranks(4, run_main, "hf_trainer.py", ["--steps", "3"]):
        assert losses == pytest.approx(one, abs=1e-4) and evaluated == pytest.approx(evaluation, abs=1e-2)


def test_eval_at_higher_cp(ranks: Any) -> None:
    for differences, _ in ranks(4, run_main, "eval_at_higher_cp.py", ["--steps", "2", "--samples", "4"]):
        assert len(differences) == 2 and max(differences) <= 1e-5
