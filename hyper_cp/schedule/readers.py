"""Rows that the ranks make, one run of consecutive rows each, and the ranks that read them. Host integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .ranges import Numbers


def runs_of_equal_cost(costs: Sequence[float], world: int) -> list[int]:
    """Cut items into one run of consecutive items for each rank, and return the boundaries ``[0, ..., items]``.

    An item goes to the rank in whose equal share of the whole cost its middle lies. So no rank has more than its share
    and one item, and the ranks without an item are spread among the others.
    """
    ends = np.cumsum(np.asarray(costs, dtype=np.float64))
    if not len(ends) or not ends[-1]:
        return [0] + [len(ends)] * world
    middle = (ends - np.asarray(costs) / 2) * (world / ends[-1])
    return [*np.searchsorted(middle, np.arange(world), side="left").tolist(), len(ends)]


@dataclass(frozen=True, eq=False)
class ReadRows:
    """This rank's part in bringing rows to the ranks that read them.

    Attributes:
        leaving: local numbers of the rows that leave, those for rank 0 first.
        sent, received: the number of rows for, and from, each rank, none of its own.
        read: what this rank reads, in order, as numbers among its own rows followed by those received.
    """

    leaving: Numbers
    sent: tuple[int, ...]
    received: tuple[int, ...]
    read: Numbers


def read_rows(readers: Sequence[Numbers], made: Sequence[int], rank: int) -> ReadRows:
    """Plan the exchange of rows.

    Args:
        readers: for each rank the numbers of the rows that it reads, in its order.
        made: the number of rows that each rank makes: rank 0 the first ones, and so on.
    """
    starts = np.cumsum([0, *made])
    leaving: list[Numbers] = []
    sent: list[int] = []
    received: list[int] = []
    read = np.full(len(readers[rank]), -1, dtype=np.int64)
    for other, wanted in enumerate(readers):
        mine = wanted[(wanted >= starts[rank]) & (wanted < starts[rank + 1])] - starts[rank]
        leaving.append(mine if other != rank else mine[:0])
        sent.append(len(leaving[-1]))
        theirs = (readers[rank] >= starts[other]) & (readers[rank] < starts[other + 1])
        if other == rank:
            read[theirs] = readers[rank][theirs] - starts[rank]
        else:
            read[theirs] = made[rank] + sum(received) + np.arange(theirs.sum())
        received.append(0 if other == rank else int(theirs.sum()))
    return ReadRows(np.concatenate(leaving), tuple(sent), tuple(received), read)
