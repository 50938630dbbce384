"""GLM 5 next of transformers: its indexers select pools of keys over all ranks, and queries attend to their tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.recurrence.windows import gather_windows, windows
from ...ops.selected_entries import select_entries, tokens_of_entries
from .forward import ForwardState
from .masks import MaskRequest
from .seams import known_as, outside_graphs, refuse_batch

INDEXER, ATTENTION = "Glm5NextTextIndexer", "Glm5NextTextAttention"
KNOWN = {
    INDEXER: ("5287b3c2b61ad95b",),
    f"{INDEXER}.get_visible_tokens": ("1675f0ba84cc3e1f",),
    f"{INDEXER}.get_pooled_states": ("d521dbfd91f22791",),
    f"{INDEXER}.append_visible_tail": ("e98358247e1ca911",),
    ATTENTION: ("b8a82e1e7a30f71c", "e43c9bdedc7988b9"),
    f"{ATTENTION}.build_attention_mask_from_topk": ("de1aef68d6b9e4bf",),
}
"""Digests of their forwards and methods in transformers 5.23 and 5.24."""

is_indexer, is_attention = known_as((INDEXER,), KNOWN), known_as((ATTENTION,), KNOWN)


@outside_graphs
def selected(
    indexer: Any, state: ForwardState, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, **cache: None
) -> Tensor:
    """The forward of an indexer over all ranks: global positions ``[B, S/n, k]``, -1 is none."""
    between = "leaves out pools that have some, but not the incomplete pool at the end"
    refuse_batch(type(indexer).__name__, state, packed="lets them see each other", between=between)
    batch, share, pool = *hidden_states.shape[:2], indexer.index_kpool
    where: dict[str, Any] = {"mesh": state.mesh.views[0], "layout": state.style.mode.layout, "every": pool}
    where["documents"] = state.batch.documents  # padding before the tokens is one: pools begin behind it
    with torch.no_grad():
        q = indexer.wq_b(q_resid).view(batch, share, -1, indexer.head_dim).transpose(1, 2)
        keys = indexer.k_norm(indexer.wk(hidden_states))
        gates = F.linear(hidden_states, indexer.index_kpool_compress_gate)
        keys, gates = windows(torch.cat([keys, gates], 2), range(pool - 1, -1, -1), **where).chunk(2, 3)
        gates = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(2)
        pooled = (gates.to(keys.dtype) * keys).sum(2)
        pooled = gather_windows(pooled, length=share * state.mesh.views[0].size, **where)
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
        weights, best = (weights * indexer.n_heads**-0.5).transpose(1, 2), indexer.index_topk // pool
        selected = select_entries(q, pooled.unsqueeze(1), weights, topk=best, scale=indexer.softmax_scale, **where)
        tokens = tokens_of_entries(selected, tail=indexer.index_kpool_always_select_tail, **where).squeeze(1)
    return tokens.masked_fill(~attention_mask[..., None], -1)


def handed_on(attention: Any, state: ForwardState, topk_indices: Tensor, **_: Any) -> MaskRequest:
    """The selected keys, in place of the mask of all pairs that one device makes of them."""
    request = MaskRequest(type(attention).__name__, None, state)
    request.selection = topk_indices.unsqueeze(1)
    return request
