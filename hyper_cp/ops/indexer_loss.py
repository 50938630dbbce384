"""The loss that trains a lightning indexer: how far its scores are from what attention attends to (DeepSeek V3.2).

With P[t, s] the weight of key s for query t, summed over the heads of attention, Z its sum over s, and I the scores::

    KL(P / Z || softmax I)  =  (sum P log P - sum P I) / Z  -  log Z  +  log sum exp I
    its gradient at I       =  softmax I  -  P / Z

All sums over s add up block by block, so one pass over the keys gives the loss, and another one, in backward, the
gradients. Keys of the indexer and of attention travel side by side; of the gradients, only the indexer's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function

from ..mesh import cp_mesh
from ..mesh.arguments import check_choice
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import backward_of, calling, operation
from ..schedule.ranges import Range
from ..schedule.tiles import Tile
from .checks import cast_for_autocast, check, check_grouped, check_latent_forms, check_local, with_hosts
from .config import Call, Mode, Operands, OpSettings
from .differentiable import differentiable, no_autocast
from .engine import KeyGradients, Saved, Work, check_nans_if_enabled
from .exchange.tails import SwappedTails
from .exchange.travel import Travel
from .kernels import REFERENCE
from .kernels.indexer import SCORES
from .kernels.indexer_target import Pairs, pairs
from .kernels.inputs import TileInputs
from .kernels.partials import RowSum, accumulation_dtype, part
from .latents import absorb
from .recompute import check_recompute, check_replay
from .selection import check_key_mask, of_indexer

_NAME = "indexer_loss"


def indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor | None,
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    lse: Tensor,
    *,
    mesh: DeviceMesh | CPMesh | None = None,
    selected: Tensor | None = None,
    heads_mesh: DeviceMesh | None = None,
    score: str = "relu_sum",
    is_causal: bool = True,
    index_scale: float | None = None,
    scale: float | None = None,
    kv_exchange: str = "all_gather",
    layout: str = "contiguous",
    load_balance: bool = False,
    attn_mask: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    exchange_stages: int | str = "auto",
) -> Tensor:
    """Compute the loss of an indexer at each query of this rank: ``KL(p || softmax I)`` over the keys that the query
    sees.

    I are the scores of :func:`select_keys`; p are the weights of attention, summed over its heads and divided by their
    sum. Without ``selected`` the sums run over all visible keys (dense warm-up), with it over the selected ones (sparse
    training). ``ContextParallelHandler.mean_loss`` makes the mean over all ranks of what is returned.

    Args:
        index_q, index_k, weights, score, index_scale: the arguments of :func:`select_keys` (its ``scale`` is
            ``index_scale``). These tensors get gradients, nothing else does.
        q: local queries ``[B, H, S/n, D]`` of attention, as it was called with them.
        k: its local keys ``[B, Hkv, S/n, D]``; or the ``(latent, rope, weight)``, ``(latent, rope, weight, bias)`` of
            :func:`latent_attention` (then in the absorbed form: as one key head of R + Dr numbers).
        lse: the log-sum-exp ``[B, H, S/n]`` that attention with the same ``selected`` has returned, of plain scores: p
            would leave out a softcap or an added bias.
        mesh: the cp mesh (1-D) of n ranks, as in :func:`select_keys`. None: one device. Inside a module with a
            ``ContextParallel`` style None raises, since attention without a mesh gives no log-sum-exp.
        selected: global positions ``[B, 1, S/n, k]``, as :func:`select_keys` returns them.
        heads_mesh: the 1-D mesh of the tensor-parallel ranks that share out the heads of attention; P is summed over
            them (block by block, ``[rows, keys]`` in fp32). They pass the same selection, and each then has the whole
            loss and all gradients.
        scale: the scale of attention; default ``D ** -0.5``.
        is_causal, layout, load_balance, attn_mask, window, documents, kv_exchange, exchange_stages: those of
            :func:`select_keys`.

    Returns:
        Losses ``[B, S/n]`` in fp32 (fp64 for fp64). A query that sees no key has a loss of 0.

    Raises:
        ValueError, TypeError, NotImplementedError: on arguments that do not fit, before any communication.

    Example::

        >>> index = torch.randn(1, 4, 8, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 4, 8)
        >>> q, k, v = (torch.randn(1, 2, 8, 32) for _ in range(3))
        >>> out, lse = attention(q, k, v, mesh=mesh, is_causal=True, return_lse=True)
        >>> indexer_loss(*index, q, k, lse, mesh=mesh).shape
        torch.Size([1, 8])

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    check_choice("score", score, tuple(SCORES), "It says how a query and a key are scored")
    check_local(f"{_NAME}: index_q", index_q, 4, "[batch, heads, sequence, head_dim]")
    check_local(f"{_NAME}: q", q, 4, "[batch, heads, sequence, head_dim]")
    if mesh is None and has_torch_function((index_q, index_k, q)):  # a styled module that is running raises an error
        given: dict[str, Any] = {"weights": weights, "k": k, "lse": lse, "selected": selected, "heads_mesh": heads_mesh}
        given |= {"score": score, "is_causal": is_causal, "index_scale": index_scale, "scale": scale}
        given |= {"attn_mask": attn_mask, "window": window, "documents": documents}
        given |= {"index_q": index_q, "index_k": index_k, "q": q}
        found: Tensor = handle_torch_function(indexer_loss, (index_q, index_k, q), **given)
        return found
    cp, table = of_indexer(cp_mesh.alone() if mesh is None else mesh, documents, _NAME)
    call = Call(is_causal, index_scale, attn_mask, table, name=_NAME, selected=selected)
    mode = Mode(kv_exchange, layout, load_balance, window, exchange_stages=exchange_stages)  # type: ignore[arg-type]
    return loss_of((index_q, index_k, weights), (q, k, lse), cp, mode, call, scale, heads_mesh, score)


