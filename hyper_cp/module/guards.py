"""Guards around styled modules: what else in a model reads across positions would see this rank's share only.

Two of them. When a plan is applied, the model is searched for modules that mix positions, such as convolutions. And the
first forward of the model is watched for attention that is not routed, and for styled modules that do not run.
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import attention_calls
from ._torch.modules import calls_running, hook_owners, is_compiled, plan_being_applied, running_modules
from .dispatch_mode import EnteredMode, current_call
from .mesh_binding import Binding, describe
from .mixers.calls import captures_function, is_mixer
from .model import Model, model_of

logger = getLogger(__name__)

# --------------------------------------------------------------------------- modules that mix positions

_POOLS = (nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
_KNOWN = re.compile(
    r"Mamba|LightningAttention|DeltaNet|DeltaAttention|R[Ww][Kk][Vv]|RetNet|Retention|Hyena|LinearAttention|RG?LRU|LSTM|ShortConv"
)
"""Names of types that run a recurrence or a convolution along the sequence, in the libraries that have them."""
_BESIDE = re.compile(r"Norm|MLP")
"""Names of their parts that do not."""
_BY_NAME = "mixes positions along the sequence"


def mixing(module: nn.Module) -> str | None:
    """The way in which a module mixes positions, in words; None if it is not known to."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return f"convolves {module.kernel_size[0]} neighbouring positions" if module.kernel_size[0] > 1 else None
    if isinstance(module, nn.RNNBase):
        return "carries a state from position to position"
    if isinstance(module, nn.BatchNorm1d) and (module.training or not module.track_running_stats):
        return "takes its statistics over positions"
    if isinstance(module, (nn.InstanceNorm1d, nn.GroupNorm)):
        return "takes its statistics over positions"
    if isinstance(module, _POOLS):
        return "pools positions"
    if is_mixer(type(module)):
        return "runs along the sequence"
    return _BY_NAME if mixes_by_name(module) else None


def mixes_by_name(module: nn.Module) -> bool:
    """True for a module that is named after a recurrence or a convolution along the sequence. (Attention of a model may
    be named after the model: it says that it is causal.)"""
    name = type(module).__name__
    return bool(_KNOWN.search(name) and not _BESIDE.search(name)) and not getattr(module, "is_causal", False)


def refuse_mixing(model: Model, whole: tuple[type[nn.Module], ...] = ()) -> None:
    """Raise ``ValueError`` if a module of the model mixes positions and its user does not vouch for it.

    Args:
        whole: types whose modules see whole sequences, so that everything may be inside them.
    """
    modules = dict(model.root.named_modules())
    inside = [name for name, module in modules.items() if isinstance(module, whole)]
    found: dict[str, str] = {}
    for name, module in modules.items():
        how = mixing(module)
        if how == _BY_NAME and any(is_mixer(type(inner)) for inner in module.modules() if inner is not module):
            continue  # a block or a model that is named after its mixers, which are judged themselves
        if how is None or model.allows(name) or any(name.startswith(f"{outer}." if outer else "") for outer in inside):
            continue
        if not any(name.startswith(f"{outer}." if outer else "") for outer in found):  # not what is inside one of them
            found[name] = f"module {name!r} ({type(module).__name__}) {how}"
    if found:
        routable = [name for name in found if is_mixer(type(modules[name]))]
        recurrent = (
            f"RecurrentContextParallel on {_pattern(routable)} in the plan runs it over all ranks. " if routable else ""
        )
        some, others = list(found.values())[:3], len(found) - 3
        raise ValueError(
            f"{'; '.join(some)}{f'; {others} others' if others > 0 else ''}. Under ContextParallel it has only this "
            f"rank's share of the sequence, so it would compute something else than on one device. {recurrent}Take it "
            "out of the model, or, if it does not work along the split sequence, vouch for it: "
            f"ContextParallel(allow={_pattern(found)})"
        )


def _pattern(names: Any) -> str:
    return repr(tuple(names)[:3]) if names else "(...)"


