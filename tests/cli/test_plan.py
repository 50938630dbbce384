"""hyper-cp plan: table, JSON, picture, and errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_cp.cli.main import main

SIZES = ["--layers", "4", "--heads", "8", "--kv-heads", "2", "--width", "512", "--ffn", "1024", "--vocabulary", "1000"]


def test_the_table_with_and_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["plan", *SIZES, "--sequence", "16K", "--gpus", "4", "--rows", "3"]
    assert main(command) == 0
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "240")
    piped = capsys.readouterr().out
    assert main(command) == 0
    table = capsys.readouterr().out
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    assert main(command) == 0
    assert capsys.readouterr().out == piped
    for text in (table, piped):
        assert "16,384 tokens" in text and "Use first: cp mesh of" in text and "tokens/s" in text
        assert "more modes" in text and ("│" in text) == (text is table and find("rich") is not None)


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "plan.png"
    lengths.write_text("4096\n2048\n2048\n")
    command = ["plan", *SIZES, "--documents", str(lengths), "--gpus", "2", "--json", "--plot", str(picture)]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["format"] == "hyper-cp plan" and found["length"] == 8192 and found["documents"] == 3
    assert found["best"] == 0 and {"why", "memory", "balance", "style"} <= found["strategies"][0].keys()
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    "options,message",
    [
        (["--sequence", "1K", "--gpus", "2"], "says what to plan for"),
        ([*SIZES, "--gpus", "2"], "says how long the sequence"),
        ([*SIZES, "--documents", "1,x", "--gpus", "2"], "cannot be read"),
        ([*SIZES, "--sequence", "1K", "--gpus", "2", "--cluster", "abacus"], "unknown profile"),
        ([*SIZES, "--sequence", "1K", "--gpus", "2", "--tflops", "-1"], "not a positive finite number"),
        ([*SIZES, "--sequence", "1K", "--gpus", "2", "--rows", "0"], "--rows 0 is not a positive number"),
        ([*SIZES, "--sequence", "1K", "--gpus", "2", "--plot", "plan.xyz"], "--plot plan.xyz has no ending of a pict"),
        ([*SIZES, "--documents", "0,512,1024", "--gpus", "2"], "Pass the differences: 512,512"),
        (["nofile.json", "--sequence", "1K", "--gpus", "2"], "means the file 'nofile.json', which does"),
        (["./folder", "--sequence", "1K", "--gpus", "2"], "model='./folder' means the file"),
        (["tests", "--sequence", "1K", "--gpus", "2"], "means the file 'tests/config.json', which"),
        (["pyproject.toml", "--sequence", "1K", "--gpus", "2"], "cannot be read as JSON"),
    ],
)
def test_mistakes_end_in_an_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setitem(sys.modules, "transformers", None)  # nothing is looked up by name
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_length_that_is_no_number_is_an_error_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", *SIZES, "--gpus", "2", "--sequence", "128x"])
    assert done.value.code == 2 and "'128x' is no number of tokens" in capsys.readouterr().err


def test_the_exit_code_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--sequence", "1M", "--gpus", "1", "--memory-gb", "1"]) == 1
    assert "Nothing fits" in capsys.readouterr().out
