"""One cp mesh seen as ring x ulysses: ranks, sizes and process groups of both dimensions.

A :class:`CPMesh` is built once per cp mesh and degree, however many modules use it. Custom ops
take strings, so a mesh is known to them by its ``key``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .comm import Axis, gather_numbers

MESH_NAMES = ("ring", "ulysses")
_DIMS = 5  # that shapes are filled up to when they are compared


@dataclass(eq=False)
class Facts:
    """What is true of the batch that a cp mesh works on now; all views of the mesh share it. It belongs
    to the mesh and not to a thread, since backward recomputes in threads of its own."""

    documents: Tensor | None = None


@dataclass(frozen=True, eq=False)
class CPMesh:
    """A cp mesh of ``ring.size * ulysses.size`` ranks; cp rank = ring rank * ulysses size +
    ulysses rank (Ulysses innermost: adjacent ranks, the fastest links)."""

    key: str
    ring: Axis
    ulysses: Axis
    flat: tuple[Axis, ...]
    """Axes that together span the whole mesh, innermost first (for gathering along all of it)."""
    facts: Facts

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    def ulysses_peers(self, ring_rank: int | None = None) -> range:
        """cp ranks that share the sequence of one ring rank (default: of this one)."""
        first = (self.ring.rank if ring_rank is None else ring_rank) * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def check_shapes(self, *tensors: Tensor, documents: Tensor | None = None) -> None:
        """Raise ``ValueError``, on every rank, if the ranks bring tensors of different shapes or different documents:
        transfers would hang or mix up positions. A few bytes between hosts; nothing under torch.compile, whose graphs
        fix shapes, and nothing where the process group has no backend for the CPU."""
        if self.size == 1 or torch.compiler.is_compiling():
            return
        mine = [n for x in tensors for n in (*x.shape, *[-1] * (_DIMS - x.ndim))[:_DIMS]]
        digest = 0 if documents is None else hash(tuple(documents.flatten().tolist()))
        everyone = gather_numbers(self.flat, [*mine, digest])
        if everyone is None or all(theirs == everyone[0] for theirs in everyone):
            return
        if all(theirs[:-1] == mine for theirs in everyone):
            odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
            raise ValueError(
                f"the ranks of the {self} call attention with different packed documents: ranks {odd} have others (or "
                "none) than rank 0. Enter the same documents block on every rank, with global cumulative lengths"
            )
        shapes = [
            [tuple(n for n in row[i : i + _DIMS] if n >= 0) for i in range(0, len(mine), _DIMS)] for row in everyone
        ]
        raise ValueError(
            f"the ranks of the {self} call attention with different shapes: "
            + "; ".join(f"rank {r}: {', '.join(map(str, found))}" for r, found in enumerate(shapes))
            + ". Every rank holds an equal share of one sequence: shard the batch with ContextParallelHandler."
            "dispatch, which pads (pad_value=) lengths that do not split evenly"
        )

    def __str__(self) -> str:
        return f"cp mesh of {self.size} ranks (ring {self.ring.size} x ulysses {self.ulysses.size})"

    def __deepcopy__(self, memo: object) -> CPMesh:
        return self  # process groups cannot be copied, and a copied model shares its ranks


_BY_KEY: dict[str, CPMesh] = {}


def register(mesh: CPMesh) -> CPMesh:
    """Make ``mesh`` known to the custom ops under its key; drop meshes whose groups are gone."""
    for key in [k for k, m in _BY_KEY.items() if not all(a.alive() for a in (m.ring, m.ulysses))]:
        del _BY_KEY[key]
    _BY_KEY[mesh.key] = mesh
    return mesh


def by_key(key: str) -> CPMesh:
    """The mesh registered under ``key`` (inside custom ops, where only strings travel)."""
    if key not in _BY_KEY:
        raise RuntimeError(
            f"the cp mesh {key!r} is not known in this process: its process groups were destroyed or "
            "the graph was compiled elsewhere. Apply ContextParallel again after init_process_group"
        )
    return _BY_KEY[key]


def divisors(n: int) -> list[int]:
    """All divisors of ``n``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless ``mesh`` is a 1-D mesh or a 2-D ("ring", "ulysses") mesh with this rank in it."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}. Make one with "
            'init_device_mesh(device_type, (cp_size,), mesh_dim_names=("cp",))'
        )
    names = mesh.mesh_dim_names
    if mesh.ndim > 2 or (mesh.ndim == 2 and names != MESH_NAMES):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions named {names}: ContextParallel needs a 1-D mesh (for "
            f'example mesh["cp"]) or a 2-D mesh named {MESH_NAMES}. Slice the dimension(s) of the '
            "sequence out of the larger mesh first"
        )
    if mesh.mesh.flatten().tolist() != sorted(mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"mesh lists its ranks as {mesh.mesh.tolist()}, not ascending: process groups number their ranks "
            "in ascending order, so that data and attention would disagree. Build the mesh in that order"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of mesh {mesh}: apply ContextParallel only on the ranks of the mesh"
        )


