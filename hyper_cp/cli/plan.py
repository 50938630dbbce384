"""Estimates a training step in every strategy, and names the one to use first. Nothing runs.

    hyper-cp plan config.json --sequence 131072 --gpus 64 --cluster h100
    hyper-cp plan meta-llama/Llama-3.1-8B --documents lengths.txt --gpus 16 --measured measured.json --plot plan.png
    hyper-cp plan --layers 32 --heads 32 --kv-heads 8 --width 4096 --vocabulary 128256 --sequence 1M --gpus 64

docs/measured/planner.md describes the model behind it. The exit code is 1 if nothing fits, and 2 if something cannot be
planned.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..planner import PlanReport, plan
from ..planner.cluster import PROFILES, cluster_of
from .options import DOCUMENTS_HELP, check_picture, document_lengths, mistake, tokens
from .shown import show_table

SIZES = ("layers", "heads", "kv_heads", "head_dim", "width", "ffn", "vocabulary")
CLUSTER = ("gpus_per_host", "tflops", "inside_gb_s", "between_gb_s", "memory_gb_s")
CHOICES = ("cp_size", "ulysses_degree", "kv_exchange", "layout", "checkpointing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp plan``."""
    parser.add_argument(
        "model", nargs="?", help="a config.json, its folder, or a name that transformers.AutoConfig finds"
    )
    others = ", ".join(map(_option, SIZES[1:]))
    sizes = f"the number of layers; with {others} in place of a model (those that are left out follow from the others)"
    for name in SIZES:
        parser.add_argument(_option(name), type=int, help=argparse.SUPPRESS if name != "layers" else sizes)
    parser.add_argument("--sequence", type=tokens, help="global length in tokens; 128K and 1M are 2**17 and 2**20")
    parser.add_argument("--documents", help=DOCUMENTS_HELP)
    parser.add_argument("--gpus", type=int, required=True, help="number of devices in all")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step on each group of cp ranks")
    parser.add_argument("--full", action="store_true", help="queries see all keys, not only earlier ones")
    parser.add_argument("--cluster", default="h100", help=f"a profile: {', '.join(PROFILES)} (default h100)")
    for name, what in zip(
        CLUSTER, ("", " of bf16 peak", " inside a host", " between hosts", " of memory"), strict=True
    ):
        kind: Any = int if name == "gpus_per_host" else float
        parser.add_argument(_option(name), type=kind, help=f"instead of the profile's{what}")
    parser.add_argument("--memory-gb", type=float, help="memory of a device that a step may use")
    parser.add_argument(
        "--measured", help="a JSON file of measurements, which replace the profile's numbers (docs/measured/planner.md)"
    )
    for name in CHOICES:
        kind = int if name in ("cp_size", "ulysses_degree") else str
        parser.add_argument(_option(name), type=kind, help="plan for this one only")
    parser.add_argument("--dtype", default="bfloat16", help="of activations (default bfloat16)")
    parser.add_argument("--rows", type=int, default=16, help="rows of the table (default 16)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw speed and memory of the modes (the extra viz)")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Plan, print, and return the exit code."""
    try:
        if args.plot:
            check_picture("--plot", args.plot)
        if args.rows < 1:
            raise ValueError(
                f"--rows {args.rows} is not a positive number. It is the length of the table. Pass at least 1"
            )
        report = _planned(args)
    except (TypeError, ValueError) as error:
        return mistake("plan", error)
    if args.plot:
        save_plot(report, args.plot)
    if args.json:
        print(report.json())
    else:
        show(report, args.rows)
    return int(report.best is None)


def _planned(args: argparse.Namespace) -> PlanReport:
    sizes = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if (args.model is None) == (not sizes):
        raise ValueError(
            f"model={args.model!r} with the sizes {sizes}. One of them says what to plan for. Pass a configuration, or "
            "--layers --heads --width --vocabulary (and --kv-heads --ffn --head-dim)"
        )
    if (args.sequence is None) == (args.documents is None):
        raise ValueError(
            f"--sequence is {args.sequence} and --documents {args.documents}. One of them says how long the sequence "
            "is. Pass one of the two"
        )
    changes = {name: value for name in CLUSTER if (value := getattr(args, name)) is not None}
    return plan(
        args.model if args.model is not None else sizes,
        args.sequence if args.documents is None else document_lengths(args.documents),
        gpus=args.gpus,
        cluster=cluster_of(args.cluster, **changes),
        measured=args.measured,
        causal=not args.full,
        batch=args.batch,
        dtype=args.dtype,
        memory_gb=args.memory_gb,
        **{name: getattr(args, name) for name in CHOICES},
    )


def show(report: PlanReport, rows: int) -> None:
    """Print the report: its heading, and the best of the modes as a table."""
    print("\n".join(report.heading()))
    cells = report.rows(rows)
    modes = report.of_modes()
    styles = ["bold green" if e is report.best else "" if e.fits else "dim" for e in modes[:rows]]
    show_table(cells, styles, left=["mode", "layout", "checkpointing", "loss", "why"])
    if len(modes) > rows:
        print(f"and {len(modes) - rows} more modes; --rows or --json shows them")


def save_plot(report: PlanReport, path: str) -> None:
    """Draw tokens per second over peak memory, a point for each mode, into an image file."""
    import matplotlib  # optional: the extra "viz"

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    groups: dict[str, list[tuple[float, float]]] = {}
    for e in report.of_modes():
        name = e.strategy.mode if e.strategy.ulysses_degree in (1, e.strategy.cp_size) else "hybrid"
        groups.setdefault(name, []).append((e.memory.peak / 1e9, e.tokens_per_second))
    for name, points in groups.items():
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, label=name, s=24, alpha=0.8)
    axes.axvline(report.memory_bytes / 1e9, color="black", linestyle="--", label="memory of a device")
    if report.best is not None:
        best = report.best
        place = best.memory.peak / 1e9, best.tokens_per_second
        axes.annotate(f"{best.strategy.mode}, cp {best.strategy.cp_size}", place)
    axes.set(
        title=report.heading()[0], xlabel="peak GB of a rank", ylabel="tokens per second, all devices", xscale="log"
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
