"""Losses that prepared models return: those that are not the rank's part of the batch's are refused, however they are
written; and what a forward gets of its batch."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from hyper_cp import context_parallel_mesh, split_cp_mesh
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import InDouble, make, prepare_batch, prepared, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

hf: Any = pytest.importorskip("transformers")
IGNORE = -100


def shifts(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss as transformers wrote it for years, whose variable has the name of an argument of today's."""
    shift_labels = labels[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), shift_labels)


def mean(logits: Tensor, shift_labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def focal(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    return ((1 - torch.exp(-losses)) * losses).sum() / num_items_in_batch


def penalised(output: Any) -> Any:
    if output.loss is not None:
        output.loss = output.loss + 0.01 * output.logits.logsumexp(-1).square().mean()
    return output


def around(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return penalised(forward(*args, **kwargs))

    return run


class Method(hf.LlamaForCausalLM):
    def loss_function(self, logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return shifts(logits, labels, vocab_size)


class Criterion(hf.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **{k: x for k, x in kwargs.items() if k != "shift_labels"})
        output["loss"] = nn.CrossEntropyLoss()(output.logits[:, :-1].mT, labels[:, 1:])  # type: ignore[index]
        return output


class Derived(Criterion):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, "use_cache": False})


class Helper(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.changed(super().forward(*args, **kwargs))

    changed = staticmethod(penalised)


class InEvaluation(Helper):
    """Its term is there in training only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if self.training else hf.LlamaForCausalLM.forward(self, *args, **kwargs)


class Decorated(hf.LlamaForCausalLM):
    forward = around(hf.LlamaForCausalLM.forward)


class Targets(hf.LlamaForCausalLM):
    """Its labels have another name."""

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output["loss"] = None if targets is None else F.cross_entropy(output.logits.mT, targets)
        return output


def of_user(case: str) -> Any:
    """A Llama with a loss of the user's."""
    model = make("llama")
    kinds = (Method, Criterion, Derived, Helper, InEvaluation, Decorated, Targets)
    model.__class__ = {kind.__name__: kind for kind in kinds}.get(case, type(model))
    functions = {"shifts": shifts, "partial": functools.partial(shifts), "mean": mean, "focal": focal}
    if case in functions:
        model.loss_function = functions[case]
    if case == "around":
        model.forward = around(model.forward)
    if case == "hook":
        model.register_forward_hook(lambda module, args, output: penalised(output))
    return model


@on_ranks
def refused(case: str, chunked: bool = False) -> str:
    from hyper_cp.hf import prepare_model

    model, batch = of_user(case), {"input_ids": tokens(24), "labels": tokens(24)}
    if chunked:
        _, handler = prepared(make("llama"))
        return error_of(lambda: prepare_model(model, handler.mesh, style=handler.style_of_model, chunked_loss=True))
    model, handler = prepared(model)
    local = prepare_batch(handler, batch)
    if case == "InEvaluation":
        model.eval()(**local)
        model.train()
    if case == "Targets":
        local = prepare_batch(handler, {"input_ids": batch["input_ids"]}) | {"targets": local["shift_labels"]}
    return error_of(lambda: model(**local))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        *((case, "does not read shift_labels") for case in ("shifts", "partial", "Method")),
        *((case, "returned another loss than that of its logits") for case in ("Helper", "InEvaluation", "Decorated")),
        *((case, "returned another loss than that of its logits") for case in ("around", "hook", "Derived")),
        ("Criterion", "its forward computes the loss"),
        ("mean", "whose result is not divided by num_items_in_batch"),
        ("Targets", "returned a loss without labels"),
    ],
)
def test_losses_of_users_that_are_not_parts_are_refused(ranks: Any, case: str, words: str) -> None:
    """Before, each was a number for which one device has another one, without a word."""
    for found in ranks(2, refused, case):
        assert found.startswith("NotImplementedError") and words in found, found


def test_a_loss_function_of_a_class_and_chunks_exclude_each_other(ranks: Any) -> None:
    for found in ranks(2, refused, "Method", True):
        assert "Method has a loss_function of its own" in found, found


@on_ranks
def replaced_in_table() -> str:
    from transformers.loss import loss_utils

    kept = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = shifts
    try:
        model, handler = prepared(make("llama"))
        local = prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)})
        return error_of(lambda: model(**local))
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = kept


