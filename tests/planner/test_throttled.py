"""The predicted order of modes on links of a fixed rate against a measured run of ``benchmarks/measured/throttled.py``.

``throttled.json`` beside this file is the output of such a run; :func:`misplaced` takes any other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from typing import Any

from hyper_cp.planner.cluster import Cluster
from hyper_cp.planner.model import ModelShape
from hyper_cp.planner.strategies import Estimator, Strategy, Workload
from hyper_cp.schedule.documents import PackedDocuments

Row = dict[str, Any]

MODES = {
    "ring": (1, "ring", "head_tail"),
    "all-gather": (1, "all_gather", "head_tail"),
    "needed": (1, "needed", "head_tail"),
    "Ulysses": (0, None, "contiguous"),
}
"""The modes of the benchmark that the planner has; degree 0 is all ranks. Load balance and head groups it has not."""

SAME = 1.1
"""Modes whose measured times differ by less have no order."""

WIDTH, FLOAT = 512, 4
IDEAL: dict[str, float] = {
    **dict.fromkeys(("link_share", "matmul_share", "forward_share", "backward_share"), 1.0),
    **dict.fromkeys(("inside_us", "between_us", "launch_us"), 1e-6),
    "memory_gb_s": 1e6,
}


def predicted(row: Row) -> float:
    """Seconds of attention, forward and backward, with kernels as fast as the step without transfers was."""
    degree, exchange, layout = MODES[row["mode"]]
    n, heads = row["ranks"], 4 * row["ranks"]
    mode = Strategy(n, degree or n, exchange, layout, "none", False)
    speed = row["rate"] * 1e6 / 8 / 1e9
    cluster = Cluster("throttled", 1, 1.0, tflops=1.0, inside_gb_s=speed, between_gb_s=speed, **IDEAL)
    model = ModelShape(1, heads, WIDTH, 1, head_dim=WIDTH // heads)
    documents = PackedDocuments([[0, row["length"]]])

    def attention(cluster: Cluster) -> Any:
        return (
            Estimator(Workload(model, cluster, n, documents, True, 1, FLOAT, 1.0, n, 1.0, "cpu")).cost(mode).attention
        )

    one = attention(cluster)
    kernels = one.kernels_forward + one.kernels_backward
    found = attention(replace(cluster, tflops=kernels / row["compute"]))
    return float(found.forward + found.backward)


def misplaced(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Pairs of modes, each with its measured and predicted seconds, that the planner puts in another order."""

    def case(row: Row) -> tuple[Any, ...]:
        return row["ranks"], row["length"], row["rate"]

    known = sorted((row for row in rows if row["mode"] in MODES and row["mask"] == "causal"), key=case)
    wrong = []
    for at, some in groupby(known, case):
        times = {row["mode"]: (median(row["seconds"]), predicted(row)) for row in some}
        for a, b in combinations(times, 2):
            (measured_a, predicted_a), (measured_b, predicted_b) = times[a], times[b]
            slow = max(measured_a, measured_b) / min(measured_a, measured_b)
            if slow > SAME and (measured_a > measured_b) != (predicted_a > predicted_b):
                wrong.append((*at, a, times[a], b, times[b]))
    return wrong


def test_the_measured_order_is_the_predicted_one() -> None:
    rows = json.loads((Path(__file__).parent / "throttled.json").read_text())["rows"]
    assert len([row for row in rows if row["mode"] in MODES]) >= 8
    assert misplaced(rows) == []
    assert {"needed"} == {min((r for r in rows if r["rate"] == rate), key=predicted)["mode"] for rate in (200, 800)}


def test_another_order_is_found() -> None:
    """An all-gather sends what a ring sends, and hides nothing of it: it cannot be three times as fast."""
    case = {"ranks": 4, "length": 4096, "mask": "causal", "rate": 200.0, "compute": 0.5, "sent": 0}
    rows = [case | {"mode": "ring", "seconds": [3.0]}, case | {"mode": "all-gather", "seconds": [1.0]}]
    assert [(row[3], row[5]) for row in misplaced(rows)] == [("ring", "all-gather")]
