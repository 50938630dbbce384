"""The planner of dynamic degrees: the rules that every plan keeps, its distance from the lower bound, its errors."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.data.dynamic import CostModel, DynamicContextParallel, Plan
from hyper_cp.data.dynamic_batches import DynamicBatches
from tests.harness.host_seconds import host_seconds

COST = CostModel.of_transformer(parameters=7e9, layers=32, hidden=4096, flops_per_second=4e14)
CHUNKS = {"contiguous": 1, "head_tail": 2}


def seconds(cost: CostModel, tokens: int, lengths: list[int] | tuple[int, ...], degree: int) -> float:
    """The documented cost of a micro-batch, computed independently."""
    work = cost.linear * tokens + cost.quadratic * sum(n * n / 2 for n in lengths)
    return cost.fixed + work / degree + cost.exchange * tokens * (degree - 1) / degree


def simulate(plan: Plan) -> tuple[float, list[float]]:
    """Simulate a step: every rank works through its own list; a micro-batch starts when all its ranks have come to it.
    Returns the end, and each rank's time spent waiting. Fails if ranks wait for each other."""
    lists = [plan.of_rank(rank) for rank in range(plan.size)]
    clock, busy, at = [0.0] * plan.size, [0.0] * plan.size, [0] * plan.size
    while any(at[r] < len(lists[r]) for r in range(plan.size)):
        heads = {id(lists[r][at[r]]): lists[r][at[r]] for r in range(plan.size) if at[r] < len(lists[r])}
        ready = [m for m in heads.values() if all(at[r] < len(lists[r]) and lists[r][at[r]] is m for r in m.ranks)]
        assert ready, "deadlock"
        for m in ready:
            end = max(clock[r] for r in m.ranks) + m.cost
            for r in m.ranks:
                clock[r], busy[r], at[r] = end, busy[r] + m.cost, at[r] + 1
    return max(clock), [c - b for c, b in zip(clock, busy, strict=True)]


def lower_bound(cost: CostModel, lengths: list[int], size: int) -> float:
    """The lower bound of a cost model without communication: mean work, or the longest sample on all ranks."""
    alone = [cost.linear * n + cost.quadratic * n * n / 2 for n in lengths]
    return max(sum(alone) / size, max(alone) / size)


def check(plan: Plan, scheduler: DynamicContextParallel, lengths: list[int]) -> None:
    cost, size = scheduler.cost, scheduler.size
    assert sorted(i for m in plan.micro_batches for i in m.samples) == list(range(len(lengths)))
    assert {id(m) for rank in range(size) for m in plan.of_rank(rank)} == {id(m) for m in plan.micro_batches}
    for m in plan.micro_batches:
        assert m.degree in scheduler.degrees
        assert m.ranks == range(m.ranks[0], m.ranks[0] + m.degree) and m.ranks[0] % m.degree == 0
        assert m.ranks[-1] < size
        assert m.lengths == tuple(lengths[i] for i in m.samples)
        multiple = CHUNKS[scheduler.layout] * m.degree
        assert m.length % multiple == 0 and 0 <= m.length - sum(m.lengths) < multiple
        assert m.length // m.degree <= scheduler.tokens_per_rank
        assert m.cost == pytest.approx(seconds(cost, m.length, m.lengths, m.degree))
        if m.documents is None:
            assert m.lengths == (m.length,)
        else:
            spans = [b - a for a, b in pairwise(m.documents)]
            assert m.documents[0] == 0 and m.documents[-1] == m.length and spans[: len(m.lengths)] == [*m.lengths]
    end, waited = simulate(plan)
    assert plan.makespan == pytest.approx(end)
    if all(b % a == 0 for a, b in pairwise(scheduler.degrees)):
        assert max(waited) <= 1e-9 * end
    if not cost.exchange:
        assert plan.lower_bound >= lower_bound(cost, lengths, size) * (1 - 1e-12)
    assert plan.makespan >= plan.lower_bound * (1 - 1e-12)


@st.composite
def problems(draw: st.DrawFn) -> tuple[DynamicContextParallel, list[int]]:
    size = draw(st.integers(1, 12))
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    degrees = draw(st.none() | st.lists(st.sampled_from(divisors), min_size=1))
    cost = CostModel(
        draw(st.floats(0.01, 10)),
        draw(st.floats(0, 0.1)),
        exchange=draw(st.sampled_from([0.0, 0.1, 5.0])),
        fixed=draw(st.sampled_from([0.0, 1.0, 1000.0])),
    )
    scheduler = DynamicContextParallel(
        size, draw(st.integers(2, 999)), cost, degrees=degrees, layout=draw(st.sampled_from(list(CHUNKS)))
    )
    longest = scheduler.capacity(scheduler.degrees[-1])
    return scheduler, draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))


