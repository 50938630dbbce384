"""Batches that do not fit what runs: split in another layout or for another mesh, not split at all, not attended."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, split_cp_mesh
from hyper_cp.ops import attention, causal_conv1d
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks

STYLES: dict[str, dict[str, Any]] = {
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "ulysses": {"ulysses_degree": None},
}
LENGTH = 16


def model_and_batch(style: ContextParallel, handler: ContextParallelHandler) -> tuple[nn.Module, Any]:
    """A styled module that is given q, k, v, and a batch of them."""
    module = parallelize_module(modules.BNSD(True), handler.mesh, style)
    x = torch.randn(1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(1))
    batch = handler.get_batch_on_this_cp_rank({"x": x, "labels": torch.zeros(1, LENGTH).long()}, {"x": 2})
    return module, batch


@on_ranks
def other_layout(way: str, kind: str, batch_layout: str) -> None:
    style = ContextParallel(2, 1, **STYLES[kind], layout="contiguous")
    handler = ContextParallelHandler(cp_mesh(), batch_layout)
    module, batch = model_and_batch(style, handler)
    x = batch["x"]
    with handler.documents(batch if way != "table" else [0, 5, LENGTH]):
        if way == "function":
            attention(x, x, x, mesh=handler.mesh, is_causal=True)
        elif way == "compiled":
            torch.compile(module, backend="eager")(x, x, x)
        elif way == "convolution":
            causal_conv1d(x.flatten(0, 1).mT[:1], torch.ones(4, 2), mesh=handler.mesh)
        else:
            module(x, x, x)


@pytest.mark.parametrize("way", ["module", "table", "function", "compiled", "convolution"])
def test_a_handler_of_another_layout_than_the_model_is_refused(ranks: Any, way: str) -> None:
    for kind in ("ring", "ulysses") if way in ("module", "table") else ("ring",):
        words = "layout='contiguous', and the handler of this batch splits it as 'head_tail'"
        ranks.raises(2, "ValueError", words, other_layout, way, kind, "head_tail", timeout=100)
        ranks(2, other_layout, way, kind, "contiguous", timeout=100)


@on_ranks
def block_of_another_handler() -> dict[str, str]:
    """Errors of blocks whose handler has another layout, or other ranks, than that which has split the batch."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    style = ContextParallel(2, 1, **STYLES["ring"], layout="contiguous")
    handler = ContextParallelHandler(world["cp"], style)
    module, batch = model_and_batch(style, handler)

    def run(given: Any, block: ContextParallelHandler = handler) -> None:
        with block.documents(given):
            module(batch["x"], batch["x"], batch["x"])

    def split_by(mesh: Any, layout: str) -> Any:
        return ContextParallelHandler(mesh, layout).get_batch_on_this_cp_rank({"x": torch.zeros(1, LENGTH)})

    run(batch)
    run(copy.copy(batch), ContextParallelHandler(world["cp"], "contiguous"))
    words = "splits with layout='contiguous' over ranks"
    return errors_of(
        {
            f"this batch was split with layout='head_tail' over ranks .*{words}": lambda: run(
                split_by(world["cp"], "head_tail")
            ),
            rf"this batch was split with layout='contiguous' over ranks \[., .\], and .*{words}": lambda: run(
                split_by(world["dp"], "contiguous")
            ),
        }
    )


def test_the_block_of_another_handler_than_that_of_the_batch_is_refused(ranks: Any) -> None:
    check_errors(ranks(4, block_of_another_handler))


@on_ranks
def recomputed_in_a_later_block(use_reentrant: bool) -> None:
    """A module in a checkpoint, whose backward runs in the block of a batch of another layout."""
    handler, other = (ContextParallelHandler(cp_mesh(), layout) for layout in ("head_tail", "contiguous"))
    style = ContextParallel(2, 1, **STYLES["ring"], layout="head_tail")
    (module, batch), (_, later) = model_and_batch(style, handler), model_and_batch(style, other)
    x = batch["x"].requires_grad_()
    with handler.documents(batch):
        loss = checkpoint(module, x, x, x, use_reentrant=use_reentrant).sum()
    with other.documents(later):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_belongs_to_the_batch_of_its_forward(ranks: Any, use_reentrant: bool) -> None:
    ranks(2, recomputed_in_a_later_block, use_reentrant)


