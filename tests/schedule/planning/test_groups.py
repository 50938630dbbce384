"""Numbers that the library chooses by the planner's cost: groups of heads, and stages of the needed exchange."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from hyper_cp.schedule.build import Schedule, build
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.lookup import resolve
from hyper_cp.schedule.planning import auto
from hyper_cp.schedule.planning.auto import FastestStages, fastest_groups, typical, visible_pairs
from hyper_cp.schedule.planning.inputs.model import ModelShape
from hyper_cp.schedule.planning.timeline import Kernels, attention_time, grouped_ulysses
from hyper_cp.schedule.planning.traffic import Ranks, transfers
from hyper_cp.schedule.planning.work import RankWork, rank_work

MEASURED = {  # benchmarks/README.md: the step over the computation, by the length of the communication, in 1, 2, 4, 8
    1.0: (2.00, 1.55, 1.38, 1.30),
    0.5: (1.50, 1.25, 1.13, 1.06),
    0.2: (1.20, 1.10, 1.05, 1.03),
}
NUMBERS = (1, 2, 4, 8)
HEADS, DIMS = (64, 8), (128, 128)


@pytest.mark.parametrize("link", MEASURED)
def test_the_model_agrees_with_the_simulated_link(link: float) -> None:
    travel = link * 3 / 8, link / 8  # q, k, v one way and the output back; the same in backward
    for number, measured in zip(NUMBERS, MEASURED[link], strict=True):
        predicted = grouped_ulysses(number, (1 / 3.5, 2.5 / 3.5), travel, 0.0)
        assert predicted == pytest.approx(measured, abs=0.015), number


def fastest(tokens: int, per_host: int, numbers: tuple[int, ...] = NUMBERS) -> int:
    """The groups on 8 typical GPUs under a causal mask."""
    pairs = visible_pairs(8 * tokens, (None, 0))
    return fastest_groups(numbers, 8, per_host, HEADS, DIMS, tokens, pairs, 2, "cuda")


def test_more_groups_on_slower_links_and_one_where_attention_is_long() -> None:
    assert [fastest(tokens, 1) for tokens in (8192, 32768, 131072)] == [8, 4, 1]
    assert [fastest(tokens, 8) for tokens in (8192, 32768, 131072)] == [2, 1, 1]
    assert fastest(8192, 1, (1, 2)) == 2


def test_many_groups_of_a_short_sequence_cost_more_messages_than_they_hide() -> None:
    assert fastest(64, 8) == 1


def test_between_hosts_on_gloo_the_most_of_equally_fast_groups_are_taken() -> None:
    for per_host, groups in ((1, 4), (4, 2)):
        assert fastest_groups((1, 2, 4), 4, per_host, (16, 16), (32, 32), 1024, 4096 * 2048, 4, "cpu") == groups


def test_the_choice_is_logged_with_what_it_gains(caplog: pytest.LogCaptureFixture) -> None:
    fastest_groups.cache_clear()
    auto.SAID.clear()
    with caplog.at_level(logging.INFO, "hyper_cp"):
        fastest(8192, 1)
        fastest(8192, 1)
    (line,) = caplog.messages
    assert line.startswith(
        'head_groups="auto": 8 groups for 64 query and 8 key/value heads over ulysses_degree=8, 8192'
    )
    assert "ms instead of" in line and line.endswith("by the cost of h100")


def test_visible_pairs() -> None:
    assert visible_pairs(100, (None, None)) == 10_000
    assert visible_pairs(100, (None, 0)) == 5_000
    assert visible_pairs(100, (-9, 0)) == 1_000
    assert visible_pairs(100, (-1_000, 0)) == 5_000
    assert visible_pairs(100, (-5, 5)) == 1_100


# --------------------------------------------------------------------------- stages of the needed exchange

MANY = {
    "documents of 1K to 16K": [1024, 16384, 2048, 8192, 4096, 12288, 1024, 6144, 14336],
    "half one document": [32768, *[2048] * 16],
}
FEW = {
    "one document": [8192],
    "documents of 100 to 2,000": [100, 1900, 700, 1300, 250, 1750, 2000, 192],
    "half one document": [4096, 1024, 2048, 1024],
}


class Case:
    """Attention of one layer with 64 or 8 query heads on some GPUs or NPUs, in any number of stages."""

    def __init__(self, lengths: list[int], ring: int, layout: str, window: int | None = None) -> None:
        documents = PackedDocuments([[0, *accumulate(lengths)]])
        self.ring, self.tokens = ring, sum(lengths) // ring
        self.held = resolve(layout, ring, sum(lengths), documents).held
        self.mask = (None if window is None else -window, 0), documents.rows
        self.works: dict[int, list[RankWork]] = {}

    def plan(self, rank: int, stages: Any, kv_exchange: str = "needed") -> Schedule:
        return build(self.held, self.held, rank, kv_exchange, False, *self.mask, stages=stages)

    def seconds(self, stages: int, choice: FastestStages) -> float:
        """On the slowest of all ranks."""
        if stages not in self.works:
            self.works[stages] = [rank_work(self.plan(rank, stages)) for rank in range(self.ring)]
        (heads, kv_heads), works = choice.heads, self.works[stages]
        model = ModelShape(1, heads, 8192, 10, kv_heads=kv_heads, head_dim=128)
        cluster, ranks = typical(choice.device), Ranks(self.ring, 1, choice.per_host)
        moves = [
            transfers(model, cluster, ranks, "needed", 1, self.tokens * self.ring, rank, work, 2)
            for rank, work in enumerate(works)
        ]
        time = attention_time("needed", Kernels(model, cluster, heads, kv_heads, 1, self.tokens), works, moves)
        return time.forward + time.backward

    def chosen(self, choice: FastestStages) -> int:
        """The same on every rank."""
        (number,) = {len(self.plan(rank, choice).routes) for rank in (0, self.ring - 1)}
        return number


def choices() -> list[FastestStages]:
    heads = (64, 8), (8, 1)
    return [
        FastestStages("needed", 1, host, h, (128, 128), 1, 2, d)
        for host in (8, 1)
        for h in heads
        for d in ("cuda", "npu")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", MANY.values(), ids=MANY)
def test_the_number_of_stages_is_near_the_best_where_many_rows_travel(lengths: list[int]) -> None:
    case = Case(lengths, 8, "balanced")
    most = sum(sum(route.received) for route in case.plan(0, 1).routes)
    for choice in choices():
        # In fewer stages a rank would receive more at once than it holds.
        times = {number: case.seconds(number, choice) for number in (1, 2, 4, 8) if number * case.tokens >= most}
        assert times[case.chosen(choice)] <= 1.1 * min(times.values()), (choice, times)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", FEW.values(), ids=FEW)
def test_the_fastest_number_is_chosen_where_few_rows_travel(lengths: list[int]) -> None:
    """The usual number takes up to 1.4 times as long. The choice sees the tiles of one rank, the one that receives
    most. Another may have more, so now and then the choice is a fifth slower than the best."""
    chosen, usual = [], []
    for ring, layout, window in ((2, "head_tail", None), (4, "contiguous", 1024), (4, "balanced", 1024)):
        case = Case(lengths, ring, layout, window)
        for choice in choices():
            number, least = case.chosen(choice), len(case.plan(0, None).routes)
            times = {number: case.seconds(number, choice) for number in sorted({1, 2, 4, number, least})}
            chosen.append(times[number] / min(times.values()))
            usual.append(times[least] / min(times.values()))
    assert max(chosen) <= 1.25 and sum(x <= 1.1 for x in chosen) >= 0.9 * len(chosen), chosen
    assert max(usual) > 1.15 and sum(chosen) < sum(usual)


def test_between_hosts_on_gloo_the_most_of_equally_fast_stages_are_taken() -> None:
    """There they are faster than the model says (benchmarks/README.md, two hosts)."""
    for tokens, ring in ((2048, 2), (4096, 2), (4096, 4)):
        case, heads = Case([tokens], ring, "head_tail"), 4 * ring
        choice = FastestStages("needed", 1, 1, (heads, heads), (512 // heads, 512 // heads), 1, 4, "cpu")
        assert case.chosen(choice) == 8, (tokens, ring)
    assert Case([2048], 2, "head_tail").chosen(replace(choice, per_host=2)) == 2
    # The same figures of a link, but another type of device: eight are not even compared.
    assert Case([2048], 2, "head_tail").chosen(replace(choice, device="cuda")) <= 4


def test_an_all_gather_is_in_stages_between_hosts_on_gloo_only() -> None:
    """On all ranks in the same number of them."""
    for tokens, ring, stages in ((2048, 2, (2, 4)), (4096, 4, (2, 4)), (8, 4, (1,))):
        case, heads = Case([tokens], ring, "head_tail"), 4 * ring
        gloo = FastestStages("all_gather", 1, 1, (heads, heads), (512 // heads, 512 // heads), 1, 4, "cpu")
        (found,) = {len(case.plan(rank, gloo, "all_gather").pieces) for rank in range(ring)}
        assert found in stages, (tokens, ring, found)
        for whole in (replace(gloo, per_host=ring), replace(gloo, device="cuda"), replace(gloo, device="npu"), None):
            assert len(case.plan(0, whole, "all_gather").pieces) == 1
