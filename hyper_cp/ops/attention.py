"""Context-parallel attention as a function, its modes and its checks.

:func:`attention` = checks, then the Ulysses all-to-all, the engine and the all-to-all back. The
style's module boundary and region call the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..mesh import cp_mesh
from ..mesh.cp_mesh import CPMesh
from ..schedule import build as schedule
from ..schedule import layout as layouts
from ..schedule import masks
from . import head_groups as overlap
from . import kernels
from .engine import attention_op
from .exchange.ulysses import all_to_all_op, shared_heads
from .kernels.dropout import draw_seed

_ops = torch.ops.hyper_cp
SAVE_LIST: list[Any] = [_ops.attention.default, _ops.all_to_all.default, _ops.ulysses_attention.default]
"""The library's forward ops, for a selective activation-checkpointing policy (MUST_SAVE): what
they return is not computed or communicated again in a recompute."""


@dataclass(frozen=True)
class Mode:
    """How the keys are obtained, how the sequence lies and what is seen of it: what all modules of one
    style share."""

    kv_exchange: str = "all_gather"
    layout: str = "contiguous"
    load_balance: bool = False
    window: tuple[int | None, int | None] | None = None
    head_groups: int = 1

    def key_length(self, keys: int, ranks: int) -> int:
        """The global number of keys, of which ``ranks`` ranks have ``keys`` each."""
        return keys if self.kv_exchange == "replicated" else keys * ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", masks.check_window(self.window))
        if self.kv_exchange not in schedule.KV_EXCHANGES:
            raise ValueError(
                f"kv_exchange={self.kv_exchange!r} is unknown; choose one of "
                f"{', '.join(map(repr, schedule.KV_EXCHANGES))}"
            )
        layouts.check_layout(self.layout)
        if not isinstance(self.head_groups, int) or isinstance(self.head_groups, bool) or self.head_groups < 1:
            raise ValueError(f"head_groups={self.head_groups!r} must be a positive int; 1 exchanges all heads at once")
        if not isinstance(self.load_balance, bool):
            raise TypeError(f"load_balance={self.load_balance!r} must be True or False")
        if self.load_balance and self.layout != "contiguous":
            raise ValueError(
                f"load_balance=True exchanges queries of contiguous data, but layout={self.layout!r} is "
                "balanced already: use load_balance=False, or layout='contiguous'"
            )


@dataclass(frozen=True)
class Call:
    """What one attention call asks for beside q, k, v."""

    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None
    """Explicit, broadcastable to ``[B, H, Sq, Skv]``, global (the query dimension may be local)."""
    documents: Tensor | None = None
    """Table of borders, see :func:`masks.documents_table`."""
    dropout_p: float = 0.0


def check_degree(mode: Mode, cp: CPMesh) -> None:
    """Raise ``ValueError`` if this way of getting keys makes no sense with the Ulysses degree."""
    if mode.kv_exchange == "replicated" and cp.ulysses.size > 1:
        raise ValueError(
            f"kv_exchange='replicated' with ulysses_degree={cp.ulysses.size}: where every rank has all keys there is "
            "nothing to trade. Set ulysses_degree=1"
        )


def check_heads(q_heads: int, kv_heads: int, cp: CPMesh) -> None:
    """Raise ``ValueError`` unless the query heads split over the Ulysses degree. (Key/value heads that do not are
    shared by ranks; an uneven split of query heads would leave ranks waiting for the fullest one.)"""
    degree = cp.ulysses.size
    if q_heads % kv_heads:
        raise ValueError(
            f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads: grouped-query attention "
            "needs that. Repeat the key/value heads or change their number"
        )
    if q_heads % degree:
        works = [d for d in cp_mesh.divisors(cp.size) if q_heads % d == 0]
        raise ValueError(
            f"ulysses_degree={degree} cannot split {q_heads} query heads: they must be a multiple of the degree (None "
            f"means all ranks of the mesh). Degrees of this cp mesh of {cp.size} ranks that work: "
            f"{', '.join(map(str, works))}; set ulysses_degree to one of them (the rest of the mesh becomes the ring "
            'dimension) or to "auto"'
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call) -> None:
    """Raise, before any communication, if this attention call ``[B, H, S, D]`` cannot be honoured."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name} is a DTensor placed {x.placements}: attention of this rank's share takes local tensors, not a "
                "DTensor. Pass x.to_local() (and wrap the output with DTensor.from_local), or put ContextParallel on a "
                "module that receives q, k, v, which does both"
            )
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; context-parallel attention takes [batch, heads, "
                "sequence, head_dim]. Add the missing dimension or transpose"
            )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"query has dtype {q.dtype}; attention takes float16, bfloat16, float32 or float64. "
            "Convert query, key and value"
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
    if not 0.0 <= call.dropout_p < 1.0:
        raise ValueError(f"dropout_p={call.dropout_p} must be a probability below 1; pass 0.0 in evaluation")
    narrowed = call.is_causal or mode.window is not None or (call.documents is not None and call.mask is None)
    crossed = q.shape[2] * cp.ring.size != mode.key_length(k.shape[2], cp.ring.size)
    if crossed and narrowed:
        raise ValueError(
            f"query has {q.shape[2]} and key {k.shape[2]} local positions (kv_exchange={mode.kv_exchange!r}): "
            "cross-attention of different lengths takes no is_causal, window or documents. Pass an explicit attn_mask "
            "(with documents in force too: they are of the queries, and the mask says what those see of the keys)"
        )
    if crossed and mode.layout in layouts.BY_DOCUMENTS and mode.kv_exchange != "replicated" and cp.size > 1:
        raise ValueError(
            f"layout={mode.layout!r} places queries by their documents, and says nothing of keys of another length: "
            "pass all of them on every rank with kv_exchange='replicated'"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads: grouped-query "
            "attention needs that. Repeat the key/value heads or change their number"
        )
    band = masks.band_of(call.is_causal, mode.window)
    swaps = schedule.swaps(mode.load_balance, cp.ring.size, band, q.shape[2] * cp.ring.size)
    odd = [x.shape[2] for x in ((q,) if mode.kv_exchange == "replicated" else (q, k)) if x.shape[2] % 2]
    if (mode.layout in ("head_tail", "auto") or swaps) and odd and cp.size > 1:
        raise ValueError(
            f"local sequence length {odd[0]} is odd, but layout={mode.layout!r} with load_balance="
            f"{mode.load_balance} halves it: use global lengths that are a multiple of {2 * cp.size}"
        )


