"""The whole engine with simulated ranks: threads of one process, with the real exchange over an :class:`Axis`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis, Pending
from hyper_cp.ops import engine, kernels
from hyper_cp.ops.config import Operands, OpSettings
from hyper_cp.ops.exchange.ulysses import Ulysses
from hyper_cp.schedule.lookup import resolve

from .results import CRASHED, Result, judge
from .tiles import answer

MODES: dict[str, dict[str, Any]] = {
    "ring, head_tail": {"kv_exchange": "ring", "layout": "head_tail"},
    "ring, load_balance": {"kv_exchange": "ring", "load_balance": True},
    "colossal, head_tail": {"kv_exchange": "all_gather", "layout": "head_tail"},
    "colossal, load_balance": {"kv_exchange": "all_gather", "load_balance": True},
    "needed, head_tail": {"kv_exchange": "needed", "layout": "head_tail"},
    "ulysses": {"ulysses": True, "layout": "head_tail"},
}
PATIENCE = 60.0
SCALE = 0.125


class Board:
    """Messages by (sender, receiver, number): the k-th that one posts is the k-th that the other expects, in
    whatever order they wait."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], Queue[list[Tensor]]] = defaultdict(Queue)
        self.lock, self.broken = threading.Lock(), threading.Event()

    def __getitem__(self, key: tuple[int, int, int]) -> Queue[list[Tensor]]:
        with self.lock:
            return self.messages[key]

    def take(self, key: tuple[int, int, int]) -> list[Tensor]:
        """The message, unless its sender has failed."""
        for _ in range(int(PATIENCE / 0.1)):
            try:
                return self[key].get(timeout=0.1)
            except Empty:
                if self.broken.is_set():
                    break
        raise TimeoutError("another rank has failed, or posts other transfers")


class _Arrival:
    """A work whose wait() copies a message into its receive buffers."""

    def __init__(self, board: Board, key: tuple[int, int, int], recvs: Sequence[Tensor]):
        self.board, self.key, self.recvs = board, key, recvs

    def wait(self) -> None:
        for target, source in zip(self.recvs, self.board.take(self.key), strict=True):
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
        return _Arrival(self.board, (source, self.rank, next(self.numbers["from", source])), recvs)

    def send_recv(self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int) -> Pending:
        self._send(to, sends)
        return Pending([self._receive(source, recvs)], list(recvs), list(sends))

    def _exchange(self, sends: Any, recvs: Any, result: Tensor, finish: Callable[[Any], Any] = lambda r: r) -> Pending:
        for rank in range(self.size):
            self._send(rank, [sends[rank]])
        works = [self._receive(rank, [recvs[rank]]) for rank in range(self.size)]
        return Pending(works, result, sends, finish)

    def all_to_all(self, send: Tensor) -> Pending:
        result = torch.empty_like(send)
        return self._exchange(send, result, result)

    def all_to_all_rows(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        result = send.new_empty(sum(received), *send.shape[1:])
        return self._exchange(send.split(list(sent)), result.split(list(received)), result)

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

    def all_to_all_rows(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return Pending([], send.new_empty(sum(received), *send.shape[1:]), send)

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


def settings_of(cp: cp_mesh.CPMesh, mode: dict[str, Any], kernel: str) -> OpSettings:
    """The settings of a causal call."""
    named = {name: mode[name] for name in ("layout", "kv_exchange", "load_balance") if name in mode}
    return OpSettings(cp.key, band=(None, 0), kernel=kernel, **named)


def share(cp: cp_mesh.CPMesh, mode: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """One rank's output and gradients, by the library's ops (its autograd would put the backward of all
    threads on one thread)."""
    heads = Ulysses(cp, mode.get("layout", "contiguous"))
    q, k, v, dout = heads.to_heads(q, k, v, dout)
    settings, scale = settings_of(cp, mode, kernels.choose(q, k, v, True)), q.shape[3] ** -0.5
    out, lse, kernel = engine.attention_op(q, k, v, *settings.arguments(Operands(), scale))
    given = Operands(kernel=kernel, mark=engine.fingerprint(None, cp.key))
    *grads, _ = engine.attention_backward_op(dout, q, k, v, out, lse, *settings.arguments(given, scale))
    return list(heads.to_sequence([out, *grads]))


class Simulation:
    """One mode on n threads: pairs of every rank's output and gradients and what is expected."""

    def __init__(
        self,
        mode: dict[str, Any],
        n: int,
        tensors: list[Tensor],
        want: list[Tensor],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.mode, self.n, self.tensors, self.want, self.around = mode, n, tensors, want, around
        self.board = Board()
        self.meshes = [mesh_of(ThreadAxis(r, n, self.board), bool(mode.get("ulysses"))) for r in range(n)]
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.failures: list[BaseException] = []

    def run(self) -> list[tuple[Tensor, Tensor]]:
        threads = [threading.Thread(target=self._rank, args=(r,)) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return self.pairs

    def _rank(self, rank: int) -> None:
        try:
            x = self.tensors[0]
            mine = resolve(self.mode.get("layout", "contiguous"), self.n, x.shape[2]).positions(rank)
            with self.around():  # autocast holds in its own thread only
                got = share(self.meshes[rank], self.mode, *(t[:, :, mine.to(t.device)] for t in self.tensors))
            self.pairs += [(a, b[:, :, mine]) for a, b in zip(got, self.want, strict=True)]
        except BaseException as failure:
            self.failures.append(failure)
            self.board.broken.set()


def check_engine(device: str, dtype: torch.dtype, worlds: Sequence[int], length: int) -> Iterator[Result]:
    """Every mode and number of simulated ranks; the first number of ranks under autocast too."""
    tensors = [torch.randn(1, length, 8, 64, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)]
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    want = answer(*tensors, visible, SCALE)
    del want[1]  # the log-sum-exp
    autocast = lambda: torch.autocast(torch.device(device).type, torch.bfloat16)  # noqa: E731
    around = [(n, "", nullcontext) for n in worlds] + [(worlds[0], ", autocast", autocast)]
    for n, under, manager in around:
        for name, mode in MODES.items():
            what = f"{name}, {n} ranks{under}, {dtype}"
            try:
                yield judge(what, dtype, Simulation(mode, n, tensors, want, manager).run())
            except Exception as failure:
                yield Result(CRASHED, what, float("inf"), f"{type(failure).__name__}: {str(failure)[:300]}")
