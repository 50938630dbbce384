"""The selection of pooled keys, and the tokens of a selection, against loops over one whole sequence."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import gather_windows, select_entries, selected_entries, tokens_of_entries, windows
from hyper_cp.ops.kernels import indexer
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import Ranks, on_ranks
from tests.harness.recurrence_oracle import boundaries

HEADS, DIM = 3, 8
CASES: list[tuple[str, Any, int, int, int]] = [
    ("contiguous", None, 48, 4, 3),
    ("head_tail", None, 48, 5, 3),  # windows over two ranks, and a tail
    ("contiguous", None, 24, 11, 2),  # over several
    ("head_tail", [[0, 1, 30, 48], [0, 24, 27, 48]], 48, 4, 3),
    ("contiguous", [[0, 7, 48], [0, 48]], 48, 4, 5),  # padding on the left of a row
    ("head_tail", [[0, 2, 24]], 24, 1, 4),
    ("per_document", [[0, 7, 30, 48]], 48, 4, 3),
    ("contiguous", [[0, 3, 6, 9, 12, 15, 18, 21, 24]], 24, 4, 3),  # no entries at all
]
"""Layout, documents, length, tokens to an entry, and the number of entries that are selected."""


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, raw keys and weights. Keys are few, so that many scores are equal."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(2, HEADS, length, DIM, generator=g, dtype=torch.float64)
    raw = torch.randn(5, DIM, generator=g, dtype=torch.float64)[torch.randint(0, 5, (2, length), generator=g)]
    return q, raw, torch.rand(2, HEADS, length, generator=g, dtype=torch.float64)


def expected(length: int, documents: Any, every: int, topk: int) -> tuple[Tensor, Tensor]:
    """Entries and tokens ``[B, S, k]`` that each query selects, one query after the other."""
    q, raw, weights = inputs(length)
    entries = torch.full((2, length, topk), -1)
    tokens = torch.full((2, length, topk * every + every - 1), -1)
    for b in range(2):
        before = 0
        for start, stop in pairwise(boundaries(documents, b, length)):
            for p in range(start, stop):
                number = (p + 1 - start) // every
                pools = raw[b, start : start + number * every].view(number, every, DIM).mean(1)
                scores = ((q[b, :, p] @ pools.T / DIM**0.5).relu() * weights[b, :, p, None]).sum(0)
                chosen = sorted(range(number), key=lambda i: (-scores[i].float().item(), i))[:topk]
                entries[b, p, : len(chosen)] = torch.tensor([before + i for i in chosen])
                found = [start + i * every + j for i in chosen for j in range(every)]
                tokens[b, p, : len(found)] = torch.tensor(found)
                tail = torch.arange(start + number * every, p + 1)
                tokens[b, p, topk * every : topk * every + len(tail)] = tail
            before += (stop - start) // every
    return entries, tokens


@on_ranks
def wrong(at_once: int) -> list[str]:
    """The cases that fail, with that many scores computed at once."""
    with patch.object(selected_entries, "SCORES_AT_ONCE", at_once), patch.object(indexer, "SCORES_AT_ONCE", at_once):
        return [name for case in CASES for name in wrong_of(*case)]


def wrong_of(layout: str, documents: Any, length: int, every: int, topk: int) -> list[str]:
    handler = ContextParallelHandler(cp_mesh(), layout)
    with handler.documents(documents):
        at = handler.position_ids(length)
    q, raw, weights = inputs(length)
    options: dict[str, Any] = {"mesh": cp_mesh(), "every": every, "layout": layout, "documents": documents}
    pooled = windows(raw[:, at], range(every), **options).mean(2)
    pooled = gather_windows(pooled, length=length, **options).unsqueeze(1)
    with record_traffic() as log:
        entries = select_entries(q[:, :, at], pooled, weights[:, :, at], topk=topk, **options)
        tokens = tokens_of_entries(entries, **options)
        without = tokens_of_entries(entries, tail=False, **options)
    assert not log.entries
    right, of_right = (x[:, at] for x in expected(length, documents, every, topk))
    checks = {
        "entries": torch.equal(entries[:, 0].long(), right),
        "tokens": torch.equal(tokens[:, 0].long(), of_right),
        "no tail": torch.equal(without[:, 0].long(), of_right[..., : topk * every]),
    }
    return [f"{what}: {layout} {documents} {length} {every}" for what, equal in checks.items() if not equal]


@pytest.mark.parametrize(("world", "at_once"), [(1, 1 << 20), (2, 64), (3, 1 << 20), (4, 1 << 20)])
def test_selection(world: int, at_once: int, ranks: Ranks) -> None:
    for of_rank in ranks(world, wrong, at_once):
        assert not of_rank


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"k": torch.zeros(1, 1, 1, 4)}, "key has 1 entries, and this rank's queries see [24]"),
    "key heads": ({"k": torch.zeros(1, 2, 4, 4)}, r"must be \[1, 1, entries, 4\]"),
    "weights": ({"weights": torch.zeros(1, 2, 4)}, r"Reshape it to \(1, 2, 8\)"),
    "topk": ({"topk": 0}, "topk=0 must be a positive int"),
    "every": ({"every": 0}, "every=0 must be a positive int"),
    "documents": ({"documents": [0, 5]}, "select_entries: "),
}


@on_ranks
def refusals() -> dict[str, str]:
    found = {}
    for name, (options, _) in BAD.items():
        given: dict[str, Any] = {"k": torch.zeros(1, 1, 4, 4), "topk": 2, "every": 4, **options}
        with pytest.raises(ValueError) as error:
            select_entries(torch.zeros(1, 2, 8, 4), given.pop("k"), mesh=cp_mesh(), **given)
        found[name] = str(error.value)
    return found


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    for messages in ranks(2, refusals):
        for name, (_, text) in BAD.items():
            assert re.search(text, messages[name]), messages[name]


@on_ranks
def recomputed() -> bool:
    """A recompute on other numbers: the selection is that of the forward."""
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 4, 4)
    made = []

    def layer(x: Tensor) -> Tensor:
        made.append(select_entries(q if not made else -q, k, topk=1, every=4, mesh=cp_mesh()))
        return x.sin()

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    return len(made) == 2 and torch.equal(*made)


def test_a_recompute_selects_the_same(ranks: Ranks) -> None:
    assert ranks(2, recomputed) == [True, True]
