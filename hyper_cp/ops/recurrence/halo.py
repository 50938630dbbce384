"""The rows of other ranks that lie around what a rank holds, and which of them are in another document."""

from __future__ import annotations

import torch
from torch import Tensor

from ...mesh import cp_mesh
from ...schedule.documents import read
from ...schedule.lookup import resolve
from ...schedule.ranges import Rows, placed
from ..exchange.held_rows import fetch, give_back, rows_plan


class Halo:
    """The rows ``before`` and ``after`` each range of positions that this rank holds.

    Args:
        share: the number of positions that a rank holds.

    Attributes:
        positions: the global ones of this rank, ``[S/n]`` on the CPU, as ``index``.
        index: their places among the fetched rows.
    """

    def __init__(self, share: int, documents: Tensor | None, mesh: str, layout: str, before: int, after: int) -> None:
        self.cp, self.packed, self.share = cp_mesh.by_key(mesh), read(documents), share
        resolved, rank = resolve(layout, self.cp.size, share * self.cp.size, self.packed), self.cp.rank
        self.plan, self.positions = rows_plan(resolved, rank, before, after), resolved.positions(rank)
        self.ranges = [
            (at + i * (before + after) + before, at + i * (before + after) + before + stop - start)
            for i, (at, start, stop) in enumerate(placed(resolved.ranges(rank)).tolist())
        ]
        self.cp.batch.record_call(share, layout, self.cp.size)

    @property
    def index(self) -> Tensor:
        return Rows(self.ranges).index(torch.device("cpu"))

    @property
    def fetched(self) -> int:
        """The number of fetched rows."""
        return sum(stop - start for _, start, stop in self.plan.parts)

    def fetch(self, x: Tensor) -> Tensor:
        """The rows of all ranks' shares ``[S/n, ...]``."""
        return fetch(x, self.plan, self.cp.flat, self.cp.rank)

    def give_back(self, gradients: Tensor) -> Tensor:
        """The transpose of :meth:`fetch`: sums ``[S/n, ...]`` of what all ranks have for this rank's rows."""
        return give_back(gradients, self.plan, self.cp.flat, self.cp.rank, self.share)

    def hidden(self, positions: Tensor, shifts: Tensor) -> Tensor:
        """True where ``positions - shifts`` is before the sequence, or in another document than the position,
        ``[len(positions), len(shifts), rows of documents or 1]``. (Behind the sequence counts as another document.)"""
        there = positions[:, None] - shifts
        outside = (there < 0).unsqueeze(2)
        if self.packed is None:
            return outside
        found = self.packed.numbers(there.flatten()).view(-1, *there.shape) != self.packed.numbers(positions)[..., None]
        return outside | found.movedim(0, 2)

    def shifted(self, rows: Tensor, shift: int) -> Tensor:
        """The rows at p - shift for every held position p, of fetched ones ``[*, B, C]``; zero in another document."""
        found = Rows([(a - shift, b - shift) for a, b in self.ranges]).take(rows, 0)
        if self.packed is None or shift == 0:
            return found
        hidden = self.hidden(self.positions, torch.tensor([shift], device="cpu"))[:, 0]
        return found.masked_fill(hidden.to(found.device)[..., None], 0)
