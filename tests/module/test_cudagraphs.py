"""Decisions that a captured CUDA graph must not replay, and that a compiled graph makes when it runs, on the CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import config, scheduler
from torch._inductor.ir import FallbackKernel
from torch._inductor.utils import is_cudagraph_unsafe_op
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.data import collectives
from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import attention, flex, kernels
from hyper_cp.ops.config import Operands, OpSettings
from hyper_cp.ops.exchange import whole_sequences
from hyper_cp.ops.kernels import cpu
from tests.harness.ranks import on_ranks

LOADED = collectives, flex, whole_sequences
"""The modules that define ops."""


def test_every_op_is_unsafe_in_a_cuda_graph() -> None:
    """Each of them communicates, or reads documents on the host: a replay would repeat what another batch decided."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("hyper_cp::")}
    assert len(names) >= 13
    for name in names:
        op = getattr(torch.ops.hyper_cp, name.removeprefix("hyper_cp::")).default
        assert torch.Tag.cudagraph_unsafe in op.tags, f"{name} has no tag"


def alone() -> str:
    """The key of a cp mesh of one rank, without processes."""
    axis = Axis.alone()
    key = "alone, for cuda graphs"
    cp_mesh.register(cp_mesh.CPMesh(key, axis, axis, (axis,), cp_mesh.BatchState()))
    return key


@pytest.mark.slow
def test_inductor_partitions_around_the_ops() -> None:
    """It asks this of every kernel when it cuts a graph into parts that are captured."""
    settings = OpSettings(alone(), kv_exchange="ring", band=(-3, 0))
    *_, text = settings.arguments(Operands(documents=torch.zeros(1)), 0.3)
    found: dict[str, bool] = {}
    should_partition = scheduler.Scheduler.should_partition

    def asked(self: Any, node: Any, *args: Any, **keywords: Any) -> Any:
        if isinstance(node.node, FallbackKernel):
            found[str(node.node.op_overload)] = is_cudagraph_unsafe_op(node.node)
        return should_partition(self, node, *args, **keywords)

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        out: Tensor = torch.ops.hyper_cp.attention(q, k, v, [documents], 0.3, 0.0, text)[0]
        return out

    # Tensors of their own: nothing is left to be added, so nothing is compiled by a C++ compiler.
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    documents = torch.tensor([[0, 3, 8]])
    torch._dynamo.reset()
    with (
        mock.patch.object(scheduler.Scheduler, "should_partition", asked),
        config.patch({"graph_partition": True, "force_disable_caches": True, "compile_threads": 1, "cpp.simdlen": 0}),
    ):
        torch.compile(attend, fullgraph=True)(q, k, v, documents).backward(torch.ones_like(q))
    assert set(found) == {f"hyper_cp.{name}.default" for name in ("attention", "attention_backward", "fingerprint")}
    assert all(found.values()), found


class Counted:
    """The CPU's kernel, which counts its calls."""

    name = "counted"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, tile: kernels.TileInputs) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return cpu.KERNEL.forward(tile)

    def backward(self, tile: kernels.TileInputs, *of_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        return cpu.KERNEL.backward(tile, *of_rows)


@on_ranks
def run_compiled(world: int, degree: int, how: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The calls of a kernel that is allowed during a compiled forward only, and of one during its backward only."""
    mesh = cp_mesh.view(init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), degree)
    q, k, v = (torch.randn(1, 4, 8, 8, requires_grad=True) for _ in range(3))
    allowed, other = Counted(), Counted()
    other.name = "other"
    now = allowed
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, mesh=mesh, is_causal=True, layout="head_tail", **how)

    with (
        kernels.register(allowed, "cpu", lambda *_: now is allowed),
        kernels.register(other, "cpu", lambda *_: now is other),
    ):
        out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
        now = other
        out.sum().backward()
    return set(allowed.calls), set(other.calls)


@pytest.mark.parametrize("degree, how", [(1, {"kv_exchange": "ring"}), (2, {"head_groups": 2})], ids=str)
def test_backward_runs_the_kernel_that_a_compiled_forward_chose(ranks: Any, degree: int, how: dict[str, Any]) -> None:
    """Whatever is allowed when backward runs: an ``sdpa_kernel`` block around the forward has ended by then."""
    assert ranks(2, run_compiled, 2, degree, how) == [({"forward", "backward"}, set())] * 2
