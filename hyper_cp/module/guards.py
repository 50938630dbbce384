"""Guards around styled modules: they refuse what else in a model would read across positions of this rank's share only.

When a plan is applied, the model is searched for modules that mix positions, such as convolutions. The first forward of
the model is watched for attention that is not routed, and for styled modules that do not run.
"""

from __future__ import annotations

import copy
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import islice
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch.compiling import is_compiling
from .._torch.modes import unseen
from .._torch.modules import (
    called_by_library,
    calling_file,
    calls_running,
    hook_owners,
    is_compiled,
    is_running,
    plan_being_applied,
    running_modules,
)
from ..schedule.documents import read
from ..schedule.layout import by_documents
from ..schedule.lookup import resolve
from . import attention_calls
from .dispatch_mode import EnteredMode, current_call
from .mesh_binding import Binding, describe
from .mixers.calls import (
    LAST,
    ROUTED,
    is_installed,
    keeps_function,
    route_kept,
    route_loaded,
    running_mixer,
    runs_over_ranks,
    watching,
)
from .mixing import GATHER, NAMED, TABLE, Mixing, mixes_by_name, mixing_modules, row_of_call
from .model import Model, model_of

logger = getLogger(__name__)
_ROTARY = re.compile("Rotary|R[oO]PE|Rope")

# --------------------------------------------------------------------------- modules and functions that mix positions


def refuse_mixing(model: Model, whole: tuple[type[nn.Module], ...] = ()) -> None:
    """Raise ``ValueError`` if a module of the model mixes positions and its user does not exempt it.

    Args:
        whole: types whose modules see whole sequences, so that everything may be inside them.
    """
    modules = dict(model.root.named_modules())
    mixers = {name for name, styled in model.styled.items() if getattr(styled.style, "mixers", False)}
    """Those of a plan that was applied before: they run over all ranks."""
    outer = [*mixers, *(name for name, module in modules.items() if isinstance(module, whole))]
    found: dict[str, Mixing] = {}

    def exempt(name: str) -> bool:
        return model.allows(name) or any(name.startswith(f"{x}." if x else "") for x in outer)

    for name, row in mixing_modules(model.root).items():
        if name not in mixers and not exempt(name):
            found[name] = row
            outer.append(name)  # not what is inside of it
    for name, module in modules.items():
        if isinstance(module, nn.BatchNorm1d) and name not in found and not exempt(name):
            module.register_forward_pre_hook(_refuse_training)
    if found:
        some = [f"module {name!r} ({type(modules[name]).__name__}) {found[name].does.format(modules[name])}"
                for name in list(found)[:3]]  # fmt: skip
        others = f"; {len(found) - 3} others" if len(found) > 3 else ""
        instead = " ".join(
            f"{advice.format(_pattern(name for name in found if found[name].instead == advice))}."
            for advice in dict.fromkeys(row.instead for row in found.values())
        )
        raise ValueError(
            f"{'; '.join(some)}{others}. Under ContextParallel it has only this rank's share of the sequence, so it "
            f"would compute something else than on one device. {instead} Or take it out of the model. If it does not "
            f"work along the split sequence, exempt it from this check: ContextParallel(allow={_pattern(found)})"
        )


def _refuse_training(module: nn.Module, args: Any) -> None:
    """Raise for batch statistics of a module that was in evaluation when the model was searched."""
    if module.training:
        raise ValueError(
            f"a {type(module).__name__} under a plan that was applied in evaluation is now in training, and takes its "
            "statistics over positions of this rank's share of the sequence. On one device they are those of the "
            f"whole. {GATHER}; or keep it in evaluation (module.eval()), or exempt it from this check with allow="
        )


def _pattern(names: Iterable[str]) -> str:
    return repr(tuple(names)[:3])


MIXING_CALLS = {name for row in TABLE if row.refused or row.warned for name in row.functions}
"""Names of functions that mix positions."""


