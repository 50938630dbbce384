"""One pipeline for batches: read documents and padding, shift labels, pad, split over the ranks, make positions.

:func:`read_batch` returns the container that it was given; ``integrations.transformers.prepare_batch`` returns the
keywords of a model's forward.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.compiling import is_compiling
from ..mesh.agreement import digest
from ..mesh.arguments import check_int, check_type, is_int
from ..mesh.cp_mesh import CPMesh
from ..mesh.entries import memory_of
from ..mesh.padding import Form, Padding
from ..mesh.split import Counted
from ..schedule import layout as layouts
from ..schedule.documents import PackedDocuments, documents_table, mark_copy, mark_packed, mark_tokens, read, tokens_of
from .loss import check_ignore_index, ranks_of
from .packing import IDS, OFFSETS, PreparedBatch, padded_mask, runs, take_documents
from .sharding import Shares, checked_dim, local_share, padded_table, resolve_layout
from .uncounted import can_hold, widened

TOKENS = ("input_ids", "tokens", "inputs_embeds")
"""Entries that determine the length of the sequence, if a batch has them."""
POSITIONS = ("position_ids", "positions", "input_pos", "pos_ids", "inputs_position")
"""Entries that may hold the position of each token: the names of transformers, torchtitan, torchtune and MaxText."""
SECOND = ("decoder_", "encoder_")
"""Beginnings of the names of entries that belong to the other sequence of an encoder-decoder."""


class LocalBatch:
    """This rank's share of a batch, and the state of the whole one. It is a dict, list or tuple."""

    documents: Tensor | None = None
    """Boundaries of documents and padding as a CPU table ``[1 or B, m]``, for ``handler.documents(batch)``."""
    tokens: Tensor | None = None
    """``[1 or B, S]`` on the CPU: False on padding that is a document in ``documents``; None: there is none."""
    packed: Sequence[Sequence[int]] | None = None
    """Boundaries of the packed documents, in which positions restart, if ``documents`` has those of padding, too."""
    length: int = 0
    """Positions of the whole sequence before padding, for ``handler.combine(..., length=batch.length)``."""
    padded_length: int = 0
    """Positions of all ranks together."""
    ranks: int = 0
    """The number of ranks that it was split over; 0: unknown."""
    split_as: tuple[str, tuple[int, ...]] = "", ()
    """The layout in which it was split, and those ranks; ("", ()): unknown."""
    form: Form = Form()
    """The form of values of its tokens."""
    weight: Any = 1.0
    """In ``handler.loader(..., accumulate=)`` the share of its labels in those of all micro-batches."""
    weights: Sequence[Any] = (1.0,)
    """The same for ``shift_labels`` and each of ``shift_labels_1``, ``shift_labels_2`` ... (``mtp_depth``)."""
    ran: bool = False
    """True if something has run over the whole sequence in a block of this batch that has ended."""
    last: bool = True
    """In ``handler.loader``, True for the last micro-batch before a step of the optimizer."""
    counted: Counted = Counted()
    """In ``handler.loader(..., accumulate=)`` the labels that were counted for ``weight``."""
    of_samples: bool = False
    """True if its documents are the samples of a planned micro-batch, each of which has positions from 0 on."""
    past: Mapping[Any, tuple[torch.Size, Tensor | None]] = {}
    """Its entries that have a sequence: the shape of each, and True where it holds padding (None: nowhere)."""
    recorded: bool = True
    """False for a copy, or one that another process has split: losses do not know its entries yet."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.recorded = False
        mark_copy(self.documents, self.tokens)
        mark_packed(self.documents, self.packed)
        record_table(self)


_by_table: Any = WeakTensorKeyDictionary()


def batch_of(handler: Shares, table: Any) -> LocalBatch:
    """The state of the batch whose documents are this very table (its entries were copied, say), if the handler fills
    it up alike: another one may have made it, for another mesh."""
    known = isinstance(table, Tensor) and not is_compiling()
    found: LocalBatch | None = _by_table.get(table) if known else None
    alike = found is not None and handler.padded_length(found.length) == found.padded_length
    return found if found is not None and alike else LocalBatch()


def refuse_other_split(handler: Shares, batch: LocalBatch) -> None:
    """Raise ``ValueError`` if a batch was split in another layout, or over as many other ranks, than by ``handler``; or
    over several, if that has one (attention finds out other numbers of ranks); or if it has more rows by now."""
    if is_compiling():
        return
    if isinstance(batch, Mapping) and _is_joined(batch):
        raise ValueError(
            f"this batch of {batch.padded_length} positions has several rows, and was one when it was split: samples "
            "were split one by one, and joined to a batch, which has the documents and padding of the first of them "
            "only. Join samples first, and split the batch"
        )
    if batch.ranks > 1 == handler.cp.size:
        raise ValueError(
            f"this batch was split over {batch.ranks} ranks, and the handler of this block is that of a mesh of one "
            "rank. Each rank would take its share for the whole sequence. Split the whole batch with the handler of "
            "this block, or enter the block of the handler that has split it"
        )
    if not len(batch.split_as[1]) == handler.cp.size > 1:
        return
    (layout, ranks), own = batch.split_as, ranks_of(handler.mesh)
    if (layout, ranks) != (handler.layout, own):
        raise ValueError(
            f"this batch was split with layout={layout!r} over ranks {list(ranks)}, and the handler of this block "
            f"splits with layout={handler.layout!r} over ranks {list(own)}. Attention and losses would take its tokens "
            "for others. Split it with a handler of the model's style and mesh, and enter the block of that handler"
        )


def _is_joined(batch: Any) -> bool:
    """True if a share of one row has become a batch of several that differ. (The documents of a row that is repeated
    are right for all.)"""
    at, share = batch.get("position_ids"), batch.padded_length // max(1, batch.ranks)
    if max(batch.form.rows, default=0) != 1 or not share:
        return False

    def grown(x: Any) -> bool:  # not features of tokens, which may be as many, and not codebooks of one row
        if not isinstance(x, Tensor) or x.ndim < 2 or len(x) == 1:
            return False
        return share in x.shape[1:] if x.is_floating_point() else x.shape[-1] == share

    tokens = _tokens_of(batch, TOKENS)
    others = [x for name, x in batch.items() if name != "position_ids" and grown(x)]
    if tokens is None and grown(at) and any(len(x) == len(at) for x in others):  # positions may have several axes
        rows = [at, *(x for x in others if not x.is_floating_point() and x.numel() == at.numel())]
    else:
        rows = [tokens] if grown(tokens) else []
    return not all(bool((x == x[:1]).all()) for x in rows)


def _tokens_of(entries: Mapping[Any, Any], names: Sequence[str]) -> Tensor | None:
    """The tokens of a batch, under the first of these names that it has; None if it has none of them."""
    return next((x for name in names if isinstance(x := entries.get(name), Tensor)), None)


def record_entries(cp: CPMesh, batch: Any) -> None:
    """Let losses know the entries of a batch that was copied, or split in another process (by a data loader)."""
    if is_compiling() or batch.recorded:
        return
    batch.recorded = True
    known = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    alike = [
        (x, past)
        for name, (shape, past) in batch.past.items()
        if isinstance(x := known.get(name), Tensor) and x.shape == shape
    ]
    memories = [memory_of(x) for x, _ in alike]  # entries that were put into one tensor cannot be told apart
    cp.batch.entries.record_copies(x for x, memory in zip(alike, memories, strict=True) if memories.count(memory) == 1)


def record_table(batch: LocalBatch) -> None:
    """Let :func:`batch_of` find the state of a batch by its table."""
    if batch.documents is not None and not is_compiling():
        state = _by_table[batch.documents] = LocalBatch()  # without the table, which would keep itself
        state.length, state.padded_length, state.form = batch.length, batch.padded_length, batch.form


class _Dict(dict[Any, Any], LocalBatch):
    pass


class _List(list[Any], LocalBatch):
    pass


class _Tuple(tuple[Any, ...], LocalBatch):
    pass


@cache
def _named_tuple(kind: Any) -> Any:
    """A function that makes a named tuple of this type, with the state of a batch, of its fields."""
    if both := [name for name in kind._fields if hasattr(LocalBatch, name)]:
        raise ValueError(
            f"batch is a {kind.__name__} with fields {both}. The batch that is returned has attributes of these names. "
            "Rename the fields, or pass a dict"
        )
    made: Any = type(kind.__name__, (kind, LocalBatch), {"__reduce__": lambda x: (_unpickled, (kind, [*x], vars(x)))})
    return made._make


def _unpickled(kind: Any, fields: list[Any], state: dict[str, Any]) -> Any:
    """A named tuple with the state of a batch, in another process."""
    found = _named_tuple(kind)(fields)
    found.__setstate__(state)
    return found


class Unsplit(NamedTuple):
    """A batch that has been read, and not split yet."""

    labels: Tensor | None
    """The numbers of labels that count ``[1 + depth]``: of next tokens and of each further one; None: no labels."""
    split: Callable[[], Any]
    """Returns this rank's share."""


