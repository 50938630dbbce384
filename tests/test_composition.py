"""With tensor parallelism, FSDP2, DDP, compile, checkpointing, mixed precision and pipelines, beside one device.

What is trained is set up by the examples of docs/composition.md, as they stand there or edited where a test says so.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests import composition_training as t

FP32 = 1e-5
RING = ("head_dim=1", "head_dim=1, ulysses_degree=1, kv_exchange='ring', layout='head_tail'")
HYBRID = ("head_dim=1", "head_dim=1, ulysses_degree=2, kv_exchange='ring'")
Edits = tuple[tuple[str, str], ...]


def error_of(title: str, edits: Edits = (), **kwargs: Any) -> float:
    """The worst error of a trained example against one device."""
    return t.train(t.setup(title, *edits)).error(t.one_device(**kwargs))


def check(ranks: Any, world: int, *args: Any, at_most: float = FP32, **kwargs: Any) -> None:
    for error in ranks(world, error_of, *args, timeout=200, **kwargs):
        assert error <= at_most, error


def test_examples_are_short() -> None:
    found = re.findall(r"```python (.*?)\n(.*?)```", t.DOCS.read_text(), re.S)
    assert len(found) >= 10
    for title, code in found:
        lines = [line for line in code.splitlines() if line.strip() and not re.match("from|import", line)]
        assert len(lines) <= 20, title


# --------------------------------------------------------------------------- tensor parallelism

PLAN = r"tp_plan = \{.*?\n\}"
CP4 = (r"\(2, 2\)", "(4, 2)")
CP_FIRST = (
    r'(parallelize_module\(model, mesh\["tp"\], tp_plan\)\n)(parallelize_module.*?\n)',
    'parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": style})\n'
    'parallelize_module(model, mesh["tp"], tp_plan)\n',
)


def tp_error(edits: Edits, local: bool, sequence_parallel: bool, cp_first: bool = False) -> float:
    model = t.llama() if local else t.with_dtensors(t.llama())
    edits = ((PLAN, "tp_plan = variant"), *edits, *((CP_FIRST,) if cp_first else ()))
    names = t.setup("tensor parallel, 4 ranks", *edits, model=model, variant=t.tp_plan(local, sequence_parallel))
    return t.train(names).error(t.one_device())


def test_tensor_parallel(ranks: Any) -> None:
    check(ranks, 4, "tensor parallel, 4 ranks")


@pytest.mark.parametrize(
    "world, edits, local, sequence_parallel, cp_first",
    [
        (4, (RING,), True, True, True),
        (4, (), False, False, True),
        (4, (RING,), False, True, False),
        (8, (CP4, HYBRID), True, True, False),
        (8, (CP4, HYBRID), False, False, False),
    ],
)
def test_tensor_parallel_variants(
    ranks: Any, world: int, edits: Edits, local: bool, sequence_parallel: bool, cp_first: bool
) -> None:
    for error in ranks(world, tp_error, edits, local, sequence_parallel, cp_first, timeout=200):
        assert error <= FP32, error


# --------------------------------------------------------------------------- FSDP2, DDP, distributed checkpoints


def test_fsdp(ranks: Any) -> None:
    check(ranks, 4, "fsdp, 4 ranks", ((r"\(\), 1\.0\)", "(), 0.01)"),), clip=0.01)
