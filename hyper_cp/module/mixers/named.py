"""Modules that receive q, k, v and gates as arguments and compute a recurrence themselves, in any code of their own.

Nothing in such a module can be routed, and its outputs cannot be corrected from outside, because its states never show.
So the user names the function that the module computes. The hooks replace the module's forward by that function over
all ranks, and compare the two on a few tokens of the first call, so that a wrong name raises.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._torch.compiling import is_compiling
from ..._torch.modes import unseen
from ...mesh.arguments import check_choice
from ..mesh_binding import Style
from ..replaced import Few, Held, along, conditions, difference, first_tokens
from .calls import LAST, ROUTED, RunningMixer, alone, running_mixer
from .hooks import StyledMixerHooks


@dataclass(frozen=True)
class Kind:
    """A function that modules compute: the names of its arguments and options, and the function over all ranks."""

    compute: Callable[..., Any]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def _recurrence(mixer: RunningMixer, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **given: Any) -> Tensor:
    """:func:`hyper_cp.ops.linear_recurrence`."""
    return mixer.recur(q * given.pop("scale", 1.0), k, v, decay, **given)


_QKVG, _OF_FLA = ("q", "k", "v", "g"), ("scale", "use_qk_l2norm_in_kernel")
KINDS: dict[str, Kind] = {
    "linear_recurrence": Kind(_recurrence, ("q", "k", "v", "decay"), ("beta",), ("scale",)),
    **{name: Kind(ROUTED[name], (*_QKVG, "beta"), (), _OF_FLA) for name in ("chunk_gated_delta_rule", "chunk_kda")},
    **{name: Kind(ROUTED[name], _QKVG, (), _OF_FLA) for name in ("chunk_gla", "chunk_simple_gla")},
    "mamba_chunk_scan_combined": Kind(
        ROUTED["mamba_chunk_scan_combined"],
        ("x", "dt", "A", "B", "C"),
        ("D", "z", "dt_bias"),
        ("dt_softplus", "dt_limit"),
    ),
    "selective_scan_fn": Kind(
        ROUTED["selective_scan_fn"], ("u", "delta", "A", "B", "C"), ("D", "z", "delta_bias"), ("delta_softplus",)
    ),
    "causal_conv1d_fn": Kind(ROUTED["causal_conv1d_fn"], ("x", "weight"), ("bias",), ("activation",)),
}
"""The functions by their public names. Those of fla scale q by ``dk ** -0.5`` unless an option says otherwise."""


@dataclass(frozen=True)
class Named:
    """The function that a module computes, and the places of its arguments among those of the module's forward.

    Raises:
        ValueError, TypeError: for functions, arguments and options that are unknown.
    """

    kind: str
    arguments: Mapping[str, int | str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    heads_first: bool = False
    """True for ``[B, H, S, D]``."""

    def __post_init__(self) -> None:
        more = ". If the module calls one of them itself, leave kind out"
        check_choice("kind", self.kind, KINDS, "It names the function that the module computes", more)
        known = KINDS[self.kind]
        for given, names, what in (
            (self.arguments, (*known.needed, *known.optional), "arguments"),
            (self.options, known.options, "options"),
        ):
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"{what}={given!r} is a {type(given).__name__}. It names the {what} of {self.kind}. Pass a dict "
                    f"with keys among {', '.join(names)}"
                )
            unknown = [name for name in given if name not in names]
            if unknown:
                raise ValueError(
                    f"{what} has {unknown[0]!r}, which {self.kind} does not have. Its {what} are {', '.join(names)}. "
                    "Use these as keys"
                )
        for name, place in self.arguments.items():
            if not isinstance(place, (int, str)) or isinstance(place, bool) or (isinstance(place, int) and place < 0):
                raise TypeError(
                    f"arguments[{name!r}]={place!r} is not an argument of a module. It must be a position that "
                    "counts from 0, or the name of a parameter of its forward. Pass one of them"
                )
        if self.heads_first and self.kind in LAST:
            raise ValueError(
                f"seq_dim=2 with kind={self.kind!r}, whose tensors have a fixed form ([batch, channels, positions]). "
                "There are no dimensions to choose. Leave seq_dim and head_dim out"
            )

    def places(self, module: nn.Module, name: str) -> dict[str, str]:
        """The parameter of the module's forward that each argument of the function is.

        Raises:
            ValueError: if one is missing, or if the module needs more than the function.
        """
        known, parameters = KINDS[self.kind], inspect.signature(module.forward).parameters
        variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        names = [p.name for p in parameters.values() if p.kind not in variable]
        found = {}
        for argument in (*known.needed, *known.optional):
            place = self.arguments.get(argument, argument)
            parameter = place if isinstance(place, str) else names[place] if place < len(names) else ""
            if parameter in names:
                found[argument] = parameter
            elif argument in known.needed or argument in self.arguments:
                raise ValueError(
                    f"{name} has no argument {place!r} for {argument!r} of {self.kind}. Its forward takes "
                    f"{', '.join(names)}. Each argument of the function is one of the module. Name it in "
                    f"arguments={{{argument!r}: ...}}"
                )
        more = [
            p for p in names if p not in {*found.values(), "documents"} and parameters[p].default is parameters[p].empty
        ]
        if more:
            raise ValueError(
                f"{name} needs the argument {more[0]!r}, which {self.kind} does not take. Its forward is replaced by "
                f"that function, so {more[0]!r} would have no effect. Use another kind, or call "
                "hyper_cp.ops.linear_recurrence in the module"
            )
        return found


def named_function(
    kind: str | None,
    arguments: Mapping[str, int | str] | None,
    options: Mapping[str, Any] | None,
    seq_dim: int,
    head_dim: int,
) -> Named | None:
    """The settings of a style as one object; None if the module calls a function itself.

    Raises:
        ValueError, TypeError: for settings that are unknown, or need ``kind``.
    """
    if kind is None and (arguments or options or (seq_dim, head_dim) != (1, 2)):
        raise ValueError(
            f"arguments={arguments}, options={options}, seq_dim={seq_dim} and head_dim={head_dim} are given without "
            "kind. They describe the arguments of a module that receives q, k, v and gates. Pass kind=, the function "
            "that it computes, or leave them out"
        )
    if (seq_dim, head_dim) not in ((1, 2), (2, 1)):
        raise ValueError(
            f"seq_dim={seq_dim} and head_dim={head_dim} must be 1 and 2 ([B, S, H, D]) or 2 and 1 ([B, H, S, D]). "
            "Recurrences take tensors in these forms. Reshape them before the module"
        )
    if kind is None:
        return None
    return Named(kind, {} if arguments is None else arguments, {} if options is None else options, seq_dim == 2)


class NamedMixerHooks(StyledMixerHooks):
    """The hooks of a module whose forward a function over all ranks replaces."""

    def __init__(
        self, style: Style, device_mesh: DeviceMesh, module: nn.Module, exchange_heads: bool, named: Named
    ) -> None:
        self.named = named
        super().__init__(style, device_mesh, module, exchange_heads)
        self.places = named.places(module, self.name)
        parameters = inspect.signature(module.forward).parameters
        self.parameters = [p.name for p in parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in parameters.values()}
        self.module, self.original = module, module.forward
        """The module, and the forward that is replaced."""
        self.compared: dict[object, Held] = {}
        """The meshes and conditions in which both have been compared (on another mesh, some ranks may not have), and
        what the module held then."""

    def check_calls(self, module: nn.Module) -> None:
        """A module of this kind need not call anything."""

    def attach(self, module: nn.Module) -> None:
        """Register the hooks, and replace the forward."""
        super().attach(module)
        module.forward = self.forward  # a bound method: a copy of the module has that of its own hooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function over all ranks; the module's own forward where there is nothing to share."""
        mixer = running_mixer()
        if mixer is None or mixer.module is not self.module:
            return self.original(*args, **kwargs)
        mixer.routed = True
        given = self._given(args, kwargs)
        if not is_compiling():
            now, trained = (mixer.cp.key, conditions(self.module)), not torch.is_inference_mode_enabled()
            known = self.compared.get(now)
            if known is None or known.changed(self.module, trained):
                self._compare(mixer, given, known is None)
                self.compared[now] = Held.by(self.module, trained)
        return self._computed(mixer, given)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the function in this call, by name."""
        named = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        taken = set(self.places.values())
        for name, x in named.items():
            if name not in taken and name != "documents" and x is not None and x is not self.defaults.get(name):
                raise ValueError(
                    f"{self.name} got {name}={_described(x)}, which is no argument of {self.named.kind}. That function "
                    f"replaces the module's forward, so {name} would have no effect. Leave it out"
                )
        given = {argument: named[place] for argument, place in self.places.items() if place in named}
        missing = [name for name in KINDS[self.named.kind].needed if given.get(name) is None]
        if missing:
            raise ValueError(
                f"{self.name} was called without {self.places[missing[0]]!r}, which is {missing[0]!r} of "
                f"{self.named.kind}. The function needs it. Pass it, or name another one in arguments="
            )
        return given

    def _computed(self, mixer: RunningMixer, given: dict[str, Any]) -> Tensor:
        """The function's output, in the form of the module."""
        if self.named.heads_first:
            given = {name: x.transpose(1, 2) if along(x) else x for name, x in given.items()}
        found = KINDS[self.named.kind].compute(mixer, **given, **self.named.options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2) if self.named.heads_first else out

    # ---- is it the right function?

    def _compare(self, mixer: RunningMixer, given: dict[str, Any], new: bool) -> None:
        """Raise ``ValueError``, on every rank, unless the module's own forward computes the function. Not ``new``: the
        module has been changed since, and each rank finds that out by itself (one that counts its calls, say, is not
        compared by the others)."""
        tensors, verdict = [x for x in given.values() if isinstance(x, Tensor)], ""
        if all(type(x) in (Tensor, nn.Parameter, nn.Buffer) for x in tensors):  # fake tensors, say, have no values
            grad = not torch.is_inference_mode_enabled()  # also without gradients: weights may be loaded
            verdict = unseen(lambda: self._difference(given, grad), tensors[0].device)
        signature = (("module", self.name), ("kind", self.named.kind))
        outcome = (("its own forward", "agrees" if not verdict else "differs"),)
        if new:  # another module of the same name has another forward
            mixer.cp.agree("module", signature, self.name, once=outcome, always=True)
        if verdict:
            since = "" if new else _CHANGED
            raise ValueError(
                f"{self.name} does not compute {self.named.kind}{since}: {verdict}. Its forward would be replaced by "
                "another function. Check kind=, arguments= and options= (functions of fla scale q by dk ** -0.5; "
                "linear_recurrence does not), or leave kind out and call hyper_cp.ops.linear_recurrence in the module"
            )

    def _difference(self, given: dict[str, Any], grad: bool) -> str:
        """The difference between the module's own forward and the function, on one device; "" if there is none."""
        few = {name: first_tokens(x, _sequence_dim(self.named)) for name, x in given.items()}
        replacement = functools.partial(self._computed, alone(self.name))
        try:
            replacement(few)
        except Exception as error:  # on this rank only, perhaps: all ranks have to hear of it
            return f"the function raises {type(error).__name__} ({error})"

        def own(few: Few) -> Any:
            return self.original(**{self.places[name]: x for name, x in few.items()})

        return difference(own, replacement, few, given, self.module, grad)


_CHANGED = ", since what the module holds (a number, a buffer, a frozen parameter) was changed behind an earlier call"


def _sequence_dim(named: Named) -> int:
    """The dimension of the sequence in the module's tensors."""
    return -1 if named.kind in LAST else 2 if named.heads_first else 1


def _described(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
