"""The models of the ranks are compared once, before anything travels: styled modules, their order, and weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh
from hyper_cp.mesh import comm
from tests.harness import modules
from tests.harness.attention_case import FP64, cp_mesh
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks
from tests.harness.styled import RING1, local


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, dtype=torch.float64)
        self.inner = modules.BNSD()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.proj(x), x, x)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = layer(x)
        return x


def styled(model: nn.Module, mesh: DeviceMesh | None = None, **style: Any) -> nn.Module:
    return parallelize_module(
        model, mesh or cp_mesh(), {"layers.*.inner": ContextParallel(**{**RING1, "kv_exchange": "ring", **style})}
    )


def outcome(model: nn.Module) -> tuple[str, int, list[str]]:
    """The error of a forward ("" if there is none), its comparisons, and everything else that travelled."""
    error = ""
    with comm.record_traffic() as log:
        try:
            model(local()[0][0])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    operations = [operation for operation, _ in log.entries]
    return error, operations.count("agreement"), [operation for operation in operations if operation != "agreement"]


@on_ranks
def other_models() -> dict[str, Any]:
    rank = dist.get_rank()
    found = {}
    found["number"] = outcome(styled(Model(2 + rank)))
    torch.manual_seed(0)
    model = styled(Model())
    model.backwards = rank == 1
    found["order"] = outcome(model)
    found["style"] = outcome(styled(Model(), window=(3 + rank, None)))
    found["qkv"] = outcome(styled(Model(), window=(5, None), qkv_indices=((0, 1, 2), (0, 2, 1))[rank]))
    torch.manual_seed(rank)
    found["weights"] = outcome(styled(Model(), window=(6, None)))
    torch.manual_seed(0)
    found["right"] = outcome(styled(Model()))
    return found


def test_other_models_are_refused_on_every_rank_before_communication(ranks: Any) -> None:
    start = "ValueError: module BNSD: the ranks of the cp mesh of 2 ranks (ring 2 x ulysses 1) call attention with "
    words = {
        "number": "different styled modules: layers.2.inner (rank 0: none; rank 1: ContextParallel(seq_dim=2",
        "order": "different module: rank 0: layers.0.inner; rank 1: layers.1.inner. Apply the same styles",
        "style": "different styled modules: layers.0.inner (rank 0: ContextParallel(",
        "qkv": "different styled modules: layers.0.inner (rank 0: ContextParallel(",
        "weights": "different weights: ranks [1] have others (or none) than rank 0, first in parameter "
        "'layers.0.proj.weight'. The ranks of a cp mesh hold the same weights: seed them alike",
    }
    for found in ranks(2, other_models):
        error, _, travelled = found.pop("right")
        assert error == "" and travelled
        for kind, (error, _, travelled) in found.items():
            assert error.startswith(start + words[kind]), (kind, error)
            assert not travelled


@on_ranks
def comparisons() -> list[Any]:
    """Comparisons of: the first forward, the second, that of a copy and of an equal model, on another mesh, again."""
    model, other = styled(Model()), cp_mesh()
    counts = [outcome(model)[1], outcome(model)[1], outcome(copy.deepcopy(model))[1]]
    torch.manual_seed(5)
    equal = styled(Model())
    counts.append(outcome(equal)[1])
    for _ in range(2):
        with context_parallel_mesh(model, other, ulysses_degree=2):
            counts.append(outcome(model)[1])
    return counts


def test_a_model_is_compared_once_per_mesh(ranks: Any) -> None:
    # Styled modules, weights, two modules, the signatures of module and attention, no documents. On the other view of
    # the mesh only the signatures are new. The weights of a copy may be others, and so may the order in another plan.
    assert ranks(2, comparisons) == [[7, 0, 1, 3, 2, 0]] * 2


@on_ranks
def second_models() -> list[str]:
    """Models after a first one, which were made by the same code: with other weights, or called in another order."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    first = styled(Model())
    found.append(outcome(first)[0])
    copied = copy.deepcopy(first)
    with torch.no_grad():
        copied.layers[1].proj.weight.add_(rank)  # type: ignore[union-attr,operator]
    found.append(outcome(copied)[0])
    torch.manual_seed(rank)
    found.append(outcome(styled(Model()))[0])
    torch.manual_seed(0)
    other = styled(Model())
    other.backwards = rank == 1
    return [*found, outcome(other)[0], outcome(first)[0]]


def test_every_model_of_a_mesh_is_compared(ranks: Any) -> None:
    for first, copied, weights, order, again in ranks(2, second_models):
        assert (first, again) == ("", "")
        assert "different weights: ranks [1] have others" in copied and "'layers.1.proj.weight'" in copied
        assert "different weights: ranks [1] have others" in weights
        assert "different module: rank 0: layers.0.inner; rank 1: layers.1.inner" in order


