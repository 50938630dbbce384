"""The table of everything that mixes positions along the sequence, and is therefore wrong on one rank's share of it.

The guards of plans and of ``context_parallel`` blocks, ``tiled``, the checks of Hugging Face models and the causes that
``verify`` names all read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .mixers.calls import calls_library, is_mixer, keeps_function, runs_over_ranks

Arguments = tuple[Any, ...]
GATHER = (
    'Gather the sequence around it (handler.combine(x, length=batch.length, gradients="shares"), then '
    "handler.dispatch(x, pad_value=0))"
)


def _behind_channels(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    return any(size in lengths for size in x.shape[2:])


def _convolved(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    kernel = weight.shape[2:] if isinstance(weight, Tensor) else ()
    dilation: Any = kwargs.get("dilation", args[5] if len(args) > 5 else 1)
    widest = max(1, *dilation) if isinstance(dilation, (tuple, list)) else max(1, dilation)
    # A causal convolution often pads its input itself, by what the kernel reaches at most.
    reaches = [(width - 1) * widest for width in kernel]
    sizes = x.shape[x.ndim - len(kernel) :]
    return any(
        reach > 0 and any(0 <= size - length <= reach for length in lengths)
        for reach, size in zip(reaches, sizes, strict=False)
    )


def _recurrent(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    packed = len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim == 1  # the rows of each step
    return any(size in lengths for size in (args[1].shape if packed else x.shape[:2]))


def _in_training(args: Arguments, kwargs: dict[str, Any]) -> bool:
    """True for a batch norm that takes the statistics of its input."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _batch_normalised(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    if not _in_training(args, kwargs):
        return False
    flattened = x.ndim == 2 and any(x.shape[0] % length == 0 for length in lengths if length > 1)
    return flattened or _behind_channels(x, args, kwargs, lengths)


