"""``is_compiling()`` of the thread that asks. That of torch is one flag for all threads of a process."""

from __future__ import annotations

import torch

# Private: nothing public tells which thread compiles (torch 2.11 to 2.15).
from torch._guards import CompileContext


def is_compiling() -> bool:
    """True in code that ``torch.compile`` or ``torch.export`` traces, and in what this thread runs while it does; False
    in a thread that prepares the next batch while another one compiles. (An export is one of all threads.)"""
    # In traced code a constant, of which Dynamo notes that it is another one in eager mode: it runs no frame eagerly
    # then because nothing in it is traced.
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and (torch.compiler.is_exporting() or CompileContext.try_get() is not None)
