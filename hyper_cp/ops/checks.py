"""The checks of an attention call, each written once, all before any communication.

:func:`check` is the entrance of every call: it casts, compares the ranks, checks and returns one
:class:`~hyper_cp.ops.config.CheckedCall`. The hooks of a module that is given q, k, v exchange heads before its
attention call is made; they call :func:`check_shards` themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from ..mesh import cp_mesh
from ..mesh.arguments import check_bool, check_int, check_number, check_type, is_number
from ..mesh.cp_mesh import CPMesh
from ..schedule import arrivals, build, documents, tiles
from ..schedule import layout as layouts
from ..schedule.blocks import BlockMap
from ..schedule.tiles import Band
from .config import Call, CheckedCall, Mode
from .differentiable import refuse_dtensor, refuse_forward_mode
from .entries import Entries

NUMBERS = (torch.SymFloat, torch.SymInt, Tensor)
"""Types that a compiled graph, or a model, may have in place of a Python number."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FIELDS = tuple(x.name for x in fields(Call))  # vars(call) would break graphs: torch 2.11 does not trace it


def check(
    q: Tensor, k: Tensor, v: Tensor, call: Call, cp: CPMesh, mode: Mode, *, exchanged: bool, of_entries: bool = False
) -> tuple[Tensor, Tensor, Tensor, CheckedCall]:
    """Cast q, k, v ``[B, H, S, D]`` as autocast does, and check everything about their attention call.

    Args:
        k, v: in latent attention latents ``[B, 1, S, R]`` and the rotary part ``[B, 1|H, S, Dr]``.
        exchanged: the Ulysses all-to-all was done already: tensors hold the sequence of a whole ring rank.
        of_entries: k and v are the entries of another call, whole on every rank.

    Raises:
        ValueError, TypeError, NotImplementedError: before any communication, if the call cannot be honoured.
    """
    check_dimensions(q, k, v)
    latent = call.weight is not None
    kv_heads = q.shape[1] if latent else k.shape[1]
    check_enable_gqa(call.name, q.shape[1], kv_heads, call.enable_gqa)
    check_kinds(call)
    refuse_forward_mode(call.name, q, k, v, *call.of_latents)
    q, k, v, *of_latents = cast_for_autocast(q, k, v, *call.of_latents)
    agree(cp, call, mode, q, k, v, *of_latents)
    if not latent:  # latents were checked where it was decided that they travel
        check_tensors(q, k, v)
    if exchanged:
        check_grouped(q.shape[1], kv_heads)
    else:
        check_shards((q.shape[1], q.shape[2]), (kv_heads, k.shape[2]), cp, mode, call.documents)
    check_places(call.name, cp, mode.layout, call.documents)
    share = q.shape[2] // (cp.ulysses.size if exchanged else 1)
    if not of_entries:
        hides = call.documents is not None or call.mask is not None or call.score is not None
        cp.batch.record_call(share, mode.layout if hides or call.is_causal or mode.window else None, cp.size)
    ranks = cp.ring.size if exchanged else cp.size
    lengths = q.shape[2] * ranks, mode.key_length(k.shape[2], ranks)
    check_options(call, mode, cp, lengths)
    band = tiles.band_of(call.is_causal, mode.window)
    if call.selected is None:
        check_tails(mode, cp, band, lengths[0], None if call.score is None else call.score.blocks)
    if call.score is not None:
        call.score.check(call.name, q.shape[0], q.shape[1] * (cp.ulysses.size if exchanged else 1), lengths)
    own: dict[str, Any] = {name: getattr(call, name) for name in _FIELDS}
    own |= _of_latents(of_latents, cp)
    if call.selected is not None:
        kv_heads *= cp.ulysses.size if exchanged else 1
        own["selected"] = _selected(call.selected, call, q, (kv_heads, share), cp, mode, lengths)
    if call.scale is None:
        own["scale"] = q.shape[3] ** -0.5
    if call.mask is not None:
        own["mask"] = _check_mask(call.mask, call, q, cp, lengths, exchanged)
    if call.sinks is not None:
        own["sinks"] = check_sinks(call, q, cp, exchanged)
    if call.entries is not None:
        own["entries"] = _entries(call.entries, q, call)
    return q, k, v, CheckedCall(**own, cp=cp, mode=mode, band=band, exchanged=exchanged, lengths=lengths)


