"""pool: sums, means and last tokens of documents, and their gradients, against each document alone on one device."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.transformers import prepare_batch, prepare_model
from tests.harness.hf_models import InDouble, make, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks

LENGTHS, PROMPT, SCALE = (13, 5, 4, 7), 2, 0.05  # four documents, whose first labels do not count


class Policy(nn.Module):
    """Log-probabilities of labels, and two values for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = make("llama")
        torch.manual_seed(5)
        self.values = nn.Linear(32, 2).double()

    def forward(self, loss: Any, given: dict[str, Any]) -> Tensor:
        hidden = self.llm.model(**given, use_cache=False).last_hidden_state
        return loss(hidden, self.llm.lm_head, self.values(hidden))


def loss_of(sums: Tensor, kl: Tensor, last: Tensor) -> Tensor:
    """A loss of pairs, of groups and of rewards: of ``[4]``, ``[4]`` and ``[4, 2]``."""
    pairs = -F.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()
    return pairs + kl.view(2, 2).mean(1).square().sum() + last.tanh().sum()


def distance(ours: Tensor, theirs: Any) -> Tensor:
    return (theirs - ours).exp() - (theirs - ours) - 1


def one_device(policy: Policy, documents: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients, each document by itself. The reference has log-probabilities of -3."""
    found = []
    for ids in documents:
        hidden = policy.llm.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        chosen = (
            policy.llm.lm_head(hidden).mul(SCALE).log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)[PROMPT - 1 :]
        )
        found.append((chosen.sum(), distance(chosen, -3.0).mean(), policy.values(hidden)[-1]))
    loss = loss_of(*(torch.stack(x) for x in zip(*found, strict=True)))
    return loss.detach(), list(torch.autograd.grad(loss, list(policy.parameters())))


@on_ranks
def trained() -> dict[str, float]:
    """Errors of the loss and of gradients in every way of reducing them, for packed and padded documents."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), {}
    rows, alone = [tokens(60 + n, 1)[0, :n] for n in LENGTHS], Policy()
    with InDouble():
        want, expected = one_device(alone, rows)
    for packed in (True, False):
        ids = torch.cat(rows)[None] if packed else nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels, attended = ids.clone(), torch.arange(13) < torch.tensor(LENGTHS)[:, None]
        starts = torch.tensor([0, *LENGTHS]).cumsum(0)
        for start in starts[:-1] if packed else [0]:
            labels[:, start : start + PROMPT] = -100
        batch: dict[str, Any] = {"input_ids": ids, "labels": labels if packed else labels.where(attended, -100)}
        batch |= {"cu_seqlens": starts} if packed else {"attention_mask": attended.long()}
        style = ContextParallel(ulysses_degree=1, layout="per_document" if packed else "head_tail")
        handler = ContextParallelHandler(mesh, style)
        local = prepare_batch(handler, batch, labels_cross_documents=False)
        shifted = local["shift_labels"]
        given = {name: local[name] for name in ("input_ids", "position_ids", "context_parallel")}
        documents: Any = {"documents": starts} if packed else {"length": 13}
        mine = None if packed else handler.dispatch(attended, 1, pad_value=0)

        def split(hidden: Tensor, head: nn.Module, values: Tensor, how: str) -> Tensor:
            ours = handler.log_probs(hidden, shifted, head=head, scale=SCALE)
            options = {**documents, "gradients": how}
            sums = handler.pool(ours, "sum", **options).flatten()
            counts = shifted != -100
            kl = handler.pool(distance(ours, -3.0), "mean", mask=counts, **options).flatten()
            return loss_of(sums, kl, handler.pool(values, "last", mask=mine, **options).flatten(0, 1))

        for wrapper in ("plain", "ddp", "fsdp"):
            model = policy = Policy()
            prepare_model(policy.llm, mesh, style=style)
            how = "sum" if wrapper == "plain" else "mean"
            if wrapper == "ddp":
                model = DistributedDataParallel(policy)  # type: ignore[assignment]
            elif wrapper == "fsdp":
                for layer in policy.llm.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(policy, mesh=mesh)
            with InDouble():
                loss = model(lambda *x, how=how: split(*x, how), given)
                (loss / mesh.size() if how == "sum" else loss).backward()
            name = f"{wrapper}, {'packed' if packed else 'padded'}"
            found[f"loss: {name}"] = relative_error(loss.detach(), want)
            grads: Any = [p.grad for p in policy.parameters()]
            for g in grads if how == "sum" else ():
                dist.all_reduce(g)
            grads = [g.full_tensor() if wrapper == "fsdp" else g for g in grads]
            found[name] = max(map(relative_error, grads, expected))
    return found


def test_gradients_are_those_of_each_document_alone(ranks: Any) -> None:
    for found in ranks(3, trained):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def values_and_refusals() -> list[str]:
    """Reductions of whole numbers, of rows with different documents; and the errors of wrong uses."""
    mesh = init_device_mesh("cpu", (2,))
    handler = ContextParallelHandler(mesh, "head_tail")
    x = torch.arange(22.0).view(2, 11)
    x[1, 4] = torch.nan  # does not count
    share, mask = handler.dispatch(x, 1, pad_value=9), handler.dispatch(~x.isnan(), 1, pad_value=True)
    ragged: Any = {"documents": [[0, 4, 11], [0, 1, 5, 11]], "mask": mask, "gradients": None}
    for reduce, want in (
        ("sum", [[6.0, 49.0, 0.0], [11.0, 39.0, 111.0]]),
        ("mean", [[1.5, 7.0, 0.0], [11.0, 13.0, 18.5]]),
        ("last", [[3.0, 10.0, 0.0], [11.0, 14.0, 21.0]]),
    ):
        assert handler.pool(share, reduce, **ragged).tolist() == want
    documents: Any = [[0, 4, 11], [0, 1, 10]]  # padding begins at another place in each row
    for given in (documents, None):
        with handler.documents(documents if given is None else None):
            sums = handler.pool(share, "sum", mask=mask, documents=given, gradients=None)
        assert sums.tolist() == [[6.0, 49.0], [11.0, 129.0]]
    nothing = handler.pool(share, "mean", mask=torch.zeros_like(share))
    assert nothing.tolist() == [[0.0], [0.0]]
    wide = handler.pool(share[..., None].expand(-1, -1, 3).bfloat16(), "last", length=11, gradients=None)
    assert wide.dtype == torch.float32 and wide.tolist() == [[[10.0] * 3], [[21.0] * 3]]
    compiled = torch.compile(lambda y: handler.pool(2 * y, "last", length=11, gradients=None), backend="eager")
    assert compiled(share).tolist() == [[20.0], [42.0]]
    batch = handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": torch.ones(2, 11).tril(10)})
    with handler.documents(batch):
        assert handler.pool(batch["x"], "last").tolist() == [[10.0], [21.0]]
    given = {"x": x.nan_to_num(), "cu_seqlens": [0, 4, 9], "cu_seqlens_padded": [0, 5, 11]}  # padding in 4 and 9, 10
    with handler.documents(inside := handler.get_batch_on_this_cp_rank(given)):
        assert handler.pool(inside["x"], "sum").tolist() == [[6.0, 35.0], [50.0, 90.0]]
    ids = torch.tensor([[-1, 1, 1, -1, 0, 0, 0, 0, 0, -1, -1], [1] * 4 + [2] * 7])  # padding in four places
    for name in ("document_ids", "seq_idx"):
        also: dict[str, Any] = {} if name == "seq_idx" else {"cu_seqlens": [[0, 1, 3, 4, 9, 11], [0, 4, 11]]}
        given = {"x": x.nan_to_num(), name: ids, **also}
        with handler.documents(inside := handler.get_batch_on_this_cp_rank(given)):
            assert handler.pool(inside["x"], "sum").tolist() == [[3.0, 30.0], [50.0, 111.0]]
    with handler.documents(document_ids=ids):
        assert handler.pool(handler.dispatch(x.nan_to_num(), 1, pad_value=9), "sum").tolist()[0] == [3.0, 30.0]
    before = torch.ones(2, 11)
    before[0, :4] = before[1, 9:] = 0
    with handler.documents(inside := handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": before})):
        assert handler.pool(inside["x"], "last", mask=mask).tolist() == [[10.0], [19.0]]
        assert handler.pool(inside["x"], "sum", documents=[0, 11], mask=mask).tolist() == [[49.0], [120.0]]
    given = {"x": x.nan_to_num(), "cu_seqlens": [0, 4, 11], "attention_mask": torch.ones(2, 11).tril(8)}
    with handler.documents(inside := handler.get_batch_on_this_cp_rank(given)):
        for documents in (None, [0, 4, 11]):
            assert handler.pool(inside["x"], "sum", documents=documents).tolist() == [[6.0, 30.0], [50.0, 90.0]]
        counted, parts = handler.dispatch(torch.ones(2, 11).tril(8), 1, pad_value=0), [0, 1, 4, 6, 11]
        sums = handler.pool(inside["x"], "sum", documents=parts, mask=counted)
        assert sums.tolist() == [[0.0, 6.0, 9.0, 21.0], [11.0, 39.0, 16.0, 74.0]]
        others = error_of(lambda: handler.pool(inside["x"], "sum", documents=parts))
        assert "which are not those of this handler.documents block, whose batch has padding" in others
    twos = 2 * torch.ones(2, 11, dtype=torch.uint8).triu(8)  # rows of three and of two tokens that count
    for dtype, how in ((torch.uint8, "sum"), (torch.int64, "sum"), (torch.int64, "mean"), (torch.int64, "last")):
        sums = handler.pool(share, how, mask=handler.dispatch(twos.to(dtype), 1, pad_value=0), length=11)
        wanted = {"sum": [[54.0], [82.0]], "mean": [[9.0], [20.5]], "last": [[10.0], [21.0]]}
        assert sums.tolist() == wanted[how]
    weights = torch.rand(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine, whole = (handler.dispatch(y, 1, pad_value=0).requires_grad_() for y in (weights, x.nan_to_num().double()))
    for reduce in ("sum", "mean"):
        found = handler.pool(whole, reduce, mask=mine, length=11, gradients=None)
        theirs, weight = x.nan_to_num().double().requires_grad_(), weights.clone().requires_grad_()
        expected = (theirs * weight).sum(1, keepdim=True) / (weight.sum(1, keepdim=True) if reduce == "mean" else 1)
        torch.testing.assert_close(found, expected)
        ours, wanted = (
            torch.autograd.grad(y.square().sum(), z) for y, z in ((found, (whole, mine)), (expected, (theirs, weight)))
        )
        torch.testing.assert_close(ours, tuple(handler.dispatch(y, 1, pad_value=0) for y in wanted))
    added = torch.zeros_like(mine).masked_fill(torch.tensor([dist.get_rank() == 1]), torch.finfo().min)
    by_documents = ContextParallelHandler(mesh, "per_document")
    return [
        *(error_of(lambda how=how: handler.pool(share, how, mask=added, length=11)) for how in ("mean", "last")),
        error_of(lambda: handler.pool(batch["x"], "sum")),
        error_of(lambda: handler.pool(share, "max", length=11)),
        error_of(lambda: handler.pool(share.int(), length=11)),
        error_of(lambda: handler.pool(share, length=8)),
        error_of(lambda: handler.pool(share, mask=x > 0)),
        error_of(lambda: handler.pool(share, length=11, gradients="total")),
        error_of(lambda: handler.pool(share, documents=[0, 5, 6])),
        error_of(lambda: by_documents.pool(share, length=11)),
    ]


@on_ranks
def numbers_of_first_labels(hidden: bool, masked: bool) -> tuple[list[float], list[str]]:
    """Sums in the block of a batch whose second row has padding before its tokens, and what was warned of.

    ``hidden``: its first label is ignored. ``masked``: the mask of the labels is passed."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    ids = torch.arange(16).view(2, 8)
    labels = ids.masked_fill(torch.tensor([[-1], [3 if hidden else 2]]) >= torch.arange(8), -100)
    whole = {"ids": ids, "labels": labels, "attention_mask": (torch.tensor([[0], [3]]) <= torch.arange(8)).long()}
    batch = handler.get_batch_on_this_cp_rank(whole, shift_labels=True)
    counts = batch["shift_labels"] != -100
    with handler.documents(batch), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"mask": counts} if masked else {}
        found = handler.pool(batch["shift_labels"].double() * counts, "sum", gradients="mean", **given)
        handler.pool(batch["ids"].double(), "sum", mask=batch["attention_mask"], gradients="mean")
    return found.flatten().tolist(), [str(x.message) for x in caught]


def test_labels_of_first_tokens_behind_padding_are_warned_of(ranks: Any) -> None:
    for masked in (False, True):
        ((sums, texts), (other, none)) = ranks(2, numbers_of_first_labels, False, masked)
        assert sums == other == [28.0, 54.0] and not none, "65.0 with the first label, 11"
        assert [x[:51] for x in texts] == ["pool leaves out padding, and with it the last one b"], texts
        for sums, texts in ranks(2, numbers_of_first_labels, True, masked):
            assert sums == [28.0, 54.0] and not texts


def test_values_and_refusals(ranks: Any) -> None:
    expected = [
        *["ValueError: mask of pool holds numbers of -10000 or less, or NaN, on one rank at least. Those of an"] * 2,
        "ValueError: x of shape (2, 6) comes without length, and this batch of 11 positions was padded to 12",
        "ValueError: reduce='max' is unknown",
        "ValueError: x has shape (2, 6) and dtype torch.int32",
        "ValueError: length=8 pads to 8 positions. The ranks hold 12",
        "ValueError: mask has shape (2, 11), and x holds 2 x 6 tokens",
        "ValueError: gradients='total' is unknown",
        "ValueError: documents=[0, 5, 6, 8] must be",
        "ValueError: pool got no documents with layout='per_document'",
    ]
    for found in ranks(2, values_and_refusals):
        for text, start in zip(found, expected, strict=True):
            assert text.startswith(start), text


@on_ranks
def read_again(gradients: Any, degrees: tuple[int, ...], last: bool, flat: bool = False) -> list[Any]:
    """The error of the gradient of losses of tokens that read a pooled value again, and the warnings of ``mean_loss``
    or of a second ``pool``."""
    names = ("cp",) if len(degrees) == 1 else ("ring", "ulysses")
    handler = ContextParallelHandler(init_device_mesh("cpu", degrees, mesh_dim_names=names), "head_tail")
    handler.cp.batch.graphs_to_read = 4
    g = torch.Generator().manual_seed(3)
    whole, weights, counted = (torch.randn(2, 16, generator=g, dtype=torch.float64) for _ in range(3))
    one, shown = whole.clone().requires_grad_(), counted > -0.5
    ratio = ((one * shown).sum(1, keepdim=True) / shown.sum(1, keepdim=True)).exp()
    (ratio * weights + one.square()).mean().backward()
    share = handler.dispatch(whole, 1).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ratio = handler.pool(share, "mean", mask=handler.dispatch(shown, 1), length=16, gradients=gradients).exp()
        losses = ratio * handler.dispatch(weights, 1) + share.square()
        if last:
            loss = handler.pool(losses, "mean", length=16, gradients="mean").mean()
        else:
            loss = handler.mean_loss(losses.flatten() if flat else losses, gradients="mean")
    loss.backward()
    assert share.grad is not None and one.grad is not None
    mine = share.grad / handler.cp.size  # as an average over the ranks leaves it
    error = relative_error(mine, handler.dispatch(one.grad, 1))
    return [error, " ".join(str(x.message) for x in caught)]


@pytest.mark.parametrize("last", [False, True], ids=["mean_loss", "pool"])
@pytest.mark.parametrize("degrees", [(1,), (2,), (2, 2)], ids=str)
def test_a_pooled_value_that_tokens_read_again_has_the_gradient_of_all_ranks(
    ranks: Any, degrees: tuple[int, ...], last: bool
) -> None:
    for error, warned in ranks(math.prod(degrees), read_again, "shares", degrees, last):
        assert error <= 1e-12 and warned == ""


@pytest.mark.parametrize("last", [False, True], ids=["mean_loss", "pool"])
def test_a_pooled_value_that_tokens_read_again_without_its_gradient_is_warned_of(ranks: Any, last: bool) -> None:
    for error, warned in (
        *ranks(2, read_again, "mean", (2,), last),
        *ranks(2, read_again, "mean", (2,), last, flat=True),
    ):
        assert error > 0.01 and 'Pass gradients="shares" to that pool' in warned


@on_ranks
def of_documents() -> list[str]:
    """Warnings of a mean over losses of documents, which all ranks have alike."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "contiguous")
    handler.cp.batch.graphs_to_read = 4
    share = handler.dispatch(torch.rand(6, 16, 3), 1).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pooled = handler.pool(share, "mean", length=16, gradients="mean")[:, 0]
        handler.mean_loss(pooled.square().sum(1), gradients="mean", elsewhere=True)
        handler.mean_loss(pooled, torch.zeros(6, dtype=torch.int64), gradients="mean", elsewhere=True)
    return [str(x.message) for x in caught]


def test_losses_of_pooled_documents_are_not_warned_of(ranks: Any) -> None:
    assert ranks(2, of_documents) == [[], []]


@on_ranks
def sequence_first() -> list[str]:
    """Errors of values [S/n, B, ...] in the block of a batch without padding, and sums of [B, S/n] and of others."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    x = torch.arange(24.0).view(8, 3)
    batch = handler.get_batch_on_this_cp_rank({"tokens": x.long(), "labels": x.long()}, 0)
    share, labels, head = handler.dispatch(x, 0), batch["labels"], torch.randn(24, 5)
    with handler.documents(batch):
        assert handler.pool(share.T, "sum", gradients=None).flatten().tolist() == x.sum(0).tolist()
        assert handler.pool(torch.ones(4, 2), "sum", gradients=None).tolist() == [[4.0]] * 4  # of another sequence
        assert handler.log_probs(torch.randn(3, 4, 5), labels.T, head=head, gather=True).shape == (3, 8)
        return [
            error_of(lambda: handler.pool(share, "sum")),
            error_of(lambda: handler.log_probs(torch.randn(4, 3, 5), labels, head=head, gather=True)),
        ]


def test_values_with_the_sequence_first_are_refused(ranks: Any) -> None:
    for found in ranks(2, sequence_first):
        for name, error in zip(("x", "labels"), found, strict=True):
            assert error.startswith(f"ValueError: {name} has shape (4, 3), and this rank has 4 tokens in each of"), (
                error
            )


@on_ranks
def without_rows(length: int) -> list[Any]:
    """Shapes and values of a batch of 0 rows, as the last one of a loader of one rank may be."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    x, labels = torch.randn(0, length, 3, requires_grad=True), torch.zeros(0, length, dtype=torch.int64)
    batch = handler.get_batch_on_this_cp_rank({"x": x, "labels": labels})
    with handler.documents(batch):
        share, mine = batch["x"], batch["labels"]
        losses = [
            handler.mean_loss(share, mine, gradients="sum", elsewhere=True),
            handler.mean_loss(share.flatten(0, 1), mine.flatten(), gradients="sum", elsewhere=True),
            handler.mean_loss(share, mask=torch.ones_like(share), gradients="sum", elsewhere=True),
        ]
        found = [handler.pool(share, how, gradients=None) for how in ("sum", "mean", "last")]
        found += [
            handler.pool(share[..., 0], "sum", gradients=None),
            handler.combine(share, 1, length=length, gradients=None),
        ]
    (sum(losses) + sum(y.sum() for y in found)).backward()  # type: ignore[arg-type]
    return [*map(float, losses), *(tuple(y.shape) for y in found)]


@pytest.mark.parametrize("length", [8, 7])
def test_batches_without_rows(ranks: Any, length: int) -> None:
    assert ranks(2, without_rows, length) == [[0.0] * 3 + [(0, 1, 3)] * 3 + [(0, 1), (0, length, 3)]] * 2