def test_a_loss_in_the_table_of_transformers_is_refused(ranks: Any) -> None:
    for found in ranks(2, replaced_in_table):
        assert "does not read shift_labels" in found, found


def with_weights(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **kwargs: Any) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    return (losses * kwargs["token_weights"].flatten()).sum() / num_items_in_batch


def of_constant(logits: Tensor, shift_labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum") / 30


def with_noise(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> Tensor:
    logits = F.dropout(logits.flatten(0, 1), 0.1)
    return F.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / num_items_in_batch


def communicates(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> Tensor:
    loss = focal(logits, shift_labels, num_items_in_batch)
    dist.all_reduce(loss.detach().clone())
    return loss


@on_ranks
def right_losses() -> list[str]:
    """Errors of forwards with losses of the user's that are right."""
    found, batch = [], {"input_ids": tokens(24), "labels": tokens(24)}
    for function in (with_weights, of_constant, with_noise, communicates):
        model, handler = prepared(make("llama"))
        model.loss_function = function
        given = {**batch, "token_weights": torch.ones(2, 24)} if function is with_weights else batch
        if function is communicates:  # one rank has no label
            given = {**batch, "labels": batch["labels"].index_fill(1, torch.arange(12, 24), IGNORE)}
        local = prepare_batch(handler, given)
        found.append(error_of(lambda model=model, local=local: model(**local)))
    model, handler = prepared(make("llama"))
    local = prepare_batch(handler, batch)
    found.append(error_of(lambda: model(**{**local, "labels": local["shift_labels"]})))
    return found


def test_right_losses_of_users_are_taken(ranks: Any) -> None:
    """Those that read other arguments, divide by a number of their own, draw numbers or communicate."""
    for found in ranks(2, right_losses):
        assert found == [""] * 5


@on_ranks
def on_other_meshes() -> None:
    """Ranks that have compared their losses on one mesh, and others that have not, meet on a third one."""
    from hyper_cp import ContextParallel
    from hyper_cp.hf import prepare_model

    mesh = cp_mesh()
    model = prepare_model(make("llama"), mesh, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    family = split_cp_mesh(mesh)
    for degree in (2 if dist.get_rank() < 2 else 1, 4):
        with context_parallel_mesh(model, family.cp(degree)) as handler:
            model(**prepare_batch(handler, {"input_ids": tokens(16), "labels": tokens(16)}))


def test_losses_are_compared_on_each_mesh(ranks: Any) -> None:
    ranks(4, on_other_meshes)


@on_ranks
def own_sum() -> float:
    """The error of a loss of the user's that is a part of the batch's."""
    model, batch = of_user("focal"), {"input_ids": tokens(24), "labels": tokens(24)}
    with InDouble():
        shifted = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), IGNORE)], 1)
        want = focal(model(input_ids=batch["input_ids"]).logits, shifted, (shifted != IGNORE).sum())
        made, handler = prepared(model)
        loss = made(**prepare_batch(handler, batch)).loss
    return absolute_error(sum_over_ranks(loss)[0], want)


def test_a_loss_of_the_users_that_is_a_part(ranks: Any) -> None:
    assert max(ranks(2, own_sum)) < 1e-10


@on_ranks
def late(case: str) -> str:
    """The error of a forward whose labels were changed after their batch had been split, in the second step."""
    model, handler = prepared(make("llama"))
    for _ in range(2):
        local = prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)})
        if case == "both":
            local["labels"][:, 0] = local["shift_labels"][:, 0] = IGNORE
        model(**local)
    local = prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)})
    if case == "in place":
        local["labels"][:, 0] = IGNORE
    if case == "replaced":
        local["labels"] = torch.where(local["input_ids"] < 20, IGNORE, local["labels"])
    if case == "copied":
        local = copy.deepcopy(local) | {"context_parallel": local["context_parallel"]}
    return error_of(lambda: model(**local))


@pytest.mark.parametrize(
    ("case", "words"), [("in place", "had split"), ("replaced", "had split"), ("copied", ""), ("both", "")]
)
def test_labels_that_are_changed_late_are_refused(ranks: Any, case: str, words: str) -> None:
    """The loss reads shift_labels, which do not follow."""
    for found in ranks(2, late, case):
        assert words in found and bool(words) == bool(found), found


