"""The arrival of keys and values at a rank: which of them lie in each step's block, and what each rank sends.

Modes differ here only. If blocks are whole shares of other ranks, a way is a list of visits
(:func:`register_exchange`); ``"needed"`` sends the rows that queries see, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .blocks import BlockMap
from .choices import Limits, doubled, stage_limits, stages_needed
from .layout import check_name
from .ranges import Documents, Numbers, Range, Rows, before, compact, placed
from .tiles import Band, seen_keys, split, within

Visits = Callable[[int, int], list[tuple[int, ...]]]
"""``visits(rank, size)``: for each step, the ranks whose keys and values that step's block holds, one after the other.
The first step is ``(rank,)``, the local block. All ranks have the same number of steps. Keys that an earlier step had
are not used again."""


@dataclass(frozen=True)
class Problem:
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
class Route:
    """The rows that this rank sends and receives before one step, if only needed ones travel.

    Attributes:
        rows: local rows of keys that it sends, those for rank 0 first, then those for rank 1, and so on.
        sent, received: the number of rows for, and from, each rank.
    """

    rows: Rows
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The blocks of keys that a rank attends: the local one, then those that arrive.

    Attributes:
        blocks: placed ranges of each block that may be used.
        routes: what travels before each arriving block; empty if whole shares travel.
        ahead: the number of stages that are under way at once, the same on all ranks.
        pieces: the rows of a whole share that travel together, the same on all ranks. The rows of a piece are a block;
            in an all-gather, those of all ranks.
    """

    blocks: tuple[Numbers, ...]
    routes: tuple[Route, ...] = ()
    ahead: int = 0
    pieces: tuple[tuple[Range, ...], ...] = ()

    @property
    def hops(self) -> int:
        """The number of blocks that arrive: pieces of one share count once."""
        return (len(self.blocks) - 1) // max(1, len(self.pieces))


# --------------------------------------------------------------------------- whole shares of other ranks


def by_visits(visits: Visits, problem: Problem) -> Arrivals:
    """Blocks are shares of other ranks, as far as any rank needs them."""
    size, keys = problem.size, problem.keys
    steps = [_first_visits(visits(r, size)) for r in range(size)]
    last = _last_step(problem, steps)
    return Arrivals(tuple(_usable(keys, sources) for sources in steps[problem.rank][: last + 1]))


def _first_visits(visits: list[tuple[int, ...]]) -> list[list[tuple[int, bool]]]:
    """For each step its sources, each with True if no earlier step has had it."""
    seen: set[int] = set()
    found = []
    for sources in visits:
        found.append([(source, source not in seen) for source in sources])
        seen.update(sources)
    return found


def _last_step(problem: Problem, steps: list[list[list[tuple[int, bool]]]]) -> int:
    """The last step, 0 for the local one, whose keys any rank sees."""
    most, last = len(steps[0]) - 1, 0
    if not most:
        return 0
    keys, source = _by_position(problem.keys)
    for queries, blocks in zip(problem.queries, steps, strict=True):
        step_of = {source: step for step, block in enumerate(blocks) for source, new in block if new}
        last = max([last, *(step_of.get(of, 0) for of in _sources(_seen(problem, queries), keys, source))])
        if last == most:
            break
    return last


def _usable(keys: Sequence[Sequence[Range]], sources: list[tuple[int, bool]]) -> Numbers:
    """The keys of a step's block that no earlier step has had, as placed ranges."""
    blocks = [np.empty((0, 3), np.int64)]
    offset = 0
    for source, new in sources:
        held = placed(keys[source], offset)
        blocks += [held] if new else []
        offset += _length(held)
    return np.concatenate(blocks)


