"""The mean loss of a sharded batch: one value on every rank, and gradients that are right once they are reduced."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch.compiling import is_compiling
from ..mesh.arguments import check_choice, check_type, is_int
from ..mesh.batch_state import BatchState
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling
from ..mesh.split import Counted
from .collectives import by_rank, with_gradient_of

ADDED = -1e4
"""No weight of a token is as low; numbers that hide logits, as they are added to them, are this or lower."""


def mean_loss(
    losses: Tensor,
    per_token: Callable[[Tensor], Tensor],
    labels: Tensor | None,
    mesh: DeviceMesh,
    *,
    ignore_index: int,
    mask: Tensor | None,
    gradients: str,
    copies: int = 1,
    missing: int = 0,
    check: Callable[[float], None] | None = None,
    check_ranks: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """See :meth:`hyper_cp.ContextParallelHandler.mean_loss`; ``mesh`` is the one over which gradients are reduced.

    ``per_token`` makes losses of hidden states, and returns others as they are; ``check`` takes the number (or weight)
    of tokens where the host does not wait for it, and ``check_ranks`` the sum, the number and ``missing`` of each rank.
    ``copies``: the number of ranks that count each token, where their gradients are not added up. ``missing``: the
    positions that the losses of this rank lack of a share.
    """
    check_gradients(gradients)
    check_ignore_index(ignore_index)
    error = None
    try:
        total, count = _local(_replicated(per_token(losses)), labels, ignore_index, mask)
    except NoClass as found:  # perhaps on this rank only: the others would wait for it
        error, total, count = found, losses.detach().sum(), losses.new_tensor(-torch.inf)
    exact = torch.promote_types(total.dtype, torch.float32)
    with calling("mean_loss"):
        numbers = total.detach(), count.detach(), total.new_full((), missing)
        of_ranks = by_rank(mesh, torch.stack([x.to(exact) for x in numbers]))
    if error is not None:
        raise ValueError(str(error))
    if of_ranks.device.type == "cpu" and not is_compiling():  # elsewhere the host would wait
        wrong = torch.nonzero(of_ranks[:, 1] == -torch.inf).flatten().tolist()
        if wrong:
            raise ValueError(
                f"labels of ranks {wrong} of mean_loss are numbers of no class, or their mask is one for logits. No "
                "rank has the mean without them. Read the errors of these ranks; for labels that do not count pass "
                "ignore_index"
            )
    if check_ranks is not None:
        check_ranks(of_ranks)
    sums = of_ranks.sum(0)
    if check is not None and of_ranks.device.type == "cpu":
        check(sums[1].item() / copies)
    # If no token counts on any rank: a loss of 0 and no gradient, rather than NaN in every parameter.
    tokens = torch.where(sums[1] == 0, 1.0, sums[1])
    factor = mesh.size() if gradients == "mean" else copies
    mean, share = sums[0] / tokens, total.to(exact)
    if count.requires_grad:  # weights that are learned change the number of tokens, too
        share = share - mean * count.to(exact)
    return with_gradient_of(mean, share * (factor / tokens), "mean_loss")


def _replicated(losses: Tensor) -> Tensor:
    """Losses as a plain tensor. Those of tensor-parallel logits (``loss_parallel``) are a DTensor, which no transfer of
    the cp mesh takes."""
    whole: Tensor = losses.full_tensor() if isinstance(losses, DTensor) else losses
    return whole


def check_gradients(gradients: str) -> None:
    """Raise ``ValueError`` for a reduction of gradients that is unknown."""
    why = "DDP and FSDP average gradients over the ranks (mean); an all-reduce with SUM does not (sum)"
    check_choice("gradients", gradients, ("mean", "sum"), why)


def adds_to_logits(mask: Tensor) -> Tensor:
    """True, on the device, for a floating-point mask that does not hold weights: it is added to logits."""
    return (mask <= ADDED).any()


class NoClass(ValueError):
    """Labels that are numbers of no class, or a mask without weights. They depend on values, so that other ranks may
    have none."""


def reduced_mesh(mesh: DeviceMesh | None, cp: DeviceMesh) -> DeviceMesh:
    """The mesh over which gradients are reduced: the one that was given, which contains the cp mesh, or that itself."""
    if mesh is not None and is_compiling():  # a graph sees another type, and no ranks
        return mesh
    check_type("mesh", mesh, (DeviceMesh, type(None)), "Gradients are reduced over its ranks. Pass a DeviceMesh")
    if mesh is not None and not set(cp.mesh.flatten().tolist()) <= set(mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"mesh of ranks {mesh.mesh.tolist()} does not contain the cp ranks {cp.mesh.tolist()}. The mean is over "
            "the tokens of all of its ranks. Pass the mesh over which gradients are reduced, data and context parallel "
            'together, like world["dp", "cp"]'
        )
    return cp if mesh is None else mesh


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh, in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def refuse_other_ranks(counted: Counted, mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` if the weight of the batch of this loss was counted over other ranks than those of ``mesh``.
    (Each rank would see the mean of all multiplied by the weight of some.)"""
    if counted.ranks and counted.ranks != (ranks := ranks_of(mesh)):
        raise ValueError(
            f"mean_loss is the mean over ranks {list(ranks)}, and handler.loader(accumulate=) has counted the labels "
            f"for batch.weight over ranks {list(counted.ranks)}. Micro-batches would get wrong weights. Pass both the "
            'mesh over which gradients are reduced: handler.loader(..., mesh=world["dp", "cp"]) and mean_loss(mesh=...)'
        )


