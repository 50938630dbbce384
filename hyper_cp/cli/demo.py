"""Trains a small byte-level Llama on real text in every mode of context parallelism, beside one rank.

Run it as `make demo`, `hyper-cp demo`, or `torchrun --nproc-per-node 4 -m hyper_cp demo`. It exits
non-zero if any mode's losses differ from those of one rank by more than fp32 rounding.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from .. import ContextParallel, ContextParallelHandler, styled_modules
from ..mesh.comm import record_traffic
from .demo_model import Llama, LlamaConfig

MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": None},
    "ulysses head-tail": {"ulysses_degree": None, "layout": "head_tail"},
    "colossal": {"ulysses_degree": 1},
    "colossal balanced": {"ulysses_degree": 1, "load_balance": True},
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "ring head-tail": {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    "ring balanced": {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
    "hybrid": {"ulysses_degree": 2},
    "hybrid ring head-tail": {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
}
ONE_RANK = "one rank"

# Sums of the same fp32 numbers in another order: about 1e-7 relative per step, carried on by the
# optimizer (5e-7 seen after 12 steps). A real mistake - a position, a mask, a label at a shard's
# border - changes the loss by 1e-3 and more from the second step on.
TOLERANCE = 2e-5


@dataclass
class Result:
    """What one training run measured, over all ranks."""

    losses: list[float]
    tokens_per_second: float
    peak_bytes: int
    bytes_per_step: int


# --------------------------------------------------------------------------- data and training


def text_batches(length: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels ``[1, length]`` of Python's own help texts, as bytes. Labels are shifted
    here, on the whole sequence: after sharding a shard's last token would have no label."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(steps):
        start = step * length % (len(data) - length - 1)
        window = data[start : start + length + 1]
        yield window[:-1].unsqueeze(0), window[1:].unsqueeze(0)


def build(mode: dict[str, Any] | None) -> tuple[Llama, ContextParallelHandler | None]:
    """The model, the same weights everywhere, and the handler of its batches (None: one rank)."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig())
    if mode is None:
        return model, None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(seq_dim=2, head_dim=1, **mode)  # q, k, v are [B, H, S, D]
    parallelize_module(model, mesh, {"layers.*.attention.inner": style})
    styled_modules(model, at_least=1)
    return model, ContextParallelHandler(mesh, style)


