"""The loss that a model returns for labels: what would be wrong of it on a share of the sequence is refused.

Most is read from the code before anything runs. The first losses are computed a second time from the logits, too: a
term that a class, a function around the forward or a hook of the user's adds would count once for each rank.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...data.collectives import by_rank
from ...data.packing import PreparedBatch
from ...mesh.cp_mesh import CPMesh
from ...ops.writes import Written, writes
from . import router_loss
from .checks import decoder_of
from .chunked_loss import IGNORE
from .media import around
from .seams import is_foreign, loss_of_user, source_of

OWN_LOSS = re.compile(
    r"\bcross_entropy\(|\bloss = .*binary_cross_entropy|\b(nll|mse|l1|huber)_loss\(|\bkl_div\("
    r"|\b(CrossEntropy|BCE|BCEWithLogits|MSE|L1|NLL|KLDiv|Huber)Loss\b"
)
"""Code of a loss in a model's forward, in place of transformers' loss functions."""
LOSS_OF_TOKENS = {None, "ForCausalLM", "ForConditionalGeneration"}
"""Types of losses that honour shifted labels and the number of labels of the whole batch."""
ROWS = 1024
"""The number of tokens whose loss is computed again at once."""


def check_kind_of_loss(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise ``NotImplementedError`` for labels of a model whose loss is none of next tokens. (On one rank it would be
    divided by the number of shifted labels.)"""
    kind = getattr(model, "loss_type", None)
    if kwargs.get("labels") is not None and kind not in LOSS_OF_TOKENS:
        raise NotImplementedError(
            f"{type(model).__name__} got labels: its loss ({kind}) is a mean over this rank's share, in which labels "
            "are not shifted. Give them to prepare_batch as shift_labels, which are split as they are; take these out "
            "of what it returns, and pass logits and them to handler.mean_loss. In hyper_cp.hf.Trainer write a "
            "compute_loss that takes labels, shift_labels and num_items_in_batch out of its inputs, and returns "
            "self.handler.mean_loss(logits, labels), in a class with loss_is_scaled_for_ga = False"
        )


