"""Findings of the doctor, and the comparison of a result with attention written out in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OK, WRONG, WARNING, ABSENT, NOTE = "ok", "WRONG", "warning", "absent", ""

BARS = {torch.float64: 1e-10, torch.float32: 5e-6}
"""The largest error of a tensor, relative to its largest element; 3e-2 in bfloat16 and float16."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: ``"versions"``, ``"kernels"``, ``"exchanges"`` ...
        what: the thing that was found or checked.
        status: ``"ok"``, ``"WRONG"``, ``"warning"``, ``"absent"``, or "" for plain information.
        note: the value, the error, or the reason.
    """

    section: str
    what: str
    status: str = NOTE
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.status:8} {self.what}" + (f": {self.note}" if self.note else "")


def bar(dtype: torch.dtype) -> float:
    """The largest relative error that a result in this dtype may have."""
    return BARS.get(dtype, 3e-2)


def error_of(value: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value, both on the CPU; infinite for NaN or another shape."""
    value, expected = value.detach().cpu().double(), expected.detach().cpu().double()
    if value.shape != expected.shape:
        return math.inf
    if not value.numel():
        return 0.0
    same = value == expected  # infinities where they belong
    difference = torch.where(same, 0.0, value - expected).abs().max().item()
    size = torch.where(expected.isfinite(), expected, 0.0).abs().max().item()
    return math.inf if math.isnan(difference) else difference / (size or 1.0)


def judged(section: str, what: str, dtype: torch.dtype, run: Callable[[], float], note: str = "") -> Finding:
    """Run a check that returns its largest relative error. Whatever it raises is a finding too."""
    try:
        error = run()
    except Exception as failure:  # the other checks still run
        return Finding(section, what, WRONG, f"{type(failure).__name__}: {str(failure).strip()[:300]}")
    if error <= bar(dtype):
        return Finding(section, what, OK, note)
    return Finding(section, what, WRONG, f"its error is {error:.1e}, and {bar(dtype):.0e} is allowed in {dtype}")


# --------------------------------------------------------------------------- attention, written out


def attention_of(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of ``[B, H, S, D]``, differentiable. Rows that see nothing give 0 and -inf."""
    groups = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~visible, -1e300)
    lse = logits.logsumexp(-1).masked_fill(~visible.any(-1), -torch.inf)
    return (logits.softmax(-1) * visible) @ v.repeat_interleave(groups, 1), lse


def answer(tensors: Sequence[Tensor], visible: Tensor, scale: float) -> list[Tensor]:
    """Output, log-sum-exp and gradients of q, k and v for ``q, k, v, dout``, in fp64 on the CPU."""
    q, k, v, dout = (x.detach().cpu().double() for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = attention_of(q, k, v, visible, scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
