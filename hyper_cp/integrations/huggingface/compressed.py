"""DeepSeek V4 of transformers: compressors pool the keys of a split sequence, and queries attend to tokens and entries.

A compressor makes an entry of every window of tokens, and its attention appends all entries to the keys. In a prepared
model each rank makes the entries of the windows that end in its rows, all ranks gather them, and attention merges the
two parts under one softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.entries import Entries
from ...ops.recurrence.windows import gather_windows, windows
from ...ops.selected_entries import select_entries
from ...schedule.lookup import resolve
from .forward import ForwardState
from .seams import in_file, known_as, outside_graphs, refuse_batch

LAYERS = {
    "compressed_sparse_attention": "DeepseekV4CSACompressor",
    "heavily_compressed_attention": "DeepseekV4HCACompressor",
}
"""The types of layers that attend to entries, and the classes of their compressors."""
KNOWN = {
    "DeepseekV4HCACompressor": ("ece6cc8bb427b6f1",),
    "DeepseekV4CSACompressor": ("276b56217c5ac79c", "b6375bbbc549720c"),
    "DeepseekV4Indexer": ("f3c60c4b07102228", "4e209635651a223d"),
    "DeepseekV4IndexerScorer": ("407cbbd669170be4",),
    "DeepseekV4Attention": ("87761f25e8b6837c", "2758d0477e7639d6"),
}
"""Digests of their forwards in transformers 5.23 and 5.24, and of the attention that they serve."""
compresses = known_as(LAYERS.values(), KNOWN)


@outside_graphs
def compressed(
    compressor: Any, state: ForwardState, hidden: Tensor, q_residual: Tensor, position_ids: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """The forward of a compressor over all ranks: all entries ``[B, 1, E, D]``. The bias that one device adds to logits
    is what :func:`entries_of` returns to attention."""
    refuse_batch(type(compressor).__name__, state)
    entries, indexer = _pooled(compressor, hidden, state), getattr(compressor, "indexer", None)
    selected = None
    if indexer is not None and entries.shape[1]:
        with torch.no_grad():
            selected = _selected(indexer, hidden, q_residual, position_ids, state)
    compressor.selected = selected
    return entries.unsqueeze(1), None


def entries_of(module: nn.Module, keys: Tensor, queries: int) -> tuple[Tensor, Entries | None]:
    """The tokens' part of an attention module's keys, and its entries; None: the module has no compressor."""
    compressor: Any = getattr(module, "compressor", None)
    if compressor is None or not compresses(type(compressor)):
        return keys, None
    pooled, selected = keys[:, :, queries:], compressor.__dict__.pop("selected")
    return keys[:, :, :queries], Entries(pooled, pooled, compressor.compress_rate, selected)


def _pooled(owner: Any, hidden: Tensor, state: ForwardState) -> Tensor:
    """The entries ``[B, E, D]`` of a compressor, or of an indexer. Where a token has two series (CSA), an entry has the
    first one of the window before and the second one of its own."""
    ratio, dim = owner.compress_rate, owner.head_dim
    both = torch.cat([owner.kv_proj(hidden), owner.gate_proj(hidden)], 2)  # which travel together
    overlap = both.shape[2] // (2 * dim)
    cp, layout = state.mesh.views[0], state.style.mode.layout
    options: dict[str, Any] = {"mesh": cp, "every": ratio, "layout": layout}
    shifts = range(overlap * ratio - 1, -1, -1)
    keys, gates = windows(both, shifts, fill=-torch.inf, **options).chunk(2, 3)
    keys = keys.masked_fill(gates == -torch.inf, 0)  # before the sequence
    gates = gates + owner.position_bias.repeat(overlap, 1)
    if overlap == 2:
        keys, gates = (torch.cat([x[:, :, :ratio, :dim], x[:, :, ratio:, dim:]], 2) for x in (keys, gates))
    pooled = owner.kv_norm((keys * gates.softmax(dim=2, dtype=torch.float32).to(keys.dtype)).sum(dim=2))
    at = resolve(layout, cp.size, hidden.shape[1] * cp.size, None).positions(cp.rank)
    first = at[(at + 1) % ratio == 0] + 1 - ratio
    pooled = _rotated(owner, pooled.unsqueeze(1), first.to(hidden.device).expand(len(hidden), -1)).squeeze(1)
    return gather_windows(pooled, length=hidden.shape[1] * cp.size, **options)


def _rotated(owner: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """``[B, H, S, D]`` at positions ``[B, S]``."""
    cos, sin = owner.rotary_emb(x, position_ids=position_ids, layer_type=owner.rope_layer_type)
    rotated: Tensor = in_file(owner, "apply_rotary_pos_emb")(x, cos, sin)
    return rotated


def _selected(indexer: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor, state: ForwardState) -> Tensor:
    """The best entries of this rank's queries, ``[B, 1, S/n, k]``."""
    keys, scorer = _pooled(indexer, hidden, state), indexer.scorer
    q = indexer.q_b_proj(q_residual).view(*hidden.shape[:2], -1, indexer.head_dim).transpose(1, 2)
    q = _rotated(indexer, q, position_ids)
    weights = (scorer.weights_proj(hidden) * scorer.weights_scaling).transpose(1, 2)
    topk, layout = min(indexer.index_topk, keys.shape[1]), state.style.mode.layout
    where: dict[str, Any] = {"mesh": state.mesh.views[0], "layout": layout, "every": indexer.compress_rate}
    return select_entries(q, keys.unsqueeze(1), weights, topk=topk, scale=scorer.softmax_scale, **where)
