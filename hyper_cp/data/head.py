"""Log-probabilities of labels without whole logits: a loop over chunks of tokens, in forward and again in backward.

Only hidden states, labels and one number per token are saved for backward. The gradient of the head is added up in
fp32 (fp64 for fp64) and rounded once.

torch 2.13 has such a loop, ``F.linear_cross_entropy``. It is not used: it adds up the gradient of a bf16 head in bf16,
chunk by chunk, and rounds losses to bf16; and it knows neither softcapped logits, nor a vocabulary that is split over
ranks, nor autocast. Per token it is slower too (1,024 tokens, 8,192 classes, one CPU thread: 0.45 s against 0.39 s in
fp32, 0.41 s against 0.20 s in bf16); for one sum, in fp32, it is faster (0.32 s), since it makes gradients in forward
and keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._torch.once import once
from ..mesh.arguments import check_type, is_int
from ..ops.writes import unchanged, written
from .collectives import by_rank
from .loss import NoClass, check_ignore_index
from .uncounted import widened

CHUNK_BYTES = 2**28
"""Size of a chunk's logits in fp32, if the caller does not choose the chunk: enough rows to keep a device busy."""


@dataclass(frozen=True)
class Logits:
    """Describes how a head's output becomes logits, and how many tokens have theirs at once.

    ``softcap * tanh(scale * output / softcap)``, or ``scale * output`` without a softcap.
    """

    ignore_index: int = -100
    softcap: float | None = None
    scale: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_ignore_index(self.ignore_index)
        for name, value in (("softcap", self.softcap), ("scale", self.scale)):
            if value is None and name == "softcap":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} is a {type(value).__name__}. Logits are capped or multiplied. Pass a number")
            if not 0 < value <= sys.float_info.max:
                raise ValueError(
                    f"{name}={value} must be positive. Logits are capped or multiplied by it. Pass one above 0"
                )
        if self.chunk is not None and not is_int(self.chunk):
            kind = type(self.chunk).__name__
            raise TypeError(f"chunk is a {kind}. It is the number of tokens that have logits at once. Pass an int")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} is too small. Logits are made for a chunk of tokens. Pass at least 1")


def log_probs(hidden: Tensor, labels: Tensor, head: nn.Module | Tensor, logits: Logits) -> Tensor:
    """The log-probability of every label, in the shape of ``labels``; 0 where a label is ignored. fp32 or fp64.

    Args:
        hidden: ``[*labels.shape, width]``.
        head: an ``nn.Linear``, whose hooks run once (FSDP gathers its weight, tensor parallelism places its input);
            or its weight ``[vocabulary, width]``.
    """
    _check_tensors(hidden, labels)
    labels = widened(labels, logits.ignore_index)
    if isinstance(head, nn.Module):
        check_head(head)
        found = _call(head, hidden, lambda x: _of_weight(x, labels, head.weight, head.bias, logits))  # type: ignore[arg-type]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if found.shape != labels.shape:
            raise ValueError(
                f"of {tuple(labels.shape)} log-probabilities, {tuple(found.shape)} are left on this rank. The head "
                "splits its output. Use ColwiseParallel(output_layouts=Replicate()), or use_local_output=False"
            )
        return found
    check_type("head", head, Tensor, "It makes the logits. Pass the nn.Linear, or its weight")
    out = _of_weight(hidden, labels, head, None, logits)
    return out.full_tensor() if isinstance(out, DTensor) else out


def token_losses(losses: Tensor, labels: Tensor | None, head: nn.Module | Tensor | None, logits: Logits) -> Tensor:
    """Losses of tokens if ``losses`` are hidden states of a head; without a head they are returned as they are."""
    if head is not None and labels is not None:
        return -log_probs(losses, labels, head, logits)
    if head is not None:
        raise ValueError("head without labels. There is no loss of hidden states alone. Pass the labels of the tokens")
    if (logits.softcap, logits.scale, logits.chunk) != (None, 1.0, None):
        raise ValueError(
            f"softcap={logits.softcap}, scale={logits.scale} and chunk={logits.chunk} without head. They describe how "
            "a head makes logits. Pass hidden states and head, or whole logits without them"
        )
    return losses


