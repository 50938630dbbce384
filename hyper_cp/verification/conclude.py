"""Turn the comparisons of all ranks into a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .causes import Evidence, explain
from .compare import (
    LEAST_LOSS,
    Found,
    Tolerance,
    accept_sums,
    by_all_ranks,
    compare_gradients,
    compare_modules,
    exchange,
)
from .record.trace import Observation, Trace
from .report import DIFFERS, EQUAL, INTERNAL, SKIPPED, Cause, Report, Row

Call = tuple[str, int]


@dataclass
class Traces:
    """The runs of one verification."""

    parallel: Trace
    alone: Trace
    exact: Trace | None
    """Alone in fp32, if the model computes in half precision."""


def conclude(traces: Traces, mesh: DeviceMesh, length: int, tolerance: Tolerance, documents: bool) -> Report:
    """Compare on every rank, and combine. All ranks of the mesh make the call and return the same report.

    Args:
        documents: True if the batch has packed documents or padding.
    """
    parallel, alone, exact = traces.parallel, traces.alone, traces.exact
    modules = by_all_ranks(mesh, compare_modules(parallel, alone, exact, tolerance))
    gradients = by_all_ranks(mesh, compare_gradients(parallel, alone, exact, tolerance))
    sums = accept_sums(mesh, modules, parallel, alone, tolerance)
    for row in (row for rows in modules for row in rows if row.key in sums):
        row.status, row.error = EQUAL, sums[row.key]
    others = exchange(
        mesh,
        {
            "losses": [parallel.loss, alone.loss, None if exact is None else exact.loss],
            "observations": [[o.tick, o.module, o.kind, o.text] for o in [*parallel.observations, *_random(alone)]],
            "parents": _parents(parallel),
            "styled": [call.module for call in parallel.calls if call.styled],
            "documents": parallel.documents,
        },
    )
    by_key = _grouped(row for rows in modules for row in rows)
    internal = _internal(modules, _enclosing([o["parents"] for o in others]))
    rows = {key: _row(found, key in internal) for key, found in by_key.items()}
    loss, loss_row = _loss([o["losses"] for o in others], tolerance)
    merged = [max(found, key=_excess) for found in _grouped(row for rows in gradients for row in rows).values()]
    table = [*rows.values(), loss_row, *(_row([row], False) for row in merged)]
    first = next((row for row in table if row.status == DIFFERS), None)
    causes = _ranks_differ([o["losses"][1] for o in others], tolerance, others)
    if not causes:
        first_key = next((key for key, row in rows.items() if row.status == DIFFERS), None)
        rank, worst = _worst(modules, first_key)
        if worst is None:
            worst = next((row for row in [loss, *merged] if row.status == DIFFERS), None)
        evidence = Evidence(
            ranks=mesh.size(),
            rows=[row for row in modules[rank] if row.key not in internal],
            first=worst,
            gradients=merged,
            observations=[Observation(*o) for o in _ordered(others, rank, first_key is None)],
            dropped=documents and not others[rank]["documents"],
            styled=frozenset(others[rank]["styled"]),
            losses=([o["losses"][0] for o in others], others[0]["losses"][1]),
        )
        causes = explain(evidence)
    return Report(first is None and not causes, mesh.size(), length, tuple(table), first, tuple(causes))


# --------------------------------------------------------------------------- rows


def _grouped(rows: Iterable[Found]) -> dict[Any, list[Found]]:
    """The comparisons of each tensor on all ranks, in the order of the first rank."""
    found: dict[Any, list[Found]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row)
    return found


def _excess(row: Found) -> float:
    if row.error is None:
        return -1.0
    return (row.error + 1e-300) / (row.tolerance or 1e-300)


def _row(found: Sequence[Found], internal: bool) -> Row:
    """One row for the comparisons of one tensor on all ranks: the worst of them."""
    worst = max(found, key=_excess)
    status = DIFFERS if any(r.status == DIFFERS for r in found) else worst.status
    status = INTERNAL if status == DIFFERS and internal else status
    note = ""
    if status == SKIPPED:
        note = f"not compared: {_shape(worst.whole_shape)} on one device" if worst.whole_shape else "not compared"
    return Row(worst.name or "(model)", worst.kind, worst.type, worst.place, tuple(worst.shape), worst.error,
               worst.tolerance, status, note)  # fmt: skip


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _loss(losses: Sequence[Sequence[Any]], tolerance: Tolerance) -> tuple[Found, Row]:
    """The comparison of the loss: each rank may return the whole mean, its share of it, or the mean of its share."""
    values, one, exact = [row[0] for row in losses], losses[0][1], losses[0][2]
    n, scale = len(values), max(abs(one), LEAST_LOSS)
    forms = {
        "": max(abs(v - one) for v in values),
        "sum over the ranks": abs(sum(values) - one),
        "mean over the ranks": abs(sum(values) / n - one),
    }
    note, error = min(forms.items(), key=lambda item: item[1])
    allowed = tolerance.rtol + tolerance.atol / scale
    if exact is not None:
        allowed += 3 * abs(one - exact) / scale
    error = error / scale if error == error else float("inf")
    status = EQUAL if error <= allowed else DIFFERS
    note = f"{values[0]:.6g} for {one:.6g}" if status == DIFFERS else note
    return Found("loss", 0, "loss", "", "", 0, [], error, allowed, status), Row(
        "loss", "loss", "", "", (), error, allowed, status, note
    )


# --------------------------------------------------------------------------- what encloses what


def _parents(trace: Trace) -> list[list[Any]]:
    """Every call, and the call that encloses it."""
    calls = trace.calls
    return [[c.module, c.number, calls[c.parent].module, calls[c.parent].number] for c in calls if c.parent is not None]


def _enclosing(tables: Sequence[Sequence[Sequence[Any]]]) -> dict[Call, Call]:
    return {(a, i): (b, j) for table in tables for a, i, b, j in table}


def _internal(modules: Sequence[Sequence[Found]], outer: dict[Call, Call]) -> set[Any]:
    """The keys of tensors that differ inside a call whose output is equal on all ranks: the difference is gone."""
    outputs: dict[Call, list[str]] = {}
    for row in (row for rows in modules for row in rows if row.kind == "output" and row.status != SKIPPED):
        outputs.setdefault((row.name, row.number), []).append(row.status)
    equal = {call for call, statuses in outputs.items() if all(s == EQUAL for s in statuses)}
    found = set()
    for row in (row for rows in modules for row in rows):
        call: Call | None = (row.name, row.number)
        if row.kind == "output":
            call = outer.get((row.name, row.number))
        while call is not None and call not in equal:
            call = outer.get(call)
        if call is not None:
            found.add(row.key)
    return found


# --------------------------------------------------------------------------- evidence


def _worst(modules: Sequence[Sequence[Found]], key: Any) -> tuple[int, Found | None]:
    """The rank on which a tensor differs most, and its comparison there."""
    found = [(rank, row) for rank, rows in enumerate(modules) for row in rows if row.key == key]
    if not found:
        return len(modules) - 1, None
    return max(found, key=lambda item: (item[1].local_positions, _excess(item[1])))


def _random(trace: Trace) -> list[Observation]:
    """Random numbers in the run on one device: styled attention shows its dropout there only."""
    return [o for o in trace.observations if o.kind == "dropout"]


def _ordered(others: Sequence[Any], rank: int, everywhere: bool) -> list[Any]:
    """The observations of one rank, or of all if no module differs; sums that were not made, of all ranks."""
    chosen = [o for i, other in enumerate(others) for o in other["observations"]
              if everywhere or i == rank or o[2] == "tensor parallel"]  # fmt: skip
    return sorted(chosen, key=lambda o: o[0])


def _ranks_differ(losses: Sequence[float], tolerance: Tolerance, others: Sequence[Any]) -> list[Cause]:
    """The cause of everything if the ranks disagree about the batch on one device, and nothing there is random."""
    allowed = tolerance.rtol * max(abs(losses[0]), LEAST_LOSS)
    odd = [rank for rank, loss in enumerate(losses) if abs(loss - losses[0]) > allowed]
    if not odd or any(o[2] == "dropout" for other in others for o in other["observations"]):
        return []
    text = (
        f"On one device cp ranks {odd} have another loss ({losses[odd[0]]:.6g}) than cp rank 0 ({losses[0]:.6g}): "
        "their weights or batches differ. All ranks of a cp mesh need the same batch and the same initial weights."
    )
    return [Cause("ranks", None, text)]
