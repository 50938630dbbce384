"""Devices and links: their numbers, those of known devices, and measurements that replace them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..mesh.arguments import check_amount, check_int

GIGA = 1e9


@dataclass(frozen=True)
class Cluster:
    """One kind of device and the links between devices, by rank.

    Args:
        name: the name that reports use.
        gpus_per_host: the number of ranks on a host, which have the fast link to each other; rank r is on host
            r // gpus_per_host.
        memory_gb: the memory of a device, in GB of 1e9 bytes.
        memory_gb_s: the bandwidth of that memory, in GB/s.
        tflops: the peak of dense bf16 matrix products, in TFLOP/s.
        inside_gb_s, between_gb_s: the bandwidth of a device's link inside its host, and of its share of the links
            between hosts, one way, in GB/s.
        memory_share: the part of the memory that a step may use; fragmentation and libraries take the rest.
        link_share, matmul_share, forward_share, backward_share: the parts of these peaks that transfers, matrix
            products, and attention forward and backward reach. They are assumptions; measure them (``measured=``).
        inside_us, between_us: the time of an empty message inside a host and between hosts, in microseconds.
        launch_us: the host time of a tile's kernels, in microseconds.
        source: the datasheet that the peaks come from.

    Raises:
        ValueError: for a number that is not positive.
    """

    name: str
    gpus_per_host: int
    memory_gb: float
    memory_gb_s: float
    tflops: float
    inside_gb_s: float
    between_gb_s: float
    memory_share: float = 0.9
    link_share: float = 0.8
    matmul_share: float = 0.65
    forward_share: float = 0.65
    backward_share: float = 0.59
    inside_us: float = 10.0
    between_us: float = 20.0
    launch_us: float = 8.0
    source: str = ""

    def __post_init__(self) -> None:
        check_int("gpus_per_host", self.gpus_per_host, "Ranks are put on hosts in order")
        for field in fields(self):
            if field.type == "float":
                check_amount(field.name, getattr(self, field.name), f"It is a property of the cluster {self.name!r}")
        for name in ("memory_share", "link_share", "matmul_share", "forward_share", "backward_share"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is more than 1. It is the part of a peak that is reached. Pass a "
                    "number above 0 and up to 1"
                )

    @property
    def inside(self) -> float:
        """Bytes per second that a rank sends inside its host."""
        return self.inside_gb_s * GIGA * self.link_share

    @property
    def between(self) -> float:
        """Bytes per second that a rank sends to other hosts."""
        return self.between_gb_s * GIGA * self.link_share

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second that elementwise kernels read and write."""
        return self.memory_gb_s * GIGA * self.link_share

    def flops(self, share: str) -> float:
        """FLOP/s that kernels reach; ``share`` names their part of the peak, ``"matmul_share"`` for example."""
        return self.tflops * 1e12 * float(getattr(self, share))


# --------------------------------------------------------------------------- known devices

_HOPPER: dict[str, Any] = {"gpus_per_host": 8, "tflops": 989.0, "inside_gb_s": 450.0, "between_gb_s": 50.0}
_ASCEND: dict[str, Any] = {"memory_gb": 64.0, "memory_gb_s": 1600.0, "forward_share": 0.55, "backward_share": 0.45}

PROFILES: dict[str, Cluster] = {
    "h100": Cluster(
        "h100",
        memory_gb=80.0,
        memory_gb_s=3350.0,
        **_HOPPER,
        source="NVIDIA H100 datasheet (SXM: 1,979 TFLOPS bf16 with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s both "
        "ways); DGX H100 datasheet (8 GPUs, eight 400 Gb/s ConnectX-7)",
    ),
    "h200": Cluster(
        "h200",
        memory_gb=141.0,
        memory_gb_s=4800.0,
        **_HOPPER,
        source="NVIDIA H200 datasheet (SXM: 1,979 TFLOPS bf16 with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s both "
        "ways); DGX H200 datasheet (8 GPUs, eight 400 Gb/s ConnectX-7)",
    ),
    "a100": Cluster(
        "a100",
        gpus_per_host=8,
        memory_gb=80.0,
        memory_gb_s=2039.0,
        tflops=312.0,
        inside_gb_s=300.0,
        between_gb_s=25.0,
        forward_share=0.6,
        backward_share=0.52,
        source="NVIDIA A100 datasheet (SXM 80 GB: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s both ways); DGX A100 "
        "datasheet (8 GPUs, eight 200 Gb/s ConnectX-6)",
    ),
    "b200": Cluster(
        "b200",
        gpus_per_host=8,
        memory_gb=180.0,
        memory_gb_s=8000.0,
        tflops=2250.0,
        inside_gb_s=900.0,
        between_gb_s=50.0,
        source="NVIDIA HGX B200 (8 GPUs: 36 PFLOPS bf16 with sparsity, NVLink 1.8 TB/s both ways each); DGX B200 "
        "datasheet (1,440 GB and 64 TB/s for 8 GPUs, 400 Gb/s ConnectX-7 each)",
    ),
    "910b": Cluster(
        "910b",
        gpus_per_host=8,
        tflops=354.0,
        inside_gb_s=196.0,
        between_gb_s=25.0,
        **_ASCEND,
        source="CANN platform configuration Ascend910B2C (24 cube cores x 1.8 GHz x 2 x 16^3 FLOP); Atlas 800T A2 (8 "
        "NPUs of 64 GB, HCCS 7 x 56 = 392 GB/s both ways, 200 GE RoCE each)",
    ),
    "910c": Cluster(
        "910c",
        gpus_per_host=768,
        tflops=376.0,
        inside_gb_s=196.0,
        between_gb_s=25.0,
        **_ASCEND,
        source="Serving Large Language Models on Huawei CloudMatrix384 (arXiv 2506.12708), per die, which is a rank: "
        "376 TFLOPS bf16, 64 GB, 1.6 TB/s, 196 GB/s one way on the UB plane of the supernode (384 chips, 768 dies), "
        "200 Gb/s RDMA",
    ),
}
"""Datasheet profiles by name. Bandwidths are one way, peaks are dense bf16."""


