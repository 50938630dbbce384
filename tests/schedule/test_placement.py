"""The layout "balanced" without processes: its deal, its cost against definitions, and what it reaches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp import ContextParallel, RecurrentContextParallel
from hyper_cp.schedule import lookup
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.layout import ResolvedLayout, check_layout, register
from hyper_cp.schedule.pairs import cost
from hyper_cp.schedule.placement import balance
from tests.harness.host_seconds import host_seconds
from tests.harness.oracle import visible_pairs


@st.composite
def dealt(draw: st.DrawFn) -> tuple[ResolvedLayout, tuple[tuple[int, ...], ...], int | None]:
    """A balanced layout, the documents of batch rows that differ and the window that it was dealt for."""
    world = draw(st.integers(2, 9))
    length = world * draw(st.sampled_from([2, 4, 6, 8, 10, 14, 16]))
    cuts = st.lists(st.integers(0, length), max_size=8).map(sorted)
    rows = [[0, *draw(cuts), length] for _ in range(draw(st.sampled_from([1, 1, 2])))]
    width = max(map(len, rows))
    table = [row + [length] * (width - len(row)) for row in rows]
    window = draw(st.one_of(st.none(), st.integers(1, length)))
    name = "balanced" if window is None else f"balanced_{window}"
    documents = PackedDocuments(table)
    found = lookup.resolve(name, world, length, documents)
    again = lookup.resolve(name, world, length, PackedDocuments(table))
    assert found is not again and found.held == again.held, "every rank finds the same"
    return found, documents.rows, window


@pytest.mark.slow
@settings(max_examples=15)
@given(dealt())
def test_a_deal_gives_every_position_to_one_rank_and_all_ranks_equally_many(
    problem: tuple[ResolvedLayout, tuple[tuple[int, ...], ...], int | None],
) -> None:
    layout, rows, window = problem
    held = [layout.positions(rank).tolist() for rank in range(layout.world)]
    assert sorted(p for mine in held for p in mine) == list(range(layout.length))
    assert {len(mine) for mine in held} == {layout.length // layout.world}
    assert all(mine == sorted(mine) for mine in held)
    counted = cost(layout.held, rows, (None if window is None else -window, 0))
    visible = visible_pairs(layout.length, True, None if window is None else (window, 0), rows)[:, 0]
    for rank, mine in enumerate(held):
        assert counted.pairs[rank] == visible[:, mine].sum()
        seen = visible[:, mine].any(0).any(0)
        assert counted.rows[rank] == seen.sum() - seen[mine].sum()


# Of the same kind as those in which the known layouts were measured: packed documents of mean lengths 4K and 16K, and
# one document of half the sequence before documents of 2K.
LENGTH = 64 * 1024
MEASURED = {
    "mean 4K": (
        [0, 274, 1046, 5538, 5741, 5937, 12594, 20402, 38579, 39598, 45108, 48077, 49976, 54466, 56558, LENGTH],
        0.19,
    ),
    "mean 16K": ([0, 1481, 8798, 10192, 30179, 62193, LENGTH], 0.35),
    "half one document": ([0, *range(LENGTH // 2, LENGTH + 1, 2048)], 0.39),
}


@pytest.mark.parametrize("name", MEASURED)
def test_balanced_does_little_more_than_its_share_and_moves_little(name: str) -> None:
    """Counted position by position: work of the fullest rank over the mean, and rows as a share of an all-gather's."""
    documents, most = MEASURED[name]
    layout = lookup.resolve("balanced", 8, LENGTH, PackedDocuments([documents]))
    starts = torch.tensor(documents)
    pairs, rows = [], 0
    for rank in range(8):
        mine = layout.positions(rank)
        first = starts[torch.searchsorted(starts, mine, right=True) - 1]
        pairs.append(int((mine - first + 1).sum()))
        seen = torch.zeros(LENGTH, dtype=torch.bool)
        for start, stop in pairwise(documents):
            inside = mine[(mine >= start) & (mine < stop)]
            seen[start : int(inside.max()) + 1 if len(inside) else start] = True
        rows += int(seen.sum()) - len(mine)
    assert max(pairs) * 8 / sum(pairs) <= 1.03
    assert rows / (7 * LENGTH) <= most
    ours = balance(LENGTH, 8, documents)["balanced"]
    assert ours.pairs == tuple(pairs) and sum(ours.rows) == rows
    assert lookup.resolve("auto", 8, LENGTH, PackedDocuments([documents])).held == layout.held


