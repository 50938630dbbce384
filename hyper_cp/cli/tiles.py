"""Draws who computes what, and what travels for it, from the schedule: one map of queries and keys for each layout.

    hyper-cp tiles --ranks 4 --documents 1100,300,1600,1096
    hyper-cp tiles --ranks 8 --documents 20000,4000,41536 --picture tiles.svg

Each row of a map stands for queries, each column for keys. A letter is the rank that computes the pair: a capital where
it holds the keys itself, a small letter where they travel to it. A picture (any format of matplotlib, the extra `viz`)
has a colour for each rank, pale where keys travel.
"""

from __future__ import annotations

import argparse
import itertools
import string
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..ops import Balance, balance
from ..schedule import lookup
from ..schedule.documents import PackedDocuments
from ..schedule.ranges import Numbers, Rows
from .options import DOCUMENTS_HELP, check_picture, document_lengths, mistake, tokens

LAYOUTS = ("head_tail", "per_document", "balanced")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp tiles``."""
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the ring dimension (default 4)")
    parser.add_argument("--length", type=tokens, help="global sequence length (default 4096, or that of the documents)")
    parser.add_argument("--documents", help=f"{DOCUMENTS_HELP} (default: one document)")
    parser.add_argument("--window", type=int, help="positions before its own that a query sees (default: all)")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help=f"default: {' '.join(LAYOUTS)}")
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
    maps = {name: tile_map(name, length, args.ranks, documents, args.window, size) for name in args.layouts}
    if args.picture:
        draw(maps, costs, args.ranks, args.picture)
    for name in args.layouts:
        if not args.picture:
            print("\n".join(text(maps[name])))
        print(f"{name}: {caption(costs[name])}")
    return 0


def _length(given: int | None, documents: Sequence[int] | None) -> int:
    """The length of the sequence: that of the documents, if there are any."""
    if documents is None:
        return 4096 if given is None else given
    if given not in (None, documents[-1]):
        raise ValueError(
            f"--length {given} is not {documents[-1]}, that of the documents. They fill the sequence. Leave it out"
        )
    return documents[-1]


def caption(cost: Balance) -> str:
    """The cost of a layout in a few words."""
    return f"work {cost.ratio:.2f} x the mean, {cost.share:.2f} of an all-gather travels"


def tile_map(
    layout: str, length: int, ranks: int, documents: Sequence[int] | None, window: int | None, size: int
) -> Numbers:
    """The tiles of all ranks under a causal mask, with ``kv_exchange="needed"``, on a grid of ``size`` x ``size``.

    Returns:
        For each queries (rows) and keys (columns) the number of the rank that computes them, from 1 on; negative if the
        keys travel to it; 0 where nothing is seen.
    """
    packed = PackedDocuments([[0, length] if documents is None else list(documents)])
    call = ("needed", False, (None if window is None else -window, 0), length, length, True, packed)
    found = np.zeros((size, size), dtype=np.int64)
    visible = _visible(packed, length, window, size)
    for rank in range(ranks):
        plan = lookup.schedule(layout, rank, ranks, 1, *call)
        queries = Rows(plan.queries)
        for i, step in enumerate(plan.forward):
            keys, number = Rows(step.keys), rank + 1 if i in (0, len(plan.forward) - 1) else -rank - 1
            for tile in itertools.chain.from_iterable(whole.rectangles for whole in step.tiles):
                for _, q in queries.within(tile.q):
                    for _, k in keys.within(tile.k):
                        cells = _cells(q, length, size), _cells(k, length, size)
                        found[cells] = np.where(visible[cells], number, found[cells])
    return found


def _cells(positions: tuple[int, int], length: int, size: int) -> slice:
    """The cells whose middle lies in a range of positions."""
    start, stop = ((2 * p * size + length - 1) // (2 * length) for p in positions)
    return slice(start, stop)


def _visible(documents: PackedDocuments, length: int, window: int | None, size: int) -> Any:
    """Cells whose middle is seen."""
    middle = (2 * np.arange(size) + 1) * length // (2 * size)
    number = np.searchsorted(np.array(documents.rows[0]), middle, "right")
    distance = middle[:, None] - middle[None]
    return (number[:, None] == number[None]) & (distance >= 0) & (True if window is None else distance <= window)


def text(cells: Numbers) -> list[str]:
    """A map in letters, a line for each row of cells."""
    letters = string.ascii_uppercase
    return [
        "".join(
            "." if n == 0 else letters[(n - 1) % 26] if n > 0 else letters[(-n - 1) % 26].lower() for n in row.tolist()
        )
        for row in cells
    ]


def draw(maps: Mapping[str, Numbers], costs: Mapping[str, Balance], ranks: int, path: str) -> None:
    """Draw the maps side by side into an image file."""
    import matplotlib  # an optional dependency (the extra "viz"), which nothing else needs

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = np.array([pyplot.get_cmap("turbo")((r + 0.5) / ranks)[:3] for r in range(ranks)])
    palette = np.concatenate((1 - 0.4 * (1 - colours[::-1]), np.ones((1, 3)), colours))  # -ranks to ranks
    figure, axes = pyplot.subplots(1, len(maps), figsize=(4.2 * len(maps), 4.9), layout="constrained", squeeze=False)
    for axis, (name, cells) in zip(axes[0], maps.items(), strict=True):
        axis.imshow(palette[cells + ranks], interpolation="nearest")
        axis.set(
            title=f'layout="{name}"\n{caption(costs[name])}', xticks=[], yticks=[], xlabel="keys", ylabel="queries"
        )
        axis.title.set_fontsize(9)
    handles = [Patch(color=colours[r], label=f"rank {r}") for r in range(ranks)]
    handles.append(Patch(color=palette[0], label="pale: the keys travel"))
    figure.legend(handles=handles, loc="outside lower center", ncol=min(ranks + 1, 9), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
