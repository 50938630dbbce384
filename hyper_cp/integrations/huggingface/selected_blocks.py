"""MiniMax M3 of transformers: its indexers select blocks of keys for each key/value head, here over all ranks.

On one device the forward of such an indexer makes queries and keys, scores all pairs, and takes the best blocks. In a
prepared model the part that makes queries and keys runs as it is, and the rest is :func:`~hyper_cp.ops.select_keys`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...data.collectives import by_rank
from ...handler import ContextParallelHandler
from ...ops.config import Call
from ...ops.kernels.indexer import PER_HEAD
from ...ops.selection import select
from .forward import ForwardState, state_for

LAYER = "minimax_m3_sparse"
"""The type of layers that attend to selected blocks."""
_SCORES = """
if past_key_values is not None:
    idx_k = past_key_values.layers[self.layer_idx].update_index(idx_k)
k_len = idx_k.shape[2]
num_key_blocks = -(-k_len // self.block_size)
pad = num_key_blocks * self.block_size - k_len
scores = torch.matmul(idx_q.float(), idx_k.float().transpose(-1, -2))
k_positions = torch.arange(k_len, device=idx_q.device)
token_future = k_positions[None, None, None, :] > position_ids[:, None, :, None]
scores = scores.masked_fill(token_future, float('-inf'))
if pad:
    scores = F.pad(scores, (0, pad), value=float('-inf'))
scores = scores.view(batch, self.num_heads, q_len, num_key_blocks, self.block_size)
block_scores = scores.amax(dim=-1)
q_block = position_ids // self.block_size
if self.local_blocks > 0:
    local = torch.arange(self.local_blocks, device=idx_q.device)
    local_idx = (q_block[..., None] - local.view(1, 1, -1)).clamp(min=0)
    local_idx = local_idx.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
    block_scores.scatter_(-1, local_idx, float('inf'))
topk = min(self.topk_blocks, num_key_blocks)
topk_scores, topk_indices = block_scores.topk(topk, dim=-1)
return topk_indices.masked_fill(topk_scores == float('-inf'), -1)
"""
"""The end of the indexer's forward in transformers 5.23."""


def selects_blocks(kind: type[nn.Module]) -> bool:
    """True for a type of module whose forward selects blocks as the indexers of MiniMax M3 do."""
    return kind.__name__.endswith("Indexer") and _inputs(kind.forward) is not None


@cache
def _inputs(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The beginning of an indexer's forward, as a function that returns its queries and keys; None if it does not end
    as is known."""
    try:
        function: Any = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    known = [ast.unparse(x) for x in ast.parse(f"def forward():\n{textwrap.indent(_SCORES, ' ')}").body[0].body]  # type: ignore[attr-defined]
    if [ast.unparse(x) for x in function.body[-len(known) :]] != known:
        return None
    function.body[-len(known) :] = ast.parse("def forward():\n return idx_q, idx_k").body[0].body  # type: ignore[attr-defined]
    function.name, function.decorator_list = "queries_and_keys", []
    found: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), inspect.getsourcefile(forward) or "", "exec"), forward.__globals__, found)
    made: Callable[..., tuple[Tensor, Tensor]] = found["queries_and_keys"]
    return made


def prepare_block_indexers(decoder: nn.Module) -> None:
    """Let the indexers of a decoder select blocks over all ranks."""
    for module in decoder.modules():
        if selects_blocks(type(module)):
            module.forward = partial(_selected, module)


def _selected(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Tensor
) -> Tensor:
    """The forward of an indexer of a prepared model: blocks ``[B, Hkv, S/n, k]``."""
    state, name = state_for(indexer), type(indexer).__name__
    given = hidden_states, position_embeddings, past_key_values, position_ids
    if not isinstance(state, ForwardState) or past_key_values is not None:
        found: Tensor = type(indexer).forward(indexer, *given)
        return found
    _check(name, state)
    with torch.no_grad():
        q, k = _inputs(type(indexer).forward)(indexer, *given)  # type: ignore[misc]
    call = Call(True, 1.0, name=name)  # neither documents nor padding: its blocks are those of slots
    blocks = indexer.topk_blocks, PER_HEAD, indexer.block_size, indexer.local_blocks
    return select(q, k, None, state.mesh.views[0], state.style.mode, call, *blocks)


def _check(name: str, state: ForwardState) -> None:
    """Raise ``NotImplementedError`` for batches in which one device selects something else than a query should see."""
    batch = state.batch
    if batch.documents is not None and batch.tokens is None:
        _refuse(name, "packed documents", "compares positions, which restart, with slots of keys, which do not")
    if batch.keys is not None:
        _refuse(name, "padding between tokens", "scores blocks with the states of padding")
    if not batch.numbered and "position_ids" in state.passed:
        _refuse(name, "position_ids", "compares them with slots of keys, so they must be 0, 1, 2 ...")
    if state.losses is not None:
        _refuse(name, "indexer_losses", "selects blocks, for which no loss is known")


def _refuse(name: str, what: str, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} got {what}. On one device it {why}. Pass one document in each row, padded at its ends, without "
        "position_ids and indexer_losses"
    )


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
