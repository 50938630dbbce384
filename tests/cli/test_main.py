"""The command: help of all subcommands, and what it says of an unknown one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hyper_cp.cli.main import main


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)
    assert done.value.code == 0 and "demo" in capsys.readouterr().out


@pytest.mark.slow
def test_an_unknown_subcommand_ends_in_an_error() -> None:
    done = subprocess.run([sys.executable, "-m", "hyper_cp", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "demo" in done.stderr
