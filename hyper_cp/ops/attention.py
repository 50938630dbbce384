"""The engine: one custom op that obtains keys and values, runs a kernel per tile, merges partials.

Every mode is this file: forward and backward walk the rank's schedule. The op saves only local
q, k, v, its output and the log-sum-exp; keys and values are fetched again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import exchange, kernels, schedule
from . import layout as layouts
from . import mesh as meshes
from .layout import Range
from .merge import Partials, RowSum, accumulation_dtype, like_queries
from .mesh import CPMesh
from .schedule import CAUSAL, FULL

SAVE_LIST: list[Any] = []
"""The library's forward ops, for a selective activation-checkpointing policy (MUST_SAVE): what
they return is not computed or communicated again in a recompute."""


# --------------------------------------------------------------------------- the engine


def _schedule(
    q: Tensor, mesh: CPMesh, layout: str, kv_exchange: str, load_balance: bool, is_causal: bool
) -> schedule.Schedule:
    length = q.shape[2] * mesh.ring.size
    held = tuple(
        layouts.union_ranges(layout, mesh.ulysses_peers(r), mesh.size, length) for r in range(mesh.ring.size)
    )
    return schedule.build(held, mesh.ring.rank, kv_exchange, load_balance, CAUSAL if is_causal else FULL)


def _rows(x: Tensor, rows: Range) -> Tensor:
    return x[:, :, rows[0] : rows[1]]


def _take(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """The ranges of a block [B, H, S, D] that a step uses, side by side; one range is a view."""
    parts = [_rows(x, r) for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_taken(total: Tensor, ranges: tuple[Range, ...], rows: Range, x: Tensor) -> None:
    """Add ``x``, which belongs to ``rows`` of the taken ranges, to where these came from."""
    before = 0
    for start, stop in ranges:
        low, high = max(rows[0], before), min(rows[1], before + stop - start)
        if low < high:
            target = _rows(total, (start + low - before, start + high - before))
            target.add_(_rows(x, (low - rows[0], high - rows[0])))
        before += stop - start


@torch.library.custom_op("hyper_cp::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: str,
    layout: str,
    kv_exchange: str,
    load_balance: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    cp = meshes.by_key(mesh)
    plan = _schedule(q, cp, layout, kv_exchange, load_balance, is_causal)
    kernel = kernels.select(q, k, v)
    blocks = exchange.FORWARD[kv_exchange](cp.ring, k, v, plan.hops)
    queries = exchange.SwappedTails(cp.ring, plan.swap, q)
    partials = Partials(q, v.shape[3])
    for step, (k_block, v_block) in zip(plan.forward, blocks, strict=True):
        if step is plan.forward[-1]:
            queries.post_results(partials.result)
        if not step.tiles:
            continue
        k_block, v_block = _take(k_block, step.take), _take(v_block, step.take)
        for tile in step.tiles:
            (q_rows,) = queries.rows(tile.q)
            partials.add(
                tile.q,
                *kernel.forward(q_rows, _rows(k_block, tile.k), _rows(v_block, tile.k), tile.band, scale),
            )
    out, lse = queries.results(partials.result)
    return _in_query_order(out), lse.contiguous()


@torch.library.custom_op("hyper_cp::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mesh: str,
    layout: str,
    kv_exchange: str,
    load_balance: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    cp = meshes.by_key(mesh)
    plan = _schedule(q, cp, layout, kv_exchange, load_balance, is_causal)
    kernel = kernels.select(q, k, v)
    blocks = exchange.BACKWARD[kv_exchange](cp.ring, k, v, plan.hops, accumulation_dtype(q.dtype))
    queries = exchange.SwappedTails(cp.ring, plan.swap, q, dout, out, lse)
    dq = RowSum(q)
    for step, (k_block, v_block, dk, dv) in zip(plan.backward, blocks, strict=True):
        if step is plan.backward[-1]:
            queries.post_results(dq.result)
        if not step.tiles:
            continue
        k_block, v_block = _take(k_block, step.take), _take(v_block, step.take)
        for tile in step.tiles:
            q_rows, dout_rows, out_rows, lse_rows = queries.rows(tile.q)
            dq_tile, dk_tile, dv_tile = kernel.backward(
                dout_rows,
                q_rows,
                _rows(k_block, tile.k),
                _rows(v_block, tile.k),
                out_rows,
                lse_rows,
                tile.band,
                scale,
            )
            dq.add(tile.q, dq_tile)
            _add_taken(dk, step.take, tile.k, dk_tile)
            _add_taken(dv, step.take, tile.k, dv_tile)
    (dq_local,) = queries.results(dq.result)
    dk_home, dv_home = blocks.home
    return (
        _in_query_order(dq_local),
        _in_query_order(dk_home.to(k.dtype)),
        _in_query_order(dv_home.to(v.dtype)),
    )


def _in_query_order(x: Tensor) -> Tensor:
    """[B, H, S, D] in memory order [B, S, H, D]: one fixed layout, which the fakes can promise."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return like_queries(q, v.shape[3], q.dtype), lse


