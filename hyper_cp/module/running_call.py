"""A running call of a styled module, and the attention that its module calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from .._torch.modules import is_running
from ..mesh.cp_mesh import CPMesh
from ..mesh.share_lengths import FEW
from ..ops import max_logits
from ..ops.attention import attend
from ..ops.config import Mode
from ..ops.engine import TileEngine
from ..ops.exchange.ulysses import Ulysses
from ..ops.selection import select
from ..schedule.layout import by_documents
from .attention_calls import AttentionRequest
from .dtensor import Outputs
from .latents import LatentLayer
from .mesh_binding import Binding, StyledMesh


@dataclass
class ExchangedInputs:
    """Tensors of a module after the Ulysses all-to-all at its entrance."""

    cp: CPMesh
    length: int
    """Positions of the sequence inside the module."""
    heads: int
    """Query heads inside the module."""
    ndim: int
    tensors: tuple[Tensor, ...] = ()
    """q, k, v as the module gets them, where their shapes do not tell sequence from heads."""


@dataclass
class RunningCall:
    """One running call of a styled module: the target of its attention call, and what its end must undo. A
    ``context_parallel`` block is one too, without a module."""

    binding: Binding
    module: nn.Module | None
    mesh: StyledMesh
    documents: Tensor | None = None
    exchanged: ExchangedInputs | None = None
    """Set if the Ulysses all-to-all was done at the entrance of the module; else the attention call does it."""
    must_route: bool = False
    """True if a local attention kernel would give wrong results."""
    outputs: Outputs | None = None
    """The DTensor placement with which outputs leave the module (None: local tensors)."""
    stop: Callable[[], None] | None = None
    """Ends the routing of attention calls, if it has begun."""
    routed: bool = False
    """True once an attention call was routed. (No count: compiled code would have a guard on it.)"""
    latents: LatentLayer | None = None
    """The layer of the module that expands latents, if the style names one."""
    adapt: Callable[[AttentionRequest], AttentionRequest] | None = None
    """Changes the attention calls of the module, if an integration has set it."""
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    shares: list[tuple[int, int]] = field(default_factory=list)
    """Rows and positions of tensors that may hold this rank's share of the sequence."""
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    """Attention calls so far, by rows and positions of their queries."""

    @property
    def engine_only(self) -> bool:
        """True if the call has documents or a window, or is to keep its largest logits, which other attention kernels
        would ignore."""
        mode = self.binding.style.mode
        return self.documents is not None or mode.window is not None or mode.max_logits

    def alive(self) -> bool:
        """True if the module's call is still on the stack of this thread, or the block has not ended."""
        return self.module is None or is_compiling() or is_running(self.module)

    def leave(self) -> None:
        """Undo what the call has begun."""
        if self.stop is not None:
            self.stop()


def routed_attention(call: RunningCall, request: AttentionRequest) -> Any:
    """Attention over the whole sequence, as a module's attention call requests it."""
    binding, exchanged = call.binding, call.exchanged
    request = request if call.adapt is None else call.adapt(request)
    _check_request(call, request)
    options = replace(
        request.call,
        name=binding.name,
        documents=_documents(call, request),
        max_logits=binding.style.mode.max_logits and torch.is_grad_enabled(),
    )
    mode, (q, k, v), outputs = _mode(call, request), (request.query, request.key, request.value), None
    if request.selects is not None:  # all ranks select together, whatever heads attention exchanges
        return select(q, k, cp=call.mesh.views[0], mode=mode, call=options, **request.selects)
    if exchanged is None:
        _warn_of_windows(call, q)
        _warn_of_keys(call, request)
        (q, k, v), outputs = binding.local([q, k, v], 2, 1, call.mesh)
        kv = q if options.weight is not None else k  # latents become as many heads as queries have
        sizes = (q.shape[1], kv.shape[1], q.shape[2], len(q)) if q.ndim == 4 and k.ndim == 4 else (1, 1, 1, 1)
        cp = call.mesh.view(*binding.record(*sizes))
    else:
        cp = exchanged.cp
    core: Any = TileEngine()
    keeps = options.max_logits
    if request.core is not None:
        core, options = request.core.select_backend(q, cp, mode, options)
    if call.latents is not None and isinstance(core, TileEngine):
        k, v, options = call.latents.in_place_of(cp, (q, k, v), options, mode)
    out = attend(q, k, v, cp, mode, options, core, exchanged=exchanged is not None)
    if keeps:
        _keep(call, out[-1], cp, options.documents)
        out = out if request.core is not None else out[0]
    return outputs.wrap(out) if outputs is not None and isinstance(out, Tensor) else out


