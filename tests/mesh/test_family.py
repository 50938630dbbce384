"""Mesh families: the right ranks at every degree, process groups made once, attention on every member."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.family import split_cp_mesh
from hyper_cp.ops import attention
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks


def groups_in_process() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("cp",) if len(shape) == 1 else ("dp", "cp"))


@on_ranks
def members(shape: tuple[int, ...]) -> dict[int, tuple[list[int], list[int]]]:
    """Global ranks of this rank's cp and dp mesh at every degree, which also carry data."""
    family = split_cp_mesh(mesh_of(shape))
    found = {}
    for degree in family.degrees:
        cp, dp = family.cp(degree), family.dp(degree)
        assert (cp.mesh_dim_names, dp.mesh_dim_names) == (("cp",), ("dp",))
        assert family.mesh(degree).shape == (family.size // degree, degree)
        for mesh in (cp, dp):
            total = torch.tensor([2 ** dist.get_rank()])
            dist.all_reduce(total, group=mesh.get_group())
            assert total.item() == sum(2**r for r in mesh.mesh.tolist())  # the group has the mesh's ranks
            assert mesh.mesh[mesh.get_local_rank()] == dist.get_rank()
        found[degree] = (cp.mesh.tolist(), dp.mesh.tolist())
    return found


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2), (6,), (3, 2)])
def test_ranks_of_every_degree(ranks: Any, shape: tuple[int, ...]) -> None:
    world = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    for rank, found in enumerate(ranks(world, members, shape, warnings_as_errors=True)):
        assert list(found) == [d for d in range(1, world + 1) if world % d == 0]
        for degree, (cp, dp) in found.items():
            assert cp == [r for r in range(world) if r // degree == rank // degree]
            assert dp == [r for r in range(world) if r % degree == rank % degree]


@on_ranks
def groups_made(shape: tuple[int, ...]) -> list[int]:
    """Process groups made by: the first family, the same again, one of the flat mesh, views and attention."""
    mesh = mesh_of(shape)
    counts = [groups_in_process()]

    def count() -> None:
        counts.append(groups_in_process())

    family = split_cp_mesh(mesh)
    count()
    again, some = split_cp_mesh(mesh), split_cp_mesh(mesh, degrees=[2])
    count()
    assert some.degrees == (1, 2)
    assert again.cp(2).get_group() is family.cp(2).get_group() is some.cp(2).get_group()
    split_cp_mesh(init_device_mesh("cpu", (dist.get_world_size(),)))
    count()
    q = torch.randn(1, 8, 4, 8)
    for degree in family.degrees:
        assert cp_mesh.view(family.cp(degree), 1) is cp_mesh.view(again.cp(degree), 1)
        attention(q, q, q, mesh=family.cp(degree), is_causal=True)
        attention(q, q, q, mesh=family.cp(degree), is_causal=True, ulysses_degree=None)
    count()
    return [b - a for a, b in pairwise(counts)]


@pytest.mark.parametrize(
    "shape, made",
    [
        ((4,), 3),  # a mesh of all ranks has the world's group; one rank alone, a pair, a strided pair
        ((2, 2), 2),  # the mesh has both pairs: one rank alone, all ranks
        ((8,), 5),  # one alone, pairs and strided fours, fours and strided pairs
    ],
)
def test_groups_are_made_once(ranks: Any, shape: tuple[int, ...], made: int) -> None:
    for counts in ranks(shape[0] * (shape[1:] or (1,))[0], groups_made, shape):
        assert counts == [made, 0, 0, 0]


@on_ranks
def attention_error(layout: str) -> float:
    """Largest error of output and gradients over all degrees of one family, one after another."""
    family = split_cp_mesh(mesh_of((2, 2)))
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 16, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2, 4))
    wholes = [x.requires_grad_() for x in (q, k, v)]
    expected = plain_attention(q, k, v, is_causal=True)
    want = torch.autograd.grad(expected, wholes, dout)
    errors = []
    for degree in (1, 4, 2, 1, 2):
        handler = ContextParallelHandler(family.cp(degree), layout)
        shards = [handler.dispatch(x.detach(), 2).requires_grad_() for x in wholes]
        for mode in ({"kv_exchange": "ring"}, {"ulysses_degree": None}):
            out = attention(*shards, mesh=family.cp(degree), is_causal=True, enable_gqa=True, layout=layout, **mode)
            got = torch.autograd.grad(out, shards, handler.dispatch(dout, 2))
            errors.append(relative_error(handler.combine(out, 2), expected))
            errors += [relative_error(handler.combine(a, 2), b) for a, b in zip(got, want, strict=True)]
    return max(errors)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_attention_on_every_member(ranks: Any, layout: str) -> None:
    assert max(ranks(4, attention_error, layout)) <= 1e-10


