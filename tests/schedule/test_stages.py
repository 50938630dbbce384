"""The stages of kv_exchange="needed": no rank waits for one that has more to do in this stage than in the next."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hyper_cp.schedule import lookup
from hyper_cp.schedule.arrivals import in_stages
from hyper_cp.schedule.documents import PackedDocuments

SHARE = 4096


@settings(max_examples=40)
@given(arrays.arrays(np.int64, st.integers(2, 7).map(lambda n: (n, n)), elements=st.integers(0, 50)), st.integers(1, 9))
def test_every_row_travels_in_one_stage(flows: np.ndarray, count: int) -> None:
    np.fill_diagonal(flows, 0)
    stages = in_stages(flows, count)
    assert (stages >= 0).all() and (stages.sum(0) == flows).all()
    parts = stages.sum(2)
    assert (parts.max(0) - parts.min(0) <= 1).all(), "a rank receives an equal part in each stage"


@pytest.mark.parametrize("world", [8, 16])
@pytest.mark.parametrize("name", ["causal", "half one document"])
def test_all_stages_together_take_no_longer_than_the_busiest_rank(name: str, world: int) -> None:
    length = world * SHARE
    ends = [0, length] if name == "causal" else [0, *range(length // 2, length + 1, 2048)]
    documents = PackedDocuments([ends])
    rest = ("needed", False, (None, 0), length, length)
    plans = [lookup.schedule(lookup.Key("balanced", rank, world, 1, *rest), documents) for rank in range(world)]
    rows = np.array([[(sum(move.sent), sum(move.received)) for move in plan.transfers.moves] for plan in plans])
    busiest, in_turn = rows.sum(1).max(), rows.max((0, 2)).sum()
    assert in_turn <= (1.01 if name == "causal" else 1.1) * busiest
