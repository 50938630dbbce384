"""The scenarios: every way is checked before it is timed, and the page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.scenarios import report, run
from benchmarks.scenarios.__main__ import main
from benchmarks.scenarios.ways import Attention, Way, ours
from benchmarks.scenarios.work import SCENARIOS, Scenario, answer, blocks
from benchmarks.speed.contenders.contender import Skip
from benchmarks.speed.run import Ranks
from tests.harness.ranks import on_ranks

NAMES = [work.name for work in SCENARIOS]
SMALL = Scenario("small", "a window", 256, ("ring, head_tail",), heads=2, kv_heads=2, dim=8, window=16, rounds=2)


@pytest.mark.parametrize("name", [work.name for work in SCENARIOS if work.kind != "loss"])
def test_pairs_are_those_of_the_definition(name: str) -> None:
    """Pair by pair: causal, the window, one document, and as many selected keys as there are."""
    work = SCENARIOS[NAMES.index(name)].resized(128)
    visible = work.visible()
    for row, ends in enumerate(work.documents or [[0, work.length]]):
        for query in range(0, work.length, 37):
            first = max(end for end in ends[:-1] if end <= query)
            if work.window is not None:
                first = max(first, query - work.window + 1)
            seen = visible[min(row, len(visible) - 1), 0, query].nonzero().flatten().tolist()
            if work.kind == "selected":
                assert len(seen) == min(query + 1, work.topk) and seen[-1] <= query
            else:
                assert seen == list(range(first, query + 1))


@pytest.mark.parametrize("name", ["packed", "window", "grouped"])
def test_attention_as_a_user_would_write_it_is_that_of_the_mask(name: str) -> None:
    work = SCENARIOS[NAMES.index(name)].resized(512)
    q, k, v = work.inputs().sharded
    torch.testing.assert_close(blocks(work, q, k, v), answer(work, exact=True)[0].float(), rtol=1e-5, atol=1e-5)


def scaled(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Its output is a little too large on one rank."""
    attend = ours(work)[0].prepare(work, mesh, rows)
    return lambda *given: attend(*given) * (1 + 1e-3 * (dist.get_rank() == 1))


def refuses(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    raise Skip("takes no window")


def fails_on_one_rank(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    if dist.get_rank() == 1:
        raise ValueError("heads do not divide\nand more")
    return lambda q, k, v: q


def missing(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    raise ModuleNotFoundError("No module named 'planted'")


PLANTED = (scaled, refuses, fails_on_one_rank, missing)


@on_ranks
def planted() -> dict[str, Any]:
    """The results of this library and of planted ways."""
    found = [*ours(SMALL), *(Way("planted", f.__name__, "head_tail", f) for f in PLANTED)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "ways", lambda *_: found)
        return run.measure(SMALL, [], Ranks(mesh), None)


def test_what_is_wrong_is_refused_and_what_fails_has_its_reason(ranks: Any) -> None:
    for found in ranks(2, planted):
        mine, *others = found["results"]
        assert mine["status"] == "ok" and len(mine["seconds"]["none"]) == 2 and mine["memory"] > 0
        states = {r["mode"]: (r["status"], r["reason"]) for r in others}
        assert states["scaled"][0] == "WRONG" and "off by" in states["scaled"][1]
        assert states["refuses"] == ("cannot", "takes no window")
        assert states["fails_on_one_rank"] == ("cannot", "ValueError: heads do not divide")
        assert states["missing"] == ("not installed", "No module named 'planted'")
        assert not any(r["seconds"] for r in others)


def result(library: str, seconds: list[float], memory: int = 2**20, **more: Any) -> dict[str, Any]:
    rounds: dict[str, Any] = {"none": seconds} if seconds else {}
    base: dict[str, Any] = {
        "library": library,
        "mode": "m",
        "layout": "l",
        "alone": False,
        "status": "ok",
        "reason": "",
    }
    return {**base, "memory": memory, "seconds": rounds, **more}


def found_of(*results: dict[str, Any]) -> dict[str, Any]:
    names = ("deepspeed", "ringmaster", "yunchang", "torch", "processor", "cores", "load", "date")
    scenario = {**SMALL.__dict__, "name": "window"}
    run = {"scenario": scenario, "results": list(results)}
    return {"machine": dict.fromkeys(names, "x"), "no_links": "", "runs": [run]}


def test_a_peer_that_is_ahead_is_named() -> None:
    found = found_of(
        result("hyper_cp", [3.0, 2.0, 4.0], 2**22),
        result("DeepSpeed", [2.0, 1.0, 5.0]),
        result("yunchang", [], status="cannot", reason="No window."),
        result("transformers", [0.1], alone=True),
    )
    text = report.markdown(found)
    assert "**DeepSpeed (m) is ahead**: 2.00 s, this library (m) 3.00 s; it was faster in 2 of 3 rounds." in text
    assert "memory: **DeepSpeed (m) is ahead**: 1 MiB, this library 4 MiB." in text
    assert "| hyper_cp | m | l | 3.00 (2.00 to 4.00) | 4 |" in text and "- yunchang, m: cannot. No window." in text
    assert "| a window | 3.00 | 2.00 | cannot | cannot | cannot | 0.10 |" in report.short(found)


def test_the_documents_have_their_places_and_what_was_measured(tmp_path: Path) -> None:
    """The page, the table of the README and the results are of one run. Until there is one, the page says so."""
    page, readme = report.DOCUMENT.read_text(), report.README.read_text()
    marks = f"<!-- scenarios: written by {report.COMMAND} -->\n", "\n<!-- end of scenarios -->"
    sections = [text.split(marks[0])[1].split(marks[1])[0] for text in (page, readme)]
    if report.RESULTS.exists():
        found = json.loads(report.RESULTS.read_text())
        assert sections == [report.page(found), report.short(found)] and report.PLOT.exists()
    else:
        assert "planned" in sections[0]


def test_the_table_of_the_readme_is_short() -> None:
    work = [{"scenario": vars(w), "results": [result("hyper_cp", [1.0])]} for w in SCENARIOS]
    table = report.short({"runs": work}).split("\n\n")[0]
    assert len(table.splitlines()) <= 8


def test_a_part_of_a_run_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--write", "--quick"])
    assert "Leave out --quick" in capsys.readouterr().err
