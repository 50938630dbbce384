"""Attention that a module of transformers writes out: a product, a softmax and a product, recorded and then routed.

GPT-J, CodeGen, GPT-Neo, XGLM, BLOOM, MPT and others multiply queries by keys themselves. While such a module runs, the
product returns :class:`Scores` in place of a tensor. It records scales, biases and masks, and at the product with the
values it becomes one attention call over the sequence of all ranks. Any other use of it raises an error, so nothing is
computed on this rank's keys alone.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..._torch.modules import is_running
from .attention import attention_forward
from .forward import ForwardState, running, state_for
from .latents import NAME
from .masks import MaskRequest
from .modules import run_in
from .relative import RelativeBias
from .seams import in_file, replace_in_file, source_of

PRODUCTS = {torch.matmul: 0, torch.bmm: 0, Tensor.matmul: 0, Tensor.bmm: 0, torch.baddbmm: 1, Tensor.baddbmm: 1}
"""Products of queries and keys, and the place of the queries among their arguments."""
BIASES = {"build_alibi_tensor", "build_mpt_alibi_tensor"}
"""Methods of decoders, or functions of their files (Falcon), that make ALiBi biases ``[B * H | H, 1, S]``, which are
added to the scores of each head."""
WRITTEN = (
    "The module writes its attention out. Its products are recorded and then routed, which cannot be part of a "
    "compiled graph. Compile without fullgraph=True"
)
"""The reason for which such a module runs outside of graphs."""


def written_attention(decoder: PreTrainedModel) -> list[nn.Module]:
    """The modules of a decoder that write attention out; none if there are fewer than layers, or if the decoder makes
    masks by itself."""
    if not re.search(r"create_(causal|bidirectional)_mask\(", source_of(type(decoder).forward)):
        return []
    found = [module for module in decoder.modules() if writes_out(type(module))]
    return found if len(found) >= getattr(decoder.config, "num_hidden_layers", 1) else []


def writes_out(kind: Any) -> bool:
    """True for a type of module that multiplies, takes a softmax, and calls no attention function."""
    source = "".join(source_of(x) for x in kind.__mro__ if not x.__module__.startswith(("torch.", "builtins")))
    product = any(f"{name}(" in source for name in ("matmul", "bmm", "einsum"))
    if "topk(" in source and not re.search("Att|Indexer", kind.__name__):
        return False  # a router of experts
    return "oftmax(" in source and product and "get_interface(" not in source


def makes_biases(decoder: nn.Module) -> bool:
    """True for a decoder whose biases of scores are known."""
    return any(hasattr(decoder, name) or in_file(decoder, name) is not None for name in BIASES)


def record(decoder: PreTrainedModel, modules: list[nn.Module]) -> None:
    """Route the attention that these modules write out, and make biases for the positions of all ranks."""
    decoder.config._attn_implementation = NAME  # it makes requests for masks, which modules add to scores
    for module in modules:
        run_in(module, _recorded)
        # Dynamo does not trace recorded scores: it breaks the graph between them, and mixes up their attributes (MPT).
        module.forward = MethodType(torch.compiler.disable(type(module).forward, reason=WRITTEN), module)
    for name in BIASES & set(dir(decoder)):
        setattr(decoder, name, _of_all_ranks(getattr(decoder, name)))


def bias_all_ranks(decoder: nn.Module) -> None:
    """Let a decoder make biases for the positions of all ranks by a function of its file, if it does."""
    for name in BIASES - {*dir(decoder)}:
        replace_in_file(type(decoder), name, _of_all_ranks)


def _of_all_ranks(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that makes ALiBi biases, for the positions of all ranks while a forward on several of them runs."""

    @torch.compiler.disable(reason=WRITTEN)
    def built(first: Any, *args: Any, **kwargs: Any) -> Tensor:
        state = running()
        if not isinstance(state, ForwardState):
            return build(first, *args, **kwargs)
        if state.counted is None:
            raise NotImplementedError(
                f"{build.__name__} makes ALiBi biases for new tokens, which attention to a cache that is split over "
                "ranks does not know. Generate in context_parallel_mesh(model, a mesh of one rank)"
            )
        if isinstance(first, Tensor) and first.ndim == 4 and first.numel() > 1:
            raise NotImplementedError(
                f"{build.__name__} got an attention mask of shape {tuple(first.shape)}. ALiBi biases are made of "
                "a mask of tokens. Pass one with two dimensions"
            )
        whole = state.whole(state.counted.to(torch.int64))
        if isinstance(first, Tensor):  # BLOOM counts the tokens of a mask
            bias = build(whole, *args, **kwargs)
        else:  # MPT: heads and a length
            bias = build(first, whole.shape[1], *args[1:], **kwargs)
        state.biases.append(bias)
        return bias

    return built


