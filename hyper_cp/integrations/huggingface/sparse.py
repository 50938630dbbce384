"""The modules of sparse attention that are known and replaced in a prepared model, by the types of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from . import compressed, qwen4, selected, selected_blocks, selected_pools


class Replaced(NamedTuple):
    """Modules that are replaced: the types of layers that have them, how they are known, and how one is prepared."""

    layers: tuple[str, ...]
    known: Callable[[type[nn.Module]], bool]
    prepare: Callable[[Any], None]


REPLACED = (
    Replaced((selected.LAYER,), selected.has_indexer_seam, selected.prepare),
    Replaced((selected_blocks.LAYER,), selected_blocks.selects_blocks, selected_blocks.prepare),
    Replaced((selected.LAYER,), selected_pools.selects_pools, selected_pools.prepare),
    Replaced((selected.LAYER,), qwen4.selects_pools, qwen4.prepare_indexer),
    Replaced((), qwen4.looks_back, qwen4.prepare_n_grams),
    Replaced(tuple(compressed.LAYERS), compressed.compresses, compressed.prepare),
)


def prepare(decoder: nn.Module) -> None:
    """Let the sparse attention of a decoder run over all ranks."""
    for module in decoder.modules():
        for replaced in REPLACED:
            if replaced.known(type(module)):
                replaced.prepare(module)


def is_known(kind: type[nn.Module]) -> bool:
    """True for a type of module that is replaced."""
    return any(replaced.known(kind) for replaced in REPLACED)


def selects(decoder: nn.Module) -> bool:
    """True for a decoder with modules that select keys or make entries."""
    return any(x.layers and x.known(type(module)) for module in decoder.modules() for x in REPLACED)


def is_replaced(kind: str, layer: nn.Module) -> bool:
    """True for a layer of a type that has a module which is replaced."""
    return any(kind in x.layers and x.known(type(module)) for module in layer.modules() for x in REPLACED)


def hides_padding(decoder: nn.Module) -> bool:
    """True for a decoder whose queries select among tokens only, also those of padding behind the tokens of a row."""
    return any(selected_pools.selects_pools(type(module)) for module in decoder.modules())
