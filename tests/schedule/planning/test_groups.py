"""The time of Ulysses in groups of heads against measured times, and the number that ``head_groups="auto"`` takes."""

from __future__ import annotations

import logging

import pytest

from hyper_cp.schedule.planning.timeline import fastest_groups, grouped_ulysses, visible_pairs

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
