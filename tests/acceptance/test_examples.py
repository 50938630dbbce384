"""The examples run as their first lines say, and print the losses of one rank."""

from __future__ import annotations

import importlib.util
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def shown(script: str) -> str:
    """The command line in an example's first lines."""
    (line,) = re.findall(r"^    torchrun (.*)$", (EXAMPLES / script).read_text(), re.M)
    return line


def command(script: str) -> list[str]:
    """Its words, without the optional part."""
    return shlex.split(re.sub(r"\[.*\]", "", shown(script)))


def options_of(script: str) -> list[str]:
    """All options that it shows, with their values."""
    return shlex.split(" ".join(x for x in re.findall(r"\[(.*?)\]", shown(script)) if "DIRECTORY" not in x))


@on_ranks
def run_main(script: str, options: list[str]) -> tuple[Any, float]:
    start = time.monotonic()
    spec = importlib.util.spec_from_file_location(Path(script).stem, EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(options), time.monotonic() - start


def test_there_are_few_and_each_says_how_it_runs() -> None:
    assert len(NAMES) <= 9
    for name in NAMES:
        assert command(name) == ["--nproc-per-node", "4", f"examples/{name}"]


OTHERS: dict[str, list[list[str]]] = {"packed_llama_fsdp.py": [["--tp", "2"]]}
"""Other options for four ranks."""
SHORTER: dict[str, list[str]] = {
    "encoder_decoder.py": ["--steps", "3", "--source", "125", "--target", "75"],
    "hybrid_recurrent.py": ["--steps", "3", "--length", "125"],
    "packed_llama_fsdp.py": ["--steps", "3", "--length", "250"],
}
"""Options with which an example is done earlier."""
QUICK, SLOW = ("nanogpt.py", "vit_cls.py"), ("encoder_decoder.py", "hybrid_recurrent.py", "packed_llama_fsdp.py")
"""Examples that return the loss of every step."""


@pytest.mark.parametrize("script", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_losses_are_those_of_one_rank(ranks: Any, script: str) -> None:
    shorter = SHORTER.get(script, [])
    ((one, _),) = ranks(1, run_main, script, [*(["--cp", "1"] if "--cp" in options_of(script) else []), *shorter])
    assert one[-1] < one[0] - 0.1, one
    for options in (options_of(script), *OTHERS.get(script, [])):
        for losses, _ in ranks(4, run_main, script, [*options, *shorter]):
            assert losses == pytest.approx(one, abs=1e-4)


def test_what_nanogpt_writes_is_what_one_rank_writes(ranks: Any) -> None:
    options = ["--steps", "2", "--length", "77", "--write", "9"]
    ((one, _),) = ranks(1, run_main, "nanogpt.py", options)
    assert len(one) == 9 and all(written == one for written, _ in ranks(3, run_main, "nanogpt.py", options))


@pytest.mark.slow
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
    ((one, evaluation), _), *_ = ranks(2, run_main, "hf_trainer.py", ["--steps", "2"])
    assert one[-1] < one[0] - 0.1
    for (losses, evaluated), _ in ranks(4, run_main, "hf_trainer.py", ["--steps", "2"]):
        assert losses == pytest.approx(one, abs=1e-4) and evaluated == pytest.approx(evaluation, abs=1e-2)


@pytest.mark.slow
def test_eval_at_higher_cp(ranks: Any) -> None:
    for differences, _ in ranks(4, run_main, "eval_at_higher_cp.py", ["--steps", "2", "--samples", "4"]):
        assert len(differences) == 2 and max(differences) <= 1e-5
