"""Kernels that are usable here, and why the others are not: each on a few tiny tiles against attention in fp64."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import kernels
from ...ops.kernels import Kernel, TileInputs
from ...ops.kernels.scores import flex_kernel
from ...ops.recurrence.kernels import fla_function
from .findings import ABSENT, NOTE, OK, WARNING, WRONG, Finding, answer, bar, error_of

SECTION = "kernels"
ROWS, HEADS, KV_HEADS, DIM, SCALE = 96, 4, 2, 64, 0.125
CAUSAL, FULL = (None, 0), (None, None)
PARTS = (((0, 40), (0, 40)), ((40, 41), (40, 41)), ((50, 96), (50, 96)))
NAMES = "output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v"


def check_kernels(device: str) -> Iterator[Finding]:
    """Every registered kernel: checked if it is for this device or the CPU, otherwise the reason why it cannot run."""
    for kind in dict.fromkeys(["cpu", *kernels.device_types()]):
        if kind in (device, "cpu"):
            yield from _of_device(kind)
            continue
        for name in kernels.available(kind):
            if name != kernels.REFERENCE.name:
                yield Finding(SECTION, name, ABSENT, _missing(kind))
    yield from _beside_attention(device)


def _of_device(kind: str) -> Iterator[Finding]:
    for dtype in [torch.float32] if kind == "cpu" else [torch.bfloat16, torch.float32]:
        tensors = _tensors(kind, dtype)
        q, k, v, _ = tensors
        chosen = kernels.choose(q, k, v, False)
        for name, kernel in kernels.available(kind).items():
            if kernel is flex_kernel.KERNEL:
                yield Finding(SECTION, f"{name} on {kind}", NOTE, "for functions of logits; compiled at the first call")
                continue
            what = f"{name} on {kind}, {str(dtype).removeprefix('torch.')}"
            yield _checked(kernel, what, tensors, name == chosen)


def _checked(kernel: Kernel, what: str, tensors: list[Tensor], chosen: bool) -> Finding:
    """One kernel on all tiles; a kernel that nothing chose may refuse them."""
    dtype, worst, refused = tensors[0].dtype, 0.0, []
    for name, tile, visible in _tiles(tensors):
        want = answer(tensors, visible, SCALE)
        try:
            out, lse = kernel.forward(tile)
            found = [out, lse, *kernel.backward(tile, tensors[3], want[0].to(out), want[1].to(lse))]
        except (RuntimeError, NotImplementedError) as error:
            refused.append(f"{name}: {str(error).strip().splitlines()[0][:120]}")
            continue
        except Exception as error:
            return Finding(SECTION, what, WRONG, f"{name}: {type(error).__name__}: {str(error).strip()[:200]}")
        errors = [error_of(a, b) for a, b in zip(found, want, strict=True)]
        if max(errors) > bar(dtype):
            part = NAMES[errors.index(max(errors))]
            return Finding(SECTION, what, WRONG, f"{name}: the {part} has an error of {max(errors):.1e}")
        worst = max(worst, *errors)
    if refused:
        return Finding(SECTION, what, WRONG if chosen else ABSENT, "it refuses " + "; ".join(refused))
    return Finding(SECTION, what, OK, "it runs plain calls" if chosen else "")


def _tiles(tensors: list[Tensor]) -> Iterator[tuple[str, TileInputs, Tensor]]:
    """A tile's kind, the tile, and its visible pairs."""
    q, k, v, _ = tensors
    everything = torch.ones(ROWS, ROWS, dtype=torch.bool)
    packed = torch.zeros_like(everything)
    for (top, bottom), (left, right) in PARTS:
        packed[top:bottom, left:right] = True
    yield "full", TileInputs(q, k, v, FULL, SCALE), everything
    yield "causal", TileInputs(q, k, v, CAUSAL, SCALE), everything.tril()
    yield "window", TileInputs(q, k, v, (-20, 0), SCALE), everything.tril() & everything.triu(-20)
    yield "packed", TileInputs(q, k, v, CAUSAL, SCALE, parts=PARTS), packed.tril()


def _tensors(device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout ``[B, H, S, D]``, in memory as ``[B, S, H, D]``."""
    g = torch.Generator().manual_seed(0)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [torch.randn(1, ROWS, h, DIM, generator=g).to(device, dtype).transpose(1, 2) for h in heads]


def _missing(kind: str) -> str:
    """The reason why there is no device of a type."""
    if kind == "cuda":
        built = torch.version.cuda or torch.version.hip
        return "there is no GPU here" if built else f"torch {torch.__version__} is built without CUDA"
    if kind == "npu":
        there = importlib.util.find_spec("torch_npu")
        return "there is no NPU here" if there else "torch_npu is not installed"
    return f"there is no device of type {kind!r} here"


def _beside_attention(device: str) -> Iterator[Finding]:
    """Triton's merge of partials, and flash-linear-attention."""
    if device != "cuda":
        yield Finding(SECTION, "merge of partials in Triton", ABSENT, f"it runs on CUDA; {device} merges by operators")
        yield Finding(SECTION, "flash-linear-attention (recurrences)", ABSENT, "it runs on CUDA; plain torch runs here")
        return
    if os.environ.get("HYPER_CP_TRITON", "1") == "0":
        yield Finding(SECTION, "merge of partials in Triton", ABSENT, "HYPER_CP_TRITON=0")
    elif importlib.util.find_spec("triton") is None:
        yield Finding(SECTION, "merge of partials in Triton", WARNING, "triton is not installed: merges are slower")
    else:
        yield Finding(SECTION, "merge of partials in Triton", NOTE, "used; the checks of exchanges run it")
    try:
        fla_function(True, False)
    except (ImportError, NotImplementedError) as error:
        yield Finding(SECTION, "flash-linear-attention (recurrences)", ABSENT, str(error))
    else:
        yield Finding(SECTION, "flash-linear-attention (recurrences)", NOTE, "used in half precision")