def check_labels(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise for labels of which a model's forward would make another loss than its part of that of the batch."""
    name = type(model).__name__
    check_kind_of_loss(model, kwargs)
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is not None:
        _check_own_loss(model)
    reason = why_loss_is_wrong(model) if labels is not None or shifted is not None else None
    if reason is not None:
        raise NotImplementedError(
            f"{name} got labels, but {reason}. Take labels, shift_labels and num_items_in_batch out of what "
            "prepare_batch returns, and pass logits and the shift_labels to handler.mean_loss"
        )
    if labels is not None and shifted is None:
        raise ValueError(
            f"{name} got labels without shift_labels. The model would shift them within this rank's "
            "share, which is wrong at its ends. Use prepare_batch, or shift them over the whole sequence"
        )
    if labels is None and shifted is not None:
        raise ValueError(
            f"{name} got shift_labels without labels, and would return no loss. Use prepare_batch instead of "
            "get_batch_on_this_cp_rank, or leave shift_labels out and pass them to handler.mean_loss"
        )
    if labels is not None and kwargs.get("num_items_in_batch") is None:
        raise ValueError(
            f"{name} got labels without num_items_in_batch. Its loss would be the mean over this rank's tokens, which "
            "is not a share of the mean over the batch. Use prepare_batch, or pass the number of labels of the whole "
            "batch"
        )


def _check_own_loss(model: PreTrainedModel) -> None:
    """Raise ``NotImplementedError`` for a loss function of the user's that reads labels which are not shifted."""
    function = loss_of_user(model)
    called = getattr(function, "forward", type(function).__call__ if callable(function) else None)
    code = getattr(function if hasattr(function, "__code__") else called, "__code__", None)
    if function is None or code is None:
        return
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # its variables may be named so, too
    if "shift_labels" not in (*arguments, *code.co_consts):
        raise NotImplementedError(
            f"{type(model).__name__} got labels, and its loss_function ({getattr(function, '__qualname__', function)}) "
            "does not read shift_labels. It would shift labels within this rank's share, which is wrong at its ends. "
            "Give it an argument shift_labels, which are shifted over the whole sequence, and divide the sum of the "
            "losses by num_items_in_batch"
        )


def why_loss_is_wrong(model: PreTrainedModel) -> str | None:
    """The reason why the loss of a model would be wrong on a share, though its labels have been shifted; or None."""
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
        return "its forward takes no shift_labels"
    decoder = decoder_of(model)
    outside = [m for m in around(model, decoder) if m is not decoder] or [model]
    source = "".join(source_of(type(module).forward) for module in outside)  # a head may be inside (BLIP)
    if OWN_LOSS.search(source):
        return "its forward computes the loss from labels that it shifts within this rank's share, or does not shift"
    function = inspect.unwrap(model.forward)
    if is_foreign(function):
        source = source_of(function)
        if "super().forward(" in source:
            known = re.search(r"\bloss\b|loss_function", source) is None
        else:
            given = re.search(r"self\.loss_function\([^)]*\*\*", source)
            known = given is not None and source.count("loss_function(") == 1
        if not known:
            return (
                "its forward, which is not one of transformers, computes the loss in a way that is not known: by "
                "self.loss_function(logits, labels, ..., **kwargs), once, it would get shifted labels"
            )
    return None


class LossCheck:
    """The losses that one prepared model returns, compared with those of its logits: the first one in training, and the
    first one in evaluation, on each mesh."""

    def __init__(self) -> None:
        self.passed: set[tuple[str, bool]] = set()
        """The keys of meshes, and ``model.training``, with which a loss was right on all ranks."""
        self.late = False
        """True if the labels of the forward that runs were changed after their batch had been split."""

    def __deepcopy__(self, memo: object) -> LossCheck:
        return LossCheck()  # a copy is another model

    def begin(self, model: nn.Module, batch: PreparedBatch | None, kwargs: dict[str, Any], cp: CPMesh) -> None:
        """Read the labels of a forward. ``ValueError`` if they were changed after the batch had been split, on a rank
        that compares nothing with the others any more."""
        first = (cp.key, model.training) not in self.passed
        self.late = kwargs.get("labels") is not None and batch is not None and _changed_labels(batch, kwargs, first)
        if self.late and not first:
            raise ValueError(self._words(model, "late"))

    def end(self, model: Any, kwargs: dict[str, Any], output: Any, mesh: DeviceMesh, cp: CPMesh) -> None:
        """Compare the loss of a forward; all ranks of ``mesh`` raise if one of them has found another."""
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            return
        if kwargs.get("labels") is None:
            raise NotImplementedError(
                f"{type(model).__name__} returned a loss without labels. It was computed from this rank's share of the "
                "sequence, by targets of another name. Name them labels, or leave them out, and pass the logits and "
                "the targets, shifted over the whole sequence, to handler.mean_loss"
            )
        if (cp.key, model.training) in self.passed:
            return
        with torch.no_grad():
            labels = (kwargs["shift_labels"] != IGNORE).sum()
            own = torch.tensor([self.late, _adds_to_loss(model, kwargs, output), labels], device=loss.device)
            late, other, counts = by_rank(mesh, own).mT.tolist()
            wrong = "late" if any(late) else "other" if any(other) else None
            # The same on all ranks: a function of the user's may communicate.
            if wrong is None and loss_of_user(model) is not None and min(counts) > 1:
                own = torch.tensor([_takes_mean(model, kwargs, output)], device=loss.device)
                wrong = "mean" if by_rank(mesh, own).any() else None
        if wrong is not None:
            raise (ValueError if wrong == "late" else NotImplementedError)(self._words(model, wrong))
        self.passed.add((cp.key, model.training))
        if (given := kwargs["num_items_in_batch"]) < sum(counts) - 0.5:
            warnings.warn(
                f"{type(model).__name__} got num_items_in_batch={int(given)} for a batch of {sum(counts)} labels. "
                "If it counts labels, they are those of this rank's share, and the loss is too large: leave the number "
                "that prepare_batch (or the trainer) has counted. If it counts samples, say, ignore this warning",
                stacklevel=2,
            )

    @staticmethod
    def _words(model: nn.Module, wrong: str) -> str:
        name = type(model).__name__
        if wrong == "late":
            return (
                f"{name} got labels that were changed after prepare_batch (or the trainer) had split their batch. Its "
                "loss reads shift_labels, in which each position has the label of the next one, so that the change "
                "would have no effect. Change labels before the batch is split (in a collator, say), or shift_labels"
            )
        if wrong == "mean":
            return (
                f"{name} has a loss_function of its own, whose result is not divided by num_items_in_batch: it is the "
                "mean over this rank's tokens. Divide the sum of the losses of all tokens by the "
                "argument num_items_in_batch, and add terms behind the forward, with handler.mean_loss"
            )
        return (
            f"{name} returned another loss than that of its logits and shift_labels. A class of yours, a function "
            "around its forward or a hook changes the loss, and this rank has its share of the tokens only, so the "
            "change would count once for each rank. Leave the loss of the model as it is, and add terms behind the "
            "forward: those of tokens by handler.mean_loss(losses), terms of weights divided by the cp size"
        )


def _changed_labels(batch: PreparedBatch, kwargs: dict[str, Any], first: bool) -> bool:
    """True if labels are others than when their batch was split, and the shifted ones, which losses read, are not."""
    labels, shifted = kwargs["labels"], kwargs["shift_labels"]
    changed = _changed(batch.labels, labels, first) and not _changed(batch.shifted, shifted, first)
    return changed and not (labels.shape == shifted.shape and torch.equal(labels, shifted))  # the latter for both


def _changed(before: Written | None, now: Any, first: bool) -> bool:
    """True if a tensor was written to, or is another one with other values. Values on another device than that of
    ``before``, for which the host would wait, are compared for the ``first`` forwards only."""
    if before is None or not isinstance(now, Tensor):
        return False
    x, count = before
    if now is x or not (first or now.device == x.device):
        return now is x and writes(x) != count
    return writes(x) != count or now.shape != x.shape or not torch.equal(now.to(x.device), x)


def _adds_to_loss(model: Any, kwargs: dict[str, Any], output: Any) -> bool:
    """True if the loss of transformers' own loss function is not that of the logits, up to the router's."""
    logits: Any = getattr(output, "logits", None)
    targets = kwargs["shift_labels"]
    if not _are_of(logits, targets) or loss_of_user(model) is not None:
        return False
    expected = _sum_of_losses(logits, targets) / _on(logits, kwargs["num_items_in_batch"])
    if isinstance(getattr(output, "aux_loss", None), Tensor) and router_loss.requested(model, kwargs):
        expected = expected + (router_loss.coefficient(model) or 0.0) * output.aux_loss.detach().to(expected.device)
    own, wide = output.loss.detach(), (torch.float32, torch.float64)
    tolerance = 1e-4 if own.dtype in wide and logits.dtype in wide else 2e-2
    return not torch.allclose(own.to(expected.device, expected.dtype), expected, rtol=tolerance, equal_nan=True)


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    rows, targets = logits.flatten(0, -2), targets.flatten().to(logits.device)
    parts = zip(rows.split(ROWS), targets.split(ROWS), strict=True)
    losses = [F.cross_entropy(x.float(), y, ignore_index=IGNORE, reduction="sum") for x, y in parts]
    return torch.stack(losses).sum()


def _takes_mean(model: Any, kwargs: dict[str, Any], output: Any) -> bool:
    """True if a loss function of the user's, applied to a few tokens, is the mean of what it is for the halves of them,
    and not the sum. (If it cannot be applied to them, nothing is known.)"""
    logits, targets = output.logits, kwargs["shift_labels"]
    if not _are_of(logits, targets):
        return False
    at = (targets != IGNORE).flatten().nonzero()[:8, 0]
    at = at[: len(at) // 2 * 2]
    devices = [] if logits.device.type == "cpu" else [logits.device]

    def loss_of(at: Tensor) -> Any:
        few = {name: kwargs[name].flatten()[at][None].to(logits.device) for name in ("labels", "shift_labels")}
        few |= {"logits": logits.flatten(0, 1)[at.to(logits.device)][None], "vocab_size": logits.shape[-1]}
        return model.loss_function(**few, num_items_in_batch=_on(logits, kwargs["num_items_in_batch"]))

    try:
        with torch.random.fork_rng(devices, device_type=logits.device.type if devices else "cuda"):
            parts = sum(loss_of(half) for half in at.chunk(2))
            return bool(parts != 0) and torch.allclose(loss_of(at), parts / 2, rtol=1e-3)
    except Exception:  # of the user's function
        return False


def _are_of(logits: Any, targets: Any) -> bool:
    """True for whole logits of each of the targets."""
    plain = isinstance(logits, Tensor) and not isinstance(logits, DTensor) and isinstance(targets, Tensor)
    return plain and targets.ndim == 2 and tuple(logits.shape[:-1]) == tuple(targets.shape)


def _on(logits: Tensor, count: Any) -> Any:
    return count.to(logits.device) if isinstance(count, Tensor) else count
