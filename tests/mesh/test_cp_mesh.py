"""Views of a cp mesh: found by identity, checked once, and never of process groups that are gone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import SAVE_LIST, attention
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


class Attends(nn.Module):
    """A layer that passes its mesh to attention."""

    def __init__(self, mesh: DeviceMesh, degree: int | None) -> None:
        super().__init__()
        self.mesh, self.degree, self.qkv = mesh, degree, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = attention(q, k, v, mesh=self.mesh, is_causal=True, ulysses_degree=self.degree)
        return x + out.transpose(1, 2).flatten(2)


@on_ranks
def recomputed_after_a_new_view() -> bool:
    """A first step of checkpoints that refuse operators which their forward did not run."""
    contexts = partial(create_selective_checkpoint_contexts, SAVE_LIST)
    cp_mesh.view(mesh := mesh_of(2))  # as a handler has made it
    layers = [checkpoint_wrapper(Attends(mesh, degree), context_fn=contexts) for degree in (None, 1)]
    model = nn.Sequential(*layers)
    model(torch.ones(1, 4, 8)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def test_a_new_view_leaves_the_others_known(ranks: Any) -> None:
    """Checking a mesh again makes tensors."""
    assert ranks(2, recomputed_after_a_new_view) == [True, True]


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
