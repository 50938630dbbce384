"""Layouts without processes: which positions a rank holds, for 1 to 16 ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_cp.schedule.documents import read
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.lookup import resolve
from hyper_cp.schedule.placement import balance
from hyper_cp.schedule.ranges import merge_ranges
from tests.harness.oracle import token_positions

worlds = st.integers(1, 16)
names = st.sampled_from(["contiguous", "head_tail"])


@given(names, worlds, st.integers(1, 5))
def test_ranks_partition_the_sequence(name: str, world: int, chunk: int) -> None:
    length = 2 * world * chunk
    held = [resolve(name, world, length).positions(r).tolist() for r in range(world)]
    assert sorted(p for rank in held for p in rank) == list(range(length))
    assert {len(rank) for rank in held} == {length // world}
    assert all(rank == sorted(rank) for rank in held)
    assert held == [token_positions(name, r, world, length) for r in range(world)]


@given(names, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_pieces_of_several_ranks_ascend(name: str, ring: int, ulysses: int, chunk: int, data: st.DataObject) -> None:
    world = ring * ulysses
    length = 2 * world * chunk
    block = data.draw(st.integers(0, ring - 1))
    ranks = range(block * ulysses, (block + 1) * ulysses)
    resolved = resolve(name, world, length)
    found = [
        token_positions(name, ranks[i], world, length)[p]
        for i, start, stop in resolved.pieces(ranks)
        for p in range(start, stop)
    ]
    assert found == sorted(p for r in ranks for p in token_positions(name, r, world, length))
    union = [p for start, stop in resolved.union(ranks) for p in range(start, stop)]
    assert union == found


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Documents of any lengths, empty and of one token too, in a length that splits over the ranks."""
    world = draw(worlds)
    lengths = draw(st.lists(st.integers(0, 5 * world), max_size=12))
    lengths.append(-sum(lengths) % world or world)
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    return world, tuple(boundaries)


@given(packed())
def test_each_document_head_tail_over_the_ranks(problem: tuple[int, tuple[int, ...]]) -> None:
    world, boundaries = problem
    resolved = ResolvedLayout.of("per_document", world, boundaries[-1], boundaries)
    held = [resolved.positions(r).tolist() for r in range(world)]
    assert sorted(p for rank in held for p in rank) == list(range(boundaries[-1]))
    assert {len(rank) for rank in held} == {boundaries[-1] // world}
    owner = {p: r for r, rank in enumerate(held) for p in rank}
    for start, stop in pairwise(boundaries):
        owners = [owner[p] for p in range(start, stop)]
        heads = next((i for i, pair in enumerate(pairwise(owners)) if pair[1] < pair[0]), len(owners) - 1) + 1
        assert owners[:heads] == sorted(owners[:heads]), "heads by ascending rank"
        assert owners[heads:] == sorted(owners[heads:], reverse=True), "tails by descending rank"
        totals = [owners.count(r) for r in range(world)]
        assert max(totals) - min(totals) <= 2, "a token more or less in each chunk"
        if (stop - start) % (2 * world) == 0:
            inside = [[p - start for p in rank if start <= p < stop] for rank in held]
            assert inside == [token_positions("head_tail", r, world, stop - start) for r in range(world)]


@pytest.mark.slow
def test_balance_of_each_layout() -> None:
    """One long document and many short ones: the long one is what head_tail cannot balance."""
    length = 64 * 1024
    documents = [0, length // 2, *range(length // 2 + 512, length + 1, 512)]
    found = balance(length, 8, documents)
    assert set(found) == {"contiguous", "head_tail", "per_document", "balanced"}
    packed_documents = read(torch.tensor([documents]))
    for name, ratio in (("contiguous", 3.5), ("head_tail", 1.9), ("per_document", 1.0), ("balanced", 1.0)):
        resolved = resolve(name, 8, length, packed_documents)
        starts = torch.tensor(documents)
        rows = [resolved.positions(r) for r in range(8)]
        pairs = [int((p - starts[torch.searchsorted(starts, p, right=True) - 1] + 1).sum()) for p in rows]
        assert list(found[name].pairs) == pairs
        assert found[name].ratio == pytest.approx(ratio, abs=0.3)
    assert resolve("auto", 8, length, packed_documents).name == "balanced", "per_document moves twice as much"
    short = torch.arange(0, length + 1, 64)[None]
    assert resolve("auto", 8, length, read(short)).name == "contiguous", "documents of 64 tokens are not cut at all"


def test_layouts_by_document_need_documents() -> None:
    with pytest.raises(ValueError, match="layout='per_document' places tokens by document, but no documents"):
        resolve("per_document", 2, 8, None)
    rows = read(torch.tensor([[0, 4, 8], [0, 2, 8]]))
    assert resolve("auto", 2, 8, rows).name == "balanced"


@given(st.integers(2, 5), st.data())
def test_rows_of_other_documents_share_a_placement_that_balances_each(world: int, data: st.DataObject) -> None:
    """Boundaries are multiples of 2n here, so that nothing remains of a division by it."""
    cuts = st.lists(st.integers(1, 9), max_size=4).map(lambda x: [0, *sorted({2 * world * c for c in x}), 20 * world])
    rows = [data.draw(cuts) for _ in range(3)]
    table = torch.tensor([row + [20 * world] * (8 - len(row)) for row in rows])
    held = [resolve("per_document", world, 20 * world, read(table)).positions(rank) for rank in range(world)]
    assert sorted(p for mine in held for p in mine.tolist()) == list(range(20 * world))
    for row in rows:
        for start, stop in pairwise(row):
            inside = [mine[(mine >= start) & (mine < stop)] - start for mine in held]
            assert len({len(mine) for mine in inside}) == 1, "every document lies on all ranks alike"
            assert len({int((mine + 1).sum()) for mine in inside}) == 1, "and is equal causal work on each"


@given(st.lists(st.integers(0, 30), max_size=12, unique=True))
def test_merge_ranges_joins_neighbours(points: list[int]) -> None:
    merged = merge_ranges((p, p + 1) for p in points)
    assert [p for start, stop in merged for p in range(start, stop)] == sorted(points)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@pytest.mark.parametrize(
    "name, world, length, words",
    [
        ("contiguous", 4, 10, "sequence length=10 .* 4 ranks .* multiple of 4 .* 8 or 12"),
        ("head_tail", 4, 12, "multiple of 8 .* 8 or 16"),
        ("head_tail", 2, 0, "positive multiple of 4"),
        ("contiguous", 4, 3, "Pad or cut the sequence to 4"),
        ("zigzag", 2, 8, "layout='zigzag' is unknown. .* Choose one of 'contiguous', 'head_tail'"),
    ],
)
def test_lengths_and_names_that_do_not_fit_are_refused(name: str, world: int, length: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(name, world, length)
