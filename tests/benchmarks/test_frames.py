"""Time and memory of an image encoder over ranks: the benchmark runs, checks itself, and counts what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measured import frames
from benchmarks.measured.frames import CHANNELS, HIDDEN, MERGED, PATCH, SIDE, TEXT, Result, check, table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_place_of_the_table() -> None:
    page = frames.DOCUMENT.read_text()
    assert f"<!-- frames: written by {frames.COMMAND} -->" in page and "<!-- end of frames -->" in page


def test_shares_are_those_of_one_rank() -> None:
    found = {2: Result(4, 1.0, 2.0, 10, 30, 0.25), 1: Result(8, 2.0, 2.5, 20, 40, 0)}
    assert table(found).splitlines()[2:] == [
        "| 1 | 8 | 2.00 s | 2.50 s | 20 MiB | 40 MiB | 0.00 MiB |",
        "| 2 | 4 | 1.00 s (0.50) | 2.00 s (0.80) | 10 MiB (0.50) | 30 MiB (0.75) | 0.25 MiB |",
    ]


def test_other_values_are_refused() -> None:
    check([2.0, 1.0, 0.0], [2.0, 1.0 + 1e-5, 0.0], 2)
    with pytest.raises(RuntimeError, match="on 2 ranks differ by"):
        check([2.0, 0.5], [2.0, 1.0], 2)


@pytest.mark.slow
def test_a_small_run_counts_memory_and_bytes() -> None:
    """Two ranks encode two frames each and keep half of the memory. A rank sends the rows whose tokens lie on the other
    one, and the gradients of those that it has received."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.measured.frames",
        "--frames",
        "4",
        "--ranks",
        "1",
        "2",
        "--rounds",
        "1",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    rows = {
        int(line.split()[0]): [float(x) for x in line.split()[1:]]
        for line in re.findall(r"^[12] [\d.e -]+$", run.stdout, re.M)
    }
    one, two = (Result(*rows[ranks]) for ranks in (1, 2))
    assert (one.frames, two.frames, one.sent) == (4, 2, 0)
    assert 0.45 < two.kept / one.kept < 0.55 and 0.45 < two.peak / one.peak < 0.55
    assert one.kept > 4 * SIDE**2 * CHANNELS * 2 * PATCH**2 * 4 / 2**20, "at least the patches"
    tokens = 4 * (SIDE // MERGED) ** 2 + TEXT
    encoded = [range(1, 129), range(129, 257)]  # the tokens whose rows a rank makes: text stands before and behind
    outer = {*range(tokens // 4), *range(3 * tokens // 4, tokens)}  # rank 0 holds the first quarter and the last
    away = sum(x not in outer for x in encoded[0]) + sum(x in outer for x in encoded[1])
    assert two.sent * 2**20 == away * HIDDEN * 4
