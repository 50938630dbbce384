"""Where a styled module runs: a cp mesh seen in the ways its style may use it, and another one for a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .dtensors import CPDims
from .ops import mesh as meshes
from .ops.attention import check_degree, check_heads
from .ops.mesh import CPMesh

if TYPE_CHECKING:
    from .handler import ContextParallelHandler
    from .style import ContextParallel


class Place:
    """A cp mesh for one style. Every mesh that calls can run on exists from here on: they create no process
    groups."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh, degree: int | str | None) -> None:
        self.mesh = mesh
        if degree == "auto" and mesh.ndim == 1:
            meshes.check_mesh(mesh)
            self.views = [meshes.view(mesh, d) for d in meshes.degrees_within_host(mesh)]
        else:
            chosen = None if degree == "auto" else degree
            if chosen is None and style.mode.kv_exchange == "ring" and mesh.ndim == 1 < mesh.size():
                raise ValueError(
                    f'kv_exchange="ring" has no effect with ulysses_degree=None on a 1-D mesh of '
                    f"{mesh.size()} ranks: all of them exchange heads. Set ulysses_degree=1 for a ring, or "
                    "a divisor of the mesh for a hybrid"
                )
            self.views = [meshes.view(mesh, chosen)]  # type: ignore[arg-type]
        for cp in self.views:
            check_degree(style.mode, cp)
        self.cp_dims = CPDims(mesh)

    @property
    def documents(self) -> Tensor | None:
        """Those in force on this mesh."""
        return self.views[0].facts.documents

    @property
    def parallel(self) -> bool:
        """Whether there is more than one rank."""
        return self.views[0].size > 1

    def view(self, q_heads: int, kv_heads: int) -> CPMesh:
        """The mesh to run on: the only one, or for "auto" the widest that the heads allow."""
        for cp in reversed(self.views[1:]):
            if q_heads % cp.ulysses.size == 0 and kv_heads % cp.ulysses.size == 0:
                return cp
        return self.views[0]


moved: WeakKeyDictionary[ContextParallel, list[DeviceMesh]] = WeakKeyDictionary()
"""Where the models of a style run now, while they are away from home."""


@contextmanager
def context_parallel_mesh(
    model: nn.Module, mesh: DeviceMesh, *, ulysses_degree: int | str | None = "style"
) -> Iterator[ContextParallelHandler]:
    """For the enclosed block the styled modules of ``model`` run on another cp mesh: another degree for evaluation or
    for a micro-batch, or a mesh of one rank (off: they then make exactly the user's own attention calls). ::

        with context_parallel_mesh(model, family.cp(4)) as handler:
            loss = evaluate(model, handler.get_batch_on_this_cp_rank(batch))

    Nested blocks, exceptions: afterwards all is as before. A recompute by activation checkpointing uses the mesh of its
    forward, also after the block. A compiled model is compiled once for each mesh. Documents are those of the yielded
    handler's ``documents`` block; one in force on the mesh that was left is an error.

    Args:
        model: a model with modules under :class:`ContextParallel`.
        mesh: 1-D, or 2-D ``("ring", "ulysses")``, of any ranks of which this rank is one; every rank that runs the
            model must enter a block on its mesh. The first block on a mesh may create process groups
            (:func:`split_cp_mesh` makes meshes whose groups are there already).
        ulysses_degree: on this mesh; by default each style's own where it divides the ranks, else their greatest
            common divisor (the rest becomes the ring dimension).

    Yields:
        A :class:`ContextParallelHandler` of that mesh, in the layout of the modules. (:meth:`ContextParallelHandler.of`
        is a handler that follows the model into such blocks.)

    Raises:
        ValueError, TypeError: before the block starts: no styled modules, a mesh without this rank, heads (as of the
            last call) that do not split over it.

    Source: evaluation-time context parallelism of Megatron-Bridge (pull request 3755); dynamic context parallelism of
    Megatron-LM.
    """
    from .boundary import boundaries
    from .handler import ContextParallelHandler

    owners = boundaries(model)
    if not owners:
        raise ValueError(
            f"no module of {type(model).__name__} runs under ContextParallel: apply a plan with parallelize_module "
            "first, or pass the model that has the styled modules"
        )
    meshes.check_mesh(mesh)
    made: dict[object, Place] = {}
    for owner in owners:
        degree = _degree(owner.style, mesh) if ulysses_degree == "style" else ulysses_degree
        if owner.style not in made:
            made[owner.style] = Place(owner.style, mesh, degree)
        if owner.heads is not None:
            check_heads(*owner.heads, made[owner.style].view(*owner.heads))
    for owner in owners:
        owner.stays.append(made[owner.style])
    for style in made:
        moved.setdefault(style, []).append(mesh)  # type: ignore[arg-type]
    try:
        yield ContextParallelHandler(mesh, owners[0].style)
    finally:
        for owner in owners:
            owner.stays.remove(made[owner.style])
        for style in made:
            moved[style].pop()  # type: ignore[index]


def _degree(style: ContextParallel, mesh: DeviceMesh) -> int | str | None:
    """The style's Ulysses degree where it fits the mesh, else what is left of it."""
    degree = style.ulysses_degree
    if mesh.ndim == 2:
        return None
    if degree is None and style.mode.kv_exchange == "ring" and mesh.size() > 1:
        return 1  # the style was made for a 2-D mesh, whose ring this one continues
    return math.gcd(degree, mesh.size()) if isinstance(degree, int) else degree
