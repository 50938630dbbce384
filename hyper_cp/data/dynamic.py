"""Plan a context-parallel degree per micro-batch: the samples of a global batch that each group of ranks runs.

Pure Python, no tensors, no communication: every rank computes the same plan from the same lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from ..mesh.arguments import check_amount, check_int, check_type
from ..mesh.cp_mesh import divisors
from ..mesh.family import MeshFamily
from ..schedule import layout as layouts

_COUNT = "It is a number of tokens or ranks"


@dataclass(frozen=True)
class CostModel:
    """Seconds that samples take, forward and backward. Only the ratios matter to a plan.

    A micro-batch of degree d takes each of its d ranks::

        fixed + (linear * tokens + sum(attention(length))) / d + exchange * tokens * (d - 1) / d

    :func:`hyper_cp.cost_model` computes the numbers of a model from its configuration.

    Args:
        linear: per token, for everything that is not attention: recurrent layers too.
        quadratic: per visible pair of a query and a key: a causal sample of S tokens has S**2 / 2 (for full
            attention pass twice the time of a pair).
        exchange: per token received from another rank of the group and not hidden behind computation. Every rank
            receives the keys and values of all other ranks.
        fixed: per micro-batch, for launching its kernels, whatever its size.
        windows: pairs of a window and seconds: per visible pair of the layers whose queries see that many keys only
            (``quadratic`` is then that of the others).
    """

    linear: float
    quadratic: float
    exchange: float = 0.0
    fixed: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        values = {name: value for name, value in vars(self).items() if name != "windows"}
        for number, (window, seconds) in enumerate(self.windows):
            check_int(f"CostModel: windows[{number}][0]", window, _COUNT)
            values[f"windows[{number}][1]"] = seconds
        for name, value in values.items():
            why = "It is a part of the seconds of a step. Measure it, or use CostModel.of_transformer(...)"
            check_amount(f"CostModel: {name}", value, why, zero=True)
        if not self.linear + self.quadratic:
            raise ValueError(
                "CostModel: linear=0 and quadratic=0. Tokens would take no time, and all plans would cost the same. "
                "Give one of them"
            )

    def attention(self, length: int) -> float:
        """Seconds of the attention of one causal sample on one rank."""
        found = self.quadratic * length**2 / 2
        for window, seconds in self.windows:
            seen = min(window, length)
            found += seconds * (length * seen - seen**2 / 2)
        return found

    @classmethod
    def of_transformer(
        cls, *, parameters: float, layers: int, hidden: int, flops_per_second: float = 1.0, **more: Any
    ) -> CostModel:
        """The costs of a transformer, from its size: 6 FLOPs per parameter and token, and per visible pair and layer
        4 * hidden forward and 2.5 times that backward (which computes the logits again).

        Args:
            parameters: number of parameters that every token is multiplied with (without the embedding; of experts
                the active ones).
            hidden: query heads times head dim.
            flops_per_second: speed that a rank reaches; with 1, all costs are in FLOPs.
            more: ``exchange`` and ``fixed``.
        """
        given = {"parameters": parameters, "layers": layers, "hidden": hidden, "flops_per_second": flops_per_second}
        for name, value in given.items():
            why = "The time of a token follows from sizes of the model, and from what a device computes in a second"
            check_amount(name, value, why, zero=name != "flops_per_second")
        return cls(6 * parameters / flops_per_second, 14 * hidden * layers / flops_per_second, **more)

    def shared(self, tokens: int, lengths: Iterable[int], degree: int) -> float:
        """Seconds on each rank for samples of these lengths in ``tokens``, shared by ``degree`` ranks; without
        ``fixed``."""
        attention = sum(map(self.attention, lengths))
        return (self.linear * tokens + attention + self.exchange * tokens * (degree - 1)) / degree


@dataclass(frozen=True)
class MicroBatch:
    """Samples that run together, packed one after the other, on one group of adjacent ranks.

    Attributes:
        degree: ranks that share the sequence: ``family.cp(degree)`` is their mesh.
        ranks: their places in the family.
        samples: indices into the lengths of the plan, in the order of packing.
        lengths: of these samples, in tokens.
        length: tokens of the packed sequence with its padding, a length that splits evenly over the ranks.
        cost: seconds the cost model expects.
    """

    degree: int
    ranks: range
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    length: int
    cost: float

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Boundaries of the packed samples and the padding, for ``handler.documents`` or ``documents=``; None if the
        sequence is one sample and nothing else."""
        if self.lengths == (self.length,):
            return None
        return tuple(dict.fromkeys((*accumulate(self.lengths, initial=0), self.length)))


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one step, in an order that every rank keeps.

    Attributes:
        micro_batches: widest first. Two micro-batches that share ranks come in this order on all of them, so no rank
            waits for one that waits for it.
        lower_bound: seconds that no plan can beat: the mean work per rank, or the longest sample at its best degree.
        of: the samples in the data set, if the plan is one of :class:`~hyper_cp.DynamicBatches`. Ranks compare them.
    """

    size: int
    micro_batches: tuple[MicroBatch, ...]
    lower_bound: float
    of: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """The micro-batches of a rank, given by its place in the family, in order. There may be none."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.size:
            raise ValueError(
                f"rank={rank!r} is not a place in this plan for {self.size} ranks: 0 to {self.size - 1}. A plan "
                "numbers the ranks of its family. Pass family.rank"
            )
        return [m for m in self.micro_batches if rank in m.ranks]

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """For each micro-batch the round in which it runs, if all ranks begin a round together: as early as its ranks
        are free."""
        ends, _ = self._run([1] * len(self.micro_batches))
        return tuple(int(end) - 1 for end in ends)

    @cached_property
    def finish(self) -> tuple[float, ...]:
        """Seconds after which each rank has run its list, waiting for the other ranks of a group included."""
        _, clock = self._run([m.cost for m in self.micro_batches])
        return tuple(clock)

    def _run(self, costs: Sequence[float]) -> tuple[list[float], list[float]]:
        """When each micro-batch ends, and each rank, if one begins as soon as all of its ranks are free."""
        ends, clock = [], [0.0] * self.size
        for m, cost in zip(self.micro_batches, costs, strict=True):
            ends.append(max(clock[m.ranks.start : m.ranks.stop]) + cost)
            clock[m.ranks.start : m.ranks.stop] = [ends[-1]] * len(m.ranks)
        return ends, clock

    @cached_property
    def makespan(self) -> float:
        """Seconds of the step: when the last rank is done."""
        return max(self.finish)

    @cached_property
    def seconds_in_steps(self) -> float:
        """Seconds of the step if all ranks begin each micro-batch together: the sum over rounds of the longest."""
        longest: dict[int, float] = {}
        for at, m in zip(self.rounds, self.micro_batches, strict=True):
            longest[at] = max(longest.get(at, 0.0), m.cost)
        return sum(longest.values())


