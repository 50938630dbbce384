"""A double of one accelerator: streams in order, hardware queues, events. It says when each kernel could start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hyper_cp.schedule.build import Schedule
from hyper_cp.schedule.moves import HOME, Event, Move


@dataclass
class Kernel:
    """Something on a stream. It starts when what it waits for, and the kernel before it on its stream, have ended."""

    name: str
    stream: str
    seconds: float
    waits: list[Kernel] = field(default_factory=list)
    start: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Device:
    """Kernels in the order in which a host launches them, which takes no time.

    With ``one_queue`` (CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel that cannot start keeps those launched after it waiting,
    on whatever stream they are.
    """

    def __init__(self, one_queue: bool) -> None:
        self.one_queue = one_queue
        self.launched: list[Kernel] = []

    def launch(self, name: str, stream: str, seconds: float, waits: Sequence[Kernel] = ()) -> Kernel:
        kernel = Kernel(name, stream, seconds, list(waits))
        before = [x for x in self.launched if x.stream == stream]
        bounds = [x.end for x in (*kernel.waits, *before[-1:])]
        if self.one_queue and self.launched:
            bounds.append(self.launched[-1].start)
        kernel.start = max(bounds, default=0.0)
        self.launched.append(kernel)
        return kernel

    @property
    def end(self) -> float:
        return max(x.end for x in self.launched)


def run(
    plan: Schedule, backward: bool, one_queue: bool, tile: Callable[[int], float], row: Callable[[bool], float]
) -> Device:
    """Carry out a schedule's events on a device, with peers that are as far as this rank.

    Args:
        tile: the time of a number of visible pairs.
        row: the time of a row on the link, of keys (False) or of gradients (True).
    """
    device, transfers = Device(one_queue), plan.transfers
    steps = iter(plan.backward if backward else plan.forward)
    arriving: dict[tuple[bool, int], Kernel] = {}
    waits: list[Kernel] = []  # what the compute stream was told to wait for

    def rows(move: Move) -> int:
        return max(sum(move.sent), sum(move.received))

    def post(event: Event) -> None:
        moves = [] if event.block is None else [(False, event.block, transfers.moves[event.block])]
        if event.gradient is not None:
            moves.append((True, event.gradient, transfers.returns[event.gradient].transposed))
        ready = [x for x in device.launched if x.stream == "compute"][-1:] + waits
        batches = [moves] if all(move.pattern == "pair" for *_, move in moves) else [[move] for move in moves]
        for batch in batches:  # pairs travel in one
            seconds = sum(rows(move) * row(of_gradient) for of_gradient, _, move in batch)
            kernel = device.launch("transfer", "transfers", seconds, ready)
            for of_gradient, number, _ in batch:
                arriving[of_gradient, number] = kernel

    for event in transfers.backward if backward else transfers.forward:
        if event.kind == "post":
            post(event)
        elif event.kind == "use":
            step = next(steps)
            name = "own keys" if event.block == HOME else f"block {event.block}"
            device.launch(name, "compute", tile(step.area), waits)
            waits = []
        else:
            number = event.block if event.kind == "arrive" else event.gradient
            waits.append(arriving.pop((event.kind == "add", number)))
    device.launch("result", "compute", 0.0, waits)
    return device