def cast_for_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to what ``F.scaled_dot_product_attention`` would receive under the current autocast state."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def agree(cp: CPMesh, call: Call, mode: Mode, *tensors: Tensor) -> None:
    """Raise ``ValueError`` on every rank if the ranks of ``cp`` make different calls or bring different documents.

    Only a signature that is new on this rank is compared: the shapes, dtypes and options of a call, or a table of
    documents.
    """
    if cp.agreement is None or is_compiling():
        return
    if mode.kv_exchange == "replicated" and cp.ulysses.size == 1:
        return  # nothing travels, so ranks may make as many such calls as they like
    # Without what may change with every step. The first scale and probability that come with a signature are compared.
    signature = (
        ("shapes", tuple(x.shape for x in tensors)),
        ("dtypes", tuple(x.dtype for x in tensors)),
        ("ulysses_degree", cp.ulysses.size),
        *mode.signature,
        ("is_causal", call.is_causal),
        ("attn_mask", call.mask is not None),
        ("sinks", call.sinks is not None),
        ("selected", None if call.selected is None else (*call.selected.shape, call.block)),
        ("dropout", call.dropout_p > 0),
        ("score", "" if call.score is None else call.score.signature),
        ("max_logits", call.max_logits),
        ("entries", None if (x := call.entries) is None else (x.k.shape[2], x.every, x.selected is not None)),
        ("gradients", _differentiated(cp, call, tensors)),
    )
    cp.agree("call", signature, call.name, (("scale", call.scale), ("dropout_p", call.dropout_p)))
    table = documents.read(call.documents)
    cp.agree("documents", (("documents", None if table is None else table.digest),), call.name)
    if call.score is not None and call.score.blocks is not None:
        cp.agree("blocks", (("block mask", call.score.blocks.digest),), call.name)


def _differentiated(cp: CPMesh, call: Call, tensors: Sequence[Tensor]) -> bool:
    """True if this rank takes part in the transfers of the backward: a tensor of the call requires a gradient there."""
    if cp.ulysses.size > 1:
        return requires_gradient(*tensors[:3])  # heads are exchanged apart from the other tensors
    return requires_gradient(*tensors, call.sinks, *(() if call.score is None else call.score.captured))


def requires_gradient(*tensors: Tensor | None) -> bool:
    """True if autograd makes a node for a function of these tensors."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


# --------------------------------------------------------------------------- shares of the sequence


def check_shards(
    q: tuple[int, int], k: tuple[int, int], cp: CPMesh, mode: Mode, documents_table: Tensor | None
) -> None:
    """Raise ``ValueError`` unless the shares of this rank split over ``cp``.

    Args:
        q, k: heads and positions of this rank's queries and keys, before heads are exchanged.
    """
    check_heads(q[0], k[0], cp)
    if q[1] and not k[1]:
        raise ValueError(f"key has no positions, and query has {q[1]}. Attention needs a key. Pass at least one")
    if documents_table is not None and cp.size > 1:
        cp.batch.refuse_whole(q[1])
    documents.check_documents(documents_table, q[1] * cp.size)
    if layouts.chunks_per_rank(mode.layout) == 2 and cp.size > 1:
        odd = [n for n in ((q[1],) if mode.kv_exchange == "replicated" else (q[1], k[1])) if n % 2]
        if odd:
            raise ValueError(_odd(odd[0], f"layout={mode.layout!r}", cp))


def check_tails(mode: Mode, cp: CPMesh, band: Band, length: int, blocks: BlockMap | None = None) -> None:
    """Raise ``ValueError`` if tails of queries are exchanged, but a ring rank has an odd number of queries."""
    queries = length // cp.ring.size
    if queries % 2 and build.swaps(mode.load_balance, cp.ring.size, band, length, blocks):
        raise ValueError(_odd(queries, "load_balance=True", cp))


def _odd(length: int, cut: str, cp: CPMesh) -> str:
    return (
        f"local sequence length {length} is odd. {cut} cuts it into two halves. Use global lengths that are a multiple "
        f"of {2 * cp.size}"
    )


# --------------------------------------------------------------------------- tensors


def check_dimensions(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k, v are local tensors ``[B, H, S, D]``."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        check_local(name, x, 4, "[batch, heads, sequence, head_dim]")


def check_local(name: str, x: Tensor, ndim: int, form: str) -> None:
    """Raise unless an argument is a local tensor with ``ndim`` dimensions; ``form`` names these."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a tensor. It must be a local tensor {form}. Pass one")
    refuse_dtensor(
        name,
        x,
        "Pass x.to_local() and wrap the output with DTensor.from_local, or put ContextParallel (or "
        "RecurrentContextParallel) on a module that receives these tensors: it does both",
    )
    if x.ndim != ndim:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}. It must be {form}. Add the missing dimension, transpose or reshape it"
        )


