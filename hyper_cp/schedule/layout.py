"""Sequence layouts: which global token positions each rank of a cp mesh holds, and in which order.

A layout belongs to the data. It knows nothing of attention, of process groups or of tensors
beyond index arithmetic. Everything is derived from one fact per layout: the chunks of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

Range = tuple[int, int]
"""A half-open range ``(start, stop)`` of token positions."""

Piece = tuple[int, int, int]
"""``(rank, start, stop)``: a range of the *local* positions of one rank."""

Documents = tuple[int, ...]
"""Borders of the documents packed into one sequence: ascending, from 0 to its length. Only
positions of the same document see each other."""

# name -> (chunks per rank, chunks held by rank r of n)
_CHUNKS = {
    "contiguous": (1, lambda rank, world: (rank,)),
    # Megatron, TransformerEngine and PyTorch call this "dual chunk", "zigzag" or head-tail.
    "head_tail": (2, lambda rank, world: (rank, 2 * world - 1 - rank)),
    # Every document by itself head-tail over the ranks: TransformerEngine's layout of packed sequences.
    "per_document": (1, lambda rank, world: (rank, 2 * world - 1 - rank)),
    # "head_tail" or "per_document", whichever balances the given documents better: see ``placement``.
    "auto": (2, lambda rank, world: (rank, 2 * world - 1 - rank)),
}

LAYOUTS = tuple(_CHUNKS)
BY_DOCUMENTS = ("per_document", "auto")
"""Layouts in which what a rank holds depends on the documents."""


def check_layout(layout: str) -> str:
    """Return ``layout`` if it is a known layout, else raise ``ValueError``."""
    if layout not in _CHUNKS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(map(repr, LAYOUTS))}")
    return layout


def length_multiple(layout: str, world: int) -> int:
    """The number that a global sequence length must be a multiple of."""
    return _CHUNKS[check_layout(layout)][0] * world


def check_length(layout: str, world: int, length: int, argument: str = "sequence length") -> None:
    """Raise ``ValueError`` unless ``length`` splits evenly over ``world`` ranks in ``layout``."""
    multiple = length_multiple(layout, world)
    if length <= 0 or length % multiple:
        lower, upper = length // multiple * multiple, -(-length // multiple) * multiple
        nearest = f"{lower} or {upper}" if lower else f"{max(upper, multiple)}"
        raise ValueError(
            f"{argument}={length} cannot be split over {world} ranks with layout={layout!r}: it must "
            f"be a positive multiple of {multiple} ({_CHUNKS[layout][0]} chunk(s) per rank). Pad or "
            f"cut the sequence to {nearest}"
        )


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges and join those that touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@lru_cache(maxsize=4096)
def rank_ranges(
    layout: str, rank: int, world: int, length: int, documents: Documents | None = None
) -> tuple[Range, ...]:
    """Global positions held by ``rank`` of ``world``, ascending, adjacent chunks joined.

    ``documents`` matters to ``"per_document"`` only, which needs it (``"auto"`` has been resolved here).
    """
    check_length(layout, world, length)
    if layout == "per_document":
        return _by_document(documents or (), world)[rank]
    chunk = length // length_multiple(layout, world)
    chunks = _CHUNKS[layout][1](rank, world)
    return merge_ranges((c * chunk, (c + 1) * chunk) for c in chunks)


@lru_cache(maxsize=256)
def _by_document(documents: Documents, world: int) -> tuple[tuple[Range, ...], ...]:
    """Every document head-tail over the ranks, of any length: what does not divide by ``2 * world`` is dealt out
    one token a rank, going on in the next document where the last one stopped, so that all ranks hold
    equally many in the end."""
    held: list[list[Range]] = [[] for _ in range(world)]
    dealt = 0
    for start, stop in pairwise(documents):
        base, rest = divmod(stop - start, 2 * world)
        extra = [0] * world  # of rank r: at most one for each of its chunks, as rest < 2 * world
        for i in range(dealt, dealt + rest):
            extra[i % world] += 1
        dealt += rest
        sizes = [base + (extra[r] > 0) for r in range(world)] + [base + (extra[r] > 1) for r in reversed(range(world))]
        for chunk, size in enumerate(sizes):
            if size:
                held[min(chunk, 2 * world - 1 - chunk)].append((start, start + size))
            start += size
    return tuple(map(merge_ranges, held))


@lru_cache(maxsize=1024)
def ascending_pieces(
    layout: str, ranks: range, world: int, length: int, documents: Documents | None = None
) -> tuple[Piece, ...]:
    """The chunks held by several ranks, in ascending global order.

    Returns pieces ``(index into ranks, local start, local stop)``.
    """
    found: list[tuple[int, Piece]] = []  # (global start, piece)
    for index, rank in enumerate(ranks):
        offset = 0
        for start, stop in rank_ranges(layout, rank, world, length, documents):
            found.append((start, (index, offset, offset + stop - start)))
            offset += stop - start
    return tuple(piece for _, piece in sorted(found))


def union_ranges(
    layout: str, ranks: range, world: int, length: int, documents: Documents | None = None
) -> tuple[Range, ...]:
    """Global positions held together by ``ranks``, ascending: what a ring rank has after the
    all-to-all has brought together the sequences of its Ulysses ranks."""
    return merge_ranges(r for rank in ranks for r in rank_ranges(layout, rank, world, length, documents))


def positions(layout: str, rank: int, world: int, length: int, documents: Documents | None = None) -> list[int]:
    """Global position of every local token of ``rank``, in local order."""
    return [p for start, stop in rank_ranges(layout, rank, world, length, documents) for p in range(start, stop)]
