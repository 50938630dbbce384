"""context_parallel: unmodified models in a block, against the same model on one device."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, context_manager, context_parallel
from hyper_cp.context_manager import _blocks, _sharded_now
from hyper_cp.mesh import comm
from hyper_cp.module.attention_calls import spelled
from hyper_cp.ops import attention, causal_conv1d, linear_recurrence, windows
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error, token_positions, visible_pairs
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks

LENGTH = 24


class Layer(nn.Module):
    """Attention as users write it; the oracle's is in plain math."""

    def __init__(self, plain: bool, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.plain, self.causal = nn.Linear(8, 24), plain, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
        attend = plain_attention if self.plain else scaled_dot_product_attention
        return x + attend(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as other libraries write it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return None, x.grad


class Model(nn.Module):
    """Knows nothing of context parallelism; its positions are a buffer."""

    def __init__(self, plain: bool = False, checkpointing: bool | str | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 8)
        self.register_buffer("place", torch.randn(LENGTH, 8))
        self.layers = nn.ModuleList(Layer(plain) for _ in range(2))
        self.checkpointing = checkpointing
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.einsum("bsd,sd->bsd", [self.embed(ids), self.place])
        for layer in self.layers:
            if isinstance(self.checkpointing, bool):
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
            else:
                x = OwnCheckpoint.apply(layer, x) if self.checkpointing == "own" else layer(x)
        return x


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(6)
    return torch.randint(11, (2, LENGTH), generator=g), torch.randn(2, LENGTH, 8, dtype=torch.float64, generator=g)


def loss_of(model: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    return (model(ids) * weights).sum()


def reference() -> tuple[Tensor, list[Tensor]]:
    model = Model(plain=True)
    loss = loss_of(model, *data())
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@on_ranks
def step(options: dict[str, Any], where: str, checkpointing: bool | str | None = None) -> float:
    """Error of a training step, with backward inside or outside the block."""
    model, (ids, weights) = Model(checkpointing=checkpointing), data()
    buffers, before = [ids, weights, model.place], [x.clone() for x in (ids, weights, model.place)]
    addresses, results = [x.data_ptr() for x in buffers], []
    block = context_parallel(
        cp_mesh(), buffers=buffers, buffer_seq_dims=[1, -2, 0], no_restore_buffers={weights}, **options
    )
    with comm.record_traffic() as log:
        with block as handler:
            mine = torch.tensor(token_positions(handler.layout, dist.get_rank(), dist.get_world_size(), LENGTH))
            assert torch.equal(ids, before[0][:, mine]) and torch.equal(model.place, before[2][mine])
            loss = loss_of(model, ids, weights)
            if where == "inside":
                loss.backward()
            if where == "grad":
                results = list(torch.autograd.grad(loss, list(model.parameters())))
            sent = len(log.entries)
        assert sent and len(log.entries) == sent  # nothing was written, so nothing has to come back
    assert all(torch.equal(x, y) for x, y in zip((ids, model.place), (before[0], before[2]), strict=True))
    assert [ids.data_ptr(), model.place.data_ptr()] == [addresses[0], addresses[2]]
    assert torch.equal(weights, before[1][:, mine]) and not _sharded_now and not _blocks.entries
    if where == "outside":
        loss.backward()
    found = results or [p.grad for p in model.parameters()]
    for grad in (loss.detach(), *found):
        dist.all_reduce(grad)
    want, grads = reference()
    return max(relative_error(a, b) for a, b in zip((loss.detach(), *found), (want, *grads), strict=True))


MODES: list[dict[str, Any]] = [
    {},
    {"kv_exchange": "ring"},
    {"layout": "contiguous", "load_balance": True},
    {"ulysses_degree": "auto", "layout": "contiguous"},
]


@pytest.mark.parametrize("where", ["inside", "outside", "grad"])
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_an_unmodified_model_trains(ranks: Any, world: int, options: dict[str, Any], where: str) -> None:
    assert max(ranks(world, step, options, where)) <= 1e-10


def test_in_head_groups(ranks: Any) -> None:
    assert max(ranks(2, step, {"ulysses_degree": None, "head_groups": 2}, "inside")) <= 1e-10
    ranks.raises(
        2, "ValueError", "head_groups=4 does not split", step, {"ulysses_degree": None, "head_groups": 4}, "inside"
    )


@pytest.mark.parametrize("degree", [1, 2, None])
def test_on_four_ranks(ranks: Any, degree: int | None) -> None:
    assert max(ranks(4, step, {"ulysses_degree": degree}, "outside")) <= 1e-10


@pytest.mark.parametrize("where", ["inside", "grad"])
def test_activation_checkpoints_recompute_in_the_block(ranks: Any, where: str) -> None:
    assert max(ranks(2, step, {"kv_exchange": "ring"}, where, False)) <= 1e-10


def test_activation_checkpoints_that_would_be_local_are_refused(ranks: Any) -> None:
    ranks.raises(2, "CheckpointError", "number of tensors|different metadata", step, {}, "outside", False)
    for kind in (True, "own"):
        ranks.raises(2, "NotImplementedError", "use_reentrant=False", step, {}, "inside", kind)


@on_ranks
def recomputed_elsewhere(then: dict[str, Any], now: dict[str, Any]) -> float:
    """Error of gradients whose backward, and with it a recompute, runs in another block than their forward."""
    model, (ids, weights) = Model(checkpointing=False), data()
    buffers, mesh = [ids, weights, model.place], cp_mesh()
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, -2, 0], **then):
        loss = loss_of(model, ids, weights)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, -2, 0], **now):
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return max(relative_error(p.grad, want) for p, want in zip(model.parameters(), reference()[1], strict=True))


