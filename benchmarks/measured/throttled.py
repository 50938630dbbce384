"""Measures every mode on links of a fixed rate: ranks in network namespaces, real gloo traffic, real kernels.

    python -m benchmarks.measured.throttled --ranks 2 --rates 100 200 800 --json throttled.json
    python -m benchmarks.measured.throttled --latents lite --ranks 4 --only ring all-gather needed --json latents.json
    python -m benchmarks.measured.throttled --report throttled.json --plot docs/pictures/throttled.png

Each rank is a host of its own with one thread and a full-duplex link of a given rate to a switch (see links.py). With
``--per-host``, that many adjacent ranks are a host: each keeps a link of its own to other hosts, as a GPU has a network
card of its own, and what they send to each other is not limited.

The script prints the seconds of forward + backward (the slowest rank, median of rounds) over the line max(compute,
communicate). "Communicate" is the bytes that the mode sends to other hosts, over the rate (on the rank that sends
most). "Compute" is the same step on the same links without a limit (the median of rounds, which take turns with the
others), with as many ranks on this machine's cores. With a perfect link and perfect overlap the ratio is 1.00. Results
are added to what the JSON file has. Where there are no such links, it says why and exits with 3.

With ``--latents`` the model has latent attention with the head shapes of DeepSeek V2 Lite or V3, and every mode runs
twice, in turns: with latents that travel ("ring, latents"), and with heads.

For groups of heads it also prints what is possible at best: the groups are too few to hide all of the first and of the
last transfer, and forward communicates more, for its computation, than backward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_cp.cli.modes import Mode, named_mode, named_modes
from hyper_cp.ops import attention, latent_attention
from hyper_cp.planner.timeline import BACKWARD, Clock

from ..ranks import join, leave, results_of
from ..simulated.needed import masks
from .links import Link, limit_all, switch, why_not

NOT_HERE = 3
"""The exit code where there can be no such links."""

MODES = {
    "ring": named_mode("ring, head_tail"),
    "all-gather": named_mode("all-gather, head_tail"),
    "needed": named_mode("needed, head_tail"),
    **{f"needed, {n} stages": named_mode(f"needed, head_tail, {n} stages") for n in (2, 4, 8)},
    **named_modes("needed, balanced", "needed, balanced, 4 stages"),
    **named_modes("Ulysses", "Ulysses, 2 head groups", "Ulysses, 4 head groups"),
    "double ring": named_mode("double ring, head_tail"),
    **{f"2 x {name}": named_mode(f"hybrid of 2, {name}, head_tail") for name in ("ring", "all-gather", "needed")},
    **named_modes("ring, per_document", "all-gather, per_document"),
    "2 x ring, per_document": named_mode("hybrid of 2, ring, per_document"),
    **named_modes("ring, load_balance", "all-gather, load_balance"),
}

NAMES = [*MODES, *(name + sent for name in MODES for sent in (", latents", ", heads"))]
"""Modes as tables and plots name them."""

DRAWN = ("log-normal", "exponential", "half one")
"""Documents of simulated/needed.py, in proportion to the tokens of a rank."""
MASKS = ("causal", "window", "documents", *DRAWN)
Row = dict[str, Any]
"""The result of one mode at one rate."""
LATENT_SHAPES = {"lite": (16, 512, 64, 128, 128), "v3": (128, 512, 64, 128, 128)}
"""Heads, R, Dr, Dn and Dv of DeepSeek V2 Lite and of V3."""
SENT = {True: ", latents", False: ", heads"}
SETTINGS = ("ranks", "length", "mask", "congestion", "latents", "per_host")
"""Arguments that are part of a row, and that rows of one table have in common."""


def masked(args: argparse.Namespace, mode: Mode) -> dict[str, Any]:
    """Return the arguments of a mask and a mode. Masks are: causal; a window of an eighth of the sequence; or
    documents."""
    length, mask = args.length, args.mask
    found: dict[str, Any] = {"is_causal": True, **mode}
    if mask == "window":
        found["window"] = (length // 8, 0)
    if mask == "documents":
        found["documents"] = [0, *(length * share // 64 for share in (3, 4, 9, 20, 22, 29, 40, 47, 50, 64))]
    if mask in DRAWN:
        drawn = masks(length, length // args.ranks)
        found["documents"] = list(next(drawn[name][0].rows[0] for name in drawn if name.startswith(mask)))
    if mode.get("layout") in ("balanced", "per_document"):
        found.setdefault("documents", [0, length])
    if mode.get("layout") == "balanced" and mask == "window":
        found["layout"] = f"balanced_{length // 8}"
    return found


# --------------------------------------------------------------------------- on a rank


class Rank:
    """One rank and its link."""

    def __init__(self, rank: int, args: argparse.Namespace, at: int, store: str) -> None:
        self.args, self.link = args, Link(at, rank, args.congestion, args.per_host)  # it names gloo's network interface
        os.environ["LOCAL_WORLD_SIZE"] = str(args.per_host)  # as torchrun sets it
        self.mesh = join(rank, args.ranks, store)

    def times(self, mode: Mode, rate: float, rounds: int) -> tuple[list[float], list[float], int]:
        """Seconds of each round, of the slowest rank, with the rate and without a limit; and the bytes that the rank
        sends that sends most. The two take turns: cores of a virtual machine are not as fast in every minute."""
        inputs, dout = self._tensors()
        found, options = [], masked(self.args, mode)
        attend = latent_attention if self.args.latents else attention
        with elsewhere(self.args.per_host) as sent:
            for turn in range(2 * rounds + 1):  # the first one warms up: schedules, connections, what ranks compare
                limit_all(self.link, rate if turn % 2 else None)
                leaves = [x.detach().requires_grad_() for x in inputs]
                dist.barrier()
                sent.clear()
                start = time.perf_counter()
                attend(*leaves, mesh=self.mesh, **options).backward(dout)
                found.append(time.perf_counter() - start)
        worst = torch.tensor([*found[1:], sum(sent)], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        *seconds, most = worst.tolist()
        return seconds[::2], seconds[1::2], int(most)

    def _tensors(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The inputs of a call, and the gradient of its output."""
        args, tokens = self.args, self.args.length // self.args.ranks
        if args.latents:
            heads, rank, rotary, plain, value = LATENT_SHAPES[args.latents]
            q, out = (torch.randn(1, tokens, heads, d).transpose(1, 2) for d in (plain + rotary, value))
            weight = torch.randn(heads * (plain + value), rank) / rank**0.5
            return [q, torch.randn(1, tokens, rank), torch.randn(1, 1, tokens, rotary), weight], out
        heads = 4 * args.ranks
        *inputs, out = (torch.randn(1, tokens, heads, args.width // heads).transpose(1, 2) for _ in range(4))
        return inputs, out


@contextmanager
def elsewhere(per_host: int) -> Iterator[list[int]]:
    """Collect the bytes of every message to another host. On gloo all transfers are such messages."""
    sent, post = list[int](), dist.batch_isend_irecv
    here = dist.get_rank() // per_host

    def counted(batch: list[dist.P2POp]) -> list[Any]:
        for op in batch:
            if op.op is dist.isend and dist.get_global_rank(op.group, op.group_peer) // per_host != here:
                sent.append(op.tensor.nbytes)
        return post(batch)

    dist.batch_isend_irecv = counted
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = post


def rank_main(
    number: int, ranks: int, store: str, put: Callable[[Row], None], args: argparse.Namespace, at: int
) -> None:
    """Measure every mode at every rate. Rank 0 puts a row of results for each."""
    rank = Rank(number, args, at, store)
    chosen = [name for name in MODES if not args.only or name in args.only]
    for rate in args.rates:
        for name in chosen:
            for latents in (True, False) if args.latents else (None,):
                sends = {} if latents is None else {"latents": latents}
                seconds, unlimited, sent = rank.times({**MODES[name], **sends}, rate, args.rounds)
                if number == 0:
                    case = {setting: getattr(args, setting) for setting in SETTINGS}
                    case |= {"per_host": None if args.per_host == 1 else args.per_host}
                    case |= {"rate": rate, "mode": name if latents is None else name + SENT[latents]}
                    put({**case, "seconds": seconds, "compute": statistics.median(unlimited), "sent": sent})
    limit_all(rank.link, None)
    leave()


# --------------------------------------------------------------------------- results


def measure(args: argparse.Namespace) -> list[Row]:
    """Run the ranks and return their rows, which are printed as they come."""
    rows: list[Row] = []
    with switch() as at:
        for row in results_of(rank_main, args.ranks, args, at, method="fork"):  # nothing of torch has run here yet
            print(line_of(row), flush=True)
            rows.append(row)
    return rows


def line(row: Row) -> float:
    """Return the seconds that the step would take if it waited for the longer of computation and communication only."""
    return max(row["compute"], communicate(row))


def communicate(row: Row) -> float:
    return row["sent"] * 8 / (row["rate"] * 1e6)


def ratio(row: Row) -> float:
    return statistics.median(row["seconds"]) / line(row)


def key(row: Row) -> tuple[Any, ...]:
    """Return the case of a row."""
    return tuple(row.get(name) for name in (*SETTINGS, "mode", "rate"))


def grouped_ulysses(groups: int, kernels: tuple[float, float], travel: tuple[float, float], each: float) -> float:
    """Seconds of attention between two exchanges of heads, forward and backward, in groups of heads: the order of
    ``ops/head_groups.py``. One group is plain Ulysses.

    Args:
        kernels: seconds of all heads, forward and backward.
        travel: seconds in which q, k and v travel one way, and the output the other.
        each: seconds that a message, and the launch of a group's kernels, take beside.
    """
    clock = Clock()
    for seconds, (arriving, leaving) in zip(kernels, (travel, travel[::-1]), strict=True):
        arrival, left = clock.post(arriving / groups + each), 0.0
        for group in range(groups):
            ahead = clock.post(arriving / groups + each) if group + 1 < groups else 0.0
            clock.wait(arrival)
            clock.compute(seconds / groups + each)
            posted = clock.post(leaving / groups + each)
            clock.wait(left)
            arrival, left = ahead, posted
        clock.wait(left)
    return clock.now


def at_best(row: Row) -> float | None:
    """Return the ratio of a step in which groups of heads overlap perfectly; None for other modes."""
    groups = MODES.get(row["mode"], {}).get("head_groups")
    if groups is None:
        return None
    forward = row["compute"] / (1 + BACKWARD)
    there = communicate(row) * 3 / 8  # q, k and v; the output is as long as one of them
    seconds = grouped_ulysses(groups, (forward, BACKWARD * forward), (there, communicate(row) / 8), 0.0)
    return seconds / line(row)


def line_of(row: Row) -> str:
    low, high, best = min(row["seconds"]), max(row["seconds"]), at_best(row)
    return (
        f"{row['ranks']} ranks {row['rate']:6g} Mbit/s {row['mode']:26} {statistics.median(row['seconds']):6.3f} s "
        f"({low:.3f} - {high:.3f})  compute {row['compute']:.3f}  communicate {communicate(row):.3f}  "
        f"{ratio(row):.2f} x the line" + ("" if best is None else f" (at best {best:.2f})")
    )


def merged(path: Path, rows: list[Row]) -> dict[str, Any]:
    """Add rows to those of a file, and write it."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {key(row): row for row in [*old, *rows]}
    machine = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {date.today()}"
    document = {"machine": machine, "rows": [found[at] for at in sorted(found, key=str)]}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table: the step in seconds, and in brackets over the line."""
    lines = []
    for settings in sorted({key(r)[: len(SETTINGS)] for r in rows}, key=str):
        some = [r for r in rows if key(r)[: len(SETTINGS)] == settings]
        (ranks, length, *rest, per_host), rates = settings, sorted({r["rate"] for r in some})
        hosts = [f"{per_host} to a host"] if per_host else []
        title = ", ".join([f"{ranks} ranks", *hosts, f"S={length}", *filter(None, rest)])
        lines += [f"| {title} | " + " | ".join(f"{x:g} Mbit/s" for x in rates) + " |"]
        lines += ["|---|" + "---:|" * len(rates)]
        for name in NAMES:
            cells = {
                r["rate"]: f"{statistics.median(r['seconds']):.2f} s ({ratio(r):.2f})"
                for r in some
                if r["mode"] == name
            }
            if cells:
                lines.append(f"| {name} | " + " | ".join(cells.get(rate, "") for rate in rates) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: str) -> None:
    """Draw the step over the rate, with the line, for every number of ranks and the modes that all of them have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    worlds = sorted({r["ranks"] for r in rows})
    measured = {(r["ranks"], r["mode"]) for r in rows}
    names = [name for name in NAMES if all((world, name) in measured for world in worlds)]
    size = 2.6 * len(names), 2.6 * len(worlds) + 0.4
    figure, grid = pyplot.subplots(
        len(worlds), len(names), figsize=size, layout="constrained", sharex=True, sharey="row", squeeze=False
    )
    for axes_row, world in zip(grid, worlds, strict=True):
        for axes, name in zip(axes_row, names, strict=True):
            some = sorted((r for r in rows if (r["ranks"], r["mode"]) == (world, name)), key=lambda r: r["rate"])
            rates = [r["rate"] for r in some]
            axes.plot(rates, [line(r) for r in some], color="0.5", label="max(compute, communicate)")
            axes.plot(rates, [statistics.median(r["seconds"]) for r in some], "o-", color="C0", label="measured")
            axes.set(xscale="log", yscale="log", title=f"{name}\n{world} ranks")
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axes.title.set_fontsize(9)
            axes.grid(alpha=0.3, which="both")
    for axes in grid[-1]:
        axes.set_xlabel("Mbit/s")
    for axes_row in grid:
        axes_row[0].set_ylabel("step, seconds")
    grid[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="adjacent ranks of a host")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 200, 800], help="Mbit/s")
    parser.add_argument("--length", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--width", type=int, default=512, help="heads times head dim; there are 4 heads a rank")
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--latents", choices=LATENT_SHAPES, help="latent attention with these head shapes")
    parser.add_argument("--congestion", default="reno", help="congestion control of TCP; see links.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MODES, help="only these modes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: print the table of this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the results")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.report:
        rows = json.loads(args.report.read_text())["rows"]
    else:
        reason = why_not()
        if reason:
            print(f"{reason} Nothing was measured.", file=sys.stderr)
            return NOT_HERE
        rows = measure(args)
        rows = merged(args.json, rows)["rows"] if args.json else rows
    print("\n" + table(rows))
    if args.plot:
        plot([row for row in rows if row.get("congestion", args.congestion) == args.congestion], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
