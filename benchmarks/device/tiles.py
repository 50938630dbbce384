"""Every kernel of a device on every kind of tile, in every memory layout, against attention written out in fp64."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hyper_cp.cli.diagnosis.findings import REFUSED, Finding, check
from hyper_cp.cli.diagnosis.tiles import CAUSAL, FULL, Parts, Tile, refused_by_the_card, run_tile
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import Kernel
from hyper_cp.ops.kernels.scores import flex_kernel

SQUARES: Parts = (((0, 100), (0, 100)), ((100, 101), (100, 101)), ((130, 256), (130, 256)))  # rows and columns missing
OBLONG: Parts = (((0, 64), (10, 138)), ((64, 200), (138, 180)), ((200, 201), (200, 300)))
MANY: Parts = tuple(((i, i + n), (i, i + n)) for d in range(0, 320, 10) for i, n in ((d, 1), (d + 1, 9)))

TILES = [
    Tile(256, 256),
    Tile(256, 256, CAUSAL),
    Tile(200, 456),
    Tile(300, 300, (-100, 0)),
    Tile(300, 420, (-40, 30)),
    Tile(256, 256, CAUSAL, SQUARES),
    Tile(256, 256, FULL, SQUARES),
    Tile(201, 300, FULL, OBLONG),
    Tile(320, 320, CAUSAL, MANY),
    Tile(320, 320, (-3, 0), MANY),  # bands of packed tiles count from the bottom right
    Tile(256, 256, (-40, 0), SQUARES),
    Tile(201, 300, (-50, 100), OBLONG),
    # windows of more rows than keys, with bounds on one side or beyond all keys
    Tile(256, 100, (-140, None)),
    Tile(256, 100, (-170, 110)),
    Tile(256, 100, (None, 160)),
    Tile(256, 256, (-20, None), (((0, 200), (0, 60)), ((200, 256), (60, 256)))),
    # one key, one query, odd lengths
    Tile(1, 1),
    Tile(77, 1),
    Tile(1, 77),
    Tile(129, 255),
    Tile(257, 257, CAUSAL),
    Tile(31, 33, (-40, 2)),
    Tile(65, 65, (-7, 0), batch=1),
    Tile(70, 40, (-80, -20)),  # rows that see nothing
    # lengths that do not recur
    Tile(256, 256, CAUSAL, recurring=False),
    Tile(61, 203, recurring=False),
    Tile(77, 1, recurring=False),
    # batches, heads, head dims
    Tile(128, 128, CAUSAL, batch=1),
    Tile(128, 96, batch=3),
    Tile(128, 128, CAUSAL, heads=(4, 4), dims=(128, 128)),
    Tile(128, 128, CAUSAL, heads=(6, 1), dims=(80, 80)),
    Tile(128, 128, CAUSAL, batch=1, heads=(2, 1), dims=(256, 256)),
]
MIXED = [Tile(128, 128, CAUSAL, heads=(4, 4), dims=(192, 128)), Tile(96, 160, heads=(4, 2), dims=(48, 32))]
"""Tiles with other head dims for values: for the kernel that is chosen for them."""
IN_EVERY_LAYOUT = [
    Tile(72, 72, CAUSAL, heads=(4, 2)),
    Tile(40, 72, heads=(4, 2)),
    Tile(72, 72, CAUSAL, (((0, 30), (0, 30)), ((30, 72), (30, 72))), heads=(4, 2)),
    Tile(72, 72, (-20, 0), heads=(4, 4)),
]


# --------------------------------------------------------------------------- refusals

HALF_ONLY = "FlashAttention and cuDNN take bfloat16 and float16 only"
REFUSALS: list[tuple[str, Sequence[torch.dtype], str, str]] = [
    (r"cuda (flash|cudnn)\b.*", (torch.float32, torch.float64), "any", HALF_ONLY),
    (r"cuda memory-efficient\b.*", (torch.float64,), "any", "the operator takes no float64"),
    (
        r"cuda memory-efficient",
        (torch.float32,),
        "packed or banded or windows",
        HALF_ONLY + ", and do these tiles of this kernel",
    ),
    (r"cuda .* without .*memory-efficient", (), "banded", "only the memory-efficient operator takes a mask"),
    (r"cuda cudnn without flash and memory-efficient", (), "windows", "no operator takes a window"),
    (r"npu fusion attention", (torch.float64,), "any", "the operator takes no float64"),
]
"""Refusals that are permitted on every card: a kernel's name, dtypes (none: all), kinds of tiles, and the reason. Every
other error is a failure, and a kernel that runs in spite of an entry has to be right."""


def refusal(kernel: str, dtype: torch.dtype, kind: str = "") -> str:
    """Return the reason why a kernel may refuse a dtype, or tiles of a kind, by a ``RuntimeError``; empty if it may
    not."""
    for name, dtypes, kinds, reason in REFUSALS:
        if re.fullmatch(name, kernel) and (dtype in dtypes or not dtypes) and (kinds == "any" or kind in kinds.split()):
            return reason
    return ""


# --------------------------------------------------------------------------- memory layouts


def _fused_projection(x: Tensor) -> Tensor:
    """Arrange x as one of q, k, v that are views of the output of one projection, ``[B, S, H, 3 * D]``."""
    b, h, s, d = x.shape
    return x.new_zeros(b, s, h, 3 * d).transpose(1, 2)[..., d : 2 * d].copy_(x)


LAYOUTS = {
    "BSHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "BHSD": lambda x: x.contiguous(),
    "SBHD": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
    "part of a projection": _fused_projection,
    "one batch row for all": lambda x: x[:1].contiguous().expand(x.shape),
}


ARRANGED = "q", "k", "v", "dout", "out"


def arrangements() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each of q, k, v, dout and out alone in each layout, then all of them."""
    for layout in LAYOUTS:
        yield f"all {layout}", dict.fromkeys(ARRANGED, layout)
    for name in ARRANGED:
        for layout in list(LAYOUTS)[1:]:
            yield f"{name} {layout}, others BSHD", {name: layout}


