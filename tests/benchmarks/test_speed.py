"""The comparison with other libraries: everything that can run is timed, and what is wrong, or missing, is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import benchmarks.__main__ as command
from benchmarks.speed import contenders, report
from benchmarks.speed.case import Problem, oracle
from benchmarks.speed.contenders.contender import Attention, Contender, Skip
from benchmarks.speed.contenders.ours import CONTENDERS as OURS
from benchmarks.speed.run import Ranks, machine, measure
from tests.harness.oracle import plain_attention, visible_pairs
from tests.harness.ranks import on_ranks

# --------------------------------------------------------------------------- planted contenders


def scaled(problem: Problem, mesh: DeviceMesh) -> Attention:
    """Its output is a little too large on one rank."""
    attend = OURS[0].prepare(problem, mesh)
    return lambda q, k, v: attend(q, k, v) * (1 + 1e-3 * (dist.get_rank() == 1))


def wrong_gradient(problem: Problem, mesh: DeviceMesh) -> Attention:
    """Its values get no gradient from one in two queries."""
    attend = OURS[0].prepare(problem, mesh)

    def attend_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v - 0.5 * (v - v.detach()))

    return attend_detached


def wrong_when_long(problem: Problem, mesh: DeviceMesh) -> Attention:
    """It is right where it is compared with fp64, on a short sequence."""
    attend = OURS[0].prepare(problem, mesh)
    return lambda q, k, v: attend(q, k, v) * (1 + 1e-3 * (problem.length > 512))


def crashes(problem: Problem, mesh: DeviceMesh) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this device\nand more lines")

    return attend


def missing(problem: Problem, mesh: DeviceMesh) -> Attention:
    raise ModuleNotFoundError("No module named 'planted'")


def refuses(problem: Problem, mesh: DeviceMesh) -> Attention:
    raise Skip("takes no such mask")


PLANTED = {f.__name__: f for f in (scaled, wrong_gradient, wrong_when_long, crashes, missing, refuses)}


@on_ranks
def planted(length: int) -> dict[str, Any]:
    """The results of one right contender and of the planted ones."""
    table = [OURS[0], *(Contender("planted", "Ulysses", "contiguous", f, name) for name, f in PLANTED.items())]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "CONTENDERS", table)
        return measure(Problem(length, heads=2, kv_heads=2, dim=8), 2, [], Ranks(mesh))


def test_wrong_contenders_are_refused_and_missing_ones_skipped(ranks: Any) -> None:
    found = ranks(2, planted, 576)
    for run in found:
        right, *others = run["results"]
        by_name = {result["note"]: (result["status"], result["reason"]) for result in others}
        assert right["status"] == "ok" and 0 < right["error"] < 1e-5 and len(right["seconds"]) == 2
        assert all(not result["seconds"] for result in others)
        assert by_name["scaled"][0] == by_name["wrong_gradient"][0] == by_name["wrong_when_long"][0] == "WRONG"
        assert "is off by" in by_name["scaled"][1] and by_name["scaled"][1].endswith("from fp64, S=512")
        assert by_name["wrong_gradient"][1].startswith("dv is off by")
        assert by_name["wrong_when_long"][1].endswith("from plain SDPA, S=576")
        assert by_name["crashes"] == ("skipped", "RuntimeError: no kernel for this device")
        assert by_name["missing"] == ("skipped", "ModuleNotFoundError: No module named 'planted'")
        assert by_name["refuses"] == ("skipped", "takes no such mask")
    table = report.markdown({"machine": dict.fromkeys(ABOUT, "?"), "runs": found[:1]})
    assert "| hyper_cp | Ulysses | contiguous |" in table
    assert "- planted, Ulysses, contiguous (scaled): refused. " in table
    assert "- planted, Ulysses, contiguous (missing): not run. ModuleNotFoundError" in table


ABOUT = "date", "torch", "processor", "cores", "load", "deepspeed", "ringmaster", "yunchang"


# --------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("problem", [Problem(64), Problem(64, "full", kv_heads=2), Problem(64, "documents")], ids=str)
def test_the_oracle_of_the_comparison_agrees_with_that_of_the_tests(problem: Problem) -> None:
    (q, k, v), dout = problem.tensors()
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    documents = None if problem.documents is None else [problem.documents]
    out = plain_attention(*inputs, visible=visible_pairs(64, problem.causal, None, documents))
    out.backward(dout.double())
    for got, want in zip(oracle(problem), [out, *(x.grad for x in inputs)], strict=True):
        assert want is not None and float((got - want).detach().abs().max()) < 1e-12


@on_ranks
def everything() -> dict[str, Any]:
    """The smallest problems, with everything that is installed."""
    ranks = Ranks(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))
    problems = Problem(64, heads=4, kv_heads=4, dim=8), Problem(64, "documents", heads=4, kv_heads=2, dim=8)
    return {"format": "hyper-cp speed", "machine": machine(), "runs": [measure(p, 1, [], ranks) for p in problems]}


@pytest.mark.slow
def test_everything_that_can_run_is_timed(ranks: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Every mode of ours, DTensor by hand, and the libraries that are installed."""
    found = ranks(2, everything, timeout=200)[0]
    causal, documents = ({r["library"]: [] for r in run["results"]} for run in found["runs"])
    for run, by_library in zip(found["runs"], (causal, documents), strict=True):
        for result in run["results"]:
            assert result["status"] != "WRONG", result
            ran = result["status"] == "ok"
            assert ran == bool(result["seconds"]) and (ran or result["reason"])
            by_library[result["library"]] += [result["mode"]] * ran
    reasons = [r["reason"] for run in found["runs"] for r in run["results"]]
    assert len(causal["hyper_cp"]) == 10 and len(documents["hyper_cp"]) == 11, reasons
    assert causal["DTensor by hand"] == ["Ulysses", "all-gather"]
    monkeypatch.setattr(command, "run", lambda *_: found)
    path, plot = tmp_path / "found.json", tmp_path / "plot.png"
    assert command.main(["--json", str(path), "--plot", str(plot)]) == 0
    assert json.loads(path.read_text()) == found and plot.stat().st_size > 0
    assert "| DTensor by hand | Ulysses | contiguous |" in capsys.readouterr().out
    found["runs"][0]["results"][0]["status"] = "WRONG"
    assert command.main([]) == 1


