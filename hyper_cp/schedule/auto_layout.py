"""The balance that layouts give to packed documents: the report of it, and the choice of "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import build as schedule
from . import layout as layouts
from .documents import PackedDocuments, documents_table, read
from .ranges import Documents
from .tiles import CAUSAL, Band, Tile, band_of, check_window

# Kernels work in blocks of about so many rows and columns: a smaller tile takes as long as a whole block.
_BLOCK = 128


@dataclass(frozen=True)
class Balance:
    """The work that a layout gives to each rank.

    Attributes:
        pairs: visible (query, key) pairs that it computes.
        blocks: these in blocks of 128 x 128, which small tiles fill badly.
        tiles: the number of tiles that it runs.
    """

    pairs: tuple[int, ...]
    blocks: tuple[int, ...]
    tiles: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The fullest rank's pairs over the mean: 1 is perfect."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))


def balance(
    length: int, ranks: int, documents: Any = None, *, is_causal: bool = True, window: Any = None
) -> dict[str, Balance]:
    """The balance that each sequence layout gives, from the schedule alone: no tensors, no communication.

    Args:
        length: the global sequence length S, which splits over ``ranks`` in every layout that is reported.
        ranks: of the ring dimension (Ulysses balances by itself).
        documents: cumulative lengths ``[0, ..., S]``; None: one document.

    Returns:
        ``{layout: Balance}`` for ``"contiguous"``, ``"head_tail"`` and ``"per_document"``.
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
    band = band_of(is_causal, check_window(window))
    names = [n for n in layouts.LAYOUTS if n != "auto" and length % layouts.length_multiple(n, ranks) == 0]
    return {name: _balance(name, length, ranks, packed, band) for name in names}


def _balance(layout: str, length: int, ranks: int, documents: PackedDocuments, band: Band) -> Balance:
    """The balance of documents that all batch rows share."""
    return documents.derived(
        ("balance", layout, ranks, band), lambda: _measured(layout, length, ranks, documents.rows, band)
    )


def _measured(layout: str, length: int, ranks: int, rows: tuple[Documents, ...], band: Band) -> Balance:
    held = layouts.ResolvedLayout.of(layout, ranks, length, rows[0]).held
    whole = (((0, length),),) * ranks  # where keys come from changes nothing of the work, but takes time to find out
    plans = [schedule.build(held, whole, r, "replicated", False, band, rows, parts=False) for r in range(ranks)]
    tiles = [[t for step in plan.forward for tile in step.tiles for t in tile.rectangles] for plan in plans]
    return Balance(
        tuple(plan.area for plan in plans),
        tuple(sum(map(_blocks, mine)) for mine in tiles),
        tuple(map(len, tiles)),
    )


def _blocks(tile: Tile) -> int:
    rows, cols = (-(-(b - a) // _BLOCK) for a, b in (tile.q, tile.k))
    return rows * (rows + 1) // 2 if tile.kind == "causal" else rows * cols


def better(length: int, world: int, documents: PackedDocuments) -> str:
    """The layout, of those that "auto" chooses from, whose fullest rank has less to do under a causal mask."""
    blocks = {n: max(_balance(n, length, world, documents, CAUSAL).blocks) for n in ("head_tail", "per_document")}
    return min(blocks, key=lambda name: blocks[name])
