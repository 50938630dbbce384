"""The rows of a one-device tensor that a rank of the cp mesh holds, found by comparing shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PIECE = 2**22
"""Values of a tensor that are compared at a time."""
LEAST_HIDDEN = -5e3
"""Numbers above it are values: models hide by -1e4 and less."""


@dataclass(frozen=True)
class Positions:
    """The positions of this rank in the sequence that is verified."""

    at: Tensor
    """``[S/n]`` int64 on the CPU: the global position of each local row; padding has positions from ``length`` on."""
    length: int
    """Positions of the sequence without padding."""
    padded: int
    """Positions of all ranks together."""
    wholes: tuple[int, ...]
    """The lengths that the sequence may have in the run without context parallelism."""
    padding: Tensor | None = None
    """``[B, S]``, True on padding tokens, whose values do not count. None: there are none."""

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return len(self.at)

    @cached_property
    def first(self) -> bool:
        """True if this rank holds positions 0, 1, 2, ...: positions that are counted locally are right here."""
        return torch.equal(self.at, torch.arange(self.local, device="cpu"))


@dataclass(frozen=True)
class Selection:
    """The rows of a local tensor, and of the one-device tensor, that must be equal."""

    kind: str
    """``"share"``, ``"same"`` (the tensors have one shape), or ``"padded"`` (the local one is whole, with padding)."""
    positions: Positions
    dim: int = 0
    count: int = 1
    """Rows of the batch, if they are flattened into the sequence dimension; else 1."""
    batch_first: bool = True
    """True if the flattened dimension is batch x sequence, False if it is sequence x batch."""

    def of_local(self, x: Tensor) -> Tensor:
        """The rows of a rank's tensor that count."""
        at = self.positions.at
        return self._select(x, torch.nonzero(at < self.positions.length).flatten())

    def of_whole(self, x: Tensor) -> Tensor:
        """The same rows of the one-device tensor."""
        at = self.positions.at
        return self._select(x, at[at < self.positions.length])

    def _select(self, x: Tensor, rows: Tensor) -> Tensor:
        if self.kind == "same":
            return x
        if self.kind == "padded":
            return x.narrow(self.dim, 0, self.positions.length)
        seq = self.dim
        if self.count > 1:
            x = x.unflatten(self.dim, (self.count, -1) if self.batch_first else (-1, self.count))
            seq += self.batch_first
        return self._without_padding(x.index_select(seq, rows.to(x.device)), seq)

    def _without_padding(self, x: Tensor, seq: int) -> Tensor:
        """``x`` with zeros on padding tokens, if it has a dimension for the batch."""
        padding = self.positions.padding
        if padding is None:
            return x
        flattened = self.dim + (not self.batch_first)
        batch = flattened if self.count > 1 else 0 if seq else 1
        if batch >= x.ndim or x.shape[batch] != len(padding):
            return x
        at = self.positions.at
        hidden = padding[:, at[at < self.positions.length]]
        shape = [1] * x.ndim
        shape[batch], shape[seq] = hidden.shape
        hidden = hidden if batch < seq else hidden.T
        return x.masked_fill(hidden.reshape(shape).to(x.device), 0)


def selections(local: Sequence[int], whole: Sequence[int], positions: Positions) -> list[Selection]:
    """The ways in which a tensor of shape ``local`` can be a share of one of shape ``whole``; none if it cannot."""
    if len(local) != len(whole):
        return []
    differ = [i for i, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
    if not differ:
        return [Selection("same", positions)]
    if len(differ) > 1:
        return []
    (dim,) = differ
    for length in positions.wholes:
        count = whole[dim] // length
        if count == 0 or whole[dim] % length:
            continue
        if local[dim] == positions.local * count:
            orders = (True, False) if count > 1 else (True,)
            return [Selection("share", positions, dim, count, order) for order in orders]
        if count == 1 and local[dim] == positions.padded:
            return [Selection("padded", positions, dim)]
    return []


def closest(local: Tensor, whole: Tensor, positions: Positions) -> tuple[Selection, Tensor] | None:
    """The selection under which ``local`` is nearest to its rows of ``whole``, and these rows."""
    found = [(s, s.of_whole(whole)) for s in selections(local.shape, whole.shape, positions)]
    if len(found) < 2:
        return found[0] if found else None
    return min(found, key=lambda pair: distance(pair[0].of_local(local), pair[1]))


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one shape."""
    if not a.is_floating_point() and not a.is_complex():
        return (a != b).double().mean().item() if a.numel() else 0.0
    return max((part.max().item() for part in differences(a, b)), default=0.0)


def differences(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The magnitudes of the differences, in parts; equal infinities and NaNs do not differ."""
    for x, y in pieces(a, b):
        same = (x == y) | (x.isnan() & y.isnan())
        difference = torch.where(same, 0.0, (x - y).abs())
        yield torch.where(difference.isnan(), torch.inf, difference)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of flattened tensors of one shape, in double precision: copies of whole logits would be large. Numbers by
    which models hide values are infinite, since all others would be equal beside them."""
    flat = [x.flatten() for x in tensors]
    for start in range(0, flat[0].numel(), PIECE):
        parts = [x[start : start + PIECE] for x in flat]
        found = [wide(x) for x in parts]
        if parts[0].is_floating_point():
            hidden = torch.stack([*map(_hides, parts)]).all(0)
            found = [
                torch.where(hidden | _is_most(x), x.sign() * torch.inf, y) for x, y in zip(parts, found, strict=True)
            ]
        yield tuple(found)


def _is_most(x: Tensor) -> Tensor:
    """True at the largest and lowest numbers of a dtype, and infinities."""
    return x.abs() >= (torch.finfo(torch.float16).max if x.dtype == torch.float16 else 3.3e38)


def _hides(x: Tensor) -> Tensor:
    """True at numbers like -1e9 by which a model hides values: the lowest ones, alike, and far below 0 (in half
    precision they are rounded)."""
    finite = x.masked_fill(_is_most(x), 0)
    lowest = finite == finite.min()
    return lowest & (finite < LEAST_HIDDEN) & (lowest.sum() > 1)


def wide(x: Tensor) -> Tensor:
    """``x`` in double precision."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def looks_local(x: Tensor, positions: Positions) -> bool:
    """True if ``x`` counts 0, 1, 2, ... along the local rows, on a rank that does not hold the first positions."""
    if positions.first or x.dtype == torch.bool or x.is_complex():
        return False
    counted = torch.arange(positions.local, dtype=torch.float64, device="cpu")
    for dim, size in enumerate(x.shape):
        if size == positions.local and positions.local > 1:
            rows = wide(x).movedim(dim, -1)
            if bool((rows == counted).all()):
                return True
    return False
