"""Inkling of transformers: position biases that each query mixes of learned profiles, its own sinks and convolutions.

Its modules make a bias ``[B, H, S, S]``. In a prepared model they return the states of the queries and the profiles,
and attention mixes them tile by tile. The sink of a query is one more state, taken from all its scores, which leaves a
sink of zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.exchange.whole_sequences import gather_sequence
from ...ops.kernels.scores import MaskMod, Score, ScoreMod, Where, register
from ...ops.recurrence.windows import windows
from .forward import ForwardState, mixer_state, running
from .relative import RelativeBias
from .seams import known_as, replace_in_file

_SECOND = {
    "RelativePositionBias": ("d60c29b3b8223693",),
    "DynamicShortConvolution": ("e22887f3ed658a9b",),
    "BlockAttentionResidual": ("f6f169c527b98195",),
    "SlidingAttention": ("e9ee850f6569d851",),
    "FullAttention": ("9488f90d699ca11a",),
}
KNOWN = {
    "Inkling": {"RelativeLogits": ("d4dda7302fe69252",), "Attention": ("fe6f93198e0490bc",)},
    "Inkling2": _SECOND,
    "Inkling2Loop": {**_SECOND, "MessageAttentionResidual": ("72af4fd22b24c891",)},
}
"""Digests in transformers 5.24 of the forwards that are replaced, and of those that call them, by the first words of
the names of a file's classes."""


def _known_in_file(*parts: str) -> Callable[[type[nn.Module]], bool]:
    """A function that returns True for the classes of these names in each file."""
    checks = [
        known_as([f"{name}{part}" for part in parts], {f"{name}{part}": x for part, x in digests.items()})
        for name, digests in KNOWN.items()
    ]
    return lambda kind: any(check(kind) for check in checks)


has_profiles = _known_in_file("RelativeLogits")
makes_states = _known_in_file("RelativePositionBias")
"""True for a module of Inkling 2 that makes the states of queries by itself."""
convolves = _known_in_file("DynamicShortConvolution")
attends_to_blocks = _known_in_file("BlockAttentionResidual", "MessageAttentionResidual")
"""True for a module in which each token attends to its own states in earlier layers."""


# --------------------------------------------------------------------------- biases


@dataclass(frozen=True)
class QueryBias(RelativeBias):
    """The bias of a layer, which the states of this rank's queries mix of profiles."""

    values: Tensor
    """The states ``[B, S/n, H, d]``."""
    profiles: Tensor
    """``[d, extent]``, one number for each distance to an earlier key."""
    state: ForwardState
    name: str
    sinks: Tensor | None = None
    """``[B, H, S/n, 1]``: a logit of each query that takes weight and gives no value."""

    def to(self, *_: Any) -> QueryBias:
        """The same: states keep their dtype."""
        return self

    float = to

    @property
    def dtype(self) -> torch.dtype:
        """That of the states."""
        return self.profiles.dtype

    def __mul__(self, factors: Tensor) -> QueryBias:
        """The biases, each query's with a factor of its own, ``[1, 1, S/n, 1]``."""
        return replace(self, values=self.values * factors.transpose(1, 2).to(self.dtype))

    def score(self, query: Tensor) -> Score:
        """The function that adds the bias, and takes the sink, of each query of all ranks. One gather of states."""
        states, profiles = self.values, F.pad(self.profiles, (0, 1))
        if self.sinks is not None:
            states = torch.cat([states, self.sinks.transpose(1, 2).to(self.dtype)], -1)
            profiles = torch.cat([profiles, -torch.ones_like(profiles[:1])])
        state, layout = self.state, self.state.style.mode.layout
        whole = gather_sequence(states, state.batch.documents, state.mesh.views[0].key, layout, 1, True, False)
        return Profiles(whole, profiles.to(whole.dtype))  # under autocast states are narrower than profiles


def with_sinks(bias: QueryBias, max_logits: bool, options: dict[str, Any]) -> tuple[QueryBias, dict[str, Any]]:
    """The bias and the options of a call with sinks of each query, as those of one with a sink of zero."""
    if max_logits:
        raise NotImplementedError(
            f"{bias.name} has a sink for each query, which is taken from all scores, and a style with max_logits=True. "
            "The largest scores would be other ones. Use max_logits=False"
        )
    sinks = options["sinks"]
    rest = {name: x for name, x in options.items() if name != "sinks"}
    return replace(bias, sinks=sinks), {**rest, "s_aux": sinks.new_zeros(sinks.shape[1])}


