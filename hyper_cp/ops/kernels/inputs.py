"""The kernel protocol: a tile's inputs, forward and backward of it, and its rectangles one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...schedule.ranges import Range
from ...schedule.tiles import CAUSAL, Band, from_bottom_right, shift
from .partials import accumulation_dtype, empty_partial, like_queries, part
from .scores import TileScore

if TYPE_CHECKING:
    from .selected import TileSelection

Parts = tuple[tuple[Range, Range], ...]
"""Rectangles (rows, columns) of a tile, none empty, ascending and disjoint in rows and in columns."""


@dataclass(slots=True, eq=False)
class TileInputs:
    """The tensors of one tile, and which of its queries see which of its keys.

    ``q`` is [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv] with H a multiple of Hkv; their last
    dimension is contiguous. Logits are ``scale * q @ k.mT``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    """Query i sees key j if ``band[0] <= j - i <= band[1]``; None is no bound."""
    scale: float
    mask: Tensor | None = None
    """An explicit mask, broadcastable to [B, H, Sq, Sk]: bool (True is visible) or added to the logits."""
    parts: Parts | None = None
    """The tile is only these rectangles of it. All other pairs are hidden. ``band`` then holds in each rectangle,
    counted from its bottom right corner: its last query sees ``-band[0]`` keys before its last key. ``mask`` and
    ``keep`` are None then. A kernel that has no call for several rectangles uses :func:`forward_each`."""
    keep: Tensor | None = None
    """Factors [B, H, Sq, Sk] of the attention weights: dropout. Only the reference kernel is given any."""
    score: TileScore | None = None
    """A function of the scaled logits [B, H, Sq, Sk] that is applied before ``band`` and ``mask``. Only kernels that
    are registered for scores are given any, and the reference kernel. Their backward also adds to the score's
    ``gradients``."""
    dlse: Tensor | None = None
    """In backward of a tile with a score: the gradient [B, H, Sq] of the merged log-sum-exp. None is zero."""
    selected: TileSelection | None = None
    """The keys that each query has selected. All other pairs are hidden; of those that are listed, ``band`` and
    ``mask`` hide more. Only kernels that are registered for selections are given any, and the reference kernel, with no
    ``parts``."""
    joint: bool = False
    """True if values are the beginnings of keys, in the same memory, and only the sum of both gradients is used:
    backward may return it as that of the keys, and zeros as that of the values."""
    largest: Tensor | None = None
    """In forward of a call that asks for the largest logits: those of the rows so far [B, H, Sq], -inf at first, which
    the kernel raises in place. Only kernels that are registered for it are given any, and the reference kernel."""
    recurring: bool = True
    """False if the lengths of such tiles change from batch to batch, as with documents: a kernel that builds a plan per
    shape would build one for each."""

    @property
    def causal(self) -> bool:
        """True if the band is the causal one."""
        return self.band == CAUSAL

    def rectangle(self, rows: Range, cols: Range, band: Band) -> TileInputs:
        """Some rows and columns as a tile of their own, under their own band."""
        mask = None if self.mask is None else mask_slice(self.mask, rows, cols)
        keep = None if self.keep is None else mask_slice(self.keep, rows, cols)
        score = None if self.score is None else self.score.rectangle(rows, cols)
        dlse = None if self.dlse is None else part(self.dlse, rows)
        tensors = part(self.q, rows), part(self.k, cols), part(self.v, cols)
        selected = None if self.selected is None else self.selected.rectangle(rows, cols)
        largest = None if self.largest is None else part(self.largest, rows)
        return TileInputs(
            *tensors, band, self.scale, mask, None, keep, score, dlse, selected, self.joint, largest, self.recurring
        )

    def raise_largest(self, logits: Tensor) -> None:
        """Raise ``largest``, if it is asked for, to the logits [B, H, Sq, *] of the tile, -inf where hidden."""
        if self.largest is not None and logits.shape[3]:
            torch.maximum(self.largest, logits.amax(3), out=self.largest)

    def rectangles(self) -> Iterator[Rectangle]:
        """The parts with their rows and columns, each as a tile of its own."""
        for rows, cols in self.parts or ():
            yield rows, cols, self.rectangle(rows, cols, from_bottom_right(self.band, rows, cols))

    def row_bands(self, size: int) -> Iterator[Rectangle]:
        """``size`` rows at a time, with the columns that any of them sees, each as a tile of its own."""
        (lower, upper), rows, cols = self.band, self.q.shape[2], self.k.shape[2]
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            first = 0 if lower is None else min(max(0, start + lower), cols - 1)
            last = cols if upper is None else max(first + 1, min(cols, stop + upper))
            some, seen = (start, stop), (first, last)
            yield some, seen, self.rectangle(some, seen, shift(self.band, start - first))


