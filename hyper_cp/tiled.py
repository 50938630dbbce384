"""Runs a position-wise module, such as an MLP, chunk by chunk over the local sequence."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import get_device_states, set_device_states

from ._torch.compiling import is_compiling
from ._torch.leaves import has_hooks, other_leaf
from ._torch.modes import tree_leaves
from ._torch.once import once
from .module.mesh_binding import binding_of
from .module.mixers.calls import names_in
from .module.mixing import mixing
from .ops.writes import Written, writes

_ATTENTION = re.compile(r"Attention|Attn")
_DRAWS = re.compile(r"(?i)dropout|\brand|bernoulli|multinomial|noise|\bnormal_?\b|uniform|exponential_|rrelu|gumbel")
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_CHUNK = object()
"""The argument that is replaced by a chunk of the tensor."""


def tiled(module: nn.Module, chunks: int, *, seq_dim: int = 1) -> nn.Module:
    """Make a position-wise module run chunk by chunk over its sequence, in place; return it.

    Nothing inside the module is saved for backward, which runs each chunk again: what an MLP makes between its
    projections exists for one chunk at a time. Values and gradients are those of one call. Gradients of parameters are
    added up in fp32 (fp64 for fp64), rounded once, and leave the module once: FSDP2 gathers its weights once in forward
    and once in backward and reduces their gradients once, and DDP does not see chunks. A recompute draws the same
    random numbers (dropout); in compiled code a module that may draw some runs as a whole::

        for layer in model.layers:
            tiled(layer.ffn, 8)  # before torch.compile; before or after fully_shard and parallelize_module

    Args:
        module: treats every position by itself. Its forward takes one tensor (anything else is passed on) and returns
            one tensor with the same sequence.
        chunks: their number; fewer if the sequence is shorter.
        seq_dim: the sequence dimension of its input and output; negative ones count from the end.

    Returns:
        The module, whose results have the same shapes as before.

    Raises:
        ValueError: if the module is known, by its type or its name, to mix positions, or is sharded inside by FSDP2.
        TypeError: in a call with several tensors, or with one inside of a list.
        NotImplementedError: in a call with a backward, if the module writes to its input in place.
        RuntimeError: in backward, if weights or buffers were changed in place or replaced since forward.

    Note:
        The module runs once for each chunk, in forward and again in backward. Side effects happen in every run: an
        attribute that it writes holds the value of the last chunk, a counter counts every chunk twice, a list that it
        appends to gets an entry for each run, hooks of inner modules see chunks, and a weight that it makes anew in
        each run (spectral norm) differs from chunk to chunk. Auxiliary losses that it stores
        (of a router, for example) have no gradient. Tile a module without side effects.

        Random numbers in compiled code are found by the names of functions that the module calls or keeps (dropout,
        rand, bernoulli ...). Do not tile a module there that draws otherwise, as in a custom ``autograd.Function``.

        Backward runs the module and its children in the mode (``train()`` or ``eval()``) of their forward. Other
        attributes that they read must be in backward what they were in forward: a number that a schedule changes in
        between, such as the ``p`` of a dropout, would change gradients.

    Example::

        >>> mlp = tiled(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), 8)
        >>> mlp(torch.randn(1, 30, 4)).shape
        torch.Size([1, 30, 4])

    Source: tiled MLPs of Arctic long-sequence training (arXiv 2506.13996).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}. The forward of an nn.Module is replaced. Pass one, for example the "
            "MLP of a layer"
        )
    for name, value in (("chunks", chunks), ("seq_dim", seq_dim)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}. It is a number. Pass an int")
    if chunks < 1:
        raise ValueError(f"chunks={chunks} is below 1. It is the number of parts of the local sequence. Pass 1 or more")
    if "forward" in vars(module):
        raise ValueError(
            f"module {type(module).__name__} has a forward that was replaced: it is tiled or compiled already, or "
            "another library has replaced it. Tiling would lose that forward. Tile the module once, before the others"
        )
    for name, inner in module.named_modules():
        how = _mixes(inner)
        if how is not None:
            where = f"module {name!r} ({type(inner).__name__}) inside it" if name else "it"
            raise ValueError(
                f"module {type(module).__name__} cannot be tiled: {where} {how}, so a chunk alone would compute "
                "something else. Tile only what treats every position by itself, such as the MLP"
            )
    module.forward = _Tiled(module, chunks, seq_dim)
    return module