def refuse_mixing_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lengths: set[int],
    rows: set[int],
    allow: tuple[str, ...],
) -> None:
    """Raise ``RuntimeError``, or warn where harm is not sure, if a function mixes positions of this rank's share of the
    sequence, in a module that its user does not exempt. (For a ``context_parallel`` block, which sees functions and no
    model.) ``lengths``, ``rows``: the numbers of positions and of rows that buffers of the block have."""

    def model() -> Model | None:
        running = list(running_modules())
        return Model(running[-1], allow) if running else None

    found = _mixing_call(func, args, kwargs, lengths, rows, model)
    if found is not None:
        row, caller, what = found
        if row.refused:
            raise RuntimeError(
                f"{what}, in a context_parallel block. {_MIXED} {row.instead}. Or take it out of the block. If that is "
                f"not the split sequence, exempt it from this check: context_parallel(..., allow=({caller!r},))"
            )
        _warn_of_mixing(row, what, f"context_parallel(..., allow=({caller!r},))")


_MIXED = "It mixes positions, so it would compute something else than on one device."


def _mixing_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lengths: set[int],
    rows: set[int],
    find_model: Callable[[], Model | None],
) -> tuple[Mixing, str, str] | None:
    """The row of a function that mixes positions of a share, the module that calls it, and both in words; None for
    other calls, in modules that are exempted, and where modules of this type in this model have been warned of it."""
    row = row_of_call(func.__name__, args, kwargs, lengths, rows)
    if row is None or not (row.refused or row.warned) or called_by_library() or calling_file() == _OF_MASKS:
        return None
    running = list(running_modules())
    caller = running[0] if running else None
    if row.activations and caller is None:
        return None
    in_model, in_caller = (_known.setdefault(running[i], set()) if running else set() for i in (-1, 0))
    call, exempted = (type(caller), func.__name__), (None, func.__name__)
    if (call in in_model or exempted in in_caller) and not row.refused:
        return None
    model = find_model()
    name = model.names.get(id(caller), "") if model else ""
    if model is not None and model.allows(name):
        in_caller.add(exempted)
        return None
    in_model.add(call)
    x: Tensor = args[0] if args else kwargs["input"]
    who = f"module {name!r} ({type(caller).__name__}) calls {func.__name__}" if model else f"{func.__name__} is called"
    return row, name, f"{who} on a tensor {tuple(x.shape)} that has this rank's share of the sequence"


_known: WeakKeyDictionary[nn.Module, set[tuple[type | None, str]]] = WeakKeyDictionary()
"""Functions that mix positions: of a model, with the types of its modules that have been warned of them, and of modules
that are exempted."""
_OF_MASKS = "transformers.masking_utils"
"""It finds packed documents by the positions of a share, of which the warnings of packed batches tell."""


def _warn_of_mixing(row: Mixing, what: str, exempts: str) -> None:
    warnings.warn(
        f"{what}. {_MIXED} {row.instead}. If that is not the split sequence, ignore this warning, or exempt it: "
        f"{exempts}",
        stacklevel=6,
    )


def refuse_running_mixer(allow: tuple[str, ...], in_this_thread: bool = True) -> list[nn.Module]:
    """Raise ``RuntimeError`` if a module whose name says that it runs along the sequence calls a function in a
    ``context_parallel`` block, none of its functions is routed, and its user does not exempt it. Returns the modules
    that call it: a projection, and the one that has it.

    ``in_this_thread``: the block was entered in the thread that runs. (Backward on an accelerator has threads of its
    own, in which recurrences are not routed.)
    """
    outer = list(islice((module for module in running_modules() if type(module) is not nn.Sequential), 2))
    for module in outer:
        if module not in _searched_for_functions:
            *_, root = running_modules()
            root = module if root in _searched_for_functions else root
            route_kept(root)
            _searched_for_functions.update((module, *root.modules()))
    for module in outer:
        if not mixes_by_name(module) or (in_this_thread and _routes(module)):
            continue
        model = model_of(module)
        name = model.names.get(id(module), "")
        if not Model(model.root, allow).allows(name):
            raise RuntimeError(
                f"module {name!r} ({type(module).__name__}) runs along the sequence in a context_parallel block, by "
                "none of the functions that are routed, so it would see this rank's share only. Take it out of the "
                f"block. {NAMED.instead}. If that is not the split sequence, exempt it from this check: "
                f"context_parallel(..., allow=({name!r},))"
            )
    return outer