@on_ranks
def other_mesh(split_by: str) -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    style = ContextParallel(2, 1, 1)
    flat = cp_mesh()
    handler = ContextParallelHandler(flat if split_by == "all" else world["cp"], style)
    module, batch = model_and_batch(style, ContextParallelHandler(flat, style))
    batch = model_and_batch(style, handler)[1]
    with handler.documents(batch):
        module(batch["x"], batch["x"], batch["x"])


def test_a_handler_of_another_mesh_than_the_model_is_refused(ranks: Any) -> None:
    ranks.raises(4, "ValueError", "over 4 ranks, and this batch of 16 positions was split over 2", other_mesh, "half")
    ranks(4, other_mesh, "all")


@on_ranks
def reference_of_another_mesh() -> list[int]:
    """Warnings of a model that has stayed on its mesh, where shares of this length are known, in two blocks of a batch
    of another mesh."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    style, found = ContextParallel(2, 1, 1), []
    module, own = model_and_batch(style, ContextParallelHandler(cp_mesh(), style))
    handler = ContextParallelHandler(world["cp"], style)
    batch = handler.get_batch_on_this_cp_rank({"x": own["x"].repeat(1, 1, 2, 1)}, {"x": 2})
    assert batch["x"].shape == own["x"].shape
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, handler.documents(batch):
            warnings.simplefilter("always")
            module(batch["x"], batch["x"], batch["x"])
        found.append(sum("let all models that get them (a reference" in str(w.message) for w in caught))
    return found


def test_a_reference_on_another_mesh_than_the_batch_is_warned_of(ranks: Any) -> None:
    """It was refused where its mesh knew no share of that length, and else took the tokens for others."""
    assert ranks(4, reference_of_another_mesh) == [[1, 0]] * 4


class Projected(nn.Module):
    """Attention of two heads over the hidden states that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


@on_ranks
def on_one_rank() -> dict[str, str]:
    """Errors of models on a mesh of one rank that get the share of a batch of two."""
    family = split_cp_mesh(cp_mesh())
    inside = ContextParallel(2, 1, ulysses_degree=1, qkv_indices=None, kv_exchange="ring")
    handler, alone = ContextParallelHandler(family.cp(2), inside), ContextParallelHandler(family.cp(1), inside)
    projected = parallelize_module(Projected(), family.cp(1), inside)
    between = parallelize_module(modules.BNSD(True), family.cp(1), ContextParallel(2, 1, 1))
    x = torch.randn(1, LENGTH, 8)
    batch = handler.get_batch_on_this_cp_rank({"x": x})

    def run(block: ContextParallelHandler, given: Any, module: nn.Module, *tensors: Tensor) -> None:
        with block.documents(given):
            module(*tensors)

    q = batch["x"].unflatten(2, (2, -1)).transpose(1, 2)
    run(alone, alone.get_batch_on_this_cp_rank({"x": x}), projected, x)
    run(handler, batch, projected, x)  # the whole sequence, beside the model of that batch
    words = "attention runs over 1 rank, and this batch of 16 positions was split over 2"
    return errors_of(
        {
            f"ValueError: {words}": lambda: run(handler, batch, projected, batch["x"]),
            f"ValueError: {words}.*model": lambda: run(handler, batch, between, q, q, q),
            "this batch was split over 2 ranks, and the handler of this block is that of a mesh of one": lambda: run(
                alone, batch, projected, batch["x"]
            ),
        }
    )


def test_a_share_is_no_batch_of_a_mesh_of_one_rank(ranks: Any) -> None:
    check_errors(ranks(2, on_one_rank))


@on_ranks
def whole_batch(kind: str, whole: bool) -> None:
    style = ContextParallel(2, 1, **STYLES[kind])
    handler = ContextParallelHandler(cp_mesh(), style)
    module, batch = model_and_batch(style, handler)
    x = torch.zeros(1, 2, LENGTH, 4) if whole else batch["x"]
    with handler.documents(batch):
        module(x, x, x)


@pytest.mark.parametrize("kind", list(STYLES))
def test_a_whole_batch_while_its_share_is_open_is_refused(ranks: Any, kind: str) -> None:
    ranks.raises(2, "ValueError", "all 16 positions of this batch on each rank, and not the 8", whole_batch, kind, True)
    ranks(2, whole_batch, kind, False)


