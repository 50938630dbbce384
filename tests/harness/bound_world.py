"""A default process group that is bound to a device, over gloo: it records who makes groups, and never hangs.

PyTorch's contract where ``init_process_group(device_id=...)`` has bound the world to a device:

* ``new_group`` splits the world's communicator, so every rank of the world must come to it, local synchronization or
  not;
* ``split_group`` needs the ranks of the parent, which must have a communicator (be bound, too), and no others.

Here a rank that does not come within ``PATIENCE`` seconds is an error on those that wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda:0")
PATIENCE = 10.0


class BoundWorld:
    """The calls of this rank: ``(function, ranks that must come)``, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._new_group = dist.new_group

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        world = dist.group.WORLD
        if world.bound_device_id is not None:
            self._meet("new_group", range(dist.get_world_size()))
        else:
            self.calls.append(("new_group", tuple(ranks)))
        return self._made(ranks, **options)

    def split_group(self, parent_pg: Any, split_ranks: list[list[int]], **options: Any) -> Any:
        if dist.group.WORLD.bound_device_id is None or parent_pg.bound_device_id is None:
            raise RuntimeError("no communicator to split")
        ranks = dist.get_process_group_ranks(parent_pg)
        self._meet("split_group", ranks)
        (own,) = ([ranks[i] for i in part] for part in split_ranks if dist.get_rank(parent_pg) in part)
        made = self._made(own, **options)
        made.bound_device_id = DEVICE
        return made

    def _made(self, ranks: Sequence[int], **options: Any) -> Any:
        assert options.pop("pg_options") is None  # gloo has none of NCCL's
        options["use_local_synchronization"] = True
        world = dist.group.WORLD
        device, world.bound_device_id = world.bound_device_id, None
        try:
            return self._new_group(list(ranks), **options)
        finally:
            world.bound_device_id = device

    def _meet(self, function: str, ranks: Sequence[int]) -> None:
        """Wait for all ranks that must make this call; they count the calls that they make together."""
        ranks = tuple(ranks)
        number = sum(call == (function, ranks) for call in self.calls)
        self.calls.append((function, ranks))
        store = dist.group.WORLD.get_group_store()
        keys = [f"bound/{function}/{ranks}/{number}/{rank}" for rank in ranks]
        store.set(keys[ranks.index(dist.get_rank())], "here")
        deadline = time.monotonic() + PATIENCE
        while not store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function} of ranks {ranks}: others do not make this call, which hangs")
            time.sleep(0.005)


@contextmanager
def bound_world(*groups: Any) -> Iterator[BoundWorld]:
    """Bind the default group and ``groups`` to a device for the length of a block."""
    world = BoundWorld()
    groups = dist.group.WORLD, *groups
    for group in groups:
        group.bound_device_id = DEVICE
    try:
        with mock.patch.multiple(dist, new_group=world.new_group, split_group=world.split_group):
            yield world
    finally:
        for group in groups:
            group.bound_device_id = None