def check_dtype(name: str, x: Tensor) -> None:
    """Raise ``TypeError`` unless a tensor has a dtype that kernels take."""
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {x.dtype}. Kernels take float16, bfloat16, float32 or float64. Convert it, and the "
            "other inputs"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k, v ``[B, H, S, D]`` have one floating dtype, and sizes that fit each other."""
    check_dtype("query", q)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"query, key and value have dtypes {q.dtype}, {k.dtype} and {v.dtype}. They must be equal. "
            "Cast them to one dtype, or run under torch.autocast"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not fit. All have one batch "
            "size, key and value one length and number of heads, query and key one head dim. Reshape them"
        )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if 0 in x.shape[1:]:
            what = ("heads", "positions", "numbers in a head")[list(x.shape[1:]).index(0)]
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, without {what}. There is nothing to attend with, and nothing to "
                "share. Pass at least one of each"
            )


def check_latent_forms(latent: Tensor, rope: Tensor, caller: str = "") -> None:
    """Raise unless latents and their rotary part have the dimensions that users give them. ``caller``: what errors
    begin with."""
    check_local(f"{caller}latent", latent, 3, "[batch, sequence, rank]")
    check_local(f"{caller}rope", rope, 4, "[batch, 1 or heads, sequence, rotary width]")


def check_latents(
    name: str,
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    all_keys: bool = False,
) -> None:
    """Raise unless queries ``[B, H, S, Dn + Dr]``, latents ``[B, 1, S, R]``, their rotary part ``[B, 1|H, S, Dr]`` and
    the weight ``[H * (Dn + Dv), R]`` that expands them have one floating dtype, and sizes that fit each other. With
    ``all_keys`` latents are those of all keys."""
    check_dtype("query", q)
    (b, heads, length, width), (rotary, rank) = q.shape, (rope.shape[3], latent.shape[3])
    others = {"latent": latent, "rope": rope, "weight": weight, **({} if bias is None else {"bias": bias})}
    for what, x in others.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name}: {what} is a DTensor placed {x.placements}. Attention needs the rows of this rank's heads as "
                "a local tensor. Pass what hyper_cp.latents_and_weight(layer, latent) returns"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name}: {what} has dtype {x.dtype} and query {q.dtype}. They must be equal. Cast them to one dtype, "
                "or run under torch.autocast"
            )
    if latent.shape[2] != rope.shape[2] or (latent.shape[2] != length and not all_keys):
        raise ValueError(
            f"{name}: query has {length} positions, latent {latent.shape[2]} and rope {rope.shape[2]}. Each rank "
            "passes its own share of the sequence of all three. Split latent and rope as the hidden states are split, "
            "and do not gather them"
        )
    rules = (
        (
            latent.shape[:2] == (b, 1) and latent.shape[2] > 0,
            f"latent {tuple(latent.shape)} must be [{b}, {length}, rank]",
        ),
        (rope.shape[0] == b and rope.shape[1] in (1, heads), f"rope {tuple(rope.shape)} must have 1 or {heads} heads"),
        (rotary < width, f"rope {tuple(rope.shape)} must be narrower than the {width} numbers of a query's head"),
        (weight.ndim == 2 and weight.shape[1] == rank, f"weight {tuple(weight.shape)} must be [outputs, {rank}]"),
        (
            weight.shape[0] % heads == 0 and weight.shape[0] // heads > width - rotary,
            f"weight {tuple(weight.shape)} must have the same outputs for each of {heads} heads, and more than the "
            f"{width - rotary} of its key without positions, which its value follows",
        ),
        (bias is None or bias.shape == weight.shape[:1], f"bias must be [{len(weight)}]"),
    )
    for fits, rule in rules:
        if not fits:
            raise ValueError(
                f"{name}: {rule}. query is {tuple(q.shape)}: [batch, heads, positions, Dn + Dr], latent [batch, "
                "positions, rank], rope [batch, 1 or heads, positions, Dr], weight [heads * (Dn + Dv), rank]. Reshape "
                "it, or pass the weight of this rank's heads"
            )


def _of_latents(of_latents: list[Tensor], cp: CPMesh) -> dict[str, Tensor]:
    """The rows of weight and bias that make the heads which this rank attends."""
    parts = [len(x) // cp.ulysses.size for x in of_latents]
    found = [x.narrow(0, cp.ulysses.rank * n, n) for x, n in zip(of_latents, parts, strict=True)]
    return dict(zip(("weight", "bias"), found, strict=False))


# --------------------------------------------------------------------------- heads


def check_enable_gqa(name: str, q_heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Raise ``ValueError`` for grouped heads without ``enable_gqa``, as ``F.scaled_dot_product_attention`` does."""
    check_bool("enable_gqa", enable_gqa, "It says that key heads may be fewer than query heads")
    if q_heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"{name}: query has {q_heads} heads and key {kv_heads}. Grouped heads may be a mistake, as in "
            "F.scaled_dot_product_attention. Pass enable_gqa=True for grouped-query attention"
        )


