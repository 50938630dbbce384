"""The table of documents: what is read from it, when, and how often."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import attention
from hyper_cp.schedule import derived, documents
from hyper_cp.schedule.blocks import BlockMap
from hyper_cp.schedule.derived import Owner
from hyper_cp.schedule.documents import PackedDocuments, documents_table, read
from hyper_cp.schedule.layout import ResolvedLayout
from hyper_cp.schedule.lookup import Key, schedule
from tests.harness.ranks import on_ranks


def rows(table: torch.Tensor | None, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The boundaries of a table that fits a batch."""
    assert table is not None
    packed = read(table)
    packed.check(batch, length)
    return packed.rows


def test_forms_of_documents() -> None:
    table = documents_table([0, 3, 8])
    assert table is not None and table.tolist() == [[0, 3, 8, 8]]
    assert documents_table() is None and documents_table(table) is table
    ids = torch.tensor([[7, 7, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 5]])
    assert rows(documents_table(None, ids), 2, 8) == ((0, 2, 5, 8), (0, 7, 8))
    assert rows(documents_table(torch.tensor([0, 8], dtype=torch.int32)), 4, 8) == ((0, 8),)
    same = documents_table([[0, 4, 4, 8], torch.tensor([0, 4, 8])])
    assert rows(same, 2, 8) == ((0, 4, 8),), "equal rows share their tiles"


