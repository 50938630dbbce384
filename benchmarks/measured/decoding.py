"""Measures the time of a new token in one attention layer over a split cache, against one rank with the whole cache.

    python -m benchmarks.measured.decoding                      # a prompt of 32,768 tokens, 4 ranks; about a minute
    python -m benchmarks.measured.decoding --length 4096 --ranks 2 --tokens 20
    python -m benchmarks.measured.decoding --rate 100           # each rank behind a link of 100 Mbit/s (see links.py)

Each rank runs on one thread, on the CPU in fp32. One rank with the whole cache calls ``F.scaled_dot_product_attention``
on a buffer that has room for the new tokens. It takes turns with all ranks, whose time is that of the slowest. Printed
are medians over tokens; also for grouped heads and for latents (the absorbed form on both sides).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.ops import SplitCache, decode_attention
from hyper_cp.ops.latents import absorb

from ..ranks import join, leave, results_of
from .links import Link, switch, why_not

HEADS, DIM, RANK, ROTARY = 8, 64, 128, 32
LAYERS = {"8 key heads": 8, "2 key heads": 2, "latents": 0}
"""Key heads of each layer that is measured."""


def tensors(kv_heads: int, length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """k and v of a prompt, or latents and their rotary part; and the weight that these need."""
    if kv_heads:
        return [torch.randn(1, kv_heads, length, DIM) for _ in range(2)], {"enable_gqa": True}
    return [torch.randn(1, 1, length, n) for n in (RANK, ROTARY)], {"weight": torch.randn(HEADS * 2 * DIM, RANK)}


def on_one_rank(kv: list[Tensor], q: Tensor, weight: Tensor | None = None, enable_gqa: bool = False) -> Tensor:
    """Attention of one token to a whole cache, as one device computes it."""
    if weight is None:
        return F.scaled_dot_product_attention(q, *kv, enable_gqa=enable_gqa)
    absorbed, latent, output = absorb(q, kv[0], ROTARY, weight)
    logits = absorbed[:, :, 0] @ torch.cat(kv, 3)[0, 0].mT * q.shape[3] ** -0.5
    return output((logits.softmax(-1) @ latent[0, 0]).unsqueeze(2))


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def work(
    rank: int, ranks: int, store: str, put: Callable[[Any], None], args: argparse.Namespace, at: int | None
) -> None:
    if at is not None:
        Link(at, rank).limit(args.rate)
    mesh, length, tokens = join(rank, ranks, store), args.length, args.tokens
    for name, kv_heads in LAYERS.items():
        torch.manual_seed(0)
        share, options = tensors(kv_heads, length // ranks)
        whole, _ = tensors(kv_heads, length + tokens)
        q, new = torch.randn(1, HEADS, 1, DIM if kv_heads else DIM + ROTARY), [x[:, :, :1] for x in share]
        cache, alone, together = SplitCache(mesh, latents=not kv_heads), [], []
        cache.fill(*share)

        def token(cache: SplitCache = cache, new: list[Tensor] = new, q: Tensor = q, options: Any = options) -> None:
            cache.append(*new)
            decode_attention(q, cache, **options)

        for _ in range(tokens):
            dist.barrier()
            alone.append(timed(lambda w=whole, q=q, o=options: on_one_rank(w, q, **o)) if rank == 0 else 0.0)
            dist.barrier()
            took = torch.tensor(timed(token))
            dist.all_reduce(took, dist.ReduceOp.MAX)
            together.append(took.item())
        if rank == 0:
            put((name, *(1e3 * statistics.median(x) for x in (alone, together))))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens that are timed")
    parser.add_argument("--rate", type=float, help="Mbit/s of each rank's link; default: this machine's own")
    args = parser.parse_args()
    if args.rate and (reason := why_not()):
        parser.error(reason)
    with switch() if args.rate else nullcontext() as at:
        # Ranks with links are forked: nothing of torch has run here yet.
        for name, alone, together in results_of(work, args.ranks, args, at, method="fork" if args.rate else "spawn"):
            ratio = f"{alone / together:.2f} x"
            print(f"{name}: {alone:.2f} ms a token on one rank, {together:.2f} ms on {args.ranks} ({ratio})")


if __name__ == "__main__":
    main()
