"""Losses and log-probabilities without whole logits: exact beside one device, and counted memory."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallelHandler
from hyper_cp.data.head import Logits, log_probs
from hyper_cp.memory import MemoryCounter
from tests.harness.labelled import LENGTH, ROWS, VOCABULARY, data
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

WIDTH = 6


def plain(hidden: Tensor, parameters: list[Tensor], labels: Tensor, softcap: float | None, scale: float) -> Tensor:
    """Log-probabilities written out over whole logits; 0 for ignored labels."""
    logits = F.linear(hidden, *parameters) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


# --------------------------------------------------------------------------- the loop, on one device

SHAPES: list[tuple[float | None, float, bool, int]] = [
    (None, 1.0, False, 3),
    (5.0, 1.0, True, 16),
    (2.0, 0.7, True, 1000),
    (None, 0.5, True, 1),
]


def errors(dtype: torch.dtype, softcap: float | None, scale: float, bias: bool, chunk: int | None) -> list[float]:
    """Relative errors of values and gradients against fp64 over whole logits; ``chunk`` None: of plain code."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 25, WIDTH, dtype=dtype, requires_grad=True), nn.Linear(WIDTH, VOCABULARY, bias=bias)
    head, labels, weights = head.to(dtype), torch.randint(VOCABULARY, (2, 25)), torch.rand(2, 25)
    labels[0, :4] = -100
    values = []
    for exact in (False, True):
        tensors = [x.detach().to(torch.float64 if exact else dtype) for x in (hidden, *head.parameters())]
        for x in tensors:
            x.requires_grad_()
        if exact or chunk is None:
            found = plain(tensors[0], tensors[1:], labels, softcap, scale)
        else:
            head.weight, head.bias = (nn.Parameter(x) for x in (*tensors[1:], None)[:2])  # type: ignore[assignment]
            if not bias:
                head.bias = None  # type: ignore[assignment]
            tensors = [tensors[0], *head.parameters()]
            found = log_probs(tensors[0], labels, head, Logits(softcap=softcap, scale=scale, chunk=chunk))
            assert found.dtype == torch.promote_types(dtype, torch.float32)
        (found * weights).sum().backward()
        values.append([found.detach(), *(x.grad for x in tensors)])
    return [relative_error(a, b) for a, b in zip(*values, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("softcap,scale,bias,chunk", SHAPES)
def test_values_and_gradients_are_those_of_whole_logits(
    softcap: float | None, scale: float, bias: bool, chunk: int
) -> None:
    assert max(errors(torch.float64, softcap, scale, bias, chunk)) <= 1e-14
    assert max(errors(torch.float32, softcap, scale, bias, chunk)) <= 1e-6
    for found, allowed in zip(
        errors(torch.bfloat16, softcap, scale, bias, chunk),
        errors(torch.bfloat16, softcap, scale, bias, None),
        strict=True,
    ):
        assert found <= 2 * allowed


def test_the_gradient_of_the_head_is_added_up_in_fp32() -> None:
    """A thousand chunks with equal gradients: added up in bf16 they would stop at 256 times the first."""
    hidden, weight = torch.ones(1000, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    log_probs(hidden, torch.zeros(1000, dtype=torch.int64), weight, Logits(chunk=1)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[500.0], [-500.0]]


def test_autocast_multiplies_in_its_dtype_and_returns_gradients_in_that_of_the_parameters() -> None:
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(WIDTH, VOCABULARY), torch.randn(8, WIDTH), torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        found = log_probs(hidden, labels, head, Logits(chunk=3))
        wanted = -F.cross_entropy(head(hidden).float(), labels, reduction="none")
    (grad,) = torch.autograd.grad(found.sum(), [head.weight])
    (expected,) = torch.autograd.grad(wanted.sum(), [head.weight])
    assert torch.allclose(found, wanted, atol=1e-6) and grad.dtype == torch.float32
    assert relative_error(grad, expected) < 1e-2


def test_one_chunk_of_logits_is_alive() -> None:
    """Counted in tensor storages: saved for backward, and the peak of both passes."""
    tokens, vocabulary, width, chunk = 256, 2048, 8, 16
    head, labels = nn.Linear(width, vocabulary, bias=False), torch.randint(vocabulary, (tokens,))
    hidden = torch.randn(tokens, width, requires_grad=True)
    one, parameters = chunk * vocabulary * 4, 2 * vocabulary * width * 4  # the head's gradient, while it is added up
    with MemoryCounter() as memory:
        loss = -log_probs(hidden, labels, head, Logits(chunk=chunk)).mean()
        assert memory.alive["cpu"] <= 64 + 4 * tokens  # one number per token is saved for backward
        assert one <= memory.peak["cpu"] <= 1.1 * one + 64 * tokens
        loss.backward()
    assert memory.peak["cpu"] <= 1.1 * one + 64 * tokens + parameters
    head.weight.grad = hidden.grad = None
    with MemoryCounter() as memory:
        loss = F.cross_entropy(head(hidden), labels)
        assert memory.alive["cpu"] >= tokens // chunk * one  # whole logits, after softmax
        loss.backward()
    assert memory.peak["cpu"] >= 3 * tokens // chunk * one


# --------------------------------------------------------------------------- the mean over ranks


class Body(nn.Module):
    """Hidden states and a head; its forward returns hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.embed(ids))


@cache
def reference(weighted: bool = False) -> tuple[float, list[Tensor]]:
    """The mean loss of one device, capped logits, and every gradient."""
    model, (ids, labels) = Body().double(), data()
    losses = -plain(model(ids), list(model.output.parameters()), labels, 3.0, 1.0)
    weights = (labels != -100) * (weights_of() if weighted else 1)
    loss = (losses * weights).sum() / weights.sum()
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def weights_of() -> Tensor:
    return torch.linspace(0, 2, LENGTH, dtype=torch.float64).expand(ROWS, -1)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@on_ranks
def mean_losses() -> list[float]:
    """Errors of loss and gradients under each wrapper, and with a weight in place of the module."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    handler = ContextParallelHandler(mesh, "head_tail")
    for wrapper in ("none", "weight", "weighted", "ddp", "fsdp root", "fsdp head"):
        model: Any = Body().double()
        inner, calls = model, []
        if wrapper == "ddp":
            model = DistributedDataParallel(model)
        if wrapper == "fsdp head":
            fully_shard(model.output, mesh=mesh)
        if wrapper.startswith("fsdp"):
            fully_shard(model, mesh=mesh)
        inner.output.register_forward_hook(lambda *_, to=calls: to.append(1))
        if wrapper == "weight":
            inner.output.bias.data.zero_()
        ids, labels = (handler.dispatch(x) for x in data())
        how: dict[str, Any] = {"gradients": "sum" if wrapper in ("none", "weight", "weighted") else "mean"}
        if wrapper == "weighted":
            how["mask"] = handler.dispatch(weights_of())
        head = inner.output.weight if wrapper == "weight" else inner.output
        loss = handler.mean_loss(model(ids), labels, head=head, softcap=3.0, chunk=5, **how)
        loss.backward()
        grads = [full(p.grad) for p in inner.parameters() if p.grad is not None]
        if how["gradients"] == "sum":
            grads = sum_over_ranks(*grads)
        if wrapper == "weight":
            assert len(grads) == 2
            continue
        assert len(calls) == 1
        want, expected = reference(wrapper == "weighted")
        found += [abs(loss.item() - want), *map(relative_error, grads, expected)]
    return found


def test_gradients_are_those_of_one_device(ranks: Any) -> None:
    for found in ranks(2, mean_losses):
        assert max(found) <= 1e-10


@on_ranks
def gathered() -> tuple[float, float]:
    """Log-probabilities in global order, of a padded sequence, and the gradient of their sum."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail")
    model, (ids, labels) = Body().double(), data()
    mine = handler.get_batch_on_this_cp_rank({"ids": ids[:, :13], "shift_labels": labels[:, :13]})
    how: dict[str, Any] = {"head": model.output, "scale": 0.5, "chunk": 3, "gather": True}
    with handler.documents(mine):  # the block knows the length
        known = handler.log_probs(model(mine["ids"]), mine["shift_labels"], **how)
    padded = handler.log_probs(model(mine["ids"]), mine["shift_labels"], **how)
    found = handler.log_probs(model(mine["ids"]), mine["shift_labels"], length=13, **how)
    assert torch.equal(found, known) and torch.equal(found, padded[:, :13]) and padded.shape[1] == 16
    other = handler.get_batch_on_this_cp_rank({"ids": ids[:, :13], "chosen": labels[:, :13]})  # padded with 0, a class
    named = handler.get_batch_on_this_cp_rank({"ids": ids[:, :13], "chosen_labels": labels[:, :13]})
    assert torch.equal(named["chosen_labels"], mine["shift_labels"])
    with handler.documents(other):
        by_name = handler.log_probs(model(other["ids"]), other["chosen"], head=model.output, scale=0.5)
    assert torch.equal(by_name, handler.dispatch(found, 1, pad_value=0))
    wanted = plain(model(ids), list(model.output.parameters()), labels, None, 0.5)[:, :13]
    factor = torch.linspace(1, 2, 13)
    (grad,) = torch.autograd.grad((found * factor).sum(), [model.output.weight])
    (expected,) = torch.autograd.grad((wanted * factor).sum(), [model.output.weight])
    of_whole = handler.log_probs(model(mine["ids"]), mine["shift_labels"], length=13, gradients="mean", **how)
    (averaged,) = torch.autograd.grad((of_whole * factor).sum(), [model.output.weight])
    with pytest.raises(ValueError, match="gradients='mean' without gather=True"):
        handler.log_probs(model(mine["ids"]), mine["shift_labels"], head=model.output, gradients="mean")
    errors = [relative_error(sum_over_ranks(g)[0], expected) for g in (grad, averaged / 2)]
    return relative_error(found, wanted), max(errors)


def test_log_probs_in_global_order(ranks: Any) -> None:
    assert max(map(max, ranks(2, gathered))) <= 1e-10


# --------------------------------------------------------------------------- tensor parallelism


@on_ranks
def split_vocabulary() -> list[float]:
    """Errors with a vocabulary of 11 split over 2 tensor-parallel ranks (6 and 5), in every placement of hidden states
    and logits; with FSDP2 above it; and with the weight alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"], mesh["tp"]
    handler, found, calls = ContextParallelHandler(cp, "contiguous"), [], []
    ids, labels = (handler.dispatch(x) for x in data())
    styles = {
        "replicated": ColwiseParallel(output_layouts=Replicate()),
        "sequence": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "sharded": ColwiseParallel(use_local_output=False),
        "fsdp": ColwiseParallel(output_layouts=Replicate()),
        "weight": ColwiseParallel(),
    }
    for name, style in styles.items():
        model: Any = parallelize_module(Body().double(), tp, {"output": style})
        if name == "fsdp":
            fully_shard(model.output, mesh=cp)
            fully_shard(model, mesh=cp)
        head: Any = model.output
        head.register_forward_hook(lambda *_: calls.append(1))
        hidden = model(ids)
        if name == "weight":
            head.bias.to_local().data.zero_()
            head, hidden = head.weight, DTensor.from_local(hidden, tp, [Replicate()], run_check=False)
        given = hidden.chunk(2, 1)[tp.get_local_rank()] if name == "sequence" else hidden
        loss = handler.mean_loss(
            given, labels, head=head, softcap=3.0, chunk=5, gradients="mean" if name == "fsdp" else "sum"
        )
        loss.backward()
        if name == "weight":
            assert not loss.isnan()
            continue
        grads = [full(p.grad) for p in model.parameters()]
        if name != "fsdp":
            for g in grads:
                dist.all_reduce(g, group=cp.get_group())
        if name == "sequence":  # each tensor-parallel rank has the gradient of its positions
            dist.all_reduce(grads[0], group=tp.get_group())
        want, expected = reference()
        found += [abs(loss.item() - want), *map(relative_error, grads, expected)]
    assert len(calls) == 4
    return found


def test_a_vocabulary_split_over_ranks(ranks: Any) -> None:
    for found in ranks(4, split_vocabulary):
        assert max(found) <= 1e-10


@on_ranks
def banned(first: int, last: int) -> list[float]:
    """The errors of a loss and of its gradients where a bias of -inf bans some of 8 classes, 4 on each of two ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
    handler, x = ContextParallelHandler(mesh["cp"], "contiguous"), torch.randn(2, 6, 5, dtype=torch.float64)
    labels, head = (1 + torch.arange(12).view(2, 6)) % 8, nn.Linear(5, 8).double()
    labels = torch.where((labels >= first) & (labels < last), 1, labels)
    head.bias.data[first:last] = -torch.inf
    for parameter in (x, *head.parameters()):
        dist.broadcast(parameter.data, 0)
    hidden, theirs = x.clone().requires_grad_(), x.requires_grad_()
    expected = F.cross_entropy(head(theirs).flatten(0, 1), labels.flatten())
    wanted = torch.autograd.grad(expected, (theirs, head.weight))
    parallelize_module(head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    loss = handler.mean_loss(hidden, labels, head=head, elsewhere=True)
    loss.backward()
    found = hidden.grad, full(head.weight.grad)
    return [abs(loss.item() - expected.item()), *map(relative_error, found, wanted)]


@pytest.mark.parametrize(("first", "last"), [(4, 5), (0, 1), (4, 8)])
def test_classes_of_a_split_vocabulary_that_a_bias_bans(ranks: Any, first: int, last: int) -> None:
    for found in ranks(2, banned, first, last):
        assert max(found) <= 1e-12


@on_ranks
def split_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"], mesh["tp"]
    handler, (ids, labels) = ContextParallelHandler(cp, "contiguous"), data()

    def run(style: Any, hidden: Any = None, head: Any = None) -> str:
        model: Any = Body().double()
        model = model if style is None else parallelize_module(model, tp, {"output": style})
        head, hidden = head(model) if head else model.output, model(ids) if hidden is None else hidden(model)
        return error_of(lambda: handler.mean_loss(hidden, labels, head=head))

    def placed(placement: Any) -> Any:
        return lambda model: distribute_tensor(model(ids).detach(), tp, [placement])

    resharded = fully_shard(Body().double(), mesh=tp, reshard_after_forward=True)
    hidden = resharded(ids)
    return [
        run(RowwiseParallel()),
        run(ColwiseParallel()),
        run(ColwiseParallel(), head=lambda model: model.output.weight),
        run(ColwiseParallel(), placed(Shard(1)), lambda model: model.output.weight),
        error_of(lambda: handler.mean_loss(hidden, labels, head=resharded.output)),
    ]


def test_other_placements_are_refused(ranks: Any) -> None:
    words = [
        "Only a vocabulary that one dimension of a mesh splits",
        r"left on this rank. The head splits its output. Use ColwiseParallel\(output_layouts=Replicate\(\)\)",
        "hidden is a local tensor. If that is FSDP.*If it is tensor parallelism",
        "Redistribute it to Replicate",
        "apply fully_shard to the head too",
    ]
    for found in ranks(2, split_refusals):
        for message, pattern in zip(found, words, strict=True):
            assert message.startswith("ValueError") and re.search(pattern, message), message


# --------------------------------------------------------------------------- wrong use


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_wrong_arguments_are_refused() -> None:
    hidden, labels, head = torch.zeros(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.int64), nn.Linear(WIDTH, VOCABULARY)
    for change, kind, words in [
        ({"hidden": hidden[..., :3]}, ValueError, "hidden has shape"),
        ({"labels": labels[:, :3]}, ValueError, "hidden has shape"),
        ({"labels": labels + VOCABULARY}, ValueError, "labels has the value 11, but the head has 11 classes"),
        ({"labels": labels.float()}, TypeError, "labels are torch.float32"),
        ({"hidden": labels}, TypeError, "hidden is torch.int64"),
        ({"hidden": hidden.double()}, ValueError, "hidden is torch.float64 and the head's weight torch.float32"),
        ({"head": "lm_head"}, TypeError, "head is a str"),
        ({"head": nn.Sequential(head)}, TypeError, "head is a Sequential"),
        ({"head": Scaled(WIDTH, VOCABULARY)}, TypeError, "head is a Scaled"),
        ({"head": torch.zeros(VOCABULARY * WIDTH)}, ValueError, r"instead of \[vocabulary, width\]"),
    ]:
        with pytest.raises(kind, match=words):
            log_probs(**{"hidden": hidden, "labels": labels, "head": head, "logits": Logits(), **change})  # type: ignore[arg-type]
    for bad, kind, words in [
        ({"softcap": 0.0}, ValueError, "softcap=0.0 must be"),
        ({"softcap": "x"}, TypeError, "softcap is a str"),
        ({"scale": None}, TypeError, "scale is a NoneType"),
        ({"chunk": 0}, ValueError, "chunk=0"),
        ({"chunk": 1.5}, TypeError, "chunk is a float"),
        ({"ignore_index": None}, TypeError, "ignore_index=None"),
    ]:
        with pytest.raises(kind, match=words):
            Logits(**bad)  # type: ignore[arg-type]
    assert "forward" not in vars(head)  # nothing is left of the calls that failed


def test_hooks_of_a_head_may_observe_and_not_change() -> None:
    hidden, labels, head = torch.ones(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.int64), nn.Linear(WIDTH, VOCABULARY)
    seen: list[Any] = []

    def once(*given: Any) -> None:
        seen.append(given)
        handle.remove()

    def in_place(module: Any, given: Any, out: Tensor) -> None:
        out.mul_(2)

    plainly = log_probs(hidden, labels, head, Logits())
    doubled = log_probs(2 * hidden, labels, head, Logits())
    handle = head.register_forward_hook(once)
    assert torch.equal(log_probs(hidden, labels, head, Logits()), plainly) and len(seen) == 1
    assert torch.equal(log_probs(hidden, labels, head, Logits()), plainly) and len(seen) == 1  # it has removed itself
    with head.register_forward_pre_hook(lambda _, given: (2 * given[0],)):  # hidden states are what they are
        assert torch.equal(log_probs(hidden, labels, head, Logits()), doubled)
    for register, hook in [
        (head.register_forward_hook, lambda _, given, out: 2 * out),
        (head.register_forward_hook, in_place),
        (head.register_full_backward_pre_hook, lambda _, grads: None),
    ]:
        with torch.no_grad(), register(hook), pytest.raises(TypeError, match="which changes logits or their gradients"):
            log_probs(hidden, labels, head, Logits())
        assert torch.equal(log_probs(hidden, labels, head, Logits()), plainly)
