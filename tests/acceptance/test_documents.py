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

import ast
import doctest
import io
import re
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import hyper_cp
from hyper_cp import ops
from hyper_cp.data.sharding import Shares
from tests.harness.composition_training import llama
from tests.harness.mixer import Mixer
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


def messages() -> str:
    """Every string of the package, a line each, with ``...`` for values."""
    found = []
    for path in (ROOT / "hyper_cp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_troubleshooting_quotes_errors_that_exist() -> None:
    """The words between the values of a quoted error are part of some message."""
    text, known = (ROOT / "docs" / "help" / "troubleshooting.md").read_text(), messages()
    quoted = re.findall(r"^\| (`[^|]*?) \|", text.partition("## Hangs")[0], re.M)
    beginnings = [words for cell in quoted for words in re.findall(r"`([^`]+)`", cell)]
    assert len(beginnings) > 30
    unknown = {
        words: part
        for words in beginnings
        for part in re.split(r"\.\.\.|'x'|\(Conv1d\)|=None|=\"ring\"|='per_document'| 0 | 2 ", words)
        if len(part.strip(" ,(=")) > 3 and part.strip(" ,(") not in known
    }
    assert not unknown, unknown


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    texts = [(page, re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.M | re.S)) for page in pages]
    links = [(page, link) for page, text in texts for link in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text)]
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert len(links) > 100 and not broken, broken


@on_ranks
def failed_examples() -> tuple[int, str]:
    """The number of examples in docstrings of the public surface on two ranks, and what failed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    style = hyper_cp.ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, layout="head_tail")
    public = {name: getattr(module, name) for module in (ops, hyper_cp) for name in module.__all__}
    found, log = 0, io.StringIO()
    for name, thing in {**public, "Shares": Shares}.items():
        for test in doctest.DocTestFinder(recurse=isinstance(thing, type)).find(thing, name, module=False, globs={}):
            hybrid = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mixer": Mixer()})])})
            handler = hyper_cp.ContextParallelHandler(mesh, style)
            given = {"mesh": mesh, "style": style, "handler": handler, "model": llama(), "hybrid": hybrid}
            test.globs.update(public, **given, torch=torch, nn=nn, parallelize_module=parallelize_module)
            test.globs["init_device_mesh"] = lambda _, *args, **names: init_device_mesh("cpu", *args, **names)
            found += len(test.examples)
            doctest.DocTestRunner(verbose=False).run(test, out=log.write, clear_globs=False)
    return found, log.getvalue()


@pytest.mark.slow
def test_examples_of_docstrings(ranks: Any) -> None:
    for found, log in ranks(2, failed_examples):
        assert not log and found > 25, log


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
