"""A mock of one accelerator: streams in order, hardware queues, events. It says when each kernel could start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.device.ranks import SilentAxis
from benchmarks.no_kernel import NoKernel
from hyper_cp.cli.modes import Mode
from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis, Message, Pending
from hyper_cp.ops import attention, kernels
from hyper_cp.ops.kernels import TileInputs


@dataclass
class Launched:
    """Something on a stream. It starts when what it waits for, and the kernel before it on its stream, have ended."""

    name: str
    seconds: float
    start: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass
class Device:
    """Kernels in the order in which a host launches them, which takes no time.

    With ``one_queue`` (CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel that cannot start keeps those launched after it waiting,
    on whatever stream they are. Copies and merges take no time.

    Attributes:
        pair: the seconds of a pair of a query and a key of one head.
        byte: the seconds of a byte on the link.
        inside: those of a byte inside a host, on a link of its own, where ranks have several hosts.
    """

    one_queue: bool = False
    pair: float = 1.0
    byte: float = 1.0
    inside: float = 0.0
    launched: list[Launched] = field(default_factory=list)
    waits: list[Launched] = field(default_factory=list)
    """The kernels that the compute stream waits for."""

    def launch(self, name: str, seconds: float, waits: Sequence[Launched]) -> Launched:
        before = self.of(name)[-1:]
        start = max((x.end for x in (*waits, *before)), default=0.0)
        if self.one_queue and self.launched:
            start = max(start, self.launched[-1].start)
        self.launched.append(Launched(name, seconds, start))
        return self.launched[-1]

    def compute(self, tile: TileInputs) -> None:
        self.launch("tile", self.pair * visible_pairs(tile) * tile.q.shape[0] * tile.q.shape[1], self.waits)

    def transfer(self, sent: int, received: int, inside: bool = False) -> Launched:
        """A transfer of some bytes, after what is queued on the compute stream."""
        name, byte = ("transfer inside", self.inside) if inside else ("transfer", self.byte)
        return self.launch(name, byte * max(sent, received), [*self.of("tile")[-1:], *self.waits])

    def of(self, name: str) -> list[Launched]:
        """The kernels on a stream, which are those of one name."""
        return [x for x in self.launched if x.name == name]

    @property
    def end(self) -> float:
        return max(x.end for x in self.launched)


def visible_pairs(tile: TileInputs) -> int:
    """The visible pairs of queries and keys of a tile without documents."""
    rows, cols = np.arange(tile.q.shape[2]), tile.k.shape[2]
    lower, upper = tile.band
    first = 0 if lower is None else np.clip(rows + lower, 0, cols)
    last = cols if upper is None else np.clip(rows + upper + 1, 0, cols)
    return int((np.maximum(last - first, 0) + 0 * rows).sum())


class OnStream(SilentAxis):
    """An axis whose transfers run on a stream of the device. Their ``wait()`` lets the compute stream wait."""

    device: Device
    stays = False
    """True while a transfer inside the host is posted."""

    def send_recv(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        object.__setattr__(self, "stays", self.per_host > 0 and not self._leaves_host([*sends, *recvs]))
        pending = super().send_recv(sends, recvs)
        object.__setattr__(self, "stays", False)
        return pending

    def _arrived(self, sent: Any, *received: Tensor) -> Pending:
        super()._arrived(sent, *received)
        outgoing = [sent] if isinstance(sent, Tensor) else [message.tensor for message in sent]
        kernel = self.device.transfer(*(sum(x.nbytes for x in tensors) for tensors in (outgoing, received)), self.stays)
        return Pending([_Work(self.device, kernel)], received[0], sent)


@dataclass
class _Work:
    device: Device
    kernel: Launched

    def wait(self) -> None:
        self.device.waits.append(self.kernel)


class OnDevice(NoKernel):
    """A kernel of attention that runs on the compute stream of a device."""

    name = "on a device"

    def __init__(self, device: Device) -> None:
        self.device = device

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        self.device.compute(tile)
        return super().forward(tile)

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.device.compute(tile)
        return super().backward(tile, *of_rows)


def run(mode: Mode, ranks: int, rows: int, backward: bool, device: Device, per_host: int = 0) -> Device:
    """Carry out a causal call of ``attention``, forward or backward, with peers that are as far as the last rank, with
    ``rows`` rows each."""
    axis, degree = OnStream(ranks - 1, ranks), mode.get("ulysses_degree", 1) or ranks
    axes = (axis, Axis.alone()) if degree == 1 else (Axis.alone(), axis)
    cp = cp_mesh.register(cp_mesh.CPMesh("on streams", *axes, (axis,), cp_mesh.BatchState()))
    if per_host:
        cp = cp_mesh.over_hosts(cp, per_host)
        axis = cp.ring
    settings = {"head_groups": 1} | {name: value for name, value in mode.items() if name != "ulysses_degree"}
    q, k, v, dout = (torch.zeros(1, 32, rows, 1, dtype=torch.bfloat16) for _ in range(4))
    # The other half of the call runs on a device of its own.
    forward, after = (Device(), device) if backward else (device, Device())
    with kernels.register(OnDevice(forward), "cpu"):
        object.__setattr__(axis, "device", forward)
        out = attention(*(x.requires_grad_() for x in (q, k, v)), mesh=cp, is_causal=True, **settings)
    with kernels.register(OnDevice(after), "cpu"):
        object.__setattr__(axis, "device", after)
        out.backward(dout)
    return device


def run_balanced(mode: Mode, ranks: int, rows: int, backward: bool, one_queue: bool, per_host: int = 0) -> Device:
    """The device after a call in which all transfers together take a second, and all tiles too. With hosts those
    between them do, and those inside take no time."""
    first = run(mode, ranks, rows, backward, Device(), per_host)
    tiles, transfers = (sum(x.seconds for x in first.of(name)) for name in ("tile", "transfer"))
    return run(mode, ranks, rows, backward, Device(one_queue, 1 / tiles, 1 / transfers), per_host)
