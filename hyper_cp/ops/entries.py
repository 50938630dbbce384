"""Pooled keys as a second source of keys, whose tiles merge with those of tokens: one softmax, with the sinks once.

All ranks have all entries, so nothing travels here. Which of them a query sees follows from its position: no mask of
queries and entries exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..schedule.ranges import Range, length_of
from ..schedule.tiles import FULL, Tile
from ..schedule.windows import tiles_of_entries
from . import kernels
from .kernels.inputs import TileInputs
from .kernels.partials import RowSum, part
from .kernels.selected import TileSelection


@dataclass(frozen=True)
class Entries:
    """Pooled keys and values of the whole sequence, the same on every rank, for ``attention(..., entries=)``.

    Entry j ends with the token at position ``(j + 1) * every - 1``: queries from there on see it.

    Args:
        k, v: ``[B, Hkv, E, D]`` and ``[B, Hkv, E, Dv]``, as :func:`hyper_cp.ops.gather_windows` returns them. Their
            rotary embedding is applied already.
        every: the number of tokens from one entry to the next.
        selected: the only entries that each of this rank's queries sees, ``[B, 1 or Hkv, S/n, k]``, int32 or int64,
            each once; -1 is none. None: a query sees all that end before it or at it.

    Source: compressed attention of DeepSeek-V4, as transformers has it.
    """

    k: Tensor
    v: Tensor
    every: int
    selected: Tensor | None = None


class EntryTiles:
    """The tiles of a rank's queries over entries, and in backward the sums of the gradients of these.

    Args:
        q: the queries, for their shape and dtype.
        keys, values, selected: those of :class:`Entries`.
        queries: the global positions of the queries that this rank attends.
    """

    def __init__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        selected: Tensor | None,
        queries: Sequence[Range],
        every: int,
        scale: float,
    ) -> None:
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        self.keys, self.values, self.selected, self.every, self.scale = keys, values, selected, every, scale
        self.queries, self.sums = queries, (RowSum(keys), RowSum(values))
        name = kernels.choose(q, keys, values, False, selected=selected is not None)
        self.kernel = kernels.get(name, q.device.type)
        kernels.check(self.kernel, selected is None, FULL)

    def tiles(self) -> Iterator[tuple[Tile, Callable[[Tensor], TileInputs]]]:
        """Each tile, and what makes its inputs of its queries."""
        number = self.keys.shape[2]
        if self.selected is None:
            for tile, position in tiles_of_entries(self.queries, self.every, number):
                yield tile, partial(self._inputs, tile, position)
        else:
            yield (tile := Tile((0, length_of(self.queries)), (0, number))), partial(self._listed, tile)

    def _inputs(self, tile: Tile, position: int | None, q: Tensor) -> TileInputs:
        """The inputs of a tile whose first query is at ``position``; None: all its queries see all its entries."""
        mask = None
        if position is not None:
            rows = torch.arange(position + 1, position + 1 + q.shape[2], device=q.device)
            mask = torch.arange(*tile.k, device=q.device) < (rows // self.every).unsqueeze(1)
            mask = mask[None, None]
        keys, values = part(self.keys, tile.k), part(self.values, tile.k)
        return TileInputs(q, keys, values, FULL, self.scale, mask, recurring=False)

    def _listed(self, tile: Tile, q: Tensor) -> TileInputs:
        """The inputs of the tile of all queries, of which each sees what it has selected and is complete."""
        assert self.selected is not None  # for mypy: `tiles` asks for it
        positions = torch.cat([torch.arange(start + 1, stop + 1, device="cpu") for start, stop in self.queries])
        complete = (positions // self.every).to(q.device).unsqueeze(1)
        listed = self.selected.masked_fill(self.selected >= complete, -1)
        ranges = torch.tensor([[0], [tile.k[1]], [0]], dtype=listed.dtype, device=listed.device)
        chosen = TileSelection(listed, ranges, tile.k)
        return TileInputs(q, self.keys, self.values, FULL, self.scale, selected=chosen, recurring=False)

    def add(self, tile: Tile, *gradients: Tensor) -> None:
        """Add the gradients of a tile's keys and values."""
        for total, x in zip(self.sums, gradients, strict=True):
            total.add(tile.k, tile.batch, x)

    @property
    def gradients(self) -> list[Tensor]:
        """Those of keys and of values, from this rank's queries."""
        return [total.total() for total in self.sums]