_searched_for_functions: WeakSet[nn.Module] = WeakSet()
"""Modules of ``context_parallel`` blocks whose models have been searched for recurrences that they keep."""


def _routes(module: nn.Module) -> bool:
    return any(runs_over_ranks(type(inner)) or keeps_function(inner) for inner in module.modules())


# --------------------------------------------------------------------------- when a plan is applied

_searched: tuple[int | None, Any] = (None, lambda: None)
"""The plan whose model was searched last, and that model."""


def refuse_uncalled(module: nn.Module) -> None:
    """Raise ``ValueError`` for a container, which is never called."""
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise ValueError(
            f"ContextParallel is applied to {describe(module)}, which has no forward. It is a container that is never "
            "called, so nothing would run under the style. End the key of the plan with the modules inside it, as in "
            '"layers.*.attention"'
        )


def guard_plan(module: nn.Module, binding: Binding, mesh: DeviceMesh) -> None:
    """Search the model of the plan that is being applied, once a plan, and have its first forward watched. On a mesh of
    one rank both wait for a wider one (``context_parallel_mesh``)."""
    global _searched
    call, root, allow = plan_being_applied()
    root = module if root is None else root
    if mesh.size() > 1 and (call is None or call != _searched[0] or _searched[1]() is not root):
        refuse_mixing(Model(root, (*binding.style.allow, *allow)), _sees_all(binding, module))
        _searched = call, ref(root)
    agreement = binding.active.views[0].agreement
    binding.applied = ref(root), 0 if agreement is None else agreement.number_of_plan(root)
    binding.first_call = guard_running if mesh.size() > 1 else _guard_wider
    if root is not module and not _watched(root):
        watch(root)


_guarded_wider: WeakSet[nn.Module] = WeakSet()
"""Models whose plan was applied on one rank, and that have been searched since."""


def _guard_wider(binding: Binding, module: nn.Module) -> None:
    """Search the model of a plan that was applied on one rank, in its first forward on more."""
    root = None if binding.applied is None else binding.applied[0]()
    if root is None or root is module:
        guard_running(binding, module)
    elif root not in _guarded_wider:
        refuse_mixing(Model(root, binding.style.allow), _sees_all(binding, module))
        _guarded_wider.add(root)  # not before: a call that is made again after the error raises again


def _sees_all(binding: Binding, module: nn.Module) -> tuple[type, ...]:
    """The type of a styled module that receives whole sequences."""
    whole = all(cp.ring.size == 1 for cp in binding.active.views)
    return (type(module),) if binding.style.qkv_indices is not None and whole else ()


def guard_model(root: nn.Module, allow: tuple[str, ...], whole: tuple[type[nn.Module], ...] = ()) -> None:
    """Guard a model that no plan knew: its attention modules were replaced, for example. Its next forward is
    watched. ``whole``: as in :func:`refuse_mixing`."""
    refuse_mixing(Model(root, allow), whole)
    watch(root)


def guard_running(binding: Binding, module: nn.Module) -> None:
    """Guard the model in which a styled module runs for the first time, if its plan did not know that model: it was
    applied module by module, or to a container. Its next forward is watched."""
    root = model_of(module).root
    if root is module or any(_watched(outer) for outer in running_modules()):
        return
    guard_model(root, binding.style.allow, _sees_all(binding, module))


def _watched(root: nn.Module) -> bool:
    return any(isinstance(owner, FirstForward) for owner in hook_owners(root))


