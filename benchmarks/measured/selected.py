"""Measures attention over selected keys against dense and masked attention, at growing lengths: time and memory.

    python -m benchmarks.measured.selected             # under six minutes on two cores; writes benchmarks/README.md
    python -m benchmarks.measured.selected --lengths 1024 2048 --document ""  # writes nothing

The layer has latent attention and a lightning indexer, and each query selects the same number of keys at every length.
Attention to them grows as the length does. Dense attention grows with its square, and so does an indexer, which scores
all keys; it is measured apart. "masked" is what transformers runs without a kernel for it (eager and sdpa): the scores
of all pairs in one tensor ``[B, S, H, S]``, and dense attention under a mask of all pairs that hides all other keys.

Everything runs with one thread a rank, on the CPU in fp32: on one rank, and on gloo ranks (all-gather, head_tail).
Attention runs forward and backward, an indexer forward. The time is that of the slowest rank, the median of as many
rounds as fit into ``--seconds``, but for one. Memory is the peak of tensor storages (``hyper_cp.memory``) above inputs
and selections, on rank 0, counted in a run of its own. The factor in brackets is that to the length before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp.memory import MemoryCounter
from hyper_cp.ops import latent_attention, select_keys

from ..ranks import join, leave, results_of
from ..speed.report import write_section
from ..speed.run import in_words, machine

DOCUMENT = Path(__file__).parents[1] / "README.md"
HEADS, RANK, ROTARY, PLAIN, VALUE = 4, 64, 16, 48, 64
INDEX_HEADS, INDEX_DIM = 2, 64
COMMAND = "python -m benchmarks.measured.selected"


class Inputs:
    """The tensors of some tokens: those of the indexer, and q, latent, rotary part and weight."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator)

        self.index = (
            random(INDEX_HEADS, tokens, INDEX_DIM),
            random(1, tokens, INDEX_DIM),
            random(INDEX_HEADS, tokens).abs(),
        )
        self.layer = random(HEADS, tokens, PLAIN + ROTARY), random(tokens, RANK), random(1, tokens, ROTARY)
        self.weight = random(HEADS * (PLAIN + VALUE), RANK)[0]

    def differentiated(self, run: Callable[..., Tensor]) -> Tensor:
        """Run a layer forward and backward; returns its output."""
        leaves = [x.detach().requires_grad_() for x in (*self.layer, self.weight)]
        out = run(*leaves)
        torch.autograd.grad(out.sum(), leaves)
        return out.detach()


# --------------------------------------------------------------------------- transformers' way


def masked_selection(given: Inputs, topk: int) -> Tensor:
    """The indexer of transformers: ``[B, S, topk]``."""
    q, k, weights = given.index
    scores = torch.matmul(q.transpose(1, 2), k.transpose(-1, -2)) * INDEX_DIM**-0.5  # [B, S, H, S]
    scores = F.relu(scores)
    scores = torch.matmul(weights.transpose(1, 2).unsqueeze(-2), scores).squeeze(-2)
    scores = scores + torch.full(scores.shape[1:], -torch.inf).triu_(1)
    return scores.topk(topk, -1).indices.to(torch.int32)


def masked_attention(chosen: Tensor, q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor) -> Tensor:
    """The attention of transformers: heads of all keys, and a mask of all pairs."""
    both = F.linear(latent, weight).unflatten(2, (HEADS, -1)).transpose(1, 2)
    keys, length = torch.cat([both[..., :PLAIN], rope.expand(-1, HEADS, -1, -1)], 3), q.shape[2]
    hidden = torch.ones(1, length, length, dtype=torch.bool).scatter_(-1, chosen.long(), False).unsqueeze(1)
    mask = torch.full((1, 1, length, length), torch.finfo(q.dtype).min).triu_(1)
    mask = mask.masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, keys, both[..., PLAIN:], mask)


def check(given: Inputs, chosen: Tensor, attend: Callable[..., Tensor], topk: int) -> None:
    """Raise ``RuntimeError`` unless both ways select and attend alike. Selections are compared where enough keys have
    scores above 0: of equal scores the two may take others."""
    ours, masked = (x[:, 2 * topk :].sort(-1).values for x in (chosen[:, 0], masked_selection(given, topk)))
    same = (ours == masked).double().mean().item()
    wants = masked_attention(chosen[:, 0].clamp(min=0), *given.layer, given.weight)
    error = (attend(*given.layer, given.weight, selected=chosen) - wants).abs().max() / wants.abs().max()
    if not (same > 0.999 and error < 1e-4):
        raise RuntimeError(
            f"{same:.2%} of the selected keys are those of transformers, and attention is off by {error:.1e}. The "
            "measurement needs results that are right. Run tests/ops/test_selected.py"
        )


