"""The Triton kernel of selected keys: equal to attention written out in fp64, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.ops.kernels import TileInputs, triton_selected
from hyper_cp.ops.kernels.scores import Softcap, TileScore
from hyper_cp.ops.kernels.selected import TileSelection
from tests.harness.oracle import attention_and_lse, relative_error, rms_error, softcap
from tests.harness.triton_interpreter import interpreted

INF, NAMES = torch.inf, ("out", "lse", "dq", "dk", "dv")
KERNEL = triton_selected.KERNELS[False]


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton's interpreter, for kernels on CPU tensors."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    with interpreted():
        yield


@dataclass(frozen=True)
class Case:
    """A tile whose keys are the last ``cols`` of a step's, at positions 5 to 14 and from 30 on."""

    heads: tuple[int, int] = (4, 2)
    lists: int = 1
    dims: tuple[int, int] = (16, 16)
    within: bool = False
    band: tuple[int | None, int | None] = (None, None)
    mask: str = ""
    cap: float | None = None
    dlse: bool = False
    joint: bool = False
    rows: int = 9
    cols: int = 23
    topk: int = 19
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, as parts of larger tensors."""
        (heads, kv_heads), (dim, dim_v), g = self.heads, self.dims, torch.Generator().manual_seed(self.rows)
        shapes = [(heads, self.rows, dim), (kv_heads, self.cols, dim), (kv_heads, self.cols, dim_v), (heads, self.rows, dim_v)]
        q, k, v, dout = (torch.randn(2, s, h, d + 3, generator=g).to(self.dtype).transpose(1, 2)[..., :d] for h, s, d in shapes)
        return [q, k, k[..., :dim_v] if self.within else v, dout]

    def selection(self) -> tuple[TileSelection, Tensor]:
        """The selection, and the pairs of queries and columns ``[2, H, rows, cols]`` that it has."""
        g = torch.Generator().manual_seed(1)
        of_step = torch.cat([torch.arange(5, 15), torch.arange(30, 30 + self.cols)])
        of_tile = of_step[-self.cols :]
        order = torch.rand(2, self.lists, self.rows, 40 + self.cols, generator=g).argsort(-1)
        positions = order[..., : self.topk].masked_fill(torch.rand(order[..., : self.topk].shape, generator=g) < 0.1, -1)
        positions[:, :, self.rows // 2] = -1  # a query that selects nothing
        pairs = (positions.unsqueeze(-1) == of_tile).any(3).repeat_interleave(self.heads[0] // self.lists, 1)
        ranges = torch.tensor([[5, 30], [15, 30 + self.cols], [0, 10]], dtype=torch.int32)
        return TileSelection(positions.to(torch.int32), ranges, (10, 10 + self.cols)), pairs

    def explicit_mask(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The mask as it is passed, and what it shows and adds."""
        g, shape = torch.Generator().manual_seed(2), (2, self.heads[0], self.rows, self.cols)
        shown, added = torch.ones(1, dtype=torch.bool), torch.zeros(1)
        if self.mask == "padding":
            mask = shown = torch.rand(2, 1, 1, self.cols, generator=g) < 0.7
        elif self.mask == "bool":
            mask = shown = torch.rand(shape, generator=g) < 0.7
        elif self.mask == "float":
            mask = added = torch.randn(1, *shape[1:], generator=g).to(self.dtype)
        return (mask if self.mask else None), shown, added.double()


def answer(case: Case) -> tuple[list[Tensor], Tensor]:
    """Output, log-sum-exp and gradients in fp64, and the visible pairs."""
    *leaves, dout = (x.double().detach().clone() for x in case.tensors())
    _, pairs = case.selection()
    _, shown, added = case.explicit_mask()
    distance = torch.arange(case.cols) - torch.arange(case.rows).unsqueeze(1)
    lower, upper = (-INF if case.band[0] is None else case.band[0]), (INF if case.band[1] is None else case.band[1])
    pairs = pairs & shown & (distance >= lower) & (distance <= upper)
    mod = None if case.cap is None else softcap(case.cap)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = attention_and_lse(*leaves, scale=case.scale, visible=pairs, bias=added, score_mod=mod)
    downward = (out * dout).sum() + (lse.masked_fill(lse == -INF, 0) * dlse_of(case)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(downward, leaves)], pairs


def dlse_of(case: Case) -> Tensor:
    return torch.arange(2 * case.heads[0] * case.rows).view(2, case.heads[0], case.rows).sin() * case.dlse


def found_by(case: Case) -> list[Tensor]:
    """The same by the kernel."""
    (q, k, v, dout), (selected, _), (mask, *_) = case.tensors(), case.selection(), case.explicit_mask()
    score = None if case.cap is None else TileScore(Softcap(case.cap), None)
    tile = TileInputs(q, k, v, case.band, case.scale, mask, score=score, selected=selected, joint=case.joint)
    tile.dlse = dlse_of(case).float() if case.dlse else None
    out, lse = KERNEL.forward(tile)
    return [out, lse, *KERNEL.backward(tile, dout, out.to(case.dtype), lse)]


CASES = {
    "grouped heads": Case(),
    "heads of their own": Case((3, 3), dims=(8, 5)),
    "one key head, more heads than a block": Case((40, 1), rows=3, topk=50),
    "lists of key heads": Case((6, 3), lists=3, dims=(24, 16)),
    "causal": Case(band=(None, 0), rows=23),
    "window": Case(band=(-6, 3), rows=30),
    "padding": Case(mask="padding"),
    "bool mask": Case(mask="bool"),
    "float mask": Case(mask="float", dims=(20, 12)),
    "softcap": Case(cap=1.5),
    "softcap and log-sum-exp": Case(cap=1.5, dlse=True, mask="bool"),
    "values in keys": Case((18, 1), dims=(24, 16), within=True),
    "values in keys, odd": Case((4, 1), dims=(13, 9), within=True),
    "few values in many keys": Case((4, 1), dims=(400, 8), within=True, rows=3),
    "one sum of both gradients": Case((18, 1), dims=(24, 16), within=True, joint=True),
    "latents of 576": Case((20, 1), dims=(576, 512), within=True, joint=True, rows=3, topk=60, cols=60),
    "576 and 512 apart": Case((4, 1), dims=(576, 512), rows=3),
    "one row, one key": Case(rows=1, cols=1, topk=41),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_attention_written_out(interpreter: Any, name: str) -> None:
    case = CASES[name]
    found, (want, _) = found_by(case), answer(case)
    if case.joint:
        assert not found[4].any()
        want[3][..., : case.dims[1]] += want[4]
        want[4].zero_()
    blind = want[1] == -INF
    assert blind.any() and torch.equal(found[1] == -INF, blind)
    assert not found[0][blind].any() and not found[2][blind].any()
    found[1], want[1] = (x.masked_fill(blind, 0) for x in (found[1], want[1]))
    for what, x, right in zip(NAMES, found, want, strict=True):
        error = relative_error(x, right) if right.any() else float(x.abs().max())
        assert x.dtype == torch.float32 and error <= 5e-6, (what, error)