def check_grouped(q_heads: int, kv_heads: int) -> None:
    """Raise ``ValueError`` unless every key/value head serves equally many query heads."""
    if not q_heads or not kv_heads:
        raise ValueError(
            f"query has {q_heads} heads and key {kv_heads}. Attention needs at least one of each. Check head_dim, or "
            "how many heads tensor parallelism leaves on this rank"
        )
    if q_heads % kv_heads:
        raise ValueError(
            f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads. In grouped-query attention each "
            "key/value head serves equally many query heads. Repeat the key/value heads or change their number"
        )


def check_heads(q_heads: int, kv_heads: int, cp: CPMesh) -> None:
    """Raise ``ValueError`` unless the query heads split over the Ulysses degree. (Key/value heads that do not split are
    shared by ranks; an uneven split of query heads would leave ranks waiting for the busiest one.)"""
    check_grouped(q_heads, kv_heads)
    check_split(q_heads, "query heads", cp, '(the rest of the mesh becomes the ring dimension) or to "auto"')


def check_split(heads: int, what: str, cp: CPMesh, todo: str, caller: str = "") -> None:
    """Raise ``ValueError`` unless heads split over the Ulysses degree. ``todo``: what to do beside another degree."""
    degree = cp.ulysses.size
    if heads % degree:
        works = [d for d in cp_mesh.divisors(cp.size) if heads % d == 0]
        raise ValueError(
            f"{caller}ulysses_degree={degree} cannot split {heads} {what}. They must be a multiple of the degree (None "
            f"is all ranks of the mesh). Degrees of this cp mesh of {cp.size} ranks that work: "
            f"{', '.join(map(str, works))}. Set ulysses_degree to one of them {todo}"
        )


def check_degree(mode: Mode, cp: CPMesh) -> None:
    """Raise ``ValueError`` if this way of getting keys makes no sense with the Ulysses degree."""
    if mode.kv_exchange == "replicated" and cp.ulysses.size > 1:
        raise ValueError(
            f"kv_exchange='replicated' with ulysses_degree={cp.ulysses.size} is not possible. Every rank has all keys, "
            "so there is nothing to trade for heads. Set ulysses_degree=1"
        )


def with_hosts(mode: Mode, cp: CPMesh) -> tuple[Mode, CPMesh]:
    """The mode of a double ring with the ring ranks of a host in its name, which ranks compare, and the mesh with its
    hosts; a flat ring where there is one host. Other modes as they are. Raises if the ring does not split."""
    name, per_host = arrivals.family(mode.kv_exchange)
    if name != arrivals.DOUBLE_RING:
        return mode, cp
    cp = cp_mesh.over_hosts(cp, per_host)
    found = f"{name}_{cp.ring.per_host}" if cp.ring.per_host else "ring"
    return replace(mode, kv_exchange=found), cp


# --------------------------------------------------------------------------- lengths


