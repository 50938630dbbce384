"""context_parallel: a block in which an unmodified model runs on its share of the sequence."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch import checkpoint, flex_patch
from ._torch.compiling import is_compiling
from ._torch.modes import past_modes
from ._torch.modules import count_compilations, running_modules
from .data.sharding import checked_dim, resolve_layout
from .handler import ContextParallelHandler
from .mesh import batch_state
from .mesh.arguments import check_type
from .module import attention_calls
from .module.dispatch_mode import BACKWARD, DispatchMode, current_call, differentiate, dispatching, running_alone
from .module.guards import MIXING_CALLS, refuse_mixing_call, refuse_running_mixer
from .module.mesh_binding import Binding
from .module.mixers.calls import RunningMixer, route_loaded, running_mixers
from .module.running_call import RunningCall
from .module.thread_stack import ThreadStack
from .ops.writes import writes
from .style import ContextParallel


class context_parallel:
    """A block in which ``buffers`` are this rank's shares and attention is context-parallel.

    Use it for models that you do not change, whose attention is ``F.scaled_dot_product_attention`` (however imported)::

        with context_parallel(mesh, buffers=[tokens, labels, model.freqs], buffer_seq_dims=[1, 1, 0],
                              no_restore_buffers={tokens, labels}):
            loss = ...   # model(tokens), on the local share
            loss.backward()

    Every such call (and every other call that a module under :class:`ContextParallel` may make) in the block and
    thread, forward and recomputed in backward, is attention over the whole sequence, except inside an inner block
    or a styled module, which have their own settings. So are recurrences and convolutions by functions that
    :class:`RecurrentContextParallel` knows. The library does not change positions that are not in a buffer: make them a
    buffer, or use ``handler.position_ids``.

    Args:
        mesh: the cp mesh of n ranks.
        buffers: tensors to shard in place along their sequence: within the block they have 1/n of their length. They
            must not require gradients. All ranks must hold the same values.
        buffer_seq_dims: the sequence dimension of each.
        no_restore_buffers: the buffers that remain sharded after the block.
        ulysses_degree, kv_exchange, layout, load_balance, window, head_groups, exchange_stages, latents,
            exchange_dtype, allow: as in :class:`ContextParallel`, but the default is that of PyTorch's context manager:
            head-tail layout, no Ulysses, all-gather of keys and values.

    Yields:
        A :class:`ContextParallelHandler` of the mesh and layout: ``combine`` for outputs, ``documents``,
        ``position_ids``, ``mean_loss``.

    Note:
        A buffer that is to be restored keeps its full storage. If nobody has written it, it comes back as it was,
        without communication. If it was written in place, restoring it costs one all-gather at the end of the block
        (all ranks must write it, in a way that PyTorch counts: collectives of ``torch.distributed``, NumPy and
        ``.data`` are not). Buffers that share memory (``ids[:, :-1]`` and ``ids[:, 1:]``) have separate shares
        inside the block, and come back together, each where it was written (two all-gathers). If the block ends by an
        exception, all buffers are as they were before it, so that no rank waits for another. Buffers in
        ``no_restore_buffers`` keep nothing but the share, after an exception, too, and another block refuses them.

        Backward may be inside or outside the block. Outside, what has saved a buffer for backward raises (run backward
        inside): a model under ``torch.compile``, and ``mean_loss(head=)`` or ``log_probs`` of labels that are a buffer.
        So does activation checkpointing (its recompute would be outside).

    Raises:
        ValueError, TypeError: for buffers, dimensions or lengths that do not fit, before anything is changed.
        NotImplementedError: for attention in the block that cannot be routed.
        RuntimeError: for functions that mix positions (``conv1d``, LSTMs, batch statistics, pools) of as many positions
            as a buffer has in the block, and for modules that are known to run along the sequence by code of their own
            (RWKV, xLSTM), unless ``allow`` names their module.

    Example::

        >>> tokens = torch.arange(8)[None]
        >>> with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        ...     tokens.shape
        torch.Size([1, 4])

    Source: the interface of ``torch.distributed.tensor.experimental.context_parallel``.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
        ulysses_degree: int | str | None = 1,
        kv_exchange: str = "all_gather",
        layout: str = "head_tail",
        load_balance: bool = False,
        window: Sequence[int | None] | None = None,
        head_groups: int | str = 1,
        exchange_stages: int | str = "auto",
        latents: bool | None = None,
        exchange_dtype: torch.dtype | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        style = ContextParallel(
            2,
            1,
            ulysses_degree,
            None,
            (),
            load_balance,
            kv_exchange=kv_exchange,
            layout=layout,
            window=window,
            head_groups=head_groups,
            exchange_stages=exchange_stages,
            latents=latents,
            exchange_dtype=exchange_dtype,
            allow=allow,
        )
        self.handler = ContextParallelHandler(mesh, style)
        self.handler.style_of_model = None  # the style of this block is no model's: every step may make a block
        self._binding = Binding(style, mesh, "a model in context_parallel")
        flex_patch.install(dispatching)
        self._buffers = _listed("buffers", buffers)
        self._dims = _listed("buffer_seq_dims", buffer_seq_dims)
        self._keep = {id(x) for x in _listed("no_restore_buffers", no_restore_buffers)}
        self._entered: list[_Routing] = []
        if len(self._buffers) != len(self._dims):
            raise ValueError(
                f"{len(self._buffers)} buffers and {len(self._dims)} buffer_seq_dims are given. Each buffer has one "
                "sequence dimension. Pass equal numbers of both"
            )
        unknown = self._keep - {id(x) for x in self._buffers}
        if unknown:
            raise ValueError(
                f"{len(unknown)} of no_restore_buffers are not in buffers (the same tensor objects). They would not be "
                "sharded at all. Add them there, or leave them out"
            )

    def __enter__(self) -> ContextParallelHandler:
        self._check()
        outer = self.handler.cp.batch.of_buffers
        if outer and outer[-1][0] != self.handler.layout:
            raise ValueError(
                f"layout={self.handler.layout!r} inside a context_parallel block that has sharded its buffers as "
                f"{outer[-1][0]!r} on the same mesh. Attention would assign wrong positions to tokens. Use one layout"
            )
        sharded = [
            _Sharded(x, dim, self.handler, id(x) in self._keep)
            for x, dim in zip(self._buffers, self._dims, strict=True)
        ]
        memory = Counter(s.memory for s in sharded)
        for s in sharded:
            if s.whole is not None and (s.shares_memory or memory[s.memory] > 1):
                s.keep_before()
        routing = _Routing(self._binding, sharded)
        if self._binding.active.parallel and not is_compiling():
            counting = [s for s in sharded if _may_count(s.buffer, s.dim)]
            on_host = [s for s in counting if s.buffer.device.type == "cpu"]
            if len(counting) > len(on_host) and _Routing.reads_left > 0:
                on_host, _Routing.reads_left = counting, _Routing.reads_left - 1
            routing.packed = any(_counts_documents(s.buffer, s.dim) for s in on_host)
        for s in sharded:  # nothing fails from here on
            s.begin()
        for s in sharded:  # when all have begun: views of one tensor count their writes together
            s.versions = s.count_versions()
        routing.__enter__()
        self._entered.append(routing)
        if sharded:
            (share,) = routing.lengths if len(routing.lengths) == 1 else (0,)
            routing.outer, routing.entry = outer, (self.handler.layout, share)
            outer.append(routing.entry)
        return self.handler

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        routing = self._entered.pop()
        routing.__exit__(kind, error, trace)
        if routing.entry is not None:
            routing.outer.remove(routing.entry)
        written = [s for s in routing.sharded if s.whole is not None and s.count_versions() != s.versions]
        for s in routing.sharded:
            s.end(failed=kind is not None)
        if kind is None:
            _collect(written)

    def _check(self) -> None:
        seen: set[int] = set()
        for i, (x, dim) in enumerate(zip(self._buffers, self._dims, strict=True)):
            name = f"buffers[{i}]"
            check_type(name, x, Tensor, "Buffers are sharded in place. Pass the tensor itself")
            if x.requires_grad:
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} requires a gradient. A tensor in an autograd graph cannot be "
                    "sharded in place. Pass x.detach(), or shard it with handler.dispatch, which is differentiable"
                )
            if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
                raise TypeError(
                    f"{name} is a {type(x).__name__}. Only plain tensors can be sharded in place. Shard it with "
                    "handler.dispatch"
                )
            if x.is_inference():
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} was made under inference_mode. Writes to it are not counted. "
                    "Make it outside, or pass x.clone() made outside"
                )
            checked_dim(x, dim, f"buffer_seq_dims[{i}]", name)
            resolve_layout(self.handler, x.shape[dim], self.handler.cp.batch.documents, f"{name}.shape[{dim}]")
            if id(x) in seen or id(x) in _sharded_now:
                where = "twice in buffers" if id(x) in seen else "sharded by an enclosing block already"
                raise ValueError(f"{name} of shape {tuple(x.shape)} is {where}. It can be sharded once. Drop it")
            if _left_sharded.get(x) == _place(x):
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} is this rank's share already: an earlier block has left it "
                    "sharded (no_restore_buffers). Splitting it once more would leave the other tokens out. Leave it "
                    "out of no_restore_buffers of the earlier block, or pass the whole batch again"
                )
            seen.add(id(x))
        _check_tables(self._buffers, self._dims)


