"""The code that pages of the documentation print, its run, and the comparison of what it trains with one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

from tests.harness.oracle import absolute_error

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "integrations"


def recipe(page: str) -> str:
    """The first code of a page, which is short."""
    code = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.M | re.S)[0]
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 20, f"{page}.md has {len(lines)} lines"
    return code


def gradient_error(model: nn.Module, oracle: nn.Module) -> float:
    """The largest error of a parameter's gradient, relative to the largest of it."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), oracle.parameters(), strict=True)]
    return max(absolute_error(a, b) / max(b.abs().max().item(), 1e-3) for a, b in pairs if b is not None)


def torchrun(words: list[str], cwd: Path) -> str:
    """The output of a program under torchrun on two ranks, which succeeds. ``words`` are those behind ``torchrun``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    command[command.index("--nproc-per-node") + 1] = "2"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
