"""Needed: a rank receives the rows of keys and values that its queries see, each once, from the ranks that hold them.

Who owns what: rows in flight belong to their :class:`~hyper_cp.mesh.comm.Pending`. The rows of the next ``plan.ahead``
stages travel while those of this stage are attended; in backward the gradients of as many stages before travel home
beside them. So a rank that has much to do in one stage does not hold up the others. All ranks take part in every stage,
whether they have rows for it or not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from ...mesh.comm import Axis, Pending
from ...schedule.arrivals import Route
from ...schedule.build import Schedule
from .wire import Pair, from_wire

logger = logging.getLogger(__name__)


class _Rows:
    """Keys and values side by side, ``[S, *]``: a token is one row, so that one gather packs a message and a message
    needs no unpacking."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (k, v)]
        self.widths = [b * h * d for b, h, d in self.shapes]

    def of(self, k: Tensor, v: Tensor) -> Tensor:
        """A copy of keys and values as rows."""
        return torch.cat([x.movedim(2, 0).flatten(1) for x in (k, v)], 1)

    def pair(self, rows: Tensor) -> Pair:
        """Keys and values ``[B, H, S, D]``, views of rows."""
        k, v = (
            from_wire(x.unflatten(1, shape))
            for x, shape in zip(rows.split_with_sizes(self.widths, 1), self.shapes, strict=True)
        )
        return k, v


class NeededForward:
    """Yields the local block, the rows of each stage, and the local block again."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule) -> None:
        self.axis, self.local, self.plan = axis, (k, v), plan
        self.format = _Rows(k, v)
        self.pending: deque[Pending] = deque()
        if plan.routes:
            logger.debug('kv_exchange="needed": %d stages, %d under way at once', len(plan.routes), plan.ahead)
            self.own = self.format.of(k, v)
            for route in plan.routes[: plan.ahead]:
                self._fetch(route)

    def _fetch(self, route: Route) -> None:
        rows = route.rows.take(self.own, 0)
        self.pending.append(self.axis.all_to_all_rows(rows, route.sent, route.received))

    def stages(self) -> Iterator[tuple[Route, Tensor]]:
        """The rows of each stage. Those of the next ones are on their way when a stage is yielded."""
        routes, ahead = self.plan.routes, self.plan.ahead
        for stage, route in enumerate(routes):
            rows = self.pending.popleft().wait()
            if stage + ahead < len(routes):
                self._fetch(routes[stage + ahead])
            yield route, rows

    def __iter__(self) -> Iterator[Pair]:
        yield self.local
        for _, rows in self.stages():
            yield self.format.pair(rows)
        yield self.local


class NeededBackward:
    """The rows are fetched again; their gradients return to the ranks that hold them.

    Yields ``(k, v, dk, dv)`` like :class:`RingBackward`. The gradients of the last stages travel while the local block
    is attended for the second time. A rank adds what returns in the order of stages and of ranks: the same bits every
    time.
    """

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, plan: Schedule, dtype: torch.dtype) -> None:
        self.axis, self.dtype, self.ahead = axis, dtype, plan.ahead
        self.blocks = NeededForward(axis, k, v, plan)
        self.total = k.new_zeros(k.shape[2], sum(self.blocks.format.widths), dtype=dtype)
        self.home = self.blocks.format.pair(self.total)
        self.returning: deque[tuple[Route, Pending]] = deque()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        pair = self.blocks.format.pair
        yield *self.blocks.local, *self.home
        for route, rows in self.blocks.stages():
            gradients = torch.zeros_like(rows, dtype=self.dtype)
            yield *pair(rows), *pair(gradients)
            if len(self.returning) == self.ahead:
                self._add()
            self.returning.append((route, self.axis.all_to_all_rows(gradients, route.received, route.sent)))
        yield *self.blocks.local, *self.home
        while self.returning:
            self._add()
        # The op returns both. Where a rank has one row or none, they would be taken as contiguous and not be copied.
        if len(self.total) < 2 or not self.total.numel():
            self.home = self.home[0].clone(), self.home[1].clone()

    def _add(self) -> None:
        """Add the gradients that were sent home first, when they have arrived."""
        route, pending = self.returning.popleft()
        index = route.rows.index(self.total.device)
        # One rank at a time, since several may return a gradient of the same row.
        for where, rows in zip(index.split(route.sent), pending.wait().split(route.sent), strict=True):
            if len(where):
                self.total.index_add_(0, where, rows)