def view(mesh: DeviceMesh, ulysses_degree: int | None = None) -> CPMesh:
    """See ``mesh`` as ring x ulysses with this Ulysses degree (``None``: all of a 1-D mesh, the
    ``ulysses`` dimension of a 2-D one).

    Process groups are made only for a true hybrid on a 1-D mesh, once per mesh and degree; all
    ranks of the mesh must make this call, in the same order, as for every collective.
    """
    check_mesh(mesh)
    if mesh.ndim == 2:
        return _view_2d(mesh, ulysses_degree)
    group = mesh.get_group()
    size = mesh.size()
    degree = size if ulysses_degree is None else ulysses_degree
    if not isinstance(degree, int) or isinstance(degree, bool):
        raise TypeError(f'ulysses_degree={degree!r} must be None or an int here ("auto" is for ContextParallel)')
    if degree < 1 or size % degree:
        raise ValueError(
            f"ulysses_degree={degree} does not divide the cp mesh of {size} ranks; degrees that do: "
            f"{', '.join(map(str, divisors(size)))}"
        )
    key = f"{group.group_name}/{size // degree}x{degree}"
    cached = _BY_KEY.get(key)
    if cached is not None and cached.flat[0].group is group:
        return cached
    whole = Axis.of(group)
    ranks = dist.get_process_group_ranks(group)
    if degree == size:
        ring, ulysses = Axis.alone(), whole
    elif degree == 1:
        ring, ulysses = whole, Axis.alone()
    else:
        block, lane = divmod(whole.rank, degree)
        ulysses = Axis.of(_subgroup(ranks[block * degree : (block + 1) * degree]))
        ring = Axis.of(_subgroup(ranks[lane::degree]))
    return register(CPMesh(key, ring, ulysses, (whole,), _facts_of(whole)))


def _view_2d(mesh: DeviceMesh, ulysses_degree: int | None) -> CPMesh:
    ring, ulysses = (Axis.of(mesh.get_group(name)) for name in MESH_NAMES)
    if ulysses_degree not in (None, ulysses.size):
        raise ValueError(
            f"ulysses_degree={ulysses_degree!r} contradicts the 2-D mesh, whose 'ulysses' dimension has "
            f"{ulysses.size} ranks: leave ulysses_degree=None or pass a 1-D mesh"
        )
    key = f"{ring.group.group_name}+{ulysses.group.group_name}/{ring.size}x{ulysses.size}"
    cached = _BY_KEY.get(key)
    if cached is not None and [a.group for a in cached.flat] == [ulysses.group, ring.group]:
        return cached
    return register(CPMesh(key, ring, ulysses, (ulysses, ring), _facts_of(ulysses, ring)))


def _facts_of(*axes: Axis) -> Facts:
    """The facts of the mesh that these axes span: those of its other views, if there are any."""
    groups = [axis.group for axis in axes]
    same = (m.facts for m in _BY_KEY.values() if [axis.group for axis in m.flat] == groups)
    return next(same, Facts())


def _subgroup(ranks: list[int]) -> dist.ProcessGroup:
    # Only the members make the call: other cp groups of a larger world need not take part.
    return dist.new_group(ranks, use_local_synchronization=True, group_desc="hyper_cp")


def degrees_within_host(mesh: DeviceMesh) -> list[int]:
    """Ulysses degrees whose blocks of adjacent ranks stay on one host.

    The host size is ``LOCAL_WORLD_SIZE`` (set by torchrun); without it, one host is assumed.
    """
    ranks = dist.get_process_group_ranks(mesh.get_group())
    host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()

    def local(degree: int) -> bool:
        blocks = (ranks[i : i + degree] for i in range(0, len(ranks), degree))
        return all(len({rank // host for rank in block}) == 1 for block in blocks)

    return [d for d in divisors(len(ranks)) if local(d)]
