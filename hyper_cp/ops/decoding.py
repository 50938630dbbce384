"""Decoding: attention of new tokens to a cache of keys and values of which each rank of a mesh holds a part.

A prompt's keys and values stay where its forward has made them, in the layout of the sequence; those of new tokens are
dealt out to the ranks in turn. All ranks compute the same new tokens. Each attends to its own part of the cache, the
partials of all ranks are gathered, and each rank merges them in rank order: all have the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..mesh.arguments import check_int
from ..mesh.comm import gather_ranks
from ..mesh.failures import calling, operation
from ..schedule.tiles import FULL
from . import kernels
from .checks import cast_for_autocast, check_local, check_sinks
from .config import Call
from .differentiable import no_autocast
from .engine import last_dim_contiguous
from .kernels import scores
from .kernels.indexer import BestKeys
from .kernels.inputs import TileInputs
from .kernels.partials import Partials, accumulation_dtype, part
from .kernels.scores import TileScore
from .kernels.selected import TileSelection
from .latents import absorb, expand
from .split_cache import SplitCache, refuse_gradients


def decode_attention(
    q: Tensor,
    cache: SplitCache,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of a split cache to all tokens that the cache holds.

    All ranks pass the same queries and get the same bits. Each sends ``(n - 1) * B * H * T * (Dv + 1)`` numbers for T
    new tokens, in fp32 (fp64 for fp64 inputs), whatever the length of the cache.

    Args:
        q: ``[B, H, T, D]``, the queries of the last T positions of the cache, the same on every rank.
        cache: the cache, which holds their keys and values already, see :meth:`SplitCache.append`.
        scale: the factor of the logits; default ``D ** -0.5``.
        enable_gqa: allow H to be a multiple of Hkv, as in ``F.scaled_dot_product_attention``.
        sinks, softcap: as in :func:`hyper_cp.ops.attention`; sinks are those of all heads, ``[H]``.
        weight, bias: as in :func:`hyper_cp.ops.latent_attention`, if the cache holds latents. Without a bias the weight
            is applied to queries and outputs, and nothing is expanded (the absorbed form of DeepSeek V2).
        selected: the only keys that each query sees, as global positions ``[B, 1 or Hkv, T, k]``, the same on every
            rank, as :func:`select_cached` returns them.

    Returns:
        ``[B, H, T, Dv]``.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.
        NotImplementedError: if an input requires a gradient and autograd is on.

    Example::

        >>> q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))  # this rank's half of 16 positions
        >>> cache = SplitCache(mesh)
        >>> cache.fill(k, v)
        >>> cache.append(k[:, :, :1], v[:, :, :1])  # one token more, which has the same key on every rank
        >>> decode_attention(q[:, :, :1], cache, enable_gqa=True).shape
        torch.Size([1, 4, 1, 16])

    Source: merging of partials as in Ring Attention (arXiv 2310.01889), across ranks as in the decode context
    parallelism of vLLM.
    """
    if has_torch_function((q,)):  # a styled module is running: the call counts as its attention
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "sinks": sinks, "softcap": softcap}
        options |= {"weight": weight, "bias": bias, "selected": selected}
        found: Tensor = handle_torch_function(decode_attention, (q,), q, cache, **options)
        return found
    return _decode(q, cache, scale, enable_gqa, sinks, softcap, weight, bias, selected)


