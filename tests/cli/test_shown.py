"""Progress and tables of the commands on a terminal, with and without rich, and in a pipe."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from hyper_cp.cli.shown import aligned, progress, say


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_and_what_is_said_meanwhile(
    rich: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if rich or name != "rich" else None)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with progress("counted", 2) as advance:
        advance("first")
        say("meanwhile", "bold red")
        advance("second")
    with progress("examining"):
        pass
    with progress("silent", 1, shown=False) as advance:
        advance("nothing")
    out, err = capsys.readouterr()
    drawn = terminal and rich and find("rich") is not None
    assert "meanwhile" in out and "silent" not in out + err
    bars = out if drawn else err
    assert "counted" in bars and "second" in bars and "examining" in bars
    assert drawn or ("first" in err) == terminal


def test_a_table_is_aligned() -> None:
    assert aligned([["mode", "loss"], ["a", "10.0"], ["ring", "9.5"]], ["mode"]) == [
        "mode  loss",
        "a     10.0",
        "ring   9.5",
    ]
