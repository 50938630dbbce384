"""The choices of ``ulysses_degree="auto"``, ``head_groups="auto"`` and ``exchange_stages="auto"``: the planner's cost
of attention, with typical figures where none are known.

All are pure functions of what all ranks have in common. The degree is chosen at the first call with some numbers of
heads, and holds for all lengths, masks and documents that come later: it may be part of a compiled graph, and must not
depend on which batch came first. So it assumes ``TOKENS`` tokens a rank, heads of ``HEAD_DIM``, bf16, a causal mask and
the datasheet's links of a ``TYPICAL`` device. Groups of heads are chosen for each call, and stages of an exchange
for each schedule, with the same links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from .. import arrivals
from ..arrivals import Arrivals
from ..build import assembled
from ..documents import PackedDocuments
from ..ranges import length_of
from ..tiles import Band
from .inputs.cluster import Cluster
from .inputs.model import ModelShape
from .inputs.profiles import PROFILES
from .strategies import KV_EXCHANGES, Estimator, Problem, Strategy
from .timeline import BACKWARD, Kernels, attention_time, grouped_ulysses
from .traffic import Ranks, heads_after_sharing, transfers
from .work import rank_work

logger = logging.getLogger(__name__)

TOKENS, HEAD_DIM, ELEMENT = 8192, 128, 2
TYPICAL = {
    "cuda": PROFILES["h100"],
    "npu": PROFILES["910b"],
    "cpu": Cluster("a CPU", 2, 64.0, 20.0, 0.1, inside_gb_s=2.0, between_gb_s=1.0, launch_us=50.0),
}
"""The figures that stand for a type of device; those of h100 for all others."""
EQUAL = 1.02
"""Choices within this of the fastest are equally good: the largest degree of them is taken, which needs the least
memory, the smallest number of groups, and the usual number of stages. :func:`_cuts_are_cheap` is the exception."""
MOST_STAGES = {"needed": 4, "all_gather": 1}
"""The most stages that are chosen, but between hosts on gloo. More of ``"needed"`` seldom gain anything on fast links,
and those of an all-gather have been measured on gloo only."""
MOST_GROUPS = 4
"""The most groups of heads that are chosen between hosts on gloo for being as fast as fewer: a group of few heads may
be too little work for all threads of a rank."""
SAID: set[tuple[str | int, ...]] = set()
"""Choices that were logged at level INFO."""


def _say(message: str, choice: tuple[int, ...], gain: str) -> None:
    """Log a choice: at level INFO, or at level DEBUG if the same was chosen before, for other documents say."""
    level = logging.DEBUG if (message, *choice) in SAID else logging.INFO
    if len(SAID) < 4096:
        SAID.add((message, *choice))
    logger.log(level, message + "%s", *choice, gain)


def typical(device: str) -> Cluster:
    """The figures that stand for a type of device."""
    return TYPICAL.get(device, TYPICAL["cuda"])


def best_degree(
    degrees: tuple[int, ...],
    size: int,
    per_host: int,
    heads: tuple[int, int],
    kv_exchange: str,
    layout: str,
    device: str,
) -> int:
    """The Ulysses degree for attention on a cp mesh.

    Args:
        degrees: the possible ones, ascending.
        size, per_host: ranks of the mesh, and how many of them share a host.
        heads: query heads, and key/value heads.
        kv_exchange, layout: of the ring that a degree leaves. For those that the planner does not know, the largest
            degree is taken.
    """
    if kv_exchange not in KV_EXCHANGES or heads[0] % heads[1]:
        return degrees[-1]
    seconds = {d: attention_seconds(d, size, per_host, heads, kv_exchange, layout, device) for d in degrees}
    fastest = min(seconds.values())
    return max(degree for degree, time in seconds.items() if time <= EQUAL * fastest)


@cache
def attention_seconds(
    degree: int, size: int, per_host: int, heads: tuple[int, int], kv_exchange: str, layout: str, device: str
) -> float:
    """Seconds of attention of one layer, forward and backward."""
    model = ModelShape(1, heads[0], heads[0] * HEAD_DIM, 1, kv_heads=heads[1], head_dim=HEAD_DIM)
    cluster = replace(typical(device), gpus_per_host=per_host)
    documents = PackedDocuments([[0, TOKENS * size]])
    problem = Problem(model, cluster, size, documents, True, 1, ELEMENT, 1.0, size, 1.0)
    # Layouts by documents deal a single document as head-tail does.
    known = layout if layout == "contiguous" else "head_tail"
    exchange = None if degree == size else kv_exchange
    time = Estimator(problem).cost(Strategy(size, degree, exchange, known, "none", False)).attention
    return time.forward + time.backward


def hosts_matter(kv_exchange: str, device: str) -> bool:
    """True if the choice of stages depends on which ranks share a host."""
    return device == "cpu" or MOST_STAGES.get(kv_exchange, 1) > 1


def stages_vary(kv_exchange: str, device: str, ranks: int, per_host: int) -> bool:
    """True if there is a choice of stages."""
    return MOST_STAGES.get(kv_exchange, 1) > 1 or _cuts_are_cheap(device, ranks, per_host)


def _cuts_are_cheap(device: str, ranks: int, per_host: int) -> bool:
    """True between hosts on gloo, where the largest of equally good numbers of groups and of stages is taken.

    Links there are seldom as fast as the profile says. And gloo has one connection for both directions: between few and
    long messages a rank says that it is ready to receive behind a long one of its own, which is not in the model
    (benchmarks/README.md has it on real links).
    """
    return device == "cpu" and ranks > per_host


# --------------------------------------------------------------------------- groups of heads


def visible_pairs(length: int, band: Band) -> int:
    """About the number of pairs of a query and a key that a band leaves of ``length`` positions."""
    lower, upper = band
    width = length // 2 if 0 in (lower, upper) else length
    return length * (width if lower is None or upper is None else min(width, upper - lower + 1))


@lru_cache(maxsize=1024)  # each batch of packed documents has other pairs
def fastest_groups(
    numbers: tuple[int, ...],
    degree: int,
    per_host: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    tokens: int,
    pairs: int,
    element: int,
    device: str,
) -> int:
    """The fewest groups of heads whose attention, forward and backward, takes within ``EQUAL`` of the shortest time.
    Between hosts on gloo it is the most of them up to ``MOST_GROUPS``.

    Args:
        numbers: the possible ones.
        degree, per_host: ranks that exchange heads, and ranks that share a host.
        heads: of queries and of keys, before the exchange.
        dims: of keys and of values.
        tokens: of this rank, all batch rows together.
        pairs: of a query and a key that each head of a rank attends.
        element: bytes of an element.
        device: its type, for which a typical profile stands.
    """
    cluster, (queries, keys), (dim, value_dim) = typical(device), heads, dims
    inside = degree <= per_host
    link = cluster.inside if inside else cluster.between
    each = (cluster.inside_us if inside else cluster.between_us) * 1e-6
    work = 2.0 * pairs * queries / degree * (dim + value_dim)
    kernels = work / cluster.flops("forward_share"), BACKWARD * work / cluster.flops("backward_share")
    byte = tokens * element * (degree - 1) / degree / link
    travel = byte * (queries * dim + heads_after_sharing(keys, degree) * (dim + value_dim)), byte * queries * value_dim
    seconds = {number: grouped_ulysses(number, kernels, travel, each) for number in numbers}
    fastest = min(seconds.values())
    equal = [number for number, found in seconds.items() if found <= EQUAL * fastest]
    best = min(equal)
    if _cuts_are_cheap(device, degree, per_host):
        best = max(number for number in equal if number <= max(best, MOST_GROUPS))
    _say(
        'head_groups="auto": %d groups for %d query and %d key/value heads over ulysses_degree=%d, %d tokens a rank',
        (best, queries, keys, degree, tokens),
        f": {seconds[best] * 1e3:.3g} ms instead of {seconds[1] * 1e3:.3g} ms at once, by the cost of {cluster.name}",
    )
    return best


# --------------------------------------------------------------------------- stages of an exchange


@dataclass(frozen=True)
class FastestStages:
    """The number of stages whose attention, forward and backward, is the fastest on the rank of a problem, or the
    usual number if that is within ``EQUAL`` of it. Between hosts on gloo it is the largest number within ``EQUAL``, and
    may be more than :data:`MOST_STAGES`.

    Attributes:
        kv_exchange: one that has stages.
        ulysses, per_host: ranks that exchange heads, and ranks that share a host.
        heads: of queries and of keys on a rank, after that exchange.
        dims: of keys and of values.
        batch: batch rows.
        element: bytes of an element.
        device: its type, for which a typical profile stands.
    """

    kv_exchange: str
    ulysses: int
    per_host: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    element: int
    device: str

    def __call__(self, problem: arrivals.Problem, numbers: Sequence[int], in_stages: Callable[[int], Arrivals]) -> int:
        """The choice among ``numbers``, the usual one first (see :data:`hyper_cp.schedule.arrivals.ChooseStages`)."""
        usual = found = numbers[0]
        cheap = _cuts_are_cheap(self.device, self.ulysses * problem.size, self.per_host)
        numbers = [number for number in numbers if cheap or number <= max(usual, MOST_STAGES[self.kv_exchange])]
        gain, rows = "", length_of(problem.queries[problem.rank])
        if len(numbers) > 1:
            seconds: dict[int, float] = {}
            for number in sorted(numbers):
                seconds[number] = self.seconds(problem, in_stages(number))
                if number >= usual and seconds[number] > EQUAL * min(seconds.values()):
                    break  # so do more of them
            best, name = min(seconds, key=seconds.__getitem__), typical(self.device).name
            equal = [number for number in seconds if seconds[number] <= EQUAL * seconds[best]]
            found = max(equal) if cheap else usual if usual in equal else best
            gain = f": {seconds[found] * 1e3:.3g} ms, {seconds[usual] * 1e3:.3g} ms in {usual}, by the cost of {name}"
        if found > 1 or len(numbers) > 1:
            _say(
                'exchange_stages="auto": %d stages for %d query and %d key/value heads on %d ranks, %d tokens each',
                (found, *self.heads, problem.size, rows),
                gain,
            )
        return found

    def seconds(self, problem: arrivals.Problem, arriving: Arrivals) -> float:
        """Seconds of attention of the problem's rank, given the keys that arrive there."""
        (queries, keys), cluster = self.heads, typical(self.device)
        dim = max(1, sum(self.dims) // 2)
        model = ModelShape(1, queries * self.ulysses, 1, 1, kv_heads=keys * self.ulysses, head_dim=dim)
        work, rows = rank_work(assembled(problem, arriving)), length_of(problem.queries[problem.rank])
        keys_of_all = length_of(problem.keys[problem.rank]) * problem.size
        ranks = Ranks(problem.size, self.ulysses, self.per_host)
        whole = self.batch, keys_of_all, problem.rank, work, self.element
        moves = transfers(model, cluster, ranks, self.kv_exchange, *whole)
        kernels = Kernels(model, cluster, queries, keys, self.batch, rows)
        time = attention_time(self.kv_exchange, kernels, [work], [moves])
        return time.forward + time.backward
