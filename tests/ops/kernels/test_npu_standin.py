"""The stand-in for the NPU's operators against attention written out pair by pair, which shares no code with it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from tests.harness.oracle import plain_attention, relative_error

HEADS, KV_HEADS, DIM, V_DIM, SCALE = 4, 2, 8, 6, 0.3
PRE, NEXT = 2, 1
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
SHAPES = {"BNSD": "b n s d", "BSND": "b s n d", "BSH": "b s (n d)", "SBH": "s b (n d)"}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_TRIANGLE = torch.cat([TRIANGLE, torch.tensor([False, True]).repeat_interleave(1024).expand(1024, -1)])


pytestmark = pytest.mark.usefixtures("standin")


def sees(mode: int, i: int, j: int, rows: int, cols: int, at: str, prefix: int, own: Tensor) -> bool:
    """True if query i sees key j, by the vendor's description of the mode. ``at``: the place of the sequence
    in the call, "first", "last", "only" or ""."""
    top_left, bottom_right = j - i, (j - cols) - (i - rows)  # from the diagonal through that corner
    band = -PRE <= bottom_right <= NEXT
    if mode in (0, 1):
        return not bool(own[i, j])
    if mode in (5, 6):
        return bottom_right <= 0 or j < prefix
    if mode == 7:
        return band if at in ("last", "only") else bottom_right <= 0
    if mode == 8:
        return band if at in ("first", "only") else top_left <= 0
    return {2: top_left <= 0, 3: bottom_right <= 0, 4: band}[mode]


@dataclass
class Problem:
    """Sequences ``[1, N, S, D]`` (batch rows, or those of TND) and the options of a call on them."""

    layout: str
    mode: int
    lengths: list[tuple[int, int]]
    pse: Tensor | None = None

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.mode)
        rows, cols = (max(x) for x in zip(*self.lengths, strict=True))
        dims = ((HEADS, 0, DIM), (KV_HEADS, 1, DIM), (KV_HEADS, 1, V_DIM), (HEADS, 0, V_DIM))
        self.tensors = [[torch.randn(1, n, s[of], d, generator=g) for s in self.lengths] for n, of, d in dims]
        own = torch.rand(rows, cols, generator=g) < 0.4
        if self.mode == 0:  # the mask that the tokens mean, and more
            own = own | ~torch.tensor([[-PRE <= j - i <= NEXT for j in range(cols)] for i in range(rows)])
        own[range(min(rows, cols)), range(min(rows, cols))] = False  # in TND no row of it may hide everything
        prefixes = [cols - 1, max(0, cols - rows)][: len(self.lengths)]
        self.visible, last = [], len(self.lengths) - 1
        for index, (r, c) in enumerate(self.lengths):
            at = "only" if last == 0 else "first" if index == 0 else "last" if index == last else ""
            prefix = prefixes[index] if index < len(prefixes) else 0
            seen = [[sees(self.mode, i, j, r, c, at, prefix, own) for j in range(c)] for i in range(r)]
            self.visible.append(torch.tensor(seen, dtype=torch.bool).view(r, c))
        self.options: dict[str, Any] = {"scale": SCALE, "sparse_mode": self.mode, "pse": self.pse}
        self.options["atten_mask"] = own if self.mode < 2 else TRIANGLE if self.mode != 6 else PREFIX_TRIANGLE
        if self.mode == 5:
            self.options["atten_mask"] = torch.stack([~x for x in self.visible])[:, None]
        if self.mode in (5, 6):
            self.options["prefix"] = prefixes
        if self.mode in (0, 4, 7, 8):
            self.options |= {"pre_tokens": PRE, "next_tokens": NEXT}
        if self.layout == "TND":
            for of, name in enumerate(("q", "kv")):
                self.options[f"actual_seq_{name}len"] = list(itertools.accumulate(s[of] for s in self.lengths))

    def arranged(self, xs: list[Tensor]) -> Tensor:
        """Sequences in the layout of the call."""
        if self.layout == "TND":
            return torch.cat([rearrange(x, "1 n s d -> s n d") for x in xs])
        return rearrange(torch.cat(xs), f"b n s d -> {SHAPES[self.layout]}").contiguous()

    def wanted(self) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        """Outputs, log-sum-exps and gradients of every sequence, in fp64."""
        outs, sums, grads = [], [], []
        for index, (q, k, v, dout) in enumerate(zip(*self.tensors, strict=True)):
            wide = [x.double().requires_grad_() for x in (q, k, v)]
            seen = self.visible[index]
            pse = None if self.pse is None else self.pse[index].double() * SCALE
            if not seen.numel():  # a sequence without queries or keys
                out = wide[0].new_zeros(dout.shape)
                grads.append([torch.zeros_like(x) for x in wide])
            else:
                out = plain_attention(*wide, visible=seen, scale=SCALE, bias=pse)
                grads.append(list(torch.autograd.grad(out, wide, dout.double())))
            logits = q.double() @ k.double().repeat_interleave(HEADS // KV_HEADS, 1).mT * SCALE
            logits = logits if pse is None else logits + pse
            sums.append(logits.masked_fill(~seen, -torch.inf).logsumexp(-1))
            outs.append(out.detach())
        return outs, sums, grads

    def spelled(self, version: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options as that version of the operator spells them."""
        if version != "_v2":
            options = {k.replace("_tokens", "_tockens"): v for k, v in options.items()}
        if version == "_v3":
            options = {k: torch.tensor(v) if k.startswith("actual") else v for k, v in options.items()}
        return options


