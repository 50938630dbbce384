"""Measures layers of DeepSeek V4 whose entries travel, against the same layers that gather hidden states first.

    python -m benchmarks.measured.entries --write        # under four minutes; writes docs/guide/selected_attention.md
    python -m benchmarks.measured.entries --length 1024 --ranks 2 --rounds 1  # a small one, which writes nothing

A CSA layer pools 8 tokens into an entry every 4 tokens, and an indexer selects entries; an HCA layer pools 128 tokens
every 128. Both attend to them beside a window of 128 tokens. Sizes are a quarter of the model's in each width, so that
the numbers of an entry for each number of a hidden state are its own. Rotary positions, norms, and the projections of
queries and outputs are left out: they need no other rank's tokens.

"entries": each rank pools the windows that end in its rows, and entries travel (:mod:`hyper_cp.ops`). "hidden states":
the ranks gather the hidden states, each pools all windows, and the sums of gradients return (an all-gather and a
reduce-scatter, by plain messages of torch.distributed). What follows is the same call in both: it selects entries,
brings the window's keys from other ranks, and attends. Outputs and all gradients are compared first.

Each rank has one thread and a link of its own (see links.py), in turns without a limit and with ``--rate``. A time is
forward and backward of the slowest rank, the median of ``--rounds``. Bytes are those that leave the network interface,
of the rank that sends most. Where there are no such links, the script says why and exits with 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from hyper_cp import ContextParallelHandler
from hyper_cp.ops import Entries, attention, gather_windows, select_entries, windows

from ..ranks import join, leave, results_of
from ..speed.report import write_section
from ..speed.run import in_words, machine
from .links import Link, limit_all, switch, why_not
from .throttled import NOT_HERE

DOCUMENT = Path(__file__).parents[2] / "docs/guide/selected_attention.md"
COMMAND = "python -m benchmarks.measured.entries --write"
WIDTH, DIM, HEADS = 1024, 128, 4
"""The numbers of a hidden state (4,096 in the model), of a key and an entry (512), and the query heads (64)."""
INDEX_DIM, INDEX_HEADS, TOPK = 32, 4, 128
"""The numbers of a key of the indexer (128), its query heads (64), and the entries of a query (512)."""
WINDOW, LAYOUT = 128, "head_tail"
LAYERS = {"CSA": (4, 2), "HCA": (128, 1)}
"""Tokens from one entry to the next, and the number of such spans that one is made of."""
WAYS = ("entries", "hidden states")


def exchanged(sends: Sequence[Tensor]) -> list[Tensor]:
    """Send one tensor to each rank, and return those that arrive: what gloo's own collectives do, without the second
    half of their reduce-scatter, which sends all sums to all ranks."""
    found, own = [torch.empty_like(x) for x in sends], dist.get_rank()
    found[own] = sends[own]
    others = [rank for rank in range(len(sends)) if rank != own]
    receives = [dist.P2POp(dist.irecv, found[rank], rank) for rank in others]
    for work in dist.batch_isend_irecv([*receives, *(dist.P2POp(dist.isend, sends[rank], rank) for rank in others)]):
        work.wait()
    return found


class Gathered(torch.autograd.Function):
    """The hidden states ``[1, S, W]`` of all ranks, in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        every_rank = exchanged([local.contiguous()] * dist.get_world_size())
        halves = [half for x in every_rank for half in x.chunk(2, 1)]
        return torch.cat([halves[i] for i in _places(len(every_rank))], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        places = _places(dist.get_world_size())
        chunks = dout.chunk(len(places), 1)
        halves = [chunks[places.index(i)] for i in range(len(places))]
        shares = exchanged([torch.cat(pair, 1) for pair in zip(halves[::2], halves[1::2], strict=True)])
        return torch.stack(shares).sum(0)


def _places(world: int) -> list[int]:
    """The chunks of a head-tail layout as ranks hold them, in the order of the sequence."""
    held = [chunk for rank in range(world) for chunk in (rank, 2 * world - 1 - rank)]
    return [held.index(chunk) for chunk in range(2 * world)]


class Layer:
    """One layer on the ranks of a mesh. Weights are the same on all ranks, and their gradients are shares of sums."""

    def __init__(self, kind: str, mesh: DeviceMesh, length: int) -> None:
        (self.every, self.series), self.mesh, self.length = LAYERS[kind], mesh, length
        self.where: dict[str, Any] = {"mesh": mesh, "every": self.every, "layout": LAYOUT}
        generator, at = torch.Generator().manual_seed(0), ContextParallelHandler(mesh, LAYOUT).position_ids(length)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden = random(1, length, WIDTH)[:, at]
        self.q, self.dout = (random(1, length, HEADS, DIM)[:, at].transpose(1, 2) for _ in range(2))
        self.index_q = random(1, length, INDEX_HEADS, INDEX_DIM)[:, at].transpose(1, 2)
        made = (DIM, 2 * self.series * DIM, 2 * self.series * INDEX_DIM)  # keys; keys and gates of entries
        self.weights = [random(numbers, WIDTH) / WIDTH**0.5 for numbers in made]

    def run(self, way: str) -> list[Tensor]:
        """Run forward and backward: the output, and the gradients of hidden states, queries and weights."""
        leaves = [x.detach().requires_grad_() for x in (self.hidden, self.q, *self.weights[:2])]
        hidden, q, of_keys, of_entries = leaves
        states = hidden if way == "entries" else Gathered.apply(hidden)
        entries, keys, selected = self._entries(states, of_entries), (hidden @ of_keys.T).unsqueeze(1), None
        if self.series > 1:
            with torch.no_grad():
                index = self._entries(states, self.weights[2])
                selected = select_entries(self.index_q, index, topk=TOPK, **self.where)
        pooled = Entries(entries, entries, self.every, selected)
        options: dict[str, Any] = {"kv_exchange": "needed", "layout": LAYOUT, "window": (WINDOW - 1, 0)}
        out: Any = attention(q, keys, keys, mesh=self.mesh, enable_gqa=True, entries=pooled, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def _entries(self, states: Tensor, weight: Tensor) -> Tensor:
        """All entries ``[1, 1, E, D]``: of this rank's hidden states, or of all hidden states."""
        made, tokens = states @ weight.T, self.series * self.every
        if states.shape[1] == self.length:  # plain torch
            before = made.new_full((1, tokens - self.every, made.shape[2]), -torch.inf)
            return self._pooled(torch.cat([before, made], 1).unfold(1, tokens, self.every).transpose(2, 3)).unsqueeze(1)
        found = self._pooled(windows(made, range(tokens - 1, -1, -1), fill=-torch.inf, **self.where))
        return gather_windows(found, length=self.length, **self.where).unsqueeze(1)

    def _pooled(self, rows: Tensor) -> Tensor:
        """The entries of windows ``[1, m, tokens, numbers]``, whose rows before the sequence are -inf."""
        keys, gates = rows.chunk(2, 3)
        keys, every = keys.masked_fill(gates == -torch.inf, 0), self.every
        if self.series > 1:  # the first series of the window before, and the second one of its own
            dim = keys.shape[3] // 2
            keys, gates = (torch.cat([x[:, :, :every, :dim], x[:, :, every:, dim:]], 2) for x in (keys, gates))
        return (keys * gates.softmax(2)).sum(2)


def check(layer: Layer) -> None:
    """Raise ``RuntimeError`` unless both ways have the same output and gradients."""
    for name, *found in zip(
        ("output", "hidden states", "queries", "keys", "entries"), *map(layer.run, WAYS), strict=True
    ):
        if name in ("keys", "entries"):  # shares of sums
            for x in found:
                dist.all_reduce(x)
        error = ((found[0] - found[1]).abs().max() / found[0].abs().max()).item()
        if not error < 1e-4:
            raise RuntimeError(
                f"the two ways differ by {error:.1e} in the {name}. The measurement needs results that are right. Run "
                "tests/ops/test_entries.py"
            )


# --------------------------------------------------------------------------- measuring

Result = tuple[int, str, str, float | None, float, int]
"""Ranks, a layer, a way, a rate (None: no limit), seconds, and bytes."""


def rank_main(rank: int, world: int, store: str, put: Callable[[Any], None], args: argparse.Namespace, at: int) -> None:
    """Measure on one rank. Rank 0 puts each :data:`Result`."""
    link = Link(at, rank)  # it names gloo's network interface
    mesh = join(rank, world, store)
    for kind in LAYERS:
        layer = Layer(kind, mesh, args.length)
        check(layer)  # and warm up: schedules, connections, what ranks compare
        cases = [(way, rate) for rate in (None, args.rate) for way in WAYS]
        found: dict[Any, list[list[float]]] = {case: [] for case in cases}
        for way, rate in cases * args.rounds:
            limit_all(link, rate)
            before, start = _sent(), time.perf_counter()
            layer.run(way)
            own = torch.tensor([time.perf_counter() - start, _sent() - before], dtype=torch.float64)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            found[way, rate].append(own.tolist())
        link.limit(None)
        for (way, rate), rounds in found.items():
            seconds, sent = (statistics.median(x) for x in zip(*rounds, strict=True))
            if rank == 0:
                put((world, kind, way, rate, seconds, int(sent)))
    leave()


def _sent() -> int:
    """The bytes that have left this rank's network interface."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


# --------------------------------------------------------------------------- the table


def table(found: Sequence[Result]) -> str:
    """All results: a row for each layer and way, with columns for each number of ranks."""
    worlds = sorted({world for world, *_ in found})
    (rate,) = {rate for _, _, _, rate, *_ in found if rate is not None}
    of = {(world, kind, way, rate): rest for world, kind, way, rate, *rest in found}
    heads = [f"{n} ranks: MiB sent | no limit | {rate:g} Mbit/s" for n in worlds]
    lines = [f"| layer | what travels | {' | '.join(heads)} |", "|---|---|" + "---:|" * 3 * len(worlds)]
    for kind in LAYERS:
        for way in WAYS:
            cells = []
            for world in worlds:
                (free, sent), (limited, _) = of[world, kind, way, None], of[world, kind, way, rate]
                cells += [f"{sent / 2**20:.2f}", f"{free:.2f} s", f"{limited:.2f} s"]
            lines.append(f"| {kind} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def about(args: argparse.Namespace) -> str:
    """The sizes, the machine and the date."""
    return (
        f"S={args.length:,}, B1, fp32, {LAYOUT}; hidden states of {WIDTH:,} numbers, {HEADS} heads and entries of "
        f"{DIM}, an indexer with {INDEX_HEADS} heads of {INDEX_DIM},\ntopk={TOPK}; "
        + in_words(machine(), "one thread a rank, ")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=200, help="Mbit/s")
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOCUMENT.name}")
    args = parser.parse_args()
    if reason := why_not():
        print(f"{reason} Nothing was measured.", file=sys.stderr)
        return NOT_HERE
    found, heading = list[Result](), about(args)
    for world in args.ranks:
        with switch() as at:
            for result in results_of(rank_main, world, args, at, method="fork"):  # nothing of torch has run here yet
                print(*result, flush=True)
                found.append(result)
    text = f"{heading}\n\n{table(found)}"
    print(f"\n{text}")
    if args.write:
        write_section(DOCUMENT, "entries", text, COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
