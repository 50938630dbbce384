"""Layouts and schedules that have been made before, found by cheap keys.

Every attention call comes here. What depends on documents is kept by the documents themselves and found by identity, so
that finding it costs the same for any number of ranks and documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .blocks import BlockMap
from .build import Schedule, build
from .choices import Limits, log_once
from .documents import PackedDocuments
from .layout import ResolvedLayout, by_documents
from .placement import place
from .ranges import Range, Ranges, Rows
from .tiles import Band


def resolve(layout: str, world: int, length: int, documents: PackedDocuments | None = None) -> ResolvedLayout:
    """The positions of every rank, with ``"auto"`` decided.

    A pure function of its arguments: data and attention come to the same answer on every rank. ``documents`` matters
    to the layouts that depend on them only; a single rank holds everything in any layout.
    """
    if not by_documents(layout) or world == 1:
        return _by_length("contiguous" if world == 1 else layout, world, length)
    if documents is None:
        raise ValueError(
            f"layout={layout!r} places tokens by document, but no documents are given. Without them it is not "
            "determined what each rank holds. Enter handler.documents(...) around dispatch, forward and combine, or "
            "pass documents= ([0, S] for one document)"
        )
    return documents.derived((layout, world, length), lambda: place(layout, world, length, documents))


@lru_cache(maxsize=256)
def _by_length(layout: str, world: int, length: int) -> ResolvedLayout:
    return ResolvedLayout.of(layout, world, length)


def ascending(layout: ResolvedLayout, ranks: range) -> tuple[Rows, Rows]:
    """The order of the tokens of several ranks, whose shares lie one after the other: rows that put them into ascending
    global order, and rows that bring them back. The layout keeps them, so that they are freed with it."""

    def make() -> tuple[Rows, Rows]:
        index, start, stop = layout.pieces(ranks).T
        first = index * (layout.length // layout.world)
        rows = Rows(Ranges(np.stack((first + start, first + stop), 1)))
        return rows, rows.inverse()

    return layout.derived(("ascending", ranks), make)


class Key(NamedTuple):
    """One kind of attention call on one ring rank: everything that its schedule depends on, but for documents and the
    blocks of a mask."""

    layout: str
    """As users give it, as ``kv_exchange`` and ``load_balance``."""
    rank: int
    """In the ring dimension, which has ``ring`` ranks; the other one has ``ulysses``."""
    ring: int
    ulysses: int
    kv_exchange: str
    load_balance: bool
    band: Band
    """The mask, over global positions."""
    q_length: int
    """Global, as ``kv_length``. Where they differ (cross-attention), documents hide nothing; an explicit mask may."""
    kv_length: int
    parts: bool = True
    """False if the kernel needs every tile to be one rectangle."""
    stages: int | Limits | None = None
    """The number of stages of the exchange, or the limits that choose it (see :mod:`choices`); None: those of a GPU."""
    most_keys: int | None = None
    """The most keys that a step uses, which then uses a part of a block; None: a step uses a whole one."""


def schedule(
    key: Key, documents: PackedDocuments | None = None, batch: int = 1, blocks: BlockMap | None = None
) -> Schedule:
    """The schedule of one ring rank for one kind of attention call. It is built on the first such call.

    Args:
        documents: those of the ``batch`` rows; ``ValueError`` if they do not fit.
        blocks: of a FlexAttention mask; other pairs are hidden.
    """
    if blocks is not None:
        digest = None if documents is None else documents.digest
        return blocks.derived((batch, digest, key), lambda: _with_documents(key, documents, batch, blocks))
    if documents is None:
        return _without_documents(key)
    return documents.derived((batch, key), lambda: _with_documents(key, documents, batch))


@lru_cache(maxsize=64)
def _without_documents(key: Key) -> Schedule:
    return _built(key, None)


def _with_documents(
    key: Key, documents: PackedDocuments | None, batch: int, blocks: BlockMap | None = None
) -> Schedule:
    if documents is None:
        return _built(key, None, blocks=blocks)
    if key.q_length == key.kv_length:
        documents.check(batch, key.q_length)
    hides = key.q_length == key.kv_length and documents.rows != ((0, key.q_length),)
    if blocks is not None:
        return _built(key, documents, hides, blocks)
    if not by_documents(key.layout) and not hides:
        return _without_documents(key)
    return _built(key, documents, hides)


def _built(
    key: Key, documents: PackedDocuments | None, hides: bool = False, blocks: BlockMap | None = None
) -> Schedule:
    world = key.ring * key.ulysses
    queries = resolve(key.layout, world, key.q_length, documents)
    held = queries.by_ring(key.ulysses).held
    if key.kv_exchange == "replicated":
        held_keys: tuple[Sequence[Range], ...] = (((0, key.kv_length),),) * key.ring
    elif key.kv_length == key.q_length:
        held_keys = held
    else:
        held_keys = resolve(queries.name, world, key.kv_length, documents).by_ring(key.ulysses).held
    rows = documents.rows if documents is not None and hides else None
    settings = key.kv_exchange, key.load_balance, key.band
    found = build(held, held_keys, key.rank, *settings, rows, key.parts, blocks, key.stages, key.most_keys)
    if isinstance(key.stages, tuple) and (number := len(found.transfers.moves)) > 1:
        message = f'exchange_stages="auto": %d stages of {key.kv_exchange} on %d ranks, %d tokens each'
        log_once(message, number, key.ring, key.q_length // key.ring)
    return found if documents is None else replace(found, recurring=False)