def check_head(head: nn.Module) -> None:
    """Raise ``TypeError`` unless the module is a linear layer that runs as it is."""
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise TypeError(
            f"head is a {type(head).__name__} whose forward is not that of nn.Linear. Its logits cannot be made in "
            "chunks. Pass the nn.Linear itself, without torch.compile, wrappers or adapters around it, or its weight"
        )


def _call(head: nn.Module, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Any:
    """Call a module with another forward: its hooks run, those of FSDP and tensor parallelism too. Hooks of others see
    log-probabilities in place of logits, so they may observe, and must not change anything."""
    hooks, before = head._forward_hooks, dict(head._forward_hooks)
    if head._backward_pre_hooks:
        raise _changes("backward pre-hook", next(iter(head._backward_pre_hooks.values())))
    for key, hook in before.items():
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
            hooks[key] = partial(_observe, hook)
    head.forward = forward
    try:
        return head(hidden)
    finally:
        del head.forward
        hooks.update((key, hook) for key, hook in before.items() if key in hooks)  # a hook may have removed itself


def _observe(hook: Callable[..., Any], module: nn.Module, *given: Any) -> None:
    """Run a forward hook; ``TypeError`` if it changes the output."""
    before = written([given[-1]])
    if hook(module, *given) is not None or not unchanged(before, [given[-1]]):
        raise _changes("forward hook", hook)


def _changes(kind: str, hook: Any) -> TypeError:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return TypeError(
        f"head has the {kind} {name!r}, which changes logits or their gradients. There are no whole logits here, only "
        "log-probabilities. Remove the hook, describe it with scale= or softcap=, or make logits without head="
    )


def _check_tensors(hidden: Tensor, labels: Tensor) -> None:
    for name, x in (("hidden", hidden), ("labels", labels)):
        check_type(name, x, Tensor, "It has one entry per token. Pass a tensor")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden is {hidden.dtype}. The head multiplies it. Pass hidden states in floating point")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}. They are numbers of classes. Pass integers (torch.int64)")


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise :class:`NoClass` for labels that do not exist. On accelerators, where that would wait for the device, they
    make their log-probability NaN."""
    if labels.device.type != "cpu":
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        raise NoClass(
            f"labels has the value {wrong[0].item()}, but the head has {vocabulary} classes. A label is the number of "
            f"a class. Pass numbers from 0 to {vocabulary - 1}, or ignore_index={ignore_index} where a position does "
            "not count"
        )


# --------------------------------------------------------------------------- tensors and DTensors


@dataclass(frozen=True)
class _Vocabulary:
    """This rank's part of a vocabulary: all of it, or rows from ``first`` on of one that a mesh dimension shards."""

    total: int
    first: int = 0
    mesh: DeviceMesh | None = None


def _of_weight(hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, logits: Logits) -> Tensor:
    """The log-probabilities for hidden states that the hooks of a head have seen; a DTensor if they are one."""
    if weight.ndim != 2:
        raise ValueError(
            f"the head's weight has shape {tuple(weight.shape)} instead of [vocabulary, width]. FSDP 1 and ZeRO 3 take "
            "it apart. Gather it first, or use FSDP2 (fully_shard)"
        )
    vocabulary = _part(weight, hidden)
    if isinstance(hidden, DTensor):
        _check_whole(hidden, getattr(weight, "device_mesh", hidden.device_mesh))
    if hidden.shape != (*labels.shape, weight.shape[1]):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, labels {tuple(labels.shape)} and the head's weight "
            f"{tuple(weight.shape)}. Each label needs one hidden state, as wide as the weight. Pass hidden "
            f"[*labels.shape, {weight.shape[1]}], this rank's share of each"
        )
    _check_labels(labels, vocabulary.total, logits.ignore_index)
    placed = hidden if isinstance(hidden, DTensor) else None
    if placed is not None:
        split = vocabulary.mesh is not None
        grads = [Partial() if split and isinstance(p, Shard) else q for p, q in _pairs(weight, placed)]
        hidden = placed.to_local(grad_placements=grads)
    weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (weight, bias))  # type: ignore[assignment]
    out: Tensor = _LogProbs.apply(hidden, weight, bias, labels.to(hidden.device), logits, vocabulary)
    return out if placed is None else DTensor.from_local(out, placed.device_mesh, placed.placements, run_check=False)


