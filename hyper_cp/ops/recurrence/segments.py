"""The segments of one rank: its held ranges, cut at documents and into pieces that a kernel takes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...schedule.documents import PackedDocuments
from ...schedule.layout import ResolvedLayout
from ...schedule.lookup import resolve
from ...schedule.ranges import Numbers, Ranges, Rows, before, bounds, pinned


@dataclass(frozen=True, eq=False)
class Segments:
    """The pieces of a rank in local order, and the held ranges of all ranks in global order.

    A piece lies in one held range and, in every batch row, in one document; it is filled up to ``size`` with zeros.
    """

    size: int
    split_rows: Rows
    """The tokens of all pieces, of a share with ``size`` rows of zeros behind it."""
    join_rows: Rows
    """The inverse: the places of the share's tokens among the pieces."""
    first: tuple[int, ...]
    """The piece with which each held range of this rank begins, and the number of pieces."""
    order: tuple[tuple[int, int], ...]
    """All held ranges in global order: the rank, and the number of the range among those of the rank."""
    most: int
    """The most ranges that a rank holds."""
    starts: Tensor
    """The position with which each piece begins."""
    carries: Tensor | None
    """``[pieces, rows]``: False where a piece begins a document, so that no state enters it. None: no documents."""

    @property
    def nbytes(self) -> int:
        """An estimate of the bytes of memory, with what is usually derived from it."""
        return 100 * self.first[-1] + 32 * len(self.order) + 16 * self.join_rows.length

    def split(self, x: Tensor) -> Tensor:
        """``[B, S, H, ...] -> [pieces, B, H, size, ...]``."""
        whole = self.first[-1] * self.size == x.shape[1]
        padded = x if whole else F.pad(x, (0, 0) * (x.ndim - 2) + (0, self.size))
        return self.split_rows.take(padded, 1).unflatten(1, (-1, self.size)).movedim(1, 0).movedim(2, 3)

    def join(self, x: Tensor) -> Tensor:
        """The inverse, without what was filled up."""
        return self.join_rows.take(x.movedim(3, 2).movedim(0, 1).flatten(1, 2), 1)

    def entering(self, like: Tensor) -> Tensor | None:
        """``carries`` as factors ``[pieces, rows, 1, 1, 1]`` of the dtype and on the device of a tensor."""
        return None if self.carries is None else self._of_pieces(self.carries, like)

    def before(self, ends: Sequence[int], like: Tensor) -> Tensor:
        """Factors of the same form: 1 for pieces that begin before the end of a row (or of all rows), 0 for others."""
        return self._of_pieces(self.starts[:, None] < torch.tensor(ends, device="cpu"), like)

    def _of_pieces(self, found: Tensor, like: Tensor) -> Tensor:
        host = found[:, :, None, None, None]
        if like.device.type == "cpu":
            return host.to(like.dtype)
        return pinned(host).to(like.device, non_blocking=True).to(like.dtype)


def segments(
    layout: str, rank: int, world: int, degree: int, length: int, size: int, documents: PackedDocuments | None
) -> Segments:
    """The segments of one of ``world`` ranks, each of which holds what ``degree`` ranks of the mesh hold together.

    Args:
        length: the global sequence length.
        size: the most tokens of a piece.
    """
    if documents is None:
        return _without_documents(layout, rank, world, degree, length, size)
    key = "segments", layout, rank, world, degree, length, size

    def make() -> Segments:
        documents.check_length(length)
        return _built(resolve(layout, world * degree, length, documents).by_ring(degree), rank, size, documents)

    return documents.derived(key, make)


@lru_cache(maxsize=64)
def _without_documents(layout: str, rank: int, world: int, degree: int, length: int, size: int) -> Segments:
    return _built(resolve(layout, world * degree, length).by_ring(degree), rank, size, None)


def _built(layout: ResolvedLayout, rank: int, most: int, documents: PackedDocuments | None) -> Segments:
    held = bounds(layout.ranges(rank))
    begins = np.unique(np.concatenate([np.array(row) for row in documents.rows])) if documents else np.empty(0, int)
    parts = [np.concatenate(([a], begins[(a < begins) & (begins < b)], [b])) for a, b in held]
    starts = np.concatenate([edges[:-1] for edges in parts])
    lengths = np.concatenate([np.diff(edges) for edges in parts])
    size = min(most, int(lengths.max()))
    counts = -(-lengths // size)
    number = np.arange(counts.sum()) - np.repeat(before(counts), counts)  # of a piece within its part
    at = np.repeat(starts, counts) + number * size
    sizes = np.minimum(size, np.repeat(starts + lengths, counts) - at)
    parts_of_range = np.repeat(np.arange(len(held)), [len(edges) - 1 for edges in parts])
    first = np.searchsorted(np.repeat(parts_of_range, counts), np.arange(len(held) + 1))
    owners = layout.pieces(range(layout.world))[:, 0]
    held_by = np.bincount(owners, minlength=layout.world)
    numbers = np.empty_like(owners)  # a rank's ranges ascend
    numbers[np.argsort(owners, kind="stable")] = np.arange(len(owners)) - np.repeat(before(held_by), held_by)
    return Segments(
        size,
        _filled(sizes, size),
        Rows(Ranges(np.stack((np.arange(len(sizes)) * size, np.arange(len(sizes)) * size + sizes), 1))),
        tuple(first.tolist()),
        tuple(zip(owners.tolist(), numbers.tolist(), strict=True)),
        int(held_by.max()),
        torch.from_numpy(at),
        None if documents is None else torch.from_numpy(_carries(documents, at)),
    )


def _filled(sizes: Numbers, size: int) -> Rows:
    """The rows of all pieces, each followed by as many rows of zeros, which lie behind the share, as fill it up."""
    local, zeros = before(sizes), np.full_like(sizes, sizes.sum())
    pairs = np.stack((local, local + sizes, zeros, zeros + size - sizes), 1).reshape(-1, 2)
    return Rows(Ranges(pairs[pairs[:, 0] < pairs[:, 1]]))


def _carries(documents: PackedDocuments, at: Numbers) -> np.ndarray:
    return np.stack([~np.isin(at, np.array(row)) for row in documents.rows], 1)
