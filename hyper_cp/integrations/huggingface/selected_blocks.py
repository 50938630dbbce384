"""MiniMax M3 of transformers: its indexers select blocks of keys for each key/value head, here over all ranks."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...data.collectives import by_rank
from ...handler import ContextParallelHandler
from ...ops.config import Call
from ...ops.kernels.indexer import PER_HEAD
from ...ops.selection import select
from .forward import ForwardState, state_for
from .seams import are_known, refuse_batch

LAYER = "minimax_m3_sparse"
"""The type of layers that attend to selected blocks."""
KNOWN = {
    "MiniMaxM3VLIndexer": ("1dc79edb4d9c462f", "5963d6a8d117b716"),
    "MiniMaxM3VLAttention": ("97e9706a2aee7e2f", "e6ace464d40ab582"),
}
"""Digests of the forwards of its indexer and its attention in transformers 5.23 and 5.24."""


def selects_blocks(kind: type[nn.Module]) -> bool:
    """True for the indexer of MiniMax M3, if its forward and that of its attention are the known ones."""
    return kind.__name__ == "MiniMaxM3VLIndexer" and are_known(sys.modules[kind.__module__], KNOWN)


def prepare(indexer: Any) -> None:
    """Let an indexer select blocks over all ranks."""
    indexer.forward = partial(_selected, indexer)


def _selected(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Tensor
) -> Tensor:
    """The forward of an indexer of a prepared model: blocks ``[B, Hkv, S/n, k]``."""
    state, name = state_for(indexer), type(indexer).__name__
    given = hidden_states, position_embeddings, past_key_values, position_ids
    if not isinstance(state, ForwardState) or past_key_values is not None:
        found: Tensor = type(indexer).forward(indexer, *given)
        return found
    refuse_batch(name, state, between="scores blocks with the states of padding")
    apply_rotary = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
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
