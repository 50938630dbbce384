"""Checks on one device, without a second one: kernels, the whole engine with simulated ranks, times.

    python benchmarks/device_check.py                     # the accelerator that is there, else the CPU
    python benchmarks/device_check.py --device cpu --lengths 1024 --dtype float32 --heads 8 --kv-heads 2 --dim 64

1. Every kernel of the device against attention written out in fp64, on every kind of tile.
2. The engine, forward and backward, with n = 2, 4, 8 ranks as threads of this process: their exchange
   implements the interface of the real ones (``hyper_cp.mesh.comm.Axis``).
3. Device time of the busiest rank's share (nothing is transferred) over 1/n of the time of plain SDPA.

Exits 1 if 1 or 2 fail.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from queue import Queue
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis, Pending
from hyper_cp.ops import engine, kernels
from hyper_cp.ops.config import OpSettings
from hyper_cp.ops.exchange.ulysses import Ulysses
from hyper_cp.schedule.lookup import resolve

Band = tuple[int | None, int | None]
Parts = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
SQUARES: Parts = (((0, 100), (0, 100)), ((100, 101), (100, 101)), ((130, 256), (130, 256)))  # rows and columns missing
OBLONG: Parts = (((0, 64), (10, 138)), ((64, 200), (138, 180)), ((200, 201), (200, 300)))
TILES: list[tuple[int, int, Band, Parts | None]] = [
    (256, 256, (None, None), None),
    (256, 256, (None, 0), None),
    (200, 456, (None, None), None),
    (300, 300, (-100, 0), None),
    (300, 420, (-40, 30), None),
    (256, 256, (None, 0), SQUARES),
    (256, 256, (None, None), SQUARES),
    (201, 300, (None, None), OBLONG),
    (320, 320, (None, 0), tuple(((i, i + n), (i, i + n)) for d in range(0, 320, 10) for i, n in ((d, 1), (d + 1, 9)))),
]
MODES: dict[str, dict[str, Any]] = {
    "ring, head_tail": {"kv_exchange": "ring", "layout": "head_tail"},
    "ring, load_balance": {"kv_exchange": "ring", "load_balance": True},
    "colossal, head_tail": {"kv_exchange": "all_gather", "layout": "head_tail"},
    "colossal, load_balance": {"kv_exchange": "all_gather", "load_balance": True},
    "ulysses": {"ulysses": True, "layout": "head_tail"},
}


def written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~visible, -1e300)
    return (logits.softmax(-1) * visible) @ v.repeat_interleave(groups, 1)  # rows that see nothing: 0


def error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).abs().max() / expected.abs().max()).item()


def bar(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float32: 5e-6}.get(dtype, 3e-2)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor, scale: float) -> list[Tensor]:
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = written_out(*wide, visible, scale)
    return [out.detach(), *torch.autograd.grad(out, wide, dout.double())]


# --------------------------------------------------------------------------- 1. kernels


def visible_of(rows: int, cols: int, band: Band, parts: Parts | None, device: str) -> Tensor:
    """``[rows, cols]``: what a tile leaves visible, written out."""
    if parts is not None:
        visible = torch.zeros(rows, cols, dtype=torch.bool, device=device)
        for (top, bottom), (left, right) in parts:
            visible[top:bottom, left:right] = visible_of(bottom - top, right - left, band, None, device)
        return visible
    distance = torch.arange(cols, device=device)[None] - torch.arange(rows, device=device)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible = visible if band[0] is None else visible & (distance >= band[0])
    return visible if band[1] is None else visible & (distance <= band[1])


def check_kernels(device: str, dtypes: Sequence[torch.dtype]) -> list[tuple[str, float, float]]:
    """``(what, error, bar)`` per kernel, dtype and tile. A kernel that refuses a dtype says so and is left out."""
    found = []
    for name, kernel in kernels.available(torch.device(device).type).items():
        for dtype in dtypes:
            for rows, cols, band, parts in TILES:
                what = f"{name} {dtype} {rows}x{cols} {band}" + (f" packed, {len(parts)} parts" if parts else "")
                q, k, v, dout = (
                    torch.randn(2, n, h, 64, device=device, dtype=dtype).transpose(1, 2)
                    for n, h in ((rows, 8), (cols, 2), (cols, 2), (rows, 8))
                )
                want = gradients(q, k, v, dout, visible_of(rows, cols, band, parts, device), 0.125)
                try:
                    tile = kernels.TileInputs(q, k, v, band, 0.125, parts=parts)
                    out, lse = kernel.forward(tile)
                    got = [out, *kernel.backward(tile, dout, want[0].to(dtype), lse)]
                except RuntimeError as refusal:
                    found.append((f"{what}: {str(refusal)[:90]}", 0.0, 0.0))
                    break
                worst = max(error(a, b) for a, b in zip(got, want, strict=True))
                found.append((what, worst, bar(dtype)))
    return found


# --------------------------------------------------------------------------- 2. simulated ranks


class Board:
    """Messages by (sender, receiver, number): the k-th that one posts is the k-th that the other expects, in
    whatever order they wait."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], Queue[list[Tensor]]] = defaultdict(Queue)
        self.lock = threading.Lock()

    def __getitem__(self, key: tuple[int, int, int]) -> Queue[list[Tensor]]:
        with self.lock:
            return self.messages[key]


