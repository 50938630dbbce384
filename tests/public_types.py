"""A user's program for ``mypy --strict`` (`make lint`): the public surface has these types. It never runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from typing_extensions import assert_type

from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    CostModel,
    DynamicContextParallel,
    MeshFamily,
    PlanReport,
    RecurrentContextParallel,
    context_parallel,
    context_parallel_mesh,
    get_cp_handler_cls,
    plan,
    split_cp_mesh,
    styled_modules,
    tiled,
    verify,
)
from hyper_cp.ops import Balance, attention, balance, causal_conv1d, linear_recurrence
from hyper_cp.verification.report import Report


def train(model: nn.Module, mesh: DeviceMesh, batches: Iterator[dict[str, Tensor]]) -> None:
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree="auto", kv_exchange="ring", window=(4096, 0))
    parallelize_module(model, mesh, {"layers.*.mixer": RecurrentContextParallel(), "layers.*.attention": style})
    assert_type(styled_modules(model, at_least=1), dict[str, ContextParallel])
    handler = ContextParallelHandler(mesh, style)
    for whole in batches:
        batch = handler.get_batch_on_this_cp_rank(whole, shift_labels=True)
        with handler.documents(batch) as documents:
            assert_type(documents, Tensor | None)
            logits: Tensor = model(batch["tokens"])
        loss = assert_type(handler.mean_loss(logits, batch["shift_labels"], gradients="sum"), Tensor)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    assert_type(handler.combine(handler.dispatch(torch.zeros(1, 8)), 1), Tensor)
    assert_type(handler.position_ids(8), Tensor)
    assert_type(handler.roll_tensor(torch.zeros(1, 8)), tuple[Tensor, Tensor])
    assert_type(ContextParallelHandler.of(model), ContextParallelHandler)
    assert_type(get_cp_handler_cls(cp_comm_type=["p2p", "a2a"]), type[ContextParallelHandler])
    assert_type(tiled(model, 8), nn.Module)


def step(model: nn.Module, batch: dict[str, Tensor], handler: ContextParallelHandler) -> Tensor:
    local = handler.get_batch_on_this_cp_rank(batch)
    return handler.mean_loss(model(local["tokens"]), local["labels"])


def other_calls(model: nn.Module, mesh: DeviceMesh, x: Tensor) -> None:
    report = assert_type(verify(model, mesh, {"tokens": x}, loss_fn=step), Report)
    assert_type(report.ok, bool)
    planned = assert_type(plan({"layers": 2}, [4096, 8192], gpus=8), PlanReport)
    if planned.best is not None:
        assert_type(planned.best.strategy.mode, str)
    family = assert_type(split_cp_mesh(mesh), MeshFamily)
    cost = CostModel.of_transformer(parameters=1e9, layers=16, hidden=2048)
    for micro_batch in DynamicContextParallel(family, 8192, cost).plan([100, 200]).of_rank(family.rank):
        assert_type(micro_batch.degree, int)
    with context_parallel_mesh(model, family.cp(2)) as handler:
        assert_type(handler, ContextParallelHandler)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]) as handler:
        assert_type(handler, ContextParallelHandler)
    assert_type(attention(x, x, x, mesh=mesh, is_causal=True), Tensor | tuple[Tensor, ...])
    assert_type(linear_recurrence(x, x, x, x, mesh=mesh), Tensor)
    assert_type(causal_conv1d(x, x, mesh=mesh), Tensor)
    assert_type(balance(4096, 4), dict[str, Balance])
