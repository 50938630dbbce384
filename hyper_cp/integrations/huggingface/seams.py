"""Forwards of transformers that are replaced, as far as they are the known ones, and the batches that they refuse."""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NoReturn

from transformers import GenerationMixin

from ...schedule.layout import by_documents
from .forward import ForwardState

_SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a cache among keywords: the first one from transformers 5.24 on, the others before."""
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next((name for name in CACHES if name in _TAKEN), "")
"""The name in the installed version; "" if it is none of them."""


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among keywords, under any of its names; None if there is none."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


@cache
def digest_of(function: Callable[..., Any]) -> str:
    """A digest of the source of a function without space and comments; "" if there is none."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    words = [x.string for x in tokenize.generate_tokens(io.StringIO(source).readline) if x.type not in _SPACE]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def are_known(file: Any, known: Mapping[str, tuple[str, ...]]) -> bool:
    """True if the forwards of classes of a file, or other methods (``Class.method``), have one of these digests."""
    methods = {name if "." in name else f"{name}.forward": digests for name, digests in known.items()}
    return all(digest_of(attrgetter(name)(file)) in digests for name, digests in methods.items())


SLOTS = "compares positions, which restart, with slots of keys, which do not"
"""The reason why a module that reads position ids mixes documents up."""


def refuse_batch(name: str, state: ForwardState, packed: str = SLOTS, between: str | None = None) -> None:
    """Raise ``NotImplementedError`` for batches of which a module of one device that counts slots makes something else
    than its queries should see. ``packed`` and ``between``: what is wrong there with packed documents, and with padding
    between tokens (None: nothing)."""
    batch, layout = state.batch, state.style.mode.layout
    if batch.documents is not None and batch.tokens is None and not (by_documents(layout) and batch.numbered):
        _refuse(name, "packed documents", packed)
    if by_documents(layout):
        _refuse(name, f"a batch in layout={layout!r}", "has no documents, by which that places tokens")
    if between is not None and batch.keys is not None:
        _refuse(name, "padding between tokens", between)
    if packed == SLOTS and not batch.numbered and "position_ids" in state.passed:
        _refuse(name, "position_ids", "compares them with slots of keys, so they must be 0, 1, 2 ...")
    if state.losses is not None:
        _refuse(name, "indexer_losses", "selects blocks or entries, for which no loss is known")


def _refuse(name: str, what: str, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} got {what}. On one device it {why}. Pass one document in each row, padded at its ends, without "
        'position_ids and indexer_losses, and use layout="contiguous" or "head_tail"'
    )
