"""Another cp mesh for a while: every degree in both directions, recompute, compile, and what is refused."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    RecurrentContextParallel,
    context_parallel_mesh,
    ops,
    split_cp_mesh,
    styled_modules,
)
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from hyper_cp.mesh import comm
from tests.harness import modules
from tests.harness.operators import Operators
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import error_of, named_error, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import recur

S = 32
CONFIG = LlamaConfig(dim=32, heads=8, kv_heads=4, hidden=48)
STYLES: list[dict[str, Any]] = [
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    {"ulysses_degree": 2, "kv_exchange": "ring", "load_balance": True},
    {"ulysses_degree": "auto", "layout": "head_tail"},
]


def built(style: dict[str, Any], home: DeviceMesh, block: bool = False, layers: int = 2) -> Llama:
    """A model under context parallelism on ``home``."""
    model = plain_model(layers)
    made = ContextParallel(qkv_indices=None, **style) if block else ContextParallel(2, 1, **style)
    parallelize_module(model, home, {f"layers.*.attention{'' if block else '.inner'}": made})
    return model


def plain_model(layers: int = 2) -> Llama:
    torch.manual_seed(0)
    return Llama(replace(CONFIG, layers=layers)).double()


def sample(number: int) -> Tensor:
    return torch.randint(256, (1, S + 1), generator=torch.Generator().manual_seed(number))


def loss_of(model: Any, tokens: Tensor, labels: Tensor, positions: Tensor, count: int) -> Tensor:
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / count


def share_of_loss(model: Any, handler: ContextParallelHandler, samples: int) -> Tensor:
    """This rank's part of the mean loss of ``samples`` samples, one per group of the handler's mesh."""
    text = sample(dist.get_rank() // handler.cp.size)
    tokens, labels = (handler.dispatch(x, 1) for x in (text[:, :-1], text[:, 1:]))
    return loss_of(model, tokens, labels, handler.position_ids(S), S * samples)


@cache
def one_device(samples: int, layers: int = 2) -> tuple[float, list[Tensor]]:
    """The mean loss of that many samples and the gradient of every parameter, on one device."""
    model = plain_model(layers)
    batch = [(sample(i)[:, :-1], sample(i)[:, 1:]) for i in range(samples)]
    loss = torch.stack([loss_of(model, *texts, torch.arange(S), S * samples) for texts in batch]).sum()
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def errors(loss: Tensor, model: Llama, samples: int) -> float:
    """The largest error of the loss and all gradients, summed over ranks, beside one device."""
    want, grads = one_device(samples, len(model.layers))
    total, *found = sum_over_ranks(loss, *(p.grad for p in model.parameters()))  # type: ignore[misc]
    model.zero_grad()
    return max(abs(total.item() / want - 1), *map(relative_error, found, grads))


@on_ranks
def every_degree(style: dict[str, Any], home: int, block: bool) -> dict[str, float]:
    world = dist.get_world_size()
    family = split_cp_mesh(init_device_mesh("cpu", (world,)))
    model = built(style, family.cp(home), block)
    follows = ContextParallelHandler.of(model)
    found = {}

    def step(name: str, handler: ContextParallelHandler, late: bool) -> None:
        samples = world // handler.cp.size
        loss = share_of_loss(model, handler, samples)
        if not late:
            loss.backward()
            found[name] = errors(loss, model, samples)
        else:
            waiting.append((name, loss, samples))

    waiting: list[Any] = []
    step("home", follows, False)
    for degree in family.degrees:
        with context_parallel_mesh(model, family.cp(degree)) as handler:
            assert follows.cp.size == handler.cp.size == degree
            step(f"{degree}", handler, False)
            step(f"{degree}, following", follows, True)
            with context_parallel_mesh(model, family.cp(home)):
                step(f"{degree}, nested home", follows, False)
            step(f"{degree}, again", follows, False)
        for name, loss, samples in waiting:
            loss.backward()  # after the block
            found[name] = errors(loss, model, samples)
        waiting.clear()
    try:
        with context_parallel_mesh(model, family.cp(family.degrees[-1])):
            raise KeyError("the user's own")
    except KeyError:
        pass
    step("home again", follows, False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "style, home, block", [*zip(STYLES, (4, 2, 4, 1), (False, True, True, False), strict=True)], ids=str
)
def test_every_degree_from_every_degree(ranks: Any, style: dict[str, Any], home: int, block: bool) -> None:
    for found in ranks(4, every_degree, style, home, block):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def other_splits() -> dict[str, float]:
    """Meshes of the same ranks whose ring x ulysses split differs."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    model = built({"kv_exchange": "ring", "layout": "head_tail"}, square)
    found = {}
    blocks = {
        "home": lambda: context_parallel_mesh(model, square),
        "a ring": lambda: context_parallel_mesh(model, line),
        "ulysses": lambda: context_parallel_mesh(model, line, ulysses_degree=4),
        "hybrid": lambda: context_parallel_mesh(model, line, ulysses_degree=2),
    }
    for name, block in blocks.items():
        with block() as handler, comm.record_traffic() as traffic:
            loss = share_of_loss(model, handler, 1)
            loss.backward()
        kinds = {operation for operation, _ in traffic.entries} - {"agreement"}
        both = {"all_to_all", "send_recv"}
        assert kinds == {"a ring": {"send_recv"}, "ulysses": {"all_to_all"}}.get(name, both)
        found[name] = errors(loss, model, 1)
    return found