@_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (like_queries(x, x.shape[3], x.dtype) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Any, ...]:
    grads = _attention_backward(dout, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None for _ in ctx.settings))


_attention.register_autograd(_differentiate, setup_context=_save)


# --------------------------------------------------------------------------- Ulysses


@torch.library.custom_op("hyper_cp::all_to_all", mutates_args=())
def _all_to_all(
    xs: list[Tensor], mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool
) -> list[Tensor]:
    cp = meshes.by_key(mesh)
    move = exchange.sequence_to_heads if to_heads else exchange.heads_to_sequence
    pending = []
    for x in xs:  # all are in flight before the first is waited for
        length = x.shape[seq_dim] * cp.ring.size * (cp.ulysses.size if to_heads else 1)
        pieces = layouts.ascending_pieces(layout, cp.ulysses_peers(), cp.size, length)
        pending.append(move(cp.ulysses, x, seq_dim, head_dim, pieces))
    return [p.wait() for p in pending]


@_all_to_all.register_fake
def _(xs: list[Tensor], mesh: str, layout: str, seq_dim: int, head_dim: int, to_heads: bool) -> list[Tensor]:
    degree = meshes.by_key(mesh).ulysses.size
    out = []
    for x in xs:
        shape = list(x.shape)
        grows, shrinks = (seq_dim, head_dim) if to_heads else (head_dim, seq_dim)
        shape[grows] *= degree
        shape[shrinks] //= degree
        out.append(x.new_empty(shape))
    return out


def _save_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, ctx.to_heads = inputs


def _differentiate_all_to_all(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    back = _all_to_all(grads, ctx.mesh, ctx.layout, ctx.seq_dim, ctx.head_dim, not ctx.to_heads)
    return (back, None, None, None, None, None)


_all_to_all.register_autograd(_differentiate_all_to_all, setup_context=_save_all_to_all)

SAVE_LIST += [torch.ops.hyper_cp.attention.default, torch.ops.hyper_cp.all_to_all.default]


# --------------------------------------------------------------------------- the functional form


@dataclass(frozen=True)
class Mode:
    """How the keys are obtained and how the sequence lies: what all layers of one style share."""

    kv_exchange: str = "all_gather"
    layout: str = "contiguous"
    load_balance: bool = False

    def __post_init__(self) -> None:
        if self.kv_exchange not in schedule.KV_EXCHANGES:
            raise ValueError(
                f"kv_exchange={self.kv_exchange!r} is unknown; choose one of "
                f"{', '.join(map(repr, schedule.KV_EXCHANGES))}"
            )
        layouts.check_layout(self.layout)
        if not isinstance(self.load_balance, bool):
            raise TypeError(f"load_balance={self.load_balance!r} must be True or False")
        if self.load_balance and self.layout != "contiguous":
            raise ValueError(
                f"load_balance=True exchanges queries of contiguous data, but layout={self.layout!r} is "
                "balanced already: use load_balance=False, or layout='contiguous'"
            )


def check_heads(q_heads: int, kv_heads: int, cp: CPMesh) -> None:
    """Raise ``ValueError`` unless both head counts split over the Ulysses degree."""
    degree = cp.ulysses.size
    if q_heads % degree or kv_heads % degree:
        works = [d for d in meshes.divisors(cp.size) if q_heads % d == 0 and kv_heads % d == 0]
        raise ValueError(
            f"ulysses_degree={degree} cannot split {q_heads} query heads and {kv_heads} key/value heads: "
            f"both must be multiples of the degree. Degrees of this cp mesh of {cp.size} ranks that "
            f"work: {', '.join(map(str, works))}; set ulysses_degree to one of them (the rest of the "
            'mesh becomes the ring dimension) or to "auto"'
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, is_causal: bool) -> None:
    """Raise, before any communication, if this attention call ``[B, H, S, D]`` cannot be honoured."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; context-parallel attention takes [batch, heads, "
                "sequence, head_dim]. Add the missing dimension or transpose"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"query, key and value have dtypes {q.dtype}, {k.dtype} and {v.dtype}: they must be equal. "
            "Cast them to one dtype, or run under torch.autocast"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not fit: batch, "
            "the sequence and heads of key and value, and the head dim of query and key must be equal"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} and key {k.shape[2]} local positions: cross-attention of different "
            "lengths is not supported under context parallelism yet. Leave this module out of the plan"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads: grouped-query "
            "attention needs that. Repeat the key/value heads or change their number"
        )
    swaps = mode.load_balance and is_causal and cp.ring.size > 1
    if (mode.layout == "head_tail" or swaps) and q.shape[2] % 2:
        raise ValueError(
            f"local sequence length {q.shape[2]} is odd, but layout={mode.layout!r} with load_balance="
            f"{mode.load_balance} halves it: use global lengths that are a multiple of {2 * cp.size}"
        )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """What ``F.scaled_dot_product_attention`` would receive under the current autocast state."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, *, is_causal: bool, scale: float | None
) -> Tensor:
    """The engine on tensors ``[B, H, S, D]`` that already hold the sequence of a whole ring rank."""
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, cp, mode, is_causal)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if cp.ring.size == 1:  # whole sequences: what the device runs for plain attention
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    out, _ = _attention(q, k, v, cp.key, mode.layout, mode.kv_exchange, mode.load_balance, is_causal, scale)
    return out