@torch.compiler.disable(
    reason="Attention to a split cache reads the positions that it holds on the host, and cannot be part of a compiled "
    "graph. Compile without fullgraph=True"
)
def _decode(
    q: Tensor,
    cache: SplitCache,
    scale: float | None,
    enable_gqa: bool,
    sinks: Tensor | None,
    softcap: float | None,
    weight: Tensor | None,
    bias: Tensor | None,
    selected: Tensor | None,
) -> Tensor:
    name, cp = "decode_attention", cache.cp
    check_local(f"{name}: query", q, 4, "[batch, heads, new tokens, head_dim]")
    refuse_gradients(name, q, *(x for x in (sinks, weight, bias) if x is not None))
    q, *of_latents = cast_for_autocast(q, *(x for x in (weight, bias) if x is not None))
    cache.check_queries(q, enable_gqa, *of_latents)
    score = None if softcap is None else TileScore(scores.softcap(softcap), None)
    sinks = None if sinks is None else check_sinks(Call(sinks=sinks, name=name), q, cp, exchanged=True)
    options = ("scale", scale), ("softcap", softcap), ("sinks", sinks is not None), ("window", cache.window)
    if selected is not None:
        selected = check_selected_keys(name, selected, q, cache)
    kinds = ("latents", weight is not None), ("selected", None if selected is None else selected.shape)
    signature = ("shapes", q.shape), ("dtypes", q.dtype), *options, *kinds
    cp.agree("call", signature, name, (("positions in the cache", cache.length),))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with calling(name), no_autocast(q.device.type), operation(cp, name, "forward"):
        out, lse = _own_partial(q, cache, scale, score, selected, *of_latents)
        gathered = gather_ranks(cp.flat, torch.cat([out, lse.unsqueeze(3)], 3))
        merged, rows = Partials(q, out.shape[3], sinks), (0, q.shape[2])
        for x in gathered:  # in rank order: the same bits on every rank
            merged.add(rows, None, x[..., :-1].contiguous(), x[..., -1].contiguous())
        return merged.result(rows)[0]


