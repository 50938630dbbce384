"""The rows of a one-device tensor that a rank holds, found from shapes, and the rule by which they are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyper_cp.verification import share
from hyper_cp.verification.compare import Tolerance
from hyper_cp.verification.share import Positions, closest, distance, looks_local, selections

AT = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])  # rank 1 of 2, head-tail, of 13 positions padded to 16
WHOLE = Positions(AT, 13, 16, (13, 14))
ROWS = [4, 5, 6, 7, 12]


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def of_rank(x: Tensor, dim: int) -> Tensor:
    """This rank's rows of ``x``, whose padding is anything."""
    padded = torch.cat([x, torch.full_like(x.narrow(dim, 0, 3), -7.0)], dim)
    return padded.index_select(dim, AT)


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 13, 5), 1), ((13, 2, 5), 0), ((2, 4, 13, 5), 2), ((13,), 0), ((13, 13), 0), ((13, 13), 1)]
)
def test_rows_are_found_along_the_sequence(shape: tuple[int, ...], dim: int) -> None:
    whole = numbered(*shape)
    local = of_rank(whole, dim)
    found = closest(local, whole, WHOLE)
    assert found is not None
    selection, rows = found
    assert (selection.kind, selection.dim) == ("share", dim)
    assert torch.equal(rows, whole.index_select(dim, torch.tensor(ROWS)))
    assert torch.equal(selection.of_local(local), rows)


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_are_found_where_the_batch_is_flattened(batch_first: bool) -> None:
    whole = numbered(3, 13, 5)
    local = of_rank(whole, 1)
    flat = [x.flatten(0, 1) if batch_first else x.transpose(0, 1).flatten(0, 1) for x in (local, whole)]
    found = closest(*flat, WHOLE)
    assert found is not None and found[0].batch_first == batch_first and found[0].count == 3
    assert torch.equal(found[0].of_local(flat[0]), found[1]) and found[1].numel() == 3 * 5 * 5


def test_other_shapes() -> None:
    assert [s.kind for s in selections((3, 5), (3, 5), WHOLE)] == ["same"]
    assert [s.kind for s in selections((2, 16, 5), (2, 13, 5), WHOLE)] == ["padded"]
    assert not selections((2, 7, 5), (2, 13, 5), WHOLE)  # tokens of one expert, say
    assert not selections((8, 8), (13, 13), WHOLE) and not selections((8,), (13, 1), WHOLE)
    assert [s.kind for s in selections((2, 8), (2, 14), WHOLE)] == ["share"]  # padded on one device too


def test_padding_tokens_do_not_count() -> None:
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1, :6] = True
    positions = Positions(AT, 13, 16, (13,), padding)
    for shape, dim, batch in (((2, 13, 5), 1, 0), ((13, 2, 5), 0, 1), ((2, 4, 13, 5), 2, 0)):
        whole = numbered(*shape)
        local = of_rank(whole, dim)
        local.select(batch, 1).narrow(dim - (batch == 0), 0, 2).fill_(99.0)  # positions 4 and 5
        (selection,) = selections(local.shape, whole.shape, positions)
        assert torch.equal(selection.of_local(local), selection.of_whole(whole))
    flat = numbered(2, 13, 5)
    local = of_rank(flat, 1)
    local[1, :2] = 99.0
    found = closest(local.flatten(0, 1), flat.flatten(0, 1), positions)
    assert found is not None and torch.equal(found[0].of_local(local.flatten(0, 1)), found[1])


def test_local_positions_are_recognised() -> None:
    counted = torch.arange(8)
    assert looks_local(counted, WHOLE) and looks_local(counted[None].float(), WHOLE)
    assert not looks_local(AT, WHOLE) and not looks_local(counted + 1, WHOLE)
    assert not looks_local(counted, Positions(counted, 16, 16, (16,)))  # these are its positions


def test_distances_and_tolerances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "PIECE", 3)
    a = torch.tensor([1.0, 2.0, float("inf"), float("nan"), -4.0])
    b = a.clone()
    assert distance(a, b) == 0
    b[1] = 2.5
    assert distance(a, b) == 0.5 and distance(a.nan_to_num(), b) == float("inf")
    assert distance(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    b[4] = float("-inf")
    assert distance(a, b) == float("inf")
    x, y = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.4])
    error, allowed = Tolerance(0.05, 0.4).judge(x, y, None)
    assert (error, allowed) == pytest.approx((0.4 / 4.4, 0.05 + 0.4 / 4.4))
    assert Tolerance(0.1).judge(torch.zeros(2), torch.zeros(2), None) == (0.0, 0.1)
    assert Tolerance(0.1).judge(torch.ones(2), torch.zeros(2), None)[0] == float("inf")
    assert Tolerance(0.1).judge(x * 1e-9, torch.zeros(2), None, least=1.0)[0] == pytest.approx(4e-9)
    # In half precision: twice as far from fp32 as one device, once more, and one rounding.
    error, allowed = Tolerance(0.04).judge(x + 0.2, x - 0.1, x)
    assert error == pytest.approx(2 * (allowed - 0.01) / 3)