def _pairs(weight: Tensor, hidden: DTensor) -> list[tuple[Any, Any]]:
    placed = weight.placements if isinstance(weight, DTensor) else [Replicate()] * len(hidden.placements)
    return list(zip(placed, hidden.placements, strict=True))


def _part(weight: Tensor, hidden: Tensor) -> _Vocabulary:
    """The part of the vocabulary that this rank holds; ``ValueError`` for placements that need other sums."""
    total = weight.shape[0]
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    split = [i for i, p in enumerate(getattr(weight, "placements", ())) if not isinstance(p, Replicate)]
    split = [i for i in split if mesh is not None and mesh.size(i) > 1]
    if mesh is None or not split:
        return _Vocabulary(total)
    placement = weight.placements[split[0]]  # type: ignore[attr-defined]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise ValueError(
            f"the head's weight is placed {weight.placements} on {mesh}. Only a vocabulary that one "  # type: ignore[attr-defined]
            "dimension of a mesh splits, Shard(0), gives log-probabilities without whole logits. Use ColwiseParallel"
        )
    if not isinstance(hidden, DTensor):
        raise ValueError(
            f"the head's weight is sharded over {mesh}, but hidden is a local tensor. If that is FSDP, it gathers the "
            "weight only in the forward of a module that it shards: apply fully_shard to the head too, and pass the "
            "head itself. If it is tensor parallelism, pass the head as a module with ColwiseParallel, or hidden as a "
            "DTensor on that mesh, Replicate()"
        )
    rows = -(-total // mesh.size(split[0]))  # as torch.chunk splits
    here = mesh.get_local_rank(split[0])
    along = mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh.get_group(split[0]), mesh.device_type)
    return _Vocabulary(total, min(here * rows, total), along)