def _keep(call: RunningCall, rows: Tensor, cp: CPMesh, documents: Tensor | None) -> None:
    """Let the module keep its largest logits, given those of the queries that it attends ``[B, H, S]``."""
    layout = call.binding.style.mode.layout
    if call.exchanged is not None:
        rows = Ulysses(cp, layout, documents=documents).to_sequence(rows)
    if call.module is not None:
        max_logits.keep(call.module, rows, cp, layout, documents)


def _warn_of_windows(call: RunningCall, q: Tensor) -> None:
    """:func:`warn_of_windows` for an attention call, also of one call after another."""
    if is_compiling() or call.binding.warned or q.ndim != 4 or not call.mesh.parallel:
        return
    rows, length = q.shape[0], q.shape[2]
    call.calls[rows, length] = call.calls.get((rows, length), 0) + 1
    shares = [*call.shares, call.mesh.views[0].batch.rows_and_share]
    calls = 1 if call.module is None else call.calls[rows, length]
    in_block = call.module is None  # whose buffers say which dimension is the sequence
    warn_of_windows(call.binding, f"{call.binding.name} attends to", (rows, length), shares, calls, in_block)


class MayWarn(Protocol):
    """A style on a module, or the hooks of one."""

    warned: bool
    """True once a call has warned of windows of the sequence."""


def shares_in(tensors: Iterable[Any], seq_dim: int = 1) -> list[tuple[int, int]]:
    """Rows and positions of hidden states among the arguments of a module, with the sequence in dimension 0 or 1."""
    return [(x.shape[1 - seq_dim], x.shape[seq_dim]) for x in tensors if isinstance(x, Tensor) and x.ndim == 3]


def warn_of_windows(
    owner: MayWarn,
    runs_over: str,
    sizes: tuple[int, int],
    shares: list[tuple[int, int]],
    calls: int = 1,
    in_block: bool = False,
) -> None:
    """Warn, once for an owner, of sequences that are parts of this rank's share, as further batch rows or one call
    after another; or of which each position of the share is a batch row.

    Args:
        sizes: rows and positions of a call.
        shares: rows and positions of tensors that may hold this rank's share.
        calls: the calls of this size so far.
        in_block: the shares are those of buffers. (Those of arguments may have the sequence in another dimension.)
    """
    rows, length = sizes
    for batch, share in shares:
        again = 1 if rows > batch else calls
        windows = rows * length * again == batch * share and 0 < length < share and share % length == 0
        across = in_block and not windows and share > 1 and rows % share == 0 and rows * length == batch * share
        if (rows == batch * share > batch or across) and length != share:
            owner.warned = True
            warnings.warn(
                f"{runs_over} {rows} sequences of {length} positions, one or several for each of the {share} positions "
                f"in the {batch} rows that this rank holds (a frame of a video, rows of a table, say). Each is joined "
                "with the one of every other rank in its place. Leave the module out of the plan (or the block) if "
                "these sequences are not split; else ignore this warning",
                stacklevel=5,
            )
            return
        if windows:
            owner.warned = True
            warnings.warn(
                f"{runs_over} sequences of {length} positions, {share // length} for each of the "
                f"{batch} rows of {share} positions that this rank holds. Each is joined with the same one "
                "of every other rank, so windows, frames or blocks of the split sequence would see others. If they lie "
                "within a rank's share, leave the module out of the plan (or the block); if each rank holds a part of "
                "all of them, ignore this warning",
                stacklevel=5,
            )
            return