@on_ranks
def counted_share() -> list[int]:
    """Numbers of warnings of forwards whose number of labels is that of the share, and that of the batch."""
    found = []
    for share in (True, False):
        model, handler = prepared(make("llama"))
        local = prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)})
        if share:
            local["num_items_in_batch"] = (local["shift_labels"] != IGNORE).sum()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**local)
        found.append(len([w for w in caught if re.search("for a batch of 46 labels", str(w.message))]))
    return found


def test_a_number_of_labels_of_a_share_is_warned_of(ranks: Any) -> None:
    assert ranks(2, counted_share) == [[1, 0]] * 2


# --------------------------------------------------------------------------- what a forward gets


class Pair(hf.LlamaForCausalLM):
    """Calls its decoder for chosen and for rejected tokens."""

    def forward(self, input_ids: Tensor, rejected: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        chosen = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        batch = kwargs if self.hands_on else {"position_ids": kwargs["position_ids"]}
        return self.lm_head(torch.cat([chosen, self.model(input_ids=rejected, **batch).last_hidden_state]))


@on_ranks
def called_twice(case: str) -> str:
    model = make("llama")
    model.__class__ = Pair
    model.hands_on = case == "the whole batch"
    model, handler = prepared(model)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :7] = 0
    batch = {"input_ids": tokens(24)} | ({} if case == "without padding" else {"attention_mask": mask})
    local = prepare_batch(handler, batch)
    other = local["input_ids"].clone() if case == "the same tokens" else local["input_ids"].flip(1)
    return error_of(lambda: model(**local, rejected=other))


def test_a_decoder_that_is_called_for_other_tokens_is_refused_the_batch_of_the_first(ranks: Any) -> None:
    """Padding of one call is not that of another, unless the call is handed the same batch."""
    for found in ranks(2, called_twice, "other tokens"):
        assert re.search("forward of Pair calls module.*LlamaModel.* with other tokens a second time", found), found
    for case in ("the same tokens", "without padding", "the whole batch"):
        assert ranks(2, called_twice, case) == [""] * 2


@on_ranks
def one_config() -> list[float]:
    """Errors on a mesh of one rank of two prepared models that share a configuration object."""
    mesh = cp_mesh()
    first = make("llama")
    second = hf.LlamaForCausalLM(first.config).double()
    assert second.config is first.config
    want = [model(input_ids=tokens(24), use_cache=False).logits for model in (first, second)]
    from hyper_cp import ContextParallel
    from hyper_cp.hf import prepare_model

    models = [prepare_model(model, mesh, style=ContextParallel()) for model in (first, second)]
    alone = split_cp_mesh(mesh).cp(1)
    with context_parallel_mesh(models[0], alone), context_parallel_mesh(models[1], alone):
        got = [model(input_ids=tokens(24), use_cache=False).logits for model in models]
    return [absolute_error(a, b) for a, b in zip(got, want, strict=True)]


def test_models_that_share_a_configuration_change_their_mesh(ranks: Any) -> None:
    """Before, attention of the second one called itself."""
    assert max(max(found) for found in ranks(2, one_config)) < 1e-10


@on_ranks
def block_mask() -> str:
    model, handler = prepared(make("llama"))
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i // 6 == j // 6), 1, 1, 24, 24, device="cpu", BLOCK_SIZE=8)
    local = prepare_batch(handler, {"input_ids": tokens(24)})
    return error_of(lambda: model(**local, attention_mask=mask))


def test_a_block_mask_is_refused(ranks: Any) -> None:
    """Before, attention was causal, whatever the mask said."""
    for found in ranks(2, block_mask):
        assert "got a BlockMask as attention mask" in found, found


class Convolves(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.convolution = inner, nn.Conv1d(32, 32, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.convolution(x.mT).mT)


@on_ranks
def added() -> str:
    model, handler = prepared(make("llama"))
    layer = model.model.layers[0]
    layer.mlp = Convolves(layer.mlp)
    return error_of(lambda: model(**prepare_batch(handler, {"input_ids": tokens(24)})))


def test_modules_that_come_after_the_preparation_are_searched(ranks: Any) -> None:
    for found in ranks(2, added):
        assert "has Conv1d, which mixes positions" in found, found