def check(problem: Problem, version: str, softmax_layout: str = "") -> None:
    """Compare outputs, statistics in their memory order, and gradients from statistics that agree only in the sum."""
    options = problem.spelled(version, problem.options)
    if softmax_layout:
        options["softmax_layout"] = softmax_layout
    q, k, v, dout = (problem.arranged(x) for x in problem.tensors)
    operator = getattr(torch.ops.npu, f"npu_fusion_attention{version}")
    out, largest, total, *rest = operator(q, k, v, HEADS, problem.layout, **options)
    assert [type(x) for x in rest] == [Tensor] + ([Tensor] * 2 if version == "_v3" else [int] * 3)
    outs, sums, grads = problem.wanted()
    assert relative_error(out, problem.arranged(outs)) < 1e-5
    # Memory: [B, N, S, 8]; of TND blocks [N, s, 8], or [T, N, 8] where softmax_layout says so.
    order = "1 n s -> (s n)" if softmax_layout else "1 n s -> (n s)"
    want = torch.cat([rearrange(x, order) for x in sums])
    flat = [x.flatten().unflatten(0, (-1, 8)) for x in (largest, total)]
    dead = want == -torch.inf
    for lane in range(8):
        found = flat[0][:, lane] + flat[1][:, lane].log()
        assert relative_error(found[~dead], want[~dead]) < 1e-5
        assert bool((flat[0][dead, lane] == LOWEST).all()) and bool((flat[1][dead, lane] == HIGHEST).all())
    assert bool((problem.arranged(outs) == 0).all(-1).any()) == bool(dead.any())
    scale = options.pop("scale")
    lse = largest + total.log()
    for pair in ((largest, total), (lse, torch.ones_like(lse)), (lse - 1, torch.full_like(lse, torch.e))):
        gradient = getattr(torch.ops.npu, f"npu_fusion_attention_grad{version}")
        statistics = {"softmax_max": pair[0], "softmax_sum": pair[1], "attention_in": out, "scale_value": scale}
        got = gradient(q, k, v, dout, HEADS, problem.layout, **statistics, **options)
        assert len(got) == (7 if version == "_v2" else 5)
        for grad, expected in zip(got, (problem.arranged(list(x)) for x in zip(*grads, strict=True)), strict=False):
            assert relative_error(grad, expected) < 1e-5


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
@pytest.mark.parametrize("mode", range(7))
def test_dense_layouts(mode: int, version: str) -> None:
    for layout in ["BSND"] if version else SHAPES:
        check(Problem(layout, mode, [(5, 7)] * 2), version)
    check(Problem("BNSD", mode, [(6, 6)] * 2), version)


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 7, 8])
def test_sequences(mode: int, softmax_layout: str) -> None:
    check(Problem("TND", mode, [(5, 7)]), "", softmax_layout)
    for version in ("", "_v2", "_v3"):
        check(Problem("TND", mode, [(3, 6), (0, 2), (4, 4), (1, 1)]), version, softmax_layout)


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_rows_that_see_nothing(mode: int) -> None:
    problem = Problem("BNSD", mode, [(9, 4)])
    hidden = [not bool(row.any()) for row in problem.visible[0]]
    assert any(hidden) == (mode != 2)
    check(problem, "")
    check(Problem("TND", mode, [(9, 4), (3, 2), (2, 5)]), "", "TND")


