"""One value for each document of a split sequence: the sum, the mean or the last of its tokens' values."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch.compiling import is_compiling
from ..mesh.arguments import check_choice, check_type
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import calling
from ..schedule import layout as layouts
from ..schedule.documents import PackedDocuments, documents_table, packed_of, read, tokens_of
from .collectives import by_rank, has_pooled, with_gradient_of, with_whole_gradient
from .loss import ADDED, adds_to_logits
from .sharding import Shares, documents_for, gradient_factor, pads_to, refuse_cut_share, resolve_layout

REDUCTIONS = ("sum", "mean", "last")


@torch.compiler.disable(reason="pool reads documents on the host. Call it outside of the compiled function")
def pool(
    shares: Shares,
    x: Tensor,
    reduce: str,
    *,
    mask: Tensor | None,
    documents: Any,
    length: int | None,
    gradients: str | None,
) -> Tensor:
    """See :meth:`hyper_cp.ContextParallelHandler.pool`."""
    _check(x, reduce, mask)
    if documents is None and length is None:
        refuse_sequence_first(shares, "x", x)
        refuse_cut_share(shares, "x", x)
    if mask is not None and (known := shares.cp.batch.entries.past_of(mask)) and known[0] is not None:
        mask = mask.masked_fill(known[0].to(mask.device), 0)  # the padding mask of a batch has ones left only
    factor = gradient_factor(shares.cp, x, gradients, "pool")
    warn_of_pooled(shares.cp, "pool", x, x)
    at, numbers, count = _documents_of_tokens(shares, x, mask, documents, length, reduce)
    index = torch.arange(len(x), device="cpu")[:, None] * (count + 1) + numbers  # the last column is of no document
    index = index.flatten().to(x.device)
    shown = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask != 0

    def per_document(values: Tensor) -> Tensor:
        """This rank's sum for each document, ``[B, S/n, W] -> [B, D, W]``."""
        sums = values.new_zeros(len(x) * (count + 1), values.shape[2]).index_add(0, index, values.flatten(0, 1))
        return sums.unflatten(0, (len(x), count + 1))[:, :count]

    if reduce == "last":
        place = at.to(x.device).masked_fill(~shown, -1).flatten()
        mine = place.new_full((len(x) * (count + 1),), -1).scatter_reduce(0, index, place, "amax")
        with calling("pool"):
            last = by_rank(shares.mesh, mine).amax(0)
        shown = shown & (place == last[index]).view(shown.shape)
    weighted, weights = _weighted(x, shown, mask, last=reduce == "last")
    sums, tokens = per_document(weighted), per_document(weights[..., None])
    with calling("pool"):
        whole = by_rank(shares.mesh, torch.cat([sums, tokens], 2).detach()).sum(0)
    _refuse_additive(whole[..., -1])
    means = reduce == "mean"
    divisor = torch.where(whole[..., -1:] == 0, 1, whole[..., -1:]) if means else 1
    mean = whole[..., :-1] / divisor
    if means and tokens.requires_grad:  # weights that are learned change the number of tokens, too
        sums = sums - mean * tokens
    found = with_gradient_of(mean, sums * (factor / divisor), "pool")
    found = with_whole_gradient(found, shares.mesh, mean=False) if gradients == "shares" else found
    return found.view(len(x), count, *x.shape[2:])


def _weighted(x: Tensor, shown: Tensor, mask: Tensor | None, *, last: bool) -> tuple[Tensor, Tensor]:
    """The values of tokens times their weights ``[B, S/n, W]``, and the weights ``[B, S/n]``, at least in fp32. Weights
    are NaN where the mask is an additive one."""
    exact = torch.promote_types(x.dtype, torch.float32)
    values, weights = x.reshape(*x.shape[:2], math.prod(x.shape[2:])).to(exact), shown.to(exact)
    if mask is not None and mask.dtype != torch.bool:
        weights = weights if last else mask.to(exact)
        weights = weights.masked_fill(adds_to_logits(mask), torch.nan)  # on all ranks, if on one
    # Values that do not count may be inf or NaN, so they are replaced before they are multiplied by 0. (The gradient of
    # a weight that is learned, and is 0 now, is its value.)
    unused = ~shown[..., None] & (~values.isfinite() if weights.requires_grad else True)
    return values.masked_fill(unused, 0) * weights[..., None], weights


