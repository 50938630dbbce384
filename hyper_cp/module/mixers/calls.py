"""The functions with which mixers run along the sequence, each replaced by a recurrence over all ranks.

Mixers call them as globals of their own file mostly: those of ``fla``, ``mamba_ssm`` and ``causal_conv1d``, or the
plain torch ones that transformers has in their place. :func:`route_mixer` puts a function in front of each, which
calls the original one unless a mixer runs under context parallelism in this thread. A new call is a new entry of
``ROUTED``. An option that cannot be honoured is refused here with its name, never reinterpreted.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch import checkpoint
from ..._torch.compiling import is_compiling
from ..._torch.modes import unseen
from ..._torch.modules import LIBRARY, is_running
from ...mesh import cp_mesh
from ...mesh.batch_state import BatchState
from ...mesh.cp_mesh import CPMesh
from ...ops.kernels.partials import accumulation_dtype
from ...ops.recurrence.convolution import causal_conv1d
from ...ops.recurrence.linear import linear_recurrence
from ...ops.recurrence.windows import windows
from ..replaced import Few, difference, first_tokens
from ..running_call import MayWarn, warn_of_windows
from ..thread_stack import ThreadStack


@dataclass
class RunningMixer:
    """A running call of a mixer: what its recurrent calls need beside their arguments."""

    name: str
    module: nn.Module | None
    """None for a ``context_parallel`` block."""
    cp: CPMesh
    layout: str
    documents: Tensor | None
    ulysses_degree: int | None = 1
    routed: bool = False
    """True once a call was routed."""
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    owner: MayWarn | None = None
    """The hooks, or the style, that warn once; None: nothing warns."""
    shares: list[tuple[int, int]] = field(default_factory=list)
    """Rows and positions of tensors that may hold this rank's share of the sequence."""

    def alive(self) -> bool:
        """True while the module's call is on the stack of this thread, or the block has not ended."""
        return self.module is None or is_compiling() or is_running(self.module)

    def current(self) -> RunningMixer | None:
        """The mixer itself; a block may leave a call to another one."""
        return self

    def look_for_windows(self, what: str, rows: int, length: int) -> None:
        """Warn, once, of a call whose sequences are parts of this rank's share, as further batch rows."""
        if not is_compiling() and self.owner is not None and not self.owner.warned and self.cp.size > 1:
            shares = [*self.shares, self.cp.batch.rows_and_share]
            warn_of_windows(self.owner, f"{self.name} runs a {what} over", (rows, length), shares)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None = None,
        final_state: list[Tensor] | None = None,
    ) -> Tensor:
        """A linear recurrence over the sequence of all ranks."""
        self.look_for_windows("recurrence", v.shape[0], v.shape[1])
        where = {"mesh": self.cp, "layout": self.layout, "documents": self.documents, "name": self.name}
        options = {**where, "final_state": final_state, "ulysses_degree": self.ulysses_degree}
        return linear_recurrence(q, k, v, decay, beta, **options)  # type: ignore[arg-type]


def _changing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the extra keywords that affect the result. (Models also pass on keywords that do not.)"""
    return {name: x for name, x in options.items() if "in_kernel" in name or name in _OTHER_RESULTS}


_OTHER_RESULTS = ("g_gamma", "gk", "gv", "offsets", "cp_context", "transpose_state_layout")
"""Gates of another form, documents (by the name of fla before 0.2), fla's own context parallelism, and states of
another layout."""


def _refuse(mixer: RunningMixer, function: str, options: dict[str, Any]) -> None:
    """Raise for options that are given and cannot be honoured."""
    given = [name for name, x in options.items() if x is not None and x is not False]
    packed = [name for name in given if name in ("seq_idx", "cu_seqlens", "cu_seqlens_cpu", "offsets")]
    if packed:
        raise ValueError(
            f"{mixer.name} passes {packed[0]} to {function}. Under context parallelism documents are those of the "
            "whole sequence, on the host. Pass them in the batch (prepare_batch), in a handler.documents block, or as "
            "documents="
        )
    if given:
        raise NotImplementedError(
            f"{mixer.name} calls {function} with {', '.join(given)}. Context parallelism runs forward from a zero "
            "state at every document, and keeps no cache of states. Pass use_cache=False, and gates and inputs in the "
            "usual form [batch, positions, heads, ...]"
        )


# --------------------------------------------------------------------------- the calls


def _convolution(
    mixer: RunningMixer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """``causal_conv1d_fn``: x ``[B, C, S]``, weight ``[C, w]``."""
    states = {"initial_states": initial_states, "return_final_states": return_final_states}
    states |= {"final_states_out": final_states_out, **_changing(others)}
    _refuse(mixer, "causal_conv1d_fn", {"seq_idx": seq_idx, **states})
    mixer.look_for_windows("convolution", x.shape[0], x.shape[-1])
    where = {"mesh": mixer.cp, "layout": mixer.layout, "documents": mixer.documents, "name": mixer.name}
    return causal_conv1d(x, weight, bias, activation=activation, **where)  # type: ignore[arg-type]


def _delta_rule(mixer: RunningMixer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule`` and ``chunk_kda``, which fla and transformers call the same way."""
    return _delta(mixer, *args, **{_FLA.get(name, name): x for name, x in kwargs.items()})