class _Arrival:
    """A work whose wait() copies a message into its receive buffers."""

    def __init__(self, mailbox: Queue[list[Tensor]], recvs: Sequence[Tensor]):
        self.mailbox, self.recvs = mailbox, recvs

    def wait(self) -> None:
        for target, source in zip(self.recvs, self.mailbox.get(timeout=60), strict=True):
            target.copy_(source)


class ThreadAxis(Axis):
    """Ranks that are threads: a message is a copy. On an accelerator all threads queue on one stream, so that
    copies are ordered as they are made."""

    def __init__(self, rank: int, size: int, board: Board):
        super().__init__(rank, size, None)
        object.__setattr__(self, "board", board)
        object.__setattr__(self, "numbers", defaultdict(count))

    board: Board
    numbers: dict[tuple[str, int], Any]

    def _send(self, to: int, sends: Sequence[Tensor]) -> None:
        self.board[self.rank, to, next(self.numbers["to", to])].put([t.clone() for t in sends])

    def _receive(self, source: int, recvs: Sequence[Tensor]) -> _Arrival:
        return _Arrival(self.board[source, self.rank, next(self.numbers["from", source])], recvs)

    def send_recv(self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int) -> Pending:
        self._send(to, sends)
        return Pending([self._receive(source, recvs)], list(recvs), list(sends))

    def _exchange(
        self, sends: Any, recvs: Tensor, result: Tensor, finish: Callable[[Any], Any] = lambda r: r
    ) -> Pending:
        for rank in range(self.size):
            self._send(rank, [sends[rank]])
        works = [self._receive(rank, [recvs[rank]]) for rank in range(self.size)]
        return Pending(works, result, sends, finish)

    def all_to_all(self, send: Tensor) -> Pending:
        result = torch.empty_like(send)
        return self._exchange(send, result, result)

    def all_gather(self, send: Tensor, own: bool = True) -> Pending:
        result = send.new_empty(self.size, *send.shape)
        return self._exchange([send] * self.size, result, result.flatten(0, 1))

    def reduce_scatter(self, send: Tensor) -> Pending:
        parts = send.unflatten(0, (self.size, -1))
        received = torch.empty_like(parts)
        return self._exchange(parts, received, received, finish=lambda x: x.sum(0))


