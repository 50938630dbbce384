"""Trains a small byte-level Llama on real text in three modes of context parallelism, beside one rank.

Run it as `make demo`, `hyper-cp demo`, or `torchrun --nproc-per-node 4 -m hyper_cp demo`; `--all` takes every mode. It
prints a table and, if matplotlib is installed (the extra `viz`), draws who computes what, and how far the losses are
from those of one rank; `--html FILE` puts all of it on one page. The exit code is not zero if the losses of any mode
differ from those of one rank by more than fp32 rounding.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import io
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from .. import ContextParallel, ContextParallelHandler, styled_modules
from ..memory import MemoryCounter
from ..mesh.comm import record_traffic
from .demo_model import Llama, LlamaConfig
from .modes import named_modes
from .options import check_picture, mistake
from .shown import aligned, progress, say, show_table
from .tiles import Panel, draw_maps, map_size, mode_panel

MODES = named_modes(
    "Ulysses",
    "ring, head_tail",
    "hybrid of 2, ring, head_tail",
    "all-gather",
    "all-gather, load_balance",
    "ring",
    "ring, load_balance",
    "Ulysses, head_tail",
    "hybrid of 2",
)
"""Every mode of the demo; by default it trains the first three that its ranks allow."""

ONE_RANK = "one rank"
"""Name of the run that the other runs are compared with: the unsharded model on rank 0."""

TOLERANCE = 2e-5
"""Largest difference between a loss and that of one rank which counts as rounding.

The ranks add the same fp32 numbers in another order. That changes a sum by about 1e-7 relative per step, and the
optimizer carries the difference on (5e-7 after 12 steps). A real mistake in a position, a mask or a label at a shard's
boundary changes the loss by 1e-3 and more from the second step on.
"""


@dataclass
class Result:
    """Measurements of one training run, over all ranks."""

    losses: list[float]
    tokens_per_second: float
    activation_bytes: int
    """The most that a rank keeps between forward and backward."""
    bytes_per_step: int

    def differences(self, losses: Sequence[float]) -> list[float]:
        """Return how far the loss of each step is from ``losses``."""
        return [abs(a - b) for a, b in zip(self.losses, losses, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp demo``."""
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default 4; torchrun decides itself)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per mode (default 10)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sequence (default 2048)")
    names = ", ".join(f"'{name}'" for name in MODES)
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help=f"some of {names} (default: three)")
    parser.add_argument("--all", action="store_true", help=f"every mode, {len(MODES)} of them")
    parser.add_argument("--out", help="image file for the maps and the differences (default demo.png)")
    parser.add_argument("--html", metavar="FILE", help="also write one page with the table and the picture")


def run(args: argparse.Namespace) -> int:
    """Train in the ranks that torchrun has started, or else in ranks started here. Return the exit code."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.ranks
    possible = [name for name, mode in MODES.items() if ranks > 0 and _heads_split(mode, ranks)]
    try:
        _check(args, ranks, possible)
    except ValueError as error:
        return mistake("demo", error)
    args.modes = args.modes or (possible if args.all else possible[:3])
    return rank_main(args) if under_torchrun else start_ranks(args)


def _heads_split(mode: dict[str, Any], ranks: int) -> bool:
    """True if the model's heads split over the Ulysses ranks of a mode, and these over all ranks."""
    degree = mode["ulysses_degree"] or ranks
    return ranks % degree == 0 and LlamaConfig().heads % degree == 0


