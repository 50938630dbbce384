"""Recurrent calls in a ``context_parallel`` block: it knows no model, so all loaded files are routed."""

from __future__ import annotations

from collections.abc import Callable

from ..mesh_binding import Binding
from .calls import RunningMixer, mixer_stack, route_loaded


class BlockMixer(RunningMixer):
    """Answers the recurrent calls of a block. States pass between all of its ranks.

    Args:
        responsible: True if calls of now belong to the block.
        check: raises for a call of this kind that the block cannot answer.
    """

    def __init__(self, binding: Binding, responsible: Callable[[], bool], check: Callable[[str], None]) -> None:
        super().__init__("a model in context_parallel", None, binding.active.views[0], binding.style.mode.layout, None)
        self.mesh, self.responsible, self.check = binding.active, responsible, check

    def current(self) -> RunningMixer | None:
        """This one with the documents of now; None where calls are left to others, or there is one rank."""
        if not self.responsible():
            return None
        self.documents = self.mesh.documents("a recurrence in a context_parallel block")
        if not self.mesh.parallel and self.documents is None:
            return None
        self.check("a recurrence")
        return self

    def begin(self) -> None:
        """Route the functions of all loaded files to this block."""
        route_loaded()
        mixer_stack().append(self)

    def end(self) -> None:
        """Undo ``begin``, whatever is on top of it."""
        stack = mixer_stack()
        stack[:] = [mixer for mixer in stack if mixer is not self]
