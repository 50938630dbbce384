"""Measures what fits: memory of a training step on one rank, over lengths and ranks, counted by tensor storages.

    python -m benchmarks.measured.memory                # tables
    python -m benchmarks.measured.memory --plot docs/pictures/memory.png

One process plays one rank of a mesh of any size: its process group is PyTorch's fake backend, which moves nothing, and
its attention kernel computes nothing, so that long sequences take no time. Tensors are as large as they would be.
Weights and the gradients that an optimizer keeps exist before a step and are not counted: they do not depend on the
length. The model is the demo's Llama in the proportions of Llama 3 8B (vocabulary 31 times the width, MLP 3.5 times,
a quarter of the heads for keys and values), fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, ContextParallelHandler, tiled
from hyper_cp.cli.demo_model import Block, Llama, LlamaConfig, rope
from hyper_cp.cli.modes import Mode, named_modes
from hyper_cp.memory import MemoryCounter
from hyper_cp.ops import SAVE_LIST, attention, kernels

from ..no_kernel import NoKernel
from .host_time import join

CONFIG = LlamaConfig(vocab=2004, dim=64, layers=4, heads=8, kv_heads=2, hidden=224)
MODES = named_modes("Ulysses", "all-gather", "ring", "needed")
LAYERS: dict[str, tuple[bool, int, str]] = {
    "plain": (False, 1, ""),
    "loss without logits": (True, 1, ""),
    "+ tiled MLP": (True, 8, ""),
    "+ checkpoints that save attention": (True, 8, "attention"),
    "+ full checkpoints": (True, 8, "all"),
}
"""For each row: is the loss chunked, chunks of the MLP, and what blocks save besides their input."""
CHUNK = 256
"""Tokens whose logits exist at once, where the loss is chunked."""


class Step(NamedTuple):
    """Bytes of one training step on one rank."""

    saved: int
    """Those that are alive between forward and backward."""
    peak: int


@contextmanager
def rank_of(ranks: int) -> Iterator[DeviceMesh]:
    """Yield the cp mesh of a process that is one of ``ranks`` ranks, in the middle of them."""
    mesh = join(ranks)
    with kernels.register(NoKernel(), "cpu"):
        try:
            yield mesh
        finally:
            dist.destroy_process_group()


def count(forward: Callable[[], Tensor], parameters: Iterator[Tensor]) -> Step:
    """Return the bytes of a forward and its backward. Gradients of parameters exist before, as with accumulation."""
    for p in parameters:
        p.grad = torch.zeros_like(p)
    with MemoryCounter() as memory:
        loss = forward()
        saved = memory.alive["cpu"]
        loss.sum().backward()
    return Step(saved, memory.peak["cpu"])


def attention_alone(mesh: DeviceMesh, length: int, mode: Mode) -> Step:
    """One attention call; q, k, v exist before."""
    part, size = length // mesh.size(), CONFIG.head_dim
    q, k, v = (
        torch.zeros(1, h, part, size, requires_grad=True) for h in (CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads)
    )
    options = {"enable_gqa": True, "is_causal": True, "layout": "head_tail", **mode}
    return count(lambda: attention(q, k, v, mesh=mesh, **options), iter((q, k, v)))  # type: ignore[return-value,arg-type]


def one_block(mesh: DeviceMesh, length: int, mode: Mode, row: str = "plain") -> Step:
    """One block of the model; its input exists before."""
    block: Any = Block(CONFIG)
    parallelize_module(block, mesh, {"attention.inner": style_of(mode)})
    _, chunks, saving = LAYERS[row]
    arrange(block, chunks)
    x = torch.zeros(1, length // mesh.size(), CONFIG.dim, requires_grad=True)
    tables = rope(torch.arange(x.shape[1]), CONFIG)
    return count(lambda: run(block, saving, x, *tables), iter((x, *block.parameters())))


def whole_model(mesh: DeviceMesh, length: int, mode: Mode, row: str = "plain") -> Step:
    """A training step of the whole model."""
    model, style = Llama(CONFIG), style_of(mode)
    parallelize_module(model, mesh, {"layers.*.attention.inner": style})
    handler = ContextParallelHandler(mesh, style)
    chunked, chunks, saving = LAYERS[row]
    for layer in model.layers:
        arrange(layer, chunks)
        layer.forward = partial(run, type(layer).forward.__get__(layer), saving)  # type: ignore[method-assign]
    head, parameters = model.output, [*model.parameters()]
    if chunked:
        model.output = nn.Identity()  # type: ignore[assignment]
    tokens, positions = torch.zeros(1, length // mesh.size(), dtype=torch.int64), handler.position_ids(length)

    def forward() -> Tensor:
        out = model(tokens, positions)
        if chunked:
            return handler.mean_loss(out, tokens, head=head, chunk=CHUNK)
        return handler.mean_loss(out, tokens)

    return count(forward, iter(parameters))


def style_of(mode: Mode) -> ContextParallel:
    return ContextParallel(seq_dim=2, head_dim=1, layout="head_tail", **mode)


def arrange(block: Any, chunks: int) -> None:
    if chunks > 1:
        tiled(block.ffn, chunks)


def run(block: Callable[..., Tensor], saving: str, *args: Tensor) -> Tensor:
    """Call a block, under a checkpoint or not."""
    if not saving:
        return block(*args)
    selective = partial(create_selective_checkpoint_contexts, SAVE_LIST)
    options = {"context_fn": selective} if saving == "attention" else {}
    out: Tensor = checkpoint(block, *args, use_reentrant=False, **options)
    return out


# --------------------------------------------------------------------------- tables and the picture


def mib(n: float) -> str:
    return f"{n / 2**20:.1f}"


def tables(lengths: list[int], ranks: list[int]) -> None:
    """Print bytes saved for backward and peaks."""
    for title, measure in (("attention alone", attention_alone), ("one block", one_block), ("model", whole_model)):
        print(f"\n{title}: MiB saved for backward / peak of a step, per rank\n")
        print("| mode, ranks | " + " | ".join(f"S={n}" for n in lengths) + " |\n|---|" + "---|" * len(lengths))
        for n in ranks:
            for name, mode in MODES.items() if n > 1 else [("one rank", MODES["all-gather"])]:
                if mode.get("ulysses_degree") is None and CONFIG.heads % n:
                    continue
                with rank_of(n) as mesh:
                    steps = [measure(mesh, length, mode) for length in lengths]
                print(f"| {name}, {n} | " + " | ".join(f"{mib(s.saved)} / {mib(s.peak)}" for s in steps) + " |")
    print(f"\nmodel on {ranks[-1]} ranks, ring: MiB saved for backward / peak\n")
    print("| | " + " | ".join(f"S={n}" for n in lengths) + " |\n|---|" + "---|" * len(lengths))
    with rank_of(ranks[-1]) as mesh:
        for row in LAYERS:
            steps = [whole_model(mesh, length, MODES["ring"], row) for length in lengths]
            print(f"| {row} | " + " | ".join(f"{mib(s.saved)} / {mib(s.peak)}" for s in steps) + " |")


def longest(mesh: DeviceMesh, row: str, budget: int) -> int:
    """Return the longest sequence whose step fits the budget, to 2 %. From some length on memory is a straight line:
    the two lengths that were measured last give the next one."""
    unit = 16 * mesh.size()
    peaks = {n: whole_model(mesh, n * unit, MODES["ring"], row).peak for n in (64, 128)}
    while not any(0.98 * budget <= peak <= budget for peak in peaks.values()):
        (a, low), (b, high) = [*peaks.items()][-2:]
        guess = int(a + (0.99 * budget - low) * (b - a) / (high - low))
        peaks[guess] = whole_model(mesh, guess * unit, MODES["ring"], row).peak
    return max(n for n, peak in peaks.items() if peak <= budget) * unit


def plot(ranks: list[int], budget: int, path: str) -> None:
    """Print and draw the longest sequence over ranks, each of which has the same memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    print(f"\nlongest sequence with {mib(budget)} MiB per rank for a step, ring\n")
    print("| | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in ranks) + " |\n|---|" + "---:|" * len(ranks))
    found: dict[str, list[int]] = {row: [] for row in LAYERS}
    for n in ranks:
        with rank_of(n) as mesh:
            for row in LAYERS:
                found[row].append(longest(mesh, row, budget))
    for row, lengths in found.items():
        print(f"| {row} | " + " | ".join(f"{length:,}" for length in lengths) + " |", flush=True)
        axes.plot(ranks, lengths, marker="o", label=row)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, map(str, ranks))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y / 1024:.0f}K")
    axes.set(xlabel="ranks", ylabel="longest sequence", title=f"{mib(budget)} MiB per rank for a training step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budget", type=int, default=32, help="MiB per rank, for the longest sequence")
    parser.add_argument("--plot", metavar="FILE", help="measure the longest sequence in the budget, and draw it")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.plot:
        plot(args.ranks, args.budget * 2**20, args.plot)
    else:
        tables(args.lengths, args.ranks)


if __name__ == "__main__":
    main()
