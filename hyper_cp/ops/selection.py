"""The keys that each query of a split sequence selects: a lightning indexer whose keys travel.

Its keys are narrow, one head of some hundred numbers, and go to all ranks as keys of attention do. Each rank keeps the
best ones of its own queries while blocks of keys arrive, so that no scores of all keys exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function

from .._torch.checkpoint import replayed
from ..mesh import cp_mesh
from ..mesh.arguments import check_choice, check_int
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling, operation
from ..schedule.tiles import Tile
from .attention import refuse_without_mesh
from .checks import check, check_head_weights, check_local, documents_of, with_hosts
from .config import Call, Mode, Operands, OpSettings
from .differentiable import no_autocast
from .engine import KeyGradients, Work, check_nans_if_enabled
from .exchange.tails import SwappedTails
from .exchange.travel import Travel
from .kernels import REFERENCE
from .kernels.indexer import PER_HEAD, SCORES, BestKeys
from .kernels.inputs import TileInputs
from .kernels.partials import part
from .kernels.scores import Positions


def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    *,
    topk: int,
    mesh: DeviceMesh | CPMesh | None = None,
    score: str = "relu_sum",
    block: int = 1,
    local_blocks: int = 0,
    is_causal: bool = True,
    scale: float | None = None,
    kv_exchange: str = "all_gather",
    layout: str = "contiguous",
    load_balance: bool = False,
    attn_mask: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    exchange_stages: int | str = "auto",
) -> Tensor:
    """Select, for each query of this rank, the ``topk`` keys with the highest scores (DeepSeek V3.2's lightning
    indexer).

    The score of query t and key s is ``sum over heads h of weights[t, h] * relu(scale * q[t, h] . k[s])``, in fp32
    (of fp64 inputs in fp64, and compared in fp32). Of equal scores, the lower position is taken, on any number of
    ranks.

    Args:
        q: local queries of the indexer ``[B, H, S/n, D]``.
        k: its local keys, ``[B, 1, S/n, D]``. They travel as those of attention do (``kv_exchange``,
            ``exchange_stages``).
        weights: the local weights of heads ``[B, H, S/n]``; None: all are 1.
        topk: the number of keys that a query selects.
        mesh: the cp mesh (1-D) of n ranks. All of them form one ring, whatever the Ulysses degree of attention:
            ranks cannot share out heads that are summed. None: as in :func:`attention`; topk, score, block,
            local_blocks, is_causal, scale and attn_mask may be given then.
        score: ``"relu_sum"``, as above; or ``"per_head"``: every head selects for itself, by ``weights[t, h] * scale *
            q[t, h] . k[s]``.
        block: select blocks of this many adjacent keys: block i has the keys from ``block * i`` on, whatever documents
            there are. The score of a block is the largest score of its visible keys.
        local_blocks: the number of blocks that come first whatever their scores, by ascending number: the block of the
            query and those before it.
        scale: the factor of ``q . k``; default ``D ** -0.5``.
        attn_mask: bool, ``[B|1, 1, S|1, S]`` over global positions, True where a key may be selected (padding: False).
        is_causal, layout, load_balance, window, documents: as in :func:`attention`. An indexer works as much as dense
            attention, so a causal one needs a balanced layout, or ``load_balance``.

    Returns:
        Global positions ``[B, 1, S/n, topk]``, int32, best first; -1 where fewer keys are visible. Numbers of blocks
        with ``block`` > 1, and ``[B, H, S/n, topk]`` with ``"per_head"``. They have no gradient. A recompute by
        activation checkpointing gets those of its forward, since other bits would select other keys. (In a compiled
        graph it selects again; save the ops of ``SAVE_LIST`` there.)

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.

    Example::

        >>> q, k, weights = torch.randn(1, 4, 8, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 4, 8)
        >>> select_keys(q, k, weights, topk=5, mesh=mesh).shape
        torch.Size([1, 1, 8, 5])

    Source: DeepSeek-V3.2 (arXiv 2512.02556); blocks and ``"per_head"``: MiniMax-M3 in transformers.
    """
    if mesh is None:
        refuse_without_mesh(
            "select_keys",
            kv_exchange=kv_exchange,
            layout=layout,
            load_balance=load_balance,
            window=window,
            documents=documents,
            exchange_stages=exchange_stages,
        )
        tensors = (q, k) if weights is None else (q, k, weights)
        if has_torch_function(tensors):  # a styled module that is running says how
            given: dict[str, Any] = {"score": score, "block": block, "local_blocks": local_blocks}
            given |= {"topk": topk, "is_causal": is_causal, "scale": scale, "attn_mask": attn_mask}
            found: Tensor = handle_torch_function(select_keys, tensors, *tensors, **given)
            return found
        mesh = cp_mesh.alone()
    cp, table = of_indexer(mesh, documents, "select_keys")
    mode = Mode(kv_exchange, layout, load_balance, window, exchange_stages=exchange_stages)  # type: ignore[arg-type]
    call = Call(is_causal, scale, attn_mask, table, name="select_keys")
    return select(q, k, weights, cp, mode, call, topk, score, block, local_blocks)


def of_indexer(mesh: DeviceMesh | CPMesh, documents: Any, caller: str) -> tuple[CPMesh, Tensor | None]:
    """The mesh of a call of an indexer, and its table of documents: those that it was given, or of the block."""
    cp = cp_mesh.whole_view(mesh)
    return cp, documents_of(mesh, cp, documents, caller)


def select(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cp: CPMesh,
    mode: Mode,
    call: Call,
    topk: int,
    score: str = "relu_sum",
    block: int = 1,
    local_blocks: int = 0,
) -> Tensor:
    """:func:`select_keys` for a mode and a call as attention takes them."""
    check_choice("score", score, (*SCORES, PER_HEAD), "It says how a query and a key are scored")
    check_int("topk", topk, "A query selects this many keys")
    check_int("block", block, "Keys are selected in blocks of this size")
    check_int("local_blocks", local_blocks, "This many blocks before a query are always selected", least=0)
    if local_blocks > topk:
        raise ValueError(
            f"{call.name}: local_blocks={local_blocks} is more than topk={topk}. Local blocks are among those that a "
            "query selects. Pass at most as many"
        )
    check_local(f"{call.name}: query", q, 4, "[batch, heads, sequence, head_dim]")
    if weights is not None:
        check_local(f"{call.name}: weights", weights, 3, "[batch, heads, sequence]")
        check_head_weights(call.name, q, weights)
    check_key_mask(call)
    mode, cp = with_hosts(mode, cp_mesh.as_ring(cp))
    with calling(call.name), torch.no_grad():
        q, k, _, checked = check(q, k, k, call, cp, mode, exchanged=False)
        same = ("topk", topk), ("score", score), ("weights", weights is not None), ("blocks", (block, local_blocks))
        cp.agree("call", same, call.name)
        given = Operands(documents=checked.documents, mask=checked.mask)
        arguments = checked.settings(REFERENCE.name).arguments(given, checked.scale)
        return replayed(lambda: select_keys_op(q, k, weights, topk, score, block, local_blocks, *arguments))


def check_key_mask(call: Call) -> None:
    """Raise ``ValueError`` for a mask of a call of an indexer that is not bool, or differs between heads."""
    mask = call.mask
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or (mask.ndim > 2 and mask.shape[-3] > 1)):
        raise ValueError(
            f"{call.name}: attn_mask is {mask.dtype} {tuple(mask.shape)}. It says which keys may be selected, for all "
            "heads together: bool [batch or 1, 1, queries or 1, keys]. Pass mask.any(1, keepdim=True), or the like"
        )


@torch.library.custom_op("hyper_cp::select_keys", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def select_keys_op(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    topk: int,
    score: str,
    block: int,
    local_blocks: int,
    tensors: list[Tensor],
    scale: float,
    dropout_p: float,
    settings: str,
) -> Tensor:
    """The selection of this rank's queries, ``[B, 1 or H, S/n, topk]``. The last arguments: see ``attention_op``."""
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    work, nothing = Work(q, k, k[..., :0], given, scale, dropout_p, options), k[..., :0]
    plan, ring = work.schedule, work.cp.ring
    positions = Positions(q, 0, plan.queries)
    best = BestKeys(q, topk, score, block, local_blocks, positions.rows)

    def compute(tile: Tile, inputs: TileInputs, of_rows: Sequence[Tensor], into: KeyGradients) -> None:
        weights, columns = of_rows[0] if of_rows else None, positions.of(into.step, tile).cols
        of_tile = part(best.best, tile.q, tile.batch)
        whole = [((0, inputs.q.shape[2]), (0, inputs.k.shape[2]), inputs)]
        for rows, cols, piece in whole if inputs.parts is None else inputs.rectangles():
            of_heads = None if weights is None else part(weights, rows)
            best.add(piece, of_heads, part(of_tile, rows), columns[slice(*cols)])

    with no_autocast(q.device.type), operation(work.cp, "selection of keys", "forward"):
        check_nans_if_enabled(work.cp, options, "query, key of an indexer", q, k)
        keys = Travel(ring, plan.transfers, k, nothing)
        queries = SwappedTails(ring, plan.swap, q, *(() if weights is None else (weights,)))
        work.run(plan.forward, keys, queries, compute, best.result)
        (found,) = queries.results(best.result)
    return found.contiguous()


@select_keys_op.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor | None, topk: int, score: str, *others: Any) -> Tensor:
    heads = q.shape[1] if score == PER_HEAD else 1
    return q.new_empty(q.shape[0], heads, q.shape[2], topk, dtype=torch.int32)
