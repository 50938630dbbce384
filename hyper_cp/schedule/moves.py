"""Moves: which rows the ranks of an axis send to each other, and in which order they are sent, received and used.

Host integers only. A way of obtaining keys and values is a list of moves (see :mod:`arrivals`); its backward is the
list transposed: what has arrived leaves as a gradient. :mod:`hyper_cp.ops.exchange.travel` carries out both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from .ranges import Range, Rows

HOME = -1
"""The source of rows that are this rank's own; other sources are numbers of moves, whose blocks travel on."""


Pattern = Literal["pair", "all", "sum", "rows"]
_TRANSPOSED: dict[Pattern, Pattern] = {"pair": "pair", "all": "sum", "sum": "all", "rows": "rows"}


@dataclass(frozen=True, eq=False)
class Move:
    """This rank's part in one transfer between all ranks of an axis. What arrives is a *block*, by its move's number.

    Attributes:
        pattern: what all ranks have in common, so that they issue the same operation. ``"pair"``: a rank sends to one
            rank and receives from one. ``"all"``: the same rows go to every other rank, and a block has those of all
            ranks in order; nobody reads its own rows in it. ``"sum"``: the transpose of that: each rank receives the
            sum of what the others have for it. ``"rows"``: any rows to any ranks.
        source: ``HOME``, or the block whose rows leave.
        rows: the rows of the source that leave; for ``"rows"`` those for rank 0 first, then those for rank 1, and so
            on.
        sent, received: the number of rows for, and from, each rank, none of its own.
        meanwhile: 0, or the number of blocks that are used while these rows are under way, on links of their own: they
            leave apart from the others, which do not wait for them.
    """

    pattern: Pattern
    source: int
    rows: Rows
    sent: tuple[int, ...]
    received: tuple[int, ...]
    meanwhile: int = 0

    @cached_property
    def transposed(self) -> Move:
        """The move of the block's gradient, which is added to ``rows`` of the source where it arrives."""
        return replace(self, pattern=_TRANSPOSED[self.pattern], sent=self.received, received=self.sent)

    @cached_property
    def peers(self) -> tuple[int, int]:
        """The rank that a ``"pair"`` sends to, and the one that it receives from."""
        to, origin = (next(rank for rank, rows in enumerate(x) if rows) for x in (self.sent, self.received))
        return to, origin


def pair(size: int, to: int, origin: int, rows: Sequence[Range], source: int = HOME) -> Move:
    """The move of a rank that sends rows to one rank and receives as many from another."""
    selected = Rows(rows)
    return Move("pair", source, selected, only(size, to, selected.length), only(size, origin, selected.length))


def only(size: int, rank: int, rows: int) -> tuple[int, ...]:
    """Rows for one rank of ``size``, none for the others."""
    return (0,) * rank + (rows,) + (0,) * (size - rank - 1)


class Event(NamedTuple):
    """One thing that a rank does in an exchange.

    ``"post"``: start the move that brings a block, the move of a block's gradient, or both at once. ``"arrive"``: wait
    for the block. ``"use"``: compute with the block (``HOME``: with this rank's own keys). ``"add"``: wait for what
    came back with the move of a block's gradient, and add it to what it is a gradient of.
    """

    kind: Literal["post", "arrive", "use", "add"]
    block: int | None = None
    gradient: int | None = None


