"""Qwen 4 of transformers: its indexers select pooled keys, and its n-grams and dilated convolutions look back.

An indexer makes one key of each window of tokens, and its attention reads the tokens of the best ones. In a prepared
model each rank pools the windows that end in its rows, all ranks gather them, and the selection reaches attention with
the request for a mask. N-grams and convolutions fetch the rows before a share; packed documents do not end them, as on
one device, and samples of a planned micro-batch do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.recurrence.convolution import causal_conv1d
from ...ops.recurrence.windows import gather_windows, windows
from ...ops.selected_entries import select_entries, tokens_of_entries
from ...schedule.documents import read, tokens_of
from ...schedule.layout import by_documents
from .forward import ForwardState
from .seams import in_file, known_as, outside_graphs

KNOWN = {
    "Qwen4ExpTextQSAIndexer": ("3cb1e00f739a2f6d",),
    "Qwen4ExpTextAttention": ("ca16e78bf50b538d", "73c60fcf06cdaaf6"),
    "Qwen4ExpTextNGramEmbedding": ("bd1e3e57b0cc06e5", "ff5b3d9e01df246a"),
    "Qwen4ExpTextNGramEmbedding._shift_right_ignore_eos": ("41aab259854fd23b",),
    "Qwen4ExpTextPLELayer": ("71b03f8bc05e49ce",),
    "Qwen4ExpTextPLELayer._short_conv": ("7cf6190cfb330454",),
    "Qwen4ExpTextModel": ("3c41105480fb4660",),
}
"""Digests in transformers 5.23 and 5.24 of the forwards that are replaced, and of those that call them."""
is_indexer, looks_back = known_as(("Qwen4ExpTextQSAIndexer",), KNOWN), known_as(("Qwen4ExpTextPLELayer",), KNOWN)


class Selection:
    """The tokens that each query of this rank has selected, ``[B, 1, S/n, k]``: a layer applies it to its mask."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


@outside_graphs
def selected(
    indexer: Any, state: ForwardState, hidden: Tensor, position_embeddings: Any, attention_mask: Any, *cache: None
) -> Selection:
    """The forward of an indexer over all ranks."""
    _refuse_batch(type(indexer).__name__, state, attention_mask)
    rotate = partial(in_file(indexer, "apply_rotary_pos_emb"), k=None)
    (b, length, _), dim, ratio = hidden.shape, indexer.index_head_dim, indexer.compress_ratio
    cp, documents = state.mesh.views[0], state.batch.documents
    where: dict[str, Any] = {"mesh": cp, "every": ratio, "layout": state.style.mode.layout, "documents": documents}
    with torch.no_grad():
        q, raw = indexer.index_qk_proj(hidden).split([indexer.index_n_heads * dim, dim], -1)
        cos, sin = (x.expand(b, -1, -1) for x in position_embeddings)
        q = rotate(indexer.q_layernorm(q.view(b, length, -1, dim)), cos=cos, sin=sin, unsqueeze_dim=2)
        both = windows(torch.cat([raw, cos, sin], -1), range(ratio - 1, -1, -1), **where)
        pooled = indexer.k_layernorm(both[..., :dim].float().mean(2).to(raw.dtype)).unsqueeze(2)
        cos, sin = both[:, :, 0, dim:].to(cos.dtype).chunk(2, -1)  # of the first token of each window
        pooled = rotate(pooled, cos=cos, sin=sin, unsqueeze_dim=2)
        keys = gather_windows(pooled.squeeze(2), length=length * cp.size, **where).unsqueeze(1)
        topk = min(indexer.block_topk, max(1, keys.shape[2]))
        return Selection(tokens_of_entries(select_entries(q.transpose(1, 2), keys, topk=topk, **where), **where))


def _refuse_batch(name: str, state: ForwardState, mask: Any) -> None:
    """Raise ``NotImplementedError`` for what would hide other keys than documents, padding at ends and causality."""
    refused = {
        "padding between tokens": state.batch.keys is not None and not state.batch.padding_counts,
        "padding with labels that are not -100": state.batch.padding_counts,
        "an attention mask of pairs": isinstance(mask, Tensor),
        "indexer_losses": state.losses is not None,
    }
    for what, given in refused.items():
        if given:
            raise NotImplementedError(
                f"{name} got {what}. Its windows are counted over the tokens that a query sees, from the first of a "
                "document or row on. Pass rows that are padded at their ends, or packed documents, without a mask of "
                "four dimensions and without indexer_losses"
            )


# --------------------------------------------------------------------------- n-grams and convolutions


def _where(module: nn.Module, state: ForwardState) -> dict[str, Any]:
    """The arguments of a function that looks back."""
    layout, documents = state.style.mode.layout, state.batch.documents
    if not (by_documents(layout) or state.samples):
        return {"mesh": state.mesh.views[0], "layout": layout}
    tokens = tokens_of(documents)
    if (
        documents is not None
        and not state.samples
        and any(  # a document of padding behind all tokens changes nothing
            tokens is None or bool(tokens[:, start:].any()) for row in read(documents).rows for start in row[1:-1]
        )
    ):
        raise NotImplementedError(
            f"{type(module).__name__} got documents, or padding before tokens, in layout={layout!r}. It reads the "
            "tokens before its own, whatever documents there are, and this layout places each document apart. Use "
            'layout="contiguous" or "head_tail"'
        )
    return {"mesh": state.mesh.views[0], "layout": layout, "documents": documents}


class _Context:
    """Takes the place of a cache: it returns the ids before each token."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor:
        return self.ids

    def update_conv_state(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""


def embedded(embedding: Any, state: ForwardState, input_ids: Tensor, *_: Any) -> Tensor:
    """The forward of an embedding of n-grams: each token is a row of its own, with the ids before it as its cache."""
    where = _where(embedding, state)
    before = windows(input_ids, range(embedding.context_len, 0, -1), fill=embedding.eos_token_id, **where)
    context = _Context(before.flatten(0, 1).long())
    found: Tensor = type(embedding).forward(embedding, input_ids.reshape(-1, 1), context)
    return found.view(*input_ids.shape, -1)


def convolved(layer: Any, state: ForwardState, hidden: Tensor, *_: Any) -> Tensor:
    """The dilated convolution of a layer of n-grams, ``[B, S/n, C]``."""
    where, conv = _where(layer, state), layer.conv1d
    options: dict[str, Any] = {"activation": "silu", "dilation": conv.dilation[0], "name": type(layer).__name__}
    return causal_conv1d(hidden.transpose(1, 2), conv.weight.squeeze(1), conv.bias, **options, **where).transpose(1, 2)
