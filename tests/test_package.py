"""The package as it is installed: light to import, typed, with a command."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, resources

import pytest

HEAVY = ["torch_npu", "matplotlib", "transformers", "accelerate", "hyper_cp.cli", "hyper_cp.demo"]


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


def test_ops_import_nothing_from_above() -> None:
    """The engine's rooms never import from the package above them."""
    ops = resources.files("hyper_cp").joinpath("ops")
    for path in [*ops.iterdir(), *ops.joinpath("kernels").iterdir()]:
        if path.name.endswith(".py"):
            upward = "..." if path.parent.name == "kernels" else ".."  # type: ignore[attr-defined]
            found = re.findall(
                rf"^\s*(?:from {re.escape(upward)}\w*|import hyper_cp|from hyper_cp).*",
                path.read_text(),
                re.M,
            )
            assert not found, f"{path.name}: {found}"


def test_only_axis_communicates() -> None:
    ops = resources.files("hyper_cp")
    calls = r"dist\.(all_|batch_|broadcast|isend|irecv|send|recv|reduce|gather|scatter|barrier)"
    for path in [*ops.iterdir(), *ops.joinpath("ops").iterdir(), *ops.joinpath("ops/kernels").iterdir()]:
        if path.name.endswith(".py") and path.name not in ("axis.py", "demo.py"):
            assert not re.search(calls, path.read_text()), f"{path.name} communicates"


@pytest.mark.slow
def test_command_answers_help() -> None:
    for argv in (["--help"], ["demo", "--help"]):
        done = subprocess.run([sys.executable, "-m", "hyper_cp.cli", *argv], capture_output=True, text=True)
        assert done.returncode == 0
        assert "demo" in done.stdout
    bad = subprocess.run([sys.executable, "-m", "hyper_cp.cli", "nonsense"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "demo" in bad.stderr