def test_a_recompute_in_a_block_with_other_settings_is_refused(ranks: Any) -> None:
    assert max(ranks(2, recomputed_elsewhere, {}, {})) <= 1e-10
    for now in ({"layout": "contiguous"}, {"window": (2, 0)}):
        ranks.raises(2, "RuntimeError", "recomputes attention in a .* block with", recomputed_elsewhere, {}, now)


@on_ranks
def recomputed_after_documents(other: bool) -> float:
    """Error of gradients that are recomputed after the documents block of their forward, or in that of another batch,
    beside those of saved tensors."""
    grads = []
    for checkpointing in (None, False):
        model, (ids, weights) = Model(checkpointing=checkpointing), data()
        buffers = [ids, weights, model.place]
        with context_parallel(cp_mesh(), buffers=buffers, buffer_seq_dims=[1, -2, 0]) as handler:
            with handler.documents([0, 5, LENGTH]):
                loss = loss_of(model, ids, weights)
            with handler.documents([0, 12, LENGTH]) if other else nullcontext():
                loss.backward()
        grads.append([p.grad for p in model.parameters()])
    return max(relative_error(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("other", [False, True])
def test_a_recompute_has_the_documents_of_its_forward(ranks: Any, other: bool) -> None:
    assert max(ranks(2, recomputed_after_documents, other)) <= 1e-10


# --------------------------------------------------------------------------- restoring


@on_ranks
def written(layout: str) -> None:
    mesh = cp_mesh()
    a, b, c, d = (torch.arange(12.0).view(2, 6).clone() + i for i in range(4))
    whole, view = [x.clone() for x in (a, b, c, d)], b[:, 2:4]
    with (
        comm.record_traffic() as log,
        context_parallel(
            mesh, buffers=[a, b, c, d], buffer_seq_dims=[1, 1, 0, 1], no_restore_buffers=[c], layout=layout
        ),
    ):
        a.mul_(2)
        torch.add(d, 1, out=d)
        c.zero_()
        assert log.entries == []
    assert [name for name, _ in log.entries] == ["all_gather"] * 2
    assert torch.equal(a, whole[0] * 2) and torch.equal(b, whole[1]) and torch.equal(d, whole[3] + 1)
    assert c.shape == (1, 6) and torch.equal(c, torch.zeros(1, 6))
    b[0, 2] = -1  # still the storage that its views see
    assert view[0, 0] == -1


def test_what_was_written_comes_back_whole(ranks: Any) -> None:
    ranks(2, written, "contiguous")


@on_ranks
def fails_on_one_rank() -> tuple[str, int]:
    mesh, x, y, told = cp_mesh(), torch.arange(8.0), torch.arange(8.0), ""
    with comm.record_traffic() as log:
        try:
            with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[0, 0], no_restore_buffers=[y]):
                x.add_(1)
                if dist.get_rank() == 1:
                    raise KeyError("the user's own mistake")
                raise KeyboardInterrupt
        except (KeyError, KeyboardInterrupt) as error:
            told = type(error).__name__
    assert torch.equal(x, torch.arange(8.0)) and len(y) == 4 and not _sharded_now and not _blocks.entries
    q = torch.randn(1, 2, 4, 4)
    out = F.scaled_dot_product_attention(q, q, q)  # local again
    assert relative_error(out, plain_attention(q, q, q)) <= 1e-5
    return told, len(log.entries)


def test_an_exception_leaves_nothing_behind_and_waits_for_nobody(ranks: Any) -> None:
    assert ranks(2, fails_on_one_rank) == [("KeyboardInterrupt", 0), ("KeyError", 0)]


# --------------------------------------------------------------------------- which block speaks


def qkv(length: int = 16) -> list[Tensor]:
    g = torch.Generator().manual_seed(8)
    return [torch.randn(1, 2, length, 4, dtype=torch.float64, generator=g) for _ in range(3)]


def attend(xs: list[Tensor]) -> Tensor:
    return scaled_dot_product_attention(*xs, is_causal=True)


@on_ranks
def nested() -> None:
    """4 ranks: all of them, pairs of them, each alone. The innermost block speaks."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "one"))["one"]
    outer, inner = context_parallel(init_device_mesh("cpu", (4,))), context_parallel(world["cp"], kv_exchange="ring")
    whole = qkv()
    want = plain_attention(*whole, is_causal=True)

    def check(handler: Any) -> None:
        local = [handler.dispatch(x, 2) for x in whole]
        assert relative_error(handler.combine(attend(local), 2), want) <= 1e-10

    for _ in range(2):  # a block may be entered again
        with outer as four:
            check(four)
            with inner as two:
                check(two)
                with context_parallel(alone) as one, outer as again:
                    check(again)
                    with context_parallel(alone):
                        check(one)
                with inner as same:  # and while it is entered
                    check(same)
                check(two)
            check(four)
    local = [four.dispatch(x, 2) for x in whole]
    assert relative_error(attend(local), plain_attention(*local, is_causal=True)) <= 1e-10


@on_ranks
def ended_first(keep: bool) -> float:
    """The largest error in a block and behind it, where one that began before it has ended first."""
    whole, others = qkv(), [torch.zeros(1, 12), torch.zeros(1, 12)]
    given = [x.clone() for x in whole]
    options: list[dict[str, Any]] = [{"buffers": [x]} for x in others]
    options[1]["buffers"] += given
    dims = [1], [1, 2, 2, 2]
    first, second = (
        context_parallel(cp_mesh(), buffer_seq_dims=d, no_restore_buffers=o["buffers"] if keep else None, **o)
        for o, d in zip(options, dims, strict=True)
    )
    first.__enter__()
    handler = second.__enter__()
    for x in others:
        x.add_(1)  # comes back whole
    first.__exit__(None, None, None)
    out = attend(given)
    found = [relative_error(handler.combine(out, 2), plain_attention(*whole, is_causal=True))]
    second.__exit__(None, None, None)
    assert not torch.overrides._get_current_function_mode_stack() and not _blocks.entries and not _sharded_now
    ones = torch.ones(1, 12 // dist.get_world_size() if keep else 12)
    return max(*found, *(float((x - ones).abs().max()) for x in others))


@pytest.mark.parametrize("keep", [False, True])
def test_a_block_may_end_before_one_that_began_in_it(ranks: Any, keep: bool) -> None:
    """As those of generators do, whose batches end in turn."""
    assert max(ranks(2, ended_first, keep)) <= 1e-12


def test_blocks_nest_and_the_innermost_speaks(ranks: Any) -> None:
    ranks(4, nested)


@on_ranks
def styled_inside() -> None:
    """A styled module in a block runs under its own style, a block's attention under the block's."""
    mesh, whole = cp_mesh(), qkv()
    want = plain_attention(*whole, is_causal=True)
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    single = modules.BNSD(True)
    parallelize_module(single, alone, ContextParallel(2, 1, 1))
    with context_parallel(mesh):
        assert relative_error(single(*whole), want) <= 1e-10
    for degree in (1, None):
        module = modules.BNSD(True)
        parallelize_module(module, mesh, ContextParallel(2, 1, degree, layout="contiguous"))
        with context_parallel(mesh, layout="head_tail") as handler:
            mine = [x.chunk(2, 2)[dist.get_rank()] for x in whole]
            part = module(*mine)
            assert relative_error(part, want.chunk(2, 2)[dist.get_rank()]) <= 1e-10
            assert relative_error(handler.combine(attend([handler.dispatch(x, 2) for x in whole]), 2), want) <= 1e-10


def test_styled_modules_speak_for_themselves(ranks: Any) -> None:
    ranks(2, styled_inside)


@on_ranks
def kept_buffers() -> bool:
    """True if a block keeps nothing alive when it has ended, before Python looks for cycles."""
    x = torch.zeros(1, 8, 2, 2)
    gc.collect()
    gc.disable()
    try:
        with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1]):
            share = weakref.ref(_blocks.entries[-1].sharded[0].share)
        return share() is None
    finally:
        gc.enable()


def test_buffers_are_freed_with_their_block(ranks: Any) -> None:
    assert ranks(2, kept_buffers) == [True, True]


@on_ranks
def written_behind(backend: str | None) -> float:
    """The error of gradients whose backward runs behind the block, after writes to buffers that the block has left
    sharded."""

    def run(write: bool) -> Tensor:
        weight = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
        x, labels = torch.arange(32.0, dtype=torch.float64).view(8, 4), torch.arange(8) % 4
        f = (lambda x: x @ weight) if backend is None else torch.compile(lambda x: x @ weight, backend=backend)
        with context_parallel(cp_mesh(), buffers=[x, labels], buffer_seq_dims=[0, 0], no_restore_buffers=[x, labels]):
            loss = F.cross_entropy(f(x), labels, ignore_index=-100)
        if write:
            labels[::2] = -100  # for the accuracy
            x.zero_()  # for the next batch
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    want = run(False)
    return relative_error(run(True), want)


@pytest.mark.parametrize("world", [1, 2])
def test_writes_to_a_buffer_that_is_left_sharded_change_no_gradient(ranks: Any, world: int) -> None:
    for backend in (None, "aot_eager"):
        assert ranks(world, written_behind, backend, timeout=100) == [0.0] * world


@on_ranks
def sharded_twice(fails: bool) -> dict[str, str]:
    """Errors of a second block with a buffer that the first has left sharded, in the end or with an exception."""
    x = torch.arange(16).view(2, 8)

    def enter(buffer: Tensor) -> torch.Size:
        with context_parallel(cp_mesh(), buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers=[buffer]):
            if fails:
                raise MemoryError
        return buffer.shape

    def again() -> None:
        with suppress(MemoryError):
            enter(x)

    again()
    if dist.get_world_size() == 1:  # where the share is the whole
        again()
        return {}
    found = errors_of({r"buffers\[0\] of shape \(2, 4\) is this rank's share already: .* pass the whole": again})
    assert x.shape == (2, 4)
    x.data = torch.arange(16).view(2, 8)  # the next batch
    again()
    x.data = torch.arange(8).view(2, 4)  # one that is as long as the share
    again()
    assert x.shape == (2, 2)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_is_left_sharded_is_split_once(ranks: Any, world: int, fails: bool) -> None:
    check_errors(ranks(world, sharded_twice, fails))


@on_ranks
def other_layouts() -> dict[str, str]:
    """Errors of functions and styles of another layout than that in which a block has split its buffers."""
    mesh, x = cp_mesh(), torch.zeros(1, 8, 2, 2)
    module = parallelize_module(modules.BNSD(True), mesh, ContextParallel(2, 1, 1))
    calls: dict[str, Callable[..., Any]] = {
        "attention": lambda x, **of: attention(*[x.transpose(1, 2)] * 3, is_causal=True, mesh=mesh, **of),
        "recurrence": lambda x, **of: linear_recurrence(x, x, x, x[..., 0], mesh=mesh, **of),
        "convolution": lambda x, **of: causal_conv1d(x[..., 0].mT, torch.zeros(2, 3), mesh=mesh, **of),
        "windows": lambda x, **of: windows(x, [1], mesh=mesh, **of),
    }
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        found = {name: error_of(lambda call=call: call(x)) for name, call in calls.items()}
        found["styled"] = error_of(lambda: module(*[x.transpose(1, 2)] * 3))
        found |= {f"right: {name}": error_of(lambda c=call: c(x, layout="head_tail")) for name, call in calls.items()}
        found["right: not causal"] = error_of(lambda: attention(*[x.transpose(1, 2)] * 3, mesh=mesh))
    found["right: behind it"] = error_of(lambda: calls["attention"](x[:, :4]))
    return found


def test_another_layout_than_that_of_the_buffers_is_refused(ranks: Any) -> None:
    for found in ranks(2, other_layouts):
        for name, error in found.items():
            if name.startswith("right"):
                assert error == "", (name, error)
            else:
                assert error.startswith("ValueError") and "split its buffers as 'head_tail'" in error, (name, error)


@on_ranks
def threads() -> None:
    """A block is of its thread: another one attends locally meanwhile."""
    found: list[Tensor] = []
    local = [x[:, :, :8] for x in qkv()]
    with context_parallel(cp_mesh()), comm.record_traffic() as log:
        worker = threading.Thread(target=lambda: found.append(attend(local)))
        worker.start()
        worker.join()
    assert log.entries == [] and relative_error(found[0], plain_attention(*local, is_causal=True)) <= 1e-10


def test_blocks_are_of_their_thread(ranks: Any) -> None:
    ranks(2, threads)


@on_ranks
def documents_and_window() -> None:
    mesh, whole = cp_mesh(), qkv()
    seen = torch.ones(16, 16, dtype=torch.bool).tril().triu(-3)
    with context_parallel(mesh, window=(3, None)) as handler:
        out = handler.combine(attend([handler.dispatch(x, 2) for x in whole]), 2)
        assert relative_error(out, plain_attention(*whole, visible=seen)) <= 1e-10
        seen[7:, :7] = False
        with handler.documents([0, 7, 16]):
            out = handler.combine(attend([handler.dispatch(x, 2) for x in whole]), 2)
        assert relative_error(out, plain_attention(*whole, visible=seen)) <= 1e-10


@pytest.mark.parametrize("world", [1, 2])
def test_documents_and_windows_hold_in_a_block(ranks: Any, world: int) -> None:
    ranks(world, documents_and_window)


@on_ranks
def without_gradients(off: str) -> float:
    """Evaluation with gradients switched off inside the block or around it; writes are detected there too."""
    model, (ids, _), worst = Model(), data(), 0.0
    count, views = torch.zeros(LENGTH), torch.arange(2.0 * LENGTH)[:LENGTH]
    block = context_parallel(
        cp_mesh(), buffers=[ids, model.place, count, views], buffer_seq_dims=[1, 0, 0, 0], layout="contiguous"
    )
    manager = getattr(torch, off)
    for outside in (True, False):
        first, second = (manager(), block) if outside else (block, manager())
        with first as a, second as b:
            out = (b if outside else a).combine(model(ids), 1)
            count += dist.get_rank() + 1
            views.mul_(2)
        worst = max(worst, relative_error(out, Model(plain=True)(data()[0]).detach()))
    assert torch.equal(count, torch.tensor([2.0, 4.0]).repeat_interleave(LENGTH // 2))
    assert torch.equal(views, 4 * torch.arange(float(LENGTH)))
    return worst


@on_ranks
def rows_of_other_documents(kv_exchange: str) -> float:
    """PyTorch's per-document balancing: every batch row has documents of its own, and attention is that of SDPA."""
    rows, g = [[0, 3, 17, LENGTH], [0, 10, 11, LENGTH]], torch.Generator().manual_seed(5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(2, 4, LENGTH, 8, dtype=torch.float64, generator=g) for _ in "qkv"]
    want = plain_attention(*whole, visible=visible_pairs(LENGTH, True, None, rows))
    buffers = [x.clone() for x in whole]
    with (
        ContextParallelHandler(mesh, "per_document").documents(rows),
        context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], layout="per_document", kv_exchange=kv_exchange
        ) as handler,
    ):
        return relative_error(handler.combine(scaled_dot_product_attention(*buffers, is_causal=True), 2), want)