def read_batch(
    handler: Shares,
    batch: Any,
    seq_dims: Any = 1,
    shift_labels: bool = False,
    *,
    ignore_index: int = -100,
    pad_values: Mapping[Any, float] | None = None,
    debug: bool = False,
    labels_cross_documents: bool = False,
    mtp_depth: int = 0,
) -> Unsplit:
    """See :meth:`hyper_cp.ContextParallelHandler.get_batch_on_this_cp_rank`."""
    check_type("batch", batch, (Mapping, list, tuple), "It holds several tensors. Pass a dict, a list or a tuple")
    named, entries = isinstance(batch, Mapping), entries_of(handler, batch, debug)
    if named:
        remedy = "It is split like the tokens. Pass a tensor over the whole sequence, or leave it out"
        check_type("position_ids", entries.get("position_ids"), (Tensor, type(None)), remedy)
    check_ignore_index(ignore_index)
    _check_shift(entries, named, shift_labels, mtp_depth)
    documents = take_documents(entries, seq_dims if isinstance(seq_dims, Mapping) else ()) if named else None
    whole = WholeBatch(handler, entries, _sequence_dims(entries, seq_dims, named), documents)
    if named:
        whole.read_padding()
        whole.refuse_second_sequence()
        # An explicit mask says what sees what. (To shift labels, documents have to be named all the same.)
        mask = entries.get("attention_mask")
        explicit = isinstance(mask, Tensor) and "attention_mask" not in whole.dims and mask.shape[-2] == mask.shape[-1]
        named_documents = documents is not None or any(name in batch for name in (*OFFSETS, *IDS))
        if not named_documents and (shift_labels or not explicit):
            whole.refuse_restarts()
    if shift_labels:
        whole.shift_labels(ignore_index, labels_cross_documents)
    dims = {name: dim for name, dim in whole.dims.items() if not (shift_labels and name == "labels")}
    pad_values = {} if pad_values is None else pad_values
    _check_pad_values(pad_values, dims)
    labels = [x for x in whole.dims if x in ("labels", "shift_labels") or _is_labels(x, whole.entries[x])]
    fill: dict[Any, float] = {x: ignore_index if can_hold(whole.entries[x].dtype, ignore_index) else 0 for x in labels}
    fill |= {**pad_values, "attention_mask": 1}
    if shift_labels:
        fill |= whole.shift_further(mtp_depth, fill, labels_cross_documents)
        del entries["labels"], whole.dims["labels"]
    own = whole.entries.get("shift_labels", whole.entries.get("labels")) if named else None
    counted = [own, *(whole.entries[f"shift_labels_{k}"] for k in range(1, 1 + mtp_depth))]
    numbers = None
    if isinstance(own, Tensor):
        numbers = torch.stack([(widened(x, ignore_index) != ignore_index).sum() for x in counted])

    return Unsplit(numbers, partial(_split, whole, fill, type(batch)))