def _warn_of_keys(call: RunningCall, request: AttentionRequest) -> None:
    """Warn, once for a style on a module, of keys that are hardly those that its style describes."""
    style, q, k = call.binding.style, request.query, request.key
    if is_compiling() or call.binding.warned or q.ndim != 4 or k.ndim != 4 or not call.mesh.parallel:
        return
    batch, queries, keys = call.mesh.views[0].batch, q.shape[2], k.shape[2]
    layout, layouts = style.mode.layout, batch.lengths.layouts_of(keys)
    more, known = keys - queries, style.cross_attention or request.masked
    in_block = batch.in_block or bool(batch.of_buffers)
    replicated = style.mode.kv_exchange == "replicated"
    if replicated and keys in batch.lengths.made:
        text = _SHARE_OF_MEMORY
    elif replicated:
        return
    elif style.cross_attention and keys not in batch.lengths.made and more != queries and more in batch.lengths.made:
        text = _ADDED_KEYS
    elif style.cross_attention and request.masked and layouts - {layout}:
        text = _OTHER_LAYOUT
    elif not known and (0 < more <= min(FEW, queries - 1) or (more > 0 and in_block and keys not in batch.lengths)):
        text = _OWN_KEYS
    else:
        return
    call.binding.warned = True
    given = {"queries": queries, "keys": keys, "layout": layout, "split": " and ".join(map(repr, sorted(layouts)))}
    warnings.warn(text.format(name=call.binding.name, ranks=call.mesh.views[0].size, **given), stacklevel=4)


_OWN_KEYS = (
    "{name} attends from {queries} queries to {keys} keys on each rank. Keys that a module adds to those of its "
    "sequence (null, prefix or register keys) would count once for each of the {ranks} ranks. Add them to the whole "
    "sequence, use ulysses_degree=None with q, k, v as inputs, or, if the keys are another sequence, give the module a "
    "style with cross_attention=True"
)
_ADDED_KEYS = (
    "{name} attends from {queries} queries to {keys} keys on each rank, as many as a share of a batch and the queries "
    "together. Queries that are keys, too (latents of a resampler), would count once for each of the {ranks} ranks. "
    "Attend to the share in one call and to the queries in another, or gather the sequence (handler.combine) and leave "
    "the module out of the plan. If the keys are a split sequence of this length, ignore this warning"
)
_SHARE_OF_MEMORY = (
    '{name} attends with kv_exchange="replicated" to {keys} keys, as many as shares have that handlers of this mesh '
    "have split. A memory that is as long as the sequence is split with it, and each rank would take its share for all "
    "of it. Leave it whole: get_batch_on_this_cp_rank(..., seq_dims={{'its name': None}}). If every rank has all of "
    "these keys, ignore this warning"
)
_OTHER_LAYOUT = (
    "{name} attends to {keys} keys on each rank with a mask and layout={layout!r}. Handlers of this mesh have split "
    "shares of that length as {split}. If the keys are among these, the mask hides other keys than it says. Split the "
    "sequence of the keys in the layout of this style; if it was, ignore this warning"
)


def _mode(call: RunningCall, request: AttentionRequest) -> Mode:
    """The settings of the style, with the window that the call requests."""
    mode = call.binding.style.mode
    if request.window is None:
        return mode
    if mode.window is not None:
        raise ValueError(
            f"{call.binding.name} calls attention with window={request.window}, but its style has "
            f"window={mode.window}. Only one of them can apply. Drop the other"
        )
    return replace(mode, window=request.window)


