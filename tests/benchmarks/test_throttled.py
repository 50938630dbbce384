"""The benchmark on links of a fixed rate: its smallest case where it may run, and its words where it may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured import links, throttled

ROOT = Path(__file__).parents[2]


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["throttled.py"])
    monkeypatch.setattr(links.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert throttled.main() == throttled.NOT_HERE
    assert (
        capsys.readouterr().err
        == "The commands tc are missing (packages iproute2 and util-linux). Nothing was measured.\n"
    )
    monkeypatch.setattr(links.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in links.why_not()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in links.why_not()


def test_results_are_added_to_a_file_and_compared_with_the_line(tmp_path: Path) -> None:
    case = {"ranks": 2, "length": 64, "mask": "causal", "mode": "ring", "rate": 8.0}
    old, new = ({**case, "seconds": [2.0, seconds, 9.0], "compute": 1.0, "sent": 3_000_000} for seconds in (8.0, 6.0))
    throttled.merged(tmp_path / "found.json", [old, {**old, "rate": 80.0}])
    rows = throttled.merged(tmp_path / "found.json", [new])["rows"]
    assert [(row["rate"], throttled.line(row), throttled.ratio(row)) for row in rows] == [
        (8.0, 3.0, 2.0),
        (80.0, 1.0, 8.0),
    ]
    assert "| ring | 6.00 s (2.00) | 8.00 s (8.00) |" in throttled.table(rows)


def test_what_groups_of_heads_can_reach_is_shown() -> None:
    """One group hides nothing. In two, half of q, k and v and half of the output stay visible each way."""
    row = {"ranks": 2, "length": 64, "mode": "Ulysses, 2 head groups", "rate": 8.0, "seconds": [4.0]}
    short, long = ({**row, "compute": compute, "sent": 1_000_000} for compute in (14.0, 1e-6))
    assert throttled.at_best(short) == pytest.approx((14.0 + 2 * (3 / 16 + 1 / 16)) / 14.0)
    assert throttled.at_best(long) == pytest.approx(1.0, abs=1e-5)
    assert "4.00 x the line" not in throttled.line_of(short) and "(at best 1.04)" in throttled.line_of(short)
    assert throttled.at_best({**row, "mode": "Ulysses", "compute": 1.0, "sent": 1}) is None


def network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


@pytest.mark.slow
def test_both_directions_of_a_real_link_are_used_at_once(tmp_path: Path) -> None:
    """Ulysses sends and receives equally much: where the directions take turns, it takes twice as long as its bytes."""
    found, length, width = tmp_path / "found.json", 512, 512
    options = f"--ranks 2 --rates 40 --length {length} --width {width} --rounds 1 --only Ulysses --json {found}"
    command = [sys.executable, "-m", "benchmarks.measured.throttled", *options.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode == throttled.NOT_HERE:
        pytest.skip(run.stderr.strip())
    assert not run.returncode, run.stderr
    (row,) = json.loads(found.read_text())["rows"]
    assert row["sent"] == 8 * (length // 2) * width * 4 // 2, "q, k, v, out and their gradients, half of each"
    assert 0.95 <= throttled.ratio(row) < 1.6, row


@pytest.mark.slow
def test_only_links_between_hosts_are_limited(tmp_path: Path) -> None:
    """Two hosts of two ranks: the rows of one rank cross in a double ring, those of all others in a flat one. The rest
    of the double ring's messages, as many again, take no time to speak of."""
    found, length, width = tmp_path / "found.json", 512, 512
    options = f"--ranks 4 --per-host 2 --rates 20 --length {length} --width {width} --rounds 1 --json {found}"
    command = [sys.executable, "-m", "benchmarks.measured.throttled", *options.split(), "--only", "ring", "double ring"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode == throttled.NOT_HERE:
        pytest.skip(run.stderr.strip())
    assert not run.returncode, run.stderr
    rows = {row["mode"]: row for row in json.loads(found.read_text())["rows"]}
    share = 2 * length // 4 * width * 4  # keys and values; they travel forward and backward, and so do their gradients
    assert {mode: row["sent"] for mode, row in rows.items()} == {"ring": 3 * 3 * share, "double ring": 3 * share}
    assert all(0.95 <= throttled.ratio(row) < 1.6 for row in rows.values()), rows
    assert "| 4 ranks, 2 to a host, S=512, causal, reno | 20 Mbit/s |" in run.stdout


@pytest.mark.slow
def test_nothing_is_left_when_it_is_killed() -> None:
    if links.why_not():
        pytest.skip(links.why_not())
    with links.switch() as pid:
        assert network(pid) != network(os.getpid())
        code = (
            f"from benchmarks.measured import links; links.Link({pid}, 0).limit(50); print('up', flush=True); input()"
        )
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process: Any = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
        assert process.stdout.readline() == "up\n"

        def ports() -> str:
            return subprocess.run(
                ["nsenter", "--net", "--target", str(pid), "ip", "-o", "link"], capture_output=True, text=True
            ).stdout

        assert "port0" in ports()
        control = f"nsenter --net --target {process.pid} cat /proc/sys/net/ipv4/tcp_congestion_control"
        assert subprocess.run(control.split(), capture_output=True, text=True).stdout == "reno\n"
        process.kill()
        process.communicate()
        for _ in range(100):
            if "port0" not in ports():
                break
            time.sleep(0.05)
        assert "port0" not in ports()
