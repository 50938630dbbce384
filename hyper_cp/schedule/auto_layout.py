"""Which layout balances packed documents: the report, and the choice of "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..mesh.cp_mesh import CPMesh
from . import build as schedule
from . import layout as layouts
from . import masks
from .documents import documents_table, read
from .layout import Documents
from .tiles import CAUSAL, Band, Tile

# Kernels work in blocks of about so many rows and columns: a smaller tile takes as long as a whole block.
_BLOCK = 128


@dataclass(frozen=True)
class Balance:
    """How even a layout makes the work of the ranks. ``pairs``: visible (query, key) pairs that each rank
    computes; ``blocks``: in blocks of 128 x 128, which small tiles fill badly; ``tiles``: how many it runs."""

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
    table = documents_table([0, length] if documents is None else documents)
    borders = None if table is None else _one_row(table, length)
    if borders is None:
        raise ValueError("documents differ between batch rows: ask for the balance of each row")
    band = masks.band_of(is_causal, masks.check_window(window))
    names = [n for n in layouts.LAYOUTS if n != "auto" and length % layouts.length_multiple(n, ranks) == 0]
    return {name: _balance(name, length, ranks, borders, band) for name in names}


@lru_cache(maxsize=64)
def _balance(layout: str, length: int, ranks: int, documents: Documents, band: Band) -> Balance:
    held = tuple(layouts.rank_ranges(layout, r, ranks, length, documents) for r in range(ranks))
    plans = [schedule.build(held, held, r, "ring", False, band, (documents,)) for r in range(ranks)]
    tiles = [[t for step in plan.forward for tile in step.tiles for t in tile.rectangles] for plan in plans]
    return Balance(
        tuple(plan.area for plan in plans),
        tuple(sum(map(_blocks, mine)) for mine in tiles),
        tuple(map(len, tiles)),
    )


def _blocks(tile: Tile) -> int:
    rows, cols = (-(-(b - a) // _BLOCK) for a, b in (tile.q, tile.k))
    return rows * (rows + 1) // 2 if tile.kind == "causal" else rows * cols


def held_ranges(
    cp: CPMesh, layout: str, ring_rank: int, length: int, documents: Documents | None = None
) -> tuple[layouts.Range, ...]:
    """Global positions that one ring rank holds, of ``length`` in all: what its Ulysses ranks have brought together.
    ``layout`` and ``documents``: as :func:`resolve` gives them."""
    return layouts.union_ranges(layout, cp.ulysses_peers(ring_rank), cp.size, length, documents)


def resolve(layout: str, world: int, length: int, documents: Tensor | None) -> tuple[str, Documents | None]:
    """The layout to use, "auto" decided, and the documents that it depends on (None: on none).

    A pure function of its arguments: data and attention come to the same answer on every rank.
    """
    if layout not in layouts.BY_DOCUMENTS or world == 1:
        return ("contiguous" if world == 1 else layout), None
    if documents is None:
        raise ValueError(
            f"layout={layout!r} places tokens by document, but no documents are given: enter handler.documents(...) "
            "around dispatch, forward and combine, or pass documents= ([0, S] for one document)"
        )
    borders = _one_row(documents, length)
    if layout == "per_document" and borders is None:
        raise ValueError(
            f"layout='per_document' needs the same documents in every batch row, but the {len(documents)} rows "
            "differ: pack one sequence per batch, or use layout='head_tail'"
        )
    if layout == "auto":
        layout = "head_tail" if borders is None else _better(length, world, borders)
    return (layout, borders) if layout == "per_document" else (layout, None)


@lru_cache(maxsize=256)
def _better(length: int, world: int, documents: Documents) -> str:
    """The layout whose fullest rank has less to do under a causal mask."""
    blocks = {n: max(_balance(n, length, world, documents, CAUSAL).blocks) for n in ("head_tail", "per_document")}
    return min(blocks, key=lambda name: blocks[name])


def _one_row(documents: Tensor, length: int) -> Documents | None:
    """The boundaries that all batch rows share, else None."""
    found = read(documents)
    found.check_length(length)
    return found.one_row
