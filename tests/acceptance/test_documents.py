"""Every Python block of the README and of docs/ that can run is run: the blocks of a page one after the other.

A page that makes a mesh runs on two ranks, any other in one process. ``"cuda"`` reads as ``"cpu"``. Comments of HTML
before a block, which readers do not see, say more:

    <!-- setup ... -->                 code that runs before the next block: the reader's model and data
    <!-- check ... -->                 code that runs after the block before: the result is what the page says
    <!-- run by tests/FILE.py ... -->  the block below is run by that file
    <!-- not run: REASON -->           the block below cannot run here

A block with a title (```` ```python TITLE ````) is run by a test that names the title.
"""

from __future__ import annotations

import re
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.composition_training import llama
from tests.harness.ranks import on_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = re.compile(
    r"<!-- (?:setup|check)\n(?P<hidden>.*?)^-->"
    r"|(?:^<!-- (?P<mark>(?:not run|run by)[^\n]*) -->\n)?^```python(?P<title>[^\n]*)\n(?P<code>.*?)^```",
    re.M | re.S,
)

Code = tuple[int, str]
"""The line that code begins after, and the code."""


def parts(page: Path) -> tuple[list[Code], list[str]]:
    """The code of a page that runs here, in order, and what is wrong with the marks of other blocks."""
    text, run, wrong = page.read_text(), [], []
    for part in PARTS.finditer(text):
        mark, title = part["mark"], (part["title"] or "").strip()
        if part["hidden"] is not None or not (mark or title):
            name = "code" if part["hidden"] is None else "hidden"
            run.append((text[: part.start(name)].count("\n"), part[name].replace('"cuda"', '"cpu"')))
        elif title:
            named = any(f'"{title}"' in source or f"python {title}\\n" in source for source in sources())
            wrong += [] if named else [title]
        elif mark.startswith("run by"):
            test = mark.split()[2].rstrip(":,")
            wrong += [] if (ROOT / test).is_file() else [mark]
        else:
            wrong += [] if re.match(r"not run: .{15}", mark) else [mark]
    return run, wrong


@cache
def sources() -> list[str]:
    return [path.read_text() for path in (ROOT / "tests").rglob("*.py")]


@on_ranks
def failures(pages: list[tuple[str, list[Code]]]) -> dict[str, str]:
    """The error of every page whose code does not run, with its line."""
    found = {}
    for page, blocks in pages:
        torch.manual_seed(0)
        names: dict[str, Any] = {"llama": llama, "print": lambda *_, **__: None, "__name__": "page"}
        try:
            for line, code in blocks:
                exec(compile("\n" * line + code, page, "exec"), names)
        except Exception:
            found[page] = traceback.format_exc(limit=-4)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_blocks_run(ranks: Any, world: int) -> None:
    pytest.importorskip("transformers")
    chosen = []
    for page in PAGES:
        blocks, _ = parts(page)
        if blocks and world == 1 + any("init_device_mesh" in code for _, code in blocks):
            chosen.append((str(page.relative_to(ROOT)), blocks))
    assert chosen
    for found in ranks(world, failures, chosen):
        assert not found, "\n".join(found.values())


def test_blocks_that_are_not_run_say_why() -> None:
    wrong = {page.name: names for page in PAGES if (names := parts(page)[1])}
    assert not wrong, f"marks or titles without a test or a reason: {wrong}"
