"""A check of exchanges that are registered from outside: what they say arrives must arrive, be all that queries see,
and go home as a gradient. Otherwise results would be wrong without an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .arrivals import Arrivals, KeyDemand, arrivals, piece, seen_by
from .moves import HOME, Move
from .ranges import Numbers, compact, length_of, placed, touching


def check_arrivals(name: str, demand: KeyDemand) -> None:
    """Raise ``ValueError``, on every rank, if an exchange brings other keys than it says, or not each key that the
    queries of a rank see exactly once, or takes gradients elsewhere. The moves of all ranks are followed."""
    everyone = range(demand.size)
    found = [arrivals(name, replace(demand, rank=rank)) for rank in everyone]
    counts = [len(x.transfers.moves) for x in found]
    if len(set(counts)) > 1 or any(len(x.blocks) != n + 1 for x, n in zip(found, counts, strict=True)):
        raise _wrong(
            name,
            f"gives ranks {[len(x.blocks) for x in found]} blocks and {counts} moves",
            "All ranks make the same number of moves, and each brings one block beside the first, a rank's own keys",
        )
    for rank in everyone:
        own, here = placed(demand.keys[rank]), found[rank]
        if not _same(here.blocks[0], own):
            raise _wrong(name, f"gives rank {rank} the keys {_text(here.blocks[0])} as its own", f"It has {_text(own)}")
        _check_seen(name, replace(demand, rank=rank), here)
        for block, move in enumerate(here.transfers.gradient_moves):
            if HOME < move.source <= block:
                raise _wrong(
                    name,
                    f"adds the gradient of block {block} of rank {rank} to that of block {move.source}",
                    "That one has left already. Add it to that of a later block, or take it home",
                )
        for block, claimed in enumerate(here.blocks[1:]):
            for what in ("move", "gradient move"):
                brought = _brought(found, what, block, rank)
                if brought is None or not _same(piece(brought, _places(claimed)), claimed):
                    got = "other numbers of rows than are sent" if brought is None else _text(brought)
                    raise _wrong(
                        name,
                        f"says that block {block} of rank {rank} has the keys {_text(claimed)}, and its {what} says "
                        f"{got}",
                        "Both must name the same keys in the same order",
                    )


def _check_seen(name: str, demand: KeyDemand, found: Arrivals) -> None:
    """Raise ``ValueError`` unless each key that the queries of the demand's rank see is in one block."""
    seen = seen_by(demand, demand.queries[demand.rank])
    starts, stops = (np.sort(np.concatenate([block[:, i] for block in found.blocks])) for i in (1, 2))
    edges = np.unique(np.concatenate((starts, stops, seen.ravel())))
    times = np.searchsorted(starts, edges, "right") - np.searchsorted(stops, edges, "right")
    inside = np.searchsorted(seen[:, 0], edges, "right") > np.searchsorted(seen[:, 1], edges, "right")
    exists = edges < sum(map(length_of, demand.keys))
    wrong = np.flatnonzero(inside & exists & (times != 1))
    if len(wrong):
        raise _wrong(
            name,
            f"brings key {edges[wrong[0]]} to rank {demand.rank} {times[wrong[0]]} times",
            "Queries of that rank see it, and count it as often as it is there. Bring it once",
        )


def _brought(found: Sequence[Arrivals], what: str, block: int, rank: int) -> Numbers | None:
    """The keys that a move of all ranks brings to one of them, as placed ranges; None if numbers of rows differ."""
    moves = [x.transfers.moves[block] if what == "move" else x.transfers.gradient_moves[block] for x in found]
    parts, at = [np.zeros((0, 3), np.int64)], 0
    for origin, move in enumerate(moves):
        count = move.sent[rank]
        if origin != rank and count != moves[rank].received[origin]:
            return None
        if move.pattern == "all":  # all ranks have the same number of rows, and nobody reads its own
            start, count = 0, move.rows.length
        else:
            start = sum(move.sent[:rank])
        if origin != rank:
            rows = [rows for _, rows in move.rows.within((start, start + count))]
            rows_of_source = piece(_source(found[origin], move), rows)
            parts.append(rows_of_source + np.array([at, 0, 0]))
        at += count if origin != rank or move.pattern == "all" else 0
    return np.concatenate(parts)


def _source(found: Arrivals, move: Move) -> Numbers:
    """The keys of the buffer that a move takes rows of; blocks begin with the rank's own."""
    return found.blocks[move.source + 1]


def _places(block: Numbers) -> list[tuple[int, int]]:
    """The rows of a block that its placed ranges name, in order."""
    return [(offset, offset + stop - start) for offset, start, stop in block.tolist()]


def _same(x: Numbers, y: Numbers) -> bool:
    return np.array_equal(touching(x[:, 1:]), touching(y[:, 1:]))


def _text(block: Numbers) -> str:
    ranges = list(compact(touching(block[:, 1:])))
    return f"{ranges[:4]}{' ...' if len(ranges) > 4 else ''}"


def _wrong(name: str, what: str, rule: str) -> ValueError:
    return ValueError(f"kv_exchange={name!r} {what}. {rule}. Change the function that was given to register_exchange")
