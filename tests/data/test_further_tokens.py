"""Multi-token prediction: tokens and labels k positions on over a split sequence, against documents one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.attention_case import FP64, cp_mesh
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

VOCABULARY, WIDTH, DEPTH = 19, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A block, and after it one for each further token, as in DeepSeek V3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1 + DEPTH))
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(DEPTH))
        self.double()

    def forward(self, tokens: list[Tensor], positions: Tensor) -> list[Tensor]:
        hidden = [self.blocks[0](self.embed(tokens[0]) + self.positions(positions))]
        for join, block, further in zip(self.join, self.blocks[1:], tokens[1:], strict=True):
            hidden.append(block(join(torch.cat([hidden[-1], self.embed(further)], -1))))
        return hidden


BOUNDS = {"packed": [0, 5, 6, 8, 17, 21], "padded": [0, 21], "plain": [0, 21]}
PADDING = ((4, 21), (0, 14))
"""The tokens of each row of the padded batch."""
WEIGHTS = (1.0, 0.3, 0.2)


def batch_of(kind: str) -> dict[str, Any]:
    ids = torch.randint(1, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(2))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, 9] = -100  # a token of a prompt, say
    if kind == "packed":
        batch["cu_seqlens"] = torch.tensor(BOUNDS[kind])
    if kind == "padded":
        batch["attention_mask"] = torch.stack([(torch.arange(21) >= a) & (torch.arange(21) < b) for a, b in PADDING])
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["labels"][0, 4] = -100  # padding does not predict the first token
    return batch


def alone(kind: str) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients on one device, which runs every document of every row by itself."""
    model, batch, losses = Model(), batch_of(kind), [[] for _ in WEIGHTS]
    for row in range(2):
        bounds = PADDING[row] if kind == "padded" else BOUNDS[kind]
        for start, stop in pairwise(bounds):
            ids, labels = (batch[name][row, start:stop] for name in ("input_ids", "labels"))
            further = [F.pad(ids[k:], (0, min(k, len(ids)))) for k in range(1 + DEPTH)]
            positions = torch.arange(len(ids)) + (0 if kind == "packed" else start)
            hidden = model([x[None] for x in further], positions[None])
            for k, x in enumerate(hidden):
                valid = max(0, len(ids) - k - 1)
                logits, right = model.head(x[0, :valid]), labels[k + 1 :]
                losses[k].append(F.cross_entropy(logits, right, reduction="none")[right != -100])
    loss = sum(weight * torch.cat(of).mean() for weight, of in zip(WEIGHTS, losses, strict=True))
    return loss.detach(), [*torch.autograd.grad(loss, [*model.parameters()])]


@on_ranks
def errors_of(kind: str, style: dict[str, Any]) -> tuple[float, float]:
    made = ContextParallel(qkv_indices=None, **style)
    model = parallelize_module(Model(), cp_mesh(), {"blocks.*": made})
    handler = ContextParallelHandler(cp_mesh(), made)
    batch = handler.get_batch_on_this_cp_rank(batch_of(kind), shift_labels=True, mtp_depth=DEPTH)
    names = ["", *(f"_{k}" for k in range(1, 1 + DEPTH))]
    with handler.documents(batch):
        hidden = model([batch[f"input_ids{name}"] for name in names], batch["position_ids"])
        losses = [
            handler.mean_loss(x, batch[f"shift_labels{name}"], head=model.head, gradients="sum")
            for x, name in zip(hidden, names, strict=True)
        ]
    loss = sum(weight * x for weight, x in zip(WEIGHTS, losses, strict=True))
    grads = sum_over_ranks(*torch.autograd.grad(loss, [*model.parameters()]))
    want, right = alone(kind)
    return relative_error(loss, want), max(relative_error(a, b) for a, b in zip(grads, right, strict=True))


@pytest.mark.parametrize(("kind", "world"), [("plain", 2), ("padded", 3), ("packed", 4)])
def test_losses_of_further_tokens(ranks: Any, kind: str, world: int) -> None:
    for layout in ("contiguous", "head_tail"):
        style = {"ulysses_degree": 1, "kv_exchange": "ring", "layout": layout}
        assert max(max(x) for x in ranks(world, errors_of, kind, style)) <= FP64, layout


