"""torch.compile, opcheck and activation checkpointing of the engine's ops on real ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel
from hyper_cp.cli.modes import named_mode
from hyper_cp.mesh import comm
from hyper_cp.mesh.padding import Form, Padding
from hyper_cp.ops import SAVE_LIST, attention, causal_conv1d
from hyper_cp.ops.recurrence.engine import RecurrenceSettings
from hyper_cp.ops.recurrence.kernels import choose
from hyper_cp.ops.settings import text
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

RING = named_mode("ring, head_tail")
ON_TWO = [named_mode(name) for name in ("Ulysses, head_tail", "all-gather, load_balance", "auto, ring")]
ON_FOUR = [named_mode("hybrid of 2, ring, head_tail")]
"""A mode that two ranks cannot have: a ring of several and Ulysses of several. (There are two key/value heads.)"""


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = nn.Linear(dim, dim + 2 * kv_heads * (dim // heads))
        self.inner, self.out = Inner(), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return x + self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class WithoutWeights(nn.Module):
    """Few operators around attention: inductor has few loops to build."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (8, -1)).transpose(1, 2).split([4, 2, 2], dim=1)
        return x[..., :16] + self.inner(q, k, v).transpose(1, 2).flatten(2)


def styled_block(world: int, mode: dict[str, Any], kind: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    block = kind().double()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    parallelize_module(block, mesh, {"inner": ContextParallel(seq_dim=2, head_dim=1, **mode)})
    return block


def gradients(run: Any, block: nn.Module, seed: int) -> list[Tensor]:
    x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


@on_ranks
def compiled_equals_eager(
    world: int, modes: list[dict[str, Any]], backend: str, kind: type[nn.Module] = Block
) -> float:
    worst = 0.0
    for mode in modes:
        torch._dynamo.reset()
        block = styled_block(world, mode, kind)
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for step in range(2):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                found = gradients(compiled, block, step)
            want = gradients(block, block, step)
            worst = max(worst, *(relative_error(a, b) for a, b in zip(found, want, strict=True)))
    return worst


@pytest.mark.parametrize(
    "world, modes",
    [
        (2, [RING]),
        pytest.param(2, ON_TWO, marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
    ids=["ring", "two ranks", "four ranks"],
)
def test_fullgraph_compile_equals_eager_without_recompiling(ranks: Any, world: int, modes: list[Any]) -> None:
    assert max(ranks(world, compiled_equals_eager, world, modes, "aot_eager", timeout=300)) <= 1e-12


class OwnHeads(Block):
    """An attention module that computes q, k and v itself."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.qkv(x).split([32, 16, 16], -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


@on_ranks
def many_blocks(world: int) -> tuple[float, int]:
    """The error of four blocks that are compiled one by one, and the number of graphs."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), OwnHeads()) for _ in range(4)]).double()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    parallelize_module(model, mesh, {"*.1": ContextParallel(qkv_indices=None, **RING)})
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    want = model(x)
    for i, block in enumerate(model):
        model[i] = torch.compile(block, fullgraph=True, backend="eager")
    counters.clear()
    return relative_error(model(x).detach(), want.detach()), counters["stats"]["unique_graphs"]


def test_equal_blocks_share_a_graph(ranks: Any) -> None:
    for error, graphs in ranks(2, many_blocks, 2):
        assert error <= 1e-12 and graphs <= 2, graphs


@on_ranks
def recomputed_after_the_block(use_reentrant: bool, before: bool) -> tuple[str, float]:
    """The words of a compiled block in a checkpoint whose backward runs after the block of its documents.

    ``before``: a batch without documents has been compiled before, and there is the error of gradients of a backward
    inside the block of its documents."""
    torch.manual_seed(0)
    model = OwnHeads().double()
    alone, x = copy.deepcopy(model), torch.randn(2, 16, 32, dtype=torch.float64)
    mesh, style = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ContextParallel(qkv_indices=None, **RING)
    parallelize_module(model, mesh, style)
    handler = ContextParallelHandler(mesh, style)
    model.compile(backend="aot_eager")

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=use_reentrant).square().sum()

    batch, worst = handler.get_batch_on_this_cp_rank({"x": x, "cu_seqlens": torch.tensor([0, 5, 16])}), 0.0
    if before:
        run(handler.dispatch(x, 1).requires_grad_()).backward()
        model.zero_grad()
        with handler.documents(batch):
            run(batch["x"].clone().requires_grad_()).backward()
        torch.cat([alone(part) for part in (x[:, :5], x[:, 5:])], 1).square().sum().backward()
        summed = sum_over_ranks(*[p.grad for p in model.parameters()])
        worst = max(relative_error(a, b.grad) for a, b in zip(summed, alone.parameters(), strict=True))
    with handler.documents(batch):
        loss = run(batch["x"].requires_grad_())
    return error_of(loss.backward), worst


RECOMPUTED = "recomputed this layer with other packed documents"
WITHOUT = "without the packed documents that its forward had"


@pytest.mark.parametrize(
    "use_reentrant, before, words", [(True, False, RECOMPUTED), (False, False, WITHOUT), (True, True, RECOMPUTED)]
)
def test_a_compiled_block_is_not_recomputed_without_its_documents(
    ranks: Any, use_reentrant: bool, before: bool, words: str
) -> None:
    for found, error in ranks(2, recomputed_after_the_block, use_reentrant, before, timeout=300):
        assert words in found
        assert error <= 1e-12, "with its documents"


@pytest.mark.slow
@on_ranks
def masks_of_layers() -> float:
    """Inductor puts the mask of the second layer into the tensor of the first one, which counts no write."""
    handler = ContextParallelHandler(cp_mesh(), "contiguous")
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def layers(x: Tensor, attend: Any) -> Tensor:
        for window in (8, 2, 8):
            far = torch.arange(8)[:, None] - torch.arange(8)
            x = attend(x, x, x, attn_mask=(far >= 0) & (far < window))
        return x

    attend = partial(attention, mesh=handler.mesh, ulysses_degree=1)
    compiled = torch.compile(partial(layers, attend=attend), backend="inductor", fullgraph=True)
    with torch.no_grad():
        found = handler.combine(compiled(handler.dispatch(x, 2)), 2)
    return relative_error(found, layers(x, F.scaled_dot_product_attention))


@pytest.mark.slow
def test_masks_that_are_made_in_a_graph(ranks: Any) -> None:
    assert max(ranks(2, masks_of_layers, timeout=300)) <= 1e-12


def test_inductor(ranks: Any) -> None:
    assert max(ranks(2, compiled_equals_eager, 2, [RING], "inductor", WithoutWeights, timeout=300)) <= 1e-12


@on_ranks
def opcheck_all(world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    from hyper_cp.mesh import cp_mesh
    from hyper_cp.ops.config import Operands, OpSettings

    ops, cp, of_heads = torch.ops.hyper_cp, cp_mesh.view(mesh, 1), cp_mesh.view(mesh, 2)
    q, k, v = (torch.randn(2, h, 8, 16, requires_grad=True) for h in (4, 2, 2))
    for layout, way in (("head_tail", True), ("contiguous", False)):
        xs = [x.detach().requires_grad_() for x in (q, k)]
        torch.library.opcheck(ops.all_to_all.default, (xs, None, of_heads.key, layout, 2, 1, way))
    for kv, layout, balance in (("ring", "head_tail", False), ("all_gather", "contiguous", True)):
        settings = OpSettings(cp.key, layout, kv, balance, band=(-9, 0), kernel="cpu flash")
        given = Operands(torch.zeros(4, requires_grad=True), torch.tensor([[0, 5, 16]]))
        torch.library.opcheck(ops.attention.default, (q, k, v, *settings.arguments(given, 0.25)))
        with torch.no_grad():
            given = Operands(documents=given.documents)
            out, lse, kernel, _ = ops.attention(q, k, v, *settings.arguments(given, 0.25))
            given = given._replace(kernel=kernel, mark=ops.fingerprint(given.documents, cp.key))
            local = torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, lse
            torch.library.opcheck(ops.attention_backward.default, (*local, *settings.arguments(given, 0.25)))
    settings, best = settings._replace(kernel="reference"), given._replace(kernel=None, mark=None)
    said = settings.arguments(best, 0.25)
    key, weights = k.detach()[:, :1], torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.library.opcheck(ops.select_keys.default, (q.detach(), key, weights, 5, "relu_sum", 1, 0, *said))
        torch.library.opcheck(ops.select_keys.default, (q.detach(), key, weights, 2, "per_head", 3, 1, *said))
        seen = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None] // 2
        torch.library.opcheck(ops.select_entries.default, (q.detach(), key, weights, *seen, 3, 0.25))
    index = [x.detach().requires_grad_() for x in (q, key, weights)]
    of_loss = *index, q.detach(), k.detach(), torch.zeros(2, 4, 8), "relu_sum", 0.25, "", *said
    torch.library.opcheck(ops.indexer_loss.default, of_loss)
    kept, dloss = torch.ones(2, 1, 8, 2), torch.ones(2, 8)
    said = settings.arguments(best._replace(mark=given.mark), 0.25)
    of_loss = dloss, kept, *(x.detach() for x in of_loss[:6]), *of_loss[6:9], *said
    torch.library.opcheck(ops.indexer_loss_backward.default, of_loss)
    x = torch.randn(2, 8, 3, requires_grad=True)
    for how in (), (True,), (True, True):
        torch.library.opcheck(ops.gather_sequence.default, (x, None, cp.key, "head_tail", 1, *how))
        torch.library.opcheck(ops.share_sequence.default, (torch.randn(2, 16, 3), None, cp.key, "head_tail", 1, *how))
    torch.library.opcheck(ops.gather_ranks.default, (x.detach(), cp.flat[0].key))
    torch.library.opcheck(ops.roll_sequence.default, (x, torch.tensor([[0, 5, 16]]), cp.key, "head_tail", 1, -3))
    torch.library.opcheck(ops.fingerprint.default, (torch.tensor([[0, 5, 16]]), cp.key))
    tables = Padding((15,), 16, 8, Form((2,))).table(), torch.tensor([[0, 15, 16]]), torch.ones(1, 16, dtype=torch.bool)
    torch.library.opcheck(ops.padding.default, (torch.ones(2, 8), *tables, cp.key, "head_tail", True))
    counts = [0, 3] if cp.rank == 0 else [3, 0]  # to each rank, and from each
    rows = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(ops.move_rows.default, (rows, counts, counts, cp.key))
    opcheck_recurrences(cp.key)


def opcheck_recurrences(mesh: str) -> None:
    ops, documents = torch.ops.hyper_cp, torch.tensor([[0, 5, 16]])
    q, k, v = (torch.randn(2, 8, 2, 4, requires_grad=True) for _ in range(3))
    decay = (-torch.rand(2, 8, 2, 1)).requires_grad_()
    kernel = choose(None, "recurrence", q, v, decay, None)
    said = text(RecurrenceSettings("head_tail", kernel, False, mesh))
    torch.library.opcheck(ops.linear_recurrence.default, (q, k, v, decay, None, documents, said))
    mark, given = ops.fingerprint(documents, mesh), [t.detach() for t in (v, q, k, v, decay)]
    torch.library.opcheck(ops.linear_recurrence_backward.default, (*given, None, mark, documents, said))
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3)
    leaves = [t.requires_grad_() for t in (x.clone(), weight.clone(), bias.clone())]
    torch.library.opcheck(ops.causal_conv1d.default, (*leaves, documents, mesh, "head_tail", 2))
    torch.library.opcheck(ops.causal_conv1d_backward.default, (x, x, weight, mark, documents, mesh, "head_tail", 2))
    rows = torch.randn(2, 8, 3, requires_grad=True)
    torch.library.opcheck(ops.windows.default, (rows, [2, 0], 1, 0.5, documents, mesh, "head_tail"))
    given = torch.randn(2, 8, 2, 3), mark, [2, 0], 1, 8, documents, mesh, "head_tail"
    torch.library.opcheck(ops.windows_backward.default, given)


@pytest.mark.slow
def test_opcheck_of_every_op(ranks: Any) -> None:
    known = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("hyper_cp::")
    }
    assert known == {
        "attention",
        "attention_backward",
        "all_to_all",
        "gather_ranks",
        "fingerprint",
        "gather_sequence",
        "move_rows",
        "padding",
        *("query_positions", "local_blocks"),  # checked in test_flex
        "roll_sequence",
        "share_sequence",
        *("select_keys", "select_entries", "indexer_loss", "indexer_loss_backward"),
        *("ulysses_attention", "ulysses_attention_backward"),  # checked in test_head_groups
        *("linear_recurrence", "linear_recurrence_backward", "causal_conv1d", "causal_conv1d_backward"),
        *("windows", "windows_backward"),
    }
    ranks(2, opcheck_all, 2, timeout=300)