def _check_shift(entries: Mapping[Any, Any], named: bool, shift_labels: bool, mtp_depth: int) -> None:
    if shift_labels and not (named and isinstance(entries.get("labels"), Tensor) and "shift_labels" not in entries):
        raise ValueError(
            "shift_labels=True needs a dict batch with a tensor 'labels' and without 'shift_labels', but the entries "
            f"are {list(entries)}. Pass the unshifted labels as 'labels', or shift_labels=False for shifted ones"
        )
    check_int("mtp_depth", mtp_depth, "It is the number of further tokens that each position predicts", least=0)
    if mtp_depth and not shift_labels:
        raise ValueError(
            f"mtp_depth={mtp_depth} without shift_labels=True. Labels of further tokens are made of those of the "
            "tokens themselves. Pass shift_labels=True, and labels"
        )


def _split(whole: WholeBatch, fill: Mapping[Any, float], kind: Any) -> Any:
    """This rank's share of a batch, in a container of the same kind that knows the batch."""
    handler, named = whole.handler, issubclass(kind, Mapping)
    shares = whole.split(fill, positions=named)
    make = _named_tuple(kind) if hasattr(kind, "_make") else _List if issubclass(kind, list) else _Tuple
    found: Any = _Dict(shares) if named else make(shares.values())
    found.documents, found.length, found.padded_length = whole.table, whole.length, whole.padded
    found.tokens, found.form, found.ranks = tokens_of(whole.table), whole.form, handler.cp.size
    found.packed, found.past = whole.restarting.rows if whole.padding else None, whole.past
    mark_packed(found.documents, found.packed)
    if not is_compiling():
        found.split_as = handler.layout, ranks_of(handler.mesh)
    record_table(found)
    labels = found.get("shift_labels", found.get("labels")) if named else None
    if isinstance(labels, Tensor) and whole.documents and any(len(row) > 2 for row in whole.documents.rows):
        handler.cp.batch.record_packed(labels)
    return found


