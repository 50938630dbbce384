"""Context-parallel attention as a function, and the single code path of every attention call.

:func:`attend` = check, Ulysses, attention of a ring rank, Ulysses back. The hooks of a styled module do the first and
the last exchange themselves when the module is given q, k, v, and call it with ``exchanged=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function

from .._torch.compiling import is_compiling
from ..mesh import cp_mesh
from ..mesh.arguments import check_type
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling
from ..schedule import choices
from ..schedule.documents import documents_table
from . import head_groups, max_logits
from .checks import (
    cast_for_autocast,
    check,
    check_degree,
    check_dimensions,
    check_entries,
    check_latent_forms,
    check_latents,
    with_hosts,
)
from .config import Call, CheckedCall, Mode
from .engine import TileEngine
from .entries import Entries
from .exchange.ulysses import Ulysses
from .kernels import scores
from .latents import expand
from .slices import score_of_slices


class AttentionBackend(Protocol):
    """Another way than tiles to compute attention of tensors ``[B, H, S, D]`` that hold the sequence of a whole ring
    rank."""

    def select_backend(
        self, q: Tensor, cp: CPMesh, mode: Mode, call: Call
    ) -> tuple[AttentionBackend | TileEngine, Call]:
        """This backend, or the engine if the call can run in tiles; and the call as that backend takes it."""
        ...

    def compiles(self, cp: CPMesh, mode: Mode, call: Call) -> bool:
        """True if the call can be part of a compiled graph."""
        ...

    def check(self, q: Tensor, k: Tensor, call: CheckedCall) -> None:
        """Raise, before any communication, if the call cannot be honoured. The tensors are those of the call."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Any: ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: CPMesh,
    mode: Mode,
    call: Call,
    core: AttentionBackend | TileEngine,
    *,
    exchanged: bool = False,
) -> Any:
    """Check a call, exchange heads, attend with ``core``, and exchange back. The only place that does.

    Args:
        q, k, v: ``[B, H, S, D]``, this rank's share of the sequence; with ``exchanged`` that of its whole ring rank.
    """
    if not isinstance(core, TileEngine) and is_compiling() and not core.compiles(cp, mode, call):
        return _outside_the_graph(q, k, v, cp, mode, call, core, exchanged)
    with calling(call.name):
        return _attend(q, k, v, cp, mode, call, core, exchanged)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: CPMesh,
    mode: Mode,
    call: Call,
    core: AttentionBackend | TileEngine,
    exchanged: bool,
) -> Any:
    if call.entries is not None:
        check_entries(q, call.entries, cp, mode, call, isinstance(core, TileEngine) and core.with_lse)
        cp = cp_mesh.as_ring(cp)
    mode, cp = with_hosts(mode, cp)
    if call.weight is not None:
        q, k, v, call = _latents_or_heads(q, k, v, cp, mode, call)
    if mode.head_groups == "auto":
        possible = isinstance(core, TileEngine) and not exchanged and call.weight is None and call.selected is None
        mode = replace(mode, head_groups=head_groups.best_groups(q, k, v, cp) if possible else 1)
    q, k, v, checked = check(q, k, v, call, cp, mode, exchanged=exchanged)
    if not isinstance(core, TileEngine):
        core.check(q, k, checked)
    if cp.ulysses.size == 1:
        return core(q, k, v, checked)
    ulysses = Ulysses(cp, mode.layout, documents=call.documents)
    if checked.selected is not None:
        checked = replace(checked, selected=ulysses.keys_to_heads(checked.selected)[0])
    if exchanged:
        return core(q, k, v, checked)
    head_groups.check_groups(q.shape[1], k.shape[1], cp, mode.groups)
    if isinstance(core, TileEngine) and mode.groups > 1:
        return head_groups.attend(q, k, v, checked, core)
    q, k, v = ulysses.to_heads(q, k, v)
    result = core(q, k, v, checked)
    if isinstance(core, TileEngine) and isinstance(result, tuple):  # apart: only the output has a gradient
        return tuple(ulysses.to_sequence(x) for x in result)
    return ulysses.to_sequence(result)