_FLA = {"q": "query", "k": "key", "v": "value"}


def _delta(
    mixer: RunningMixer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Any = None,
    head_first: bool = False,
    reverse: bool = False,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    # A prompt leaves a state to decode with; in training nothing reads one.
    final: list[Tensor] | None = [] if output_final_state and not torch.is_grad_enabled() else None
    states = {"initial_state": initial_state, "output_final_state": output_final_state and final is None}
    others = {"use_gate_in_kernel": use_gate_in_kernel, "head_first": head_first, "reverse": reverse}
    _refuse(mixer, "a recurrent kernel", {**states, **others, "cu_seqlens": cu_seqlens, **_changing(unknown)})
    if use_qk_l2norm_in_kernel:
        query, key = _normalised(query), _normalised(key)
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)
    out = mixer.recur(query, key, value, g, beta, final)
    return out, final[0] if final else None


def _normalised(x: Tensor) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _ssd(
    mixer: RunningMixer,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Tensor:
    """``mamba_chunk_scan_combined`` (Mamba 2): x ``[B, S, H, P]``, dt ``[B, S, H]``, B and C ``[B, S, G, N]``."""
    states = {"initial_states": initial_states, "return_final_states": return_final_states}
    _refuse(
        mixer,
        "mamba_chunk_scan_combined",
        {**states, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens, **_changing(others)},
    )
    dtype = accumulation_dtype(x.dtype)
    dt = _step(dt.to(dtype), dt_bias, dt_softplus).clamp(dt_limit[0], dt_limit[1])
    out = mixer.recur(C.to(dtype), B.to(dtype), x.to(dtype) * dt[..., None], A.to(dtype) * dt)
    if D is not None:
        out = out + x.to(dtype) * (D if D.ndim == 2 else D[:, None]).to(dtype)
    out = out if z is None else out * F.silu(z.to(dtype))
    return out.to(x.dtype).contiguous()


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _selective_scan(
    mixer: RunningMixer,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **others: Any,
) -> Tensor:
    """``selective_scan_fn`` (Mamba 1): u and delta ``[B, D, S]``, A ``[D, N]``, B and C ``[B, N, S]`` or ``[B, G, N,
    S]``. Every channel is a head, whose state has N numbers."""
    if A.is_complex() or B.ndim < 3 or C.ndim < 3:
        raise NotImplementedError(
            f"{mixer.name} calls selective_scan_fn with A {tuple(A.shape)} of {A.dtype} and B {tuple(B.shape)}. "
            "Context parallelism has real states, and B and C for every position. Leave the module out of the plan"
        )
    _refuse(mixer, "selective_scan_fn", {"return_last_state": return_last_state, **_changing(others)})
    dtype = accumulation_dtype(u.dtype)
    dt = _step(delta.to(dtype).mT, delta_bias, delta_softplus)
    x, q, k = u.to(dtype).mT, _groups(C, dtype), _groups(B, dtype)
    out = mixer.recur(q, k, (x * dt)[..., None], dt[..., None] * A.to(dtype)).squeeze(-1)
    out = out if D is None else out + x * D.to(dtype)
    out = out if z is None else out * F.silu(z.to(dtype).mT)
    return out.to(u.dtype).mT


def _groups(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, N, S]`` or ``[B, G, N, S]`` to ``[B, S, G, N]``."""
    return (x if x.ndim == 4 else x[:, None]).to(dtype).permute(0, 3, 1, 2)


def _not_fused(mixer: RunningMixer, *_: Any, **__: Any) -> None:
    """A whole mixer in one function. transformers returns None where there is no such kernel, and the mixer then calls
    its parts."""


def _decoding(mixer: RunningMixer, *_: Any, **__: Any) -> None:
    """A function that goes on token by token from a cached state, which would see this rank's share only."""
    _refuse(mixer, "a function for decoding", {"a cached state": True})


def _unknown(mixer: RunningMixer, *_: Any, **__: Any) -> None:
    """A recurrence of flash-linear-attention that is not routed."""
    raise NotImplementedError(
        f"{mixer.name} calls a recurrence that context parallelism does not route, beside functions that it does: its "
        "states would begin anew on every rank, and pass from one document to the next. Use a mode of the layer that "
        "calls chunk_gated_delta_rule, chunk_kda, chunk_gla or chunk_simple_gla, or call "
        "hyper_cp.ops.linear_recurrence(..., mesh=...) in it"
    )


def _not_routed(mixer: RunningMixer, *_: Any, **__: Any) -> None:
    """A function of such a package that mixes positions in another way."""
    raise NotImplementedError(
        f"{mixer.name} calls a token shift, a convolution, attention or a whole mixer of fla or mamba_ssm that "
        "context parallelism does not route. It would see this rank's share of the sequence only. Call "
        "handler.roll_tensor, causal_conv1d_fn, F.scaled_dot_product_attention, flex_attention or selective_scan_fn in "
        "its place"
    )


# --------------------------------------------------------------------------- the table

_KINDS = (
    *("delta_rule", "dplr_delta_rule", "iplr_delta_rule", "gated_delta_product", "comba", "gsa", "hgrn", "retention"),
    *("rwkv6", "rwkv7", "linear_attn", "lightning_attn", "log_linear_attn", "mesa_net", "ttt_linear", "based", "abc"),
)
_FUSED = ("gla", "simple_gla", "kda")

ROUTED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    **dict.fromkeys(("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"), _delta_rule),
    **dict.fromkeys(("chunk_kda", "chunk_kimi_delta_attention"), _delta_rule),
    **dict.fromkeys(("chunk_gla", "chunk_simple_gla"), _delta_rule),
    **dict.fromkeys(("mamba_chunk_scan_combined", "mamba_chunk_scan", "mamba2_chunk_scan"), _ssd),
    **dict.fromkeys(("selective_scan_fn", "mamba_selective_scan"), _selective_scan),
    **dict.fromkeys(("causal_conv1d_update", "selective_state_update"), _decoding),
    **dict.fromkeys(("fused_recurrent_gated_delta_rule", "torch_recurrent_gated_delta_rule"), _decoding),
    **dict.fromkeys([f"{how}_{kind}" for how in ("chunk", "fused_chunk") for kind in _KINDS], _unknown),
    **dict.fromkeys([f"fused_recurrent_{kind}" for kind in (*_KINDS, *_FUSED)], _unknown),
    **dict.fromkeys([f"fused_chunk_{kind}" for kind in _FUSED], _unknown),
    **dict.fromkeys(("parallel_retention", "parallel_simple_gla", "parallel_based"), _unknown),
    **dict.fromkeys(("mamba_inner_fn",), _not_fused),
    **dict.fromkeys(("mamba_split_conv1d_scan_combined", "mamba2_split_conv1d_scan_combined"), _not_fused),
}
"""The functions by the names that they have in the files of mixers."""