def watch(root: nn.Module, known: bool = False, elsewhere: Set[nn.Module] = frozenset()) -> None:
    """Watch the next forward of a model for attention that is not routed, for positions counted locally and for
    functions that mix positions. Of a model that is ``known`` the user's own code only is watched for these. Modules
    that attend ``elsewhere`` than to the sequence may do so by themselves."""
    first = FirstForward(known, elsewhere)
    root.register_forward_pre_hook(first.before, prepend=True)
    root.register_forward_hook(first.after, always_call=True)


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Forwards of ``model`` in this block are not watched, and do not count as its first."""
    found = [owner for module in model.modules() for owner in hook_owners(module) if isinstance(owner, FirstForward)]
    before = [first.done for first in found]
    try:
        for first in found:
            first.done = {True, False}
        yield
    finally:
        for first, done in zip(found, before, strict=True):
            first.done = done


# --------------------------------------------------------------------------- the first forward


class FirstForward(EnteredMode):
    """The hooks of a model around its first forward, and the mode that sees the functions which that forward calls."""

    def __init__(self, known: bool = False, elsewhere: Set[nn.Module] = frozenset()) -> None:
        super().__init__()
        self.known, self.elsewhere = known, elsewhere
        self.warned = self.warned_of_keys = False
        self.done: set[bool] = set()
        """The modes whose first forward has been watched, training and evaluation: other modules may run in each."""
        self.thread: int | None = None
        """The thread in which the first forward runs; None while it does not run."""
        self.alone: Binding | None = None
        """A styled module of the model that has run on one rank only, where there is nothing to watch."""
        self.unrouted: list[tuple[str, str, int | None, str]] = []
        """Calls that were not routed: module name, beginning and end of the error, number of positions."""

    def __deepcopy__(self, memo: Any) -> FirstForward:
        return FirstForward(self.known, copy.deepcopy(self.elsewhere, memo))  # a copy is another model

    def before(self, root: nn.Module, args: Any) -> None:
        """Begin to watch."""
        if is_compiling() or root.training in self.done or current_call() is not None:
            return
        if self.thread is not None:
            if self.thread != threading.get_ident() or calls_running(root) > 1:
                return
            self._end()  # a KeyboardInterrupt ended that forward without its hooks
        if self.alone is not None and not self.alone.active.parallel:
            return
        if any(is_compiled(module) for module in (*running_modules(), *root.modules())):
            self.done = {True, False}  # graphs would be compiled for this forward, and again without the watch
            return
        self.model = Model(root)
        parallel = any(binding.active.parallel for binding in self.model.styled.values())
        self.alone = None if parallel else next(iter(self.model.styled.values()), None)
        if parallel:
            self.thread, self.unrouted = threading.get_ident(), []
            self.__enter__()
            if not self.known:
                route_loaded()
                route_kept(root)
                watching.push(self)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_compiling():
            self._inspect(func, args, kwargs)
        return attention_calls.PLAIN.get(func, func)(*args, **kwargs)

    def _inspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spelling, caller = attention_calls.spelled(func), next(running_modules(), self.model.root)
        counts = spelling is None and not self.warned and takes_positions(func, caller)
        mixes = getattr(func, "__name__", "") in MIXING_CALLS and self._watches_mixing()
        # All frames are walked for few functions only.
        if not (spelling or counts or mixes) or not is_running(self.model.root):
            return
        if counts:
            self._warn_of_local_positions(caller, (*args, *kwargs.values()))
        if mixes:
            self._warn_of_mixing(func, args, kwargs)
        if spelling is None or current_call() is not None:
            return
        lengths = _lengths(func, args, kwargs)
        reads = lengths is not None and lengths[0] != lengths[1]
        if lengths is not None and (lengths[1] == 1 or (reads and not self._watches_mixing())):
            return
        name = self.model.names.get(id(caller), "")
        if not self.model.allows(name) and self.elsewhere.isdisjoint(running_modules()):
            end = _OTHER_QUERIES if reads else _NOT_REPLACED if self.known else _NO_KEYS
            self._add(caller, name, spelling, None if lengths is None else lengths[1], end)

    def _watches_mixing(self) -> bool:
        """True for a call in a model that the user has written, and of the user's own code in a mixer and in a model
        that is known. (A block watches by itself.)"""
        mixer = running_mixer()
        if mixer is not None and mixer.module is None:
            return False
        return (mixer is None and not self.known) or not is_installed(calling_file())

    def inspect_recurrence(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuse a recurrence, or a convolution, that no mixer routes, if it may be over this rank's share."""
        if not is_running(self.model.root):  # a KeyboardInterrupt ended the forward without its hooks
            return
        length = next((x.shape[-1 if name in LAST else 1] for x in args if isinstance(x, Tensor) and x.ndim > 2), None)
        caller = next(running_modules(), self.model.root)
        if not self.model.allows(place := self.model.names.get(id(caller), "")):
            self._add(caller, place, name, length, _NO_STATES if name in ROUTED else _NOT_ROUTED)

    def _add(self, caller: nn.Module, name: str, function: str, length: int | None, end: str) -> None:
        self.unrouted.append((name, f"module {name!r} ({type(caller).__name__}) calls {function}", length, end))
        self._refuse_unrouted()

    def _warn_of_local_positions(self, caller: nn.Module, inputs: Iterable[Any]) -> None:
        """Warn if a table of positions is read, or a rotary embedding made, at 0 to S/n - 1 on a rank that holds other
        ones. (The host waits for these values, in the first forward only.)"""
        name = self.model.names.get(id(caller), "")
        if self.model.allows(name):
            return
        binding = next(binding for binding in self.model.styled.values() if binding.active.parallel)
        if any(type(x) is Tensor and counts_locally(x, binding) for x in inputs):
            self.warned = True
            warnings.warn(
                f"module {name!r} ({type(caller).__name__}) got positions 0, 1, 2, ... "
                "on a rank whose share holds other positions. They were counted locally, perhaps by torch.arange. Pass "
                "the model the position_ids of get_batch_on_this_cp_rank, or those of handler.position_ids"
                + (f". A module that sees no shares is exempt with ContextParallel(allow=({name!r},))" if name else ""),
                stacklevel=6,
            )

    def _warn_of_mixing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        binding = next(binding for binding in self.model.styled.values() if binding.active.parallel)
        batch = binding.active.views[0].batch
        lengths, (of_block, _) = self._shares() | batch.lengths.made, batch.rows_and_share
        rows = {b.rows or 0 for b in self.model.styled.values() if b.ran} | {of_block}
        if found := _mixing_call(func, args, kwargs, lengths, rows - {0}, lambda: self.model):
            row, name, what = found
            _warn_of_mixing(row, what, f"ContextParallel(allow=({name!r},))")

    def _shares(self) -> set[int]:
        """The positions of this rank in the styled modules that have run."""
        return {b.positions for b in self.model.styled.values() if b.ran and b.positions is not None}

    def _refuse_unrouted(self) -> None:
        """Raise if a call that was not routed had as many positions as this rank's share of the sequence. Warn if these
        were keys of other queries: a memory that every rank has may be as long."""
        shares = self._shares()
        for entry in [*self.unrouted]:
            name, call, length, end = entry
            if not shares or length not in (None, *shares):
                continue
            text = (
                f"{call} on this rank's share of the sequence{'' if length is None else f' ({length} positions)'}, "
                f"{end} exempt it from this check: ContextParallel(allow={_pattern([name])})"
            )
            if end != _OTHER_QUERIES:
                raise RuntimeError(text)
            self.unrouted.remove(entry)
            if not self.warned_of_keys:
                self.warned_of_keys = True
                warnings.warn(text, stacklevel=6)

    def after(self, root: nn.Module, args: Any, output: Any) -> None:
        """Raise if attention was not routed, or if no styled module ran."""
        if is_compiling() or self.thread != threading.get_ident() or calls_running(root) > 1:
            return
        self._end()
        if output is None and sys.exc_info()[0] is not None:  # an exception is on its way
            return
        self._refuse_unrouted()
        self.done.add(root.training)
        styled = self.model.styled
        idle = [name for name, binding in styled.items() if not binding.ran]
        some = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        if len(idle) == len(styled):
            raise RuntimeError(
                f"None of the {len(idle)} modules under ContextParallel ({some}) ran in the first forward of "
                f"{type(root).__name__}, so its attention covered only this rank's share of the sequence. Apply the "
                "style to modules that are called (module(...), not module.forward(...)). If this forward needs none "
                "of them, ignore the error: it comes once"
            )
        if idle:
            logger.warning(
                "%d of %d modules under ContextParallel did not run in the first forward of %s: %s. If they are never "
                "called, the plan is wrong. styled_modules(model, ran=True) raises until all have run",
                len(idle),
                len(styled),
                type(root).__name__,
                some,
            )

    def _end(self) -> None:
        watching.remove(self)
        self.thread = None
        self.take_out()


