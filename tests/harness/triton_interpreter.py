"""Triton's interpreter for kernels that call functions and multiply matrices, in a process that also compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from hyper_cp.ops.kernels import triton_selected


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernels of selected keys on CPU tensors. In Triton 3.9 three things stand in the way:

    - functions of triton.language that are written in Triton were made for GPUs when it was imported, so those that
      the kernels call are made again;
    - a function that a kernel calls leaves triton.language changed, and nothing compiles any more after it;
    - a product of matrices in bfloat16 multiplies their bits as integers.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        import triton
        import triton.language as tl
        from triton.runtime import interpreter

        for name in ("cumsum", "max", "sum", "zeros"):
            again = triton.jit(getattr(tl, name).fn)
            stack.enter_context(mock.patch.object(tl, name, again))

        def call(self: Any, *args: Any, **options: Any) -> Any:
            if self.fn.__globals__ is vars(triton_selected):  # changed for the kernel already
                return self.rewrite()(*args, **options)
            changes = interpreter._patch_lang(self.fn)
            try:
                return self.rewrite()(*args, **options)
            finally:
                changes.restore()

        plain_dot = interpreter.InterpreterBuilder.create_dot

        def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
            return plain_dot(self, *(_single(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *others)

        def _single(x: Any) -> Any:
            return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        stack.enter_context(mock.patch.object(interpreter.InterpretedFunction, "__call__", call))
        stack.enter_context(mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot))
        triton_selected.compiled.cache_clear()
        stack.callback(triton_selected.compiled.cache_clear)
        yield
