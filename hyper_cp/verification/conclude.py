"""Turn the comparisons of all ranks into a report: the first tensor that differs, and the usual causes of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from operator import attrgetter
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..module import mixing
from .compare import LEAST_LOSS, Comparison, Tolerance, accept_sums, compare_gradients, compare_modules, exchange
from .record import Observation, Trace
from .report import DIFFERS, EQUAL, INTERNAL, SKIPPED, Cause, Report, Row

Call = tuple[str, int]


def conclude(
    parallel: Trace,
    alone: Trace,
    exact: Trace | None,
    mesh: DeviceMesh,
    length: int,
    tolerance: Tolerance,
    documents: bool,
) -> Report:
    """Compare on every rank, and combine. All ranks of the mesh make the call and return the same report.

    Args:
        parallel, alone: the runs with context parallelism and on one device.
        exact: the run on one device in fp32, if the model computes in half precision.
        documents: True if the batch has packed documents or padding.
    """
    # Random numbers of the run on one device are evidence too: styled attention shows its dropout there only.
    observations = parallel.observations + [o for o in alone.observations if o.kind == "dropout"]
    calls = parallel.calls
    ranks = exchange(
        mesh,
        {
            "modules": [asdict(row) for row in compare_modules(parallel, alone, exact, tolerance)],
            "gradients": [asdict(row) for row in compare_gradients(parallel, alone, exact, tolerance)],
            "losses": [parallel.loss, alone.loss, None if exact is None else exact.loss],
            "observations": [[o.tick, o.module, o.kind, o.text] for o in observations],
            "parents": [
                [c.module, c.number, calls[c.parent].module, calls[c.parent].number]
                for c in calls
                if c.parent is not None
            ],
            "styled": [call.module for call in calls if call.styled],
            "documents": parallel.documents,
        },
    )
    modules, gradients = (
        [[Comparison(**row) for row in rank[name]] for rank in ranks] for name in ("modules", "gradients")
    )
    sums = accept_sums(mesh, modules, parallel, alone, tolerance)
    for row in (row for rows in modules for row in rows if row.key in sums):
        row.status, row.error = EQUAL, sums[row.key]
    internal = _internal(modules, {(a, i): (b, j) for rank in ranks for a, i, b, j in rank["parents"]})
    rows = {key: _row(found, key in internal) for key, found in _grouped(modules).items()}
    loss, loss_row = _loss([rank["losses"] for rank in ranks], tolerance)
    merged = [max(found, key=attrgetter("excess")) for found in _grouped(gradients).values()]
    table = [*rows.values(), loss_row, *(_row([row], False) for row in merged)]
    first = next((row for row in table if row.status == DIFFERS), None)
    causes = _ranks_differ([rank["losses"][1] for rank in ranks], tolerance, ranks)
    if not causes:
        key = next((key for key, row in rows.items() if row.status == DIFFERS), None)
        rank, worst = _worst(modules, key)
        if worst is None:
            worst = next((row for row in [loss, *merged] if row.status == DIFFERS), None)
        evidence = Evidence(
            ranks=mesh.size(),
            rows=[row for row in modules[rank] if row.key not in internal],
            first=worst,
            gradients=merged,
            observations=[Observation(*o) for o in _observations_of(ranks, rank, key is None)],
            dropped=documents and not ranks[rank]["documents"],
            styled=frozenset(ranks[rank]["styled"]),
            losses=([other["losses"][0] for other in ranks], ranks[0]["losses"][1]),
        )
        causes = explain(evidence)
    return Report(first is None and not causes, mesh.size(), length, tuple(table), first, tuple(causes))


# --------------------------------------------------------------------------- rows


def _grouped(ranks: Iterable[Iterable[Comparison]]) -> dict[Any, list[Comparison]]:
    """The comparisons of each tensor on all ranks, in the order of the first rank."""
    found: dict[Any, list[Comparison]] = {}
    for row in (row for rows in ranks for row in rows):
        found.setdefault(row.key, []).append(row)
    return found


def _row(found: Sequence[Comparison], internal: bool) -> Row:
    """One row for the comparisons of one tensor on all ranks: the worst of them."""
    worst = max(found, key=attrgetter("excess"))
    status = DIFFERS if any(r.status == DIFFERS for r in found) else worst.status
    status = INTERNAL if status == DIFFERS and internal else status
    shape = "x".join(map(str, worst.whole_shape))
    note = f"not compared{f': {shape} on one device' if shape else ''}" if status == SKIPPED else ""
    return Row(worst.name or "(model)", worst.kind, worst.type, worst.place, tuple(worst.shape), worst.error,
               worst.tolerance, status, note)  # fmt: skip


def _loss(losses: Sequence[Sequence[Any]], tolerance: Tolerance) -> tuple[Comparison, Row]:
    """The comparison of the loss: each rank may return the whole mean, its share of it, or the mean of its share."""
    values, one, exact = [row[0] for row in losses], losses[0][1], losses[0][2]
    n, scale = len(values), max(abs(one), LEAST_LOSS)
    forms = {
        "": max((abs(v - one) for v in values), key=lambda x: (x != x, x)),  # NaN of a rank is the largest
        "sum over the ranks": abs(sum(values) - one),
        "mean over the ranks": abs(sum(values) / n - one),
    }
    note, error = min(forms.items(), key=lambda item: (item[1] != item[1], item[1]))
    allowed = tolerance.rtol + tolerance.atol / scale
    if exact is not None:
        allowed += 3 * abs(one - exact) / scale
    error = error / scale if error == error else float("inf")
    status = EQUAL if error <= allowed else DIFFERS
    note = f"{values[0]:.6g} for {one:.6g}" if status == DIFFERS else note
    row = Comparison("loss", 0, "loss", "", "", 0, [], error, allowed, status)
    return row, replace(_row([row], False), note=note)


# --------------------------------------------------------------------------- what encloses what


def _internal(modules: Sequence[Sequence[Comparison]], outer: dict[Call, Call]) -> set[Any]:
    """The keys of tensors that differ inside a call whose output is equal on all ranks: the difference is gone. (One
    number, such as the loss that a model returns, tells little of what is inside, but for other numbers.)"""
    outputs: dict[Call, list[str]] = {}
    large: set[Call] = set()
    for row in (row for rows in modules for row in rows if row.kind == "output" and row.status != SKIPPED):
        outputs.setdefault((row.name, row.number), []).append(row.status)
        large |= {(row.name, row.number)} if prod(row.shape) > 1 else set()
    equal = {call for call, statuses in outputs.items() if all(s == EQUAL for s in statuses)}
    found = set()
    for row in (row for rows in modules for row in rows):
        call: Call | None = (row.name, row.number)
        if row.kind == "output":
            call = outer.get((row.name, row.number))
        tell = equal & large if prod(row.shape) > 1 else equal
        while call is not None and call not in tell:
            call = outer.get(call)
        if call is not None:
            found.add(row.key)
    return found


# --------------------------------------------------------------------------- evidence


def _worst(modules: Sequence[Sequence[Comparison]], key: Any) -> tuple[int, Comparison | None]:
    """The rank on which a tensor differs most, and its comparison there."""
    found = [(rank, row) for rank, rows in enumerate(modules) for row in rows if row.key == key]
    if not found:
        return len(modules) - 1, None
    return max(found, key=lambda item: (item[1].local_positions, item[1].excess))


def _observations_of(ranks: Sequence[Any], rank: int, everywhere: bool) -> list[Any]:
    """The observations of one rank, or of all if no module differs; sums that were not made, of all ranks."""
    chosen = [o for i, other in enumerate(ranks) for o in other["observations"]
              if everywhere or i == rank or o[2] == "tensor parallel"]  # fmt: skip
    return sorted(chosen, key=lambda o: o[0])


def _ranks_differ(losses: Sequence[float], tolerance: Tolerance, ranks: Sequence[Any]) -> list[Cause]:
    """The cause of everything if the ranks disagree about the batch on one device, and nothing there is random."""
    allowed = tolerance.rtol * max(abs(losses[0]), LEAST_LOSS)
    odd = [rank for rank, loss in enumerate(losses) if not abs(loss - losses[0]) <= allowed]
    if not odd or any(o[2] == "dropout" for rank in ranks for o in rank["observations"]):
        return []
    text = (
        f"On one device cp ranks {odd} have another loss ({losses[odd[0]]:.6g}) than cp rank 0 ({losses[0]:.6g}): "
        "their weights or batches differ. All ranks of a cp mesh need the same batch and the same initial weights."
    )
    return [Cause("ranks", None, text)]


# --------------------------------------------------------------------------- causes

TEXTS = {
    "positions": "{where} counts positions locally ({what}). A rank does not hold positions 0 to S/n - 1. Use the "
    "position_ids of get_batch_on_this_cp_rank, or handler.position_ids, and index tables of positions by them.",
    "dropout": "{where}: {what}. Ranks draw other numbers than one device, so that the runs cannot be equal from here "
    "on. Verify with dropout probabilities of 0, or with model.eval().",
    "attention": "{where}: {what}. It sees this rank's share of the sequence only. Add the module to the "
    "ContextParallel plan, and let it call F.scaled_dot_product_attention.",
    "mixing": "{where} mixes positions ({what}), and its neighbours are on other ranks. {instead}, or replace the "
    "module.",
    "labels": "{where}: {what}. A share does not contain the next token of its last position. Shift over the whole "
    "sequence: get_batch_on_this_cp_rank(batch, shift_labels=True).",
    "mask": "The batch has packed documents or padding, but no module ran with them, so that attention sees across "
    "their boundaries. Run the forward inside `with handler.documents(batch):`, with the batch that "
    "get_batch_on_this_cp_rank returned.",
    "loss": "All modules agree, and the loss differs. The loss itself is computed from a share: labels that are "
    "shifted after sharding, or a mean over another number of tokens on each rank. Use shift_labels=True and "
    "handler.mean_loss.",
    "factor": "Gradients are those of one device but for a factor of cp ({what}). The loss and the reduction of "
    'gradients assume different things. Use handler.mean_loss(gradients="mean") if gradients are averaged over the '
    'ranks (DDP, FSDP), and "sum" if they are summed (then also verify(..., gradients="sum")). See '
    "combine(gradients=) for outputs that were gathered.",
    "batch": "{where} {what}. Attention takes the local rows for the positions of the model's layout. Split the whole "
    "batch with the handler that loss_fn receives (get_batch_on_this_cp_rank), or with one of the model's style.",
    "tensor parallel": "{what}. The sum over tensor-parallel ranks was not made. Give RowwiseParallel "
    "output_layouts=Replicate(), or all-reduce the output.",
    "unknown": "{where} differs, and no usual cause was recognised. {what}",
}
_ELSEWHERE = f"{mixing.GATHER}, use handler.roll_tensor for shifts"


@dataclass
class Evidence:
    """The evidence for a cause, from the run of the rank where the first difference is largest."""

    ranks: int
    rows: Sequence[Comparison]
    """Comparisons of modules in the order of execution."""
    first: Comparison | None
    """The first tensor that differs: of a module, the loss or a gradient."""
    gradients: Sequence[Comparison]
    observations: Sequence[Observation]
    dropped: bool
    """True if the batch has documents or padding, and no module ran with them."""
    styled: frozenset[str]
    """Names of styled modules."""
    losses: tuple[Sequence[float], float]
    """With context parallelism on every rank, and on one device."""

    def unsplit(self, name: str) -> bool:
        """True if this module is a styled one, or is inside one whose inputs are as long as on one device."""
        outer = next((x for x in self.styled if not x or name.startswith(f"{x}.")), None)
        shapes = [row.same_shape for row in self.rows if row.name == outer and row.kind == "input"]
        return name in self.styled or (bool(shapes) and all(shapes))


def explain(e: Evidence) -> list[Cause]:
    """Return the causes that fit, the most likely one first; at least one if something differs."""
    sums = [_cause("tensor parallel", o.module, o.text) for o in e.observations if o.kind == "tensor parallel"]
    if e.first is None:
        return sums[:1]
    if e.first.kind in ("input", "output"):
        return [*sums, _of_module(e, e.first)][:3]
    return [*sums, _of_loss(e) if e.first.kind == "loss" else _of_gradients(e)][:3]


def _cause(kind: str, module: str | None, what: str = "", where: str = "") -> Cause:
    where = where or ("loss_fn" if module is None else f"Module {module}" if module else "The model itself")
    instead = mixing.BY_NAME[name][0].instead if (name := what.split(" ")[0]) in mixing.BY_NAME else _ELSEWHERE
    return Cause(kind, module, TEXTS[kind].format(where=where, what=what, instead=instead))


def _observed(observations: Iterable[Observation], *kinds: str) -> Cause | None:
    """The cause that an observation shows: the first one of the first of these kinds that has any."""
    known = list(observations)
    found = next((o for kind in kinds for o in known if o.kind == kind), None)
    if found is None:
        return None
    return _cause("mixing" if found.kind == "shift" else found.kind, found.module, found.text)


def _of_module(e: Evidence, first: Comparison) -> Cause:
    """The cause of a difference in an input or an output of a module."""
    if first.local_positions:
        return _cause("positions", first.name, f"0, 1, 2, ... in {first.kind} {first.place}".rstrip())
    if first.same_shape and e.unsplit(first.name):
        shape = "x".join(map(str, first.shape))
        return _cause("batch", first.name, f"has {shape} on every rank as on one device: its inputs were not split")
    if first.kind == "input" and not first.name:
        what = f"receives other rows as {first.place} than this rank holds: the batch was split in another layout"
        return _cause("batch", first.name, what)
    since = max((r.tick for r in e.rows if r.tick < first.tick and r.status == EQUAL), default=-1)
    near = [o for o in e.observations if since <= o.tick <= first.tick]
    found = _observed(near, "dropout", "attention")
    if found is None and e.dropped and (first.name in e.styled or not near):
        return _cause("mask", first.name)
    if found is None and first.kind == "output" and first.type in mixing.BY_NAME:
        return _cause("mixing", first.name, first.type)
    found = found or _observed(near, "positions", "mixing", "shift")
    inputs_differ = any(r.key[:2] == first.key[:2] and r.kind == "input" and r.status == DIFFERS for r in e.rows)
    if found is None and first.kind == "output" and not inputs_differ and first.name not in e.styled:
        return _cause("mixing", first.name, "its inputs agree, and its output does not")
    before = [o for o in reversed(e.observations) if o.tick < since]
    what = "Something between the modules computes it from this rank's share, or from local positions."
    if first.kind == "output":
        what = "Its inputs agree. Check seq_dim, head_dim, layout and window of its style, and its masks."
    return found or _observed(before, "dropout", "positions", "attention") or _cause("unknown", first.name, what)


def _of_loss(e: Evidence) -> Cause:
    """The cause of a loss that differs, where all modules agree."""
    random = _observed(e.observations, "dropout")
    if random is not None:
        return random
    values, one = e.losses
    n = e.ranks
    if one and len({round(v / one, 3) for v in values}) == 1:
        for what, value in (("each rank's loss", values[0]), ("the mean of the ranks' losses", sum(values) / n)):
            for factor, name in ((n, f"{n} times"), (1 / n, f"1/{n} of"), (n * n, f"{n * n} times")):
                if abs(value / one - factor) < 1e-3 * factor:
                    text = f"{what} is {name} that of one device: the loss is divided or multiplied by the number of"
                    return Cause("factor", None, f"{text} ranks once too often. Use handler.mean_loss.")
    shifts = [o for o in e.observations if o.kind == "shift"]
    if shifts:
        return _cause("labels", shifts[-1].module, shifts[-1].text, "The loss")
    return _cause("mask" if e.dropped else "loss", None)


def _of_gradients(e: Evidence) -> Cause:
    """The cause of gradients that differ, where all modules and the loss agree."""
    wrong = [row for row in e.gradients if row.status == DIFFERS]
    factors: dict[str, list[str]] = {}
    for row in wrong:
        for factor, name in ((e.ranks, f"{e.ranks} times"), (1 / e.ranks, f"1/{e.ranks} of")):
            if row.factor is not None and abs(row.factor / factor - 1) < 0.02:
                factors.setdefault(name, []).append(row.name)
    if factors and sum(len(names) for names in factors.values()) == len(wrong):
        parts = [f"{names[0]}{' and others' if len(names) > 1 else ''} {k} that" for k, names in factors.items()]
        return _cause("factor", None, f"{'; '.join(parts)} of one device; {len(wrong)} of {len(e.gradients)}")
    if e.dropped:
        return _cause("mask", None)
    what = (
        "The forward agrees. A tensor was detached, gathered without its gradient, or used by another number of ranks "
        "than its gradient is reduced over."
    )
    return _cause("unknown", None, what, f"The gradient of {wrong[0].name if wrong else ''}")
