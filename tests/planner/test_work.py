"""Work counted by formula against the schedule that a run would use, rank by rank."""

from __future__ import annotations

from itertools import accumulate, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_cp.planner import work as works
from hyper_cp.planner.work import hops, ring_work
from hyper_cp.schedule import tiles
from hyper_cp.schedule.build import build
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.pairs import cost, visible, visible_between
from hyper_cp.schedule.tiles import CAUSAL, FULL, Tile

LENGTHS = [[240], [75, 5, 160], [120, 120], [1, 239], [15] * 16]


def boundaries(lengths: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


@pytest.mark.parametrize("band", [CAUSAL, FULL, (-20, 0), (-70, 0)])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_formulas_count_what_schedules_owe(lengths: list[int], layout: str, band: tiles.Band) -> None:
    documents = boundaries(lengths)
    for ranks in (2, 5):
        held = ResolvedLayout.of(layout, ranks, 240).held
        plans = [build(held, held, r, "ring", False, band, (documents,)) for r in range(ranks)]
        counted = cost(held, (documents,), band)
        assert counted.pairs.tolist() == [plan.area for plan in plans]
        assert hops(layout, ranks, np.array(documents), band) == plans[0].transfers.hops
        fetched = [build(held, held, r, "needed", False, band, (documents,)) for r in range(ranks)]
        assert counted.rows.tolist() == [plan.received for plan in fetched]
        for mine, plan in zip(held, plans, strict=True):
            local = [visible_between(np.array(documents), q, k, band) for q, k in product(mine, repeat=2)]
            assert sum(local) == plan.forward[0].area


@given(*[st.integers(1, 12)] * 2, *[st.none() | st.integers(-14, 14)] * 2)
def test_the_pairs_of_a_rectangle(rows: int, cols: int, lower: int | None, upper: int | None) -> None:
    """Counted one by one; a band whose bounds cross shows nothing."""
    low, high = -99 if lower is None else lower, 99 if upper is None else upper
    pairs = sum(low <= j - i <= high for i in range(rows) for j in range(cols))
    assert Tile((0, rows), (0, cols), (lower, upper)).area == pairs
    if low <= high:
        assert visible(np.array([rows]), np.array([cols]), (lower, upper)).tolist() == [pairs]


@given(*[st.integers(1, 12)] * 2, *[st.none() | st.integers(-6, 6)] * 2)
def test_the_blocks_of_a_tile(rows: int, cols: int, lower: int | None, upper: int | None) -> None:
    """Those of 4 x 4 pairs, of which the last ones may be smaller, with a pair that could be visible."""
    low, high = -99 if lower is None else lower, 99 if upper is None else upper
    whole = range(-(-rows // 4) * 4), range(-(-cols // 4) * 4)
    seen = {(i // 4, j // 4) for i, j in product(*whole) if low <= j - i <= high}
    with patch.object(tiles, "BLOCK", 4):
        if low <= high:
            assert Tile((0, rows), (0, cols), (lower, upper)).blocks == len(seen)


@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather", "needed"])
@pytest.mark.parametrize(
    ("layout", "band"),
    [
        *product(["contiguous", "head_tail", "per_document", "balanced"], [CAUSAL]),
        *product(["contiguous", "head_tail"], [(-1199, 0), (-99, 0)]),
    ],
)
def test_a_long_ring_by_formula_has_the_work_of_its_schedule(
    layout: str, band: tiles.Band, kv_exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs and rows of the fullest of 12 ranks, step by step."""
    monkeypatch.setattr(tiles, "BLOCK", 1)
    monkeypatch.setattr(works, "BLOCK", 1)
    packed = PackedDocuments([list(boundaries([4800, 4800]))])
    monkeypatch.setattr(works, "REAL", 12)
    real = ring_work(layout, 12, kv_exchange, packed, band)
    monkeypatch.setattr(works, "REAL", 1)
    formula = ring_work(layout, 12, kv_exchange, packed, band)
    assert np.allclose(real.pairs, formula.pairs, rtol=1e-3)
    exact, mine = real.ranks[real.rank], formula.ranks[formula.rank]
    assert exact.hops == mine.hops and len(exact.forward) == len(mine.forward)
    for direction in ("forward", "backward"):
        totals = [sum(step.pairs for step in getattr(w, direction)) for w in (exact, mine)]
        assert totals[1] == pytest.approx(totals[0], rel=0.05)
    steps = zip(*(w.forward[1:-1] for w in real.ranks.values()), strict=True)  # a ring waits for the slowest rank
    most = sum(max(step.rows for step in ranks) for ranks in steps)
    assert 0.5 * most <= sum(step.rows for step in mine.forward[1:-1]) <= 2 * most
    if kv_exchange == "needed":
        worst = max(sum(map(np.sum, w.received)) for w in real.ranks.values())
        assert sum(map(np.sum, mine.received)) == pytest.approx(worst, rel=0.1)
