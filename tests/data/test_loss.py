"""mean_loss: the loss and the parameter gradients of one device, under DDP, FSDP2 and plain sums."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel
from hyper_cp.mesh import comm
from tests.harness.labelled import LENGTH, ROWS, VOCABULARY, data
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Small(nn.Module):
    """One attention layer between an embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, 8), Inner()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, is_causal=True)


def small() -> Small:
    torch.manual_seed(1)
    return Small().double()


def reference(weights: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The loss and gradients of one device, for the whole batch."""
    model, (ids, labels) = small(), data()
    model.inner = Plain()  # type: ignore[assignment]
    logits = model(ids).flatten(0, 1)
    if weights is None:
        loss = F.cross_entropy(logits, labels.flatten())
    else:
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / (weights * (labels != -100)).sum()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


class Pooled(nn.Module):
    """A head on the mean of all tokens, which ``gather`` makes out of this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = small(), nn.Linear(VOCABULARY, 5).double()

    def forward(self, ids: Tensor, gather: Any) -> Tensor:
        return self.head(gather(self.body(ids)).mean(1))


def setup(wrapper: str, layout: str, pooled: bool = False) -> tuple[DeviceMesh, ContextParallelHandler, nn.Module]:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    style = ContextParallel(2, 1, 1, layout=layout)
    model = Pooled() if pooled else small()
    parallelize_module(model.body.inner if pooled else model.inner, world["cp"], style)  # type: ignore[union-attr]
    if wrapper == "ddp":
        return world, ContextParallelHandler(world["cp"], style), DistributedDataParallel(model)
    if wrapper == "fsdp":
        flat = world._flatten("dp_cp")
        return flat, ContextParallelHandler(world["cp"], style), fully_shard(model, mesh=flat)
    return world, ContextParallelHandler(world["cp"], style), model  # type: ignore[return-value]


def gradients(model: nn.Module) -> list[Tensor]:
    grads = (p.grad for p in model.parameters())
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # type: ignore[union-attr,misc]


@on_ranks
def train(wrapper: str, layout: str, form: str) -> tuple[float, float, float]:
    """The reported loss, its error, and the worst error of gradients, on one rank of 2 dp x 2 cp."""
    mesh, handler, model = setup(wrapper, layout)
    ids, labels = (x.chunk(2)[dist.get_rank() // 2] for x in data())
    ids, labels = handler.dispatch(ids), handler.dispatch(labels)
    logits, weights = model(ids), None
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    how = "sum" if wrapper == "none" else "mean"
    if form == "logits":
        loss = handler.mean_loss(logits, labels, mesh=mesh, gradients=how)
    elif form == "losses":
        loss = handler.mean_loss(losses, labels, mesh=mesh, gradients=how)
    elif form == "mask":
        loss = handler.mean_loss(losses, mask=labels != -100, mesh=mesh, gradients=how)
    else:
        weights = torch.linspace(0, 2, LENGTH, dtype=torch.float64).expand(ROWS, -1)
        mine = handler.dispatch(weights.chunk(2)[0])
        loss = handler.mean_loss(logits, labels, mask=mine, mesh=mesh, gradients=how)
    loss.backward()
    found = gradients(model)
    if wrapper == "none":
        for g in found:
            dist.all_reduce(g)
    want, grads = reference(weights)
    worst = max(relative_error(a, b) for a, b in zip(found, grads, strict=True))
    return loss.item(), abs(loss.item() - want.item()), worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapper,layout,form",
    [
        ("ddp", "head_tail", "logits"),
        ("ddp", "contiguous", "losses"),
        ("fsdp", "contiguous", "mask"),
        ("fsdp", "head_tail", "logits"),
        ("none", "head_tail", "weights"),
    ],
)
def test_gradients_are_those_of_one_device(ranks: Any, wrapper: str, layout: str, form: str) -> None:
    results = ranks(4, train, wrapper, layout, form)
    assert len({value for value, _, _ in results}) == 1  # the same bits on every rank
    for _, loss, worst in results:
        assert loss <= 1e-12 and worst <= 1e-10


@on_ranks
def train_pooled(wrapper: str, form: str) -> float:
    """The worst error of gradients of a body and a pooled head, on one rank of 2 dp x 2 cp."""
    torch.manual_seed(3)
    mesh, handler, model = setup(wrapper, "head_tail", pooled=True)
    ids, classes = data()[0], torch.tensor([0, 4, 2, 2])
    half = dist.get_rank() // 2
    how = {"ddp": "mean", "fsdp": "mean", "none": "sum"}[wrapper]
    scores = model(handler.dispatch(ids.chunk(2)[half]), lambda x: handler.combine(x, 1, gradients=how))
    losses = F.cross_entropy(scores, classes.chunk(2)[half], reduction="none")
    if form == "mean_loss":
        handler.mean_loss(losses, mesh=mesh, gradients=how).backward()
    else:
        (losses.mean() / (4 if how == "sum" else 1)).backward()
    found = gradients(model)
    if wrapper == "none":
        for g in found:
            dist.all_reduce(g)
    torch.manual_seed(3)
    whole = Pooled()
    whole.body.inner = Plain()  # type: ignore[assignment]
    loss = F.cross_entropy(whole(ids, lambda x: x), classes)
    grads = torch.autograd.grad(loss, list(whole.parameters()))
    return max(relative_error(a, b) for a, b in zip(found, grads, strict=True))


@pytest.mark.parametrize("wrapper,form", [("ddp", "mean_loss"), ("ddp", "plain"), ("fsdp", "plain")])
def test_pooled_heads_under_averages(ranks: Any, wrapper: str, form: str) -> None:
    assert max(ranks(4, train_pooled, wrapper, form)) <= 1e-10


@pytest.mark.parametrize("form", ["mean_loss", "divided"])
def test_pooled_heads_under_sums(ranks: Any, form: str) -> None:
    assert max(ranks(4, train_pooled, "none", form)) <= 1e-10


@on_ranks
def naive(kind: str) -> tuple[float, float]:
    """Other losses under DDP: the factor of their gradients, and the distance from that multiple of the right ones."""
    _, handler, model = setup("ddp", "contiguous")
    ids, labels = (x.chunk(2)[dist.get_rank() // 2] for x in data())
    ids, labels = handler.dispatch(ids), handler.dispatch(labels)
    logits, count = model(ids).flatten(0, 1), (data()[1] != -100).sum()
    if kind == "sum":
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
    else:
        valid = (labels != -100).sum().clamp(min=1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / valid
    loss.backward()
    found = torch.cat([g.flatten() for g in gradients(model)])
    want = torch.cat([g.flatten() for g in reference()[1]])
    factor = (found @ want) / (want @ want)
    return factor.item(), relative_error(found, factor * want)


def test_other_losses_have_wrong_gradients(ranks: Any) -> None:
    for factor, rest in ranks(4, naive, "sum"):
        assert abs(factor - 0.25) <= 1e-10 and rest <= 1e-10  # DDP has divided by 2 x 2 ranks
    for factor, rest in ranks(4, naive, "mean of means"):
        assert abs(factor - 1) > 0.05 and rest > 0.05  # not even a multiple


@on_ranks
def nothing_counts() -> tuple[float, float, int]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    losses = torch.full((2, 4), torch.inf, requires_grad=True)
    with comm.record_traffic() as log:
        loss = handler.mean_loss(losses, torch.full((2, 4), -100))
    loss.backward()
    half = torch.full((2, 4000), 0.3, dtype=torch.bfloat16)
    assert handler.mean_loss(half).item() == pytest.approx(half[0, 0].item(), rel=1e-6)  # added up in fp32
    return loss.item(), losses.grad.abs().max().item(), len(log.entries)  # type: ignore[union-attr]


@on_ranks
def half_masks() -> list[float]:
    """Mean losses over many tokens with masks in half precision, and counts of rolled masks."""
    handler, found = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous"), []
    losses = torch.ones(1, 70_000)
    for dtype in (torch.bfloat16, torch.float16):
        mask = torch.ones(1, 70_000, dtype=dtype)
        labels = torch.zeros(1, 70_000, dtype=torch.int64)
        found += [handler.mean_loss(losses, mask=mask).item(), handler.mean_loss(losses, labels, mask=mask).item()]
        found.append(handler.roll_tensor(mask, -1)[1].item() + dist.get_rank())  # the last token has no next one
    return found


def test_masks_in_half_precision_count_all_tokens(ranks: Any) -> None:
    assert ranks(2, half_masks) == [[1.0, 1.0, 70_000.0] * 2] * 2


@on_ranks
def shifted_late(what: str) -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    batch = handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(3, 16, dtype=torch.int64)})
    labels = batch["input_ids"]
    logits = torch.zeros(*labels.shape, VOCABULARY)
    if what == "late":
        handler.mean_loss(logits[:, :-1], labels[:, 1:])
    elif what == "losses":
        handler.mean_loss(torch.zeros(labels.shape)[:, 1:])
    else:  # shares, pooled losses, losses of some positions, and flattened ones
        handler.mean_loss(logits, labels)
        handler.mean_loss(torch.zeros(7))
        handler.mean_loss(torch.zeros(3, 5))
        handler.mean_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        alone = ContextParallelHandler(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"], "contiguous")
        alone.dispatch(labels)
        alone.mean_loss(logits[:, :-1], labels[:, 1:])  # on one rank the share is the sequence


def test_labels_that_are_shifted_after_sharding_are_refused(ranks: Any) -> None:
    words = r"shape \(3, 7\) have 7 positions, but this rank's share of the sequence has 8.*shift_labels=True"
    for what in ("late", "losses"):
        ranks.raises(2, "ValueError", words, shifted_late, what)
    ranks(2, shifted_late, "others")


@on_ranks
def cut_by_several(what: str, left: int = 10) -> None:
    """Tokens after the next one as labels, of a share of 12 positions; ``left``: the positions that remain."""
    handler, rows = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous"), 1 if "one row" in what else 3
    batch = handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(rows, 24, dtype=torch.int64)})
    ids, head = batch["input_ids"], torch.zeros(VOCABULARY, 4)
    labels, logits = ids[:, -left:], torch.zeros(*ids.shape, VOCABULARY)[:, :left]
    losses = logits.sum(2)
    with handler.documents(batch) if what.endswith("block") else nullcontext():
        if what.startswith("labels"):
            handler.mean_loss(logits, labels, elsewhere=True)
        elif what.startswith("losses"):
            handler.mean_loss(losses, mask=torch.ones_like(losses))
        elif what == "log_probs":
            handler.mean_loss(handler.log_probs(torch.zeros(3, left, 4), labels, head=head), elsewhere=True)
        elif what.startswith("pool"):
            handler.pool(losses, mask=torch.ones_like(losses))
        elif what == "combine":
            handler.combine(logits, 1)
        else:  # fewer positions, which were selected, other rows, the share of another batch, a sequence of its own
            handler.mean_loss(torch.zeros(3, 8))
            handler.mean_loss(torch.zeros(2, 10))
            handler.mean_loss(torch.zeros(3, 10 + handler.cp.rank * 2))  # columns without labels left out
            handler.mean_loss(torch.zeros(3, 9 + handler.cp.rank))
            handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(1, 24, dtype=torch.int64)})
            handler.mean_loss(torch.zeros(1, 10))
            handler.mean_loss(logits.flatten(0, 1), labels.flatten())
            handler.combine(torch.zeros(3, 10), 1, length=20)
            handler.combine(torch.zeros(12, 10), 0)
            handler.dispatch(torch.zeros(3, 20), 1)
            handler.pool(torch.zeros(3, 10))
            handler.combine(torch.zeros(3, 10), 1)
            handler.mean_loss(torch.zeros(3, 10))