def _check_tables(buffers: list[Tensor], dims: list[int]) -> None:
    """Check numbers of positions that are longer than the tokens: they have no rows of a batch.

    ``ValueError`` for a table, a warning for numbers in floating point ``[1, S, ..]``, which may be features of another
    sequence. Where lengths differ, it waits for the device of whole numbers that have no rows.
    """
    each = list(zip(buffers, [dim % x.ndim for x, dim in zip(buffers, dims, strict=True)], strict=True))
    if len({x.shape[dim] for x, dim in each}) < 2:
        return
    tables = [_may_be_table(x, dim) for x, dim in each]
    # Tokens have rows. They may be those of two sequences.
    lengths = (x.shape[dim] for (x, dim), table in zip(each, tables, strict=True) if dim and not table)
    length = max(lengths, default=0)
    features = {x.shape[dim] for x, dim in each if dim and x.is_floating_point()}  # perhaps of a second sequence
    for i, ((x, dim), table) in enumerate(zip(each, tables, strict=True)):
        if not table or not x.shape[dim] > length > 0:
            continue
        part = ", ".join([*":" * dim, f":{length}"])
        pass_rows = (
            f"Each rank would get a part of the table that does not belong to its tokens. Pass the rows of the tokens, "
            f"table = x[{part}], as a view, and let the model read that tensor in place of x"
        )
        if (dim and x.is_floating_point()) or (_holds_integers(x) and x.shape[dim] in features):
            warnings.warn(
                f"buffers[{i}] of shape {tuple(x.shape)} has {x.shape[dim]} positions, and the tokens have {length}. "
                f"If it is a table of positions: {pass_rows}. If it is another sequence, ignore this warning",
                stacklevel=5,
            )
            continue
        raise ValueError(
            f"buffers[{i}] of shape {tuple(x.shape)} is a table of {x.shape[dim]} positions, and the tokens have "
            f"{length}. {pass_rows}"
        )


