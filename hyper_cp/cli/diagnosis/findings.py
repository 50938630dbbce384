"""Findings of the self-checks, and the comparison of a result with attention written out in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OK, WRONG, NOT_FINITE, CRASHED = "ok", "WRONG", "NOT FINITE", "CRASHED"
REFUSED, ABSENT, WARNING, NOTE = "refused", "absent", "warning", ""

BARS = {torch.float64: 1e-10, torch.float32: 5e-6}
"""The largest error of a tensor, relative to its largest element; 3e-2 in bfloat16 and float16."""

NAMES = "output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v"
"""The names of what :func:`answer` returns."""

Results = Sequence[tuple[str, Tensor, Tensor]]
"""``(name, value, expected value)``"""


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        section: ``"versions"``, ``"kernels"``, ``"exchanges"`` ...
        what: the thing that was found or checked.
        status: ``"ok"``, ``"WRONG"``, ``"NOT FINITE"``, ``"CRASHED"``, ``"refused"``, ``"absent"``, ``"warning"``, or
            "" for plain information.
        note: the value, the error, or the reason.
        error: the largest relative error of a finite result.
    """

    section: str
    what: str
    status: str = NOTE
    note: str = ""
    error: float | None = None

    @property
    def failed(self) -> bool:
        return self.status in (WRONG, NOT_FINITE, CRASHED)

    def __str__(self) -> str:
        error = "" if self.error is None else f" (error {self.error:.1e})"
        return f"{self.status:10} {self.what}" + (f": {self.note}" if self.note else "") + error


def bar(dtype: torch.dtype) -> float:
    """Return the largest relative error that a result in this dtype may have."""
    return BARS.get(dtype, 3e-2)


def check(section: str, what: str, dtype: torch.dtype, run: Callable[[], Results], permitted: str = "") -> Finding:
    """Run a check and judge its results. An error that it raises is a finding too: the other checks still run.

    Args:
        permitted: the reason why the run may raise a ``RuntimeError`` instead; empty if it may not.
    """
    try:
        results = run()
        if not results:
            return Finding(section, what, ABSENT, "this device has none")
        return judge(section, what, dtype, results)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if permitted and isinstance(error, RuntimeError):
            return Finding(section, what, REFUSED, f"{permitted} ({text[:120]})")
        return Finding(section, what, CRASHED, text)


def judge(section: str, what: str, dtype: torch.dtype, results: Results) -> Finding:
    """Compare values with what is expected: of the same shape, finite where that is, and within the bar."""
    worst, worst_name, largest = 0.0, "", max(_size(expected) for *_, expected in results)
    for name, on_device, on_any_device in results:
        found, expected = on_device.detach().cpu().double(), on_any_device.detach().cpu().double()
        if found.shape != expected.shape:
            shapes = f"the {name} has the shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
            return Finding(section, what, WRONG, shapes)
        finite = expected.isfinite()
        odd = int((~torch.where(finite, found.isfinite(), found == expected)).sum())
        if odd:
            return Finding(section, what, NOT_FINITE, f"{odd} of {found.numel()} elements of the {name}")
        size, difference = _size(expected), _size((found - expected)[finite])
        # A gradient that is zero everywhere, as that of a single key's logits, has no size: take that of the others.
        error = difference / (size if size > 1e-9 else largest or 1.0)
        worst, worst_name = max((worst, worst_name), (error, name))
    if worst <= bar(dtype):
        return Finding(section, what, OK, error=worst)
    return Finding(section, what, WRONG, f"the {worst_name} is off by more than {bar(dtype):.0e} in {dtype}", worst)


def _size(x: Tensor) -> float:
    """Return the largest absolute value among the finite ones; 0 if there is none."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


# --------------------------------------------------------------------------- attention, written out


def written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of ``[B, H, S, D]``, differentiable. Rows that see nothing give 0 and -inf."""
    groups = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~visible, -1e300)
    lse = logits.logsumexp(-1).masked_fill(~visible.any(-1), -torch.inf)
    return (logits.softmax(-1) * visible) @ v.repeat_interleave(groups, 1), lse


def answer(tensors: Sequence[Tensor], visible: Tensor, scale: float) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of q, k and v for ``q, k, v, dout``. They are computed in fp64 on the
    CPU, since some devices have no fp64."""
    q, k, v, dout = (x.detach().cpu().double() for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = written_out(q, k, v, visible, scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