# A rank cannot hide the kernels of the last block that arrives behind a transfer. On few ranks these are much of its
# work, so there a share travels in two pieces. Each has the half of either half of the share: in the head-tail layout
# all ranks then have equal work in each piece, as they have in whole shares. On four ranks and a link that is as slow
# as the computation is long, a ring takes 1.21 times as long as either if shares are whole (benchmarks/overlap.py),
# 1.19 times if the pieces are heads and tails, and 1.12 times with these.
_IN_PIECES_UP_TO = 4  # ranks
_LEAST_PIECE = 512  # rows; kernels are slower on fewer


def in_pieces(problem: Problem, whole: Arrivals) -> Arrivals:
    """The same blocks, of one share each, in pieces if the ranks are few and the shares long."""
    share = _length(placed(problem.keys[problem.rank]))
    pieces = _pieces(share, 1 if problem.size > _IN_PIECES_UP_TO or share < 2 * _LEAST_PIECE else 2)
    local, *arriving = whole.blocks
    return Arrivals((local, *(_piece(block, rows) for block in arriving for rows in pieces)), pieces=pieces)


def gathered(problem: Problem, whole: Arrivals) -> Arrivals:
    """The same block, of all shares, in stages: in each, the same piece of every share travels. All of them are under
    way at once."""
    if not whole.hops:
        return whole
    share, count = _length(placed(problem.keys[0])), problem.stages
    if not isinstance(count, int):
        count = doubled((problem.size - 1) * share, count or ())
    pieces, (local, block) = _pieces(share, min(count, max(1, share // 2))), whole.blocks
    of = block[:, 0] // share
    stages = []
    for rows in pieces:
        length = sum(stop - start for start, stop in rows)
        parts = [_piece(block[of == source] - [source * share, 0, 0], rows) for source in range(problem.size)]
        stages.append(np.concatenate([part + [source * length, 0, 0] for source, part in enumerate(parts)]))
    return Arrivals((local, *stages), ahead=len(pieces), pieces=pieces)


def _pieces(share: int, count: int) -> tuple[tuple[Range, ...], ...]:
    """The rows of a share in so many pieces, each of which has an equal part of either half of the share."""
    if count == 1:
        return (((0, share),),)
    cuts = [share * i // (2 * count) for i in range(2 * count + 1)]
    ranges = [*pairwise(cuts)]
    return tuple((ranges[i], ranges[count + i]) for i in range(count))


def _piece(block: Numbers, rows: Sequence[Range]) -> Numbers:
    """The part of a block, placed ranges, that some of its rows are, which then lie side by side."""
    offset, first, last = block.T
    found, at = [], 0
    for start, stop in rows:
        low, high = np.maximum(offset, start), np.minimum(offset + last - first, stop)
        cut = np.column_stack((at + low - start, first + low - offset, first + high - offset))
        found.append(cut[high > low])
        at += stop - start
    return np.concatenate(found)


# --------------------------------------------------------------------------- only what is needed

# So many stages are under way, and at most as many rows as so many ranks hold. A rank with much to do in one stage then
# seldom holds up the others. In backward gradients travel beside keys, and the more stages of keys are under way, the
# longer the first takes to arrive: on TCP, keys for all ranks share the link.
_AHEAD = 3
_USUAL = stage_limits("needed")


def needed(problem: Problem) -> Arrivals:
    """Blocks are the rows that this rank's queries see, each once, from the ranks that hold them."""
    flows = _Flows(problem)
    if not flows.most:
        return Arrivals((placed(problem.keys[problem.rank]),))
    count = problem.stages
    if not isinstance(count, int):
        count = stages_needed(_USUAL if count is None else count, flows.most, flows.share)
    return flows.arrivals(problem.rank, min(count, flows.most))


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

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        keys, source = _by_position(problem.keys)
        self.lengths = np.zeros((problem.size, problem.size), np.int64)
        self._rows: list[tuple[Numbers, Numbers]] = []  # those for each rank, and who holds them
        for to in range(problem.size):
            rows, at = within(keys, _seen(problem, problem.queries[to]))
            self._rows.append((rows, source[at]))
            self.lengths[to] = np.bincount(source[at], rows[:, 2] - rows[:, 1], problem.size)
            self.lengths[to, to] = 0
        self.most, self.share = int(self.lengths.sum(1).max()), _length(placed(problem.keys[problem.rank]))

    def arrivals(self, rank: int, count: int) -> Arrivals:
        """The blocks and routes of one rank in so many stages."""
        everyone, stages = range(self.problem.size), in_stages(self.lengths, count)
        received = [self._stages(rank, of, stages) for of in everyone]
        sent = [self._stages(to, rank, stages) for to in everyone]
        blocks, routes = [placed(self.problem.keys[rank])], []
        for stage in range(count):
            incoming, outgoing = [rows[stage] for rows in received], [rows[stage] for rows in sent]
            rows = np.concatenate(outgoing)
            blocks.append(placed(compact(np.concatenate(incoming)[:, 1:])))
            local = np.stack((rows[:, 0], rows[:, 0] + rows[:, 2] - rows[:, 1]), 1)
            routes.append(Route(Rows(compact(local)), *(tuple(map(_length, x)) for x in (outgoing, incoming))))
        return Arrivals(tuple(blocks), tuple(routes), ahead_of(self.most, self.share, count))

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


def _seen(problem: Problem, queries: Sequence[Range]) -> Numbers:
    """Global positions of the keys that any of the queries sees: ascending ranges that neither overlap nor touch."""
    found = np.concatenate([seen_keys(placed(queries), problem.band, ends) for ends in problem.boundaries()])
    found = found[np.argsort(found[:, 0], kind="stable")]
    end = np.maximum.accumulate(found[:, 1])
    first = np.concatenate(([True], found[1:, 0] > end[:-1]))[: len(found)]
    last = np.concatenate((first[1:], [True]))[: len(found)]
    seen = np.stack((found[first, 0], end[last]), 1)
    if problem.blocks is None:
        return seen
    return within(np.column_stack((seen[:, 0], seen)), problem.blocks.keys_of(queries))[0][:, 1:]


def _sources(seen: Numbers, keys: Numbers, source: Numbers) -> list[int]:
    """The ranks that hold any of the positions ``seen``."""
    return list(np.unique(source[within(keys, seen)[1]]).tolist())


# --------------------------------------------------------------------------- by name

_ARRIVALS: dict[str, Callable[[Problem], Arrivals]] = {}
_VISITS: dict[str, Visits] = {}

KV_EXCHANGES = _ARRIVALS.keys()
"""Names of all ways in which keys and values reach a rank, those registered later included."""
STAGED = frozenset({"all_gather", "needed"})
"""Those whose transfers are cut into stages."""


def arrivals(kv_exchange: str, problem: Problem) -> Arrivals:
    """The arrival of keys and values, by the name that users write as ``kv_exchange=``."""
    return _ARRIVALS[kv_exchange](problem)


def register_exchange(name: str, visits: Visits) -> None:
    """Add a way in which keys and values arrive. Its transfers go by the same name in ``ops.exchange``."""
    check_name("kv_exchange", name)
    if name in _ARRIVALS and _VISITS.get(name) is not visits:
        raise ValueError(
            f"kv_exchange={name!r} is registered already, with other visits. Calls find an exchange by its name. "
            "Choose another name"
        )
    _VISITS[name] = visits
    _ARRIVALS[name] = lambda problem: by_visits(visits, problem)


register_exchange("all_gather", lambda rank, size: [(rank,), tuple(range(size))])
register_exchange("ring", lambda rank, size: [((rank - hop) % size,) for hop in range(size)])
_GATHER, _RING = _ARRIVALS["all_gather"], _ARRIVALS["ring"]
_ARRIVALS["all_gather"] = lambda problem: gathered(problem, _GATHER(problem))
_ARRIVALS["ring"] = lambda problem: in_pieces(problem, _RING(problem))
register_exchange("replicated", lambda rank, size: [(rank,)])  # every rank holds all keys and values
_ARRIVALS["needed"] = needed