def _own_partial(
    q: Tensor,
    cache: SplitCache,
    scale: float,
    score: TileScore | None,
    selected: Tensor | None,
    *of_latents: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention to this rank's rows: the output and its log-sum-exp, in the accumulation dtype."""
    held, shown = cache.held()
    (rank, rotary), wide = cache.widths, accumulation_dtype(q.dtype)
    output, k, v = None, held[0], held[-1]
    if len(of_latents) == 1:
        # Keys are latents with their rotary part. So are values, of which outputs keep the latents: kernels take
        # equal head dims, and no copy is made.
        q, _, output = absorb(q, k, rotary, of_latents[0])
    elif of_latents:
        latent, rope = k.split([rank, rotary], 3)
        k, v = expand(latent, rope, q.shape[1], q.shape[3], *of_latents)
    q, k, v = last_dim_contiguous(q, k, v)
    kinds = score is not None, selected is not None
    kernel = kernels.get(kernels.choose(q, k, v, False, 0.0, *kinds), q.device.type)
    ranges = None if selected is None else cache.ranges()
    partials = Partials(q.to(wide), v.shape[3])
    for tile in cache.tiles(q.shape[2]):
        kernels.check(kernel, shown is not None, tile.band)
        mask = None if shown is None else shown[..., slice(*tile.k)]
        blocks = part(q, tile.q), part(k, tile.k), part(v, tile.k)
        inputs = TileInputs(*blocks, tile.band, scale, mask, score=score, recurring=False)
        if selected is not None and ranges is not None:
            inputs.selected = TileSelection(part(selected, tile.q), ranges, tile.k)
        partials.add(tile.q, None, *_by_key_heads(kernel, inputs))
    out, lse = partials.result((0, q.shape[2]))
    return out if output is None else output(out[..., :rank].to(q.dtype)).to(wide), lse


def _by_key_heads(kernel: kernels.Kernel, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Attention of one tile. Where all queries see the same keys, those of one key head are rows of one head: each key
    is then read once, and not once for each query head."""
    heads, kv_heads, rows = tile.q.shape[1], tile.k.shape[1], tile.q.shape[2]
    if heads == kv_heads or tile.band != FULL or tile.selected is not None:
        return kernel.forward(tile)
    joined = tile.q.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    found = kernel.forward(replace(tile, q=joined))
    out, lse = (x.unflatten(2, (-1, rows)).flatten(1, 2) for x in found)
    return out, lse


# --------------------------------------------------------------------------- selected keys


def check_selected_keys(name: str, selected: Tensor, q: Tensor, cache: SplitCache) -> Tensor:
    """Selected keys in int32. Raises unless they fit queries ``[B, H, T, D]``."""
    heads = (1, cache.held()[0][0].shape[1])
    integers = isinstance(selected, Tensor) and selected.dtype in (torch.int32, torch.int64)
    if not integers or selected.ndim != 4 or selected.shape[0] != len(q) or selected.shape[2] != q.shape[2]:
        found = f"{selected.dtype} {tuple(selected.shape)}" if isinstance(selected, Tensor) else repr(selected)
        raise ValueError(
            f"{name}: selected is {found}. It must hold global positions [{len(q)}, 1 or {heads[1]} key heads, "
            f"{q.shape[2]} new tokens, selected keys], int32 or int64. Pass what select_cached returns"
        )
    return selected.to(torch.int32)


def select_cached(
    q: Tensor, cache: SplitCache, weights: Tensor | None = None, *, topk: int, scale: float | None = None
) -> Tensor:
    """Select keys of a split cache for the last tokens, as :func:`select_keys` does for the tokens of a sequence.

    Each rank sends ``(n - 1) * B * T * topk * 8`` bytes: its best keys.

    Args:
        q: queries of the indexer ``[B, H, T, D]`` of the last T positions of the cache, the same on every rank.
        cache: the cache of the indexer's keys. It was made with ``latents=True``, and filled with the two parts of a
            key, ``[B, 1, S/n, ...]`` each.
        weights: the weights of heads ``[B, H, T]``; None: all are 1.
        topk, scale: as in :func:`select_keys`.

    Returns:
        Global positions ``[B, 1, T, topk]``, int32, best first, the same on every rank; -1 where fewer keys are
        visible.

    Raises:
        ValueError, TypeError: on arguments that do not fit the cache, or differ between ranks, before any
            communication.
        NotImplementedError: if q requires a gradient and autograd is on.

    Example::

        >>> cache = SplitCache(mesh, latents=True)
        >>> cache.fill(torch.randn(1, 1, 8, 12), torch.randn(1, 1, 8, 4))  # this rank's half of 16 positions
        >>> select_cached(torch.randn(1, 2, 1, 16), cache, topk=5).shape  # for the last of them
        torch.Size([1, 1, 1, 5])

    Source: DeepSeek-V3.2 (arXiv 2512.02556), over a split cache as :func:`decode_attention`.
    """
    name, cp = "select_cached", cache.cp
    check_int("topk", topk, "A query selects this many keys")
    check_local(f"{name}: query", q, 4, "[batch, heads, new tokens, head_dim]")
    refuse_gradients(name, q)
    (q,) = cast_for_autocast(q)  # as the cache has cast its keys
    cache.check_indexer(name, q, weights)
    held, shown = cache.held()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    signature = ("shapes", q.shape), ("dtypes", q.dtype), ("topk", topk), ("scale", scale)
    cp.agree("call", (*signature, ("weights", weights is not None)), name)
    with calling(name), no_autocast(q.device.type), operation(cp, name, "forward"):
        best, k = BestKeys(q, topk), held[0]
        starts, _, first = cache.ranges()
        for tile in cache.tiles(q.shape[2]):
            rows = torch.arange(*tile.k, dtype=torch.int32, device=q.device)
            at = torch.searchsorted(first, rows, right=True) - 1
            mask = None if shown is None else shown[..., slice(*tile.k)]
            inputs = TileInputs(part(q, tile.q), part(k, tile.k), part(k, tile.k), tile.band, scale, mask)
            of_heads = None if weights is None else part(weights, tile.q)
            best.add(inputs, of_heads, part(best.best, tile.q), starts[at] + rows - first[at])
        gathered = gather_ranks(cp.flat, best.best)
        best.best = torch.cat([*gathered], 3).topk(topk, 3, sorted=False).values
        return best.result((0, q.shape[2]))[0]
