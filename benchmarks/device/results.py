"""Results of a check: fine, wrong, or a refusal that is permitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OK, WRONG, NOT_FINITE, CRASHED, REFUSED, ABSENT = "ok", "WRONG", "NOT FINITE", "CRASHED", "refused", "absent"
PASSING = OK, REFUSED, ABSENT

HALF_ONLY = "FlashAttention and cuDNN take bfloat16 and float16 only"
REFUSALS: list[tuple[str, Sequence[torch.dtype], str, str]] = [
    (r"cuda (flash|cudnn)\b.*", (torch.float32, torch.float64), "any", HALF_ONLY),
    (r"cuda memory-efficient\b.*", (torch.float64,), "any", "the operator takes no float64"),
    (
        r"cuda memory-efficient",
        (torch.float32,),
        "packed or banded or windows",
        HALF_ONLY + ", and do these tiles of this kernel",
    ),
    (
        r"cuda .* without .*memory-efficient",
        (),
        "banded",
        "only the memory-efficient operator takes a mask",
    ),
    (r"cuda cudnn without flash and memory-efficient", (), "windows", "no operator takes a window"),
    (r"npu fusion attention", (torch.float64,), "any", "the operator takes no float64"),
]
"""Refusals that are permitted: a kernel's name, dtypes (none: all), kinds of tiles, and the reason. Every other error
is a failure, and a kernel that runs in spite of an entry has to be right."""

BARS = {torch.float64: 1e-10, torch.float32: 5e-6}
"""The largest error of a tensor, relative to its largest element; 3e-2 in bfloat16 and float16."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check."""

    status: str
    what: str
    error: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.status in PASSING

    def __str__(self) -> str:
        return f"{self.status:10} {self.error:9.2e}  {self.what}" + (f": {self.note}" if self.note else "")


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Results and what is expected."""


def refusal(kernel: str, dtype: torch.dtype, kind: str = "") -> str:
    """The reason why a kernel may refuse a dtype, or tiles of a kind, by a ``RuntimeError``; empty if it may not."""
    for name, dtypes, kinds, reason in REFUSALS:
        if re.fullmatch(name, kernel) and (dtype in dtypes or not dtypes) and (kinds == "any" or kind in kinds.split()):
            return reason
    return ""


def bar(dtype: torch.dtype) -> float:
    return BARS.get(dtype, 3e-2)


def check(what: str, dtype: torch.dtype, run: Callable[[], Pairs], permitted: str = "") -> Result:
    """Run a check that returns pairs of a result and what is expected, and judge it.

    Args:
        permitted: the reason why the run may raise a ``RuntimeError`` instead; empty if it may not.
    """
    try:
        pairs = run()
        if not pairs:
            return Result(ABSENT, what, note="this device has none")
        return judge(what, dtype, pairs)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if permitted and isinstance(error, RuntimeError):
            return Result(REFUSED, what, note=f"{permitted} ({text[:90]})")
        return Result(CRASHED, what, float("inf"), text)


def judge(what: str, dtype: torch.dtype, pairs: Pairs) -> Result:
    """Compare results with what is expected: finite where that is, and within the bar of the dtype."""
    worst, largest = 0.0, max(_size(x) for _, x in pairs)
    for on_device, expected in pairs:
        found = on_device.detach().cpu()
        if found.shape != expected.shape:
            return Result(WRONG, what, float("inf"), f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        finite = expected.isfinite()
        odd = int((~torch.where(finite, found.isfinite(), found == expected)).sum())
        if odd:
            return Result(NOT_FINITE, what, float("inf"), f"{odd} of {found.numel()} elements")
        size, difference = _size(expected), _size((found.double() - expected)[finite])
        # A gradient that is zero everywhere, as that of a single key's logits, has no size: take that of the others.
        worst = max(worst, difference / (size if size > 1e-9 else largest or 1.0))
    return Result(OK if worst <= bar(dtype) else WRONG, what, worst)


def _size(x: Tensor) -> float:
    """The largest absolute value among the finite ones; 0 if there is none."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
