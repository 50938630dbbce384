"""Plain English in docstrings, comments, messages and documents: no banned openings, none of our private words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted(p for room in ("hyper_cp", "benchmarks", "examples", "tests") for p in (ROOT / room).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RULES = ("CONTRIBUTING.md", "tests/test_words.py")
"""Files that quote the banned words."""

OPENINGS = ("Of", "What", "Where", "Whether", "Which", "How")
"""First words that make a docstring a fragment: it should begin with what the thing does or is."""

INSTEAD = {
    r"\blook(s|ed)? at\b": "read, examined, honoured",
    r"\b(is|are|was|were) told\b": "receives",
    r"\bseen of\b": "visible in",
    r"\bwith words\b": "with an error that explains itself",
    r"\b(refus|rais|reject)\w*\b[^.]{0,60}\bby name\b": "raises an error",
    r"\b(the|these|its|their|all|mesh) stays\b": "mesh stack",
    r"\bthey are of the\b": "they describe",
    r"\bfacts?\b": "batch state, property",
    r"\bsettle[sd]?\b": "decide, restore",
    r"\bborders?\b": "boundaries, cu_seqlens",
    r"\bnotice[sd]?\b": "detect",
    r"\bvouch\w*\b": "exempt from this check",
    r"\bof so many\b": "this many, or the name of the number",
    r"\bow(e|es|ed)\b": "must compute",
    r"\bremember(s|ed)?\b": "record",
    r"\b(a double|doubles) (of|with|that)\b": "a mock",
    r"\btakes? the loss\b": "compute the loss",
    r"\bupon which\b": "so that",
    r"\banswers? None\b": "return None",
    r"\bis to be done\b": "you need to do",
    r"\bothers lose\b": "why each other is not the first choice",
    r"\bhere as there\b": "as on one device",
    r"\bbehind \w+'s back\b": "say what changed",
}
"""Private or vague words, and what to write instead."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every comment; comments below each other are one text."""
    first, block = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != first + len(block):
            yield first, "\n".join(block)
            first, block = token.start[0], []
        block.append(token.string.lstrip("#"))
    yield first, "\n".join(block)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """First line and text of every string: messages, docstrings, the words between the values of f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def texts() -> Iterator[tuple[str, int, str]]:
    """File, first line and text of everything that people read."""
    for path in [*PYTHON, *DOCUMENTS]:
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if name in RULES:
            continue
        found = [(1, source)] if path.suffix == ".md" else [*comments(source), *strings(ast.parse(source))]
        yield from ((name, first, text) for first, text in found)


@pytest.mark.slow
def test_docstrings_begin_with_what_the_thing_does_or_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in PYTHON
        for line, text in docstrings(ast.parse(path.read_text()))
        if re.match(rf"({'|'.join(OPENINGS)})\b", text.strip())
    ]
    assert not found, "docstrings that begin with " + ", ".join(OPENINGS) + ":\n" + "\n".join(found)


@pytest.mark.slow
def test_words_of_the_field_instead_of_private_ones() -> None:
    found = [
        f"{name}:{first + text[: match.start()].count(chr(10))}: {match.group()!r}  [instead: {instead}]"
        for name, first, text in texts()
        for pattern, instead in INSTEAD.items()
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)
    ]
    assert not found, f"{len(found)} places:\n" + "\n".join(sorted(set(found)))
