"""What may see what: windows, documents and explicit masks, in the forms users have them.

Windows and causality become a band, documents become borders: both are cut into tiles by the
schedule. Explicit masks are looked at (a causal matrix is a band) and else sliced per tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .build import Schedule, Step
from .layout import Documents, Range
from .tiles import CAUSAL, FULL, Band, Tile

# --------------------------------------------------------------------------- windows


def check_window(window: Sequence[int | None] | None) -> tuple[int | None, int | None] | None:
    """``(left, right)`` with None for unbounded, or None for no window; else ``ValueError``."""
    if window is None:
        return None
    if len(window) != 2 or any(
        w is not None and (not isinstance(w, int) or isinstance(w, bool) or w < -1) for w in window
    ):
        raise ValueError(
            f"window={window!r} must be (left, right): how many positions before and after its own a query "
            "sees, each an int >= 0, or None (or -1) for no bound"
        )
    left, right = (None if w == -1 else w for w in window)
    return None if left is None and right is None else (left, right)


def band_of(is_causal: bool, window: tuple[int | None, int | None] | None) -> Band:
    """The band of global positions that causality and a window leave visible."""
    left, right = window or (None, None)
    return (None if left is None else -left, 0 if is_causal else right)


# --------------------------------------------------------------------------- documents


def documents_table(documents: Any = None, document_ids: Any = None) -> Tensor | None:
    """Packed documents as a CPU int64 tensor of borders, ``[1, m]`` or ``[batch, m]``.

    Args:
        documents: cumulative lengths from 0 to S as a list or tensor ``[m]`` (for every batch row);
            or one such list or tensor per row; or ``[batch, m]``, each row filled up with S.
        document_ids: ``[batch, S]``: the document of every position; a document is contiguous.

    Returns:
        The table, its width filled up to a power of two (so that another number of documents is
        seldom another shape), or None without documents.
    """
    if document_ids is not None:
        if documents is not None:
            raise ValueError("documents and document_ids are both given: pass one of them")
        documents = _borders_of_ids(torch.as_tensor(document_ids))
    if documents is None:
        return None
    if isinstance(documents, Tensor) and documents.ndim == 2 and documents.dtype == torch.int64:
        return documents  # a table already: not read here, so that a compiled graph takes it as an input
    if isinstance(documents, Tensor):
        rows = documents.reshape(1, -1) if documents.ndim == 1 else documents
        if rows.ndim != 2 or rows.is_floating_point():
            raise ValueError(
                f"documents is a {documents.dtype} tensor of shape {tuple(documents.shape)}: pass cumulative "
                "lengths (integers from 0 to the sequence length) of shape [m] or [batch, m]"
            )
        table = rows.detach().to("cpu", torch.int64).tolist()
    else:
        listed = list(documents)
        nested = any(isinstance(x, (list, tuple)) or (isinstance(x, Tensor) and x.ndim) for x in listed)
        table = [[int(b) for b in row] for row in (listed if nested else [listed])]
    if not table or any(len(row) < 2 for row in table):
        raise ValueError(f"documents={documents!r}: cumulative lengths need at least the borders 0 and S")
    width = 1 << (max(len(row) for row in table) - 1).bit_length()
    return torch.tensor([row + [row[-1]] * (width - len(row)) for row in table], dtype=torch.int64)


def _borders_of_ids(ids: Tensor) -> list[list[int]]:
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"document_ids has shape {tuple(ids.shape)}; it must be [batch, sequence]")
    found = []
    for row, line in enumerate(ids.cpu()):
        first = (torch.nonzero(line[1:] != line[:-1]).flatten() + 1).tolist()
        if len(first) + 1 != len(line.unique()):
            raise ValueError(
                f"document_ids[{row}] names a document in two places: a document is contiguous. Give its "
                "parts different ids"
            )
        found.append([0, *first, len(line)])
    return found


def documents_of(table: Tensor | None, batch: int, length: int) -> tuple[Documents, ...] | None:
    """The borders of a table, one tuple for all rows if they agree; None if nothing is hidden by them.
    ``ValueError`` if they do not fit ``batch`` rows of ``length`` positions."""
    if table is None:
        return None
    rows = distinct_rows(table, length)
    if len(table) not in (1, batch):
        raise ValueError(f"documents has {len(table)} rows for a batch of {batch}: give one for all, or one each")
    return None if rows == ((0, length),) else rows


def distinct_rows(table: Tensor, length: int) -> tuple[Documents, ...]:
    """:func:`borders_of` the table of a sequence of this length, or ``ValueError``."""
    if table.device.type != "cpu" or table.ndim != 2:
        raise ValueError(
            f"documents is a {table.ndim}-D tensor on {table.device}: pass cumulative lengths [batch or 1, m]"
            " on the CPU (once per batch: they are needed on the host)"
        )
    return _checked_rows(tuple(map(tuple, table.tolist())), length)


def check_documents(table: Tensor | None, length: int) -> None:
    """Raise ``ValueError``, before any communication, if documents do not fit a global length."""
    if table is not None and not torch.compiler.is_compiling():
        distinct_rows(table, length)


@lru_cache(maxsize=256)
def _checked_rows(rows: tuple[Documents, ...], length: int) -> tuple[Documents, ...]:
    for row in rows:
        if row[0] != 0 or row[-1] != length or any(a > b for a, b in pairwise(row)):
            raise ValueError(
                f"documents={list(dict.fromkeys(row))} must be cumulative lengths that ascend from 0 to the "
                f"global sequence length {length}. Add a last document for padding, if there is any"
            )
    return _without_empty(rows)


def borders_of(table: Tensor | None) -> tuple[Documents, ...] | None:
    """The borders of each row of any table, without empty documents; one tuple if all rows agree."""
    return None if table is None else _without_empty(table.tolist())


def _without_empty(rows: Sequence[Sequence[int]]) -> tuple[Documents, ...]:
    found = tuple(tuple(dict.fromkeys(row)) for row in rows)
    return found[:1] if all(row == found[0] for row in found) else found


# --------------------------------------------------------------------------- explicit masks

_seen: Any = WeakTensorKeyDictionary()  # mask -> (version, what it is)


def recognised(mask: Tensor, length: int) -> Band | None:
    """The band a mask ``[..., S, S]`` amounts to (causal, or everything visible), else None.

    Every element is compared; the answer is kept as long as the tensor lives unchanged. Reads the
    result once per mask, which on an accelerator waits for the device.
    """
    if mask.shape[-1] != length or mask.shape[-2] != length:
        return None
    if mask.is_inference():  # has no version by which a change would show
        return _recognise(mask)
    owner = mask if mask._base is None else mask._base  # views are made anew for every call
    known = _seen.setdefault(owner, {})
    view = (tuple(mask.shape), mask.stride(), mask.storage_offset())
    if view not in known or known[view][0] != mask._version:
        known[view] = mask._version, _recognise(mask)
    found: Band | None = known[view][1]
    return found


def _recognise(mask: Tensor) -> Band | None:
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:  # exactly 0 where visible; what hides is -inf or the most negative number
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((mask.masked_fill(hidden, 0) == 0).all()):
            return None
    if not bool(hidden.any()):
        return FULL
    upper = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return CAUSAL if bool((hidden == upper).all()) else None


class MaskSlices:
    """An explicit mask ``[B|1, H|1, Sq|1, Skv|1]``, cut to what this rank's tiles need.

    The key dimension is global; the query dimension is global, or this rank's own rows.
    """

    def __init__(self, mask: Tensor, plan: Schedule):
        rows = sum(stop - start for start, stop in plan.queries)
        own = mask.shape[2] in (1, rows)
        if plan.swap and own and mask.shape[2] > 1:
            raise ValueError(
                f"attn_mask of shape {tuple(mask.shape)} has the local queries in its third dimension, but "
                "load_balance=True attends other queries: pass the mask of all global queries"
            )
        self.mask = mask if own else _ranges(mask, plan.queries, 2)
        self.step: Step | None = None

    def of(self, step: Step, tile: Tile) -> Tensor:
        """The slice of a tile, broadcastable to ``[b, H, rows, cols]``."""
        if step is not self.step:
            self.step = step
            self.block = self.mask if self.mask.shape[3] == 1 else _ranges(self.mask, step.keys, 3)
        part = self.block
        if tile.batch is not None and part.shape[0] > 1:
            part = part[tile.batch[0] : tile.batch[1]]
        if part.shape[2] > 1:
            part = part[:, :, tile.q[0] : tile.q[1]]
        return part if part.shape[3] == 1 else part[..., tile.k[0] : tile.k[1]]


def _ranges(x: Tensor, ranges: tuple[Range, ...], dim: int) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
