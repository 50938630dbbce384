"""Windows with a stride, counted from the first token of each document: where they end, and which a query sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .documents import PackedDocuments
from .layout import ResolvedLayout
from .ranges import Range
from .tiles import Tile

ROWS = 1024
"""The queries of a tile over entries."""


def counted(positions: Tensor, documents: PackedDocuments | None) -> Tensor:
    """Positions ``[n]`` counted from the first of their document, ``[rows of documents or 1, n]``."""
    return positions.unsqueeze(0) if documents is None else documents.restarted(positions)


def window_ends(counted: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """The index of each position that ends a window, in order, ``[rows, m]``; and False where a row has fewer than the
    m of the row with the most."""
    ends = (counted + 1) % every == 0
    numbers = ends.sum(1)
    there = torch.arange(int(numbers.max()), device="cpu") < numbers.unsqueeze(1)
    found = torch.zeros_like(there, dtype=torch.int64)
    found[there] = ends.nonzero(as_tuple=True)[1]  # both in the order of rows
    return found, there


class Gathering(NamedTuple):
    """The windows of all ranks side by side, each rank's filled up to the most of any."""

    counts: list[int]
    """The number of windows of each rank, of its row with the most."""
    places: Tensor
    """The places of a row's windows in the order of the sequence, ``[rows, E]``; -1 where a row has fewer than E."""


def gathering(layout: ResolvedLayout, documents: PackedDocuments | None, every: int) -> Gathering:
    """The places of windows among those that the ranks gather. Made once for each layout and documents."""
    if documents is None:
        return layout.derived(("windows", every), lambda: _gathering(layout, None, every))
    return documents.derived(("windows", layout, every), lambda: _gathering(layout, documents, every))


def _gathering(layout: ResolvedLayout, documents: PackedDocuments | None, every: int) -> Gathering:
    positions = [layout.positions(rank) for rank in range(layout.world)]
    found = [window_ends(counted(at, documents), every) for at in positions]
    counts = [ends.shape[1] for ends, _ in found]
    rows = []
    for row in range(len(found[0][0])):
        ends = [at[ends[row][there[row]]] for at, (ends, there) in zip(positions, found, strict=True)]
        places = torch.cat([rank * max(counts) + torch.arange(len(x), device="cpu") for rank, x in enumerate(ends)])
        rows.append(places[torch.cat(ends).argsort()])
    return Gathering(counts, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1))


class SeenEntries(NamedTuple):
    """The entries that queries see, of which each window makes one, ``[rows, n]`` each: those of a query's document
    that are complete at the query or before it."""

    start: Tensor
    """The position of the first token of the query's document."""
    first: Tensor
    """The number of entries before that document."""
    complete: Tensor
    """The number of entries of that document that the query sees."""


def seen_entries(positions: Tensor, documents: PackedDocuments | None, every: int) -> SeenEntries:
    """The entries that queries at global positions ``[n]`` see."""
    count = counted(positions, documents)
    first = torch.zeros_like(count)
    if documents is not None:
        for row, boundaries in enumerate(documents.rows):
            bounds = torch.tensor(boundaries, device="cpu")
            before = torch.tensor([0, *(bounds.diff() // every).cumsum(0)], device="cpu")
            first[row] = before[torch.searchsorted(bounds, positions, right=True) - 1]
    return SeenEntries(positions - count, first, (count + 1) // every)


def tiles_of_entries(queries: Sequence[Range], every: int, number: int) -> Iterator[tuple[Tile, int | None]]:
    """The tiles of queries that see the first of ``number`` entries, those that end before the query or at it.

    Args:
        queries: their global positions, in the order of their rows.

    Yields:
        A tile and None, if all of its queries see all of its entries; or a tile in which query i sees entry j if ``(p +
        i + 1) // every > tile.k[0] + j``, and p, the position of its first query.
    """
    at = 0
    for start, stop in queries:
        for first in range(start, stop, ROWS):
            last = min(first + ROWS, stop)
            low, high = (min(position // every, number) for position in (first + 1, last))
            rows = at + first - start, at + last - start
            if low:
                yield Tile(rows, (0, low)), None
            if low < high:
                later = max(first, (low + 1) * every - 1)  # the first query that sees one more
                yield Tile((rows[0] + later - first, rows[1]), (low, high)), later
        at += stop - start
