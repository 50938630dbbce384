"""Lines, tables and progress of the commands: by rich on a terminal where it is installed, otherwise as plain text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def _with_rich() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def say(text: str, style: str = "") -> None:
    """Print a line, on a terminal in one of rich's styles."""
    if _with_rich():
        from rich.console import Console  # an optional dependency (the extra "viz"), which nothing else needs
        from rich.text import Text

        Console().print(Text(text, style), soft_wrap=True)
    else:
        print(text, flush=True)


def aligned(cells: Sequence[Sequence[str]], left: Sequence[str]) -> list[str]:
    """Return the lines of a table as plain text; columns are aligned to the right, but for those named in ``left``."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if name in left else ">" for name in cells[0]]
    return ["  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in cells]


def show_table(cells: Sequence[Sequence[str]], styles: Sequence[str], left: Sequence[str]) -> None:
    """Print a table.

    Args:
        cells: rows of cells; the first row is the header.
        styles: rich's style of each row below the header.
        left: names of the columns that are aligned to the left.
    """
    if not _with_rich():
        print("\n".join(aligned(cells, left)), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in cells[0]:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row, style in zip(cells[1:], styles, strict=True):
        table.add_row(*map(Text, row), style=style)
    Console().print(table)


@contextmanager
def progress(what: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show that ``what`` is under way.

    Args:
        total: the number of its parts; None if they are not counted.
        shown: False on ranks that print nothing.

    Yields:
        A function to call after each part, with a few words about it.
    """
    if not shown:
        yield lambda note: None
    elif _with_rich():
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:28}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, transient=total is None) as bars:
            task = bars.add_task(what, total=total, note="")
            yield lambda note: bars.update(task, advance=1, note=note)
    elif total is None:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield lambda note: None
    else:
        done = 0

        def advance(note: str) -> None:
            nonlocal done
            done += 1
            live, last = sys.stderr.isatty(), done == total
            if live or last:
                line = f"{what:28} [{'#' * (24 * done // total):.<24}] {done}/{total}  {note}"
                print("\r" * live + line, end="\n" if last else "", file=sys.stderr, flush=True)

        yield advance
