"""Documents and padding of a batch: read under the names that batches use, as boundaries and as masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..schedule.documents import documents_table, read
from .sharding import Shares

OFFSETS = ("documents", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k")
"""Names under which batches hold cumulative lengths: ours, Megatron's, FlashAttention's and Hugging Face's."""
LONGEST = ("max_seqlen", "max_seqlen_q", "max_seqlen_kv", "max_length_q", "max_length_k")
"""Names of the longest document, which has no meaning for a share of the sequence."""


def take_documents(entries: dict[Any, Any]) -> Tensor | None:
    """Remove packed documents, whatever their name, from ``entries``, and return them as a table of boundaries.

    Raises:
        ValueError: if two entries name different documents.
    """
    # An entry named "documents" may be anything else, such as texts; then it passes through.
    names = [name for name in OFFSETS if name in entries and (name != "documents" or _numbers(entries))]
    given = {name: entries.pop(name) for name in names}
    for name in LONGEST if given else ():
        entries.pop(name, None)
    tables = {name: documents_table(x) for name, x in given.items()}
    tables["document_ids"] = documents_table(None, entries.pop("document_ids", None))
    found = {name: table for name, table in tables.items() if table is not None}
    rows = {name: read(table).rows for name, table in found.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"{', '.join(map(repr, rows))} name different documents: {rows}. Context parallelism of packed documents "
            f"needs queries and keys to be packed alike. Keep one of them and drop the others"
        )
    return next(iter(found.values()), None)


def _numbers(entries: dict[Any, Any]) -> bool:
    """True if the entry "documents" holds cumulative lengths: integers, maybe one list of them per row."""
    first = entries["documents"]
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return first is None or isinstance(first, (int, Tensor))


def runs(mask: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Return a padding mask ``[B, S]`` as booleans on the CPU, and the boundaries of its runs of tokens and padding.

    Raises:
        ValueError: if the mask has values other than 0 (padding) and 1 (a token).
    """
    host = mask.detach().cpu()
    wrong = ((host != 0) & (host != 1)).any(-1)
    if bool(wrong.any()):
        raise ValueError(
            f"attention_mask[{int(wrong.int().argmax())}] is not a padding mask: it has values other than 0 and 1 (up "
            f"to {host.max().item()}). If they number packed documents, pass documents= (cumulative lengths) or "
            "document_ids instead of attention_mask"
        )
    return host.bool(), _boundaries(host[:, 1:] != host[:, :-1])


def _boundaries(changes: Tensor) -> list[list[int]]:
    """Boundaries ``[0, ..., S]`` of each row of ``changes [B, S - 1]``, which is True between two pieces."""
    return [[0, *(torch.nonzero(row).flatten() + 1).tolist(), len(row) + 1] for row in changes]


@dataclass(frozen=True)
class AttentionState:
    """The part of a batch's state that its attention calls need, beside a causal mask."""

    documents: Tensor | None = None
    """Table of boundaries, on the CPU; padding before the tokens of a row is a document of its own."""
    tokens: Tensor | None = None
    """``[B, 1, S/n, 1]``, if padding is a document: False where this rank holds padding, which sees nothing."""
    keys: Tensor | None = None
    """``[B, 1, 1, S]``, if padding cannot be a document (it lies between tokens): False where there is padding."""
    layout: str | None = None
    """The layout in which the batch was split."""

    def to(self, device: torch.device) -> AttentionState:
        """The same on the device where the model computes: batches are often prepared on the host."""
        tokens, keys = (None if x is None else x.to(device) for x in (self.tokens, self.keys))
        return replace(self, tokens=tokens, keys=keys)


def attention_state(
    handler: Shares, documents: Tensor | None, mask: Tensor | None = None, positions: Tensor | None = None
) -> AttentionState:
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
            documents = _restarts(positions, handler.padded_length(positions.shape[1]))
        return AttentionState(documents, layout=handler.layout)
    host, rows = runs(mask)
    begins = host.int().diff(dim=1) > 0  # a token behind padding
    if not bool(begins.any()):
        return AttentionState(documents, layout=handler.layout)
    tokens = mask.bool()
    if documents is not None or bool((begins.sum(1) + host[:, 0] > 1).any()):
        return AttentionState(documents, keys=rearrange(tokens, "b s -> b 1 1 s"), layout=handler.layout)
    documents = documents_table(rows)
    here = rearrange(handler.local_share(tokens, 1, documents), "b s -> b 1 s 1")
    return AttentionState(documents, tokens=here, layout=handler.layout)


def _restarts(positions: Tensor, length: int) -> Tensor | None:
    """Return documents that begin where positions do not go on by one; padding up to ``length`` joins the last."""
    rows = _boundaries((positions.diff(dim=1) != 1).cpu())
    return documents_table([[*row[:-1], length] for row in rows]) if max(map(len, rows)) > 2 else None
