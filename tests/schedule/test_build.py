"""The schedule without processes: every visible pair once, balanced, frugal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_cp.schedule import build as schedule
from hyper_cp.schedule import lookup
from hyper_cp.schedule.choices import doubled
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.ranges import merge_ranges
from tests.harness.oracle import token_positions
from tests.harness.transfers import carry_out

CAUSAL, FULL = (None, 0), (None, None)


def held_by(layout: str, ring: int, ulysses: int, length: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    return lookup.resolve(layout, ring * ulysses, length).by_ring(ulysses).held


def query_positions(layout: str, balance: bool, rank: int, ring: int, ulysses: int, length: int) -> list[int]:
    """Positions of the queries a ring rank attends, from the definitions."""

    def own(r: int) -> list[int]:
        world = ring * ulysses
        return sorted(p for u in range(ulysses) for p in token_positions(layout, r * ulysses + u, world, length))

    if not balance:
        return own(rank)
    half = length // ring // 2
    return own(rank)[:half] + own(ring - 1 - rank)[half:]


def seen_in(step: schedule.Step, block: np.ndarray, queries: list[int], length: int) -> np.ndarray:
    """Count for each (query, key) pair of global positions how often a step computes it."""
    count = np.zeros((length, length), dtype=int)
    rows = np.array(queries)
    keys = np.concatenate([block[:0], *(block[start:stop] for start, stop in step.take)])
    for tile in (part for tiles in step.tiles for part in tiles.rectangles):
        q, k = rows[slice(*tile.q)], keys[slice(*tile.k)]
        distance = np.arange(len(k))[None] - np.arange(len(q))[:, None]
        lower, upper = tile.band
        seen = np.ones_like(distance, dtype=bool)
        if lower is not None:
            seen &= distance >= lower
        if upper is not None:
            seen &= distance <= upper
        assert seen.any(1).all() and seen.any(0).all(), f"a tile launches rows or columns for nothing: {tile}"
        assert tile.area == seen.sum()
        count[np.ix_(q, k)] += seen
    return count


def check_world(plans: list[schedule.Schedule], own: list[list[int]], visible: np.ndarray) -> list[list[np.ndarray]]:
    """Every visible pair is computed once, in forward and in backward, with the keys that the transfers bring; and the
    gradient of a key, one for each query that sees it, comes home. Returns the blocks of each rank."""
    length, half = len(visible), len(own[0]) // 2
    queries = [
        mine[:half] + own[len(own) - 1 - rank][half:] if plan.swap else mine
        for rank, (plan, mine) in enumerate(zip(plans, own, strict=True))
    ]
    transfers = [plan.transfers for plan in plans]
    blocks, _ = carry_out(transfers, own)
    count = np.zeros((length, length), dtype=int)
    for plan, of_rank, rows in zip(plans, blocks, queries, strict=True):
        for step, block in zip(plan.forward, [*of_rank, of_rank[0]], strict=True):
            count += seen_in(step, block, rows, length)
    assert (count == visible).all()
    again = np.zeros((length, length), dtype=int)

    def gradient(rank: int, step: int, block: np.ndarray) -> np.ndarray:
        seen = seen_in(plans[rank].backward[step], block, queries[rank], length)
        np.add(again, seen, out=again)
        return seen.sum(0)[block]

    _, sums = carry_out(transfers, own, gradient)
    assert (again == visible).all()
    for mine, total in zip(own, sums, strict=True):
        assert (total == visible.sum(0)[mine]).all()
    return blocks


def in_documents(length: int, boundaries: tuple[int, ...]) -> np.ndarray:
    number = np.zeros(length, dtype=int)
    for start in boundaries[1:-1]:
        number[start:] += 1
    return number[:, None] == number[None]


@st.composite
def packed_problems(draw: st.DrawFn) -> tuple:
    ring, ulysses = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3]))
    layout = draw(st.sampled_from(["contiguous", "head_tail", "per_document", "balanced"]))
    kv = draw(st.sampled_from(["ring", "all_gather", "needed"]))
    balance = layout == "contiguous" and draw(st.booleans())
    length = 2 * ring * ulysses * draw(st.integers(1, 5))
    cuts = draw(st.lists(st.integers(0, length), max_size=9).map(sorted))
    band = draw(st.one_of(st.sampled_from([CAUSAL, FULL]), st.tuples(st.integers(-length, 0), st.just(0))))
    return ring, ulysses, layout, kv, balance, length, band, (0, *cuts, length)


@pytest.mark.slow
@settings(max_examples=50)
@given(packed_problems(), st.sampled_from([1, 1024]))
def test_every_visible_pair_of_packed_documents_exactly_once(problem: tuple, least: int) -> None:
    ring, ulysses, layout, kv, balance, length, band, boundaries = problem
    world = ring * ulysses
    resolved = lookup.resolve(layout, world, length, PackedDocuments([list(boundaries)]))
    own = [sorted(p for u in range(ulysses) for p in resolved.positions(r * ulysses + u).tolist()) for r in range(ring)]
    held = tuple(merge_ranges((p, p + 1) for p in mine) for mine in own)
    assert held == resolved.by_ring(ulysses).held
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    visible = in_documents(length, boundaries)
    visible &= np.ones_like(visible) if band[0] is None else distance >= band[0]
    visible &= np.ones_like(visible) if band[1] is None else distance <= band[1]
    plans = [
        schedule.build(held, held, rank, kv, balance, band, (boundaries,), least_rows=least) for rank in range(ring)
    ]
    blocks = check_world(plans, own, visible)
    for rank, plan in enumerate(plans):
        half = length // ring // 2
        if kv == "needed":
            queries = own[rank][:half] + own[ring - 1 - rank][half:] if plan.swap else own[rank]
            columns = visible[queries].any(0)
            wanted = [p for p in range(length) if columns[p] and p not in own[rank]]
            assert sorted(p for block in blocks[rank][1:] for p in block) == wanted, "exactly these rows, each once"
        for tile in (t for step in (*plan.forward, *plan.backward) for t in step.tiles if t.parts):
            assert not (plan.swap and tile.q[0] < half < tile.q[1]), "a tile would wait for the partner's tail"
            assert len({t.band == FULL for t in tile.rectangles} | {tile.band == FULL}) == 1 or tile.band != FULL


@pytest.mark.parametrize("kv", ["ring", "all_gather"])
def test_documents_are_few_tiles(kv: str) -> None:
    """As many as there are kinds of work at a step, not as many as there are documents."""
    boundaries = tuple(range(0, 64 * 16 + 1, 16))
    for layout, most in (("contiguous", 1), ("head_tail", 1), ("per_document", 1)):
        held = ResolvedLayout.of(layout, 4, 1024, boundaries).held
        for rank in range(4):
            plan = schedule.build(held, held, rank, kv, False, CAUSAL, (boundaries,))
            many = 3 if kv == "all_gather" and layout == "per_document" else most
            assert all(len(step.tiles) <= many for step in plan.forward), (layout, [len(s.tiles) for s in plan.forward])


def test_windows_of_documents_are_few_tiles() -> None:
    """Documents shorter and longer than the window, and parts of them, are sequences of the same calls."""
    boundaries = tuple(sorted({*range(0, 1025, 16), *range(512, 700), 100, 203, 871}))
    for kv, layout, most in (("ring", "contiguous", 2), ("all_gather", "head_tail", 2), ("ring", "per_document", 8)):
        held = ResolvedLayout.of(layout, 4, 1024, boundaries).held
        tiles = [
            len(step.tiles)
            for rank in range(4)
            for step in schedule.build(held, held, rank, kv, False, (-10, 0), (boundaries,)).forward
        ]
        assert max(tiles) <= most, (kv, layout, tiles)


@st.composite
def problems(draw: st.DrawFn) -> tuple:
    ring, ulysses = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3]))
    layout = draw(st.sampled_from(["contiguous", "head_tail"]))
    kv = draw(st.sampled_from(["ring", "all_gather", "needed"]))
    balance = layout == "contiguous" and draw(st.booleans())
    length = 2 * ring * ulysses * draw(st.integers(1, 4))
    band = draw(
        st.one_of(
            st.sampled_from([CAUSAL, FULL]),
            st.tuples(st.integers(-length - 2, 0), st.just(0)),
            st.tuples(st.integers(-length, 0), st.integers(0, length)),
        )
    )
    return ring, ulysses, layout, kv, balance, length, band


@pytest.mark.slow
@settings(max_examples=50)
@given(problems(), st.sampled_from([1, 1024]))
def test_every_visible_pair_exactly_once(problem: tuple, least: int) -> None:
    """Also where tiles as short as these are cut in two (``least=1``)."""
    ring, ulysses, layout, kv, balance, length, band = problem
    held = held_by(layout, ring, ulysses, length)
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    visible = np.ones((length, length), dtype=bool)
    if band[0] is not None:
        visible &= distance >= band[0]
    if band[1] is not None:
        visible &= distance <= band[1]
    plans = [schedule.build(held, held, rank, kv, balance, band, least_rows=least) for rank in range(ring)]
    local = [query_positions(layout, False, r, ring, ulysses, length) for r in range(ring)]
    check_world(plans, local, visible)
    for plan in plans if plans[0].swap else ():
        for steps in (plan.forward, plan.backward):
            assert all(t.q[1] <= len(local[0]) // 2 for t in steps[-1].tiles), "the tails are on their way"


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["ring", "all_gather", "needed"])
@pytest.mark.parametrize("layout, balance", [("head_tail", False), ("contiguous", True)])
def test_causal_work_is_balanced(kv: str, layout: str, balance: bool) -> None:
    for ring in (1, 2, 3, 8, 11):
        held = held_by(layout, ring, 1, 2 * ring * 128)
        areas = [schedule.build(held, held, r, kv, balance, CAUSAL).area for r in range(ring)]
        assert max(areas) == min(areas)


@pytest.mark.slow
def test_contiguous_work_is_uneven_by_a_known_ratio() -> None:
    """The last rank's share over the mean is 2 - 1/n (+ the diagonal's rounding)."""
    for ring in (2, 4, 11):
        held = held_by("contiguous", ring, 1, ring * 128)
        areas = [schedule.build(held, held, r, "ring", False, CAUSAL).area for r in range(ring)]
        assert max(areas) / (sum(areas) / ring) == pytest.approx(2 - 1 / ring, rel=0.01)


def test_head_tail_ring_runs_one_kernel_per_step() -> None:
    held = held_by("head_tail", 8, 1, 8 * 256)
    for rank in range(8):
        plan = schedule.build(held, held, rank, "ring", False, CAUSAL)
        assert [len(step.tiles) for step in plan.forward] == [1] * 8 + [0]
        assert all(len(step.take) <= 1 for step in plan.forward), "a ring block is used without a copy"


def test_window_bounds_the_hops() -> None:
    held = held_by("contiguous", 8, 1, 8 * 128)
    assert schedule.build(held, held, 0, "ring", False, (-127, 0)).transfers.hops == 1
    assert schedule.build(held, held, 0, "ring", False, (-129, 0)).transfers.hops == 2
    assert schedule.build(held, held, 0, "ring", False, (0, 0)).transfers.hops == 0
    assert schedule.build(held, held, 0, "ring", False, CAUSAL).transfers.hops == 7


@pytest.mark.parametrize("layout, limits", [("head_tail", (3, 6)), ("balanced", (2, 4, 8)), ("balanced", (4000,))])
def test_needed_rows_travel_in_equal_stages(layout: str, limits: tuple[int, ...]) -> None:
    """A rank receives an equal part in each stage, never more than a rank holds."""
    world, length = 8, 4096
    boundaries = (0, 700, 712, 2900, 3000, length)
    held = lookup.resolve(layout, world, length, PackedDocuments([list(boundaries)])).held
    plans = [schedule.build(held, held, r, "needed", False, CAUSAL, (boundaries,), stages=limits) for r in range(world)]
    (stages,), (ahead,) = ({len(plan.transfers.moves) for plan in plans}, {plan.transfers.ahead for plan in plans})
    most = max(plan.received for plan in plans)
    assert stages == max(doubled(most, limits), -(-most // (length // world)))
    assert 1 <= ahead <= 3 and ahead * -(-most // stages) <= 3 * length // world + stages
    for plan in plans:
        totals = [sum(move.received) for move in plan.transfers.moves]
        assert max(totals) - min(totals) <= 1 and max(totals) <= length // world
