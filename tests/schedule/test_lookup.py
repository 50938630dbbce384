"""Layouts and schedules are made once for each kind of call, and found again whatever the number of ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_cp.schedule import lookup
from hyper_cp.schedule.build import build
from hyper_cp.schedule.documents import PackedDocuments, documents_table, read
from hyper_cp.schedule.layout import ResolvedLayout
from tests.harness.oracle import token_positions

CAUSAL = (None, 0)


def packed(*row: int) -> PackedDocuments:
    return PackedDocuments([list(row)])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ResolvedLayout, int, int, list[list[int]]]:
    """A layout of ring x ulysses ranks, and the positions of every cp rank one by one."""
    ring, ulysses = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    name, world = draw(st.sampled_from(["contiguous", "head_tail", "per_document"])), ring * ulysses
    length = 2 * world * draw(st.integers(1, 4))
    if name != "per_document":
        expected = [token_positions(name, r, world, length) for r in range(world)]
        return lookup.resolve(name, world, length), ring, ulysses, expected
    # Documents of lengths that split evenly: then each is head-tail by itself.
    sizes = draw(st.lists(st.integers(1, 3).map(lambda n: 2 * world * n), min_size=1, max_size=4))
    boundaries = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    expected = [
        [start + p for start, size in zip(boundaries, sizes, strict=False) for p in token_positions("", r, world, size)]
        for r in range(world)
    ]
    return lookup.resolve(name, world, boundaries[-1], packed(*boundaries)), ring, ulysses, expected


@given(layouts(), st.data())
def test_a_layout_says_where_every_token_is(
    problem: tuple[ResolvedLayout, int, int, list[list[int]]], data: st.DataObject
) -> None:
    resolved, ring, ulysses, expected = problem
    assert resolved.world == len(expected) and resolved.length == sum(map(len, expected))
    for rank, positions in enumerate(expected):
        assert resolved.positions(rank).tolist() == positions
        assert [p for start, stop in resolved.ranges(rank) for p in range(start, stop)] == positions
    first = data.draw(st.integers(0, len(expected) - 1))
    ranks = range(first, data.draw(st.integers(first + 1, len(expected))))
    together = sorted(p for r in ranks for p in expected[r])
    assert [p for start, stop in resolved.union(ranks) for p in range(start, stop)] == together
    pieces = resolved.pieces(ranks)
    assert [expected[ranks[i]][p] for i, start, stop in pieces for p in range(start, stop)] == together
    assert resolved.pieces(range(first, ranks.stop)) is pieces, "made once"
    on_ring = resolved.by_ring(ulysses)
    assert on_ring is resolved.by_ring(ulysses) and on_ring.world == ring
    for r in range(ring):
        block = expected[r * ulysses : (r + 1) * ulysses]
        assert on_ring.positions(r).tolist() == sorted(p for mine in block for p in mine)


def test_layouts_are_made_once() -> None:
    assert lookup.resolve("head_tail", 4, 64) is lookup.resolve("head_tail", 4, 64, packed(0, 5, 64))
    documents = packed(0, 16, 64)
    found = lookup.resolve("per_document", 4, 64, documents)
    assert found is lookup.resolve("per_document", 4, 64, documents)
    assert found is not lookup.resolve("per_document", 4, 64, packed(0, 16, 64)), "they belong to their documents"
    assert lookup.resolve("per_document", 1, 64).name == "contiguous"


CALL: dict[str, Any] = {
    "layout": "per_document",
    "rank": 1,
    "ring": 4,
    "ulysses": 2,
    "kv_exchange": "ring",
    "load_balance": False,
    "band": CAUSAL,
    "q_length": 64,
    "kv_length": 64,
}
OTHERS: dict[str, Any] = {
    "layout": "head_tail",
    "rank": 2,
    "ring": 2,
    "ulysses": 1,
    "kv_exchange": "all_gather",
    "band": (-5, 0),
    "parts": False,
}


@pytest.mark.parametrize("with_documents", [True, False])
def test_a_schedule_is_found_without_work(with_documents: bool) -> None:
    """The second call neither reads boundaries nor asks a layout."""
    call = {**CALL, "layout": "head_tail"} if not with_documents else CALL
    documents = packed(0, 5, 64) if with_documents else None
    first = lookup.schedule(lookup.Key(**call), documents=documents)
    with (
        mock.patch.object(lookup, "build", side_effect=AssertionError("built again")),
        mock.patch.object(lookup, "resolve", side_effect=AssertionError("resolved again")),
        mock.patch.object(PackedDocuments, "check", side_effect=AssertionError("checked again")),
    ):
        assert lookup.schedule(lookup.Key(**call), documents=documents) is first


@pytest.mark.parametrize("argument", OTHERS)
def test_each_setting_has_a_schedule_of_its_own(argument: str) -> None:
    documents = packed(0, 5, 40, 64)
    first = lookup.schedule(lookup.Key(**CALL), documents=documents)
    call = {**CALL, argument: OTHERS[argument]}
    resolved = lookup.resolve(call["layout"], call["ring"] * call["ulysses"], 64, documents)
    held = resolved.by_ring(call["ulysses"]).held
    settings = (call["kv_exchange"], False, call["band"], documents.rows, call.get("parts", True))
    found = lookup.schedule(lookup.Key(**call), documents=documents)
    assert found == build(held, held, call["rank"], *settings) != first


def test_documents_are_checked_before_a_schedule_is_built() -> None:
    with pytest.raises(ValueError, match="global sequence length 64"):
        lookup.schedule(lookup.Key(**CALL), documents=packed(0, 5, 60))
    rows = read(documents_table([[0, 5, 64], [0, 6, 64]]))
    with pytest.raises(ValueError, match="2 rows for a batch of 3"):
        lookup.schedule(lookup.Key(**{**CALL, "layout": "contiguous"}), documents=rows, batch=3)


def test_one_document_has_the_schedule_of_none() -> None:
    call = {**CALL, "layout": "contiguous"}
    assert lookup.schedule(lookup.Key(**call), documents=packed(0, 64)) is lookup.schedule(lookup.Key(**call))


def test_keys_of_another_length() -> None:
    """Documents restrict keys only where queries and keys are the same sequence."""
    call = {**CALL, "layout": "contiguous", "band": (None, None), "kv_length": 32}
    found = lookup.schedule(lookup.Key(**call), documents=packed(0, 5, 64))
    assert found.area == 16 * 32
    assert lookup.schedule(lookup.Key(**{**call, "kv_exchange": "replicated"})).transfers.hops == 0
    assert torch.equal(lookup.resolve("contiguous", 8, 64).by_ring(2).positions(1), torch.arange(16, 32))
