"""``DynamicBatches`` in a data loader: every sample once, the same order for any workers, ranks and degrees."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hyper_cp import CostModel, DynamicBatches, DynamicContextParallel

LENGTHS = random.Random(3).sample(range(3, 200), 22)
TEXTS = [torch.full((length,), number) for number, length in enumerate(LENGTHS)]


def batches(rank: int = 0, size: int = 4, batch_size: int = 4, seed: int = 5) -> DynamicBatches:
    scheduler = DynamicContextParallel(size, 256 // size, CostModel(1.0, 0.02, 2.0))
    return DynamicBatches(TEXTS, LENGTHS, scheduler, batch_size=batch_size, rank=rank, seed=seed)


def read(size: int, workers: int = 0, state: Any = None, **options: Any) -> list[tuple[set[int], dict[str, int]]]:
    """The samples of each global batch that all ranks together run, and the position behind it."""
    found: list[tuple[set[int], dict[str, int]]] = []
    for rank in range(size):
        source = batches(rank, size, **options)
        if state:
            source.load_state_dict(state)
        for number, batch in enumerate(DataLoader(source, batch_size=None, num_workers=workers)):
            if rank == 0:
                found.append((set(), batch.state))
            own = [i for m in batch.plan.of_rank(rank) for i in m.samples]
            lengths = dict(x for m in batch.plan.micro_batches for x in zip(m.samples, m.lengths, strict=True))
            assert batch.state == found[number][1] and batch.samples and set(own) <= set(batch.samples)
            assert all(len(sample) == lengths[i] for i, sample in batch.samples.items())
            found[number][0].update(int(batch.samples[i][0]) for i in own)
    return found


def test_each_epoch_has_every_sample_once_for_any_ranks() -> None:
    first, other = read(4), read(2)
    assert [samples for samples, _ in first] == [samples for samples, _ in other]
    assert sorted(i for samples, _ in first for i in samples) == list(range(22))
    assert [len(samples) for samples, _ in first] == [4, 4, 4, 4, 4, 2]
    assert first[1][1] == {"seed": 5, "epoch": 0, "samples": 8, "of": 22}
    assert first[-1][1] == {"seed": 5, "epoch": 1, "samples": 0, "of": 22}
    following = [samples for samples, _ in read(2, state=first[-1][1])]
    assert sorted(i for samples in following for i in samples) == list(range(22))
    assert following != [samples for samples, _ in first], "another order"


def test_resumed_in_an_epoch_on_other_ranks_with_other_batches() -> None:
    whole = read(4)
    assert read(1, state=whole[2][1]) == whole[3:]
    larger = read(2, state=whole[2][1], batch_size=8)
    assert larger[0][0] == whole[3][0] | whole[4][0] and larger[0][1] == whole[4][1]


def test_workers_plan_ahead_in_the_same_order_and_are_resumed() -> None:
    want = [batch.state for batch in batches()]
    source = batches()
    loader = DataLoader(source, batch_size=None, num_workers=2, persistent_workers=True)
    assert [batch.state for batch in loader] == want
    source.load_state_dict(want[1])  # workers that live on begin there, too
    again = list(loader)
    assert [batch.state for batch in again] == want[2:]
    assert [batch.plan for batch in again] == [batch.plan for batch in batches()][2:]


def test_errors() -> None:
    scheduler = DynamicContextParallel(2, 16, CostModel(1.0, 0.02))
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"lengths\[1\]=33 does not fit. The widest degree is 2", ([0, 0], [4, 33], scheduler), {}),
        ("lengths has 1 entries, and the dataset 2 samples", ([0, 0], [4], scheduler), {}),
        ("rank=2 is not below 2", ([0], [4], scheduler), {"rank": 2}),
        ("batch_size=0 must be an int of at least 1", ([0], [4], scheduler), {"batch_size": 0}),
    ]
    for text, args, options in cases:
        with pytest.raises(ValueError, match=text):
            DynamicBatches(*args, **({"batch_size": 1, "rank": 0} | options))
    with pytest.raises(ValueError, match="state has seed=4, and these batches seed=5"):
        batches().load_state_dict(batches(seed=4).state_dict())
