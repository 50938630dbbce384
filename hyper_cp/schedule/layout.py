"""Sequence layouts: the global token positions that each rank of a cp mesh holds, and their order.

A layout belongs to the data. It knows nothing of attention or of process groups. A layout by chunks is one function,
from a rank to the chunks that it holds; :func:`register` adds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mesh.arguments import check_choice
from .derived import Owner
from .ranges import Documents, Numbers, Range, Rows, before, bounds, compact, length_of, merge_ranges, placed, touching

# --------------------------------------------------------------------------- the layouts


@dataclass(frozen=True)
class _Layout:
    """The sequence is cut into ``chunks_per_rank * world`` equal chunks; a rank holds ``chunks(rank, world)``."""

    chunks_per_rank: int
    chunks: Callable[[int, int], Sequence[int]]


def _one_each(rank: int, world: int) -> tuple[int, ...]:
    return (rank,)


def _head_and_tail(rank: int, world: int) -> tuple[int, ...]:
    return (rank, 2 * world - 1 - rank)


_LAYOUTS = {
    "contiguous": _Layout(1, _one_each),
    # Megatron, TransformerEngine and PyTorch call this "dual chunk", "zigzag" or head-tail.
    "head_tail": _Layout(2, _head_and_tail),
    # Every document by itself head-tail over the ranks: TransformerEngine's layout of packed sequences. Its ranges
    # come from the documents (see _by_document); one token per rank is the smallest share.
    "per_document": _Layout(1, _one_each),
    # Chunks dealt by cost, at least two per rank; and the layout that costs least: see placement.
    "balanced": _Layout(2, _head_and_tail),
    "auto": _Layout(2, _head_and_tail),
}

LAYOUTS = _LAYOUTS.keys()
"""Names of all layouts, those registered later included."""
_UNLISTED: dict[str, _Layout] = {}
"""Layouts that are made for one mask: no list of choices has them."""
_BY_DOCUMENTS = ("per_document", "balanced", "auto")
_WINDOWED = re.compile("balanced_([1-9][0-9]{0,14})")
_NO_WINDOW = re.compile("balanced_0[0-9]*")


def window_of(layout: str) -> int | None:
    """The window that a layout is dealt for: 4096 for ``"balanced_4096"``, None for ``"balanced"``."""
    found = _WINDOWED.fullmatch(layout)
    return int(found[1]) if found else None


def by_documents(layout: str) -> bool:
    """True if what a rank holds depends on the documents."""
    return _family(layout) in _BY_DOCUMENTS


def places_by_cost(layout: str) -> bool:
    """True if chunks go to ranks by their cost, so that neighbours in a ring need not be neighbours in the sequence."""
    return _family(layout) in ("balanced", "auto")


def _family(layout: str) -> str:
    """The name without a window."""
    return layout if layout in _LAYOUTS or not _WINDOWED.fullmatch(layout) else "balanced"


def is_registered(layout: str) -> bool:
    """True for the name of a layout, with or without a window."""
    return _family(layout) in _LAYOUTS or layout in _UNLISTED


def _find(layout: str) -> _Layout:
    return _UNLISTED[layout] if layout in _UNLISTED else _LAYOUTS[_family(layout)]


def register(
    name: str, chunks: Callable[[int, int], Sequence[int]], chunks_per_rank: int = 1, *, listed: bool = True
) -> None:
    """Add a sequence layout, for every mode and for the batch side.

    Args:
        name: what users write as ``layout=``.
        chunks: ``chunks(rank, world)`` are the numbers of the chunks that a rank holds, for every ``world``. It holds
            them in ascending order.
        chunks_per_rank: the number of these chunks; the sequence has ``chunks_per_rank * world`` of equal length.
        listed: False for a layout that is made for one purpose: no list of choices has it.
    """
    check_name("layout", name)
    _check_window(name)
    layout = _Layout(chunks_per_rank, chunks)
    if is_registered(name) and _find(name) != layout:
        raise ValueError(
            f"layout={name!r} is registered already, with other chunks. Data and attention find a layout by its name. "
            "Choose another name"
        )
    for world in range(1, 9):  # others are checked when they are used
        _dealt(name, layout, world)
    (_LAYOUTS if listed else _UNLISTED)[name] = layout


def _dealt(name: str, layout: _Layout, world: int) -> list[Sequence[int]]:
    """The chunks of every rank, or ``ValueError`` if they are not all chunks once."""
    dealt, each = [layout.chunks(rank, world) for rank in range(world)], layout.chunks_per_rank
    if {len(c) for c in dealt} != {each} or {i for c in dealt for i in c} != set(range(each * world)):
        raise ValueError(
            f"layout={name!r} deals the chunks {dealt} to {world} ranks. Every rank must hold {each} of the chunks "
            f"0 to {each * world - 1}, and every chunk must have one rank. Change chunks or chunks_per_rank"
        )
    return dealt


def check_name(argument: str, name: str) -> None:
    """Raise ``ValueError`` unless ``name`` may be registered: ops receive names inside a text."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"{argument}={name!r} cannot be registered. Ops receive the name inside a text, so it must be an "
            "identifier. Use letters, digits and underscores"
        )


def _check_window(layout: Any) -> None:
    """Raise ``ValueError`` for ``"balanced_0"`` and numbers that are written in two ways."""
    if isinstance(layout, str) and _NO_WINDOW.fullmatch(layout):
        raise ValueError(
            f"layout={layout!r} does not name a window. balanced_N deals chunks for layers whose queries see N "
            "positions before their own, and N must be a number from 1 on, without leading zeros. Use the window of "
            "your layers, as in 'balanced_4096', or 'balanced' for layers without one"
        )


