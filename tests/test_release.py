"""The release: the wheel runs its command in an environment of its own, and the sdist has what builds it again."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import hyper_cp

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that succeeds. It does not find this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_alone(tmp_path: Path) -> None:
    """``make release-check`` does the same with everything from the registry."""
    backend = pytest.importorskip("hatchling.build")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        wheel, sdist = (tmp_path / build(str(tmp_path)) for build in (backend.build_wheel, backend.build_sdist))
    finally:
        os.chdir(before)
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"hyper_cp-{hyper_cp.__version__}-py3-none-any.whl" and "hyper_cp/py.typed" in names
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"hyper_cp", info}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "hyper_cp/__init__.py"} <= held

    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", env / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    options = ["--ranks", "2", "--steps", "1", "--seq-len", "64", "--modes", "ring", "--html", "demo.html"]
    assert "\nring " in run(env / "bin" / "hyper-cp", "demo", *options, cwd=tmp_path)
    assert (tmp_path / "demo.html").stat().st_size > 1000
    code = "from importlib.util import find_spec; print(find_spec('hyper_cp').origin)"
    found = run(env / "bin" / "python", "-c", code, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(site)


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {hyper_cp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{hyper_cp.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