@on_ranks
def entries() -> None:
    handler = ContextParallelHandler(cp_mesh(), "contiguous")
    ids = torch.arange(1, 9)[None]
    whole = {"tokens": ids, "labels": ids, "document_ids": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]])}
    found = handler.get_batch_on_this_cp_rank(whole, shift_labels=True, mtp_depth=2, pad_values={"tokens": 18})
    assert list(found) == [
        "tokens",
        "shift_labels",
        *("tokens_1", "shift_labels_1", "tokens_2", "shift_labels_2"),
        "position_ids",
    ]
    assert found["tokens_1"].tolist() == [[2, 3, 18, 18, 6, 7, 8, 18]]
    assert found["tokens_2"].tolist() == [[3, 18, 18, 18, 7, 8, 18, 18]]
    assert found["shift_labels_1"].tolist() == [[3, -100, -100, -100, 7, 8, -100, -100]]
    assert found["shift_labels_2"].tolist() == [[-100] * 4 + [8, -100, -100, -100]]
    crossing = handler.get_batch_on_this_cp_rank(whole, shift_labels=True, mtp_depth=9, labels_cross_documents=True)
    assert crossing["tokens_1"].tolist() == [[2, 3, 4, 5, 6, 7, 8, 0]]
    assert crossing["shift_labels_1"].tolist() == [[3, 4, 5, 6, 7, 8, -100, -100]]
    assert crossing["shift_labels_9"].tolist() == [[-100] * 8] and crossing["tokens_9"].tolist() == [[0] * 8]
    get = handler.get_batch_on_this_cp_rank
    for padding, want in {  # whose labels are those that input_ids have there
        "11110000": [3, 4] + [-100] * 6,
        "00001111": [-100] * 4 + [7, 8, -100, -100],
    }.items():
        mask = torch.tensor([[*map(int, padding)]])
        for x, shown, dim in ((ids, mask, 1), (ids.T, mask.T, 0), (ids[0], mask, 0)):
            padded = {"tokens": x, "labels": x, "attention_mask": shown}
            dims = {"tokens": dim, "labels": dim, "attention_mask": 1 if shown is mask else 0}
            made = get(padded, dims, shift_labels=True, mtp_depth=1)
            assert made["shift_labels_1"].flatten().tolist() == want and made["shift_labels_1"].shape == x.shape
    for words, call in {
        "mtp_depth=-1 must be a non-negative int": lambda: get(whole, shift_labels=True, mtp_depth=-1),
        "mtp_depth=1 without shift_labels=True": lambda: get(whole, mtp_depth=1),
        "batch has an entry 'tokens_1'": lambda: get({**whole, "tokens_1": ids}, shift_labels=True, mtp_depth=1),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_entries_and_errors(ranks: Any) -> None:
    ranks(1, entries)


@on_ranks
def accumulated() -> list[float]:
    """Errors of losses of further tokens over three micro-batches, of which each has other numbers of labels."""
    handler, found = ContextParallelHandler(cp_mesh(), "head_tail"), []
    wholes = [batch_of(kind) for kind in BOUNDS]
    values = [torch.rand(2, 21, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    for whole, x in zip(wholes, values, strict=True):
        whole["values"] = x
    sums = torch.zeros(1 + DEPTH, 2, dtype=torch.float64)  # of values that count, and their number
    for kind, whole in zip(BOUNDS, wholes, strict=True):
        for row in range(2):
            for start, stop in pairwise(PADDING[row] if kind == "padded" else BOUNDS[kind]):
                for k in range(1 + DEPTH):
                    here = whole["labels"][row, start + k + 1 : stop] != -100
                    counted = whole["values"][row, start : max(start, stop - k - 1)][here]
                    sums[k] += torch.tensor([counted.sum(), counted.numel()])
    for accumulate in (3, 1):
        losses = torch.zeros(1 + DEPTH, dtype=torch.float64)
        for batch in handler.loader(wholes, accumulate=accumulate, shift_labels=True, mtp_depth=DEPTH):
            for k, weight in enumerate(batch.weights):
                labels = batch[f"shift_labels_{k}" if k else "shift_labels"]
                with handler.documents(batch):
                    losses[k] += handler.mean_loss(batch["values"], labels, elsewhere=True) * weight
            assert len(batch.weights) == 1 + DEPTH and batch.weight == batch.weights[0]
        found += [(losses - sums[:, 0] / sums[:, 1]).abs().max().item()]
    return found


def test_micro_batches_weigh_as_much_as_they_have_labels_of_each_token(ranks: Any) -> None:
    for error, alone in ranks(2, accumulated):
        assert error <= 1e-12 and alone > 0.1