def loss_of(
    index: tuple[Tensor, Tensor, Tensor | None],
    attended: tuple[Tensor, Tensor | Sequence[Tensor], Tensor],
    cp: CPMesh,
    mode: Mode,
    call: Call,
    scale: float | None,
    heads_mesh: DeviceMesh | None = None,
    score: str = "relu_sum",
) -> Tensor:
    """:func:`indexer_loss` for a mode and a call of the indexer. ``scale``: attention's."""
    (index_q, index_k, weights), (q, k, lse) = index, attended
    mode, cp = with_hosts(mode, cp_mesh.as_ring(cp))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    check_local(f"{_NAME}: index_k", index_k, 4, "[batch, 1, sequence, head_dim]")
    index_q, index_k = cast_for_autocast(index_q, index_k)
    q, k = _attention_tensors(q, k)
    weights = index_q.new_ones(index_q.shape[:3]) if weights is None else weights
    _check(index_q, index_k, weights, q, k, lse)
    check_key_mask(call)
    with calling(_NAME):
        shared = None if heads_mesh is None else cp_mesh.view(heads_mesh, 1)
        heads = "" if shared is None else shared.key
        index_q, index_k, _, checked = check(index_q, index_k, index_k, call, cp, mode, exchanged=False)
        same = ("score", score), ("query", tuple(q.shape)), ("key", tuple(k.shape)), ("heads_mesh", heads != "")
        cp.agree("call", same, _NAME)
        if shared is not None:  # the sizes of the blocks that travel follow from these
            chosen = None if checked.selected is None else tuple(checked.selected.shape)
            shared.agree("call", (*same, ("indexer", tuple(index_q.shape)), ("selected", chosen)), _NAME)
        given = Operands(documents=checked.documents, mask=checked.mask, selected=checked.selected)
        arguments = checked.settings(REFERENCE.name).arguments(given, checked.scale)
        lse = lse.detach().to(accumulation_dtype(q.dtype))
        target = q, k, lse, score, scale, heads
        loss: Tensor = differentiable_indexer_loss(index_q, index_k, weights, *target, *arguments)[0]
        return loss


