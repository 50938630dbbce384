"""MiniMax M3 of transformers: its indexers select blocks of keys for each key/value head, here over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.collectives import by_rank
from ...handler import ContextParallelHandler
from ...ops.config import Call
from ...ops.kernels.indexer import PER_HEAD
from ...ops.selection import select
from .forward import ForwardState
from .seams import in_file, known_as, refuse_batch

LAYER = "minimax_m3_sparse"
"""The type of layers that attend to selected blocks."""
KNOWN = {
    "MiniMaxM3VLIndexer": ("b56a401c809bf6a5",),
    "MiniMaxM3VLAttention": ("3711523b49b0fb44", "205328f17cd6b888"),
}
"""Digests of the forwards of its indexer and its attention in transformers 5.23 and 5.24."""
is_indexer = known_as(("MiniMaxM3VLIndexer",), KNOWN)


def selected(
    indexer: Any, state: ForwardState, hidden_states: Tensor, position_embeddings: Any, cache: None, *_: Any
) -> Tensor:
    """The forward of an indexer over all ranks: blocks ``[B, Hkv, S/n, k]``."""
    name = type(indexer).__name__
    refuse_batch(name, state, between="scores blocks with the states of padding")
    apply_rotary = in_file(indexer, "apply_rotary_pos_emb")
    heads, dim = (*hidden_states.shape[:2], -1, indexer.head_dim), indexer.head_dim
    with torch.no_grad():
        q = indexer.q_norm(indexer.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k = indexer.k_norm(indexer.k_proj(hidden_states).view(heads)).transpose(1, 2)
        q, k = apply_rotary(q, k, *(x[..., :dim] for x in position_embeddings))
    call = Call(True, 1.0, name=name)  # neither documents nor padding: its blocks are those of slots
    blocks = indexer.topk_blocks, PER_HEAD, indexer.block_size, indexer.local_blocks
    return select(q, k, None, state.mesh.views[0], state.style.mode, call, *blocks)


def of_padding(state: ForwardState, value: Tensor, heads: int) -> Tensor:
    """The output ``[B, H, 1, D]`` of queries that are padding, whose states the next indexer scores: on one device the
    mean of all values, since all keys are hidden by the same finite number. One small gather."""
    batch, share = state.batch, value.shape[2]
    handler = ContextParallelHandler(state.mesh.mesh, state.style.mode.layout)
    length = share * handler.cp.size
    at = handler.position_ids(length, device=value.device, documents=batch.documents)
    last = batch.last_position if batch.length is not None else length - 1
    with torch.no_grad():
        total = by_rank(state.mesh.mesh, (value * (at <= last).view(-1, 1)).sum(2, keepdim=True)).sum(0)
    return (total / (last + 1)).repeat_interleave(heads // value.shape[1], 1)
