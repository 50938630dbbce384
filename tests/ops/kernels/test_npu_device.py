"""The whole library on tensors of a device named "npu", with real gloo ranks, in every mode."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_cp.ops.kernels import TileInputs, npu
from tests.harness import npu_device, npu_standin
from tests.harness.attention_case import FP32, AttentionCase, Errors, check, cp_mesh, modes, pairwise, run_module
from tests.harness.ranks import Ranks, on_ranks


def run_case(case: AttentionCase, mesh: DeviceMesh) -> Errors:
    """Run forward and backward on this rank: errors of its share against the oracle, and no wait for the device."""
    shard = case.shard("npu")
    npu_standin.calls.clear(), npu_device.calls.clear(), npu_device.waits.clear()
    out = shard.attend(mesh)
    grads = torch.autograd.grad(out, shard.qkv, shard.dout)
    waits, transfers = list(npu_device.waits), [x for x in npu_device.calls if x.startswith("c10d.")]
    assert all(x.device.type == "npu" for x in (out, *grads)) and transfers
    assert npu_standin.calls or case.mask == "float", "the NPU's operators were not called"
    if case.mask is None:  # a mask is read once per tensor
        assert not waits, f"a step waited for the device: {waits}"
    return shard.errors(out, grads)


@on_ranks
def run_cases(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    mesh = cp_mesh("npu")
    return [(case, run_case(case, mesh)) for case in cases]


FLOAT = {"heads": 8, "dtype": torch.float32}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mode(npus: Ranks, world: int) -> None:
    """On two ranks, and on four those that have both a ring and Ulysses."""
    chosen = [mode for mode in modes(world) if world == 2 or mode["ulysses_degree"] == 2]
    cases = [AttentionCase(12 * world, i % 3 > 0, v_dim=8 - i % 2, **FLOAT, **mode) for i, mode in enumerate(chosen)]
    check(npus(world, run_cases, cases), FP32)


@pytest.mark.slow
def test_windows_documents_and_masks(npus: Ranks) -> None:
    length = 24
    settings: list[dict[str, Any]] = [
        {"window": (3, 2)},
        {"window": (length // 2, 0), "is_causal": True},
        {"documents": ((0, 1, 7, length - 2, length),), "is_causal": True},
        {"documents": ((0, 5, 6, length - 3, length),)},
        {"documents": ((0, 5, length), (0, length - 1, length)), "window": (4, 1)},
        {"mask": "bool"},
        {"mask": "padding"},
        {"mask": "float"},
    ]
    cases = [AttentionCase(length, **FLOAT, **mode, **some) for mode in modes(2) for some in settings]
    check(npus(2, run_cases, pairwise(cases)), FP32)


# --------------------------------------------------------------------------- nothing waits for the device


@on_ranks
def traced(case: AttentionCase, break_it: str = "") -> list[str]:
    """Run one step, forward and backward, and return its first wait for the device."""
    forward = npu.NPUKernel.forward

    def reading(self: Any, tile: TileInputs) -> Any:
        q = tile.q
        {
            "item": lambda: q.flatten()[0].item(),
            "if": lambda: bool((q > 0).any()),
            "cpu": q.cpu,
            "nonzero": q.nonzero,
            "mask": lambda: q[q > 0],
            "upload": lambda: torch.ones(2).to(q.device),
            "synchronize": torch.npu.synchronize,  # type: ignore[attr-defined]
        }[break_it]()
        return forward(self, tile)

    with mock.patch.object(npu.NPUKernel, "forward", reading) if break_it else nullcontext():
        try:
            run_case(case, cp_mesh("npu"))
        except AssertionError:
            assert npu_device.waits
    return npu_device.waits[:1]


def test_a_read_in_a_kernel_is_detected(npus: Ranks) -> None:
    """Every case above asserts that a step waits for nothing. This test breaks a kernel to see that assertion fail."""
    for break_it, found in {
        "item": "_local_scalar_dense",
        "if": "_local_scalar_dense",
        "cpu": "copy from npu to cpu",
        "nonzero": "nonzero",
        "mask": "index by a mask or by positions on the CPU",
        "upload": "copy from cpu to npu",
        "synchronize": "synchronize",
    }.items():
        assert npus(2, traced, AttentionCase(16, True, **FLOAT), break_it) == [[found]] * 2


def test_operands_on_two_devices_are_refused(npus: Ranks) -> None:
    for mix in (add_across_devices, attend_across_devices):
        npus.raises(1, RuntimeError, "expected all tensors to be on the same device", mix)


@on_ranks
def add_across_devices() -> None:
    torch.ones(2, device="npu") + torch.ones(2)


@on_ranks
def attend_across_devices() -> None:
    q, mask = torch.ones(1, 1, 4, 8, device="npu"), torch.zeros(4, 4, dtype=torch.bool)
    torch.ops.npu.npu_fusion_attention(q, q, q, 1, "BNSD", atten_mask=mask)


# --------------------------------------------------------------------------- user modules


class Attention(nn.Module):
    """Causal attention of a user: SDPA, or some version of the NPU's operator."""

    def __init__(self, version: str | None) -> None:
        super().__init__()
        self.version = version

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.version is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        triangle = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
        operator = getattr(torch.ops.npu, f"npu_fusion_attention{self.version}")
        options = {"atten_mask": triangle, "sparse_mode": 3, "scale": 0.3}
        return operator(q, k, v, q.shape[1], "BNSD", **options)[0]


@on_ranks
def run_modules(mode: dict[str, Any]) -> list[tuple[AttentionCase, Errors]]:
    case = AttentionCase(16, True, heads=8, dtype=torch.float32, scale=0.3, **mode)
    return [(case, run_module(Attention(version), case, "npu")) for version in (None, "", "_v2", "_v3")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": None},
    ],
    ids=str,
)
def test_modules_of_users(npus: Ranks, mode: dict[str, Any]) -> None:
    check(npus(2, run_modules, mode), FP32)


# --------------------------------------------------------------------------- offload


@on_ranks
def offloaded(cases: list[AttentionCase]) -> tuple[list[tuple[AttentionCase, Errors]], int]:
    """Errors of calls whose saved tensors are on the host between forward and backward, and the fewest tensors that a
    call brought back."""
    mesh, found, fewest = cp_mesh("npu"), [], 99
    for case in cases:
        shard = case.shard("npu")
        with torch.autograd.graph.save_on_cpu():
            out = shard.attend(mesh)
        npu_device.waits.clear()
        grads = torch.autograd.grad(out, shard.qkv, shard.dout)
        fewest = min(fewest, npu_device.waits.count("copy from cpu to npu"))
        found.append((case, shard.errors(out, grads)))
    return found, fewest


@pytest.mark.slow
def test_saved_tensors_may_wait_on_the_host(npus: Ranks) -> None:
    """q, k, v, the output and the log-sum-exp come back from the host for backward, in every exchange and layout."""
    results = npus(2, offloaded, [AttentionCase(24, True, **FLOAT, **mode) for mode in modes(2)[::2]])
    check([found for found, _ in results], FP32)
    assert all(fewest == 5 for _, fewest in results), [fewest for _, fewest in results]
