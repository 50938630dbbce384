"""Plain English in docstrings, comments, messages and documents: no banned openings, none of our private words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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
    r"\b(refused|refuses) by name\b": "raises an error",
    r"\bthey are of the\b": "they describe",
    r"\bfacts?\b": "batch state, property",
    r"\bsettle[sd]?\b": "decide, restore",
    r"\bborders?\b": "boundaries, cu_seqlens",
    r"\bnotice[sd]?\b": "detect",
    r"\bremember(s|ed)?\b": "record",
}
"""Private or vague words, and what to write instead."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and every string, messages and docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def texts() -> Iterator[tuple[str, int, str]]:
    """File, line and text of everything that people read."""
    for path in [*PYTHON, *DOCUMENTS]:
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if name not in RULES:
            lines = prose(source) if path.suffix == ".py" else enumerate(source.splitlines(), 1)
            yield from ((name, number, line) for number, line in lines)


def test_docstrings_begin_with_what_the_thing_does_or_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in PYTHON
        for line, text in docstrings(ast.parse(path.read_text()))
        if re.match(rf"({'|'.join(OPENINGS)})\b", text.strip())
    ]
    assert not found, "docstrings that begin with " + ", ".join(OPENINGS) + ":\n" + "\n".join(found)


def test_words_of_the_field_instead_of_private_ones() -> None:
    found = [
        f"{name}:{number}: {line.strip()}  [instead: {instead}]"
        for name, number, line in texts()
        for pattern, instead in INSTEAD.items()
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