@torch.compiler.assume_constant_result  # a graph need not trace what is logged
def _latents_travel(heads: int, ulysses: int, latent: int, rotary: tuple[int, int], of_head: int) -> bool:
    return choices.latents_travel(heads, ulysses, latent, rotary, of_head)


def _latents_or_heads(
    q: Tensor, latent: Tensor, rope: Tensor, cp: CPMesh, mode: Mode, call: Call
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """q, k, v of a call of latent attention, and the call. If latents travel, they and their rotary part are k and v;
    otherwise these are the heads that this rank makes of its own."""
    check_dimensions(q, latent, rope)
    q, latent, rope, *of_latents = cast_for_autocast(q, latent, rope, *call.of_latents)
    check_latents(call.name, q, latent, rope, *of_latents, all_keys=mode.kv_exchange == "replicated")
    in_groups = mode.groups > 1 and cp.ulysses.size > 1
    if mode.latents and (in_groups or mode.kv_exchange == "replicated"):
        what = f"head_groups={mode.head_groups}" if in_groups else "kv_exchange='replicated'"
        raise ValueError(
            f"{call.name}: latents=True with {what}. Latents have no heads that could be exchanged one group after the "
            "other, and on ranks that have all keys nothing travels. Leave out one of them"
        )
    heads, rotary = int(q.shape[1]), (int(rope.shape[1]), int(rope.shape[3]))
    travel = mode.latents
    if travel is None:
        sizes = int(latent.shape[3]), rotary, len(of_latents[0]) // heads + rotary[1]
        travel = call.selected is not None or (not in_groups and _latents_travel(heads, cp.ulysses.size, *sizes))
    if travel and (cp.size > 1 or call.selected is not None) and mode.kv_exchange != "replicated":
        return q, latent, rope, call
    k, v = expand(latent, rope, heads, q.shape[3], *of_latents)
    return q, k, v, replace(call, weight=None, bias=None)


@torch.compiler.disable(
    reason="FlexAttention runs in tiles in this mode, and its functions cannot be part of a compiled graph. Compile "
    'without fullgraph=True, or use kv_exchange="all_gather" or ulysses_degree=None'
)
def _outside_the_graph(
    q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call, core: AttentionBackend, exchanged: bool
) -> Any:
    selected, call = core.select_backend(q, cp, mode, call)
    return attend(q, k, v, cp, mode, call, selected, exchanged=exchanged)


def cp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: CPMesh,
    mode: Mode,
    call: Call,
    module: nn.Module,
    counted: Tensor | None = None,
) -> Tensor:
    """Attention of the local shards ``[B, H, S, D]`` of one cp rank, which ``module`` calls. ``counted [B, S/n]`` is
    False where this rank holds padding of which the documents of the call say nothing."""
    keeps = mode.max_logits and torch.is_grad_enabled()
    call = replace(call, max_logits=True) if keeps else call  # (most do not, and a copy takes a while to trace)
    found = attend(q, k, v, cp, mode, call, TileEngine())
    if keeps:
        max_logits.keep(module, found[1], cp, mode.layout, call.documents, counted)
    out: Tensor = found[0] if keeps else found
    return out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | CPMesh | None = None,
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
    return_max_logits: bool = False,
    head_groups: int | str = 1,
    exchange_stages: int | str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
    exchange_dtype: torch.dtype | None = None,
    slices: Any = None,
    selected: Tensor | None = None,
    block: int = 1,
    entries: Entries | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Context-parallel scaled dot-product attention of this rank's share of the sequence.

    Args:
        q: local queries ``[B, H, S/n, D]``.
        k: local keys ``[B, Hkv, S/n, D]``; in cross-attention (no is_causal, window or documents) they may have
            another length. With ``kv_exchange="replicated"`` all keys, the same on every rank.
        v: local values ``[B, Hkv, S/n, Dv]``.
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``) of n ranks. None: inside a module with a
            ``ContextParallel`` style, attention over the mesh and with the settings of that style; elsewhere attention
            on one device. Only is_causal, scale, enable_gqa, attn_mask, dropout_p, selected and block may be given
            then.
        is_causal: True if a query sees no key after its own *global* position.
        scale: the factor of the logits; default ``D ** -0.5``.
        enable_gqa: allow H to be a multiple of Hkv, as in ``F.scaled_dot_product_attention``.
        ulysses_degree: the number of ranks that trade sequence for heads; ``None``: all ranks of the mesh.
        kv_exchange: ``"all_gather"``, ``"ring"``, ``"double_ring"`` (a ring inside each host and one between
            hosts, which are those of ``LOCAL_WORLD_SIZE``; ``"double_ring_4"``: 4 adjacent ring ranks to a host) or
            ``"needed"`` (only the rows that queries see, for documents and windows), over the remaining ranks; or
            ``"replicated"``: every rank has all keys and values (cross-attention to a text), nothing travels, and each
            rank's gradient of them is its share of a sum.
        layout: which positions the ranks hold: ``"contiguous"``, ``"head_tail"``, ``"per_document"`` (each
            document head-tail), ``"balanced"`` (chunks dealt by their cost) or ``"auto"`` (the cheapest of all). The
            last three need documents.
        load_balance: head-tail exchange of queries on contiguous data (causal only; otherwise
            nothing is unbalanced and nothing is exchanged).
        attn_mask: bool (True is visible) or added to the logits, broadcastable to ``[B, H, S, S]`` over
            *global* positions; its query dimension may be this rank's own, at a Ulysses degree of 1. No gradient for
            it. A mask that is exactly causal is treated as ``is_causal`` (checked once per tensor).
        window: ``(left, right)``: the most positions that a query sees before and after its own;
            None (or -1): no bound.
        documents: cumulative lengths ``[0, ..., S]`` of documents packed into the sequence, global, on
            the CPU (a list or tensor, or one per batch row): only positions of one document see each
            other. They may have any length and begin anywhere. None: those of the enclosing ``handler.documents``
            block, if there is one and there are as many keys as queries; where these are another sequence, pass
            ``[0, S]`` and an ``attn_mask``, since documents say nothing about it.
        dropout_p: probability that a weight is dropped (never the same pairs on two ranks, the same ones in a
            recompute). Only where plain SDPA would compute in plain math, as on the CPU; the seed comes from
            the default CPU generator.
        return_lse: also return the log-sum-exp of the scaled logits (and of ``sinks``, if there are any).
        return_max_logits: also return the largest logit of each query head over the queries and keys of all ranks, for
            QK-clip: the largest of the visible pairs, after ``scale``, ``softcap`` and an added mask, without sinks.
            Queries that are padding do not count, if the documents come from a handler's batch or block. The forward
            runs on a kernel that returns it (docs/guide/max_logits.md has the cost), and makes one small communication.
            In compiled code it breaks the graph.
        head_groups: exchange heads (``ulysses_degree`` > 1) in this many groups. The next group travels while attention
            to one is computed, in backward too. Each rank's heads must split into them. ``"auto"``: chosen by heads and
            tokens (docs/measured/planner.md), and logged.
        exchange_stages: the number of stages in which keys and values travel with ``kv_exchange="needed"`` or
            ``"all_gather"``; the first tiles run while the rows of later stages are on their way. ``"auto"``: chosen
            for each batch by the rows that travel (docs/measured/planner.md), and logged; an all-gather stays whole,
            except on gloo.
        sinks: a learned logit per query head ``[H]``, of all heads, which takes weight in the softmax of every row and
            gives no value (attention sinks, as in gpt-oss). Each rank returns the gradient through its own rows and
            heads: reduce it over the cp ranks like that of any replicated parameter.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before masks and the softmax (as in Gemma 2). Plain
            math computes that on the CPU and on NPUs, FlexAttention on CUDA.
        exchange_dtype: ``torch.bfloat16``: fp32 gradients of keys and values (and fp32 keys and values) travel in
            bfloat16 between the ranks that Ulysses leaves, in half of the bytes. Every rank adds in fp32; each hop of a
            ring rounds the sum once (docs/measured/communication.md has the errors). ``torch.float32`` does the same
            with fp64. None: nothing is rounded.
        slices: the pairs that are visible, as ``(q_range, k_range, kind)`` over global positions, see
            :func:`mask_of_slices`. Every other option hides more. In compiled code they break the graph.
        selected: the only keys that each query sees, as global positions ``[B, 1, S/n, k]``, or ``[B, Hkv, S/n, k]``
            for each key head, int32 or int64, as :func:`select_keys` returns them; -1 is no key. A query lists a key
            once. Every other option hides more, so a listed key of the future or of another document is not seen. With
            Ulysses all ranks of a group need the selections of the group: 4 k bytes of a token travel beside its heads.
            ``load_balance`` exchanges no queries then, since every query sees equally many keys.
        block: ``selected`` lists blocks of this many adjacent keys: block i has the keys from ``block * i`` on.
        entries: pooled keys and values of the whole sequence (:class:`Entries`), to which queries attend under the same
            softmax as to tokens, with sinks once. All other options are about tokens. All ranks form one ring then,
            whatever ulysses_degree is. Documents, softcap, slices, dropout, selected tokens and return_lse raise then.

    Returns:
        This rank's output ``[B, H, S/n, Dv]``. With ``return_lse`` a tuple with the log-sum-exp ``[B, H, S/n]`` in fp32
        (fp64 for fp64 inputs); it has a gradient with softcap only, and is -inf for queries that see nothing. With
        ``return_max_logits`` a tuple that ends with the largest logits ``[H]`` in that dtype, the same on every rank,
        without a gradient.

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.
        NotImplementedError: for gradients of masks, dropout where a fused kernel would draw random numbers, and options
            that selected keys or entries do not take.

    Example::

        >>> q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))  # this rank's half of 16 positions
        >>> attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, kv_exchange="ring").shape
        torch.Size([1, 4, 8, 16])

    Source: DeepSpeed Ulysses (arXiv 2309.14509), Ring Attention (2310.01889), USP (2405.07719).
    """
    call = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "dropout_p": dropout_p}
    call |= {"enable_gqa": enable_gqa, "selected": selected, "block": block}
    of_ranks = {
        "ulysses_degree": ulysses_degree,
        "kv_exchange": kv_exchange,
        "layout": layout,
        "load_balance": load_balance,
        "window": window,
        "documents": documents,
        "return_lse": return_lse,
        "return_max_logits": return_max_logits,
        "head_groups": head_groups,
        "exchange_stages": exchange_stages,
        "sinks": sinks,
        "softcap": softcap,
        "exchange_dtype": exchange_dtype,
        "slices": slices,
        "entries": entries,
    }
    return _function(attention, (q, k, v), mesh, call, of_ranks)


def latent_attention(
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mesh: DeviceMesh | CPMesh | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    ulysses_degree: int | None = 1,
    kv_exchange: str = "all_gather",
    layout: str = "contiguous",
    load_balance: bool = False,
    attn_mask: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logits: bool = False,
    head_groups: int | str = 1,
    exchange_stages: int | str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
    exchange_dtype: torch.dtype | None = None,
    latents: bool | None = None,
    selected: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Multi-head latent attention (DeepSeek V2), in which latents travel and not the heads that are made of them.

    The rows of ``weight`` that belong to head h make its key and value of a token's latent: first the key's Dn numbers
    without positions, then the value's Dv. The rotary part is the end of the key::

        key, value = F.linear(latent, weight, bias).unflatten(2, (H, Dn + Dv)).split([Dn, Dv], -1)
        attention(q, cat([key, rope]), value)

    Each rank expands what has arrived, block by block, and again in backward, so that no more than one share of the
    sequence is expanded at a time. For DeepSeek V3, 576 numbers of a token travel in place of 40,960. Its price is that
    every rank expands every token that its queries see.

    Args:
        q: local queries ``[B, H, S/n, Dn + Dr]``, the rotary part last.
        latent: local latents ``[B, S/n, R]``, after their norm.
        rope: the rotary part of local keys, after the rotation: ``[B, 1, S/n, Dr]`` for all heads, or ``[B, H, S/n,
            Dr]``.
        weight: ``[H * (Dn + Dv), R]``, for the heads of q (with tensor parallelism those of this rank). Its gradient is
            this rank's share of a sum over the cp ranks, like that of any other parameter.
        bias: ``[H * (Dn + Dv)]``, added to what the weight makes; None: there is none.
        mesh: the cp mesh of n ranks. None: inside a module with a ``ContextParallel`` style, attention over the mesh
            and with the settings of that style; elsewhere attention on one device. Only is_causal, scale, attn_mask,
            dropout_p and selected may be given then. (In compiled code heads travel then.)
        latents: True: latents travel. False: heads travel. None: those that are fewer numbers for a token. Heads can be
            fewer with Ulysses, which gives a rank ``H / ulysses_degree`` of them. The choice is logged.
        selected: as in :func:`attention`, ``[B, 1, S/n, k]``. Latents travel then by default, and nothing is
            expanded: the weight is applied to queries and outputs, with one key head of R + Dr numbers (the absorbed
            form). Queries and outputs of a layer are kept for backward in that width.

    Dn is the width of q without that of rope, and Dv is what is left of the rows of ``weight`` for a head: check the
    width of the output where sizes may be wrong. All other arguments (all of :func:`attention` but ``enable_gqa`` and
    ``slices``), results and errors are those of :func:`attention`. (``head_groups`` > 1 needs heads.) With tensor
    parallelism done by hand, the gradients of latent and rope are shares of sums over the heads of all tensor-parallel
    ranks.

    Example::

        >>> q, latent, rope = torch.randn(1, 4, 8, 24), torch.randn(1, 8, 32), torch.randn(1, 1, 8, 8)
        >>> weight = torch.randn(4 * (16 + 16), 32)
        >>> latent_attention(q, latent, rope, weight, mesh=mesh, is_causal=True, kv_exchange="ring").shape
        torch.Size([1, 4, 8, 16])

    Source: DeepSeek-V2 (arXiv 2405.04434); latents round a ring as in pith-train.
    """
    call = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "dropout_p": dropout_p}
    call |= {"bias": bias, "selected": selected}
    of_ranks = {
        "ulysses_degree": ulysses_degree,
        "kv_exchange": kv_exchange,
        "layout": layout,
        "load_balance": load_balance,
        "window": window,
        "documents": documents,
        "return_lse": return_lse,
        "return_max_logits": return_max_logits,
        "head_groups": head_groups,
        "exchange_stages": exchange_stages,
        "sinks": sinks,
        "softcap": softcap,
        "exchange_dtype": exchange_dtype,
        "latents": latents,
    }
    return _function(latent_attention, (q, latent, rope, weight), mesh, call, of_ranks)


