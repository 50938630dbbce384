"""Host time of one attention call: the Python and dispatch work of a rank, without communication and kernels.

    python -m benchmarks.measured.host_time
    python -m benchmarks.measured.host_time --against ../older-checkout

One process plays one rank of a mesh of any size: its process group is PyTorch's fake backend, which moves nothing,
and its attention kernel computes nothing. What is left is the library's own work (and the merge of partials, which is
why the tensors are tiny: on an accelerator that arithmetic is not the host's). Times are CPU time of the calling
thread, so that other processes of the machine are no part of them (but they do slow it down: see ``--fastest``); each
is a median over ``--calls`` calls.

With documents every batch has new ones. "first layer" is the first call with them, "second layer" the next one with
the same table. ``--against`` measures another checkout too, in turns with this one, in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DOCUMENTS = 32
RING = {"kv_exchange": "ring"}
MODES: dict[str, dict[str, Any]] = {
    "all-gather": {},
    "all-gather, load_balance": {"load_balance": True},
    "ring": RING,
    "needed": {"kv_exchange": "needed"},
    "needed, 1 stage": {"kv_exchange": "needed", "exchange_stages": 1},
    "Ulysses": {"ulysses_degree": None},
    "hybrid, 2 x ring": {**RING, "ulysses_degree": 2},
}
Times = dict[str, tuple[float, float]]
"""Microseconds of forward and backward by case; a case is "mode | layout and documents | ranks"."""


def library() -> SimpleNamespace:
    """Return the entry points that this benchmark uses, of this tree or of one from before the rooms."""
    ops = importlib.import_module("hyper_cp.ops")
    rooms = importlib.util.find_spec("hyper_cp.mesh") is not None
    comm = importlib.import_module("hyper_cp.mesh.comm" if rooms else "hyper_cp.ops.axis")
    return SimpleNamespace(attention=ops.attention, kernels=importlib.import_module("hyper_cp.ops.kernels"), comm=comm)


class NoKernel:
    """Returns zeros of the right shapes, whatever way a tile is described in."""

    name = "none"

    def forward(self, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
        q, _k, v = self._qkv(args, 0)
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, *args: Any, **_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in self._qkv(args, 1))

    @staticmethod
    def _qkv(args: tuple[Any, ...], first: int) -> tuple[Tensor, ...]:
        tile = args[0]
        return args[first : first + 3] if isinstance(tile, Tensor) else (tile.q, tile.k, tile.v)


def leave_out_the_device() -> SimpleNamespace:
    """The library with a kernel that computes nothing, and with collectives whose cost does not grow with the ranks:
    the fake backend copies an all-gather's input once per rank, where a real one would queue one kernel."""
    lib = library()
    kernel, token = NoKernel(), torch.zeros(1)
    lib.kernels.get = lambda *_, **__: kernel

    def collective(out: Tensor, x: Tensor, *_sizes: Any, group: Any, async_op: bool = False) -> Any:
        if not async_op:  # small numbers that ranks compare, which the caller reads at once
            out.view(-1, x.numel()).copy_(x.view(1, -1))
        return dist.all_reduce(token, group=group, async_op=async_op)

    lib.comm._all_gather = lib.comm._reduce_scatter = collective
    dist.all_to_all_single = collective  # type: ignore[assignment]
    return lib


def join(ranks: int) -> DeviceMesh:
    """Return the cp mesh of a process that is one of ``ranks`` ranks, in the middle of them."""
    # Private to PyTorch, as there is no public process group without peers; importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def new_documents(length: int) -> Tensor:
    """Return a table of packed documents of random lengths."""
    inner = random.sample(range(1, length), min(DOCUMENTS, length) - 1)
    return torch.tensor([[0, *sorted(inner), length]])


def microseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time_ns()
    result = call()
    return (time.thread_time_ns() - start) / 1e3, result


