"""The padding with which the split of a batch fills up its sequence, in values of its tokens of any form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """The form that values of a batch's tokens may have."""

    rows: tuple[int, ...] = ()
    """Rows of the batch; C and 1 if ``[S, C]`` may be C rows, or one row with C numbers for each token; (): unknown."""
    dims: tuple[int, ...] = (1,)
    """The dimensions that are the sequence in entries of the batch."""


@dataclass(frozen=True)
class Padding:
    """The positions with which the split of a batch has filled up its sequence."""

    ends: tuple[int, ...]
    """The positions before padding of each row, or of all rows in one number."""
    padded: int
    share: int
    """Positions of each rank."""
    form: Form = Form()

    def table(self) -> Tensor:
        """The same in one tensor, an input of compiled graphs: a recompute in backward has that of its forward."""
        parts = self.ends, (self.padded, self.share), self.form.rows, self.form.dims
        return torch.tensor([x for part in parts for x in (len(part), *part)], device="cpu")

    @classmethod
    def of_table(cls, table: Tensor) -> Padding:
        """The padding of a :meth:`table`."""
        numbers = iter(table.tolist())
        ends, (padded, share), rows, dims = (tuple(islice(numbers, next(numbers))) for _ in range(4))
        return cls(ends, padded, share, Form(rows, dims))

    def spread(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Numbers of a share's tokens ``[1 or B, share]``, in a form that broadcasts to values of this shape: a value,
        or several, for each token, flattened or not. None: these are no values of all tokens of the share.

        Raises:
            ValueError: if the values may be those of tokens in two orders, of unknown rows, or of rows themselves.
        """
        places, several_rows = torch.arange(tokens.numel(), device="cpu").view(tokens.shape), False
        for form in (self._beside_rows, self._flat, self._beside_others):
            first, *others = [x.expand(shape) for x in form(places, shape)] or [places]
            if any(not torch.equal(x, first) for x in others):
                raise ValueError(
                    f"labels or mask of shape {shape} may belong to the tokens of this batch in two orders: entries "
                    f"have their sequence in dimensions {list(self.form.dims)}, and several values may be those of "
                    "each token or those of several passes, one after the other. The padding of the split must not "
                    "count, and has another place in each. Pass labels as they are in the batch, or labels and masks "
                    "[B, S/n, ...] that are not flattened; of several passes, compute a mean for each"
                )
            if found := form(tokens, shape):
                if self.share == 1 and form == self._flat:
                    raise ValueError(
                        f"labels or mask of shape {shape} may have a value for each row of this batch, or for each of "
                        f"its tokens, of which every rank has one in a row. The padding of the split must not count. "
                        "Pass values of tokens [B, 1], as they are in the batch, and compute the mean of values of "
                        "rows without mean_loss"
                    )
                return found[0]
            several_rows |= len(tokens) > 1 and bool(form(tokens[:1], shape))
        if several_rows:
            raise ValueError(
                f"labels or mask of shape {shape} have other rows than this batch, whose {len(tokens)} rows have "
                "padding in different places. It must not count, and which row is which is not known. Pass labels or "
                "a mask of all rows in their order, parts of the batch's own entries, or compute a mean for each pass"
            )
        return None

    @property
    def known(self) -> tuple[int, int] | None:
        """The lengths before and after padding; None: there is none."""
        return None if min(self.ends) == self.padded else (max(self.ends), self.padded)

    def holds(self, shape: tuple[int, ...]) -> bool:
        """True if values of this shape may be those of all tokens of a share."""
        places = torch.zeros(1, self.share, device="cpu")
        return any(form(places, shape) for form in (self._beside_rows, self._flat, self._beside_others))

    def may_hold(self, shape: tuple[int, ...]) -> bool:
        """True also if their number only is that of several for each token. Values of rows are none of tokens."""
        if not self.form.rows:
            return any(n and n % self.share == 0 for n in shape[:2])
        of_rows = self.form.rows == shape[:1] and math.prod(shape[1:]) % self.share != 0
        return math.prod(shape) > 0 and math.prod(shape) % self.share == 0 and not of_rows

    def _beside_rows(self, tokens: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """The tokens along each dimension that may be the sequence, beside one of all rows."""
        found = self._shares(shape) if len(shape) > 1 else []
        return self._along([i for i in found if shape[0 if i else 1] in self.form.rows], tokens, shape)

    def _beside_others(self, tokens: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """The same beside some rows, or none."""
        rows_first = 0 not in self.form.dims
        found = [i for i in self._shares(shape) if i or not (rows_first and shape[0] in self.form.rows)]
        return self._along(found, tokens, shape)

    def _shares(self, shape: tuple[int, ...]) -> list[int]:
        return [i for i, n in enumerate(shape) if n == self.share]

    def _along(self, dims: list[int], tokens: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        found = []
        for dim in [i for i in dims if i in self.form.dims] or dims:
            rows, size = 0 if dim else 1, [1] * len(shape)
            size[dim] = self.share
            if len(tokens) > 1:
                if shape[rows : rows + 1] != (len(tokens),):
                    continue
                size[rows] = len(tokens)
            found.append((tokens if dim else tokens.mT).reshape(size))
        return found

    def _flat(self, tokens: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """The tokens in each order that ``[B * S/n, ...]``, ``[B * S/n * C]`` or ``[B, S/n * C]`` may have."""
        found, first = [], shape[0] if shape else 0
        for rows in filter(None, self.form.rows) if len(tokens) == 1 else {*self.form.rows} & {len(tokens)}:
            whole, wide = tokens.expand(rows, -1), len(shape) == 2 and first == rows
            several, rest = divmod(shape[1] if wide else first, self.share if wide else rows * self.share)
            if rest or not several or (several > 1 and len(shape) > 1 and not wide):
                continue
            orders = {min(dim, 2) for dim in self.form.dims} | ({1} if wide or max(self.form.dims) > 1 else set())
            orders |= {2} if several > 1 else set()  # two losses of each token, say, one behind the other
            each = [
                whole.mT[..., None].expand(-1, -1, several),
                whole[..., None].expand(-1, -1, several),
                whole[:, None].expand(-1, several, -1),
            ]
            size = [rows, -1] if wide else [-1] + [1] * (len(shape) - 1)
            found += [each[order].reshape(size) for order in sorted(orders - {0} if wide else orders)]
            found += [whole.flatten().repeat(several).reshape(size)] if several > 1 and not wide else []
        return found