def check_kinds(call: Call) -> None:
    """Raise ``TypeError`` unless the numbers of a call are numbers, its bools are bools, and its mask is a tensor."""
    if not isinstance(call.is_causal, torch.SymBool):
        check_bool(f"{call.name}: is_causal", call.is_causal, "It says that no query sees a key after its own position")
    for name, x in (("scale", 0.0 if call.scale is None else call.scale), ("dropout_p", call.dropout_p)):
        check_number(name, x, "It changes the weights of attention", "Pass a float", NUMBERS)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{call.name}: {name} is a tensor that requires a gradient. Attention takes it as a number, so the "
                "gradient would be missing. Pass its value, x.item(); multiply the queries by a learned scale instead"
            )
    if call.scale is not None and is_number(call.scale) and not call.scale > 0:  # NaN too
        raise ValueError(
            f"{call.name}: scale={call.scale}. Fused kernels hide keys before they scale, so that hidden ones would be "
            "NaN. Pass a positive scale, and multiply the queries by the sign, or by 0"
        )
    if call.mask is not None and not isinstance(call.mask, Tensor):
        raise TypeError(
            f"attn_mask is a {type(call.mask).__name__}, not a tensor. It must be bool (True is visible) or floating, "
            "over global positions. Pass torch.tensor(...)"
        )
    if isinstance(call.mask, CausalBias):
        raise TypeError(
            f"attn_mask is torch's CausalBias of {call.mask.seq_len_q} x {call.mask.seq_len_kv} positions, a tensor "
            "without values. Pass is_causal=True, or a mask with values, in which True is visible"
        )
    check_int("block", call.block, "Keys are selected in blocks of this size")
    if call.selected is not None:
        check_local(f"{call.name}: selected", call.selected, 4, "[batch, 1 or key heads, queries, selected keys]")
    elif call.block != 1:
        raise ValueError(
            f"{call.name}: block={call.block} without selected. It says how many keys each number in selected means. "
            "Pass selected, as select_keys(..., block=) returns it, or leave block out"
        )


def check_options(call: Call, mode: Mode, cp: CPMesh, lengths: tuple[int, int]) -> None:
    """Raise ``ValueError`` if the options of a call contradict each other or its ``lengths`` (queries, keys)."""
    if not 0.0 <= call.dropout_p < 1.0:
        raise ValueError(
            f"dropout_p={call.dropout_p} must be a probability below 1. Each weight is dropped with it. Pass a number "
            "from 0.0 on, and 0.0 in evaluation"
        )
    if lengths[0] == lengths[1]:
        return
    masked = call.mask is not None or (call.score is not None and call.score.blocks is not None)
    if call.is_causal or mode.window is not None or (call.documents is not None and not masked):
        raise ValueError(
            f"query has {lengths[0]} and key {lengths[1]} positions (kv_exchange={mode.kv_exchange!r}). "
            "Cross-attention of different lengths takes no is_causal, window or documents: document boundaries "
            "describe queries only. Pass an explicit attn_mask (to FlexAttention a block_mask), which says which keys "
            "each query sees (in a module of a plan with cross_attention=True in its style)"
        )
    if layouts.by_documents(mode.layout) and mode.kv_exchange != "replicated" and cp.size > 1:
        raise ValueError(
            f"layout={mode.layout!r} does not place keys of another length than the queries. It places queries by "
            "their documents, which say nothing about such keys. Pass all keys on every rank with "
            "kv_exchange='replicated'"
        )


# --------------------------------------------------------------------------- explicit masks


def check_sinks(call: Call, q: Tensor, cp: CPMesh, exchanged: bool) -> Tensor:
    """The sinks of the heads that this rank attends; raises if they do not fit. Its gradient is zero for the other
    heads."""
    sinks, degree = call.sinks, cp.ulysses.size
    attended = q.shape[1] if exchanged else q.shape[1] // degree
    heads = attended * degree
    fits = isinstance(sinks, Tensor) and sinks.is_floating_point() and sinks.device == q.device and sinks.ndim == 1
    if sinks is None or not fits or len(sinks) not in ({heads, attended} if exchanged else {heads}):
        given = f"{sinks.dtype} {tuple(sinks.shape)} on {sinks.device}" if isinstance(sinks, Tensor) else repr(sinks)
        raise ValueError(
            f"{call.name}: sinks={given} must hold one floating-point logit per query head, [{heads}] on {q.device}. "
            "Each rank takes those of its own heads. Pass the sinks of all heads"
        )
    if len(sinks) == attended:
        return sinks
    return sinks.narrow(0, cp.ulysses.rank * attended, attended)


