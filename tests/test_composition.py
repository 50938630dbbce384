"""With tensor parallelism, FSDP2, DDP, compile, checkpointing, mixed precision and pipelines, beside one device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from tests import composition_training as t

BNSD = {"seq_dim": 2, "head_dim": 1}
FP32 = 1e-5


def tp_errors(cp: int, tp: int, cases: list[tuple[dict[str, Any], bool, bool, bool]]) -> list[float]:
    mesh, errors = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp")), []
    for mode, local, sequence_parallel, cp_first in cases:
        model = t.llama() if local else t.with_dtensors(t.llama())
        style = ContextParallel(**BNSD, **mode)
        plans = [(mesh["tp"], t.tp_plan(local, sequence_parallel)), (mesh["cp"], {t.INNER: style})]
        for sub, plan in reversed(plans) if cp_first else plans:
            parallelize_module(model, sub, plan)
        styled_modules(model, at_least=2)
        group = mesh["cp"].get_group()
        found = t.train(model, ContextParallelHandler(mesh["cp"], style), sums=[group], loss_group=group)
        errors.append(found.error(t.one_device()))
    return errors


MODES: list[dict[str, Any]] = [
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
]


@pytest.mark.parametrize("cp, tp", [(2, 2), (4, 2)])
def test_tensor_parallel(ranks: Any, cp: int, tp: int) -> None:
    cases = [
        (mode, local, sp, first)
        for mode in MODES
        for local, sp, first in ((True, False, False), (False, False, True), (True, True, True), (False, True, False))
    ]
    if cp == 4:
        cases = [({"ulysses_degree": 2, "kv_exchange": "ring"}, *kinds[1:]) for kinds in cases[:2]]
    for errors in ranks(cp * tp, tp_errors, cp, tp, cases):
        assert max(errors) <= FP32, dict(zip(map(str, cases), errors, strict=True))