def _may_be_table(buffer: Tensor, dim: int) -> bool:
    """True for numbers of positions that have no rows of a batch; integers count 0, 1, 2 and so on."""
    if buffer.shape[:dim].numel() > 1:
        return False
    if not _holds_integers(buffer):
        return True
    counting = torch.arange(buffer.shape[dim], device=buffer.device)
    return buffer.numel() == len(counting) and bool((buffer.flatten() == counting).all())


def _holds_integers(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())


def _listed(argument: str, given: Any) -> list[Any]:
    """An argument that is None or holds several objects, as a list."""
    if isinstance(given, (Tensor, str)) or not isinstance(given, (Iterable, type(None))):
        raise TypeError(f"{argument} is a {type(given).__name__}. Each buffer has an entry. Pass a list")
    return list(given or ())


def _may_count(buffer: Tensor, dim: int) -> bool:
    """True if a buffer may hold positions."""
    return buffer.dtype in (torch.int32, torch.int64) and buffer.ndim <= 2 and buffer.shape[dim] > 1


def _counts_documents(buffer: Tensor, dim: int) -> bool:
    """True if a buffer counts 0, 1, 2 and so on, and returns to 0. Waits for the device that holds it."""
    at = buffer.detach().movedim(dim, -1)
    before, after = at[..., :-1], at[..., 1:]
    back, on = (after == 0) & (before > 0), after == before + 1
    return bool(back.any() & (back | on).all() & (at[..., 0] == 0).all())


