"""Transfers of keys, values, queries and heads. A way of obtaining keys and values is one entry of a table here.

:func:`register` adds one from outside the package: its two transfer classes, and the ranks whose keys arrive at each
step, from which the schedule is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ...mesh.comm import Axis
from ...schedule.arrivals import Visits, register_exchange
from ...schedule.build import Schedule
from ...schedule.layout import places_by_cost
from .all_gather import GatherBackward, GatherForward
from .needed import NeededBackward, NeededForward
from .ring import RingBackward, RingForward


class Forward(Protocol):
    """Keys and values of one forward call. Iterating yields a block ``(k, v)`` ``[B, H, S', D]`` for each step of the
    schedule: the local one, those that arrive (``plan.hops``, each in ``plan.pieces``), and the local one again."""

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


# --------------------------------------------------------------------------- what costs more than it must

_warned: set[str] = set()


def warn_of_cost(layout: str, kv_exchange: str, plan: Schedule, keys: int, mask: Tensor | None) -> None:
    """Warn once in a process if an exchange moves much more than queries see, though another would not.

    Args:
        keys: the number of key positions that each rank holds.
        mask: an explicit mask that is no band.
    """
    if kv_exchange == "ring" and plan.hops > 1 and places_by_cost(layout) and "ring" not in _warned:
        moved, seen = plan.hops * keys, plan.used
        if 2 * seen < moved:
            _warn(
                "ring",
                f"layout={layout!r} with kv_exchange='ring' makes {plan.hops} hops in each attention call of this "
                f"batch. They bring {moved} rows of keys and values to this rank, of which its queries see {seen}, "
                "because chunks that are dealt by cost seldom need those of the neighbours in a ring. Use "
                "kv_exchange='needed', which moves only what queries see, or compare layouts with "
                "hyper_cp.ops.balance",
            )
    if kv_exchange != "needed" or mask is None or not plan.routes or "mask" in _warned:
        return
    if plan.received == (len(plan.routes[0].received) - 1) * keys:
        _warn(
            "mask",
            f"kv_exchange='needed' with an attn_mask of shape {tuple(mask.shape)} sends all keys and values to every "
            "rank, as an all-gather does. A mask that is neither causal nor a window is not read to find out which "
            "keys it hides. Pass is_causal, window or documents where they say the same, or use kv_exchange='ring' or "
            "'all_gather'",
        )


def _warn(what: str, message: str) -> None:
    _warned.add(what)
    warnings.warn(message, stacklevel=2)