def cases(args: argparse.Namespace) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, with documents or not, and arguments of the attention call."""
    for mode, how in MODES.items():
        own = "contiguous" if "load_balance" in how else "head_tail"
        for layout in (own,) if "load_balance" in how else (own, "per_document"):
            for packed in (False, True)[layout == "per_document" :]:
                name = f"{mode} | {layout}{f', {DOCUMENTS} documents' if packed else ''}"
                if all(word in name for word in args.only):
                    yield name, packed, {**how, "layout": layout}


def one_call(attend: Callable[..., Tensor], qkv: list[Tensor]) -> tuple[float, float]:
    """Return the microseconds of forward and of backward."""
    forward, out = microseconds(lambda: attend(*qkv))
    gradient = torch.zeros_like(out)
    return forward, microseconds(lambda: torch.autograd.grad(out, qkv, gradient))[0]


def measure(args: argparse.Namespace) -> Times:
    torch.set_num_threads(1)
    random.seed(0)
    lib, found = leave_out_the_device(), {}
    for ranks in args.ranks:
        mesh = join(ranks)
        for name, packed, how in cases(args):
            heads = max(args.heads, ranks) if mode_of(name) == "Ulysses" else args.heads
            qkv = [torch.zeros(1, heads, args.length // ranks, args.dim, requires_grad=True) for _ in range(3)]
            layers: dict[str, list[tuple[float, float]]] = {}
            for _ in range(args.calls):
                documents = new_documents(args.length) if packed else None
                attend = partial(lib.attention, mesh=mesh, is_causal=True, documents=documents, **how)
                for layer in (", first layer", ", second layer") if packed else ("",):
                    layers.setdefault(layer, []).append(one_call(attend, qkv))
            for layer, times in layers.items():
                # The first calls of a process are not typical: caches fill, memory is taken from the system.
                forward, backward = zip(*times[len(times) // 5 :], strict=True)
                typical = min if args.fastest else statistics.median
                found[f"{name}{layer} | {ranks}"] = typical(forward), typical(backward)
        dist.destroy_process_group()
    return found


def mode_of(case: str) -> str:
    return case.split(" | ")[0]


def hops(case: str) -> int:
    """Return the hops of the ring in one direction; 0 where nothing goes round."""
    degree = MODES[mode_of(case)].get("ulysses_degree", 1)
    ring = MODES[mode_of(case)].get("kv_exchange") == "ring"
    return int(case.split(" | ")[-1]) // degree - 1 if ring else 0


def in_turns(args: argparse.Namespace) -> list[Times]:
    """Return the times of the other checkout and of this one, which take turns. A busy machine only ever adds time, so
    the round with the lowest median counts."""
    trees = [Path(args.against).resolve(), Path(__file__).resolve().parents[2]]
    own = [word for name in ("calls", "length", "heads", "dim") for word in (f"--{name}", str(getattr(args, name)))]
    own += ["--fastest"] if args.fastest else []
    own += ["--ranks", *map(str, args.ranks), *(["--only", *args.only] if args.only else [])]
    rounds: list[list[Times]] = [[], []]
    for _ in range(args.rounds):
        for tree, found in zip(trees, rounds, strict=True):
            done = subprocess.run(
                [sys.executable, __file__, "--json", *own],
                env={**os.environ, "PYTHONPATH": str(tree)},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found.append(json.loads(done.stdout))
    return [
        {case: tuple(map(min, zip(*(r[case] for r in found), strict=True))) for case in found[0]} for found in rounds
    ]


def further_hop(times: Times, case: str) -> str:
    """Return the microseconds that one more hop costs, forward and backward: the difference to the case with the fewest
    ranks."""
    name = case.rpartition(" | ")[0]
    fewest = min((c for c in times if c.rpartition(" | ")[0] == name), key=hops)
    more = hops(case) - hops(fewest)
    return ", ".join(f"{(x - y) / more:.0f}" for x, y in zip(times[case], times[fewest], strict=True)) if more else ""


def report(columns: list[Times]) -> None:
    """Return a Markdown table; with two columns of times, before and after."""
    arrow = " before -> after" if len(columns) == 2 else ""
    print(f"| mode | layout, documents | ranks | forward, µs{arrow} | backward, µs{arrow} | a further hop: both |")
    print("|---|---|---:|---:|---:|---:|")
    for case in columns[-1]:
        forward, backward = (" -> ".join(f"{times[case][i]:.0f}" for times in columns) for i in range(2))
        print(f"| {case} | {forward} | {backward} | {further_hop(columns[-1], case)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--calls", type=int, default=15, help="of each case")
    parser.add_argument("--length", type=int, default=1024, help="of the sequence, over all ranks")
    parser.add_argument("--heads", type=int, default=2, help="at least; Ulysses has one per rank")
    parser.add_argument("--dim", type=int, default=1, help="of a head")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains all these words")
    parser.add_argument("--against", help="another checkout, for times before and after")
    parser.add_argument("--rounds", type=int, default=3, help="of each checkout, with --against")
    parser.add_argument("--fastest", action="store_true", help="the fastest calls, not medians: for a busy machine")
    parser.add_argument("--json", action="store_true", help="print the times as JSON, not as a table")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args)))
    else:
        report(in_turns(args) if args.against else [measure(args)])


if __name__ == "__main__":
    main()
