"""Bandwidth and latency of every mesh dimension, and the speed of a device, as ``plan(measured=)`` reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import cp_mesh
from ...mesh.comm import Axis
from ...ops import kernels
from ...planner.cluster import FORMAT, VERSION
from .exchanges import transfer
from .findings import NOTE, Finding
from .machine import device_of
from .ranks import Ranks
from .tiles import FULL, Tile
from .timing import seconds_in_turns

GIGA = 1e9
SMALL_ROUNDS = 20
"""Rounds of what takes microseconds."""
TIMED = "send_recv", "all_gather", "reduce_scatter", "all_to_all"


@dataclass(frozen=True)
class Sizes:
    """The sizes of what is timed: large enough to reach the peak, and over in a second."""

    message: int
    matmul: int
    tile: Tile
    copied: int
    dtype: torch.dtype

    @staticmethod
    def of(device: str, message: int | None) -> Sizes:
        if device == "cpu":
            tile = Tile(512, 512, FULL, batch=1, heads=(4, 4))
            return Sizes(message or 2**24, 768, tile, 2**24, torch.float32)
        tile = Tile(8192, 8192, FULL, batch=1, heads=(16, 16), dims=(128, 128))
        return Sizes(message or 2**28, 8192, tile, 2**28, torch.bfloat16)


def measure(ranks: Ranks, degree: int | None, message: int | None) -> tuple[list[Finding], dict[str, Any]]:
    """Time links and devices. Returns findings, and the contents of a file of measurements."""
    sizes = Sizes.of(ranks.device, message)
    findings: list[Finding] = []
    found: dict[str, Any] = {"format": FORMAT, "version": VERSION} | _device(ranks, sizes)
    for name, axis in _dimensions(ranks, degree):
        between, gb_s, latency_us = _link(ranks, axis, sizes.message)
        bandwidth, latency = ("between_gb_s", "between_us") if between else ("inside_gb_s", "inside_us")
        found[bandwidth] = min(found.get(bandwidth, float("inf")), gb_s["send_recv"])
        found[latency] = max(found.get(latency, 0.0), latency_us)
        what = f"mesh dimension {name}, {axis.size} ranks {'between hosts' if between else 'inside a host'}"
        speeds = ", ".join(f"{way} {value:.3g} GB/s" for way, value in gb_s.items())
        note = f"{speeds}; {latency_us:.0f} us an exchange of a few bytes"
        findings.append(Finding("links", what, NOTE, note))
    speeds_found = ((name, value) for name, value in found.items() if isinstance(value, float))
    return [*findings, *(Finding("speeds", name, NOTE, f"{value:.4g}") for name, value in speeds_found)], found


# --------------------------------------------------------------------------- links


def _dimensions(ranks: Ranks, degree: int | None) -> Iterator[tuple[str, Axis]]:
    """Yield the dimensions of the mesh that have several ranks, ``"ring"``, ``"ulysses"`` or ``"cp"``."""
    if degree is None:  # the ring goes over hosts, if there are several
        degree = ranks.per_host if 1 < ranks.per_host < ranks.size and ranks.size % ranks.per_host == 0 else 1
    view = cp_mesh.view(ranks.mesh(), degree)
    for name, axis in (("ring", view.ring), ("ulysses", view.ulysses)):
        if axis.size > 1:
            yield "cp" if axis.size == ranks.size else name, axis


def _link(ranks: Ranks, axis: Axis, message: int) -> tuple[bool, dict[str, float], float]:
    """Time the transfers of one mesh dimension.

    Returns:
        True if it joins ranks of several hosts; GB/s that the slowest rank sends in each way to exchange a large
        message; and microseconds of an exchange of a few bytes with the neighbours.
    """
    n = axis.size
    rows = {way: max(1, message // 16 // (1 if way == "send_recv" else n)) for way in TIMED}
    ways = {way: transfer(way, axis, ranks.device, rows[way])[0] for way in TIMED}
    small = {"few": transfer("send_recv", axis, ranks.device, 1)[0]}
    mine = seconds_in_turns(ways, ranks.device) | seconds_in_turns(small, ranks.device, SMALL_ROUNDS)
    members = dist.get_process_group_ranks(axis.group)
    everyone = ranks.share([mine, len({ranks.host(rank) for rank in members}) > 1])
    slowest = {way: max(times[way] for times, _ in everyone) for way in mine}
    sent = {way: 16 * (count + 1 if way == "send_recv" else count * (n - 1)) for way, count in rows.items()}
    speeds = {way: nbytes / slowest[way] / GIGA for way, nbytes in sent.items()}
    return any(crosses for _, crosses in everyone), speeds, slowest["few"] * 1e6


# --------------------------------------------------------------------------- devices


def _device(ranks: Ranks, sizes: Sizes) -> dict[str, Any]:
    """Return the speed of the slowest rank's device, while all of them work, with the kernel that plain calls run."""
    device, about, tile = ranks.device, device_of(ranks.device), sizes.tile
    a = torch.ones(sizes.matmul, sizes.matmul, device=device, dtype=sizes.dtype)
    copied = torch.ones(sizes.copied // 4, device=device)
    into = torch.empty_like(copied)
    q, k, v, dout = tile.tensors(device, sizes.dtype, seed=None)
    kernel, given = kernels.get(kernels.choose(q, k, v, False), q.device.type), tile.inputs(q, k, v)
    out, lse = kernel.forward(given)
    times = seconds_in_turns(
        {
            "matmul": lambda: a @ a,
            "copy": lambda: into.copy_(copied),
            "forward": lambda: kernel.forward(given),
            "backward": lambda: kernel.backward(given, dout, out, lse),
        },
        device,
    )
    pairs = 4.0 * tile.rows * tile.cols * tile.heads[0] * tile.dims[0]
    mine = {
        "matmul_tflops": 2.0 * sizes.matmul**3 / times["matmul"] / 1e12,
        "attention_forward_tflops": pairs / times["forward"] / 1e12,
        "attention_backward_tflops": 2.5 * pairs / times["backward"] / 1e12,
        "memory_gb_s": 2.0 * copied.nbytes / times["copy"] / GIGA,
        "memory_gb": about["memory_gb"] / (ranks.per_host if device == "cpu" else 1),
    }
    tiny = tile.inputs(*(x[:, :, :16] for x in (q, k, v)))
    kernel.forward(tiny)
    start = time.perf_counter()  # of the host: launches are queued and not waited for
    for _ in range(SMALL_ROUNDS):
        kernel.forward(tiny)
    launch = (time.perf_counter() - start) / SMALL_ROUNDS * 1e6
    everyone = ranks.share([mine, launch])
    found: dict[str, Any] = {"device": about["name"]}
    if ranks.size > 1 or device != "cpu":  # one process alone knows the accelerators of its host
        found["gpus_per_host"] = ranks.per_host if ranks.size > 1 else about["count"]
    found |= {name: min(one[name] for one, _ in everyone) for name in mine}
    return found | {"launch_us": max(time for _, time in everyone)}