_POOLING = ("max_pool1d", "avg_pool1d", "lp_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
MIXING_CALLS = {"conv1d", "conv_transpose1d", "batch_norm", "instance_norm", *_POOLING, *_RECURRENT}
"""Names of functions that mix positions."""


def refuse_mixing_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: set[int], allow: tuple[str, ...]
) -> None:
    """Raise ``RuntimeError`` if a function of ``MIXING_CALLS`` runs over this rank's share of the sequence, in a module
    that its user does not vouch for. (For a ``context_parallel`` block, which sees functions and no model.)"""
    name, x = func.__name__, args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not _along_share(name, x, args, kwargs, lengths):
        return
    running = list(running_modules())
    model = Model(running[-1], allow) if running else None
    caller = model.names.get(id(running[0]), "") if model else ""
    if model is None or not model.allows(caller):
        who = f"module {caller!r} ({type(running[0]).__name__}) calls {name}" if model else f"{name} is called"
        raise RuntimeError(
            f"{who} on a tensor {tuple(x.shape)} that has this rank's share of the sequence, in a context_parallel "
            "block. It mixes positions, so it would compute something else than on one device. Take it out of the "
            f"block, or, if that is not the split sequence, vouch for it: context_parallel(..., allow=({caller!r},))"
        )


def refuse_running_mixer(allow: tuple[str, ...], in_this_thread: bool = True) -> None:
    """Raise ``RuntimeError`` if a module that is known to run along the sequence by code of its own calls a function in
    a ``context_parallel`` block, and its user does not vouch for it.

    ``in_this_thread``: the block was entered in the thread that runs. (Backward on an accelerator has threads of its
    own, in which recurrences are not routed.)
    """
    for module in islice(running_modules(), 2):  # the module that calls a projection, and the projection
        routed = in_this_thread and not captures_function(module)
        if not mixes_by_name(module) or (routed and any(is_mixer(type(inner)) for inner in module.modules())):
            continue
        model = model_of(module)
        name = model.names.get(id(module), "")
        if not Model(model.root, allow).allows(name):
            raise RuntimeError(
                f"module {name!r} ({type(module).__name__}) runs along the sequence in a context_parallel block, by "
                "none of the functions that are routed, so it would see this rank's share only. Take it out of the "
                "block, call hyper_cp.ops.linear_recurrence in it, or, if that is not the split sequence, vouch for "
                f"it: context_parallel(..., allow=({name!r},))"
            )


def _along_share(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: set[int]) -> bool:
    if name.startswith("conv"):
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        return isinstance(weight, Tensor) and weight.shape[-1] > 1 and x.shape[-1] in lengths
    if name in _RECURRENT:
        return not lengths.isdisjoint(x.shape[:2])
    if name == "batch_norm" and not kwargs.get("training", args[5] if len(args) > 5 else False):
        return False
    flattened = (
        name == "batch_norm" and x.ndim == 2 and any(x.shape[0] % length == 0 for length in lengths if length > 1)
    )
    return flattened or (x.ndim > 2 and x.shape[-1] in lengths)


# --------------------------------------------------------------------------- when a plan is applied

_searched: tuple[int | None, Any] = (None, lambda: None)
"""The plan whose model was searched last, and that model."""


def refuse_uncalled(module: nn.Module) -> None:
    """Raise ``ValueError`` for a container, which is never called."""
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise ValueError(
            f"ContextParallel is applied to {describe(module)}, which has no forward: it is a container that is never "
            "called, so nothing would run under the style. End the key of the plan with the modules inside it, as in "
            '"layers.*.attention"'
        )


def guard_plan(module: nn.Module, binding: Binding, mesh: DeviceMesh) -> None:
    """Search the model of the plan that is being applied, once a plan, and have its first forward watched."""
    global _searched
    if mesh.size() == 1:
        return
    call, root, vouched = plan_being_applied()
    root = module if root is None else root
    if call is None or call != _searched[0] or _searched[1]() is not root:
        style, views = binding.style, binding.active.views
        sees_all = style.qkv_indices is not None and all(cp.ring.size == 1 for cp in views)
        refuse_mixing(Model(root, (*style.allow, *vouched)), (type(module),) if sees_all else ())
        _searched = call, ref(root)
    if root is not module and not any(isinstance(owner, FirstForward) for owner in hook_owners(root)):
        first = FirstForward()
        root.register_forward_pre_hook(first.before, prepend=True)
        root.register_forward_hook(first.after, always_call=True)


# --------------------------------------------------------------------------- the first forward


