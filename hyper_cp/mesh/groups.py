"""Process groups that the library makes for itself, by their members only.

With ``init_process_group(device_id=...)`` PyTorch splits the communicator of a new group off that of the world: every
rank of the world must then make the call, whatever ``use_local_synchronization`` says. Ranks without attention, such as
other pipeline stages, would never make it. So groups are split off a group of the same ranks, or made without a parent.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from .comm import Axis, backend_of, backends_of

MAX_CTAS = 16
"""The most thread blocks of an NCCL kernel on these groups (of 132 multiprocessors on an H100), so that attention
keeps the rest; ``HYPER_CP_MAX_CTAS`` overrides it, and 0 leaves the number to NCCL. Not measured on a GPU yet."""

NO_STORE = ("fake", "mpi")
"""Backends whose groups have no store with the other ranks behind it."""

Parts = tuple[tuple[int, ...], ...]
"""Disjoint sets of global ranks, ascending."""


def parts_of(rows: Sequence[Sequence[int]]) -> Parts:
    """The partition of these rows, the same for every order of them."""
    return tuple(sorted(map(tuple, rows)))


def make_group(
    parts: Parts, parent: dist.ProcessGroup | None, description: str, cpu: bool = False
) -> dist.ProcessGroup:
    """Make a process group for each of ``parts`` and return the one with this rank.

    All ranks of ``parts`` make this call, in the same order, and no other rank does.

    Args:
        parts: they cover ``parent``.
        parent: a group of the ranks of all ``parts``, if there is one.
        description: the name of the group in NCCL's logs and flight recorder.
        cpu: also carry tensors of the CPU, if the default group does.
    """
    (own,) = (part for part in parts if dist.get_rank() in part)
    described: dict[str, Any] = {"group_desc": f"hyper_cp {description}", "timeout": timeout()}
    if parent is not None and can_split(parent, cpu):
        place = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(parent))}
        split = [[place[rank] for rank in part] for part in parts]
        # A split of several backends hands NCCL's options to all of them: gloo warns, and drops the timeout.
        if _several(parent):
            described["backend"] = _backends(parent)
        made = dist.split_group(parent, split, pg_options=options(parent), **described)
        assert made is not None  # for mypy: this rank is in a part
        return made
    with _without_parent() as world:
        made = dist.new_group(
            list(own),
            backend=_backends(world) if _several(world) and not cpu else None,
            use_local_synchronization=True,
            pg_options=options(world),
            **described,
        )
    return made


def timeout() -> timedelta | None:
    """The timeout of ``init_process_group``, which gives it to its store too; PyTorch gives new groups the default of
    their backend (half an hour on gloo), however soon the user wants an error. None: there is no store."""
    world = dist.group.WORLD
    if world is None or dist.get_backend(world) in NO_STORE:
        return None
    found: timedelta = world.get_group_store().timeout  # type: ignore[attr-defined]
    return found


def can_split(group: dist.ProcessGroup, cpu: bool = False) -> bool:
    """True if the group has a communicator already, of a backend that can split it. (PyTorch splits no other: its
    ranks could not know whether all of them have one.) One of several backends must be split without the others, for
    which older versions of PyTorch have no argument."""
    device = group.bound_device_id
    if device is None or (_several(group) and (cpu or "backend" not in inspect.signature(dist.split_group).parameters)):
        return False
    # Private: only the backend says whether it can split, and no public function returns it.
    return bool(group._get_backend(device).supports_splitting)


def _several(group: dist.ProcessGroup) -> bool:
    """True if the group has a backend for the CPU and another one for the accelerator."""
    return len(set(backends_of(group).values())) > 1


def _backends(group: dist.ProcessGroup) -> str:
    """The backends of the accelerators, as PyTorch writes them: ``"cuda:nccl"``."""
    return ",".join(f"{device}:{backend}" for device, backend in backends_of(group).items() if device != "cpu")


def groups_made() -> int:
    """The number that PyTorch makes the name of the next group from. Ranks with different numbers, because some are in
    more groups than others, give it different names and never meet."""
    return len(dist.distributed_c10d._world.pg_names)  # private: no public function returns it


@contextmanager
def _without_parent() -> Iterator[dist.ProcessGroup]:
    """While the world is bound to no device, PyTorch makes a group out of its members alone."""
    world = dist.group.WORLD
    assert world is not None  # for mypy: a mesh exists, so there is a default group
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield world
    finally:
        world.bound_device_id = device


def options(like: dist.ProcessGroup) -> Any:
    """Options of a new group with the backend of ``like``; None for the backend's own.

    A transfer of NCCL is a kernel. At normal priority it queues behind an attention kernel that fills the GPU, and
    nothing overlaps; with as many thread blocks as NCCL likes it takes multiprocessors from attention.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)  # builds without NCCL have no such class
    if nccl is None or backend_of(like) != "nccl":
        return None
    made = nccl.Options(is_high_priority_stream=True)
    given = os.environ.get("HYPER_CP_MAX_CTAS", str(MAX_CTAS))
    if not given.isdecimal():
        raise ValueError(
            f"HYPER_CP_MAX_CTAS={given!r} is not a whole number. It limits the thread blocks of NCCL's transfers. Set "
            f"a number such as {MAX_CTAS}, or 0 for NCCL's own choice, or unset it"
        )
    made._timeout = timeout() or made._timeout  # private: another one than that of new_group is a warning
    limit = int(given)
    if limit and hasattr(made, "config"):
        made.config.max_ctas = limit
    return made


def check_launch_order(*axes: Axis) -> None:
    """Warn once in a process if transfers on several NCCL groups may be in flight at once without an order.

    Their kernels wait for those of other ranks. If one GPU starts with one group and another GPU with the other group,
    and there is no room for both, each waits for the other.
    """
    if any(backend_of(axis.group) == "nccl" for axis in axes if axis.size > 1):
        _warn_of_launch_order(os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0"))


@cache
def _warn_of_launch_order(value: str) -> None:
    if value in ("", "0"):
        warnings.warn(
            "head_groups > 1 in a hybrid, and a double ring, keep two NCCL groups in flight, with "
            f"NCCL_LAUNCH_ORDER_IMPLICIT={value!r}. GPUs may then start their transfers in different orders and wait "
            "for each other for good. Set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or newer) before the first process "
            "group is made, or use head_groups=1 and kv_exchange='ring'",
            RuntimeWarning,
            stacklevel=2,
        )
