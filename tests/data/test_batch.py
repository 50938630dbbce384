"""roll_tensor and get_batch_on_this_cp_rank, compared with the same operations on whole tensors."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.ops.exchange.held_rows import rows_plan
from hyper_cp.schedule.lookup import resolve
from tests.harness.oracle import token_positions
from tests.harness.ranks import check_errors, errors_of, on_ranks

LAYOUTS = ["contiguous", "head_tail"]
LENGTHS = ["seq_lengths", "sequence_lengths", "doc_lens", "document_lengths", "sample_lens", "subseq_lengths"]
LENGTHS += ["cu_doc_lens", "cumulative_seqlens", "segment_lens", "document_boundaries", "doc_offsets"]
PER_TOKEN = ["segment_idx", "inputs_segmentation", "decoder_segment_ids", "example_ids", "attention_mask_in_length"]
PER_TOKEN += ["segments"]
"""Names of packed documents in other libraries: lengths of documents, and numbers of the documents of tokens."""


def rolled_whole(x: Tensor, shifts: int, dim: int, boundaries: list[list[int]] | None) -> Tensor:
    """The oracle: every position looks up its source."""
    x = x.movedim(dim, 0)
    out = torch.zeros_like(x)
    for p in range(len(x)):
        source = p - shifts
        if not 0 <= source < len(x):
            continue
        out[p] = x[source]
        for row, bounds in enumerate(boundaries or []):
            if any(min(p, source) < b <= max(p, source) for b in bounds):
                (out[p] if len(boundaries) == 1 else out[p][row]).zero_()  # type: ignore[arg-type]
    return out.movedim(0, dim)


@given(st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 4), st.integers(-30, 30))
def test_a_roll_plan_moves_each_row_to_its_place(layout: str, world: int, unit: int, shifts: int) -> None:
    length = 2 * world * unit
    resolved = resolve(layout, world, length)
    whole = torch.arange(1, length + 1)
    local = [whole[torch.tensor(token_positions(layout, r, world, length))] for r in range(world)]
    plans = [rows_plan(resolved, r, shifts, -shifts) for r in range(world)]
    for rank, plan in enumerate(plans):
        sent = [
            torch.cat([x[a:b] for a, b in rows]) if rows else x[:0] for x, rows in zip(local, plan.sent, strict=True)
        ]
        assert max(map(len, sent)) == plan.width
        parts = [
            torch.zeros(b - a, dtype=torch.int64)
            if owner is None
            else (local[rank] if owner == rank else sent[owner])[a:b]
            for owner, a, b in plan.parts
        ]
        expected = rolled_whole(whole, shifts, 0, None)[torch.tensor(token_positions(layout, rank, world, length))]
        assert torch.equal(torch.cat(parts), expected)


ROLLS: list[tuple[int, Any]] = [(s, None) for s in (-1, 1, -2, 3, 0, -7, 11, -24, 50)]
ROLLS += [(s, d) for s in (-1, 2, -5) for d in ([0, 5, 6, 17, 24], [[0, 24], [0, 7, 8, 24], [0, 1, 23, 24]])]


@on_ranks
def rolls(layout: str, names: tuple[str, ...]) -> dict[str, int]:
    """Compare each roll, its gradient and its number of transfers with a roll of the whole."""
    world = dist.get_world_size()
    shape = (world,) if len(names) == 1 else (2, world // 2)
    handler = ContextParallelHandler(init_device_mesh("cpu", shape, mesh_dim_names=names), layout)
    mine, g = torch.tensor(token_positions(layout, dist.get_rank(), world, 24)), torch.Generator().manual_seed(1)
    for shifts, documents in ROLLS:
        boundaries = documents if documents is None or isinstance(documents[0], list) else [documents]
        for x, dim in (
            (torch.randn(3, 24, dtype=torch.float64, generator=g), -1),
            (torch.randn(24, 3, 2, dtype=torch.float64, generator=g), 0),
            (torch.rand(3, 2, 24, generator=g) > 0.5, 2),
            (torch.randint(99, (3, 24, 2), generator=g), 1),
        ):
            local = x.index_select(dim, mine)
            learns = x.is_floating_point()
            local.requires_grad_(learns)
            with comm.record_traffic() as log:
                got, total = handler.roll_tensor(local, shifts, dim, documents=documents)
            where = f"{shifts} {documents} {tuple(x.shape)}"
            want = rolled_whole(x, shifts, dim, boundaries).index_select(dim, mine)
            assert torch.equal(got, want), where
            assert got.dtype == x.dtype and torch.equal(total, want.sum()), where
            assert len(log.entries) <= len(names), where
            if learns:
                weight = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
                wide = x.clone().requires_grad_()
                (full,) = torch.autograd.grad(
                    (rolled_whole(wide * 1, shifts, dim, boundaries) * weight).sum() + 0 * wide.sum(), wide
                )
                (grad,) = torch.autograd.grad((got * weight.index_select(dim, mine)).sum(), local)
                assert torch.equal(grad, full.index_select(dim, mine)), where
    return {}


@on_ranks
def warned(length: int) -> dict[str, int]:
    """Warnings of calls in the block of a batch of ``length`` positions."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "contiguous")
    batch = handler.get_batch_on_this_cp_rank({"x": torch.randn(1, length, 4)})
    found, x = {}, batch["x"]
    with handler.documents(batch):
        for name, call in {
            "whole with padding": lambda: handler.combine(x, gradients="shares"),
            "whole without it": lambda: handler.combine(x, length=length, gradients="shares"),
            "for a loss": lambda: handler.combine(x, gradients="sum"),
            **({"channels": lambda: handler.roll_tensor(x, 1)} if length == 16 else {}),  # else an error
            "positions": lambda: handler.roll_tensor(x, 1, 1),
            "positions are last": lambda: handler.roll_tensor(x.mT, 1),
        }.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            found[name] = sum("padding" in str(w.message) or "dims=" in str(w.message) for w in caught)
    return found