def test_rows_that_a_mask_hides_come_back_as_the_mean_of_values() -> None:
    """Unless ``inner_precise=2``. Their log-sum-exp is the lowest number in both cases."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    for precise, want in ((0, v.mean(2)), (1, v.mean(2)), (2, torch.zeros(1, 2, 8))):
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            q, k, v, 2, "BNSD", atten_mask=mask, sparse_mode=1, inner_precise=precise
        )
        assert relative_error(out[:, :, 2], want) < 1e-5 if precise < 2 else bool((out[:, :, 2] == 0).all())
        assert bool((largest[:, :, 2] == LOWEST).all()) and bool((total[:, :, 2] == HIGHEST).all())


def test_statistics_of_sequences_lie_in_blocks_without_softmax_layout() -> None:
    problem = Problem("TND", 3, [(2, 2), (3, 3)])
    q, k, v, _ = (problem.arranged(x) for x in problem.tensors)
    blocks, straight = (
        torch.ops.npu.npu_fusion_attention(q, k, v, HEADS, "TND", **problem.spelled("", problem.options), **more)[1]
        for more in ({}, {"softmax_layout": "TND"})
    )
    assert blocks.shape == straight.shape == (5, HEADS, 8) and not torch.equal(blocks, straight)
    first, second = blocks.flatten()[: 2 * HEADS * 8].view(HEADS, 2, 8), blocks.flatten()[2 * HEADS * 8 :]
    assert torch.equal(first, straight[:2].transpose(0, 1))
    assert torch.equal(second.view(HEADS, 3, 8), straight[2:].transpose(0, 1))


def test_tokens_behind_the_last_sequence_are_not_computed() -> None:
    q = torch.randn(9, 2, 8)
    lengths = {"actual_seq_qlen": [3, 5, 0], "actual_seq_kvlen": [3, 5, 0]}
    out, largest, *_ = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "TND", softmax_layout="TND", **lengths)
    assert bool(out[:5].isfinite().all()) and bool(out[5:].isnan().all()) and bool(largest[5:].isnan().all())


def test_pse_is_added_before_the_scale_and_has_a_gradient() -> None:
    for heads in (HEADS, 1):
        pse = torch.randn(2, heads, 6, 6, generator=torch.Generator().manual_seed(9))
        if heads == HEADS:
            check(Problem("BNSD", 2, [(6, 6)] * 2, pse), "_v2")
    problem = Problem("BNSD", 2, [(6, 6)], torch.randn(1, HEADS, 6, 6))
    q, k, v, dout = (problem.arranged(x) for x in problem.tensors)
    out, top, total, *_ = torch.ops.npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", **problem.options)
    options = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "scale_value": SCALE, **problem.options}
    del options["scale"]
    found = torch.ops.npu.npu_fusion_attention_grad(q, k, v, dout, HEADS, "BNSD", **options)[3]
    wide = problem.pse.double().requires_grad_()  # type: ignore[union-attr]
    want = plain_attention(*(x.double() for x in (q, k, v)), is_causal=True, bias=wide * SCALE, scale=SCALE)
    assert relative_error(found, torch.autograd.grad(want, wide, dout.double())[0]) < 1e-5


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_outputs_are_differentiable(version: str) -> None:
    problem = Problem("TND", 3, [(3, 6), (4, 4)])
    q, k, v, dout = (problem.arranged(x) for x in problem.tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    operator = getattr(torch.ops.npu, f"npu_fusion_attention{version}")
    out, *_ = operator(*leaves, HEADS, "TND", **problem.spelled(version, problem.options))
    for grad, want in zip(torch.autograd.grad(out, leaves, dout), zip(*problem.wanted()[2], strict=True), strict=True):
        assert relative_error(grad, problem.arranged(list(want))) < 1e-5


def test_without_a_mask_modes_and_tokens_are_ignored() -> None:
    q = torch.randn(1, 2, 6, 8)
    for options in ({"sparse_mode": 2}, {"sparse_mode": 4, "pre_tockens": 0, "next_tockens": 0}):
        full, *_ = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.3, **options)
        assert relative_error(full, plain_attention(q.double(), q.double(), q.double(), scale=0.3)) < 1e-5


Q, T = torch.randn(1, 2, 6, 8), torch.randn(6, 2, 8)
ENDS = {"query": T, "key": T, "value": T, "input_layout": "TND", "actual_seq_qlen": [6], "actual_seq_kvlen": [6]}
REFUSED: dict[str, dict[str, Any]] = {
    "query must be contiguous": {"query": Q.mT.contiguous().mT},
    "float64": {"query": Q.double(), "key": Q.double(), "value": Q.double()},
    "equal to query's": {"key": Q.half()},
    "padding_mask": {"padding_mask": Q},
    "softmax_layout TND takes": {"softmax_layout": "TND"},
    "only softmax_layout TND": {**ENDS, "softmax_layout": "BSH"},
    "input_layout NBSD": {"input_layout": "NBSD"},
    "has 3 dimensions": {"input_layout": "BSH"},
    "head_num 257": {"head_num": 257},
    "head_num is 1": {"head_num": 1},
    "keep_prob": {"keep_prob": 0.0},
    "inner_precise 3": {"inner_precise": 3},
    "head dims": {"value": torch.randn(1, 2, 6, 9)},
    "heads of query must be a multiple": {"key": torch.randn(1, 3, 6, 8), "value": torch.randn(1, 3, 6, 8)},
    "differ in heads or length": {"value": torch.randn(1, 2, 7, 8)},
    "batch sizes": {"key": torch.randn(2, 2, 6, 8), "value": torch.randn(2, 2, 6, 8)},
    "head dim 776": {name: torch.randn(1, 2, 6, 776) for name in ("query", "key", "value")},
    "atten_mask .5, 6.": {"atten_mask": torch.zeros(5, 6, dtype=torch.bool)},
    "bool or uint8": {"atten_mask": torch.zeros(6, 6)},
    "not its mask": {"atten_mask": torch.zeros(2048, 2048, dtype=torch.bool), "sparse_mode": 3},
    "sparse_mode 6: not": {"atten_mask": TRIANGLE, "sparse_mode": 6, "prefix": [3]},
    "sparse_mode 5: atten_mask is": {"atten_mask": TRIANGLE[:6, :6][None, None], "sparse_mode": 5, "prefix": [3]},
    "prefix .7. is out": {"atten_mask": PREFIX_TRIANGLE, "sparse_mode": 6, "prefix": [7]},
    "prefix: one per row": {"atten_mask": PREFIX_TRIANGLE, "sparse_mode": 6},
    "tokens hide": {"atten_mask": torch.zeros(6, 6, dtype=torch.bool), "next_tockens": 0},
    "leave nothing": {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 1, "next_tockens": -2},
    "sparse_mode 7 is not for BNSD": {"sparse_mode": 7},
    "sparse_mode 9": {"sparse_mode": 9},
    "sparse_mode 5 is not for TND": {**ENDS, "sparse_mode": 5},
    "TND takes actual": {**ENDS, "actual_seq_kvlen": None},
    "equally many": {**ENDS, "actual_seq_kvlen": [3, 6]},
    "at most 1024": {**ENDS, "actual_seq_qlen": [6] * 1025, "actual_seq_kvlen": [6] * 1025},
    "actual_seq_qlen .5, 3. is wrong": {**ENDS, "actual_seq_qlen": [5, 3], "actual_seq_kvlen": [3, 5]},
    "actual_seq_kvlen .7. is wrong": {**ENDS, "actual_seq_kvlen": [7]},
    "belong to input_layout TND": {"actual_seq_qlen": [6], "actual_seq_kvlen": [6]},
    "hides whole rows": {**ENDS, "atten_mask": torch.ones(6, 6, dtype=torch.bool), "sparse_mode": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_that_the_vendor_refuses_are_refused(message: str) -> None:
    right: dict[str, Any] = {"query": Q, "key": Q, "value": Q, "head_num": 2, "input_layout": "BNSD"}
    torch.ops.npu.npu_fusion_attention(**right)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.npu.npu_fusion_attention(**{**right, **REFUSED[message]})


def test_gradients_refuse_statistics_of_another_form() -> None:
    out, top, total, *_ = torch.ops.npu.npu_fusion_attention(Q, Q, Q, 2, "BNSD")
    options = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    torch.ops.npu.npu_fusion_attention_grad(Q, Q, Q, Q, 2, "BNSD", **options)
    for bad in ({"softmax_max": top[..., 0]}, {"softmax_sum": total.double()}, {"attention_in": None}):
        with pytest.raises(RuntimeError, match=next(iter(bad))):
            torch.ops.npu.npu_fusion_attention_grad(Q, Q, Q, Q, 2, "BNSD", **{**options, **bad})
    wide = torch.randn(6, 2, 520)
    ends = {"actual_seq_qlen": [6], "actual_seq_kvlen": [6]}
    out, top, total, *_ = torch.ops.npu.npu_fusion_attention(wide, wide, wide, 2, "TND", **ends)
    options = {"softmax_max": top, "softmax_sum": total, "attention_in": out, **ends}
    with pytest.raises(RuntimeError, match="head dim 520 is too large"):
        torch.ops.npu.npu_fusion_attention_grad(wide, wide, wide, wide, 2, "TND", **options)
