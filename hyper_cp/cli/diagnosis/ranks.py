"""The ranks that are examined. They share what they have found through the store, not through what they check."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .findings import WRONG, Finding


class Ranks:
    """All ranks of the default process group, on devices of one type."""

    def __init__(self, device: str) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.per_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or self.size
        world = dist.group.WORLD
        assert world is not None  # for mypy: there is a default group
        store = world.get_group_store()
        # The store may outlive an examination: each one has entries of its own, which every rank numbers alike.
        number = store.add(f"hyper_cp/doctor/{self.rank}", 1)
        self._store, self._round = dist.PrefixStore(f"hyper_cp/doctor/{number}", store), 0  # type: ignore[attr-defined]

    def share(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; they travel as JSON. All ranks call this in the same order."""
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._round}/{rank}")) for rank in range(self.size)]

    def worst(self, finding: Finding) -> Finding:
        """Return what all ranks have found together: this rank's finding, or WRONG if it failed on any rank."""
        everyone = self.share([finding.failed, finding.note])
        wrong = [rank for rank, (failed, _) in enumerate(everyone) if failed]
        if not wrong:
            return finding
        where = f"on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        return replace(finding, status=WRONG, note=f"{where}: {everyone[wrong[0]][1]}")

    def mesh(self) -> DeviceMesh:
        """Return the cp mesh of all ranks."""
        return init_device_mesh(self.device, (self.size,), mesh_dim_names=("cp",))

    def host(self, rank: int) -> int:
        """Return the number of a rank's host, as the library counts hosts."""
        return rank // self.per_host


def default_device() -> str:
    """Return the type of this machine's accelerator, or ``"cpu"``."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def one_of_several_ranks() -> bool:
    """True if torchrun, or something that sets the same variables, has started this process.

    Raises:
        ValueError: if some of the variables are missing by which ranks find each other.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if {"RANK", "WORLD_SIZE"} & set(missing):
        return False
    if missing and not dist.is_initialized():
        raise ValueError(
            f"RANK={os.environ['RANK']} is set, and {' and '.join(missing)} is not. Ranks find each other by it. Start "
            "them with torchrun, or set it to the host and a free port of rank 0"
        )
    return True


@contextmanager
def process_group(device: str, seconds: float | None = None, several: bool = True) -> Iterator[None]:
    """Open the default process group: the one that exists, that of ``several`` ranks, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    limit = None if seconds is None else timedelta(seconds=seconds)
    backend = "gloo" if device == "cpu" else None
    if several:
        dist.init_process_group(backend, timeout=limit)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
