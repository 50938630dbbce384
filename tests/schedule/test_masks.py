"""Forms of documents, windows and masks: what users pass, what it becomes, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hyper_cp.schedule import masks
from hyper_cp.schedule.documents import documents_table, read


def rows(table: Any, batch: int, length: int) -> Any:
    """The boundaries of a table that fits a batch."""
    packed = read(table)
    packed.check(batch, length)
    return packed.rows


def test_forms_of_documents() -> None:
    table = documents_table([0, 3, 8])
    assert table is not None and table.tolist() == [[0, 3, 8, 8]]
    ids = torch.tensor([[7, 7, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 5]])
    assert rows(documents_table(None, ids), 2, 8) == ((0, 2, 5, 8), (0, 7, 8))
    assert rows(documents_table(torch.tensor([0, 8], dtype=torch.int32)), 4, 8) == ((0, 8),)
    same = documents_table([[0, 4, 4, 8], torch.tensor([0, 4, 8])])
    assert rows(same, 2, 8) == ((0, 4, 8),), "equal rows share their tiles"


@pytest.mark.parametrize(
    "documents, batch, words",
    [
        ([0, 5], 1, "ascend from 0 to the global sequence length 8"),
        ([1, 8], 1, "ascend from 0"),
        ([0, 5, 3, 8], 1, "ascend from 0"),
        ([[0, 8], [0, 8], [0, 8]], 2, "3 rows for a batch of 2"),
    ],
)
def test_documents_that_do_not_fit(documents: Any, batch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rows(documents_table(documents), batch, 8)


def test_a_document_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"document_ids\[0\] names a document in two places"):
        documents_table(None, torch.tensor([[1, 2, 1]]))


@pytest.mark.parametrize("window", [(1,), (-2, 0), (1.5, 0), (True, 0)])
def test_windows_that_make_no_sense(window: Any) -> None:
    with pytest.raises(ValueError, match="window="):
        masks.check_window(window)


def test_a_causal_matrix_is_recognised_exactly_and_not_by_memory_of_another() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(causal, 6) == (None, 0)
    causal[2, 3] = True  # changed in place: compared again
    assert masks.recognised(causal, 6) is None
    lowest = torch.finfo(torch.bfloat16).min
    added = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16).masked_fill(~torch.ones(6, 6).tril().bool(), lowest)
    assert masks.recognised(added, 6) == (None, 0)
    added[1, 0, 5, 0] = -1.0
    assert masks.recognised(added, 6) is None
    assert masks.recognised(torch.ones(6, 6, dtype=torch.bool), 6) == (None, None)


def test_masks_of_inference_and_views_of_one_mask() -> None:
    with torch.inference_mode():
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(mask, 6) == (None, 0)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    with mock.patch.object(masks, "_recognise", wraps=masks._recognise) as compared:
        for _ in range(3):
            assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) == (None, 0)
        assert compared.call_count == 1, "a view is made anew for every call"
        mask[2, 3] = True
        assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) is None
    both = torch.stack([torch.ones(6, 6).tril(), torch.ones(6, 6)]).bool()
    assert (masks.recognised(both[0], 6), masks.recognised(both[1], 6)) == ((None, 0), (None, None))