def test_padding_in_the_middle_of_a_model_and_rolled_channels_are_warned_of(ranks: Any) -> None:
    for length in (16, 17):
        for found in ranks(2, warned, length):
            assert found.pop("channels", 1) == 1 and found.pop("whole with padding") == (length == 17)
            assert not any(found.values()), found


@pytest.mark.parametrize(
    ("world", "layout"), [(1, "contiguous"), (2, "contiguous"), pytest.param(3, "head_tail", marks=pytest.mark.slow)]
)
def test_a_roll_is_that_of_the_whole_sequence(ranks: Any, world: int, layout: str) -> None:
    ranks(world, rolls, layout, ("cp",))


@pytest.mark.slow
def test_rolls_on_a_mesh_of_two_dimensions(ranks: Any) -> None:
    ranks(4, rolls, "head_tail", ("ring", "ulysses"))


@on_ranks
def compiled_roll() -> list[bool]:
    handler, x = ContextParallelHandler(init_device_mesh("cpu", (2,)), ContextParallel(2, 1)), torch.randn(1, 8, 4)
    found = []
    for documents in (None, [0, 5, 16]):
        roll = torch.compile(lambda x: handler.roll_tensor(x, 1, 1)[0], backend="eager", fullgraph=documents is None)
        with handler.documents(documents):
            found.append(torch.equal(roll(x), handler.roll_tensor(x, 1, 1)[0]))
    return found


def test_a_roll_in_a_compiled_function(ranks: Any) -> None:
    for found in ranks(2, compiled_roll):
        assert found == [True, True]


@on_ranks
def roll_traffic(layout: str) -> tuple[int, int]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (4,)), layout)
    with comm.record_traffic() as log, handler.documents([0, 9, 64]):
        handler.roll_tensor(torch.zeros(2, 16, 5), -1, 1)
    return len(log.entries), log.bytes_sent


@pytest.mark.parametrize("layout,rows", [("contiguous", 1), ("head_tail", 2)])
def test_only_rows_at_the_ends_of_chunks_travel(ranks: Any, layout: str, rows: int) -> None:
    for entries, sent in ranks(4, roll_traffic, layout):
        assert (entries, sent) == (1, 3 * rows * 2 * 5 * 4)


@on_ranks
def wrong_roll() -> dict[str, str]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    x = torch.zeros(3, 8)
    return errors_of(
        {
            "dims=2 is not a dimension": lambda: handler.roll_tensor(x, -1, 2),
            r"TypeError: shifts=\(1, 2\) must be an int": lambda: handler.roll_tensor(x, (1, 2)),  # type: ignore[arg-type]
            "global sequence length 16": lambda: handler.roll_tensor(x, documents=[0, 5, 12]),
            "2 rows for a batch of 3": lambda: handler.roll_tensor(x, documents=[[0, 16], [0, 4, 16]]),
        }
    )