def _attention_tensors(q: Tensor, k: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys of attention, without a gradient; latents in the absorbed form."""
    if isinstance(k, Tensor):
        check_local(f"{_NAME}: k", k, 4, "[batch, key heads, sequence, head_dim]")
        q, k = cast_for_autocast(q.detach(), k.detach())
        return q, k
    if len(k) not in (3, 4):
        raise ValueError(
            f"{_NAME}: k has {len(k)} tensors. It must be the keys, or (latent, rope, weight) or (latent, rope, "
            "weight, bias) as latent_attention takes them. Pass one of these"
        )
    latent, rope, weight, *bias = k
    check_latent_forms(latent, rope, f"{_NAME}: ")
    if rope.shape[1] > 1:
        raise NotImplementedError(
            f"{_NAME}: rope has {rope.shape[1]} heads. Latents are used as one key head of all queries, so that their "
            "rotary part must be one head, too. Pass the keys of all heads as k"
        )
    with torch.no_grad():
        q, latent, rope, weight, *bias = cast_for_autocast(q, latent, rope, weight, *bias)
        absorbed, latents, _ = absorb(q, latent.unsqueeze(1), rope.shape[3], weight, *bias)
        return absorbed, torch.cat([latents, rope], 3)


def _check(index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> None:
    """Raise for tensors that do not fit together."""
    check_local(f"{_NAME}: lse", lse, 3, "[batch, heads, sequence]")
    (b, heads, rows, _), share = index_q.shape, index_k.shape[2]
    wanted = (
        ("index_k", index_k, (b, 1, share, index_q.shape[3]), "one key head of the width of index_q"),
        ("weights", weights, (b, heads, rows), "one for each head of index_q"),
        ("q", q, (b, q.shape[1], rows, q.shape[3]), "the rows of index_q"),
        ("k", k, (b, k.shape[1], share, q.shape[3]), "the rows of index_k and the width of q"),
        ("lse", lse, (b, q.shape[1], rows), "one for each head of q"),
    )
    for name, x, shape, rule in wanted:
        if tuple(x.shape) != shape or not x.is_floating_point():
            raise ValueError(
                f"{_NAME}: {name} {x.dtype} {tuple(x.shape)} must be floating-point {shape}: {rule}. Pass the tensors "
                "of one call of attention and of its indexer"
            )
    check_grouped(q.shape[1], k.shape[1])
    if not index_q.dtype == index_k.dtype == q.dtype == k.dtype:
        raise TypeError(
            f"{_NAME}: index_q, index_k, q, k have dtypes {index_q.dtype}, {index_k.dtype}, {q.dtype}, {k.dtype}. Keys "
            "of both travel in one message, so all must have one. Convert them"
        )


class _Compared(NamedTuple):
    """Some pairs of queries and keys, as attention weighs them and as the indexer scores them, ``[b, rows, c]``.

    Attributes:
        rows: the queries, of those of a tile.
        target: P, 0 where a pair is hidden.
        scores, visible: the scores; and the same with -inf where a pair is hidden.
        weights: of the heads of the indexer, ``[b, rows, Hi]``.
    """

    pairs: Pairs
    rows: slice
    target: Tensor
    scores: Tensor
    visible: Tensor
    weights: Tensor


class _Comparison:
    """Compares the scores of an indexer with the weights of attention.

    Args:
        score, scale: the score function, and attention's scale.
        heads: the key of the mesh of the ranks that share out the heads of attention, or "".
    """

    def __init__(self, score: str, scale: float, heads: str, backward: bool = False) -> None:
        self.score, self.scale, self.backward = SCORES[score], scale, backward
        self.axis = cp_mesh.by_key(heads).ring if heads else None

    def __call__(self, tile: TileInputs, weights: Tensor, q: Tensor, lse: Tensor) -> Iterator[_Compared]:
        """All visible pairs of a tile, a few queries at a time, given what belongs to its queries."""
        for found in pairs(tile, q, self.scale):
            target, of_heads = self._target(found, part(lse, found.rows)), part(weights, found.rows)
            of_heads = of_heads.to(found.products.dtype).transpose(1, 2)
            products = found.products.clone() if self.backward else found.products  # it may overwrite them
            scores = visible = self.score.of(products, of_heads)
            if found.visible is not None:
                visible = scores.masked_fill(~found.visible, -torch.inf)
            yield _Compared(found, slice(*found.rows), target, scores, visible, of_heads)

    def _target(self, found: Pairs, lse: Tensor) -> Tensor:
        weights = found.logits.sub_(lse.transpose(1, 2).unsqueeze(3)).exp_().sum(2)
        if found.visible is not None:
            weights = weights.masked_fill_(~found.visible, 0)
        if self.axis is None or self.axis.size == 1:
            return weights
        of_ranks: Tensor = self.axis.all_gather(weights.unsqueeze(0)).wait()
        return of_ranks.sum(0)  # in one order on all ranks, so that all have the same bits


@torch.library.custom_op("hyper_cp::indexer_loss", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def indexer_loss_op(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    score: str,
    scale: float,
    heads: str,
    tensors: list[Tensor],
    index_scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor]:
    """Losses ``[B, S/n]``, and for backward of each query the log-sum-exp of its scores and Z, ``[B, 1, S/n, 2]``.

    Args:
        heads: the key of the mesh over which P is summed, or "".
        tensors, index_scale, dropout_p, settings: the last arguments of ``attention_op``, those of the indexer.
    """
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    check_replay(given.documents, options.mesh)
    work = Work(index_q, index_k, k, given, index_scale, dropout_p, options)
    plan, ring, compare = work.schedule, work.cp.ring, _Comparison(score, scale, heads)
    b, _, rows, _ = index_q.shape
    sums = index_q.new_zeros(b, 1, rows, 3, dtype=accumulation_dtype(q.dtype))  # of P, of P log P, of P I
    lse_of_scores = torch.full_like(sums[..., 0], -torch.inf)

    def compute(tile: Tile, inputs: TileInputs, of_rows: Sequence[Tensor], into: KeyGradients) -> None:
        of_tile, seen = (part(x, tile.q, tile.batch)[:, 0] for x in (sums, lse_of_scores))
        for _, at, target, scores, visible, _ in compare(inputs, *of_rows):
            of_tile[:, at].add_(torch.stack([x.sum(2) for x in (target, target.xlogy(target), target * scores)], 2))
            seen[:, at].copy_(torch.logaddexp(seen[:, at], visible.logsumexp(2)))

    def result(rows: Range) -> tuple[Tensor, Tensor]:
        (total, own, cross), of_scores = part(sums, rows).unbind(3), part(lse_of_scores, rows)
        loss = (own - cross) / total - total.log() + of_scores
        return loss.masked_fill(total == 0, 0), torch.stack([of_scores, total], 3)

    with no_autocast(q.device.type), operation(work.cp, "loss of an indexer", "forward"):
        check_nans_if_enabled(work.cp, options, "query, key of an indexer", index_q, index_k)
        keys = Travel(ring, plan.transfers, index_k, k)
        queries = SwappedTails(ring, plan.swap, index_q, weights, q, lse)
        work.run(plan.forward, keys, queries, compute, result)
        loss, kept = queries.results(result)
    return loss[:, 0].contiguous(), kept.contiguous()


@torch.library.custom_op("hyper_cp::indexer_loss_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def indexer_loss_backward_op(
    dloss: Tensor,
    kept: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    score: str,
    scale: float,
    heads: str,
    tensors: list[Tensor],
    index_scale: float,
    dropout_p: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of index_q, index_k and weights. ``kept``: the second result of the forward."""
    options = OpSettings.read(settings)
    given = Operands.of(tensors, options.tensors)
    check_recompute(given.documents, options.mesh, given.mark)
    work = Work(index_q, index_k, k, given, index_scale, dropout_p, options, backward=True)
    plan, ring, wide = work.schedule, work.cp.ring, kept.dtype
    compare = _Comparison(score, scale, heads, backward=True)
    dq, dweights = RowSum(index_q), RowSum(weights.unsqueeze(3))

    def compute(tile: Tile, inputs: TileInputs, of_rows: Sequence[Tensor], into: KeyGradients) -> None:
        *of_rows, of_loss = of_rows
        of_tile = inputs.q, inputs.k, of_rows[0]
        dq_tile, dk, dweights_tile = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in of_tile)
        of_scores, total, upstream = of_loss[:, 0].unsqueeze(3).unbind(2)
        for found, at, target, _, visible, of_heads in compare(inputs, *of_rows):
            dscores = upstream[:, at] * ((visible - of_scores[:, at]).exp() - target / total[:, at])
            dproducts, of_weights = compare.score.pull_back(dscores, found.products, of_heads)
            dproducts *= inputs.scale
            dweights_tile[:, :, at].add_(of_weights.transpose(1, 2))
            dq_tile[:, :, at].add_(found.of_queries(dproducts))
            found.add_to_keys(dk, dproducts)
        dq.add(tile.q, tile.batch, dq_tile)
        dweights.add(tile.q, tile.batch, dweights_tile.unsqueeze(3))
        into.add(tile, dk)

    def result(rows: Range) -> tuple[Tensor, Tensor]:
        return (*dq.result(rows), *dweights.result(rows))

    with no_autocast(q.device.type), operation(work.cp, "loss of an indexer", "backward"):
        keys = Travel(ring, plan.transfers, index_k, k, wide, keys_only=True)
        of_scores, total = kept.unbind(3)
        seen = total > 0  # other queries, which see nothing, have no gradient
        upstream = dloss.to(wide).unsqueeze(1) * seen
        of_loss = torch.stack([of_scores.where(of_scores > -torch.inf, 0), total.where(seen, 1), upstream], 3)
        of_queries = SwappedTails(ring, plan.swap, index_q, weights, q, lse, of_loss)
        work.run(plan.backward, keys, of_queries, compute, result)
        dq_local, of_weights = of_queries.results(result)
    dk, _ = keys.gradients_at_home()
    return dq_local.contiguous(), dk.contiguous(), of_weights.squeeze(3).contiguous()