def unwarned() -> tuple[ContextParallelHandler, nn.Module, Any]:
    """A handler of a mesh that has warned of nothing yet, a module of its style, and a batch."""
    style = ContextParallel(2, 1, **STYLES["ring"])
    handler = ContextParallelHandler(cp_mesh(), style)
    handler.cp.batch.__init__()  # type: ignore[misc]
    return handler, *model_and_batch(style, handler)


@on_ranks
def whole_batch_or_other_share() -> list[str]:
    """Warnings of a call with as many positions as the whole batch, and as the share of a batch before it."""
    handler, module, batch = unwarned()
    handler.dispatch(torch.zeros(1, 2 * LENGTH), 1)
    x = torch.zeros(1, 2, LENGTH, 4)
    with warnings.catch_warnings(record=True) as found, handler.documents(batch):
        warnings.simplefilter("always")
        module(batch["x"], batch["x"], batch["x"])
        assert not found
        module(x, x, x)
    return [str(warning.message) for warning in found]


def test_a_whole_batch_that_may_be_another_share_is_warned_of(ranks: Any) -> None:
    for (found,) in ranks(2, whole_batch_or_other_share):
        assert "may have got all 16 positions of this batch on each rank, and not the 8 of its share" in found


@on_ranks
def recomputed_in_another_block() -> list[str]:
    """Warnings of an encoder whose share is as long as the whole target, recomputed in the target's block."""
    handler, module, target = unwarned()
    source = handler.get_batch_on_this_cp_rank(
        {"x": torch.ones(1, 2, 2 * LENGTH, 4), "cu_seqlens": [0, 5, 32]}, {"x": 2}
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with handler.documents(source):
            out = checkpoint(module, *[source["x"].requires_grad_()] * 3, use_reentrant=False)
        with handler.documents(target):
            module(*[target["x"]] * 3)
            out.sum().backward()
    return [str(warning.message) for warning in found]


def test_a_recompute_in_the_block_of_another_batch_is_not_warned_of(ranks: Any) -> None:
    assert ranks(2, recomputed_in_another_block) == [[], []]


@on_ranks
def padded_whole(length: int, function: bool) -> None:
    """Tokens before padding, or after it, of a batch of 15."""
    style = ContextParallel(2, 1, 1, layout="head_tail")
    handler = ContextParallelHandler(cp_mesh(), style)
    module = parallelize_module(modules.BNSD(True), handler.mesh, style)
    batch, x = handler.get_batch_on_this_cp_rank({"labels": torch.zeros(1, 15).long()}), torch.zeros(1, 2, length, 4)
    with handler.documents(batch):
        attention(x, x, x, mesh=handler.mesh, is_causal=True, layout="head_tail") if function else module(x, x, x)


@pytest.mark.parametrize("function", [True, False])
def test_a_whole_batch_with_padding_is_refused_before_its_documents_are(ranks: Any, function: bool) -> None:
    for length in (15, 16):
        words = f"attention has got all {length} positions of this batch on each rank, and not the 8"
        ranks.raises(2, "ValueError", words, padded_whole, length, function)
    ranks(2, padded_whole, 8, function)


@on_ranks
def loss_of(way: str) -> None:
    style = ContextParallel(2, 1, None)
    handler = ContextParallelHandler(cp_mesh(), style)
    module, batch = model_and_batch(style, handler)

    def loss(elsewhere: bool = False) -> Tensor:
        return handler.mean_loss(batch["x"][:, :, :, 0].mean(1), batch["labels"], elsewhere=elsewhere)

    def run(model: nn.Module) -> None:
        model(batch["x"], batch["x"], batch["x"])

    if way == "never":
        loss()
    elif way == "not in this block":
        run(module)
        with handler.documents(batch):
            loss()
    elif way == "elsewhere":
        loss(elsewhere=True)
    elif way == "data only":
        ContextParallelHandler(cp_mesh(), "contiguous").mean_loss(torch.zeros(1, 8), batch["labels"])
    else:
        with handler.documents(batch):
            run(torch.compile(module, backend="aot_eager") if way == "compiled" else module)
            loss()
        loss()


def test_a_loss_without_attention_is_refused(ranks: Any) -> None:
    for way in ("never", "not in this block"):
        ranks.raises(2, "RuntimeError", "on which no attention has run", loss_of, way)
    for way in ("elsewhere", "data only", "right", "compiled"):
        ranks(2, loss_of, way, timeout=100)


class Step(NamedTuple):
    """A batch of a user."""

    x: Tensor
    rewards: Tensor


Marked = namedtuple("Marked", "x tokens")


@on_ranks
def kinds_of_batches() -> dict[str, str]:
    handler = ContextParallelHandler(cp_mesh(), "head_tail")
    x = torch.arange(30.0).view(2, 15)
    batch = handler.get_batch_on_this_cp_rank(Step(x, -x))
    (loaded,) = handler.loader([Step(x, -x)])
    for found in (batch, loaded, copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert isinstance(found, Step) and torch.equal(found.rewards, -found.x), found
        assert found.length == 15 and torch.equal(handler.combine(found.x, 1, length=found.length), x)
        with handler.documents(found):
            assert handler.mean_loss(found.x, mask=torch.ones_like(found.x), elsewhere=True).item() == x.mean()
    sparse, rows = {"x": x, "adjacency": torch.eye(15).to_sparse()}, torch.eye(16).to_sparse_csr()
    whole = handler.get_batch_on_this_cp_rank(dict(sparse), {"adjacency": None})
    assert whole["adjacency"] is sparse["adjacency"]
    return errors_of(
        {
            r"fields \['tokens'\].*Rename the fields": lambda: handler.get_batch_on_this_cp_rank(Marked(x, x)),
            "NotImplementedError: batch entry 'adjacency' has layout torch.sparse_coo.*seq_dims={...: None}": (
                lambda: handler.get_batch_on_this_cp_rank(sparse)
            ),
            "NotImplementedError: tensor has layout torch.sparse_csr": lambda: handler.dispatch(rows, 0),
        }
    )


def test_named_tuples_keep_their_fields_and_sparse_entries_are_refused(ranks: Any) -> None:
    check_errors(ranks(2, kinds_of_batches))


@on_ranks
def joined_samples(name: str, rows: bool) -> dict[str, str]:
    """The error of a batch whose samples were split one by one, under this name and as one row each, maybe; a sample
    whose tokens are repeated is none."""
    handler = ContextParallelHandler(cp_mesh(), "contiguous")
    ids, dims = torch.arange(12), {name: int(rows)}
    ends = [0, 4, 12], [0, 9, 12]
    tokens = [(ids + n)[None] if rows else ids + n for n in range(2)]
    tokens = [x[..., None] / 7.0 if name == "inputs_embeds" else x for x in tokens]
    given = ({name: x, "cu_seqlens": end} for x, end in zip(tokens, ends, strict=True))
    samples = [handler.get_batch_on_this_cp_rank(x, dims) for x in given]

    def enter(batch: Any) -> None:
        with handler.documents(batch):
            pass

    repeated, axes = copy.copy(samples[0]), copy.copy(samples[0])
    for entry, x in repeated.items():
        repeated[entry] = x.repeat(3, *[1] * (x.ndim - rows))
    axes["position_ids"] = axes["position_ids"].expand(3, 1, -1)
    enter(repeated)
    enter(axes)
    features = torch.randn(1, 12, 6, generator=torch.Generator().manual_seed(0))  # as many as positions of a rank
    enter(handler.get_batch_on_this_cp_rank({"tokens": features}, {"tokens": 1}))
    codebooks = {"input_ids": torch.arange(36).view(1, 3, 12), "cu_seqlens": [0, 4, 12]}
    enter(handler.get_batch_on_this_cp_rank(codebooks, {"input_ids": 2}))
    joined = torch.utils.data.default_collate(samples)
    kept = copy.copy(samples[0])
    kept[name] = joined[name]
    words = "this batch of 12 positions has several rows, and was one when it was split"
    alone = [words not in error_of(lambda: enter(kept))] if name == "input_ids" else []  # tokens alone
    assert not any(alone)
    return errors_of({words: lambda: enter(joined)})


@pytest.mark.parametrize(
    ("name", "rows"), [("input_ids", False), ("input_ids", True), ("x", False), ("inputs_embeds", True)]
)
def test_samples_that_are_joined_after_the_split_are_refused(ranks: Any, name: str, rows: bool) -> None:
    """The joined batch had the documents of the first sample."""
    check_errors(ranks(2, joined_samples, name, rows))
