"""One cp mesh seen as ring x ulysses: ranks, sizes and process groups of both dimensions.

A :class:`CPMesh` is built once per cp mesh and degree, however many modules use it. Custom ops take strings, so they
find a mesh by its ``key``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.compiling import is_compiling
from .agreement import Agreement, Signature
from .arguments import is_int
from .batch_state import BatchState
from .comm import Axis
from .groups import check_launch_order, groups_made, make_group, parts_of

MESH_NAMES = ("ring", "ulysses")


@dataclass(frozen=True, eq=False)
class CPMesh:
    """A cp mesh of ``ring.size * ulysses.size`` ranks; cp rank = ring rank * ulysses size + ulysses rank (Ulysses is
    innermost: adjacent ranks have the fastest links)."""

    key: str
    ring: Axis
    ulysses: Axis
    flat: tuple[Axis, ...]
    """Axes that together span the whole mesh, innermost first (for gathering along all of it)."""
    batch: BatchState
    agreement: Agreement | None = None
    """The signatures that the ranks have agreed on; all views of the mesh share it. None: nothing is compared."""

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    def ulysses_peers(self) -> range:
        """The cp ranks that share the sequence of this ring rank."""
        first = self.ring.rank * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def alive(self) -> bool:
        """True while the process groups exist."""
        return self.ring.alive() and self.ulysses.alive()

    def agree(
        self,
        kind: str,
        signature: Signature,
        caller: str = "attention",
        once: Signature = (),
        details: Callable[[], dict[str, str]] = dict,
        always: bool = False,
    ) -> None:
        """Compare ``signature`` with those of the other ranks if it is new on this mesh; else do nothing.

        All ranks of the mesh make this call, in the same order, before anything travels. Nothing is compared under
        torch.compile, whose graphs fix shapes, on one rank, and on a fake process group.

        Args:
            kind: ``"call"`` for what one attention call brings, ``"documents"`` for a table of documents, ``"plan"``,
                ``"weights"`` and ``"module"`` for a model and a module that are new. Signatures of different kinds are
                compared and recorded apart, so that documents count once a batch, not once a layer.
            signature: pairs of a field's name and its value. Values are hashable, and their text is the same in every
                process. An error names the fields that differ.
            caller: names the call in errors, usually its module.
            once: pairs that are compared with a new signature, and not recorded: they may change with every call.
            details: makes what is exchanged if the ranks disagree, so that the error can name the first that differs.
            always: compare a signature that is not new too, because ``once`` may differ.

        Raises:
            ValueError: on every rank, if the signatures differ, or if the ranks have made different calls (each agreed
                on) since their last comparison. Nothing is recorded then.
            RuntimeError: if other ranks do not come to compare theirs within a time limit (see :mod:`.agreement`).
        """
        if self.agreement is not None and not is_compiling():
            self.agreement.compare_if_new(kind, signature, self, caller, once, details, always)

    def __str__(self) -> str:
        return f"cp mesh of {self.size} ranks (ring {self.ring.size} x ulysses {self.ulysses.size})"

    def __deepcopy__(self, memo: object) -> CPMesh:
        return self  # process groups cannot be copied, and a copied model shares its ranks


_BY_KEY: dict[str, CPMesh] = {}

_VIEWS: dict[tuple[int, int | None], tuple[weakref.ref[DeviceMesh], CPMesh]] = {}
"""Views by the identity of their mesh and their degree, since a call takes its mesh and checking one is slow."""
_MOST_VIEWS = 256


def register(mesh: CPMesh) -> CPMesh:
    """Let custom ops find ``mesh`` by its key; drop meshes whose groups are gone."""
    for key in [k for k, m in _BY_KEY.items() if not m.alive()]:
        del _BY_KEY[key]
    # The others stay: checking a mesh again would be an operator in a recompute that its forward did not run.
    for seen in [k for k, (m, cp) in _VIEWS.items() if m() is None or not cp.alive()]:
        del _VIEWS[seen]
    _BY_KEY[mesh.key] = mesh
    return mesh


def by_key(key: str) -> CPMesh:
    """The mesh registered under ``key`` (inside custom ops, where only strings travel)."""
    if key not in _BY_KEY:
        raise RuntimeError(
            f"the cp mesh {key!r} does not exist in this process. Its process groups were destroyed, or the graph was "
            "compiled elsewhere. Apply ContextParallel again after init_process_group"
        )
    return _BY_KEY[key]


def alone() -> CPMesh:
    """The mesh of one rank, without process groups: what runs on it communicates nothing."""
    return _BY_KEY.get("alone") or register(CPMesh("alone", Axis.alone(), Axis.alone(), (Axis.alone(),), BatchState()))


def divisors(n: int) -> list[int]:
    """All divisors of ``n``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def ranks_of(mesh: DeviceMesh, sizes: str, caller: str) -> list[int]:
    """The global ranks of a mesh. Raise unless it is a ``DeviceMesh`` whose ranks ascend, with this rank among them.

    Args:
        sizes, caller: how errors write the shape and the name of the mesh, and who needs it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}. It names the ranks that share a "
            f"sequence. Make one with init_device_mesh(device_type, {sizes})"
        )
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"mesh lists its ranks as {mesh.mesh.tolist()}, not ascending. Process groups number their ranks in "
            "ascending order, so that data and attention would disagree. Build the mesh in that order"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of mesh {mesh}. It has no share of the sequence. Call {caller} only "
            "on the ranks of the mesh"
        )
    return ranks


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless ``mesh`` is a 1-D mesh or a 2-D ("ring", "ulysses") mesh with this rank in it."""
    ranks_of(mesh, '(cp_size,), mesh_dim_names=("cp",)', "ContextParallel")
    names = mesh.mesh_dim_names
    if mesh.ndim > 2 or (mesh.ndim == 2 and names != MESH_NAMES):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions named {names}. ContextParallel needs a 1-D mesh, or a 2-D mesh named "
            f'{MESH_NAMES}. Slice the dimension(s) of the sequence out of the larger mesh first, as in mesh["cp"]'
        )


