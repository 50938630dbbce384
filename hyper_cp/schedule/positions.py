"""Index arithmetic of the batch side, as CPU tensors: positions of tokens, and the documents they are in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import auto_layout as placement
from . import layout as layouts
from .layout import Range

Rows = Sequence[Sequence[int]]
"""Borders of documents, ascending from 0 to S: one row for all of a batch, or one each."""


def held(layout: str, world: int, length: int, documents: Tensor | None = None) -> tuple[tuple[Range, ...], ...]:
    """Global positions that every rank holds, in its local order.

    What the batch side asks a layout, and asked only here. ``documents`` is the table of the batch, for layouts in
    which positions depend on it.
    """
    layout, borders = placement.resolve(layout, world, length, documents)
    return tuple(layouts.rank_ranges(layout, rank, world, length, borders) for rank in range(world))


def positions(ranges: Sequence[Range]) -> Tensor:
    """The positions of ranges, in order: ``[n]`` int64."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def document_numbers(at: Tensor, rows: Rows) -> Tensor:
    """The number of the document that each position ``at [n]`` is in, per row: ``[rows, n]``; 0 before the first
    position of the sequence, and a number of its own behind the last."""
    return torch.stack([torch.searchsorted(_borders(row), at, right=True) for row in rows])


def restarted(at: Tensor, rows: Rows) -> Tensor:
    """Positions within their documents: ``[n] -> [rows, n]``."""
    starts = [_borders(row)[torch.searchsorted(_borders(row), at, right=True) - 1] for row in rows]
    return at - torch.stack(starts)


def _borders(row: Sequence[int]) -> Tensor:
    return torch.tensor(tuple(dict.fromkeys(row)))  # without empty documents
