"""Process groups that the library makes: only their ranks take part, with NCCL's options for overlap."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, context_parallel_mesh, split_cp_mesh
from hyper_cp.mesh import cp_mesh, groups
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import attention
from tests.harness.bound_world import bound_world
from tests.harness.ranks import on_ranks

CP = (0, 1, 2, 3)
Calls = list[tuple[str, tuple[int, ...]]]


def carries(group: Any) -> bool:
    """True if data goes round the group, and to nobody else."""
    total = torch.tensor([2 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    return total.item() == sum(2**rank for rank in dist.get_process_group_ranks(group))


def hybrid(mesh: DeviceMesh) -> None:
    cp = cp_mesh.view(mesh, 2)
    assert carries(cp.ring.group) and carries(cp.ulysses.group)
    q = torch.randn(1, 2, 4, 8)
    assert attention(q, q, q, mesh=mesh, ulysses_degree=2, kv_exchange="ring").shape == q.shape


def automatic(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Identity())
    parallelize_module(model, mesh, {"0": ContextParallel(ulysses_degree="auto", kv_exchange="ring")})


def another_mesh(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Identity())
    parallelize_module(
        model, split_cp_mesh(mesh, [1]).cp(1), {"0": ContextParallel(ulysses_degree=1, kv_exchange="ring")}
    )
    with context_parallel_mesh(model, mesh, ulysses_degree=2):
        pass


def family(mesh: DeviceMesh) -> None:
    made = split_cp_mesh(mesh)
    for degree in made.degrees:
        assert carries(made.mesh(degree).get_group("dp")) and carries(made.mesh(degree).get_group("cp"))
    cp_mesh.view(made.cp(4), 2)


@on_ranks
def calls_of(make: Any, bound: bool) -> Calls:
    """The calls of this rank, where rank 4 is a pipeline stage without attention."""
    mesh, calls = DeviceMesh("cpu", list(CP), mesh_dim_names=("cp",)), []
    if dist.get_rank() in CP:
        with bound_world(*([mesh.get_group()] if bound else [])) as world:
            make(mesh)
        calls = world.calls
    dist.barrier()  # gloo: a rank that has ended closes connections that others are still making
    return calls


@pytest.mark.parametrize("make", [hybrid, automatic, another_mesh, family])
def test_only_the_ranks_of_the_cp_mesh_make_groups(ranks: Any, make: Any) -> None:
    calls = ranks(5, calls_of, make, True)
    assert calls[4] == [] and all(mine == calls[0] for mine in calls[:4])
    assert calls[0] and set(calls[0]) == {("split_group", CP)}


def test_a_group_without_a_communicator_is_not_split(ranks: Any) -> None:
    calls = ranks(5, calls_of, hybrid, False)
    assert [calls[rank] for rank in CP] == [
        [("new_group", (rank // 2 * 2, rank // 2 * 2 + 1)), ("new_group", (rank % 2, rank % 2 + 2))] for rank in CP
    ]


@on_ranks
def slice_of_a_larger_mesh() -> Calls:
    """Lane 0 of tensor parallelism makes a family, lane 1 none."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    mesh = whole["dp", "cp"]
    with bound_world(*mesh.get_all_groups()) as world:
        if whole["tp"].get_local_rank() == 0:
            family(mesh)
    dist.barrier()
    return world.calls


def test_a_family_on_a_slice_has_no_group_to_split(ranks: Any) -> None:
    calls = ranks(8, slice_of_a_larger_mesh)
    for rank, made in enumerate(calls):
        assert all(function == "new_group" and rank in members for function, members in made)
        assert bool(made) == (rank % 2 == 0)


@on_ranks
def another_group_on_some_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    dist.new_group([0])  # all ranks make the call; rank 0 alone has a group more
    cp_mesh.view(mesh, 2)


def test_ranks_with_different_numbers_of_groups_are_refused(ranks: Any) -> None:
    """PyTorch would name the same group differently on rank 0 and the others, and wait for good."""
    ranks.raises(
        4,
        ValueError,
        r"number of process groups: rank 0: 2; rank 1: 1.*Make the same number of groups",
        another_group_on_some_ranks,
    )


# --------------------------------------------------------------------------- NCCL's options, without NCCL


class Options:
    """The part of ``ProcessGroupNCCL.Options`` that is set."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=32)
        self._timeout = timedelta(minutes=10)


def nccl_options(monkeypatch: Any, backend: str = "cpu:gloo,cuda:nccl") -> Any:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    return groups.options(mock.sentinel.group)


def test_groups_have_high_priority_and_few_thread_blocks(monkeypatch: Any) -> None:
    made = nccl_options(monkeypatch)
    assert (made.is_high_priority_stream, made.config.max_ctas) == (True, groups.MAX_CTAS)
    monkeypatch.setenv("HYPER_CP_MAX_CTAS", "4")
    assert nccl_options(monkeypatch).config.max_ctas == 4
    monkeypatch.setenv("HYPER_CP_MAX_CTAS", "0")
    assert nccl_options(monkeypatch).config.max_ctas == 32
    monkeypatch.setenv("HYPER_CP_MAX_CTAS", "few")
    with pytest.raises(ValueError, match=r"HYPER_CP_MAX_CTAS='few' is not a whole number.*such as 16"):
        nccl_options(monkeypatch)
    assert nccl_options(monkeypatch, "cpu:gloo,npu:hccl") is None and nccl_options(monkeypatch, "cpu:gloo") is None


def test_options_reach_new_groups_and_splits(monkeypatch: Any) -> None:
    nccl_options(monkeypatch)
    store = SimpleNamespace(timeout=timedelta(seconds=7))
    world = SimpleNamespace(
        bound_device_id="cuda:0", _get_backend=lambda device: backend, get_group_store=lambda: store
    )
    backend = SimpleNamespace(supports_splitting=True)
    given: list[Any] = []
    double = SimpleNamespace(
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
        group=SimpleNamespace(WORLD=world),
        get_rank=lambda: 1,
        get_backend=lambda group: "nccl",
        get_process_group_ranks=lambda group: [1, 2],
        new_group=lambda ranks, **options: given.append((world.bound_device_id, ranks, options)),
        split_group=lambda parent, parts, **options: given.append((parent, parts, options)) or parent,
    )
    monkeypatch.setattr(groups, "dist", double)
    groups.make_group(((1,), (2,)), world)
    groups.make_group(((1,), (2,)), None)
    backend.supports_splitting = False
    groups.make_group(((1,), (2,)), world)
    assert [call[:2] for call in given] == [(world, [[0], [1]]), (None, [1]), (None, [1])]
    # PyTorch would give them NCCL's default, and warn of options that differ from it.
    assert {(call[2]["timeout"], call[2]["pg_options"]._timeout) for call in given} == {(store.timeout,) * 2}
    assert all(call[2]["pg_options"].is_high_priority_stream for call in given) and world.bound_device_id == "cuda:0"


def test_head_groups_in_a_hybrid_want_an_order_of_launches(monkeypatch: Any) -> None:
    groups._warn_of_launch_order.cache_clear()
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    backend = "cuda:nccl"
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    axes = Axis(0, 2, "ring"), Axis(0, 2, "ulysses")
    with pytest.warns(RuntimeWarning, match="NCCL_LAUNCH_ORDER_IMPLICIT='0'.*=1"):
        groups.check_launch_order(*axes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups.check_launch_order(*axes)  # once in a process
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        groups.check_launch_order(*axes)
        backend = "cpu:gloo"
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")
        groups.check_launch_order(*axes)
