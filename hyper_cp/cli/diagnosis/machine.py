"""Versions, devices, backends and environment variables of a rank, and what differs between ranks."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from ..._torch.version import INSTALLED, SUPPORTED, supported, supported_range
from ...mesh.comm import backend_of
from .findings import NOTE, OK, WARNING, WRONG, Finding
from .ranks import Ranks

PACKAGES = (
    *("hyper-cp", "numpy", "triton", "transformers", "accelerate", "torchtitan", "torch_npu"),
    *("flash-linear-attention", "flash-attn"),
)

VARIABLES: dict[str, tuple[str, ...]] = {
    "any": ("OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"),
    "gloo": ("GLOO_SOCKET_IFNAME",),
    "cuda": (
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF"),
        *("TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"),
        *("NCCL_MAX_CTAS", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
        *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"),
    ),
    "npu": (
        *("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_LAUNCH_BLOCKING", "PYTORCH_NPU_ALLOC_CONF", "HCCL_BUFFSIZE"),
        *("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT", "HCCL_SOCKET_IFNAME", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ),
}
"""Variables that change results or times, by device type or backend, beside the library's own (HYPER_CP_...).
docs/measured/devices.md says what to set."""

HARMFUL = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel, so nothing overlaps. Unset it",
    ("ASCEND_LAUNCH_BLOCKING", "1"): "the host waits for every kernel, so nothing overlaps. Unset it",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one host send through its memory. Unset it",
    ("NCCL_IB_DISABLE", "1"): "hosts send over sockets. Unset it",
    ("NCCL_SHM_DISABLE", "1"): "ranks of one host may send over the network. Unset it",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked, which takes time. Unset it for training",
}
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""Several ranks on NCCL should have it."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""With 1, kernels start in the order in which they are launched, so a transfer that was posted first starts first. A
tile then also waits behind the second of two transfers that were posted before it (tests/schedule/test_overlap.py)."""
BLACKWELL = 10
"""The major compute capability from which on Megatron does not ask for one queue."""
_FOR_ONE_QUEUE = "a ring on more than 4 ranks, or an all-gather in one stage, without FSDP2"
_MANY_AT_ONCE = (
    "FSDP2, kv_exchange='needed', head_groups > 1, load_balance, stages of an all-gather, or a ring on up to 4 ranks"
)


def machine(ranks: Ranks) -> list[Finding]:
    """Everything about the software and hardware of the ranks. It is compared where it should be equal."""
    mine = {"versions": versions(), "device": device_of(ranks.device), "variables": variables(ranks.device)}
    everyone = ranks.share({**mine, "host": socket.gethostname()})
    return [*_versions(everyone), *_devices(ranks, everyone), *_backends(ranks), *_variables(ranks, everyone)]


def versions() -> dict[str, str]:
    """Return the installed versions of what the library runs on or with; packages that are missing are left out."""
    found = {"python": platform.python_version(), "torch": INSTALLED}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_of(kind: str) -> dict[str, Any]:
    """Return the name, memory and number of this rank's kind of device."""
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        name = platform.processor() or platform.machine()
        return {"name": name, "memory_gb": memory / 1e9, "count": 1, "threads": torch.get_num_threads()}
    module = torch.get_device_module(kind)
    memory = module.get_device_properties(torch.accelerator.current_device_index()).total_memory
    found = {"name": module.get_device_name(), "memory_gb": memory / 1e9, "count": torch.accelerator.device_count()}
    return found | ({"capability": module.get_device_capability()[0]} if torch.version.cuda and kind == "cuda" else {})


def variables(device: str) -> dict[str, str]:
    """Return the variables that matter here and are set."""
    names = [*VARIABLES["any"], *VARIABLES.get("gloo" if device == "cpu" else device, ())]
    names += sorted(name for name in os.environ if name.startswith("HYPER_CP_"))
    return {name: os.environ[name] for name in names if name in os.environ}


