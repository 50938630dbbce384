"""Blocks of ``handler.documents``: whose batch attention sees, and errors where it would see another one's."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.data.packing import attention_state
from hyper_cp.ops import attention
from hyper_cp.schedule.documents import read
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks
from tests.harness.styled import Flash

LENGTH, A, B = 16, [0, 7, 16], [0, 4, 5, 16]


def setup(causal: bool = True) -> tuple[ContextParallelHandler, nn.Module, list[Tensor]]:
    """A handler, a styled module, and q, k, v of the whole sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(2, 1, 1, kv_exchange="ring", layout="head_tail")
    g = torch.Generator().manual_seed(4)
    whole = [torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, generator=g) for _ in range(3)]
    module = parallelize_module(modules.BNSD(causal), mesh, style)
    return ContextParallelHandler(mesh, style), module, whole


def expected(whole: list[Tensor], boundaries: list[int] | None, causal: bool = True) -> Tensor:
    number = torch.bucketize(torch.arange(LENGTH), torch.tensor(boundaries or [0, LENGTH])[1:-1], right=True)
    return plain_attention(*whole, is_causal=causal, visible=number[:, None] == number)


def packed_step(way: str) -> bool:
    """True if the loss of a batch with packed documents warns, on a mesh on which nothing has run."""
    handler, module, whole = setup()
    handler.cp.batch.__init__()  # type: ignore[misc]
    ids = torch.arange(LENGTH)[None]
    entries = {} if way == "one document" else {"cu_seqlens": [0, LENGTH] if way == "whole" else A}
    batch = handler.get_batch_on_this_cp_rank({"tokens": ids, "labels": ids, **entries}, shift_labels=True)
    labels, q = batch["shift_labels"], [handler.dispatch(x, 2) for x in whole]
    if way == "block":
        with handler.documents(batch):
            module(*q)
    elif way == "argument":
        module(*q, documents=A)
    elif way == "next batch":  # split ahead of a loss, which is that of another batch
        labels = torch.zeros_like(labels)
        module(*q)
    elif way != "no attention":
        module(*q)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handler.mean_loss(torch.zeros(1, labels.shape[1]), labels, elsewhere=way == "no attention")
    return any("no attention call on this cp mesh has had documents" in str(x.message) for x in caught)


@on_ranks
def packed_steps() -> list[str]:
    ways = ("forgotten", "block", "argument", "next batch", "no attention", "one document", "whole")
    return [way for way in ways if packed_step(way)]


def test_a_forgotten_block_warns_in_the_loss(ranks: Any) -> None:
    assert ranks(2, packed_steps) == [["forgotten"]] * 2


@contextmanager
def prefetching(handler: ContextParallelHandler, documents: Any) -> Iterator[None]:
    """Another thread is in a documents block of the next batch."""
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with handler.documents(documents):
            handler.dispatch(torch.zeros(1, LENGTH))
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join(30)


@on_ranks
def two_threads() -> float:
    """The worst error of forwards and gradients of this thread, beside another one that prepares a batch."""
    handler, module, whole = setup()
    local = [handler.dispatch(x, 2).requires_grad_() for x in whole]
    worst = 0.0

    def check(documents: Any) -> None:
        nonlocal worst
        worst = max(worst, relative_error(handler.combine(module(*local).detach(), 2), expected(whole, documents)))

    with prefetching(handler, A):
        for documents in (B, None):
            with handler.documents(documents):
                check(documents)
        with pytest.raises(RuntimeError, match="which is in no documents block, while thread"):
            module(*local)
    check(None)
    with handler.documents(B):
        with prefetching(handler, A):
            check(B)
        check(B)  # and after the other thread's block
    first, second = handler.documents(A), handler.documents(B)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    check(B)
    second.__exit__(None, None, None)
    check(None)
    # A recompute after the block, while another thread is in one, has the documents of its forward.
    with handler.documents(B):
        out = checkpoint(module, *local, use_reentrant=False)
    with prefetching(handler, A):
        grads = torch.autograd.grad(out.sum(), local)
    wide = [x.clone().requires_grad_() for x in whole]
    want = torch.autograd.grad(expected(wide, B).sum(), wide)
    return max(worst, *(relative_error(handler.combine(a, 2), b) for a, b in zip(grads, want, strict=True)))


def test_documents_belong_to_the_thread_of_their_block(ranks: Any) -> None:
    assert max(ranks(2, two_threads)) <= 1e-10


# --------------------------------------------------------------------------- two sequences


