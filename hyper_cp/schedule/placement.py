"""The placement of tokens in layouts that depend on documents, and what every layout gives to ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mesh.arguments import is_int
from . import build as schedule
from . import layout as layouts
from .arrivals import KeyDemand, arrivals
from .deal import dealt, fullest_first
from .documents import PackedDocuments, documents_table, read
from .layout import ResolvedLayout, window_of
from .pairs import ALL_GATHER, Floats, cost
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
        # Rows that differ share one placement: whatever lies between two boundaries of any row is dealt head-tail. A
        # document in several such pieces has equal work on all ranks too, since they hold equal parts of each piece.
        return ResolvedLayout.of(layout, world, length, tuple(sorted(set().union(*documents.rows))))
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


# --------------------------------------------------------------------------- layouts of masks


def layout_of_mask(mask: Any, *, chunks_per_rank: int = 8) -> str:
    """Register a layout in which all ranks have equal work under one mask, and return its name for ``layout=``.

    The sequence is cut into equal chunks, and the ranks get equal numbers of them, those whose queries see most keys
    first. Keys travel as in any layout. Make it for a mask that many batches share; for packed documents
    ``layout="balanced"`` needs none, and places them by what travels too.

    Args:
        mask: the mask of the whole sequence, the same on all ranks: a ``BlockMask`` (each listed block counts as
            visible), or booleans ``[..., S, S]``, True where a query (dimension -2) sees a key.
        chunks_per_rank: the number of chunks that each rank holds. More balance better, and make smaller tiles. S must
            be a multiple of this times the number of ranks.

    Returns:
        A name made of the mask's contents.

    Raises:
        TypeError, ValueError: for another mask, or one that hides everything.

    Example::

        >>> visible = torch.ones(64, 64, dtype=torch.bool).tril()
        >>> handler = ContextParallelHandler(mesh, layout_of_mask(visible))
        >>> handler.dispatch(torch.arange(64), 0).shape
        torch.Size([32])

    Source: round robin by processing time, as PyTorch's context parallelism of FlexAttention (``_PTRRLoadBalancer``).
    """
    if not is_int(chunks_per_rank, 1) or chunks_per_rank > 1024:
        raise ValueError(
            f"chunks_per_rank={chunks_per_rank!r} must be an int from 1 to 1024. It is the number of pieces of the "
            "sequence that each rank holds. Pass 8, say"
        )
    done = np.append(0.0, np.cumsum(_work_of_rows(mask)))
    if not done[-1]:
        raise ValueError("mask hides every pair. No rank would have work. Pass the mask that attention uses")
    name = f"mask_{hashlib.blake2b(done.tobytes(), digest_size=8).hexdigest()}_{chunks_per_rank}"

    @lru_cache(maxsize=8)
    def deal(world: int) -> list[list[int]]:
        ends = np.linspace(0, len(done) - 1, chunks_per_rank * world + 1)
        return fullest_first(np.diff(np.interp(ends, np.arange(len(done)), done)), world).tolist()

    if not layouts.is_registered(name):
        layouts.register(name, lambda rank, world: deal(world)[rank], chunks_per_rank, listed=False)
    return name


def _work_of_rows(mask: Any) -> Floats:
    """The visible pairs of each query, or the blocks of pairs of each block of queries, of all batch rows and heads."""
    blocks = [getattr(mask, name, None) for name in ("kv_num_blocks", "full_kv_num_blocks")]
    counts: Tensor
    if isinstance(blocks[0], Tensor):
        counts = blocks[0] if blocks[1] is None else blocks[0] + blocks[1]
    elif isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim > 1 and mask.shape[-1] == mask.shape[-2]:
        counts = mask.sum(-1)
    else:
        kind = f"{mask.dtype} tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask is a {kind}. It says which keys each query of the whole sequence sees. Pass a BlockMask, or "
            "booleans [..., S, S]"
        )
    found: Floats = counts.reshape(-1, counts.shape[-1]).sum(0).double().cpu().numpy()
    return found


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
        if not is_int(value, 1) or value >= 2**48:
            raise ValueError(
                f"{name}={value!r} must be a positive int. Pass the global length and the ranks of the ring"
            )
    packed = read(documents_table([0, length] if documents is None else documents))
    if packed is None or packed.one_row is None:
        raise ValueError("documents differ between batch rows. A balance is that of one row. Call balance for each row")
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
        arrivals("ring", KeyDemand(0, held, held, band, rows)).transfers.hops,
        length,
    )
