"""Documents packed into one sequence: the table that travels, and what the host reads from it, once per table.

The table, a CPU int64 tensor ``[1 or B, m]``, is what users' settings become and what ops take. Under
``torch.compile`` it is an input of the graph, so nothing here reads it while a graph is traced.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import struct
import weakref
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.compiling import is_compiling
from .derived import Owner
from .ranges import Documents

# --------------------------------------------------------------------------- from users' forms to a table

_WHY = "Documents are cumulative lengths: integers that ascend from 0 to the global sequence length."
_REMEDY = "Pass a list or tensor such as [0, 5, 16], or one for each batch row."
_IDS = "Each position has the number of its document. Pass a tensor [batch, sequence] of integers."


def documents_table(documents: Any = None, document_ids: Any = None) -> Tensor | None:
    """Packed documents as a CPU int64 tensor of boundaries, ``[1, m]`` or ``[batch, m]``.

    Args:
        documents: cumulative lengths from 0 to S as a list or tensor ``[m]`` (for every batch row);
            or one such list or tensor per row; or ``[batch, m]``, each row filled up with S.
        document_ids: ``[batch, S]``: the document of every position; a document is contiguous. Negative ones are
            padding.

    Returns:
        The table, its width filled up to a power of two (so that another number of documents is
        seldom another shape), or None without documents.
    """
    if document_ids is not None:
        if documents is not None:
            raise ValueError("documents and document_ids are both given. They describe the same. Pass one of them")
        ids = ids_tensor(document_ids)
        of_ids = documents_table(_boundaries_of_ids(ids))
        tokens = None if is_compiling() or not bool((ids < 0).any()) else (ids >= 0).cpu()
        return of_ids if of_ids is None or tokens is None else mark_tokens(of_ids, tokens)
    if documents is None:
        return None
    if isinstance(documents, Tensor) and documents.ndim == 2 and documents.dtype == torch.int64:
        return documents  # a table already: not read here, so that a compiled graph takes it as an input
    if isinstance(documents, Tensor):
        rows = documents.reshape(1, -1) if documents.ndim == 1 else documents
        if rows.ndim != 2 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise ValueError(
                f"documents is a {documents.dtype} tensor of shape {tuple(documents.shape)}. {_WHY} {_REMEDY}"
            )
        table = rows.detach().to("cpu", torch.int64).tolist()
    else:
        table = listed(documents)
    if not table or any(len(row) < 2 for row in table):
        raise ValueError(f"documents={documents!r} has a row of less than two boundaries. {_WHY} {_REMEDY}")
    width = 1 << (max(len(row) for row in table) - 1).bit_length()
    return torch.tensor([row + [row[-1]] * (width - len(row)) for row in table], dtype=torch.int64, device="cpu")


def listed(documents: Any) -> list[list[int]]:
    """The boundaries of each row, from numbers or one list of them per row."""
    try:
        listed = [x.tolist() if hasattr(x, "tolist") else x for x in documents]
        nested = any(isinstance(x, (list, tuple)) for x in listed)
        return [[operator.index(b) for b in row] for row in (listed if nested else [listed])]
    except TypeError as error:
        raise TypeError(f"documents={documents!r} must be cumulative lengths. {_WHY} {_REMEDY}") from error


def ids_tensor(document_ids: Any) -> Tensor:
    """The document of every position as a tensor."""
    try:
        return document_ids if isinstance(document_ids, Tensor) else torch.as_tensor(document_ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"document_ids is a {type(document_ids).__name__} that cannot become a tensor ({error}). {_IDS}"
        ) from error


def _boundaries_of_ids(ids: Tensor) -> list[list[int]]:
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"document_ids has shape {tuple(ids.shape)}. {_IDS}")
    found = []
    for row, line in enumerate(ids.cpu()):
        first = (torch.nonzero(line[1:] != line[:-1]).flatten() + 1).tolist()
        named = (begin := line[[0, *first]])[begin >= 0]  # padding may lie in several places
        if len(named) != len(named.unique()):
            raise ValueError(
                f"document_ids[{row}] names a document in two places. A document is contiguous. Give its parts "
                "different ids"
            )
        found.append([0, *first, len(line)])
    return found


# --------------------------------------------------------------------------- from a table to boundaries


class PackedDocuments(Owner):
    """The contents of one table. Equal tables are one object, so that it can be compared by identity.

    Attributes:
        rows: the boundaries of each batch row, without empty documents; one tuple if all rows agree.
        digest: a hash of ``rows``, 64 bits, the same in every process.
    """

    def __init__(self, table: list[list[int]]) -> None:
        super().__init__()
        distinct = tuple(tuple(dict.fromkeys(row)) for row in table)
        agree = all(row == distinct[0] for row in distinct)
        self.rows: tuple[Documents, ...] = distinct[:1] if agree else distinct
        self.digest = _digest(self.rows)
        self._table_rows = len(table)
        self._sound = [row[0] == 0 and all(a <= b for a, b in pairwise(row)) for row in table]
        ends = {row[-1] for row in table}
        self._length = ends.pop() if all(self._sound) and len(ends) == 1 else None

    @property
    def one_row(self) -> Documents | None:
        """The boundaries that all batch rows share, or None if rows differ."""
        return self.rows[0] if len(self.rows) == 1 else None

    def check_ascending(self) -> None:
        """Raise ``ValueError`` unless every row ascends from 0, whatever the length of the sequence."""
        if not all(self._sound):
            raise ValueError(f"documents={[list(row) for row in self.rows]} must ascend from 0. {_WHY} {_REMEDY}")

    def check_length(self, length: int) -> None:
        """Raise ``ValueError`` unless every row ascends from 0 to the global sequence length."""
        if length == self._length:
            return
        rows = self.rows * self._table_rows if len(self.rows) == 1 else self.rows
        row = next(row for row, sound in zip(rows, self._sound, strict=True) if not sound or row[-1] != length)
        raise ValueError(
            f"documents={list(row)} must be cumulative lengths that ascend from 0 to the "
            f"global sequence length {length}. Add a last document for padding, if there is any"
        )

    def check(self, batch: int, length: int) -> None:
        """Raise ``ValueError`` unless these documents fit ``batch`` rows of ``length`` global positions."""
        self.check_length(length)
        if self._table_rows not in (1, batch):
            raise ValueError(
                f"documents has {self._table_rows} rows for a batch of {batch}. A row belongs to one batch row, or to "
                "all. Pass one row, or as many as the batch has"
            )

    def numbers(self, positions: Tensor) -> Tensor:
        """The number of the document of each position ``[n]``, for each row: ``[rows, n]``. It is 0 before the first
        position of the sequence, and one more than the last document's behind the last."""
        rows = (torch.tensor(row, device="cpu") for row in self.rows)
        return torch.stack([torch.searchsorted(row, positions, right=True) for row in rows])

    def restarted(self, positions: Tensor) -> Tensor:
        """Positions counted from 0 in each document: ``[n] -> [rows, n]``."""
        boundaries = [torch.tensor(row, device="cpu") for row in self.rows]
        return positions - torch.stack([b[torch.searchsorted(b, positions, right=True) - 1] for b in boundaries])


