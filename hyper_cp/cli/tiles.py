"""Draws who computes what, and what travels for it, from the schedule: one map of queries and keys for each layout.

    hyper-cp tiles --ranks 4 --documents 1100,300,1600,1096
    hyper-cp tiles --ranks 8 --documents 20000,4000,41536 --picture tiles.svg

The rows of a map are queries, its columns keys. A letter is the rank that computes the pair: a capital where
it holds the keys itself, a small letter where they travel to it. A picture (any format of matplotlib, the extra `viz`)
has a colour for each rank, pale where keys travel.

    hyper-cp tiles --modes --ranks 4 --length 4096 --picture modes.png

draws the modes instead of the layouts, under a causal mask. Where heads are split too, there is a map for each part of
them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..mesh.cp_mesh import divisors
from ..ops import Balance, balance
from ..schedule import lookup
from ..schedule.documents import PackedDocuments
from ..schedule.ranges import Numbers, Rows
from .options import DOCUMENTS_HELP, check_picture, document_lengths, mistake, tokens

LAYOUTS = ("head_tail", "per_document", "balanced")
LEGEND = (
    "A row is a part of the queries, a column one of the keys, a letter the rank that computes the pair: a capital "
    "where\nit holds the keys, a small letter where they travel to it. A dot is hidden by the mask."
)


@dataclass(frozen=True)
class Panel:
    """A map with its title above it and, below it, what the division costs."""

    title: str
    caption: str
    cells: Numbers
    parts: int = 1
    """Parts of the heads, of which each has a map of its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp tiles``."""
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the ring dimension (default 4)")
    parser.add_argument("--length", type=tokens, help="global sequence length (default 4096, or that of the documents)")
    parser.add_argument("--documents", help=f"{DOCUMENTS_HELP} (default: one document)")
    parser.add_argument("--window", type=int, help="positions before its own that a query sees (default: all)")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help=f"default: {' '.join(LAYOUTS)}")
    parser.add_argument("--modes", action="store_true", help="the modes under a causal mask, not the layouts")
    parser.add_argument("--picture", metavar="FILE", help="draw the maps into this file instead of printing them")


def run(args: argparse.Namespace) -> int:
    """Print or draw the maps, and print what each layout costs."""
    try:
        documents = None if args.documents is None else [0, *accumulate(document_lengths(args.documents))]
        length = _length(args.length, documents)
        if args.picture:
            check_picture("--picture", args.picture)
        if args.window is not None and args.window < 0:
            raise ValueError(
                f"--window {args.window} is negative. It is a number of positions before a query. Pass 0 or more"
            )
        if args.modes and (documents or args.window is not None):
            raise ValueError(
                "--modes with --documents or --window is not possible. It draws the modes under a plain causal mask. "
                "Leave them out, or leave out --modes"
            )
        costs = balance(length, args.ranks, documents, window=None if args.window is None else (args.window, 0))
        missing = [name for name in args.layouts if name not in costs]
        if missing:
            raise ValueError(
                f"--layouts {' '.join(missing)} cannot be drawn. The length {length} splits over {args.ranks} ranks in "
                f"the layouts {', '.join(costs)}. Choose among them, or another length"
            )
    except ValueError as error:
        return mistake("tiles", error)
    size = 384 if args.picture else 32
    if args.modes:
        panels = mode_panels(args.ranks, length, size)
    else:
        given = length, args.ranks, documents, args.window, size
        panels = [Panel(name, caption(costs[name]), tile_map(name, *given)) for name in args.layouts]
    if args.picture:
        draw(panels, args.ranks, args.picture)
    for panel in panels:
        if not args.picture:
            print("\n".join(text(panel.cells)))
        print(f"{panel.title}: {panel.caption}")
    if not args.picture:
        print(LEGEND)
    return 0


def _length(given: int | None, documents: Sequence[int] | None) -> int:
    """Return the length of the sequence: that of the documents, if there are any."""
    if documents is None:
        return 4096 if given is None else given
    if given not in (None, documents[-1]):
        raise ValueError(
            f"--length {given} is not {documents[-1]}, that of the documents. They fill the sequence. Leave it out"
        )
    return documents[-1]


def mode_panels(ranks: int, length: int, size: int) -> list[Panel]:
    """Return the modes that these ranks and this length allow."""
    modes: dict[str, dict[str, Any]] = {
        "all-gather or ring, contiguous": {},
        "the same, load_balance": {"load_balance": True},
        "all-gather or ring, head_tail": {"layout": "head_tail"},
    }
    if length % (2 * ranks):
        modes = {"all-gather or ring, contiguous": {}}
    between = [k for k in divisors(ranks) if 1 < k < ranks]
    if between:
        layout = "contiguous" if length % (2 * ranks) else "head_tail"
        modes[f"hybrid, ulysses_degree={between[0]}, {layout}"] = {"ulysses_degree": between[0], "layout": layout}
    modes["Ulysses"] = {"ulysses_degree": None}
    return [mode_panel(name, mode, ranks, length, size) for name, mode in modes.items()]


def mode_panel(title: str, mode: dict[str, Any], ranks: int, length: int, size: int) -> Panel:
    """Return the map of one mode under a causal mask, and its cost.

    Args:
        mode: arguments of :class:`hyper_cp.ContextParallel`: ``ulysses_degree``, ``layout``, ``load_balance``.
    """
    layout, balanced = mode.get("layout", "contiguous"), mode.get("load_balance", False)
    ulysses = mode.get("ulysses_degree", 1) or ranks
    ring = ranks // ulysses
    call = ("all_gather", balanced, (None, 0), length, length)
    work = [lookup.schedule(lookup.Key(layout, rank, ring, ulysses, *call)).area for rank in range(ring)]
    sent = 4 * (ulysses - 1) / ulysses + 2 * (ring - 1) + (balanced and ring > 1)
    maps = [
        tile_map(layout, length, ranks, None, None, size, ulysses=ulysses, group=group, load_balance=balanced)
        for group in range(ulysses)
    ]
    cost = f"work {max(work) * ring / sum(work):.2f} x the mean, a rank sends {sent:.2g} x its q"
    return Panel(title, cost, mosaic(maps), ulysses)


def mosaic(maps: list[Numbers]) -> Numbers:
    """Return maps in a square with gaps, row by row; two of them on its diagonal."""
    side, size = math.ceil(math.sqrt(len(maps))), len(maps[0])
    step = size + (max(1, size // 24) if len(maps) > 1 else 0)
    whole = np.zeros((side * step - step + size,) * 2, dtype=np.int64)
    for i, one in enumerate(maps):
        row, column = (i, i) if len(maps) == 2 else divmod(i, side)
        whole[row * step :, column * step :][:size, :size] = one
    return whole


def caption(cost: Balance) -> str:
    """Return the cost of a layout in a few words."""
    return f"work {cost.ratio:.2f} x the mean, {cost.share:.2f} of an all-gather travels"


def tile_map(
    layout: str,
    length: int,
    ranks: int,
    documents: Sequence[int] | None,
    window: int | None,
    size: int,
    *,
    ulysses: int = 1,
    group: int = 0,
    load_balance: bool = False,
) -> Numbers:
    """Return the tiles of all ranks under a causal mask on a grid of ``size`` x ``size``.

    Args:
        ulysses: the number of adjacent ranks that split the heads; the map is that of part ``group`` of them.

    Returns:
        For each queries (rows) and keys (columns) the number of the rank that computes them, from 1 on; negative if the
        keys travel to it; 0 where nothing is seen.
    """
    packed = PackedDocuments([[0, length] if documents is None else list(documents)])
    band = None if window is None else -window, 0
    call = ("all_gather" if load_balance else "needed", load_balance, band, length, length)
    found = np.zeros((size, size), dtype=np.int64)
    visible, held = _visible(packed, length, window, size), lookup.resolve(layout, ranks, length, packed)
    for place in range(ranks // ulysses):
        rank = place * ulysses + group
        plan = lookup.schedule(lookup.Key(layout, place, ranks // ulysses, ulysses, *call), packed)
        here = np.zeros(size, dtype=bool)
        for positions in held.ranges(rank):
            here[_cells(positions, length, size)] = True
        number = np.where(here, rank + 1, -rank - 1)
        queries = Rows(plan.queries)
        for step in plan.forward:
            keys = Rows(step.keys)
            for tile in itertools.chain.from_iterable(whole.rectangles for whole in step.tiles):
                for _, q in queries.within(tile.q):
                    for _, k in keys.within(tile.k):
                        cells = _cells(q, length, size), _cells(k, length, size)
                        found[cells] = np.where(visible[cells], number[None, cells[1]], found[cells])
    return found


def _cells(positions: tuple[int, int], length: int, size: int) -> slice:
    """Return the cells whose middle lies in a range of positions."""
    start, stop = ((2 * p * size + length - 1) // (2 * length) for p in positions)
    return slice(start, stop)


def _visible(documents: PackedDocuments, length: int, window: int | None, size: int) -> Any:
    """Return the cells whose middle is seen."""
    middle = (2 * np.arange(size) + 1) * length // (2 * size)
    number = np.searchsorted(np.array(documents.rows[0]), middle, "right")
    distance = middle[:, None] - middle[None]
    return (number[:, None] == number[None]) & (distance >= 0) & (True if window is None else distance <= window)


def text(cells: Numbers) -> list[str]:
    """Return a map in letters, a line for each row of cells."""
    letters = string.ascii_uppercase
    return [
        "".join(
            "." if n == 0 else letters[(n - 1) % 26] if n > 0 else letters[(-n - 1) % 26].lower() for n in row.tolist()
        )
        for row in cells
    ]


def palette(ranks: int) -> Any:
    """Return the colours (red, green, blue from 0 to 1) of the numbers from ``-ranks`` to ``ranks``: pale, white, and
    full."""
    hues = (np.arange(ranks)[:, None] + 0.5) / ranks + np.array([0, 2 / 3, 1 / 3])
    colours = 0.5 + 0.4 * np.cos(2 * np.pi * hues)
    return np.concatenate((1 - 0.4 * (1 - colours[::-1]), np.ones((1, 3)), colours))


def draw(panels: Sequence[Panel], ranks: int, path: str) -> None:
    """Draw the maps into an image file."""
    from matplotlib.figure import Figure  # an optional dependency (the extra "viz"), which nothing else needs

    figure = Figure(figsize=map_size(len(panels)), layout="constrained")
    draw_maps(figure, panels, ranks)
    figure.savefig(path, dpi=110)


def _grid(panels: int) -> tuple[int, int]:
    """Return rows and columns of a grid of maps: one row of at most four, or two."""
    return (1, panels) if panels <= 4 else (2, (panels + 1) // 2)


def map_size(panels: int) -> tuple[float, float]:
    """Return width and height in inches of the maps."""
    rows, columns = _grid(panels)
    return 4.2 * columns, 5.1 * rows + 0.3


def draw_maps(figure: Any, panels: Sequence[Panel], ranks: int) -> None:
    """Draw the panels on a grid of one figure, all of one size. The colours of the ranks are explained in a place that
    no panel takes, or below."""
    from matplotlib.patches import Patch

    colours = palette(ranks)
    axes = figure.subplots(*_grid(len(panels)), squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        heads = f", for each of {panel.parts} parts of the heads" if panel.parts > 1 else ""
        axis.imshow(colours[panel.cells + ranks], interpolation="nearest")
        axis.set_title(panel.title, fontsize=16)
        caption = panel.caption.replace(", ", ",\n")
        axis.set_xlabel(f"keys{heads}\n{caption}", fontsize=14)
        axis.set_ylabel("queries", fontsize=14)
        axis.set(xticks=[], yticks=[])
    handles = [Patch(color=colours[ranks + 1 + r], label=f"rank {r}") for r in range(ranks)]
    handles.append(Patch(color=colours[ranks - 1], label="pale: the keys travel"))
    free = axes[len(panels) :]
    for axis in free:
        axis.axis("off")
    place = free[0] if len(free) else figure
    where = {"loc": "center"} if len(free) else {"loc": "outside lower center", "ncol": min(ranks + 1, 5)}
    place.legend(handles=handles, fontsize=14, frameon=False, **where)
