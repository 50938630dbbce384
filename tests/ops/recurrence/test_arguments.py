"""Arguments that do not fit are refused with a reason; what a call saves for backward, and what it rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from hyper_cp.ops import attention, causal_conv1d, linear_recurrence
from hyper_cp.ops.recurrence.chunked import affine
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import Ranks, error_of, on_ranks
from tests.harness.recurrence_oracle import recur


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@on_ranks
def refusals() -> dict[str, str]:
    mesh = cp_mesh()
    q, v, g, beta = random(1, 8, 2, 4), random(1, 8, 4, 3), -random(1, 8, 4).abs(), random(1, 8, 4).sigmoid()
    x, weight = random(1, 6, 8), random(6, 4)

    def recurrence(*given: Any, **options: Any) -> Callable[[], Any]:
        return lambda: linear_recurrence(*given, mesh=mesh, **options)

    def convolution(*given: Any, **options: Any) -> Callable[[], Any]:
        return lambda: causal_conv1d(*given, mesh=mesh, **options)

    wrong = {
        "q is a list": recurrence([1], q, v, g),
        "q has shape (8, 2, 4)": recurrence(q[0], q, v, g),
        "dtype torch.int64": recurrence(q.long(), q, v, g),
        "must be equal. Cast": recurrence(q.float(), q, v, g),
        "number of heads that divides": recurrence(q, q, random(1, 8, 3, 3), -random(1, 8, 3).abs()),
        "decay (1, 8, 2, 1)": recurrence(q, q, v, g[..., :2]),
        "A head has one decay": recurrence(q, q, v, random(1, 8, 4, 3)),
        "beta (1, 8, 2)": recurrence(q, q, v, g, beta[..., :2]),
        "layout='zigzag'": recurrence(q, q, v, g, layout="zigzag"),
        "global sequence length 16": recurrence(q, q, v, g, documents=[0, 8]),
        "sequence length=14": recurrence(q[:, :7], q[:, :7], v[:, :7], g[:, :7], layout="head_tail"),
        "no documents are given": recurrence(q, q, v, g, layout="per_document"),
        "scale=None": recurrence(q, q, v, g, scale=None),
        "decay has a value of": recurrence(q, q, v, -g, name="all ranks"),
        "kernel='x'": recurrence(q, q, v, g, kernel="x"),
        "cannot split 3 heads": recurrence(
            random(1, 8, 3, 4), random(1, 8, 3, 4), random(1, 8, 3, 3), g[..., :3], ulysses_degree=2
        ),
        "x has shape (6, 8)": convolution(x[0], weight),
        "one row of weights": convolution(x, weight[:5]),
        "bias (5,)": convolution(x, weight, random(5)),
        "activation='gelu'": convolution(x, weight, activation="gelu"),
    }
    found = {text: error_of(call) for text, call in wrong.items()}
    length = 6 if mesh.get_rank() else 4  # ranks that disagree raise, all of them
    grows = g.abs() if mesh.get_rank() else g  # as those that one rank calls with
    found["decays above 0"] = error_of(recurrence(q, q, v, grows, name="one rank"))
    found["shapes"] = error_of(recurrence(q[:, :length], q[:, :length], v[:, :length], g[:, :length]))
    return found


def test_arguments_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, refusals):
        for text, error in found.items():
            assert text in error and error.startswith(("ValueError", "TypeError")), (text, error)


@on_ranks
def saved() -> tuple[int, int, float, float]:
    """Bytes that a call saves and those of its inputs; errors in half precision of ranks and of one device."""
    world = dist.get_world_size()
    mesh = cp_mesh()
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "cp"))["cp"]
    wide = [random(2, 64, 2, 8), random(2, 64, 2, 8) / 3, random(2, 64, 4, 8), -random(2, 64, 4).abs()]
    wide.append(random(2, 64, 4).sigmoid())
    half = [x.bfloat16() for x in wide]
    want = recur(*(x.double() for x in half[:4]), half[4].double(), None)  # type: ignore[arg-type]
    one = linear_recurrence(*half, mesh=alone)  # type: ignore[arg-type]
    share = 64 // world
    at = slice(share * mesh.get_rank(), share * mesh.get_rank() + share)
    local = [x[:, at].contiguous().requires_grad_() for x in half]
    total = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal total
        total += x.nbytes
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = linear_recurrence(*local, mesh=mesh)  # type: ignore[arg-type]
    errors = [(x - y).abs().max().item() for x, y in ((out, want[:, at]), (one, want))]
    return total, sum(x.nbytes for x in local), errors[0], errors[1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_call_saves_its_inputs_and_rounds_like_one_device(world: int, ranks: Ranks) -> None:
    """For any number of ranks: nothing of the other ranks is kept."""
    for total, given, error, alone in ranks(world, saved):
        assert total == given + 8  # and the fingerprint of the documents
        assert error <= 2 * alone


@on_ranks
def counted() -> bool:
    """Backward under a dispatch mode, in which torch.func would end the process."""
    mesh = cp_mesh()
    q, k, v, decay = (random(1, 8, 2, 4).requires_grad_() for _ in range(4))
    with FlopCounterMode(display=False):
        linear_recurrence(q, k, v, -decay.abs(), mesh=mesh).sum().backward()
        attention(q.mT, k.mT, v.mT, mesh=mesh, softcap=2.0).sum().backward()
    return all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v, decay))


def test_derivatives_under_a_counter_of_flops(ranks: Ranks) -> None:
    assert ranks(2, counted) == [True, True]


@pytest.mark.parametrize("channels", [1, 2, 32])
def test_decays_after_a_very_strong_one_are_kept(channels: int) -> None:
    """Differences of one running sum would lose them, in fp32 from about 1e4 on."""
    ones = torch.ones(1, 1, 1, 9, channels)
    for strong, at in product((-1e5, -1e9, torch.finfo(torch.float32).min, -torch.inf), (1, 2, 6)):
        g = torch.full((1, 1, 1, 9, channels), -0.5)
        g[..., at, :] = strong
        maps = affine(ones, ones, ones, g.requires_grad_())
        steps = [*range(1, at + 1), *range(1, 10 - at)]  # tokens since the strong one, or since the first
        want = torch.tensor([channels * sum(math.exp(-0.5 * i) for i in range(n)) for n in steps])
        torch.testing.assert_close(maps.O[..., 0].flatten(), want)
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in maps), g)
        assert gradient.isfinite().all() and gradient[..., at + 2, :].min().item() > 1
        # The delta rule, of which no sums are known: fp64, where the sums of a strong decay lose less.
        beta = torch.full((1, 1, 1, 9, 1), 0.5)
        keys = ones / channels**0.5
        got, exact = (affine(*(x.to(t) for x in (keys, keys, ones, g.detach(), beta))) for t in (g.dtype, torch.double))
        for x, y in zip(got, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
