"""The code that pages of the documentation print, and the comparison of what it trains with one device."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from tests.harness.oracle import absolute_error

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


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