@pytest.mark.parametrize("kv_exchange", ["all_gather", "ring"])
def test_rows_have_documents_of_their_own_in_a_block(ranks: Any, kv_exchange: str) -> None:
    assert max(ranks(3, rows_of_other_documents, kv_exchange)) <= 1e-10


@pytest.mark.parametrize("off", ["no_grad", "inference_mode"])
def test_evaluation_in_a_block(ranks: Any, off: str) -> None:
    assert max(ranks(2, without_gradients, off)) <= 1e-10


@on_ranks
def compiled() -> float:
    model, (ids, weights) = Model(), data()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    block = context_parallel(cp_mesh(), buffers=[ids, weights, model.place], buffer_seq_dims=[1, 1, 0])
    with block:
        loss = loss_of(fast, ids, weights)
        loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    with block:
        late = loss_of(fast, ids, weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    for x in found:
        dist.all_reduce(x)
    return max(relative_error(a, b) for a, b in zip(found, (reference()[0], *reference()[1]), strict=True))


@pytest.mark.slow
def test_compiled_models_in_a_block(ranks: Any) -> None:
    assert max(ranks(2, compiled)) <= 1e-10


@on_ranks
def graphs_of_steps() -> list[int]:
    """The number of graphs after each step, of compiled layers that run in a block of each step's own."""
    torch._dynamo.reset()
    made: list[None] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(None)
        return graph.forward

    layers, found = nn.ModuleList(Layer(False) for _ in range(3)), []
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(1, LENGTH, 8)
        with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1]):
            out: Tensor = x
            for layer in layers:
                out = layer(out)
        found.append(len(made))
    return found


