"""Views of a cp mesh: found by identity, checked once, and never of process groups that are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp.mesh import cp_mesh
from tests.harness.ranks import on_ranks


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("cp",) if len(shape) == 1 else ("ring", "ulysses"))


@on_ranks
def found_by_identity() -> list[bool]:
    mesh, plane, checks = mesh_of(4), mesh_of(2, 2), []
    views = [cp_mesh.view(mesh, degree) for degree in (1, 2, 4)]
    assert views == [cp_mesh.view(mesh, degree) for degree in (1, 2, None)] and len(set(map(id, views))) == 3
    original = cp_mesh.check_mesh
    cp_mesh.check_mesh = lambda mesh: checks.append(mesh)
    try:
        again = [cp_mesh.view(mesh, degree) for degree in (1, 2, 4)]
        cp_mesh.view(plane), cp_mesh.view(plane)
    finally:
        cp_mesh.check_mesh = original
    assert checks == [plane]  # the first call with a mesh checks it
    for wrong in (True, 1.0, "auto", [1]):
        with pytest.raises(TypeError, match="must be None or an int"):
            cp_mesh.view(mesh, wrong)
    return [a is b for a, b in zip(views, again, strict=True)]


def test_views_are_found_by_identity(ranks: Any) -> None:
    assert ranks(4, found_by_identity) == [[True] * 3] * 4


@on_ranks
def groups_gone() -> tuple[bool, bool, bool]:
    """The same mesh object, whose group was destroyed and made again under its name."""
    mesh = mesh_of(2)
    before = cp_mesh.view(mesh, 1)
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    gone = not before.alive()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    after = cp_mesh.view(mesh, 1)
    return gone, after is not before, after.alive()


def test_a_view_of_destroyed_groups_is_not_found(ranks: Any) -> None:
    assert ranks(2, groups_gone) == [(True, True, True)] * 2