@torch.compiler.disable(reason=WRITTEN)
def _recorded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchFunctionMode | None:
    state = state_for(module)
    if not isinstance(state, ForwardState):
        return None
    hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 3)
    return Recorder(module, state, hidden.shape[0])


class Recorder(TorchFunctionMode):
    """While entered, the product of queries and keys returns scores that are recorded."""

    def __init__(self, module: nn.Module, state: ForwardState, rows: int) -> None:
        super().__init__()
        self.module, self.state, self.rows = module, state, rows
        self.zeros: list[Tensor] = []
        """Tensors that ``torch.zeros`` has made in this call: a product may be added to one (GPT-NeoX Japanese)."""
        self.routed = False
        """True once scores have been made: each module attends once in a call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_running(self.module):  # a KeyboardInterrupt ends a module's call without its hooks
            return func(*args, **kwargs)
        given = (*args, *kwargs.values())
        if any(isinstance(x, Scores) for x in given):
            return next(x for x in given if isinstance(x, Scores)).apply(func, args, kwargs)
        if func in PRODUCTS and (scores := self._scores(func, args, dict(kwargs))) is not None:
            return scores
        found = func(*args, **kwargs)
        self.zeros += [found] if func is torch.zeros else []
        return found

    def _scores(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
        at = PRODUCTS[func]
        names = ("input", "batch1", "batch2")[1 - at :]
        given = [*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)]
        query, keys = given[at : at + 2]
        if query.ndim < 3 or keys.ndim < 3:  # by a weight
            return None
        square = query.shape[-2] == keys.shape[-1] or self.module in self.state.cross
        if self.routed or query.shape[:-2] != keys.shape[:-2] or not square:
            shapes = f"a product of {tuple(query.shape)} and {tuple(keys.shape)}"
            Scores(self, query, keys, query).refuse(shapes)
        self.routed = True
        like = torch.empty(*query.shape[:-1], keys.shape[-1], dtype=query.dtype, device="meta")
        scores = Scores(self, query, keys.transpose(-1, -2), like, float(kwargs.get("alpha", 1.0)))
        if not at or any(x is given[0] for x in self.zeros):
            return scores
        return scores.plus(given[0]) if kwargs.get("beta", 1.0) == 1 else None


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one attention call, or the weights that a softmax makes of them; recorded, not computed."""

    mode: Recorder
    query: Tensor
    key: Tensor
    like: Tensor
    """A tensor of the same shape and dtype without memory."""
    scale: float = 1.0
    bias: Tensor | None = None
    """``[B | 1, H, 1, S]``, over the keys of all ranks."""
    relative: RelativeBias | None = None
    window: int | None = None
    mask: MaskRequest | None = None
    """The mask that the decoder has requested, once it has been applied."""
    weights: bool = False
    dropout: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """That of the tensor."""
        return self.query.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.apply(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        return scores.apply(func, args, kwargs or {})

    def apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of scores; ``NotImplementedError`` unless it is one that attention consists of."""
        name = func if isinstance(func, str) else getattr(func, "__name__", str(func)).strip("_")
        step = _STEPS.get(name)
        if step is None or (step is not _where and args[:1] != (self,)):
            self.refuse(name)
        given = args if step is _where else args[1:]
        try:
            _signature(step).bind(self, *given, **kwargs)
        except TypeError:
            self.refuse(f"{name} with other arguments")
        return step(self, *given, **kwargs)

    def refuse(self, how: str) -> NoReturn:
        """Raise for what is not a step of attention."""
        raise NotImplementedError(
            f"{type(self.mode.module).__name__} writes attention out, with a step ({how}) that context parallelism "
            "does not know. Its scores are not computed on this rank, which has a share of the keys. Use a model that "
            "calls transformers' AttentionInterface or SDPA"
        )

    def times(self, factor: Any) -> Scores:
        """Scores with another scale."""
        plain = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1)
        if (
            self.weights
            or self.bias is not None
            or self.relative is not None
            or not plain
            or getattr(factor, "requires_grad", False)
        ):
            self.refuse("a product")
        return replace(self, scale=self.scale * float(factor))

    def plus(self, other: Any) -> Scores:
        """Scores with the mask of the decoder, or with a bias that it has made for all ranks."""
        if self.weights or not isinstance(other, (Tensor, MaskRequest, RelativeBias)):
            self.refuse("a sum")
        if isinstance(other, RelativeBias):
            return replace(self, relative=other)
        if isinstance(other, MaskRequest):
            return replace(self, mask=other)
        for bias in self.mode.state.biases:  # slices share its memory
            if bias.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and self.bias is None:
                heads = self.query.shape[:-2].numel() // self.mode.rows
                return replace(self, bias=bias.view(-1, heads, 1, bias.shape[-1]))
        return self.refuse("a bias")

    def to(self, *args: Any, **kwargs: Any) -> Scores:
        """Scores of another dtype."""
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        return replace(self, like=self.like.to(found[0]) if found else self.like)

    def attend(self, value: Tensor) -> Tensor:
        """The product of weights and values: attention over the sequence of all ranks."""
        mask, rows, state = self.mask, self.mode.rows, self.mode.state
        if not self.weights or (mask is None and self.mode.module not in state.cross):
            self.refuse("a product with values before a mask and a softmax")
        if self.window is not None and mask is not None:
            mask = copy.copy(mask)
            mask.window = self.window
        q, k, v = (x.to(value.dtype).view(rows, -1, *x.shape[-2:]) for x in (self.query, self.key, value))
        options: dict[str, Any] = {"scaling": self.scale, "dropout": self.dropout, "key_bias": self.bias}
        options["position_bias"] = self.relative
        out, _ = attention_forward(self.mode.module, q, k, v, mask, context_parallel=state, **options)
        return out.transpose(1, 2).reshape(*self.like.shape[:-1], value.shape[-1])


# --------------------------------------------------------------------------- steps


def _filled(scores: Scores, mask: Any, value: Any) -> Scores:
    return scores.plus(mask) if value < -1e4 else scores.refuse("masked_fill")


def _largest(scores: Scores, other: Any) -> Scores:
    """``torch.max`` with the lowest number of a dtype changes nothing but hidden scores."""
    return scores if other.numel() == 1 and other <= torch.finfo(scores.dtype).min else scores.refuse("max")


def _softmax(scores: Scores, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Scores:
    if scores.weights or dim not in (-1, scores.like.ndim - 1):
        scores.refuse("softmax")
    return replace(scores, weights=True, like=scores.like if dtype is None else scores.like.to(dtype))


def _dropout(scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores:
    if not scores.weights:
        scores.refuse("dropout")
    return replace(scores, dropout=p if training else 0.0)


def _where(scores: Scores, visible: Tensor, kept: Any, value: Any) -> Scores:
    """A band of visible keys, in a buffer of the module (GPT-Neo): it is causal, and maybe has a window."""
    for buffer in scores.mode.module.buffers(recurse=False):
        own = buffer.untyped_storage().data_ptr() == visible.untyped_storage().data_ptr() and kept is scores
        if own and value <= torch.finfo(scores.dtype).min and (width := _band(buffer)):
            return replace(scores, window=width if width < buffer.shape[-1] else None)
    return scores.refuse("where")


def _band(buffer: Tensor) -> int:
    """The width of the band of a matrix of visible keys ``[1, 1, S, S]``; 0 if it is none."""
    width, (rows, columns) = int(buffer[0, 0, -1].sum()), buffer.shape[-2:]
    at = torch.arange(rows, device=buffer.device)
    behind = at[:, None] - at
    return width if rows == columns and bool((buffer == ((behind >= 0) & (behind < width))).all()) else 0


def _reshaped(name: str) -> Callable[..., Scores]:
    return lambda scores, *shape: replace(scores, like=getattr(scores.like, name)(*shape))


_signature = cache(inspect.signature)
_STEPS: dict[str, Callable[..., Any]] = {
    "mul": Scores.times,
    "truediv": lambda scores, x: scores.times(1 / x if isinstance(x, (int, float, Tensor)) else x),
    "add": Scores.plus,
    "masked_fill": _filled,
    "max": _largest,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
    "to": Scores.to,
    "float": lambda scores: scores.to(torch.float32),
    "type_as": lambda scores, x: scores.to(x.dtype),
    "view": _reshaped("view"),
    "reshape": _reshaped("reshape"),
    "size": lambda scores, *dim: scores.like.size(*dim),
    "matmul": Scores.attend,
    "bmm": Scores.attend,
}
"""The functions and methods that modules may call with scores and weights."""


def _operator(name: str) -> Callable[..., Any]:
    return lambda scores, *args: scores.apply(name, (scores, *args), {})


for _name in ("add", "mul", "truediv", "sub", "radd", "rmul", "getitem", "neg", "matmul"):
    setattr(Scores, f"__{_name}__", _operator(_name))
