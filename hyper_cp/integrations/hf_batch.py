"""What a Hugging Face batch says about attention, looked at: padding and packing become documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..handler import ContextParallelHandler
from ..module.mesh_binding import Style, StyledMesh
from ..schedule.masks import documents_table

FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""How padding-free collators name the borders of packed documents."""
IGNORE = -100


@dataclass(frozen=True)
class Seen:
    """What the attention calls of one forward must know beside a causal mask."""

    documents: Tensor | None = None
    """Table of borders, on the CPU; padding is a document of its own."""
    tokens: Tensor | None = None
    """``[B, 1, S/n, 1]``, with such documents: False where this rank holds padding, which sees nothing."""
    keys: Tensor | None = None
    """``[B, 1, 1, S]``: False where there is padding that documents cannot tell (between tokens)."""
    layout: str | None = None
    """In which the batch was split."""
    style: Style | None = None
    place: StyledMesh | None = None
    """The style and mesh of the model; set in the forward."""

    def on(self, device: torch.device, style: Style, place: StyledMesh) -> Seen:
        """The same where the model computes: batches are often prepared on the host."""
        tokens, keys = (None if x is None else x.to(device) for x in (self.tokens, self.keys))
        return Seen(self.documents, tokens, keys, self.layout, style, place)


def look(
    handler: ContextParallelHandler, documents: Any, mask: Tensor | None = None, positions: Tensor | None = None
) -> Seen:
    """Look at a batch's global ``documents``, padding ``mask [B, S]`` (1: a token) and ``position_ids [B, S]``.

    Padding at the end of rows asks for nothing: a causal mask hides it. Positions are read as transformers reads
    them: where they do not go on by one a document begins, unless there is a mask. ``ValueError`` for a mask of
    other values than 0 and 1. Waits for the device that holds the mask or positions.
    """
    table = documents if isinstance(documents, Tensor) and documents.ndim == 2 else documents_table(documents)
    if mask is None:
        if positions is None or table is not None:
            return Seen(table)
        rows = _borders((positions[:, 1:] - positions[:, :-1] != 1).cpu())
        length = handler.padded_length(positions.shape[1])
        return Seen(documents_table([[*row[:-1], length] for row in rows]) if max(map(len, rows)) > 2 else None)
    kept = mask.bool()
    host = mask.cpu()
    if not bool(((host == 0) | (host == 1)).all()):
        raise ValueError(
            f"attention_mask has values other than 0 and 1 (up to {host.max().item()}). If they number packed "
            "documents, pass documents= (cumulative lengths) and no attention_mask"
        )
    host = host.bool()
    if bool((host[:, 1:] <= host[:, :-1]).all()):
        return Seen(table)
    rows = _borders(host[:, 1:] != host[:, :-1])
    parts = [sum(bool(line[start]) for start in row[:-1]) for row, line in zip(rows, host, strict=True)]
    if table is not None or max(parts) > 1:
        return Seen(table, keys=kept[:, None, None, :])
    return Seen(documents_table(rows), tokens=handler.dispatch(kept, 1)[:, None, :, None])


def _borders(changes: Tensor) -> list[list[int]]:
    return [[0, *(torch.nonzero(row).flatten() + 1).tolist(), len(row) + 1] for row in changes]


def documents_of(batch: dict[str, Any]) -> Any:
    """Take the documents out of a batch: ``documents``, or the arguments of flash attention."""
    flash, *_ = [batch.pop(name, None) for name in FLASH]
    given = batch.pop("documents", None)
    if flash is not None and given is not None:
        raise ValueError("the batch has documents and cu_seq_lens_q: drop one of them")
    return flash if given is None else given


def prepare_batch(handler: ContextParallelHandler, batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of a global batch, for the forward of a model that ``prepare_model`` has prepared.

    Labels are shifted before the sequence is split (``shift_labels``), ``position_ids`` are made, padding and packed
    documents are looked at here (the forward then communicates in attention only), ``num_items_in_batch`` counts the
    labels of the whole batch: the model's loss is this rank's share of the mean, and gradients *summed* over the cp
    ranks are those of one device.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` of any length S, and what the model takes with them. Tensors
            ``[B, S, ...]`` are split; 4-D attention masks (over global positions) and everything else stay whole.
    """
    batch = dict(batch)
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if tokens is None:
        raise ValueError(
            f"batch has the entries {list(batch)}, but neither input_ids nor inputs_embeds: name the tokens so"
        )
    length, padded = tokens.shape[1], handler.padded_length(tokens.shape[1])
    if batch.get("labels") is not None:
        if batch.get("shift_labels") is None:
            batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
        batch.setdefault("num_items_in_batch", (batch["shift_labels"] != IGNORE).sum())
    documents, mask, positions = documents_of(batch), batch.get("attention_mask"), batch.get("position_ids")
    if documents is not None:
        with handler.documents(documents) as documents:  # with padding up to the padded length
            pass
    if isinstance(mask, Tensor) and mask.ndim == 2:
        del batch["attention_mask"]
        batch["context_parallel"] = look(handler, documents, F.pad(mask, (0, padded - length)))
    else:
        packed = mask is None and positions is not None and positions.ndim == 2
        batch["context_parallel"] = look(handler, documents, None, positions if packed else None)
    batch["context_parallel"] = replace(batch["context_parallel"], layout=handler.layout)
    for name, x in batch.items():
        dim = -1 if name == "position_ids" else 1
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[dim] == length and name != "attention_mask":
            batch[name] = handler.dispatch(x, dim, pad_value=IGNORE if "labels" in name else 0)
    if positions is None:
        batch["position_ids"] = handler.position_ids(padded, device=tokens.device)[None]
    return batch