@given(problems())
def test_every_plan_is_a_valid_one(problem: tuple[DynamicContextParallel, list[int]]) -> None:
    scheduler, lengths = problem
    plan = scheduler.plan(lengths)
    check(plan, scheduler, lengths)
    assert scheduler.plan(tuple(lengths)) == plan  # deterministic: all ranks get the same plan


@given(problems())
def test_no_static_degree_is_faster(problem: tuple[DynamicContextParallel, list[int]]) -> None:
    scheduler, lengths = problem
    makespan = scheduler.plan(lengths).makespan
    for degree in scheduler.degrees:
        if max(lengths) <= scheduler.capacity(degree):
            static = DynamicContextParallel(
                scheduler.size, scheduler.tokens_per_rank, scheduler.cost, degrees=[degree], layout=scheduler.layout
            )
            assert makespan <= static.plan(lengths).makespan * (1 + scheduler.slack) * (1 + 1e-12)


def uniform(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(256, 32_768) for _ in range(count)]


def log_normal(rng: random.Random, count: int) -> list[int]:
    return [min(131_072, 16 + int(rng.lognormvariate(7.6, 1.3))) for _ in range(count)]


def one_long(rng: random.Random, count: int) -> list[int]:
    lengths = [4096] * (count - 1) + [131_072]
    rng.shuffle(lengths)
    return lengths


