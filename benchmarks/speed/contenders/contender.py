"""One contender: a function on a rank's share of q, k, v, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..case import Problem

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's share ``[B, H, S/n, D]``."""

LIMIT = "plain SDPA"


class Skip(Exception):
    """The reason why a contender does not take a problem."""


@dataclass(frozen=True)
class Contender:
    """One way to solve a problem.

    Attributes:
        library: whose it is.
        mode: the kind that it competes in: ``"Ulysses"``, ``"all-gather"``, ``"ring"``, ``"needed"`` or ``"hybrid"``.
        layout: the library's name of the sequence layout on the ranks.
        prepare: makes its attention function, for a problem on a mesh. It raises :class:`Skip`, or its library's own
            error, if it cannot.
        note: more about it, for the table.
        balanced: False if a causal mask leaves its ranks with unequal work.
    """

    library: str
    mode: str
    layout: str
    prepare: Callable[[Problem, DeviceMesh], Attention]
    note: str = ""
    balanced: bool = True

    @property
    def name(self) -> str:
        note = f", {self.note}" if self.note else ""
        return f"{self.library}: {self.mode}, {self.layout}{note}"


def refuse(problem: Problem, *, documents: bool = True, grouped: bool = True) -> None:
    """Raise :class:`Skip` for what a contender's functions do not take."""
    if documents and problem.documents is not None:
        raise Skip("takes no packed documents on the CPU")
    if not grouped and problem.heads != problem.kv_heads:
        raise Skip("takes no grouped-query heads")