def test_compiled_layers_share_graphs_in_the_blocks_of_all_steps(ranks: Any) -> None:
    """Graphs had guards on the number of attention calls and on the buffers of their block: each layer had its own,
    each block compiled them again, and from the ninth graph on layers ran eagerly."""
    assert ranks(2, graphs_of_steps) == [[2, 2, 2]] * 2  # the first layer's input has no gradient


# --------------------------------------------------------------------------- mistakes


@on_ranks
def wrong() -> dict[str, str]:
    mesh, x = cp_mesh(), torch.zeros(2, 8)
    learned, odd = torch.zeros(2, 8, requires_grad=True), torch.zeros(2, 6)

    def enter(*buffers: Any, dims: Any = None, **options: Any) -> None:
        with context_parallel(
            mesh, buffers=list(buffers), buffer_seq_dims=[1] * len(buffers) if dims is None else dims, **options
        ):
            raise AssertionError("entered")

    def inside(fn: Any) -> None:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            fn()

    try:
        return errors_of(
            {
                r"buffers\[1\] of shape \(2, 8\) requires a gradient.*handler.dispatch": lambda: enter(x, learned),
                r"buffers\[1\] of shape \(2, 8\) requires a gradient": lambda: enter(x, learned * 1),
                "1 buffers and 0 buffer_seq_dims": lambda: enter(x, dims=[]),
                r"buffer_seq_dims\[0\]=2 is not a dimension": lambda: enter(x, dims=[2]),
                r"buffer_seq_dims\[0\]=None is not a dimension": lambda: enter(x, dims=[None]),
                r"buffers\[1\].shape\[1\]=6 cannot be split over 2 ranks with layout='head_tail'": lambda: enter(
                    x, odd
                ),
                r"TypeError: buffers\[1\] is a list": lambda: enter(x, [1, 2]),
                "twice in buffers": lambda: enter(x, x),
                "1 of no_restore_buffers are not in buffers": lambda: enter(x, no_restore_buffers=[odd]),
                "layout='zigzag' is unknown": lambda: enter(x, layout="zigzag"),
                "is a table of 16 positions, and the tokens have 8": lambda: enter(
                    x.long(), torch.zeros(16, 4), dims=[1, 0]
                ),
                r"\(16, 2\) is a table of 16 positions.* table = x\[:8\], as": lambda: enter(
                    x.long(), torch.zeros(16, 2, dtype=torch.complex64), dims=[1, 0]
                ),
                r"\(1, 16, 4\) is a table of 16 positions.* table = x\[:, :8\]": lambda: enter(
                    x, torch.zeros(1, 16, 4, dtype=torch.complex64), dims=[1, 1]
                ),
                r"\(1, 16\) is a table of 16 positions": lambda: enter(
                    x.long(), torch.arange(16).unsqueeze(0), dims=[1, 1]
                ),
                r"\(16,\) is a table of 16 positions": lambda: enter(x[:1].long(), torch.arange(16), dims=[1, 0]),
                "was made under inference_mode": lambda: enter(torch.inference_mode()(torch.zeros)(2, 8)),
                "sharded by an enclosing block already": lambda: inside(lambda: enter(x)),
                "dropout_p=1.0 must be a probability below 1": lambda: inside(
                    lambda: F.scaled_dot_product_attention(*qkv(), dropout_p=1.0)
                ),
                "NotImplementedError: nn.MultiheadAttention": lambda: inside(
                    lambda: nn.MultiheadAttention(8, 2)(*[torch.zeros(2, 4, 8)] * 3)
                ),
            }
        )
    finally:
        assert x.shape == odd.shape[:1] + (8,) and not _sharded_now and not _blocks.entries


