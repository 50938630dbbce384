"""Entries against hidden states on links of a fixed rate: the benchmark runs, finds its two ways equal, and counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measured import entries, throttled

ROOT = Path(__file__).parents[2]


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["entries.py"])
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert entries.main() == throttled.NOT_HERE
    assert capsys.readouterr().err.endswith("Nothing was measured.\n")


def test_the_page_has_a_place_for_the_table() -> None:
    page = entries.DOCUMENT.read_text()
    assert f"<!-- entries: written by {entries.COMMAND} -->" in page and "<!-- end of entries -->" in page


@pytest.mark.slow
def test_a_small_run_counts_bytes() -> None:
    """256 tokens of 1,024 numbers on each of two ranks leave twice as hidden states and as their gradients; of entries,
    halos of windows of 128 tokens are most."""
    command = [sys.executable, "-m", "benchmarks.measured.entries", "--length", "512", "--ranks", "2", "--rounds", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode == throttled.NOT_HERE:
        pytest.skip(run.stderr.strip())
    assert not run.returncode, run.stderr
    rows = re.findall(r"^\| (CSA|HCA) \| ([a-z ]+) \| ([\d.]+) \| [\d.]+ s \| [\d.]+ s \|$", run.stdout, re.M)
    sent = {(kind, way): float(mib) for kind, way, mib in rows}
    gathered = 2 * 256 * 1024 * 4 / 2**20
    for kind in entries.LAYERS:
        assert gathered < sent[kind, "hidden states"] < 1.25 * gathered
        assert sent[kind, "entries"] < gathered / 2
