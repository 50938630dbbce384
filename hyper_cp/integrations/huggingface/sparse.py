"""The methods that are replaced in a prepared model, most of them of sparse attention: of which modules, with what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from transformers import Cache

from . import compressed, inkling, qwen4, recurrent_gemma, selected, selected_blocks, selected_pools
from .forward import ForwardState, state_for
from .seams import own_forward


class Replaced(NamedTuple):
    """A type of module, and the functions that take the places of its methods, or of those of its children, in a
    forward over all ranks: they are called with the module and the state of the forward."""

    is_kind: Callable[[type[nn.Module]], bool]
    layers: tuple[str, ...]
    """The types of layers that have such a module."""
    methods: dict[str, Callable[..., Any]]


REPLACED = (
    Replaced(selected.has_indexer_seam, (selected.LAYER,), {"forward": selected.selected}),
    Replaced(selected_blocks.is_indexer, (selected_blocks.LAYER,), {"forward": selected_blocks.selected}),
    Replaced(selected_pools.is_indexer, (selected.LAYER,), {"forward": selected_pools.selected}),
    Replaced(
        selected_pools.is_attention, (selected.LAYER,), {"build_attention_mask_from_topk": selected_pools.handed_on}
    ),
    Replaced(qwen4.is_indexer, (selected.LAYER,), {"forward": qwen4.selected}),
    Replaced(qwen4.looks_back, (), {"_short_conv": qwen4.convolved, "ple_embedding.forward": qwen4.embedded}),
    Replaced(inkling.has_profiles, (), {"forward": inkling.mixed_by}),
    Replaced(inkling.makes_states, (), {"forward": inkling.mixed_by_hidden}),
    Replaced(inkling.convolves, (), {"forward": inkling.convolved}),
    Replaced(
        recurrent_gemma.is_block,
        (),
        {
            "conv_1d.forward": recurrent_gemma.convolved,
            "rg_lru.forward": recurrent_gemma.forgetting,
            "rg_lru._rnn_scan": recurrent_gemma.scanned,
        },
    ),
    Replaced(compressed.compresses, tuple(compressed.LAYERS), {"forward": compressed.compressed}),
)


def prepare(decoder: nn.Module) -> None:
    """Let the sparse attention of a decoder run over all ranks."""
    inkling.leave_out_distances(decoder)
    for module in decoder.modules():
        for replaced in (x for x in REPLACED if x.methods and x.is_kind(type(module))):
            _refuse_changed(module)
            for path, function in replaced.methods.items():
                child, _, name = path.rpartition(".")
                owner = attrgetter(child)(module) if child else module
                setattr(owner, name, partial(_over_all_ranks, function, owner, name))


def _refuse_changed(module: nn.Module) -> None:
    """Raise ``NotImplementedError`` for a module that is replaced, if a user has changed it or a part of it: what
    replaces it computes what transformers does."""
    for name, inner in module.named_modules():
        of_transformers = any(x.__module__.startswith("transformers.models.") for x in type(inner).__mro__)
        if of_transformers and (own := own_forward(inner)) is not None:
            raise NotImplementedError(
                f"{name or 'the module'} of {type(module).__name__} has a forward of your own ({own.__qualname__}), "
                "and context parallelism replaces what transformers does there. Use that, or leave the model unprepared"
            )


def _over_all_ranks(function: Callable[..., Any], owner: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function in place of a method; outside of forwards over all ranks, and with a cache of one, the method."""
    state = state_for(owner)
    if isinstance(state, ForwardState):
        cached = any(isinstance(x, Cache) for x in (*args, *kwargs.values()))
        if state.cache is not None or not cached:
            return function(owner, state, *args, **kwargs)
    return getattr(type(owner), name)(owner, *args, **kwargs)


def is_known(kind: type[nn.Module]) -> bool:
    """True for a type of module that is replaced."""
    return any(replaced.is_kind(kind) for replaced in REPLACED)


def selects(decoder: nn.Module) -> bool:
    """True for a decoder with modules that select keys or make entries."""
    return any(x.layers and x.is_kind(type(module)) for module in decoder.modules() for x in REPLACED)


def is_replaced(kind: str, layer: nn.Module) -> bool:
    """True for a layer of a type that has a module which is replaced."""
    return any(kind in x.layers and x.is_kind(type(module)) for module in layer.modules() for x in REPLACED)
