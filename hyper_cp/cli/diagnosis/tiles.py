"""Tiles with the answers of plain math, and the kernels that are usable here, and why the others are not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ...ops import kernels
from ...ops.kernels import Kernel, TileInputs, cuda
from ...ops.kernels.scores import flex_kernel
from ...ops.recurrence.kernels import fla_function
from .findings import ABSENT, NAMES, NOTE, OK, REFUSED, WARNING, WRONG, Finding, Results, answer, check

SECTION = "kernels"
Band = tuple[int | None, int | None]
Parts = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
FULL: Band = (None, None)
CAUSAL: Band = (None, 0)


@dataclass(frozen=True)
class Tile:
    """The shape of a tile, and which of its pairs are visible."""

    rows: int
    cols: int
    band: Band = FULL
    parts: Parts | None = None
    batch: int = 2
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    recurring: bool = True
    """False: as with documents, whose lengths are others in every batch. A kernel may then use another operator."""

    @property
    def kind(self) -> str:
        """``"packed"``, or ``"windows"`` if these are under a band; ``"banded"`` if an operator for rectangles cannot
        express it; or ``"dense"``."""
        square = self.band == CAUSAL and self.rows == self.cols
        if self.parts and self.band not in (FULL, CAUSAL):
            return "windows"
        return "packed" if self.parts else "dense" if square or self.band == FULL else "banded"

    @property
    def scale(self) -> float:
        return float(self.dims[0] ** -0.5)

    def __str__(self) -> str:
        packed = f" packed, {len(self.parts)} parts" if self.parts else ""
        v = "" if self.dims[0] == self.dims[1] else f"/{self.dims[1]}"
        heads = f"B{self.batch} H{self.heads[0]}/{self.heads[1]} D{self.dims[0]}{v}"
        return f"{heads} {self.rows}x{self.cols} {self.band}{packed}{'' if self.recurring else ', new lengths'}"

    def visible(self) -> Tensor:
        """Return ``[rows, cols]``: the pairs that are visible, on the CPU."""
        if self.parts is not None:
            visible = torch.zeros(self.rows, self.cols, dtype=torch.bool, device="cpu")
            for (top, bottom), (left, right) in self.parts:
                height, width = bottom - top, right - left
                lower, upper = (None if bound is None else bound + width - height for bound in self.band)
                visible[top:bottom, left:right] = Tile(height, width, (lower, upper)).visible()
            return visible
        distance = torch.arange(self.cols, device="cpu")[None] - torch.arange(self.rows, device="cpu")[:, None]
        lower, upper = self.band
        visible = torch.ones_like(distance, dtype=torch.bool)
        visible = visible if lower is None else visible & (distance >= lower)
        return visible if upper is None else visible & (distance <= upper)

    def tensors(self, device: str, dtype: torch.dtype, seed: int | None = 0) -> list[Tensor]:
        """Return random q, k, v and dout ``[B, H, S, D]``, in memory as ``[B, S, H, D]``. With a seed they are drawn on
        the CPU and are the same everywhere; with None they are drawn on the device, which is faster for long ones."""
        g = None if seed is None else torch.Generator().manual_seed(seed)
        drawn_on = device if seed is None else "cpu"
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        shapes = (self.rows, heads, dim), (self.cols, kv_heads, dim), (self.cols, kv_heads, v_dim)
        made = (
            torch.randn(self.batch, *shape, generator=g, device=drawn_on)
            for shape in (*shapes, (self.rows, heads, v_dim))
        )
        return [x.to(device, dtype).transpose(1, 2) for x in made]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> TileInputs:
        """Return the tile as kernels take it."""
        return TileInputs(q, k, v, self.band, self.scale, parts=self.parts, recurring=self.recurring)


def run_tile(
    kernel: Kernel, tile: Tile, tensors: Sequence[Tensor], arrange: Callable[[Tensor], Tensor] = lambda x: x
) -> Results:
    """Run a kernel forward and backward. Backward takes the right output, as one that other tiles are merged into.

    Args:
        tensors: q, k, v and dout.
        arrange: puts the output that backward takes into another memory layout.
    """
    *qkv, dout = tensors
    want, given = answer(tensors, tile.visible(), tile.scale), tile.inputs(*qkv)
    out, lse = kernel.forward(given)
    found = out, lse, *kernel.backward(given, dout, arrange(want[0].to(dout)), want[1].to(lse))
    return list(zip(NAMES, found, want, strict=True))


def refused_by_the_card(kernel: Kernel, tile: Tile, dtype: torch.dtype, device: str) -> str:
    """Return the reason why no call with a tile's head dims and dtype reaches a kernel on this card; empty if one may.
    The operator is not asked: it need not check what it is given. (cuDNN's runs in float32, and returns other
    numbers.)"""
    dense = getattr(kernel, "dense", None)
    if not kernel.name.startswith("cuda ") or dense is None:
        return ""
    heads = tile.heads if dense.grouped else (tile.heads[0],) * 2  # it gets key heads repeated
    call = replace(tile, rows=128, cols=128, heads=heads)  # a tile of a call may be as narrow as one key
    q, k, v, _ = call.tensors(device, dtype)
    if cuda.takes(dense.name, q, k, v):
        return ""
    return f"{dense.name} takes no {dtype} of such head dims on this card, forward and backward"


# --------------------------------------------------------------------------- the kernels of the doctor

_SQUARE = Tile(96, 96, CAUSAL, batch=1, heads=(4, 2))
QUICK = {
    "full": replace(_SQUARE, band=FULL),
    "causal": _SQUARE,
    "window": replace(_SQUARE, band=(-20, 0)),
    "window of fewer keys": replace(_SQUARE, cols=40, band=(-60, None)),
    "packed": replace(_SQUARE, parts=tuple((part, part) for part in ((0, 40), (40, 41), (50, 96)))),
}


def check_kernels(device: str) -> Iterator[Finding]:
    """Yield every registered kernel: checked if it is for this device or the CPU, otherwise why it cannot run."""
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
        q, k, v, _ = _SQUARE.tensors(kind, dtype)
        chosen = kernels.choose(q, k, v, False)
        for name, kernel in kernels.available(kind, selected=False).items():
            if kernel is flex_kernel.KERNEL:
                yield Finding(SECTION, f"{name} on {kind}", NOTE, "for functions of logits; compiled at the first call")
                continue
            what = f"{name} on {kind}, {str(dtype).removeprefix('torch.')}"
            unreachable = refused_by_the_card(kernel, _SQUARE, dtype, kind)
            if unreachable:
                yield Finding(SECTION, what, ABSENT, unreachable)
                continue
            yield _on_quick_tiles(kernel, what, q, name == chosen)


def _on_quick_tiles(kernel: Kernel, what: str, like: Tensor, chosen: bool) -> Finding:
    """Check one kernel on all tiles, on the device and in the dtype of a tensor; a kernel that nothing chose may refuse
    them."""
    permitted = "" if chosen else "it refuses the tile"
    failed, refused = [], []
    for kind, tile in QUICK.items():
        tensors = tile.tensors(str(like.device), like.dtype)
        found = check(SECTION, what, like.dtype, partial(run_tile, kernel, tile, tensors), permitted)
        failed += [f"{kind}: {found.note}"] if found.failed else []
        refused += [f"{kind}: {found.note}"] if found.status == REFUSED else []
    if failed or refused:
        return Finding(SECTION, what, WRONG if failed else ABSENT, "; ".join(failed or refused))
    return Finding(SECTION, what, OK, "it runs plain calls" if chosen else "")


def _missing(kind: str) -> str:
    """Return the reason why there is no device of a type."""
    if kind == "cuda":
        built = torch.version.cuda or torch.version.hip
        return "there is no GPU here" if built else f"torch {torch.__version__} is built without CUDA"
    if kind == "npu":
        there = importlib.util.find_spec("torch_npu")
        return "there is no NPU here" if there else "torch_npu is not installed"
    return f"there is no device of type {kind!r} here"


def _beside_attention(device: str) -> Iterator[Finding]:
    """Yield Triton's merge of partials, flash-linear-attention, and the FlashAttention of windows and documents."""
    triton, linear = "merge of partials in Triton", "flash-linear-attention (recurrences)"
    if device != "cuda":
        yield Finding(SECTION, triton, ABSENT, f"it runs on CUDA; {device} merges by operators")
        yield Finding(SECTION, linear, ABSENT, "it runs on CUDA; plain torch runs here")
        return
    if os.environ.get("HYPER_CP_TRITON", "1") == "0":
        yield Finding(SECTION, triton, ABSENT, "HYPER_CP_TRITON=0")
    elif importlib.util.find_spec("triton") is None:
        yield Finding(SECTION, triton, WARNING, "triton is not installed: merges are slower")
    else:
        yield Finding(SECTION, triton, NOTE, "used; the checks of exchanges run it")
    try:
        fla_function(True, False)
    except (ImportError, NotImplementedError) as error:
        yield Finding(SECTION, linear, ABSENT, str(error))
    else:
        yield Finding(SECTION, linear, NOTE, "used in half precision")
    yield flash_attention(torch.cuda.get_device_capability()[0])