@on_ranks
def checkpointed(world: int, modes: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Per mode: worst error, and transfers of a recompute with everything / with our ops saved."""

    def policy(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVE_LIST else CheckpointPolicy.PREFER_RECOMPUTE

    results = []
    for mode in modes:
        block = styled_block(world, mode)
        want = gradients(block, block, 1)
        worst, transfers = 0.0, []
        for selective in (False, True):
            extra = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
            for early in (True, False):
                with set_checkpoint_early_stop(early), comm.record_traffic() as log:
                    run = partial(checkpoint, block, use_reentrant=False, **extra)
                    found = gradients(run, block, 1)
                worst = max(worst, *(relative_error(a, b) for a, b in zip(found, want, strict=True)))
            transfers.append(len(log.entries))
        results.append((worst, *transfers))
    return results


def test_activation_checkpointing_recomputes_with_context_parallelism(ranks: Any) -> None:
    modes = [RING, *ON_TWO[1:], *ON_FOUR]
    for found in ranks(4, checkpointed, 4, modes):
        for mode, (worst, full, selective) in zip(modes, found, strict=True):
            assert worst <= 1e-12, mode
            assert selective < full, f"{mode}: saved ops communicate again in the recompute"


@on_ranks
def step_that_splits() -> float:
    """The worst error of a compiled step that splits batches of other numbers of documents, against the eager step."""
    block = styled_block(2, {"ulysses_degree": 1})
    handler = ContextParallelHandler.of(block)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        batch = handler.get_batch_on_this_cp_rank({"x": x, "document_ids": ids}, {"x": 1})
        with handler.documents(batch):
            out: Tensor = block(batch["x"])
        return out

    compiled, errors = torch.compile(step, backend="eager"), []
    for starts in ((5,), (2, 4, 11)):
        x = torch.randn(1, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(len(starts)))
        ids = torch.bucketize(torch.arange(16), torch.tensor(starts), right=True)[None]
        errors.append(relative_error(compiled(x, ids).detach(), step(x, ids).detach()))
    return max(errors)


def test_a_compiled_step_may_split_its_batch(ranks: Any) -> None:
    assert max(ranks(2, step_that_splits, timeout=300)) <= 1e-12


@on_ranks
def block_in_one_graph() -> float:
    """The error of a compiled function without graph breaks that enters the block of its packed batch."""
    block = styled_block(2, {"ulysses_degree": 1})
    handler = ContextParallelHandler.of(block)
    x = torch.randn(1, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = handler.get_batch_on_this_cp_rank({"x": x, "cu_seqlens": torch.tensor([0, 5, 16])})

    def step(x: Tensor) -> Tensor:
        with handler.documents(batch):
            out: Tensor = block(x)
        return out

    want = step(batch["x"]).detach()
    return relative_error(torch.compile(step, backend="eager", fullgraph=True)(batch["x"]).detach(), want)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of older versions cannot read a batch in a graph")
def test_a_block_may_be_entered_in_one_graph(ranks: Any) -> None:
    assert max(ranks(2, block_in_one_graph, timeout=300)) <= 1e-12


@on_ranks
def first_calls(dynamic: bool | None) -> float:
    """The worst error of compiled functions, of which the first is the first call on its mesh."""
    mesh, worst = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), 0.0
    weight = torch.ones(8, 3, dtype=torch.float64)

    def convolved(x: Tensor) -> Tensor:
        return causal_conv1d(x.mT, weight, mesh=mesh)

    def attended(x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        return attention(q, q, q, mesh=mesh, is_causal=True)

    for function in (convolved, attended):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for length in (4, 6) if dynamic else (4,):
            x = torch.randn(1, length, 8, dtype=torch.float64)
            worst = max(worst, relative_error(compiled(x), function(x)))
    return worst


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_first_call_on_a_mesh_may_be_compiled(ranks: Any, dynamic: bool | None) -> None:
    """Before, Dynamo could not sort the ranks of the mesh, and the graph ran before its mesh was registered."""
    assert max(ranks(2, first_calls, dynamic)) <= 1e-12


class GivenUp(nn.Module):
    """Dynamo compiles no frame of this forward: it breaks in a generator."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.logsigmoid((x.mT * 2).mT)
        q, k, v = (part.unflatten(-1, (2, 4)) for part in x.chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@on_ranks
def given_up(block: bool) -> list[float]:
    """Errors of three calls of a compiled module whose share is as long as a dimension of it."""
    torch._dynamo.reset()
    mesh, g = cp_mesh(), torch.Generator().manual_seed(0)
    whole, module = torch.randn(2, 16, 24, generator=g, dtype=torch.float64), GivenUp()
    want = module(whole).chunk(2, 1)[dist.get_rank()]
    if not block:
        parallelize_module(module, mesh, ContextParallel(ulysses_degree=1, qkv_indices=None))
    module.compile(backend="eager")
    found = []
    for _ in range(3):
        x = whole.clone()
        if block:
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous"):
                out = module(x)
        else:
            out = module(x.chunk(2, 1)[dist.get_rank()])
        found.append((out - want).abs().max().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True], ids=["plan", "block"])
def test_functions_of_a_frame_that_is_given_up_stay_themselves(ranks: Any, block: bool) -> None:
    for found in ranks(2, given_up, block):
        assert max(found) <= 1e-12, found
