"""The Triton kernel of selected keys: its results in Triton's interpreter, its machine code, and where it is chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.ops import kernels, latent_attention
from hyper_cp.ops.kernels import TileInputs, fused, triton_selected
from hyper_cp.ops.kernels.scores import Softcap, TileScore
from hyper_cp.ops.kernels.selected import TileSelection
from tests.harness import attention_case
from tests.harness.attention_case import FP32, AttentionCase, Errors, check, run_case
from tests.harness.oracle import attention_and_lse, relative_error, rms_error, softcap
from tests.harness.ranks import on_ranks
from tests.harness.triton_interpreter import interpreted

INF, NAMES = torch.inf, ("out", "lse", "dq", "dk", "dv")
KERNEL = triton_selected.KERNELS[False]
INTERPRETER = "no triton, or one whose interpreter has no loops of a length that NumPy 2.4 holds"


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton's interpreter, for kernels on CPU tensors."""
    pytest.importorskip("triton", "3.9", reason=INTERPRETER)
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
    rows: int = 4
    cols: int = 23
    topk: int = 19
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, as parts of larger tensors."""
        (heads, kv_heads), (dim, dim_v), g = self.heads, self.dims, torch.Generator().manual_seed(self.rows)
        of_rows, of_cols = (heads, self.rows), (kv_heads, self.cols)
        shapes = [(*of_rows, dim), (*of_cols, dim), (*of_cols, dim_v), (*of_rows, dim_v)]
        wider = (torch.randn(2, s, h, d + 3, generator=g).to(self.dtype) for h, s, d in shapes)
        q, k, v, dout = (x.transpose(1, 2)[..., : d[2]] for x, d in zip(wider, shapes, strict=True))
        return [q, k, k[..., :dim_v] if self.within else v, dout]

    def selection(self) -> tuple[TileSelection, Tensor]:
        """The selection, and the pairs of queries and columns ``[2, H, rows, cols]`` that it has."""
        g = torch.Generator().manual_seed(1)
        of_step = torch.cat([torch.arange(5, 15), torch.arange(30, 30 + self.cols)])
        of_tile = of_step[-self.cols :]
        order = torch.rand(2, self.lists, self.rows, 40 + self.cols, generator=g).argsort(-1)
        positions = order[..., : self.topk].masked_fill(
            torch.rand(order[..., : self.topk].shape, generator=g) < 0.1, -1
        )
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
            mask[:, 1, 1] = False  # a query that selects keys and sees none
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
    "more heads and keys than a block": Case((40, 1), rows=3, cols=150, topk=170),
    "lists of key heads": Case((6, 3), lists=3, dims=(24, 16), rows=3),
    "causal": Case(band=(None, 0), cols=8),
    "window": Case(band=(-2, 2), cols=8),
    "padding": Case(mask="padding"),
    "float mask": Case(mask="float", dims=(20, 12)),
    "softcap and log-sum-exp": Case(cap=1.5, dlse=True, mask="bool"),
    "values in keys": Case((18, 1), dims=(24, 16), within=True),
    "one sum, odd": Case((4, 1), dims=(13, 9), within=True, joint=True),
    "few values in many keys": Case((4, 1), dims=(400, 8), within=True, joint=True, rows=3),
    "one sum of both gradients": Case((18, 1), dims=(24, 16), within=True, joint=True),
    "latents of 576": Case((20, 1), dims=(576, 512), within=True, joint=True, rows=3, topk=60, cols=60),
    "576 and 512 apart": Case((4, 1), dims=(576, 512), rows=3),
    "one row, one key": Case(rows=1, cols=1, topk=41),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_attention_written_out(interpreter: Any, name: str) -> None:
    case = CASES[name]
    found, (want, _) = found_by(case), answer(case)
    if case.joint:  # the sum of both gradients is what counts
        for grads in (found, want):
            grads[3][..., : case.dims[1]] += grads.pop()
    blind = want[1] == -INF
    assert blind.any() and torch.equal(found[1] == -INF, blind)
    assert not found[0][blind].any() and not found[2][blind].any()
    found[1], want[1] = (x.masked_fill(blind, 0) for x in (found[1], want[1]))
    for what, x, right in zip(NAMES, found, want, strict=False):
        error = relative_error(x, right) if right.any() else float(x.abs().max())
        assert x.dtype == torch.float32 and error <= 5e-6, (what, error)


def test_rows_are_listed_some_at_a_time(interpreter: None, monkeypatch: Any) -> None:
    """The same bits: rows do not meet in the outputs, and queries are added to few keys in turn."""
    case = Case(band=(-9, 2), mask="bool", cap=1.5, dlse=True)
    whole = found_by(case)
    monkeypatch.setattr(triton_selected, "LISTED_AT_ONCE", 2 * 19 * 3)
    assert all(torch.equal(a, b) for a, b in zip(found_by(case), whole, strict=True))


def test_tensors_of_more_than_two_billion_numbers(interpreter: None) -> None:
    """Rows of keys that lie 2^27 numbers apart: their places are no 32-bit numbers."""
    case = Case((2, 1), rows=2, cols=40, topk=79)
    q, k, *_ = case.tensors()
    memory = torch.empty(2**27 * 39 + 16, dtype=torch.bfloat16)  # the system has memory for what is written only
    far = memory.as_strided((1, 1, 40, 16), (16, 16, 2**27, 1)).copy_(k[:1])
    near = far.contiguous()
    selected, _ = case.selection()
    selected.listed = selected.listed[:1]
    tiles = [TileInputs(q[:1].bfloat16(), x, x, (None, None), 1.0, selected=selected) for x in (far, near)]
    for a, b in zip(*(KERNEL.forward(tile) for tile in tiles), strict=True):
        assert torch.equal(a, b) and a.any()


HALVES = {
    "grouped heads": Case((8, 2), dims=(64, 64), dtype=torch.bfloat16),
    "latents of 576": Case((16, 1), dims=(576, 512), rows=5, cols=60, topk=60, dtype=torch.bfloat16),
    "float16": Case((8, 2), dims=(64, 64), dtype=torch.float16),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_within_twice_one_device(interpreter: None, name: str) -> None:
    """Values are filled up to the width of keys: PyTorch has a kernel for one head dim only, and fp32 math for two."""
    case = HALVES[name]
    (out, lse, *grads), (want, pairs) = found_by(case), answer(case)
    blind = (want[1] == -INF).unsqueeze(-1)
    *leaves, dout = (x.detach().clone().requires_grad_() for x in case.tensors())
    missing = case.dims[0] - case.dims[1]
    padded = *leaves[:2], F.pad(leaves[2], (0, missing))
    alone = F.scaled_dot_product_attention(*padded, pairs | blind, scale=case.scale, enable_gqa=True)
    theirs = torch.autograd.grad(alone, leaves, F.pad(dout, (0, missing)).masked_fill(blind, 0))
    theirs = alone[..., : case.dims[1]].masked_fill(blind, 0), *theirs
    assert torch.equal(lse == -INF, blind[..., 0])
    for what, a, b, right in zip(("out", "dq", "dk", "dv"), (out, *grads), theirs, (want[0], *want[2:]), strict=True):
        assert rms_error(a, right) <= 2 * rms_error(b, right), what


# --------------------------------------------------------------------------- in the engine


def test_latents_of_576_in_bf16_are_within_twice_one_device(interpreter: None) -> None:
    """The form that applies the weight to queries and outputs, against keys and values of all heads in bfloat16 on one
    device: DeepSeek's head dims, 16 heads, output and all gradients."""
    g, (heads, rank, plain, rotary, length) = torch.Generator().manual_seed(0), (16, 512, 128, 64, 16)
    shapes = (1, heads, length, plain + rotary), (1, length, rank), (1, 1, length, rotary), (heads * 2 * plain, rank)
    leaves = [torch.randn(s, generator=g) * (rank**-0.5 if len(s) == 2 else 1) for s in shapes]
    leaves = [x.bfloat16().requires_grad_() for x in leaves]
    dout = torch.randn(1, heads, length, plain, generator=g).bfloat16()
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    selected = torch.rand(length, length, generator=g).masked_fill(~seen, -1).topk(7).indices
    pairs = torch.zeros_like(seen).scatter(1, selected, True) & seen

    def expanded(dtype: torch.dtype) -> list[Tensor]:
        q, latent, rope, weight = (x.detach().to(dtype).requires_grad_() for x in leaves)
        both = F.linear(latent, weight).unflatten(2, (heads, -1)).transpose(1, 2)
        k = torch.cat([both[..., :plain], rope.expand(-1, heads, -1, -1)], 3)
        out = F.scaled_dot_product_attention(q, k, both[..., plain:], pairs)
        return [out.detach(), *torch.autograd.grad(out, (q, latent, rope, weight), dout.to(dtype))]

    ran = Counting("counting")
    with kernels.register(ran, "cpu", selected=True):
        out = latent_attention(*leaves, is_causal=True, selected=selected[None, None])
        ours = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert ran.tiles == [(True, True)] * 2
    alone, want = expanded(torch.bfloat16), expanded(torch.float64)
    for what, a, b, right in zip(("out", "q", "latent", "rope", "weight"), ours, alone, want, strict=True):
        assert rms_error(a, right) <= 2 * rms_error(b, right), what


