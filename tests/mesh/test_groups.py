"""Process groups that the library makes: only their ranks take part, with NCCL's options for overlap."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
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


@on_ranks
def descriptions() -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    cp, made = cp_mesh.view(mesh, 2), split_cp_mesh(mesh)
    return [x.group_desc for x in (cp.ring.group, cp.ulysses.group, made.dp(2).get_group(), made.dp(4).get_group())]


def test_groups_are_named_in_logs(ranks: Any) -> None:
    names = ["hyper_cp ring", "hyper_cp ulysses", "hyper_cp dp, degree 2", "hyper_cp cp, degree 1"]
    assert ranks(4, descriptions) == [names] * 4


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
def another_group_on_some_ranks(make: Any, bound: bool) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    dist.new_group([0])  # all ranks make the call; rank 0 alone has a group more
    with bound_world(*([mesh.get_group()] if bound else [])):
        make(mesh)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("make", [hybrid, split_cp_mesh])
def test_ranks_with_different_numbers_of_groups_are_refused(ranks: Any, make: Any, bound: bool) -> None:
    """PyTorch would name the same group differently on rank 0 and the others, and wait for good. A split without a
    store would not, but what is split depends on the versions of PyTorch and on the backends."""
    ranks.raises(
        4,
        ValueError,
        r"make process groups with different number of process groups: rank 0: 2; rank 1: 1.*Make the same number",
        another_group_on_some_ranks,
        make,
        bound,
    )


@on_ranks
def other_degrees() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    split_cp_mesh(mesh, degrees=[2, 4] if dist.get_rank() else [4])


def test_ranks_with_different_degrees_are_refused(ranks: Any) -> None:
    message = r"different degrees: rank 0: \(1, 4\); rank 1: \(1, 2, 4\).*Call split_cp_mesh with the same degrees"
    ranks.raises(4, ValueError, message, other_degrees)


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


class BoundNCCL:
    """torch.distributed of rank 1 of 2, bound to a GPU: it keeps what groups are made with, and refuses what loses the
    user's timeout."""

    ProcessGroupNCCL = SimpleNamespace(Options=Options)

    def __init__(self, backends: str, split_group: Any) -> None:
        self.backends, self.given, self.splits = backends, list[Any](), True
        self.store = SimpleNamespace(timeout=timedelta(seconds=7))
        self.world = SimpleNamespace(
            bound_device_id="cuda:0",
            _get_backend=lambda device: SimpleNamespace(supports_splitting=self.splits),
            get_group_store=lambda: self.store,
        )
        self.group = SimpleNamespace(WORLD=self.world)
        self.split_group = partial(split_group, self)
        self.get_rank, self.get_backend = lambda: 1, lambda group: backends
        self.get_process_group_ranks = lambda group: [1, 2]

    def new_group(self, ranks: list[int], *, backend: str | None, **options: Any) -> Any:
        assert self.world.bound_device_id is None, "it would split the world"
        self.given.append(("new_group", ranks, backend or self.backends, options))

    def split(self, parent: Any, parts: Any, backend: str | None = None, **options: Any) -> Any:
        if len((backend or self.backends).split(",")) > 1:
            raise RuntimeError("NCCL's options are handed to gloo, which drops the timeout")
        self.given.append(("split_group", parts, backend or self.backends, options))
        return parent

    def split_all(self, parent: Any, parts: Any, **options: Any) -> Any:
        """That of torch 2.11, which has no argument for the backend."""
        return self.split(parent, parts, **options)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("split_group", [BoundNCCL.split, BoundNCCL.split_all])
def test_options_reach_new_groups_and_splits(monkeypatch: Any, split_group: Any, backends: str, cpu: bool) -> None:
    """Those of NCCL reach NCCL alone. A group for the CPU too is made, not split, for the same reason."""
    nccl_options(monkeypatch, backends)
    double = BoundNCCL(backends, split_group)
    monkeypatch.setattr(groups, "dist", double)
    for parent, supports in ((double.world, True), (None, True), (double.world, False)):
        double.splits = supports
        groups.make_group(((1,), (2,)), parent, "ring", cpu)
    splits = backends == "cuda:nccl" or (split_group is BoundNCCL.split and not cpu)
    first = ("split_group", [[0], [1]]) if splits else ("new_group", [1])
    assert [call[:2] for call in double.given] == [first, ("new_group", [1]), ("new_group", [1])]
    assert {call[2] for call in double.given} == {backends if cpu else "cuda:nccl"}
    for *_, options in double.given:
        # PyTorch would give them NCCL's default, and warn of options that differ from it.
        assert options["timeout"] == options["pg_options"]._timeout == double.store.timeout
        assert options["pg_options"].is_high_priority_stream and options["group_desc"] == "hyper_cp ring"
    assert double.world.bound_device_id == "cuda:0"


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
