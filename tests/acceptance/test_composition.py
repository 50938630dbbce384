"""With tensor parallelism, FSDP2, DDP, compile, checkpointing, mixed precision and pipelines, beside one device.

What is trained is set up by the examples of docs/guide/composition.md, as they stand or edited where a test says so.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hyper_cp.mesh import comm
from tests.harness import composition_training as t
from tests.harness.ranks import on_ranks

FP32 = 1e-5
RING = ("head_dim=1", "head_dim=1, ulysses_degree=1, kv_exchange='ring', layout='head_tail'")
HYBRID = ("head_dim=1", "head_dim=1, ulysses_degree=2, kv_exchange='ring'")
Edits = tuple[tuple[str, str], ...]
TWO = range(2)
"""The steps of most tests: an optimizer and compiled code carry something to the second."""


def trained(names: dict[str, Any], **kwargs: Any) -> float:
    """The worst error of two steps against one device."""
    return t.train(names, TWO).error(t.one_device(**kwargs).part(TWO))


@on_ranks
def error_of(title: str, edits: Edits = (), **kwargs: Any) -> float:
    """The worst error of a trained example."""
    return trained(t.setup(title, *edits), **kwargs)


@on_ranks
def error_of_one_layer(title: str, edits: Edits = (), **names: Any) -> float:
    """The same of a model of one layer."""
    return trained(t.setup(title, *edits, model=one_layer(t.llama()), **names), prepare=one_layer)


def check(ranks: Any, world: int, *args: Any, run: Any = error_of, **kwargs: Any) -> None:
    for error in ranks(world, run, *args, timeout=200, **kwargs):
        assert error <= FP32, error


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


@on_ranks
def tp_error(edits: Edits, local: bool, sequence_parallel: bool, **names: Any) -> float:
    """The error of one layer with another plan of tensor parallelism."""
    model = one_layer(t.llama() if local else t.with_attention(t.DTensorAttention))
    names["variant"] = t.tp_plan(local, sequence_parallel)
    edits = ((PLAN, "tp_plan = variant"), *edits)
    return trained(t.setup("tensor parallel, 4 ranks", *edits, model=model, **names), prepare=one_layer)


def one_layer(model: Any) -> Any:
    model.layers = model.layers[:1]
    return model


def test_tensor_parallel(ranks: Any) -> None:
    check(ranks, 4, "tensor parallel, 4 ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, edits, local, sequence_parallel",
    [
        (4, (RING,), True, True),
        (4, (RING, CP_FIRST), False, True),
        (8, (CP4, HYBRID), False, False),
    ],
)
def test_tensor_parallel_variants(ranks: Any, world: int, edits: Edits, local: bool, sequence_parallel: bool) -> None:
    check(ranks, world, edits, local, sequence_parallel, run=tp_error)


@on_ranks
def composed_error(edits: Edits) -> float:
    """q, k, v and the output on the cp x tp mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    edits = ((r"mesh = .*?\n", "mesh = given\n"), *edits)
    model = t.with_attention(t.ComposedAttention, mesh=mesh)
    return trained(t.setup("tensor parallel, 4 ranks", *edits, model=model, given=mesh))


@pytest.mark.slow
def test_tensor_parallel_on_the_mesh_of_both(ranks: Any) -> None:
    for edits in ((), ((RING[0], RING[1].replace("head_tail", "contiguous")),)):
        check(ranks, 4, edits, run=composed_error)


# --------------------------------------------------------------------------- FSDP2, DDP, distributed checkpoints


def test_fsdp(ranks: Any) -> None:
    check(ranks, 4, "fsdp, 4 ranks", ((r"\(\), 1\.0\)", "(), 0.01)"),), clip=0.01)


def test_gradients_meant_for_a_sum_are_too_small(ranks: Any) -> None:
    """FSDP averages over its four ranks, so gradients of a sum come out a quarter as large."""
    for factor in ranks(4, gradient_factor):
        assert abs(factor - 0.25) < 1e-5


@on_ranks
def gradient_factor() -> float:
    names = t.setup(
        "fsdp, 4 ranks",
        ("mesh=dp_cp\\)\n    loss", "mesh=dp_cp, gradients='sum')\n    loss"),
        (r"    torch\.nn\.utils.*?\n", ""),
    )
    found, want = t.train(names, range(1)).grads[0], t.one_device().grads[0]
    factors = torch.stack([found[name].norm() / want[name].norm() for name in want])
    assert factors.max() - factors.min() < 1e-4, factors
    return factors.mean().item()