@pytest.mark.parametrize("left", [9, 10])
def test_shares_that_lack_several_positions_are_refused(ranks: Any, left: int) -> None:
    words = rf"losses or labels of shape \(., {left}\) have {left} positions, but .* share .* has 12.*mtp_depth="
    for what in ("labels", "labels in a block", "labels of one row", "losses", "losses of one row", "log_probs"):
        ranks.raises(2, "ValueError", words, cut_by_several, what, left)
    for what, name in (("pool", "x"), ("pool in a block", "x"), ("combine", "tensor")):
        words = rf"{name} has shape \(3, {left}.*share of a batch of 3 rows has 12 positions.*combine\(x, 1\)"
        ranks.raises(2, "ValueError", words, cut_by_several, what, left)


def test_values_of_other_positions_than_a_share_are_none_that_lack_some(ranks: Any) -> None:
    ranks(2, cut_by_several, "others")


@on_ranks
def padding_counts() -> list[float]:
    """Losses of a batch of 7 positions, which are padded to 8: without labels, padding would count."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    whole = torch.arange(21.0).view(3, 7)
    batch = handler.get_batch_on_this_cp_rank(
        {"input_ids": whole.long(), "losses": whole, "shift_labels": whole.long()}
    )
    losses, labels = batch["losses"], batch["shift_labels"]
    for given in (losses, losses.flatten()):
        with pytest.raises(ValueError, match=r"without labels or mask, and this batch of 7 positions was padded to 8"):
            handler.mean_loss(given)
    found = [handler.mean_loss(losses, labels), handler.mean_loss(losses.flatten(), labels.flatten())]
    found += [handler.mean_loss(losses, mask=labels != -100), handler.mean_loss(whole.sum(1))]
    handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(3, 8)})
    return [x.item() for x in (*found, handler.mean_loss(torch.ones(3, 4)))]


@on_ranks
def padding_of_an_earlier_batch() -> tuple[float, float]:
    """The loader has split the next batch, which needs no padding, when the loss of this one is computed."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    first, second = (handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(3, n)}) for n in (7, 8))
    losses = torch.ones(3, 4)
    with handler.documents(first), pytest.raises(ValueError, match="this batch of 7 positions was padded to 8"):
        handler.mean_loss(losses, elsewhere=True)
    third = handler.get_batch_on_this_cp_rank({"input_ids": torch.zeros(3, 7)})
    with handler.documents(second):
        of_second = handler.mean_loss(losses * len(third), elsewhere=True).item()
    whole = torch.arange(24.0).view(3, 8)  # a context_parallel block splits evenly, whatever the last batch had
    with context_parallel(handler.mesh, buffers=[whole], buffer_seq_dims=[1], layout="contiguous") as of_block:
        of_buffers = of_block.mean_loss(whole, elsewhere=True).item()
        with of_block.documents(first), pytest.raises(ValueError, match="this batch of 7 positions was padded to 8"):
            of_block.mean_loss(losses, elsewhere=True)
    return of_second, of_buffers