def warn_of_counts(state: BatchState, counted: Counted, copies: int, tokens: float) -> None:
    """Warn, once on a mesh, of a mean over other tokens than those that were counted for the weight of its batch.
    ``copies``: the ranks that may all have the same labels, of whole rows."""
    expected = [x * times for x in counted.numbers for times in {1, copies}]
    known = any(math.isclose(tokens, x, rel_tol=1e-6) for x in expected)  # tokens were added up in fp32
    if not known and not state.warned_of_counts:
        state.warned_of_counts = True
        warnings.warn(
            f"mean_loss is the mean over tokens that weigh {tokens:g}, and handler.loader(accumulate=) has counted "
            f"{counted.numbers[0]} labels for batch.weight. With this weight, micro-batches do not add up to the mean "
            "over all of them. Set labels that do not count to ignore_index in the whole batch; for weights of tokens "
            "leave accumulate= out, and multiply by the share of each micro-batch in the sum of all weights",
            stacklevel=4,
        )


def check_tokens(
    cp: CPMesh, losses: Any, labels: Tensor | None, mask: Tensor | None, own: DeviceMesh, mesh: DeviceMesh
) -> tuple[int, Callable[[Tensor], None] | None]:
    """Raise ``ValueError`` for tokens that were shifted in a share, and for padding that would count.

    Losses that may have been selected by a mask are judged by the numbers of them on the ranks of ``mesh``, which the
    function that is then returned takes, for :func:`mean_loss`. Those of all tokens are as many on every rank of the cp
    mesh ``own``; selected ones are not, since some ranks have padding. The same holds for the positions of this rank
    that are missing, which are returned, too.
    """
    per_token = losses if labels is None else labels
    check_share(cp, per_token)
    shape, rows = tuple(getattr(losses, "shape", ())), tuple(getattr(per_token, "shape", ()))
    cut = cp.batch.cut_share(*rows) if cp.size > 1 and len(rows) == 2 else None  # from which some were perhaps cut
    missing = 0 if cut is None else cut - per_token.shape[1]
    found = None if labels is not None or mask is not None else cp.batch.padding_of(shape)
    error = None if found is None else _padding_counts(shape, *found)
    if error is not None and (len(shape) > 2 or is_compiling()):
        raise error

    def check_ranks(of_ranks: Tensor) -> None:
        here = of_ranks[torch.isin(mesh.mesh, own.mesh).flatten().to(of_ranks.device)]
        if cut is not None and bool((here[:, 2] == missing).all()):
            raise _shifted(tuple(per_token.shape), per_token.shape[1], cut)
        if error is not None and bool((here[:, 1] == math.prod(shape)).all()):
            raise error

    return missing, check_ranks if error is not None or cut is not None else None


def _padding_counts(shape: tuple[int, ...], length: int, padded: int) -> ValueError:
    return ValueError(
        f"losses of shape {shape} come without labels or mask, and this batch of {length} positions was padded to "
        f"{padded}. The losses of padding, and zeros for ignored labels, would count in the mean. Pass labels too, "
        'mean_loss(losses, batch["shift_labels"]), or a mask of the tokens that count: in the block of the batch, '
        "mask=torch.ones_like(losses) leaves the padding out"
    )