Rectangle = tuple[Range, Range, TileInputs]
"""Some rows and some columns of a tile, and what they are as a tile of their own."""


_CACHED = 1 << 20
"""Numbers that stay in a cache of a CPU. The memory of more is mapped anew for each piece."""


def at_once(most: int, x: Tensor) -> int:
    """The most numbers that are computed at once on the device of ``x``."""
    return min(most, _CACHED) if x.device.type == "cpu" else most


def mask_slice(mask: Tensor, rows: Range, cols: Range) -> Tensor:
    """Rows and columns of a mask ``[..., Sq|1, Sk|1]``."""
    mask = mask if mask.shape[2] == 1 else mask[:, :, slice(*rows)]
    return mask if mask.shape[3] == 1 else mask[..., slice(*cols)]


class Kernel(Protocol):
    """Attention of one tile on one device, forward and backward.

    A row that sees nothing has out = 0, lse = -inf and zero gradients. Outputs and gradients may be in the dtype of
    the inputs or wider. Returned tensors are new: the caller may write to them.
    """

    name: str

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        """The tile's partial: ``out`` [B, H, Sq, Dv] and ``lse`` [B, H, Sq], the natural logarithm of the sum of
        exponentials of the logits, in fp32 (fp64 for fp64 inputs)."""
        ...

    def backward(self, tile: TileInputs, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of ``(dq, dk, dv)``, given the *merged* ``out`` and ``lse`` of its rows."""
        ...


# --------------------------------------------------------------------------- rectangles of a tile, one after another


def forward_each(
    attend: Callable[[TileInputs], tuple[Tensor, Tensor]], tile: TileInputs, rectangles: Iterable[Rectangle]
) -> tuple[Tensor, Tensor]:
    """Attend rectangles of a tile, which are disjoint in rows, one after another. All other pairs are hidden. Memory is
    that of the result and of one rectangle."""
    q, dim = tile.q, tile.v.shape[3]
    result: tuple[Tensor, ...] = ()
    for rows, _, rectangle in rectangles:
        pieces = attend(rectangle)
        if rows == (0, q.shape[2]):
            return pieces
        result = result or empty_partial(q, dim, *(x.dtype for x in pieces))
        for whole, piece in zip(result, pieces, strict=True):
            part(whole, rows).copy_(piece)
    out, lse = result or empty_partial(q, dim, q.dtype, accumulation_dtype(q.dtype))
    return out, lse


def backward_each(
    differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]],
    tile: TileInputs,
    rectangles: Iterable[Rectangle],
    *of_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate rectangles of a tile one after another.

    Args:
        of_rows: what :meth:`Kernel.backward` takes: dout, out and the log-sum-exp.
    """
    inputs = tile.q, tile.k, tile.v
    grads: list[Tensor] = []
    for rows, cols, rectangle in rectangles:
        pieces = differentiate(rectangle, *(part(x, rows) for x in of_rows))
        if rows == (0, tile.q.shape[2]) and cols == (0, tile.k.shape[2]):
            return pieces
        # Parts are disjoint in columns too; other rectangles add to the same keys.
        dtypes = [x.dtype if tile.parts is not None else accumulation_dtype(x.dtype) for x in pieces]
        dtypes[0] = pieces[0].dtype
        grads = grads or [like_queries(x, x.shape[3], t).zero_() for x, t in zip(inputs, dtypes, strict=True)]
        for grad, piece, covered in zip(grads, pieces, (rows, cols, cols), strict=True):
            part(grad, covered).add_(piece)
    dq, dk, dv = grads or [like_queries(x, x.shape[3], x.dtype).zero_() for x in inputs]
    return dq, dk, dv


# --------------------------------------------------------------------------- fewer key/value heads than query heads


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads to as many as the queries have."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """The gradient of repeated heads: the sum over those that share a key/value head."""
    if grad.shape[1] == kv_heads:
        return grad
    return grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=accumulation_dtype(grad.dtype))
