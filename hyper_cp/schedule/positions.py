"""Names of before, for the batch side: see ``lookup.resolve`` and ``documents.read``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .documents import PackedDocuments, read
from .layout import Range
from .lookup import resolve

Rows = Sequence[Sequence[int]]
"""Boundaries of documents, ascending from 0 to S: one row for all of a batch, or one each."""


def held(layout: str, world: int, length: int, documents: Tensor | None = None) -> tuple[tuple[Range, ...], ...]:
    """Use ``lookup.resolve(layout, world, length, documents.read(table)).held``."""
    return resolve(layout, world, length, read(documents)).held


def positions(ranges: Sequence[Range]) -> Tensor:
    """The positions of ranges, in order: ``[n]`` int64. Use ``lookup.resolve(...).positions(rank)``."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def restarted(at: Tensor, rows: Rows) -> Tensor:
    """Use ``documents.read(table).restarted(at)``."""
    return PackedDocuments([list(row) for row in rows]).restarted(at)
