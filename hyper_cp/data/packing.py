"""Documents and padding of a batch: read under the names that batches use, as boundaries and as masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..schedule.documents import documents_table, ids_tensor, listed, mark_copy, mark_tokens, read, tokens_of
from .sharding import Shares, local_share, padded_table

OFFSETS = (
    "documents",
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_k"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_q", "cu_seq_k"),
)
"""Names under which batches hold cumulative lengths: ours, Megatron's and FlashAttention's, Hugging Face's and
torchtitan's."""
LONGEST = ("max_seqlen", "max_seqlen_q", "max_seqlen_kv", "max_seqlen_k", "max_length_q", "max_length_k")
"""Names of the longest document, which has no meaning for a share of the sequence."""
PADDED, UNPADDED, END = "{}_padded", "{}_unpadded", "{}_argmin"
"""Names of entries beside cumulative lengths: the same with padding between documents (Megatron), the same
without it if the others count it, and the number of boundaries if the rest is filling (both Megatron Bridge)."""
IDS = ("document_ids", "seq_idx")
"""Names under which batches hold the document of every position ``[B, S]``: ours, and that of recurrent layers."""
_LIKE_OFFSETS = re.compile(
    "cu_?(seq|doc|len|segment)|cumulative_(seq|len)|seq_?lens|packed|packing|(doc|document)s?_(boundaries|bounds|offsets)$"
    "|(doc|document|sample|sub_?seq|seq|sequence|segment)s?_?len(gth)?s$"
)
_LIKE_IDS = re.compile(
    "((inputs|targets|encoder|decoder)_)?(doc|document|segment|seq|sequence|pack|example|sample)s?_?(id|ids|idx|index)$"
    "|segments$|(inputs|targets)_segmentation$|attention_mask_in_length$"
)


def take_documents(entries: dict[Any, Any], known: Collection[Any] = ()) -> Tensor | None:
    """Remove packed documents, whatever their name, from ``entries``, and return them as a table of boundaries.

    Raises:
        ValueError: if two entries name different documents, or if an entry that is not ``known`` to be something else
            seems to name them in another way: they would be ignored.
    """
    # An entry named "documents" may be anything else, such as texts; then it passes through.
    names = [name for name in OFFSETS if name in entries and (name != "documents" or _numbers(entries))]
    tables = {name: _table(name, entries) for name in (*names, *(name for name in IDS if name in entries))}
    for name in LONGEST if names else ():
        entries.pop(name, None)
    _refuse_unknown_names({name: x for name, x in entries.items() if name not in known})
    found = {name: table for name, table in tables.items() if table is not None}
    rows = {name: read(table).rows for name, table in found.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"{', '.join(map(repr, rows))} name different documents: {rows}. Context parallelism of packed documents "
            f"needs queries and keys to be packed alike. Keep one of them and drop the others"
        )
    return max(found.values(), key=lambda table: tokens_of(table) is not None, default=None)  # one that knows padding


def _table(name: str, entries: dict[Any, Any]) -> Tensor | None:
    """Remove a batch entry, and those that belong to it, and return its table; its errors name the entry."""
    try:
        if name not in IDS:
            return _table_of_lengths(name, entries)
        entry = entries.pop(name)
        ids = None if entry is None else ids_tensor(entry)
        return documents_table(None, ids[None] if ids is not None and ids.ndim == 1 else ids)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batch entry {name!r}: {error}") from error


def _table_of_lengths(name: str, entries: dict[Any, Any]) -> Tensor | None:
    """The table of cumulative lengths. Padding between documents becomes documents, which nothing else sees."""
    entry = entries[name] = entries[name].cpu() if isinstance(entries[name], Tensor) else entries[name]
    if isinstance(entry, Tensor) and (
        entry.ndim not in (1, 2) or entry.dtype == torch.bool or entry.is_floating_point()
    ):
        return documents_table(entry)  # raises
    rows = _boundaries_of(name, entries)
    if rows is None:
        return None
    if entries.get(PADDED.format(name)) is not None:
        return _padded_documents(rows, _boundaries_of(PADDED.format(name), entries) or [])
    if entries.get(UNPADDED.format(name)) is not None:
        return _padded_documents(_boundaries_of(UNPADDED.format(name), entries) or [], rows)
    for beside in (PADDED.format(name), UNPADDED.format(name), END.format(UNPADDED.format(name))):
        entries.pop(beside, None)  # None, or says nothing alone
    table = isinstance(entry, Tensor) and entry.ndim == 2 and all(len(row) == entry.shape[1] for row in rows)
    return documents_table(entry if table else rows)