def _mixes(module: nn.Module) -> str | None:
    if binding_of(module) is not None or isinstance(module, nn.MultiheadAttention):
        return "is attention"
    return "is attention" if _ATTENTION.search(type(module).__name__) else mixing(module)


def _calls(module: nn.Module, function: Any, names: re.Pattern[str], depth: int = 3) -> bool:
    """True if a function (or one of several) has such a name, or calls one that has: in its file, in one that this
    imports, in a closure, or as a method or an attribute of the module."""
    if isinstance(function, (list, tuple, dict)) and depth > 0:
        kept = function.values() if isinstance(function, dict) else function
        return any(_calls(module, x, names, depth - 1) for x in kept)
    made = function.func if isinstance(function, partial) else function
    made = inspect.unwrap(made) if inspect.isroutine(made) else made
    if names.search(_name_of(made)):
        return True
    if callable(made) and not isinstance(made, (type, nn.Module)) and not inspect.isroutine(made):
        made = inspect.unwrap(type(made).__call__)  # of an object
    if not inspect.isfunction(made) or depth == 0:
        return False
    called = names_in(made.__code__) - set(dict(module.named_children()))  # these are known by their types
    closure: dict[str, Any] = {}
    for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty one
            closure[name] = cell.cell_contents
    called |= {*closure}
    files = [x for name in called if inspect.ismodule(x := made.__globals__.get(name))]
    places = [vars(module), made.__globals__, closure, *(vars(file) for file in files)]
    inner = (x for name in called for x in (getattr(type(module), name, None), *(place.get(name) for place in places)))
    return bool(names.search(" ".join(called))) or any(_calls(module, x, names, depth - 1) for x in inner)


def _name_of(x: Any) -> str:
    with suppress(Exception):  # configurations may answer to any name, or raise any error
        return str(x.__name__)
    return ""


class _Tiled:
    """Replaces the forward of a tiled module."""

    def __init__(self, module: nn.Module, chunks: int, seq_dim: int) -> None:
        self.module, self.chunks, self.seq_dim = module, chunks, seq_dim
        self.buffers = _Buffers(module)
        self.draws = any(
            _calls(inner, type(inner).forward, _DRAWS) for inner in module.modules() if not isinstance(inner, _DROPOUTS)
        )
        """True if the module may draw random numbers by the functions that its forward calls, in training or not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        inside = [name for name, m in self.module.named_modules() if name and isinstance(m, FSDPModule)]
        if inside:
            raise ValueError(
                f"module {self._name} is tiled, and fully_shard was applied to {inside[0]!r} inside it. Its weights "
                "would be gathered for every chunk. Apply fully_shard to the tiled module, or to a block around it"
            )
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if len(tensors) != 1 or not any(x is tensors[0] for x in (*args, *kwargs.values())):
            raise TypeError(
                f"module {self._name} is tiled and got {len(tensors)} tensors, those inside of lists included. It cuts "
                "one tensor, which is an argument by itself, into chunks. Tile a module whose forward takes one"
            )
        (x,) = tensors
        if not -x.ndim <= self.seq_dim < x.ndim:
            raise ValueError(
                f"module {self._name} is tiled along seq_dim={self.seq_dim}, and its input has shape "
                f"{tuple(x.shape)}. The input is cut into chunks along that dimension. Pass tiled(..., seq_dim=) the "
                "dimension of the sequence"
            )
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not is_compiling() and any(has_hooks(p) for p in parameters):
            raise NotImplementedError(
                f"module {self._name} is tiled, and a weight of it has a hook (Tensor.register_hook), which would be "
                "called for each chunk and for their sum. Use register_post_accumulate_grad_hook, or do not tile it"
            )
        before, call = writes(x), _Call(self, args, kwargs, x, len(parameters))
        if is_compiling() and torch.is_grad_enabled() and self._draws():
            return call.run(x)  # inductor draws numbers of its own, which only its own recompute finds again
        out: Tensor = _Chunks.apply(call, x, *parameters)
        if out.requires_grad and writes(x) != before:
            raise NotImplementedError(
                f"module {self._name} is tiled, and writes to its input in place (inplace=True, say). Backward makes "
                "each chunk again, and the values of forward are gone. Let it make a new tensor, as x = x * 2 does in "
                "place of x *= 2, or do not tile it"
            )
        return out

    def _draws(self) -> bool:
        """True if the module may draw random numbers now; adapters may have been added to it since it was tiled."""
        dropouts = [m for m in self.module.modules() if isinstance(m, _DROPOUTS)]
        return self.draws or any(m.training for m in dropouts)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


class _Buffers:
    """The buffers of a tiled module, some of which (counters) the module writes itself in each of its runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Counter[str] = Counter()
        """Writes to each by the module itself."""
        self.made: set[str] = set()
        """Names of those that the module makes anew itself."""

    def read(self) -> dict[str, Written]:
        """Return every buffer with the number of writes to it by others than the module."""
        return {name: (b, writes(b) - self.own[name]) for name, b in self.module.named_buffers()}

    @contextmanager
    def run(self) -> Iterator[None]:
        """Take writes of the time of this block for the module's own."""
        before = self.read()
        try:
            yield
        finally:
            for name, b in self.module.named_buffers():
                old, of_others = before.get(name, (None, 0))
                if old is b:
                    self.own[name] = writes(b) - of_others
                else:
                    self.made.add(name)

    def changed(self, then: dict[str, Written]) -> list[str]:
        """Return the names of those that others have written to or replaced since they were read."""
        now = self.read()
        same = {
            name for name, (b, count) in then.items() if name in now and now[name][0] is b and now[name][1] == count
        }
        return [name for name in then if name not in same and name not in self.made]


