"""The documents blocks of threads: each thread has its own, and threads of backward see those of the only other."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hyper_cp.mesh.batch_state import BatchState
from hyper_cp.mesh.share_lengths import LENGTHS, ShareLengths

A, B = torch.tensor([[0, 4, 8]]), torch.tensor([[0, 2, 8]])


def result_of(call: Callable[[], Any], start: Callable[[Callable[[], None]], Any]) -> Any:
    """The result of a call in another thread, or its error."""
    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(error)
        done.set()

    start(run)
    assert done.wait(10)
    return found[0]


def thread_of_python(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="worker").start()


def thread_of_others(run: Callable[[], None]) -> None:
    """A thread that ``threading`` has not started, as of Ray's actors."""
    _thread.start_new_thread(run, ())


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.run()
        return grad, None


def thread_of_backward(run: Callable[[], None]) -> None:
    """Backward in such a thread, like those of autograd on an accelerator."""
    x = InBackward.apply(torch.ones((), requires_grad=True), run)
    thread_of_others(x.backward)


@contextmanager
def in_a_block_of_another_thread(state: BatchState, documents: Any) -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        block = state.enter(documents)
        entered.set()
        leave.wait(10)
        state.leave(block)

    thread = threading.Thread(target=run, name="prefetch")
    thread.start()
    assert entered.wait(10)
    yield
    leave.set()
    thread.join(10)


def test_blocks_end_in_any_order() -> None:
    state = BatchState()
    first, second = state.enter(A), state.enter(B)
    state.leave(first)
    assert state.documents is B
    state.leave(second)
    assert state.documents is None and state.active_documents("x") is None
    with in_a_block_of_another_thread(state, None):
        first, second = state.enter(A), state.enter(None)
        assert state.documents is None
        state.leave(second)
        assert state.documents is A
    result_of(lambda: state.leave(first), thread_of_python)  # it still ends the block of the thread that entered it
    assert state.documents is None and result_of(lambda: state.active_documents("x"), thread_of_python) is None


def test_a_block_holds_in_its_own_thread() -> None:
    state = BatchState()
    with in_a_block_of_another_thread(state, B):
        assert state.documents is None
        with pytest.raises(RuntimeError, match=r"layer 3 runs in thread 'MainThread'.*'prefetch'.*documents\(None\)"):
            state.active_documents("layer 3")
        own = state.enter(A)
        assert state.active_documents("layer 3") is A and state.documents is A
        state.leave(own)
    assert state.active_documents("layer 3") is None


def test_a_worker_does_not_ignore_the_documents_of_the_thread_that_started_it() -> None:
    state = BatchState()
    block = state.enter(A)
    assert "'worker', which is in no documents block" in str(
        result_of(lambda: state.active_documents("x"), thread_of_python)
    )
    assert result_of(lambda: state.documents, thread_of_python) is None
    state.leave(block)


def test_backward_sees_the_only_blocks_there_are() -> None:
    state = BatchState()
    assert result_of(lambda: state.active_documents("x"), thread_of_backward) is None
    block = state.enter(A)
    assert result_of(lambda: state.active_documents("x"), thread_of_backward) is A
    with in_a_block_of_another_thread(state, B):
        error = str(result_of(lambda: state.active_documents("x"), thread_of_backward))
        assert "2 threads ('MainThread', 'prefetch') are in documents blocks" in error
    state.leave(block)


def test_other_threads_that_python_has_not_started_see_no_blocks() -> None:
    """Before, they were taken for threads of backward: the next batch got the documents of this one."""
    state = BatchState()
    block = state.enter(A)
    assert result_of(lambda: state.documents, thread_of_others) is None
    assert "is in no documents block" in str(result_of(lambda: state.active_documents("x"), thread_of_others))
    state.leave(block)


def test_blocks_of_a_thread_that_has_ended_do_not_count() -> None:
    state = BatchState()
    thread = threading.Thread(target=lambda: state.enter(B))
    thread.start()
    thread.join()
    assert state.active_documents("x") is None


def test_lengths_of_shares_are_recorded_for_a_while() -> None:
    lengths = ShareLengths()
    for length in range(LENGTHS + 2):
        lengths.record(length)
    assert 1 not in lengths and 2 in lengths and LENGTHS + 1 in lengths


def attend(state: BatchState, **given: Any) -> None:
    """Record a call of 8 queries and keys with the documents ``A``; without more it is causal."""
    usual = {"band": (None, 0), "lengths": (8, 8), "mask_rows": None, "masked": False, "positional": False}
    state.record_attention(A, **{**usual, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"positional": True},
        {"mask_rows": 8, "masked": True},
        {"mask_rows": 1, "masked": True, "lengths": (8, 6)},
        {"mask_rows": 1, "masked": True, "lengths": (1, 1)},
    ],
)
def test_attention_that_may_be_anything_is_not_compared(given: dict[str, Any]) -> None:
    state = BatchState()
    block = state.enter(A)
    attend(state)
    attend(state, band=(None, None), **given)
    assert block.kinds == {True}
    state.leave(block)


@pytest.mark.parametrize(
    "given",
    [{}, {"mask_rows": 1, "masked": True}, {"mask_rows": 8}],
    ids=["plain", "rows alike", "mask that is a band"],
)
def test_causal_and_other_attention_in_one_block_raises(given: dict[str, Any]) -> None:
    state = BatchState()
    block = state.enter(A)
    attend(state)
    with pytest.raises(RuntimeError, match="causal and non-causal attention use the documents of one"):
        attend(state, band=(None, None), **given)
    state.leave(block)
    attend(state, band=(None, None))  # outside of the block nothing is compared


def test_labels_of_documents_that_no_call_had() -> None:
    state, labels = BatchState(), torch.zeros(1, 8)
    state.record_packed(labels)
    assert not state.ignores_documents(labels)
    state.record_attention(None, band=(None, 0), lengths=(8, 8), mask_rows=None, masked=False, positional=False)
    assert state.ignores_documents(labels) and not state.ignores_documents(labels.clone())
    attend(state)
    assert not state.ignores_documents(labels)