class Counting(triton_selected.SelectedKernel):
    """The kernel, which notes of each tile, in forward and in backward, what saves work for latents."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tiles: list[tuple[bool, bool]] = []

    def forward(self, tile: TileInputs) -> Any:
        self.tiles.append((tile.joint, triton_selected.widths(tile)["WITHIN"]))
        return super().forward(tile)

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> Any:
        self.tiles.append((tile.joint, triton_selected.widths(tile)["WITHIN"]))
        return super().backward(tile, *of_rows)


@on_ranks
def run_on_ranks(cases: list[Any]) -> list[tuple[Any, Errors]]:
    mesh = attention_case.cp_mesh()
    with interpreted(), ExitStack() as stack:
        for scores, kernel in triton_selected.KERNELS.items():
            stack.enter_context(kernels.register(kernel, "cpu", scores=scores, selected=True))
        return [(case, run_case(case, mesh)) for case in cases]


@pytest.mark.slow
def test_in_the_engine_on_two_ranks(ranks: Any) -> None:
    """Each step has a share of the keys that a query has selected, and documents several ranges of them."""
    pytest.importorskip("triton", "3.9", reason=INTERPRETER)
    given: dict[str, Any] = {"heads": 2, "kv_heads": 1, "is_causal": True, "dtype": torch.float32, "batch": 1}
    ways = {"kv_exchange": "ring"}, {"kv_exchange": "all_gather", "layout": "head_tail", "softcap": 2.0, "sinks": True}
    cases = [AttentionCase(8, selected=(3, 1), **given, **way) for way in ways]
    cases.append(replace(cases[0], kv_heads=2, selected=(3, 2), documents=((0, 3, 8),), layout="per_document"))
    cases.append(replace(cases[0], kv_heads=2, selected=(2, 2), block=3))
    check(ranks(2, run_on_ranks, cases), FP32)


# --------------------------------------------------------------------------- the choice


def on_a_gpu(dim: int = 576, dim_v: int = 512, **other: Any) -> Any:
    """The properties of q, k and v on a GPU that the choice reads."""
    known = {"is_cuda": True, "device": "cuda:0", "dtype": torch.bfloat16} | other
    return [SimpleNamespace(shape=(1, 1, 8, d), **known) for d in (dim, dim, dim_v)]


@pytest.fixture
def card(monkeypatch: Any) -> SimpleNamespace:
    """An A100."""
    found = SimpleNamespace(major=8, shared_memory_per_block_optin=166912)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return found


def test_chosen_where_it_can_run(card: SimpleNamespace, monkeypatch: Any) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    accepts = partial(lambda tensors: triton_selected.accepts(*tensors, True))
    assert accepts(on_a_gpu()) and accepts(on_a_gpu(dtype=torch.float16)) and accepts(on_a_gpu(8, 300))
    others = {"is_cuda": False}, {"dtype": torch.float32}, {"dtype": torch.float64}, {"dim": 577}, {"dim_v": 513}
    assert not any(accepts(on_a_gpu(**other)) for other in others)
    card.shared_memory_per_block_optin = 101376  # of a consumer's card
    assert not accepts(on_a_gpu()) and accepts(on_a_gpu(192, 128))
    card.major = 7
    assert not accepts(on_a_gpu(128, 128))
    card.major = 9
    for setting in ({"HYPER_CP_TRITON": "0"}, {}):
        with patch.dict(os.environ, setting):
            assert accepts(on_a_gpu(128, 128)) == (not setting)
    monkeypatch.setattr(triton_selected, "INSTALLED", False)
    assert not accepts(on_a_gpu(128, 128))


def test_plain_math_where_results_must_be_deterministic(card: SimpleNamespace) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    torch.use_deterministic_algorithms(True)
    try:
        assert not triton_selected.accepts(*on_a_gpu(), True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert triton_selected.accepts(*on_a_gpu(), True)


def test_registered_for_selections_on_cuda(card: SimpleNamespace) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    tensors = on_a_gpu(device=torch.device("cuda"))
    for scores, kernel in triton_selected.KERNELS.items():
        assert kernels.choose(*tensors, True, scores=scores, selected=True) == kernel.name
        assert kernels.get(kernel.name, "cuda") is kernel


def test_an_error_says_how_to_run_plain_math(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(triton_selected, "compiled", refuse)
    with pytest.raises(RuntimeError, match=r"Failed to find C compiler.*HYPER_CP_TRITON=0"):
        found_by(Case())


@pytest.mark.parametrize("module", [triton_selected, fused])
def test_the_package_is_imported_without_triton(module: Any) -> None:
    spec = spec_from_file_location(f"{module.__name__}_again", module.__file__)
    assert spec is not None and spec.loader is not None
    again = module_from_spec(spec)
    with patch.dict(sys.modules, {"triton": None}):
        spec.loader.exec_module(again)
    assert getattr(again, "tl", None) is None


# --------------------------------------------------------------------------- machine code, without a GPU

SIZES = {"heads of 128": (8, 128, 128, False), "latents of 576": (128, 576, 512, True)}
MEMORY = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that a program may have on each architecture."""


