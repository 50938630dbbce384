"""What of a Hugging Face batch attention must know: padding and packing are looked at, and become documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..handler import ContextParallelHandler

Borders = list[list[int]]
"""Cumulative lengths of documents over global positions, a list per batch row."""

FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""How padding-free collators name the borders of packed documents."""
IGNORE = -100


def borders_of_mask(mask: Tensor) -> tuple[Borders | None, bool]:
    """What a global padding mask ``[B, S]`` (1: a token, 0: padding) asks for beside a causal mask.

    Returns:
        Borders that keep padding apart, or None if the causal mask does that (no padding, or only at the end); and
        whether borders cannot say it (padding between tokens). ``ValueError`` for values other than 0 and 1.
    """
    kept = mask.to("cpu")
    if not bool(((kept == 0) | (kept == 1)).all()):
        raise ValueError(
            f"attention_mask has values other than 0 and 1 (up to {kept.max().item()}). If they number packed "
            "documents, pass documents= (cumulative lengths) and no attention_mask"
        )
    kept = kept.bool()
    if bool((kept[:, 1:] <= kept[:, :-1]).all()):
        return None, False
    rows = _runs(kept[:, 1:] != kept[:, :-1])
    tokens = [sum(bool(line[a]) for a in row[:-1]) for row, line in zip(rows, kept, strict=True)]
    return (None, True) if max(tokens) > 1 else (rows, False)


def borders_of_positions(position_ids: Tensor) -> Borders | None:
    """Borders where global positions ``[B, S]`` do not go on by one, as transformers reads packed sequences; None
    if they always do."""
    rows = _runs((position_ids[:, 1:] - position_ids[:, :-1] != 1).to("cpu"))
    return rows if any(len(row) > 2 for row in rows) else None


def _runs(changes: Tensor) -> Borders:
    return [[0, *(torch.nonzero(row).flatten() + 1).tolist(), len(row) + 1] for row in changes]


def borders_of_batch(batch: dict[str, Any], padded: int) -> Borders | None:
    """The documents that a batch names (``documents`` or the arguments of flash attention, which are taken out),
    with padding up to ``padded`` as one more."""
    flash, given = [batch.pop(name, None) for name in FLASH][0], batch.get("documents")
    if flash is not None and given is not None:
        raise ValueError("the batch has documents and cu_seq_lens_q: drop one of them")
    given = flash if given is None else given
    if given is None:
        return None
    rows = given.tolist() if isinstance(given, Tensor) else list(given)
    return _padded(rows if isinstance(rows[0], (list, tuple)) else [rows], padded)


def _padded(rows: Borders | None, padded: int) -> Borders | None:
    return rows and [[int(x) for x in row] + [padded] * (row[-1] < padded) for row in rows]


def prepare_batch(handler: ContextParallelHandler, batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of a global batch, for the forward of a model that ``prepare_model`` has prepared.

    Labels are shifted before the sequence is split (``shift_labels``), ``position_ids`` are made, padding and packed
    documents become ``documents`` (host integers: the forward looks at nothing and communicates in attention only),
    ``num_items_in_batch`` counts the labels of the whole batch. The model's loss is then this rank's share of the
    mean, and gradients *summed* over the cp ranks are those of one device.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` of any length S, and what the model takes with them. Tensors
            ``[B, S, ...]`` are split; 4-D attention masks (over global positions) and everything else stay whole.
    """
    batch = dict(batch)
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    length, padded = tokens.shape[1], handler.padded_length(tokens.shape[1])
    if batch.get("labels") is not None:
        if batch.get("shift_labels") is None:
            batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
        batch.setdefault("num_items_in_batch", (batch["shift_labels"] != IGNORE).sum())
    documents = borders_of_batch(batch, padded)
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        borders, explicit = borders_of_mask(mask)
        if not explicit and (documents is None or borders is None):
            del batch["attention_mask"]  # else it travels with the tokens, and the forward makes it explicit
            documents = documents or _padded(borders, padded)
    elif mask is None and documents is None and positions is not None:
        documents = _padded(borders_of_positions(positions), padded)
    batch["documents"] = documents
    for name, x in batch.items():
        dim = -1 if name == "position_ids" else 1
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[dim] == length and not (x is mask and x.ndim == 4):
            batch[name] = handler.dispatch(x, dim, pad_value=IGNORE if "labels" in name else 0)
    if positions is None:
        batch["position_ids"] = handler.position_ids(padded, device=tokens.device)[None]
    return batch
