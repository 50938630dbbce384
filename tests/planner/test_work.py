"""Work counted by formula against the schedule that a run would use, rank by rank."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from hyper_cp.schedule.build import build
from hyper_cp.schedule.documents import PackedDocuments
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.planning import pairs as counting
from hyper_cp.schedule.planning import work as works
from hyper_cp.schedule.planning.pairs import Pairs
from hyper_cp.schedule.planning.work import ring_work
from hyper_cp.schedule.tiles import CAUSAL, FULL

LENGTHS = [[240], [75, 5, 160], [120, 120], [1, 239], [15] * 16]


def boundaries(lengths: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_formulas_count_what_schedules_owe(lengths: list[int], layout: str, causal: bool) -> None:
    documents = boundaries(lengths)
    pairs = Pairs(documents, causal)
    for ranks in (2, 3, 5, 8):
        held = ResolvedLayout.of(layout, ranks, 240).held
        plans = [build(held, held, r, "ring", False, CAUSAL if causal else FULL, (documents,)) for r in range(ranks)]
        assert pairs.by_rank(layout, ranks).tolist() == [plan.area for plan in plans]
        assert counting.hops(layout, ranks, 240, pairs) == plans[0].hops
        for rank in range(ranks):
            assert counting.held(layout, rank, ranks, 240) == list(held[rank])
            local, remote = pairs.local_and_remote(list(held[rank]))
            mine = plans[rank]
            one = mine.forward[0].area
            assert local == one
            fetched = build(held, held, rank, "needed", False, CAUSAL if causal else FULL, (documents,))
            assert remote == sum(sum(route.received) for route in fetched.routes)


@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather", "needed"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "per_document", "balanced"])
def test_a_long_ring_by_formula_has_the_work_of_its_schedule(
    layout: str, kv_exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs and rows of the fullest of 12 ranks, step by step."""
    monkeypatch.setattr(works, "BLOCK", 1)
    packed = PackedDocuments([list(boundaries([4800, 4800]))])
    pairs = Pairs(packed.rows[0], True)
    monkeypatch.setattr(works, "REAL", 12)
    real = ring_work(layout, 12, kv_exchange, packed, pairs)
    monkeypatch.setattr(works, "REAL", 1)
    formula = ring_work(layout, 12, kv_exchange, packed, pairs)
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
