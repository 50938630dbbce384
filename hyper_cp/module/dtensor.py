"""q, k, v that are DTensors: the local tensors a rank attends with, and outputs placed as q was.

On the cp dimension of its mesh a DTensor must be ``Shard(seq_dim)``. On every other dimension (tensor, data
parallel) it may shard heads or batch, which attention treats one by one, or nothing. Any other placement would need a
communication that the user did not request, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._torch.modules import root_mesh


@dataclass(frozen=True)
class Outputs:
    """The mesh and placements of the DTensors that a styled module returns."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def wrap(self, x: Tensor) -> DTensor:
        return DTensor.from_local(x, self.mesh, self.placements, run_check=False)


class CPDims:
    """Finds the dimension(s) of a cp mesh in other meshes, by their ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.names = mesh, tuple(mesh.mesh_dim_names or ())
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        # A 2-D cp mesh is two dimensions of another mesh, or flattened to one.
        own = [ranks_along(mesh, i) for i in range(mesh.ndim) if mesh.size(i) > 1]
        self.spellings = ([self.ranks], own)

    def within(self, mesh: DeviceMesh, what: str) -> list[int]:
        """The dimensions of ``mesh`` that share the sequence; ``ValueError`` if one mixes cp ranks with others."""
        dims = [i for i in range(mesh.ndim) if len(set(ranks_along(mesh, i)) & set(self.ranks)) > 1]
        if dims and [ranks_along(mesh, i) for i in dims] not in self.spellings:
            raise ValueError(
                f"{what} is a DTensor on a mesh whose dimension {', '.join(_name(mesh, i) for i in dims)} has some of "
                f"the cp ranks {self.ranks} without being the cp dimension. Use a mesh that has cp as a dimension of "
                "its own, or local tensors"
            )
        return dims

    def outputs(self, like: Outputs | None, seq_dim: int, what: str) -> Outputs:
        """``like`` with the cp placement added (``use_local_output=False``)."""
        if like is None:
            return Outputs(self.mesh, (Shard(seq_dim),) * self.mesh.ndim)
        names = tuple(like.mesh.mesh_dim_names or ())
        if self.within(like.mesh, what) or (self.names and set(self.names) <= set(names)):
            return like
        placed = {**dict(zip(names, like.placements, strict=False)), **dict.fromkeys(self.names, Shard(seq_dim))}
        # Both placements need one mesh, and one that equals the user's own.
        root = root_mesh(like.mesh)
        both = tuple(name for name in root.mesh_dim_names or () if name in placed)
        if len(both) != self.mesh.ndim + like.mesh.ndim or root != root_mesh(self.mesh):
            raise ValueError(
                f"{what} is a DTensor on a mesh {names}, to which use_local_output=False adds {self.names}. No mesh "
                "has all of these dimensions. Slice both from one init_device_mesh(..., mesh_dim_names=...), or use "
                "use_local_output=True"
            )
        return Outputs(root[both], tuple(placed[name] for name in both))


def unwrap(
    module: str, qkv: Sequence[Tensor], cp: CPDims, layout: str, seq_dim: int, head_dim: int
) -> tuple[list[Tensor], Outputs]:
    """The local tensors of the DTensors q, k, v (or q and k with v in it), differentiably, and where outputs go.

    Keys and values may be replicated where the heads of the queries are sharded (fewer of them than
    tensor-parallel ranks): each rank takes the heads that its queries use.

    Raises:
        ValueError: before any communication, if they cannot be attended as they lie.
    """
    found = [x for x in qkv if isinstance(x, DTensor)]
    q, mesh = found[0], found[0].device_mesh
    cp_dims = cp.within(mesh, f"{module}: q")
    if cp_dims and layout != "contiguous":
        raise ValueError(
            f"{module}: q is placed {q.placements} on a mesh with the cp dimension, with layout={layout!r}. Such a "
            "placement means contiguous order. Pass DTensors without that dimension, or local tensors"
        )
    for what, x in zip("qkv", found, strict=False):
        if x.device_mesh != mesh:
            raise ValueError(
                f"{module}: q is on {mesh}, {what} on {x.device_mesh}. As DTensors q, k, v must be on one mesh. Make "
                f"{what} on that of q"
            )
        _check_placements(f"{module}: {what}", x, cp_dims, seq_dim, head_dim)
        _check_even(f"{module}: {what}", x, seq_dim, head_dim)
    others = [_beside(module, what, q, x, head_dim) for what, x in zip("kv", found[1:], strict=False)]
    return [q.to_local(), *others], Outputs(mesh, tuple(q.placements))


def heads_of(what: str, x: Tensor, head_dim: int) -> str:
    """For errors: ``"q has 8 heads"``, or ``"q has 8 heads / tp 2 = 4 local heads"``."""
    if not isinstance(x, DTensor) or not _split_by(x, head_dim):
        return f"{what} has {x.shape[head_dim]} heads"
    return f"{what} has {_quotient(x, head_dim, 'heads')} = {x.shape[head_dim] // _ways(x, head_dim)} local heads"


def _check_placements(what: str, x: DTensor, cp_dims: list[int], seq_dim: int, head_dim: int) -> None:
    mesh = x.device_mesh
    for i, placement in enumerate(x.placements):
        where = f"{what} is placed {placement} on mesh dimension {_name(mesh, i)}"
        if isinstance(placement, Partial):
            raise ValueError(
                f"{where}: a sum that is not done yet. Attention needs its result. Redistribute it to Shard or "
                "Replicate first"
            )
        dim = placement.dim % x.ndim if type(placement) is Shard else None
        if dim is None and not isinstance(placement, Replicate):
            raise ValueError(
                f"{where}, which gives ranks something else than one adjacent part each. Attention takes parts of the "
                f"heads, or all of them. Redistribute it to Shard({head_dim}) or Replicate()"
            )
        if mesh.size(i) == 1:
            continue
        if i in cp_dims and dim is None:
            raise ValueError(
                f"{where}. Every cp rank has the whole sequence, so it was not dispatched. Redistribute it to "
                f"Shard({seq_dim}), or dispatch the batch (ContextParallelHandler.dispatch)"
            )
        if i in cp_dims and dim != seq_dim:
            raise ValueError(f"{where}, where the sequence is shared. Redistribute it to Shard({seq_dim})")
        if i not in cp_dims and dim in (seq_dim, x.ndim - 1):
            part = "sequence" if dim == seq_dim else "size of a head"
            raise ValueError(
                f"{where}. That splits the {part} over ranks outside the cp mesh. Redistribute it to "
                f"Shard({head_dim}) (heads) or Replicate()"
            )


def _check_even(what: str, x: DTensor, seq_dim: int, head_dim: int) -> None:
    for dim, size in enumerate(x.shape):
        if size % _ways(x, dim):
            noun = {seq_dim: "positions", head_dim: "heads"}.get(dim, "rows")
            raise ValueError(
                f"{what} has {_quotient(x, dim, noun)}. Every rank must have the same number. Change the number, or "
                "the size of that mesh dimension"
            )


def _beside(module: str, what: str, q: DTensor, x: DTensor, head_dim: int) -> Tensor:
    """The keys or values that this rank's queries attend."""
    if x.placements == q.placements:
        return x.to_local()
    differ = [i for i, (a, b) in enumerate(zip(q.placements, x.placements, strict=True)) if a != b]
    if differ != _split_by(q, head_dim) or len(differ) > 1 or not isinstance(x.placements[differ[0]], Replicate):
        raise ValueError(
            f"{module}: q is placed {q.placements} and {what} {x.placements} on the mesh "
            f"{q.device_mesh.mesh_dim_names}. They must be equal, or {what} Replicate() where q is Shard({head_dim}). "
            "Redistribute one of them"
        )
    (i,) = differ
    ways, heads, q_heads = q.device_mesh.size(i), x.shape[head_dim], q.shape[head_dim]
    if q_heads % heads or (heads % ways and ways % heads):
        raise ValueError(
            f"{module}: {heads_of('q', q, head_dim)}, whose groups do not fit the {heads} replicated heads of {what}. "
            f"Use a tensor-parallel size that divides {heads} or is a multiple of it"
        )
    # A rank has the gradient of its own queries; their sum over the ranks is the gradient of x.
    grads = [Partial() if j == i else p for j, p in enumerate(x.placements)]
    first = q.device_mesh.get_coordinate()[i] * heads // ways  # type: ignore[index]
    return x.to_local(grad_placements=grads).narrow(head_dim, first, max(1, heads // ways))


@torch.compiler.assume_constant_result  # a compiled graph is guarded on the mesh
def ranks_along(mesh: DeviceMesh, dim: int) -> list[int]:
    """The ranks that differ from this one in one coordinate only."""
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(
            f"this rank is not part of {mesh}, on which a DTensor of q, k, v is. It has no part of that tensor. Call "
            "the module on the ranks of that mesh only"
        )
    ranks = mesh.mesh
    for i in reversed(range(mesh.ndim)):
        ranks = ranks if i == dim else ranks.select(i, here[i])
    return ranks.tolist()


def _name(mesh: DeviceMesh, dim: int) -> str:
    return repr(mesh.mesh_dim_names[dim]) if mesh.mesh_dim_names else str(dim)


def _split_by(x: DTensor, dim: int) -> list[int]:
    """The mesh dimensions that shard a tensor dimension."""
    return [i for i, p in enumerate(x.placements) if type(p) is Shard and p.dim % x.ndim == dim]


def _ways(x: DTensor, dim: int) -> int:
    """Into how many parts a tensor dimension is sharded."""
    ways = 1
    for i in _split_by(x, dim):
        ways *= x.device_mesh.size(i)
    return ways


def _quotient(x: DTensor, dim: int, noun: str) -> str:
    """``"8 heads / tp 2"``."""
    names = [f"{_name(x.device_mesh, i)} {x.device_mesh.size(i)}".replace("'", "") for i in _split_by(x, dim)]
    return " / ".join([f"{x.shape[dim]} {noun}", *names])
