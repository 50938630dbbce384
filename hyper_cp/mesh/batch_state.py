"""The state of the batch that a cp mesh works on: its documents, by block and thread, and what is known of batches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from .entries import Entries
from .padding import Padding
from .share_lengths import ShareLengths
from .split import Counted, Split

CUT = 8
"""The most positions that are expected to be cut off a share by mistake: those of the furthest token that is predicted.
Of short shares it is a quarter."""
PACKED = 16
"""Batches with packed documents whose labels are known; the oldest is dropped."""


class Block:
    """One entered ``handler.documents`` block, and the calls that have used its documents."""

    def __init__(
        self, documents: Tensor | None, owner: ThreadBlocks, split: Split | None, tokens: Tensor | None
    ) -> None:
        self.documents, self.owner, self.split = documents, owner, split
        places = None if split is None else split.places
        self.padding = None if places is None else places.table(), tokens
        """The table of the places of tokens, and False where the batch itself has padding."""
        self.opened = _of_all_meshes.entered
        self.ran = False
        """True if something has run over the whole sequence in the block."""
        self.used = documents is None
        """True if something that splits the sequence has run in the block, or read its documents, or there are none."""
        self.kinds: set[bool] = set()
        """The kinds of attention calls with the documents of the block: True for causal."""


class ThreadBlocks:
    """The documents blocks of one thread, innermost last."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.entered: list[Block] = []
        # An attribute, and not the last block: a compiled graph reads it as an input, at any depth of blocks.
        self.documents: Tensor | None = None
        self.padding: tuple[Tensor | None, Tensor | None] = None, None
        """That of the last block; an attribute as well."""
        self.of_buffers: list[tuple[str, int]] = []
        """The layouts of ``context_parallel`` blocks that have split buffers, innermost last, each with the length of
        its shares, if all have one; else 0."""


class _OfAllMeshes(threading.local):
    """The blocks of a thread on all meshes, innermost last."""

    def __init__(self) -> None:
        self.entered: list[Block] = []


_of_all_meshes = _OfAllMeshes()

calls_of_engine = 0
"""The number of calls of the process that have run over the sequence of a mesh."""


class _ThisThread(threading.local):
    """The blocks of a thread on one mesh. (No ``module.thread_stack``: other threads must see them too, see below.)"""

    def __init__(self) -> None:
        self.blocks = ThreadBlocks()


