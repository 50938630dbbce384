"""A batch on its way to the ranks: lengths, padding, documents, labels and positions, settled before it is sharded."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..schedule import layout as layouts
from ..schedule import masks, positions
from .collectives import by_rank
from .sharding import Shares

Name = str | int
"""A key of a mapping, or a place in a list or tuple."""

OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k")
"""Entries that hold cumulative lengths, as Megatron, FlashAttention and Hugging Face call them."""
LONGEST = ("max_seqlen", "max_seqlen_q", "max_seqlen_kv", "max_length_q", "max_length_k")
"""Entries that belong to them, and mean nothing for a part of the sequence."""
TOKENS = ("input_ids", "tokens", "inputs_embeds")
"""Entries that say best how long the sequence is."""


class LocalBatch:
    """This rank's share of a batch, and what is true of the whole one. It is a dict, list or tuple."""

    documents: Tensor | None = None
    """Borders of documents and padding as a CPU table ``[1 or B, m]``, for ``handler.documents(batch)``."""
    length: int = 0
    """Positions of the whole sequence before padding, for ``handler.combine(..., length=batch.length)``."""
    padded_length: int = 0
    """Positions of all ranks together."""


class _Dict(dict[Any, Any], LocalBatch):
    pass


class _List(list[Any], LocalBatch):
    pass


class _Tuple(tuple[Any, ...], LocalBatch):
    pass


def local_batch(
    handler: Shares,
    batch: Any,
    seq_dims: Any,
    *,
    shift_labels: bool,
    ignore_index: int,
    pad_values: Mapping[Any, float] | None,
    debug: bool,
) -> Any:
    """See :meth:`hyper_cp.ContextParallelHandler.get_batch_on_this_cp_rank`."""
    if isinstance(batch, Mapping):
        entries: dict[Name, Any] = dict(batch)
    elif isinstance(batch, (list, tuple)):
        entries = dict(enumerate(batch))
    else:
        raise TypeError(f"batch is a {type(batch).__name__}: pass a dict, a list or a tuple of tensors")
    if debug:
        same_on_all_ranks(handler, entries)
    named = isinstance(batch, Mapping)
    if shift_labels and not (named and isinstance(entries.get("labels"), Tensor) and "shift_labels" not in entries):
        raise ValueError(
            "shift_labels=True needs a dict batch with a tensor 'labels' and without 'shift_labels', but the entries "
            f"are {list(entries)}. Pass the unshifted labels as 'labels', or shift_labels=False for shifted ones"
        )
    whole = _Whole(handler, entries, seq_dims, named)
    whole.find_documents()
    whole.find_padding()
    if shift_labels:
        whole.shift_labels(ignore_index)
    unknown = [name for name in pad_values or {} if name not in whole.dims]
    if unknown:
        raise ValueError(f"pad_values names {unknown}, but the entries with a sequence are {list(whole.dims)}")
    shares = whole.shares({"labels": ignore_index, "shift_labels": ignore_index, **(pad_values or {})})
    kind = _Dict if named else _List if isinstance(batch, list) else _Tuple
    found: Any = kind(shares if named else shares.values())
    found.documents, found.length, found.padded_length = whole.table(), whole.length, whole.padded
    return found


