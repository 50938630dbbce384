"""Times on the device: tiles against plain SDPA of the same shape, and a rank's share of a sequence."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.ops import kernels

from .ranks import MODES, SilentAxis, mesh_of, share
from .results import refusal
from .tiles import CAUSAL, SCALE, tensors_of, timed_tiles


def seconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Median time of a call on the device, after a first one that warms up."""
    synchronise = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    times = []
    for _ in range(rounds + 1):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def time_tiles(device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[str]:
    """A line per kernel and tile: forward and backward over the time of plain SDPA of the same shape, which is causal
    if the tile is and sees everything otherwise. Windowed and packed tiles see a part of that."""
    for tile in timed_tiles(min(args.lengths), (args.heads, args.kv_heads), args.dim):
        q, k, v, dout = tensors_of(tile, device, dtype)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        causal = tile.band == CAUSAL and tile.rows == tile.cols

        def plain(inputs: list[Tensor] = inputs, dout: Tensor = dout, causal: bool = causal) -> Any:
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True, scale=SCALE)
            return torch.autograd.grad(out, inputs, dout)

        base = seconds(plain, device, args.rounds)
        for name, kernel in kernels.available(torch.device(device).type).items():
            if refusal(name, dtype, tile.kind) or (name == "reference" and tile.rows > 4096):
                continue  # plain math would need the memory of all logits

            def run(kernel: Any = kernel, tile: Any = tile, x: Any = (q, k, v, dout)) -> Any:
                given = kernels.TileInputs(*x[:3], tile.band, SCALE, parts=tile.parts)
                out, lse = kernel.forward(given)
                return kernel.backward(given, x[3], out.to(x[0].dtype), lse)

            taken = seconds(run, device, args.rounds)
            yield f"{taken * 1e3:9.2f} ms  {taken / base:6.3f} of plain SDPA  {name} {tile}"


class NoKernel:
    """In place of a kernel: its results without its work. What remains is merging and adding."""

    name = "none"

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        q, v = tile.q, tile.v
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(self, tile: kernels.TileInputs, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(tile.q), torch.empty_like(tile.k), torch.empty_like(tile.v)


def time_shares(device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[str]:
    """A line per length, number of ranks and mode: the busiest rank's share over 1/n of the time of plain SDPA."""
    yield (
        "S, ranks, mode: (time of a rank) / (plain SDPA / n); merging alone; "
        f"B1 H{args.heads}/{args.kv_heads} D{args.dim} {dtype} causal, forward + backward"
    )
    for length in args.lengths:
        whole = [
            torch.randn(1, length, h, args.dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for h in (args.heads, args.kv_heads, args.kv_heads)
        ]
        dout = torch.randn_like(whole[0])

        def plain(whole: list[Tensor] = whole, dout: Tensor = dout) -> Any:
            out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, whole, dout)

        base = seconds(plain, device, args.rounds)
        yield f"{length:>7}   1 plain SDPA               {base * 1e3:9.2f} ms"
        for n in args.ranks:
            if length % (2 * n):
                continue
            part = [x.detach()[:, :, : length // n].clone() for x in (*whole, dout)]
            for name, mode in MODES.items():
                if mode.get("ulysses") and args.kv_heads % n:
                    continue
                cp = mesh_of(SilentAxis(n - 1, n), bool(mode.get("ulysses")))
                run = lambda cp=cp, mode=mode, part=part: share(cp, mode, *part)  # noqa: E731
                taken = seconds(run, device, args.rounds)
                with kernels.register(NoKernel(), torch.device(device).type):
                    merging = seconds(run, device, args.rounds)
                yield (
                    f"{length:>7} {n:>3} {name:24} {taken * 1e3:9.2f} ms  {taken / (base / n):6.3f}  "
                    f"merging {merging / (base / n):6.3f}"
                )
