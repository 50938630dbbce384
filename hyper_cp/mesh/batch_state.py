"""The state of the batch that a cp mesh works on: the documents blocks that are entered, each owned by its thread."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

LENGTHS = 16
"""Lengths of shares that are recorded; the oldest is dropped."""


class Block:
    """One entered ``handler.documents`` block, and the calls that have used its documents."""

    def __init__(self, documents: Tensor | None, owner: ThreadBlocks, length: int | None = None) -> None:
        self.documents, self.owner, self.length = documents, owner, length
        self.used = documents is None
        """True if something has read the documents, or there are none."""
        self.kinds: set[bool] = set()
        """The kinds of attention calls with the documents of the block: True for causal."""


class ThreadBlocks:
    """The documents blocks of one thread, innermost last."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.entered: list[Block] = []
        # An attribute, and not the last block: a compiled graph reads it as an input, at any depth of blocks.
        self.documents: Tensor | None = None


class _Mine(threading.local):
    def __init__(self) -> None:
        self.blocks = ThreadBlocks()


class BatchState:
    """The documents that are in force on a mesh, and the lengths of its shares; all views of the mesh share it.

    A block belongs to the thread that entered it. Another thread does not see it, with one exception: backward runs in
    threads that PyTorch starts, and these see the blocks of the thread that is in any.
    """

    def __init__(self) -> None:
        self._mine = _Mine()
        self._threads: list[ThreadBlocks] = []
        """Those of the threads that are in a block."""
        self._lengths: dict[int, None] = {}
        self.batches = 0
        """The number of batches that this rank has split, for errors."""
        self._packed: list[weakref.ref[Tensor]] = []
        """Labels of the latest batches with packed documents."""
        self._heeded: set[bool] = set()
        """True if an attention call had documents or an explicit mask, False if one had neither."""
        self.padded: tuple[tuple[int, int], int, int] | None = None
        """Rows and positions of a share of the last batch, and its length before and after padding; None: none."""

    # ------------------------------------------------------------------ blocks

    def enter(self, documents: Tensor | None, length: int | None = None) -> Block:
        """Put documents (None: a batch without) in force in this thread. ``length``: positions before padding."""
        mine = self._mine.blocks
        block = Block(documents, mine, length)
        if not mine.entered:
            self._threads.append(mine)
        mine.entered.append(block)
        mine.documents = documents
        return block

    def leave(self, block: Block) -> None:
        """End one block, whichever thread and order it ends in: no other block changes."""
        theirs = block.owner
        theirs.entered.remove(block)
        theirs.documents = theirs.entered[-1].documents if theirs.entered else None
        if not theirs.entered:
            self._threads.remove(theirs)

    @property
    def documents(self) -> Tensor | None:
        """The documents of the innermost block of this thread, for what prepares or gathers data."""
        mine = self._mine.blocks
        if torch.compiler.is_compiling():
            return mine.documents
        if not mine.entered:
            mine = self._of_backward() or mine
        for block in mine.entered[-1:]:
            block.used = True
        return mine.documents

    @property
    def length(self) -> int | None:
        """The positions of the sequence of this thread's innermost block, before padding, if the block knows them."""
        entered = self._mine.blocks.entered
        return entered[-1].length if entered else None

    def in_force(self, caller: str) -> Tensor | None:
        """The documents for an attention call.

        Raises:
            RuntimeError: if this thread is in no block, but another one is. (A forward in a worker thread would ignore
                the documents of its batch; one beside a thread that prepares the next batch may lack its own block.)
        """
        found = self.documents
        mine = self._mine.blocks
        if torch.compiler.is_compiling() or mine.entered or not self._threads or self._of_backward():
            return found
        others = [theirs.thread.name for theirs in self._alive()]
        if others:
            raise RuntimeError(
                f"{caller} runs in thread {mine.thread.name!r}, which is in no documents block, while thread "
                f"{others[0]!r} is in one on this cp mesh. A block holds in its own thread only. Enter "
                "handler.documents(batch) in the thread of the forward too (documents(None) for a batch without "
                "documents), or pass documents= to the module"
            )
        return found

    def _of_backward(self) -> ThreadBlocks | None:
        """The blocks of the only thread that is in any, if this is a thread of PyTorch's backward."""
        # A thread that Python has not started; CPython has no public name for its kind.
        if not self._threads or not isinstance(threading.current_thread(), threading._DummyThread):
            return None
        others = self._alive()
        if len(others) > 1:
            names = ", ".join(repr(theirs.thread.name) for theirs in others)
            raise RuntimeError(
                f"backward recomputes attention while {len(others)} threads ({names}) are in documents blocks on this "
                "cp mesh. A thread of backward cannot tell whose batch it works on. Pass documents= to the modules, "
                "or use torch's own activation checkpointing, which records them"
            )
        return others[0] if others else None

    def _alive(self) -> list[ThreadBlocks]:
        return [theirs for theirs in tuple(self._threads) if theirs.thread.is_alive()]

    # ------------------------------------------------------------------ what the calls of a batch have in common

    def record_attention(self, length: int, documents: Tensor | None, causal: bool | None) -> None:
        """Record an attention call of this thread.

        Args:
            length: the number of query positions that this rank holds.
            documents: those of the call.
            causal: None for an explicit mask, which may be anything.

        Raises:
            RuntimeError: if causal and other attention use the documents of one block.
        """
        self.record_length(length)
        self._heeded.add(documents is not None or causal is None)
        entered = self._mine.blocks.entered
        if documents is None or not entered:
            return
        block = entered[-1]
        block.used = True
        # The same table, and not an equal one: a recompute may have that of a block that has ended.
        if causal is None or documents is not block.documents:
            return
        block.kinds.add(causal)
        if len(block.kinds) > 1:
            raise RuntimeError(
                "causal and non-causal attention use the documents of one handler.documents block. They usually belong "
                "to two sequences (an encoder and a decoder, or cross-attention), and documents describe one. Enter a "
                "block of each batch around its own part of the model, and give modules of cross-attention a style "
                "with cross_attention=True. If one sequence really has both, pass documents= to the styled modules as "
                "a keyword argument instead of a block"
            )

    def record_packed(self, labels: Tensor) -> None:
        """Record the labels of a batch with packed documents."""
        self._packed = [*self._packed[1 - LENGTHS :], weakref.ref(labels)]

    def ignores_documents(self, labels: object) -> bool:
        """True if these are the labels of a batch with packed documents, and no attention call had documents ever."""
        return self._heeded == {False} and any(known() is labels for known in self._packed)

    def record_length(self, length: int) -> None:
        """Record the length of a share."""
        if torch.compiler.is_compiling() or length in self._lengths:
            return
        self._lengths[length] = None
        if len(self._lengths) > LENGTHS:
            self._lengths.pop(next(iter(self._lengths)), None)

    def is_share(self, length: int) -> bool:
        """True if a share of this length was handed out or attended lately."""
        return length in self._lengths