_sharded_now: set[int] = set()
"""Buffers (by id: their blocks hold them) that are sharded at the moment, in any thread."""

_left_sharded: Any = WeakTensorKeyDictionary()
"""The places of buffers that blocks have left sharded. (Whole tensors may have been put into them since.)"""


def _place(x: Tensor) -> tuple[int, torch.Size]:
    return x.data_ptr(), x.shape


class _Sharded:
    """One buffer in a block."""

    def __init__(self, buffer: Tensor, dim: int, handler: ContextParallelHandler, keep_share: bool) -> None:
        self.buffer, self.dim, self.handler = buffer, dim % buffer.ndim, handler
        self.versions = (0, 0)
        # Also under inference_mode a normal tensor: it counts its versions.
        with torch.inference_mode(False), torch.no_grad():
            self.share = handler.dispatch(buffer.detach(), self.dim)
            # The old storage, unless the buffer is to give it up.
            self.whole = None if keep_share else buffer.detach()
        self.splits, self.rows = self.share.shape != buffer.shape, buffer.shape[: self.dim].numel()
        storage = buffer.untyped_storage()
        self.memory = buffer.device, storage.data_ptr()
        self.shares_memory = buffer._base is not None or storage.nbytes() > buffer.numel() * buffer.element_size()
        """True if other tensors use the memory of the buffer: writes to them count as writes to it."""
        self.before: Tensor | None = None
        self.hook: RemovableHandle | None = None
        """The hook of the buffer's gradient, once it requires one."""

    def keep_before(self) -> None:
        """Keep the share as it is now, to find out later where it was written."""
        with torch.inference_mode(False), torch.no_grad():
            self.before = self.share.clone()

    def begin(self) -> None:
        _sharded_now.add(id(self.buffer))
        self._point_to(self.share)

    def end(self, failed: bool) -> None:
        """Back to the whole sequence, as it was before; or to a copy of the share, which graphs may have saved.
        ``failed``: by an exception, after which there may be no memory for copies."""
        _sharded_now.discard(id(self.buffer))
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
            self.buffer.requires_grad_(False)
        if self.whole is not None:
            self._point_to(self.whole)
        elif not failed:
            with torch.inference_mode(False), torch.no_grad():
                # Graphs have saved the share, whose counter writes to the buffer would not reach. (Those of compiled
                # functions may have saved the buffer: no write is counted here.)
                self.buffer.data = self.share.clone()
        if self.whole is None and self.splits:
            _left_sharded[self.buffer] = _place(self.buffer)

    def require_gradients(self) -> None:
        """Let the buffer require gradients if its share does. Functions that are compiled ahead of time get the buffer
        itself, and its gradient is added to that of the share."""
        if self.buffer.requires_grad == self.share.requires_grad:
            return
        self.buffer.requires_grad_(self.share.requires_grad)
        if self.hook is None:
            self.hook = self.buffer.register_post_accumulate_grad_hook(self._move_gradient)

    def _move_gradient(self, buffer: Tensor) -> None:
        with past_modes():
            grad, buffer.grad = buffer.grad, None
            if grad is not None:
                self.share.grad = grad if self.share.grad is None else self.share.grad + grad

    def gathered(self) -> Tensor:
        """The shares of all ranks, as they were written."""
        return self.handler.combine(self.share.detach(), self.dim)

    def _point_to(self, data: Tensor) -> None:
        self.buffer.data = data
        increment_version([self.buffer])  # a graph that saved this tensor for backward must not use it now

    def count_versions(self) -> tuple[int, int]:
        """Numbers of writes, to the share and to the buffer (past the routing)."""
        return writes(self.share), writes(self.buffer)


