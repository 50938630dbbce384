"""The positions of every rank in the layouts that depend on documents."""

from __future__ import annotations

from ..documents import PackedDocuments
from ..layout import ResolvedLayout, window_of
from .balanced import dealt
from .cost import ALL_GATHER, cost


def place(layout: str, world: int, length: int, documents: PackedDocuments) -> ResolvedLayout:
    """Place the tokens of documents, with ``"auto"`` decided.

    A pure function of its arguments: data and attention come to the same answer on every rank. It is found through
    :func:`lookup.resolve`, which calls it once.
    """
    documents.check_length(length)
    if layout == "auto":
        return _cheapest(world, length, documents)
    if layout == "per_document":
        if documents.one_row is None:
            raise ValueError(
                f"layout='per_document' needs the same documents in every batch row, but the {len(documents.rows)} "
                "rows differ: pack one sequence per batch, or use layout='balanced'"
            )
        return ResolvedLayout.of(layout, world, length, documents.one_row)
    return ResolvedLayout(layout, dealt(length, world, documents.rows, window_of(layout)))


def _cheapest(world: int, length: int, documents: PackedDocuments) -> ResolvedLayout:
    """The layout that costs least under a causal mask; of equals the simplest."""

    def of(layout: ResolvedLayout) -> float:
        return cost(layout.held, documents.rows, None).total

    placed = [ResolvedLayout.of(name, world, length) for name in ("contiguous", "head_tail")]
    placed.append(place("balanced", world, length, documents))
    best = min(placed, key=of)
    # Where every document lies on every rank, at least half of an all-gather is needed: mostly that need not be placed.
    if documents.one_row is None or of(best) <= 1 + 0.5 * ALL_GATHER:
        return best
    return min(best, place("per_document", world, length, documents), key=of)
