"""What mkdocs needs to know of this repository: pages outside of docs/, links to them, and docstrings as Markdown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "README.md": "index.md",
}
"""Files of the repository that are pages of the site; the README is the first one."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Drop comments (they are code for tests) and titles of code blocks, and mend links that leave docs/."""
    markdown = re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.S)
    markdown = re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.M)
    here = page.file.src_uri
    source = next((s for s, name in OUTSIDE.items() if name == here), f"docs/{here}")
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: mended(link, source, here), part) for part in parts[::2]]
    return "".join(parts)


def mended(link: re.Match[str], source: str, here: str) -> str:
    """A link in the file ``source`` as a link from the page ``here``; its text alone if it is no page of the site."""
    image, text, target, anchor = link.groups(default="")
    if not target or ":" in target:
        return link.group()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path)
    if page is None:
        return text
    return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"


RULE = re.compile(r"^\s*=+(?: +=+)+\s*$")


def as_markdown(text: str) -> str:
    """A docstring of this package as Markdown: roles, literal blocks, tables and sources."""
    steps: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        (r":(?:class|meth|func|mod|attr):`~?([\w.]+)`", lambda m: f"`{m.group(1).removeprefix('hyper_cp.')}`"),
        (r"``([^`]+)``", r"`\1`"),
        (r"^(\s*)Example::", r"\1Examples:"),
        (r"^\s*>>> # xdoctest.*\n", ""),
        (r"^\s*::\s*$", ""),
        (r" ?::$", ":"),
        (r"^(\s*)Source: ", r"\1**Source:** "),
    ]
    for pattern, to in steps:
        text = re.sub(pattern, to, text, flags=re.M)
    return tables_as_code(text)


def tables_as_code(text: str) -> str:
    """The text with its tables, which have rules of ``===``, as code."""
    found, inside = [], 0
    for line in text.split("\n"):
        rule = bool(RULE.match(line))
        indent = line[: len(line) - len(line.lstrip())]
        if rule and inside == 0:
            found.append(f"{indent}```text")
        inside += rule
        found.append(line)
        if rule and inside == 3:
            found.append(f"{indent}```")
            inside = 0
    return "\n".join(found)


class PlainText(griffe.Extension):
    """Turns docstrings into Markdown before they are shown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
