"""The ranks that a doctor examines. They share what they have found through the store, not through what they check."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
        """The values of all ranks, by rank; they travel as JSON. All ranks call this in the same order."""
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._round}/{rank}")) for rank in range(self.size)]

    def mesh(self) -> DeviceMesh:
        """The cp mesh of all ranks."""
        return init_device_mesh(self.device, (self.size,), mesh_dim_names=("cp",))

    def host(self, rank: int) -> int:
        """The number of a rank's host, as the library counts hosts."""
        return rank // self.per_host


def default_device() -> str:
    """The type of this machine's accelerator, or ``"cpu"``."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


@contextmanager
def process_group(device: str, seconds: float, several: bool) -> Iterator[None]:
    """The default process group: the one that exists, that of ``several`` ranks, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    limit = timedelta(seconds=seconds)
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


def host_name() -> str:
    """The name of this host."""
    return socket.gethostname()