def exponential(length: int, mean: int, seed: int) -> list[int]:
    lengths = torch.empty(length // mean * 4).exponential_(1 / mean, generator=torch.Generator().manual_seed(seed))
    ends = lengths.cumsum(0).long().unique()
    return [0, *ends[ends < length].tolist(), length]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "documents", "most"),
    [
        (64, [0, *range(64 * 4096, 64 * 8192 + 1, 2048)], 1.02),
        (64, exponential(64 * 8192, 16384, 2), 1.35),
    ],
)
def test_no_rank_receives_or_sends_much_more_than_one_must(world: int, documents: list[int], most: float) -> None:
    """The rank with the last query of the longest document receives the rest of it, in any deal. No rank has much more
    to receive, or to send, which is counted position by position."""
    length = documents[-1]
    layout = lookup.resolve("balanced", world, length, PackedDocuments([documents]))
    starts, received, readers = torch.tensor(documents), [], torch.zeros(length, dtype=torch.long)
    for rank in range(world):
        mine = layout.positions(rank)
        of = torch.searchsorted(starts, mine, right=True) - 1
        last = torch.full((len(documents),), -1).scatter_reduce(0, of, mine, "amax")
        at = torch.arange(length)
        sees = at <= last[torch.searchsorted(starts, at, right=True) - 1]
        received.append(int(sees.sum()) - len(mine))
        readers += sees
    sent = [int((readers[layout.positions(rank)] - 1).sum()) for rank in range(world)]
    assert sum(sent) == sum(received)
    assert max(*received, *sent) <= most * (max(b - a for a, b in pairwise(documents)) - length // world)


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_plain_causal_is_head_tail(world: int) -> None:
    documents = PackedDocuments([[0, 16 * world]])
    found = lookup.resolve("balanced", world, 16 * world, documents)
    assert found.held == lookup.resolve("head_tail", world, 16 * world).held
    assert lookup.resolve("auto", world, 16 * world, documents).name == "head_tail"


def test_a_window_in_the_name_keeps_neighbours_together() -> None:
    """Under a window, contiguous chunks have nearly equal work and need their neighbour's last keys only."""
    documents = PackedDocuments([[0, LENGTH]])
    assert len(lookup.resolve("balanced_4096", 8, LENGTH, documents).held[3]) == 1
    found = balance(LENGTH, 8, window=(4096, 0))
    assert found["balanced_4096"].share < 0.07 < 0.12 < found["balanced"].share + 0.001
    assert (found["balanced_4096"].hops, found["balanced"].hops) == (1, 7)


def test_a_plan_for_many_ranks_and_documents_is_quick() -> None:
    """It takes 0.1 s."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(5000, generator=generator) + 0.5
    ends = (lengths.cumsum(0) / lengths.sum() * 2**20).long().unique().tolist()
    documents = PackedDocuments([[0, *ends[:-1], 2**20]])
    assert host_seconds(lambda: lookup.resolve("balanced", 64, 2**20, documents)) < 0.5
    found = lookup.resolve("balanced", 64, 2**20, documents)
    figures = cost(found.held, documents.rows, (None, 0))
    assert figures.work <= 1.031 and figures.share <= 0.01


@pytest.mark.parametrize("name", ["balanced_", "balanced_-1", "balanced_x", "balanced_1_2", "balanced 4"])
def test_names_that_are_no_window_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown\. .* Choose one of .*'auto', or 'balanced_4096' if most"):
        check_layout(name)


@pytest.mark.parametrize("name", ["balanced_0", "balanced_000", "balanced_04096"])
def test_a_window_of_zero_is_refused_where_it_is_configured(name: str) -> None:
    message = rf"layout='{name}' does not name a window\. .* N must be a number from 1 on, .*\. Use the window of"
    for configure in (lambda: ContextParallel(layout=name), lambda: RecurrentContextParallel(layout=name)):
        with pytest.raises(ValueError, match=message):
            configure()
    with pytest.raises(ValueError, match=message):
        register(name, lambda rank, world: (rank,))
    assert "balanced_0" not in balance(64, 2, window=(0, 0))


def test_names_with_a_window_are_taken() -> None:
    with pytest.raises(ValueError, match="layout='balanced_12' is registered already"):
        register("balanced_12", lambda rank, world: (rank,))