_WITHOUT_MESH = {
    "ulysses_degree": 1,
    "kv_exchange": "all_gather",
    "layout": "contiguous",
    "load_balance": False,
    "return_lse": False,
    "return_max_logits": False,
    "head_groups": 1,
    "exchange_stages": "auto",
}
"""Defaults of the arguments that say how ranks work together, where that is not None."""


def refuse_without_mesh(caller: str, **given: Any) -> None:
    """Raise ``ValueError`` for arguments that need a mesh and are not their defaults."""
    defaults = ((name, x, _WITHOUT_MESH.get(name)) for name, x in given.items())
    if named := [f"{name}={x!r}" for name, x, default in defaults if x is not default and x != default]:
        raise ValueError(
            f"{caller}: {', '.join(named)} without a mesh. Inside a styled module its ContextParallel says how "
            "attention runs, and documents come with the batch. Pass mesh=, or give these to the style"
        )


def _function(
    function: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    mesh: DeviceMesh | CPMesh | None,
    call: dict[str, Any],
    of_ranks: dict[str, Any],
) -> Any:
    """The functions of this module: attention on a mesh, as a styled module that is running says, or on one device.

    Args:
        tensors: q, k, v, or q, the latents, their rotary part and their weight.
        call: the arguments that can be given without a mesh, under their names.
        of_ranks: all others.
    """
    for name in ("return_lse", "return_max_logits"):
        check_type(name, of_ranks[name], bool, "It says if a further result is returned. Pass True or False")
    if mesh is None:
        refuse_without_mesh(function.__name__, **of_ranks)
        if has_torch_function(tensors):
            return handle_torch_function(function, tensors, *tensors, **call)
        mesh = cp_mesh.alone()
    q, k, v, *weight = tensors
    call["mask"] = call.pop("attn_mask")
    if weight:
        check_latent_forms(k, v)
        k = k.unsqueeze(1)
        call |= {"name": function.__name__, "weight": weight[0]}
    whole = of_ranks.get("slices") is None and not of_ranks["return_max_logits"]
    return (_on_mesh if whole else _outside_of_graphs)(q, k, v, mesh, call, **of_ranks)


