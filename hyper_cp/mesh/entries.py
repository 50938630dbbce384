"""The entries of batches that are alive, and where they hold padding: losses ask for it, of labels and of masks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.compiling import is_compiling
from .padding import Padding
from .split import Split

BATCHES = 64
"""Batches that are alive and recorded, beside the last one."""


def memory_of(x: Tensor) -> Any:
    """Names the memory of a tensor, in which its views lie too."""
    if type(x) is not Tensor or x.layout != torch.strided or not x.untyped_storage().nbytes():
        return id(x)
    return x.device, x.untyped_storage().data_ptr()


def _forget(entries: dict[Any, Any], key: Any, entry: weakref.ref[Tensor]) -> None:
    if key in entries and entries[key][0] is entry:  # else the memory has another entry by now
        del entries[key]


class Entries:
    """The entries of a mesh's batches, known as long as they are alive."""

    def __init__(self) -> None:
        self._latest: list[tuple[weakref.ref[Tensor], Padding]] = []
        """The first entries of batches that are alive, and of the last one, and their padding."""
        self._by_memory: dict[Any, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        """All entries, and where they hold padding."""
        self._warned = False
        """True once losses that may be those of a padded batch or of another one have been warned of."""

    def record(self, entries: Iterable[tuple[Tensor, Tensor | None]], padding: Padding) -> None:
        """Record a batch: its entries, which labels may be, each with True where it holds padding (None: nowhere)."""
        if is_compiling():
            return
        alive = [(entry, x) for entry, x in self._latest if entry() is not None]
        for number, (x, past) in enumerate(entries):
            entry = self._record_entry(x, past)
            if not number:
                self._latest = [*alive[-BATCHES:], (entry, padding)]

    def _record_entry(self, x: Tensor, past: Tensor | None) -> weakref.ref[Tensor]:
        entry = weakref.ref(x, partial(_forget, self._by_memory, memory_of(x)))
        self._by_memory[memory_of(x)] = entry, past
        return entry

    def record_copies(self, entries: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Record the entries of a copy of a batch, which is not the last one."""
        for x, past in entries:
            self._record_entry(x, past)

    def record_moved(self, x: Tensor, moved: Tensor) -> None:
        """Record the copy of an entry of the last batch on another device, which takes its place."""
        if moved is not x and (known := self.past_of(x)):
            entry = self._record_entry(moved, *known)
            if self._latest[-1][0]() is x:
                self._latest[-1] = entry, self._latest[-1][1]

    def past_of(self, x: Tensor) -> tuple[Tensor | None] | None:
        """True where a tensor, which is an entry of a batch or a view of one, holds padding (None: nowhere), broadcast
        over it, in a tuple; None if it is no entry."""
        found, past = self._by_memory.get(memory_of(x), (None, None))
        entry = None if found is None else found()
        if entry is None or entry.dtype != x.dtype:
            return None
        if past is None or entry is x:
            return (past,)
        cells = torch.zeros(entry.untyped_storage().nbytes() // entry.itemsize, dtype=torch.bool, device="cpu")
        cells.as_strided(entry.shape, entry.stride(), entry.storage_offset()).copy_(past)
        return (cells.as_strided(x.shape, x.stride(), x.storage_offset()),)

    def shares_of(self, rows: int | None = None) -> set[int]:
        """The positions of each rank in batches that are alive, and have as many rows."""
        alive = [x for entry, x in self._latest if entry() is not None]
        return {x.share for x in alive if rows is None or rows in x.form.rows}

    def padding_of(self, shape: tuple[int, ...], split: Split | None) -> tuple[int, int] | None:
        """The lengths, before and after padding, of the batch to which losses of this shape belong: that of ``split``,
        else the last one. None: it was not padded, or these are no losses of its tokens."""
        of_block = None if split is None else split.padding
        even = split is not None and split.length and split.length == split.padded
        if of_block is None and (even or not self._latest):
            return None
        last, *others = [of_block] if of_block else [x for _, x in reversed(self._latest)]
        earlier = next((x.known for x in others if x.share > 1 and x.known and x.holds(shape)), None)
        belongs = (last.may_hold if last.known else last.holds)(shape)
        if earlier and not (belongs and last.known) and not self._warned:
            self._warned = True
            warnings.warn(
                f"losses of shape {shape} come without labels or mask. They fit a batch of {earlier[0]} positions that "
                f"was padded to {earlier[1]}, and is not the last one. If they belong to it, its padding counts. "
                "Compute the loss in `with handler.documents(batch)` of their batch, or pass labels",
                stacklevel=5,
            )
        # Outside of its block, anything could be values of a share of one position.
        return last.known if belongs and (last.share > 1 or of_block) else None