# --------------------------------------------------------------------------- the checks


def check_tile(
    section: str, kernel: Kernel, tile: Tile, tensors: Sequence[Tensor], how: str = "", **at: str
) -> Finding:
    """Check one kernel on one tile, unless the card does not have it.

    Args:
        how: more about the tile, or its memory layouts, for the report.
        at: memory layouts of q, k, v, dout and out; BSHD is that of the others.
    """
    dtype, device = tensors[0].dtype, str(tensors[0].device)
    what, permitted = f"{kernel.name} {dtype} {tile}{how}", refusal(kernel.name, dtype, tile.kind)
    unreachable = refused_by_the_card(kernel, tile, dtype, device)
    if unreachable:
        return Finding(section, what, REFUSED, unreachable)
    arranged = [LAYOUTS[at.get(name, "BSHD")](x) for name, x in zip(ARRANGED[:4], tensors, strict=True)]
    out = at.get("out", "BSHD")
    arrange = LAYOUTS["BSHD" if out == "one batch row for all" else out]  # an output has rows of its own
    return check(section, what, dtype, partial(run_tile, kernel, tile, arranged, arrange), permitted)


def plain_kernels(device: str) -> dict[str, Kernel]:
    """Return the kernels of a device for calls without selected keys, but for FlexAttention, which is compiled for
    functions of logits."""
    found = kernels.available(torch.device(device).type, selected=False)
    return {name: kernel for name, kernel in found.items() if kernel is not flex_kernel.KERNEL}


def _on_every_tile(section: str, found: Iterable[Kernel], device: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Check kernels on every tile, in one dtype."""
    for tile in TILES:
        tensors = tile.tensors(device, dtype)
        for kernel in found:
            yield check_tile(section, kernel, tile, tensors)


def check_flex(device: str, dtypes: Sequence[torch.dtype]) -> Iterator[Finding]:
    """Check FlexAttention, if the device has it, on every dtype and tile. It is compiled for each number of heads."""
    flex = [x for x in kernels.available(torch.device(device).type).values() if x is flex_kernel.KERNEL]
    for dtype in dtypes:
        yield from _on_every_tile("flex", flex, device, dtype)


def check_kernels(device: str, dtypes: Sequence[torch.dtype]) -> Iterator[Finding]:
    """Check every kernel of the device but FlexAttention, dtype and tile."""
    for dtype in dtypes:
        yield from _on_every_tile("kernels", plain_kernels(device).values(), device, dtype)
        for tile in MIXED:
            tensors = tile.tensors(device, dtype)
            q, k, v, _ = tensors
            chosen = kernels.get(kernels.choose(q, k, v, tile.band == CAUSAL), q.device.type)
            what = f"{chosen.name} (chosen) {dtype} {tile}"
            yield check("kernels", what, dtype, partial(run_tile, chosen, tile, tensors))


def check_layouts(device: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Check every kernel of the device but FlexAttention with its tensors in every memory layout."""
    for kernel in plain_kernels(device).values():
        for tile in IN_EVERY_LAYOUT:
            tensors = tile.tensors(device, dtype)
            for how, layouts in arrangements():
                yield check_tile("layouts", kernel, tile, tensors, f", {how}", **layouts)


def timed_tiles(length: int, heads: tuple[int, int], dim: int) -> list[Tile]:
    """Return the kinds of tiles that a rank has, at a length that occurs."""
    documents = tuple(((i * length // 16, (i + 1) * length // 16),) * 2 for i in range(16))
    square = Tile(length, length, CAUSAL, batch=1, heads=heads, dims=(dim, dim))
    return [
        square,
        replace(square, band=FULL),
        replace(square, rows=length // 2, band=FULL),
        replace(square, rows=length // 2 + 1, cols=length - 1, band=FULL),
        replace(square, band=(-(length // 8), 0)),
        replace(square, parts=documents),
    ]
