"""Measures the image encoder of Qwen 2.5 VL on a video of many frames: time and memory of a rank of several.

    python -m benchmarks.measured.frames --write                        # a minute; writes docs/integrations/images.md
    python -m benchmarks.measured.frames --frames 8 --ranks 1 2 --rounds 1  # a small one, which writes nothing

The model is random: an encoder of some layers, and a decoder of one small layer, which takes the tokens of the video
and a few of text. It is prepared by ``prepare_model``, also on one rank, and runs training steps in fp32. Loss and
gradients of the encoder must be those of one rank before anything is timed.

Each rank has one thread. A time is CPU time of that thread, so that it does not matter if ranks share cores: what a
core of its own would take, without waiting for others. Backward counts from the gradient of the encoder's output on.
Memory is counted by tensor storages: those that the encoder's forward keeps for backward, and the peak from its first
operation to the end of the step. Bytes are those of rows and of their gradients that leave a rank. All columns are
those of the rank with most, times are medians of ``--rounds``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.hf import prepare_batch, prepare_model
from hyper_cp.memory import MemoryCounter
from hyper_cp.mesh.comm import record_traffic

from ..ranks import join, leave, results_of
from ..speed.report import write_section
from ..speed.run import in_words, machine

DOCUMENT = Path(__file__).parents[2] / "docs/integrations/images.md"
COMMAND = "python -m benchmarks.measured.frames --write"
SIDE, PATCH, CHANNELS, MERGED = 16, 4, 3, 2
"""Patches along a side of a frame, pixels along a side of a patch, channels, and sides of patches that become a row."""
LAYERS, WIDTH, HEADS, HIDDEN, VIDEO, TEXT = 4, 128, 4, 64, 60, 32
"""The encoder's layers, width and heads; the decoder's width, the token of videos, and the number of tokens of text."""


class Result(NamedTuple):
    """Frames, seconds and MiB of a step on one rank, or the most of all ranks."""

    frames: float
    forward: float
    backward: float
    kept: float
    peak: float
    sent: float


def make_model() -> Any:
    """The model, with the same random weights on every rank."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, logging

    logging.set_verbosity_error()  # of tokens that the small vocabulary does not have
    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 1 << 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": 3 * WIDTH}
    vision |= {"out_hidden_size": HIDDEN, "patch_size": PATCH, "spatial_merge_size": MERGED, "in_chans": CHANNELS}
    vision |= {"window_size": 8 * PATCH, "fullatt_block_indexes": [LAYERS - 1]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, video_token_id=VIDEO, image_token_id=61
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_batch(frames: int) -> dict[str, Any]:
    """A row of a video and text behind it."""
    generator = torch.Generator().manual_seed(0)
    rows = frames * (SIDE // MERGED) ** 2
    ids = torch.randint(1, 50, (1, rows + TEXT), generator=generator)
    ids[0, 1 : rows + 1] = VIDEO
    types = 2 * (ids == VIDEO).long()
    pixels = torch.randn(frames * SIDE**2, CHANNELS * 2 * PATCH**2, generator=generator)
    video = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, SIDE, SIDE]])}
    labels = ids.masked_fill(ids == VIDEO, -100)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        "labels": labels,
        **video,
    }