_NO_KEYS = (
    "and is not under ContextParallel: it attends to none of the other ranks' keys. Add it to the plan. If what it "
    "attends to is not the split sequence,"
)
_OTHER_QUERIES = (
    "as keys of other queries (a learned probe, a head that pools), and reads none of the other ranks' keys. Give it "
    "the whole sequence (handler.combine, see docs/guide/encoders.md). If every rank has all of these keys, ignore "
    "this warning, or"
)
_NOT_REPLACED = (
    "which the preparation of this model does not replace: it attends to none of the other ranks' keys. Call attention "
    "as the models of its library do (ALL_ATTENTION_FUNCTIONS of transformers, attention processors of diffusers), or "
    "put ContextParallel styles on the attention modules with parallelize_module in place of preparing the model. If "
    "what it attends to is not the split sequence,"
)
_NO_STATES = (
    "and is not under RecurrentContextParallel: its states would begin anew on every rank. Add the module to the plan, "
    "with RecurrentContextParallel, and call the function by its name in a method of that module, or in a function of "
    "its file. If that is not the split sequence,"
)


_NOT_ROUTED = (
    "which context parallelism does not route: it sees none of the other ranks' positions. Call handler.roll_tensor, "
    "hyper_cp.ops.causal_conv1d, F.scaled_dot_product_attention or flex_attention in its place. If that is not the "
    "split sequence,"
)