class _Call:
    """One call of a tiled module: its arguments except the tensor, and the states that a recompute must find again."""

    def __init__(
        self, tiled: _Tiled, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, parameters: int
    ) -> None:
        self.module, self.parameters = tiled.module, parameters
        compiled = is_compiling()  # a compiled graph computes again with what it has saved
        self.weights = {} if compiled else {name: (p, writes(p)) for name, p in tiled.module.named_parameters()}
        self.modes = [] if compiled else [(module, module.training) for module in tiled.module.modules()]
        self.buffers = None if compiled else tiled.buffers
        self.read: dict[str, Written] = {}
        """The buffers as they were after the forward."""
        self.args = [_CHUNK if a is x else a for a in args]
        self.kwargs = {name: _CHUNK if a is x else a for name, a in kwargs.items()}
        self.dim = tiled.seq_dim % x.ndim
        self.size = max(1, -(-x.shape[self.dim] // tiled.chunks))
        self.device = x.device.type
        self.random = torch.get_rng_state(), *get_device_states(x)
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {self.device, "cpu"}
        ]

    def check_weights(self) -> None:
        """Raise ``RuntimeError`` for a weight or buffer that has been written to since forward, as autograd does, or
        replaced."""
        now = dict(self.module.named_parameters())
        # FSDP 1 makes new views of its flat parameter, which are no leaves, for backward.
        replaced = [
            name
            for name, (p, _) in self.weights.items()
            if (q := now.get(name)) is not p and (q is None or q.is_leaf or p.is_leaf)
        ]
        if replaced:
            raise RuntimeError(
                f"module {type(self.module).__name__} is tiled, and its weight {replaced[0]!r} is another tensor in "
                "backward, which computes each chunk again, than in forward (torch.func.functional_call, or a weight "
                "that was replaced). Its gradients would be those of other weights. Do not tile it there"
            )
        changed = [name for name, (p, count) in self.weights.items() if writes(p) != count]
        if changed:
            raise RuntimeError(
                f"module {type(self.module).__name__} is tiled, and its weight {changed[0]!r} was changed in place "
                "between forward and backward, which computes each chunk again. Its gradients would be those of other "
                "weights. Step the optimizer after backward"
            )
        written = [] if self.buffers is None else self.buffers.changed(self.read)
        if written:
            raise RuntimeError(
                f"module {type(self.module).__name__} is tiled, and its buffer {written[0]!r} was changed in place or "
                "replaced between forward and backward, which computes each chunk again. Its gradients would be those "
                "of other values. Change it before forward or after backward"
            )

    def check_leaves(self, out: Tensor, x: Tensor) -> None:
        """Raise ``NotImplementedError`` if a chunk was computed from a leaf that is no weight of the module."""
        if not is_compiling():
            leaf = other_leaf(out, [x, *self.module.parameters()])
            if leaf is not None:
                raise NotImplementedError(
                    f"module {type(self.module).__name__} is tiled, and reads a tensor (shape {tuple(leaf.shape)}, or "
                    "what was computed from it) that requires a gradient and is no parameter of it, which would get no "
                    "gradient. Make it a parameter of the module, or do not tile it"
                )

    def run(self, x: Tensor) -> Tensor:
        """Call the module's own forward with one chunk."""
        args = [x if a is _CHUNK else a for a in self.args]
        kwargs = {name: x if a is _CHUNK else a for name, a in self.kwargs.items()}
        out: Any = type(self.module).forward(self.module, *args, **kwargs)
        if not isinstance(out, Tensor) or out.ndim <= self.dim or out.shape[self.dim] != x.shape[self.dim]:
            kind, shape = type(self.module).__name__, getattr(out, "shape", None)
            raise ValueError(
                f"module {kind} is tiled and returned a {type(out).__name__} (shape {shape}) for a chunk of shape "
                f"{tuple(x.shape)}. The results of all chunks are joined along the sequence. Tile a module that "
                f"returns one tensor, with the sequence in dimension {self.dim}"
            )
        return out

    def parts(self, length: int) -> Iterator[tuple[int, int]]:
        """Start and length of every chunk; one empty chunk of an empty sequence."""
        return ((start, min(self.size, length - start)) for start in range(0, max(1, length), self.size))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Cast as in forward, tell the module's own writes to its buffers from those of others, and read them."""
        with self.autocasts():
            if self.buffers is None:
                yield
                return
            with self.buffers.run():
                yield
            self.read = self.buffers.read()

    @contextmanager
    def autocasts(self) -> Iterator[None]:
        """Cast as in forward, and keep no casts: one that was made without gradients must not serve a recompute."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
            yield

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Restore the random numbers, autocast and modes of the forward for the time of a recompute."""
        state, devices, states = self.random
        kind = self.device if devices else "cuda"  # without devices its name has no meaning
        others = [(module, module.training) for module, training in self.modes if module.training != training]
        with torch.random.fork_rng(devices, device_type=kind), self.running(), torch.enable_grad():
            torch.set_rng_state(state)
            if devices:
                set_device_states(devices, states, device_type=self.device)
            try:
                for module, training in others:
                    module.training = not training
                yield
            finally:
                for module, training in others:
                    module.training = training


class _Chunks(torch.autograd.Function):
    """The chunks of one call. Parameters are inputs, so that autograd receives the gradient of each once."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call
        # In graphs autograd finds weights that were changed in place since; else `check_weights` does, also under FSDP.
        ctx.save_for_backward(x, *(parameters if is_compiling() else ()))
        out = None
        with call.running():
            for start, length in call.parts(x.shape[call.dim]):
                part = call.run(x.narrow(call.dim, start, length))
                if out is None:
                    shape = list(part.shape)
                    shape[call.dim] = x.shape[call.dim]
                    out = part.new_empty(shape)
                out.narrow(call.dim, start, length).copy_(part)
                del part  # before the next chunk is made
        return out  # type: ignore[return-value]

    @staticmethod
    @once("a tiled module")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, *_), of_x = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1]
        parameters = [p for p in call.module.parameters() if p.requires_grad]
        if len(parameters) != call.parameters:
            raise RuntimeError(
                f"module {type(call.module).__name__} is tiled and had {call.parameters} parameters that require "
                f"gradients in forward, and {len(parameters)} in backward. Backward returns one gradient for each of "
                "those in forward. Freeze parameters before the forward"
            )
        call.check_weights()
        total: list[Tensor | None] = [None] * len(parameters)
        grad_x = torch.zeros_like(x) if of_x else None
        with call.as_in_forward():
            for start, length in call.parts(x.shape[call.dim]):
                part = x.narrow(call.dim, start, length).detach().requires_grad_(of_x)
                out = call.run(part)
                if start == 0:
                    call.check_leaves(out, part)
                wanted = [*parameters, *([part] if of_x else [])]
                found = [*torch.autograd.grad(out, wanted, grad.narrow(call.dim, start, length), allow_unused=True)]
                if grad_x is not None and (of_part := found.pop()) is not None:
                    grad_x.narrow(call.dim, start, length).copy_(of_part)
                total = [_add(a, b) for a, b in zip(total, found, strict=True)]
                del part, out, found, wanted
        rounded = (a if a is None else a.to(p.dtype) for a, p in zip(total, parameters, strict=True))
        return (None, grad_x, *rounded)


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add a gradient to a sum in fp32 or fp64, in place."""
    if grad is None:
        return total
    exact = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(exact) if total is None else total.add_(grad)
