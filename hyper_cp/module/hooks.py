"""The hooks of one styled module: q, k, v in, region on; region off, output back."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..mesh.cp_mesh import CPMesh
from ..ops.attention import check_heads, ulysses, ulysses_back
from ..ops.exchange.ulysses import shared_heads
from ..schedule.masks import check_documents, documents_table
from . import dtensor as dtensors
from ._torch import checkpoint as recompute
from ._torch import flex_patch as overridable
from .dispatch_mode import Region, RunningCall, entered, running_call, running_calls
from .mesh_binding import Binding, Style


def attached(module: nn.Module) -> Binding | None:
    """The binding of a styled module, else None."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    # Modules that are ours (integrations) have it themselves.
    for found in (*(getattr(owner, "binding", None) for owner in owners), module.__dict__.get("binding")):
        if isinstance(found, Binding):
            return found
    return None


def bindings(model: nn.Module) -> list[Binding]:
    """Those of all styled modules of a model."""
    return [found for module in model.modules() if (found := attached(module)) is not None]


class Boundary:
    """The hooks of one styled module: q, k, v in, region on; region off, output back."""

    def __init__(self, style: Style, device_mesh: DeviceMesh, module: nn.Module) -> None:
        self.binding = Binding(style, device_mesh, describe(module))
        names = style.qkv_kwarg_names or _parameter_names(module, style.qkv_indices)
        # Position and name of q, k, v; of q and k only, if v is in the same tensor.
        self.places = list(dict.fromkeys(zip(style.qkv_indices or (), names, strict=True)))
        self.takes_documents = "documents" in inspect.signature(module.forward).parameters
        overridable.install(entered)

    @property
    def style(self) -> Style:
        return self.binding.style

    @property
    def name(self) -> str:
        return self.binding.name

    # ---- before the module's forward

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_nesting()
        call = RunningCall(self.binding, module)
        running_calls().append(call)
        kwargs, documents = self._documents(kwargs)
        call.documents, call.place = recompute.settle(self.binding, (documents, self.binding.place))
        if self.style.qkv_indices is None:
            if not self.style.use_local_output:
                call.outputs = call.place.cp_dims.outputs(None, self.style.seq_dim, self.name)
            if call.engine_only() or call.place.parallel:
                self._enter(call)
            return args, kwargs
        where = self._find(args, kwargs)
        qkv = [args[w] if isinstance(w, int) else kwargs[w] for w in where]
        self._check(qkv)
        style, (seq, head) = self.style, (self.style.seq_dim, self.style.head_dim)
        given, (qkv, call.outputs) = qkv, self.binding.local(qkv, seq, head, call.place)
        if not style.use_local_output:
            call.outputs = call.place.cp_dims.outputs(call.outputs, seq, f"{self.name}: q")
        cp = call.place.view(*self.binding.record_heads(qkv[0].shape[head], qkv[1].shape[head]))
        cp.check_shapes(*qkv[:2], documents=call.documents)
        self._check_split(given, qkv, cp, call)
        qkv = [qkv[0], *(shared_heads(x, cp.ulysses.size, head) for x in qkv[1:])]
        qkv = ulysses(qkv, cp, style.mode, seq, head, call.documents)
        call.cp, call.ndim = cp, qkv[0].ndim
        call.length, call.heads = qkv[0].shape[seq], qkv[0].shape[head]
        if call.length == call.heads and not torch.compiler.is_compiling():
            call.handed = tuple(qkv)
        args, kwargs = list(args), dict(kwargs)  # type: ignore[assignment]
        for w, x in zip(where, qkv, strict=True):
            (args if isinstance(w, int) else kwargs)[w] = x  # type: ignore[index]
        if call.engine_only() or cp.size > 1:
            self._enter(call)
        return tuple(args), kwargs

    def _documents(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """Packed documents of this call: passed by keyword, or those of the enclosing block. The keyword
        is ours unless the module has a parameter of that name."""
        if kwargs.get("documents") is None:
            found = self.binding.documents_in_force()
        else:
            found = documents_table(kwargs["documents"])
        if "documents" in kwargs and not self.takes_documents:
            kwargs = {name: value for name, value in kwargs.items() if name != "documents"}
        return kwargs, found

    def _refuse_nesting(self) -> None:
        while (outer := running_call()) is not None:
            if outer.alive():
                raise RuntimeError(
                    f"{self.name} was called inside {outer.binding.name}, and ContextParallel is applied to both: "
                    "the sequence would be exchanged twice. Apply it to one of them"
                )
            # A KeyboardInterrupt ended that call: torch runs no hooks then.
            running_calls().pop().leave()

    def _enter(self, call: RunningCall) -> None:
        call.required = call.cp is None or call.cp.ring.size > 1 or call.engine_only()
        call.region = Region(call)
        call.region.__enter__()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
        """Where q, k, v (q and k, if v is in the same tensor) are in this call: a position or a keyword each."""
        where: list[int | str] = []
        for what, (index, name) in zip("qkv", self.places, strict=False):
            if name in kwargs:
                where.append(name)
            elif index < len(args):
                where.append(index)
            else:
                keyword = f"nor as keyword {name!r}" if name else "nor under a name (the module's forward has no such)"
                raise ValueError(
                    f"{self.name} was called with {len(args)} positional arguments and keywords "
                    f"{sorted(kwargs)}: {what} was found neither at position {index} {keyword}. Set qkv_indices or "
                    "qkv_kwarg_names of ContextParallel to where q, k, v are, or qkv_indices=None if the module "
                    "computes them"
                )
        return where

    def _check(self, qkv: list[Any]) -> None:
        seq, head = self.style.seq_dim, self.style.head_dim
        for what, x in zip("qkv", qkv, strict=False):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"{self.name}: {what} is a {type(x).__name__}, not a tensor. Set qkv_indices or "
                    "qkv_kwarg_names of ContextParallel to where q, k, v are"
                )
            if isinstance(x, DTensor) != isinstance(qkv[0], DTensor):
                raise TypeError(
                    f"{self.name}: q is a {type(qkv[0]).__name__}, but {what} a {type(x).__name__}. Make q, k, v all "
                    "local tensors (use_local_output=True of their projections) or all DTensors"
                )
            if x.ndim < max(seq, head) + 2:
                raise ValueError(
                    f"{self.name}: {what} has shape {tuple(x.shape)}, but seq_dim={seq} and head_dim={head} "
                    f"need {max(seq, head) + 2} dimensions (the last one is the size of a head). Set them to "
                    "where sequence and heads are; if the module computes q, k, v itself, set qkv_indices=None"
                )
        q, k, v = qkv[0], qkv[1], qkv[-1]
        # Under autocast each travels as it is, and all are cast where attention is called, as without us.
        cast = torch.is_autocast_enabled(q.device.type)
        kinds = {"cast" if cast and x.is_floating_point() and x.dtype != torch.float64 else x.dtype for x in (q, k, v)}
        if len(kinds) > 1:
            raise TypeError(
                f"{self.name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must be equal. Cast "
                "them to one dtype before the module"
            )
        if k.shape[seq] != v.shape[seq]:
            raise ValueError(
                f"{self.name}: k and v have {k.shape[seq]} and {v.shape[seq]} positions in dimension seq_dim={seq}; "
                "they must be equal. If these are not sequence lengths, set seq_dim"
            )
        if k.shape[head] != v.shape[head]:
            raise ValueError(
                f"{self.name}: k has {k.shape[head]} and v {v.shape[head]} heads in dimension head_dim="
                f"{head}; they must be equal. If these are not heads, set head_dim"
            )

    def _check_split(self, given: list[Tensor], qkv: list[Tensor], cp: CPMesh, call: RunningCall) -> None:
        """Raise if what this rank holds (of what was ``given``, maybe DTensors) does not split over ``cp``."""
        seq, head, layout = self.style.seq_dim, self.style.head_dim, self.style.mode.layout
        try:
            check_heads(qkv[0].shape[head], qkv[1].shape[head], cp)
        except ValueError as error:
            heads = ", ".join(dtensors.heads_of(what, x, head) for what, x in zip("qk", given, strict=False))
            raise ValueError(f"{self.name}: {heads}. {error}") from None
        check_documents(call.documents, qkv[0].shape[seq] * cp.size)
        sharded = qkv[:1] if self.style.mode.kv_exchange == "replicated" else qkv[:2]
        for what, x in zip("qk", sharded, strict=False):
            if layout in ("head_tail", "auto") and cp.size > 1 and x.shape[seq] % 2:
                raise ValueError(
                    f"{self.name}: the local sequence length {x.shape[seq]} of {what} (dimension {seq}) is odd, but "
                    f"layout={layout!r} holds two chunks: use global lengths divisible by {2 * cp.size}"
                )

    # ---- after it

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = running_call()
        if call is None or call.binding is not self.binding:
            return None  # an earlier hook, or `before` itself, raised: there is no call to end
        running_calls().pop()
        call.leave()
        if output is None:  # an exception is on its way, or the module has nothing to give back
            return None
        if call.required and call.routed == 0:
            raise RuntimeError(
                f"{self.name} returned without calling F.scaled_dot_product_attention or flex_attention, so its "
                "attention covered only the local share of the sequence (or ignored the window or the documents). "
                "Apply ContextParallel to the module that calls it (Hugging Face: load the model with "
                'attn_implementation="sdpa"); without window and documents ulysses_degree=None with q, k, v '
                "as inputs works with any kernel"
            )
        if call.cp is None:
            return self._placed(call, output)
        return self._back(call, output) if call.cp.ulysses.size > 1 or call.outputs is not None else output

    def _back(self, call: RunningCall, output: Any) -> Any:
        """All-to-all back, and into the placement of q: a tensor, or every fitting tensor of a tuple or list."""
        cp, mode, (seq, head) = call.cp, self.style.mode, (self.style.seq_dim, self.style.head_dim)
        items = list(output) if isinstance(output, (tuple, list)) else [output]
        fits = [self._fits(call, x) for x in items]
        if not items or not fits[0]:
            got = tuple(items[0].shape) if items and isinstance(items[0], Tensor) else type(output).__name__
            raise ValueError(
                f"{self.name} returned {got}; its (first) output must be a tensor with {call.length} "
                f"positions in dimension seq_dim={seq} and {call.heads} heads in dimension head_dim={head} "
                "(or heads and head dim flattened there). Return it in the layout of q"
            )
        fitting = [x for x, f in zip(items, fits, strict=True) if f]
        moved = iter(ulysses_back(fitting, cp, mode, seq, head, call.documents))  # type: ignore[arg-type]
        items = [self._placed(call, next(moved)) if f else x for x, f in zip(items, fits, strict=True)]
        return _like(output, items) if isinstance(output, (tuple, list)) else items[0]

    def _fits(self, call: RunningCall, x: Any) -> bool:
        seq, head = self.style.seq_dim, self.style.head_dim
        if not isinstance(x, Tensor) or x.ndim <= max(seq, head) or x.shape[seq] != call.length:
            return False
        flattened = x.ndim == call.ndim - 1 and x.shape[head] % call.heads == 0
        return x.shape[head] == call.heads or flattened

    def _placed(self, call: RunningCall, output: Any) -> Any:
        if call.outputs is None:
            return output
        if isinstance(output, (tuple, list)):
            return _like(output, [self._placed(call, x) for x in output])
        local = isinstance(output, Tensor) and not isinstance(output, DTensor)
        return call.outputs.wrap(output) if local else output


def _like(container: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list of the type of ``container``."""
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def describe(module: nn.Module) -> str:
    return f"module {type(module).__name__}"


def _parameter_names(module: nn.Module, indices: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names of the forward parameters at these positions ("" where the signature has none)."""
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(parameters[i] if i < len(parameters) else "" for i in indices or ())