@indexer_loss_op.register_fake
def _(index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    b, _, rows, _ = index_q.shape
    wide = accumulation_dtype(q.dtype)
    return index_q.new_empty(b, rows, dtype=wide), index_q.new_empty(b, 1, rows, 2, dtype=wide)


@indexer_loss_backward_op.register_fake
def _(
    dloss: Tensor, kept: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dweights = (x.new_empty(x.shape) for x in (index_q, index_k, weights))
    return dq, dk, dweights


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, score, scale, heads, tensors, index_scale, dropout_p, settings = inputs
    ctx.saved, ctx.target = Saved(index_scale, dropout_p, settings), (score, scale, heads)
    ctx.save_for_backward(output[1], *given, *ctx.saved.kept(tensors))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dloss: Tensor | None, _: None) -> tuple[Any, ...]:
    kept, *others = ctx.saved_tensors
    saved: Saved = ctx.saved
    # Transfers take place without a gradient, too: other ranks may have one.
    dloss = torch.zeros_like(kept[:, 0, :, 0]) if dloss is None else dloss
    with backward_of(saved.caller):
        grads = indexer_loss_backward_op(dloss, kept, *others[:6], *ctx.target, *saved.arguments(others[6:]))
    return *grads, *[None] * 6, saved.gradients(()), None, None, None


differentiable_indexer_loss = differentiable("indexer_loss", indexer_loss_op, _differentiate, _save)
