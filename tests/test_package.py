"""The package as it is installed: light to import, typed, with a command."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

HEAVY = ["torch_npu", "matplotlib", "transformers", "accelerate", "hyper_cp.cli"]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light() -> None:
    assert python(f"import sys, hyper_cp; print([m for m in {HEAVY} if m in sys.modules])").strip() == "[]"


def test_import_gives_no_warning() -> None:
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", "import hyper_cp"], check=True)


def test_version_and_marker() -> None:
    import hyper_cp

    assert metadata.version("hyper-cp") == hyper_cp.__version__
    assert resources.files("hyper_cp").joinpath("py.typed").is_file()


def test_public_names_resolve() -> None:
    import hyper_cp

    assert all(hasattr(hyper_cp, name) for name in hyper_cp.__all__)


def test_only_comm_communicates() -> None:
    package = Path(str(resources.files("hyper_cp")))
    calls = r"dist\.(all_|batch_|broadcast|isend|irecv|send|recv|reduce|gather|scatter|barrier)"
    for path in package.rglob("*.py"):
        if path.relative_to(package).as_posix() not in ("mesh/comm.py", "cli/demo.py"):
            assert not re.search(calls, path.read_text()), f"{path} communicates"


@pytest.mark.slow
def test_command_answers_help() -> None:
    for argv in (["--help"], ["demo", "--help"]):
        done = subprocess.run([sys.executable, "-m", "hyper_cp", *argv], capture_output=True, text=True)
        assert done.returncode == 0
        assert "demo" in done.stdout
    bad = subprocess.run([sys.executable, "-m", "hyper_cp", "nonsense"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "demo" in bad.stderr
