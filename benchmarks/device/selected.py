"""The kernel that is chosen for selected keys, forward and backward, against attention written out in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hyper_cp.cli.diagnosis.findings import NAMES, Finding, Results, answer, check
from hyper_cp.cli.diagnosis.tiles import CAUSAL, Tile
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import Kernel
from hyper_cp.ops.kernels.selected import TileSelection


@dataclass(frozen=True)
class Case:
    """A tile whose queries select some keys; with ``latents``, values are the beginnings of keys."""

    tile: Tile
    topk: int
    lists: int = 1
    latents: bool = False

    def __str__(self) -> str:
        of_latents = ", values in keys" if self.latents else ""
        return f"{self.tile}, {self.topk} selected by {self.lists} heads{of_latents}"


CASES = [
    Case(Tile(300, 420, dims=(128, 128)), 90),
    Case(Tile(256, 256, CAUSAL, dims=(64, 64)), 200, lists=2),
    Case(Tile(100, 256, heads=(4, 4), dims=(192, 128)), 64),
    Case(Tile(70, 40, (-80, -20), heads=(6, 1), dims=(80, 48)), 30),  # rows that see nothing
    Case(Tile(65, 200, batch=1, heads=(32, 1), dims=(320, 256)), 150, latents=True),
    Case(Tile(33, 160, CAUSAL, batch=1, heads=(128, 1), dims=(576, 512)), 100, latents=True),
    Case(Tile(65, 200, heads=(5, 1), dims=(576, 512)), 150),
]


def run_case(kernel: Kernel, case: Case, device: str, dtype: torch.dtype) -> Results:
    """Run a kernel forward and backward on a random selection, of which a tenth is missing."""
    tile, g = case.tile, torch.Generator().manual_seed(1)
    q, k, v, dout = tile.tensors(device, dtype)
    v = k[..., : v.shape[3]] if case.latents else v
    order = torch.rand(tile.batch, case.lists, tile.rows, tile.cols, generator=g).argsort(-1)[..., : case.topk]
    pairs = torch.zeros(*order.shape[:3], tile.cols, dtype=torch.bool)
    pairs.scatter_(3, order, torch.rand(order.shape, generator=g) > 0.1)
    positions = order.masked_fill(~pairs.gather(3, order), -1).to(device, torch.int32)
    ranges = torch.tensor([[0], [tile.cols], [0]], dtype=torch.int32, device=device)
    given = tile.inputs(q, k, v)
    given.selected, given.joint = TileSelection(positions, ranges, (0, tile.cols)), case.latents
    visible = pairs.repeat_interleave(tile.heads[0] // case.lists, 1) & tile.visible()
    want = answer((q, k, v, dout), visible, tile.scale)
    out, lse = kernel.forward(given)
    found = [out, lse, *kernel.backward(given, dout, want[0].to(dout), want[1].to(lse))]
    if case.latents:  # the sum of both gradients is what counts
        for grads in (want, found):
            grads[3][..., : v.shape[3]] += grads.pop()
    return list(zip(NAMES, found, want, strict=False))


def check_selected(device: str, dtypes: Sequence[torch.dtype]) -> Iterator[Finding]:
    """Check the kernel that each case gets, in each dtype."""
    for dtype in dtypes:
        for case in CASES:
            q, k, v, _ = case.tile.tensors(device, dtype)
            chosen = kernels.get(kernels.choose(q, k, v, False, selected=True), q.device.type)
            run = partial(run_case, chosen, case, device, dtype)
            yield check("selected", f"{chosen.name} (chosen) {dtype} {case}", dtype, run)