@on_ranks
def behind_many_lengths() -> list[float]:
    """Losses of a batch, in its block and behind it, when batches of many other lengths have been split."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    first, *others = (handler.get_batch_on_this_cp_rank({"x": torch.ones(2, n)}) for n in (16, *range(60, 16, -2)))
    with handler.documents(first):
        found = [handler.mean_loss(first["x"], elsewhere=True).item()]
    return [*found, handler.mean_loss(first["x"], elsewhere=True).item(), *(x["x"].mean().item() for x in others)]


def test_losses_behind_batches_of_many_lengths(ranks: Any) -> None:
    for found in ranks(2, behind_many_lengths):
        assert {*found} == {1.0}


@on_ranks
def split_elsewhere() -> list[float]:
    """Means behind the block of a batch that a data loader's worker has split: with its padding mask, and with labels
    of another name, which are padded with a class."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    whole = {"losses": torch.arange(14.0).view(2, 7), "classes": torch.zeros(2, 7, dtype=torch.int64)}
    whole["further"] = torch.ones(2, 7, dtype=torch.int64)
    whole["attention_mask"] = (torch.arange(7) < torch.tensor([[5], [7]])).long()
    batch = pickle.loads(pickle.dumps(handler.get_batch_on_this_cp_rank(whole)))
    with handler.documents(batch):
        assert handler.cp.batch.documents is not None
    of_mask = handler.mean_loss(batch["losses"], mask=batch["attention_mask"], elsewhere=True)
    found = [of_mask, handler.mean_loss(batch["losses"], batch["classes"], elsewhere=True)]
    batch = copy.deepcopy(batch)
    batch["classes"], batch["further"] = torch.stack([batch["classes"], batch["further"]]).unbind()
    with handler.documents(batch):
        found.append(handler.mean_loss(batch["losses"], batch["classes"], elsewhere=True))
    return [x.item() for x in found]


def test_losses_of_batches_that_a_worker_has_split(ranks: Any) -> None:
    for of_mask, *of_labels in ranks(2, split_elsewhere):
        assert of_mask == pytest.approx(80 / 12)
        assert of_labels == pytest.approx([91 / 14] * 2), "also of labels that lie in one tensor with another entry"


def test_padding_is_that_of_the_batch_of_the_block(ranks: Any) -> None:
    """Before, it was that of the last batch: padding counted (0.75 for 1.0), or losses without padding were refused."""
    assert ranks(2, padding_of_an_earlier_batch) == [(2.0, 11.5)] * 2


