"""Calls of functions that are often wrong on a share of the sequence: what they were, and in which module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...module import attention_calls
from .share import Positions

ALONG = {
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll", "sort", "argsort", "diff"),
    *("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "norm", "median"),
    *("softmax", "log_softmax", "logsumexp"),
}
"""Functions that mix positions if their dimension is the sequence."""
MIXERS = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "interpolate"),
    *("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "lp_pool1d"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "batch_norm"),
}
"""Functions that mix the positions of their input."""
DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
RANDOM = {"bernoulli", "bernoulli_", "rand_like", "randn_like", "rand", "randn"}
LIBRARY = __name__.partition(".")[0]

Found = tuple[str, str]
"""The kind of a call, and the call in words."""


class Observer(TorchFunctionMode):
    """While entered, hands every call that may be wrong on a share to ``found(kind, text)``."""

    def __init__(self, positions: Callable[[], Positions | None], found: Callable[[str, str], None]) -> None:
        super().__init__()
        self.positions, self.found = positions, found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with suppress(RuntimeError):  # values cannot be read in transforms of functions, and need not be
            what = classify(func, args, kwargs, out, self.positions())
            if what is not None and not _ours():
                self.found(*what)
        return out


def classify(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, positions: Positions | None
) -> Found | None:
    """The kind and description of a call, if it may be wrong on a share. ``positions`` is None in the run without
    context parallelism, where only random numbers matter."""
    name = getattr(func, "__name__", "")
    random = _random(func, name, args, kwargs)
    if random is not None or positions is None:
        return random
    x = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    local = positions.local
    if func is torch.arange or name == "arange":
        counts = isinstance(out, Tensor) and out.shape == (local,) and out[0] == 0 and out[-1] == local - 1
        if counts and not positions.first:
            return "positions", f"torch.arange counts 0 to {local - 1}, the local length"
    elif attention_calls.key_of(func) in attention_calls.ROUTED or attention_calls.spelled(func) is not None:
        if isinstance(x, Tensor) and local in x.shape:
            return "attention", f"{name} attends {local} local positions only"
    elif name == "__getitem__":
        return _slice(x, out, positions)
    elif name in MIXERS and isinstance(x, Tensor) and local in x.shape and not _pointwise(name, args, kwargs):
        return "mixing", f"{name} over {local} local positions"
    elif name in ALONG and isinstance(x, Tensor) and local in _sizes_along(x, args, kwargs):
        kind = "attention" if name == "softmax" and x.ndim > 2 else "mixing"
        return kind, f"{name} over {local} local positions"
    return None


def _random(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    if name in DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return ("dropout", f"{name}(p={p}) is active") if training and p else None
    if func is F.scaled_dot_product_attention:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return ("dropout", f"{name}(dropout_p={p}) is active") if p else None
    return ("dropout", f"{name} draws random numbers") if name in RANDOM else None


def _slice(x: Any, out: Any, positions: Positions) -> Found | None:
    """A slice that begins at position 0 of a table, or that moves the local rows against each other."""
    if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim != out.ndim:
        return None
    local = positions.local
    for before, after in zip(x.shape, out.shape, strict=True):
        if before == local and local - 3 <= after < local:
            return "shift", f"a slice keeps {after} of the {local} local positions"
        begins = after == local and before >= min(positions.wholes) and x.data_ptr() == out.data_ptr()
        if begins and not positions.first:
            return "positions", f"a slice takes the first {local} rows of a table of {before}"
    return None


def _pointwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for convolutions of one position, and for batch norm that uses its running statistics."""
    if name.startswith("conv"):
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        return isinstance(weight, Tensor) and all(size == 1 for size in weight.shape[2:])
    if name == "batch_norm":
        return not kwargs.get("training", args[5] if len(args) > 5 else False)
    return False


def _sizes_along(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes of the dimensions that a reduction or scan runs over."""
    positional = next((a for a in args[1:] if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)), None)
    dims = kwargs.get("dim", kwargs.get("dims", positional))
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return [x.shape[d] for d in dims if isinstance(d, int) and -x.ndim <= d < x.ndim]


def _ours() -> bool:
    """True if the library itself makes the call: it knows what it does. (The demo's model is a user's model.)"""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        routing = frame.f_code.co_name == "__torch_function__"  # a mode hands on what somebody else has called
        if not routing and module != __name__ and module.partition(".")[0] != "torch":
            return bool(module.startswith(f"{LIBRARY}.") and not module.startswith(f"{LIBRARY}.cli."))
        frame = frame.f_back
    return False