def train(name: str, mode: dict[str, Any] | None, args: argparse.Namespace) -> Result:
    """Train one mode on all ranks, or (``mode`` None) the unsharded model on this rank alone."""
    model, handler = build(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.arange(args.seq_len) if handler is None else handler.position_ids(args.seq_len)
    reset_peak()
    losses, seconds = [], []
    with record_traffic() as traffic:
        for step, (tokens, labels) in enumerate(text_batches(args.seq_len, args.steps)):
            start = time.perf_counter()
            if handler is not None:
                tokens, labels = handler.dispatch(tokens, seq_dim=1), handler.dispatch(labels, seq_dim=1)
            logits = model(tokens, positions)
            # The mean over the whole sequence: a local sum over the global count.
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / args.seq_len
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach()
            if handler is not None:
                total = sum_over_ranks(total, model)
            optimizer.step()
            losses.append(total.item())
            seconds.append(time.perf_counter() - start)
            progress(name, step + 1, args.steps, losses[-1])
    rate = args.seq_len / sorted(seconds)[len(seconds) // 2]
    return Result(losses, rate, peak_bytes(), traffic.bytes_sent // args.steps)


def sum_over_ranks(loss: Tensor, model: Llama) -> Tensor:
    """Add up the ranks' gradients (parameters are replicated) and losses; returns the loss."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([loss.view(1), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    return flat[0]


# --------------------------------------------------------------------------- what is shown


def peak_bytes() -> int:
    """Peak resident memory of this process since :func:`reset_peak` (Linux; elsewhere 0)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def reset_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return  # the peak then covers the whole process


def progress(name: str, step: int, steps: int, loss: float) -> None:
    if dist.get_rank() == 0:
        done = 24 * step // steps
        bar = f"{name:22} [{'#' * done}{'.' * (24 - done)}] {step:3}/{steps}  loss {loss:.4f}"
        if sys.stderr.isatty():
            print(f"\r{bar}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
        elif step == steps:
            print(bar, file=sys.stderr, flush=True)


def table(results: dict[str, Result]) -> tuple[list[str], list[str]]:
    """The lines of the final table, and the names of the modes that are wrong."""
    reference = results[ONE_RANK].losses
    lines = [f"{'mode':22} {'final loss':>10} {'max |diff|':>10} {'tokens/s':>9} {'peak MiB':>9} {'sent MiB/step':>14}"]
    wrong = []
    for name, r in results.items():
        differences = [abs(a - b) for a, b in zip(r.losses, reference, strict=True)]
        if not all(d <= TOLERANCE for d in differences):  # a NaN is wrong too
            wrong.append(name)
        lines.append(
            f"{name:22} {r.losses[-1]:>10.5f} {max(differences):>10.1e} {r.tokens_per_second:>9.0f} "
            f"{r.peak_bytes / 2**20:>9.0f} {r.bytes_per_step / 2**20:>14.2f}"
        )
    return lines, wrong


def save_picture(results: dict[str, Result], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    reference = results[ONE_RANK].losses
    for name, r in results.items():
        left.plot(r.losses, label=name, linewidth=3 if name == ONE_RANK else 1)
        if name != ONE_RANK:
            right.semilogy([abs(a - b) + 1e-9 for a, b in zip(r.losses, reference, strict=True)], label=name)
    right.axhline(TOLERANCE, color="black", linestyle="--", label="allowed")
    left.set(title="loss", xlabel="step")
    right.set(title="|loss - loss on one rank|", xlabel="step")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)


# --------------------------------------------------------------------------- ranks


def gather(result: Result) -> Result:
    """Of all ranks: the same losses, the slowest rate, the largest memory and traffic."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, result)
    return Result(
        result.losses,
        min(p.tokens_per_second for p in parts),
        max(p.peak_bytes for p in parts),
        max(p.bytes_per_step for p in parts),
    )


def rank_main(args: argparse.Namespace) -> int:
    """What every rank does; RANK, WORLD_SIZE and the address are in the environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, Result] = {}
    if rank == 0:
        results[ONE_RANK] = train(ONE_RANK, None, args)
    dist.barrier()
    for name in args.modes:
        results[name] = gather(train(name, MODES[name], args))
    failed = 0
    if rank == 0:
        lines, wrong = table(results)
        print(f"\n{world} gloo ranks x 1 thread, {os.cpu_count()} cores, sequence length {args.seq_len}, "
              f"{args.steps} steps, fp32, torch {torch.__version__}")  # fmt: skip
        print("\n".join(lines))
        print(
            "peak MiB: largest resident memory of a rank (torch itself included); sent MiB/step: by "
            "hyper_cp, per rank,\nwithout the all-reduce of replicated parameters' gradients."
        )
        save_picture(results, args.out)
        print(f"loss curves: {args.out}")
        if wrong:
            print(f"WRONG: losses differ from one rank by more than {TOLERANCE}: {', '.join(wrong)}")
        failed = int(bool(wrong))
    verdict = torch.tensor([failed])
    dist.broadcast(verdict, 0)
    dist.destroy_process_group()
    return int(verdict.item())


def _spawned(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(args.ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(args.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    raise SystemExit(rank_main(args))


def run(args: argparse.Namespace) -> int:
    """Run under torchrun's environment if there is one, else on ranks of our own."""
    if not args.modes:
        args.modes = [m for m in MODES if args.ranks % (MODES[m]["ulysses_degree"] or 1) == 0]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return rank_main(args)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = torch.multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [context.Process(target=_spawned, args=(r, args, port)) for r in range(args.ranks)]
    for process in ranks:
        process.start()
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
        time.sleep(0.1)
    for process in ranks:
        process.join(timeout=10)
        if process.is_alive():  # another rank has failed and this one waits for it
            process.kill()
            process.join()
    return max(abs(p.exitcode or 0) for p in ranks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per mode (default 10)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence (default 4096)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="modes to train (default: all)")
    parser.add_argument("--out", default="demo_losses.png", help="where to save the loss curves")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