@on_ranks
def evaluate(degree: int) -> tuple[int, float]:
    """Steps and mean of a per-token score over 8 samples at one degree: each step takes one sample per cp group."""
    family = split_cp_mesh(mesh_of((4,)))
    dp, handler = family.dp(degree), ContextParallelHandler(family.cp(degree), "head_tail")
    samples = torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total, steps = torch.zeros((), dtype=torch.float64), 0
    for first in range(0, len(samples), dp.size()):
        x = handler.dispatch(samples[first + dp.get_local_rank()][None, None], 2)
        total += attention(x, x, x, mesh=family.cp(degree), is_causal=True, layout="head_tail").square().sum()
        steps += 1
    dist.all_reduce(total, group=family.dp(1).get_group())
    return steps, total.item() / samples.numel()


def test_evaluation_at_another_degree(ranks: Any) -> None:
    x = torch.randn(8, 1, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = plain_attention(x, x, x, is_causal=True).square().mean().item()
    for degree, steps in ((1, 2), (2, 4), (4, 8)):
        for got_steps, got in ranks(4, evaluate, degree):
            assert got_steps == steps
            assert got == pytest.approx(expected, rel=1e-12)


@on_ranks
def inside_a_larger_mesh() -> tuple[list[int], list[int]]:
    """Two tensor-parallel lanes make a family each; lane 1 makes its own later, and not of the same degrees."""
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    family = split_cp_mesh(whole["dp", "cp"], degrees=[1] if whole["tp"].get_local_rank() else None)
    return list(family.degrees), family.dp(1).mesh.tolist()


def test_only_the_ranks_of_the_mesh_take_part(ranks: Any) -> None:
    assert ranks(4, inside_a_larger_mesh) == [([1, 2], [0, 2]), ([1], [1, 3])] * 2


@on_ranks
def absent() -> str:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    try:
        return str(split_cp_mesh(mesh))
    except ValueError as error:
        return str(error)


def test_a_rank_outside_the_mesh_is_told(ranks: Any) -> None:
    first, second, third = ranks(3, absent)
    assert first == second == "MeshFamily(2 ranks, degrees 1, 2)"
    assert "rank 2 is not part of mesh" in third


@on_ranks
def ask(degrees: Any, degree: Any) -> None:
    split_cp_mesh(mesh_of((2, 2)), degrees).cp(degree)


@on_ranks
def split_wrong(kind: str) -> None:
    wrong = {
        "type": "cp",
        "cp outside": init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("cp", "dp", "tp"))["cp", "dp"],
        "no names": init_device_mesh("cpu", (2, 1)),
        "order": DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)),
    }
    split_cp_mesh(wrong[kind])  # type: ignore[arg-type]


def test_words(ranks: Any) -> None:
    ranks.raises(4, ValueError, r"degree=3 is not in this family of 4 ranks. Its degrees are 1, 2, 4", ask, None, 3)
    ranks.raises(4, ValueError, r"degree=4 is not in .* 1, 2. Choose.*degrees=", ask, [2], 4)
    ranks.raises(4, ValueError, r"degree=True is not in", ask, None, True)
    ranks.raises(4, ValueError, r"degrees=\[2, 3\]: 3 does not divide the 4 ranks.*1, 2, 4", ask, [2, 3], 2)
    ranks.raises(2, TypeError, "mesh must be a .*DeviceMesh, got str", split_wrong, "type")
    ranks.raises(2, ValueError, r"named \('cp', 'dp'\): the innermost must be 'cp'", split_wrong, "cp outside")
    ranks.raises(2, ValueError, "2 dimensions named None", split_wrong, "no names")
    ranks.raises(2, ValueError, r"lists its ranks as \[1, 0\], not ascending", split_wrong, "order")