def _boundaries_of(name: str, entries: dict[Any, Any]) -> list[list[int]] | None:
    """Remove cumulative lengths from a batch, and return the boundaries of each row, without the -1 that fill it up."""
    entry, end = entries.pop(name), entries.pop(END.format(name), None)
    if entry is None:
        return None
    rows = listed(entry)
    ends = [len(row) for row in rows] if end is None else torch.as_tensor(end, device="cpu").flatten().tolist()
    ends = ends * len(rows) if len(ends) == 1 else ends
    if len(ends) != len(rows):
        raise ValueError(
            f"{END.format(name)} has {len(ends)} numbers for {len(rows)} rows of {name}. Each is the number of "
            "boundaries of a row. Pass one for each, or leave them out"
        )
    rows = [row[:stop] for row, stop in zip(rows, ends, strict=True)]
    return [row[: row.index(-1)] if row[-1:] == [-1] else row for row in rows]


def _padded_documents(lengths: list[list[int]], padded: list[list[int]]) -> Tensor | None:
    """The table of cumulative lengths without and with padding."""
    rows = _with_padding(lengths, padded)
    table = documents_table(rows)
    if table is None or len({row[-1] for row in rows}) > 1:  # refused later
        return table
    tokens = torch.zeros(len(rows), rows[0][-1], dtype=torch.bool, device="cpu")
    for line, row in zip(tokens, rows, strict=True):
        for start, stop in list(pairwise(row))[::2]:
            line[start:stop] = True
    return mark_tokens(table, tokens)


def _with_padding(lengths: list[list[int]], padded: list[list[int]]) -> list[list[int]]:
    """The boundaries of the tokens and of the padding of each document, from cumulative lengths without and with it."""
    if [len(row) for row in lengths] != [len(row) for row in padded]:
        raise ValueError(
            f"it has {[len(row) for row in lengths]} boundaries in its rows without padding, and "
            f"{[len(row) for row in padded]} with it. Both describe the same documents. Pass equal numbers"
        )
    found = []
    for without, within in zip(lengths, padded, strict=True):
        bounds = within[:1]
        for (a, b), (begin, stop) in zip(pairwise(without), pairwise(within), strict=True):
            if begin == stop == within[-1] and b in (a, stop):
                continue  # from here on the row is filled up with its last boundary, or with the length of the sequence
            if not 0 <= b - a <= stop - begin:
                raise ValueError(
                    f"a document has {b - a} tokens in {stop - begin} positions, {begin} to {stop} of the sequence. "
                    "With padding it cannot be shorter. Pass cumulative lengths without padding and with it"
                )
            bounds += [begin + b - a, stop]
        found.append(bounds)
    return found


def _refuse_unknown_names(entries: dict[Any, Any]) -> None:
    for name, x in entries.items():
        first, dims = x, 0
        while isinstance(first, (list, tuple)) and first:
            first, dims = first[0], dims + 1
        integers = isinstance(first, int) or (isinstance(first, Tensor) and not first.is_floating_point())
        dims += first.ndim if isinstance(first, Tensor) else 0
        offsets = _LIKE_OFFSETS.match(str(name)) and ((integers and dims > 0) or any(hasattr(x, n) for n in OFFSETS))
        if offsets or (_LIKE_IDS.match(str(name)) and integers and dims > 1):
            raise ValueError(
                f"batch entry {name!r} seems to name packed documents, but not under a name that is known. It would be "
                f"ignored, and documents would see each other. Pass cumulative lengths over the whole sequence as "
                f"{OFFSETS[1]!r}, or the document of every position as {IDS[0]!r}; if it is something else, rename it "
                f"or say so with seq_dims={{{name!r}: ...}} of get_batch_on_this_cp_rank"
            )


def _numbers(entries: dict[Any, Any]) -> bool:
    """True if the entry "documents" holds cumulative lengths: integers, maybe one list of them per row."""
    first = entries["documents"]
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return first is None or isinstance(first, (int, Tensor))


