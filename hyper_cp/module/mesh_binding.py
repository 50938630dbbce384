"""A style bound to one module: its name, and the stack of meshes that it runs on, of which the last one is active."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch.checkpoint import in_foreign_recompute
from .._torch.compiling import is_compiling
from .._torch.modules import hook_owners
from ..mesh import cp_mesh
from ..mesh.agreement import Agreement, Signature, digest
from ..mesh.cp_mesh import CPMesh
from ..ops.checks import check_degree, with_hosts
from ..ops.config import Mode
from ..schedule import arrivals, choices
from ..schedule.documents import documents_table
from . import dtensor
from .dtensor import CPDims, Outputs
from .thread_stack import of_this_thread


class Style(Protocol):
    """The part of :class:`hyper_cp.ContextParallel` that is read while a module runs."""

    mode: Mode
    seq_dim: int
    head_dim: int
    ulysses_degree: int | str | None
    qkv_indices: tuple[int, ...] | None
    qkv_kwarg_names: tuple[str, ...]
    use_local_output: bool
    cross_attention: bool
    latents_from: str | None
    allow: tuple[str, ...]
    copy_of: Any


class Plan:
    """The styled modules of a model, as ranks compare them: the style of each, as text, by its qualified name."""

    def __init__(self, styles: dict[str, str]) -> None:
        self.styles = styles
        self.compared: WeakSet[Agreement] = WeakSet()
        """Meshes on which the weights of the model have been compared with those of the other ranks."""

    @cached_property
    def signature(self) -> Signature:
        """The number of styled modules and a digest of their names and styles."""
        text = "\n".join(f"{name}: {style}" for name, style in sorted(self.styles.items()))
        return (("styled modules", f"{len(self.styles)} ({digest(text.encode())})"),)


class StyledMesh:
    """A cp mesh as one style uses it. Everything that calls can run on exists from here on: a call creates no process
    groups."""

    def __init__(
        self, style: Style, mesh: DeviceMesh, degree: int | str | None, thread: threading.Thread | None = None
    ) -> None:
        self.mesh, self.mode = mesh, style.mode
        self.thread = thread
        """The thread of the ``context_parallel_mesh`` block of this mesh; None: the plan's own."""
        self.copies: WeakSet[Binding] = WeakSet()
        """Bindings of copies of the model that were made in that block, and leave the mesh when it ends."""
        if degree == "auto" and mesh.ndim == 1:
            cp_mesh.check_mesh(mesh)
            self.views = [cp_mesh.view(mesh, d) for d in cp_mesh.degrees_within_host(mesh)]
        else:
            chosen = None if degree == "auto" else degree
            exchange = style.mode.kv_exchange
            if (
                chosen is None
                and arrivals.family(exchange)[0] in arrivals.ALONG_THE_RING
                and mesh.ndim == 1 < mesh.size()
            ):
                raise ValueError(
                    f'kv_exchange="{exchange}" has no effect with ulysses_degree=None on a 1-D mesh of {mesh.size()} '
                    "ranks. All of them exchange heads. Set ulysses_degree=1, or a divisor of the mesh for a hybrid"
                )
            self.views = [cp_mesh.view(mesh, chosen)]  # type: ignore[arg-type]
        for cp in self.views:
            check_degree(style.mode, cp)
            with_hosts(style.mode, cp)  # it makes a process group
        self.cp_dims = CPDims(mesh)

    @property
    def parallel(self) -> bool:
        """True if there is more than one rank."""
        return self.views[0].size > 1

    def view(self, q_heads: int, kv_heads: int) -> CPMesh:
        """The mesh to run on: the only one, or for "auto" the one of the degree that is chosen for these heads."""
        if len(self.views) == 1:
            return self.views[0]
        degrees = [cp.ulysses.size for cp in self.views]
        return self.views[degrees.index(choices.ulysses_degree(degrees, int(q_heads), int(kv_heads)))]


swapped: WeakKeyDictionary[Style, list[Any]] = WeakKeyDictionary()
"""Style -> the handlers of the ``context_parallel_mesh`` blocks that its models are in, innermost last."""


