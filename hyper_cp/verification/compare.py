"""Compare the runs of a verification on one rank, tensor by tensor, and exchange the comparisons of all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..data.collectives import by_rank
from .record import Trace
from .report import DIFFERS, EQUAL, SKIPPED
from .share import differences, distance, pieces, wide

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}
"""Default tolerances by the coarsest dtype of a run. (Some models compute parts in fp32 whatever their dtype.)"""
LEAST_GRADIENT = 1e-2
"""Gradients that are zero but for rounding (a bias of keys) are judged by this part of the largest gradient: of the
largest root mean square in norms, since one large value (a frequent token's in an embedding) would hide others."""
LEAST_LOSS = 1e-2
"""Losses that are nearly zero are judged by this number."""


@dataclass(frozen=True)
class Tolerance:
    """The rule by which two tensors are equal."""

    rtol: float
    atol: float = 0.0
    norms: bool = False
    """True in half precision: errors are those of norms, in which the rounding of single values cancels."""

    def judge(self, local: Tensor, alone: Tensor, exact: Tensor | None, least: float = 0.0) -> tuple[float, float]:
        """The error of ``local``, the tensor under context parallelism, and the tolerance for it.

        ``alone`` is the tensor on one device, and ``exact`` the same in fp32, for half precision. The distance between
        ``local`` and ``exact`` may be three times that of ``alone`` (twice, and once more since small tensors scatter),
        plus one rounding. A fixed tolerance would not do: rounding adds up over layers, and where a router picks other
        experts, a few rows differ altogether.
        """
        if local.numel() == 0:
            return 0.0, 0.0
        if not local.is_floating_point() and not local.is_complex():
            allowed = 3 * distance(alone, exact) if exact is not None and exact.shape == alone.shape else 0.0
            return distance(local, alone), allowed
        if exact is not None and exact.shape == alone.shape:
            scale = max(_norm(exact), least * exact.numel() ** 0.5)
            return _ratio(_norm(local, exact), scale), 3 * _ratio(_norm(alone, exact), scale) + self.rtol / 4
        if self.norms:
            scale = max(_norm(alone), least * alone.numel() ** 0.5)
            return self._relative(_norm(local, alone), scale)
        scale = max(_largest(alone), least)
        return self._relative(distance(local, alone), scale)

    def _relative(self, error: float, scale: float) -> tuple[float, float]:
        """An error and the tolerance for it, relative to ``scale``; absolute ones where one device has zeros."""
        if self.atol and not scale:
            return error, self.atol
        return _ratio(error, scale), self.rtol + _ratio(self.atol, scale)


def _ratio(a: float, scale: float) -> float:
    return a / scale if scale else (0.0 if a == 0 else float("inf"))


def _norm(x: Tensor, y: Tensor | None = None) -> float:
    """The norm of the finite values of ``x``, or of its difference from ``y``."""
    parts = (a.abs().nan_to_num(0.0, 0.0, 0.0) for (a,) in pieces(x)) if y is None else differences(x, y)
    return sum(torch.linalg.vector_norm(part).item() ** 2 for part in parts) ** 0.5


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    return max((part.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for (part,) in pieces(x)), default=0.0)


def _root_mean_square(x: Tensor) -> float:
    return _norm(x) / max(x.numel(), 1) ** 0.5


def coarsest(trace: Trace) -> torch.dtype:
    """The dtype with the fewest digits among the tensors of a run."""
    found = [event.value.dtype for event in trace.events.values()] + [x.dtype for x in trace.gradients.values()]
    return max((d for d in found if d in TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float32)


# --------------------------------------------------------------------------- one rank


@dataclass
class Comparison:
    """The comparison of one tensor on one rank; it travels as JSON."""

    name: str
    number: int
    kind: str
    place: str
    type: str
    tick: int
    shape: list[int]
    error: float | None
    tolerance: float | None
    status: str
    same_shape: bool = False
    """True if the tensor has no sequence dimension."""
    whole_shape: list[int] = field(default_factory=list)
    local_positions: bool = False
    factor: float | None = None
    """For gradients: the factor that makes the one-device gradient most like this one, if it then is equal."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.name, self.number, self.kind, self.place

    @property
    def excess(self) -> float:
        """The error in units of the tolerance; -1 where nothing was compared."""
        return -1.0 if self.error is None else (self.error + 1e-300) / (self.tolerance or 1e-300)

    def record_outcome(
        self, tolerance: Tolerance, local: Tensor, alone: Tensor, exact: Tensor | None, least: float = 0.0
    ) -> None:
        """Compare two tensors, and record the outcome."""
        self.error, self.tolerance = tolerance.judge(local, alone, exact, least)
        self.status = EQUAL if self.error <= self.tolerance else DIFFERS


def compare_modules(parallel: Trace, alone: Trace, exact: Trace | None, tolerance: Tolerance) -> list[Comparison]:
    """Compare every tensor that went into or came out of a module with that of one device."""
    rows = []
    for key, event in parallel.events.items():
        call, whole = parallel.calls[event.call], alone.events.get(key)
        row = Comparison(*key, call.type, event.tick, list(event.shape), None, None, SKIPPED)
        row.whole_shape = list(whole.shape if whole is not None else alone.unmatched.get(key, ()))
        if whole is not None and whole.selection is not None:
            precise = None if exact is None else exact.events.get(key)
            truth = None if precise is None or precise.selection != whole.selection else precise.value
            local = whole.selection.of_local(event.value)
            row.record_outcome(tolerance, local, whole.value, truth)
            row.same_shape = whole.selection.kind == "same"
            row.local_positions = event.local_positions
        if row.whole_shape or event.key[2] == "output":
            rows.append(row)
    return rows


def compare_gradients(parallel: Trace, alone: Trace, exact: Trace | None, tolerance: Tolerance) -> list[Comparison]:
    """Compare the gradients of parameters and inputs."""
    size = _root_mean_square if tolerance.norms else _largest
    largest = max((size(x) for x in alone.gradients.values()), default=0.0)
    rows = []
    for name, whole in alone.gradients.items():
        reduced = parallel.gradients[name]
        row = Comparison(name, 0, "gradient", "", "", 0, list(reduced.shape), None, None, SKIPPED)
        row.record_outcome(
            tolerance, reduced, whole, None if exact is None else exact.gradients.get(name), LEAST_GRADIENT * largest
        )
        if row.status == DIFFERS:
            a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (wide(reduced), wide(whole)))
            a, b = a.flatten(), b.flatten()
            factor = (a @ b / (b @ b)).item() if bool(b.any()) else 0.0
            fits = Tolerance(max(tolerance.rtol, 1e-3), norms=True).judge(a, factor * b, None)
            row.factor = factor if fits[0] <= fits[1] else None
        rows.append(row)
    return rows


# --------------------------------------------------------------------------- all ranks


def exchange(mesh: DeviceMesh, payload: Any) -> list[Any]:
    """The payloads of all ranks of a mesh, which are gathered as JSON."""
    content = torch.frombuffer(bytearray(json.dumps(payload).encode()), dtype=torch.uint8).to(mesh.device_type)
    sizes = by_rank(mesh, torch.tensor([len(content)], device=mesh.device_type)).flatten().tolist()
    padded = torch.cat([content, content.new_zeros(max(sizes) - len(content))])
    rows = by_rank(mesh, padded).cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def accept_sums(
    mesh: DeviceMesh, ranks: list[list[Comparison]], parallel: Trace, alone: Trace, tol: Tolerance
) -> dict[Any, float]:
    """The keys of tensors without a sequence dimension whose sum or mean over the ranks is that of one device, and its
    error: each rank has its share of a statistic. All ranks make the call."""
    tables = [{row.key: row for row in rows if row.same_shape} for rows in ranks]
    accepted = {}
    for key, row in tables[0].items():
        everywhere = [table.get(key) for table in tables]
        if any(r is None or r.shape != row.shape for r in everywhere):
            continue
        value = parallel.events[key].value
        if not value.is_floating_point() or all(r is not None and r.status == EQUAL for r in everywhere):
            continue
        total = by_rank(mesh, value.reshape(-1).to(mesh.device_type)).cpu().double().sum(0).view(value.shape)
        judged = [tol.judge(x, alone.events[key].value, None) for x in (total, total / mesh.size())]
        gathered = by_rank(mesh, torch.tensor(judged, device=mesh.device_type))
        for errors, allowed in (form.unbind(-1) for form in gathered.unbind(1)):
            if bool((errors <= allowed).all()):
                accepted[key] = errors.max().item()
    return accepted