def view(mesh: DeviceMesh, ulysses_degree: int | None = None) -> CPMesh:
    """View ``mesh`` as ring x ulysses with this Ulysses degree (``None``: all of a 1-D mesh, the ``ulysses`` dimension
    of a 2-D one).

    Process groups are made only for a true hybrid on a 1-D mesh, once per mesh and degree; all ranks of the mesh must
    make this call, in the same order, as for every collective. Ranks outside the mesh need not.
    """
    if is_compiling():  # a graph cannot depend on the identity of an object
        return by_key(_key_of_view(mesh, ulysses_degree))
    if ulysses_degree is None or type(ulysses_degree) is int:
        kept = _VIEWS.get((id(mesh), ulysses_degree))
        if kept is not None and kept[0]() is mesh and kept[1].alive():
            return kept[1]
    cp = _view(mesh, ulysses_degree)
    if len(_VIEWS) >= _MOST_VIEWS:
        _VIEWS.clear()
    _VIEWS[id(mesh), ulysses_degree] = weakref.ref(mesh), cp
    return cp


@torch.compiler.assume_constant_result  # traced, ranks may be symbolic, and a new view is kept after the graph has run
def _key_of_view(mesh: DeviceMesh, ulysses_degree: int | None) -> str:
    return _view(mesh, ulysses_degree).key


def whole_view(mesh: DeviceMesh | CPMesh) -> CPMesh:
    """A view of ``mesh`` for what goes along all of its ranks (``flat``), whatever the Ulysses degree."""
    return mesh if isinstance(mesh, CPMesh) else view(mesh, 1 if mesh.ndim == 1 else None)


def as_ring(cp: CPMesh) -> CPMesh:
    """All ranks of a mesh as one ring, for what has no heads that ranks could share out.

    Raises:
        NotImplementedError: for a 2-D mesh with two dimensions, whose ranks together have no process group.
    """
    if cp.ulysses.size == 1:
        return cp
    if len(cp.flat) > 1:
        raise NotImplementedError(
            f"this call runs over all ranks of the {cp}. A 2-D mesh has no process group of all of them. "
            f"Pass the 1-D mesh of these ranks, with ulysses_degree={cp.ulysses.size} where heads are exchanged"
        )
    key = f"{cp.flat[0].group.group_name}/{cp.size}x1"
    cached = _BY_KEY.get(key)
    if cached is not None and cached.flat[0].group is cp.flat[0].group:
        return cached
    return register(replace(cp, key=key, ring=cp.flat[0], ulysses=Axis.alone()))


