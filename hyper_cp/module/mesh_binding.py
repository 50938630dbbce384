"""A style bound to one module: the meshes that the module runs on, a stack of which the last one is active."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..mesh import cp_mesh
from ..mesh.cp_mesh import CPMesh
from ..ops.attention import Mode, check_degree
from . import dtensor as dtensors
from .dtensor import CPDims, Outputs


class Style(Protocol):
    """The part of :class:`hyper_cp.ContextParallel` that is read while a module runs."""

    mode: Mode
    seq_dim: int
    head_dim: int
    ulysses_degree: int | str | None
    qkv_indices: tuple[int, ...] | None
    qkv_kwarg_names: tuple[str, ...]
    use_local_output: bool


class Place:
    """A cp mesh for one style. Every mesh that calls can run on exists from here on: they create no process
    groups."""

    def __init__(self, style: Style, mesh: DeviceMesh, degree: int | str | None) -> None:
        self.mesh = mesh
        if degree == "auto" and mesh.ndim == 1:
            cp_mesh.check_mesh(mesh)
            self.views = [cp_mesh.view(mesh, d) for d in cp_mesh.degrees_within_host(mesh)]
        else:
            chosen = None if degree == "auto" else degree
            if chosen is None and style.mode.kv_exchange == "ring" and mesh.ndim == 1 < mesh.size():
                raise ValueError(
                    f'kv_exchange="ring" has no effect with ulysses_degree=None on a 1-D mesh of '
                    f"{mesh.size()} ranks: all of them exchange heads. Set ulysses_degree=1 for a ring, or "
                    "a divisor of the mesh for a hybrid"
                )
            self.views = [cp_mesh.view(mesh, chosen)]  # type: ignore[arg-type]
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


moved: WeakKeyDictionary[Style, list[DeviceMesh]] = WeakKeyDictionary()
"""Where the models of a style run now, while they are away from home."""


class Binding:
    """A style on one module: the name of the module, its stack of meshes and the head counts of its last call."""

    def __init__(self, style: Style, mesh: DeviceMesh, name: str) -> None:
        self.style, self.name = style, name
        self.stack = [Place(style, mesh, style.ulysses_degree)]
        """Meshes that the module runs on; the last one is active."""
        self.heads: tuple[int, int] | None = None
        """Heads of q and k in the last call, before they are split over ranks of the cp mesh."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)  # style and meshes are shared, process groups cannot be copied
        copy.stack = list(self.stack)
        return copy

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.name} runs under ContextParallel on live process groups and cannot be pickled. Save "
            "model.state_dict() instead, and apply the style again after loading"
        )

    @property
    def place(self) -> Place:
        """The active mesh."""
        return self.stack[-1]

    def record_heads(self, q_heads: int, kv_heads: int) -> tuple[int, int]:
        """Remember the heads of a call: another mesh is checked against them before it is used."""
        if not torch.compiler.is_compiling():
            self.heads = q_heads, kv_heads
        return q_heads, kv_heads

    def documents_in_force(self) -> Tensor | None:
        """Documents of the enclosing ``handler.documents`` block on the active mesh."""
        found = self.place.documents
        if found is None and any(place.documents is not None for place in self.stack):
            raise RuntimeError(
                f"{self.name} runs on another cp mesh, but documents are in force on the one it has left: "
                "enter the documents block of the handler that context_parallel_mesh yields, or pass documents="
            )
        return found

    def local(
        self, qkv: list[Tensor], seq_dim: int, head_dim: int, place: Place
    ) -> tuple[list[Tensor], Outputs | None]:
        """This rank's part of q, k, v, and the placement that outputs return to (None: q is a local tensor)."""
        if not isinstance(qkv[0], DTensor):
            return qkv, None
        return dtensors.unwrap(self.name, qkv, place.cp_dims, self.style.mode.layout, seq_dim, head_dim)
