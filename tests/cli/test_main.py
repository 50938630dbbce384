"""The command: help of all subcommands, and what it says of an unknown one."""

from __future__ import annotations

import runpy
import sys

import pytest

from hyper_cp.cli.main import main


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)
    assert done.value.code == 0 and "demo" in capsys.readouterr().out


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert "train a small Llama" in printed and "examine the machine" in printed


def test_help_of_the_planner_names_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    found = capsys.readouterr().out.partition("options:")[2]
    for size in ("--layers", "--heads", "--kv-heads", "--head-dim", "--width", "--ffn", "--vocabulary"):
        assert size in found


def test_an_unknown_subcommand_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hyper_cp", "nonsense"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("hyper_cp", run_name="__main__")  # as ``python -m hyper_cp`` does
    assert done.value.code == 2 and "demo" in capsys.readouterr().err