@dataclass
class Unrouted:
    """An attention call that was not routed: who made it, how it is spelled, and its number of positions."""

    name: str
    kind: str
    call: str
    length: int | None


class _Watch(EnteredMode):
    """Sees the functions that a model calls in its first forward."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.thread = model, threading.get_ident()
        self.unrouted: list[Unrouted] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and calls_running(self.model.root):
            self._inspect(func, args, kwargs)
        return attention_calls.PLAIN.get(func, func)(*args, **kwargs)

    def _inspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spelling = attention_calls.spelled(func)
        if spelling is None or current_call() is not None:
            return
        length = _self_attention(func, args, kwargs)
        if length == 0:
            return
        caller = next(iter(running_modules()), self.model.root)
        name = self.model.names.get(id(caller), "")
        if not self.model.allows(name):
            self.unrouted.append(Unrouted(name, type(caller).__name__, spelling, length))
            self.refuse_unrouted()

    def refuse_unrouted(self) -> None:
        """Raise if attention that was not routed had as many positions as this rank's share of the sequence."""
        shares = {found.positions for found in self.model.styled.values() if found.ran} - {None}
        wrong = [x for x in self.unrouted if shares and (x.length is None or x.length in shares)]
        if wrong:
            x = wrong[0]
            raise RuntimeError(
                f"module {x.name!r} ({x.kind}) calls {x.call} on this rank's share of the sequence"
                f"{'' if x.length is None else f' ({x.length} positions)'}, and is not under ContextParallel: "
                "it attends to none of the other ranks' keys. Add it to the plan; or, if what it attends to is not the "
                f"split sequence, vouch for it: ContextParallel(allow={_pattern([x.name])})"
            )


def _self_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The number of positions of an attention call; 0 for one that is surely not attention of a sequence to itself;
    None if it cannot be read."""
    pair = [*args[:2], *(kwargs[name] for name in ("query", "key") if name in kwargs)][:2]
    dim = attention_calls.SEQUENCE_DIM.get(func)
    if dim is None or len(pair) < 2 or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in pair):
        return None
    queries, keys = (x.shape[dim] for x in pair)
    return queries if queries == keys > 1 else 0


class FirstForward:
    """The hooks of a model around its first forward."""

    def __init__(self) -> None:
        self.done = False
        self.watch: _Watch | None = None

    def __deepcopy__(self, memo: Any) -> FirstForward:
        return FirstForward()  # a copy is another model

    def before(self, root: nn.Module, args: Any) -> None:
        """Begin to watch."""
        if torch.compiler.is_compiling() or self.done or current_call() is not None:
            return
        if self.watch is not None:
            if self.watch.thread != threading.get_ident() or calls_running(root) > 1:
                return
            self._end()  # a KeyboardInterrupt ended that forward without its hooks
        if any(is_compiled(module) for module in (*running_modules(), *root.modules())):
            self.done = True  # graphs would be compiled for this forward, and again without the watch
            return
        model = Model(root)
        if any(binding.active.parallel for binding in model.styled.values()):
            self.watch = _Watch(model)
            self.watch.__enter__()

    def after(self, root: nn.Module, args: Any, output: Any) -> None:
        """Raise if attention was not routed, or if no styled module ran."""
        watch = None if torch.compiler.is_compiling() else self.watch
        if watch is None or watch.thread != threading.get_ident() or calls_running(root) > 1:
            return
        self._end()
        if output is None and sys.exc_info()[0] is not None:  # an exception is on its way
            return
        watch.refuse_unrouted()
        self.done = True
        idle = [name for name, binding in watch.model.styled.items() if not binding.ran]
        if len(idle) == len(watch.model.styled):
            raise RuntimeError(
                f"None of the {len(idle)} modules under ContextParallel ({_some(idle)}) ran in the first forward of "
                f"{type(root).__name__}, so its attention covered only this rank's share of the sequence. Apply the "
                "style to modules that are called (module(...), not module.forward(...)); if this forward needs none "
                "of them, ignore the error: it comes once"
            )
        if idle:
            logger.warning(
                "%d of %d modules under ContextParallel did not run in the first forward of %s: %s. If they are never "
                "called, the plan is wrong; styled_modules(model, ran=True) raises until all have run",
                len(idle),
                len(watch.model.styled),
                type(root).__name__,
                _some(idle),
            )

    def _end(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.take_out()


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