def test_mistakes_are_refused_before_anything_is_changed(ranks: Any) -> None:
    check_errors(ranks(2, wrong))


@on_ranks
def compiled_without_gradients() -> float:
    """The error of a fully compiled function with a projection, in a block without gradients."""
    whole = qkv()
    weight = torch.eye(whole[0].shape[-1], dtype=whole[0].dtype)
    f = torch.compile(
        lambda q, k, v: F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), weight),
        backend="aot_eager",
        fullgraph=True,
    )
    with torch.no_grad():
        want = f(*whole)
    torch._dynamo.reset()
    given = [x.clone() for x in whole]
    with context_parallel(cp_mesh(), buffers=given, buffer_seq_dims=[2, 2, 2]) as handler, torch.no_grad():
        out = f(*given)
        return relative_error(handler.combine(out, 2), want)


def test_a_compiled_function_without_gradients_in_a_block(ranks: Any) -> None:
    assert max(ranks(2, compiled_without_gradients, timeout=100)) <= 1e-10


@on_ranks
def gradients_of_buffers(backend: str, setter: bool) -> list[Any]:
    """Errors of the gradients of buffers that require them in the block, of a compiled function and an eager one after
    it, and what is left on the buffers behind the block."""
    whole = [x.requires_grad_() for x in qkv()]
    weight = torch.arange(1.0, 17, dtype=torch.float64)[:, None]
    (2 * plain_attention(*whole, is_causal=True) * weight).sum().backward()
    torch._dynamo.reset()
    f = torch.compile(lambda *xs: F.scaled_dot_product_attention(*xs, is_causal=True), backend=backend)
    given = [x.detach().clone() for x in whole]
    with context_parallel(cp_mesh(), buffers=[*given, weight], buffer_seq_dims=[2, 2, 2, 0]) as handler:
        for x in given:
            if setter:
                x.requires_grad = True
            else:
                x.requires_grad_()
        for call in (f, attend_to):
            (call(*given) * weight).sum().backward()
        errors = [relative_error(handler.combine(x.grad, 2), w.grad) for x, w in zip(given, whole, strict=True)]
    return [*errors, [x.requires_grad for x in given], [tuple(x.shape) for x in given]]