@dataclass(frozen=True, eq=False)
class Transfers:
    """All moves of one call on one rank, and their order, which is the same on all ranks.

    Attributes:
        moves: each brings a block. A block that travels on must have arrived before its next move is posted:
            ``moves[i].source <= i - ahead``.
        ahead: the number of moves that are under way at once, beside those with a number of their own.
        gradient_moves: the way of block i's gradient, written like a move of keys, and posted transposed: the
            gradient's rows go where ``gradient_moves[i]`` would bring the block from, and are added there.
        pieces: the number of moves that make up one hop: more than one if a share travels in pieces, one after the
            other.
    """

    moves: tuple[Move, ...] = ()
    ahead: int = 1
    gradient_moves: tuple[Move, ...] = ()
    pieces: int = 1

    def __post_init__(self) -> None:
        if len(self.gradient_moves) != len(self.moves):
            raise ValueError(
                f"{len(self.moves)} moves and {len(self.gradient_moves)} gradient moves. The gradient of every block "
                "leaves through a move of its own. Give one gradient move for each move"
            )
        for i, move in enumerate(self.moves):
            ahead = move.meanwhile or self.ahead
            if move.source != HOME and move.source > i - ahead:
                raise ValueError(
                    f"move {i} sends block {move.source} on, with {ahead} moves under way at once. It is posted "
                    f"when block {i - ahead} has arrived. Take an earlier source, or a smaller number of moves"
                )

    @property
    def hops(self) -> int:
        """The number of times that keys arrive; pieces that travel one after the other count once."""
        return len(self.moves) // self.pieces

    @cached_property
    def sent_on(self) -> dict[int, int]:
        """For sources of moves, the last block that leaves them."""
        return {move.source: block for block, move in enumerate(self.moves)}

    @cached_property
    def becomes(self) -> dict[int, int]:
        """For blocks whose gradient another one is added to before it leaves, row by row, the (last) one: where a rank
        has nothing else to add, what arrives is the sum."""
        return {
            move.source: block
            for block, move in enumerate(self.gradient_moves)
            if move.source != HOME
            and move.pattern == self.moves[move.source].pattern == "pair"
            and len(move.rows.ranges) == 1
            and move.rows.length == self.moves[move.source].rows.length
        }

    @cached_property
    def forward(self) -> tuple[Event, ...]:
        """The events of a rank, in order: the next moves are under way while a block is used. Its own keys are used
        first and once more last, while the last results travel home."""
        return tuple(self._events(False))

    @cached_property
    def backward(self) -> tuple[Event, ...]:
        """The same with gradients, which leave after their block has been used and what is added to them has arrived.
        At most ``ahead`` of them are on their way home, and a rank adds them in the order in which they left: the same
        bits every time."""
        return tuple(self._events(True))

    def _events(self, backward: bool) -> Iterator[Event]:
        leaving, home = None, deque[int]()
        added_to: dict[int, list[int]] = {}
        for block, move in enumerate(self.gradient_moves if backward else ()):
            added_to.setdefault(move.source, []).append(block)
        following: dict[int, list[int]] = {}  # the moves that are posted when a block has arrived
        for block, move in enumerate(self.moves):
            following.setdefault(max(HOME, block - (move.meanwhile or self.ahead)), []).append(block)
        yield from self._posts(following.get(HOME, []), None)
        yield Event("use", HOME)
        for block in range(len(self.moves)):
            yield Event("arrive", block)
            yield from self._posts(following.get(block, []), leaving)
            yield Event("use", block)
            if backward:
                leaving = block
                for gradient in added_to.get(block, ()):
                    yield Event("add", gradient=gradient)
                if self.gradient_moves[block].source == HOME:
                    if len(home) == self.ahead:
                        yield Event("add", gradient=home.popleft())
                    home.append(block)
        yield from self._posts([], leaving)
        yield Event("use", HOME)
        for gradient in home:
            yield Event("add", gradient=gradient)

    def _posts(self, blocks: Sequence[int], gradient: int | None) -> Iterator[Event]:
        """Start moves of keys, and that of a gradient together with the one on the same links. What is on its way for
        long goes first."""
        for apart in (True, False):
            mine = [block for block in blocks if (self.moves[block].meanwhile > 0) == apart]
            leaves = gradient is not None and (self.gradient_moves[gradient].meanwhile > 0) == apart
            for i, block in enumerate(mine):
                yield Event("post", block, gradient if leaves and not i else None)
            if leaves and not mine:
                yield Event("post", gradient=gradient)


NO_TRANSFERS = Transfers()
"""The transfers of a rank that has all keys: none."""