@pytest.mark.parametrize("lengths_of", [uniform, log_normal, one_long])
@settings(max_examples=40)
@given(size=st.sampled_from([1, 2, 3, 4, 8, 12, 32, 64]), count=st.integers(4, 300), seed=st.integers(0, 2**32))
def test_within_ten_percent_of_the_lower_bound(lengths_of: object, size: int, count: int, seed: int) -> None:
    lengths = lengths_of(random.Random(seed), count)  # type: ignore[operator]
    scheduler = DynamicContextParallel(size, max(16_384, 2 * -(-131_072 // (2 * size))), COST)
    plan = scheduler.plan(lengths)
    check(plan, scheduler, lengths)
    assert plan.makespan <= 1.10 * lower_bound(COST, lengths, size)


def test_a_long_sample_is_shared_and_short_ones_are_not() -> None:
    plan = DynamicContextParallel(8, 16_384, COST).plan([4096] * 127 + [131_072])
    wide, *rest = plan.micro_batches
    assert (wide.degree, wide.samples) == (8, (127,))
    assert all(m.degree == 1 and m.length <= 16_384 for m in rest)
    assert len(rest) <= 5 * 8  # packed: 127 samples are at least 32 sequences


def test_no_more_samples_are_shared_than_balance_needs() -> None:
    """Plan 999 equal samples on 64 ranks: 39 are left over after 15 rounds."""
    plan = DynamicContextParallel(64, 16_384, COST).plan([131_072] + [4096] * 999)
    assert sum(len(m.samples) for m in plan.micro_batches if m.degree == 1) >= 900
    assert plan.makespan <= 1.02 * plan.lower_bound


def test_groups_are_narrow_unless_balance_needs_wide_ones() -> None:
    scheduler = DynamicContextParallel(4, 1000, CostModel(1.0, 0.0))
    assert [m.degree for m in scheduler.plan([100] * 8).micro_batches] == [1] * 4
    assert [m.degree for m in scheduler.plan([800]).micro_batches] == [4]  # one sample would leave three ranks idle
    dear = DynamicContextParallel(4, 1000, CostModel(1.0, 0.0, exchange=10.0))
    assert [m.degree for m in dear.plan([800]).micro_batches] == [1]  # sharing costs more than it saves


@pytest.mark.parametrize("microseconds", [0, 1, 10, 30, 100])
def test_a_slow_link_makes_groups_narrower(microseconds: int) -> None:
    """Plan one long sample shared by d ranks, the short ones unsharded: the plan is near the best of all d."""
    cost = CostModel(COST.linear, COST.quadratic, exchange=microseconds * 1e-6)
    plan = DynamicContextParallel(64, 16_384, cost).plan([4096] * 511 + [131_072])
    short = 511 * seconds(cost, 4096, [4096], 1)
    long = {d: seconds(cost, 131_072, [131_072], d) for d in (8, 16, 32, 64)}
    assert plan.makespan <= 1.08 * min(max(t, (short + d * t) / 64) for d, t in long.items())


def test_a_thousand_samples_on_64_ranks_take_less_than_a_second() -> None:
    rng = random.Random(0)
    slow = CostModel(
        COST.linear, COST.quadratic, exchange=1e-4, fixed=0.1
    )  # far from the bound: all candidates are tried
    for cost, lengths in ((COST, log_normal(rng, 1000)), (slow, one_long(rng, 1000))):
        scheduler = DynamicContextParallel(64, 16_384, cost)
        assert host_seconds(lambda s=scheduler, n=lengths: s.plan(n)) < 1.0


def test_a_sample_that_does_not_fit_is_an_error_with_ways_out() -> None:
    lengths = [10, 100_001]
    with pytest.raises(ValueError, match=r"lengths\[1\]=100001 does not fit. The widest degree is 4, and 4 ranks") as e:
        DynamicContextParallel(8, 1000, COST, degrees=[1, 4]).plan(lengths)
    cut, budget, degree = (
        int(re.search(pattern, str(e.value))[1])  # type: ignore[index]
        for pattern in (r"hold (\d+) tokens", r"tokens_per_rank to (\d+)", r"degree of at least (\d+)")
    )
    DynamicContextParallel(8, 1000, COST, degrees=[1, 4]).plan(
        [10, cut]
    )  # each way out that the error names works, and nothing less does
    DynamicContextParallel(8, budget, COST, degrees=[1, 4]).plan(lengths)
    DynamicContextParallel(degree, 1000, COST).plan(lengths)
    for scheduler, wrong in (
        (DynamicContextParallel(8, 1000, COST, degrees=[1, 4]), cut + 1),
        (DynamicContextParallel(8, budget - 1, COST, degrees=[1, 4]), 100_001),
        (DynamicContextParallel(degree - 1, 1000, COST), 100_001),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            scheduler.plan([10, wrong])


def test_lengths_of_arrays_and_tensors() -> None:
    scheduler, lengths = DynamicContextParallel(4, 1000, COST), [300, 20, 7]
    for kind in (np.array(lengths), torch.tensor(lengths), [*np.array(lengths)], [*torch.tensor(lengths)]):
        assert scheduler.plan(kind) == scheduler.plan(lengths)
        batches = DynamicBatches([0] * 3, kind, scheduler, batch_size=2, rank=0)
        assert batches.lengths == lengths and {type(x) for x in batches.lengths} == {int}
    with pytest.raises(ValueError, match=r"lengths\[0\]=300.0 must be a positive int"):
        scheduler.plan(np.array([300.0, 20.0]))
    with pytest.raises(ValueError, match=r"lengths\[0\]=True must be a positive int"):
        scheduler.plan(np.array([True]))


def test_an_empty_batch_is_an_empty_plan() -> None:
    plan = DynamicContextParallel(4, 1000, COST).plan([])
    assert (plan.micro_batches, plan.makespan, plan.of_rank(3)) == ((), 0.0, [])


def test_wrong_arguments_are_named() -> None:
    def raises(match: str, *args: object, error: type[Exception] = ValueError, **kwargs: object) -> None:
        with pytest.raises(error, match=match):
            DynamicContextParallel(*args, **kwargs)  # type: ignore[arg-type]

    raises(r"family=0 must be a positive int", 0, 1000, COST)
    raises(r"tokens_per_rank=1.5 must be a positive int", 4, 1.5, COST)
    raises(r"tokens_per_rank=1 is less than 2", 4, 1, COST)
    raises(r"degrees=\[1, 3\] must be among .* 4 ranks: 1, 2, 4 \(3 is not\)\. Each is", 4, 1000, COST, degrees=[1, 3])
    raises(r"degrees=\[\] must be among", 4, 1000, COST, degrees=[])
    raises(r"layout='zigzag' is unknown", 4, 1000, COST, layout="zigzag")
    raises(r"slack=-1 is not a finite number of 0 or more. .* this share of", 4, 1000, COST, slack=-1)
    raises(r"cost is a float. .* Pass a CostModel", 4, 1000, 1.0, error=TypeError)
    with pytest.raises(ValueError, match=r"linear=-1 is not a finite number of 0 or more"):
        CostModel(-1, 0)
    with pytest.raises(ValueError, match="linear=0 and quadratic=0"):
        CostModel(0, 0)
    with pytest.raises(ValueError, match=r"lengths\[1\]=0 must be a positive int"):
        DynamicContextParallel(4, 1000, COST).plan([5, 0])
    with pytest.raises(ValueError, match=r"rank=4 is not a place in this plan for 4 ranks: 0 to 3"):
        DynamicContextParallel(4, 1000, COST).plan([5]).of_rank(4)
