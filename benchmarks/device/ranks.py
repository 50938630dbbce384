"""The whole engine with simulated ranks: threads of one process, with the real exchange over an :class:`Axis`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from hyper_cp.cli.diagnosis.exchanges import positions, whole
from hyper_cp.cli.diagnosis.findings import NAMES, Finding, Results, check
from hyper_cp.cli.diagnosis.tiles import CAUSAL, Tile
from hyper_cp.cli.modes import Mode, named_modes
from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis, Message, Pending
from hyper_cp.ops import engine, kernels
from hyper_cp.ops.config import Operands, OpSettings
from hyper_cp.ops.exchange.ulysses import Ulysses

MODES = named_modes(
    "ring, head_tail",
    "ring, load_balance",
    "all-gather, head_tail",
    "all-gather, load_balance",
    "needed, head_tail",
    "Ulysses, head_tail",
)
PATIENCE = 60.0


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
        """Return the message, unless its sender has failed."""
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

    def send_recv(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        for message in sends:
            self._send(message.peer, [message.tensor])
        works = [self._receive(message.peer, [message.tensor]) for message in recvs]
        return Pending(works, [message.tensor for message in recvs], sends)

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
    """Transfers that take no time and bring random numbers: for timing one rank's own work.

    A receive buffer is filled when its memory is seen for the first time, which is in the warm-up: the allocator hands
    out the same memory again, and attention of numbers that mean something takes another power than that of zeros.
    """

    filled: set[int]

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size, None)
        object.__setattr__(self, "filled", set())

    def _arrived(self, sent: Any, *received: Tensor) -> Pending:
        for x in received:
            if x.data_ptr() not in self.filled:
                self.filled.add(x.data_ptr())
                x.normal_() if x.is_floating_point() else x.zero_()
        return Pending([], received[0], sent)

    def send_recv(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        into = [message.tensor for message in recvs]
        return self._arrived(sends, *into).then(lambda _: into)

    def all_to_all(self, send: Tensor) -> Pending:
        return self._arrived(send, torch.empty_like(send))

    def all_to_all_rows(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return self._arrived(send, send.new_empty(sum(received), *send.shape[1:]))

    def all_gather(self, send: Tensor, own: bool = True) -> Pending:
        return self._arrived(send, send.new_empty(self.size * send.shape[0], *send.shape[1:]))

    def reduce_scatter(self, send: Tensor) -> Pending:
        return self._arrived(send, send.new_empty(send.shape[0] // self.size, *send.shape[1:]))


def mesh_of(line: Axis, by_heads: bool) -> cp_mesh.CPMesh:
    """Return a cp mesh whose only dimension larger than one is ``line``."""
    alone = Axis.alone()
    ring, heads = (alone, line) if by_heads else (line, alone)
    key = f"{type(line).__name__}/{line.rank}/{ring.size}x{heads.size}"
    return cp_mesh.register(cp_mesh.CPMesh(key, ring, heads, (line,), cp_mesh.BatchState()))


def settings_of(cp: cp_mesh.CPMesh, mode: Mode, kernel: str) -> OpSettings:
    """Return the settings of a causal call."""
    named = {name: mode[name] for name in ("layout", "kv_exchange", "load_balance") if name in mode}
    return OpSettings(cp.key, band=(None, 0), kernel=kernel, **named)


def share(cp: cp_mesh.CPMesh, mode: Mode, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return one rank's output and gradients, by the library's ops (its autograd would put the backward of all
    threads on one thread)."""
    heads = Ulysses(cp, mode.get("layout", "contiguous"))
    q, k, v, dout = heads.to_heads(q, k, v, dout)
    settings, scale = settings_of(cp, mode, kernels.choose(q, k, v, True)), q.shape[3] ** -0.5
    out, lse, kernel, _ = engine.attention_op(q, k, v, *settings.arguments(Operands(), scale))
    given = Operands(kernel=kernel, mark=engine.fingerprint(None, cp.key))
    *grads, _ = engine.attention_backward_op(dout, q, k, v, out, lse, *settings.arguments(given, scale))
    return list(heads.to_sequence([out, *grads]))


class Simulation:
    """One mode on n threads, each of which computes its share of a whole sequence.

    Args:
        around: a context for each thread: autocast, for example, holds in its own thread only.
    """

    def __init__(
        self,
        mode: Mode,
        n: int,
        tile: Tile,
        dtype: torch.dtype,
        device: str,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.mode, self.n, self.tile, self.device, self.around = mode, n, tile, device, around
        self.tensors, self.want = whole(tile, dtype)
        self.board = Board()
        self.meshes = [mesh_of(ThreadAxis(r, n, self.board), mode["ulysses_degree"] is None) for r in range(n)]
        self.results: list[tuple[str, Tensor, Tensor]] = []
        self.failures: list[BaseException] = []

    def run(self) -> Results:
        """Run all threads; returns every rank's output and gradients, and what is expected."""
        threads = [threading.Thread(target=self._rank, args=(r,)) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return self.results

    def _rank(self, rank: int) -> None:
        try:
            at = positions(rank, self.n, self.tile, self.mode.get("layout", "contiguous"))
            with self.around():
                found = share(self.meshes[rank], self.mode, *(x[:, :, at].to(self.device) for x in self.tensors))
            want = (x[:, :, at] for x in self.want)
            self.results += zip((NAMES[0], *NAMES[2:]), found, want, strict=True)
        except BaseException as failure:
            self.failures.append(failure)
            self.board.broken.set()


def check_engine(device: str, dtype: torch.dtype, worlds: Sequence[int], length: int) -> Iterator[Finding]:
    """Check every mode and number of simulated ranks; the first number of ranks under autocast too."""
    tile = Tile(length, length, CAUSAL, batch=1, heads=(8, 8))
    autocast = partial(torch.autocast, torch.device(device).type, torch.bfloat16)
    around: list[tuple[int, str, Any]] = [(n, "", nullcontext) for n in worlds]
    for n, under, manager in [*around, (worlds[0], ", autocast", autocast)]:
        for name, mode in MODES.items():
            simulation = Simulation(mode, n, tile, dtype, device, manager)
            yield check("engine", f"{name}, {n} ranks{under}, {dtype}", dtype, simulation.run)
