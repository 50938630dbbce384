"""Attention over selected keys against dense and masked attention: the benchmark runs, and says what it has found."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.measured import selected
from benchmarks.measured.selected import Inputs, check, main, masked_attention, table
from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import latent_attention, select_keys
from tests.harness.attention_case import cp_mesh as cp_mesh_of_ranks
from tests.harness.ranks import on_ranks

MARKS = "<!-- selected: written by python -m benchmarks.measured.selected -->", "<!-- end of selected -->"


@on_ranks
def found_by_ranks(args: argparse.Namespace) -> list[Any]:
    """The results of a run in this process group."""
    found: list[Any] = []
    with mock.patch.multiple(selected, join=lambda *_: cp_mesh_of_ranks(), leave=lambda: None):
        selected.rank_main(dist.get_rank(), dist.get_world_size(), "", found.append, args)
    return found


def test_a_small_run_writes_its_table(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "results_of", lambda _, world, args: ranks(world, found_by_ranks, args)[0])
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(MARKS) + "\nafter\n")
    main(["--lengths", "128", "256", "--topk", "32", "--rounds", "1", "--document", str(page)])
    written = page.read_text()
    assert written.startswith(f"before\n{MARKS[0]}\ntopk=32, ") and written.endswith(f"{MARKS[1]}\nafter\n")
    rows = re.findall(r"^\| ([a-z ,]+) \| (\d) \| [\d.]+ s, \d+ MiB \| [\d.]+ s \([\d.]+\), \d+ MiB", written, re.M)
    ours = ["indexer", "attention to selected keys", "dense attention"]
    alone = {(name, "1") for name in [*ours, "indexer, masked", "masked attention"]}
    assert len(rows) == 8 and {*rows} == alone | {(name, "2") for name in ours}
    assert written.split(MARKS[0])[1].split(MARKS[1])[0].strip() in capsys.readouterr().out


def test_the_page_has_the_place_of_the_table() -> None:
    assert all(mark in selected.DOCUMENT.read_text() for mark in MARKS)


def test_factors_are_those_to_the_length_before() -> None:
    found = [(8, 1, "x", 3.0, 6 * 2**20), (4, 1, "x", 1.5, 2**20), (4, 2, "x", 1.0, 2**20), (8, 2, "x", 0.5, 2**21)]
    assert table(found).splitlines() == [
        "| | ranks | S=4 | S=8 |",
        "|---|---:|---:|---:|",
        "| x | 1 | 1.50 s, 1 MiB | 3.00 s (2.0), 6 MiB (6.0) |",
        "| x | 2 | 1.00 s, 1 MiB | 0.50 s (0.5), 2 MiB (2.0) |",
    ]


def test_masked_attention_is_that_of_selected_keys() -> None:
    """The check before a measurement passes, and fails for other keys and for other attention."""
    given, alone = Inputs(256), cp_mesh.alone()
    chosen = select_keys(*given.index, topk=32, mesh=alone)
    attend = partial(latent_attention, is_causal=True)
    check(given, chosen, attend, 32)
    with pytest.raises(RuntimeError, match="of the selected keys"):
        check(given, chosen.roll(1, 2), attend, 32)
    with pytest.raises(RuntimeError, match=r"is off by"):
        check(given, chosen, partial(attend, scale=0.3), 32)
    dense = latent_attention(*given.layer, given.weight, is_causal=True)
    everything = torch.arange(256).expand(1, 256, 256)
    assert torch.allclose(masked_attention(everything, *given.layer, given.weight), dense, atol=1e-5)