def check_mask(mask: Tensor, q: Tensor, cp: CPMesh, lengths: tuple[int, int], call: Call) -> Tensor:
    """The mask in four dimensions and with the query heads of ``q``; raises if it does not fit.

    ``q`` is ``[B, H, S, D]`` as the engine gets it, ``lengths`` the global ones of queries and keys.
    """
    if call.is_causal:
        raise ValueError("attn_mask and is_causal=True are both given: pass one of them")
    if mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"attn_mask of shape {tuple(mask.shape)} requires a gradient, which context-parallel attention "
            "does not compute: detach it, or leave this module out of the plan"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {mask.dtype}; it must be bool (True is visible) or floating")
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 4 else mask
    degree, (batch, heads, rows, _) = cp.ulysses.size, q.shape
    fits = (
        mask.ndim == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads, heads * degree)
        and mask.shape[2] in (1, rows, lengths[0])
        and mask.shape[3] in (1, lengths[1])
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}; it must be broadcastable to [{batch}, "
            f"{heads * degree}, {lengths[0]}, {lengths[1]}] (batch, heads, global queries, global keys), "
            f"or have this rank's {rows} queries in the third place. Build it for the whole sequence, "
            "not for the local share"
        )
    if mask.shape[1] == heads * degree and degree > 1:
        mask = mask.narrow(1, cp.ulysses.rank * heads, heads)
    return mask


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """What ``F.scaled_dot_product_attention`` would receive under the current autocast state."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call) -> Tensor:
    """The engine on tensors ``[B, H, S, D]`` that already hold the sequence of a whole ring rank."""
    return _attend(q, k, v, cp, mode, call)[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, cp, mode, call)
    mask = call.mask
    if mask is not None:
        mask = check_mask(mask, q, cp, (q.shape[2] * cp.ring.size, mode.key_length(k.shape[2], cp.ring.size)), call)
    if cp.size == 1 and call.documents is None and mode.window is None and not with_lse:
        gqa = q.shape[1] != k.shape[1]  # exactly the user's own call
        return F.scaled_dot_product_attention(
            q, k, v, mask, call.dropout_p, call.is_causal, scale=_scale(q, call), enable_gqa=gqa
        ), None
    seed = draw_seed() if call.dropout_p else None
    kernel = kernels.choose(q, k, v, call.is_causal, call.dropout_p)
    return attention_op(q, k, v, call.documents, mask, seed, *_how(q, cp, mode, call), call.dropout_p, kernel)


def _scale(q: Tensor, call: Call) -> float:
    return q.shape[3] ** -0.5 if call.scale is None else call.scale


def _how(q: Tensor, cp: CPMesh, mode: Mode, call: Call) -> tuple[Any, ...]:
    """What the ops are told alike, from the mesh to the scale."""
    band = masks.band_of(call.is_causal, mode.window)
    return cp.key, mode.layout, mode.kv_exchange, mode.load_balance, *band, _scale(q, call)


def ulysses(
    xs: list[Tensor], cp: CPMesh, mode: Mode, seq_dim: int, head_dim: int, documents: Tensor | None = None
) -> list[Tensor]:
    """All-to-all: each ``[.. S .. H ..]`` becomes ``[.. S*degree .. H/degree ..]``, ascending in S. ``documents``:
    those in force, which the layout may depend on."""
    return _exchange(xs, cp, mode, seq_dim, head_dim, documents, True)


def ulysses_back(
    xs: list[Tensor], cp: CPMesh, mode: Mode, seq_dim: int, head_dim: int, documents: Tensor | None = None
) -> list[Tensor]:
    """The inverse of :func:`ulysses`."""
    return _exchange(xs, cp, mode, seq_dim, head_dim, documents, False)


def _exchange(
    xs: list[Tensor], cp: CPMesh, mode: Mode, seq: int, head: int, documents: Tensor | None, to_heads: bool
) -> list[Tensor]:
    if cp.ulysses.size == 1:
        return xs
    placed_by = documents if mode.layout in layouts.BY_DOCUMENTS else None
    return all_to_all_op(xs, placed_by, cp.key, mode.layout, seq, head, to_heads)


def cp_attention(q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call) -> Tensor:
    """Ulysses, engine and Ulysses back on the local shards ``[B, H, S, D]`` of one cp rank."""
    return _attend_shards(q, k, v, cp, mode, call)[0]


def _attend_shards(
    q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    q, k, v = _autocast(q, k, v)
    cp.check_shapes(q, k, documents=call.documents)
    check_qkv(q, k, v, cp, mode, call)
    check_heads(q.shape[1], k.shape[1], cp)
    masks.check_documents(call.documents, q.shape[2] * cp.size)
    mask = call.mask
    if mask is not None:  # before any communication
        whole = q.new_empty(q.shape[0], q.shape[1] // cp.ulysses.size, q.shape[2] * cp.ulysses.size, 1, device="meta")
        mask = check_mask(mask, whole, cp, (q.shape[2] * cp.size, mode.key_length(k.shape[2], cp.size)), call)
    shared = [shared_heads(x, cp.ulysses.size, 1) for x in (k, v)]
    overlap.check_groups(q.shape[1], shared[0].shape[1], cp, mode.head_groups)
    k, v = shared
    if mode.head_groups > 1 and cp.ulysses.size > 1 and not call.dropout_p:
        # (With dropout at once: which pairs are dropped depends on the number of a head among those of its rank.)
        how = (*_how(q, cp, mode, call), kernels.choose(q, k, v, call.is_causal))
        out, lses = overlap.attend(q, k, v, mode.head_groups, call.documents, mask, *how)
        lse = torch.cat(lses, 1) if with_lse else None
    else:
        q, k, v = ulysses([q, k, v], cp, mode, 2, 1, call.documents)
        out, lse = _attend(q, k, v, cp, mode, call, with_lse)
        (out,) = ulysses_back([out], cp, mode, 2, 1, call.documents)
    if lse is not None and with_lse:
        (lse,) = ulysses_back([lse.unsqueeze(-1)], cp, mode, 2, 1, call.documents)
        lse = lse.squeeze(-1)
    return out, lse


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
    attn_mask: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    head_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Context-parallel scaled dot-product attention of this rank's share of the sequence.

    Args:
        q: local queries ``[B, H, S/n, D]``.
        k: local keys ``[B, Hkv, S/n, D]``; in cross-attention (no is_causal, window or documents) they may have
            another length. With ``kv_exchange="replicated"`` all keys, the same on every rank.
        v: local values ``[B, Hkv, S/n, Dv]``.
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``) of n ranks.
        is_causal: causal over *global* positions.
        scale: of the logits; default ``D ** -0.5``.
        enable_gqa: allow H to be a multiple of Hkv, as in ``F.scaled_dot_product_attention``.
        ulysses_degree: ranks that trade sequence for heads; ``None`` = all of the mesh.
        kv_exchange: ``"all_gather"`` (Colossal) or ``"ring"``, over the remaining ranks; or ``"replicated"``: every
            rank has all keys and values (cross-attention to a text), nothing travels, and each rank's gradient of
            them is its share of a sum.
        layout: which positions the ranks hold: ``"contiguous"``, ``"head_tail"``, ``"per_document"`` (each
            document head-tail; needs documents) or ``"auto"`` (of the last two what balances them better).
        load_balance: head-tail exchange of queries on contiguous data (causal only; otherwise
            nothing is unbalanced and nothing is exchanged).
        attn_mask: bool (True is visible) or added to the logits, broadcastable to ``[B, H, S, S]`` over
            *global* positions; its query dimension may be this rank's own. No gradient for it. A mask
            that is exactly causal is treated as ``is_causal`` (checked once per tensor).
        window: ``(left, right)``: a query sees at most so many positions before and after its own;
            None (or -1): no bound.
        documents: cumulative lengths ``[0, ..., S]`` of documents packed into the sequence, global, on
            the CPU (a list or tensor, or one per batch row): only positions of one document see each
            other. Any lengths, borders anywhere.
        dropout_p: probability that a weight is dropped (never the same pairs on two ranks, the same ones in a
            recompute). Only where plain SDPA would compute in plain math, as on the CPU; the seed comes from
            the default CPU generator.
        return_lse: also return the log-sum-exp of the scaled logits.
        head_groups: exchange heads (``ulysses_degree`` > 1) in so many groups, the next one in flight while one is
            attended, in backward too. Each rank's heads must split into them. Not with dropout (then all at once).

    Returns:
        This rank's output ``[B, H, S/n, Dv]``; with ``return_lse`` and ``[B, H, S/n]`` in fp32 (fp64 for fp64
        inputs), which has no gradient and is -inf for queries that see nothing.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.

    Source: DeepSpeed Ulysses (arXiv 2309.14509), Ring Attention (2310.01889), USP (2405.07719).
    """
    cp = mesh if isinstance(mesh, CPMesh) else cp_mesh.view(mesh, ulysses_degree)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: pass enable_gqa=True for grouped-query "
            "attention, as with F.scaled_dot_product_attention"
        )
    mode = Mode(kv_exchange, layout, load_balance, window, head_groups)  # type: ignore[arg-type]
    check_degree(mode, cp)
    call = Call(is_causal, scale, attn_mask, masks.documents_table(documents), dropout_p)
    out, lse = _attend_shards(q, k, v, cp, mode, call, return_lse)
    return out if lse is None or not return_lse else (out, lse)