def test_wrong_rolls_are_refused(ranks: Any) -> None:
    check_errors(ranks(2, wrong_roll))


# --------------------------------------------------------------------------- whole batches


def tokens(batch: int = 3, length: int = 24) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 99, (batch, length), generator=g)
    return {"input_ids": ids, "labels": ids.clone(), "weight": torch.rand(batch, generator=g)}


def shift(labels: Tensor, last: list[list[int]]) -> Tensor:
    """Next tokens of ``[B, S]``; positions ``last``, where a row's documents end, have no label."""
    out = torch.full_like(labels, -100)
    for b in range(len(labels)):
        for p in range(labels.shape[1] - 1):
            if p not in last[b % len(last)]:
                out[b, p] = labels[b, p + 1]
    return out


@on_ranks
def packed(layout: str) -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (dist.get_world_size(),)), layout)
    mine = torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), 24))
    batch = tokens()
    whole = {k: v.clone() for k, v in batch.items()}

    found = handler.get_batch_on_this_cp_rank(batch, shift_labels=True, debug=True)
    assert list(found) == ["input_ids", "weight", "shift_labels", "position_ids"]
    assert isinstance(found, dict) and found.documents is None and (found.length, found.padded_length) == (24, 24)
    assert torch.equal(found["input_ids"], whole["input_ids"][:, mine])
    assert torch.equal(found["shift_labels"], shift(whole["labels"], [[]])[:, mine])
    assert torch.equal(found["position_ids"], mine.expand(3, -1))
    assert torch.equal(found["weight"], whole["weight"])
    assert all(torch.equal(batch[k], v) for k, v in whole.items()) and list(batch) == list(whole)  # untouched

    restarted = torch.tensor([*range(5), *range(1), *range(11), *range(7)])
    for offsets in (
        {"cu_seqlens": [0, 5, 6, 17, 24]},
        {"documents": [0, 5, 6, 17, 24], "cu_seqlens_q": torch.tensor([[0, 5, 6, 17, 24]])},
        {"cu_seq_q": torch.tensor([0, 5, 6, 17, 24]), "cu_seqlens_k": [0, 5, 6, 17, 24], "max_seqlen_k": 11},
        {"seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor([5, 1, 11, 7]))},
        {
            "cu_seq_lens_q": torch.tensor([0, 5, 6, 17, 24], dtype=torch.int32),
            "cu_seq_lens_k": [0, 5, 6, 17, 24],
            "max_length_q": 11,
        },
        {
            "document_ids": torch.repeat_interleave(torch.tensor([3, 1, 4, 9]), torch.tensor([5, 1, 11, 7])).expand(
                3, -1
            )
        },
    ):
        found = handler.get_batch_on_this_cp_rank({**batch, **offsets}, shift_labels=True)
        assert list(found) == ["input_ids", "weight", "shift_labels", "position_ids"]
        assert torch.equal(found["shift_labels"], shift(whole["labels"], [[4, 5, 16]])[:, mine])
        assert torch.equal(found["position_ids"], restarted[mine].expand(3, -1))
        crossing = handler.get_batch_on_this_cp_rank(
            {**batch, **offsets}, shift_labels=True, labels_cross_documents=True
        )
        assert torch.equal(crossing["shift_labels"], shift(whole["labels"], [[]])[:, mine])
        with handler.documents(found) as table:
            assert sorted(set(table[0].tolist())) == [0, 5, 6, 17, 24] and handler.cp.batch.documents is table
            assert torch.equal(handler.position_ids(24, restart=True), restarted[mine])
            assert torch.equal(handler.position_ids(24), mine)
        assert handler.cp.batch.documents is None

    rows = [[0, 24], [0, 7, 8, 24], [0, 1, 23, 24]]
    found = handler.get_batch_on_this_cp_rank({**batch, "cu_seqlens": rows}, shift_labels=True)
    assert torch.equal(found["shift_labels"], shift(whole["labels"], [[b - 1 for b in r] for r in rows])[:, mine])
    starts = torch.tensor([[max(b for b in r if b <= p) for p in range(24)] for r in rows])
    assert torch.equal(found["position_ids"], (torch.arange(24) - starts)[:, mine])
    assert torch.equal(handler.position_ids(24, restart=True, documents=rows), found["position_ids"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_labels_positions_and_documents(ranks: Any, world: int, layout: str) -> None:
    ranks(world, packed, layout)


@on_ranks
def padded(layout: str) -> None:
    """Batches of 13 positions on 3 ranks, padded on the right, on the left, and on both sides or not at all."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (3,)), layout)
    width = 15 if layout == "contiguous" else 18
    mine = token_positions(layout, dist.get_rank(), 3, width)
    batch = {**tokens(3, 13), "attention_mask": torch.ones(3, 13, dtype=torch.int64)}
    batch["attention_mask"][0, 9:] = 0
    batch["attention_mask"][1, :4] = 0

    def local(x: Tensor, fill: int) -> Tensor:
        return torch.cat([x, torch.full((3, width - 13), fill)], 1)[:, mine]

    found = handler.get_batch_on_this_cp_rank(batch, shift_labels=True, pad_values={"input_ids": 7})
    assert (found.length, found.padded_length) == (13, width)
    assert torch.equal(found["input_ids"], local(batch["input_ids"], 7))
    assert torch.equal(found["shift_labels"], local(shift(batch["labels"], [[], [], []]), -100))
    assert bool((found["attention_mask"] == 1).all()) and found["attention_mask"].shape == (3, width // 3)
    assert torch.equal(
        found["position_ids"], local(torch.arange(13).expand(3, -1), 0) + torch.tensor([max(0, p - 13) for p in mine])
    )
    want = [[0, 9, 13, width], [0, 4, 13, width], [0, 13, width]]
    assert [list(dict.fromkeys(row)) for row in found.documents.tolist()] == want
    assert torch.equal(handler.combine(found["input_ids"], length=found.length), batch["input_ids"])

    batch["attention_mask"][2, :3] = batch["attention_mask"][2, 11:] = 0  # a prompt and what was generated for it
    found = handler.get_batch_on_this_cp_rank(batch)
    assert [*dict.fromkeys(found.documents[2].tolist())] == [0, 3, 11, 13, width]
    assert found.tokens is not None and found.tokens.sum(1).tolist() == [9, 9, 8]

    batch["attention_mask"][:] = 1  # only the padding up to the padded length remains
    found = handler.get_batch_on_this_cp_rank(batch)
    assert [list(dict.fromkeys(row)) for row in found.documents.tolist()] == [[0, 13, width]]
    assert torch.equal(found["labels"], local(batch["labels"], -100))

    both = {**batch, "cu_seqlens": [0, 6, 13], "attention_mask": torch.ones(3, 13, dtype=torch.bool)}
    both["attention_mask"][2, 11:] = False
    found = handler.get_batch_on_this_cp_rank(both)
    want = [[0, 6, 13, width], [0, 6, 13, width], [0, 6, 11, 13, width]]
    assert [list(dict.fromkeys(row)) for row in found.documents.tolist()] == want
    at = torch.tensor([*range(6), *range(7), *range(width - 13)])[mine]
    assert torch.equal(found["position_ids"], at.expand(3, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_becomes_documents(ranks: Any, layout: str) -> None:
    ranks(3, padded, layout)


@on_ranks
def containers() -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail")
    mine = torch.tensor(token_positions("head_tail", dist.get_rank(), 2, 8))
    x, y, image = torch.arange(16).view(2, 8), torch.arange(8.0), torch.rand(2, 3)
    found = handler.get_batch_on_this_cp_rank((x, y, image, "text"), [-1, 0, None, None])
    assert isinstance(found, tuple) and found.length == 8
    assert torch.equal(found[0], x[:, mine]) and torch.equal(found[1], y[mine]) and torch.equal(found[2], image)
    found = handler.get_batch_on_this_cp_rank([x, 3])
    assert isinstance(found, list) and torch.equal(found[0], x[:, mine]) and found[1] == 3
    # The sequence as dimension 0; [S] alone; an image whose dimension 1 is something else; an explicit mask.
    found = handler.get_batch_on_this_cp_rank({"tokens": x.T, "labels": x.T}, 0, shift_labels=True)
    assert torch.equal(found["shift_labels"], shift(x, [[]]).T[mine]) and torch.equal(
        found["position_ids"], torch.stack([mine, mine], 1)
    )
    found = handler.get_batch_on_this_cp_rank({"tokens": y}, 0)
    assert torch.equal(found["position_ids"], mine)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    found = handler.get_batch_on_this_cp_rank(
        {"pixels": image, "input_ids": x, "attention_mask": mask, "position_ids": x + 1, "none": None}, {"pixels": None}
    )
    assert found["attention_mask"] is mask and found["pixels"] is image and found["none"] is None
    assert torch.equal(found["position_ids"], (x + 1)[:, mine])
    found = handler.get_batch_on_this_cp_rank({"input_ids": x, "segment_ids": x}, {"segment_ids": 1})  # something else
    assert torch.equal(found["segment_ids"], x[:, mine])


def test_containers_and_dimensions(ranks: Any) -> None:
    ranks(2, containers)


@on_ranks
def wrong_batch() -> dict[str, str]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    get, x = handler.get_batch_on_this_cp_rank, torch.zeros(2, 7, dtype=torch.int64)
    holes = torch.ones_like(x)
    holes[1, 3] = 0
    return errors_of(
        {
            "TypeError: batch is a Tensor": lambda: get(x),
            "'images' has 3 positions in dimension 1, but 'input_ids' has 7.*'images': None": lambda: get(
                {"images": torch.zeros(2, 3), "input_ids": x}
            ),
            "no entry of the batch has a sequence dimension": lambda: get({"scale": torch.zeros(3)}),
            r"seq_dims names \['tokens'\]": lambda: get({"input_ids": x}, {"tokens": 1}),
            r"seq_dims\['input_ids'\]=2 is not a dimension of batch entry .*\(2, 7\)": lambda: get(
                {"input_ids": x}, {"input_ids": 2}
            ),
            "has 1 places": lambda: get([x, x], [1]),
            "TypeError: 'more' is a dict of tensors": lambda: get({"input_ids": x, "more": {"a": x}}),
            "shift_labels=True needs a dict batch with a tensor 'labels'": lambda: get(
                {"input_ids": x}, shift_labels=True
            ),
            r"attention_mask\[1\] is not a padding mask": lambda: get({"input_ids": x, "attention_mask": holes}),
            r"attention_mask\[0\] is not a padding mask": lambda: get({"input_ids": x, "attention_mask": holes + 1}),
            r"attention_mask \(2, 1, 6, 7\) does not fit the 7 positions": lambda: get(
                {"input_ids": x, "attention_mask": torch.ones(2, 1, 6, 7)}
            ),
            "'segment_ids' seems to name packed documents.*'cu_seqlens'.*'document_ids'": lambda: get(
                {"input_ids": x, "segment_ids": x}
            ),
            **{
                f"{name!r} seems to name packed documents": functools.partial(get, {"input_ids": x, name: documents})
                for names, documents in ((LENGTHS, [[3, 4], [7]]), (PER_TOKEN, x))
                for name in names
            },
            "'cu_seqlens_q_padded' seems to name packed documents": lambda: get(
                {"input_ids": x, "cu_seqlens_q_padded": [0, 4, 7]}
            ),
            "'packed_seq_params' seems to name packed documents": lambda: get(
                {"input_ids": x, "packed_seq_params": SimpleNamespace(cu_seqlens_q=[0, 7])}
            ),
            "global sequence length 7": lambda: get({"input_ids": x, "cu_seqlens": [0, 5]}),
            "name different documents": lambda: get(
                {"input_ids": x, "cu_seqlens": [0, 5, 7], "cu_seqlens_kv": [0, 4, 7]}
            ),
            "pad_value=-100 is not a value of a tensor of torch.uint8": lambda: get(
                {"tokens": x, "classes": x.byte()}, pad_values={"classes": -100}
            ),
            "pad_value=2 is not a value of a tensor of torch.bool": lambda: handler.dispatch(x > 0, 1, pad_value=2),
            "pad_value=0.5 is not a value of a tensor of torch.int64": lambda: handler.dispatch(x, 1, pad_value=0.5),
            r"pad_values names \['input'\]": lambda: get({"input_ids": x}, pad_values={"input": 3}),
            "batch is this rank's share of a batch of 7 positions.*Pass the whole batch": lambda: get(
                get({"input_ids": x})
            ),
            "batch is this rank's share of a batch of 7 positions": lambda: get(get([x, x])),
        }
    )


def test_wrong_batches_are_refused(ranks: Any) -> None:
    check_errors(ranks(2, wrong_batch))


@on_ranks
def labels_that_are_shifted(layout: str) -> list[int]:
    """The number of warnings in the first two batches of a mesh."""
    ids = torch.tensor([[5, 3, 8, 8, 1, 2, 9, 4], [6, 6, 2, 7, 1, 1, 3, 5]])
    after = ids.roll(-1, 1)
    prompt = torch.where(torch.arange(8) < 3, -100, after)
    cases = {
        "last is the first": {"input_ids": ids, "labels": after},
        "last ignored": {"tokens": ids, "labels": torch.where(torch.arange(8) == 7, -100, after)},
        "prompt ignored": {"input_ids": ids, "labels": prompt, "attention_mask": torch.ones_like(ids)},
        "unshifted": {"input_ids": ids, "labels": ids},
        "unshifted prompt": {"input_ids": ids, "labels": ids.masked_fill(prompt == -100, -100)},
        "one token": {"input_ids": torch.ones_like(ids), "labels": torch.ones_like(ids)},
        "others": {"input_ids": ids, "labels": ids.flip(1)},
        "nothing counts": {"input_ids": ids, "labels": torch.full_like(ids, -100)},
        "no tokens": {"x": ids, "labels": after},
    }
    handler, found = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout), []
    for batch in cases.values():
        handler.cp.batch.batches = 0  # as on a new mesh
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                handler.get_batch_on_this_cp_rank(dict(batch), shift_labels=True)
        found.append(sum("those of the next tokens already" in str(x.message) for x in caught))
    return found


def test_labels_that_are_shifted_already_warn_once(ranks: Any) -> None:
    assert ranks(2, labels_that_are_shifted, "head_tail") == [[1, 1, 1, 0, 0, 0, 0, 0, 0]] * 2


@on_ranks
def unequal(what: str, names: tuple[str, ...]) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)
    handler, batch = ContextParallelHandler(mesh, "contiguous"), tokens(2, 8)
    batch["note"] = "epoch 1"  # type: ignore[assignment]
    batch |= {"scale": torch.tensor(0.5), "empty": torch.zeros(0, 8), "columns": torch.ones(8, 2).T}
    image, nested = np.zeros((40, 40)), {"boxes": [np.zeros(2000)], "tags": {"a", "b"}}
    batch |= {"image": image, "nested": nested, "objects": [object(), np.array(["a", None])]}  # type: ignore[dict-item]
    if rank == 1 and what == "array":
        image[20, 20] = 1
    if rank == 1 and what == "nested":
        nested["boxes"][0][1000] = 1  # type: ignore[index]
    if rank == 1 and what == "value":
        batch["labels"][1, 3] += 1
    if rank == 1 and what == "shape":
        batch["labels"] = batch["labels"][:, :4]
    if rank == 1 and what == "names":
        del batch["labels"]
    if rank == 1 and what == "other":
        batch["note"] = "epoch 2"  # type: ignore[assignment]
    handler.get_batch_on_this_cp_rank(batch, debug=True)


def test_unequal_batches_are_named(ranks: Any) -> None:
    ranks(3, unequal, "equal", ("cp",))
    for what, words in (
        ("value", r"batches that differ in entry 'labels': ranks \[1\] have others.*same rank of data parallelism"),
        ("shape", "batches that differ in entry 'labels': "),
        ("names", r"batches that differ in the names \(or number\) of its entries: "),
        ("other", "batches that differ in entry 'note': "),
        ("array", "batches that differ in entry 'image': "),
        ("nested", "batches that differ in entry 'nested': "),
    ):
        ranks.raises(3, "ValueError", words, unequal, what, ("cp",))
    ranks.raises(4, "ValueError", "entry 'labels'", unequal, "value", ("ring", "ulysses"))


@on_ranks
def texts_under_the_name_of_documents() -> list[str]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "head_tail")
    batch = handler.get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 8), "documents": ["raw", "text"]})
    return batch["documents"]


def test_texts_under_the_name_of_documents_pass_through(ranks: Any) -> None:
    assert ranks(2, texts_under_the_name_of_documents) == [["raw", "text"]] * 2


@on_ranks
def of_all_rows() -> None:
    """A padding mask ``[1, S]`` beside documents that differ between rows, and positions ``[S]``."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "contiguous")
    ids, mask = torch.arange(14).view(2, 7), torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]])
    whole = {"tokens": ids, "labels": ids, "document_ids": documents}
    made = [
        handler.get_batch_on_this_cp_rank({**whole, "attention_mask": shown}, shift_labels=True, mtp_depth=1)
        for shown in (mask, mask.expand(2, -1))
    ]
    assert torch.equal(made[0].documents, made[1].documents)
    assert torch.equal(made[0]["shift_labels_1"], made[1]["shift_labels_1"])
    at = torch.arange(7)
    one, rows = (handler.get_batch_on_this_cp_rank({"tokens": ids, "position_ids": x}) for x in (at, at.expand(2, -1)))
    assert one["position_ids"].shape == (4,) and torch.equal(one["position_ids"].expand(2, -1), rows["position_ids"])
    kept = {"tokens": ids, "position_ids": at}
    assert len(handler.get_batch_on_this_cp_rank(kept, {"position_ids": None})["position_ids"]) == 7


