"""Stacks of what is running: each thread has its own."""

from __future__ import annotations

import threading

from hyper_cp.module.thread_stack import ThreadStack


def test_each_thread_has_its_own_entries() -> None:
    stack: ThreadStack[list[int]] = ThreadStack()
    outer, inner = [1], [1]
    stack.push(outer)
    stack.push(inner)
    found: list[list[int] | None] = []
    thread = threading.Thread(target=lambda: found.append(stack.top))
    thread.start()
    thread.join()
    assert found == [None] and stack.top is inner


def test_entries_leave_by_identity_and_in_any_order() -> None:
    stack: ThreadStack[list[int]] = ThreadStack()
    outer, inner = [1], [1]  # equal, and not the same
    stack.push(outer)
    stack.push(inner)
    stack.remove(outer)
    assert stack.top is inner and len(stack.entries) == 1
    stack.remove(outer)  # not there: nothing changes
    stack.push(inner)
    stack.remove(inner)
    assert stack.entries == [inner]
    stack.remove(inner)
    assert stack.top is None
