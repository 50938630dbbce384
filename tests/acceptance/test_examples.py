"""The examples run as users start them, and print the losses of one rank."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(script: str, *options: str) -> str:
    """Start a script on two ranks and return the output of rank 0. (The pool runs it on four.)"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command += [str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(text: str) -> dict[str, list[float]]:
    """Losses by what stands before the colon."""
    lines = re.findall(r"^(.+?) *(?:on|,) \d ranks?: (.*)$", text, re.M)
    return {name.strip(): [float(x) for x in losses.split()] for name, losses in lines}


@on_ranks
def run_main(script: str, options: list[str]) -> Any:
    spec = importlib.util.spec_from_file_location(Path(script).stem, EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(options)


@pytest.mark.slow
def test_finetune_llama(ranks: Any) -> None:
    pytest.importorskip("transformers")
    found = printed(torchrun("finetune_llama.py", "--steps", "3"))
    assert list(found) == ["ulysses", "colossal", "ring"]
    (one,) = ranks(1, run_main, "finetune_llama.py", ["--steps", "3", "--mode", "ulysses"])
    for losses in found.values():
        assert losses == pytest.approx(one["ulysses"], abs=2e-3) and losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_pretrain_fsdp_cp(ranks: Any) -> None:
    found = printed(torchrun("pretrain_fsdp_cp.py", "--steps", "3"))
    (one,) = ranks(1, run_main, "pretrain_fsdp_cp.py", ["--steps", "3", "--cp", "1"])
    assert found["cp 2, tp 1"] == pytest.approx(one, abs=2e-3) and one[-1] < one[0] - 0.3
    for losses in ranks(4, run_main, "pretrain_fsdp_cp.py", ["--steps", "3", "--tp", "2"]):
        assert losses == pytest.approx(one, abs=2e-3)


def test_examples_in_the_pool(ranks: Any) -> None:
    """The other two without torchrun."""
    pytest.importorskip("transformers")
    (one,) = ranks(1, run_main, "finetune_llama.py", ["--steps", "2", "--mode", "ulysses"])
    for found in ranks(4, run_main, "finetune_llama.py", ["--steps", "2"]):
        assert all(losses == pytest.approx(one["ulysses"], abs=2e-3) for losses in found.values())
    (one,) = ranks(1, run_main, "pretrain_fsdp_cp.py", ["--steps", "2", "--cp", "1"])
    for losses in ranks(4, run_main, "pretrain_fsdp_cp.py", ["--steps", "2"]):
        assert losses == pytest.approx(one, abs=2e-3)


def test_eval_at_higher_cp(ranks: Any) -> None:
    for differences in ranks(4, run_main, "eval_at_higher_cp.py", ["--steps", "2", "--samples", "4"]):
        assert len(differences) == 2 and max(differences) <= 1e-5