def test_entries_of_all_rows(ranks: Any) -> None:
    ranks(2, of_all_rows)


@on_ranks
def positions_that_restart(name: str, shift_labels: bool = False) -> list[int]:
    handler = ContextParallelHandler(
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), "contiguous"
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    once, packed = torch.arange(8), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    left, left_mask = torch.tensor([1, 1, 1, 0, 1, 2, 3, 4]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    batch = {
        "packed": {"position_ids": torch.stack([once, packed])},
        "from one": {"position_ids": torch.stack([once, packed]) + 1},
        "masked": {"position_ids": torch.stack([once, packed]), "attention_mask": torch.ones(2, 8)},
        "named": {"position_ids": packed.expand(2, -1), "cu_seqlens": torch.tensor([0, 3, 8])},
        "one document": {"position_ids": packed.expand(2, -1), "document_ids": None},
        "explicit mask": {
            "position_ids": packed.expand(2, -1),
            "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(),
        },
        "left padding": {"position_ids": left.expand(2, -1), "attention_mask": left_mask.expand(2, -1)},
        "right padding": {
            "position_ids": (packed * left_mask.flip(0)).expand(2, -1),
            "attention_mask": torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).expand(2, -1),
        },
        "all zero": {"position_ids": torch.zeros(2, 8, dtype=torch.long)},
        "further axes": {"position_ids": packed.expand(3, 2, -1)},
        "positions of torchtitan": {"positions": packed.expand(2, -1)},
        "patches": {"pos_ids": torch.stack([once // 4, once % 4], 1)},
    }[name]
    dims: Any = {"seq_dims": {"input_ids": 1, "position_ids": 2}} if name == "further axes" else {}
    dims = {"seq_dims": {"input_ids": 1, "pos_ids": 0}} if name == "patches" else dims
    if shift_labels:
        batch, dims = {**batch, "labels": ids}, {**dims, "shift_labels": True}
    return list(handler.get_batch_on_this_cp_rank({"input_ids": ids, **batch}, **dims)["position_ids"].shape)


@pytest.mark.parametrize(
    "name",
    [
        *("named", "one document", "explicit mask", "left padding", "right padding", "all zero"),
        *("further axes", "patches"),
    ],
)
def test_positions_that_go_on_or_whose_documents_are_named_are_split(ranks: Any, name: str) -> None:
    assert ranks(2, positions_that_restart, name) == [[2, 4] if name != "further axes" else [3, 2, 4]] * 2


@pytest.mark.parametrize("name", ["packed", "masked"])
def test_positions_that_restart_in_a_batch_without_documents_are_refused(ranks: Any, name: str) -> None:
    with pytest.raises(Exception, match=r"position_ids\[1\] returns to 0 at position 3.*cu_seqlens or document_ids"):
        ranks(2, positions_that_restart, name)


def test_positions_of_another_name_that_restart_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, r"positions\[0\] returns to 0", positions_that_restart, "positions of torchtitan")


def test_positions_that_are_counted_from_one_and_go_back_are_refused(ranks: Any) -> None:
    words = r"position_ids\[1\] goes back to 1 at position 3, as in packed documents"
    ranks.raises(2, ValueError, words, positions_that_restart, "from one")


def test_labels_are_not_shifted_across_documents_that_only_a_mask_keeps_apart(ranks: Any) -> None:
    words = r"position_ids\[0\] returns to 0 at position 3"
    ranks.raises(2, ValueError, words, positions_that_restart, "explicit mask", shift_labels=True)