def _refuse_additive(tokens: Tensor) -> None:
    """Raise ``ValueError`` if the summed weights of all ranks are NaN."""
    if tokens.device.type == "cpu" and bool(tokens.isnan().any()):  # elsewhere the host would wait
        raise ValueError(
            f"mask of pool holds numbers of {ADDED:g} or less, or NaN, on one rank at least. Those of an additive mask "
            "hide logits, and here 0 is the weight of a token that does not count. Pass a bool mask (mask == 0 of an "
            "additive one), or weights"
        )


def warn_of_pooled(cp: CPMesh, caller: str, values: Any, per_token: Any) -> None:
    """Warn, once on a mesh, if ``caller`` gets values of this rank's tokens that depend on a result of ``pool`` as if
    each rank had its whole gradient. The first graphs are read only: they have thousands of nodes.

    ``per_token``: one number for each value. Those of documents, which all ranks have alike, are as they should be.
    """
    batch = cp.batch
    if cp.size == 1 or is_compiling() or not batch.graphs_to_read or getattr(values, "grad_fn", None) is None:
        return
    shape, shares = getattr(per_token, "shape", ()), batch.lengths.made
    flat = len(shape) == 1 and any(math.prod(shape) % share == 0 for share in shares)  # with the rows of the batch
    if not flat and (len(shape) < 2 or shares.isdisjoint(shape[:2])):
        return
    batch.graphs_to_read -= 1
    if has_pooled(values):
        batch.graphs_to_read = 0
        warnings.warn(
            f"{caller} got values of this rank's tokens that depend on what handler.pool has returned. The gradient of "
            "each rank is then that of its own tokens, and pool adds none up, so parameters would get a part of their "
            'gradient. Pass gradients="shares" to that pool',
            stacklevel=4,
        )


def refuse_sequence_first(shares: Shares, name: str, x: Tensor) -> None:
    """Raise ``ValueError`` if values, which errors call ``name``, are those of the tokens of this thread's block with
    the sequence in dimension 0."""
    rows, share = shares.cp.batch.rows_and_share
    if rows != share and tuple(x.shape[:2]) == (share, rows):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and this rank has {share} tokens in each of the {rows} rows of the "
            "batch of this block. The sequence is dimension 1 here. Pass values [B, S/n, ...]: "
            f"{name}.transpose(0, 1)"
        )


def _check(x: Any, reduce: Any, mask: Any) -> None:
    check_type("x", x, Tensor, "It has one value, or several, for each token of this rank. Pass a tensor [B, S/n, ...]")
    check_type("mask", mask, (Tensor, type(None)), "It says which tokens count. Pass a tensor [B, S/n], or None")
    check_choice("reduce", reduce, REDUCTIONS, "The values of a document become one")
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}. It holds values of tokens in floating point. Pass "
            "[B, S/n], or [B, S/n, width]"
        )
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, and x holds {x.shape[0]} x {x.shape[1]} tokens. It says which of "
            "them count. Pass this rank's share of it, as of labels: handler.dispatch(mask, 1, pad_value=0)"
        )


def _tokens_of_block(table: Tensor | None, given: Any, mask: Tensor | None) -> Tensor | None:
    """False at padding of a block ``[1 or B, S]``, if documents that are given are its packed ones.

    Raises:
        ValueError: for others in the block of a batch with padding, without a mask: parts of that batch's documents
            have its padding, and those of another sequence have not.
    """
    if table is None or given is None:
        return None
    other: Any = documents_table(given)
    own, rows, tokens = packed_of(table).rows, read(other).rows, tokens_of(table)
    own = own * len(rows) if len(own) == 1 else own
    if len(own) == len(rows) and all(tuple(a[: len(b)]) == tuple(b) for a, b in zip(own, rows, strict=True)):
        return tokens
    if tokens is not None and mask is None and tokens_of(other) is None:  # a batch's own table knows its padding
        raise ValueError(
            f"pool got documents={[list(row) for row in rows[:2]]}, which are not those of this handler.documents "
            "block, whose batch has padding. Parts of its documents have that padding, and those of another sequence "
            "have not. Pass mask= (this rank's share of the tokens that count), or call pool behind the block"
        )
    return None