def compiled_for(capability: int, kernel: Any, heads: int, dim: int, dim_v: int, joint: bool) -> Any:
    """A kernel for one key head and bfloat16, as the launch would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    k = torch.empty(1, 1, 1, dim)
    tile = TileInputs(k, k, k[..., :dim_v] if joint else torch.empty(1, 1, 1, dim_v), (None, None), 1.0, joint=joint)
    fixed: dict[str, Any] = {"STEPS": 2, "BLOCK": 1024}
    if kernel is not triton_selected.list_kernel:
        fixed = triton_selected.widths(tile) | {"CAPPED": False, "MASK": "", "DLSE": False}
        fixed |= triton_selected.blocks(kernel, fixed, heads)
    options = {name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}
    made = triton_selected.compiled(kernel)
    fixed = {name: value for name, value in fixed.items() if name in made.arg_names} | {"groups": 1, "lists": 1}
    types = dict.fromkeys(("q", "k", "v", "dout", "mask"), "*bf16") | dict.fromkeys(("scale", "cap"), "fp32")
    types |= dict.fromkeys(("lse", "dlse", "delta", "dq", "dk", "dv"), "*fp32")
    types |= {"out": "*fp32" if kernel is triton_selected.attend_kernel else "*bf16"}
    types |= dict.fromkeys(("columns", "counts", "positions", "ranges"), "*i32")
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(made.arg_names):
        if name in fixed:
            signature[name], constants[(i,)] = "constexpr", fixed[name]
        elif name.endswith("_at"):  # strides: the last one is 1, the others multiples of 16
            signature[name] = ("i32",) * 3 + ("constexpr",)
            constants[i, 3] = 1
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(made, signature, constants, attributes), target=target, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("capability, size", [*((n, "latents of 576") for n in MEMORY), (80, "heads of 128")], ids=str)
def test_compiles_for_gpus(capability: int, size: str, tmp_path: Path, capsys: Any) -> None:
    """Prints registers and shared memory of each kernel; none spills registers to memory, and all fit the card."""
    triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton comes without cuobjdump")
    triton_selected.compiled.cache_clear()
    of_kernels = ("list_kernel", "attend_kernel", "queries_kernel", "keys_kernel")
    for name in of_kernels:
        code = compiled_for(capability, getattr(triton_selected, name), *SIZES[size])
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"{x}:(\d+)", usage)[1]) for x in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
        memory = code.metadata.shared / 1024
        with capsys.disabled():
            print(f"\n{name} of {size}, sm_{capability}: {registers} registers, {memory:.1f} KiB of shared memory")
        assert stack == local == 0, (name, stack, local)
        assert memory <= min(MEMORY[capability], triton_selected._MEMORY / 1024)
