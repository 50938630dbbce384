"""Masks at the grain of blocks, as FlexAttention lists them: which keys to obtain and which tiles to skip."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .derived import Owner
from .ranges import Numbers, Range, bounds, touching


class BlockMap(Owner):
    """The blocks of keys that the queries of each block may see, in any head and batch row. Equal maps are one object.

    Attributes:
        listed: ``[R, C]``, True where a block is listed.
        size: queries and keys of a block.
        digest: 64 bits that stand for both, the same in every process.
    """

    def __init__(self, listed: npt.NDArray[np.bool_], size: tuple[int, int]) -> None:
        super().__init__()
        self.listed, self.size = listed, size
        packed = np.packbits(listed).tobytes()
        self.digest = int.from_bytes(
            hashlib.blake2b(packed + repr((listed.shape, size)).encode(), digest_size=8).digest(), "big"
        )

    def trimmed(self, queries: Range, keys: Range) -> tuple[Range, Range] | None:
        """The smallest rectangle that has all listed blocks of a rectangle of global positions; None if none is."""
        (q0, q1), (k0, k1), (rows, cols) = queries, keys, self.size
        row, col = q0 // rows, k0 // cols
        part = self.listed[row : -(-q1 // rows), col : -(-k1 // cols)]
        some_rows, some_cols = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
        if not len(some_rows):
            return None
        return (
            (max(q0, (row + int(some_rows[0])) * rows), min(q1, (row + int(some_rows[-1]) + 1) * rows)),
            (max(k0, (col + int(some_cols[0])) * cols), min(k1, (col + int(some_cols[-1]) + 1) * cols)),
        )

    def keys_of(self, queries: Sequence[Range]) -> Numbers:
        """Ascending global ranges ``[n, 2]`` of the keys in blocks that any of the queries sees."""
        rows, cols = self.size
        seen = np.zeros(self.listed.shape[1], dtype=bool)
        for start, stop in bounds(queries).tolist():
            seen |= self.listed[start // rows : -(-stop // rows)].any(0)
        at = np.flatnonzero(seen).astype(np.int64)
        return touching(np.stack((at * cols, (at + 1) * cols), 1))

    def work(self, queries: Sequence[Range]) -> float:
        """The number of pairs in listed blocks of these queries."""
        before = np.concatenate(([0], np.cumsum(self.listed.sum(1)))) * self.size[0] * self.size[1]
        ends = np.arange(len(before)) * self.size[0]
        low, high = bounds(queries).T
        return float((np.interp(high, ends, before) - np.interp(low, ends, before)).sum())


@lru_cache(maxsize=16)
def _block_map(packed: bytes, shape: tuple[int, int], size: tuple[int, int]) -> BlockMap:
    count = shape[0] * shape[1]
    listed = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool).reshape(shape)
    return BlockMap(listed, size)


def block_map(listed: npt.NDArray[np.bool_], size: tuple[int, int]) -> BlockMap:
    """The map of these blocks."""
    rows, cols = listed.shape
    return _block_map(np.packbits(listed).tobytes(), (rows, cols), size)