def _selected(
    selected: Tensor, call: Call, q: Tensor, sizes: tuple[int, int], cp: CPMesh, mode: Mode, lengths: tuple[int, int]
) -> Tensor:
    """The selected keys of a call in int32; raises if they do not fit it. ``sizes``: its key heads, and this rank's
    share of its queries."""
    name, (kv_heads, share) = call.name, sizes
    form = f"global positions [{q.shape[0]}, 1 or {kv_heads} key heads, {share} queries of this rank, selected keys]"
    if selected.dtype not in (torch.int32, torch.int64) or selected.device != q.device:
        raise TypeError(
            f"{name}: selected has dtype {selected.dtype} on {selected.device}. It must be int32 or int64 on "
            f"{q.device}, {form}. Pass what select_keys returns, or convert it"
        )
    fits = selected.ndim == 4 and selected.shape[0] == q.shape[0] and selected.shape[1] in (1, kv_heads)
    if not fits or selected.shape[2] != share or not selected.shape[3]:
        raise ValueError(f"{name}: selected has shape {tuple(selected.shape)}. It must be {form}. Reshape it")
    refused = (
        (call.dropout_p > 0, f"dropout_p={call.dropout_p}", "Set dropout to 0.0"),
        (call.score is not None and call.score.positional, "a function of pairs (slices or flex_attention)", _MASK),
        (mode.groups > 1 and cp.ulysses.size > 1, f"head_groups={mode.head_groups}", "Use head_groups=1"),
        (
            lengths[0] != lengths[1] and cp.size > 1,
            f"{lengths[0]} queries and {lengths[1]} keys",
            "Select keys of the same sequence",
        ),
        (mode.kv_exchange == "replicated", "kv_exchange='replicated'", 'Use "all_gather" or "ring"'),
    )
    for applies, what, todo in refused:
        if applies:
            raise NotImplementedError(
                f"{name}: selected keys with {what} are not supported. Selected keys are gathered for a few queries "
                f"at a time, out of a sequence that is split as the queries are. {todo}"
            )
    return selected.to(torch.int32)


def documents_of(mesh: DeviceMesh | CPMesh, cp: CPMesh, given: Any, name: str) -> Tensor | None:
    """The documents of a call as a table: those that are given, or those of the enclosing ``handler.documents`` block.
    (Callers inside the library hand over a :class:`CPMesh`, and have read the block already.)"""
    if not isinstance(mesh, CPMesh):
        cp.batch.refuse_left(name, cp)
        if given is None:
            return cp.batch.documents_of_call(name)
    return documents.documents_table(given)


def check_places(name: str, cp: CPMesh, layout: str, table: Tensor | None) -> None:
    """Raise ``ValueError`` for documents of a call that have not placed the tokens of the batch in whose block it is
    made, in a layout that places tokens by documents."""
    if is_compiling() or table is None or cp.size == 1 or not layouts.by_documents(layout):
        return
    placing, given = documents.read(cp.batch.documents_in_block), documents.read(table)
    if placing is None or given is None or placing.rows == given.rows:
        return
    if checkpoint.in_foreign_recompute():  # perhaps in the block of the next batch
        return
    shown, batch = ([list(row) for row in x.rows] for x in (given, placing))
    raise ValueError(
        f"{name}: documents={shown} are not those of the batch in whose block it is called, {batch}. By these "
        f"layout={layout!r} has placed the tokens, and by others they would be taken for tokens of other positions. "
        'Leave documents= out, or use layout="head_tail" or "contiguous", in which a call may have documents of its '
        "own. For another sequence enter the block of its batch"
    )


def check_head_weights(name: str, q: Tensor, weights: Tensor | None) -> None:
    """Raise ``ValueError`` unless the weights of an indexer are one for each head of its queries ``[B, H, S, D]``."""
    if weights is not None and (weights.shape != q.shape[:3] or not weights.is_floating_point()):
        raise ValueError(
            f"{name}: weights is {weights.dtype} {tuple(weights.shape)}. It must be floating-point "
            f"{tuple(q.shape[:3])}, one weight for each head of a query. Reshape it, or pass None for weights of 1"
        )