def _digest(rows: tuple[Documents, ...]) -> int:
    """64 bits of a hash of the boundaries. (Python's own ``hash`` may differ between builds.)"""
    h = hashlib.blake2b(digest_size=8)
    for row in rows:
        h.update(struct.pack(f"<{len(row) + 1}q", len(row), *row))
    return int.from_bytes(h.digest(), "little", signed=True)


_known: dict[int, tuple[weakref.ref[Tensor], bytes, PackedDocuments]] = {}
"""``id(table) -> (table, its bytes, its contents)``, as long as the table lives."""


@overload
def read(table: Tensor) -> PackedDocuments: ...
@overload
def read(table: None) -> None: ...
def read(table: Tensor | None) -> PackedDocuments | None:
    """The contents of a table, parsed once: until the table is written to, this is a look-up by its identity.

    Its bytes are compared, not its version: NumPy or another process may own its memory, and PyTorch does not count
    their writes.
    """
    if table is None:
        return None
    if is_compiling():
        return _read_outside_of_graphs(table)
    known = _known.get(id(table))
    if known is not None and known[0]() is table and known[1] == _bytes(table):
        return known[2]
    if table.device.type != "cpu" or table.ndim != 2:
        raise ValueError(
            f"documents is a {table.ndim}-D tensor on {table.device}. The host reads them, once per batch. Pass "
            "cumulative lengths [batch or 1, m] on the CPU"
        )
    if not table.numel():
        raise ValueError(f"documents has shape {tuple(table.shape)}, and no boundaries. {_WHY} {_REMEDY}")
    content = _bytes(table)
    found = _parsed(content, len(table))
    key, known_tables = id(table), _known  # bound here: globals may be gone when the last tables die
    _known[key] = weakref.ref(table, lambda _: known_tables.pop(key, None)), content, found
    return found