@pytest.mark.slow
def test_fsdp_with_tensor_parallel(ranks: Any) -> None:
    check(ranks, 8, run=fsdp_tp_error)


@on_ranks
def fsdp_tp_error() -> float:
    plan = t.tp_plan(sequence_parallel=True)
    return error_of_one_layer("fsdp and tensor parallel, 8 ranks", tp_plan=plan)


def test_ddp(ranks: Any) -> None:
    check(ranks, 4, "ddp, 4 ranks")


@pytest.mark.slow
def test_the_plan_may_also_come_after_fsdp(ranks: Any) -> None:
    plan = r"parallelize_module\(model, mesh\[.cp.\].*?at_least=1\)\n"
    late = 'parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": style})\nhandler = Context'
    clip = (r"    torch\.nn\.utils.*?\n", "")
    check(ranks, 4, "fsdp, 4 ranks", ((plan, ""), ("handler = Context", late), clip, RING))


@on_ranks
def distributed_checkpoint(path: str, load: bool, title: str = "fsdp, 4 ranks") -> float:
    """Two steps and save, or load and the third: beside one device's three."""
    world, want = dist.get_world_size(), t.one_device()
    names = t.setup(
        title,
        *(((r"\(2, 2\)", f"(1, {world})"), (r"    torch\.nn\.utils.*?\n", "")) if title == "fsdp, 4 ranks" else ()),
    )
    exec(t.example("save and load, any ranks"), names)
    if not load:
        found = t.train(names, range(2))
        names["save"](path)
        return found.error(want.part(range(2)))
    with torch.no_grad():
        for p in names["model"].parameters():
            p.zero_()
    names["load"](path)
    return t.train(names, range(2, 3)).error(want.part(range(2, 3)))


@pytest.mark.slow
def test_a_checkpoint_of_four_cp_ranks_loads_at_other_degrees(ranks: Any, tmp_path: Any) -> None:
    for world, load, *title in ((4, False), (2, True), (1, True), (4, True, "tensor parallel, 4 ranks")):
        assert max(ranks(world, distributed_checkpoint, str(tmp_path), load, *title)) <= FP32, (world, title)


# --------------------------------------------------------------------------- torch.compile

WHOLE = (
    "handler = Context",
    "model = torch.compile(model, fullgraph=True, backend=backend)\nhandler = Context",
)


@pytest.mark.slow
def test_compiled_whole_with_tensor_parallel(ranks: Any) -> None:
    check(ranks, 4, (WHOLE,), False, False, backend="eager", run=tp_error)


@pytest.mark.slow
def test_compiled_blocks_with_fsdp(ranks: Any) -> None:
    check(ranks, 2, "compiled blocks and fsdp, 4 ranks", ((r"\(2, 2\)", "(1, 2)"),), run=error_of_one_layer)


@on_ranks
def checkpointed_error(inside: bool) -> float:
    """Selective checkpointing inside a block's graph, or around it."""
    wrapped = "checkpoint_wrapper({}, context_fn=partial(create_selective_checkpoint_contexts, SAVE_LIST))"
    compiled = "torch.compile({}, fullgraph=True, backend=backend)"
    edit = (compiled.format(wrapped) if inside else wrapped.format(compiled)).format("block") + "\n"
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=inside):
        return error_of_one_layer(SELECTIVE, ((r"checkpoint_wrapper\(block, .*?\n", edit), (r"\(4,\)", "(2,)"), RING))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_checkpointed_blocks(ranks: Any, inside: bool) -> None:
    check(ranks, 2, inside, run=checkpointed_error)


# --------------------------------------------------------------------------- activation checkpointing

SELECTIVE = "selective checkpointing, 4 ranks"
FULL = (r", context_fn=partial\(create_selective_checkpoint_contexts, SAVE_LIST\)", "")
WRAP = r"for i, block in enumerate\(model.layers\):\n.*?\n(?=handler)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits",
    [
        pytest.param((FULL, HYBRID), id="full, hybrid", marks=pytest.mark.slow),
        pytest.param((), id="selective", marks=pytest.mark.slow),
        pytest.param((RING,), id="selective, ring"),
    ],
)
def test_checkpointed_blocks(ranks: Any, edits: Edits) -> None:
    check(ranks, 4, SELECTIVE, edits)


