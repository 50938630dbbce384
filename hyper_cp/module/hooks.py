"""The hooks of one styled module: they exchange q, k, v before its forward, and its output after it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import checkpoint, flex_patch
from .._torch.compiling import is_compiling
from .._torch.modules import calls_running, numbered_alike
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling
from ..ops.checks import agree, check_shards
from ..ops.config import Call
from ..ops.differentiable import refuse_forward_mode
from ..ops.exchange.ulysses import Ulysses
from . import dtensor
from .dispatch_mode import abandon, begin, calls, current_call, dispatching
from .latents import LatentLayer
from .mesh_binding import Binding, Style, describe, documents_keyword, takes_documents
from .model import begin_call
from .running_call import ExchangedInputs, RunningCall, shares_in


class AttentionHooks:
    """The forward-pre-hook and the forward hook of one styled module."""

    def __init__(self, style: Style, device_mesh: DeviceMesh, module: nn.Module) -> None:
        self.binding = Binding(style, device_mesh, describe(module))
        names = style.qkv_kwarg_names or _parameter_names(module, style.qkv_indices)
        self.arguments = list(dict.fromkeys(zip(style.qkv_indices or (), names, strict=True)))
        """Position and name of q, k, v among the module's arguments; of q and k only, if v is in the same tensor."""
        self.takes_documents = takes_documents(module)
        self.latents = None if style.latents_from is None else LatentLayer(self.name, style.latents_from, module)
        flex_patch.install(dispatching)

    @property
    def style(self) -> Style:
        return self.binding.style

    @property
    def name(self) -> str:
        return self.binding.name

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        with numbered_alike(module):
            module.register_forward_pre_hook(self.before, with_kwargs=True)
            # Runs after an exception too: nothing of a call may be left behind. Before hooks that are there already:
            # they get this rank's share, and not its heads.
            module.register_forward_hook(self.after, prepend=True, with_kwargs=True, always_call=True)

    # ---- before the module's forward

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange heads of q, k, v, and begin to route attention calls. A module that computes q, k, v itself leaves
        the exchange to its attention call."""
        self._refuse_nesting(module)
        given, kwargs = documents_keyword(kwargs, self.takes_documents)
        tensors = (*args, *kwargs.values())
        mesh, documents = begin_call(self.binding, module, lambda: (self.binding.active_documents(given),), tensors)
        if is_compiling():
            checkpoint.refuse_recompiled(self.name, documents is not None)
        call = RunningCall(self.binding, module, mesh, documents, latents=self.latents)
        calls.push(call)
        if self.style.qkv_indices is None:
            call.shares = self._shares(args, kwargs)
            if not self.style.use_local_output:
                call.outputs = mesh.cp_dims.outputs(None, self.style.seq_dim, self.name)
            parallel = mesh.parallel
        else:
            args, kwargs = self._exchange(call, args, kwargs)
            parallel = call.exchanged is not None and call.exchanged.cp.size > 1
        if parallel or call.engine_only:
            call.must_route = call.exchanged is None or call.exchanged.cp.ring.size > 1 or call.engine_only
            begin(call)
        return args, kwargs

    def _shares(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
        """Rows and positions of the tensors that the module is given, if it has not warned of these yet."""
        if is_compiling() or self.binding.warned:
            return []
        return shares_in((*args, *kwargs.values()), 0 if self.style.seq_dim == 0 else 1)

    def _exchange(
        self, call: RunningCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with q, k, v unwrapped, checked and exchanged."""
        where = self._find(args, kwargs)
        given = [args[w] if isinstance(w, int) else kwargs[w] for w in where]
        self._check(given)
        style, (seq, head) = self.style, (self.style.seq_dim, self.style.head_dim)
        qkv, call.outputs = self.binding.local(given, seq, head, call.mesh)
        if not style.use_local_output:
            call.outputs = call.mesh.cp_dims.outputs(call.outputs, seq, f"{self.name}: q")
        cp = call.mesh.view(
            *self.binding.record(qkv[0].shape[head], qkv[1].shape[head], qkv[0].shape[seq], len(qkv[0]) if seq else 0)
        )
        if cp.size > 1:
            refuse_forward_mode(self.name, *qkv)
        agree(cp, Call(documents=call.documents, name=self.name), style.mode, *qkv)
        try:
            q, k = ((x.shape[head], x.shape[seq]) for x in qkv[:2])
            check_shards(q, k, cp, style.mode, call.documents)
            cp.batch.record_call(q[1], None if style.cross_attention else style.mode.layout, cp.size)
        except ValueError as error:
            counts = ", ".join(dtensor.heads_of(what, x, head) for what, x in zip("qk", given, strict=False))
            raise ValueError(f"{self.name} (sequence in dimension {seq}): {counts}. {error}") from None
        with calling(self.name):
            qkv = self._ulysses(call, cp).to_heads(*qkv)
        length, heads = qkv[0].shape[seq], qkv[0].shape[head]
        ambiguous = length == heads and not is_compiling()
        call.exchanged = ExchangedInputs(cp, length, heads, qkv[0].ndim, tuple(qkv) if ambiguous else ())
        positional, keywords = list(args), dict(kwargs)
        for w, x in zip(where, qkv, strict=True):
            (positional if isinstance(w, int) else keywords)[w] = x  # type: ignore[index]
        return tuple(positional), keywords

    def _ulysses(self, call: RunningCall, cp: CPMesh) -> Ulysses:
        style = self.style
        return Ulysses(cp, style.mode.layout, style.seq_dim, style.head_dim, call.documents)

    def _refuse_nesting(self, module: nn.Module) -> None:
        while (outer := current_call()) is not None:
            # The call that begins here is on the stack too: where it is one of the same module, there must be another.
            if outer.alive() and (is_compiling() or outer.module is not module or calls_running(module) > 1):
                raise RuntimeError(
                    f"{self.name} was called inside {outer.binding.name}, and ContextParallel is applied to both. The "
                    "sequence would be exchanged twice. Apply it to one of them"
                )
            # A KeyboardInterrupt ended that call: torch runs no hooks then.
            calls.remove(outer)
            abandon(outer)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
        """Positions or keywords of q, k, v (q and k, if v is in the same tensor) in this call. (By hand, because
        ``inspect.Signature.bind`` is slow and cannot be traced by torch.compile in all versions.)"""
        where: list[int | str] = []
        for what, (index, name) in zip("qkv", self.arguments, strict=False):
            if name in kwargs:
                where.append(name)
            elif index < len(args):
                where.append(index)
            else:
                keyword = (
                    f"nor as keyword {name!r}"
                    if name
                    else "nor under a name (the module's forward has no parameter there)"
                )
                raise ValueError(
                    f"{self.name} was called with {len(args)} positional arguments and keywords "
                    f"{sorted(kwargs)}: {what} was found neither at position {index} {keyword}. Set qkv_indices or "
                    "qkv_kwarg_names of ContextParallel to where q, k, v are, or qkv_indices=None if the module "
                    "computes them"
                )
        return where

    def _check(self, qkv: list[Any]) -> None:
        """Raise unless q, k, v are tensors of one kind with the dimensions that the style names."""
        seq, head = self.style.seq_dim, self.style.head_dim
        for what, x in zip("qkv", qkv, strict=False):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"{self.name}: {what} is a {type(x).__name__}, not a tensor. Set qkv_indices or "
                    "qkv_kwarg_names of ContextParallel to where q, k, v are"
                )
            if isinstance(x, DTensor) != isinstance(qkv[0], DTensor):
                raise TypeError(
                    f"{self.name}: q is a {type(qkv[0]).__name__}, and {what} is a {type(x).__name__}. All three must "
                    "be of one kind. Make them local tensors (use_local_output=True of their projections) or DTensors"
                )
            if x.ndim < max(seq, head) + 2:
                raise ValueError(
                    f"{self.name}: {what} has shape {tuple(x.shape)}, but seq_dim={seq} and head_dim={head} "
                    f"need {max(seq, head) + 2} dimensions (the last one is the size of a head). Set them to "
                    "where sequence and heads are; if the module computes q, k, v itself, set qkv_indices=None"
                )
        self._check_pair(qkv[0], qkv[1], qkv[-1])

    def _check_pair(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise unless k and v fit each other, and dtypes are equal."""
        # Under autocast each travels in its own dtype, and the attention call casts all of them, as PyTorch does.
        cast = torch.is_autocast_enabled(q.device.type)
        kinds = {"cast" if cast and x.is_floating_point() and x.dtype != torch.float64 else x.dtype for x in (q, k, v)}
        if len(kinds) > 1:
            raise TypeError(
                f"{self.name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}. They must be equal. Cast "
                "them to one dtype before the module"
            )
        for argument, noun in (("seq_dim", "positions"), ("head_dim", "heads")):
            dim = getattr(self.style, argument)
            if k.shape[dim] != v.shape[dim]:
                raise ValueError(
                    f"{self.name}: k and v have {k.shape[dim]} and {v.shape[dim]} {noun} in dimension "
                    f"{argument}={dim}. They must be equal. If these are not {noun}, set {argument}"
                )

    # ---- after it

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Stop routing, and exchange the output back."""
        if self.latents is not None:
            self.latents.forget()
        call = current_call()
        if call is None or call.binding is not self.binding:
            return None  # an earlier hook, or `before` itself, raised: there is no call to end
        calls.remove(call)
        call.leave()
        if output is None:  # an exception is on its way, or the module has nothing to give back
            return None
        if call.must_route and not call.routed:
            raise RuntimeError(
                f"{self.name} returned without calling F.scaled_dot_product_attention or flex_attention. Other "
                "attention covers only the local share of the sequence, or ignores the window or the documents. Apply "
                "ContextParallel to the module that calls one of them (Hugging Face: load the model with "
                'attn_implementation="sdpa"); leave a module that passes mesh= to hyper_cp.ops out of the plan, or '
                "mesh= out of the call; without window and documents ulysses_degree=None with q, k, v as inputs works "
                "with any kernel"
            )
        if call.exchanged is None:
            return self._placed(call, output)
        if call.exchanged.cp.ulysses.size == 1 and call.outputs is None:
            return output
        return self._back(call, call.exchanged, output)

    def _back(self, call: RunningCall, inside: ExchangedInputs, output: Any) -> Any:
        """All-to-all back, and into the placement of q: a tensor, or every fitting tensor of a tuple or list."""
        items = list(output) if isinstance(output, (tuple, list)) else [output]
        fits = [self._fits(inside, x) for x in items]
        if not items or not fits[0]:
            got = tuple(items[0].shape) if items and isinstance(items[0], Tensor) else type(output).__name__
            raise ValueError(
                f"{self.name} returned {got}. Its (first) output must be a tensor with {inside.length} "
                f"positions in dimension seq_dim={self.style.seq_dim} and {inside.heads} heads in dimension "
                f"head_dim={self.style.head_dim} (or heads and head dim flattened there). Return it in the layout of q"
            )
        fitting = [x for x, f in zip(items, fits, strict=True) if f]
        with calling(self.name):
            moved = iter(self._ulysses(call, inside.cp).to_sequence(fitting))
        items = [self._placed(call, next(moved)) if f else x for x, f in zip(items, fits, strict=True)]
        return _like(output, items) if isinstance(output, (tuple, list)) else items[0]

    def _fits(self, inside: ExchangedInputs, x: Any) -> bool:
        """True for a tensor of the module's output that has its sequence and heads where q had them."""
        seq, head = self.style.seq_dim, self.style.head_dim
        if not isinstance(x, Tensor) or x.ndim <= max(seq, head) or x.shape[seq] != inside.length:
            return False
        flattened = x.ndim == inside.ndim - 1 and x.shape[head] % inside.heads == 0
        return x.shape[head] == inside.heads or flattened

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


def _parameter_names(module: nn.Module, indices: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names of the forward parameters at these positions ("" where the signature has none)."""
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(parameters[i] if i < len(parameters) else "" for i in indices or ())
