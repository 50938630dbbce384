"""The placement of tokens in layouts that depend on documents, and what every layout gives to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import build as schedule
from . import layout as layouts
from .arrivals import Problem, arrivals
from .deal import dealt
from .documents import PackedDocuments, documents_table, read
from .layout import ResolvedLayout, window_of
from .pairs import ALL_GATHER, cost
from .tiles import CAUSAL, Band, band_of, check_window


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
        return cost(layout.held, documents.rows, CAUSAL).total

    placed = [ResolvedLayout.of(name, world, length) for name in ("contiguous", "head_tail")]
    placed.append(place("balanced", world, length, documents))
    best = min(placed, key=of)
    # Where every document lies on every rank, at least half of an all-gather is needed: mostly that need not be placed.
    if documents.one_row is None or of(best) <= 1 + 0.5 * ALL_GATHER:
        return best
    return min(best, place("per_document", world, length, documents), key=of)


# --------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Balance:
    """The work that a layout gives to each rank, and what has to travel.

    Attributes:
        pairs: visible (query, key) pairs that it computes.
        blocks: these in blocks of 128 x 128, which small tiles fill badly.
        tiles: the number of tiles that it runs.
        rows: positions of keys and values that it receives with ``kv_exchange="needed"``.
        hops: of a ring (the same on all ranks), each of which moves the keys and values of a whole rank.
        length: the global sequence length.
    """

    pairs: tuple[int, ...]
    blocks: tuple[int, ...]
    tiles: tuple[int, ...]
    rows: tuple[int, ...]
    hops: int
    length: int

    @property
    def ratio(self) -> float:
        """The fullest rank's pairs over the mean: 1 is perfect."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))

    @property
    def share(self) -> float:
        """The rows that ``kv_exchange="needed"`` moves as a share of those that an all-gather moves. (A ring moves
        ``hops / (ranks - 1)`` of these.)"""
        return sum(self.rows) / max(1, self.length * (len(self.rows) - 1))


def balance(
    length: int, ranks: int, documents: Any = None, *, is_causal: bool = True, window: Any = None
) -> dict[str, Balance]:
    """The balance that each sequence layout gives, from the schedule alone: no tensors, no communication.

    Args:
        length: the global sequence length S, which splits over ``ranks`` in every layout that is reported.
        ranks: of the ring dimension (Ulysses balances by itself).
        documents: cumulative lengths ``[0, ..., S]``; None: one document.
        is_causal: causal attention within documents.
        window: ``(left, right)``, in positions, as in :class:`hyper_cp.ContextParallel`.

    Returns:
        ``{layout: Balance}`` for ``"contiguous"``, ``"head_tail"``, ``"per_document"`` and ``"balanced"``, and under a
        window of, say, 4096 for ``"balanced_4096"``.

    Raises:
        ValueError: for documents that do not fit the length or that differ between batch rows.

    Example::

        >>> found = balance(4096, 4)
        >>> round(found["contiguous"].ratio, 2), round(found["head_tail"].ratio, 2)
        (1.75, 1.0)
    """
    for name, value in (("length", length), ("ranks", ranks)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**48:
            raise ValueError(
                f"{name}={value!r} must be a positive int. Pass the global length and the ranks of the ring"
            )
    packed = read(documents_table([0, length] if documents is None else documents))
    if packed is None or packed.one_row is None:
        raise ValueError("documents differ between batch rows: ask for the balance of each row")
    packed.check_length(length)
    lower, upper = band_of(is_causal, check_window(window))
    names = [n for n in layouts.LAYOUTS if n != "auto" and length % layouts.length_multiple(n, ranks) == 0]
    names += [f"balanced_{-lower}"] if lower and "balanced" in names else []
    return {name: _balance(name, length, ranks, packed, (lower, upper)) for name in names}


def _balance(layout: str, length: int, ranks: int, documents: PackedDocuments, band: Band) -> Balance:
    """The balance of documents that all batch rows share."""
    return documents.derived(
        ("balance", layout, ranks, band), lambda: _measured(layout, length, ranks, documents, band)
    )


def _measured(layout: str, length: int, ranks: int, documents: PackedDocuments, band: Band) -> Balance:
    by_documents = layouts.by_documents(layout)
    resolved = place(layout, ranks, length, documents) if by_documents else ResolvedLayout.of(layout, ranks, length)
    held, rows = resolved.held, documents.rows
    whole = (((0, length),),) * ranks  # where keys come from changes nothing of the work, but takes time to find out
    plans = [schedule.build(held, whole, r, "replicated", False, band, rows, parts=False) for r in range(ranks)]
    tiles = [[t for step in plan.forward for tile in step.tiles for t in tile.rectangles] for plan in plans]
    counted = cost(held, rows, band)
    return Balance(
        tuple(map(int, counted.pairs)),
        tuple(sum(tile.blocks for tile in mine) for mine in tiles),
        tuple(map(len, tiles)),
        tuple(map(int, counted.rows)),
        arrivals("ring", Problem(0, held, held, band, rows)).transfers.hops,
        length,
    )
