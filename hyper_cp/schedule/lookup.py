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
            f"layout={layout!r} places tokens by document, but no documents are given: enter handler.documents(...) "
            "around dispatch, forward and combine, or pass documents= ([0, S] for one document)"
        )
    return documents.derived((layout, world, length), lambda: place(layout, world, length, documents))


@lru_cache(maxsize=256)
def _by_length(layout: str, world: int, length: int) -> ResolvedLayout:
    return ResolvedLayout.of(layout, world, length)


def ascending(layout: ResolvedLayout, ranks: range) -> tuple[Rows, Rows]:
    """The order of the tokens of several ranks, whose shares lie one after the other: rows that put them into ascending
    global order, and rows that bring them back. The layout keeps them, so that they are freed with it."""
    found = layout.orders.get(ranks)
    if found is None:
        index, start, stop = layout.pieces(ranks).T
        first = index * (layout.length // layout.world)
        rows = Rows(Ranges(np.stack((first + start, first + stop), 1)))
        found = layout.orders[ranks] = rows, rows.inverse()
    return found


class _Call(NamedTuple):
    """The arguments of :func:`schedule` on which a schedule depends, but for documents."""

    layout: str
    rank: int
    ring: int
    ulysses: int
    kv_exchange: str
    load_balance: bool
    band: Band
    q_length: int
    kv_length: int
    parts: bool
    stages: int | Limits | None


def schedule(
    layout: str,
    rank: int,
    ring: int,
    ulysses: int,
    kv_exchange: str,
    load_balance: bool,
    band: Band,
    q_length: int,
    kv_length: int,
    parts: bool = True,
    documents: PackedDocuments | None = None,
    batch: int = 1,
    blocks: BlockMap | None = None,
    stages: int | Limits | None = None,
) -> Schedule:
    """The schedule of one ring rank for one kind of attention call. It is built on the first such call.

    Args:
        layout: as users give it.
        rank: this rank in the ring dimension, of ``ring`` ranks; ``ulysses``: the size of the other dimension.
        kv_exchange, load_balance: as users give them.
        band: the mask, over global positions.
        q_length, kv_length: global lengths. Where they differ (cross-attention), documents hide nothing; an explicit
            mask may.
        parts: False if the kernel needs every tile to be one rectangle.
        documents: those of the ``batch`` rows; ``ValueError`` if they do not fit.
        blocks: of a FlexAttention mask; other pairs are hidden.
        stages: the number of stages of the exchange, or the limits that choose it (see :mod:`choices`); None: those
            of a GPU.
    """
    call = layout, rank, ring, ulysses, kv_exchange, load_balance, band, q_length, kv_length, parts, stages
    if blocks is not None:
        key = batch, None if documents is None else documents.digest, call
        return blocks.derived(key, lambda: _with_documents(_Call(*call), documents, batch, blocks))
    if documents is None:
        return _without_documents(call)
    return documents.derived((batch, call), lambda: _with_documents(_Call(*call), documents, batch))


@lru_cache(maxsize=64)
def _without_documents(call: tuple) -> Schedule:
    return _built(_Call(*call), None)


def _with_documents(
    call: _Call, documents: PackedDocuments | None, batch: int, blocks: BlockMap | None = None
) -> Schedule:
    if documents is None:
        return _built(call, None, blocks=blocks)
    if call.q_length == call.kv_length:
        documents.check(batch, call.q_length)
    hides = call.q_length == call.kv_length and documents.rows != ((0, call.q_length),)
    if blocks is not None:
        return _built(call, documents, hides, blocks)
    if not by_documents(call.layout) and not hides:
        return _without_documents(call)
    return _built(call, documents, hides)


def _built(
    call: _Call, documents: PackedDocuments | None, hides: bool = False, blocks: BlockMap | None = None
) -> Schedule:
    world = call.ring * call.ulysses
    queries = resolve(call.layout, world, call.q_length, documents)
    held = queries.by_ring(call.ulysses).held
    if call.kv_exchange == "replicated":
        held_keys: tuple[Sequence[Range], ...] = (((0, call.kv_length),),) * call.ring
    elif call.kv_length == call.q_length:
        held_keys = held
    else:
        held_keys = resolve(queries.name, world, call.kv_length, documents).by_ring(call.ulysses).held
    rows = documents.rows if documents is not None and hides else None
    settings = call.kv_exchange, call.load_balance, call.band
    found = build(held, held_keys, call.rank, *settings, rows, call.parts, blocks, call.stages)
    if isinstance(call.stages, tuple) and (number := len(found.routes) or len(found.pieces)) > 1:
        message = f'exchange_stages="auto": %d stages of {call.kv_exchange} on %d ranks, %d tokens each'
        log_once(message, number, call.ring, call.q_length // call.ring)
    return found if documents is None else replace(found, recurring=False)
