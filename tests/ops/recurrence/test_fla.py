"""The calls of fla's kernels, against a mock with fla's signatures that refuses what fla refuses."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import linear_recurrence
from hyper_cp.ops.recurrence import kernels
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import Ranks, error_of, on_ranks
from tests.harness.recurrence_oracle import recur, recur_from


class _Double(torch.autograd.Function):
    """A kernel of fla: an old-style function, which torch.func cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Any, scale: float, h0: Tensor) -> Any:
        ctx.save_for_backward(q, k, v, g, beta, h0)
        ctx.scale = scale
        return _outputs(q, k, v, g, beta, scale, h0)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dht: Tensor) -> Any:
        *leaves, h0 = ctx.saved_tensors
        assert do.is_contiguous() and dht.is_contiguous()
        leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
        with torch.enable_grad():
            out = _outputs(*leaves, ctx.scale, h0)
        given = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad(out, given, (do, dht)))
        return *(None if x is None else next(grads) for x in leaves), None, None


def _outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Any, scale: float, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token from an initial state."""
    wide = (None if x is None else x.double() for x in (h0, q, k, v, g, beta))
    out, state = recur_from(*wide)  # type: ignore[arg-type]
    return (out * scale).to(v.dtype), state.float()


def _delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Any = None, scale: Any = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
) -> Any:  # fmt: skip
    assert q.dtype == k.dtype == v.dtype  # fla itself refuses float32, in which the algebra can be seen here
    assert g.dtype == torch.float32 and initial_state.dtype == torch.float32 and output_final_state
    assert len(v) * v.shape[2] <= kernels.SEQUENCES
    assert initial_state.shape == (*q.shape[:1], *q.shape[2:], v.shape[3]) and q.shape == k.shape
    assert all(x.is_contiguous() for x in (q, k, v, g)) and (beta is None or beta.ndim == 3)
    return _Double.apply(q, k, v, g, beta, scale, initial_state)


def _gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    return _delta(q, k, v, g, None, **options)


_gated.__signature__ = inspect.signature(_delta)  # type: ignore[attr-defined]


def install() -> None:
    """Modules with the names of fla's."""
    for path, name, function in (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta),
        ("fla.ops.kda", "chunk_kda", _delta),
        ("fla.ops.simple_gla", "chunk_simple_gla", _gated),
        ("fla.ops.gla", "chunk_gla", _gated),
    ):
        for parent in ("fla", "fla.ops"):
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[path] = types.ModuleType(path)
        setattr(sys.modules[path], name, function)


def remove() -> None:
    for path in [path for path in sys.modules if path.split(".")[0] == "fla"]:
        del sys.modules[path]


@on_ranks
def errors(most: int | None = None) -> dict[str, float]:
    """The largest error of outputs and gradients, in float32 and bfloat16. ``most``: the sequences times heads that a
    call of fla takes."""
    mesh, before = cp_mesh(), kernels.SEQUENCES
    kernels.SEQUENCES = most or before
    found, rank = {}, mesh.get_rank()
    install()
    try:
        for delta in (True, False):
            for channels in (True, False):
                g = torch.Generator().manual_seed(1)
                q, k, v = (torch.randn(2, 16, h, 16, generator=g) / 4 for h in (2, 2, 4))
                decay = -torch.rand((2, 16, 4, 16) if channels else (2, 16, 4), generator=g)
                beta = [torch.rand(2, 16, 4, generator=g)] if delta else []
                documents, at = [[0, 5, 16], [0, 11, 16]], slice(8 * rank, 8 * rank + 8)
                for dtype in (torch.float32, torch.bfloat16):
                    wide = [x.to(dtype).double().requires_grad_() for x in (q, k, v, decay, *beta)]
                    want = recur(*wide[:4], wide[4] if delta else None, documents)
                    want_grads = torch.autograd.grad(want.square().sum(), wide)
                    local = [x.detach()[:, at].to(dtype).requires_grad_() for x in wide]
                    out = linear_recurrence(*local, mesh=mesh, documents=documents, kernel="fla")  # type: ignore[arg-type]
                    grads = torch.autograd.grad(out, local, 2 * want[:, at].to(dtype))
                    pairs = zip((out, *grads), (want, *want_grads), strict=True)
                    worst = max(((a - b[:, at]).abs().max() / b.abs().max()).item() for a, b in pairs)
                    found[f"delta={delta} channels={channels} {dtype}"] = worst
    finally:
        kernels.SEQUENCES = before
        remove()
    return found


@pytest.mark.parametrize("most", [None, 8])
def test_fla_kernels_are_called_as_they_ask(ranks: Ranks, most: int | None) -> None:
    """Also in several calls. (A grid of CUDA has no place for all pieces of long sequences in small documents.)"""
    for found in ranks(2, errors, most):
        # Outputs and gradients of fla's functions are rounded to bfloat16, of which one step is 0.0039.
        assert all(error <= (0.02 if "bfloat16" in name else 5e-6) for name, error in found.items()), found


@on_ranks
def refused() -> list[str]:
    mesh = cp_mesh()
    x, g = torch.randn(1, 4, 2, 16), -torch.rand(1, 4, 2)
    remove()
    absent = error_of(lambda: linear_recurrence(x, x, x, g, mesh=mesh, kernel="fla"))
    install()
    sys.modules["fla.ops.simple_gla"].chunk_simple_gla = lambda q, k, v, g, scale=None: None  # type: ignore[attr-defined]
    try:
        stateless = error_of(lambda: linear_recurrence(x, x, x, g, mesh=mesh, kernel="fla"))
    finally:
        remove()
    return [absent, stateless, error_of(lambda: linear_recurrence(x, x, x, g, mesh=mesh, kernel="triton"))]


def test_kernels_that_cannot_be_used_are_refused(ranks: Ranks) -> None:
    absent, stateless, unknown = ranks(1, refused)[0]
    assert absent.startswith("NotImplementedError") and "hyper-cp[fla]" in absent
    assert stateless.startswith("NotImplementedError") and "initial_state" in stateless
    assert unknown.startswith("ValueError") and "'triton'" in unknown