@pytest.mark.parametrize(
    "documents, batch, words",
    [
        ([0, 5], 1, "ascend from 0 to the global sequence length 8"),
        ([1, 8], 1, "ascend from 0"),
        ([0, 5, 3, 8], 1, "ascend from 0"),
        ([[0, 8], [0, 8], [0, 8]], 2, "3 rows for a batch of 2"),
    ],
)
def test_documents_that_do_not_fit(documents: Any, batch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rows(documents_table(documents), batch, 8)


def test_a_document_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"document_ids\[0\] names a document in two places"):
        documents_table(None, torch.tensor([[1, 2, 1]]))


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A global length, and rows of boundaries with empty documents, filled up to any width."""
    length = draw(st.integers(1, 30))
    cuts = [draw(st.lists(st.integers(0, length), max_size=6).map(sorted)) for _ in range(draw(st.integers(1, 3)))]
    width = max(map(len, cuts)) + draw(st.integers(2, 5))
    return length, [[0, *c] + [length] * (width - 1 - len(c)) for c in cuts]


def numbers_one_by_one(row: list[int], length: int) -> list[int]:
    """The document of each position, counted from 1, empty documents left out."""
    found, number = [], 0
    for position in range(length):
        number += position in row
        found.append(number)
    return found


@given(tables())
def test_what_is_read_of_a_table(problem: tuple[int, list[list[int]]]) -> None:
    length, rows = problem
    packed = read(torch.tensor(rows))
    distinct = [sorted(set(row)) for row in rows]
    distinct = distinct[:1] if all(row == distinct[0] for row in distinct) else distinct
    assert [list(row) for row in packed.rows] == distinct
    assert packed.one_row == (tuple(distinct[0]) if len(distinct) == 1 else None)
    expected = [numbers_one_by_one(row, length) for row in distinct]
    assert packed.numbers(torch.arange(length)).tolist() == expected
    restarted = [[p - max(b for b in row if b <= p) for p in range(length)] for row in distinct]
    assert packed.restarted(torch.arange(length)).tolist() == restarted


@given(tables(), tables())
def test_digests_stand_for_the_boundaries(one: tuple[int, list[list[int]]], two: tuple[int, list[list[int]]]) -> None:
    a, b = (read(torch.tensor(rows)) for _, rows in (one, two))
    assert (a.digest == b.digest) == (a.rows == b.rows)
    wider = read(torch.tensor([[*row, row[-1]] for row in one[1]]))
    assert wider.digest == a.digest


def test_a_digest_is_the_same_in_every_process() -> None:
    content = b"".join(n.to_bytes(8, "little") for n in (3, 0, 3, 8, 2, 0, 8))  # each row after its length
    digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
    assert read(torch.tensor([[0, 3, 3, 8], [0, 8, 8, 8]])).digest == digest == -1685459204910877574


@given(tables(), st.data())
def test_tables_that_do_not_fit_are_refused(problem: tuple[int, list[list[int]]], data: st.DataObject) -> None:
    length, rows = problem
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    rows[row][column] = data.draw(st.integers(-2, 32))
    wanted, batch = data.draw(st.sampled_from([length, length + 1])), data.draw(st.integers(1, 3))
    fits = all(r[0] == 0 and r == sorted(r) and r[-1] == wanted for r in rows)
    packed = read(torch.tensor(rows))
    if not fits:
        with pytest.raises(ValueError, match=f"ascend from 0 to the global sequence length {wanted}"):
            packed.check(batch, wanted)
    elif len(rows) not in (1, batch):
        packed.check_length(wanted)
        with pytest.raises(ValueError, match=f"documents has {len(rows)} rows for a batch of {batch}"):
            packed.check(batch, wanted)
    else:
        packed.check(batch, wanted)


def test_the_first_row_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"documents=\[0, 5, 3, 8\] must be"):
        read(torch.tensor([[0, 5, 8, 8], [0, 5, 3, 8]])).check(2, 8)
    with pytest.raises(ValueError, match=r"documents=\[0, 8\] must be .* length 9"):
        read(torch.tensor([[0, 9], [0, 8]])).check(2, 9)


@pytest.mark.parametrize(
    "table, words",
    [
        (torch.tensor([0, 8]), "documents is a 1-D tensor on cpu"),
        (torch.empty(1, 2, dtype=torch.int64, device="meta"), "documents is a 2-D tensor on meta"),
        (torch.empty(0, 2, dtype=torch.int64), r"documents has shape \(0, 2\)"),
    ],
)
def test_tensors_that_are_no_tables(table: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(table)


# --------------------------------------------------------------------------- how often it is read


def test_a_table_is_parsed_once_until_it_is_written_to() -> None:
    table = documents_table([0, 3, 8])
    assert table is not None
    first = read(table)
    assert all(read(table) is first for _ in range(5))
    table[0, 1] = 4
    assert read(table).rows == ((0, 4, 8),)


@on_ranks
def attend_in_three_layers(compiled: bool) -> None:
    """The table has been read, and further ones since: what is read of equal tables is kept of the latest only."""
    mesh = view(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), ulysses_degree=1)
    mode = {"mesh": mesh, "layout": "per_document", "kv_exchange": "ring"}
    table, x = torch.tensor([[0, 5, 7, 16]]), torch.randn(1, 2, 8, 4, requires_grad=True)

    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = attention(x, x, x, is_causal=True, documents=table, **mode)
        return x

    contents = read(table)
    for n in range(1, 50):
        read(torch.tensor([[0, n, 50]]))
    with mock.patch.object(documents, "PackedDocuments", side_effect=AssertionError("parsed again")):
        run = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiled else layers
        run(x, table).sum().backward()
        assert read(table) is contents


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_is_parsed_once_in_all_layers(ranks: Any, compiled: bool) -> None:
    ranks(2, attend_in_three_layers, compiled)


def test_equal_tables_are_one_object() -> None:
    one, two = (read(documents_table([0, 3, 7, 8])) for _ in range(2))
    assert one is two
    assert read(documents_table([[0, 3, 7, 8]] * 2)) is not one, "two rows do not fit every batch"
    with torch.inference_mode():
        table = documents_table([0, 3, 7, 8])
        assert table is not None and table.is_inference() and read(table) is one
        table[0, 1] = 4  # a tensor of inference mode has no version
        assert read(table).rows == ((0, 4, 7, 8),)


def test_nothing_is_kept_of_tables_that_are_gone() -> None:
    tables = [torch.tensor([[0, n, 100]]) for n in range(1, 99)]
    contents = [weakref.ref(read(table)) for table in tables]
    assert all(content() is not None for content in contents)
    del tables
    gc.collect()
    assert sum(content() is not None for content in contents) <= 32, "but of the latest, for equal tables"


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


OWNERS: dict[str, Callable[[int], Owner]] = {
    "documents": lambda n: PackedDocuments([[0, n, 50]]),
    "layout": lambda n: ResolvedLayout.of("contiguous", n, 2 * n),
    "blocks": lambda n: BlockMap(numpy.ones((n, n), bool), (8, 8)),
}


def has(owner: Owner, key: Any) -> bool:
    """True if a value is found without being made."""
    made: list[int] = []
    owner.derived(key, lambda: made.append(1) or Sized(0))
    return not made


@pytest.mark.parametrize("kind", OWNERS)
def test_what_is_derived_is_made_once(kind: str) -> None:
    one, other = (OWNERS[kind](n) for n in (3, 4))
    assert not has(one, "key") and has(one, "key")
    assert not has(other, "key"), "it belongs to its owner"


@pytest.mark.parametrize("kind", OWNERS)
def test_what_is_derived_is_bounded_in_bytes_over_all_owners(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(derived, "kept", derived.Kept(100_000))
    one, other = OWNERS[kind](3), PackedDocuments([[0, 4, 50]])
    for n in range(3):
        one.derived(n, lambda: Sized(20_000))
    assert all(has(one, n) for n in range(3))
    other.derived("large", lambda: Sized(95_000))
    assert has(other, "large") and not has(one, 0), "the oldest go, whosever they are"
    other.derived("larger", lambda: Sized(10**9))
    assert has(other, "larger") and not has(other, "large"), "the newest stays"
    for n in range(10_000):
        one.derived(n, lambda: None)
    assert not any(has(one, n) for n in range(9_000)), "small values count too"
    del other
    gc.collect()
    one.derived("after a table is gone", lambda: Sized(99_000))
    assert derived.kept.nbytes <= 100_000 + 1024


def test_a_schedule_knows_about_how_large_it_is() -> None:
    packed = PackedDocuments([list(range(0, 2**14 + 1, 16))])
    for exchange in ("ring", "all_gather"):
        call = ("per_document", 3, 8, 1, exchange, False, (None, 0), 2**14, 2**14)
        found = schedule(Key(*call), packed)
        for step in found.forward:
            step.used.index(torch.device("cpu"))
        assert found.nbytes / 2 <= in_memory(found, set()) <= found.nbytes * 2


def in_memory(value: Any, counted: set[int]) -> int:
    """Bytes of an object and of what it refers to."""
    if id(value) in counted or isinstance(value, type):
        return 0
    counted.add(id(value))
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return int(value.nbytes)
    inner = [*value] if isinstance(value, (tuple, list, set)) else []
    inner += [*value.keys(), *value.values()] if isinstance(value, dict) else []
    inner += [getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)]
    inner += [value.__dict__] if hasattr(value, "__dict__") else []
    return sys.getsizeof(value) + sum(in_memory(x, counted) for x in inner)


def test_a_table_in_memory_that_others_write() -> None:
    memory = numpy.array([[0, 3, 8, 8]])
    table = torch.from_numpy(memory)
    assert read(table).rows == ((0, 3, 8),)
    memory[0, 1] = 5  # no version of the tensor counts this
    assert read(table).rows == ((0, 5, 8),)
