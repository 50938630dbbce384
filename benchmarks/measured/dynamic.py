"""Compares step times of a degree per micro-batch and of one static degree: predicted for a cluster, measured here.

    python -m benchmarks.measured.dynamic                       # the planner's numbers, 8, 64 and 512 ranks
    python -m benchmarks.measured.dynamic --measure --ranks 4   # a small Llama on gloo ranks of this machine

"Static" is training without dynamic degrees. The run has one cp degree, the smallest at which the longest sample of the
distribution fits into the ranks' memory, and samples are packed up to the capacity of such a group, each split over all
ranks of the group (``layout="per_document"``). The sequences are dealt to the groups in turn, or balanced by the same
cost model ("static, balanced", as Megatron-LM's dp_balanced scheduler does). The difference between "static, balanced"
and "dynamic" is the degree alone. "In steps" is the time if all ranks begin each micro-batch together, as FSDP2 makes
them (``dynamic_steps``).

The measurement reports wall time and the processor time of the busiest rank. With more ranks than cores, or on a
machine with other work, only the processor time shows what one core per rank would take. The plans take turns.

The prediction comes from the planner (``hyper_cp.cost_model``), not from a machine. What an exchange of keys and values
does not hide is that of packed documents for "static", and that of one document for "dynamic".
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_cp import ContextParallelHandler, cost_model, plan
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from hyper_cp.data.dynamic import CostModel, DynamicContextParallel, Plan
from hyper_cp.mesh.family import MeshFamily, split_cp_mesh
from hyper_cp.ops import attention

from ..ranks import join, leave, results_of

K = 1024
Draw = Callable[[random.Random, int], list[int]]


def log_normal(least: int, longest: int, mean: int, sigma: float) -> Draw:
    """Draw lengths as Megatron-LM's mock data for hybrid context parallelism does. ``mean`` is that before clipping."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, n: [min(longest, max(least, int(rng.lognormvariate(mu, sigma)))) for _ in range(n)]


def uniform(least: int, longest: int) -> Draw:
    return lambda rng, n: [rng.randint(least, longest) for _ in range(n)]


def one_long(longest: int, short: int) -> Draw:
    return lambda rng, n: [longest] + [short] * (n - 1)


def bimodal(shortest: int, short: int, long: int, longest: int, share: float) -> Draw:
    """Draw ``share`` of the samples between two long lengths, the others between two short ones."""
    return lambda rng, n: [
        rng.randint(long, longest) if rng.random() < share else rng.randint(shortest, short) for _ in range(n)
    ]


