"""The arrival of keys and values at a rank: which of them lie in each block that arrives, and the moves that bring it.

Modes differ here only. A way of obtaining keys and values is one function from a :class:`KeyDemand` to its
:class:`Arrivals`; :func:`register_exchange` adds one from outside the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from .blocks import BlockMap
from .choices import Limits, doubled, stage_limits, stages_needed
from .layout import check_name
from .moves import HOME, NO_TRANSFERS, Move, Transfers, pair
from .ranges import Documents, Numbers, Range, Rows, before, compact, placed
from .tiles import Band, seen_keys, split, within


@dataclass(frozen=True)
class KeyDemand:
    """Who holds which keys and who sees them, which decides what travels.

    Attributes:
        rank: this ring rank.
        queries, keys: the global positions of queries and of keys, by ring rank.
        documents: boundaries for all batch rows, or one per row; None: one document.
        blocks: the blocks of pairs that may be seen; None: all.
        stages: the number of stages of an exchange that has some, or the limits that choose it; None: those of a GPU
            and a few key/value heads.
    """

    rank: int
    queries: Sequence[Sequence[Range]]
    keys: Sequence[Sequence[Range]]
    band: Band
    documents: tuple[Documents, ...] | None
    blocks: BlockMap | None = None
    stages: int | Limits | None = None

    @property
    def size(self) -> int:
        return len(self.queries)

    def boundaries(self) -> Iterator[Documents | None]:
        """The documents of batch rows, those that rows share only once."""
        yield from (None,) if self.documents is None else self.documents


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The blocks of keys that a rank attends: its own, then those that arrive.

    Attributes:
        blocks: placed ranges of the keys that are used in each block.
        transfers: the moves that bring each block but the first, and take its gradient home.
    """

    blocks: tuple[Numbers, ...]
    transfers: Transfers = NO_TRANSFERS


# --------------------------------------------------------------------------- whole shares of other ranks

# A rank cannot hide the kernels of the last block that arrives behind a transfer. On few ranks these are much of its
# work, so there a share goes round a ring in two pieces. Each has the half of either half of the share: in the
# head-tail layout all ranks then have equal work in each piece, as they have in whole shares. On four ranks and a link
# that is as slow as the computation is long, a ring takes 1.21 times as long as either if shares are whole
# (benchmarks/simulated/overlap.py), 1.19 times if the pieces are heads and tails, and 1.12 times with these.
_IN_PIECES_UP_TO = 4  # ranks


def ring(demand: KeyDemand, least_piece: int = 512) -> Arrivals:
    """Shares travel on to the next rank, hop by hop, as far as any rank needs them. In backward the gradient of a share
    goes on with it, one hop behind, and from the last rank straight home.

    Args:
        least_piece: the fewest rows of a piece, on which kernels are not yet slower. Shorter shares travel whole.
    """
    size, rank, own = demand.size, demand.rank, demand.keys[demand.rank]
    share = _length(placed(own))
    hops = 0
    for receiver, origins in _origins(demand):
        hops = max([hops, *((receiver - origin) % size for origin in origins)])
        if hops == size - 1:
            break
    pieces = _pieces(share, 1 if size > _IN_PIECES_UP_TO or share < 2 * least_piece else 2)
    blocks = [placed(own)]
    for hop in range(1, hops + 1):
        held = placed(demand.keys[(rank - hop) % size])
        blocks += [piece(held, rows) for rows in pieces]
    return Arrivals(tuple(blocks), _around(size, rank, hops, pieces))


_once = lru_cache(maxsize=16)
"""Moves of whole shares are the same for every batch of documents: they are made once, and so is their order."""