@torch.compiler.disable(reason="The host reads documents. Split batches before the compiled function")
def _read_outside_of_graphs(table: Tensor) -> PackedDocuments:
    return read(table)


def _bytes(table: Tensor) -> bytes:
    """The numbers of a table, as bytes of int64."""
    dense = (
        table if table.dtype == torch.int64 and table.is_contiguous() else table.detach().to(torch.int64).contiguous()
    )
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)


@lru_cache(maxsize=32)
def _parsed(content: bytes, rows: int) -> PackedDocuments:
    numbers = memoryview(content).cast("q").tolist()
    width = len(numbers) // rows
    return PackedDocuments([numbers[i * width : (i + 1) * width] for i in range(rows)])


_tokens: Any = WeakTensorKeyDictionary()


def mark_tokens(table: Tensor, tokens: Tensor) -> Tensor:
    """Return a table, of whose positions some are padding, which is a document like any other: ``tokens [1 or B, S]``
    on the CPU is False there."""
    _tokens[table] = tokens
    return table


def mark_copy(table: Tensor | None, tokens: Tensor | None) -> None:
    """Record the padding of a table also for its copy: the record belongs to the very tensor, which a data loader's
    worker, ``pickle`` and ``copy.deepcopy`` make anew."""
    if table is not None and tokens is not None:
        mark_tokens(table, tokens)


def tokens_of(table: Tensor | None) -> Tensor | None:
    """The record of :func:`mark_tokens` for this very table; None: no padding is known."""
    found: Tensor | None = None if table is None else _tokens.get(table)
    return found


def ends_of_tokens(table: Tensor | None) -> tuple[int, ...] | None:
    """The position behind the last token of each row, or of all rows in one number; None: no padding is known there."""
    tokens = tokens_of(table)
    if tokens is None or bool(tokens[:, -1].all()):
        return None
    found: list[int] = (tokens * torch.arange(1, tokens.shape[1] + 1, device="cpu")).amax(1).tolist()
    return tuple(found)


_packed: Any = WeakTensorKeyDictionary()


def mark_packed(table: Tensor | None, rows: Sequence[Sequence[int]] | None) -> None:
    """Record the packed documents of a table, whose other boundaries are those of padding: positions restart in packed
    documents, and not behind padding."""
    if table is not None and rows is not None:
        _packed[table] = PackedDocuments([[*row] for row in rows])


def packed_of(table: Tensor) -> PackedDocuments:
    """The documents of a table in which positions restart: those of :func:`mark_packed` for this very table, or all."""
    if is_compiling():
        return _packed_outside_of_graphs(table)
    found: PackedDocuments | None = _packed.get(table)
    return read(table) if found is None else found


@torch.compiler.disable(reason="The host reads documents. Split batches before the compiled function")
def _packed_outside_of_graphs(table: Tensor) -> PackedDocuments:
    return packed_of(table)


def check_documents(table: Tensor | None, length: int) -> None:
    """Raise ``ValueError``, before any communication, if documents do not fit a global length."""
    if table is not None and not is_compiling():
        read(table).check_length(length)
