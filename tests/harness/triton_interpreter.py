"""Triton's interpreter, which runs kernels on CPU tensors, also in a process that has imported Triton before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from hyper_cp.ops.kernels import triton_selected


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernels of selected keys in the interpreter. Functions of triton.language that are written in Triton were
    made for GPUs when that was imported: those that the kernels call are made again."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        import triton
        import triton.language as tl

        for name in ("cumsum", "max", "sum", "zeros"):
            again = triton.jit(getattr(tl, name).fn)
            stack.enter_context(mock.patch.object(tl, name, again))
        triton_selected.compiled.cache_clear()
        stack.callback(triton_selected.compiled.cache_clear)
        yield
