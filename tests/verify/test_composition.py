"""verify with tensor parallelism, FSDP2, DDP, compiled blocks, activation checkpoints and half precision."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial

from hyper_cp import ContextParallelHandler, verify
from hyper_cp.verification import runs
from hyper_cp.verify import Report
from tests.harness import composition_training as t
from tests.harness import planted
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import check_errors, error_of, on_ranks

Summary = tuple[bool, str | None, str | None, str, int]
"""ok, the first module, the cause, the text, and the number of tensors that were compared."""
REDUCED = r"    \"layers\.\*\.attention\.wo\": RowwiseParallel\(\)"
"""A line of the tensor-parallel plan in docs/guide/composition.md."""


def summary(report: Report) -> Summary:
    compared = sum(row.status != "not compared" for row in report.rows)
    return report.ok, report.module, report.cause, str(report), compared


def composed(title: str, *edits: tuple[str, str], reduced: dict[str, Any] | None = None, **names: Any) -> Summary:
    """The report on an example of docs/guide/composition.md."""
    made = t.setup(title, *edits, **names)
    mesh, model = made["mesh"], made["model"]
    rows = slice(0, 2) if "dp" not in mesh.mesh_dim_names else slice(mesh["dp"].get_local_rank(), None, 2)
    tokens, labels = (x[rows] for x in t.batch(0))
    passed = {"gradients": "sum"} if reduced is None else {name: made[x] for name, x in reduced.items()}

    def loss_fn(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        loss: Tensor = made["loss_of"](model, handler, batch["tokens"], batch["labels"], **passed)
        return loss

    batch = {"tokens": tokens, "labels": labels}
    cp = mesh["cp"] if mesh.ndim > 1 else mesh
    report = verify(model, cp, batch, loss_fn=loss_fn, gradients=passed.get("gradients", "mean"))
    for p in model.parameters():
        assert p.grad is None
    return summary(report)


@on_ranks
def tensor_parallel() -> list[Summary]:
    partial = (REDUCED, '    "layers.*.attention.wo": RowwiseParallel(output_layouts=Partial())')
    return [
        composed("tensor parallel, 4 ranks"),
        composed("tensor parallel, 4 ranks", partial, Partial=Partial),
        composed("tensor parallel, 4 ranks", (r"= \{\n.*?\n\}", "= variant"), variant=t.tp_plan(True, True)),
    ]


@pytest.mark.slow
def test_tensor_parallel_and_a_sum_that_is_not_made(ranks: Any) -> None:
    for right, wrong, sequence_parallel in ranks(4, tensor_parallel):
        assert right[0] and right[4] > 60, right[3]
        assert not wrong[0] and wrong[2] == "tensor parallel", wrong[3]
        assert "layers.0.attention.wo" in wrong[3]
        assert sequence_parallel[0], sequence_parallel[3]


@on_ranks
def wrapped(title: str, reduced: dict[str, str] | None) -> Summary:
    return composed(title, reduced=reduced)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "reduced"),
    [
        ("fsdp, 4 ranks", {"mesh": "dp_cp"}),
        ("fsdp mixed precision, 4 ranks", {"mesh": "dp_cp"}),
        ("ddp, 4 ranks", {"mesh": "mesh"}),
        ("compiled blocks and fsdp, 4 ranks", {"mesh": "dp_cp"}),
        ("selective checkpointing, 4 ranks", None),
    ],
)
def test_wrapped_models(title: str, reduced: dict[str, str] | None, ranks: Any) -> None:
    for ok, _, _, text, compared in ranks(4, wrapped, title, reduced):
        assert ok and compared > 60, text


@on_ranks
def summed_over_a_mesh(wrapped: bool) -> list[Summary]:
    """Steps whose loss names a mesh, and has gradients for a sum over its ranks, which DDP does not make: of the given
    handler, of that of the model, and in micro-batches with weights."""
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    mesh, over = world["cp"], {"mesh": world, "gradients": "sum"}
    model = planted.styled(mesh)

    def given(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        loss: Tensor = handler.mean_loss(*planted.forward(model, batch, handler), **over)
        return loss

    def of_the_model(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        return given(model, batch, ContextParallelHandler.of(model))

    def accumulated(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        rows, total = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(planted.ROWS)], torch.zeros(())
        for local in handler.loader(rows, accumulate=planted.ROWS, mesh=world, shift_labels=True):
            with handler.documents(local):
                logits = model(local["input_ids"], local["position_ids"])
                total = total + local.weight * handler.mean_loss(logits, local["shift_labels"], **over)
        return total

    trained, reduced = (nn.parallel.DistributedDataParallel(model), "mean") if wrapped else (model, "sum")
    with mock.patch.object(runs, "LARGEST_COUNT", 8):  # many ranks send more
        return [
            summary(verify(trained, mesh, planted.whole_batch(), loss_fn=loss_fn, gradients=reduced))
            for loss_fn in (given, of_the_model, accumulated)
        ]


def test_a_loss_may_name_the_mesh_of_its_gradients(ranks: Any) -> None:
    for found in ranks(2, summed_over_a_mesh, False, warnings_as_errors=True):
        for right in found:
            assert right[0], right[3]
    for found in ranks(2, summed_over_a_mesh, True):
        for wrong in found:
            assert not wrong[0] and wrong[2] == "factor", wrong[3]


@on_ranks
def in_place_of_a_forward() -> Summary:
    """A step in half precision with too large gradients; a copy of the model would run the model itself."""
    mesh, model = cp_mesh(), planted.Planted(dtype=torch.bfloat16)
    forward = model.forward
    model.forward = lambda *args: forward(*args)
    return summary(verify(model, mesh, planted.whole_batch(), loss_fn=planted.in_block, gradients="sum"))


def test_a_function_in_place_of_a_forward(ranks: Any) -> None:
    for ok, _, cause, text, compared in ranks(2, in_place_of_a_forward):
        assert not ok and cause == "factor" and compared > 40, text


HALF_WRONG = {
    "local table": ("blocks.0", "positions"),
    "unrouted": ("blocks.1.extra.inner", "attention"),
    "conv": ("blocks.1.extra", "mixing"),
    "cumsum": ("blocks.1.extra", "mixing"),
    "token shift": ("blocks.1.extra", "mixing"),
    "normalise": ("blocks.1.extra", "mixing"),
}
"""Faults of a model, and the module and the cause that are named in half precision, as in double precision."""


@on_ranks
def half(dtype: torch.dtype, faults: list[str]) -> list[Summary]:
    """Right and wrong models in half precision, a wrong loss, and a right model under autocast, with packed documents
    and checkpoints."""
    mesh, style = cp_mesh(), {"ulysses_degree": 1, "layout": "head_tail"}
    models = [planted.styled(mesh, fault, dtype, **style) for fault in ("", *faults)]
    found = [summary(verify(model, mesh, planted.whole_batch(), loss_fn=planted.loss_fn)) for model in models]
    found.append(summary(verify(models[0], mesh, planted.whole_batch(), loss_fn=planted.mean_of_share)))

    def with_autocast(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return planted.loss_fn(model, batch, handler)

    model = planted.styled(mesh, "", torch.float32, **style)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    batch = planted.whole_batch(documents=[0, 9, planted.LENGTH])
    return [*found, summary(verify(model, mesh, batch, loss_fn=with_autocast))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "faults"), [(torch.bfloat16, [*HALF_WRONG]), (torch.float16, ["unrouted", "conv"])])
def test_half_precision(dtype: torch.dtype, faults: list[str], ranks: Any) -> None:
    for right, *wrong, mean_of_share, autocast in ranks(2, half, dtype, faults):
        assert right[0], right[3]
        for fault, report in zip(faults, wrong, strict=True):
            assert report[:3] == (False, *HALF_WRONG[fault]), (fault, report[3])
        assert not mean_of_share[0] and mean_of_share[1] is None, mean_of_share[3]
        assert autocast[0], autocast[3]


@on_ranks
def trained_after_verify(fails: bool) -> float:
    """The error of five steps under FSDP2 after a verification, which may have ended by an exception."""
    made = t.setup("fsdp, 4 ranks", (r"    torch\.nn\.utils.*?\n", ""))
    tokens, labels = t.batch(0)

    def loss_fn(model: nn.Module, batch: Any, handler: Any) -> Tensor:
        loss: Tensor = made["loss_of"](model, handler, batch["tokens"], batch["labels"], mesh=made["dp_cp"])
        if fails:
            raise KeyError("the user's own mistake")
        return loss

    with suppress(KeyError):
        assert verify(made["model"], made["mesh"]["cp"], {"tokens": tokens, "labels": labels}, loss_fn=loss_fn).ok
    return t.train(made).error(t.one_device())


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_sharded_model_trains_as_before_afterwards(fails: bool, ranks: Any) -> None:
    assert max(ranks(4, trained_after_verify, fails)) < 5e-6


def fsdp2(model: nn.Module) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=cp_mesh())
    return fully_shard(model, mesh=cp_mesh())


@on_ranks
def between_backward_and_step(view: bool) -> bool:
    """True if gradients of DDP are what they were, in the memory of its buckets or in that of their own."""
    mesh, made = cp_mesh(), planted.styled(cp_mesh())
    model = nn.parallel.DistributedDataParallel(made, gradient_as_bucket_view=view)
    handler = ContextParallelHandler.of(made)
    for _ in range(2):  # from the second on DDP keeps its buckets in the order of the backward
        model.zero_grad(set_to_none=False)
        planted.loss_fn(model, planted.whole_batch(), handler).backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    other = {**planted.whole_batch(), "input_ids": planted.whole_batch()["input_ids"].flip(1)}
    assert verify(model, mesh, other, loss_fn=planted.loss_fn).ok
    return all(p.grad is x and torch.equal(x, y) for p, (x, y) in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_ddp_remain(view: bool, ranks: Any) -> None:
    assert ranks(2, between_backward_and_step, view) == [True, True]


@on_ranks
def in_an_accumulation() -> tuple[dict[str, str], bool]:
    """Errors of verify in accumulations, and True if the gradient of two batches is the sum of theirs afterwards, also
    behind an evaluation."""
    mesh, found, grads = cp_mesh(), {}, []

    def refused(name: str, model: nn.Module) -> None:
        found[f"{name}.*accumulates gradients"] = error_of(
            lambda: verify(model, mesh, planted.whole_batch(), loss_fn=planted.loss_fn)
        )

    for verified in (False, True):
        model = fsdp2(planted.styled(mesh))
        handler = ContextParallelHandler.of(model)
        model.set_requires_gradient_sync(False)
        planted.loss_fn(model, planted.whole_batch(), handler).backward()
        if verified:
            refused("FSDPPlanted", model)
        model.set_requires_gradient_sync(True)
        if verified:
            refused("module '' of FSDPPlanted", model)  # the gradients of the first batch wait to be reduced
        planted.loss_fn(model, planted.whole_batch(length=18), handler).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    with torch.no_grad():  # the root is whole behind an evaluation
        planted.loss_fn(model, planted.whole_batch(), handler)
    assert verify(model, mesh, planted.whole_batch(), loss_fn=planted.loss_fn).ok
    grads.append([p.grad.full_tensor() for p in model.parameters()])
    model = nn.parallel.DistributedDataParallel(planted.styled(mesh))
    with model.no_sync():
        refused("DistributedDataParallel", model)
    return found, all(torch.equal(a, x) for a, *others in zip(*grads, strict=True) for x in others)


def test_an_accumulation_is_not_disturbed(ranks: Any) -> None:
    here, there = ranks(2, in_an_accumulation)
    check_errors([here[0], there[0]])
    assert here[1] and there[1]
