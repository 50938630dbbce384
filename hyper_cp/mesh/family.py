"""One set of ranks as dp x cp at several degrees: every mesh and process group built once, and shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import cp_mesh
from .agreement import Agreement
from .arguments import is_int
from .comm import Axis
from .groups import Parts, groups_made, make_group, parts_of

Ranks = tuple[int, ...]

_GROUPS: dict[Parts, dist.ProcessGroup] = {}
"""This rank's group of each partition of ranks for which this process has made groups. The whole partition is the key,
so that all of its ranks agree on which groups exist."""


class MeshFamily:
    """A set of ranks seen as ``dp x cp`` at several context-parallel degrees; made by :func:`split_cp_mesh`.

    At degree d, ``d`` adjacent ranks share a sequence and ``size / d`` such groups work on different samples.

    Attributes:
        degrees: the degrees of this family, ascending; the first is 1 (context parallelism off).
        ranks: the global ranks, ascending.
        rank: this process's place among them, 0 to ``size - 1``.
    """

    def __init__(self, ranks: Ranks, meshes: dict[int, DeviceMesh], agreement: Agreement | None = None) -> None:
        self.ranks, self._meshes, self.agreement = ranks, meshes, agreement
        self.degrees = tuple(sorted(meshes))
        self.rank = ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def mesh(self, degree: int) -> DeviceMesh:
        """The 2-D mesh ``("dp", "cp")`` of shape ``(size / degree, degree)``."""
        if not is_int(degree) or degree not in self._meshes:
            raise ValueError(
                f"degree={degree!r} is not in this family of {self.size} ranks. Its degrees are "
                f"{', '.join(map(str, self.degrees))}. Choose one of them, or name it in "
                "split_cp_mesh(mesh, degrees=...)"
            )
        return self._meshes[degree]

    def cp(self, degree: int) -> DeviceMesh:
        """The 1-D mesh ``("cp",)`` of the ``degree`` adjacent ranks that share this rank's sequences."""
        return self.mesh(degree)["cp"]

    def dp(self, degree: int) -> DeviceMesh:
        """The 1-D mesh ``("dp",)`` of the ranks in this rank's place of every cp group of this degree.

        Its size is the number of samples that a step at this degree covers with one sample per group:
        evaluation at degree 4 covers 4 times fewer than at degree 1. ``dp(1)`` are all ranks.
        """
        return self.mesh(degree)["dp"]

    def __repr__(self) -> str:
        return f"MeshFamily({self.size} ranks, degrees {', '.join(map(str, self.degrees))})"


def split_cp_mesh(mesh: DeviceMesh, degrees: Sequence[int] | None = None) -> MeshFamily:
    """Build the meshes of every context-parallel degree over the ranks of ``mesh``.

    Use it for evaluation at another degree than training, and for a degree per micro-batch
    (:class:`~hyper_cp.DynamicContextParallel`)::

        family = split_cp_mesh(init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp")))
        family.cp(4), family.dp(4)  # 4 ranks per sequence, size / 4 samples at a time

    Args:
        mesh: the ranks to share out: 1-D (of any name), or with dimensions of which the innermost is named
            ``"cp"`` (``mesh["dp", "cp"]`` of a larger mesh), or ``("ring", "ulysses")``.
        degrees: context-parallel degrees, divisors of the number of ranks. Default: all of them. Degree 1 is
            always there.

    All ranks of ``mesh`` must make the call, as for every collective; other ranks need not.

    No process group is made twice: the groups of ``mesh`` and of earlier calls are used again, and a cp group of one
    degree may be the dp group of another. On n = 2^k ranks
    every rank is in 2k groups, one of which holds this rank alone.

    Raises:
        ValueError, TypeError: on meshes and degrees that do not fit, before any communication.

    Example::

        >>> split_cp_mesh(mesh)
        MeshFamily(2 ranks, degrees 1, 2)

    Source: Megatron-Bridge (PR #3755) swaps the cp groups of a model for an evaluation; Megatron-LM's dynamic
    context parallelism prebuilds its groups likewise.
    """
    ranks = _checked_ranks(mesh)
    chosen = _checked_degrees(degrees, len(ranks))
    groups = {parts: g for parts, g in _GROUPS.items() if _alive(g)} | _groups_of(mesh)
    _GROUPS.clear()
    agreement = Agreement.between(ranks, mesh.get_all_groups())
    if agreement is not None:  # a rank that makes other groups, or names them otherwise, would leave the others waiting
        signature = ("degrees", tuple(chosen)), ("number of process groups", groups_made())
        agreement.compare_if_new("groups", signature, f"mesh of {len(ranks)} ranks", "split_cp_mesh")
    built = {}
    for degree in chosen:  # the same order on every rank, which makes the group-wise set-up free of deadlock
        table = torch.tensor(ranks, device="cpu").view(-1, degree)
        members = [parts_of(table.T.tolist()), parts_of(table.tolist())]
        for name, parts in zip(("dp", "cp"), members, strict=True):
            if parts not in groups:
                parent = groups.get((ranks,)) or _world_of(ranks)
                groups[parts] = make_group(parts, parent, f"{name}, degree {degree}", cpu=True)
        built[degree] = DeviceMesh.from_group(
            [groups[parts] for parts in members], mesh.device_type, mesh=table, mesh_dim_names=("dp", "cp")
        )
    _GROUPS.update(groups)
    return MeshFamily(ranks, built, agreement)


def _checked_ranks(mesh: DeviceMesh) -> Ranks:
    ranks = cp_mesh.ranks_of(mesh, '(dp_size, cp_size), mesh_dim_names=("dp", "cp")', "split_cp_mesh")
    names = mesh.mesh_dim_names
    if mesh.ndim > 1 and names != cp_mesh.MESH_NAMES and (not names or names[-1] != "cp"):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions named {names}: the innermost must be 'cp'. Adjacent ranks share a "
            'sequence. Slice these dimensions out of a larger mesh, as in mesh["dp", "cp"]'
        )
    return tuple(ranks)


def _checked_degrees(degrees: Sequence[int] | None, size: int) -> list[int]:
    works = cp_mesh.divisors(size)
    if degrees is None:
        return works
    if not isinstance(degrees, (list, tuple, range, set, frozenset)):
        raise TypeError(
            f"degrees={degrees!r} must be a list of context-parallel degrees. Each gets a mesh. Pass degrees=[2], say, "
            "or None for all"
        )
    wrong = [d for d in degrees if not is_int(d) or d not in works]
    if wrong:
        raise ValueError(
            f"degrees={list(degrees)!r}: {wrong[0]!r} does not divide the {size} ranks of the mesh. All groups of a "
            f"degree have equally many ranks. Degrees that divide it: {', '.join(map(str, works))}"
        )
    return sorted({1, *degrees})


def _groups_of(mesh: DeviceMesh) -> dict[Parts, dist.ProcessGroup]:
    """The groups of every dimension, by the partition of the mesh's ranks that they belong to."""
    rows = (mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(mesh.shape))
    return {parts_of(parts): group for parts, group in zip(rows, mesh.get_all_groups(), strict=True)}


def _world_of(ranks: Ranks) -> dist.ProcessGroup | None:
    """The default process group, if these are its ranks."""
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else None


def _alive(group: dist.ProcessGroup) -> bool:
    return Axis(0, 1, group).alive()