class _Whole:
    """The global batch: its entries, their sequence dimensions, and the documents in it."""

    def __init__(self, handler: Shares, entries: dict[Name, Any], seq_dims: Any, named: bool) -> None:
        self.handler, self.entries, self.named = handler, entries, named
        self.offsets = {k: entries.pop(k) for k in OFFSETS if k in entries} if named else {}
        for name in LONGEST if self.offsets else ():
            entries.pop(name, None)
        self.ids = entries.pop("document_ids", None) if named else None
        self.dims = _sequence_dims(entries, seq_dims, named)
        sizes = {name: entries[name].shape[dim] for name, dim in self.dims.items()}
        if not sizes:
            raise ValueError(
                f"no entry of the batch has a sequence dimension: {_shapes(entries)} with seq_dims={seq_dims!r}. Set "
                "seq_dims to where the sequence is"
            )
        first = next((name for name in sizes if name in TOKENS), next(iter(sizes)))
        self.length = sizes[first]
        for entry, size in sizes.items():
            if size != self.length:
                raise ValueError(
                    f"batch entry {entry!r} has {size} positions in dimension {self.dims[entry]}, but {first!r} has "
                    f"{self.length}. If that is not its sequence, set seq_dims={{{entry!r}: None}} (it passes through "
                    "whole) or the right dimension"
                )
        self.padded = handler.padded_length(self.length)
        self.first, self.dim = entries[first], self.dims[first]
        self.rows = self.first.shape[0] if self.dim else self.first.shape[1] if self.first.ndim > 1 else 1
        self.packed: list[list[int]] | None = None
        """Borders of packed documents, by which positions restart."""
        self.borders: list[list[int]] | None = None
        """These and the borders of padding."""

    def find_documents(self) -> None:
        """Read document offsets or ids."""
        tables = {name: masks.documents_table(x) for name, x in self.offsets.items() if x is not None}
        if self.ids is not None:
            tables["document_ids"] = masks.documents_table(None, self.ids)
        rows = {name: [*map(list, masks.borders_of(t) or ())] for name, t in tables.items()}
        if any(r != next(iter(rows.values())) for r in rows.values()):
            raise ValueError(
                f"{', '.join(map(repr, rows))} name different documents: {rows}. Context parallelism of packed "
                "documents needs queries and keys to be packed alike; pass one of them"
            )
        for name, table in tables.items():
            masks.documents_of(table, self.rows, self.length)
            self.packed = self.borders = rows[name]

    def find_padding(self) -> None:
        """Turn a padding mask ``[B, S]`` into borders; the mask that is left sees everything."""
        mask = self.entries.get("attention_mask") if self.named else None
        if not isinstance(mask, Tensor) or "attention_mask" not in self.dims:
            return
        seen, at = mask.detach().movedim(self.dims["attention_mask"], -1).cpu(), torch.arange(self.length)
        lengths = seen.sum(-1, keepdim=True)
        right, left = (seen == (at < lengths)).all(-1), (seen == (at >= self.length - lengths)).all(-1)
        if not bool((right | left).all()):
            raise ValueError(
                f"attention_mask[{int((right | left).int().argmin())}] is not a padding mask: it must be 1 on the "
                "tokens and 0 on padding before or after them. Pass packed documents as document_ids or cu_seqlens, "
                "and other masks in four dimensions [B, 1, S, S] (they pass through whole)"
            )
        self.entries["attention_mask"] = torch.ones_like(mask)
        found = torch.where(right, lengths[:, 0], self.length - lengths[:, 0]).tolist()
        if all(border in (0, self.length) for border in found):
            return
        rows = self.borders or [[0, self.length]]
        rows = rows * len(found) if len(rows) == 1 else rows
        self.borders = [sorted({*row, int(border)}) for row, border in zip(rows, found, strict=True)]

    def table(self) -> Tensor | None:
        """Documents and padding, of the padded sequence."""
        by_document = self.handler.layout in layouts.BY_DOCUMENTS  # then one document is a document too
        rows = self.borders or ([[0, self.length]] if self.padded > self.length or by_document else None)
        return None if rows is None else self.handler._with_padding(masks.documents_table(rows))

    def shift_labels(self, ignore_index: int) -> None:
        """Every label becomes that of the position before it; the last of each document has none."""
        labels, dim = self.entries.pop("labels"), self.dims.pop("labels")
        shifted = torch.cat([labels.narrow(dim, 1, self.length - 1), labels.narrow(dim, 0, 1)], dim).movedim(dim, -1)
        shifted = shifted.contiguous()
        for row, borders in enumerate(self.borders or [[0, self.length]]):
            last = torch.tensor([b - 1 for b in borders[1:] if b], device=labels.device)
            (shifted[row] if self.borders and len(self.borders) > 1 else shifted)[..., last] = ignore_index
        self.entries["shift_labels"], self.dims["shift_labels"] = shifted.movedim(-1, dim), dim

    def shares(self, fill: Mapping[Name, float]) -> dict[Name, Any]:
        """This rank's share of every entry, position ids included."""
        table, found = self.table(), {}
        explicit = "attention_mask" not in self.dims and self.entries.get("attention_mask")
        if isinstance(explicit, Tensor) and self.padded > self.length:
            raise ValueError(
                f"attention_mask {tuple(explicit.shape)} is explicit, but {self.length} positions do not split over "
                f"the ranks: pad the batch to {self.padded} positions yourself, mask included, or pass a padding "
                "mask [B, S]"
            )
        for name, x in self.entries.items():
            dim = self.dims.get(name)
            value = 1 if name == "attention_mask" else fill.get(name, 0)
            found[name] = x if dim is None else self.handler._share(x, dim, pad_value=value, documents=table)
        if self.named and "position_ids" not in found:
            found["position_ids"] = self.position_ids(table)
        return found

    def position_ids(self, table: Tensor | None) -> Tensor:
        """Of the first entry's form: ``[B, S/n]``, or ``[S/n]``; they restart in packed documents."""
        # Padding counts from 0 again: a table of positions need not be longer than the sequence.
        rows = self.packed or [[0, self.length]]
        ranges = self.handler._ranges(self.padded, "padded length", table)
        at = positions.restarted(positions.positions(ranges), rows).to(self.first.device)
        if self.first.ndim == 1:
            return at[0]
        at = at.expand(self.rows, -1)
        return (at if self.dim else at.T).contiguous()