@on_ranks
def several_numbers_a_token(layout: str) -> dict[str, float]:
    """Errors of means in a batch of 7 positions, which is padded to 8, against one device. The split fills up entries
    whose names it does not know with 0."""
    cp = init_device_mesh("cpu", (2,))
    handler, g = ContextParallelHandler(cp, layout), torch.Generator().manual_seed(0)
    losses, logits = (torch.randn(3, 7, *n, generator=g, dtype=torch.float64) for n in ((5,), (2, 4)))
    codes = torch.randint(4, (3, 7, 2), generator=g)
    whole = {"x": losses, "logits": logits, "codes": codes}
    batch, other = (handler.get_batch_on_this_cp_rank(dict(whole)) for _ in range(2))
    turned = {name: value.transpose(0, 1) for name, value in whole.items()}
    first = handler.get_batch_on_this_cp_rank(turned, seq_dims=0)
    row = handler.get_batch_on_this_cp_rank({name: value[0] for name, value in whole.items()}, seq_dims=0)
    even = handler.get_batch_on_this_cp_rank({"x": losses[:, :6].repeat(1, 4, 1)[:, :8]})

    def mean(batch: Any, form: Callable[[Tensor], Tensor] = lambda x: x, rows: bool = True) -> float:
        x = form(batch["x"])
        return handler.mean_loss(x, mask=torch.ones_like(x), elsewhere=True).item() - losses[: 3 if rows else 1].mean()

    def coded(batch: Any, form: Callable[[Tensor], Tensor] = lambda x: x) -> float:
        want = F.cross_entropy(logits.flatten(0, 2), codes.flatten())
        return handler.mean_loss(form(batch["logits"]), form(batch["codes"]), elsewhere=True).item() - want

    found = {}
    with handler.documents(batch):
        forms = {"as they are": lambda x: x, "flat": lambda x: x.flatten(0, 1)}
        found |= {name: mean(batch, form) for name, form in forms.items()}
        passes, labels = torch.cat([batch["logits"]] * 2), torch.cat([batch["codes"]] * 2)
        found["passes"] = coded({"logits": passes, "codes": labels})
        with pytest.raises(ValueError, match="those of several passes, one after the other"):
            handler.mean_loss(passes.flatten(0, 2), labels.flatten(), elsewhere=True)
        with pytest.raises(ValueError, match=r"shape \(3, 20\) .* in two orders"):
            mean(batch, lambda x: x.flatten(1))
        forms["wide"] = lambda x: x.flatten(1)
        found |= {"codes": coded(batch), "flat codes": coded(batch, lambda x: x.flatten(0, 1))}
        for losses_of in forms.values():
            with pytest.raises(ValueError, match=r"without labels or mask, and this batch of 7 positions was padded"):
                handler.mean_loss(losses_of(batch["x"]), elsewhere=True)
    with handler.documents(first):
        found |= {
            "sequence first": mean(first),
            "flat, too": mean(first, lambda x: x.flatten(0, 1)),
            "fc": coded(first),
        }
    with handler.documents(row):
        found |= {"one row": mean(row, rows=False)}
    with handler.documents(even):
        found |= {"in another block": coded(other)}
    with handler.documents([0, 7]):
        x = handler.dispatch(losses, 1, pad_value=0.0)
        found |= {"dispatched": handler.mean_loss(x, mask=torch.ones_like(x), elsewhere=True).item() - losses.mean()}
        with pytest.raises(ValueError, match=r"without labels or mask, and this batch of 7 positions was padded to 8"):
            handler.mean_loss(x.flatten(1), elsewhere=True)
    handler.get_batch_on_this_cp_rank({"x": losses[:, :4]})
    return {name: abs(float(x)) for name, x in (found | {"behind the blocks": coded(other)}).items()}


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_padding_of_several_numbers_a_token_does_not_count(ranks: Any, layout: str) -> None:
    for found in ranks(2, several_numbers_a_token, layout):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def dimensions_of_the_sequence(layout: str) -> dict[str, float]:
    """Errors of means in batches of 7 positions, which are padded to 8, by where entries have the sequence. Labels
    have a name that the split does not know."""
    handler, g = ContextParallelHandler(init_device_mesh("cpu", (2,)), layout), torch.Generator().manual_seed(0)
    several = torch.randn(3, 7, 5, generator=g, dtype=torch.float64)
    losses, codes = several[..., 0], torch.randint(4, (3, 7), generator=g)
    found: dict[str, Any] = {}

    def mean(x: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(x) if labels is None else None
        return handler.mean_loss(x, labels, mask=mask, elsewhere=True)

    def refused(words: str, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> None:
        with pytest.raises(ValueError, match=words):
            handler.mean_loss(x, labels, mask=mask, elsewhere=True)

    alone = r"without labels or mask, and this batch of 7 positions was padded to 8"
    for first in (True, False):  # the sequence is dimension 0 of one entry and 1 of others
        given = {"x": several.transpose(0, 1), "losses": losses, "codes": codes}
        batch = handler.get_batch_on_this_cp_rank(given if first else dict(reversed(given.items())), {"x": 0})
        with handler.documents(batch):
            x, labels = batch["losses"], batch["codes"]
            for name, form in FORMS.items():
                found[f"{first} {name}"] = mean(form(x), form(labels)) - losses.mean()
            found[f"{first} half of the rows"] = mean(x[:2], labels[:2]) - losses[:2].mean()
            found[f"{first} copies"] = mean(x.clone(), labels.clone()) - losses.mean()
            found[f"{first} mask"] = mean(x.clone()) - losses.mean()
            refused(r"shape \(12,\).*in two orders.*dimensions \[0, 1\]", x.flatten(), labels.flatten().clone())
            refused("in two orders", x.flatten(), None, torch.ones(12))
            refused(alone, x.flatten())
    for features in (5, 4, 1):  # one row without a dimension of rows
        given = {"x": torch.randn(7, features), "losses": losses[0], "codes": codes[0]}
        for entries in (given, dict(reversed(given.items()))):
            batch = handler.get_batch_on_this_cp_rank(entries, 0)
            with handler.documents(batch):
                x, labels, name = batch["losses"], batch["codes"], f"{features} features, {next(iter(entries))} first"
                found[f"{name}: entries"] = mean(x, labels) - losses[0].mean()
                found[f"{name}: copies"] = mean(x, labels.clone()) - losses[0].mean()
                found[f"{name}: mask"] = mean(x) - losses[0].mean()
                refused(alone, x)
    batch = handler.get_batch_on_this_cp_rank({"x": several})
    with handler.documents(batch):
        x = batch["x"]
        for name, form in (FORMS | OF_ROWS).items():
            if name == "flat":
                refused("in two orders", form(x), None, torch.ones_like(form(x)))
            else:
                found[f"several {name}"] = mean(form(x)) - several.mean()
            refused(alone, form(x))
    turned = handler.get_batch_on_this_cp_rank({"x": several.mT}, 2)
    with handler.documents(turned):
        x = turned["x"]
        found |= {"features first": mean(x) - several.mean(), "joined": mean(x.flatten(0, 1)) - several.mean()}
        found |= {"last": mean(x.mT) - several.mean(), "of tokens": mean(x.mean(1).flatten()) - several.mean()}
        refused("in two orders", x.flatten(), None, torch.ones(60))
    return {name: abs(float(x)) for name, x in found.items()}


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "flat": lambda x: x.flatten(),
    "tokens": lambda x: x.flatten(0, 1),
    "turned": lambda x: x.mT,
}
OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {"positions": lambda x: x.mean((0, 2)), "rows": lambda x: x.mean(0)}


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_padding_does_not_count_wherever_the_sequence_is(ranks: Any, layout: str) -> None:
    """Padding counted where the first entry has another dimension of the sequence, or features for rows, and in flat
    losses of several numbers a token. Errors are raised on all ranks, also on those without padding."""
    for found in ranks(2, dimensions_of_the_sequence, layout):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def selected_losses() -> float:
    """The error of the mean over tokens that each rank selects: all of those of some ranks, whose shares are full."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    handler, both = ContextParallelHandler(world["cp"], "contiguous"), world["dp", "cp"]
    whole = torch.arange(14.0, dtype=torch.float64).view(2, 7) + 100 * world.get_local_rank("dp")
    batch = handler.get_batch_on_this_cp_rank({"x": whole, "keep": torch.ones_like(whole)})
    with pytest.raises(ValueError, match="without labels or mask, and this batch of 7 positions was padded to 8"):
        handler.mean_loss(batch["x"].flatten(), mesh=both)
    return abs(handler.mean_loss(batch["x"][batch["keep"] > 0], mesh=both).item() - 56.5)


def test_losses_that_a_mask_selects_are_no_padding(ranks: Any) -> None:
    """They were refused on the ranks whose tokens are all selected, and the others waited."""
    assert max(ranks(4, selected_losses, timeout=60)) <= 1e-12


@on_ranks
def remembered_batches() -> dict[str, float]:
    """Errors of means that depend on what is known of a batch of 7 positions, which is padded to 8, after its block."""
    handler, g = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous"), torch.Generator().manual_seed(0)
    x, codes = torch.randn(2, 7, generator=g, dtype=torch.float64), torch.ones(2, 7, dtype=torch.int64)
    found: dict[str, Any] = {}

    def split(**more: Tensor) -> Any:
        return handler.get_batch_on_this_cp_rank({"x": x, "codes": codes, **more})

    many = [split(**{str(i): codes for i in range(5)}) for _ in range(20)]
    for number, batch in enumerate(many):
        found[f"batch {number}"] = handler.mean_loss(batch["x"], batch["codes"], elsewhere=True) - x.mean()
    batch = split()
    with handler.documents(batch):
        handler.cp.batch.mark_ran()
    with handler.documents(batch):  # a block of its own for the loss
        found["second block"] = handler.mean_loss(batch["x"], mask=torch.ones_like(batch["x"])) - x.mean()
    head = torch.nn.Linear(3, 4, dtype=torch.float64)
    for reentrant in (True, False):

        def mean(weight: Tensor) -> Tensor:
            losses = batch["x"] * weight
            return handler.mean_loss(losses, mask=torch.ones_like(losses), gradients="sum", elsewhere=True)

        def logs(hidden: Tensor) -> Tensor:
            return handler.log_probs(hidden, batch["codes"], head=head, gather=True, gradients="sum")

        for name, function, leaf in (
            ("mean", mean, torch.ones(1, dtype=torch.float64)),
            ("log-probabilities", logs, batch["x"][..., None].expand(-1, -1, 3)),
        ):
            grads = []
            for late in (False, True):
                given = leaf.clone().requires_grad_()
                with handler.documents(batch):
                    out = checkpoint(function, given, use_reentrant=reentrant).square().sum()
                    if not late:
                        out.backward()
                if late:
                    out.backward()
                grads.append(given.grad)
            found[f"{name}, reentrant={reentrant}"] = (grads[0] - grads[1]).abs().max()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
    for dim in (0, 1):
        padded = {"x": x, "attention_mask": mask} if dim else {"x": x.mT, "attention_mask": mask.mT}
        batch = handler.get_batch_on_this_cp_rank(padded, dim)
        loss = handler.mean_loss(batch["x"], mask=batch["attention_mask"], elsewhere=True)
        found[f"mask of dimension {dim}"] = loss - x[mask > 0].mean()
    found["pooled"] = (
        (handler.pool(batch["x"], "sum", mask=batch["attention_mask"]) - (x * mask).sum(1, keepdim=True)).abs().max()
    )
    compiled = torch.compile(
        lambda x, labels: handler.mean_loss(x, labels, elsewhere=True), backend="eager", dynamic=True
    )
    other = handler.get_batch_on_this_cp_rank({"x": torch.ones(2, 8)})
    for number in (7, 8, 7):
        whole = {"x": x.new_ones(2, number), "codes": codes.new_ones(2, number), "tokens": codes.new_ones(2, number)}
        batch = handler.get_batch_on_this_cp_rank(whole)
        with handler.documents(batch):
            found[f"compiled {number}"] = compiled(batch["x"] + 0, batch["codes"]) - 1
            found[f"compiled copies {number}"] = compiled(batch["x"] + 0, batch["codes"].clone()) - 1
        with handler.documents(other):
            found[f"compiled beside another {number}"] = compiled(batch["x"] + 0, batch["codes"]) - 1
        for name in ("codes", "tokens"):
            found[f"compiled behind, {name} {number}"] = compiled(batch["x"] + 0, batch[name]) - 1
    batch = split()
    handler.get_batch_on_this_cp_rank({"x": torch.ones(2, 8)})
    with pytest.warns(UserWarning, match="fit a batch of 7 positions that was padded to 8, and is not"):
        handler.mean_loss(batch["x"], elsewhere=True)
    return {name: abs(float(x)) for name, x in found.items()}


def test_what_is_known_of_a_batch_is_remembered(ranks: Any) -> None:
    """Padding counted in the oldest of many batches, in recomputes after the block, in a mean with the padding mask of
    the batch, in compiled losses, and where another batch was split since; a second block of a batch was refused."""
    for found in ranks(2, remembered_batches):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def refilled_mask(dtype: torch.dtype) -> float:
    """The error of a mean, whose caller has filled the mask of its batch with that of the next batch."""
    handler, mask = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail"), torch.ones(2, 8, dtype=dtype)
    mask[0, 5:] = 0
    mask[1, :3] = 0
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = x[mask > 0].mean()
    batch = handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": mask})
    mask.fill_(1)
    with handler.documents(batch):
        return float(handler.mean_loss(batch["x"], mask=torch.ones_like(batch["x"]), elsewhere=True) - want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_that_is_filled_again_belongs_to_its_batch_no_more(ranks: Any, dtype: torch.dtype) -> None:
    assert max(map(abs, ranks(2, refilled_mask, dtype))) <= 1e-12


@on_ranks
def compiled_checkpoints(way: str, layout: str) -> float:
    """The error of the gradient of a weight, where a loss is recomputed behind the block of its padded batch."""
    handler, g = ContextParallelHandler(init_device_mesh("cpu", (dist.get_world_size(),)), layout), torch.Generator()
    weight = torch.randn(3, 5, generator=g.manual_seed(0), dtype=torch.float64)

    def loss(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        per_token = F.cross_entropy((x @ weight).tanh().mT, y, reduction="none")
        means = handler.mean_loss(per_token, y + 0, gradients="sum", elsewhere=True)
        return means + handler.mean_loss(per_token, mask=torch.ones_like(y), gradients="sum", elsewhere=True)

    if way == "inside":
        run: Any = torch.compile(lambda *given: checkpoint(loss, *given, use_reentrant=False), backend="aot_eager")
    else:
        graph = torch.compile(loss, backend="aot_eager", fullgraph=True)
        run = partial(checkpoint, graph, use_reentrant=False)
    worst = 0.0
    for length in (17, 16, 19):
        x, y = torch.randn(2, length, 3, generator=g, dtype=torch.float64), torch.randint(5, (2, length), generator=g)
        batch, mine, own = handler.get_batch_on_this_cp_rank({"x": x, "y": y}), weight.clone(), weight.clone()
        other = handler.get_batch_on_this_cp_rank({"x": x[:, :12]})
        with handler.documents(batch), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing reads the documents here
            total = run(batch["x"], mine.requires_grad_(), batch["y"])
        with handler.documents(other):
            total.backward()
        dist.all_reduce(mine.grad)
        (2 * F.cross_entropy((x @ own.requires_grad_()).tanh().mT, y)).backward()
        worst = max(worst, (mine.grad - own.grad).abs().max().item())  # type: ignore[operator]
    return worst


@pytest.mark.parametrize(("world", "way", "layout"), [(1, "inside", "head_tail"), (2, "around", "balanced")])
def test_compiled_losses_are_recomputed_with_the_padding_of_their_batch(
    ranks: Any, world: int, way: str, layout: str
) -> None:
    assert max(ranks(world, compiled_checkpoints, way, layout)) <= 1e-12


@on_ranks
def compiled_means_of_meshes() -> list[float]:
    """Errors of compiled means over a mesh of two dimensions, and of what each rank adds to the gradient's sum."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    handler, g = ContextParallelHandler(world["cp"], "contiguous"), torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 6, generator=g, dtype=torch.float64), torch.randint(-2, 3, (4, 6), generator=g)
    rows = slice(2, 4) if dist.get_rank() > 1 else slice(0, 2)
    batch = handler.get_batch_on_this_cp_rank({"x": x[rows], "labels": torch.where(y < 0, -100, y)[rows]})

    def mean(x: Tensor, labels: Tensor) -> Tensor:
        return handler.mean_loss(x, labels, mesh=world, gradients="sum", elsewhere=True)

    found = torch.compile(mean, backend="aot_eager", fullgraph=True)(
        mine := batch["x"].requires_grad_(), batch["labels"]
    )
    (gradient,) = torch.autograd.grad(found, mine)
    want = (batch["labels"] >= 0).double() / int((y >= 0).sum())
    return [abs(float(found - x[y >= 0].mean())), float((gradient - want).abs().max())]


def test_compiled_means_of_two_dimensions_are_one_graph(ranks: Any) -> None:
    """A graph that breaks at a transfer wrote over what arrived, sometimes."""
    assert max(max(found) for found in ranks(4, compiled_means_of_meshes)) <= 1e-12


@on_ranks
def masks_of_padded_batches(short: int) -> dict[str, float]:
    """Errors of means and sums with the padding mask of a batch that has an empty row, with its copies, and with what a
    loader moves to a device."""
    handler, g = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail"), torch.Generator().manual_seed(0)
    x, mask = torch.randn(3, 16 - short, generator=g, dtype=torch.float64), torch.ones(3, 16 - short, dtype=torch.int64)
    mask[2] = 0
    mask[1, : 3 * short] = 0
    want, codes = x[mask > 0].mean(), torch.ones_like(mask)
    whole, found = {"x": x, "attention_mask": mask, "codes": codes}, {}
    copying = mock.patch.object(Tensor, "to", lambda x, *_, **how: x.clone() if "non_blocking" in how else x)
    compiled = torch.compile(
        lambda x, mask: handler.mean_loss(x, mask=mask, elsewhere=True), backend="eager", fullgraph=True
    )
    with copying:  # as from the host to a device
        (moved,) = handler.loader([whole])

    @torch.compile(backend="eager")
    def in_block(batch: Any) -> Tensor:
        with handler.documents(batch):
            return handler.mean_loss(batch["x"], mask=torch.ones_like(batch["x"]), elsewhere=True)

    for name, batch in ("own", handler.get_batch_on_this_cp_rank(whole)), ("moved", moved):
        shown = batch["attention_mask"]
        copied = shown.clone(), shown.bool(), shown.double() * 2, shown.T.clone().T, shown[..., None] > 0
        masks = {"entry": shown, "view": shown[:], **{f"copy {i}": y for i, y in enumerate(copied)}}
        with handler.documents(batch):
            for kind, given in masks.items():
                losses = batch["x"][..., None] if given.ndim == 3 else batch["x"]
                found[f"{name}, {kind}"] = handler.mean_loss(losses, mask=given, elsewhere=True) - want
            twice = torch.cat([batch["x"]] * 2), torch.stack([copied[1]] * 2)
            for losses, given in (twice[0], twice[1].flatten(0, 1)), (twice[0].view_as(twice[1]), twice[1]):
                with pytest.raises(ValueError, match="have other rows than this batch, whose 3 rows have padding"):
                    handler.mean_loss(losses, mask=given, elsewhere=True)
            pooled = handler.pool(batch["x"], "sum", mask=copied[1])
            found[f"{name}, compiled"] = compiled(batch["x"], shown) - want
        found[f"{name}, block in compiled code"] = in_block(batch) - want
        found[f"{name}, behind"] = handler.mean_loss(batch["x"], mask=shown, elsewhere=True) - want
        found[f"{name}, compiled behind"] = compiled(batch["x"], shown) - want
        found[f"{name}, labels"] = handler.mean_loss(batch["x"], batch["codes"], elsewhere=True) - x.mean()
        for kind, sums in ("pool", pooled), ("pool behind", handler.pool(batch["x"], "sum", mask=shown)):
            found[f"{name}, {kind}"] = (sums.sum(1) - (x * mask).sum(1)).abs().max()
    return {name: abs(float(x)) for name, x in found.items()}


@pytest.mark.parametrize("short", [0, 1])
def test_copies_of_masks_leave_padding_out(ranks: Any, short: int) -> None:
    """Copies hold ones, those that a loader moved to a device too; and an empty row alone was no padding."""
    for found in ranks(2, masks_of_padded_batches, short):
        assert max(found.values()) <= 1e-12, {name: x for name, x in found.items() if x > 1e-12}


@on_ranks
def shares_of_one_position(layout: str) -> dict[str, Any]:
    """Means over fewer tokens than there are ranks, less those of one device; and what is refused."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (3,)), layout)
    losses = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wide = torch.stack([losses, 2 * losses], -1)
    batch = handler.get_batch_on_this_cp_rank({"x": losses, "wide": wide, "cu_seqlens": torch.tensor([0, 2])})
    x, wide = batch["x"] * 1, batch["wide"] * 1
    found: dict[str, Any] = {}
    with handler.documents(batch) as table:
        assert table is not None and x.shape == (4, 1)
        for name, y, factor in (("mask", x, 1), ("several", wide, 1.5)):
            mean = handler.mean_loss(y, mask=torch.ones_like(y), elsewhere=True)
            found[name] = abs(mean.item() - factor * losses.mean().item())
        labels = torch.zeros(4, 1, dtype=torch.int64)
        found["labels"] = abs(handler.mean_loss(x, labels, elsewhere=True).item() - losses.mean().item())
        found["neither"] = error_of(lambda: handler.mean_loss(x, elsewhere=True))
        flat = x.flatten()
        found["flat"] = error_of(lambda: handler.mean_loss(flat, mask=torch.ones_like(flat), elsewhere=True))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "per_document"])
def test_padding_of_shares_of_one_position_does_not_count(ranks: Any, layout: str) -> None:
    for found in ranks(3, shares_of_one_position, layout):
        assert "come without labels or mask" in found.pop("neither"), found
        assert "a value for each row of this batch, or for each of its tokens" in found.pop("flat"), found
        assert max(found.values()) < 1e-12, found


@on_ranks
def labels_of_kinds(length: int) -> dict[str, float]:
    """Errors of means with labels that hold no -100, and with those whose value for none is another one."""
    handler, g = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail"), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, length, 3, generator=g, dtype=torch.float64), torch.randint(3, (2, length), generator=g)
    y[0, 2] = -1
    found = {}
    for dtype in (torch.bool, torch.uint8, torch.float64):
        labels = (y > 0).to(dtype)
        batch = handler.get_batch_on_this_cp_rank({"x": x, "labels": labels})
        want = F.binary_cross_entropy_with_logits(x[..., 0], labels.double())
        mine = F.binary_cross_entropy_with_logits(batch["x"][..., 0], batch["labels"].double(), reduction="none")
        found[f"{dtype}"] = handler.mean_loss(mine, batch["labels"], elsewhere=True) - want
        masked = handler.mean_loss(mine, batch["labels"], mask=batch["labels"] > 0, elsewhere=True)
        alone = F.binary_cross_entropy_with_logits(x[..., 0], labels.double(), reduction="none")
        found[f"{dtype}, mask"] = masked - alone[labels > 0].mean()
    bytes_, wide = (y.clamp(min=0) + 155).byte(), torch.randn(2, length, 160, generator=g, dtype=torch.float64)
    batch = handler.get_batch_on_this_cp_rank({"x": wide, "labels": bytes_})
    want = F.cross_entropy(wide.flatten(0, 1), bytes_.flatten().long())
    found["bytes"] = handler.mean_loss(batch["x"], batch["labels"], elsewhere=True) - want
    eye = torch.eye(160, dtype=torch.float64)
    found["bytes of a head"] = handler.mean_loss(batch["x"], batch["labels"], head=eye, elsewhere=True) - want
    batch, want = handler.get_batch_on_this_cp_rank({"x": x, "labels": y}), F.cross_entropy(x.mT, y, ignore_index=-1)
    found["ignore_index"] = handler.mean_loss(batch["x"], batch["labels"], ignore_index=-1, elsewhere=True) - want
    with pytest.raises(TypeError, match=r"labels are torch.uint8, which holds no ignore_index=-100"):
        handler.get_batch_on_this_cp_rank({"x": x, "labels": y.clamp(min=0).byte()}, shift_labels=True)
    return {name: abs(float(x)) for name, x in found.items()}


@pytest.mark.parametrize("length", [7, 8])
def test_labels_of_any_kind_leave_padding_out(ranks: Any, length: int) -> None:
    for found in ranks(2, labels_of_kinds, length):
        assert max(found.values()) <= 1e-12, found


@on_ranks
def label_of_one_rank(head: bool) -> str:
    """The error of this rank for a label of -1 on rank 1; the other one must not wait for it."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    labels = torch.zeros(1, 4, dtype=torch.int64)
    labels[0, 0] -= dist.get_rank()
    options = {"head": torch.nn.Linear(3, 3)} if head else {}
    return error_of(lambda: handler.mean_loss(torch.zeros(1, 4, 3), labels, **options))


@pytest.mark.parametrize("head", [False, True])
def test_a_label_of_one_rank_is_an_error_on_all(ranks: Any, head: bool) -> None:
    first, second = ranks(2, label_of_one_rank, head, timeout=30)
    assert first.startswith("ValueError: labels of ranks [1]") and second.startswith("ValueError: labels"), first


@on_ranks
def additive_masks() -> list[str]:
    """Errors of masks that hide rank 1's tokens as in attention."""
    handler, x = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous"), torch.ones(1, 4)
    masks = [x * dist.get_rank() * hidden for hidden in (-torch.inf, torch.finfo().min, -0.5)]
    masks = [x.nan_to_num(neginf=-torch.inf) for x in masks]
    return [error_of(lambda mask=mask: handler.mean_loss(x, mask=mask, elsewhere=True)) for mask in masks]


def test_an_additive_mask_is_an_error_on_all_ranks(ranks: Any) -> None:
    """It says nothing of labels. Weights below 0 are taken."""
    first, second = ranks(2, additive_masks, timeout=30)
    for others, own, value in zip(first, second, ("-inf", "-3.40282e+38"), strict=False):
        assert others.startswith(
            "ValueError: labels of ranks [1] of mean_loss are numbers of no class, or their mask is"
        )
        assert own.startswith(f"ValueError: mask of mean_loss holds {value}. Such numbers of an additive mask hide")
    assert first[2] == second[2] == ""


@on_ranks
def compiled_masks() -> list[float]:
    """Losses of compiled code, which reads no values: of masks that one rank adds to logits, and of weights."""
    handler, x = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous"), torch.ones(1, 4)
    loss = torch.compile(lambda x, mask: handler.mean_loss(x, mask=mask, elsewhere=True), backend="aot_eager")
    return [loss(x, x * dist.get_rank() * hidden).item() for hidden in (-1e4, 0.5)]


def test_an_additive_mask_makes_no_number_where_values_are_not_read(ranks: Any) -> None:
    """Before, the loss was the mean over the tokens that the mask hides."""
    for added, weighed in ranks(2, compiled_masks, timeout=60):
        assert math.isnan(added) and weighed == 1.0


@on_ranks
def learned_weights() -> float:
    """The error of the gradients of losses and of their weights, which change the number of tokens too."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail")
    g = torch.Generator().manual_seed(1)
    whole = [torch.rand(2, 8, generator=g, dtype=torch.float64) for _ in range(2)]
    whole[1][:, ::3] = 0  # as hard gates are
    whole = [x.requires_grad_() for x in whole]
    want = torch.autograd.grad((whole[0] * whole[1]).sum() / whole[1].sum(), whole)
    local = [handler.dispatch(x.detach()).requires_grad_() for x in whole]
    found = torch.autograd.grad(handler.mean_loss(local[0], mask=local[1], gradients="sum"), local)
    return max((a - handler.dispatch(b)).abs().max().item() for a, b in zip(found, want, strict=True))


def test_weights_have_gradients(ranks: Any) -> None:
    assert max(ranks(2, learned_weights)) <= 1e-12


def test_padding_does_not_count(ranks: Any) -> None:
    assert ranks(2, padding_counts) == [[10.0, 10.0, 10.0, 70.0, 1.0]] * 2


def test_no_token_counts(ranks: Any) -> None:
    assert ranks(2, nothing_counts) == [(0.0, 0.0, 1)] * 2


@on_ranks
def wrong() -> dict[str, str]:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    handler, x = ContextParallelHandler(world["cp"], "contiguous"), torch.zeros(2, 4)
    return errors_of(
        {
            "does not contain the cp ranks": lambda: handler.mean_loss(x, mesh=world["dp"]),
            "gradients='average' is unknown": lambda: handler.mean_loss(x, gradients="average"),
            r"losses has shape \(2, 4\) and labels \(2, 3\)": lambda: handler.mean_loss(
                x, torch.zeros(2, 3, dtype=torch.int64)
            ),
            r"mask \(4,\)": lambda: handler.mean_loss(x, mask=torch.ones(4)),
            "losses is one number": lambda: handler.mean_loss(x.mean()),
            "ValueError: labels are torch.float32 of shape .*probabilities of classes": lambda: handler.mean_loss(
                torch.zeros(2, 4, 3) - 1, torch.ones(2, 4, 3) / 3
            ),
            r"labels are torch.float32 of shape \(8, 3\).*probabilities": lambda: handler.mean_loss(
                torch.zeros(8, 3) - 1, torch.cat([torch.ones(7, 3) / 3, torch.full((1, 3), -100.0)])
            ),
            r"labels are torch.float32 of shape .*\(or less\)": lambda: handler.mean_loss(  # the largest of a teacher's
                torch.zeros(2, 4, 3) - 1, torch.tensor([0.5, 0.3, 0.0]).expand(2, 4, 3)
            ),
            "labels are torch.int64 of shape .*probabilities of classes": lambda: handler.mean_loss(
                torch.zeros(2, 4, 3) - 1, torch.eye(3).long().repeat(2, 2, 1)[:, :4]
            ),
            "TypeError: losses is a torch.int64": lambda: handler.mean_loss(x.long()),
            "gradients='average' is unknown.*None if nobody": lambda: handler.combine(x, gradients="average"),
        }
    )


def test_wrong_losses_are_refused(ranks: Any) -> None:
    check_errors(ranks(4, wrong))


# --------------------------------------------------------------------------- a batch from end to end


class WithinDocuments(nn.Module):
    """The oracle's attention: causal or not, among positions of one document."""

    def __init__(self, causal: bool, number: Tensor) -> None:
        super().__init__()
        self.causal, self.visible = causal, (number[:, :, None] == number[:, None])[:, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, is_causal=self.causal, visible=self.visible)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


@on_ranks
def end_to_end(layout: str, causal: bool, packed: bool) -> float:
    """Train on 13 tokens, padded on the right, on the left or not, or packed. Returns the worst relative error of loss
    and gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = ContextParallel(2, 1, 1, kv_exchange="ring", layout=layout)
    handler, model, g = ContextParallelHandler(mesh, style), small(), torch.Generator().manual_seed(3)
    model.inner = Attention(causal)  # type: ignore[assignment]
    parallelize_module(model.inner, mesh, style)
    ids = torch.randint(VOCABULARY, (3, 13), generator=g)
    number = torch.zeros(3, 13)  # the document of each position; padding is one
    batch = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        number[:, 4:] += 1
        number[:, 11:] += 1
        batch["cu_seqlens"] = torch.tensor([0, 4, 11, 13])
    else:
        number[0, 9:] = number[1, :5] = 1
        batch["attention_mask"] = (number == 0).long()
        batch["labels"][number == 1] = -100
    local = handler.get_batch_on_this_cp_rank(batch, shift_labels=True, debug=True)
    with handler.documents(local):
        logits = model(local["input_ids"])
    loss = handler.mean_loss(logits, local["shift_labels"], gradients="sum")
    loss.backward()
    found = gradients(model)
    for grad in found:
        dist.all_reduce(grad)
    model = small()
    model.inner = WithinDocuments(causal, number)  # type: ignore[assignment]
    target = torch.full_like(ids, -100)
    target[:, :-1] = batch["labels"][:, 1:]  # the label of padding before the first token counts, as on one device
    if packed:
        target[:, :-1][number[:, 1:] != number[:, :-1]] = -100
    want = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
    grads = torch.autograd.grad(want, list(model.parameters()))
    return max(relative_error(a, b) for a, b in zip((loss.detach(), *found), (want.detach(), *grads), strict=True))


@pytest.mark.parametrize(
    "world,layout,causal,packed",
    [
        (2, "contiguous", False, True),
        (2, "contiguous", True, False),
        (2, "head_tail", False, False),
        (2, "head_tail", True, True),
        (3, "head_tail", False, True),
        (3, "head_tail", True, False),
        (4, "contiguous", False, False),
        (4, "contiguous", True, True),
    ],
)
def test_padded_and_packed_batches_train_as_on_one_device(
    ranks: Any, world: int, layout: str, causal: bool, packed: bool
) -> None:
    assert max(ranks(world, end_to_end, layout, causal, packed)) <= 1e-10


# --------------------------------------------------------------------------- a whole that is dispatched again


@on_ranks
def gathered_and_split(layout: str, degrees: tuple[int, ...], dtype: torch.dtype = torch.float64) -> float:
    """The error of the gradient through a scan over the whole sequence, whose result is dispatched again."""
    names = ("cp",) if len(degrees) == 1 else ("ring", "ulysses")
    handler = ContextParallelHandler(init_device_mesh("cpu", degrees, mesh_dim_names=names), layout)
    g = torch.Generator().manual_seed(3)
    x, factors = (torch.randn(2, 16, 3, generator=g, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    (want,) = torch.autograd.grad(torch.view_as_real((x.cumsum(1) * factors).sum() + 0j).sum(), x)
    share = handler.dispatch(x.detach()).requires_grad_()
    out = handler.dispatch(handler.combine(share, gradients="shares").cumsum(1))
    (found,) = torch.autograd.grad(torch.view_as_real((out * handler.dispatch(factors)).sum() + 0j).sum(), share)
    return relative_error(*(torch.view_as_real(x + 0j) for x in (found, handler.dispatch(want))))


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_gradients_of_a_whole_that_is_dispatched_again(ranks: Any, layout: str) -> None:
    assert max(ranks(2, gathered_and_split, layout, (2,))) <= 1e-12
    assert max(ranks(4, gathered_and_split, layout, (2, 2))) <= 1e-12
    assert max(ranks(2, gathered_and_split, layout, (2,), torch.complex128)) <= 1e-12


@on_ranks
def behind_a_loader() -> list[str]:
    """The error and the warnings of a loss of other tokens behind the end of a loader that has counted labels."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    handler, x = ContextParallelHandler(both["cp"], "contiguous"), torch.ones(2, 8, requires_grad=True)
    wholes = [{"x": torch.ones(2, 8), "labels": torch.ones(2, 8, dtype=torch.int64)} for _ in range(2)]
    for batch in handler.loader(wholes, accumulate=2, mesh=both["dp", "cp"]):
        handler.mean_loss(batch["x"], batch["labels"], mesh=both["dp", "cp"], elsewhere=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(lambda: handler.mean_loss(handler.dispatch(x, 1), elsewhere=True))
    return [error, *(str(warning.message) for warning in caught)]


def test_what_a_loader_has_counted_is_not_expected_of_later_losses(ranks: Any) -> None:
    assert ranks(4, behind_a_loader) == [[""]] * 4


@on_ranks
def unsaid_gradients(wrapper: str) -> list[str]:
    """Warnings of combine and of mean_loss, under a wrapper or without one."""
    mesh, handler, model = setup(wrapper, "contiguous")
    handler.cp.batch.__init__()  # type: ignore[misc]
    ids, labels = (handler.dispatch(x.chunk(2)[0]) for x in data())
    logits = model(ids)
    found = []
    for call in (
        lambda: handler.combine(logits.detach()),
        lambda: handler.combine(logits, gradients="mean"),
        lambda: handler.combine(logits, gradients=None),
        lambda: handler.mean_loss(logits, labels, mesh=mesh),
        lambda: handler.combine(logits),
        lambda: handler.combine(logits),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found.append(" ".join(str(x.message) for x in caught))
    handler.cp.batch.warned_of_gradients = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handler.mean_loss(logits, labels, mesh=mesh, gradients="sum")
    return [*found, " ".join(str(x.message) for x in caught)]


@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_a_reduction_that_is_unknown_or_does_not_fit_warns_once(ranks: Any, wrapper: str) -> None:
    for *silent, unsaid, again, summed in ranks(4, unsaid_gradients, wrapper):
        assert silent == [""] * 4 and again == ""
        assert "does not know how gradients are reduced" in unsaid
        assert ("DDP or FSDP is around this model" in unsaid) == (wrapper != "none")
        assert ('mean_loss has gradients="sum"' in summed) == (wrapper != "none")


@on_ranks
def labels_of_no_class(rank: int) -> None:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    labels = torch.full((1, 4), -1 if dist.get_rank() == rank else 1)
    handler.mean_loss(torch.zeros(1, 4, 3), labels, ignore_index=-1 if rank == 2 else -100)


def test_labels_of_no_class_raise_on_every_rank(ranks: Any) -> None:
    for rank in (0, 1):
        ranks.raises(2, "ValueError", "labels of", labels_of_no_class, rank)
    ranks(2, labels_of_no_class, 2)


@on_ranks
def in_loss_parallel() -> float:
    """Error of loss and gradients of a head whose logits are sharded over tp, in torch's ``loss_parallel``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    head = nn.Linear(6, 8, dtype=torch.float64)
    hidden, labels = torch.randn(2, 12, 6, dtype=torch.float64), torch.randint(8, (2, 12))
    labels[0, :7] = -100  # ranks have different numbers of labels
    want = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    grads = torch.autograd.grad(want, list(head.parameters()))
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, mesh["tp"], plan)
    handler = ContextParallelHandler(mesh["cp"], ContextParallel(2, 1))
    with loss_parallel():
        logits = head(handler.dispatch(hidden, 1))
        loss = handler.mean_loss(logits, handler.dispatch(labels, 1), gradients="sum", elsewhere=True)
        loss.backward()
    found = [loss]
    for p in head.parameters():
        whole = p.grad.full_tensor()
        dist.all_reduce(whole, group=mesh.get_group("cp"))
        found.append(whole)
    return max(relative_error(a.detach(), b.detach()) for a, b in zip(found, (want, *grads), strict=True))


def test_logits_that_are_sharded_over_their_classes(ranks: Any) -> None:
    assert max(ranks(4, in_loss_parallel)) <= 1e-10


@on_ranks
def accumulated(how: str) -> int:
    """Warnings in an accumulation of two batches, in which a mask hides some of the tokens that have labels."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    handler, both = ContextParallelHandler(mesh["cp"], "contiguous"), mesh["dp", "cp"]
    labels = torch.randint(8, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    shown = torch.rand(2, 12, generator=torch.Generator().manual_seed(dist.get_rank() // 2)) < 0.5
    if how == "labels":
        labels, shown = labels.masked_fill(~shown, -100), torch.ones_like(shown)
    wholes = [{"tokens": labels, "shift_labels": labels, "shown": shown.int()}] * 2
    if how == "classes":
        wholes = [{"tokens": labels, "labels": labels[:, 0]}] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in handler.loader(wholes, accumulate=1 if how == "one batch" else 2, mesh=both):
            losses = torch.ones(2, 6, requires_grad=how != "evaluation")
            if how == "classes":  # of whole rows: the same on the ranks of a cp mesh
                handler.mean_loss(losses[:, 0], batch["labels"], mesh=both, elsewhere=True)
                continue
            handler.mean_loss(losses, batch["shift_labels"], mask=batch["shown"].bool(), mesh=both, elsewhere=True)
    return len([w for w in caught if "mean over tokens that weigh" in str(w.message)])


@pytest.mark.parametrize(
    ("how", "warned"), [("mask", 1), ("labels", 0), ("one batch", 0), ("evaluation", 0), ("classes", 0)]
)
def test_a_mean_over_other_tokens_than_the_weight_counts_is_warned_of(ranks: Any, how: str, warned: int) -> None:
    assert ranks(4, accumulated, how) == [warned] * 4


@on_ranks
def uneven_ends(count: int) -> None:
    """Three batches on the first data-parallel rank, and ``count`` on the second."""
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    labels = torch.ones(1, 4, dtype=torch.int64)
    wholes = [{"labels": labels, "shift_labels": labels}] * (count if dist.get_rank() else 3)
    for batch in ContextParallelHandler(both["cp"], "contiguous").loader(wholes, accumulate=2, mesh=both["dp", "cp"]):
        assert batch.weight in (0.5, 1)


def test_data_parallel_ranks_with_other_numbers_of_batches_are_refused(ranks: Any) -> None:
    ranks(2, uneven_ends, 3)
    for count, numbers in (4, "1, 2"), (2, "1, 0"), (6, "1, 2"), (0, "2, 0"):
        words = rf"ended after \[{numbers}\] of 2 micro-batches on ranks \[0, 1\].*drop_last=True"
        ranks.raises(2, ValueError, words, uneven_ends, count)
