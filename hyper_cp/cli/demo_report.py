"""The demo's measurements, and how it shows them: a progress bar, a table and a picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch.distributed as dist

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


def save_picture(results: dict[str, Result], path: str) -> None:
    """Plot the losses, and their differences from those of one rank, into an image file."""
    import matplotlib  # an optional dependency (the extra "viz"), which nothing else needs

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