def _collect(written: list[_Sharded]) -> None:
    """Copy what all ranks have written into the whole buffers."""
    by_memory: dict[Any, list[_Sharded]] = {}
    with torch.no_grad():
        for s in written:
            if s.before is None:
                s.buffer.copy_(s.gathered())
            else:
                by_memory.setdefault(s.memory, []).append(s)
        for group in by_memory.values():
            _merge(group)


def _merge(views: list[_Sharded]) -> None:
    """Copy views of one memory into it, each where its share has changed: elsewhere something else may be written.

    ``RuntimeError`` if two were written differently in one place. All ranks see the same values, and decide alike.
    """
    before, after = [s.buffer.clone() for s in views], [s.gathered() for s in views]
    changed = [s.handler.combine(~_same(s.before, s.share), s.dim) for s in views if s.before is not None]
    for s, where, new in zip(views, changed, after, strict=True):
        s.buffer.copy_(torch.where(where, new, s.buffer))
    for s, where, new in zip(views, changed, after, strict=True):
        if bool((where & ~_same(s.buffer, new)).any()):
            shapes = " and ".join(str(tuple(view.buffer.shape)) for view in views)
            for view, old in zip(views, before, strict=True):
                view.buffer.copy_(old)
            raise RuntimeError(
                f"buffers of shapes {shapes} share memory, and were written in the block with different values in one "
                "place. Inside the block each has a share of its own, so the result would depend on their order. "
                "Write one of them only, or pass clones. All are as they were before the block"
            )


def _same(a: Tensor, b: Tensor) -> Tensor:
    """True where two tensors are equal, or both NaN."""
    return (a == b) | ((a != a) & (b != b))


# --------------------------------------------------------------------------- routing


_PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum}
"""Functions of which a recurrence calls one at least, to project its inputs."""
_OF_SHAPES = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "__len__"}
"""The names of functions that read no numbers; the first one is that of attributes."""
_REQUIRE = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