class Loop(nn.Module):
    """A model whose blocks are called by the code of its user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


@on_ranks
def loops(plans: str) -> str:
    model, mesh = Loop(), cp_mesh()
    style = {**RING1, "kv_exchange": "ring"}
    if plans == "one":
        styled(model)
    else:
        for layer in model.layers:
            parallelize_module(layer, mesh, {"inner": ContextParallel(**style)})
    x = local()[0][0]
    try:
        for layer in reversed(model.layers) if dist.get_rank() else model.layers:
            x = layer(x)
    except ValueError as error:
        return str(error)
    return ""


def test_the_order_of_blocks_that_the_user_calls_is_compared(ranks: Any) -> None:
    for error in ranks(2, loops, "one"):
        assert "different module: rank 0: layers.0.inner; rank 1: layers.1.inner" in error
    for error in ranks(2, loops, "one for each block"):
        assert "different weights: ranks [1] have others" in error


@on_ranks
def weights_that_differ_on_purpose() -> list[str]:
    rank, errors = dist.get_rank(), []
    for allow in ((), ("layers.1",), ("layers.*.proj",), ("Linear",), ("Model",)):
        model = Model()
        with torch.no_grad():
            model.layers[1].proj.weight.add_(rank)  # type: ignore[union-attr,operator]
        errors.append(outcome(styled(model, allow=allow))[0])
    # Sharded over the cp ranks, as FSDP does: not the same on purpose. Replicated: the same.
    for placement in (Replicate(), Shard(0)):
        model = Model()
        mine = distribute_tensor(torch.arange(8.0), cp_mesh(), [placement])
        mine.to_local().add_(rank)
        model.layers[1].table = nn.Parameter(mine)
        errors.append(outcome(styled(model))[0])
    return errors


def test_weights_that_the_user_exempts_or_that_are_sharded(ranks: Any) -> None:
    for none, *allowed, replicated, sharded in ranks(2, weights_that_differ_on_purpose):
        assert "first in parameter 'layers.1.proj.weight'" in none
        assert allowed == [""] * 4
        assert sharded == "" and "first in parameter 'layers.1.table'" in replicated


@on_ranks
def other_batches() -> list[str]:
    """Rank 1 splits another batch, twice; then both the same. Others after that are not compared."""
    style = ContextParallel(**{**RING1, "kv_exchange": "ring"})
    handler = ContextParallelHandler(cp_mesh(), style)
    model = parallelize_module(Model(), cp_mesh(), {"layers.*.inner": style})
    handler.dispatch(torch.arange(8.0)[None] + dist.get_rank())  # no integers
    handler.get_batch_on_this_cp_rank({"tokens": torch.arange(16)[None] * (3 + dist.get_rank())})
    errors = [outcome(model)[0]]
    for tokens in (3 + dist.get_rank(), 3, 3 + dist.get_rank()):
        handler.get_batch_on_this_cp_rank({"tokens": torch.arange(16)[None] * tokens})
        if dist.get_rank() == 1 and tokens == 3:  # splits one by itself, to print it
            handler.dispatch(torch.arange(16)[None])
        errors.append(outcome(model)[0])
    second = ContextParallel(**{**RING1, "kv_exchange": "ring"})
    handler = ContextParallelHandler(cp_mesh(), second)
    model = parallelize_module(Model(), cp_mesh(), {"layers.*.inner": second})
    handler.get_batch_on_this_cp_rank({"tokens": torch.arange(16)[None] * (3 + dist.get_rank())})
    errors += [outcome(model)[0], outcome(model)[0]]
    with torch.no_grad():  # an evaluation, whose sampler is another one
        if dist.get_rank() == 0:  # prints a share; nothing is compared for it
            handler.dispatch(torch.arange(16)[None])
        with torch.enable_grad():
            errors.append(outcome(model)[0])
        handler.get_batch_on_this_cp_rank({"tokens": torch.arange(16)[None] * (3 + dist.get_rank())})
        errors.append(outcome(model)[0])
    return errors


def test_the_first_batches_are_compared(ranks: Any) -> None:
    for first, again, *once, of_second_model, other, printed, of_evaluation in ranks(2, other_batches):
        for error in (first, again, of_second_model, of_evaluation):
            assert "different batch: ranks [1] have others (or none) than rank 0. The ranks of a cp mesh" in error
        assert (*once, other, printed) == ("",) * 4


@on_ranks
def partitioned() -> tuple[str, int, list[str]]:
    model = styled(Model())
    model.layers[1].proj.weight.ds_id = 3  # what DeepSpeed gives a parameter that it has partitioned
    return outcome(model)


def test_zero_3_is_refused_before_anything_travels(ranks: Any) -> None:
    for error, _, travelled in ranks(2, partitioned):
        assert "NotImplementedError: parameter 'layers.1.proj.weight' of Model is partitioned by DeepSpeed" in error
        assert "fully_shard" in error and not travelled


def save_all_but_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if "mm" in str(op) else CheckpointPolicy.PREFER_SAVE


class Embeds(nn.Module):
    """A model that looks up its tokens; positions among them would be read in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        x = local()[0][0]
        self.heads, width = x.shape[1], x.shape[1] * x.shape[3]
        self.model, self.table = Model(), nn.Embedding(16, width, dtype=x.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(self.table(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2))
        return found


@on_ranks
def first_steps(embeds: bool) -> float:
    """The largest error of a gradient in the first step under a selective checkpoint, beside one without."""
    torch.manual_seed(0)
    model, x = (Embeds(), torch.arange(16).view(2, 8)) if embeds else (Model(), local()[0][0])
    plain, saved = copy.deepcopy(model), model
    for made in (plain, saved):
        plan = f"{'model.' * embeds}layers.*.inner"
        parallelize_module(made, cp_mesh(), {plan: ContextParallel(**{**RING1, "kv_exchange": "ring"})})
    plain(x).square().sum().backward()
    contexts = partial(create_selective_checkpoint_contexts, save_all_but_products)
    checkpoint(saved, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    pairs = zip(saved.parameters(), plain.parameters(), strict=True)
    return max(relative_error(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def test_a_selective_checkpoint_does_not_see_the_comparison(ranks: Any) -> None:
    """It counts operators: its recompute, which compares nothing, would take the results of others."""
    for embeds in (False, True):
        assert max(ranks(2, first_steps, embeds)) < FP64