NOT_ROUTED: dict[str, tuple[str, ...]] = {
    "fla": ("token_shift", "fused_token_shift", "causal_conv1d", "parallel_attn", "parallel_path_attn"),
    "mamba_ssm": ("mamba_inner_fn_no_out_proj", "bimamba_inner_fn"),
}
"""Functions of packages that are refused, beside those that ``fla.ops`` exports. Functions of other files with these
names are not touched."""
_ALONG = ("chunk_", "fused_chunk_", "fused_recurrent_", "parallel_")
"""The beginnings of the names of functions that ``fla.ops`` exports and that run along the sequence."""


LAST = {name for name, function in ROUTED.items() if function in (_convolution, _selective_scan)}
"""Those whose tensors end with the sequence; in others it is dimension 1, beside the heads."""

running_mixers: ThreadStack[RunningMixer] = ThreadStack()
"""The mixers, and the ``context_parallel`` blocks, that are running."""


class Watch(Protocol):
    """The watch of a model's first forward."""

    def inspect_recurrence(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise if a function of :data:`ROUTED` should have been routed, or one that is not is called."""


watching: ThreadStack[Watch] = ThreadStack()
"""The watches that receive calls which no mixer routes."""


def running_mixer() -> RunningMixer | None:
    """The mixer, or the ``context_parallel`` block, that runs the recurrent calls of this thread now."""
    while (mixer := running_mixers.top) is not None:
        if mixer.alive():
            return mixer.current()
        running_mixers.remove(mixer)  # a KeyboardInterrupt ended that call without its hooks
    return None


def is_mixer(kind: type[nn.Module]) -> bool:
    """True if a method of a type of module calls one of the functions that are routed."""
    found = (_function_of(x, names.get(x)) for names, x in _called(kind))
    return any(ROUTED.get(known, _unknown) is not _unknown for known in found if known)


def gives_state(kind: type[nn.Module]) -> bool:
    """True if a mixer of this type calls a recurrence that can return its final state."""
    return any(ROUTED.get(known) is _delta_rule for names, x in _called(kind) if (known := _function_of(x, names[x])))


def keeps_function(module: nn.Module) -> bool:
    """True if a module keeps one of the functions as an attribute."""
    return any(callable(value) and _function_of(name, value) for name, value in vars(module).items())


def _function_of(name: str, value: Any) -> str | None:
    """The name in :data:`ROUTED` of a global or an attribute, which may have been imported under another name."""
    # Not isinstance, which asks objects for their class: some warn, or load a module, when they are asked for anything.
    own = value.__name__ if type(value) is FunctionType else ""
    package = (value.__module__ or "").partition(".")[0] if own and own not in ROUTED else ""
    if package in NOT_ROUTED:
        exported = getattr(sys.modules.get(f"{package}.ops"), "__all__", ())
        if own in NOT_ROUTED[package] or (own in exported and own.startswith(_ALONG)):
            return own
    return name if name in ROUTED else own if own in ROUTED else None


def _unrouted(name: str, value: Any) -> str | None:
    """The name in :data:`ROUTED` of a global or an attribute that holds a function which is not routed yet."""
    known = _function_of(name, value)
    return known if known and callable(value) and not hasattr(value, "hyper_cp_routes") else None


def _called(kind: type[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """The globals of a file, and the name there, of each function that methods of a type call: as a global, under
    another name too, as an attribute (of the module or of an imported file), or imported when they run."""
    if kind in _known:
        return _known[kind]
    found = [(names, name) for names, used in _names(kind) for name in used if _function_of(name, names.get(name))]
    _known[kind] = found
    return found


def _names(kind: type[nn.Module]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """The globals of the file of each method of a type, and the names that it uses of globals and attributes."""
    for owner in kind.__mro__:
        for method in vars(owner).values() if issubclass(owner, nn.Module) else ():
            # Code that was made by exec may belong to no file.
            if (method := _plain(method)) is None or (method.__module__ or "").startswith("torch."):
                continue
            names, used = method.__globals__, names_in(method.__code__)
            # A method may call the function through another one of its file.
            helpers = [_plain(names.get(name)) for name in used]
            yield names, used.union(*(names_in(f.__code__) for f in helpers if f and f.__globals__ is names))


def calls_library(kind: type[nn.Module]) -> bool:
    """True if a method of a type of module calls the library's recurrence, or its convolution or windows if it is named
    after a convolution: what runs over all ranks in place of its own."""
    if kind not in _calls_library:
        ours = (linear_recurrence, causal_conv1d, windows)[: 3 if _CONVOLUTION.search(kind.__name__) else 1]
        _calls_library[kind] = any(_uses(names, used, ours) for names, used in _names(kind))
    return _calls_library[kind]


_CONVOLUTION = re.compile("Hyena|ShortConv|CMix|ChannelMix")  # RWKV's channel mix shifts tokens only
_calls_library: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def runs_over_ranks(kind: type[nn.Module]) -> bool:
    """True for a type of module that calls functions which can be routed, or those of the library."""
    return is_mixer(kind) or calls_library(kind)


def _uses(names: dict[str, Any], used: set[str], ours: tuple[Any, ...]) -> bool:
    """True if code with these globals, which uses these names, calls one of these functions, also by its file."""
    values = [names.get(name) for name in used]
    files = [x.__name__ for x in values if isinstance(x, ModuleType)]
    of_library = any(file.partition(".")[0] == LIBRARY for file in (*used, *files))  # it may import what it calls
    return any(any(x is f for x in values) or (of_library and f.__name__ in used) for f in ours)


def _plain(method: Any) -> FunctionType | None:
    """The function of a method, of a property, or of a global; None for anything else, which is not asked."""
    method = _method(method)
    return inspect.unwrap(method) if type(method) is FunctionType else None


def _method(method: Any) -> Any:
    """The same with the functions around it."""
    if type(method) in (staticmethod, classmethod, property):
        method = method.fget if type(method) is property else method.__func__
    if type(method) is not FunctionType:  # an object in front of a function, such as torch 2.15's @checkpoint
        method = getattr(method, "__dict__", {}).get("__wrapped__")
    return method


def names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in code, and in functions inside of it."""
    return {*code.co_names}.union(*(names_in(x) for x in code.co_consts if isinstance(x, CodeType)))


_known: WeakKeyDictionary[type, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()


def route(kind: type[nn.Module]) -> None:
    """Put :data:`ROUTED` in front of the functions that mixers of a type call, once."""
    for names, name in _called(kind):
        _put_in_front(names, name)


def route_mixer(module: nn.Module) -> None:
    """Route the functions that a mixer calls: as globals of its file, through other files (``fla.ops.chunk_gla``, a
    helper), or as what it keeps."""
    route(type(module))
    route_loaded()
    route_kept(module)


def route_kept(root: nn.Module) -> None:
    """Route the functions that modules and their classes keep: as attributes, also in a dict or a list, in a partial
    function, or in the closure or a default of a function."""
    seen: set[int] = set()
    kinds: set[type] = set()
    for module in root.modules():
        own = vars(module)
        for name in list(own):
            _put_in_front(own, name)
            if (kept := _kept(own[name], seen)) is not own[name]:
                own[name] = kept
        kinds.update(type(module).__mro__)
    for kind in kinds:
        if issubclass(kind, nn.Module) and not _is_internal(kind):
            _route_class(kind, seen)


def _is_internal(x: Any) -> bool:
    """True for functions and classes of PyTorch, and of this library, which keep original functions."""
    return (x.__module__ or "").partition(".")[0] in ("torch", LIBRARY)


def _route_class(kind: type[nn.Module], seen: set[int]) -> None:
    for name, value in list(vars(kind).items()):
        if type(value) is staticmethod:
            function = value.__func__
            known = _unrouted(name, function)
            kept: Any = _in_front(known, function) if known else _kept(function, seen)
            if kept is not function:
                setattr(kind, name, staticmethod(kept))
        elif type(method := _method(value)) is FunctionType:
            _route_inside(method, seen)
        elif (kept := _kept(value, seen)) is not value:
            setattr(kind, name, kept)


def _route_inside(function: FunctionType, seen: set[int]) -> None:
    """Route what the closure and the defaults of a function keep."""
    if id(function) in seen or _is_internal(function):
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            if (kept := _kept(cell.cell_contents, seen)) is not cell.cell_contents:
                cell.cell_contents = kept
    _kept(function.__kwdefaults__, seen)
    if (kept := _kept(function.__defaults__, seen)) is not function.__defaults__:
        function.__defaults__ = kept


def _kept(value: Any, seen: set[int] | None = None) -> Any:
    """Return what to keep in place of a value: a function that is routed, or a partial function or a tuple with such
    functions.

    Args:
        seen: the dicts, lists and functions that have been searched; what they keep is changed in them. None: they are
            not searched.
    """
    kind = type(value)
    if kind is FunctionType:
        if known := _unrouted("", value):
            return _in_front(known, value)
        if seen is not None and not hasattr(value, "hyper_cp_routes"):
            _route_inside(value, seen)
    elif kind is functools.partial:
        parts = value.func, value.args, value.keywords
        func, args, keywords = kept = tuple(_kept(x, seen) for x in parts)
        if any(x is not y for x, y in zip(kept, parts, strict=True)):
            return functools.partial(func, *args, **keywords)
    elif kind is tuple and len(value) <= _REGISTRY:
        found = tuple(_kept(x, seen) for x in value)
        return found if any(x is not y for x, y in zip(found, value, strict=True)) else value
    elif kind in (dict, list) and seen is not None and id(value) not in seen:
        seen.add(id(value))
        _route_entries(value, seen)
    return value


def _route_entries(value: dict[Any, Any] | list[Any], seen: set[int] | None = None) -> None:
    if len(value) <= _REGISTRY:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (kept := _kept(item, seen)) is not item:
                value[key] = kept


def route_loaded() -> None:
    """Put :data:`ROUTED` in front of the functions of all loaded files, whatever their names there: a
    ``context_parallel`` block knows no model, and a mixer may call them through another file."""
    # A notebook (which has no spec) gets new functions with each cell; a file that is loaded again gets another spec.
    again = {x for x, spec in _own.items() if spec is None or getattr(sys.modules.get(x), "__spec__", None) is not spec}
    for file in (sys.modules.keys() - _routed) | again:
        found = vars(module) if isinstance(module := sys.modules.get(file), ModuleType) else {}
        for names in _globals_of(file, found):
            for name, value in list(names.items()):
                _put_in_front(names, name)
                if not file.startswith("torch."):
                    _put_in_front_of_kept(names, name, value, file)
        _routed.add(file)
        if not is_installed(file):
            _own[file] = found.get("__spec__")


def _globals_of(file: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The names of a file, and the globals of its functions where they are another dict: the script of a process that
    ``multiprocessing`` has spawned has a copy of them."""
    found = {id(names): names}
    if not is_installed(file):
        for value in [*names.values()]:
            for function in [value, *(vars(value).values() if isinstance(value, type) else ())]:
                own = function.__globals__ if type(function) is FunctionType else {}  # not those of a decorator
                if own and own.get("__name__") == names.get("__name__"):
                    found[id(own)] = own
    return [*found.values()]


_routed: set[str] = set()
"""The files whose functions have been routed."""
_own: dict[str, Any] = {}
"""Those that are not of an installed package, with what they were loaded by."""
PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "transformers")
"""The packages whose functions are those of :data:`ROUTED`. Others may bear a name and compute something else."""
_INSTALLED = {*sys.stdlib_module_names, LIBRARY, *PACKAGES, "torch", "accelerate", "diffusers", "peft"}


def is_installed(file: str) -> bool:
    """True for the file of an installed package, of Python and of this library; False for one of the user's."""
    package = file.partition(".")[0]
    where = str(getattr(sys.modules.get(package), "__file__", ""))
    return package in _INSTALLED or "site-packages" in where or "dist-packages" in where


def _put_in_front_of_kept(names: dict[str, Any], name: str, value: Any, file: str) -> None:
    """The same for functions that a global of a file keeps: a dict or a list, a partial function, or a class as a
    static method."""
    if type(value) in (dict, list):
        _route_entries(value)
    elif type(value) is functools.partial and (kept := _kept(value)) is not value:
        names[name] = kept
    elif issubclass(type(value), type) and issubclass(value, nn.Module) and value.__module__ == file:
        for key, kept in list(vars(value).items()):
            if type(kept) is staticmethod and (known := _unrouted(key, kept.__func__)):
                setattr(value, key, staticmethod(_in_front(known, kept.__func__)))


_REGISTRY = 64
"""The most entries of a dict, a list or a tuple that is searched."""


def _put_in_front(names: dict[str, Any], name: str) -> None:
    if known := _unrouted(name, names.get(name)):
        names[name] = _in_front(known, names[name])


def _in_front(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    replacement, known = ROUTED.get(name, _not_routed), (original.__module__ or "").split(".")[0] in PACKAGES
    # By mesh: on another one, some of its ranks may not have met the function yet.
    compared: WeakKeyDictionary[BatchState, set[tuple[Any, ...]]] = WeakKeyDictionary()

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        current = running_mixer()
        # A non-reentrant checkpoint inside of a mixer recomputes the call in backward, where no mixer runs any more.
        then, documents = checkpoint.batch_state(routed, lambda: (current, current and current.documents))
        mixer: RunningMixer | None = current
        if current is None and then is not None:
            mixer = copy.copy(then)
            mixer.documents = documents
        if mixer is None:
            if not is_compiling() and (watch := watching.top) is not None:
                watch.inspect_recurrence(name, (*args, *kwargs.values()))
            return original(*args, **kwargs)
        mixer.routed = True
        if mixer.module is not None:  # blocks examine checkpoints themselves
            checkpoint.refuse_without_gradients(mixer.name, name, mixer.grad_enabled)
        if not known and not is_compiling():
            # No integers: those of ranks may differ.
            given = [
                (key, x if isinstance(x, (bool, str, float)) else type(x).__name__)
                for key, x in (*enumerate(args), *kwargs.items())
            ]
            before = compared.setdefault(mixer.cp.batch, set())
            if (now := (torch.is_grad_enabled(), *given)) not in before:
                _compare(mixer, name, original, args, kwargs)
                before.add(now)
        return replacement(mixer, *args, **kwargs)

    routed.hyper_cp_routes = name  # type: ignore[attr-defined]
    return routed


def _compare(
    mixer: RunningMixer, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ``ValueError``, on every rank, unless a function computes what replaces it, on the first tokens."""
    tensors, dim = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], -1 if name in LAST else 1
    grad = not torch.is_inference_mode_enabled()  # also without gradients: weights may be loaded behind this call

    def found() -> str:
        given: Few = {**dict(enumerate(args)), **kwargs}
        few = {key: first_tokens(x, dim) for key, x in given.items()}

        def called(function: Callable[..., Any], few: Few) -> Any:
            places = [x for key, x in few.items() if isinstance(key, int)]
            return function(*places, **{key: x for key, x in few.items() if isinstance(key, str)})

        replacement = functools.partial(called, functools.partial(ROUTED[name], alone(mixer.name)))
        try:
            replacement(few)
        except Exception:  # the call itself will say so
            return ""
        own = functools.partial(called, original)
        verdict = difference(own, replacement, few, given, mixer.module, grad)
        if not verdict and few.get("use_qk_l2norm_in_kernel") and tensors[0].itemsize > 2:
            # Small norms show its epsilon.
            few = {key: x * 1e-3 if key in (0, 1, "q", "k") else x for key, x in few.items()}
            verdict = difference(own, replacement, few, given, mixer.module, grad)
            verdict = verdict and f"with queries and keys of small norm (fla adds 1e-6 to its square) {verdict}"
        return verdict

    real = all(type(x) in (Tensor, nn.Parameter, nn.Buffer) for x in tensors)  # fake tensors, say, have no values
    verdict = unseen(found, tensors[0].device) if real and tensors else ""
    signature = ("module", mixer.name), ("function", name)
    outcome = (("result of the replaced function", "differs" if verdict else "agrees"),)
    mixer.cp.agree("module", signature, mixer.name, once=outcome, always=True)
    if verdict:
        raise ValueError(
            f"{mixer.name} calls {name} of {original.__module__}, which does not compute what {name} of "
            f"its package computes: {verdict}. Under context "
            "parallelism the function of that name would replace it. Call hyper_cp.ops.linear_recurrence or "
            "hyper_cp.ops.causal_conv1d in its place, or use the conventions of that package (tensors [batch, "
            "positions, heads, ...], queries scaled by dk ** -0.5, no softplus unless asked for, (output, state) "
            "returned by delta rules and gated linear attention)"
        )


def alone(name: str) -> RunningMixer:
    """A call of a mixer on one device."""
    return RunningMixer(name, None, cp_mesh.alone(), "contiguous", None)