@_once
def _around(size: int, rank: int, hops: int, pieces: tuple[tuple[Range, ...], ...]) -> Transfers:
    """The moves of :func:`ring`."""
    after, behind = (rank + 1) % size, (rank - 1) % size
    moves, gradient_moves = list[Move](), list[Move]()
    # Moves of equal pieces are one object each: their number must not grow with the square of the ranks.
    sizes = [sum(stop - start for start, stop in rows) for rows in pieces]
    first = [pair(size, after, behind, rows) for rows in pieces]
    onward = [replace(move, rows=Rows(((0, length),))) for move, length in zip(first, sizes, strict=True)]
    back = [pair(size, behind, after, ((0, length),)) for length in sizes]
    for hop in range(1, hops + 1):
        for i, rows in enumerate(pieces):
            block = len(moves)
            moves.append(first[i] if hop == 1 else replace(onward[i], source=block - len(pieces)))
            if hop < hops:
                gradient_moves.append(replace(back[i], source=block + len(pieces)))
            else:
                gradient_moves.append(pair(size, (rank + hops) % size, (rank - hops) % size, rows))
    return Transfers(tuple(moves), len(pieces), tuple(gradient_moves), len(pieces))


def double_ring(demand: KeyDemand, per_host: int = 0) -> Arrivals:
    """A ring of two levels. In each round the shares of one host go round inside each host, from rank to rank, while
    each rank sends the one that it began the round with to the same place on the next host: all links between hosts
    are busy at once, each for a whole round.

    In backward the gradient of a share follows it inside the host, one hop behind, and collects what the ranks there
    have for it. When the round is over it goes straight home, while the next round runs: so a rank sends one gradient
    a round to another host, as it sends one share. Gradients are added at home in the order in which they left. The
    round of a rank's own host is cut in two: the first half hides the first share that comes from another host, the
    second, after all other rounds, the last gradient that goes there.

    With H hosts of P ranks and shares of ``s`` bytes, whose gradients have ``g``, each rank sends to other hosts
    ``(H-1) * s`` in forward and ``(H-1) * (s + g)`` in backward, and inside its host ``H * (P-1)`` times ``s`` and
    ``s + g``. In a flat ring one rank of each host sends ``H * P - 1`` times as much to another host.

    Rounds, and hops of a round, end where no rank needs a further share.

    Args:
        per_host: adjacent ranks that share a host. With all, one or none of them this is a flat ring.
    """
    size, rank = demand.size, demand.rank
    if not 1 < per_host < size or size % per_host:
        return ring(demand)
    furthest: dict[int, int] = {0: 0}  # the hops of each round, as far as any rank needs them
    for receiver, origins in _origins(demand):
        for origin in origins:
            step = (receiver // per_host - origin // per_host) % (size // per_host)
            furthest[step] = max(furthest.get(step, 0), (receiver - origin) % per_host)
    others, own_hops = max(furthest), furthest[0]
    half = (own_hops + 1) // 2 if others else own_hops
    rounds = [(0, range(1, half + 1))]
    rounds += [(step, range(furthest.get(step, 0) + 1)) for step in range(1, others + 1)]
    rounds += [(0, range(half + 1, own_hops + 1))]
    origins = [_rank_at(rank, size, per_host, -step, -hop) for step, hops in rounds for hop in hops]
    blocks = tuple(placed(demand.keys[origin]) for origin in (rank, *origins))
    return Arrivals(blocks, _over_hosts(size, rank, per_host, tuple(rounds), _length(blocks[0])))


def _rank_at(rank: int, size: int, per_host: int, step: int, hops: int) -> int:
    """The rank that has what left this one ``step`` hosts and ``hops`` ranks of a host ago."""
    host, place = divmod(rank, per_host)
    return (host + step) * per_host % size + (place + hops) % per_host


@_once
def _over_hosts(size: int, rank: int, per_host: int, rounds: tuple[tuple[int, range], ...], share: int) -> Transfers:
    """The moves of :func:`double_ring`, given the steps and hops of its rounds."""
    rank_at, whole = partial(_rank_at, rank, size, per_host), ((0, share),)
    moves, gradient_moves = list[Move](), list[Move]()
    onward, across = (pair(size, rank_at(*x), rank_at(-x[0], -x[1]), whole) for x in ((0, 1), (1, 0)))
    back = pair(size, *onward.peers[::-1], whole)
    begun = HOME  # the block that the last round began with
    for step, hops in rounds:
        for hop in hops:
            if hop > hops[0]:
                moves.append(replace(onward, source=len(moves) - 1))
            elif step:
                source, begun = begun, len(moves)
                moves.append(replace(across, source=source, meanwhile=begun - source))
            else:
                moves.append(pair(size, rank_at(0, hop), rank_at(0, -hop), whole))
            if hop < hops[-1]:
                gradient_moves.append(replace(back, source=len(moves)))
            else:
                home = pair(size, rank_at(step, hop), rank_at(-step, -hop), whole)
                gradient_moves.append(replace(home, meanwhile=len(hops) if step else 0))
    return Transfers(tuple(moves), 1, tuple(gradient_moves))


def all_gather(demand: KeyDemand) -> Arrivals:
    """The shares of all ranks arrive, in as many stages as were asked for: in each, the same piece of every share. All
    of them are under way at once."""
    size, rank, own = demand.size, demand.rank, placed(demand.keys[demand.rank])
    everyone = range(size)
    if all(origin == receiver for receiver, origins in _origins(demand) for origin in origins):
        return Arrivals((own,))
    share, count = _length(own), demand.stages
    if not isinstance(count, int):
        count = doubled((size - 1) * share, count or ())
    blocks, moves = [own], []
    for rows in _pieces(share, min(count, max(1, share // 2))):
        parts, selected = [piece(placed(keys), rows) for keys in demand.keys], Rows(rows)
        offsets = np.arange(size) * selected.length
        arriving = [part + [offset, 0, 0] for part, offset in zip(parts, offsets, strict=True)]
        blocks.append(np.concatenate(arriving[:rank] + arriving[rank + 1 :]))
        others = tuple(0 if r == rank else selected.length for r in everyone)
        moves.append(Move("all", HOME, selected, others, others))
    return Arrivals(tuple(blocks), Transfers(tuple(moves), len(moves), tuple(moves), len(moves)))


def local(demand: KeyDemand) -> Arrivals:
    """Nothing arrives: every rank has all the keys that its queries see."""
    return Arrivals((placed(demand.keys[demand.rank]),))


def _origins(demand: KeyDemand) -> Iterator[tuple[int, list[int]]]:
    """For each rank the ranks that hold keys which its queries see."""
    keys, source = _by_position(demand.keys)
    for rank, queries in enumerate(demand.queries):
        yield rank, list(np.unique(source[within(keys, seen_by(demand, queries))[1]]).tolist())


def _pieces(share: int, count: int) -> tuple[tuple[Range, ...], ...]:
    """The rows of a share in ``count`` pieces, each of which has an equal part of either half of the share."""
    if count == 1:
        return (((0, share),),)
    cuts = [share * i // (2 * count) for i in range(2 * count + 1)]
    ranges = [*pairwise(cuts)]
    return tuple((ranges[i], ranges[count + i]) for i in range(count))


def piece(block: Numbers, rows: Sequence[Range]) -> Numbers:
    """The part of a block, placed ranges, that some of its rows are, which then lie side by side."""
    offset, first, last = block.T
    found, at = [block[:0]], 0
    for start, stop in rows:
        low, high = np.maximum(offset, start), np.minimum(offset + last - first, stop)
        cut = np.column_stack((at + low - start, first + low - offset, first + high - offset))
        found.append(cut[high > low])
        at += stop - start
    return np.concatenate(found)


# --------------------------------------------------------------------------- only what is needed

# The most stages that are under way; they have at most as many rows as that number of ranks hold. A rank with much to
# do in one stage then seldom holds up the others. In backward gradients travel beside keys, and the more stages of keys
# are under way, the longer the first takes to arrive: on TCP, keys for all ranks share the link.
_AHEAD = 3
_USUAL = stage_limits("needed")


def needed(demand: KeyDemand) -> Arrivals:
    """Blocks are the rows that this rank's queries see, each once, from the ranks that hold them."""
    flows = _Flows(demand)
    if not flows.most:
        return Arrivals((placed(demand.keys[demand.rank]),))
    count = demand.stages
    if not isinstance(count, int):
        count = stages_needed(_USUAL if count is None else count, flows.most, flows.share)
    return flows.arrivals(demand.rank, min(count, flows.most))


def ahead_of(most: int, share: int, stages: int) -> int:
    """The number of stages that are under way at once."""
    return max(1, min(_AHEAD, _AHEAD * share * stages // most))


def in_stages(flows: Numbers, count: int) -> Numbers:
    """Divide the rows that travel into stages, in each of which a rank receives an equal part of its rows.

    It receives an equal part from each rank, so each rank sends an equal part too, and all stages together take as long
    as the transfers of the busiest rank. (Rows that do not divide go to one stage after the other.)

    Args:
        flows: the number of rows that rank ``to`` receives from rank ``of``: ``[to, of]``.

    Returns:
        The same for each stage: ``[count, to, of]``.
    """
    more = flows % count
    first, stage = np.cumsum(more, 1) - more, np.arange(count)[:, None, None]
    part: Numbers = flows // count + ((stage - first) % count < more)
    return part


class _Flows:
    """The rows that travel from each rank to each other.

    Attributes:
        lengths: their number, ``[to, of]``.
        most: the rows of the rank that receives most.
        share: the rows that a rank holds.
    """

    def __init__(self, demand: KeyDemand) -> None:
        self.demand = demand
        keys, source = _by_position(demand.keys)
        self.lengths = np.zeros((demand.size, demand.size), np.int64)
        self._rows: list[tuple[Numbers, Numbers]] = []  # those for each rank, and who holds them
        for to in range(demand.size):
            rows, at = within(keys, seen_by(demand, demand.queries[to]))
            self._rows.append((rows, source[at]))
            self.lengths[to] = np.bincount(source[at], rows[:, 2] - rows[:, 1], demand.size)
            self.lengths[to, to] = 0
        self.most, self.share = int(self.lengths.sum(1).max()), _length(placed(demand.keys[demand.rank]))

    def arrivals(self, rank: int, count: int) -> Arrivals:
        """The blocks and moves of one rank in ``count`` stages."""
        everyone, stages = range(self.demand.size), in_stages(self.lengths, count)
        received = [self._stages(rank, of, stages) for of in everyone]
        sent = [self._stages(to, rank, stages) for to in everyone]
        blocks, moves = [placed(self.demand.keys[rank])], []
        for stage in range(count):
            incoming, outgoing = [rows[stage] for rows in received], [rows[stage] for rows in sent]
            rows = np.concatenate(outgoing)
            blocks.append(placed(compact(np.concatenate(incoming)[:, 1:])))
            local_rows = Rows(compact(np.stack((rows[:, 0], rows[:, 0] + rows[:, 2] - rows[:, 1]), 1)))
            sent_now, received_now = (tuple(map(_length, x)) for x in (outgoing, incoming))
            moves.append(Move("rows", HOME, local_rows, sent_now, received_now))
        ahead = ahead_of(self.most, self.share, count)
        return Arrivals(tuple(blocks), Transfers(tuple(moves), ahead, tuple(moves)))

    def _stages(self, to: int, of: int, stages: Numbers) -> list[Numbers]:
        """The rows from one rank to another in each stage."""
        rows, source = self._rows[to]
        rows = rows[:0] if of == to else rows[source == of]
        ends = np.concatenate(([0], np.cumsum(stages[:, to, of])))
        length = rows[:, 2] - rows[:, 1]
        line = before(length)  # rows, counted from the first that travels
        pieces, stage, piece_of = split(np.stack((rows[:, 0], line, line + length), 1), tuple(ends.tolist()))
        pieces[:, 1:] += (rows[:, 1] - line)[piece_of, None]
        some = pieces[:, 2] > pieces[:, 1]  # nothing travels between these ranks in other stages
        return [pieces[some & (stage == i)] for i in range(len(stages))]


def _length(rows: Numbers) -> int:
    """The number of positions in placed ranges."""
    return int((rows[:, 2] - rows[:, 1]).sum())


def _by_position(keys: Sequence[Sequence[Range]]) -> tuple[Numbers, Numbers]:
    """The keys of all ranks as placed ranges in global order, and the rank of each."""
    held = [placed(ranges) for ranges in keys]
    everything = np.concatenate(held)
    order = np.argsort(everything[:, 1])
    return everything[order], np.repeat(np.arange(len(held)), [len(x) for x in held])[order]


def seen_by(demand: KeyDemand, queries: Sequence[Range]) -> Numbers:
    """Global positions of the keys that any of the queries sees: ascending ranges that neither overlap nor touch."""
    found = np.concatenate([seen_keys(placed(queries), demand.band, ends) for ends in demand.boundaries()])
    found = found[np.argsort(found[:, 0], kind="stable")]
    end = np.maximum.accumulate(found[:, 1])
    first = np.concatenate(([True], found[1:, 0] > end[:-1]))[: len(found)]
    last = np.concatenate((first[1:], [True]))[: len(found)]
    seen = np.stack((found[first, 0], end[last]), 1)
    if demand.blocks is None:
        return seen
    return within(np.column_stack((seen[:, 0], seen)), demand.blocks.keys_of(queries))[0][:, 1:]


# --------------------------------------------------------------------------- by name

Exchange = Callable[[KeyDemand], Arrivals]
"""A way in which keys and values arrive. All ranks make the same sequence of moves, whatever their own queries see."""

DOUBLE_RING = "double_ring"
_EXCHANGES: dict[str, Exchange] = {
    "all_gather": all_gather,
    "ring": ring,
    DOUBLE_RING: double_ring,
    "needed": needed,
    "replicated": local,
}

_BUILT_IN = frozenset(_EXCHANGES)

_NUMBERED = re.compile(rf"{DOUBLE_RING}_([1-9][0-9]*)")
KV_EXCHANGES = _EXCHANGES.keys()
"""Names of all ways in which keys and values reach a rank, those registered later included."""
ALONG_THE_RING = frozenset({"ring", DOUBLE_RING, "needed"})
"""Those that have no effect where all ranks exchange heads."""
STAGED = frozenset({"all_gather", "needed"})
"""Those whose transfers are cut into stages."""


def arrivals(kv_exchange: str, demand: KeyDemand) -> Arrivals:
    """The arrival of keys and values, by the name that users write as ``kv_exchange=``."""
    name, number = family(kv_exchange)
    return double_ring(demand, number) if number else _EXCHANGES[name](demand)


def family(kv_exchange: str) -> tuple[str, int]:
    """The name without its number, and the number: ``"double_ring_8"`` is a double ring over hosts of 8 adjacent ranks
    each. 0: there is none, so that the hosts are those of the mesh."""
    known = not isinstance(kv_exchange, str) or kv_exchange in _EXCHANGES
    found = None if known else _NUMBERED.fullmatch(kv_exchange)
    return (DOUBLE_RING, int(found[1])) if found else (kv_exchange, 0)


def is_from_outside(kv_exchange: str) -> bool:
    """True for a name that :func:`register_exchange` has added."""
    return family(kv_exchange)[0] not in _BUILT_IN


def register_exchange(name: str, exchange: Exchange) -> None:
    """Add a way in which keys and values arrive, under a name that ``kv_exchange=`` then takes.

    Each plan is checked when it is made: the function is called for every rank, and what it says arrives must be what
    the moves bring, and all that queries see.
    """
    check_name("kv_exchange", name)
    if _EXCHANGES.setdefault(name, exchange) is not exchange:
        raise ValueError(
            f"kv_exchange={name!r} is registered already, as another function. Calls find an exchange by its name. "
            "Choose another name"
        )
