"""Every kernel of a device on every kind of tile, in every memory layout, against attention written out in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyper_cp.ops import kernels

from .results import Result, check, refusal

Band = tuple[int | None, int | None]
Parts = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
FULL: Band = (None, None)
CAUSAL: Band = (None, 0)
SQUARES: Parts = (((0, 100), (0, 100)), ((100, 101), (100, 101)), ((130, 256), (130, 256)))  # rows and columns missing
OBLONG: Parts = (((0, 64), (10, 138)), ((64, 200), (138, 180)), ((200, 201), (200, 300)))
MANY: Parts = tuple(((i, i + n), (i, i + n)) for d in range(0, 320, 10) for i, n in ((d, 1), (d + 1, 9)))
SCALE = 0.125
NAMES = "out", "lse", "dq", "dk", "dv"


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

    def __str__(self) -> str:
        packed = f" packed, {len(self.parts)} parts" if self.parts else ""
        v = "" if self.dims[0] == self.dims[1] else f"/{self.dims[1]}"
        heads = f"B{self.batch} H{self.heads[0]}/{self.heads[1]} D{self.dims[0]}{v}"
        return f"{heads} {self.rows}x{self.cols} {self.band}{packed}{'' if self.recurring else ', new lengths'}"


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
]


# --------------------------------------------------------------------------- written out


def visible_of(tile: Tile, device: str) -> Tensor:
    """``[rows, cols]``: the pairs that a tile leaves visible."""
    if tile.parts is not None:
        visible = torch.zeros(tile.rows, tile.cols, dtype=torch.bool, device=device)
        for (top, bottom), (left, right) in tile.parts:
            height, width = bottom - top, right - left
            lower, upper = (None if bound is None else bound + width - height for bound in tile.band)
            visible[top:bottom, left:right] = visible_of(Tile(height, width, (lower, upper)), device)
        return visible
    distance = torch.arange(tile.cols, device=device)[None] - torch.arange(tile.rows, device=device)[:, None]
    lower, upper = tile.band
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible = visible if lower is None else visible & (distance >= lower)
    return visible if upper is None else visible & (distance <= upper)


def written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, differentiable. Rows that see nothing: 0 and -inf."""
    groups = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~visible, -1e300)
    lse = logits.logsumexp(-1).masked_fill(~visible.any(-1), -torch.inf)
    return (logits.softmax(-1) * visible) @ v.repeat_interleave(groups, 1), lse


def answer(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor, scale: float) -> list[Tensor]:
    """Output, log-sum-exp and gradients in fp64, on the CPU: some devices have no fp64."""
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    out, lse = written_out(*wide, visible.cpu(), scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, wide, dout.cpu().double())]


# --------------------------------------------------------------------------- memory layouts


def _fused_projection(x: Tensor) -> Tensor:
    """As one of q, k, v that are views of the output of one projection, ``[B, S, H, 3 * D]``."""
    b, h, s, d = x.shape
    return x.new_zeros(b, s, h, 3 * d).transpose(1, 2)[..., d : 2 * d].copy_(x)


LAYOUTS = {
    "BSHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "BHSD": lambda x: x.contiguous(),
    "SBHD": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
    "part of a projection": _fused_projection,
    "one batch row for all": lambda x: x[:1].contiguous().expand(x.shape),
}


def tensors_of(tile: Tile, device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout in memory order [B, S, H, D]."""
    g = torch.Generator().manual_seed(seed)
    (heads, kv_heads), (dim, v_dim) = tile.heads, tile.dims
    shapes = (
        (tile.rows, heads, dim),
        (tile.cols, kv_heads, dim),
        (tile.cols, kv_heads, v_dim),
        (tile.rows, heads, v_dim),
    )
    made = (torch.randn(tile.batch, *shape, generator=g).to(device, dtype) for shape in shapes)
    return [x.transpose(1, 2) for x in made]


def arrangements(kernel_tile: Tile, tensors: list[Tensor]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each of q, k, v, dout and out alone in each layout, then all of them."""
    for layout in LAYOUTS:
        yield f"all {layout}", dict.fromkeys(("q", "k", "v", "dout", "out"), layout)
    for name in ("q", "k", "v", "dout", "out"):
        for layout in list(LAYOUTS)[1:]:
            yield f"{name} {layout}, others BSHD", {name: layout}


# --------------------------------------------------------------------------- the checks


def run_tile(kernel: Any, tile: Tile, tensors: Sequence[Tensor], layouts: dict[str, str], device: str) -> Any:
    """Pairs of what a kernel returns for a tile and what is expected."""
    arranged = [LAYOUTS[layouts.get(name, "BSHD")](x) for name, x in zip(("q", "k", "v", "dout"), tensors, strict=True)]
    q, k, v, dout = arranged
    want = answer(*arranged, visible_of(tile, device), SCALE)
    given = kernels.TileInputs(q, k, v, tile.band, SCALE, parts=tile.parts, recurring=tile.recurring)
    out, lse = kernel.forward(given)
    merged = want[0].to(q)
    if layouts.get("out", "BSHD") != "one batch row for all":  # an output has rows of its own
        merged = LAYOUTS[layouts.get("out", "BSHD")](merged)
    merged_lse = want[1].to(lse)
    return list(zip((out, lse, *kernel.backward(given, dout, merged, merged_lse)), want, strict=True))


def check_kernels(device: str, dtypes: Sequence[torch.dtype]) -> Iterator[Result]:
    """Every kernel of the device, dtype and tile."""
    found = kernels.available(torch.device(device).type)
    for dtype in dtypes:
        for tile in TILES:
            tensors = tensors_of(tile, device, dtype)
            for name, kernel in found.items():
                what, permitted = f"{name} {dtype} {tile}", refusal(name, dtype, tile.kind)
                yield check(what, dtype, lambda k=kernel, t=tile, x=tensors: run_tile(k, t, x, {}, device), permitted)
        for tile in MIXED:
            tensors = tensors_of(tile, device, dtype)
            chosen = kernels.get(kernels.choose(*tensors[:3], tile.band == CAUSAL), *tensors[:3])
            what = f"{chosen.name} (chosen) {dtype} {tile}"
            yield check(what, dtype, lambda k=chosen, t=tile, x=tensors: run_tile(k, t, x, {}, device))


def check_layouts(device: str, dtype: torch.dtype) -> Iterator[Result]:
    """Every kernel of the device with its tensors in every memory layout."""
    for name, kernel in kernels.available(torch.device(device).type).items():
        for tile in IN_EVERY_LAYOUT:
            tensors = tensors_of(tile, device, dtype)
            for how, layouts in arrangements(tile, tensors):
                what, permitted = f"{name} {dtype} {tile}, {how}", refusal(name, dtype, tile.kind)
                run = lambda k=kernel, t=tile, x=tensors, w=layouts: run_tile(k, t, x, w, device)  # noqa: E731
                yield check(what, dtype, run, permitted)


def timed_tiles(length: int, heads: tuple[int, int], dim: int) -> list[Tile]:
    """The kinds of tiles that a rank has, at a length that occurs."""
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