def _shifted(shape: tuple[int, ...], length: int, share: int) -> ValueError:
    return ValueError(
        f"losses or labels of shape {shape} have {length} positions, but this rank's share of the sequence has "
        f"{share}. If they were shifted after sharding, every rank lacks the labels of its last tokens. Shift them "
        "over the whole sequence: get_batch_on_this_cp_rank(..., shift_labels=True), with mtp_depth= for tokens after "
        "the next one; if they are not positions of this share, pass them flattened"
    )


def refuse_idle(cp: CPMesh, styled: bool) -> None:
    """Raise ``RuntimeError`` if nothing has run over the whole sequence of the batch of this loss. ``styled``: the
    handler has the style of a model. (With the name of a layout only, attention may run in other code.)"""
    if cp.size > 1 and not is_compiling() and cp.batch.idle(ever=styled):
        raise RuntimeError(
            f"mean_loss of a batch that is split over the {cp}, on which no attention has run. The model has seen only "
            "this rank's share: its plan matches no module, prepare_model is missing, or its mesh is another one. "
            "Apply ContextParallel to the model on this mesh; if its attention runs in other code, pass elsewhere=True"
        )


def warn_of_sum(cp: CPMesh, gradients: str) -> None:
    """Warn, once on a mesh, of a loss for gradients that are summed beside a wrapper that averages them."""
    if gradients == "sum" and cp.batch.averaged and not cp.batch.warned_of_gradients and not is_compiling():
        cp.batch.warned_of_gradients = True
        warnings.warn(
            'mean_loss has gradients="sum", and DDP or FSDP is around a model on this cp mesh. It averages gradients, '
            'so they would be too small by the number of ranks. Keep gradients="mean", and multiply the loss of a '
            "prepared encoder-decoder by handler.cp.size. If you multiply losses or gradients already, ignore this",
            stacklevel=3,
        )


def check_share(cp: CPMesh, per_token: Any) -> None:
    """Check the labels (or losses) of a share against what is known of its batch.

    ``ValueError`` for tokens ``[B, S/n - 1]``: each rank has shifted its own share. A warning if the batch has packed
    documents and attention did not know them.
    """
    state, shape = cp.batch, tuple(getattr(per_token, "shape", ()))
    if not is_compiling() and state.ignores_documents(per_token):
        warnings.warn(
            "the batch of these labels has packed documents, and no attention call on this cp mesh has had documents: "
            "the documents see each other. Run the forward inside `with handler.documents(batch)`, or pass documents= "
            "to the styled modules",
            stacklevel=3,
        )
    if cp.size == 1 or len(shape) != 2 or any(n in state.lengths for n in shape):
        return
    alive = set() if is_compiling() else {state.rows_and_share[1], *state.entries.shares_of()}
    if max(shape) in alive:  # of an earlier batch, whose length is one of many
        return
    length = max(shape)
    if length + 1 in state.lengths:
        raise _shifted(shape, length, length + 1)


def check_ignore_index(ignore_index: int) -> None:
    """Raise ``TypeError`` unless ``ignore_index`` may be a label."""
    if not is_int(ignore_index) or not -(2**63) <= ignore_index < 2**63:
        raise TypeError(
            f"ignore_index={ignore_index!r} must be an int of 64 bits. It is the label of positions that do not count. "
            "Pass one that is no class"
        )