def _pooled(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True for windows of more than one position. Before those that overlap the input may have been padded by what a
    window reaches."""
    kernel = kwargs.get("kernel_size", args[1] if len(args) > 1 else None)
    stride = kwargs.get("stride", args[2] if len(args) > 2 else None) or kernel
    each = (_each(given, x.ndim - 2) for given in (kernel, stride, kwargs.get("dilation", 1)))
    for n, size, step, dilation in zip(x.shape[2:], *each, strict=False):
        if n in lengths and size != 1:
            return True
        if size is not None and size > step and any(0 < n - length <= (size - 1) * dilation for length in lengths):
            return True
    return False


def _pooled_to(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    sizes = _each(kwargs.get("output_size", args[1] if len(args) > 1 else None), x.ndim - 2)
    return any(n in lengths and size not in (n, None) for n, size in zip(x.shape[2:], sizes, strict=False))


def _each(given: Any, number: int) -> list[Any]:
    return [*given] if isinstance(given, (tuple, list)) else [given] * number


def _dims(x: Tensor, args: Arguments, kwargs: dict[str, Any]) -> list[int]:
    """The dimensions that a function was given, counted from the first one."""
    positional = next((a for a in args[1:] if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)), None)
    dims = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", positional)))
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return [d % x.ndim for d in dims if isinstance(d, int) and -x.ndim <= d < x.ndim]


def _along_dim(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    dims = _dims(x, args, kwargs)
    return any(x.shape[d] in lengths for d in dims) or _grid(x, dims) in lengths


def _grid(x: Tensor, dims: list[int]) -> int:
    """The positions of a grid, whose rows and columns (and frames) these dimensions are; 0 for one dimension."""
    return math.prod(x.shape[d] for d in dims) if len(dims) > 1 else 0


def _on_grid(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True for tokens that were put on a grid ``[B, C, rows, columns]``, or one of frames, too."""
    return x.ndim > 3 and math.prod(x.shape[2:]) in lengths


def _convolved_grid(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """The same, with a kernel that reaches further than its stride. (That of patches does not.)"""
    weight, sides = kwargs.get("weight", args[1] if len(args) > 1 else None), x.ndim - 2
    kernel = weight.shape[2:] if isinstance(weight, Tensor) else _each(weight or kwargs.get("kernel_size"), sides)
    place = 3 if isinstance(weight, Tensor) else 2
    stride = kwargs.get("stride", args[place] if len(args) > place else 1 if place == 3 else kernel)
    reaches = any(size > step for size, step in zip(kernel, _each(stride or kernel, sides), strict=False))
    return reaches and _on_grid(x, args, kwargs, lengths)


def _normalised_grid(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    return _in_training(args, kwargs) and _on_grid(x, args, kwargs, lengths)


def _along_rows(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True for a dimension before the last one, which mostly holds channels. (Whole numbers are counted to sort tokens
    by experts.)"""
    dims = [] if isinstance(x, nn.Parameter) or not x.is_floating_point() else _dims(x, args, kwargs)
    return any(x.shape[d] in lengths for d in dims if d < x.ndim - 1) or _grid(x, dims) in lengths


def _ordered(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True for numbers that are ordered along a dimension, the last one by default. (Whole numbers are ordered to sort
    tokens by experts.)"""
    dims = _dims(x, args, kwargs) or [x.ndim - 1]
    return x.is_floating_point() and any(x.shape[d] in lengths for d in dims if d >= 0)


def _normalised(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    shape: Any = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    return len(shape) > 1 and any(n in lengths for n in shape)


Along = Callable[[Tensor, Arguments, dict[str, Any], Collection[int]], bool]


def _past_second(along: Along) -> Along:
    """The same for functions with another argument, such as the kind of a norm, in the second place."""
    return lambda x, args, kwargs, lengths: along(x, (x, *args[2:]), kwargs, lengths)


def _along_third(default: int | tuple[int, ...] | None) -> Along:
    """For functions whose third argument is a dimension, or several; None: all."""

    def along(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
        given = kwargs.get("dim", kwargs.get("dims", args[2] if len(args) > 2 else default))
        return _along_dim(x, (x, tuple(range(x.ndim)) if given is None else given), {}, lengths)

    return along


def _always_along(dim: int) -> Along:
    return lambda x, args, kwargs, lengths: _along_dim(x, (x, dim), {}, lengths)


def _shifted(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True if one side of a dimension is cut off, and the other is filled up."""
    pad: Any = kwargs.get("pad", args[1] if len(args) > 1 else ())
    sides = zip(pad[::2], pad[1::2], x.shape[::-1], strict=False)
    return any(left * right < 0 and size in lengths for left, right, size in sides)


def _unfolded(x: Tensor, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int]) -> bool:
    """True for windows that overlap, of a tensor (whose arguments are a dimension, a size and a step) or of pixels. The
    tensor may have been padded before by what a window reaches."""
    of_tensor = [*args[1:], *(kwargs[name] for name in ("dimension", "size", "step") if name in kwargs)]
    if len(of_tensor) > 2:
        dim, size, step = of_tensor
        windows = [(x.shape[dim], size, step)]
    else:
        each = (
            kwargs.get("kernel_size", of_tensor[0] if of_tensor else 1),
            kwargs.get("dilation", 1),
            kwargs.get("stride", 1),
        )
        sizes = zip(x.shape[-2:], *(_each(n, 2) for n in each), strict=False)
        windows = [(n, (kernel - 1) * dilation + 1, step) for n, kernel, dilation, step in sizes]
    return any(0 <= n - length < size and step < size for n, size, step in windows for length in lengths)


@dataclass(frozen=True)
class Mixing:
    """One row of the table: modules and functions that mix positions in the same way."""

    does: str
    """The predicate of a sentence about such a module; ``{0}`` is the module."""
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[str, ...] = ()
    harmless: Callable[[Any], bool] = lambda module: False
    """True for a module of these types that treats every position by itself."""
    along: Along = lambda *_: False
    """True if a function, called with an input and these arguments, mixes one of these numbers of positions."""
    instead: str = GATHER
    """The way out, as a sentence without its full stop; ``{0}`` is the names of the modules."""
    refused: bool = True
    """False where the sequence is seldom the dimension that is mixed, or harm is not sure."""
    warned: bool = False
    """True: such a call is warned of. Else ``verify`` takes what is not refused for evidence only."""
    activations: bool = False
    """True: positions may be flattened with the rows of a batch, and only modules that run are meant: gradients of
    weights, and statistics of an optimizer, are sums over a share, too, and right."""


_SHIFT = f"{GATHER}, use handler.roll_tensor for a shift"


_POOLS_OF_GRIDS = tuple(f"{kind}{n}d" for kind in ("max_pool", "avg_pool") for n in (2, 3))
_ADAPTIVE = tuple(f"adaptive_{name}" for name in _POOLS_OF_GRIDS)


def _fourier(dims: str) -> tuple[str, ...]:
    return tuple(f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih"))


_REDUCTIONS = (
    *("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean"),
    *("median", "softmax", "log_softmax", "softmin", "logsumexp", "std_mean", "prod", "quantile", "aminmax", "mode"),
    *("nanmean", "nansum", "nanmedian", "nanquantile"),
)
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "normalize", "cosine_similarity", "kthvalue")
"""Reductions with another argument, such as the kind of a norm, before their dimension."""
TABLE = (
    Mixing(
        "convolves {0.kernel_size[0]} neighbouring positions",
        (nn.Conv1d, nn.ConvTranspose1d),
        ("conv1d", "conv_transpose1d"),
        harmless=lambda module: module.kernel_size[0] == 1,
        along=_convolved,
        instead="If it is causal, call hyper_cp.ops.causal_conv1d in its place",
    ),
    Mixing(
        "carries a state from position to position",
        (nn.RNN, nn.LSTM, nn.GRU, nn.RNNBase),
        ("rnn_tanh", "rnn_relu", "lstm", "gru"),
        along=_recurrent,
    ),
    Mixing(
        "carries a state from call to call, which may be from position to position",
        (nn.RNNCellBase,),
        ("rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell"),
        along=lambda *_: True,
    ),
    Mixing(
        "takes its statistics over positions",
        (nn.BatchNorm1d,),
        ("batch_norm",),
        harmless=lambda module: not module.training and module.track_running_stats,
        along=_batch_normalised,
    ),
    Mixing(
        "takes its statistics over positions",
        (nn.InstanceNorm1d, nn.GroupNorm),
        ("instance_norm", "group_norm"),
        along=_behind_channels,
    ),
    Mixing(
        "pools positions",
        (nn.MaxPool1d, nn.AvgPool1d),
        tuple(f"{kind}{n}d" for kind in ("max_pool", "avg_pool") for n in (1, 2, 3)),
        along=_pooled,
    ),
    Mixing("pools positions", (nn.LPPool1d,), tuple(f"lp_pool{n}d" for n in (1, 2, 3)), along=_past_second(_pooled)),
    Mixing(
        "pools positions",
        (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
        tuple(f"adaptive_{kind}{n}d" for kind in ("max_pool", "avg_pool") for n in (1, 2, 3)),
        along=_pooled_to,
    ),
    Mixing(
        "takes a softmax over dimension {0.dim}, which may be the sequence",
        (nn.Softmax, nn.LogSoftmax, nn.Softmin),
        harmless=lambda module: module.dim is not None and (module.dim == -1 or module.dim > 1),
        instead="If that is its last dimension, write dim=-1. " + GATHER,
    ),
    # Their modules are mostly for pixels, and calls show what they are for.
    Mixing("convolves pixels", functions=("conv2d", "conv3d"), along=_convolved),
    Mixing("convolves pixels", (nn.Conv2d, nn.Conv3d), refused=False),
    Mixing("takes its statistics over pixels", (nn.BatchNorm2d, nn.SyncBatchNorm), refused=False),
    Mixing("resizes the sequence", functions=("interpolate",), along=_behind_channels, refused=False, warned=True),
    Mixing(
        "scans or orders positions",
        functions=("cumsum", "cumsum_", "cumprod", "cumprod_", "cummax", "cummin", "logcumsumexp", "flip", "sort"),
        along=_along_dim,
        refused=False,
        warned=True,
    ),
    Mixing("orders positions", functions=("sort", "argsort"), along=_ordered, refused=False, warned=True),
    Mixing(
        "shifts or selects positions",
        functions=("roll", "diff", "topk"),
        along=_along_third(-1),
        instead=_SHIFT,
        refused=False,
        warned=True,
    ),
    *(
        Mixing(does, functions=functions, along=along, instead=instead, refused=False, warned=True)
        for does, functions, along, instead in (
            ("shifts positions", ("pad", "constant_pad_nd"), _shifted, _SHIFT),
            ("takes windows of positions", ("unfold",), _unfolded, GATHER),
            ("transforms positions", _fourier(""), _along_third(-1), GATHER),
            ("transforms positions", _fourier("2"), _along_third((-2, -1)), GATHER),
            ("transforms positions", _fourier("n"), _along_third(None), GATHER),
            ("transforms positions", ("stft",), _always_along(-1), GATHER),
            ("turns positions", ("rot90",), _along_third((0, 1)), GATHER),
            ("turns or orders positions", ("flipud", "msort"), _always_along(0), GATHER),
            ("turns or sums up positions", ("fliplr", "local_response_norm"), _always_along(1), GATHER),
            ("differentiates positions", ("gradient",), _along_third(None), GATHER),
            ("scans positions", ("cumulative_trapezoid",), _along_third(-1), GATHER),
            ("takes its statistics over positions", ("layer_norm", "rms_norm"), _normalised, GATHER),
            ("takes its statistics over a grid of positions", ("batch_norm",), _normalised_grid, GATHER),
            ("takes its statistics over a grid of positions", ("instance_norm", "group_norm"), _on_grid, GATHER),
            ("convolves a grid of positions", ("conv2d", "conv3d"), _convolved_grid, GATHER),
            ("pools a grid of positions", _POOLS_OF_GRIDS, _convolved_grid, GATHER),
            ("pools or resizes a grid of positions", (*_ADAPTIVE, "interpolate"), _on_grid, GATHER),
        )
    ),
    *(
        Mixing(
            "reduces positions",
            functions=functions,
            along=along,
            instead='Call handler.pool(x, "mean") in its place, which takes "sum" and "last" too, or gather the '
            "sequence before it with handler.combine",
            refused=False,
            warned=True,
            activations=True,
        )
        for functions, along in ((_REDUCTIONS, _along_rows), (_NORMS, _past_second(_along_rows)))
    ),
    Mixing("reduces positions", functions=_REDUCTIONS, along=_along_dim, refused=False),
    Mixing("reduces positions", functions=_NORMS, along=_past_second(_along_dim), refused=False),
)
ROUTED = Mixing("runs along the sequence", instead="RecurrentContextParallel on {0} in the plan runs it over all ranks")
"""Modules that call recurrences and convolutions which can be routed."""
NAMED = Mixing(
    "mixes positions along the sequence", instead="Call hyper_cp.ops.linear_recurrence in place of its recurrence"
)
"""Modules that are named after a recurrence or a convolution, and call none that can be routed."""

BY_NAME: dict[str, list[Mixing]] = {}
"""The rows by the names of their functions and of their types of modules."""
for _row in TABLE:
    for _name in (*_row.functions, *(kind.__name__ for kind in _row.modules)):
        BY_NAME.setdefault(_name, []).append(_row)

_NAMES = re.compile(
    r"Mamba|LightningAttention|DeltaNet|DeltaAttention|R[Ww][Kk][Vv]|RetNet|Retention|Hyena|LinearAttention|RG?LRU|LSTM|ShortConv"
)
"""Names of types that run a recurrence or a convolution along the sequence, in the libraries that have them."""
_NAMES_OF_PARTS = re.compile(r"Norm|MLP")
"""Names of parts of such modules that do not."""


def mixes_by_name(module: nn.Module) -> bool:
    """True for a module that is named after a recurrence or a convolution along the sequence, and calls no function of
    the library that runs over all ranks. (Attention of a model may be named after the model: it says that it is
    causal.)"""
    name = type(module).__name__
    named = bool(_NAMES.search(name) and not _NAMES_OF_PARTS.search(name)) and not getattr(module, "is_causal", False)
    return named and not calls_library(type(module))


def row_of(module: nn.Module) -> Mixing | None:
    """The row of a module that mixes positions; None for other modules."""
    for row in TABLE:
        if row.refused and isinstance(module, row.modules):
            return None if row.harmless(module) else row
    if is_mixer(type(module)) or keeps_function(module):
        return ROUTED
    return NAMED if mixes_by_name(module) else None


def mixing(module: nn.Module) -> str | None:
    """The predicate of a sentence about a module that mixes positions; None for other modules."""
    row = row_of(module)
    return None if row is None else row.does.format(module)


def mixing_modules(root: nn.Module) -> dict[str, Mixing]:
    """The modules of a model that mix positions, by name. A block or a model that is named after its mixers is none of
    them: its mixers are."""
    found = {}
    for name, module in root.named_modules():
        row = row_of(module)
        inner = (part for part in module.modules() if part is not module) if row is NAMED else ()
        if row is not None and not any(runs_over_ranks(type(part)) for part in inner):
            found[name] = row
    return found


def row_of_call(
    name: str, args: Arguments, kwargs: dict[str, Any], lengths: Collection[int], rows: Collection[int] = ()
) -> Mixing | None:
    """The first row of a function for which this call of it mixes one of these numbers of positions; ``rows``: those of
    batches, whose positions may be flattened."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return None
    for row in BY_NAME.get(name, ()):
        flattened = {n * length for n in rows for length in lengths} if row.activations else set()
        if row.along(x, args, kwargs, {*lengths, *flattened}):
            return row
    return None
