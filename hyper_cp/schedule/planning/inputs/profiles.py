"""Numbers of known devices, from public datasheets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cluster import Cluster

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