def _is_labels(name: Any, x: Tensor) -> bool:
    """True for labels of another name, which are padded as labels are."""
    return str(name).endswith(("labels", "targets")) and not (x.is_floating_point() or x.dtype == torch.bool)


def _check_pad_values(pad_values: Any, dims: Mapping[Any, int]) -> None:
    check_type("pad_values", pad_values, Mapping, "Each entry has a value of its own. Pass a dict of numbers")
    unknown = [name for name in pad_values if name not in dims]
    if unknown:
        raise ValueError(
            f"pad_values names {unknown}, but the entries with a sequence are {list(dims)}. Others are not padded. "
            "Leave them out"
        )
    for name, value in pad_values.items():
        check_type(f"pad_values[{name!r}]", value, (int, float), "The entry is padded with it. Pass a number")


class WholeBatch:
    """A batch before it is split: its entries, the sequence dimension of each that has one, and its documents.

    Every batch goes the same way: :meth:`read_padding`, :meth:`shift_labels`, :meth:`split`. The conventions here are
    those of ``get_batch_on_this_cp_rank``; those of transformers are in ``integrations.transformers``.
    """

    def __init__(
        self, handler: Shares, entries: dict[Any, Any], dims: dict[Any, int], documents: Tensor | None
    ) -> None:
        """``documents``: packed documents of the batch; ``ValueError`` if they do not fit it."""
        self.handler, self.entries, self.dims = handler, entries, dims
        sizes = {name: entries[name].shape[dim] for name, dim in dims.items()}
        first = next((name for name in sizes if name in TOKENS), next(iter(sizes)))
        self.length = sizes[first]
        for entry, size in sizes.items():
            if size != self.length:
                raise ValueError(
                    f"batch entry {entry!r} has {size} positions in dimension {dims[entry]}, but {first!r} has "
                    f"{self.length}. If that is not its sequence, set seq_dims={{{entry!r}: None}} (it passes through "
                    "whole) or the right dimension"
                )
        self.padded = handler.padded_length(self.length)
        self.source, self.first, self.dim = first, entries[first], dims[first]
        self.rows = _rows_of(self.first, self.dim)
        self.documents, self.tokens = read(documents), tokens_of(documents)
        """Packed documents, in which positions restart; and False where there is padding ``[1 or B, S]``, if any."""
        if self.documents is not None:
            self.documents.check(self.rows, self.length)
        self.shown = torch.empty(0, device="cpu")
        """The padding mask ``[B, S]``, if there is padding."""
        self.padding: Sequence[Sequence[int]] = ()
        """Boundaries of tokens and padding in each row of the batch, if there is padding."""
        self.past: Mapping[Any, tuple[torch.Size, Tensor | None]] = {}
        """Once it is split, the shape of each share, and where it holds padding."""

    @property
    def form(self) -> Form:
        """The form of values of the tokens, as far as the entries tell."""
        entries = [(x := self.entries[name], dim % x.ndim) for name, dim in self.dims.items()]
        alike = [dim for x, dim in entries if x.ndim > 1 and _rows_of(x, dim) == self.rows]
        # [S, C] without another entry of as many rows, or [C, S] beside one without rows, may be one row of C features.
        alone = self.first.ndim == 2 and self.first.is_floating_point() and len(alike) == 1
        features = alone and (self.dim % 2 == 0 or any(x.ndim == 1 for x, _ in entries))
        return Form((self.rows, 1) if features and self.rows > 1 else (self.rows,), tuple(sorted({*alike})) or (0,))

    def read_padding(self) -> None:
        """Turn a padding mask ``[B, S]`` into boundaries; the mask that is left hides nothing. An explicit mask is
        padded like the sequence.

        ``ValueError`` for padding between tokens, and for explicit masks of another length.
        """
        mask = self.entries.get("attention_mask")
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.ndim < 2:
            kind = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
            raise TypeError(
                f"attention_mask {kind}. It says which positions are padding, or which see each other. Pass a padding "
                "mask [B, S], or a mask [..., S, S], as a tensor"
            )
        if "attention_mask" not in self.dims:
            self.pad_mask(mask)
            return
        host, padding = runs(mask.movedim(self.dims["attention_mask"], -1))
        for row, found in enumerate(padding):
            if len(found) > (3 if host[row, 0] else 4):
                raise ValueError(
                    f"attention_mask[{row}] is not a padding mask. It must be 1 on the tokens and 0 on padding before "
                    "or after them. Pass packed documents as document_ids or cu_seqlens, and other masks in four "
                    "dimensions [B, 1, S, S] (they pass through whole)"
                )
        self.entries["attention_mask"] = torch.ones_like(mask)
        if not bool(host.all()):
            self.shown = host
            self.padding, self.tokens = padding, host if self.tokens is None else host & self.tokens

    def refuse_restarts(self) -> None:
        """Raise ``ValueError`` if positions go back at a token, as in packed documents, which nothing names: some
        models keep such documents apart, others do not. Waits for the device that holds the positions."""
        for name in POSITIONS:
            positions, dim = self.entries.get(name), self.dims.get(name)
            if isinstance(positions, Tensor) and dim is not None and positions.ndim <= 2:
                self._refuse_restarts(name, positions, dim)

    def _refuse_restarts(self, name: str, positions: Tensor, dim: int) -> None:
        rows, alike = _rows_of(positions, dim), bool(dim % positions.ndim) == bool(self.dim % self.first.ndim)
        of_rows = rows == 1 or (rows == self.rows and alike)  # else they are coordinates of patches, say
        if name != "position_ids" and (positions.is_floating_point() or not of_rows):
            return
        host = torch.atleast_2d(positions.movedim(dim, -1)).cpu()
        back = host[:, 1:] < host[:, :-1]
        if self.tokens is not None:
            back = back & self.tokens[:, 1:] & self.tokens[:, :-1]
        if bool(back.any()):
            row, before = back.nonzero()[0].tolist()
            first = host[row, before + 1].item()
            raise ValueError(
                f"{name}[{row}] {'goes back' if first else 'returns'} to {first} at position {before + 1}, as in "
                "packed documents. The batch does not say whether these see each other. Pass cu_seqlens or document_ids"
                " to keep them apart (hyper_cp.hf.prepare_batch reads position_ids as transformers does), "
                "document_ids=None if they see each other, or attention_mask if it is padding"
            )

    def pad_mask(self, mask: Tensor) -> None:
        """Pad an explicit mask with the sequence. ``ValueError`` if it has another length."""
        if self.padded > self.length:
            self.entries["attention_mask"] = padded_mask(mask, self.length, self.padded)

    def refuse_second_sequence(self) -> None:
        """Raise ``ValueError`` if documents or padding of one sequence come with the tokens of another."""
        second = [name for name in self.dims if str(name).startswith(SECOND)]
        if second and (self.documents or self.padding):
            raise ValueError(
                f"batch has documents or padding, and two sequences: {self.source!r} and {second[0]!r}. Documents "
                "describe one sequence, and would be applied to both. Make a batch of each sequence, and run the "
                "encoder in the documents block of its batch and the decoder in that of its own"
            )

    def shift_labels(self, ignore_index: int, cross_documents: bool) -> None:
        """Add ``shift_labels``: every position has the label of the next one; the last of the sequence has
        ``ignore_index``, and so has the last of each document unless labels ``cross_documents``. (The labels of padding
        are the caller's, as on one device.)"""
        labels = self.entries["labels"]
        if "labels" not in self.dims:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} have no sequence dimension. shift_labels=True shifts them "
                "along it. Pass labels of tokens [B, S], or shift_labels=False"
            )
        if not can_hold(labels.dtype, ignore_index):
            raise TypeError(
                f"labels are {labels.dtype}, which holds no ignore_index={ignore_index}. The last token has no "
                'next one, and gets it. Pass batch["labels"].long(), or another ignore_index'
            )
        dim = self.dims["shift_labels"] = self.dims["labels"]
        _warn_if_shifted(self.handler, self.entries, dim, ignore_index)
        boundaries = self.documents.rows if self.documents and not cross_documents else ()
        self.entries["shift_labels"] = shifted(labels, dim, ignore_index, boundaries)

    def shift_further(self, depth: int, fill: Mapping[Any, float], cross_documents: bool) -> dict[Any, float]:
        """Add, for k = 1 to ``depth``, the tokens k positions on and the labels k + 1 on, and return the values with
        which they are padded: those of ``fill`` for tokens and labels, which also stand where there is no further one
        in the sequence, or in the document unless labels ``cross_documents``. Padding before tokens has none. Labels on
        padding are filled, too."""
        own = self.documents.rows if self.documents and not cross_documents else ((0, self.length),)
        rows = self._with_padding(own)
        made = {}
        for k in range(1, depth + 1):
            for name, source, by in ((f"{self.source}_{k}", self.source, k), (f"shift_labels_{k}", "labels", k + 1)):
                if name in self.entries:
                    raise ValueError(
                        f"batch has an entry {name!r}, and mtp_depth={depth} makes one of this name. Only one of them "
                        "can be kept. Rename it"
                    )
                dim, value = self.dims[source], fill.get(source, 0)
                x = shifted(self.entries[source], dim, value, rows, by)
                if source == "labels" and self.tokens is not None:
                    hidden = ~self.tokens.view(len(self.tokens), *[1] * (x.ndim - 2), -1)[0 if x.ndim == 1 else ...]
                    x = x.movedim(dim, -1).masked_fill(hidden.to(x.device), value).movedim(-1, dim)
                self.entries[name] = x
                self.dims[name], made[name] = dim, value
        return made

    def _with_padding(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Boundaries of documents with those of padding; each may be those of all rows in one."""
        padding = self.padding or ((),)
        count = max(len(rows), len(padding))
        both = ([*x] * count if len(x) == 1 else x for x in (rows, padding))
        return [sorted({*row, *found}) for row, found in zip(*both, strict=True)]

    @cached_property
    def table(self) -> Tensor | None:
        """Documents and padding of the padded sequence; None if there are none."""
        rows: Sequence[Sequence[int]] = self.documents.rows if self.documents else ()
        if self.padding:
            rows = self._with_padding(rows or [[0]])
        if not rows and (self.padded > self.length or layouts.by_documents(self.handler.layout)):
            rows = [[0, self.length]]  # the whole sequence is a document too
        return self.table_of(rows) if rows else None

    def table_of(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The table of these boundaries for the padded sequence, which says what is padding."""
        table: Any = documents_table(rows)
        return padded_table(self.handler, table if self.tokens is None else mark_tokens(table, self.tokens))

    def split(self, fill: Mapping[Any, float], *, positions: bool = True) -> dict[Any, Any]:
        """This rank's share of every entry, and its ``position_ids``.

        Args:
            fill: the values (default 0) with which entries are padded.
            positions: False for a batch whose entries have no names.
        """
        handler, state = self.handler, self.handler.cp.batch
        state.batches += 1
        state.counted = Counted()
        shares, at, past = dict(self.entries), None, None
        for name, dim in self.dims.items():
            shares[name] = local_share(handler, shares[name], dim, self.table, fill.get(name, 0))
        counts = positions and shares.get("position_ids") is None
        if counts or self.padded > self.length:
            at = resolve_layout(handler, self.padded, self.table, "padded length").positions(handler.cp.rank)
        if at is not None and self.padded > self.length:
            past = at >= self.length
        padding = Padding((self.length,), self.padded, self.padded // handler.cp.size, self.form)
        self.past = {name: (shares[name].shape, self._past(name, past)) for name in self.dims}
        state.entries.record([(shares[name], found) for name, (_, found) in self.past.items()], padding)
        if at is not None and counts:
            shares["position_ids"] = self.positions(at).to(self.first.device)
        return shares

    def _past(self, name: Any, past: Tensor | None) -> Tensor | None:
        """True where an entry holds padding of the split, given the positions ``[share]`` that do. In the padding mask,
        of which ones are left, it is True on padding of the batch too, so that a mean with this mask leaves it out."""
        x, dim = self.entries[name], self.dims[name]
        if name == "attention_mask" and self.padding:
            shown = local_share(self.handler, self.shown, 1, self.table, 0)
            return ~shown if dim % x.ndim else ~shown.mT
        return None if past is None else past.view([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)])

    @property
    def restarting(self) -> PackedDocuments:
        """The documents in which positions restart."""
        return self.documents or PackedDocuments([[0, self.length]])

    def positions(self, at: Tensor) -> Tensor:
        """Position ids of tokens at ``[S/n]``, in the form of the tokens, ``[B, S/n]`` or ``[S/n]``. They restart in
        packed documents.

        Padding positions restart at 0: a table of positions need not be longer than the sequence.
        """
        found = self.restarting.restarted(at)
        if self.first.ndim == 1:
            return found[0]
        found = found.expand(self.rows, -1)
        return (found if self.dim else found.T).contiguous()


def _rows_of(x: Tensor, dim: int) -> int:
    """The rows of an entry that has the sequence in a dimension."""
    return x.shape[0] if dim else x.shape[1] if x.ndim > 1 else 1


def entries_of(handler: Shares, batch: Any, debug: bool) -> dict[Any, Any]:
    """The entries of a batch that is to be split, by name or place; with ``debug``, compared on all ranks.

    Raises ``ValueError`` if the batch is what was made of another one, a rank's share of it, or if the ranks hold
    different batches.
    """
    entries: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    is_share = isinstance(batch, LocalBatch) or any(isinstance(x, PreparedBatch) for x in entries.values())
    if debug:
        state = "its state (whole, or split already)"
        compare_contents(handler, {state: is_share, "the names (or number) of its entries": list(entries)})
    if is_share:
        length = f" of {batch.length} positions" if isinstance(batch, LocalBatch) else ""
        raise ValueError(
            f"batch is this rank's share of a batch{length}: get_batch_on_this_cp_rank or prepare_batch has made it. "
            "Splitting it again would leave a share of the share, in which most tokens are missing. Pass the whole "
            "batch, and split it once: with prepare_batch for models of prepare_model, else with "
            "get_batch_on_this_cp_rank"
        )
    if debug and entries:
        compare_contents(handler, {f"entry {name!r}": x for name, x in entries.items()})
    return entries


def _warn_if_shifted(handler: Shares, entries: Mapping[Any, Any], dim: int, ignore_index: int) -> None:
    """Warn if labels that will be shifted are those of the next tokens already.

    Only the first batch of a mesh is read, since that waits for the device; a loader makes all batches alike.
    """
    labels, tokens = entries["labels"], _tokens_of(entries, TOKENS[:2])
    if handler.cp.batch.batches or is_compiling() or tokens is None or tokens.shape != labels.shape:
        return
    tokens, labels = (x.movedim(dim, -1) for x in (tokens, labels))
    if labels.is_meta or type(labels) is not Tensor or labels.device != tokens.device:
        return
    counted = labels != ignore_index
    here, following = counted & (labels != tokens), counted[..., :-1] & (labels[..., :-1] != tokens[..., 1:])
    if here.any() and counted[..., :-1].any() and not following.any():
        warnings.warn(
            "the labels of this batch are those of the next tokens already, and will be shifted once more: the model "
            "would learn to predict the token after the next one. Pass unshifted labels, or name these 'shift_labels' "
            "(and leave shift_labels=True out)",
            stacklevel=5,
        )


def shifted(x: Tensor, dim: int, fill: float, boundaries: Sequence[Sequence[int]] = (), by: int = 1) -> Tensor:
    """Give every position the label (or token) ``by`` positions on; the last ones of each document get ``fill``."""
    out = F.pad(x.movedim(dim, -1), (0, by), value=fill)[..., by:]
    for row, bounds in enumerate(boundaries):
        last = (torch.tensor(bounds[1:], device="cpu") - torch.arange(1, by + 1, device="cpu")[:, None]).flatten()
        last = last[last >= 0].to(x.device)  # of a document that is shorter, those before it have none either
        (out if len(boundaries) == 1 else out[row])[..., last] = fill
    return out.movedim(-1, dim)


def _sequence_dims(entries: dict[Any, Any], seq_dims: Any, named: bool) -> dict[Any, int]:
    """The sequence dimension of every entry that has one."""
    if isinstance(seq_dims, (list, tuple)):
        if named or len(seq_dims) != len(entries):
            raise ValueError(
                f"seq_dims={seq_dims!r} has {len(seq_dims)} places for the entries {list(entries)}. Each entry of a "
                "list or tuple has its own place, and a dict has names. Pass one int per entry, a dict of names for a "
                "dict, or one int for all"
            )
        seq_dims = dict(enumerate(seq_dims))
    given: Mapping[Any, int | None] = seq_dims if isinstance(seq_dims, Mapping) else {}
    default: Any = 1 if isinstance(seq_dims, Mapping) else seq_dims
    if not is_int(default):
        raise TypeError(
            f"seq_dims={seq_dims!r} is not a dimension. It says where each entry has its sequence. Pass an int, a dict "
            "of ints and None, or one of these per entry"
        )
    missing = [name for name in given if name not in entries]
    if missing:
        raise ValueError(
            f"seq_dims names {missing}, but the batch has {list(entries)}. There is nothing to split. Correct the names"
        )
    found = {}
    for name, x in entries.items():
        if not isinstance(x, Tensor):
            _refuse_nested(name, x)
            continue
        explicit_mask = named and name == "attention_mask" and x.ndim != 2
        of_all_rows = named and name == "position_ids" and x.ndim == 1  # [S] beside tokens [B, S]
        dim = 0 if of_all_rows else default
        dim = given.get(name, None if explicit_mask or not -x.ndim <= dim < x.ndim else dim)
        if dim is None:
            continue
        found[name] = checked_dim(x, dim, f"seq_dims[{name!r}]", f"batch entry {name!r}")
    if not found:
        shapes = {k: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for k, x in entries.items()}
        raise ValueError(
            f"no entry of the batch has a sequence dimension: {shapes} with seq_dims={seq_dims!r}. Set seq_dims to the "
            "dimension that the sequence has"
        )
    return found


def _refuse_nested(name: Any, x: Any) -> None:
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    if any(isinstance(y, Tensor) for y in inner):
        raise TypeError(
            f"batch entry {name!r} is a {type(x).__name__} of tensors. Each tensor needs its own place in seq_dims. "
            "Put them into the batch itself"
        )


def compare_contents(handler: Shares, values: Mapping[str, Any], caller: str = "debug=True") -> None:
    """Raise ``ValueError`` on every rank, naming the values, if the ranks of the cp mesh hold different ones."""
    digests = tuple((name, digest(contents_of(x))) for name, x in values.items())
    handler.cp.agree("batch", (), caller, once=digests, always=True)


def contents_of(x: Any) -> bytes:
    """The contents of an entry: all values of a tensor or an array (an image), with its dtype and shape; one by one
    those of what holds several; else what it prints, without addresses."""
    if isinstance(x, Mapping):
        x = [*x.items()]
    elif isinstance(x, (set, frozenset)):
        x = sorted(x, key=repr)
    elif not isinstance(x, Tensor) and hasattr(x, "__array_interface__"):  # repr leaves out what is in the middle
        array = np.asarray(x)
        values = contents_of(array.tolist()) if array.dtype.hasobject else array.tobytes()
        return f"{array.dtype} {array.shape}".encode() + values
    if isinstance(x, (list, tuple)):
        return f"{type(x).__name__} of {len(x)}: {[digest(contents_of(y)) for y in x]}".encode()
    if not isinstance(x, Tensor):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x)).encode()
    return f"{x.dtype} {tuple(x.shape)}".encode() + x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