@dataclass(frozen=True)
class _Sample:
    index: int
    length: int
    degree: int
    weight: float


class DynamicContextParallel:
    """Plans which samples run together, and on which ranks, so that all ranks finish at the same time.

    A long sample gets a group of many ranks; short samples run on one rank, packed up to the budget. Among plans that
    are nearly as fast as the fastest (see ``slack``) the narrowest wins. By the cost model no plan is slower than the
    best static degree, up to ``slack``::

        scheduler = DynamicContextParallel(family, 16_384, cost)
        plan = scheduler.plan(lengths)  # of the global batch: the same on every rank
        for m in plan.of_rank(family.rank):
            handler = ContextParallelHandler(family.cp(m.degree), "head_tail")
            tokens = handler.dispatch(pack(m.samples), 1, pad_value=0)  # attention on family.cp(m.degree)
            (loss_sum(tokens, m.documents) / tokens_of_the_global_batch).backward()
        # then all-reduce every gradient (sum) in family.dp(1).get_group(): over all ranks

    **Loss and gradients.** Divide the *sum* of per-token losses by the number of loss tokens of the whole global
    batch. Each rank's loss then is its tokens' share of the global mean, whatever the degree they ran at, so that
    losses and gradients *summed* over all ranks are those of one device. (Averages per micro-batch would depend on
    the plan.)

    **Between the ranks.** Ranks have different numbers of micro-batches, perhaps none, so inside one only its own
    group may communicate. Sum the gradients after the last one; a rank without work contributes zeros. DDP outside
    ``no_sync``, and FSDP that gathers parameters per module, communicate over all ranks in every forward or backward:
    they would wait forever for a rank without that micro-batch. For these, :func:`hyper_cp.dynamic_steps` gives every
    rank the same number of steps.

    Args:
        family: the :class:`~hyper_cp.MeshFamily` to plan for, or a number of ranks.
        tokens_per_rank: the budget: tokens that a rank can hold in one micro-batch.
        cost: the cost of samples.
        degrees: allowed degrees, of those of the family (of the divisors of a number). Default: all. A group of degree
            d is d adjacent ranks from a multiple of d. Groups nest if each degree divides the next one, and then
            nobody waits for another rank inside a step; otherwise waiting is part of the plan.
        layout: of the sequence on the ranks; determines which lengths split evenly. The costs assume that the
            ranks of a group have equal work, which under ``"contiguous"`` is true of pure Ulysses only. For styles with
            ``load_balance=True`` pass ``"head_tail"``: they cut shares into halves, too.
        slack: share of the step time by which a plan may be slower than the fastest and still be preferred for being
            narrower: it communicates less, and the cost model may not include all of that.
        in_steps: True if all ranks begin each micro-batch together, as FSDP2 makes them if it gathers parameters in
            every step of :func:`hyper_cp.dynamic_steps`. The plan with the least :attr:`Plan.seconds_in_steps` wins
            then, which takes longer to find (``DynamicBatches`` plans ahead).

    Source: Megatron-LM's dynamic context parallelism (hybrid data x context parallelism, PRs #2054 and #2282), where a
    sample's degree is the least power of two that keeps the budget. Here balance may widen it further.
    """

    def __init__(
        self,
        family: MeshFamily | int,
        tokens_per_rank: int,
        cost: CostModel,
        *,
        degrees: Sequence[int] | None = None,
        layout: str = "head_tail",
        slack: float = 0.02,
        in_steps: bool = False,
    ) -> None:
        todo = "Plans are compared by its seconds. Pass a CostModel, such as CostModel.of_transformer(...)"
        check_type("cost", cost, CostModel, todo)
        if isinstance(family, MeshFamily):
            self.size, works = family.size, list(family.degrees)
        else:
            check_int("family", family, _COUNT)
            self.size, works = family, divisors(family)
        self.cost, self.layout, self.slack, self.in_steps = cost, layouts.check_layout(layout), slack, in_steps
        self.degrees = _checked_degrees(degrees, self.size, works)
        self._multiples = {d: layouts.length_multiple(layout, d) for d in self.degrees}
        check_int("tokens_per_rank", tokens_per_rank, _COUNT)
        self._per_rank = layouts.length_multiple(layout, 1)
        if tokens_per_rank < self._per_rank:
            raise ValueError(
                f"tokens_per_rank={tokens_per_rank} is less than {self._per_rank}. A rank holds at least one token of "
                f"each of its chunks in layout={layout!r}. Pass what fits into the memory of a device"
            )
        self.tokens_per_rank = tokens_per_rank
        why = "Plans that are slower by at most this share of the step time count as equal"
        check_amount("slack", slack, why, zero=True)

    def capacity(self, degree: int) -> int:
        """Tokens of the longest sequence that ``degree`` ranks can hold."""
        check_int("degree", degree, _COUNT)
        return self.tokens_per_rank // self._per_rank * self._per_rank * degree

    def plan(self, lengths: Sequence[int]) -> Plan:
        """Plan one step.

        Args:
            lengths: tokens of every sample of the global batch.

        Returns:
            The :class:`Plan`; the same for the same arguments, on every rank.

        Raises:
            ValueError: if a sample does not fit into the budget at the widest degree.
        """
        lengths = listed("lengths", lengths)
        least = [self.least_degree(lengths, i) for i in range(len(lengths))]
        if not lengths:
            return Plan(self.size, (), 0.0)
        alone = [
            {d: self.cost.shared(length, [length], d) for d in self.degrees if d >= low}
            for length, low in zip(lengths, least, strict=True)
        ]
        bound = max(
            sum(min(d * seconds for d, seconds in row.items()) for row in alone) / self.size,
            max(min(row.values()) for row in alone) + self.cost.fixed,
        )
        plans: dict[tuple[int, tuple[int, ...]], Plan] = {}
        for packed, choice in self._choices(lengths, least, bound):
            if (packed, choice) in plans:
                continue
            samples = [_Sample(i, lengths[i], d, alone[i][d]) for i, d in enumerate(choice)]
            plans[packed, choice] = plan = Plan(self.size, tuple(self._assign(samples, packed)), bound)
            if self._seconds(plan) <= (1 + self.slack) * bound:
                return plan
        fastest = min(map(self._seconds, plans.values()))
        return next(plan for plan in plans.values() if self._seconds(plan) <= (1 + self.slack) * fastest)

    def _seconds(self, plan: Plan) -> float:
        return plan.seconds_in_steps if self.in_steps else plan.makespan

    def _choices(self, lengths: list[int], least: list[int], bound: float) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Candidates from narrow to wide: the degree at which samples are packed, and the degree of every sample.

        The first ones pack at the narrowest degree and make samples ever wider: as narrow as the budget allows, then
        wide enough that none takes longer than a cap, which falls from the time of the longest sample to a fraction of
        the step. The last ones pack at wider degrees. Every static degree is among the candidates.
        """
        narrowest = self.degrees[0]
        table = [
            {
                d: self.cost.shared(length if d == narrowest else self._padded(length, d), [length], d)
                for d in self.degrees
                if d >= low
            }
            for length, low in zip(lengths, least, strict=True)
        ]
        longest = table[lengths.index(max(lengths))].values()
        for cap in sorted({float("inf"), *longest, *(bound * 0.7**k for k in range(24))}, reverse=True):
            choice = [_narrowest(row, cap) for row in table]
            yield narrowest, tuple(choice)
            yield narrowest, tuple(self._evened(choice, lengths))
        for packed in self.degrees[1:]:
            yield packed, tuple(max(packed, low) for low in least)

    def _evened(self, choice: list[int], lengths: list[int]) -> list[int]:
        """``choice`` with as many samples at every degree as its groups can share evenly: the longest of the others go
        one degree wider."""
        choice = list(choice)
        for degree, wider in pairwise(self.degrees):
            own = sorted((i for i, d in enumerate(choice) if d == degree), key=lambda i: (-lengths[i], i))
            for index in own[: len(own) % (self.size // degree)]:
                choice[index] = wider
        return choice

    def least_degree(self, lengths: Sequence[int], index: int) -> int:
        """The narrowest degree at which sample ``index`` fits; ``ValueError`` if there is none."""
        length = lengths[index]
        check_int(f"lengths[{index}]", length, _COUNT)
        fits = [d for d in self.degrees if length <= self.capacity(d)]
        if fits:
            return fits[0]
        widest = self.degrees[-1]
        need = layouts.length_multiple(self.layout, 1) * -(-length // layouts.length_multiple(self.layout, widest))
        raise ValueError(
            f"lengths[{index}]={length} does not fit. The widest degree is {widest}, and {widest} ranks with "
            f"tokens_per_rank={self.tokens_per_rank} hold {self.capacity(widest)} tokens. Cut the sample to that, "
            f"raise tokens_per_rank to {need}, or plan for more ranks with a degree of at least "
            f"{-(-length // self.capacity(1))}"
        )

    def _padded(self, length: int, degree: int) -> int:
        multiple = self._multiples[degree]
        return -(-length // multiple) * multiple

    def _micro_batch(self, degree: int, group: int, samples: Sequence[_Sample]) -> MicroBatch:
        samples = sorted(samples, key=lambda s: s.index)
        lengths = tuple(s.length for s in samples)
        padded = self._padded(sum(lengths), degree)
        cost = self.cost.fixed + self.cost.shared(padded, lengths, degree)
        ranks = range(group * degree, (group + 1) * degree)
        return MicroBatch(degree, ranks, tuple(s.index for s in samples), lengths, padded, cost)

    def _assign(self, samples: list[_Sample], packed: int) -> list[MicroBatch]:
        """Assign samples from the widest degree to the narrowest: the longest first, to the group that is free first.
        Samples of degree ``packed`` share sequences."""
        clock, found = [0.0] * self.size, []
        for degree in reversed(self.degrees):
            groups = [slice(first, first + degree) for first in range(0, self.size, degree)]
            capacity = self.capacity(degree)
            queue = sorted((s for s in samples if s.degree == degree), key=lambda s: (-s.weight, s.index))
            # The fixed cost of a micro-batch of packed samples is spread over its tokens.
            seconds = [s.weight + self.cost.fixed * (s.length / capacity if degree == packed else 1.0) for s in queue]
            given = _balance(queue, seconds, [max(clock[group]) for group in groups])
            for number, own in enumerate(given):
                packs = _pack(own, capacity) if degree == packed else [[s] for s in own]
                batches = [self._micro_batch(degree, number, pack) for pack in packs]
                batches.sort(key=lambda m: -m.cost)  # those of one round take about as long
                if batches:
                    clock[groups[number]] = [max(clock[groups[number]]) + sum(m.cost for m in batches)] * degree
                found += batches
        return found


def _narrowest(row: dict[int, float], cap: float) -> int:
    """The narrowest degree at which a sample takes at most ``cap`` seconds, else the fastest."""
    return next((d for d, weight in row.items() if weight <= cap), min(row, key=lambda d: (row[d], d)))


def _balance(queue: list[_Sample], seconds: list[float], free_at: list[float]) -> list[list[_Sample]]:
    """Give each sample in turn to the group that is free first; returns the samples of every group."""
    given: list[list[_Sample]] = [[] for _ in free_at]
    free = [(at, group) for group, at in enumerate(free_at)]
    heapq.heapify(free)
    for sample, duration in zip(queue, seconds, strict=True):
        at, group = free[0]
        given[group].append(sample)
        heapq.heapreplace(free, (at + duration, group))
    return given


def _pack(samples: list[_Sample], capacity: int) -> list[list[_Sample]]:
    """Pack samples into few sequences of at most ``capacity`` tokens: first fit decreasing."""
    packs: list[list[_Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: (-s.length, s.index)):
        where = next((i for i, left in enumerate(room) if left >= sample.length), None)
        if where is None:
            packs.append([sample])
            room.append(capacity - sample.length)
        else:
            packs[where].append(sample)
            room[where] -= sample.length
    return packs


def _checked_degrees(degrees: Sequence[int] | None, size: int, works: list[int]) -> tuple[int, ...]:
    chosen = works if degrees is None else listed("degrees", degrees)
    wrong = [d for d in chosen if not isinstance(d, int) or isinstance(d, bool) or d not in works]
    if wrong or not chosen:
        which = f" ({wrong[0]!r} is not)" if wrong else ""
        raise ValueError(
            f"degrees={chosen!r} must be among the degrees of these {size} ranks: {', '.join(map(str, works))}{which}. "
            "Each is the size of meshes into which the family divides. Leave out the others, or pass None for all"
        )
    return tuple(sorted(set(chosen)))


def listed(name: str, given: Iterable[int]) -> list[int]:
    """Whole numbers as a list of Python's; ``TypeError`` if there are not several."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}. It lists whole numbers. Pass a list of ints")
    values: Any = given.tolist() if hasattr(given, "tolist") else given  # a tensor or an array
    return [x.item() if hasattr(x, "item") else x for x in values]