def runs(mask: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Return a copy of a padding mask ``[B, S]`` as booleans on the CPU, and the boundaries of its runs of tokens and
    padding.

    Raises:
        ValueError: if the mask has values other than 0 (padding) and 1 (a token).
    """
    host = mask.detach().cpu()
    wrong = ((host != 0) & (host != 1)).any(-1)
    if bool(wrong.any()):
        raise ValueError(
            f"attention_mask[{int(wrong.int().argmax())}] is not a padding mask. It has values other than 0 and 1 (up "
            f"to {host.max().item()}). If they number packed documents, pass documents= (cumulative lengths) or "
            "document_ids instead of attention_mask"
        )
    # A copy of booleans, too: they are kept, and the caller may fill his mask with that of the next batch.
    own = host.clone() if host.dtype == torch.bool else host.bool()
    return own, _boundaries(host[:, 1:] != host[:, :-1])


def _boundaries(changes: Tensor) -> list[list[int]]:
    """Boundaries ``[0, ..., S]`` of each row of ``changes [B, S - 1]``, which is True between two pieces."""
    return [[0, *(torch.nonzero(row).flatten() + 1).tolist(), len(row) + 1] for row in changes]


def padded_mask(mask: Tensor, length: int, padded: int) -> Tensor:
    """Pad an explicit mask ``[..., S|1, S|1]`` over ``length`` positions: tokens do not see the padding at the end.

    Raises:
        ValueError: if the mask is for another length.
    """
    if mask.ndim < 2 or mask.shape[-1] not in (1, length) or mask.shape[-2] not in (1, length):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} does not fit the {length} positions of the sequence. Masks are those "
            f"of the whole sequence. Pass it as [..., {length}, {length}] (a dimension may be 1), or pass a padding "
            "mask [B, S]"
        )
    more, visible = padded - length, 1 if mask.dtype == torch.bool else 0
    hidden = 0 if mask.dtype == torch.bool else -torch.inf
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        hidden = 0  # attention refuses the dtype, and names it
    wide = F.pad(mask.expand(*mask.shape[:-1], length), (0, more), value=hidden)
    # Padding may see anything, but a row must not be empty: its softmax would be NaN.
    return wide if mask.shape[-2] == 1 else F.pad(wide, (0, 0, 0, more), value=visible)


@dataclass(frozen=True)
class Media:
    """Images and videos of a whole batch, which are not split with its tokens. All of it is on the host, as it was."""

    entries: dict[str, Any]
    """The entries of the batch that hold them, or say how large they are."""
    tokens: Tensor
    """``input_ids [B, S]`` of the whole batch."""
    mask: Tensor | None
    """``attention_mask [B, S]``, if the batch has one."""


NONE_BACK = 1 << 40
"""A distance that no sequence has."""


@dataclass(frozen=True)
class PreparedBatch:
    """The state of a batch that attention, rotary embeddings and the router loss of a model need."""

    documents: Tensor | None = None
    """Table of boundaries, on the CPU; padding before the tokens of a row is a document of its own."""
    tokens: Tensor | None = None
    """``[B, 1, S/n, 1]``, if padding is a document: False where this rank holds padding, which sees nothing."""
    keys: Tensor | None = None
    """``[B, 1, 1, S]``, if padding cannot be a document (it lies between tokens): False where there is padding."""
    layout: str | None = None
    """The layout in which the batch was split."""
    last_position: int | Tensor = 0
    """The largest position of the whole batch: some rotary tables depend on it."""
    counted: Tensor | None = None
    """``[B, S/n]``: False on this rank's padding, which the router loss does not count. None: there is none."""
    visible: Tensor | None = None
    """``[B, 1, 1, S]``: False on the padding of the whole sequence, which causality does not hide from the tokens of an
    encoder. None: there is none."""
    packed: bool = True
    """False if documents do nothing but keep padding apart from the tokens of a row."""
    padding_counts: bool = False
    """True if something reads the outputs of padding, which sees the tokens before it (by its type those behind it)."""
    tokens_back: int = 0
    """The largest distance from padding whose label counts back to the nearest token of its row; ``NONE_BACK`` where
    there is none before it."""
    tokens_near: int = 0
    """The same to the nearest token on either side."""
    token_types: dict[str, Tensor] = field(default_factory=dict)
    """Types of all tokens of the sequence ``[B, S]``, -1 on padding that no mask of keys hides, by their name in the
    batch. Some models make masks of them, in which images see themselves whole."""
    length: int | None = None
    """The number of tokens of this rank, padding included; None if ``prepare_batch`` has not split the batch."""
    ranks: int | None = None
    """The number of ranks that the batch was split over; None as above."""
    numbered: bool = False
    """True if the batch had no position ids, and they count from 0 to the end of the sequence."""
    media: Media | None = None
    """Images and videos, until the model has encoded them."""
    labels: tuple[Tensor, int] | None = None
    """This rank's labels, and the number of writes to them when they were split."""
    shifted: tuple[Tensor, int] | None = None
    """The same of ``shift_labels``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "padding": tokens_of(self.documents), "labels": None, "shifted": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        padding = state.pop("padding", None)
        self.__dict__.update(state)
        mark_copy(self.documents, padding)

    @property
    def plain(self) -> bool:
        """True if the batch has neither documents nor padding that attention must know."""
        return self.documents is None and self.tokens is None and self.keys is None and not self.padding_counts

    def to(self, device: torch.device) -> PreparedBatch:
        """Move the state to the device where the model computes: batches are often prepared on the host."""
        given = {"tokens": self.tokens, "keys": self.keys, "counted": self.counted, "visible": self.visible}
        moved: dict[str, Any] = {name: None if x is None else x.to(device) for name, x in given.items()}
        return replace(self, **moved, token_types={name: x.to(device) for name, x in self.token_types.items()})


def attention_state(
    handler: Shares, documents: Tensor | None, mask: Tensor | None = None, positions: Tensor | None = None
) -> PreparedBatch:
    """Read what attention must know from a batch's global documents, padding mask and positions.

    Waits for the device that holds the mask or positions.

    Args:
        documents: table of boundaries.
        mask: ``[B, S]``, 1 on tokens. Padding at the end of rows changes nothing: a causal mask hides it.
        positions: ``[B, S]``. They count only if there are neither documents nor a mask; then, as in transformers, a
            document begins wherever positions do not go on by one.

    Raises:
        ValueError: for a mask with values other than 0 and 1.
    """
    if mask is None:
        if positions is not None and documents is None:
            documents = _restarts(handler, positions)
        return PreparedBatch(documents, layout=handler.layout)
    host, rows = runs(mask)
    begins = host.int().diff(dim=1) > 0  # a token behind padding
    empty = ~host.any(1) & (mask.shape[1] > 0)  # rows of nothing but padding, which see none of it either
    if not bool((begins.any(1) | empty).any()):
        return PreparedBatch(documents, layout=handler.layout)
    tokens = mask.bool()
    if documents is not None or bool((begins.sum(1) + host[:, 0] > 1).any()):
        return PreparedBatch(documents, keys=rearrange(tokens, "b s -> b 1 1 s"), layout=handler.layout)
    documents = mark_tokens(documents_table(rows), host)  # type: ignore[arg-type]
    here = rearrange(local_share(handler, tokens, 1, documents), "b s -> b 1 s 1")
    return PreparedBatch(documents, tokens=here, layout=handler.layout)


def read_positions(positions: Tensor | None, whole: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor | None:
    """The positions ``[B, S]`` that :func:`attention_state` reads; None if there are none.

    Position ids are ``[B, S]``, or have several axes: ``[4, B, S]`` begins with the positions of the text, and
    ``[3, B, S]`` (time, height and width) says nothing of documents.

    Args:
        whole: makes a share ``[B, S/n]`` the positions of the whole sequence.

    Raises:
        ValueError: if documents are packed in positions that have no row of the text.
    """
    if positions is None or not (positions.ndim == 2 or (positions.ndim == 3 and len(positions) in (3, 4))):
        return None
    first = whole(positions if positions.ndim == 2 else positions[0])
    if positions.ndim == 2 or len(positions) == 4:
        return first
    if bool((first.diff(dim=1) < 0).any()):  # time never goes back in a document
        raise ValueError(
            f"position_ids of {len(positions)} axes go back along the sequence, as those of packed documents do. "
            "Without a row of positions of the text nothing keeps the documents apart. Pass [4, B, S] with these "
            "positions in row 0, or cu_seqlens; if it is padding, pass attention_mask"
        )
    return None


def _restarts(handler: Shares, positions: Tensor) -> Tensor | None:
    """Return documents that begin where positions do not go on by one. Padding of the split is one more, as behind
    documents that a batch names: a layout by documents must place tokens alike, whoever names them."""
    rows = _boundaries((positions.diff(dim=1) != 1).cpu())
    return padded_table(handler, documents_table(rows)) if max(map(len, rows)) > 2 else None