def _check(args: argparse.Namespace, ranks: int, possible: list[str]) -> None:
    for name, value in (("--ranks", ranks), ("--steps", args.steps), ("--seq-len", args.seq_len)):
        if value < 1:
            raise ValueError(f"{name} {value} is not a positive number. The demo trains. Pass at least 1")
    if args.seq_len % (2 * ranks):
        least = -(-args.seq_len // (2 * ranks)) * 2 * ranks
        raise ValueError(
            f"--seq-len {args.seq_len} does not split over {ranks} ranks. Each rank of a balanced mode holds two equal "
            f"chunks. Pass a multiple of {2 * ranks}, {least} for example"
        )
    impossible = [name for name in args.modes or () if name not in possible]
    if impossible:
        raise ValueError(
            f"--modes {', '.join(impossible)} cannot run on {ranks} ranks. Ulysses splits the model's "
            f"{LlamaConfig().heads} heads over its ranks. Choose among {', '.join(possible)}"
        )
    if args.out is not None:
        check_picture("--out", args.out)
    if args.html and not Path(args.html).parent.is_dir():
        raise ValueError(
            f"--html {args.html} lies in a folder that does not exist. The page is written there. Make the folder first"
        )


# --------------------------------------------------------------------------- data and training


def text_batches(length: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels ``[1, length]``: Python's own help texts, one token per byte.

    Labels are shifted here, on the whole sequence: the last token of a shard has its label on another rank.
    """
    from pydoc_data.topics import topics  # the text is large, and only training needs it

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(steps):
        start = step * length % (len(data) - length - 1)
        window = data[start : start + length + 1]
        yield window[:-1].unsqueeze(0), window[1:].unsqueeze(0)


def build(mode: dict[str, Any] | None) -> tuple[Llama, ContextParallelHandler | None]:
    """Make the model, with the same weights on every rank, and the handler of its batches (None without a mode)."""
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
    positions = torch.arange(args.seq_len, device="cpu") if handler is None else handler.position_ids(args.seq_len)
    losses, seconds, activations = [], [], 0
    with record_traffic() as traffic, progress(name, args.steps, bool(name) and dist.get_rank() == 0) as advance:
        for step, (tokens, labels) in enumerate(text_batches(args.seq_len, args.steps)):
            start = time.perf_counter()
            if handler is not None:
                tokens, labels = handler.dispatch(tokens, seq_dim=1), handler.dispatch(labels, seq_dim=1)
            with MemoryCounter() if step == 0 else nullcontext() as memory:
                loss = share_of_loss(model, tokens, labels, positions, args.seq_len)
            activations = activations if memory is None else memory.alive["cpu"]
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach() if handler is None else sum_over_ranks(loss.detach(), model)
            optimizer.step()
            losses.append(total.item())
            seconds.append(time.perf_counter() - start)
            advance(f"loss {losses[-1]:.4f}")
    rate = args.seq_len / sorted(seconds)[len(seconds) // 2]
    return Result(losses, rate, activations, traffic.bytes_sent // args.steps)


def share_of_loss(model: Llama, tokens: Tensor, labels: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return this rank's share of the mean over the whole sequence: a local sum over the global number of tokens."""
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / length


def sum_over_ranks(loss: Tensor, model: Llama) -> Tensor:
    """Sum gradients (parameters are replicated) and the loss over the ranks. Return the summed loss."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([loss.view(1), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    return flat[0]


# --------------------------------------------------------------------------- the report


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def table(results: dict[str, Result], speed: bool = True) -> tuple[list[list[str]], list[str]]:
    """Return the cells of the final table, and the names of the modes whose losses are wrong.

    Args:
        speed: False if the times say nothing, and have no column.
    """
    reference, whole = results[ONE_RANK].losses, results[ONE_RANK].activation_bytes / 2**20
    titles = ["mode", "final loss", "max |diff|", "tokens/s", "activations, MiB", "sent, MiB/step"]
    cells, wrong = [titles], []
    for name, r in results.items():
        if not all(d <= TOLERANCE for d in r.differences(reference)):  # written so that a NaN counts as wrong
            wrong.append(name)
        kept = f"{r.activation_bytes / 2**20:.1f} of {whole:.1f}"
        worst = f"{max(r.differences(reference)):.1e}"
        sent = f"{r.bytes_per_step / 2**20:.2f}"
        cells.append([name, f"{r.losses[-1]:.5f}", worst, f"{r.tokens_per_second:.0f}", kept, sent])
    return cells if speed else [row[:3] + row[4:] for row in cells], wrong


def maps(modes: list[str], ranks: int, length: int) -> list[Panel]:
    """Return who computes what in each of the modes; those with equal maps share one."""
    found: dict[bytes, Panel] = {}
    for name in modes:
        panel = mode_panel(name, MODES[name], ranks, length, 192)
        same = found.get(panel.cells.tobytes())
        found[panel.cells.tobytes()] = panel if same is None else replace(same, title=f"{same.title}; {name}")
    return list(found.values())


def picture(results: dict[str, Result], panels: Sequence[Panel], ranks: int) -> Any:
    """Return a figure: the maps of who computes what, above bars of every mode's difference from one rank and of its
    activations. Return None if matplotlib, an optional dependency (the extra "viz"), is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        return None
    from matplotlib.figure import Figure

    (width, height), bars = map_size(len(panels)), 1.2 + 0.3 * len(results)
    figure = Figure(figsize=(width, height + bars), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[height, bars])  # type: ignore[misc]
    draw_maps(above, panels, ranks)
    left, right = below.subplots(1, 2, sharey=True)
    reference, names = results[ONE_RANK].losses, list(results)
    worst = [max(r.differences(reference)) for r in results.values()]
    right.barh(names, [r.activation_bytes / 2**20 for r in results.values()], color="tab:green")
    right.set_title("activations of a rank, MiB", fontsize=10)
    left.bar_label(left.barh(names[1:], [max(w, 1e-9) for w in worst[1:]]), [f" {w:.0e}" for w in worst[1:]])
    left.axvline(TOLERANCE, color="black", linestyle="--")
    left.set(xscale="log", xlim=(1e-9, 1e-4))
    left.set_title("largest difference of a loss from one rank (dashed: allowed)", fontsize=10)
    left.invert_yaxis()
    return figure


def save_page(lines: Sequence[str], figure: Any, path: str) -> None:
    """Write the table, and the figure as SVG if there is one, into one HTML file that loads nothing else."""
    drawn = io.StringIO()
    if figure is not None:
        figure.savefig(drawn, format="svg")
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>hyper-cp demo</title>\n<h1>hyper-cp demo</h1>\n'
    svg = drawn.getvalue().partition("<svg")
    page = f"{head}<pre>{html.escape(chr(10).join(lines))}</pre>\n{svg[1]}{svg[2]}"
    Path(path).write_text(page, encoding="utf-8")


def report(results: dict[str, Result], args: argparse.Namespace) -> int:
    """Print the table and save the pictures. Return 1 if the losses of a mode are wrong, else 0."""
    ranks, here = dist.get_world_size(), cores()
    cells, wrong = table(results, speed=ranks <= here)
    about = [
        f"{ranks} gloo ranks x 1 thread, {here} cores, sequence length {args.seq_len}, {args.steps} steps, fp32, torch "
        f"{torch.__version__}",
        *[f"{ranks} ranks share {here} cores: speed says nothing here, so no column has it."] * (ranks > here),
    ]
    notes = [
        "activations: bytes of tensors that a rank keeps between forward and backward, and what one rank alone needs.",
        "sent: bytes that hyper_cp sends per rank, without the all-reduce of the gradients of parameters.",
        "docs/start/concepts.md explains the modes.",
    ]
    print("\n" + "\n".join(about))
    show_table(cells, ["red" if row[0] in wrong else "" for row in cells[1:]], left=["mode"])
    print("\n".join(notes))
    figure, path = picture(results, maps(args.modes, ranks, args.seq_len), ranks), args.out or "demo.png"
    if figure is None:
        print("no picture: matplotlib is not installed (pip install 'hyper-cp[viz]')")
    else:
        figure.savefig(path, dpi=120)
        print(f"who computes what, and how far losses are from those of one rank: {path}")
    if args.html:
        save_page([*about, *aligned(cells, ["mode"]), *notes], figure, args.html)
        print(f"page with all of it: {args.html}")
    if wrong:
        say(f"WRONG: losses differ from one rank by more than {TOLERANCE}: {'; '.join(wrong)}", "bold red")
    sys.stdout.flush()  # a rank that ends with an error may end the others before they have printed
    return int(bool(wrong))


# --------------------------------------------------------------------------- ranks


def gather(result: Result) -> Result:
    """Combine the results of all ranks: equal losses, the slowest rate, the largest memory and traffic."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, result)
    return Result(
        result.losses,
        min(p.tokens_per_second for p in parts),
        max(p.activation_bytes for p in parts),
        max(p.bytes_per_step for p in parts),
    )


def rank_main(args: argparse.Namespace) -> int:
    """Train every mode on this rank, with RANK, WORLD_SIZE and the address in the environment. Return the exit code,
    which is the same on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    results: dict[str, Result] = {}
    if rank == 0:
        first = train("", None, argparse.Namespace(seq_len=args.seq_len, steps=1))
        seconds = args.seq_len / first.tokens_per_second * args.steps * (1 + len(args.modes))
        say(f"one rank, then {len(args.modes)} modes on {dist.get_world_size()} ranks: about {seconds:.0f} seconds")
        results[ONE_RANK] = train(ONE_RANK, None, args)
    dist.barrier()
    for name in args.modes:
        results[name] = gather(train(name, MODES[name], args))
    exit_code = torch.tensor([report(results, args) if rank == 0 else 0], device="cpu")
    dist.broadcast(exit_code, 0)
    dist.destroy_process_group()
    return int(exit_code.item())


def _spawned(rank: int, args: argparse.Namespace, port: int) -> None:
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": args.ranks}
    where = {"RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **local}
    os.environ.update({name: str(value) for name, value in where.items()})
    sys.exit(rank_main(args))


def start_ranks(args: argparse.Namespace) -> int:
    """Start ``args.ranks`` processes that train, and wait for them. Return the exit code of the first that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    method = "fork" if sys.platform == "linux" else "spawn"
    try:
        start_processes(_spawned, (args, port), args.ranks, start_method=method)
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    except ProcessExitedException as error:
        return abs(error.exit_code)
    return 0