class _Routing(DispatchMode):
    """Routes attention calls of a block, and gives functions a share in place of its buffer: an autograd graph must
    not hold the buffer, which will be another tensor when backward runs after the block."""

    reads_left = 8
    """The blocks of the process whose buffers on accelerators are still read: the host waits for that."""

    def __init__(self, binding: Binding, sharded: list[_Sharded]) -> None:
        super().__init__(RunningCall(binding, None, binding.active, grad_enabled=False))
        self.training, self.sharded = torch.is_grad_enabled(), sharded
        self.shares = {id(s.buffer): s.share for s in sharded}
        self.buffers = {id(s.share): s.buffer for s in sharded}
        self.call.shares = [(s.share.shape[0] if s.dim else 1, s.share.shape[s.dim]) for s in sharded]
        self.mixer = _BlockMixer(self)
        self.outer: list[tuple[str, int]] = []
        self.entry: tuple[str, int] | None = None
        """The list of the batch state and its entry for this block, if it has split buffers."""
        self.packed = False
        """True if a buffer has positions of packed documents, and no attention call has been warned of them."""
        self.lengths = {s.share.shape[s.dim] for s in sharded if binding.active.parallel}
        """Positions of the shares."""
        self.rows = {rows for rows, _ in self.call.shares}
        self.attending: set[type[nn.Module]] = set()
        """Modules that have projected something in the block and are named like attention."""
        self.unread = {
            s.memory[1]: s.buffer
            for s in sharded
            if s.splits and s.whole is not None and (not _holds_integers(s.buffer) or (s.shares_memory and s.rows == 1))
        }
        """Buffers that may be parts or copies of a table, by their memory, as long as no function has read them."""
        self.read_whole: set[int] = set()
        """The memory of which functions have read other tensors than buffers."""
        self.calls_before = 0
        self.around: nn.Module | None = None
        """The model on a mesh of one rank in whose forward the block has begun."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_compiling() and self.shares:  # no guards on what every block has of its own
            if self.unread and func.__name__ not in _OF_SHAPES:
                self._find_unread([*args, *kwargs.values()])
            args, kwargs = tuple(map(self._shared, args)), {name: self._shared(x) for name, x in kwargs.items()}
        if func in BACKWARD and not is_compiling():
            return differentiate(self, func, args, kwargs)
        if func in _PRODUCTS and self.call.mesh.parallel and not is_compiling() and self.responsible():
            outer = refuse_running_mixer(self.call.binding.style.allow, self in _blocks.entries)
            self.attending.update(kind for kind in map(type, outer) if "attention" in kind.__name__.lower())
        key = attention_calls.key_of(func)
        attention = key in attention_calls.ROUTED or attention_calls.spelled(func) is not None
        if not attention or not self.responsible():
            if not is_compiling() and getattr(func, "__name__", "") in MIXING_CALLS:
                self._refuse_mixing(func, args, kwargs)
            out = attention_calls.PLAIN.get(func, func)(*args, **kwargs)
            if func in _REQUIRE and not is_compiling():
                for s in self.sharded:
                    s.require_gradients()
            # The result of `x += 1` is x, which must still be the buffer.
            return out if is_compiling() else self.buffers.get(id(out), out)
        self.check_checkpoint("attention")
        if self.sharded and self.call.mesh.parallel and not is_compiling():
            self.refuse_broadcast()
        call = self.call
        call.documents = call.mesh.views[0].batch.documents_of_call("attention in a context_parallel block")
        if self.packed and call.documents is None and not is_compiling():
            self.packed = False
            warnings.warn(
                "a buffer of this context_parallel block has positions that return to 0, as in packed documents, and "
                "attention runs without documents. Models that keep such documents apart by their positions (those of "
                "transformers) see the positions of a share only, and attend across documents. Run the model in "
                "handler.documents(...), with the handler that the block yields; or ignore this warning, if the model "
                "attends across documents on one device, too",
                stacklevel=2,
            )
        call.must_route = call.mesh.parallel or call.engine_only
        return super().__torch_function__(func, types, args, kwargs)

    def refuse_broadcast(self) -> None:
        """Raise ``ValueError`` in a model whose DDP has broadcast a buffer of the block, of which ranks have shares."""
        for module in running_modules():
            if not isinstance(module, DistributedDataParallel) or not module.will_sync_module_buffers():
                continue
            together = {*get_process_group_ranks(module.process_group)} & {*self.call.mesh.mesh.mesh.flatten().tolist()}
            split = [name for name, buffer in module.module.named_buffers() if id(buffer) in self.shares]
            if split and len(together) > 1:
                raise ValueError(
                    f"DistributedDataParallel broadcasts the buffers of its model at every forward, and {split[0]!r} "
                    "is a buffer of this context_parallel block: each rank has got the share of another one. Pass "
                    "DistributedDataParallel(..., broadcast_buffers=False), or forward_sync_buffers=False (torch 2.13)"
                )

    def check_checkpoint(self, what: str) -> None:
        """Raise ``NotImplementedError`` in a reentrant checkpoint (torch's or other code's), and ``RuntimeError`` in a
        recompute whose forward ran in a block with other settings."""
        if is_compiling():  # such a checkpoint is an error in a compiled graph
            return
        if self.training and checkpoint.in_function_forward():
            raise NotImplementedError(
                f"{what} runs in the forward of an autograd function inside context_parallel, as in a reentrant "
                f"activation checkpoint. Its recompute could come after the block, and would silently be local {what}. "
                "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        now = self.call.binding.style
        (then,) = checkpoint.batch_state(_blocks, lambda: (now,))
        if (then.mode, then.ulysses_degree) != (now.mode, now.ulysses_degree):
            raise RuntimeError(
                f"activation checkpointing recomputes {what} in a context_parallel block with {now.mode}, "
                f"ulysses_degree={now.ulysses_degree}, but its forward ran in one with {then.mode}, "
                f"ulysses_degree={then.ulysses_degree}. Its gradients would be wrong. Run backward inside the block of "
                "the forward"
            )

    def _refuse_mixing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.lengths and self.responsible():
            refuse_mixing_call(func, args, kwargs, self.lengths, self.rows, self.call.binding.style.allow)

    def _shared(self, x: Any) -> Any:
        """``x`` with buffers replaced by their shares, in a list or tuple too."""
        if isinstance(x, Tensor):
            return self.shares.get(id(x), x)
        if type(x) in (tuple, list) and any(id(y) in self.shares for y in x):
            return type(x)(self.shares.get(id(y), y) for y in x)
        return x

    def responsible(self) -> bool:
        """True if attention that is called now belongs to this block, not to an inner block or a styled module, or to a
        prepared model on a mesh of one rank."""
        running, inner = current_call(), _blocks.top  # threads of backward inherit the mode, not the stack
        if running is not None and running.alive():
            return False
        alone = running_alone()
        return (inner is None or inner is self) and (alone is None or alone is self.around)

    def __enter__(self) -> Any:
        self.calls_before, self.around = batch_state.calls_of_engine, running_alone()
        _blocks.push(self)
        route_loaded()
        running_mixers.push(self.mixer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _blocks.remove(self)
        running_mixers.remove(self.mixer)
        self.take_out()  # another block may have begun since, and go on: generators end in any order
        if error[0] is None:
            self._warn_if_local()
            self._warn_of_unread()

    def _find_unread(self, given: Iterable[Any]) -> None:
        """Note which buffers a function reads, and in place of which it reads other tensors of their memory."""
        for x in given:
            if type(x) in (tuple, list):
                self._find_unread(x)
            elif id(x) in self.shares:
                self.unread = {memory: buffer for memory, buffer in self.unread.items() if buffer is not x}
            elif type(x) in (Tensor, nn.Parameter):
                with suppress(NotImplementedError, RuntimeError):  # those of torch.func have no memory
                    self.read_whole |= {x.untyped_storage().data_ptr()} & self.unread.keys()

    def _warn_of_unread(self) -> None:
        """Warn of buffers that were not read in the block, while other tensors of their memory were."""
        if not self.call.mesh.parallel or count_compilations():  # compiled code reads unseen
            return
        for memory in self.read_whole & self.unread.keys():
            shape = tuple(self.shares[id(self.unread[memory])].shape)
            warnings.warn(
                f"a buffer of this context_parallel block, whose share has shape {shape}, was not read in the block, "
                "and the whole tensor was of which it is a view: each rank then takes its first rows, and not those of "
                "its own tokens. Keep the view in a variable or an attribute, pass it as the buffer, and let the model "
                "read it (model.table = table)",
                stacklevel=3,
            )

    def _warn_if_local(self) -> None:
        """Warn of modules named like attention that have run in a block in which no attention was routed."""
        new = [kind for kind in self.attending if kind not in _attended]
        _attended.update(new)
        ran = self.call.routed or self.mixer.routed or batch_state.calls_of_engine > self.calls_before
        if new and not ran:
            names = ", ".join(sorted(kind.__name__ for kind in new))
            warnings.warn(
                f"{names} ran in this context_parallel block, and no attention was routed in it. By hand, or by a "
                "kernel of another package, each rank attends to its share only. Call flex_attention or "
                "F.scaled_dot_product_attention (attn_implementation='sdpa' in transformers); or ignore this warning, "
                "if it attends to nothing along the sequence",
                stacklevel=3,
            )


_attended: WeakSet[type[nn.Module]] = WeakSet()
"""Types of modules named like attention that have run in a block which has ended."""

_blocks: ThreadStack[_Routing] = ThreadStack()
"""The blocks that are entered."""


class _BlockMixer(RunningMixer):
    """Runs the recurrent calls of a block. States pass between all of its ranks."""

    def __init__(self, routing: _Routing) -> None:
        binding = routing.call.binding
        super().__init__(binding.name, None, binding.active.views[0], binding.style.mode.layout, None)
        self.owner, self.shares = binding, routing.call.shares
        self.routing = ref(routing)  # which holds this one: a cycle would keep all buffers until Python looks for it

    def current(self) -> RunningMixer | None:
        """This one with the active documents; None where calls are left to others, or there is one rank."""
        routing = self.routing()
        if routing is None or not routing.responsible():
            return None
        binding = routing.call.binding
        batch = binding.active.views[0].batch
        self.documents = batch.documents_of_call("a recurrence in a context_parallel block")
        if not binding.active.parallel and self.documents is None:
            return None
        routing.check_checkpoint("a recurrence")
        return self