class Steps:
    """Training steps of the prepared model on the ranks of a mesh. Its hooks note where the encoder begins and ends."""

    def __init__(self, mesh: Any, frames: int) -> None:
        style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")
        self.model = prepare_model(make_model(), mesh, style=style)
        self.handler, self.batch = ContextParallelHandler(mesh, style), make_batch(frames)
        self.encoder: Any = self.model.model.visual
        self.encoder.register_forward_pre_hook(lambda _, args: self._begins(args[0]))
        self.encoder.register_forward_hook(lambda _, args, output: self._ends(output))
        self.memory: MemoryCounter | None = None
        self.patches = 0
        self.times: list[float] = []
        self.alive: list[int] = []

    def _note(self) -> None:
        self.times.append(time.thread_time())
        if self.memory is not None:
            self.alive.append(self.memory.alive["cpu"])

    def _begins(self, patches: Any) -> None:
        self.patches = len(patches)
        if self.memory is not None:
            self.memory.peak["cpu"] = self.memory.alive["cpu"]
        self._note()

    def _ends(self, output: Any) -> None:
        self._note()
        output.pooler_output.register_hook(lambda _: self._note())

    def run(self) -> torch.Tensor:
        """Run a step, and return this rank's share of the loss."""
        self.times, self.alive = [], []
        self.model.zero_grad()
        loss: torch.Tensor = self.model(**prepare_batch(self.handler, self.batch)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._note()
        return loss.detach()

    def values(self) -> list[float]:
        """The loss of a step, and the sum of squares of each gradient of the encoder, of all ranks together."""
        loss = self.run().clone()
        dist.all_reduce(loss)
        found = [loss.item()]
        for p in self.encoder.parameters():
            whole = p.grad.clone()
            dist.all_reduce(whole)
            found.append(whole.square().sum().item())
        return found

    def measure(self, rounds: int) -> Result:
        """Measure on this rank."""
        times = []
        for _ in range(rounds):
            dist.barrier()
            self.run()
            begin, end, back, stop = self.times
            times.append((end - begin, stop - back))
        forward, backward = (statistics.median(x) for x in zip(*times, strict=True))
        with record_traffic() as log, MemoryCounter() as self.memory:
            self.run()
        begin, end, *_ = self.alive
        kept, peak, self.memory = end - begin, self.memory.peak["cpu"] - begin, None
        sent = sum(n for name, n in log.entries if name == "all_to_all_rows")
        return Result(self.patches / SIDE**2, forward, backward, kept / 2**20, peak / 2**20, sent / 2**20)


def rank_main(rank: int, world: int, store: str, put: Callable[[Any], None], args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 puts the values of a step, and the :class:`Result` with the most of all ranks."""
    steps = Steps(join(rank, world, store), args.frames)
    values = steps.values()  # and warm up
    most = torch.tensor(steps.measure(args.rounds), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        put((values, Result(*most.tolist())))
    leave()


def check(values: Sequence[float], one: Sequence[float], ranks: int) -> None:
    """Raise ``RuntimeError`` unless loss and gradients are those of one rank."""
    error = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, one, strict=True) if abs(b) > 1e-10)
    if not error < 1e-3:
        raise RuntimeError(
            f"loss or gradients of the encoder on {ranks} ranks differ by {error:.1e} from those of one. The "
            "measurement needs results that are right. Run tests/integrations/test_images.py"
        )


def table(found: dict[int, Result]) -> str:
    """A row for each number of ranks, with shares of what one rank takes in brackets."""
    one = found[min(found)]
    lines = ["| ranks | frames of a rank | forward | backward | kept for backward | peak | rows sent |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|")
    for ranks, of in sorted(found.items()):

        def cell(name: str, unit: str, of: Result = of) -> str:
            value, whole = getattr(of, name), getattr(one, name)
            text = f"{value:.2f} {unit}" if unit == "s" else f"{value:.0f} {unit}"
            return text if of is one else f"{text} ({value / whole:.2f})"

        cells = [cell("forward", "s"), cell("backward", "s"), cell("kept", "MiB"), cell("peak", "MiB")]
        lines.append(f"| {ranks} | {of.frames:g} | {' | '.join(cells)} | {of.sent:.2f} MiB |")
    return "\n".join(lines)


def about(args: argparse.Namespace) -> str:
    """The sizes, the machine and the date."""
    return (
        f"{args.frames} frames of {SIDE} x {SIDE} patches, an encoder of Qwen 2.5 VL with {LAYERS} layers of width "
        f"{WIDTH}, fp32; CPU time of the busiest rank,\n"
        + in_words(machine(), "one thread a rank, ")
        + " Shares of one rank are in brackets."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="1 must be among them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOCUMENT.name}")
    args = parser.parse_args()
    if 1 not in args.ranks:
        parser.error(f"--ranks has {args.ranks}, but all are compared with one rank. Add 1")
    heading, found, one = about(args), dict[int, Result](), list[float]()
    for ranks in sorted(args.ranks):
        ((values, result),) = results_of(rank_main, ranks, args, method="fork")  # nothing of torch has run here yet
        one = one or values
        check(values, one, ranks)
        found[ranks] = result
        print(ranks, *result, flush=True)
    text = f"{heading}\n\n{table(found)}"
    print(f"\n{text}")
    if args.write:
        write_section(DOCUMENT, "frames", text, COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
