"""Bandwidth and latency of every mesh dimension, and the speed of a device, as ``plan(measured=)`` reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...mesh import cp_mesh
from ...mesh.comm import Axis
from ...ops import kernels
from ...ops.kernels import TileInputs
from ...planner.cluster import FORMAT, VERSION
from .findings import NOTE, Finding
from .machine import device_of
from .ranks import Ranks

GIGA = 1e9
ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """The sizes of what is timed: large enough to reach the peak, and over in a second."""

    message: int
    matmul: int
    length: int
    heads: int
    dim: int
    copied: int
    dtype: torch.dtype

    @staticmethod
    def of(device: str, message: int | None) -> Sizes:
        if device == "cpu":
            return Sizes(message or 2**24, 768, 512, 4, 64, 2**24, torch.float32)
        return Sizes(message or 2**28, 8192, 8192, 16, 128, 2**28, torch.bfloat16)


@dataclass(frozen=True)
class Link:
    """The speed of one mesh dimension, that of its slowest rank.

    Attributes:
        name: ``"ring"``, ``"ulysses"`` or ``"cp"``.
        between: True if it joins ranks of several hosts.
        gb_s: of each way to exchange a large message, by its name: bytes that a rank sends, per second.
        latency_us: time of an exchange of a few bytes with the neighbours.
    """

    name: str
    size: int
    between: bool
    gb_s: dict[str, float]
    latency_us: float


def measure(ranks: Ranks, degree: int | None, message: int | None) -> tuple[list[Finding], dict[str, Any]]:
    """Time links and devices. Returns findings, and the contents of a file of measurements."""
    sizes = Sizes.of(ranks.device, message)
    links = list(_links(ranks, degree, sizes.message))
    found: dict[str, Any] = {"format": FORMAT, "version": VERSION} | _device(ranks, sizes)
    for link in links:
        bandwidth, latency = ("between_gb_s", "between_us") if link.between else ("inside_gb_s", "inside_us")
        found[bandwidth] = min(found.get(bandwidth, float("inf")), link.gb_s["send_recv"])
        found[latency] = max(found.get(latency, 0.0), link.latency_us)
    lines = [Finding("speeds", name, NOTE, f"{value:.4g}") for name, value in found.items() if isinstance(value, float)]
    return [*map(_described, links), *lines], found


def _described(link: Link) -> Finding:
    speeds = ", ".join(f"{name} {value:.3g} GB/s" for name, value in link.gb_s.items())
    where = "between hosts" if link.between else "inside a host"
    what = f"mesh dimension {link.name}, {link.size} ranks {where}"
    return Finding("links", what, NOTE, f"{speeds}; {link.latency_us:.0f} us an exchange of a few bytes")


# --------------------------------------------------------------------------- links


def _links(ranks: Ranks, degree: int | None, message: int) -> Iterator[Link]:
    if ranks.size == 1:
        return
    if degree is None:  # the ring goes over hosts, if there are several
        degree = ranks.per_host if 1 < ranks.per_host < ranks.size and ranks.size % ranks.per_host == 0 else 1
    view = cp_mesh.view(ranks.mesh(), degree)
    for name, axis in (("ring", view.ring), ("ulysses", view.ulysses)):
        if axis.size > 1:
            yield _link(ranks, "cp" if axis.size == ranks.size else name, axis, message)


def _link(ranks: Ranks, name: str, axis: Axis, message: int) -> Link:
    n = axis.size
    rows = max(n, message // 4 // n * n)
    large, few = (torch.ones(count, device=ranks.device) for count in (rows, n))
    square, received = large.view(n, -1), torch.empty_like(large)
    to, source = (axis.rank + 1) % n, (axis.rank - 1) % n
    part = large.narrow(0, 0, rows // n)
    ways: dict[str, tuple[float, Callable[[], Any]]] = {
        "send_recv": (large.nbytes, lambda: axis.send_recv([large], to, [received], source).wait()),
        "all_gather": (part.nbytes * (n - 1), lambda: axis.all_gather(part).wait()),
        "reduce_scatter": (part.nbytes * (n - 1), lambda: axis.reduce_scatter(large).wait()),
        "all_to_all": (part.nbytes * (n - 1), lambda: axis.all_to_all(square).wait()),
    }
    empty = torch.empty_like(few)
    mine: dict[str, float] = {way: seconds(run, ranks.device) for way, (_, run) in ways.items()}
    mine["few"] = seconds(lambda: axis.send_recv([few], to, [empty], source).wait(), ranks.device, 4 * ROUNDS)
    members = dist.get_process_group_ranks(axis.group)
    crosses = len({ranks.host(rank) for rank in members}) > 1
    everyone = ranks.share(mine | {"crosses": float(crosses)})
    slowest = {key: max(one[key] for one in everyone) for key in mine}
    speeds = {way: nbytes / slowest[way] / GIGA for way, (nbytes, _) in ways.items()}
    return Link(name, n, any(one["crosses"] for one in everyone), speeds, slowest["few"] * 1e6)


def seconds(run: Callable[[], Any], device: str, rounds: int = ROUNDS) -> float:
    """The median time of a call, with the work that it queues on the device."""
    run()
    times = []
    for _ in range(rounds):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


# --------------------------------------------------------------------------- devices


def _device(ranks: Ranks, sizes: Sizes) -> dict[str, Any]:
    """The speed of the slowest rank's device, while all of them work."""
    device, about = ranks.device, device_of(ranks.device)
    a = torch.ones(sizes.matmul, sizes.matmul, device=device, dtype=sizes.dtype)
    copied = torch.ones(sizes.copied // 4, device=device)
    out = torch.empty_like(copied)
    q, k, v = (
        torch.randn(1, sizes.length, sizes.heads, sizes.dim, device=device).to(sizes.dtype).transpose(1, 2)
        for _ in range(3)
    )
    pairs = 4.0 * sizes.length**2 * sizes.heads * sizes.dim
    forward, backward, launch = _attention(q, k, v, device)
    mine = {
        "matmul_tflops": 2.0 * sizes.matmul**3 / seconds(lambda: a @ a, device) / 1e12,
        "attention_forward_tflops": pairs / forward / 1e12,
        "attention_backward_tflops": 2.5 * pairs / backward / 1e12,
        "memory_gb_s": 2.0 * copied.nbytes / seconds(lambda: out.copy_(copied), device) / GIGA,
        "memory_gb": about["memory_gb"] / (ranks.per_host if device == "cpu" else 1),
    }
    everyone = ranks.share(mine | {"launch_us": launch * 1e6})
    found: dict[str, Any] = {"device": about["name"]}
    if ranks.size > 1 or device != "cpu":  # one process alone knows the accelerators of its host
        found["gpus_per_host"] = ranks.per_host if ranks.size > 1 else about["count"]
    found |= {name: min(one[name] for one in everyone) for name in mine}
    return found | {"launch_us": max(one["launch_us"] for one in everyone)}


def _attention(q: Tensor, k: Tensor, v: Tensor, device: str) -> tuple[float, float, float]:
    """Seconds of the kernel that plain calls run, forward and backward, and of queueing a tiny tile."""
    kernel = kernels.get(kernels.choose(q, k, v, False), q, k, v)
    tile = TileInputs(q, k, v, (None, None), q.shape[3] ** -0.5)
    out, lse = kernel.forward(tile)
    tiny = TileInputs(q[:, :, :16], k[:, :, :16], v[:, :, :16], (None, None), 1.0)
    kernel.forward(tiny)
    start = time.perf_counter()
    for _ in range(4 * ROUNDS):
        kernel.forward(tiny)
    launch = (time.perf_counter() - start) / (4 * ROUNDS)
    return (
        seconds(lambda: kernel.forward(tile), device),
        seconds(lambda: kernel.backward(tile, q, out, lse), device),
        launch,
    )
