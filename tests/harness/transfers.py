"""All ranks of an axis in one process: their transfers carried out on numbers, event by event, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_cp.schedule.moves import HOME, Move, Transfers


def positions_of(move: Move, held: np.ndarray) -> np.ndarray:
    """The rows that leave with a move, of a source that holds these."""
    return np.concatenate([held[:0], *(held[start:stop] for start, stop in move.rows.ranges)])


def departures(move: Move, rank: int, rows: np.ndarray, size: int) -> dict[int, np.ndarray]:
    """The rows for each other rank; with moves of some rows, for those ranks only that get any."""
    if move.pattern in ("all", "sum"):
        parts = dict(enumerate([rows] * size if move.pattern == "all" else np.split(rows, size)))
        del parts[rank]
        return parts
    ends = np.cumsum(move.sent)
    return {int(to): rows[ends[to] - move.sent[to] : ends[to]] for to in np.flatnonzero(move.sent)}


def exchange(moves: Sequence[Move], leaving: Sequence[np.ndarray]) -> list[dict[int, np.ndarray]]:
    """The rows that every rank receives, by their origin. A rank must expect what another sends it."""
    size = len(moves)
    assert len({move.pattern for move in moves}) == 1, "all ranks issue one operation"
    sent, received = (np.array([getattr(move, name) for move in moves]) for name in ("sent", "received"))
    assert (sent == received.T).all() and not sent.diagonal().any()
    if moves[0].pattern == "pair":
        assert all((np.count_nonzero(x, axis=1) == 1).all() for x in (sent, received))
    arrived: list[dict[int, np.ndarray]] = [{} for _ in moves]
    for origin, (move, rows) in enumerate(zip(moves, leaving, strict=True)):
        for to, part in departures(move, origin, rows, size).items():
            assert len(part) == sent[origin, to]
            arrived[to][origin] = part
    return arrived


def block_of(move: Move, arrived: dict[int, np.ndarray], own: np.ndarray) -> np.ndarray:
    """The block that a move brings."""
    place_of_own = own if move.pattern == "all" else own[:0]
    return np.concatenate([arrived.get(origin, place_of_own) for origin in range(len(move.sent))])


Gradient = Callable[[int, int, np.ndarray], np.ndarray]
"""``gradient(rank, step, positions)``: of the keys that a rank uses in a step."""


def carry_out(
    transfers: Sequence[Transfers], own: Sequence[Sequence[int]], gradient: Gradient | None = None
) -> tuple[list[list[Any]], list[np.ndarray]]:
    """The positions in every block of every rank, and the sums of gradients at home.

    Fails if the ranks do not issue the same sequence, if one waits for what nobody has posted, uses a block twice or
    never, or sends on what has not arrived: with transfers that take place one after another in the order in which they
    are posted, and sends that wait for receives, nothing else can keep ranks waiting for good.
    """
    ranks = range(len(transfers))
    orders = [each.forward if gradient is None else each.backward for each in transfers]
    assert all(order == orders[0] for order in orders)
    held = [np.array(x) for x in own]
    blocks: list[dict[int, np.ndarray]] = [{} for _ in ranks]
    sums: list[dict[int, np.ndarray]] = [{HOME: np.zeros(len(x))} for x in held]
    under_way: dict[tuple[str, int], list[np.ndarray]] = {}
    used: list[int] = []
    for kind, block, other in orders[0]:
        if kind == "post" and block is not None:
            moves = [each.moves[block] for each in transfers]
            leaving = [
                positions_of(move, held[r] if move.source == HOME else blocks[r][move.source])
                for r, move in enumerate(moves)
            ]
            found = exchange(moves, leaving)
            under_way["keys", block] = [block_of(moves[r], found[r], leaving[r]) for r in ranks]
        if kind == "post" and other is not None:
            moves = [each.gradient_moves[other].transposed for each in transfers]
            assert used[-1] != HOME or used.count(HOME) == 1, "before this rank's own keys are used again"
            found = exchange(moves, [sums[r].pop(other) for r in ranks])
            under_way["sums", other] = [_returned(moves[r], found[r]) for r in ranks]
        if kind == "arrive":
            for r, rows in zip(ranks, under_way.pop(("keys", block)), strict=True):
                blocks[r][block] = rows
        if kind == "use":
            used.append(block)
            for r in ranks if gradient is not None else ():
                part = gradient(r, len(used) - 1, held[r] if block == HOME else blocks[r][block])
                sums[r][block] = sums[r].get(block, 0) + part
        if kind == "add":
            for r, rows in zip(ranks, under_way.pop(("sums", other)), strict=True):
                move = transfers[r].gradient_moves[other]
                index = positions_of(move, np.arange(len(sums[r][move.source])))
                np.add.at(sums[r][move.source], index, rows)
    assert not under_way and used == [HOME, *range(len(transfers[0].moves)), HOME]
    return [[held[r], *(blocks[r][i] for i in sorted(blocks[r]))] for r in ranks], [each[HOME] for each in sums]


def _returned(move: Move, arrived: dict[int, np.ndarray]) -> np.ndarray:
    """The rows that come back with the gradient of a block."""
    if move.pattern == "sum":
        return sum(arrived.values())
    return np.concatenate([np.zeros(0), *(x for _, x in sorted(arrived.items()))])


def neighbours_agree(transfers: dict[int, Transfers]) -> None:
    """The same for some ranks of a wide world: the events of all, and the rows between any two of them."""
    first = next(iter(transfers.values()))
    for rank, each in transfers.items():
        assert each.forward == first.forward and each.backward == first.backward
        for peer, other in transfers.items():
            for mine, its in zip(
                (*each.moves, *each.gradient_moves), (*other.moves, *other.gradient_moves), strict=True
            ):
                assert mine.pattern == its.pattern and mine.source == its.source
                assert rank == peer or mine.sent[peer] == its.received[rank]