def _sequence_dims(entries: dict[Name, Any], seq_dims: Any, named: bool) -> dict[Name, int]:
    """The sequence dimension of every entry that has one."""
    if isinstance(seq_dims, (list, tuple)):
        if named or len(seq_dims) != len(entries):
            raise ValueError(
                f"seq_dims={seq_dims!r} has {len(seq_dims)} places for the entries {list(entries)}: give one per entry "
                "of a list or tuple; for a dict, a dict of names or one int"
            )
        seq_dims = dict(enumerate(seq_dims))
    given: Mapping[Any, int | None] = seq_dims if isinstance(seq_dims, Mapping) else {}
    default = 1 if isinstance(seq_dims, Mapping) else seq_dims
    if not isinstance(default, int) or isinstance(default, bool):
        raise TypeError(f"seq_dims={seq_dims!r} must be an int, a dict of ints and None, or one of these per entry")
    missing = [name for name in given if name not in entries]
    if missing:
        raise ValueError(f"seq_dims names {missing}, but the batch has {list(entries)}")
    found = {}
    for name, x in entries.items():
        if not isinstance(x, Tensor):
            _refuse_nested(name, x)
            continue
        explicit_mask = named and name == "attention_mask" and x.ndim != 2
        dim = given.get(name, None if explicit_mask or not -x.ndim <= default < x.ndim else default)
        if dim is None:
            continue
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"seq_dims gives {name!r} dimension {dim}, but its shape is {tuple(x.shape)}")
        found[name] = dim % x.ndim
    return found


def _refuse_nested(name: Name, x: Any) -> None:
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    if any(isinstance(y, Tensor) for y in inner):
        raise TypeError(
            f"batch entry {name!r} is a {type(x).__name__} of tensors: put them into the batch itself, so that each "
            "has its own seq_dims"
        )


def _shapes(entries: Mapping[Name, Any]) -> dict[Name, Any]:
    return {k: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for k, x in entries.items()}


# --------------------------------------------------------------------------- the same batch everywhere


def same_on_all_ranks(handler: Shares, entries: Mapping[Name, Any]) -> None:
    """Raise ``ValueError`` on every rank, naming the entry, if the ranks of the cp mesh hold different batches."""
    digests = [_digest(repr(list(entries))), *(_digest(x) for x in entries.values())]
    device = handler.mesh.device_type
    names = by_rank(handler.mesh, torch.tensor(digests[:1], device=device)).flatten().tolist()
    described = ["the names (or number) of entries", *(f"entry {name!r}" for name in entries)]
    columns = [names]
    if len(set(names)) == 1:
        columns = by_rank(handler.mesh, torch.tensor(digests, device=device)).T.tolist()
    for what, column in zip(described, columns, strict=False):
        odd = [rank for rank, digest in enumerate(column) if digest != column[0]]
        if odd:
            raise ValueError(
                f"{what} of the batch differs between the ranks of the cp mesh: cp ranks {odd} do not hold what cp "
                f"rank 0 holds. All ranks of a cp mesh must get the same batch: let the sampler of the data loader "
                "depend on the data-parallel rank only, or broadcast the batch inside the cp mesh"
            )


def _digest(x: Any) -> int:
    """64 bits of a hash of the contents."""
    h = hashlib.blake2b(digest_size=8)
    if isinstance(x, Tensor):
        x = x.detach().cpu().contiguous()
        h.update(f"{x.dtype} {tuple(x.shape)}".encode())
        h.update(ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b"")
    else:
        h.update(repr(x).encode())
    return int.from_bytes(h.digest(), "big", signed=True)


__all__: Sequence[str] = ("LocalBatch", "local_batch", "same_on_all_ranks")
