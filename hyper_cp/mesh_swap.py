"""``context_parallel_mesh``: the styled modules of a model run on another cp mesh for the length of a block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch.modules import running_modules
from .handler import ContextParallelHandler
from .mesh import cp_mesh
from .mesh.arguments import check_type
from .mesh.batch_state import BatchState
from .module.mesh_binding import Style, StyledMesh, bindings, swapped
from .ops.checks import check_heads
from .schedule import arrivals
from .style import style_of


@contextmanager
def context_parallel_mesh(
    model: nn.Module, mesh: DeviceMesh, *, ulysses_degree: int | str | None = "style"
) -> Iterator[ContextParallelHandler]:
    """In this block the styled modules of ``model`` run on another cp mesh: another degree for evaluation or
    for a micro-batch, or a mesh of one rank (off: they then make exactly the user's own attention calls). ::

        with context_parallel_mesh(model, family.cp(4)) as handler:
            loss = evaluate(model, handler.get_batch_on_this_cp_rank(batch))

    Blocks may be nested; after a block, or an exception in it, everything is as before. A recompute by activation
    checkpointing uses the mesh of its forward, also after the block. A compiled model is compiled once for each mesh.
    Documents are those of the yielded handler's ``documents`` block; a documents block that is active on the mesh that
    was left is an error, and so is a forward of the model in another thread.

    Args:
        model: a model with modules under :class:`ContextParallel`.
        mesh: 1-D, or 2-D ``("ring", "ulysses")``. This rank must be in it, and every rank that runs the model must
            enter a block on its mesh. The first block on a mesh may create process groups
            (:func:`split_cp_mesh` makes meshes whose groups are there already).
        ulysses_degree: the degree on this mesh. The default is each style's own where it divides the ranks, else their
            greatest common divisor (the rest becomes the ring dimension).

    Yields:
        A :class:`ContextParallelHandler` of that mesh, in the layout of the modules. (:meth:`ContextParallelHandler.of`
        is a handler that follows the model into such blocks.)

    Raises:
        ValueError, TypeError: before the block starts: no styled modules, a mesh without this rank, heads (as of the
            last call) that do not split over it.

    Example::

        >>> model = parallelize_module(model, mesh, {"layers.*.attention.inner": style})
        >>> with context_parallel_mesh(model, split_cp_mesh(mesh).cp(1)) as handler:  # without context parallelism
        ...     handler.position_ids(8).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: evaluation-time context parallelism of Megatron-Bridge (pull request 3755); dynamic context parallelism of
    Megatron-LM.
    """
    check_type("model", model, nn.Module, "Its styled modules change their mesh. Pass the model that has them")
    found = bindings(model)
    if not found:
        raise ValueError(
            f"no module of {type(model).__name__} runs under ContextParallel. Only such modules have a mesh that can "
            "change. Apply a plan with parallelize_module first, or pass the model that has the styled modules"
        )
    cp_mesh.check_mesh(mesh)
    meshes: dict[Style, StyledMesh] = {}
    for binding in found:
        style = binding.style
        degree = _degree(style, mesh) if ulysses_degree == "style" else ulysses_degree
        if style not in meshes:
            meshes[style] = StyledMesh(style, mesh, degree, threading.current_thread())
        if binding.heads is not None:
            check_heads(*binding.heads, meshes[style].view(*binding.heads))
    left_meshes = {id(batch): batch for batch in (binding.active.views[0].batch for binding in found)}.values()

    inside = {*model.modules()}

    def left() -> tuple[BatchState, str] | None:
        now = found[0].active.views[0]
        return None if inside.isdisjoint(running_modules()) else (now.batch, str(now))

    for binding in found:
        binding.stack.append(meshes[binding.style])
    handler = ContextParallelHandler(mesh, style_of(found[0]))
    handler.of_block = threading.current_thread()
    styles = {*meshes, *(style.copy_of for style in meshes if style.copy_of is not None)}
    for style in styles:
        swapped.setdefault(style, []).append(handler)
    for state in left_meshes:
        state.left.append(left)
    try:
        yield handler
    finally:
        for binding in {*found, *(copy for swap in meshes.values() for copy in swap.copies)}:
            while meshes[binding.style] in binding.stack:
                binding.stack.remove(meshes[binding.style])
        for style in styles:
            swapped[style].remove(handler)
        for state in left_meshes:
            state.left.remove(left)


def _degree(style: Style, mesh: DeviceMesh) -> int | str | None:
    """The style's Ulysses degree where it fits the mesh, else its greatest common divisor with the mesh."""
    degree = style.ulysses_degree
    if mesh.ndim == 2:
        return None
    if degree is None and arrivals.family(style.mode.kv_exchange)[0] in arrivals.ALONG_THE_RING and mesh.size() > 1:
        return 1  # the style was made for a 2-D mesh, whose ring this one continues
    return math.gcd(degree, mesh.size()) if isinstance(degree, int) else degree