def _check_whole(hidden: DTensor, mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` unless hidden states are whole on every rank of the mesh of the head's weight."""
    if mesh != hidden.device_mesh or any(not isinstance(p, Replicate) for p in hidden.placements):
        raise ValueError(
            f"hidden is a DTensor placed {hidden.placements} on {hidden.device_mesh}. The head needs all of this cp "
            f"rank's tokens and their whole width. Redistribute it to Replicate() on {mesh}"
        )


# --------------------------------------------------------------------------- the loop


class _LogProbs(torch.autograd.Function):
    """Hidden states ``[*, width]``, weight, bias and labels ``[*]`` to log-probabilities ``[*]``, which are no view:
    FSDP2 warns of modules that return one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        logits: Logits,
        vocabulary: _Vocabulary,
    ) -> Tensor:
        loop = _Loop(hidden, weight, bias, labels, logits, vocabulary)
        exponents = hidden.new_empty(labels.numel(), dtype=loop.exact)
        chosen = torch.zeros_like(exponents)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in loop.chunks():
                scores = loop.scores(rows)
                index, mine = loop.own_labels(rows)
                if len(loop.weight):  # by choice and not by a product: the logit for another rank's label may be -inf
                    chosen[rows] = torch.where(mine == 0, 0, scores.gather(1, index).squeeze(1) * mine)
                exponents[rows] = _log_sum_exp_(scores)
                del scores  # before the next chunk's are made
        if vocabulary.mesh is not None:
            parts = by_rank(vocabulary.mesh, torch.stack([exponents, chosen]))
            exponents, chosen = torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, bias, labels, exponents)
        ctx.logits, ctx.vocabulary, ctx.dtype = logits, vocabulary, loop.dtype
        return torch.where(labels == logits.ignore_index, 0, (chosen - exponents).view(labels.shape))

    @staticmethod
    @once("log-probabilities in chunks of tokens")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, exponents = ctx.saved_tensors
        loop = _Loop(hidden, weight, bias, labels, ctx.logits, ctx.vocabulary, ctx.dtype)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grads = [
            torch.empty_like(loop.hidden) if of_hidden else None,
            torch.zeros_like(weight, dtype=loop.exact) if of_weight else None,
            torch.zeros_like(bias, dtype=loop.exact) if of_bias and bias is not None else None,
        ]
        grad = torch.where(labels == ctx.logits.ignore_index, 0, grad.to(loop.exact)).flatten()
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in loop.chunks():
                loop.differentiate(rows, exponents[rows], grad[rows], *grads)
        of_parameters = (g if g is None else g.to(x.dtype) for g, x in zip(grads[1:], (weight, bias), strict=True))
        return (None if grads[0] is None else grads[0].view(hidden.shape), *of_parameters, None, None, None)


class _Loop:
    """One pass over chunks of tokens."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        logits: Logits,
        vocabulary: _Vocabulary,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype``: that of the product; default that of the tensors, or of autocast."""
        device = hidden.device.type
        if dtype is None and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if dtype is None and weight.dtype != hidden.dtype:
            raise ValueError(
                f"hidden is {hidden.dtype} and the head's weight {weight.dtype}. They are multiplied, and must be "
                "equal. Cast one of them, or run under autocast"
            )
        self.dtype = dtype or hidden.dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)
        self.hidden, self.labels = hidden.reshape(-1, hidden.shape[-1]), labels.flatten()
        self.logits, self.vocabulary = logits, vocabulary
        self.scale, self.softcap = float(logits.scale), None if logits.softcap is None else float(logits.softcap)
        self.weight, self.bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def chunks(self) -> Iterator[slice]:
        """The rows of each chunk. Every rank of a split vocabulary has the same."""
        widest = -(-self.vocabulary.total // (1 if self.vocabulary.mesh is None else self.vocabulary.mesh.size()))
        rows = self.logits.chunk or max(1, CHUNK_BYTES // (4 * max(1, widest)))
        rows = min(rows, max(1, len(self.labels)))
        return (slice(start, start + rows) for start in range(0, len(self.labels), rows))

    def scores(self, rows: slice) -> Tensor:
        """The logits of a chunk, in fp32 or fp64."""
        out = F.linear(self.hidden[rows].to(self.dtype), self.weight, self.bias).to(self.exact)
        if self.softcap is not None:
            return out.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return out if self.scale == 1 else out.mul_(self.scale)

    def own_labels(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Columns ``[c, 1]`` of the labels, and 1 where this rank has them. NaN for labels that do not exist."""
        labels = self.labels[rows]
        counts, at = labels != self.logits.ignore_index, labels - self.vocabulary.first
        mine = counts & (at >= 0) & (at < len(self.weight))
        wrong = counts & ((labels < 0) | (labels >= self.vocabulary.total))
        index = torch.where(mine, at, 0).to(torch.int64)[:, None]
        return index, torch.where(wrong, torch.nan, mine.to(self.exact))

    def differentiate(
        self,
        rows: slice,
        exponents: Tensor,
        grad: Tensor,
        of_hidden: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
    ) -> None:
        """Add a chunk to the gradients, for the gradients of its log-probabilities."""
        scores = self.scores(rows)
        slope = None
        if self.softcap is not None:
            slope = (scores / self.softcap).square_().neg_().add_(1)
        index, mine = self.own_labels(rows)
        wanted = scores.sub_(exponents[:, None]).exp_().mul_(-grad[:, None])
        if len(self.weight):
            wanted.scatter_add_(1, index, (grad * mine)[:, None])
        if slope is not None:
            wanted.mul_(slope)
        if self.scale != 1:
            wanted.mul_(self.scale)
        del slope, scores
        if of_bias is not None:
            of_bias.add_(wanted.sum(0))
        wanted = wanted.to(self.dtype)
        if of_hidden is not None:
            of_hidden[rows] = (wanted @ self.weight).to(of_hidden.dtype)
        if of_weight is not None:
            hidden = self.hidden[rows].to(self.dtype)
            if of_weight.dtype == self.dtype:
                of_weight.addmm_(wanted.t(), hidden)
            else:  # the product of half precision is exact inside, and rounded once
                of_weight.add_(wanted.t() @ hidden)


def _log_sum_exp_(scores: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row; overwrites its argument."""
    if scores.shape[1] == 0:
        return scores.new_full((len(scores),), -torch.inf)
    highest = scores.amax(1, keepdim=True)
    highest = torch.where(highest == -torch.inf, 0, highest)  # a bias may ban all classes of this rank
    return scores.sub_(highest).exp_().sum(1).log_().add_(highest.squeeze(1))
