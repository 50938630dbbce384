"""A kernel that is added from outside the package runs an attention call, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import Kernel, TileInputs
from tests.harness.attention_case import FP64, AttentionCase, Errors, cp_mesh, run_case
from tests.harness.ranks import on_ranks


class Einsum:
    """Attention without a mask tensor or parts, written with einsum: enough for causal calls without documents."""

    name = "einsum"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _logits(self, tile: TileInputs) -> Tensor:
        logits = torch.einsum("bhid,bhjd->bhij", tile.q, tile.k) * tile.scale
        return logits + torch.full_like(logits, -torch.inf).triu(1) if tile.causal else logits

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        logits = self._logits(tile)
        return torch.einsum("bhij,bhjd->bhid", logits.softmax(-1), tile.v), logits.logsumexp(-1)

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        weights = (self._logits(tile) - lse[..., None]).exp()
        dweights = torch.einsum("bhid,bhjd->bhij", dout, tile.v) - (dout * out).sum(-1, keepdim=True)
        dlogits = weights * dweights * tile.scale
        return dlogits @ tile.k, dlogits.mT @ tile.q, weights.mT @ dout


@on_ranks
def run(case: AttentionCase) -> tuple[Errors, set[str]]:
    """Errors of a causal call on this rank, and the methods of the kernel that ran."""
    kernel = Einsum()
    with kernels.register(kernel, "cpu", accepts=lambda q, k, v, is_causal: is_causal):
        return run_case(case, cp_mesh()), set(kernel.calls)


def test_a_kernel_from_outside_is_exact(ranks: Any) -> None:
    case = AttentionCase(24, is_causal=True, kv_exchange="ring", layout="head_tail")
    for errors, methods in ranks(2, run, case):
        assert max(errors.values()) <= FP64 and methods == {"forward", "backward"}


# --------------------------------------------------------------------------- the rules of register


def chosen(**options: Any) -> str:
    x = torch.randn(1, 2, 4, 8)
    return kernels.choose(x, x, x, options.pop("is_causal", True), **options)


def test_the_kernel_registered_last_is_asked_first() -> None:
    first, second = Einsum(), Einsum()
    second.name = "second"
    with kernels.register(first, "cpu"):
        with kernels.register(second, "cpu", lambda q, k, v, is_causal: is_causal):
            assert (chosen(), chosen(is_causal=False)) == ("second", "einsum")
            assert set(kernels.available("cpu")) == {"reference", "cpu flash", "einsum", "second"}
        assert chosen() == "einsum" and "second" not in kernels.available("cpu")
    assert chosen() == "cpu flash"


def test_a_device_without_kernels_gets_one() -> None:
    x = torch.empty(1, 2, 4, 8, device="meta")
    handle = kernels.register(Einsum(), "meta")
    assert kernels.choose(x, x, x, True) == "einsum"
    handle.remove()
    assert kernels.choose(x, x, x, True) == "reference"


@pytest.mark.parametrize("name", ["reference", "cpu flash"])
def test_names_of_kernels_are_unique(name: str) -> None:
    kernel: Kernel = Einsum()
    kernel.name = name
    with pytest.raises(ValueError, match=f"a kernel with the name '{name}' is registered already for .*'cpu'"):
        kernels.register(kernel, "cpu")


def test_a_kernel_that_backward_needs_must_stay_registered() -> None:
    with kernels.register(Einsum(), "cpu"):
        name = chosen()
    with pytest.raises(LookupError, match=r"no kernel with the name 'einsum' is registered .* until backward has run"):
        kernels.get(name, "cpu")


def test_dropout_is_refused_or_left_to_plain_math() -> None:
    assert chosen(dropout_p=0.1) == "reference"
    with (
        kernels.register(Einsum(), "cpu"),
        pytest.raises(NotImplementedError, match=r"dropout_p > 0 is not possible on cpu.*'einsum'.*Set dropout to 0"),
    ):
        chosen(dropout_p=0.1)
    with kernels.register(Einsum(), "cpu", plain_with_dropout=True):
        assert chosen(dropout_p=0.1) == "reference" and chosen() == "einsum"
