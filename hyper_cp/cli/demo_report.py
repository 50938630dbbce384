"""The demo's measurements, and how it shows them: a progress bar, a table, a picture and a page."""

from __future__ import annotations

import html
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from .tiles import Panel, draw_on, legend, palette

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


def progress(name: str, step: int, steps: int, loss: float) -> None:
    """Draw the progress bar of a run on rank 0: every step on a terminal, otherwise only the last one."""
    if dist.get_rank() != 0:
        return
    done = 24 * step // steps
    bar = f"{name:22} [{'#' * done}{'.' * (24 - done)}] {step:3}/{steps}  loss {loss:.4f}"
    if sys.stderr.isatty():
        print(f"\r{bar}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step == steps:
        print(bar, file=sys.stderr, flush=True)


def table(results: dict[str, Result]) -> tuple[list[str], list[str]]:
    """Return the lines of the final table, and the names of the modes whose losses are wrong."""
    reference = results[ONE_RANK].losses
    whole = results[ONE_RANK].activation_bytes / 2**20
    titles = f"{'final loss':>10} {'max |diff|':>10} {'tokens/s':>9} {'activations, MiB':>17} {'sent MiB/step':>14}"
    lines = [f"{'mode':22} {titles}"]
    wrong = []
    for name, r in results.items():
        differences = [abs(a - b) for a, b in zip(r.losses, reference, strict=True)]
        if not all(d <= TOLERANCE for d in differences):  # written so that a NaN counts as wrong
            wrong.append(name)
        lines.append(
            f"{name:22} {r.losses[-1]:>10.5f} {max(differences):>10.1e} {r.tokens_per_second:>9.0f} "
            f"{f'{r.activation_bytes / 2**20:.1f} of {whole:.1f}':>17} {r.bytes_per_step / 2**20:>14.2f}"
        )
    return lines, wrong


def save_picture(results: dict[str, Result], panels: Sequence[Panel], ranks: int, path: str) -> bool:
    """Plot the losses and their differences from those of one rank, above the maps of who computes what, into an image
    file. Return False if matplotlib, an optional dependency (the extra "viz"), is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(max(12, 2.6 * len(panels)), 8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    left, right = above.subplots(1, 2)
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
    draw_on(below.subplots(1, len(panels), squeeze=False)[0], panels, ranks)
    legend(below, ranks)
    figure.savefig(path, dpi=120)
    return True


# --------------------------------------------------------------------------- a page

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; }
.maps { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; width: 14rem; }
svg { width: 100%; outline: 1px solid #999; } figcaption { font-size: 13px; } .key span { margin-right: 1rem; }
.key i { display: inline-block; width: 1em; height: 1em; vertical-align: -2px; margin-right: .3em; }
"""


def save_page(results: dict[str, Result], lines: Sequence[str], panels: Sequence[Panel], ranks: int, path: str) -> None:
    """Write the table, the losses and the maps into one HTML file that loads nothing else."""
    maps = "".join(
        f"<figure>{_map(panel, ranks)}<figcaption><b>{html.escape(panel.title)}</b><br>{html.escape(panel.caption)}"
        "</figcaption></figure>"
        for panel in panels
    )
    colours = [_colour(palette(ranks)[ranks + 1 + rank]) for rank in range(ranks)]
    key = "".join(f'<span><i style="background:{c}"></i>rank {rank}</span>' for rank, c in enumerate(colours))
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>hyper-cp demo</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>hyper-cp demo</h1>\n"
        f"<pre>{html.escape(chr(10).join(lines))}</pre>\n<h2>Losses of every mode</h2>\n{_curves(results)}\n"
        "<p>The curves lie on each other: every mode has the losses of one rank.</p>\n<h2>Who computes what</h2>\n"
        "<p>Rows are queries, columns are keys. A colour is a rank, pale where the keys travel to it. Where heads are "
        f'split too, there is a map for each part of them.</p>\n<p class="key">{key}</p>\n'
        f'<div class="maps">{maps}</div>\n</body></html>\n',
        encoding="utf-8",
    )


def _map(panel: Panel, ranks: int) -> str:
    """A map as SVG, a rectangle for each run of equal cells in a row."""
    colours, shapes = palette(ranks), []
    rows, columns = panel.cells.shape
    for y, row in enumerate(panel.cells.tolist()):
        x = 0
        for number, run in groupby(row):
            width = len(list(run))
            if number:
                fill = _colour(colours[number + ranks])
                shapes.append(f'<rect x="{x}" y="{y}" width="{width}" height="1" fill="{fill}"/>')
            x += width
    return f'<svg viewBox="0 0 {columns} {rows}" shape-rendering="crispEdges">{"".join(shapes)}</svg>'


def _colour(rgb: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def _curves(results: dict[str, Result]) -> str:
    """The losses as SVG, one line for each run."""
    top, low = (f(x for r in results.values() for x in r.losses if x == x) for f in (max, min))
    lines = []
    for name, r in results.items():
        at = [
            (i * 600 / max(1, len(r.losses) - 1), 180 * (top - x) / max(top - low, 1e-9))
            for i, x in enumerate(r.losses)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at if y == y)
        width = 5 if name == ONE_RANK else 1.5
        colour = "#bbb" if name == ONE_RANK else "#1f5fbf"
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"><title>'
            f"{html.escape(name)}</title></polyline>"
        )
    return (
        f'<svg viewBox="-60 -10 680 210" style="max-width:46rem">{"".join(lines)}'
        f'<text x="-55" y="10" font-size="12">{top:.3f}</text>'
        f'<text x="-55" y="184" font-size="12">{low:.3f}</text></svg>'
    )