def flash_attention(major: int) -> Finding:
    """Return which FlashAttention windows and packed documents run on, and a faster one that this card has.

    Args:
        major: the first number of the card's compute capability.
    """
    what, used = "FlashAttention of windows and packed documents", current_flash_attention_impl()
    if used is not None:
        right = major in cuda.ACTIVATED.get(used, ((major,), 0))[0]
        return Finding(SECTION, what, NOTE if right else WARNING, f"{used}" + ("" if right else ": not for this card"))
    faster = [name for name, (cards, _) in cuda.ACTIVATED.items() if major in cards]
    if not faster:
        return Finding(SECTION, what, NOTE, "version 2")
    there = [name for name in faster if _installed(name)]
    if there:
        line = f"torch.nn.attention.activate_flash_attention_impl({there[0]!r})"
        return Finding(SECTION, what, WARNING, f"version 2, and {there[0]} is installed and faster. Call {line}")
    return Finding(SECTION, what, NOTE, f"version 2. This card also has {' and '.join(faster)}, not installed")


def _installed(name: str) -> bool:
    """True if the package of an implementation is there. It is not imported."""
    if name == "FA3":
        return importlib.util.find_spec("flash_attn_interface") is not None
    return any(True for _ in importlib.metadata.distributions(name="flash-attn-4"))
