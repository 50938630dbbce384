"""The result of a verification: one row for every tensor that was compared, and the causes of differences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

EQUAL, INTERNAL, DIFFERS, SKIPPED = "equal", "internal", "differs", "not compared"
MOST_ROWS = 30
"""Rows that the table shows at most; the JSON has all."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    """The module (its qualified name), parameter or entry of the batch; ``"loss"``."""
    kind: str
    """``"input"`` or ``"output"`` of a module, ``"loss"``, or ``"gradient"``."""
    type: str
    """The class of the module."""
    place: str
    """The tensor among the module's inputs or outputs; empty if there is one."""
    shape: tuple[int, ...]
    """The shape of the tensor on one rank of the run with context parallelism."""
    error: float | None
    """The largest difference on any rank, relative to the largest value (in half precision: of the norms)."""
    tolerance: float | None
    status: str
    """``"equal"``, ``"differs"``, ``"not compared"`` (no rows of the one-device tensor fit this shape), or
    ``"internal"`` (it differs, but the output of an enclosing module does not)."""
    note: str = ""

    @property
    def title(self) -> str:
        """The name of the row in the table and in sentences."""
        place = f" {self.place}" if self.place not in ("", self.kind) else ""
        return f"{self.name} {self.kind}{place}" if self.kind != "loss" else "loss"


@dataclass(frozen=True)
class Cause:
    """A usual cause that fits the differences."""

    kind: str
    """``"batch"``, ``"positions"``, ``"labels"``, ``"loss"``, ``"mask"``, ``"factor"``, ``"dropout"``, ``"attention"``,
    ``"mixing"``, ``"tensor parallel"``, ``"ranks"`` or ``"unknown"``."""
    module: str | None
    text: str
    """One sentence about the finding, one about the reason, one about the way out."""


@dataclass(frozen=True)
class Report:
    """The result of :func:`hyper_cp.verify`, the same on every rank of the cp mesh. Its text is a table."""

    ok: bool
    """True if nothing differs."""
    ranks: int
    length: int
    """Positions of the sequence."""
    rows: tuple[Row, ...]
    """Rows of modules in the order of execution, then the loss, then gradients."""
    first: Row | None
    """The first row that differs."""
    causes: tuple[Cause, ...]
    """Causes that fit, the most likely one first."""

    @property
    def module(self) -> str | None:
        """The name of the first module that differs, or that the cause names; None if the modules agree."""
        if self.first is None:
            return self.causes[0].module if self.causes else None
        return self.first.name if self.first.kind in ("input", "output") else None

    @property
    def cause(self) -> str | None:
        """The kind of the most likely cause."""
        return self.causes[0].kind if self.causes else None

    def json(self) -> str:
        """The report as JSON text."""
        return json.dumps({**asdict(self), "module": self.module, "cause": self.cause})

    def __str__(self) -> str:
        return "\n".join([self.heading(), *_table(self.cells()), *self.conclusion()])

    def heading(self) -> str:
        """The line above the table."""
        return f"hyper_cp.verify: {self.length} positions on {self.ranks} ranks against one device"

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text: a header, then the rows that say most."""
        cells: list[tuple[str, ...]] = [("", "name", "class", "shape", "error", "tolerance", "")]
        for row in self._shown():
            mark = {EQUAL: "", INTERNAL: "~", DIFFERS: "!", SKIPPED: "?"}[row.status]
            numbers = ["" if x is None else f"{x:.1e}" for x in (row.error, row.tolerance)]
            note = row.note or ("" if row.status == EQUAL else row.status)
            cells.append((mark, row.title, row.type, "x".join(map(str, row.shape)), *numbers, note))
        return cells

    def conclusion(self) -> list[str]:
        """The lines below the table: the result, and the causes."""
        compared = [row for row in self.rows if row.status != SKIPPED]
        hidden = len(self.rows) - len(self._shown())
        lines = [f"... and {hidden} more rows (report.rows)"] if hidden else []
        if self.ok:
            worst = max((row for row in compared if row.status == EQUAL), key=_excess, default=None)
            most = f"; the largest error is {worst.error:.1e} ({worst.title})" if worst is not None else ""
            inside = sum(row.status == INTERNAL for row in self.rows)
            agree = f"{len(compared) - inside} of {len(self.rows)} tensors were compared and agree"
            lines.append(f"OK: {agree}{most}.")
            if inside:
                lines.append(
                    f"{inside} tensors (~) differ inside modules whose outputs agree. Weights that are zero now, as "
                    "gates and projections at the start of a training may be, hide differences: verify again after "
                    "some steps, or with other weights."
                )
            if len(compared) < len(self.rows) / 2:
                lines.append("Most tensors could not be compared: their shapes do not follow from the sequence.")
        elif self.first is not None:
            lines.append(f"DIFFERENT, first in {self.first.title}{_by(self.first)}.")
        else:
            lines.append("WRONG, although nothing differs between the two runs.")
        for cause in self.causes:
            lines.append(f"Cause ({cause.kind}){f' in {cause.module}' if cause.module else ''}: {cause.text}")
        return lines

    def _shown(self) -> list[Row]:
        """The rows that say most: the first that differs, outputs (around the first difference, if they are many), the
        loss, and the gradients that are nearest to their tolerance."""
        bad = [i for i, row in enumerate(self.rows) if row.status == DIFFERS]
        around = bad[0] if bad else 0
        modules = [i for i, row in enumerate(self.rows) if row.kind == "output"]
        gradients = [i for i, row in enumerate(self.rows) if row.kind == "gradient"]
        chosen = [
            *bad[:1],
            *(i for i, row in enumerate(self.rows) if row.kind == "loss"),
            *sorted(gradients, key=lambda i: -_excess(self.rows[i]))[:3],
            *sorted(modules, key=lambda i: abs(i - around)),
        ]
        keep = set(list(dict.fromkeys(chosen))[:MOST_ROWS])
        return [row for i, row in enumerate(self.rows) if i in keep]


def _excess(row: Row) -> float:
    """The error in units of the tolerance."""
    if row.error is None:
        return -1.0
    return row.error / row.tolerance if row.tolerance else row.error


def _by(row: Row) -> str:
    return "" if row.error is None else f", by {row.error:.1e} (tolerance {row.tolerance or 0:.1e})"


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(cell[i]) for cell in cells) for i in range(7)]
    return ["  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip() for cell in cells]