@on_ranks
def encoder_and_decoder() -> None:
    handler, encoder, whole = setup(causal=False)
    decoder, mine = parallelize_module(modules.BNSD(True), handler.mesh, handler.style), []
    local = [handler.dispatch(x, 2) for x in whole]
    ids = torch.arange(LENGTH)[None]
    mask = (ids < 7).long()
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    with pytest.raises(ValueError, match="two sequences: 'input_ids' and 'decoder_input_ids'"):
        handler.get_batch_on_this_cp_rank(batch)
    batch["attention_mask"] = torch.ones_like(mask)  # nothing to mix up
    assert handler.get_batch_on_this_cp_rank(batch)["decoder_input_ids"].shape == (1, LENGTH // 2)
    source = handler.get_batch_on_this_cp_rank({"input_ids": ids, "attention_mask": mask})
    with handler.documents(source):
        memory = encoder(*local)
        with pytest.raises(RuntimeError, match="causal and non-causal attention use the documents of one"):
            decoder(memory, *local[1:])
    # A block of each batch around its own part is exact.
    with (
        pytest.raises(TypeError, match=r"documents got a dict with the entries \['input_ids'"),
        handler.documents({**source}),
    ):
        raise AssertionError("entered")
    target = handler.get_batch_on_this_cp_rank({"input_ids": ids})
    with handler.documents(source):
        memory = encoder(*local)
        with handler.documents(target):
            mine.append(decoder(memory, *local[1:]))
        mine.append(encoder(*local))
    # A recompute of the encoder in the block of the decoder, with documents of equal numbers, is neither's mistake.
    with handler.documents(A):
        out = checkpoint(encoder, *(x.requires_grad_() for x in local), use_reentrant=False)
    with handler.documents(A):
        decoder(*local)
        out.sum().backward()
    want = expected(whole, A, causal=False)
    assert relative_error(handler.combine(mine[1], 2), want) <= 1e-10
    assert relative_error(handler.combine(mine[0], 2), expected([want, *whole[1:]], None)) <= 1e-10


def test_documents_of_one_sequence_are_not_applied_to_another(ranks: Any) -> None:
    ranks(2, encoder_and_decoder)


# --------------------------------------------------------------------------- explicit masks of a padded batch


@on_ranks
def masked(layout: str) -> float:
    """The worst error of attention under masks over 13 positions, which are padded with their batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style, worst = ContextParallel(2, 1, 1, layout=layout), 0.0
    handler, g = ContextParallelHandler(mesh, style), torch.Generator().manual_seed(5)
    whole = [torch.randn(2, 2, 13, 4, dtype=torch.float64, generator=g) for _ in range(3)]
    seen = torch.rand(2, 1, 13, 13, generator=g) > 0.4
    seen |= torch.eye(13, dtype=torch.bool)
    added = torch.randn(1, 2, 13, 13, dtype=torch.float64, generator=g)
    for mask in (seen, added, seen[:1, :, -1:], seen[:1, :, :, :1] | True):
        batch = handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(2, 13), "attention_mask": mask})
        module = parallelize_module(Flash(attn_mask=batch["attention_mask"]), mesh, style)
        with handler.documents(batch):
            local = [handler.dispatch(x, 2, pad_value=3.0).requires_grad_() for x in whole]
            out = handler.combine(module(*local), 2, length=13)
            grads = [handler.combine(x, 2, length=13) for x in torch.autograd.grad(out.square().sum(), local)]
        wide = [x.clone().requires_grad_() for x in whole]
        want = F.scaled_dot_product_attention(*wide, attn_mask=mask)
        pairs = zip((out, *grads), (want, *torch.autograd.grad(want.square().sum(), wide)), strict=True)
        worst = max(worst, *(relative_error(a.detach(), b.detach()) for a, b in pairs))
    return worst


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_explicit_masks_are_padded_with_their_batch(ranks: Any, layout: str) -> None:
    assert max(ranks(3, masked, layout)) <= 1e-10


# --------------------------------------------------------------------------- nobody reads them


class Crossing(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@on_ranks
def warnings_of(what: str) -> list[str]:
    handler, module, whole = setup()
    batch = handler.get_batch_on_this_cp_rank({"input_ids": torch.arange(14)[None]})
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))["cp"]
    single = parallelize_module(modules.BNSD(True), alone, handler.style)
    local = [handler.dispatch(x, 2) for x in whole]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if what == "forgotten plan":
            with handler.documents(batch):
                modules.BNSD(True)(*local)
        elif what == "styled":
            with handler.documents(batch):
                module(*local)
            with handler.documents(A), handler.documents(A):  # those of a teacher and of its student
                module(*local)
            with handler.documents(batch):
                handler.combine(local[0], 2)
            with handler.documents(None):
                modules.BNSD(True)(*local)
        elif what == "cross-attention":
            q, k, v = local[0], *(x[:, :, :4] for x in local[1:])
            style = ContextParallel(2, 1, 1, cross_attention=True, layout="head_tail")
            crossing = parallelize_module(Crossing(), handler.mesh, style)
            with handler.documents(batch):
                crossing(q, k, v, torch.ones(1, 1, 1, 4 * dist.get_world_size(), dtype=torch.bool))
            with handler.documents(batch):
                attention(q, k, v, mesh=handler.mesh, layout="head_tail")
            with handler.documents(batch):
                attention(*local, mesh=handler.mesh, layout="head_tail", documents=[0, 16])
        elif what == "one rank":
            with ContextParallelHandler(alone, handler.style).documents(A):
                assert relative_error(single(*whole), expected(whole, A)) <= 1e-10
        elif what == "an error":
            with pytest.raises(KeyError), handler.documents(batch):
                raise KeyError
    return [str(x.message) for x in found if x.filename == __file__]


def test_documents_that_nobody_reads_are_warned_of(ranks: Any) -> None:
    for (found,) in ranks(2, warnings_of, "forgotten plan"):
        assert "nothing in it has read its documents" in found and "a mesh of one rank honours documents" in found
    for what in ("styled", "cross-attention", "one rank", "an error"):
        assert ranks(2, warnings_of, what) == [[], []], what


@on_ranks
def copies_of_a_batch() -> tuple[list[int], list[str]]:
    """The boundaries of documents in the blocks of copies that keep them, and the errors of those that do not."""
    handler, _, _ = setup()
    entries = {"tokens": torch.arange(LENGTH)[None], "cu_seqlens": A}
    batch = handler.get_batch_on_this_cp_rank(entries)
    listed = handler.get_batch_on_this_cp_rank([torch.arange(LENGTH)[None]])
    whole = []
    for kept in (batch, copy.copy(batch), copy.deepcopy(batch)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with handler.documents(kept) as table:
                whole.append(read(table).rows[0] == tuple(A))

    def enter(other: Any) -> None:
        with handler.documents(other):
            pass

    moved = type(batch)({name: x.clone() for name, x in batch.items()})  # as accelerate and Lightning make it
    return whole, [error_of(lambda: enter(x)) for x in (moved, dict(batch), type(listed)(listed))]


def test_copies_of_a_batch_keep_its_documents_or_are_refused(ranks: Any) -> None:
    """Before, documents saw each other in a batch that was moved to a device with its type kept."""
    for whole, errors in ranks(2, copies_of_a_batch):
        assert whole == [True] * 3
        assert all(error.startswith("TypeError") and "carries no documents" in error for error in errors), errors


@on_ranks
def sums_of_copies() -> dict[str, float]:
    """Errors of sums over documents that a copy of a batch, or one from a data loader's worker, says."""
    handler, found = ContextParallelHandler(cp_mesh(), "contiguous"), {}
    x, mask = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.ones(2, 7)
    mask[0, :2] = mask[1, :5] = 0
    local = handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": mask})
    table = local.documents
    assert table is not None
    state = attention_state(handler, None, F.pad(mask, (0, local.padded_length - 7)))
    for name, batch in ("batch", local), ("state", state):
        for how, copied in ("pickle", pickle.loads(pickle.dumps(batch))), ("deepcopy", copy.deepcopy(batch)):
            pooled = handler.pool(local["x"], "sum", documents=copied.documents, length=local.padded_length)
            found[f"{name}, {how}"] = (pooled.sum(1) - (x * mask).sum(1)).abs().max().item()
    return found


def test_copies_of_a_batch_know_its_padding(ranks: Any) -> None:
    """Their tables of documents took padding for documents."""
    for found in ranks(2, sums_of_copies):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def prepared_beside_a_compilation() -> dict[str, float]:
    """Errors of means of a batch that another thread has prepared, while this one compiled."""
    handler, g = ContextParallelHandler(cp_mesh(), "contiguous"), torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 9, 3, generator=g, dtype=torch.float64), torch.randint(1, 3, (2, 9), generator=g)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    batches: list[Any] = []

    def prepare() -> None:
        batches.append(handler.get_batch_on_this_cp_rank({"x": x, "target": target, "attention_mask": mask}))

    def backend(graph: Any, _: Any) -> Any:
        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join()
        return graph.forward

    torch.compile(torch.nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    (local,) = batches
    losses = F.cross_entropy(x.mT, target, reduction="none")
    own = F.cross_entropy(local["x"].mT, local["target"], reduction="none")
    found = {"behind": handler.mean_loss(local["x"], local["target"], elsewhere=True) - losses.mean()}
    with handler.documents(local):
        ones = handler.mean_loss(own, mask=torch.ones_like(own), elsewhere=True)
        found["mask"] = ones - losses[mask.bool()].mean()
    return {name: abs(float(x)) for name, x in found.items()}


def test_a_batch_that_is_prepared_beside_a_compilation(ranks: Any) -> None:
    for found in ranks(2, prepared_beside_a_compilation):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def means_of_copies() -> dict[str, float]:
    """Errors of means with copied labels of another name, filled up with 0, in a block of the batch's table."""
    handler, g = ContextParallelHandler(cp_mesh(), "contiguous"), torch.Generator().manual_seed(0)
    x, target = torch.randn(1, 9, 3, generator=g, dtype=torch.float64), torch.randint(1, 3, (1, 9), generator=g)
    local = handler.get_batch_on_this_cp_rank({"x": x, "target": target})
    want = F.cross_entropy(x[0], target[0])
    moved = {name: entry.clone() for name, entry in local.items()}
    tables = {"own": local.documents, "pickled": pickle.loads(pickle.dumps(local)).documents}
    alone = ContextParallelHandler(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"], "contiguous")
    tables["of another mesh"] = alone.get_batch_on_this_cp_rank({"x": x, "cu_seqlens": torch.tensor([0, 9])}).documents
    found = {}
    for name, table in tables.items():
        with handler.documents(table):
            found[name] = abs(handler.mean_loss(moved["x"], moved["target"], elsewhere=True).item() - want.item())
    return found


def test_a_block_of_the_table_of_a_batch_knows_its_length(ranks: Any) -> None:
    for found in ranks(2, means_of_copies):
        assert max(found.values()) <= 1e-12, found


# --------------------------------------------------------------------------- functions of a handler in a checkpoint


@on_ranks
def recomputed(layout: str) -> dict[str, float]:
    """Errors of gradients of functions of a handler in a checkpoint, with backward in no block or in the next one."""
    style = ContextParallel(ulysses_degree=1, kv_exchange="needed", layout=layout)
    handler, found, length = ContextParallelHandler(cp_mesh(), style), {}, 16
    table, whole = torch.randn(64, 4, dtype=torch.float64), torch.randn(1, length, 4, dtype=torch.float64)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda x: handler.roll_tensor(x, 1, 1)[0],
        "rotary": lambda x: handler.apply_rotary_pos_emb(x.unsqueeze(2), table).squeeze(2),
        "positions": lambda x: x * handler.position_ids(length, restart=True)[None, :, None],
        "combine": lambda x: x * handler.dispatch(handler.combine(x, 1, gradients="shares").cumsum(1), 1),
    }

    def gradient(function: Callable[[Tensor], Tensor], use_reentrant: bool | None, block: Any) -> Tensor:
        weight = torch.eye(4, dtype=torch.float64).requires_grad_()

        def run(x: Tensor) -> Tensor:
            return function(torch.tanh(x @ weight)) @ weight

        with handler.documents([0, 3, 6, length]):
            x = handler.dispatch(whole, 1).requires_grad_()
            loss = (run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)).square().sum()
            if use_reentrant is None:
                loss.backward()
        if use_reentrant is not None:
            with handler.documents([0, 8, length]) if block == "next" else nullcontext():
                loss.backward()
        return sum_over_ranks(weight.grad)[0]

    for name, function in functions.items():
        want = gradient(function, None, "in")
        for reentrant, block in itertools.product((False, True), ("none", "next")):
            found[f"{name} {reentrant} {block}"] = relative_error(gradient(function, reentrant, block), want)
    return found


@pytest.mark.parametrize("layout", ["head_tail", "balanced"])
def test_functions_of_a_handler_are_recomputed_with_the_documents_of_their_forward(ranks: Any, layout: str) -> None:
    for found in ranks(2, recomputed, layout):
        assert len(found) == 16 and max(found.values()) <= 1e-12, found