def _of_classes(losses: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """True where labels of the shape of losses are probabilities of classes (or the largest of them), or one class of
    each token, and losses are logits. Padding may be zeros, or be ignored."""
    ignored = (labels == ignore_index).all(-1, keepdim=True)
    of_tokens = labels.masked_fill(ignored, 0).double()
    sums = of_tokens.sum(-1)
    one = (sums - 1).abs() < 0.02
    one |= (sums > 0) & (sums < 1) if labels.is_floating_point() and labels.ndim > 2 else False
    within = (of_tokens >= 0).all() & (of_tokens <= 1).all() & (one | (sums == 0)).all() & one.any()
    return within & (losses < 0).any()


def _local(losses: Tensor, labels: Tensor | None, ignore_index: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """This rank's sum of losses, and the number (or weight) of its tokens."""
    _check_kinds(losses, labels, mask)
    losses = losses if losses.dtype == torch.float64 else losses.float()
    losses = _without_probabilities(losses, labels, ignore_index)
    mask = _exact_weights(mask)
    if labels is not None and losses.ndim == labels.ndim + 1 > 1 and losses.shape[:-1] == labels.shape:
        per_token = _cross_entropy(losses, labels, ignore_index, "sum" if mask is None else "none")
        if mask is None:
            return per_token, (labels != ignore_index).sum()
        losses = per_token.view(labels.shape)
    _check_shapes(losses, labels, mask)
    weights = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
    if labels is not None:
        weights = weights.masked_fill(labels == ignore_index, 0)
    # Masked before they are weighted: losses that do not count may be inf or NaN. (The gradient of a weight that is
    # learned, and is 0 now, is its loss.)
    unused = (weights == 0) & ~losses.isfinite() if weights.requires_grad else weights == 0
    return (losses.masked_fill(unused, 0) * weights).sum(), weights.sum()


def _check_kinds(losses: Tensor, labels: Tensor | None, mask: Tensor | None) -> None:
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(
            f"losses is a {kind}. It holds numbers in floating point. Pass the losses of tokens (reduction='none'), or "
            "logits and labels"
        )
    for name, given in (("labels", labels), ("mask", mask)):
        check_type(name, given, (Tensor, type(None)), "It has one value per token. Pass a tensor, or None")
    if mask is not None and labels is not None and labels.shape != mask.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and labels {tuple(labels.shape)}. Both have one value per token. Pass "
            "equal shapes"
        )


def _without_probabilities(losses: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """Losses whose labels are no probabilities of classes. Where the host would wait for values, all ranks get NaN."""
    several = labels is not None and labels.ndim > 2 - labels.is_floating_point() and labels.shape[-1] > 1
    if labels is None or not several or labels.shape != losses.shape:
        return losses
    if losses.device.type != "cpu" or is_compiling():
        return losses.masked_fill(_of_classes(losses, labels, ignore_index), torch.nan)
    if _of_classes(losses, labels, ignore_index):
        raise NoClass(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}, that of losses, and from 0 to 1 with a sum "
            "of 1 (or less) for each token, beside losses below 0: probabilities of classes, it seems. Labels are "
            "numbers of classes, and losses would be averaged as they are. Pass losses of tokens without labels, "
            'F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1).float(), reduction="none"), with mask='
        )
    return losses


def _exact_weights(mask: Tensor | None) -> Tensor | None:
    """A mask whose weights can be counted: half precision cannot. An additive one is refused, as above."""
    if mask is None or not mask.is_floating_point():
        return mask
    mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    if mask.device.type != "cpu" or is_compiling():
        return mask.masked_fill(adds_to_logits(mask), torch.nan)
    if adds_to_logits(mask):
        raise NoClass(
            f"mask of mean_loss holds {mask.min().item():g}. Such numbers of an additive mask hide logits, and "
            "here 0 is the weight of a token that does not count. Pass a bool mask (mask == 0 of an additive one), "
            "or weights"
        )
    return mask


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    wide, flat = logits.flatten(0, -2), labels.flatten()
    if flat.dtype == torch.bool or flat.is_floating_point():
        raise TypeError(f"labels are {flat.dtype}. They are numbers of classes. Pass integers (torch.int64)")
    try:
        return F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction=reduction)
    except (IndexError, RuntimeError) as error:
        least = int(flat.min()) if isinstance(error, IndexError) and flat.numel() else 0
        advice = f". If {least} is the label of tokens that do not count, pass ignore_index={least}"
        text = f"labels of shape {tuple(labels.shape)} do not fit the {wide.shape[-1]} classes of losses: {error}"
        wrong = NoClass if isinstance(error, IndexError) else ValueError
        raise wrong(text + (advice if least < 0 else "")) from error


def _check_shapes(losses: Tensor, labels: Tensor | None, mask: Tensor | None) -> None:
    for name, other in (("labels", labels), ("mask", mask)):
        if other is not None and other.shape != losses.shape:
            raise ValueError(
                f"losses has shape {tuple(losses.shape)} and {name} {tuple(other.shape)}. Each has one number for each "
                "token. Pass one loss per token (reduction='none') in the same shape, or logits [*labels.shape, "
                "classes] with labels"
            )
    if losses.ndim > 2 and labels is None and mask is None:
        raise ValueError(
            f"losses has shape {tuple(losses.shape)} and there are no labels. Logits have three dimensions, and losses "
            "of tokens two. If these are logits, pass labels; if they are several losses for each token, pass a mask "
            "of their shape (torch.ones_like(losses): padding of the split does not count)"
        )
    if losses.ndim == 0:
        raise ValueError(
            "losses is one number. The number of its tokens is unknown, and ranks have different ones. Pass logits and "
            "labels, or losses of tokens (reduction='none') and their labels, of which the ignored ones do not count"
        )