def _documents_of_tokens(
    shares: Shares, x: Tensor, mask: Tensor | None, documents: Any, length: int | None, reduce: str
) -> tuple[Tensor, Tensor, int]:
    """The global positions of this rank's tokens ``[S/n]``, the number of the document of each token ``[1 or B, S/n]``
    and the number of documents. Tokens of padding have the number that follows the last one."""
    padded, state = x.shape[1] * shares.cp.size, shares.cp.batch
    layouts.check_length(shares.layout, shares.cp.size, padded)
    table = documents_for(shares, documents, padded, x, 1)
    if table is None and layouts.by_documents(shares.layout):
        raise ValueError(
            f"pool got no documents with layout={shares.layout!r}. This layout places tokens by documents. Call it in "
            "the block of the batch, `with handler.documents(batch)`, or pass documents="
        )
    ends = _ends(shares, padded, documents, length)
    if not ends and table is None and mask is None and (found := state.padding_of(tuple(x.shape[:2]))):
        raise ValueError(
            f"x of shape {tuple(x.shape)} comes without length, and this batch of {found[0]} positions was padded to "
            f"{found[1]}. Padding would count. Pass length={found[0]}, or a mask of the tokens that count"
        )
    counted = torch.arange(padded, device="cpu") < torch.tensor(ends or (padded,), device="cpu")[:, None]
    # Also padding inside, which is a document for attention, and that of the block of the documents that are given.
    for tokens in (tokens_of(table), _tokens_of_block(state.documents_in_block, documents, mask)):
        if tokens is not None:
            counted = counted & tokens
    at = resolve_layout(shares, padded, table).positions(shares.cp.rank)
    if x.ndim == 2 and reduce != "last":
        _warn_of_first_labels(shares.cp, x, mask, counted, at)
    packed = PackedDocuments([[0, padded]]) if table is None else read(table)
    rows = max(len(packed.rows), len(counted))
    boundaries = packed.rows * rows if len(packed.rows) == 1 else packed.rows
    kept = [
        torch.tensor([bool(here[start:stop].any()) for start, stop in pairwise(row)], device="cpu")
        for row, here in zip(boundaries, counted.expand(rows, -1), strict=True)
    ]
    count = max(int(row.sum()) for row in kept)
    # A document has the number of those before it that are kept.
    renumbered = [(row.cumsum(0) - 1).where(row, count) for row in kept]
    numbers = zip(renumbered, packed.numbers(at).expand(rows, -1), strict=True)
    of_tokens = torch.stack([new[old - 1] for new, old in numbers])
    return at, torch.where(counted.expand(rows, -1)[:, at], of_tokens, count), count


def _warn_of_first_labels(cp: CPMesh, x: Tensor, mask: Tensor | None, counted: Tensor, at: Tensor) -> None:
    """Warn, once on a mesh, if numbers ``[B, S/n]`` that are left out with padding seem to be those of a row's first
    label, which the last padding before it predicts. (In the first calls with such padding; a device is waited for.)"""
    if not cp.batch.first_labels_to_read:
        return
    last = F.pad(counted[:, 1:] & ~counted[:, :-1], (0, 1))
    if bool(last.any()):
        cp.batch.first_labels_to_read -= 1
        left_out = (x != 0) & last[:, at].to(x.device)
        if bool((left_out if mask is None else left_out & (mask != 0)).any()):
            cp.batch.first_labels_to_read = 0
            warnings.warn(
                "pool leaves out padding, and with it the last one before a row's tokens, whose number is not 0 here. "
                "If the numbers are those of labels (log-probabilities, losses), it is that of the first token, "
                "which counts on one device: set that label to ignore_index, or add up log_probs(..., gather=True). If "
                "they are those of tokens, pass a mask that is 0 at padding",
                stacklevel=6,
            )


def _ends(shares: Shares, padded: int, documents: Any, length: int | None) -> tuple[int, ...]:
    """The length of each row, or of all rows, before it was padded to ``padded``; () if it is not known."""
    if length is not None and not pads_to(shares, length, padded):
        raise ValueError(
            f"length={length} pads to {shares.padded_length(length)} positions. The ranks hold {padded}. Pass the "
            "length of the sequence before it was split"
        )
    if length is not None:
        return (length,)
    if documents is not None:
        given: Any = documents_table(documents)
        return tuple(row[-1] for row in read(given).rows)
    state = shares.cp.batch
    known = all((state.padded_length or shares.padded_length(x)) == padded for x in state.ends)
    return state.ends if known else ()
