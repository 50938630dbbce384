"""Layouts without processes: which positions a rank holds, for 1 to 16 ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_cp.ops import layout as layouts
from tests.oracle import token_positions

worlds = st.integers(1, 16)
names = st.sampled_from(["contiguous", "head_tail"])


@given(names, worlds, st.integers(1, 5))
def test_ranks_partition_the_sequence(name: str, world: int, chunk: int) -> None:
    length = 2 * world * chunk
    held = [layouts.positions(name, r, world, length) for r in range(world)]
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
    found = [
        token_positions(name, ranks[i], world, length)[p]
        for i, start, stop in layouts.ascending_pieces(name, ranks, world, length)
        for p in range(start, stop)
    ]
    assert found == sorted(p for r in ranks for p in token_positions(name, r, world, length))
    union = [p for start, stop in layouts.union_ranges(name, ranks, world, length) for p in range(start, stop)]
    assert union == found


@given(st.lists(st.integers(0, 30), max_size=12, unique=True))
def test_merge_ranges_joins_neighbours(points: list[int]) -> None:
    merged = layouts.merge_ranges((p, p + 1) for p in points)
    assert [p for start, stop in merged for p in range(start, stop)] == sorted(points)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@pytest.mark.parametrize(
    "name, world, length, words",
    [
        ("contiguous", 4, 10, "sequence length=10 .* 4 ranks .* multiple of 4 .* 8 or 12"),
        ("head_tail", 4, 12, "multiple of 8 .* 8 or 16"),
        ("head_tail", 2, 0, "positive multiple of 4"),
        ("contiguous", 4, 3, "Pad or cut the sequence to 4"),
        ("zigzag", 2, 8, "layout='zigzag' is unknown; choose one of 'contiguous', 'head_tail'"),
    ],
)
def test_what_does_not_fit_is_refused_with_words(name: str, world: int, length: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layouts.rank_ranges(name, 0, world, length)