def test_a_section_of_a_document_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Page\n<!-- speed: written by python -m benchmarks -->\nold\n<!-- end of speed -->\nrest\n")
    report.write_section(path, "speed", "a \\1 table")
    assert path.read_text().splitlines()[2:] == ["a \\1 table", "<!-- end of speed -->", "rest"]
    with pytest.raises(ValueError, match="has no section 'memory'"):
        report.write_section(path, "memory", "a table")


def test_peers_that_are_faster_are_named() -> None:
    def result(library: str, seconds: float, mode: str = "ring") -> dict[str, Any]:
        names = {"library": library, "mode": mode, "layout": "head_tail", "note": ""}
        return {**names, "status": "ok", "balanced": True, "seconds": [seconds, seconds], "limits": [1.0, 1.0]}

    problem = dict(Problem(4096).__dict__)
    results = [result("hyper_cp", 1.1), result("hyper_cp", 1.25), result("other", 1.0), result("other", 0.5, "Ulysses")]
    found = {"runs": [{"problem": problem, "limit": [1.0, 1.0], "results": results}]}
    (line,) = report.behind(found)
    assert "ring of other" in line and "1.000, of hyper_cp 0.909 (ahead in 2 of 2 rounds)" in line
    kept, faster = report.summary(found, [(4096, 0.9)])
    assert "NOT kept (least 0.800: ring, head_tail)" in kept and faster.startswith("faster peer: ")