def check_entries(q: Tensor, entries: Entries, cp: CPMesh, mode: Mode, call: Call, with_lse: bool) -> None:
    """Raise, before any communication, for what attention to two sources does not do."""
    todo = "It holds pooled keys of the whole sequence. Pass hyper_cp.ops.Entries(k, v, every=...)"
    check_type(f"{call.name}: entries", entries, Entries, todo)
    check_int("every", entries.every, "It is the number of tokens from one entry to the next")
    check_local(f"{call.name}: query", q, 4, "[batch, heads, sequence, head_dim]")
    for name, x in (("k", entries.k), ("v", entries.v)):
        check_local(f"{call.name}: entries.{name}", x, 4, "[batch, key heads, entries, head_dim]")
    number = q.shape[2] * cp.size // entries.every
    if not entries.k.shape[2] == entries.v.shape[2] <= number:
        raise ValueError(
            f"{call.name}: entries has {entries.k.shape[2]} keys and {entries.v.shape[2]} values. There are as many of "
            f"both, and at most {number}, one for every {entries.every} of {q.shape[2] * cp.size} tokens. Pass those "
            "of the whole sequence, as gather_windows returns them"
        )
    refused = (
        (call.score is not None, "softcap or slices", "Leave them out"),
        (call.dropout_p > 0, f"dropout_p={call.dropout_p}", "Set dropout to 0.0"),
        (call.selected is not None, "selected", "Put the selected entries into Entries(selected=)"),
        (mode.kv_exchange == "replicated", "kv_exchange='replicated'", 'Use "all_gather" or "ring"'),
        (with_lse, "return_lse=True", "Leave it out"),
        (call.max_logits or mode.max_logits, "max_logits", "Leave it out"),
    )
    for applies, what, todo in refused:
        if applies:
            raise NotImplementedError(
                f"{call.name}: entries with {what} are not supported. Tokens and entries are two calls whose results "
                f"are merged. {todo}"
            )


def _entries(entries: Entries, q: Tensor, call: Call) -> Entries | None:
    """The entries of a call, cast as its queries are; raises if they do not fit these. None: there are none."""
    if not entries.k.shape[2]:
        return None
    own = Call(name=call.name, enable_gqa=call.enable_gqa, selected=entries.selected)
    alone = cp_mesh.alone()
    _, k, v, checked = check(q, entries.k, entries.v, own, alone, Mode(), exchanged=False, of_entries=True)
    return replace(entries, k=k, v=v, selected=checked.selected)


_MASK = "Pass an attn_mask, or leave out of the selection what they hide"


def _check_mask(mask: Tensor, call: Call, q: Tensor, cp: CPMesh, lengths: tuple[int, int], exchanged: bool) -> Tensor:
    """The explicit mask in four dimensions, with the heads that this rank attends; raises if it does not fit."""
    degree = cp.ulysses.size
    if call.is_causal:
        raise ValueError("attn_mask and is_causal=True are both given. Each says what is visible. Pass one of them")
    if mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"attn_mask of shape {tuple(mask.shape)} requires a gradient, as the learned position bias of T5 does. "
            "Context-parallel attention does not compute it. Add a learned bias in the score_mod of flex_attention, "
            "which is called with global positions and whose tensors get gradients; or detach the mask"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}. It must be bool (True is visible) or floating (added to the logits). "
            "Convert it, with mask.bool() say"
        )
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 4 else mask
    all_heads = q.shape[1] * (degree if exchanged else 1)
    own_heads, rows = all_heads // degree, lengths[0] // cp.ring.size
    fits = (
        mask.ndim == 4
        and mask.shape[0] in (1, q.shape[0])
        and mask.shape[1] in (1, all_heads, *([own_heads] if exchanged else []))
        and mask.shape[2] in (1, rows, lengths[0])
        and mask.shape[3] in (1, lengths[1])
    )
    if not fits:
        whose = "this rank's" if degree == 1 else f"the {degree} ranks' that exchange heads,"
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}. It must be broadcastable to [{q.shape[0]}, "
            f"{all_heads}, {lengths[0]}, {lengths[1]}] (batch, heads, global queries, global keys), "
            f"or have {whose} {rows} queries in dimension 2. Build it for all {lengths[1]} positions of the "
            "sequence, and not for the local share; if the batch was padded to that length, pad the mask too, as "
            "get_batch_on_this_cp_rank does with an entry attention_mask"
        )
    if mask.shape[2] == 1 < mask.shape[3] and degree > 1 and lengths[0] == cp.size:
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} has one row, and so has every rank's share of the {lengths[0]} "
            "queries. It may be the row of this rank's query, which the other ranks need, or one row for all queries. "
            f"Pass all rows, [..., {lengths[0]}, {lengths[1]}], with expand if they are equal"
        )
    if mask.shape[1] == all_heads and degree > 1:
        mask = mask.narrow(1, cp.ulysses.rank * own_heads, own_heads)
    return mask
