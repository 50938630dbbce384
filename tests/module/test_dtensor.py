"""q, k, v as DTensors: every placement that means something, exact with gradients; every other refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from tests.harness import modules
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import named_error, on_ranks

BATCH, SEQ, HEADS, DIM = 2, 16, 8, 4
SEQ_DIM, HEAD_DIM = 2, 1
BNSD = {"seq_dim": SEQ_DIM, "head_dim": HEAD_DIM}
S, H, R, B = Shard(SEQ_DIM), Shard(HEAD_DIM), Replicate(), Shard(0)
RING = {"ulysses_degree": 1, "kv_exchange": "ring"}


def whole(kv_heads: int = HEADS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, h, SEQ, DIM, generator=g, dtype=torch.float64) for h in (HEADS, kv_heads, kv_heads)]


def expected(kv_heads: int) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one device, under a weighted sum."""
    qkv = [x.requires_grad_() for x in whole(kv_heads)]
    out = plain_attention(*qkv, is_causal=True)
    return out.detach(), list(torch.autograd.grad((out * weights()).sum(), qkv))


def weights() -> Tensor:
    return torch.randn(BATCH, HEADS, SEQ, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Case:
    """A module under ContextParallel on ``cp`` dims of a mesh, its inputs, and how outputs are to be placed."""

    def __init__(
        self,
        shape: dict[str, int],
        on: str,
        q: tuple[Placement, ...],
        kv: tuple[Placement, ...] | None = None,
        kv_heads: int = 4,
        out: tuple[str, tuple[Placement, ...]] | None = None,
        **style: Any,
    ) -> None:
        self.shape, self.on, self.q, self.kv, self.kv_heads = shape, on.split(), q, kv or q, kv_heads
        self.out = out or (on, q)
        self.style = style

    def errors(self, root: DeviceMesh, compiled: bool) -> list[float]:
        cp = root["cp"] if "cp" in self.shape else root["ring", "ulysses"]
        module = parallelize_module(modules.BNSD(), cp, ContextParallel(**BNSD, **self.style))
        # Other dimensions than those of the DTensors' mesh hold this rank's part as local tensors do.
        qkv = [self.given(x, root, cp, i > 0).requires_grad_() for i, x in enumerate(whole(self.kv_heads))]
        run: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        out = run(*qkv)
        names, placements = self.out[0].split(), self.out[1]
        assert isinstance(out, DTensor) and out.placements == placements, out
        assert out.device_mesh == (root if names == list(self.shape) else root[tuple(names)])
        want, grads = expected(self.kv_heads)
        loss = (out * distribute_tensor(self.part(weights(), root, cp, names), out.device_mesh, placements)).sum()
        found = torch.autograd.grad(full(loss), qkv)
        errors = [relative_error(out.full_tensor(), self.part(want, root, cp, names))]
        for g, w in zip(found, grads, strict=True):
            mine = self.part(w, root, cp, self.on)
            errors.append(relative_error(full(g), mine))
        return errors

    def given(self, x: Tensor, root: DeviceMesh, cp: DeviceMesh, is_kv: bool) -> Tensor:
        x = self.part(x, root, cp, self.on)
        if not self.on:
            return x
        mesh = root if self.on == list(self.shape) else root[tuple(self.on)]
        return distribute_tensor(x, mesh, self.kv if is_kv else self.q).detach()

    @staticmethod
    def part(x: Tensor, root: DeviceMesh, cp: DeviceMesh, names: list[str]) -> Tensor:
        """The whole tensor of a DTensor on the mesh of these names: the cp share, unless cp is among them."""
        if "cp" in names or "ring" in names:
            return x.clone()
        return x.chunk(cp.size(), SEQ_DIM)[(cp.mesh == dist.get_rank()).flatten().nonzero().item()].clone()


CPTP = {"cp": 2, "tp": 2}
CASES: dict[str, Case] = {
    "tp heads": Case(CPTP, "tp", (H,)),
    "tp heads, ring": Case(CPTP, "tp", (H,), **RING),
    "tp replicated": Case(CPTP, "tp", (R,)),
    "tp heads, shared kv": Case(CPTP, "tp", (H,), (R,), kv_heads=2),
    "tp heads, one kv": Case(CPTP, "tp", (H,), (R,), kv_heads=1, **RING),
    "tp 4, shared kv": Case({"cp": 1, "tp": 4}, "tp", (H,), (R,), kv_heads=2),
    "cp x tp": Case(CPTP, "cp tp", (S, H)),
    "cp x tp, ring, shared kv": Case(CPTP, "cp tp", (S, H), (S, R), kv_heads=2, **RING, load_balance=True),
    "tp x cp": Case({"tp": 2, "cp": 2}, "tp cp", (R, S)),
    "dp x cp": Case({"dp": 2, "cp": 2}, "dp cp", (B, S)),
    "cp alone": Case({"cp": 4}, "cp", (S,), ulysses_degree=2),
    "keeps cp, local": Case({"cp": 4}, "", (), out=("cp", (S,)), use_local_output=False),
    "keeps cp, tp": Case(CPTP, "tp", (H,), out=("cp tp", (S, H)), use_local_output=False),
    "keeps cp, tp first": Case({"tp": 2, "cp": 2}, "tp", (H,), out=("tp cp", (H, S)), use_local_output=False, **RING),
    "keeps cp, cp x tp": Case(CPTP, "cp tp", (S, H), use_local_output=False),
    "keeps cp, 2-D": Case({"ring": 2, "ulysses": 2}, "", (), out=("ring ulysses", (S, S)), use_local_output=False),
    "called inside a block": Case(CPTP, "tp", (H,), qkv_indices=None),
    "called inside a block, ring, shared kv": Case(CPTP, "tp", (H,), (R,), kv_heads=2, qkv_indices=None, **RING),
    "cp of one rank": Case({"cp": 1, "tp": 4}, "cp tp", (S, H), use_local_output=False),
}
CUBES = {
    "ring x ulysses x tp": Case({"ring": 2, "ulysses": 2, "tp": 2}, "ring ulysses tp", (S, S, H), kv_heads=8),
    "dp x cp x tp": Case({"dp": 2, "cp": 2, "tp": 2}, "cp tp", (S, H)),
}


@on_ranks
def errors_of(names: list[str], compiled: bool) -> dict[str, list[float]]:
    found, roots = {}, {}
    for name in names:
        if compiled:
            torch._dynamo.reset()
        case = {**CASES, **CUBES}[name]
        shape = tuple(case.shape.items())
        if shape not in roots:  # making process groups is what takes time here
            roots[shape] = init_device_mesh("cpu", tuple(case.shape.values()), mesh_dim_names=tuple(case.shape))
        found[name] = case.errors(roots[shape], compiled)
    return found


def check(results: list[dict[str, list[float]]]) -> None:
    for found in results:
        assert all(max(errors) <= 1e-10 for errors in found.values()), found


FEW = ["tp heads", "tp heads, shared kv", "cp x tp", "cp alone", "keeps cp, tp"]


@pytest.mark.parametrize(
    "world, names",
    [
        (4, FEW),
        pytest.param(4, [name for name in CASES if name not in FEW], marks=pytest.mark.slow),
        pytest.param(8, list(CUBES), marks=pytest.mark.slow),
    ],
    ids=["few", "others", "three dimensions"],
)
def test_outputs_and_gradients_in_every_placement(ranks: Any, world: int, names: list[str]) -> None:
    check(ranks(world, errors_of, names, False))


@pytest.mark.slow
def test_compiled(ranks: Any) -> None:
    check(ranks(4, errors_of, ["cp x tp, ring, shared kv"], True, timeout=300))


# --------------------------------------------------------------------------- refusals


Make = Callable[[DeviceMesh], Iterable[Any]]
"""Makes q, k and v for a module that is styled on the cp dimension of a cp x tp mesh."""


def placed(names: str, *placements: tuple[Placement, ...], kv_heads: int = HEADS) -> Make:
    """DTensors on these dimensions of the mesh, placed so (q, and k and v)."""

    def make(root: DeviceMesh) -> list[Tensor]:
        mesh = root if names == "cp tp" else root[names]
        each = (placements[0], placements[-1], placements[-1])
        return [DTensor.from_local(x, mesh, p) for x, p in zip(whole(kv_heads), each, strict=True)]

    return make


def mixed(root: DeviceMesh) -> list[Tensor]:
    q, k, v = whole()
    return [DTensor.from_local(q, root["tp"], [H]), k, DTensor.from_local(v, root["tp"], [H])]


def other_meshes(root: DeviceMesh) -> list[Tensor]:
    q, k, _ = whole()
    tp, both = (DTensor.from_local(x, m, p) for x, m, p in ((q, root["tp"], [H]), (k, root, [S, H])))
    return [tp, both, both]


def world_as_one_dimension(root: DeviceMesh) -> Iterable[Tensor]:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return (DTensor.from_local(x, flat, [S]) for x in whole())


def two_roots(root: DeviceMesh) -> Iterable[Tensor]:
    tp = DeviceMesh.from_group(root.get_group("tp"), "cpu", mesh_dim_names=("tp",))
    return (DTensor.from_local(x, tp, [H]) for x in whole())


WRONG: dict[str, tuple[str, Make]] = {
    "not dispatched": (
        r"q is placed R.* on mesh dimension 'cp'\. Every cp rank has the whole sequence.*Shard\(2\)",
        placed("cp tp", (R, H)),
    ),
    "heads over cp": (
        r"on mesh dimension 'cp', where the sequence is shared. Redistribute it to Shard\(2\)",
        placed("cp tp", (H, R)),
    ),
    "partial": ("'tp': a sum that is not done yet", placed("tp", (Partial(),))),
    "partial k": ("k is placed P.*a sum that is not done", placed("tp", (H,), (Partial(),))),
    "sequence over tp": (
        r"'tp'. That splits the sequence over ranks outside the cp mesh.*Shard\(1\) \(heads\)",
        placed("tp", (S,)),
    ),
    "channels over tp": ("That splits the size of a head", placed("tp", (Shard(3),))),
    "unlike": (
        r"q is placed \(Replicate.* and k \(Shard.*They must be equal, or k Replicate\(\) where q is Shard\(1\)",
        placed("tp", (R,), (H,)),
    ),
    "unlike batch": ("They must be equal", placed("tp", (B,), (R,))),
    "groups": (
        "q has 16 heads / tp 2 = 8 local heads, whose groups do not fit the 3 replicated heads of k",
        placed("tp", (H,), (R,), kv_heads=3),
    ),
    "uneven": (
        "q has 7 heads / tp 2. Every rank must have the same number",
        lambda root: (distribute_tensor(x[:, :7], root["tp"], [H]) for x in whole()),
    ),
    "ulysses after tp": (
        r"q has 6 heads / tp 2 = 3 local heads, k has 6 heads / tp 2 = 3 local heads\. ulysses_degree=2 cannot split 3",
        lambda root: (DTensor.from_local(x[:, :3], root["tp"], [H]) for x in whole()),
    ),
    "mixed": ("TypeError: q is a DTensor, and k is a Tensor", mixed),
    "other meshes": ("q, k, v must be on one mesh", other_meshes),
    "world": (r"dimension 'all' has some of the cp ranks .* without being the cp", world_as_one_dimension),
    "head-tail": (
        "with layout='head_tail'. Such a placement means contiguous order",
        placed("cp tp", (S, H)),
    ),
    "two roots": ("Slice both from one init_device_mesh", two_roots),
    "functional": ("TypeError: takes local tensors", placed("tp", (H,))),
}
STYLES: dict[str, dict[str, Any]] = {"head-tail": {"layout": "head_tail"}, "two roots": {"use_local_output": False}}


@on_ranks
def refused(kind: str) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    make = WRONG[kind][1]
    with comm.record_traffic() as log:
        try:
            if kind == "functional":
                attention(*make(root), mesh=root["cp"])
            else:
                parallelize_module(modules.BNSD(), root["cp"], ContextParallel(**BNSD, **STYLES.get(kind, {})))(
                    *make(root)
                )
        finally:
            if any(operation != "agreement" for operation, _ in log.entries):
                raise SystemError(f"communicated before refusing: {log.entries}")


@pytest.mark.parametrize("kind", WRONG)
def test_placements_that_mean_nothing_are_refused(ranks: Any, kind: str) -> None:
    ranks.raises(4, *named_error(WRONG[kind][0]), refused, kind)


# --------------------------------------------------------------------------- keys and values in one tensor


class Packed(nn.Module):
    """Latent attention: keys and values ``[B, S, H, Dk + Dv]`` in one tensor."""

    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv.split([q.shape[-1], kv.shape[-1] - q.shape[-1]], dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@on_ranks
def packed() -> tuple[list[float], list[list[str]]]:
    """Errors of outputs and gradients with kv by position and by keyword, as DTensors; and what Ulysses sent."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    g = torch.Generator().manual_seed(3)
    q, kv = (torch.randn(2, SEQ, HEADS, d, generator=g, dtype=torch.float64) for d in (DIM, DIM + 2))
    want_in = [x.clone().requires_grad_() for x in (q, kv)]
    k, v = want_in[1].split([DIM, 2], dim=-1)
    want = plain_attention(*(x.transpose(1, 2) for x in (want_in[0], k, v)), is_causal=True).transpose(1, 2)
    grads = torch.autograd.grad(want.square().sum(), want_in)
    errors, sent, rank = [], [], root["cp"].get_local_rank()
    here = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2)
    for mode in ({}, RING):
        style = ContextParallel(qkv_indices=(0, 1, 1), **mode)
        named = ContextParallel(qkv_indices=(0, 1, 1), qkv_kwarg_names=("q", "kv", "kv"), **mode)
        for one, keywords, tp in ((style, False, False), (named, True, False), (style, True, True)):
            module = parallelize_module(Packed(), root["cp"], one)
            mine = [x[:, here].clone().requires_grad_() for x in (q, kv)]
            if tp:
                mine = [distribute_tensor(x.detach(), root["tp"], [Shard(2)]).requires_grad_() for x in mine]
            with comm.record_traffic() as log:
                out = module(q=mine[0], kv=mine[1]) if keywords else module(*mine)
            if not mode:
                sent.append([name for name, _ in log.entries if name != "agreement"])
            found = (out, *torch.autograd.grad(full(out).square().sum(), mine))
            errors += [relative_error(full(a), b[:, here]) for a, b in zip(found, (want, *grads), strict=True)]
    return errors, sent


def test_keys_and_values_in_one_tensor(ranks: Any) -> None:
    for errors, sent in ranks(4, packed):
        assert max(errors) <= 1e-10, errors
        assert sent == [["all_to_all"] * 3] * 3  # q, kv, out
