"""Stacks of what is running, one for each thread, and whose blocks a thread sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .._torch.checkpoint import in_backward
from .._torch.compiling import is_compiling

T = TypeVar("T")


class ThreadStack(threading.local, Generic[T]):
    """A stack that every thread has for itself: an entry of one thread does not exist in the others."""

    def __init__(self) -> None:
        self.entries: list[T] = []
        """The entries of this thread, innermost last."""

    @property
    def top(self) -> T | None:
        """The innermost entry of this thread."""
        return self.entries[-1] if self.entries else None

    def innermost(self, alive: Callable[[T], bool]) -> T | None:
        """The innermost entry of this thread that is alive, without those above it, whose calls a KeyboardInterrupt has
        ended without their hooks."""
        while (top := self.top) is not None and not alive(top):
            self.remove(top)
        return top

    def push(self, entry: T) -> None:
        """Add the innermost entry."""
        self.entries.append(entry)

    def remove(self, entry: T) -> None:
        """Remove an entry, whatever is above it."""
        for i in reversed(range(len(self.entries))):
            if self.entries[i] is entry:
                self.entries.pop(i)
                return


def of_this_thread(thread: threading.Thread | None) -> bool:
    """True for this thread, and for None; in backward, which PyTorch runs in threads of its own, for every one, and in
    graphs, which know no threads."""
    return is_compiling() or thread is None or thread is threading.current_thread() or in_backward()