def _view(mesh: DeviceMesh, ulysses_degree: int | None) -> CPMesh:
    check_mesh(mesh)
    if mesh.ndim == 2:
        return _view_2d(mesh, ulysses_degree)
    group = mesh.get_group()
    size = mesh.size()
    degree = size if ulysses_degree is None else ulysses_degree
    if not is_int(degree):
        raise TypeError(
            f'ulysses_degree={degree!r} must be None or an int here. "auto" is for ContextParallel, which knows the '
            "module. Pass a number of ranks"
        )
    if degree < 1 or size % degree:
        raise ValueError(
            f"ulysses_degree={degree} does not divide the cp mesh of {size} ranks. Ranks that trade sequence for heads "
            f"are blocks of equal size. Degrees that divide it: {', '.join(map(str, divisors(size)))}"
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
        # A rank that makes other groups, or none, would leave the others waiting for it. (The view without groups holds
        # what all views share, also if the ranks disagree.)
        signature = ("ulysses_degree", degree), ("number of process groups", groups_made())
        _view(mesh, 1).agree("groups", signature, "ContextParallel")
        blocks = parts_of([ranks[i : i + degree] for i in range(0, size, degree)])
        lanes = parts_of([ranks[i::degree] for i in range(degree)])
        ulysses, ring = (Axis.of(make_group(*x)) for x in ((blocks, group, "ulysses"), (lanes, group, "ring")))
    return register(CPMesh(key, ring, ulysses, (whole,), *_shared_state(ranks, whole)))


def _view_2d(mesh: DeviceMesh, ulysses_degree: int | None) -> CPMesh:
    ring, ulysses = (Axis.of(mesh.get_group(name)) for name in MESH_NAMES)
    if ulysses_degree not in (None, ulysses.size):
        raise ValueError(
            f"ulysses_degree={ulysses_degree!r} contradicts the 2-D mesh, whose 'ulysses' dimension has "
            f"{ulysses.size} ranks. That is the degree already. Leave ulysses_degree=None, or pass a 1-D mesh"
        )
    key = f"{ring.group.group_name}+{ulysses.group.group_name}/{ring.size}x{ulysses.size}"
    cached = _BY_KEY.get(key)
    if cached is not None and [a.group for a in cached.flat] == [ulysses.group, ring.group]:
        return cached
    ranks = mesh.mesh.flatten().tolist()
    return register(CPMesh(key, ring, ulysses, (ulysses, ring), *_shared_state(ranks, ulysses, ring)))


def _shared_state(ranks: list[int], *axes: Axis) -> tuple[BatchState, Agreement | None]:
    """The state of the mesh of these global ranks that these axes span: that of its other views, if there are any."""
    groups = [axis.group for axis in axes]
    for other in _BY_KEY.values():
        if [axis.group for axis in other.flat] == groups:
            return other.batch, other.agreement
    return BatchState(), Agreement.between(ranks, groups)


def over_hosts(cp: CPMesh, per_host: int = 0) -> CPMesh:
    """View a mesh with the hosts of its ring: ``cp.ring.per_host`` adjacent ring ranks share one. The result is ``cp``
    itself, whose number is 0, if they all do, or if no two of them do.

    The first call makes a process group, so all ranks make it, in the same order.

    Args:
        per_host: adjacent ring ranks that share a host; 0: by :func:`ranks_per_host`, where hosts have equally many.

    Raises:
        ValueError: before any communication, if ``per_host`` does not divide the ring.
    """
    size = cp.ring.size
    per_host = per_host or _ring_ranks_per_host(cp)
    if not 1 < per_host < size or per_host == cp.ring.per_host:
        return cp
    if size % per_host:
        raise ValueError(
            f"kv_exchange='double_ring_{per_host}' on a ring of {size} ranks, which it does not divide. Each host has "
            f"equally many adjacent ranks of the ring. Numbers that divide it: {', '.join(map(str, divisors(size)))}; "
            "or use kv_exchange='double_ring', which asks the mesh"
        )
    key = f"{cp.key}/hosts of {per_host}"
    cached = _BY_KEY.get(key)
    if cached is not None and cached.ring.group is cp.ring.group is not None:
        return cached
    between = None
    if cp.ring.group is not None:  # simulated ranks have none
        signature = ("ring ranks of a host", per_host), ("number of process groups", groups_made())
        cp.agree("groups", signature)
        ranks = parts_of([dist.get_process_group_ranks(cp.ring.group)])
        between = Axis.of(make_group(ranks, cp.ring.group, "ring between hosts"))
        check_launch_order(cp.ring, between)
    return register(replace(cp, key=key, ring=cp.ring.over_hosts(per_host, between)))


def _ring_ranks_per_host(cp: CPMesh) -> int:
    """The adjacent ring ranks of each host; 0 if hosts have different numbers of them."""
    if cp.ring.group is None:
        return 0
    hosts = [rank // ranks_per_host() for rank in dist.get_process_group_ranks(cp.ring.group)]
    first = hosts.count(hosts[0])
    even = len(hosts) % first == 0 and all(hosts.count(host) == first for host in hosts[::first])
    return first if even else 0


def ranks_per_host() -> int:
    """The ranks that share a host: ``LOCAL_WORLD_SIZE`` (set by torchrun), or all of them without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (dist.get_world_size() if dist.is_initialized() else 1)


def degrees_within_host(mesh: DeviceMesh) -> list[int]:
    """The Ulysses degrees whose blocks of adjacent ranks lie on one host.

    The host size is that of :func:`ranks_per_host`.
    """
    ranks = dist.get_process_group_ranks(mesh.get_group())
    host = ranks_per_host()

    def local(degree: int) -> bool:
        blocks = (ranks[i : i + degree] for i in range(0, len(ranks), degree))
        return all(len({rank // host for rank in block}) == 1 for block in blocks)

    return [d for d in divisors(len(ranks)) if local(d)]