def attend_to(*xs: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*xs, is_causal=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("setter", [True, False])
def test_compiled_functions_have_the_gradients_of_buffers(ranks: Any, backend: str, setter: bool) -> None:
    for *errors, required, shapes in ranks(2, gradients_of_buffers, backend, setter, timeout=100):
        assert max(errors) <= 1e-10
        assert required == [False] * 3 and shapes == [(1, 2, 16, 4)] * 3


@on_ranks
def by_operator(operator: str) -> float:
    """The error of attention that is spelled as an operator of PyTorch."""
    mesh, (q, k, v) = cp_mesh(), torch.randn(3, 2, 2, LENGTH, 4, dtype=torch.float64).unbind()
    want, buffers = plain_attention(q, k, v, is_causal=True), [x.clone() for x in (q, k, v)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3) as handler:
        out = getattr(torch.ops.aten, operator)(*buffers, 0.0, True) if operator[0] == "_" else None
        if out is None:
            out = torch.ops.aten.scaled_dot_product_attention.default(*buffers, is_causal=True)
        return relative_error(handler.combine(out, 2), want)


def test_operators_of_attention_are_routed_or_refused(ranks: Any) -> None:
    """Before, they covered this rank's share only."""
    assert max(ranks(2, by_operator, "scaled_dot_product_attention")) <= 1e-10
    for operator in ("_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward"):
        ranks.raises(2, NotImplementedError, f"aten.{operator}, which cannot be routed", by_operator, operator)


@on_ranks
def packed_positions() -> list[tuple[list[str], float]]:
    """Warnings of blocks with positions of packed documents, and the error of the output against documents."""
    mesh, found = cp_mesh(), []
    module, x = Layer(plain=False).double(), torch.randn(1, LENGTH, 8, dtype=torch.float64)
    for documents in (None, [0, LENGTH // 2, LENGTH]):
        for boundary in (LENGTH // 2, LENGTH):
            positions, share = torch.arange(LENGTH)[None] % boundary, x.clone()
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                with (
                    context_parallel(
                        mesh, buffers=[positions, share], buffer_seq_dims=[1, 1], layout="contiguous"
                    ) as handler,
                    handler.documents(documents) if documents else nullcontext(),
                ):
                    out = handler.combine(module(share), 1)
            want = torch.cat([module(x[:, :12]), module(x[:, 12:])], 1) if documents else module(x)
            said = [str(w.message) for w in caught if "positions that return to 0" in str(w.message)]
            found.append((said, relative_error(out, want.detach())))
    return found


def test_positions_of_packed_documents_are_warned_of(ranks: Any) -> None:
    for found in ranks(2, packed_positions):
        assert [len(said) for said, _ in found] == [1, 0, 0, 0], found
        assert max(error for _, error in found) <= 1e-10


class SelfAttention(Layer):
    """A layer whose name says what it does, with a core of its own."""

    def __init__(self, core: Callable[..., Tensor]) -> None:
        super().__init__(plain=False)
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
        return x + self.core(q, k, v).transpose(1, 2).flatten(2)


@on_ranks
def local_attention(how: str) -> list[int]:
    """Numbers of warnings of local attention in two blocks."""
    cores: dict[str, Callable[..., Tensor]] = {
        "by hand": plain_attention,
        "routed": lambda *qkv: F.scaled_dot_product_attention(*qkv),
        "engine": lambda *qkv: attention(*qkv, mesh=cp_mesh()),
        "compiled": torch.compile(lambda *qkv: F.scaled_dot_product_attention(*qkv), backend="aot_eager"),
    }
    kind = type("SelfAttention", (SelfAttention,), {})
    module, x, found = kind(cores[how]), torch.randn(1, LENGTH, 8), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1]):
                module(x)
        found.append(len([w for w in caught if "SelfAttention ran in this context_parallel block" in str(w.message)]))
    return found


def test_modules_of_attention_that_nothing_routes_are_warned_of(ranks: Any) -> None:
    """A kernel that is no operator of PyTorch cannot be seen, its module can."""
    assert ranks(2, local_attention, "by hand") == [[1, 0]] * 2
    for how in ("routed", "engine", "compiled"):
        assert ranks(2, local_attention, how) == [[0, 0]] * 2


@pytest.mark.parametrize(
    "namespace",
    ["flash_attn_3", "_flash_attn2_588b404", "_vllm_flash_attn3_1a2b", "_sage_attention_0c", "xformers_flash"],
)
def test_operators_of_kernels_are_known_by_name(namespace: str) -> None:
    """Kernels from a hub have an underscore in front of their names."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("attend_for_test(Tensor q) -> Tensor")
    operator = getattr(torch.ops, namespace).attend_for_test.default
    assert spelled(operator) == f"{namespace}.attend_for_test.default"
    assert spelled(torch.ops.aten.add.Tensor) is None


@on_ranks
def tokens_added_in_a_block(added: int, length: int) -> int:
    """Warnings of tokens that every rank puts before its share of a block's buffers."""
    mesh, q = cp_mesh(), torch.randn(1, 2, length, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2], layout="contiguous"):
            more = torch.cat([torch.zeros(1, 2, added, 8), q], 2)
            F.scaled_dot_product_attention(more, more, more)
    return sum("than its share of a batch" in str(x.message) for x in caught)


@pytest.mark.parametrize(("added", "length"), [(3, 24), (20, 24), (100, 24), (0, 24)])
def test_tokens_that_every_rank_adds_in_a_block_are_warned_of(ranks: Any, added: int, length: int) -> None:
    """More than as many as a share has were taken for another sequence."""
    assert ranks(2, tokens_added_in_a_block, added, length) == [int(added > 0)] * 2


# --------------------------------------------------------------------------- tables of positions


@on_ranks
def several_lengths() -> list[list[int]]:
    """The lengths of shares of buffers of two lengths, none of which is a table: an encoder's and a decoder's, with
    rows or the sequence first."""
    found = []
    g = torch.Generator().manual_seed(0)
    source, target = (torch.randint(9, (1, n), generator=g) for n in (16, 8))
    for buffers, dims in (
        ([source, target, torch.arange(16).unsqueeze(0)], [1, 1, 1]),
        ([torch.zeros(16, 4), source], [0, 1]),
        ([torch.zeros(16, 2, 4), target.mT.expand(-1, 2).clone()], [0, 0]),
        ([torch.zeros(16, 4), target[0], torch.arange(16)], [0, 0, 0]),
    ):
        with warnings.catch_warnings(), context_parallel(cp_mesh(), buffers=buffers, buffer_seq_dims=dims):
            warnings.simplefilter("error")
            found.append([x.shape[dim] for x, dim in zip(buffers, dims, strict=True)])
    return found


def test_buffers_of_two_sequences_are_no_tables(ranks: Any) -> None:
    assert ranks(2, several_lengths) == [[[8, 4, 8], [8, 8], [8, 4], [8, 4, 8]]] * 2


@on_ranks
def longer_numbers(rows: int) -> list[str]:
    """Warnings of a block with numbers of more positions than its tokens, perhaps features with their positions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffers = [torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(1, 16, 4), torch.arange(16)]
        with context_parallel(cp_mesh(), buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            pass
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("rows", [1, 3])
def test_numbers_of_more_positions_than_the_tokens_are_warned_of(ranks: Any, rows: int) -> None:
    for features, positions in ranks(2, longer_numbers, rows):
        assert "buffers[1] of shape (1, 16, 4) has 16 positions, and the tokens have 8" in features
        assert "buffers[2] of shape (16,) has 16 positions, and the tokens have 8" in positions


@on_ranks
@patch.object(context_manager, "count_compilations", lambda: 0)
def view_of_a_table(reads: str) -> list[str]:
    """Warnings of a block whose buffer is a view of a table, of which the model reads the whole, the view, or only the
    shape."""
    table, x = nn.Parameter(torch.rand(32, 4)) if reads == "parameter" else torch.rand(32, 4), torch.zeros(2, 16, 4)
    rows = table.detach()[:16]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(cp_mesh(), buffers=[x, rows], buffer_seq_dims=[1, 0]):
            read = {"view": lambda: x + rows, "shape": lambda: table.shape}
            read.get(reads, lambda: x + table[: x.shape[1]])()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("reads", ["whole", "parameter", "view", "shape"])
def test_a_table_that_is_read_in_place_of_its_rows_is_warned_of(ranks: Any, reads: str) -> None:
    for found in ranks(2, view_of_a_table, reads):
        assert len(found) == (reads in ("whole", "parameter"))
        assert all("of which it is a view" in text for text in found)