@torch.compiler.disable(
    reason="Attention under slices runs in tiles with a function of pairs, and a maximum of logits leaves out what the "
    "host knows to be padding. Neither can be part of a compiled graph. Compile without fullgraph=True"
)
def _outside_of_graphs(*given: Any, **of_ranks: Any) -> Any:
    return _on_mesh(*given, **of_ranks)


def _on_mesh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | CPMesh,
    call: dict[str, Any],
    *,
    ulysses_degree: int | None,
    documents: Any,
    return_lse: bool,
    return_max_logits: bool,
    sinks: Tensor | None,
    softcap: float | None,
    slices: Any = None,
    entries: Entries | None = None,
    **settings: Any,
) -> Any:
    """Attention with documents, softcap, slices and entries as users give them. ``call``: other fields of a
    :class:`Call`; ``settings``: those of a :class:`Mode`."""
    mode = Mode(**settings)
    cp = mesh if isinstance(mesh, CPMesh) else cp_mesh.view(mesh, ulysses_degree)
    if not isinstance(mesh, CPMesh):
        cp.batch.refuse_left("attention", cp)
    check_degree(mode, cp)
    score: scores.Score | None = None if softcap is None else scores.softcap(softcap)
    table = documents_table(documents)
    readable = isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4  # others are refused below
    if slices is not None and readable:
        keys = k.shape[2] * (1 if mode.kv_exchange == "replicated" else cp.size)
        score = score_of_slices(slices, (q.shape[2] * cp.size, keys), q, score)
    own = documents is None and readable and q.shape[2] == k.shape[2] and mode.kv_exchange != "replicated"
    if own and not isinstance(mesh, CPMesh):  # attention of a sequence to itself, of which a block says the documents
        table = cp.batch.documents_of_call("attention")
    if entries is not None and table is not None:
        raise NotImplementedError(
            "attention: entries with documents are not supported. Entries of one document would be seen by the next "
            "one. Pack no documents"
        )
    call |= {"sinks": sinks, "max_logits": return_max_logits, "entries": entries}
    made = Call(documents=table, score=score, **call)
    found = attend(q, k, v, cp, mode, made, TileEngine(return_lse))
    if made.max_logits:
        found = *found[:-1], max_logits.of_all_ranks(found[-1], cp, mode.layout, table)
    return found