def counts_locally(x: Tensor, binding: Binding) -> bool:
    """True if the last dimension of ``x`` counts the positions of a share from 0, and this rank holds other ones, in
    the sequence and in each row of its documents."""
    cp, layout, length = binding.active.views[0], binding.style.mode.layout, x.shape[-1] if x.ndim else 0
    if not counts_from_0(x) or length not in cp.batch.lengths:
        return False
    documents = read(cp.batch.known_documents if binding.documents is None else binding.documents)
    if by_documents(layout) if documents is None else documents.rows[0][-1] != length * cp.size:
        return False  # positions are unknown
    try:
        own = resolve(layout, cp.size, length * cp.size, documents).positions(cp.rank)
    except ValueError:  # shares of such a length are of a batch in another layout
        return False
    own = own[None] if documents is None else torch.cat([own[None], documents.restarted(own)])
    return list(range(length)) not in own.tolist()


def counts_from_0(x: Tensor) -> bool:
    """True if the last dimension of ``x`` is 0, 1, 2, ... in each row. (The host waits for these values.)"""
    if x.is_meta or not x.numel() or x.ndim == 0 or x.shape[-1] < 2 or x.dtype in (torch.bool, torch.complex64):
        return False
    here = x.detach()
    found: bool = unseen(lambda: bool((here == torch.arange(here.shape[-1], device=here.device)).all()), x.device)
    return found


def takes_positions(func: Any, caller: nn.Module) -> bool:
    """True if a function that a module calls looks up a table, or belongs to a rotary embedding."""
    return getattr(func, "__name__", "") == "embedding" or _ROTARY.search(type(caller).__name__) is not None


def _lengths(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """The numbers of queries and of keys of an attention call; None if they cannot be read."""
    pair = [*args[:2], *(kwargs[name] for name in ("query", "key") if name in kwargs)][:2]
    routed = attention_calls.ROUTED.get(func)
    dim = None if routed is None else routed.dim
    if dim is None or len(pair) < 2 or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in pair):
        return None
    queries, keys = (x.shape[dim] for x in pair)
    return queries, keys
