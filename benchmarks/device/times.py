"""Times on the device: tiles against plain SDPA of the same shape, and a rank's share of a sequence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.cli.diagnosis.tiles import CAUSAL, FULL, Tile, refused_by_the_card
from hyper_cp.cli.diagnosis.timing import seconds_in_turns

from ..no_kernel import without_kernel
from .ranks import MODES, SilentAxis, mesh_of, share
from .tiles import plain_kernels, refusal, timed_tiles


def plain(tensors: list[Tensor], causal: bool) -> Callable[[], Any]:
    """Return a step of plain SDPA, forward and backward."""
    *qkv, dout = tensors
    inputs = [x.detach().requires_grad_() for x in qkv]

    def step() -> Any:
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
        return torch.autograd.grad(out, inputs, dout)

    return step


def time_tiles(device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[str]:
    """Yield a line per kernel and tile: forward and backward over the time of plain SDPA of the same shape, which is
    causal if the tile is and sees everything otherwise. Windowed and packed tiles see a part of that."""
    for tile in timed_tiles(min(args.lengths), (args.heads, args.kv_heads), args.dim):
        *qkv, dout = tile.tensors(device, dtype, seed=None)

        def run(kernel: Any, tile: Tile = tile, qkv: list[Tensor] = qkv, dout: Tensor = dout) -> Any:
            given = tile.inputs(*qkv)
            out, lse = kernel.forward(given)
            return kernel.backward(given, dout, out.to(dout.dtype), lse)

        runs = {"": plain([*qkv, dout], tile.band == CAUSAL and tile.rows == tile.cols)}
        for name, kernel in plain_kernels(device).items():
            if name == "reference" and tile.rows > 4096:
                continue  # plain math would need the memory of all logits
            if not refusal(name, dtype, tile.kind) and not refused_by_the_card(kernel, tile, dtype, device):
                runs[name] = partial(run, kernel)
        times = seconds_in_turns(runs, device, args.rounds)
        base = times.pop("")
        for name, taken in times.items():
            yield f"{taken * 1e3:9.2f} ms  {taken / base:6.3f} of plain SDPA  {name} {tile}"


def time_shares(device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[str]:
    """Yield a line per length, number of ranks and mode: the busiest rank's share over 1/n of the time of plain SDPA,
    and the part of it that is merging."""
    yield (
        "S, ranks, mode: (time of a rank) / (plain SDPA / n); merging alone; "
        f"B1 H{args.heads}/{args.kv_heads} D{args.dim} {dtype} causal, forward + backward"
    )
    for length in args.lengths:
        tile = Tile(length, length, FULL, batch=1, heads=(args.heads, args.kv_heads), dims=(args.dim, args.dim))
        whole = tile.tensors(device, dtype, seed=None)
        for n in args.ranks:
            if length % (2 * n):
                continue
            part = [x[:, :, : length // n].clone() for x in whole]
            runs: dict[str, Callable[[], Any]] = {"": plain(whole, causal=True)}
            for name, mode in MODES.items():
                by_heads = mode["ulysses_degree"] is None
                if by_heads and args.kv_heads % n:
                    continue
                runs[name] = partial(share, mesh_of(SilentAxis(n - 1, n), by_heads), mode, *part)
                runs[f"merging, {name}"] = without_kernel(runs[name], device)
            times = seconds_in_turns(runs, device, args.rounds)
            base = times[""]
            yield f"{length:>7}   1 plain SDPA               {base * 1e3:9.2f} ms"
            for name in filter(times.get, MODES):
                yield (
                    f"{length:>7} {n:>3} {name:24} {times[name] * 1e3:9.2f} ms  {times[name] / (base / n):6.3f}  "
                    f"merging {times[f'merging, {name}'] / (base / n):6.3f}"
                )
