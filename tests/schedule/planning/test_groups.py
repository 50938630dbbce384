"""Numbers that the library chooses by the planner's cost: groups of heads, and stages of the needed exchange."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import accumulate

import pytest

from hyper_cp.schedule import arrivals
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.planning.auto import fastest_groups, visible_pairs
from hyper_cp.schedule.planning.inputs.model import ModelShape
from hyper_cp.schedule.planning.inputs.profiles import PROFILES
from hyper_cp.schedule.planning.strategies import Estimator, Problem, Strategy
from hyper_cp.schedule.planning.timeline import grouped_ulysses

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


def test_the_choice_is_logged_with_what_it_gains(caplog: pytest.LogCaptureFixture) -> None:
    fastest_groups.cache_clear()
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

LENGTHS = {
    "documents of 1K to 16K": [1024, 16384, 2048, 8192, 4096, 12288, 1024, 6144, 14336],
    "half one document": [32768, *[2048] * 16],
}


def seconds_in(count: int | None, lengths: list[int], per_host: int, patch: pytest.MonkeyPatch) -> float:
    """Attention of one layer on 8 GPUs with so many stages; None: with the number that the schedule chooses."""
    model = ModelShape(layers=1, heads=64, width=8192, kv_heads=8, head_dim=128, vocabulary=10)
    documents = PackedDocuments([[0, *accumulate(lengths)]])
    cluster = replace(PROFILES["h100"], gpus_per_host=per_host)
    problem = Problem(model, cluster, 8, documents, True, 1, 2, 16.0, 8, 1e12)
    with patch.context() as patched:
        if count is not None:
            ahead = lambda most, share: max(1, 3 * share * count // most)  # noqa: E731  (as the schedule does)
            patched.setattr(arrivals, "stages_of", lambda most, share: (min(most, count), ahead(most, share)))
        time = Estimator(problem).cost(Strategy(8, 1, "needed", "balanced", "none", False)).attention
    return time.forward + time.backward


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [8, 1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_number_of_stages_is_near_the_best_by_the_cost(
    lengths: list[int], per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {count: seconds_in(count, lengths, per_host, monkeypatch) for count in (1, 2, 4, 8)}
    chosen = seconds_in(None, lengths, per_host, monkeypatch)
    assert chosen <= 1.1 * min(times.values()), (chosen, times)