# name: (lengths, the longest length that must fit, tokens that a rank can hold)
CLUSTER: dict[str, tuple[Draw, int, int]] = {
    "log-normal, 1K to 16K, mean 8K, sigma 1.1 (Megatron)": (log_normal(K, 16 * K, 8 * K, 1.1), 16 * K, 4 * K),
    "log-normal, 64 to 128K, mean 8K, sigma 1.5": (log_normal(64, 128 * K, 8 * K, 1.5), 128 * K, 16 * K),
    "bimodal, 95 % 256 to 2K, 5 % 64K to 128K": (bimodal(256, 2 * K, 64 * K, 128 * K, 0.05), 128 * K, 16 * K),
    "one 128K among 4K": (one_long(128 * K, 4 * K), 128 * K, 16 * K),
}
LLAMA = {"layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "ffn": 14336, "vocabulary": 128256}
HERE: dict[str, tuple[Draw, int]] = {
    "uniform 32 to 1K": (uniform(32, K), K),
    "log-normal, 8 to 4K, mean 256, sigma 1.5": (log_normal(8, 4 * K, 256, 1.5), 4 * K),
    "one 4K among 128": (one_long(4 * K, 128), 4 * K),
}


def least_degree(scheduler: DynamicContextParallel, longest: int) -> int:
    """Return the smallest degree at which a sample of ``longest`` tokens fits."""
    return next(d for d in scheduler.degrees if longest <= scheduler.capacity(d))


def in_turn(static: DynamicContextParallel, lengths: list[int]) -> float:
    """Return the seconds of a step whose samples are packed in their order and dealt to the groups in turn."""
    degree, cost = static.degrees[0], static.cost
    packs: list[list[int]] = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > static.capacity(degree):
            packs.append([])
        packs[-1].append(length)
    seconds = [cost.fixed + cost.shared(sum(p), p, degree) for p in packs]
    groups = static.size // degree
    return max(sum(seconds[g::groups]) for g in range(groups))


# --------------------------------------------------------------------------- predicted


def not_hidden(lengths: list[int], degree: int, cluster: str) -> float:
    """Return the seconds per token and exchange that a packed sequence of these lengths does not hide."""
    rest = -sum(lengths) % (2 * degree)
    packed = [*lengths, rest] if rest else lengths
    options: dict[str, Any] = {"checkpointing": "none", "memory_gb": 1e6, "cluster": cluster}
    best = plan(LLAMA, packed, gpus=degree, cp_size=degree, layout="per_document", **options).best
    return best.exposed_seconds * degree / (sum(packed) * (degree - 1))


def predict(args: argparse.Namespace) -> None:
    """Print the predicted times of Llama 3.1 8B on ranks of a known cluster, in bf16."""
    print(
        f"Llama 8B on {args.cluster}, {args.samples} samples per rank and step, mean of {args.steps} steps; "
        f"{args.fixed} s per micro-batch"
    )
    print("| lengths | ranks | static cp | static, in turn | static, balanced | dynamic | in steps: static, dynamic |")
    print("|---|---|---|---|---|---|---|")
    for name, (draw, longest, budget) in CLUSTER.items():
        exchange = None
        for ranks in [args.ranks] if args.ranks else [8, 64, 512]:
            rng, rows = random.Random(0), []
            cost = cost_model(LLAMA, budget, ranks, cluster=args.cluster, fixed=args.fixed)
            dynamic = DynamicContextParallel(ranks, budget, cost)
            degree = least_degree(dynamic, longest)
            if exchange is None:
                lengths = draw(random.Random(1), 64)
                while sum(lengths) > dynamic.capacity(degree):
                    lengths.pop(lengths.index(max(lengths)))
                exchange = not_hidden(lengths, degree, args.cluster)
            packed = replace(cost, exchange=exchange)
            static = DynamicContextParallel(ranks, budget, packed, degrees=[degree])
            stepped = DynamicContextParallel(ranks, budget, cost, in_steps=True)
            for _ in range(args.steps):
                lengths = draw(rng, args.samples * ranks)
                fixed, together = static.plan(lengths), stepped.plan(lengths).seconds_in_steps
                both = fixed.makespan, dynamic.plan(lengths).makespan
                rows.append((in_turn(static, lengths), *both, fixed.seconds_in_steps, together))
            turn, balanced, best, fixed_steps, best_steps = (statistics.mean(x) for x in zip(*rows, strict=True))
            print(
                f"| {name} | {ranks} | {degree} | {turn:.2f} s ({turn / best:.2f}x) | {balanced:.2f} s "
                f"({balanced / best:.2f}x) | {best:.2f} s | {fixed_steps:.2f} s ({fixed_steps / best_steps:.2f}x), "
                f"{best_steps:.2f} s |"
            )


# --------------------------------------------------------------------------- measured

CONFIG = LlamaConfig(dim=128, layers=2, heads=4, kv_heads=2, hidden=256)
LAYOUT = "head_tail"


class InnerAttention(nn.Module):
    """Attention on the cp mesh, and with the documents, of the current micro-batch."""

    mesh: Any = None
    documents: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cls = type(self)
        where = {"mesh": cls.mesh, "documents": cls.documents, "layout": LAYOUT, "kv_exchange": "ring"}
        return attention(q, k, v, is_causal=True, enable_gqa=True, **where)


def run(model: nn.Module, family: MeshFamily, plan: Plan, samples: list[Tensor]) -> tuple[float, float]:
    """Run one step without the sum of gradients over all ranks. Return the wall seconds of the slowest rank and the
    processor seconds of the busiest."""
    model.zero_grad()
    dist.barrier()
    wall, busy = time.perf_counter(), time.process_time()
    count = sum(len(s) for s in samples)
    for batch in plan.of_rank(family.rank):
        InnerAttention.mesh, InnerAttention.documents = family.cp(batch.degree), batch.documents
        handler = ContextParallelHandler(InnerAttention.mesh, LAYOUT)
        tokens = torch.cat([samples[i] for i in batch.samples])
        positions = torch.cat([torch.arange(n) for n in batch.lengths])
        tokens, positions = (handler.dispatch(x, 0, pad_value=0) for x in (tokens, positions))
        (F.cross_entropy(model(tokens[None], positions)[0], tokens, reduction="sum") / count).backward()
    seconds = torch.tensor([time.perf_counter() - wall, time.process_time() - busy])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds[0].item(), seconds[1].item()


def calibrate(model: nn.Module, family: MeshFamily) -> CostModel:
    """Measure the costs of this machine in processor seconds, with samples of three lengths on one rank each, and with
    the longest one shared by all ranks."""

    def seconds(length: int, degree: int) -> float:
        plan = DynamicContextParallel(family, length, CostModel(1.0, 0.0), degrees=[degree]).plan(
            [length] * family.size
        )
        samples = [torch.randint(CONFIG.vocab, (length,)) for _ in range(family.size)]
        return min(run(model, family, plan, samples)[1] for _ in range(4))

    n, lengths = family.size, (64, K, 4 * K)
    times = [seconds(length, 1) for length in lengths]
    system = torch.tensor([[1.0, s, s * s / 2] for s in lengths], dtype=torch.float64)
    found = torch.linalg.solve(system, torch.tensor(times, dtype=torch.float64)).clamp(min=0)
    fixed, linear, quadratic = found.tolist()
    # n samples, each shared by all n ranks, are the work of one unshared sample plus the cost of sharing.
    exchange = max(0.0, seconds(4 * K, n) - times[-1] - (n - 1) * fixed) / (4 * K * (n - 1))
    return CostModel(linear, quadratic, exchange, fixed)


def rank_main(rank: int, ranks: int, store: str, put: Callable[[Any], None], args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 puts the lines of the report."""
    family = split_cp_mesh(join(rank, ranks, store))
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for layer in model.layers:
        layer.attention.inner = InnerAttention()
    costs: list[Any] = [calibrate(model, family)]
    dist.broadcast_object_list(costs)  # all ranks must make the same plan
    show = put if rank == 0 else lambda _: None
    show(f"{args.ranks} ranks x 1 thread, {os.cpu_count()} cores, torch {torch.__version__}; {args.samples} samples")
    show(f"measured costs: {costs[0]}")
    show("| lengths | static cp | static: wall, busiest rank | dynamic: wall, busiest rank | speedup | predicted |")
    show("|---|---|---|---|---|---|")
    for name, (draw, longest) in HERE.items():
        budget = longest // args.ranks
        dynamic = DynamicContextParallel(family, budget, costs[0])
        degree = least_degree(dynamic, longest)
        static = DynamicContextParallel(family, budget, costs[0], degrees=[degree])
        rng, rows = random.Random(0), []
        for step in range(args.steps + 1):
            lengths = draw(rng, args.samples)
            plans = (static.plan(lengths), dynamic.plan(lengths))
            samples = [torch.randint(CONFIG.vocab, (n,)) for n in lengths]
            (wall, busy), (wall_free, busy_free) = (run(model, family, each, samples) for each in plans)
            if step:  # step 0 warms up
                ratios = (wall / wall_free, busy / busy_free, plans[0].makespan / plans[1].makespan)
                rows.append((wall, busy, wall_free, busy_free, *ratios))
        wall, busy, wall_free, busy_free, faster, lighter, predicted = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        show(
            f"| {name} | {degree} | {wall:.2f} s, {busy:.2f} s | {wall_free:.2f} s, {busy_free:.2f} s | "
            f"{faster:.2f}, {lighter:.2f} | {predicted:.2f} |"
        )
    leave()


def measure(args: argparse.Namespace) -> None:
    """Print the times of a small Llama on gloo ranks of this machine."""
    for line in results_of(rank_main, args.ranks, args):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run a small model on gloo ranks of this machine")
    parser.add_argument("--ranks", type=int, help="default 8, 64 and 512, or 4 with --measure")
    parser.add_argument("--samples", type=int, help="samples per rank and step; default 8; with --measure in all, 32")
    parser.add_argument("--steps", type=int, help="default 2, or 5 with --measure")
    parser.add_argument("--cluster", default="h100", help="a profile of the planner")
    parser.add_argument("--fixed", type=float, default=0.02, help="seconds per micro-batch, independent of its size")
    args = parser.parse_args()
    defaults = {"ranks": (None, 4), "samples": (8, 32), "steps": (2, 5)}
    for name, choice in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, choice[args.measure])
    (measure if args.measure else predict)(args)


if __name__ == "__main__":
    main()
