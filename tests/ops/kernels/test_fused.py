"""The fused merge and sum: equal to plain math in Triton's interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops.kernels import fused, partials
from tests.harness.oracle import relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 1, 67, 64), (2, 1, 130, 24), (1, 1, 3, 192)]
ORDERS = "contiguous", "some rows of [B, S, H, D]", "padded head dim", "[B, H, D, S]"
INF = torch.inf


@pytest.fixture
def interpreter(monkeypatch: Any) -> Any:
    """Triton's interpreter, for kernels on CPU tensors."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused.compiled.cache_clear()
    yield
    fused.compiled.cache_clear()


def in_memory(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """``x`` ``[B, H, S, D]`` as a view of other memory, which is returned too; the rest of it is 7."""
    b, h, s, d = x.shape
    if order == "contiguous":
        memory, view = (base := torch.full_like(x, 7)), base
    elif order == "some rows of [B, S, H, D]":
        memory = x.new_full((b, s + 5, h, d), 7)
        view = memory.transpose(1, 2)[:, :, 2 : s + 2]
    elif order == "padded head dim":
        memory = x.new_full((b, h, s, d + 3), 7)
        view = memory[..., :d]
    else:  # [B, H, D, S]
        memory = x.new_full((b, h, d, s), 7)
        view = memory.mT
    view.copy_(x)
    return view, memory


def partial_of(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, dead: slice) -> tuple[Tensor, Tensor]:
    """An output and its log-sum-exp; the rows ``dead`` have seen nothing."""
    out, lse = torch.randn(shape, generator=g).to(dtype), torch.randn(shape[:3], generator=g) * 20
    out[:, :, dead], lse[:, :, dead] = 0, -INF
    return out, lse


def exact(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The merge written out in fp64."""
    lses = torch.stack([lse.double() for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total.nan_to_num(neginf=0.0)).exp()
    return sum(w.unsqueeze(-1) * out.double() for w, (out, _) in zip(weights, parts, strict=True)), total


def test_no_rows_are_no_launch(interpreter: Any) -> None:
    empty = torch.zeros(1, 2, 0, 8)
    fused.launch_merge(empty, empty[..., 0], empty, empty[..., 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge(interpreter: Any, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    for i, out_order in enumerate(ORDERS):
        # Rows that nobody has seen, rows that one has not seen, rows that both have.
        old = partial_of(shape, torch.float32, g, slice(0, shape[2] // 2))
        new = partial_of(shape, DTYPES[i % 3], g, slice(i % 2, shape[2] // 3))
        want_out, want_lse = exact(old, new)
        (total, memory), (out, _) = in_memory(old[0], ORDERS[1]), in_memory(new[0], out_order)
        total_lse, lse = old[1].clone(), torch.stack([new[1], new[1]], -1)[..., 0]
        plain, plain_lse = total.clone(), total_lse.clone()
        partials.merge(plain, plain_lse, out, lse)
        fused.launch_merge(total, total_lse, out, lse)
        assert torch.equal(total_lse == -INF, want_lse == -INF) and not total.isnan().any()
        assert relative_error(total, want_out) <= 5e-7 and relative_error(total, plain.double()) <= 5e-7
        seen = want_lse > -INF
        for found in (want_lse, plain_lse.double()):
            torch.testing.assert_close(total_lse[seen].double(), found[seen], rtol=1e-6, atol=1e-6)
        assert int((memory == 7).sum()) == memory.numel() - total.numel()  # nothing beside its rows was written


def test_add(interpreter: Any) -> None:
    for i, (shape, order) in enumerate(itertools.product(SHAPES[1:], ORDERS[1:])):
        total, memory = in_memory(torch.randn(shape), ORDERS[1])
        x, _ = in_memory(torch.randn(shape).to(DTYPES[i % 3]), order)
        want = total + x
        fused.launch_add(total, x)
        assert torch.equal(total, want)
        assert int((memory == 7).sum()) == memory.numel() - total.numel()


def test_ends_are_exact(interpreter: Any) -> None:
    """A weight of 0 or 1 returns one of the two bit for bit, as the first partial of a row must."""
    old, new = (torch.randn(1, 1, 2, 8) for _ in range(2))
    old[:, :, 0] = 0
    total, total_lse = old.clone(), torch.tensor([[[-INF, 90.0]]])
    fused.launch_merge(total, total_lse, new, torch.tensor([[[3.0, -INF]]]))
    assert torch.equal(total[:, :, 0], new[:, :, 0]) and torch.equal(total[:, :, 1], old[:, :, 1])
    assert total_lse.tolist() == [[[3.0, 90.0]]]


def test_partials_and_sums_run_the_kernels(interpreter: Any, monkeypatch: Any) -> None:
    """Three tiles on ranges of rows, of all and of one batch row, by the kernels and by PyTorch's operators."""
    q = torch.randn(2, 2, 12, 8, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(0)
    tiles = [((3, 9), None), ((0, 12), None), ((5, 12), (1, 2))]
    given = [partial_of((2 if b is None else 1, 2, e - s, 8), q.dtype, g, slice(0, 1)) for (s, e), b in tiles]

    def run() -> list[Tensor]:
        total, row_sum = partials.Partials(q, 8), partials.RowSum(q)
        for (rows, batch), (out, lse) in zip(tiles, given, strict=True):
            total.add(rows, batch, out.clone(), lse.clone())
            row_sum.add(rows, batch, out.clone())
        return [*total.result((0, 12)), row_sum.total()]

    plain, launches = run(), []
    for name in ("merge", "add"):
        launch = getattr(fused, f"launch_{name}")
        monkeypatch.setattr(fused, name, lambda *x, launch=launch: launches.append(launch) or launch(*x) is None)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(a, b)
    assert len(launches) == 6


# --------------------------------------------------------------------------- the choice


def on_a_gpu(**other: Any) -> Any:
    """The properties of a tensor on the current GPU that the choice reads."""
    return SimpleNamespace(**{"is_cuda": True, "dtype": torch.float32, "get_device": lambda: 0} | other)


def test_chosen_on_cuda_only(monkeypatch: Any) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(fused, "launch_add", lambda total, x: launched.append(total))
    assert fused.add(on_a_gpu(), None) and len(launched) == 1
    others = {"is_cuda": False}, {"dtype": torch.float64}, {"get_device": lambda: 1}
    assert not any(fused.add(on_a_gpu(**other), None) for other in others)
    monkeypatch.setenv("HYPER_CP_TRITON", "0")
    assert not fused.add(on_a_gpu(), None) and len(launched) == 1


def test_without_a_compiler_pytorch_merges(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    spec: Any = fused.__spec__
    fresh = importlib.util.module_from_spec(spec)  # as another process has it: it keeps a failure
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(fresh, "launch_merge", refuse)
    with pytest.warns(RuntimeWarning, match=r"Triton cannot compile.*Failed to find C compiler.*HYPER_CP_TRITON=0"):
        assert not fresh.merge(on_a_gpu(), None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fresh.merge(on_a_gpu(), None, None, None)  # it is not tried again


# --------------------------------------------------------------------------- machine code, without a GPU


def compiled_for(capability: int, kernel: Any, rows: int, dim: int) -> Any:
    """A kernel for bfloat16, as the launch would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = fused.compiled(kernel)
    numbers = {name: i for i, name in enumerate(made.arg_names)}
    types = {"total": "*fp32", "total_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "x": "*bf16"}
    fixed = dict(zip(("ROWS", "DIM"), fused.blocks(rows, dim), strict=True))
    fixed |= {name: 1 for name in numbers if name.endswith("_d")}  # as Triton's launcher does with strides of 1
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in numbers}
    even = [name for name in numbers if name not in (*fixed, "heads", "rows", "total_lse_s", "lse_s")]
    attributes = {(numbers[name],): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(made, signature, {(numbers[n],): value for n, value in fixed.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100])
def test_compiles_for_gpus(capability: int, tmp_path: Path, capsys: Any) -> None:
    """Prints registers and shared memory of each kernel; none spills registers to memory."""
    triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    fused.compiled.cache_clear()
    for kernel in (fused.merge_kernel, fused.add_kernel):
        code = compiled_for(capability, kernel, 8192, 128)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"{x}:(\d+)", usage)[1]) for x in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
        with capsys.disabled():
            print(
                f"\n{kernel.__name__} {fused.blocks(8192, 128)} sm_{capability}: {registers} registers, "
                f"{code.metadata.shared} bytes of shared memory"
            )
        assert registers <= 128 and stack == local == 0
        assert_loads_first(code.asm["ptx"])


def assert_loads_first(ptx: str) -> None:
    """Memory is changed in place: where several warps load the same element, all have to load it before one stores."""
    at = {name: [x.start() for x in re.finditer(name, ptx)] for name in (r"ld\.global", r"bar\.sync", r"st\.global")}
    loads, barriers, stores = at.values()
    assert loads and stores and any(max(loads) < barrier < min(stores) for barrier in barriers)


@pytest.mark.parametrize("rows, dim", [(1, 1), (300, 64), (8192, 576)], ids=str)
def test_all_warps_load_before_one_stores(rows: int, dim: int) -> None:
    """On a GPU merges were wrong now and then: a warp read log-sum-exps that another one had merged already."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    for kernel in (fused.merge_kernel, fused.add_kernel):
        assert_loads_first(compiled_for(90, kernel, rows, dim).asm["ptx"])