def check_layout(layout: str) -> str:
    """Return ``layout`` if it is a layout, else raise ``ValueError``."""
    if not isinstance(layout, str) or not is_registered(layout):
        _check_window(layout)
        more = ", or 'balanced_4096' if most attention has a window of 4096 (any number)"
        check_choice("layout", layout, LAYOUTS, "It names the positions that each rank holds", more)
    return layout


def chunks_per_rank(layout: str) -> int:
    """The number of chunks that each rank holds: its local length must be a multiple of it."""
    return _find(check_layout(layout)).chunks_per_rank


def length_multiple(layout: str, world: int) -> int:
    """The number that a global sequence length must be a multiple of."""
    return chunks_per_rank(layout) * world


def check_length(layout: str, world: int, length: int, argument: str = "sequence length") -> None:
    """Raise ``ValueError`` unless ``length`` splits evenly over ``world`` ranks in ``layout``."""
    multiple = length_multiple(layout, world)
    if length <= 0 or length % multiple:
        lower, upper = length // multiple * multiple, -(-length // multiple) * multiple
        nearest = f"{lower} or {upper}" if lower else f"{max(upper, multiple)}"
        raise ValueError(
            f"{argument}={length} cannot be split over {world} ranks with layout={layout!r}. It must be a positive "
            f"multiple of {multiple} ({chunks_per_rank(layout)} chunk(s) per rank). Pad or cut the sequence to "
            f"{nearest}"
        )


# --------------------------------------------------------------------------- the positions of every rank


class ResolvedLayout(Owner):
    """A layout for one number of ranks, one length and, if it depends on them, one set of documents.

    Global positions of every rank, each ascending, adjacent chunks joined. Get it from :func:`lookup.resolve`, which
    makes each of them once.

    Attributes:
        name: the layout, never ``"auto"``.
        held: the ranges of every rank, by rank.
        length: the global sequence length.
    """

    def __init__(self, name: str, held: tuple[Sequence[Range], ...]) -> None:
        super().__init__()
        self.name, self.held = name, held
        self.length = sum(map(length_of, held))

    @classmethod
    def of(cls, layout: str, world: int, length: int, documents: Documents | None = None) -> ResolvedLayout:
        """Place the tokens. ``documents`` matters to ``"per_document"`` only, which needs it."""
        check_length(layout, world, length)
        if layout == "per_document":
            return cls(layout, _by_document(documents or (0, length), world))
        chunk = length // length_multiple(layout, world)
        dealt = _dealt(layout, _find(layout), world)
        return cls(layout, tuple(merge_ranges((c * chunk, (c + 1) * chunk) for c in chunks) for chunks in dealt))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.held)

    @property
    def nbytes(self) -> int:
        """An estimate of the bytes of memory, with what is usually derived from it."""
        return 200 * sum(map(len, self.held)) + 16 * self.length // max(1, self.world)

    def ranges(self, rank: int) -> Sequence[Range]:
        """Global positions that ``rank`` holds, in its local order."""
        return self.held[rank]

    def union(self, ranks: Iterable[int]) -> Sequence[Range]:
        """Global positions that several ranks hold together, ascending."""
        together = np.concatenate([bounds(self.held[rank]) for rank in ranks])
        return compact(touching(together[np.argsort(together[:, 0])]))

    def positions(self, rank: int) -> Tensor:
        """The global position of every local token of ``rank``: ``[length / world]`` int64 on the CPU."""
        return Rows(self.held[rank]).index(torch.device("cpu"))

    def pieces(self, ranks: range) -> Numbers:
        """The ranges that several ranks hold, in ascending global order: ``(index into ranks, local start, stop)`` as
        an array ``[n, 3]``."""

        def make() -> Numbers:
            held = [placed(self.held[rank]) for rank in ranks]
            index = np.repeat(np.arange(len(held)), [len(x) for x in held])
            offset, start, stop = np.concatenate(held).T
            return np.stack((index, offset, offset + stop - start), 1)[np.argsort(start)]

        return self.derived(("pieces", ranks), make)

    def by_ring(self, ulysses: int) -> ResolvedLayout:
        """The same layout as ring ranks see it, each of which holds what ``ulysses`` adjacent cp ranks hold together:
        ``ranges``, ``pieces`` and ``positions`` are then those of ring ranks."""
        if ulysses == 1:
            return self
        blocks = (range(r, r + ulysses) for r in range(0, self.world, ulysses))
        return self.derived(("ring", ulysses), lambda: ResolvedLayout(self.name, tuple(map(self.union, blocks))))


def _by_document(documents: Documents, world: int) -> tuple[Sequence[Range], ...]:
    """Deal every document, of any length, head-tail over the ranks. The tokens that
    remain after a division by ``2 * world`` are dealt one to a rank. The next document continues with the following
    rank, so that in the end all ranks hold equally many tokens."""
    ends, ranks = np.asarray(documents, dtype=np.int64), np.arange(world)
    base, rest = (x[:, None] for x in np.divmod(np.diff(ends), 2 * world))
    dealt = before(rest[:, 0])[:, None]

    def dealt_to(first: Numbers) -> Numbers:  # numbers below `first` that each rank has if they are dealt in turn
        return (first - ranks + world - 1) // world

    extra = dealt_to(dealt + rest) - dealt_to(dealt)  # at most one for each of its chunks, as rest < 2 * world
    sizes = base + np.concatenate((extra > 0, (extra > 1)[:, ::-1]), 1)
    stops = ends[:-1, None] + np.cumsum(sizes, 1)
    chunks = np.stack((stops - sizes, stops), 2)  # [documents, 2 * world, 2]
    held = []
    for rank in range(world):
        mine = chunks[:, [rank, 2 * world - 1 - rank]].reshape(-1, 2)
        held.append(compact(touching(mine[mine[:, 0] < mine[:, 1]])))
    return tuple(held)
