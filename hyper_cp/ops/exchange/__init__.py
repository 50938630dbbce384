"""Transfers of keys, values, queries and heads. A way of obtaining keys and values is one entry of a table here.

:func:`register` adds one from outside the package: its two transfer classes, and the ranks whose keys arrive at each
step, from which the schedule is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ...mesh.comm import Axis
from ...schedule.arrivals import Visits, register_exchange
from ...schedule.build import Schedule
from .all_gather import GatherBackward, GatherForward
from .needed import NeededBackward, NeededForward
from .ring import RingBackward, RingForward


class Forward(Protocol):
    """Keys and values of one forward call. Iterating yields a block ``(k, v)`` ``[B, H, S', D]`` for each step of the
    schedule: the local one, the ``plan.hops`` blocks that arrive, and the local one again."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Backward(Protocol):
    """The same for backward: yields ``(k, v, dk, dv)``. The caller adds to dk and dv, in ``dtype``, before it asks for
    the next block. Afterwards ``home`` holds the gradients of this rank's own k and v."""

    home: tuple[Tensor, Tensor]

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]: ...


FORWARD: dict[str, Callable[..., Any]] = {}
BACKWARD: dict[str, Callable[..., Any]] = {}


def register(name: str, forward: type[Forward], backward: type[Backward], visits: Visits) -> None:
    """Add a way of obtaining keys and values, under a name that ``kv_exchange=`` then takes.

    Args:
        forward, backward: the transfers, see :class:`Forward` and :class:`Backward`. Every rank of the axis must issue
            the same sequence of transfers, whatever its own tiles are.
        visits: ``visits(rank, size)`` lists for each step the ranks whose keys are in its block, in the order in which
            they lie there. The first step is the local block.
    """
    register_exchange(name, visits)
    FORWARD[name], BACKWARD[name] = forward, backward


FORWARD.update(ring=RingForward, all_gather=GatherForward, needed=NeededForward, replicated=GatherForward)
BACKWARD.update(ring=RingBackward, all_gather=GatherBackward, needed=NeededBackward, replicated=GatherBackward)
# Replicated keys and values never hop: the local block holds all of them.