def _documents(call: RunningCall, request: AttentionRequest) -> Tensor | None:
    """The documents that place the queries of an attention call, and hide keys if these are the same sequence.

    Documents describe queries. Keys of another sequence may have the same length, so a module that attends to them has
    cross_attention=True in its style.
    """
    style, mesh = call.binding.style, call.mesh
    found = call.documents if request.call.documents is None else request.call.documents
    q, k = request.query, request.key
    if q.ndim != 4 or k.ndim != 4:  # refused below
        return found
    replicated = style.mode.kv_exchange == "replicated"
    equal = q.shape[2] * (mesh.views[0].size if replicated else 1) == k.shape[2]
    inside = 1 if call.exchanged is None else call.exchanged.cp.ulysses.size
    cross, placed, styled = style.cross_attention, by_documents(style.mode.layout), call.module is not None
    hiding, other_keys = found is not None, not cross and not equal and styled
    refused = (
        (other_keys and not replicated and mesh.parallel and q.shape[2] == inside < k.shape[2], _DECODING),
        (other_keys and hiding and request.masked, _OTHER_KEYS),
        (cross and (request.call.is_causal or request.window is not None), _CAUSAL_CROSS_ATTENTION),
        (cross and hiding and not request.masked, _CROSS_ATTENTION_WITHOUT_MASK),
        (cross and hiding and placed and equal, _EQUAL_CROSS_ATTENTION),
    )
    for applies, text in refused:
        if applies:
            lengths = {"queries": q.shape[2], "keys": k.shape[2], "local_keys": k.shape[2] // inside}
            raise ValueError(text.format(name=call.binding.name, layout=style.mode.layout, **lengths))
    return found if placed or not cross else None


_DECODING = (
    "{name} attends from one query on each rank to {local_keys} keys on each. That is how a model decodes with a KV "
    "cache: the new token is no share of a sequence, and the cache holds shares, so the result would be wrong. "
    "Generate on a mesh of one rank (context_parallel_mesh), or, if keys are another sequence, give the module a style "
    "with cross_attention=True"
)
_OTHER_KEYS = (
    "{name} attends to keys of another length ({keys} for {queries} queries on this rank) in a batch with documents or "
    "padding. These describe queries, and in a batch in which both lengths are equal they would hide keys. Give this "
    "module a style of its own with cross_attention=True"
)
_CAUSAL_CROSS_ATTENTION = (
    "{name} calls attention with is_causal=True or a window, and its style has cross_attention=True. Keys of another "
    "sequence come neither before nor after a query. Leave out one of them"
)
_CROSS_ATTENTION_WITHOUT_MASK = (
    "{name} calls attention without attn_mask (cross_attention=True) in a batch with documents or padding. These "
    "describe queries, so nothing says which keys are padding. Pass a mask over the global positions of the keys, "
    "[B, 1, 1, Skv], all True if there is no padding"
)
_EQUAL_CROSS_ATTENTION = (
    "{name} has as many keys as queries ({keys}) with cross_attention=True and layout={layout!r}, which places queries "
    'by documents. These would hide keys as well. Use layout="contiguous" or "head_tail", or add a key that the mask '
    "hides"
)


def _check_request(call: RunningCall, request: AttentionRequest) -> None:
    name, q, exchanged = call.binding.name, request.query, call.exchanged
    checkpoint.refuse_without_gradients(name, "attention", call.grad_enabled)
    if request.call.documents is not None and call.documents is not None:
        raise ValueError(
            f"{name} passes packed documents, and so does the caller. A call has one table of documents. Leave one out"
        )
    if exchanged is None or q.ndim != 4 or request.selects is not None:
        return
    if request.call.weight is not None:
        raise ValueError(
            f"{name} calls latent_attention, but its style exchanges heads at the entrance of the module "
            f"(qkv_indices={call.binding.style.qkv_indices}), where latents have none. The call exchanges what it "
            "must. Set qkv_indices=None"
        )
    if tuple(q.shape[1:3]) != (exchanged.heads, exchanged.length) or _swapped(call, exchanged, request):
        raise ValueError(
            f"{name} calls attention with a query of shape {tuple(q.shape)}. After the exchange of "
            f"sequence and heads it should be [batch, {exchanged.heads} heads, {exchanged.length} positions, "
            "head size]. Check seq_dim and head_dim of ContextParallel: [B, S, H, D] inputs have 1 and 2, "
            "[B, H, S, D] inputs 2 and 1"
        )


def _swapped(call: RunningCall, exchanged: ExchangedInputs, request: AttentionRequest) -> bool:
    """True if the style's sequence dimension is where attention has its heads. The strides show it, of tensors that
    reach attention as the module got them, or as views."""
    style = call.binding.style
    for x in (request.query, request.key, request.value):
        for y in exchanged.tensors:
            same = x is y or (x._base is not None and x._base is (y if y._base is None else y._base))
            strides = y.stride(style.seq_dim), y.stride(style.head_dim)
            if same and x.ndim == 4 and (x.stride(1), x.stride(2)) == strides and strides[0] != strides[1]:
                return True
    return False
