"""``HYPER_CP_DEBUG=nan``: finds the first NaN, and says on which rank, in which module and in which step it arises.
(``HYPER_CP_DEBUG=nan,selected`` also checks selected keys, see :mod:`hyper_cp.ops.selected_check`.)

A NaN of one rank reaches the others with the next keys, so a loss shows nothing but that there was one. While this is
on, every op on a mesh checks its inputs before they travel, and its results, on all ranks, and all raise the same
error. That costs a small gather and a wait for the device per check. While it is off, it costs the test of a flag.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .comm import gather_ranks
from .cp_mesh import CPMesh
from .failures import running


def _switched_on() -> set[str]:
    given = os.environ.get("HYPER_CP_DEBUG", "")
    names = set() if given in ("", "0") else set(given.split(","))
    if not names <= {"nan", "selected"}:
        raise ValueError(
            f"HYPER_CP_DEBUG={given!r} is unknown. It switches on checks: of NaN, and of selected keys. Set "
            "HYPER_CP_DEBUG=nan, HYPER_CP_DEBUG=selected or HYPER_CP_DEBUG=nan,selected, or unset it"
        )
    return names


class _Watch:
    def __init__(self) -> None:
        names = _switched_on()
        self.on = "nan" in names
        """Read once, when the package is imported: ranks must not differ in it."""
        self.selected = "selected" in names
        """True if selected keys are checked."""
        self.clean = ""
        """The last check that found none."""


watch = _Watch()


def check(cp: CPMesh, names: str, *tensors: Tensor | None) -> None:
    """Raise ``FloatingPointError`` on every rank if a tensor of any rank has a NaN. All ranks of ``cp`` make this call.

    Args:
        names: those of the tensors, separated by commas; the last one is that of all further tensors.
    """
    if not watch.on or any(x is not None and x.is_meta for x in tensors):
        return
    flags = [x is not None and x.is_floating_point() and bool(x.isnan().any()) for x in tensors]
    device = next((x.device for x in tensors if x is not None), torch.device("cpu"))
    found = gather_ranks(cp.flat, torch.tensor(flags, dtype=torch.uint8, device=device)).tolist()
    where = f"{running(cp)}: {names}"
    if not any(map(any, found)):
        watch.clean = where
        return
    ranks = [rank for rank, flags in enumerate(found) if any(flags)]
    named = names.split(", ")
    which = dict.fromkeys(named[min(i, len(named) - 1)] for i, flag in enumerate(found[ranks[0]]) if flag)
    others = f" (and on ranks {ranks[1:]})" if ranks[1:] else ""
    since = f"the last check without one was that of {watch.clean}" if watch.clean else "this is the first check"
    raise FloatingPointError(
        f"{running(cp)}: NaN in {', '.join(which)} of rank {ranks[0]} of the mesh{others}. It arises on that rank "
        f"before this check; {since}. Examine what rank {ranks[0]} computes between the two: its share of the batch, "
        "a division, a logarithm, an overflow in half precision; with all ranks at once also the weights"
    )
