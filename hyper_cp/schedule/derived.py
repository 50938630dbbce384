"""Keeps what documents, layouts and masks of blocks give beside them: found by a key, and freed with them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Owner:
    """An object that owns what is derived from it. It is compared by identity, so that a value is found without reading
    or hashing its contents."""

    def __init__(self) -> None:
        self._derived: dict[Hashable, Any] = {}

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value under ``key``, made on first use. Values of all owners together are kept up to a number of bytes;
        the oldest is dropped first."""
        found: T | None = self._derived.get(key)
        if found is None:
            found = self._derived[key] = make()
            kept.add(self, key, found)
        return found

    def drop(self, key: Hashable) -> None:
        """Forget a value."""
        self._derived.pop(key, None)


class Kept:
    """The values of all owners, oldest first, and their bytes, as far as they have ``nbytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self.entries: deque[tuple[weakref.ref[Owner], Hashable, int]] = deque()

    def add(self, owner: Owner, key: Hashable, value: Any) -> None:
        nbytes = _SMALLEST + getattr(value, "nbytes", 0)
        self.entries.append((weakref.ref(owner), key, nbytes))
        self.nbytes += nbytes
        # The newest stays, whatever its size. Those of owners that are gone go anyway.
        while len(self.entries) > 1 and (self.nbytes > self.most_bytes or self.entries[0][0]() is None):
            of, old, freed = self.entries.popleft()
            self.nbytes -= freed
            first = of()
            if first is not None:
                first.drop(old)


_SMALLEST = 1024  # bytes that an entry takes at least
kept = Kept(256 * 2**20)
