"""A mixer as models write them: it calls recurrent functions as globals of its file. They are plain torch here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import kernels
from tests.harness.kernels import chunk_kda as kda_kernel
from tests.harness.recurrence_oracle import convolve, recur


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    out = convolve(x, weight, bias, None)
    return F.silu(out) if options.get("activation") else out


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return recur(q * k.shape[-1] ** -0.5, k, v, g, beta, None), None


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return recur(q * k.shape[-1] ** -0.5, k, v, g, None, None), None


class Mixer(nn.Module):
    """A gated delta net with a short convolution, ``[B, S, C] -> [B, S, C]``."""

    def __init__(self, heads: int = 2, size: int = 4, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        width = heads * size
        self.qkv, self.gates, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 2 * heads),
            nn.Linear(width, width),
        )
        self.conv1d = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = causal_conv1d_fn(
            self.qkv(x).transpose(1, 2), self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        )
        q, k, v = mixed.transpose(1, 2).unflatten(2, (3 * self.heads, -1)).chunk(3, 2)
        g, beta = self.gates(x).chunk(2, -1)
        out, _ = self.rule(q, F.normalize(k, dim=-1), v, F.logsigmoid(g), beta.sigmoid())
        return self.out(out.flatten(2))

    def rule(self, *gates: Tensor) -> Any:
        return chunk_gated_delta_rule(*gates, **self.options)


def fused_recurrent_gated_delta_rule(q: Tensor, *args: Any, **options: Any) -> Tensor:
    """Goes on from a cached state, token by token."""
    return q


class Decodes(Mixer):
    """A mixer that also calls a function for decoding."""

    def forward(self, x: Tensor) -> Tensor:
        return fused_recurrent_gated_delta_rule(super().forward(x))


class CallsModule(Mixer):
    """A mixer that calls its convolution as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.conv1d(x.repeat(1, 1, 3).transpose(1, 2)).sum()


class Renamed(Mixer):
    """A mixer that has imported its recurrence under another name."""

    def rule(self, *gates: Tensor) -> Any:
        return kda_kernel(*gates)


class InOtherFile(Mixer):
    """A mixer that calls its recurrence in another file."""

    def rule(self, *gates: Tensor) -> Any:
        return kernels.chunk_kda(*gates)


class ImportsLate(Mixer):
    """A mixer that imports its recurrence when it runs."""

    def rule(self, *gates: Tensor) -> Any:
        from tests.harness.kernels import chunk_kda

        return chunk_kda(*gates)


class Keeps(Mixer):
    """A mixer that keeps its recurrence as an attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kernel = _RAW[1]

    def rule(self, *gates: Tensor) -> Any:
        return self.kernel(*gates)


_RAW = (chunk_gated_delta_rule, kernels.chunk_kda)  # as they are before anything routes them


class _Calls(nn.Module):
    """Calls a function that its owner gives it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *gates: Tensor) -> Any:
        return self.function(*gates)


def _of_instance(way: Callable[[Callable[..., Any]], Any]) -> Callable[[], Mixer]:
    def make() -> Mixer:
        made = Keeps()
        made.kernel = way(_RAW[1])
        return made

    return make


def _of_class(kernel: Any, way: Callable[[Any], Callable[..., Any]] = lambda kernel: kernel) -> Callable[[], Mixer]:
    def rule(self: Any, *gates: Tensor) -> Any:
        return way(self.kernel)(*gates)

    return lambda: type("OfClass", (Mixer,), {"kernel": kernel, "rule": rule})()


def _default() -> Mixer:
    def rule(self: Any, *gates: Tensor, kernel: Any = _RAW[1]) -> Any:
        return kernel(*gates)

    return type("Default", (Mixer,), {"rule": rule})()


def _closure() -> Mixer:
    kernel = _RAW[1]

    def rule(self: Any, *gates: Tensor) -> Any:
        return kernel(*gates)

    return type("Closure", (Mixer,), {"rule": functools.wraps(Mixer.rule)(rule)})()


def _entry(kernel: Any) -> Callable[..., Any]:
    kept = {"chunk": [kernel]}
    return lambda *gates: kept["chunk"][0](*gates)


WAYS: dict[str, Callable[[], Mixer]] = {
    "partial": _of_instance(functools.partial),
    "partial of a partial": _of_instance(lambda kernel: functools.partial(functools.partial(kernel))),
    "argument of a partial": _of_instance(lambda kernel: functools.partial(lambda f, *x: f(*x), kernel)),
    "lambda": _of_instance(lambda kernel: lambda *gates: kernel(*gates)),
    "list in a dict": _of_instance(_entry),
    "module": _of_instance(lambda kernel: _Calls(functools.partial(kernel))),
    "partial of a class": _of_class(functools.partial(_RAW[1])),
    "tuples of a class": _of_class(((_RAW[1],),), lambda kernel: kernel[0][0]),
    "default": _default,
    "closure": _closure,
}
"""Mixers that keep their recurrence in ways that no name shows, by these."""


class KeepsGatedDeltaNet(Mixer):
    """A mixer that keeps its function as an attribute, as some models do."""

    def __init__(self, heads: int = 2, size: int = 4) -> None:
        super().__init__(heads, size)
        self.chunk_gated_delta_rule = _RAW[0]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3 * self.heads, -1)).chunk(3, 2)
        g, beta = self.gates(x).chunk(2, -1)
        return self.out(self.chunk_gated_delta_rule(q, k, v, F.logsigmoid(g), beta.sigmoid())[0].flatten(2))


class Idle(Mixer):
    """A mixer that calls nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) else super().forward(x)


class DeltaNetElsewhere(nn.Module):
    """A mixer that computes its recurrence itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Stack(nn.Module):
    """Layers of mixers; ``names`` of their attributes."""

    def __init__(self, *kinds: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(**options) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(*kinds: type[nn.Module], **options: Any) -> Stack:
    """A stack in double precision with the same weights on every rank."""
    torch.manual_seed(3)
    return Stack(*(kinds or (Mixer, Mixer)), **options).double()
