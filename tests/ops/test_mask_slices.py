"""Windows and masks: the forms that users pass, what they become, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hyper_cp.ops import masks
from hyper_cp.schedule.tiles import check_window


@pytest.mark.parametrize("window", [(1,), (-2, 0), (1.5, 0), (True, 0)])
def test_windows_that_make_no_sense(window: Any) -> None:
    with pytest.raises(ValueError, match="window="):
        check_window(window)


def test_a_causal_matrix_is_recognised_until_it_is_written_to() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert masks.recognised(causal, 6) == (None, 0)
    causal[2, 3] = True  # changed in place: read again
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
    with mock.patch.object(masks, "_recognise", wraps=masks._recognise) as recognise:
        for _ in range(3):
            assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) == (None, 0)
        assert recognise.call_count == 1, "a view is made anew for every call"
        mask[2, 3] = True
        assert masks.recognised(mask.reshape(1, 1, 6, 6), 6) is None
    both = torch.stack([torch.ones(6, 6).tril(), torch.ones(6, 6)]).bool()
    assert (masks.recognised(both[0], 6), masks.recognised(both[1], 6)) == ((None, 0), (None, None))