class BatchState:
    """The active documents of a mesh, and what is known of its batches; all views of the mesh share it.

    A block belongs to the thread that entered it. Another thread does not see it, with one exception: backward runs in
    threads that PyTorch starts, and these see the blocks of the thread that is in any.
    """

    def __init__(self) -> None:
        self.entries, self.lengths = Entries(), ShareLengths()
        self._this_thread = _ThisThread()
        self._threads: list[ThreadBlocks] = []
        """The blocks of all threads that are in one."""
        self._had_documents = False
        """True if the last function that was called with this mesh, in a forward, had documents of a block."""
        self.left: list[Callable[[], tuple[BatchState, str] | None]] = []
        """One for each ``context_parallel_mesh`` block whose modules have left this mesh: it returns the state and the
        name of the mesh that they are on, if one of them runs in this thread."""
        self.ran = False
        """True if anything has run over the whole sequence on this mesh."""
        self.averaged = False
        """True if DDP or FSDP averages the gradients of a model on this mesh over its ranks."""
        self.warned_of_gradients = False
        """True once a reduction that is unknown, or does not fit, has been warned of."""
        self.graphs_to_read = 4
        """The number of graphs of losses in which results of ``pool`` are still looked for."""
        self.first_labels_to_read = 4
        """The number of calls of ``pool`` in which first labels behind padding are still looked for."""
        self.batches = 0
        """The number of batches that this rank has split, for errors."""
        self._packed: list[weakref.ref[Tensor]] = []
        """Labels of the latest batches with packed documents."""
        self._explicit: set[bool] = set()
        """True if an attention call had documents or an explicit mask, False if one had neither."""
        self.counted = Counted()
        """That of the last batch."""
        self.warned_of_counts = False
        self.verified: frozenset[int] = frozenset()
        """In a run of ``verify`` on one device, the ranks that run the same batch, each on a mesh of its own."""

    def copies(self, ranks: Sequence[int]) -> int:
        """The number of these ranks, over which tokens are counted, that run one batch without sharing it."""
        return len(self.verified.intersection(ranks)) or 1

    # ------------------------------------------------------------------ blocks

    def enter(self, documents: Tensor | None, split: Split | None = None, tokens: Tensor | None = None) -> Block:
        """Make documents (None: a batch without) active in this thread. ``tokens``: False where the batch itself has
        padding, ``[1 or B, S]``."""
        blocks = self._this_thread.blocks
        block = Block(documents, blocks, split, tokens)
        block.opened.append(block)
        if not blocks.entered:
            self._threads.append(blocks)
        blocks.entered.append(block)
        blocks.documents, blocks.padding = documents, block.padding
        return block

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In this thread, a block for a sequence that is none of the user's: its length is not recorded."""
        lengths, self.lengths = self.lengths, ShareLengths()
        block = self.enter(None)
        try:
            yield
        finally:
            self.leave(block)
            self.lengths = lengths

    @property
    def of_buffers(self) -> list[tuple[str, int]]:
        """The layouts in which ``context_parallel`` blocks of this thread have split their buffers, innermost last,
        each with the length of its shares, if all have one; else 0."""
        return self._this_thread.blocks.of_buffers

    def leave(self, block: Block) -> None:
        """End one block, whichever thread and order it ends in: no other block changes."""
        blocks = block.owner
        block.opened.remove(block)
        blocks.entered.remove(block)
        around = None if is_compiling() or not blocks.entered else blocks.entered[-1]
        if around is not None and around.documents is not None and block.documents is not None and block.used:
            around.used |= torch.equal(around.documents, block.documents)  # of a teacher and its student, say
        blocks.documents = blocks.entered[-1].documents if blocks.entered else None
        blocks.padding = blocks.entered[-1].padding if blocks.entered else (None, None)
        if not blocks.entered:
            self._threads.remove(blocks)

    @property
    def documents(self) -> Tensor | None:
        """The documents of the innermost block of this thread, for what prepares or gathers data; in a recompute by
        activation checkpointing those of its forward."""
        found: Tensor | None
        (found,) = checkpoint.batch_state(self, lambda: (self._documents_now(),))
        return found

    def _documents_now(self) -> Tensor | None:
        blocks = self._this_thread.blocks
        if is_compiling():
            return blocks.documents
        if not blocks.entered:
            blocks = self._blocks_of_backward() or blocks
        for block in blocks.entered[-1:]:
            block.used = True
        return blocks.documents

    @property
    def in_block(self) -> bool:
        """True if this thread, or the one whose backward it runs, is in a block, with documents or without."""
        return bool(self._this_thread.blocks.entered or self._blocks_of_backward())

    @property
    def known_documents(self) -> Tensor | None:
        """The documents of the innermost block of this thread, for checks: they do not count as read."""
        return self._this_thread.blocks.documents

    @property
    def length(self) -> int | None:
        """The positions of the sequence of this thread's innermost block, before padding, if the block knows them."""
        return None if self._split is None else self._split.length

    @property
    def padded_length(self) -> int | None:
        """The same with padding. (That of a planned micro-batch may be more than its handler's layout needs.)"""
        return None if self._split is None else self._split.padded

    @property
    def rows_and_share(self) -> tuple[int, int]:
        """Rows, and positions of each rank, of the batch of this thread's innermost block; 0 where it does not know
        them."""
        split = self._split_now
        return (0, 0) if split is None else (next(iter(split.form.rows), 0), split.share or 0)

    def cut_share(self, rows: int, length: int) -> int | None:
        """The positions of each rank in a batch of as many rows, of which values ``[rows, length]`` lack a few, and no
        share of another batch is as long: in this thread's block, else of those that are alive. None: they are others.
        """
        if is_compiling() or length in self.lengths or length in self.entries.shares_of():
            return None
        of_block, share = self.rows_and_share
        shares = ({share} if rows == of_block else set()) if share else self.entries.shares_of(rows)
        known = shares & self.lengths.made
        return min((x for x in known if 0 < x - length <= min(CUT, x // 4)), default=None)

    @property
    def ends(self) -> tuple[int, ...]:
        """The positions before padding of each row of its documents, or of all rows in one number; (): the block does
        not know them."""
        return () if self._split is None else self._split.row_ends

    @property
    def _split(self) -> Split | None:
        """The split of the batch of this thread's innermost block, in a recompute by activation checkpointing that of
        its forward; None: no block, or one that does not say."""
        found: Split | None
        (found,) = checkpoint.batch_state(self._this_thread, lambda: (self._split_now,))
        return found

    @property
    def _split_now(self) -> Split | None:
        entered = self._this_thread.blocks.entered
        return entered[-1].split if entered else None

    @property
    def of_samples(self) -> bool:
        """True if the documents of this thread's innermost block are samples, which have positions from 0 on."""
        return self._split is not None and self._split.of_samples

    def padding_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The lengths, before and after padding, of the batch to which losses of this shape belong: that of this
        thread's innermost block (the loader may have split the next one already), else the last one. None: it was not
        padded, or these are no losses of its tokens."""
        split = self._split
        if split is None and any(share in shape[-1:] for _, share in self.of_buffers[-1:]):
            return None  # buffers of a context_parallel block are split evenly
        return self.entries.padding_of(shape, split)

    @property
    def places_in_block(self) -> Padding | None:
        """The places of tokens, of the batch of this thread's innermost block, in values of a share; None: unknown."""
        split = self._split
        return None if split is None else split.places

    @property
    def documents_in_block(self) -> Tensor | None:
        """Those of :attr:`documents`, which do not count as read."""
        found: Tensor | None
        (found,) = checkpoint.batch_state(self, lambda: (self.known_documents,))
        return found

    @property
    def inputs_of_padding(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """For compiled graphs, of the batch of this thread's innermost block: the table of :attr:`places_in_block`, its
        documents, and False where it has padding of its own."""
        blocks = self._this_thread.blocks
        return blocks.padding[0], blocks.documents, blocks.padding[1]

    @property
    def weighed(self) -> Counted:
        """The labels that were counted for the weight of the batch of this thread's innermost block, else of the last
        batch."""
        split = self._split
        return split.counted if split is not None and split.length else self.counted

    def active_documents(self, caller: str) -> Tensor | None:
        """The documents for an attention call of ``caller``, which errors name.

        Raises:
            RuntimeError: if this thread is in no block, but another one is. (A forward in a worker thread would ignore
                the documents of its batch; one beside a thread that prepares the next batch may lack its own block.)
        """
        found = self._documents_now()
        blocks = self._this_thread.blocks
        if is_compiling() or blocks.entered or not self._threads or self._blocks_of_backward():
            return found
        others = [other.thread.name for other in self._alive()]
        if others:
            raise RuntimeError(
                f"{caller} runs in thread {blocks.thread.name!r}, which is in no documents block, while thread "
                f"{others[0]!r} is in one on this cp mesh. A block holds in its own thread only. Enter "
                "handler.documents(batch) in the thread of the forward too (documents(None) for a batch without "
                "documents), or pass documents= to the module"
            )
        return found

    def documents_of_call(self, caller: str) -> Tensor | None:
        """:meth:`active_documents` for a function that is called with a mesh; in a recompute by activation
        checkpointing those of its forward.

        Raises:
            RuntimeError: also if code of others recomputes the call in backward, and the block of its forward has
                ended.
        """
        found: Tensor | None
        (found,) = checkpoint.batch_state(self, lambda: (self.active_documents(caller),))
        if is_compiling():
            return found
        if not checkpoint.in_foreign_recompute():
            self._had_documents = found is not None
        elif found is None and self._had_documents and not self.in_block:
            raise RuntimeError(
                f"{caller} is recomputed in backward without documents, and had some in its last forward, whose block "
                "has ended. This activation checkpointing is not torch's own, so nothing recorded them, and the "
                "gradients would be wrong. Run backward inside the block, pass documents= to the function, or use "
                "torch.utils.checkpoint"
            )
        return found

    def refuse_left(self, caller: str, mesh: object) -> None:
        """Raise ``ValueError`` if a function is called on ``mesh``, this one, in a model that runs on another mesh."""
        if not self.left or is_compiling() or checkpoint.in_backward():  # of a forward before the block, maybe
            return
        for now in (left() for left in reversed(self.left)):
            if now is not None and now[0] is not self:
                raise ValueError(
                    f"{caller}: mesh={mesh} is the one that styled modules of the running model have left, for the "
                    f"{now[1]} of a context_parallel_mesh block. The function would take a tensor that is split over "
                    "that mesh for a share of this one. Pass the mesh of the model: "
                    "mesh=ContextParallelHandler.of(model).mesh, read in every forward"
                )

    def _blocks_of_backward(self) -> ThreadBlocks | None:
        """The blocks of the only thread that is in any, if this is a thread of PyTorch's backward."""
        # A thread that Python has not started (others start such threads, too); CPython has no public name for it.
        started = not isinstance(threading.current_thread(), threading._DummyThread)
        if not self._threads or started or not checkpoint.in_backward():
            return None
        others = self._alive()
        if len(others) > 1:
            names = ", ".join(repr(other.thread.name) for other in others)
            raise RuntimeError(
                f"backward recomputes attention while {len(others)} threads ({names}) are in documents blocks on this "
                "cp mesh. A thread of backward cannot tell whose batch it works on. Pass documents= to the modules, "
                "or use torch's own activation checkpointing, which records them"
            )
        return others[0] if others else None

    def _alive(self) -> list[ThreadBlocks]:
        return [blocks for blocks in tuple(self._threads) if blocks.thread.is_alive()]

    # ------------------------------------------------------------------ what the calls of a batch have in common

    def record_attention(
        self,
        documents: Tensor | None,
        *,
        band: tuple[int | None, int | None],
        lengths: tuple[int, int],
        mask_rows: int | None,
        masked: bool,
        positional: bool,
    ) -> None:
        """Record an attention call of this thread.

        Args:
            documents: those of the call.
            band: the least and the greatest distance of visible keys from their query; None: no bound.
            lengths: global lengths of queries and keys.
            mask_rows: rows of the explicit mask of the call; None: it has none.
            masked: True if the mask hides more than ``band`` says.
            positional: True if a score function depends on positions.

        Raises:
            RuntimeError: if causal and other attention use the documents of one block.
        """
        # A mask whose rows are all the same shows the same keys to every query: only the band may be causal then.
        alike = mask_rows is None or mask_rows == 1 < lengths[0] == lengths[1]
        causal = band[1] == 0 if (alike or not masked) and not positional else None
        self._explicit.add(documents is not None or causal is None)
        entered = self._this_thread.blocks.entered
        if documents is None or not entered:
            return
        block = entered[-1]
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
        self._packed = [*self._packed[1 - PACKED :], weakref.ref(labels)]

    def record_moved(self, x: Tensor, moved: Tensor) -> None:
        """Record the copy of an entry of the last batch on another device, which takes its place."""
        self.entries.record_moved(x, moved)
        if any(labels() is x for labels in self._packed[-1:]):
            self._packed[-1] = weakref.ref(moved)

    def ignores_documents(self, labels: object) -> bool:
        """True if these are the labels of a batch with packed documents, and no attention call ever had documents."""
        return self._explicit == {False} and any(known() is labels for known in self._packed)

    def record_call(self, length: int, layout: str | None, ranks: int) -> None:
        """Record a call of this thread, whose share of the sequence has ``length`` positions. ``layout``: None if the
        call would be right in any.

        Raises:
            ValueError: if this thread is in the block of a batch that was split otherwise than the call expects.
        """
        if is_compiling():
            return
        global calls_of_engine
        calls_of_engine += 1
        entered = self._this_thread.blocks.entered
        for block in entered[-1:]:
            block.used = True  # also by cross-attention, which its documents do not describe
        if not self.fits(length, layout, ranks):
            return
        if layout is not None and ranks > 1 and not entered and not self.of_buffers:
            self.lengths.warn_of_layout(length, layout)
        if length not in self.lengths:
            if ranks > 1:
                split = entered[-1].split if entered else None
                share = None if split is None else split.share
                self.lengths.warn_of_change(length, share or next((x for _, x in self.of_buffers[-1:]), 0))
            self.lengths.record(length)

    def fits(self, length: int, layout: str | None, ranks: int) -> bool:
        """False if a recompute runs in the block of another batch than its forward. Arguments and errors are those of
        :meth:`record_call`, which calls this; on one rank, where attention may be the user's own, modules do."""
        opened = self._this_thread.blocks.entered or _of_all_meshes.entered
        try:
            self._check_split(opened[-1].split if opened else None, length, layout, ranks)
        except ValueError:
            if checkpoint.in_recompute():  # of a forward in a block of its own (few calls come here: looking is slow)
                return False
            raise
        return True

    def _check_split(self, split: Split | None, length: int, layout: str | None, ranks: int) -> None:
        if ranks == 1:  # any layout is right there
            if split:
                self.lengths.refuse_other_ranks(split, length, ranks, bool(self._this_thread.blocks.entered))
            return
        of_buffers = [x for x, _ in self.of_buffers[-1:]]
        if of_buffers and layout not in (None, *of_buffers):
            (given,) = of_buffers
            raise ValueError(
                f"attention or a recurrence runs with layout={layout!r}, in a context_parallel block that has split "
                f"its buffers as {given!r} on the same mesh. It would assign wrong positions to tokens. Pass "
                f"layout={given!r} to the function or the style, or layout={layout!r} to the block"
            )
        if split:
            self.lengths.check(split, length, layout, ranks, bool(self._this_thread.blocks.entered))

    def refuse_whole(self, length: int) -> None:
        """Raise ``ValueError`` if a call has got the whole batch of the block that this thread is in. (Its documents
        are half as long, or less, which :meth:`record_call` comes too late to explain.)"""
        entered = self._this_thread.blocks.entered
        if not is_compiling() and entered and entered[-1].split is not None:
            self.lengths.refuse_whole(entered[-1].split, length)

    def mark_ran(self) -> None:
        """Record that something runs over the whole sequence."""
        self.ran = True
        for block in self._this_thread.blocks.entered:
            block.ran = True

    def idle(self, ever: bool) -> bool:
        """True if nothing has run over the whole sequence in the block of a batch that this thread is in. Outside of
        blocks with ``ever``: if batches were split on this mesh, and nothing has run for any of them."""
        batches = [block for block in self._this_thread.blocks.entered if block.split and block.split.share]
        return not any(block.ran for block in batches) if batches else ever and self.batches > 0 and not self.ran