_number = itertools.count()


class Profiles(Score):
    """A score that adds the product of a query's states ``[B, S, H, d]`` and the profile ``[d, extent + 1]`` of the
    distance to the key; the last profile is that of all keys further away."""

    signature = "profiles"

    def __init__(self, states: Tensor, profiles: Tensor) -> None:
        self.key = f"profiles={next(_number)}"
        self.tensors = states, profiles
        # Without gradients there is no backward.
        self.captured = tuple(x for x in self.tensors if x.requires_grad) if torch.is_grad_enabled() else ()
        register(self)

    def _mixed(self, at: Where, captured: Sequence[Tensor]) -> Tensor:
        """The biases ``[B, H, Sq, extent + 1]`` of a tile's queries."""
        instead = {id(x): y for x, y in zip(self.captured, captured, strict=True)}
        states, profiles = (instead.get(id(x), x) for x in self.tensors)
        return (states[at.batch[:, None, None], at.rows[:, None], at.heads] @ profiles).transpose(1, 2)

    def mods(self, where: Where | None) -> tuple[ScoreMod | None, MaskMod | None]:
        at = _known(where)
        mixed, rows, cols = self._mixed(at, self.captured), at.rows, at.cols
        last = mixed.shape[-1] - 1
        return lambda score, b, h, i, j: score + mixed[b, h, i, _profile(rows[i] - cols[j], last)], None

    def __call__(self, logits: Tensor, where: Where | None, captured: Sequence[Tensor]) -> Tensor:
        at = _known(where)
        mixed = self._mixed(at, captured)
        index = _profile(at.rows[:, None] - at.cols, mixed.shape[-1] - 1)
        return logits + mixed.gather(-1, index.expand(logits.shape))


def _known(where: Where | None) -> Where:
    if where is None:
        raise RuntimeError("profiles need positions")
    return where


def _profile(distance: Tensor, last: int) -> Tensor:
    """The number of the profile of a distance."""
    return torch.where(distance < 0, last, distance).clamp(max=last)


def mixed_by(module: Any, state: ForwardState, relative_states: Tensor, *_: Tensor) -> QueryBias:
    """The forward of a module of Inkling over all ranks."""
    return QueryBias(relative_states, module.proj, state, type(module).__name__)


def mixed_by_hidden(module: Any, state: ForwardState, hidden: Tensor, _: Any, position_ids: Tensor) -> QueryBias:
    """The same of a module of Inkling 2, which makes the states."""
    states = module.linear(hidden).view(*hidden.shape[:-1], module.num_heads, -1)
    return QueryBias(module.norm(states, position_ids), module.proj, state, type(module).__name__)


def leave_out_distances(decoder: nn.Module) -> None:
    """Let the file of a decoder with such modules make no matrix of the distances of this rank's tokens, which nothing
    reads while a forward over all ranks runs."""
    for kind in {type(module) for module in decoder.modules()}:
        if makes_states(kind):
            replace_in_file(kind, "get_relative_distance", _none_over_all_ranks)


def _none_over_all_ranks(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None if isinstance(running(), ForwardState) else make(*args, **kwargs)


# --------------------------------------------------------------------------- convolutions


def convolved(
    module: Any,
    state: ForwardState,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    cache: None = None,
    conv_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """The forward of a convolution whose weights are those of a layer and of a token, ``[B, S/n, C]``."""
    width, wide = module.conv_kernel_size, hidden_states.float()
    weights = module.weight_proj(dynamic_input).float().unflatten(-1, (module.num_heads, 1, width))
    weights = weights + module.static_weight.float().T.view(module.num_heads, -1, width)
    shown = wide if conv_mask is None else wide * conv_mask[:, :, None]
    cp, layout, documents, _ = cast(Any, mixer_state(module))
    before = windows(shown, range(width), mesh=cp, layout=layout, documents=documents)
    taken = (before.movedim(2, -1).unflatten(2, (module.num_heads, -1)) * weights).sum(-1).flatten(2)
    return ((taken + wide) / math.sqrt(2 * width + 1)).to(hidden_states.dtype)
