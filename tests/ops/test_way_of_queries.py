"""The way of q from ``ops.attention`` to the kernel can be read: it seldom returns to a file that it has left."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import hyper_cp
from hyper_cp.ops import attention
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import on_ranks

ROOT = str(Path(hyper_cp.__file__).parent)
MODES: list[dict[str, Any]] = [{"kv_exchange": "ring"}, {}, {"kv_exchange": "needed"}, {"ulysses_degree": None}]
KERNEL = "ops/kernels/cpu.py", "forward"


def holds(x: object, q: Tensor) -> bool:
    """True if an argument is q or a view of it, or has it."""
    if isinstance(x, Tensor):
        return x.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    return any(holds(y, q) for y in x) if isinstance(x, tuple) else isinstance(getattr(x, "q", None), Tensor)


@on_ranks
def files_of_calls(mode: dict[str, Any]) -> list[str]:
    """The files of the functions that are given q, in the order of their calls, up to the kernel that attends."""
    calls: list[tuple[str, str]] = []
    q, k, v = (torch.randn(1, 4, 64, 16) for _ in range(3))

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and KERNEL not in calls:
            number = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)  # 4: it has *args
            arguments = [frame.f_locals.get(name) for name in code.co_varnames[:number] if name != "self"]
            if any(holds(x, q) for x in arguments):
                calls.append((code.co_filename[len(ROOT) + 1 :], code.co_name))

    sys.setprofile(note)
    attention(q, k, v, mesh=cp_mesh(), is_causal=True, **mode)
    sys.setprofile(None)
    return [file for file, _ in groupby(file for file, _ in calls)]


def test_queries_seldom_return_to_a_file(ranks: Any) -> None:
    for mode in MODES:
        for files in ranks(2, files_of_calls, mode):
            assert files[0] == "ops/attention.py" and "ops/engine.py" in files and files[-1] == KERNEL[0]
            assert len(files) - len(set(files)) < 8, (mode, files)