def test_other_splits_of_the_same_ranks(ranks: Any) -> None:
    for found in ranks(4, other_splits):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def off() -> tuple[int, list[str]]:
    """On a mesh of one rank the module makes exactly the user's own call: no transfers, and no operators of ours."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,)))
    model = built({"ulysses_degree": 1, "kv_exchange": "ring"}, family.cp(2))
    text = sample(0)[:, :-1]
    with Operators() as ran, comm.record_traffic() as traffic, context_parallel_mesh(model, family.cp(1)):
        model(text, torch.arange(S)).sum().backward()
    return len(traffic.entries), [name for name, _ in ran.calls if name.startswith("hyper_cp")]


def test_one_rank_is_off(ranks: Any) -> None:
    assert ranks(2, off) == [(0, [])] * 2


@on_ranks
def recomputed(reentrant: bool) -> dict[str, float]:
    """Activation checkpointing per layer; backward inside the block, after it, and in a block on another mesh."""
    family = split_cp_mesh(init_device_mesh("cpu", (4,)))
    model = built({"ulysses_degree": 2, "kv_exchange": "ring"}, family.cp(2))
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
    found = {}
    for degree in (4, 1):
        samples = 4 // degree
        with context_parallel_mesh(model, family.cp(degree)) as handler:
            inside, after, elsewhere = (share_of_loss(model, handler, samples) for _ in range(3))
            inside.backward()
            found[f"{degree} inside"] = errors(inside, model, samples)
        after.backward()
        found[f"{degree} after"] = errors(after, model, samples)
        with context_parallel_mesh(model, family.cp({4: 1, 1: 4}[degree])):
            elsewhere.backward()
        found[f"{degree} elsewhere"] = errors(elsewhere, model, samples)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_uses_the_mesh_of_its_forward(ranks: Any, reentrant: bool) -> None:
    for found in ranks(4, recomputed, reentrant):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def twice_in_one_checkpoint(reentrant: bool) -> float:
    """One module called twice with equal documents, given as lists: its mesh is that of its forward."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,)))

    home, other = family.cp(1), family.cp(2)
    style = ContextParallel(2, 1, ulysses_degree=1, kv_exchange="all_gather", qkv_indices=None)
    module = parallelize_module(modules.BNSD(), home, style)
    whole = torch.randn(1, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def twice(x: Tensor, run: Any, **keywords: Any) -> Tensor:
        x = run(x, x, x, **keywords)
        return run(x, x, x, **keywords)

    plain = partial(plain_attention, visible=visible_pairs(16, True, None, [[0, 5, 16]]))

    with context_parallel_mesh(module, other) as handler:
        x = handler.dispatch(whole, 2).requires_grad_()
        out = checkpoint(lambda y: twice(y, module, documents=[0, 5, 16]), x, use_reentrant=reentrant)
    out.sin().sum().backward()
    assert x.grad is not None
    wide = whole.clone().requires_grad_()
    (want,) = torch.autograd.grad(twice(wide, plain).sin().sum(), wide)
    mine = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    return (x.grad - want[:, :, mine]).abs().max().item()


@pytest.mark.parametrize("reentrant", [False, True])
def test_called_twice_in_one_checkpoint(ranks: Any, reentrant: bool) -> None:
    assert max(ranks(2, twice_in_one_checkpoint, reentrant)) <= 1e-10


@on_ranks
def rolled(reentrant: bool) -> float:
    """The error of a handler that follows a model, in a checkpoint whose backward runs after the block of a mesh."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,)))
    style = ContextParallel(2, 1, ulysses_degree=1, layout="head_tail")
    module = parallelize_module(modules.BNSD(), family.cp(2), style)
    follower, whole = ContextParallelHandler.of(module), torch.arange(16.0, dtype=torch.float64).view(1, 16, 1)
    with context_parallel_mesh(module, family.cp(1)) as handler:
        x = handler.dispatch(whole, 1).requires_grad_()
        out = checkpoint(lambda y: follower.roll_tensor(y.square(), 1, 1)[0], x, use_reentrant=reentrant)
    (out * whole).sum().backward()
    assert x.grad is not None
    return (x.grad - 2 * whole * (whole + 1) * (whole < 15)).abs().max().item()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_handler_of_a_model_is_recomputed_on_the_mesh_of_its_forward(ranks: Any, reentrant: bool) -> None:
    assert max(ranks(2, rolled, reentrant)) <= 1e-12


@on_ranks
def compiled() -> dict[str, float]:
    """Ulysses, a ring and one rank: three meshes of two ranks, and back."""
    torch._dynamo.reset()
    family = split_cp_mesh(init_device_mesh("cpu", (2,)))
    model = built({"ulysses_degree": None, "layout": "head_tail"}, family.cp(2), block=True, layers=1)
    model.layers[0].attention.compile(fullgraph=True, backend="eager")
    found = {}
    for turn, (degree, ulysses) in enumerate(((2, None), (2, 1), (1, None), (2, None), (2, 1), (1, None))):
        with (
            context_parallel_mesh(model, family.cp(degree), ulysses_degree=ulysses) as handler,
            torch._dynamo.config.patch(error_on_recompile=turn > 2),  # none when coming back
        ):
            loss = share_of_loss(model, handler, 2 // degree)
        loss.backward()
        found[f"{turn}: {degree}"] = errors(loss, model, 2 // degree)
    return found


@pytest.mark.slow
def test_compiled_once_for_each_mesh(ranks: Any) -> None:
    for found in ranks(2, compiled, timeout=300):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def fsdp() -> dict[str, float]:
    everyone = init_device_mesh("cpu", (4,))
    family = split_cp_mesh(everyone)
    model = built({"ulysses_degree": None, "layout": "head_tail"}, family.cp(2))
    for part in (*model.layers, model):
        fully_shard(part, mesh=everyone)
    found = {}
    for degree in (2, 4, 1, 2):
        with context_parallel_mesh(model, family.cp(degree)) as handler:
            (share_of_loss(model, handler, 4 // degree) * 4).backward()  # FSDP averages over four ranks
        found[f"{degree}"] = sharded_errors(model, 4 // degree)
    return found


@on_ranks
def tensor_parallel() -> dict[str, float]:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    family = split_cp_mesh(root["cp"])
    model = built({"ulysses_degree": None}, family.cp(2))
    columns = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(model, root["tp"], {**columns, "layers.*.attention.wo": RowwiseParallel()})
    found = {}
    for degree in (2, 1, 2):
        with context_parallel_mesh(model, family.cp(degree)) as handler:
            text = sample(root.get_local_rank("cp") // degree)
            tokens, labels = (handler.dispatch(x, 1) for x in (text[:, :-1], text[:, 1:]))
            loss_of(model, tokens, labels, handler.position_ids(S), S * (2 // degree)).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, group=root.get_group("cp"))
        found[f"{degree}"] = sharded_errors(model, 2 // degree)
    return found


def sharded_errors(model: Llama, samples: int) -> float:
    """The largest error of gradients that have been reduced already."""
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    model.zero_grad()
    return max(map(relative_error, grads, one_device(samples)[1]))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("run", [fsdp, tensor_parallel])
def test_with_sharded_parameters(ranks: Any, run: Any) -> None:
    for found in ranks(4, run):
        assert max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- words


def enter(model: Any, mesh: Any, **options: Any) -> None:
    with context_parallel_mesh(model, mesh, **options):
        pass


def half() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1] if dist.get_rank() > 1 else [2, 3], mesh_dim_names=("cp",))


def with_a_handler_of_home(model: Any, family: Any) -> None:
    handler = ContextParallelHandler(family.cp(2), next(iter(styled_modules(model).values())))
    with context_parallel_mesh(model, family.cp(4)):
        handler.dispatch(sample(0)[:, :-1], 1)


def inside_documents(model: Any, family: Any, between: int | None = None) -> None:
    """Documents of home, or of a mesh between home and the one that runs."""
    with ExitStack() as blocks:
        handler = ContextParallelHandler.of(model)
        if between is not None:
            handler = blocks.enter_context(context_parallel_mesh(model, family.cp(between)))
        blocks.enter_context(handler.documents([0, 5, S]))
        share_of_loss(model, blocks.enter_context(context_parallel_mesh(model, family.cp(4))), 1)


def too_few_heads(_: Any, family: Any) -> None:
    x = torch.randn(1, 2, 8, 4)
    model = parallelize_module(modules.BNSD(causal=False), family.cp(2), ContextParallel(2, 1))
    model(x, x, x)
    with comm.record_traffic() as traffic, context_parallel_mesh(model, family.cp(4)):
        raise AssertionError(f"the block started: {traffic.entries}")


A_BLOCK = "RuntimeError: a documents block is active on the one it has left"
REFUSED: dict[str, tuple[str, Any]] = {
    "no style": (
        "no module of Linear runs under ContextParallel. Only such modules have a mesh that can change. Apply a plan",
        lambda _, family: enter(torch.nn.Linear(2, 2), family.cp(4)),
    ),
    "absent": ("is not part of mesh", lambda model, _: enter(model, half())),
    "no mesh": ("TypeError: mesh must be a torch.distributed.DeviceMesh", lambda model, _: enter(model, 4)),
    "degree": ("degree=3 does not divide", lambda model, family: enter(model, family.cp(4), ulysses_degree=3)),
    "documents": (A_BLOCK, inside_documents),
    "documents between": (A_BLOCK, partial(inside_documents, between=1)),
    "handler": ("RuntimeError: this handler's style runs on another cp mesh", with_a_handler_of_home),
    "heads, before the block": ("cannot split 2 query heads", too_few_heads),
}


@on_ranks
def refused(what: str) -> None:
    family = split_cp_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)))
    model = built({"ulysses_degree": None}, family.cp(2))
    with comm.record_traffic() as traffic:
        try:
            REFUSED[what][1](model, family)
        finally:
            sent = [op for op, _ in traffic.entries if op != "agreement"]
            assert not sent or what.startswith("heads"), "communicated before refusing"


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_meshes_are_refused(ranks: Any, what: str) -> None:
    ranks.raises(4, *named_error(REFUSED[what][0]), refused, what)


class Beside(nn.Module):
    """Attention, and something beside it that mixes positions."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.what = nn.Embedding(S, 8), what
        self.attend, self.other = Attend(), nn.Conv1d(8, 8, 3, padding=1) if what == "module" else Attend()

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        y = self.attend(x + self.embed(torch.arange(x.shape[1])[None] if self.what == "positions" else at))
        if self.what == "module":
            return self.other(y.mT).mT
        return y.cumsum(1) if self.what == "function" else self.other(y) if self.what == "attention" else y


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(2, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)


@on_ranks
def planned_on_one_rank(what: str) -> list[str]:
    """The errors, or the warnings, of two forwards on two ranks of a model that was planned and has run on one."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    model = Beside(what)
    parallelize_module(model, family.cp(1), {"attend": ContextParallel(qkv_indices=None, ulysses_degree=1)})
    x, at = torch.randn(1, 16, 8), torch.arange(16)[None]
    model(x, at)
    with warnings.catch_warnings(record=True) as found, context_parallel_mesh(model, family.cp(2)) as handler:
        warnings.simplefilter("always")
        errors = [error_of(lambda: model(handler.dispatch(x, 1), handler.dispatch(at, 1))) for _ in range(2)]
    return errors if any(errors) else [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    "what, words",
    [
        ("module", "convolves 3 neighbouring positions"),
        ("attention", "on this rank's share"),
        ("function", "calls cumsum on a tensor"),
        ("positions", "got positions 0, 1, 2"),
        ("nothing", ""),
    ],
)
def test_models_that_were_planned_on_one_rank_are_guarded_on_more(ranks: Any, what: str, words: str) -> None:
    """Neither their modules nor their first forward were examined: all ran over a rank's share, without a word."""
    for rank, found in enumerate(ranks(2, planned_on_one_rank, what)):
        if what == "nothing" or (what == "positions" and rank == 0):  # which holds these positions
            assert not found
        else:
            assert len(found) == (2 if what in ("module", "attention") else 1), found  # errors again, warnings once
            assert all(words in message for message in found), found


class Rule(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return recur(q, k, v, g, None, None)


@on_ranks
def compared_on_one_rank() -> float:
    """The error on two ranks of a module that has been compared with its own forward on one rank of them only."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    style = RecurrentContextParallel(kind="linear_recurrence", arguments={"decay": "g"})
    rule = parallelize_module(Rule(), family.cp(2), style)
    whole = [torch.randn(1, 12, 2, 4, dtype=torch.float64) for _ in "qkv"]
    whole.append(-torch.rand(1, 12, 2, dtype=torch.float64))
    documents = [0, 5, 12] if family.rank == 0 else None  # where there are some, it is replaced on one rank, too
    with context_parallel_mesh(rule, family.cp(1)) as handler, handler.documents(documents):
        rule(*whole)
    handler = ContextParallelHandler.of(rule)
    out = rule(*[handler.dispatch(x, 1) for x in whole])
    return relative_error(handler.combine(out, 1), Rule()(*whole))


def test_a_module_that_one_rank_has_compared_is_compared_on_all(ranks: Any) -> None:
    """The other rank compared alone, and both ended with an error of different calls."""
    assert max(ranks(2, compared_on_one_rank)) <= 1e-12


# --------------------------------------------------------------------------- other threads


def in_thread(run: Any) -> Any:
    """The result of ``run`` in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


@on_ranks
def beside_another_thread() -> tuple[int, str, float, str]:
    """The length of a share that a thread splits during an evaluation, the error of a forward in that thread, that of
    the loss of the share after the evaluation, and the error where the share is one of the evaluation's mesh."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    model = built(STYLES[1], family.cp(2))
    follows, fixed = ContextParallelHandler.of(model), ContextParallelHandler(family.cp(2), "head_tail")
    text = {"input_ids": sample(0)[:, :-1], "labels": sample(0)[:, 1:]}
    fixed.dispatch(torch.zeros(1, 2 * S))  # a share as long as the whole text was split before

    def step(batch: Any) -> Tensor:
        with torch.no_grad(), follows.documents(batch):
            return follows.mean_loss(model(batch["input_ids"], batch["position_ids"]), batch["labels"])

    want = step(follows.get_batch_on_this_cp_rank(text))
    with context_parallel_mesh(model, family.cp(1)) as handler, torch.no_grad():
        batch = in_thread(lambda: follows.get_batch_on_this_cp_rank(text))
        alone = handler.get_batch_on_this_cp_rank(text)
        error = error_of(lambda: in_thread(lambda: model(batch["input_ids"], batch["position_ids"])))
    return batch["input_ids"].shape[1], error, relative_error(step(batch), want), error_of(lambda: step(alone))


def test_blocks_of_another_thread(ranks: Any) -> None:
    """Before, a thread that split the next batch followed the evaluation to its mesh, and a forward ran there."""
    for length, in_evaluation, error, of_other_mesh in ranks(2, beside_another_thread):
        assert length == S // 2 and error <= 1e-12
        assert "while thread 'MainThread' is in a context_parallel_mesh block of this model" in in_evaluation
        assert f"this batch of {S} positions was split over 1" in of_other_mesh


@on_ranks
def compiled_handler() -> list[float]:
    """Errors of the handlers of a block and of a model in one graph, in the block."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    model, x = built(STYLES[0], family.cp(1)), torch.arange(16.0)[None]
    follows = ContextParallelHandler.of(model)
    with context_parallel_mesh(model, family.cp(2)) as handler:
        shares = [
            torch.compile(lambda x, made=made: made.combine(2 * x, 1), fullgraph=True, backend="eager")
            for made in (handler, follows)
        ]
        return [(share(handler.dispatch(x, 1)) - 2 * x).abs().max().item() for share in shares]


def test_handlers_compile_in_a_block(ranks: Any) -> None:
    assert max(max(found) for found in ranks(2, compiled_handler)) == 0


@on_ranks
def copied_in_a_block() -> dict[str, float]:
    """Errors of copies that were made in a block of one rank (the best weights of an evaluation, say), in it and
    behind it. In it another thread makes one that it runs by itself."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    model, found = built(STYLES[1], family.cp(2)), {}

    def step(name: str, made: Llama, samples: int) -> None:
        loss = share_of_loss(made, ContextParallelHandler.of(made), samples)
        loss.backward()
        found[name] = errors(loss, made, samples)

    with context_parallel_mesh(model, family.cp(1)):
        best = copy.deepcopy(model)
        step("inside", best, 2)
        again = copy.deepcopy(best)
        other = in_thread(lambda: copy.deepcopy(model))
        in_thread(lambda: step("another thread's", other, 1))
    handler = ContextParallelHandler(family.cp(2), next(iter(styled_modules(model).values())))
    for name, made in {"behind": best, "of a copy": again, "of another thread": other, "original": model}.items():
        loss = share_of_loss(made, handler, 1)
        loss.backward()
        found[name] = errors(loss, made, 1)
    return found


def test_copies_that_are_made_in_a_block_leave_its_mesh_with_it(ranks: Any) -> None:
    """Nothing took them off it: behind the block they ran on one rank over the shares of two, without a word."""
    for found in ranks(2, copied_in_a_block):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def cores_of_a_handler(reentrant: bool) -> tuple[str, float, float]:
    """The error of ``core_attn`` of the training's handler in an evaluation on one rank; the errors of a handler that
    follows the model, and of gradients of the former in a checkpoint whose backward runs in the evaluation."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    style = ContextParallel(2, 1, ulysses_degree=1, layout="head_tail")
    module = parallelize_module(modules.BNSD(), family.cp(2), style)
    handler, follows = ContextParallelHandler(family.cp(2), style), ContextParallelHandler.of(module)
    whole = torch.randn(1, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = plain_attention(*[whole] * 3, is_causal=True)
    (wanted,) = torch.autograd.grad(want[:, :, :-1].sin().sum(), whole)  # the last one is shifted out
    x = handler.dispatch(whole.detach(), 2).requires_grad_()

    def attend(of: ContextParallelHandler, y: Tensor) -> Tensor:
        out: Tensor = of.core_attn(modules.BNSD(), y, y, y)
        return out

    out = checkpoint(lambda y: handler.roll_tensor(attend(handler, y), 1, 2)[0], x, use_reentrant=reentrant)
    with context_parallel_mesh(module, family.cp(1)):
        refused = error_of(lambda: attend(handler, whole))
        alone = relative_error(attend(follows, whole).detach(), want.detach())
        out.sin().sum().backward()
    assert x.grad is not None
    return refused, alone, relative_error(x.grad, handler.dispatch(wanted, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_handler_calls_attention_on_the_mesh_of_its_model_only(ranks: Any, reentrant: bool) -> None:
    """It ran on the training's mesh, over whole sequences of the evaluation, without a word."""
    for refused, *errors in ranks(2, cores_of_a_handler, reentrant):
        assert "RuntimeError: the model of this handler's style runs on another cp mesh" in refused
        assert max(errors) <= 1e-10


class Shifts(nn.Module):
    """A token shift, a convolution, a recurrence or attention of its own, by functions that get a mesh."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.mesh_of, self.scale = what, None, nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x, mesh = x * self.scale, None if self.mesh_of is None else self.mesh_of()
        where: dict[str, Any] = {"mesh": mesh, "layout": "head_tail"}
        if self.what == "windows":
            return F.pad(x, (0, 0, 1, 0))[:, :-1] if mesh is None else ops.windows(x, [1], **where)[:, :, 0]
        if self.what == "convolution":
            weight = x.new_ones(8, 2)
            inside = x.mT + F.pad(x, (0, 0, 1, 0))[:, :-1].mT
            return inside.mT if mesh is None else ops.causal_conv1d(x.mT.contiguous(), weight, **where).mT
        if self.what == "recurrence":
            q = x.unflatten(2, (2, 4))
            decay = -q.square().mean(-1)
            made = recur(q, q, q, decay, None, None) if mesh is None else ops.linear_recurrence(q, q, q, decay, **where)
            return made.flatten(2)
        q = x[:, None]
        causal = {"is_causal": True}
        return (
            F.scaled_dot_product_attention(q, q, q, **causal)
            if mesh is None
            else ops.attention(q, q, q, **causal, **where)
        )[:, 0]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


@on_ranks
def functions(what: str) -> dict[str, Any]:
    """The error of a model that calls a function with the mesh that its block has left, and the relative errors of
    outputs and gradients where it follows the block, recomputed behind it too, and in a block back to its own mesh."""
    home = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    family = split_cp_mesh(home)
    whole, found = nn.Sequential(Attends(), Shifts(what)), {}
    model: Any = copy.deepcopy(whole)
    style = ContextParallel(qkv_indices=None, ulysses_degree=1, layout="head_tail")
    parallelize_module(model, home, {"0": style})
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = whole(x)
    (wanted,) = torch.autograd.grad(want.square().sum(), [whole[1].scale])

    def error(run: Any, handler: ContextParallelHandler, block: ExitStack) -> float:
        out = run(handler.dispatch(x, 1))
        got = handler.combine(out.detach(), 1)
        size = handler.cp.size
        block.close()
        (gradient,) = torch.autograd.grad(out.square().sum(), [model[1].scale])
        total = gradient if size == 1 else sum_over_ranks(gradient)[0]
        return max(relative_error(got, want.detach()), relative_error(total, wanted))

    def blocks(*meshes: DeviceMesh) -> tuple[ContextParallelHandler, ExitStack]:
        stack, handler = ExitStack(), ContextParallelHandler.of(model)
        for mesh in meshes:
            handler = stack.enter_context(context_parallel_mesh(model, mesh))
        return handler, stack

    model[1].mesh_of = lambda: home
    found["home"] = error(model, *blocks())
    found["nested"] = error(model, *blocks(family.cp(1), home))
    with context_parallel_mesh(model, family.cp(1)):
        found["left"] = error_of(lambda: model(x))
        other = Shifts(what)
        other.mesh_of = lambda: home  # type: ignore[assignment]
        shares = ContextParallelHandler(home, "head_tail")
        out = other(shares.dispatch(x, 1))
        model_free = whole[1](x)
        found["another model"] = relative_error(shares.combine(out.detach(), 1), model_free.detach())
    model[1].mesh_of = lambda: ContextParallelHandler.of(model).mesh
    for again in (False, True):
        run = partial(checkpoint, model, use_reentrant=False) if again else model
        found[f"follows, {again}"] = error(run, *blocks(family.cp(1)))
        found[f"follows at home, {again}"] = error(run, *blocks())
    return found


@pytest.mark.parametrize("what", ["windows", "convolution", "recurrence", "attention"])
def test_functions_with_the_mesh_that_a_block_has_left_are_refused(ranks: Any, what: str) -> None:
    """They took each rank's whole sequence for a share, without a word."""
    for found in ranks(2, functions, what):
        text = found.pop("left")
        assert "mesh=cp mesh of 2 ranks" in text and "have left, for the cp mesh of 1 ranks" in text, text
        assert max(found.values()) <= 1e-10, found
