"""GLM 5 next of transformers: its indexers select pools of keys over all ranks, and queries attend to their tokens."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.recurrence.windows import gather_windows, windows
from ...ops.selected_entries import select_entries, tokens_of_entries
from .attention import MaskRequest
from .forward import ForwardState, OneDevice, state_for
from .seams import are_known, cache_in, refuse_batch

INDEXER, ATTENTION = "Glm5NextTextIndexer", "Glm5NextTextAttention"
KNOWN = {
    INDEXER: ("6f927aa6876c718b", "e7f961e1f1a4533a"),
    f"{INDEXER}.get_visible_tokens": ("1675f0ba84cc3e1f",),
    f"{INDEXER}.get_pooled_states": ("d521dbfd91f22791",),
    f"{INDEXER}.append_visible_tail": ("e98358247e1ca911",),
    ATTENTION: ("dd8c34b21be05dfc", "a5951bf438372e5b"),
    f"{ATTENTION}.build_attention_mask_from_topk": ("de1aef68d6b9e4bf",),
}
"""Digests of their forwards and methods in transformers 5.23 and 5.24."""


def selects_pools(kind: type[nn.Module]) -> bool:
    """True for the indexer of GLM 5 next and its attention, if what they call is known."""
    return kind.__name__ in (INDEXER, ATTENTION) and are_known(sys.modules[kind.__module__], KNOWN)


def prepare(module: Any) -> None:
    """Let an indexer select pools over all ranks, and attention hand on what it selects."""
    if type(module).__name__ == INDEXER:
        module.forward = partial(_selected, module)
    else:
        module.build_attention_mask_from_topk = partial(_handed_on, module)


@torch.compiler.disable(
    reason="The number of pools of a rank depends on its positions, which a compiled graph does not know. Compile "
    "without fullgraph=True"
)
def _selected(indexer: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, **cache: Any) -> Tensor:
    """The forward of an indexer of a prepared model: global positions ``[B, S/n, k]``, -1 is none."""
    state, name = state_for(indexer), type(indexer).__name__
    if not isinstance(state, ForwardState) or cache_in(cache) is not None:
        found: Tensor = type(indexer).forward(indexer, hidden_states, q_resid, attention_mask, **cache)
        return found
    between = "leaves out pools that have some, but not the incomplete pool at the end"
    refuse_batch(name, state, packed="lets them see each other", between=between)
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


def _handed_on(attention: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Any:
    """In place of a mask of all pairs, which one device makes of them: the selected keys."""
    state, make = state_for(attention), type(attention).build_attention_mask_from_topk
    if isinstance(state, ForwardState):
        request = MaskRequest(type(attention).__name__, None, state)
        request.selection = topk_indices.unsqueeze(1)
        return request
    mask = make(attention, topk_indices, query_states, kv_length)
    return mask == 0 if isinstance(state, OneDevice) and state.implementation == "sdpa" else mask