def _differing(everyone: list[dict[str, Any]], section: str) -> Iterator[tuple[str, str]]:
    """Yield names whose values differ between ranks, with the values of the first rank and of the first that
    differs."""
    for name in dict.fromkeys(name for one in everyone for name in one[section]):
        values = [one[section].get(name) for one in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            yield name, f"{values[0]!r} on rank 0, {values[other]!r} on rank {other}"


def _versions(everyone: list[dict[str, Any]]) -> Iterator[Finding]:
    for name, version in everyone[0]["versions"].items():
        if name in SUPPORTED and not supported(version, name):
            yield Finding("versions", name, WARNING, f"{version}, and {supported_range(name)} are supported")
        else:
            yield Finding("versions", name, NOTE, version)
    for name, difference in _differing(everyone, "versions"):
        yield Finding("versions", f"{name} is not the same on all ranks", WRONG, difference)


def _devices(ranks: Ranks, everyone: list[dict[str, Any]]) -> Iterator[Finding]:
    first = everyone[0]["device"]
    threads = f", {first['threads']} threads a rank" if "threads" in first else ""
    yield Finding("devices", ranks.device, NOTE, f"{first['name']}, {first['memory_gb']:.0f} GB{threads}")
    hosts = dict.fromkeys(one["host"] for one in everyone)
    yield Finding("devices", "ranks", NOTE, f"{ranks.size}, {ranks.per_host} to a host, on {', '.join(hosts)}")
    for rank, one in enumerate(everyone):
        if one["device"]["name"] != first["name"]:
            yield Finding("devices", f"rank {rank} has another device", WARNING, one["device"]["name"])
            break
    wrong = [r for r in range(ranks.size) if everyone[r]["host"] != everyone[ranks.host(r) * ranks.per_host]["host"]]
    if wrong:
        yield Finding(
            "devices",
            f"rank {wrong[0]} is on another host than rank {ranks.host(wrong[0]) * ranks.per_host}",
            WARNING,
            f"LOCAL_WORLD_SIZE={ranks.per_host} puts them on one host. Number the ranks host by host",
        )


def _backends(ranks: Ranks) -> Iterator[Finding]:
    for name in ("gloo", "nccl", "mpi", "xccl"):
        if dist.is_backend_available(name):
            yield Finding("backends", name, NOTE, "built into this torch")
    world = dist.group.WORLD
    assert world is not None  # for mypy: there is a default group
    used = backend_of(world)
    wanted = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}.get(ranks.device, "gloo")
    if used == wanted or ranks.size == 1:
        yield Finding("backends", f"transfers of tensors on {ranks.device}", OK, used)
    else:
        yield Finding(
            "backends", f"transfers of tensors on {ranks.device}", WARNING, f"{used}, where {wanted} is faster"
        )


def _queues(value: str | None, capability: int | None) -> Iterator[Finding]:
    """Yield what to do about the number of hardware queues, by the compute capability (None: not a GPU by NVIDIA)."""
    if capability is None:
        return
    if value == "1" and capability >= BLACKWELL:
        why = f"this GPU does not need it, and it keeps attention waiting with {_MANY_AT_ONCE}. Unset it"
        yield Finding("variables", f"{QUEUES} is 1", WARNING, why)
    elif value == "1":
        why = f"right for {_FOR_ONE_QUEUE}. It keeps attention waiting with {_MANY_AT_ONCE}: unset it there"
        yield Finding("variables", f"{QUEUES} is 1", NOTE, why)
    elif capability < BLACKWELL:
        why = f"set it to 1 if benchmarks/device/overlap.py shows that transfers start late, for {_FOR_ONE_QUEUE} only"
        yield Finding("variables", f"{QUEUES} is {value or 'not set'}", NOTE, why)


def _variables(ranks: Ranks, everyone: list[dict[str, Any]]) -> Iterator[Finding]:
    first = everyone[0]["variables"]
    for name, value in first.items():
        found = HARMFUL.get((name, value))
        yield Finding("variables", f"{name}={value}", WARNING if found else NOTE, found or "")
    if ranks.device == "cuda" and ranks.size > 1:
        if first.get(PRIORITY) != "1":
            why = "transfers on your cp mesh queue behind attention, and nothing overlaps. Set it to 1"
            yield Finding("variables", f"{PRIORITY} is {first.get(PRIORITY, 'not set')}", WARNING, why)
        yield from _queues(first.get(QUEUES), everyone[0]["device"].get("capability"))
    if ranks.device == "cpu" and torch.get_num_threads() * min(ranks.per_host, ranks.size) > (os.cpu_count() or 1):
        yield Finding(
            "variables",
            f"{ranks.per_host} ranks with {torch.get_num_threads()} threads each on {os.cpu_count()} cores",
            WARNING,
            "they wait for each other. Set OMP_NUM_THREADS",
        )
    for name, difference in _differing(everyone, "variables"):
        per_rank = name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
        if not per_rank:
            yield Finding("variables", f"{name} is not the same on all ranks", WARNING, difference)