class Binding:
    """A style on one module: the name of the module, its stack of meshes and the head counts of its last call.

    Hooks, the context manager and the integrations hold one each.
    """

    def __init__(self, style: Style, mesh: DeviceMesh, name: str) -> None:
        self.style, self._name, self._type = style, name, name
        self.stack = [StyledMesh(style, mesh, style.ulysses_degree)]
        """Mesh stack; the last one is active."""
        self.heads: tuple[int, int] | None = None
        """Heads of q and k in the last call, before they are split over ranks of the cp mesh."""
        self.positions: int | None = None
        """Positions of q in the last call, before it is exchanged: this rank's share of the sequence."""
        self.rows: int | None = None
        """Rows of the batch of q in the last call."""
        self.documents: Tensor | None = None
        """Those of the last batch of a prepared model, whose blocks do not know them."""
        self.ran = False
        """True once a call has begun (compiled calls do not count)."""
        self.applied: tuple[weakref.ref[nn.Module], int] | None = None
        """The model that the plan was applied to, and the number of that plan among those of the mesh."""
        self.first_call: Callable[[Binding, nn.Module], None] | None = None
        """Guards the model of the module, when it runs for the first time."""
        self.warned = False
        """True once a call has warned of windows of the sequence."""
        self.forward_state: tuple[StyledMesh, bool] | None = None
        """The mesh of the last forward, and True if its documents were those of a block."""
        self.place: tuple[str, Plan] | None = None
        """The qualified name of the module in the model that it runs in, and that model's styled modules."""
        self.compared: WeakSet[Agreement] = WeakSet()
        """Meshes on which the module has been compared with that of the other ranks."""

    @property
    def name(self) -> str:
        """The name of the module in errors. In compiled code it is that of its type, so that equal blocks share one
        graph."""
        return self._type if is_compiling() else self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)  # style and meshes are shared, process groups cannot be copied
        copy.stack = [mesh for mesh in self.stack if of_this_thread(mesh.thread)]
        for mesh in copy.stack[1:]:
            mesh.copies.add(copy)
        copy.compared, copy.place = WeakSet(), None  # another model
        if self.applied is not None:
            root = memo.get(id(self.applied[0]()))
            copy.applied = None if root is None else (weakref.ref(root), self.applied[1])
        return copy

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.name} runs under ContextParallel and cannot be pickled. It holds live process groups. Save "
            "model.state_dict() instead, and apply the style again after loading"
        )

    @property
    def active(self) -> StyledMesh:
        """The mesh that calls run on now."""
        return self.stack[-1]

    def of_thread(self) -> StyledMesh:
        """The mesh for batches of this thread: not one of another thread's block."""
        return next(mesh for mesh in reversed(self.stack) if of_this_thread(mesh.thread))

    def of_call(self) -> StyledMesh:
        """The active mesh, for a call in this thread.

        Raises:
            RuntimeError: if it is that of another thread's ``context_parallel_mesh`` block.
        """
        mesh, owner = self.stack[-1], self.stack[-1].thread
        if owner is not None and not is_compiling() and not of_this_thread(owner):
            raise RuntimeError(
                f"{self.name} runs in thread {threading.current_thread().name!r}, while thread {owner.name!r} is in a "
                "context_parallel_mesh block of this model, which changes the mesh of the model for all threads. Run "
                "the model in the thread of the block, wait until the block has ended, or enter the block with a copy "
                "of the model (copy.deepcopy)"
            )
        return mesh

    def record(self, q_heads: int, kv_heads: int, positions: int, rows: int) -> tuple[int, int]:
        """Record the heads, the positions and the rows of the batch of a call; returns the heads. Another mesh is
        checked against the heads before it is used."""
        if not is_compiling():
            self.heads, self.positions, self.rows = (q_heads, kv_heads), positions, rows
        return q_heads, kv_heads

    def active_documents(self, given: Tensor | None = None) -> Tensor | None:
        """The documents of a call: those it is ``given``, else those of the enclosing ``handler.documents`` block on
        the active mesh."""
        if given is not None:
            self._refuse_foreign_recompute(packed=False)
            return given
        found = self.active.views[0].batch.active_documents(self.name)
        self._refuse_foreign_recompute(packed=found is not None)
        if found is None and any(mesh.views[0].batch.documents is not None for mesh in self.stack[:-1]):
            raise RuntimeError(
                f"{self.name} runs on another cp mesh, but a documents block is active on the one it has left. "
                "Enter the documents block of the handler that context_parallel_mesh yields, or pass documents="
            )
        return found

    def _refuse_foreign_recompute(self, packed: bool) -> None:
        """Raise ``RuntimeError`` if code of others recomputes this module in backward after the block that set the
        documents (or the mesh) of its forward has ended. ``packed``: this call has documents of a block."""
        if is_compiling():
            return
        if self.forward_state is None or not in_foreign_recompute():
            self.forward_state = self.active, packed
            return
        mesh, had_documents = self.forward_state
        without = had_documents and not packed and not mesh.views[0].batch.in_block
        if without or mesh not in self.stack:
            what = "documents" if without else "cp mesh"
            raise RuntimeError(
                f"{self.name} is recomputed in backward without the {what} of its last forward, whose block has ended. "
                "This activation checkpointing is not torch's own, so nothing recorded them, and the gradients would "
                "be wrong. Run backward inside the block, pass documents= to the module through the checkpointed "
                "function, or use torch.utils.checkpoint"
            )

    def local(
        self, qkv: list[Tensor], seq_dim: int, head_dim: int, mesh: StyledMesh
    ) -> tuple[list[Tensor], Outputs | None]:
        """This rank's part of q, k, v, and the placement that outputs return to (None: q is a local tensor)."""
        if not isinstance(qkv[0], DTensor):
            return qkv, None
        return dtensor.unwrap(self.name, qkv, mesh.cp_dims, self.style.mode.layout, seq_dim, head_dim)


def takes_documents(module: nn.Module) -> bool:
    """True if the forward of a module has a parameter ``documents`` of its own."""
    return "documents" in inspect.signature(module.forward).parameters


def documents_keyword(kwargs: dict[str, Any], keep: bool) -> tuple[Tensor | None, dict[str, Any]]:
    """The table of the keyword ``documents`` of a call, and the keywords that the module gets; with ``keep`` that one
    too."""
    if "documents" not in kwargs:
        return None, kwargs
    table = documents_table(kwargs["documents"])
    return table, kwargs if keep else {name: x for name, x in kwargs.items() if name != "documents"}


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a styled module, else None. Its hooks hold it, or (in integrations) the module itself."""
    owners = hook_owners(module)
    for found in (*(getattr(owner, "binding", None) for owner in owners), module.__dict__.get("binding")):
        if isinstance(found, Binding):
            return found
    return None


def bindings(model: nn.Module) -> list[Binding]:
    """The bindings of all styled modules of a model."""
    return [found for module in model.modules() if (found := binding_of(module)) is not None]


def describe(module: nn.Module) -> str:
    """The name of a module in errors, until ``styled_modules`` gives it its qualified name."""
    return f"module {type(module).__name__}"