def ulysses(xs: list[Tensor], cp: CPMesh, mode: Mode, seq_dim: int, head_dim: int) -> list[Tensor]:
    """All-to-all: each ``[.. S .. H ..]`` becomes ``[.. S*degree .. H/degree ..]``, ascending in S."""
    if cp.ulysses.size == 1:
        return xs
    return _all_to_all(xs, cp.key, mode.layout, seq_dim, head_dim, True)


def ulysses_back(xs: list[Tensor], cp: CPMesh, mode: Mode, seq_dim: int, head_dim: int) -> list[Tensor]:
    """The inverse of :func:`ulysses`."""
    if cp.ulysses.size == 1:
        return xs
    return _all_to_all(xs, cp.key, mode.layout, seq_dim, head_dim, False)


def cp_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, *, is_causal: bool, scale: float | None
) -> Tensor:
    """Ulysses, engine and Ulysses back on the local shards ``[B, H, S, D]`` of one cp rank."""
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, cp, mode, is_causal)
    check_heads(q.shape[1], k.shape[1], cp)
    q, k, v = ulysses([q, k, v], cp, mode, seq_dim=2, head_dim=1)
    out = ring_attention(q, k, v, cp, mode, is_causal=is_causal, scale=scale)
    return ulysses_back([out], cp, mode, seq_dim=2, head_dim=1)[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | CPMesh,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    ulysses_degree: int | None = 1,
    kv_exchange: str = "all_gather",
    layout: str = "contiguous",
    load_balance: bool = False,
) -> Tensor:
    """Context-parallel scaled dot-product attention of this rank's share of the sequence.

    Args:
        q: local queries ``[B, H, S/n, D]``.
        k: local keys ``[B, Hkv, S/n, D]``.
        v: local values ``[B, Hkv, S/n, Dv]``.
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``) of n ranks.
        is_causal: causal over *global* positions.
        scale: of the logits; default ``D ** -0.5``.
        enable_gqa: allow H to be a multiple of Hkv, as in ``F.scaled_dot_product_attention``.
        ulysses_degree: ranks that trade sequence for heads; ``None`` = all of the mesh.
        kv_exchange: ``"all_gather"`` (Colossal) or ``"ring"``, over the remaining ranks.
        layout: ``"contiguous"`` or ``"head_tail"``: which positions the ranks hold.
        load_balance: head-tail exchange of queries on contiguous data (causal only; otherwise
            nothing is unbalanced and nothing is exchanged).

    Returns:
        This rank's output ``[B, H, S/n, Dv]``.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.

    Source: DeepSpeed Ulysses (arXiv 2309.14509), Ring Attention (2310.01889), USP (2405.07719).
    """
    cp = mesh if isinstance(mesh, CPMesh) else meshes.view(mesh, ulysses_degree)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: pass enable_gqa=True for grouped-query "
            "attention, as with F.scaled_dot_product_attention"
        )
    mode = Mode(kv_exchange, layout, load_balance)
    return cp_attention(q, k, v, cp, mode, is_causal=is_causal, scale=scale)