@on_ranks
def wrapped_before(target: str, key: str) -> tuple[float, int]:
    """``checkpoint_wrapper`` around blocks or styled modules *before* the plan; and all transfers of two steps."""
    model = t.llama()
    for i, block in enumerate(model.layers):
        if target == "inner":
            block.attention.inner = checkpoint_wrapper(block.attention.inner)
        elif target == "block":
            model.layers[i] = checkpoint_wrapper(block)
    names = t.setup(SELECTIVE, (WRAP, ""), RING, (r"layers\.\*\.attention\.inner", key), model=model)
    with comm.record_traffic() as log:
        error = trained(names)
    return error, len(log.entries)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, key",
    [("block", "layers.*._checkpoint_wrapped_module.attention.inner"), ("inner", "layers.*.attention.inner")],
)
def test_wrapped_before_the_plan(ranks: Any, target: str, key: str) -> None:
    plain = ranks(4, wrapped_before, "nothing", "layers.*.attention.inner")
    for (error, transfers), (_, without) in zip(ranks(4, wrapped_before, target, key), plain, strict=True):
        assert error <= FP32, error
        assert transfers > without, "recomputed without context parallelism"


@on_ranks
def checkpoint_in_forward() -> float:
    """``torch.utils.checkpoint`` called by the model itself."""
    names = t.setup(SELECTIVE, (WRAP, ""), HYBRID)
    for layer in names["model"].layers:
        layer.attention.forward = partial(checkpoint, layer.attention.forward, use_reentrant=False)
    return trained(names)


def test_checkpoint_in_forward(ranks: Any) -> None:
    check(ranks, 4, run=checkpoint_in_forward)


# --------------------------------------------------------------------------- mixed precision


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@on_ranks
def autocast_errors() -> list[tuple[float, float]]:
    """Errors against fp32 with context parallelism and on one device, both under autocast."""
    plain = t.one_device(autocast).part(TWO).error(t.one_device().part(TWO))
    return [(trained(t.setup("autocast, 4 ranks", *edits)), plain) for edits in ((), (RING,))]


@pytest.mark.slow
def test_autocast(ranks: Any) -> None:
    for found in ranks(4, autocast_errors, timeout=200):
        for mine, plain in found:
            assert 1e-4 < mine <= 2 * plain, (mine, plain)


@on_ranks
def mixed_precision_errors() -> tuple[float, float]:
    """The example, and the same policy on a mesh of one rank with whole batches."""
    mine = t.train(t.setup("fsdp mixed precision, 4 ranks"))
    one = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(model: Any) -> Any:
        for block in [*model.layers, model]:
            fully_shard(block, mesh=one, mp_policy=policy)
        return model

    exact, plain = t.one_device(), t.one_device(prepare=shard)
    return mine.error(exact), plain.error(exact)


@pytest.mark.slow
def test_fsdp_mixed_precision(ranks: Any) -> None:
    for mine, plain in ranks(4, mixed_precision_errors, timeout=200):
        assert 1e-4 < mine <= 2 * plain, (mine, plain)


# --------------------------------------------------------------------------- pipeline


@on_ranks
def pipeline_error(edits: Edits) -> tuple[float, int]:
    """Error of the stage's gradients (and of the loss, on the last), and how many parameters it has."""
    names, record, want = t.setup("pipeline, 4 ranks", *edits, Stage=t.Stage), t.Record(), t.one_device_packed()
    part = names["part"]
    optimizer = t.sgd(part.parameters())
    for step in range(t.STEPS):
        optimizer.zero_grad()
        loss = names["step"](*t.batch(step), t.packed_documents(step))
        total = torch.as_tensor(loss, dtype=torch.float32).detach().clone()
        dist.all_reduce(total)  # zero but on the last stage
        record.add(total, part)
        optimizer.step()
    return record.error(want, some=True), len(record.grads[0])


@pytest.mark.slow
@pytest.mark.parametrize("edits", [(RING,), ()], ids=["ring, head_tail", "ulysses"])
def test_pipeline_keeps_the_documents_of_micro_batches_apart(ranks: Any, edits: Edits) -> None:
    found = ranks(4, pipeline_error, edits, timeout=200)
    assert max(error for error, _ in found) <= FP32, found
    assert found[0][1] + found[2][1] == len(list(t.llama().parameters()))