# --------------------------------------------------------------------------- measuring

Result = tuple[int, int, str, float, int]
"""A length, ranks, what was measured, its seconds, and its peak of bytes."""


def rank_main(rank: int, world: int, store: str, put: Callable[[Any], None], args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 puts each :data:`Result`."""
    mesh = join(rank, world, store)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "cp"))["cp"]
    for length in args.lengths:
        if rank == 0:  # the other ranks wait in the next barrier and use no core
            for name, seconds, peak in on_a_mesh(alone, length, args):
                put((length, 1, name, seconds, peak))
        dist.barrier()
        for name, seconds, peak in on_a_mesh(mesh, length, args):
            if rank == 0:
                put((length, world, name, seconds, peak))
    leave()


def on_a_mesh(mesh: DeviceMesh, length: int, args: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """Measure this library on the ranks of a mesh, and transformers' way if there is one."""
    given = Inputs(length // mesh.size())
    options: dict[str, Any] = {"mesh": mesh, "is_causal": True, "layout": "head_tail"}
    attend, clock = partial(latent_attention, **options), partial(measured, mesh, args)
    seconds, peak, chosen = clock(partial(select_keys, *given.index, topk=args.topk, **options))
    yield "indexer", seconds, peak
    runs = {"attention to selected keys": partial(attend, selected=chosen), "dense attention": attend}
    if mesh.size() == 1:
        if length == args.lengths[0]:
            check(given, chosen, attend, args.topk)
        runs["masked attention"] = partial(masked_attention, chosen[:, 0].clamp(min=0))
        yield "indexer, masked", *clock(partial(masked_selection, given, args.topk))[:2]
    for name, run in runs.items():
        yield name, *clock(partial(given.differentiated, run))[:2]


def measured(mesh: DeviceMesh, args: argparse.Namespace, step: Callable[[], Tensor]) -> tuple[float, int, Tensor]:
    """The seconds of a step on the ranks of a mesh, its peak of bytes, and its result."""
    group, times = mesh.get_group(), []
    with MemoryCounter() as memory:
        result = step()
    while not times or (len(times) < args.rounds and sum(times) < args.seconds):
        dist.barrier(group)
        start = time.perf_counter()
        step()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        times.append(seconds.item())
    return statistics.median(times), memory.peak["cpu"], result


# --------------------------------------------------------------------------- the table


def table(found: Sequence[Result]) -> str:
    """All results, over the lengths."""
    lengths = sorted({length for length, *_ in found})
    rows: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for length, ranks, name, seconds, peak in sorted(found, key=lambda result: (result[1], result[0])):
        rows.setdefault((name, ranks), {})[length] = seconds, peak / 2**20
    lines = ["| | ranks | " + " | ".join(f"S={length:,}" for length in lengths) + " |"]
    lines.append("|---|---:|" + "---:|" * len(lengths))
    for (name, ranks), cells in rows.items():
        shown = []
        for number, length in enumerate(lengths):
            (seconds, peak), factors = cells[length], ("", "")
            if number:
                before = cells[lengths[number - 1]]
                factors = f" ({seconds / before[0]:.1f})", f" ({peak / before[1]:.1f})"
            shown.append(f"{seconds:.2f} s{factors[0]}, {peak:,.0f} MiB{factors[1]}")
        lines.append(f"| {name} | {ranks} | {' | '.join(shown)} |")
    return "\n".join(lines)


def about(args: argparse.Namespace) -> str:
    """The sizes, the machine and the date."""
    return (
        f"topk={args.topk}, {HEADS} heads of {PLAIN} + {ROTARY} and {VALUE}, latents of {RANK} + {ROTARY}, an indexer "
        f"with {INDEX_HEADS} heads of {INDEX_DIM},\nB1, fp32; {in_words(machine())}"
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="after which a measurement has no further rounds")
    parser.add_argument("--document", default=str(DOCUMENT), help='write the table to this file ("": to none)')
    args = parser.parse_args(given)
    found, heading = list[Result](), about(args)
    for result in results_of(rank_main, args.ranks, args):
        print(*result, flush=True)
        found.append(result)
    text = f"{heading}\n\n{table(found)}"
    print(f"\n{text}")
    if args.document:
        write_section(Path(args.document), "selected", text, COMMAND)


if __name__ == "__main__":
    main()