def cluster_of(cluster: Cluster | str, **changes: float | None) -> Cluster:
    """A cluster by the name of a profile, with some numbers replaced.

    Raises:
        ValueError: for an unknown name, or a number that is not positive.
    """
    if not isinstance(cluster, Cluster):
        if not isinstance(cluster, str) or cluster.lower() not in PROFILES:
            raise ValueError(
                f"cluster={cluster!r} is an unknown profile. The known ones are {', '.join(PROFILES)}. Pass one of "
                "them, or a Cluster with your numbers"
            )
        cluster = PROFILES[cluster.lower()]
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(cluster, **given) if given else cluster  # type: ignore[arg-type]


# --------------------------------------------------------------------------- measurements

FORMAT = "hyper-cp measurements"
VERSION = 1
MEASURED = {
    "gpus_per_host": "gpus_per_host",
    "memory_gb": "memory_gb",
    "memory_gb_s": "memory_gb_s",
    "inside_gb_s": "inside_gb_s",
    "between_gb_s": "between_gb_s",
    "inside_us": "inside_us",
    "between_us": "between_us",
    "launch_us": "launch_us",
    "matmul_tflops": "matmul_share",
    "attention_forward_tflops": "forward_share",
    "attention_backward_tflops": "backward_share",
}
"""Numbers that a file of measurements may have, and the number of a :class:`Cluster` that each decides."""


def with_measurements(cluster: Cluster, measured: Any) -> Cluster:
    """``cluster`` with what was measured in place of the datasheet's numbers.

    Args:
        measured: the path of a JSON file, or its contents as a dict: ``{"format": "hyper-cp measurements", "version":
            1, "device": "a name", "inside_gb_s": 361.0, ...}`` with any of the keys of ``MEASURED``. Bandwidths and
            TFLOP/s are those that were reached, so no share is taken off them. Other keys are ignored.

    Raises:
        ValueError: if this is not such a file, or if a number is not positive.
    """
    content, where = _read(measured)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(
            f"{where} has format={content.get('format')!r} and version={content.get('version')!r}. Measurements begin "
            f'with "format": "{FORMAT}", "version": {VERSION}. Write the file as docs/measured/planner.md describes it'
        )
    found = {name: content[name] for name in MEASURED if content.get(name) is not None}
    for name, value in found.items():
        check = check_int if name == "gpus_per_host" else check_amount
        check(name, value, f"It was measured, says {where}")
    # A bandwidth that was reached is not reduced once more: the share of links becomes 1, so those that were not
    # measured are reduced here.
    numbers: dict[str, Any] = {
        name: getattr(cluster, name) * cluster.link_share
        for name in ("memory_gb_s", "inside_gb_s", "between_gb_s")
        if name not in found
    }
    speeds = {name: value for name, value in found.items() if name.endswith("tflops")}
    peak = max([cluster.tflops, *speeds.values()])
    shares = ("matmul_share", "forward_share", "backward_share")
    numbers |= {share: getattr(cluster, share) * cluster.tflops / peak for share in shares}
    numbers |= {MEASURED[name]: value / peak for name, value in speeds.items()}
    numbers |= {name: value for name, value in found.items() if name not in speeds}
    device = content.get("device", cluster.name)
    return replace(cluster, **numbers, name=f"{device}, measured", tflops=peak, link_share=1.0, source=where)


def _read(measured: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(measured, Mapping):
        return measured, "measured"
    return read_object("measured", measured, "Measurements are", "a JSON file of measurements"), str(measured)


def read_object(argument: str, path: Any, what: str, way_out: str) -> dict[str, Any]:
    """Return the JSON object in a file, else raise ``ValueError``."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{argument}={str(path)!r} cannot be read as JSON: {error}. {what} one JSON object. Pass the path of "
            f"{way_out}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{argument}={str(path)!r} holds a {type(found).__name__}. {what} one JSON object. Pass the path of "
            f"{way_out}"
        )
    return found
