"""The whole library on tensors of a device named "npu", with real gloo ranks, in every mode of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.ops import attention
from tests import npu_device, npu_standin
from tests.oracle import plain_attention, relative_error, token_positions, visible_pairs
from tests.ranks import Ranks
from tests.test_attention import FP32, check, inputs, modes

Case = dict[str, Any]


@pytest.fixture(scope="module")
def npus() -> Iterator[Ranks]:
    """Ranks of their own: the device is registered for good."""
    if npu_device.SETUP is None:
        pytest.skip(npu_device.WHY_NOT)
    npu_standin.install()
    if npu_standin._library is None:
        pytest.skip("the real torch_npu is installed")
    pool = Ranks(npu_device.BACKEND, npu_device.install)
    yield pool
    pool.close()


def run_case(case: Case) -> dict[str, float]:
    rank, world, length = dist.get_rank(), dist.get_world_size(), case["length"]
    mesh = init_device_mesh("npu", (world,), mesh_dim_names=("cp",))
    q, k, v, dout = inputs(2, 8, 4, length, 8, case.get("v_dim", 8), torch.float32)
    mine = torch.tensor(token_positions(case["layout"], rank, world, length))
    visible = visible_pairs(length, case["causal"], case.get("window"), case.get("documents"))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = plain_attention(*wide, visible=visible)
    want_grads = torch.autograd.grad(want, wide, dout.double())
    local = [x[:, :, mine].to("npu").requires_grad_() for x in (q, k, v)]
    npu_standin.calls.clear()
    out = attention(
        *local,
        mesh=mesh,
        is_causal=case["causal"],
        enable_gqa=True,
        ulysses_degree=case["degree"],
        kv_exchange=case["kv"],
        layout=case["layout"],
        load_balance=case["balance"],
        window=case.get("window"),
        documents=case.get("documents"),
    )
    grads = torch.autograd.grad(out, local, dout[:, :, mine].to("npu"))
    assert npu_standin.calls, "the NPU's operators were not called"
    assert all(x.device.type == "npu" for x in (out, *grads))
    found = {"out": relative_error(out.cpu(), want[:, :, mine])}
    for name, grad, right in zip(("dq", "dk", "dv"), grads, want_grads, strict=True):
        found[name] = relative_error(grad.cpu(), right[:, :, mine])
    return found


def run_cases(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    return [(case, run_case(case)) for case in cases]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_mode(npus: Ranks, world: int) -> None:
    cases = [{**mode, "causal": causal, "length": 12 * world} for mode in modes(world) for causal in (True, False)]
    check(npus(world, run_cases, cases), FP32)
