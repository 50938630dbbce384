"""The demo, short: every mode's losses are those of one rank, and a wrong mode is caught."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

from hyper_cp.cli import demo
from hyper_cp.cli.main import main
from tests.harness.ranks import on_ranks


@pytest.mark.slow
def test_every_mode_and_the_picture(tmp_path: Path) -> None:
    picture, page = tmp_path / "picture.png", tmp_path / "demo.html"
    command = [
        sys.executable,
        "-m",
        "hyper_cp",
        "demo",
        "--all",
        "--steps",
        "1",
        "--seq-len",
        "128",
        "--out",
        str(picture),
        "--html",
        str(page),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in [demo.ONE_RANK, *demo.MODES]:
        assert f"\n{mode} " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "all-gather; ring" in text and "\nring, head_tail " in text and text.count("<svg") == 1
    assert not re.search(r'src=|href="(?!#|data:)|url\((?!#)|@import', text), "the page loads something else"
    ElementTree.fromstring(text[text.index("<svg") :])


def result(losses: list[float]) -> demo.Result:
    return demo.Result(losses, 1.0, 1, 1)


def test_without_matplotlib_the_page_has_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    args = argparse.Namespace(modes=["ring"], seq_len=64, steps=1, out=None, html=str(tmp_path / "demo.html"))
    assert demo.report({demo.ONE_RANK: result([5.0]), "ring": result([5.0])}, args) == 0
    assert "no picture: matplotlib is not installed (pip install 'hyper-cp[viz]')" in capsys.readouterr().out
    assert "\nring  " in (tmp_path / "demo.html").read_text()


@pytest.mark.parametrize("losses", [[5.0, 4.001], [5.0, float("nan")]])
def test_table_names_a_wrong_mode(losses: list[float]) -> None:
    results = {demo.ONE_RANK: result([5.0, 4.0]), "good": result([5.0, 4.000001]), "bad": result(losses)}
    assert demo.table(results)[1] == ["bad"]


def test_table_shows_activations_beside_those_of_one_rank() -> None:
    one, shared = (demo.Result([5.0], 1.0, n * 2**20, 1) for n in (120, 31))
    cells = demo.table({demo.ONE_RANK: one, "ring": shared})[0]
    assert [row[4] for row in cells] == ["activations, MiB", "120.0 of 120.0", "31.0 of 120.0"]


@pytest.mark.parametrize("cores", [1, 2])
def test_speed_is_left_out_where_ranks_share_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "cores", lambda: cores)
    monkeypatch.setattr(demo, "picture", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    args = argparse.Namespace(modes=["ring"], seq_len=64, steps=1, out=None, html=None)
    assert demo.report({demo.ONE_RANK: result([5.0]), "ring": result([5.0])}, args) == 0
    out = capsys.readouterr().out
    assert ("2 ranks share 1 cores: speed says nothing here" in out) == (cores == 1) == ("tokens/s" not in out)


@pytest.mark.parametrize(("options", "modes"), [([], 3), (["--all"], 9), (["--ranks", "3", "--seq-len", "6"], 3)])
def test_three_modes_unless_all_are_asked_for(options: list[str], modes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.Namespace] = []
    monkeypatch.setattr(demo, "start_ranks", lambda args: found.append(args) or 0)
    assert main(["demo", *options]) == 0
    assert len(found[0].modes) == modes


@on_ranks
def activations() -> list[int]:
    """Bytes kept between forward and backward: of one rank, and of each mode on this mesh."""
    args = argparse.Namespace(steps=1, seq_len=256)
    modes = [None, demo.MODES["Ulysses"], demo.MODES["ring, head_tail"], demo.MODES["all-gather"]]
    return [demo.train("", mode, args).activation_bytes for mode in modes]


def test_activations_are_shared_by_the_ranks(ranks: Any) -> None:
    """Each of two ranks keeps half, less what one rank's plain attention keeps of repeated key/value heads."""
    for whole, *found in ranks(2, activations):
        assert all(0.45 * whole <= mine <= 0.51 * whole for mine in found), (whole, found)


@pytest.mark.slow
def test_wrong_losses_are_printed_and_end_in_an_error(tmp_path: Path) -> None:
    """All ranks end with an error at the same time, and the first one ends the others."""
    options = "--ranks 2 --steps 1 --seq-len 64 --modes ring all-gather"
    run = f"raise SystemExit(m.main(['demo', *'{options}'.split()]))"
    code = f"import hyper_cp.cli.main as m; m.demo.TOLERANCE = -1.0; m.demo.picture = lambda *_: None; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1 and "\nall-gather " in done.stdout, done.stderr
    assert "WRONG: losses differ from one rank by more than -1.0: one rank; ring; all-gather" in done.stdout


def train_with_positions_of_rank_zero() -> int:
    """A classic mistake, every rank counting positions from zero, must end in a non-zero exit."""
    right = demo.ContextParallelHandler.position_ids
    demo.ContextParallelHandler.position_ids = lambda self, length: torch.arange(length // self.cp.size)  # type: ignore[method-assign]
    torch.distributed.destroy_process_group()
    try:
        args = argparse.Namespace(steps=3, seq_len=256, modes=["ring"], out=None, html=None)
        with mock.patch.object(demo, "picture", lambda *_: None):
            return demo.rank_main(args)
    finally:
        demo.ContextParallelHandler.position_ids = right  # type: ignore[method-assign]
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def test_wrong_positions_make_it_exit_non_zero(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks(2, with_address, port) == [1, 1]


@on_ranks
def with_address(port: int) -> int:
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return train_with_positions_of_rank_zero()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks 0 is not a positive number"),
        (["--seq-len", "1001"], "--seq-len 1001 does not split over 4 ranks"),
        (["--ranks", "3", "--seq-len", "6", "--modes", "Ulysses"], "--modes Ulysses cannot run on 3 ranks"),
        (["--out", "losses.xyz"], "--out losses.xyz has no ending of a picture"),
    ],
)
def test_mistakes_end_in_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    assert message in capsys.readouterr().err