class SilentAxis(Axis):
    """Transfers that take no time and bring nothing: for timing one rank's own work."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size, None)

    def send_recv(self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int) -> Pending:
        return Pending([], list(recvs), list(sends))

    def all_to_all(self, send: Tensor) -> Pending:
        return Pending([], torch.empty_like(send), send)

    def all_gather(self, send: Tensor, own: bool = True) -> Pending:
        return Pending([], send.new_empty(self.size * send.shape[0], *send.shape[1:]), send)

    def reduce_scatter(self, send: Tensor) -> Pending:
        return Pending([], send.new_empty(send.shape[0] // self.size, *send.shape[1:]), send)


def mesh_of(line: Axis, by_heads: bool) -> cp_mesh.CPMesh:
    """A cp mesh whose only dimension larger than one is ``line``."""
    alone = Axis.alone()
    ring, heads = (alone, line) if by_heads else (line, alone)
    key = f"{type(line).__name__}/{line.rank}/{ring.size}x{heads.size}"
    return cp_mesh.register(cp_mesh.CPMesh(key, ring, heads, (line,), cp_mesh.BatchState()))


def share(cp: cp_mesh.CPMesh, mode: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """One rank's output and gradients, by the library's ops (its autograd would put the backward of all
    threads on one thread)."""
    layout, exchange = mode.get("layout", "contiguous"), mode.get("kv_exchange", "all_gather")
    heads = Ulysses(cp, layout)
    q, k, v, dout = heads.to_heads(q, k, v, dout)
    kernel = kernels.choose(q, k, v, True)
    settings = OpSettings(layout, exchange, mode.get("load_balance", False), (None, 0), 1, kernel, cp.key).text()
    rest = (None, None, None, q.shape[3] ** -0.5, 0.0, settings)
    out, lse, chosen = engine.attention_op(q, k, v, None, *rest)
    mark = engine.fingerprint(None, cp.key)
    grads = engine.attention_backward_op(dout, q, k, v, out, lse, chosen, mark, *rest)
    return list(heads.to_sequence([out, *grads]))


class Simulation:
    """One mode on n threads: the largest error of any rank's output and gradients."""

    def __init__(self, mode: dict[str, Any], n: int, tensors: list[Tensor], want: list[Tensor]):
        self.mode, self.n, self.tensors, self.want = mode, n, tensors, want
        board = Board()
        self.meshes = [mesh_of(ThreadAxis(r, n, board), bool(mode.get("ulysses"))) for r in range(n)]
        self.errors: list[float] = [0.0] * n
        self.failures: list[BaseException] = []

    def run(self) -> float:
        threads = [threading.Thread(target=self._rank, args=(r,)) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return max(self.errors)

    def _rank(self, rank: int) -> None:
        try:
            x = self.tensors[0]
            mine = resolve(self.mode.get("layout", "contiguous"), self.n, x.shape[2]).positions(rank).to(x.device)
            got = share(self.meshes[rank], self.mode, *(t[:, :, mine] for t in self.tensors))
            self.errors[rank] = max(error(a, b[:, :, mine]) for a, b in zip(got, self.want, strict=True))
        except BaseException as failure:
            self.failures.append(failure)


def check_engine(device: str, dtype: torch.dtype, worlds: Sequence[int], length: int) -> list[tuple[str, float, float]]:
    """``(what, error, bar)`` per mode and number of simulated ranks."""
    found = []
    tensors = [torch.randn(1, length, 8, 64, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)]
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    want = gradients(*tensors, visible, 0.125)
    for n in worlds:
        for name, mode in MODES.items():
            found.append((f"{name}, {n} ranks, {dtype}", Simulation(mode, n, tensors, want).run(), bar(dtype)))
    return found


# --------------------------------------------------------------------------- 3. times


def seconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Median time of a call on the device, after a first one that warms up."""
    synchronise = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    times = []
    for _ in range(rounds + 1):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class _NoKernel:
    """In place of a kernel: its results without its work. What remains is merging and adding."""

    name = "none"

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        q, v = tile.q, tile.v
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(self, tile: kernels.TileInputs, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(tile.q), torch.empty_like(tile.k), torch.empty_like(tile.v)


def measure(device: str, dtype: torch.dtype, args: argparse.Namespace) -> None:
    print(f"\nS, ranks, mode: (time of a rank) / (plain SDPA / n); merging alone; B1 H{args.heads}/{args.kv_heads} "
          f"D{args.dim} {dtype} causal, forward + backward")  # fmt: skip
    for length in args.lengths:
        whole = [
            torch.randn(1, length, h, args.dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for h in (args.heads, args.kv_heads, args.kv_heads)
        ]
        dout = torch.randn_like(whole[0])

        def plain(whole: list[Tensor] = whole, dout: Tensor = dout) -> Any:
            out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, whole, dout)

        base = seconds(plain, device, args.rounds)
        print(f"{length:>7}   1 plain SDPA               {base * 1e3:9.2f} ms", flush=True)
        for n in args.ranks:
            if length % (2 * n):
                continue
            part = [x.detach()[:, :, : length // n].clone() for x in (*whole, dout)]
            for name, mode in MODES.items():
                if mode.get("ulysses") and args.kv_heads % n:
                    continue
                cp = mesh_of(SilentAxis(n - 1, n), bool(mode.get("ulysses")))
                run = lambda cp=cp, mode=mode, part=part: share(cp, mode, *part)  # noqa: E731
                taken = seconds(run, device, args.rounds)
                with kernels.register(_NoKernel(), torch.device(device).type):
                    merging = seconds(run, device, args.rounds)
                print(
                    f"{length:>7} {n:>3} {name:24} {taken * 1e3:9.2f} ms  {taken / (base / n):6.3f}  "
                    f"merging {merging / (base / n):6.3f}",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192 << i for i in range(6)])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()
    device, dtype = args.device, getattr(torch, args.dtype)
    name = device if device == "cpu" else torch.get_device_module(device).get_device_name()
    print(f"torch {torch.__version__} on {name}")
    torch.manual_seed(0)
    results = check_kernels(device, list(dict.fromkeys([dtype, torch.float32])))
    results += check_engine(device, dtype, [2, 4, 8], min([1024, *args.lengths]))
    for what, found, limit in results:
        print(f"{'left out' if limit == 0.0 else 'ok' if found <= limit else 'WRONG':8} {found:9.2e}  {what}")
    measure(device, dtype, args)
    return int(any(found > limit for _, found, limit in results))


if __name__ == "__main__":
    sys.exit(main())
