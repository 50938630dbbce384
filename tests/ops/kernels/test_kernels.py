"""Kernels of every device on every kind of tile, against plain math in fp64 and the operators' contracts."""

from __future__ import annotations

import itertools
import logging
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import TileInputs, cpu, cuda, npu, reference
from tests.harness.oracle import relative_error
from tests.harness.tile_case import Tile, plain_math

BANDS = [(None, None), (None, 0), (-5, 0), (-3, 4), (2, 9), (None, 3), (-700, 0)]
TILES: list[Tile] = [
    (rows, cols, band, mask)
    for (rows, cols), band, mask in itertools.product([(12, 12), (7, 16), (600, 530)], BANDS, ["", "bool", "float"])
    if not (mask == "float" and rows > 100)
]
MARKED = [pytest.param(tile, marks=pytest.mark.slow if tile[0] > 100 and tile[3] else ()) for tile in TILES]


def errors(kernel: Any, tile: Tile, dtype: torch.dtype, v_dim: int = 8) -> dict[str, float]:
    """Errors of output, log-sum-exp and gradients, given the oracle's merged output and log-sum-exp."""
    want = plain_math(tile, dtype, v_dim, 0.3)
    q, k, v, dout = want.tensors
    given = TileInputs(q, k, v, tile[2], 0.3, want.mask)
    out, lse = kernel.forward(given)
    alive = want.lse > -torch.inf
    assert bool(((lse > -torch.inf) == alive).all()), "rows that see nothing"
    grads = kernel.backward(given, dout, want.out.to(dtype), lse)
    found = {"out": relative_error(out, want.out), "lse": relative_error(lse[alive], want.lse[alive])}
    for name, grad, expected in zip(("dq", "dk", "dv"), grads, want.grads, strict=True):
        found[name] = relative_error(grad, expected)
    return found


@pytest.mark.parametrize("tile", MARKED, ids=str)
def test_cpu_and_reference(tile: Tile) -> None:
    for kernel, v_dim in ((cpu.KERNEL, 8), (reference.KERNEL, 8), (reference.KERNEL, 5)):
        assert max(errors(kernel, tile, torch.float64, v_dim).values()) <= 1e-10


def test_choice_is_logged_and_follows_head_dims(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(1, 2, 4, d) for d in (8, 8, 6))
    with caplog.at_level(logging.DEBUG, logger="hyper_cp.ops.kernels"):
        assert kernels.choose(q, k, k, True) == "cpu flash"
        assert kernels.choose(q, k, v, True) == "reference"
        assert kernels.choose(*(x.to("meta") for x in (q, k, v)), True) == "reference"
    assert "cpu flash" in caplog.text and "reference" in caplog.text


# --------------------------------------------------------------------------- CUDA, without a GPU


@pytest.mark.parametrize("name", cuda.KERNELS)
@pytest.mark.parametrize("band", [(None, None), (None, 0), (-7, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_operators_are_called_as_their_schemas_say(name: str, band: Any, masked: bool) -> None:
    """On the meta device: arguments and shapes, not numbers."""
    kernel, dim, v_dim = cuda.KERNELS[name], 60 if "flash" in name else 64, {"cuda memory-efficient": 40}
    dims = (dim, dim, v_dim.get(name, dim))

    def made(heads: int, size: int) -> Tensor:
        return torch.empty(2, 100, heads, size, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    q, k, v = made(8, dims[0]), made(2, dims[1]), made(2, dims[2])
    mask = torch.empty(1, 1, 100, 100, dtype=torch.bool, device="meta") if masked else None
    given = TileInputs(q, k, v, band, 0.1, mask)
    out, lse = kernel.forward(given)
    assert out.shape == (2, 8, 100, dims[2]) and lse.shape == (2, 8, 100) and lse.dtype == torch.float32
    grads = kernel.backward(given, torch.empty_like(out), out, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def backends_that_refuse() -> Any:
    """A CUDA build without a driver raises before a backend can say why it refuses."""
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return nullcontext()
    names = ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention")
    refuse = {name: lambda params, debug: warnings.warn("refused", stacklevel=1) for name in names}
    return mock.patch.multiple(torch.backends.cuda, **refuse)


def test_cuda_runs_what_plain_sdpa_would() -> None:
    q = torch.randn(1, 2, 4, 8)
    for backend, name in (
        (SDPBackend.FLASH_ATTENTION, "cuda flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "cuda memory-efficient"),
        (SDPBackend.CUDNN_ATTENTION, "cuda cudnn"),
        (SDPBackend.MATH, None),  # no kernel accepts, so the reference kernel runs
    ):
        with mock.patch.object(torch, "_fused_sdp_choice", return_value=int(backend.value)):
            accepting = [x.name for x in cuda.KERNELS.values() if cuda.accepts(x, q, q, q, True)]
            assert accepting == ([] if name is None else [name])
    with (
        mock.patch.object(torch, "_fused_sdp_choice", return_value=int(SDPBackend.ERROR.value)),
        backends_that_refuse(),
        pytest.raises(RuntimeError, match=r"no attention backend takes query \(1, 2, 4, 8\).*flash: .*cudnn: "),
    ):
        cuda.accepts(cuda.KERNELS["cuda flash"], q, q, q, True)
    assert set(kernels.available("cuda")) == {"reference", "flex attention", *cuda.KERNELS}


# --------------------------------------------------------------------------- NPU, against the stand-in


@pytest.mark.parametrize("tile", MARKED, ids=str)
def test_npu(standin: Any, tile: Tile) -> None:
    for v_dim in (8, 5):
        assert max(errors(npu.KERNEL, tile, torch.float32, v_dim).values()) <= 5e-6


def test_npu_masks_are_compressed_and_full_tiles_have_none(standin: Any) -> None:
    for tile, want in (
        ((12, 12, (None, None), ""), {"layout": "BNSD", "mode": 0, "mask": False}),
        ((12, 12, (None, 0), ""), {"layout": "BNSD", "mode": 2, "mask": True}),
        ((12, 12, (-5, 0), ""), {"layout": "BNSD", "mode": 4, "mask": True}),
    ):
        standin.calls.clear()
        errors(npu.KERNEL, tile, torch.float32)
        assert standin.calls == [want]
    q = torch.randn(2, 6, 4, 8).transpose(1, 2)  # [B, S, H, D] in memory: no copy
    standin.calls.clear()
    npu.KERNEL.forward(TileInputs(q, q, q, (None, None), 0.3))
    assert standin.calls[0]["layout"] == "BSND"


def test_an_unknown_device_gets_plain_math() -> None:
    assert kernels.get("", *(torch.empty(1, 1, 2, 4, device="meta") for _ in range(3))) is reference.KERNEL
