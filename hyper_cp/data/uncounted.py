"""Labels and masks of which the padding of their batch does not count, in eager mode and in compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from ..mesh import cp_mesh
from ..mesh.arguments import is_int
from ..mesh.cp_mesh import CPMesh
from ..mesh.padding import Padding
from ..schedule.documents import read, tokens_of
from ..schedule.layout import by_documents
from ..schedule.lookup import resolve


def without_padding(cp: CPMesh, layout: str, labels: Any, mask: Any, ignore_index: int) -> tuple[Any, Any]:
    """Labels, and a mask, of this rank's tokens, which do not count where the split of their batch has filled up the
    sequence. (It fills up labels of a name that it does not know with 0, which may be a class.) The batch is the one
    that they are an entry of, or else that of the block. Masks do not count at the padding that this one has had itself
    either, whose outputs are other numbers than on one device."""
    if isinstance(mask, Tensor) and (at := _padding(cp, layout, mask, of_batch=True)) is not None:
        mask = mask.masked_fill(at, 0)
    if not isinstance(labels, Tensor) or not is_int(ignore_index):
        return labels, mask
    at, labels = _padding(cp, layout, labels, of_batch=False), widened(labels, ignore_index)
    if at is None:
        return labels, mask
    if labels.dtype != torch.bool:
        return labels.masked_fill(at, ignore_index), mask
    return labels, ~at if mask is None else mask.masked_fill(at, 0)


def widened(labels: Tensor, ignore_index: int) -> Tensor:
    """Numbers of classes in a dtype that holds ``ignore_index`` too: of bytes, 156 would be equal to -100."""
    return labels if labels.dtype == torch.bool or can_hold(labels.dtype, ignore_index) else labels.long()


def can_hold(dtype: torch.dtype, value: float) -> bool:
    """True if a number is a value of a dtype of whole numbers (others hold all of them, more or less exactly)."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= value <= most and value == int(value)


_OfBlock = tuple[Padding | None, Tensor | None, Tensor | None]
"""A block's batch: the places of its tokens, its documents (read if the layout depends on them), and ``[1 or B, S]``
False at padding of its own, if that is asked for."""


def _padding(cp: CPMesh, layout: str, x: Tensor, of_batch: bool) -> Tensor | None:
    """True where a tensor of this rank's tokens holds padding, in its shape; None: nowhere. ``of_batch``: also that
    which its batch has had itself."""
    if is_compiling():  # what is padding is known on the host, when the graph runs
        found: Tensor = padding_op(x, *cp.batch.inputs_of_padding, cp.key, layout, of_batch)
        return found
    at = _known_padding(cp, layout, x, _of_block(cp, layout, of_batch))
    return None if at is None else at.to(x.device).expand(x.shape)


def _of_block(cp: CPMesh, layout: str, of_batch: bool) -> _OfBlock:
    tokens = tokens_of(cp.batch.documents_in_block) if of_batch else None
    return cp.batch.places_in_block, cp.batch.documents if by_documents(layout) else None, tokens


def _known_padding(cp: CPMesh, layout: str, x: Tensor, of_block: _OfBlock) -> Tensor | None:
    """True where an entry of a batch, or else what fits the batch of a block, holds padding, broadcast over it."""
    if known := cp.batch.entries.past_of(x):
        return known[0]
    places, documents, tokens = of_block
    if places is None or not (places.known or tokens is not None):
        return None
    if by_documents(layout) and documents is None:
        return None
    packed = read(documents) if by_documents(layout) else None
    at = resolve(layout, cp.size, places.padded, packed).positions(cp.rank)
    if tokens is not None and len(tokens) > 1 and torch.equal(tokens, tokens[:1].expand_as(tokens)):
        tokens = tokens[:1]  # the same in any row
    past = at >= torch.tensor(places.ends if len({*places.ends}) > 1 else places.ends[:1], device="cpu")[:, None]
    return places.spread(past if tokens is None else past | ~tokens[:, at], tuple(x.shape))


# It communicates nothing, and a captured graph would repeat what it has read of another batch.
@torch.library.custom_op("hyper_cp::padding", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def padding_op(
    x: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    tokens: Tensor | None,
    mesh: str,
    layout: str,
    of_batch: bool,
) -> Tensor:
    """True where ``x`` holds padding, in its shape. The graph has the block of its forward as tensors: it may run this
    again in backward, behind the block. A checkpoint around the graph has recorded the block."""
    cp = cp_mesh.by_key(mesh)
    of_block, places = _of_block(cp, layout, of_batch), None if table is None else Padding.of_table(table)
    if not checkpoint.in_recompute():
        of_block = places, documents, tokens if of_batch else None
    at = _known_padding(cp, layout, x, of_block)
    found = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    return found if at is None else found.copy_(at)


@padding_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)
